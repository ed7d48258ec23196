import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel

from bertfused.config import Recipe, RunRecipe, Section, check_recipe, load_recipe
from bertfused.errors import UserError
from docnmt.config import DocumentRecipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
[data]
source = "en"
target = "de"
train = [{source = "train.en", target = "text/train.de"}]
dev = {source = "/elsewhere/val.en", target = "../val.de"}

[train]
max_steps = 5
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def refusal(path: Path, *overrides: str, schema: type[Section] = DocumentRecipe) -> str:
    """What load_recipe says of a wrong recipe, without the name of the file."""
    with pytest.raises(UserError) as caught:
        load_recipe(path, schema, overrides)
    return str(caught.value).removeprefix(f"{path}: ")


# Reading


def test_a_short_recipe_is_completed_with_the_defaults(recipe: Path) -> None:
    loaded = load_recipe(recipe, Recipe)
    assert (loaded.data.source, loaded.data.target) == ("en", "de")
    assert (loaded.model.model_dim, loaded.optim.lr, loaded.search.beam_size) == (512, 5e-4, 5)
    assert loaded.fusion is None
    assert loaded.train.max_steps == 5


def test_the_defaults_are_those_of_the_paper_and_of_fairseq(recipe: Path) -> None:
    loaded = load_recipe(recipe, Recipe, ["fusion.encoder=minilm"])
    optim, fusion, search = loaded.optim, loaded.fusion, loaded.search
    assert fusion is not None
    assert (fusion.drop_net, fusion.branch_weights, fusion.order) == (1.0, (0.5, 0.5), "parallel")
    assert (optim.betas, optim.weight_decay, optim.label_smoothing) == ((0.9, 0.98), 1e-4, 0.1)
    assert (optim.warmup_steps, optim.warmup_init_lr, optim.schedule) == (
        4000,
        1e-7,
        "inverse_sqrt",
    )
    assert (search.length_penalty, search.max_length_a, search.max_length_b) == (1, 0, 200)


def test_relative_paths_are_relative_to_the_recipe(recipe: Path, tmp_path: Path) -> None:
    data = load_recipe(recipe, Recipe).data
    assert data.train[0].source == tmp_path / "train.en"
    assert data.train[0].target == tmp_path / "text" / "train.de"
    assert data.dev.source == Path("/elsewhere/val.en")
    assert data.dev.target == tmp_path.parent / "val.de"
    assert data.train[0].docids is None


def test_relative_paths_may_be_relative_to_another_folder(recipe: Path) -> None:
    loaded = load_recipe(recipe, Recipe, ["subwords.reuse=old"], folder=Path("/data"))
    assert loaded.data.train[0].source == Path("/data/train.en")
    assert loaded.data.dev.target == Path("/val.de")
    assert loaded.subwords.reuse == Path("/data/old")


def test_a_resolved_recipe_is_read_back_as_it_was(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, DocumentRecipe, ["fusion.layer=average", "optim.clip_norm=1"])
    written = tmp_path / "elsewhere" / "config.toml"
    written.parent.mkdir()
    written.write_text(tomli_w.dumps(loaded.model_dump(mode="json", exclude_none=True)))
    assert load_recipe(written, DocumentRecipe) == loaded


def test_recipes_are_frozen(recipe: Path) -> None:
    loaded = load_recipe(recipe, Recipe)
    with pytest.raises(ValueError, match="frozen"):
        loaded.train.max_steps = 7  # type: ignore[misc]


@pytest.mark.parametrize("folder", ["bertfused", "docnmt"])
def test_recipes_that_come_with_the_package_are_valid(folder: str) -> None:
    schema = Recipe if folder == "bertfused" else DocumentRecipe
    for path in sorted((ROOT / folder).glob("recipes/*.toml")):
        load_recipe(path, schema)


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.lr=1e-3", "optim", "lr", 1e-3),
        (" optim.lr = 1e-3 ", "optim", "lr", 1e-3),
        ("model.norm=pre", "model", "norm", "pre"),
        ("model.norm='pre'", "model", "norm", "pre"),
        ("data.source=zh_Hant=x", "data", "source", "zh_Hant=x"),
        ("optim.betas=[0.8, 0.9]", "optim", "betas", (0.8, 0.9)),
        ("fusion.gates=[true, false]", "fusion", "gates", (True, False)),
        ("fusion.layer=-2", "fusion", "layer", -2),
        ("fusion.layer=stochastic", "fusion", "layer", "stochastic"),
        ("train.validate_bleu=false", "train", "validate_bleu", False),
        ("data.max_ratio=2", "data", "max_ratio", 2.0),
        ("search.sampling=topk:10", "search", "sampling", "topk:10"),
        ("search.sampling=nucleus:.9", "search", "sampling", "nucleus:.9"),
        ("documents.previous=2", "documents", "previous", 2),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(
    recipe: Path, override: str, section: str, key: str, value: object
) -> None:
    loaded = load_recipe(recipe, DocumentRecipe, [override])
    assert getattr(getattr(loaded, section), key) == value


def test_the_last_override_wins_and_none_removes(recipe: Path) -> None:
    assert load_recipe(recipe, Recipe, ["optim.lr=1", "optim.lr=2"]).optim.lr == 2
    overrides = ["train.max_steps=none", "train.max_epochs=3", "data.max_tokens=none"]
    loaded = load_recipe(recipe, Recipe, overrides)
    assert (loaded.train.max_steps, loaded.train.max_epochs) == (None, 3)
    assert loaded.data.max_tokens == 250


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dropout", "--set needs key=value, not 'model.dropout'"),
        ("=3", "--set needs key=value, not '=3'"),
        ("data.train.0.source=x", "--set data.train.0.source=x: train is not a section"),
        ("data.source.x=y", "--set data.source.x=y: source is not a section"),
    ],
)
def test_an_override_that_is_none(recipe: Path, override: str, message: str) -> None:
    assert refusal(recipe, override) == message


# Unknown keys and wrong values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.heads=2", "unknown key modle; did you mean 'model'?"),
        ("model.dropuot=0.1", "unknown key model.dropuot; did you mean 'dropout'?"),
        ("fusion.drop_nett=1", "unknown key fusion.drop_nett; did you mean 'drop_net'?"),
        ("data.dev.targt='x'", "unknown key data.dev.targt; did you mean 'target'?"),
        ("documents.previuos=2", "unknown key documents.previuos; did you mean 'previous'?"),
        ("model.qqqq=1", "unknown key model.qqqq"),
        ("train.max_steps.x=1", "--set train.max_steps.x=1: max_steps is not a section"),
        ("model.heads.x=1", "model.heads = {'x': 1}: input should be a valid integer"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(
    recipe: Path, override: str, message: str
) -> None:
    assert refusal(recipe, override) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("model='layerwise', layesr=2", "unknown key context.layesr; did you mean 'layers'?"),
        ("model='zhang', reset_gate='none'", "unknown key context.reset_gate"),
        ("model='concatenation', layers=2", "unknown key context.layers"),
        (
            "model='layerwise', layers=0",
            "context.layers = 0: input should be greater than or equal to 1",
        ),
        (
            "model='cadec', sentences=17",
            "context.sentences = 17: input should be less than or equal to 16",
        ),
        (
            "model='layerwise', reset_gate='x'",
            "context.reset_gate = 'x': input should be 'reset', 'reset_add' or 'none'",
        ),
        (
            "model='layerwise', source=false, target=false",
            "context: source and target are both false: no context would be read",
        ),
        (
            "model='layerwise', source=false, reset_gate='none'",
            "context: reset_gate has no meaning with source = false",
        ),
        (
            "model='layerwise', target=false, target_dropout=0.2",
            "context: target_dropout has no meaning with target = false",
        ),
        (
            "model='layerwize'",
            "context.model = 'layerwize': input should be 'layerwise', 'cadec', 'zhang' or "
            "'concatenation'",
        ),
        (
            "model=3",
            "context.model = 3: input should be 'layerwise', 'cadec', 'zhang' or 'concatenation'",
        ),
        (
            "layers=2",
            "context.model is missing; it is 'layerwise', 'cadec', 'zhang' or 'concatenation'",
        ),
        (
            'modle="zhang"',
            "context.model is missing (did you mean it by 'modle'?); it is 'layerwise', 'cadec', "
            "'zhang' or 'concatenation'",
        ),
    ],
)
def test_keys_of_a_section_of_several_kinds(recipe: Path, values: str, message: str) -> None:
    assert refusal(recipe, f"context={{{values}}}") == message
    assert refusal(recipe, "context=3").startswith("context = 3: input should be a valid dict")


def test_unknown_keys_in_lists_of_sections(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace('{source = "train', '{sorce = "train'))
    assert refusal(recipe) == "unknown key data.train.0.sorce; did you mean 'source'?"
    recipe.write_text(RECIPE + "[[data.test]]\nsource='a'\ntarget='b'\nnam='c'\n")
    assert refusal(recipe) == "unknown key data.test.0.nam; did you mean 'name'?"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.dropout=high",
            "model.dropout = 'high': input should be a valid number, unable to parse string as a "
            "number",
        ),
        ("model.dropout=1", "model.dropout = 1: input should be less than 1"),
        ("model.heads=0", "model.heads = 0: input should be greater than or equal to 1"),
        (
            "train.max_steps=2.5",
            "train.max_steps = 2.5: input should be a valid integer, got a number with a "
            "fractional part",
        ),
        (
            "train.precision=fp16",
            "train.precision = 'fp16': input should be 'auto', 'fp32' or 'bf16'",
        ),
        (
            "fusion.layer=middle",
            "fusion.layer = 'middle': input should be a valid integer, unable to parse string as "
            "an integer or input should be 'average' or 'stochastic'",
        ),
        ("optim.betas=[0.9, 1.5]", "optim.betas.1 = 1.5: input should be less than 1"),
        ("optim.betas=[0.9]", "optim.betas.1 is missing"),
        ("optim.lr=nan", "optim.lr = nan: input should be a finite number"),
        ("optim.lr=0", "optim.lr = 0: input should be greater than 0"),
        (
            "data.train=[]",
            "data.train = []: tuple should have at least 1 item after validation, not 0",
        ),
        ("data.source=none", "data.source is missing"),
        (
            "model=3",
            "model = 3: input should be a valid dictionary or instance of ModelConfig",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_path(recipe: Path, override: str, message: str) -> None:
    assert refusal(recipe, override) == message


def test_a_long_value_is_cut(recipe: Path) -> None:
    message = refusal(recipe, f"model.norm={'x' * 200}")
    assert message == f"model.norm = '{'x' * 76}...: input should be 'post' or 'pre'"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.heads=3"], "model: model_dim 512 is not a multiple of 3 heads"),
        (["model.decoder_heads=7"], "model: model_dim 512 is not a multiple of 7 heads"),
        (
            ["fusion.branch_weights=[0, 1]"],
            "fusion: start = 'function-preserving' needs a positive own branch weight",
        ),
        (
            ["fusion.branch_weights=[-1, 1]"],
            "fusion: start = 'function-preserving' needs a positive own branch weight",
        ),
        (
            ["fusion.mixup=true", "fusion.drop_net_warmup_steps=3"],
            "fusion: drop_net_warmup_steps has no meaning with mixup",
        ),
        (
            ["train.max_steps=none"],
            "train: give max_steps, max_epochs, max_minutes or patience",
        ),
        (
            ["train.select=bleu", "train.validate_bleu=false"],
            "train: select = 'bleu' needs validate_bleu = true",
        ),
        (
            ["optim.schedule=linear", "train.max_steps=none", "train.max_epochs=2"],
            "optim.schedule = 'linear' needs train.max_steps",
        ),
        (
            ["search.beam_size=4", "search.diverse_groups=3"],
            "search: beam_size 4 is not a multiple of diverse_groups 3",
        ),
        (
            ["search.sampling=full", "search.diverse_groups=5"],
            "search: sampling and diverse_groups exclude each other",
        ),
        *(
            (
                [f"search.sampling={sampling}"],
                f"search: sampling is '{sampling}'; allowed are full, topk:K with K >= 1 and "
                "nucleus:P with 0 < P <= 1",
            )
            for sampling in ("topk", "topk:0", "nucleus:0.0", "nucleus:1.5", "half", "full:1")
        ),
    ],
)
def test_keys_that_do_not_go_together(recipe: Path, overrides: list[str], message: str) -> None:
    assert refusal(recipe, *overrides) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["fusion.branch_weights=[0, 1]", "fusion.start=paper"],
        ["optim.schedule=linear"],
        ["train.max_steps=none", "train.patience=3"],
        ["train.max_steps=none", "train.max_minutes=0.5"],
        ["train.max_steps=0"],
        ["search.beam_size=4", "search.diverse_groups=2"],
        ["model.heads=8", "model.decoder_heads=2"],
    ],
)
def test_keys_that_do_go_together(recipe: Path, overrides: list[str]) -> None:
    load_recipe(recipe, Recipe, overrides)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([None], "data: every entry of data.test needs a name of its own"),
        (["a", "a"], "data: every entry of data.test needs a name of its own"),
        (["dev"], "data: a test set cannot be named 'train' or 'dev'"),
        (["a", "train"], "data: a test set cannot be named 'train' or 'dev'"),
        (["a/b"], "data: name 'a/b' of a test set is to be part of file names"),
        ([".."], "data: name '..' of a test set is to be part of file names"),
    ],
)
def test_names_of_test_sets(recipe: Path, names: list[str | None], message: str) -> None:
    entries = ["source='a'\ntarget='b'" + (f"\nname='{n}'" if n else "") for n in names]
    recipe.write_text(RECIPE + "".join(f"[[data.test]]\n{entry}\n" for entry in entries))
    assert refusal(recipe) == message


def test_values_that_come_from_elsewhere_are_checked_alike() -> None:
    values: dict[str, Any] = {**tomllib.loads(RECIPE), "serach": {}}
    with pytest.raises(
        UserError, match=r"^run\.json: unknown key serach; did you mean 'search'\?$"
    ):
        check_recipe(values, Recipe, "run.json")
    del values["serach"]
    assert check_recipe(values, Recipe, "run.json").data.train[0].source == Path("train.en")


# Files that are no recipe


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    assert refusal(missing) == f"cannot read {missing}: No such file or directory"
    assert refusal(tmp_path) == f"cannot read {tmp_path}: Is a directory"


def test_a_file_that_is_not_toml(recipe: Path) -> None:
    recipe.write_text("data = [")
    assert refusal(recipe).startswith(f"{recipe} is not valid TOML: Invalid value")
    recipe.write_bytes(b"a = '\xff'")
    assert refusal(recipe).startswith(f"{recipe} is not valid TOML: 'utf-8' codec can't decode")


# The schema itself


def sections() -> list[type[BaseModel]]:
    import bertfused.config as config

    assert isinstance(config, ModuleType)
    found = [value for value in vars(config).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, Section) and value is not Section]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_key_is_described_in_one_line(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        if issubclass(section, RunRecipe):
            continue
        assert field.description, name
        assert field.description.endswith("."), name
        assert "\n" not in field.description, name


def test_an_encoder_in_a_folder_is_found_beside_the_recipe_and_from_here(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoder(name: str) -> str:
        fusion = load_recipe(recipe, Recipe, [f"fusion.encoder={name}"]).fusion
        assert fusion is not None
        return fusion.encoder

    here = tmp_path / "here"
    for folder in (tmp_path / "bert", here / "mine", tmp_path / "minilm"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert encoder("bert") == str(tmp_path / "bert")
    assert encoder("mine") == str(here / "mine")
    assert encoder("minilm") == "minilm"
    assert encoder("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"
