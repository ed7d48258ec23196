from pathlib import Path

import pytest
import tomli_w

from bertfused.config import load_recipe
from bertfused.errors import UserError
from tests.tiny_texts import Texts
from unsup.config import ObjectivesConfig, UnsupervisedRecipe, points


@pytest.mark.parametrize(
    ("schedule", "step", "weight"),
    [
        ("1", 0, 1.0),
        ("0.5", 10**6, 0.5),
        ("1e-5", 3, 1e-5),
        ("0:2.5E-1,4:1e0", 2, 0.625),
        ("0:1,100:0.1,300:0", 0, 1.0),
        ("0:1,100:0.1,300:0", 50, 0.55),
        ("0:1,100:0.1,300:0", 100, 0.1),
        ("0:1,100:0.1,300:0", 200, 0.05),
        ("0:1,100:0.1,300:0", 5000, 0.0),
        ("0:0,10:0,11:1", 10, 0.0),
        ("0:0,10:0,11:1", 11, 1.0),
    ],
)
def test_a_weight_is_linear_between_its_corners(schedule: str, step: int, weight: float) -> None:
    objectives = ObjectivesConfig(denoising=schedule)
    assert objectives.weight("denoising", step) == pytest.approx(weight)


@pytest.mark.parametrize(
    "schedule", ["", "x", "-1", "1e", "e5", "5:1", "0:1,0:2", "0:1,9:1,3:1", "0:1,9"]
)
def test_what_is_no_schedule_is_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"neither a weight|begin with 0"):
        points(schedule)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("objectives", {"denoising": "0", "backtranslation": "0:0"}, "have weight 0 at step 1"),
        ("objectives", {"denoising": "0:1,9:0", "backtranslation": 0}, "have weight 0 at step 9"),
        (
            "objectives",
            {"denoising": "0:1,9:0", "backtranslation": "0:0,9:0,10:1"},
            "have weight 0 at step 9",
        ),
        ("data", {"test": [{"name": "t", "source": "a", "target": "b", "weight": 2}]}, "a weight"),
        ("words", {"swap_cost": 1}, "give dictionaries, an encoder or both"),
        (
            "words",
            {"dictionaries": [{"path": "a", "language": "de"}]},
            "begins with words of 'de', which is none of the languages",
        ),
        ("objectives", {"denoising": "2:1"}, "the steps of '2:1' have to begin with 0"),
        ("objectives", {"teacher": "average"}, "teacher = 'average' needs optim.ema"),
        ("generate", {"updates": 2}, "validate_every = 3 is no multiple of generate.updates = 2"),
        ("model", {"share_embeddings": "none"}, "so 'all' it is"),
        ("subwords", {"shared": False}, "one encoder reads both languages"),
        ("subwords", {"tags": ["<x>"]}, "tags have to name '<mask>'"),
        ("data", {"mono": {"ab": ["a"]}}, "mono.xy is missing"),
        ("data", {"mono": {"ab": ["a"], "xy": ["b"], "de": ["c"]}}, "mono.de is of another"),
        ("data", {"max_ratio": 2.0}, "max_ratio has no use here"),
        ("data", {"train": []}, "unknown key data.train"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    texts: Texts, section: str, values: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        texts.with_(**{section: values})


def test_selection_by_pairs_needs_pairs(texts: Texts) -> None:
    with pytest.raises(UserError, match=r"select = 'bleu' needs data\.dev"):
        texts.with_(data={"dev": None}, validation={"select": "bleu"})


def test_encoders_of_all_sections_are_found_beside_the_recipe(texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    recipe = tmp_path / "recipe.toml"
    own = {name: {"encoder": "mine"} for name in ("words", "embeddings", "fusion")}
    values = texts.with_(**own).model_dump(mode="json", exclude_unset=True, exclude_none=True)
    recipe.write_text(tomli_w.dumps(values))
    loaded = load_recipe(recipe, UnsupervisedRecipe)
    for section in (loaded.words, loaded.embeddings, loaded.fusion):
        assert section is not None
        assert section.encoder == str(tmp_path / "mine")
