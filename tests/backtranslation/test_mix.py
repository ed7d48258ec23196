from pathlib import Path
from typing import Any

import pytest

from backtranslation.config import FilterConfig, NoiseConfig
from backtranslation.filters import filter_pairs
from backtranslation.mix import mix
from backtranslation.noise import add_noise
from bertfused.config import Recipe, load_recipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.prepare import prepare
from bertfused.text import read_lines


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Read a recipe whose paths are relative to it."""
    write(tmp_path / "train.ro", "unu", "doi trei")
    write(tmp_path / "train.en", "one", "two three")
    path = tmp_path / "base.toml"
    path.write_text(
        'data.source = "ro"\ndata.target = "en"\n'
        'data.train = [{source = "train.ro", target = "train.en", weight = 2}]\n'
        'data.dev = {source = "train.ro", target = "train.en"}\n'
        'subwords.kind = "words"\ntrain.max_steps = 1\n'
    )
    return load_recipe(path, Recipe)


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    """Filter three pairs, of which two stay."""
    source = write(tmp_path / "synthetic.ro", "patru unu", "", "cinci")
    target = write(tmp_path / "mono.en", "four one", "x", "five")
    filter_pairs(source, target, tmp_path / "filtered", FilterConfig(), ("ro", "en"))
    return tmp_path / "filtered"


def sources_of(data: Path) -> list[str]:
    """Print the source side of the training pairs, with tags."""
    folder = DataFolder.open(data)
    symbols = folder.tokenizers()[0].vocabulary.symbols
    return [" ".join(symbols[id] for id in ids[:-1]) for ids in folder.split("train").source]


def test_synthetic_pairs_come_after_the_real_ones_with_a_tag(
    recipe: Recipe, synthetic: Path, tmp_path: Path
) -> None:
    path = mix(recipe, [synthetic], tmp_path / "mixed", upsample=3.0)
    mixed = load_recipe(path, Recipe)
    assert [corpus.weight for corpus in mixed.data.train] == [6, 1]
    assert [corpus.tag for corpus in mixed.data.train] == [None, "<BT>"]
    report = prepare(mixed, tmp_path / "data")
    assert report.splits["train"].corpora == (2, 2)
    assert sources_of(tmp_path / "data") == ["unu", "doi trei", "<BT> patru unu", "<BT> cinci"]


def test_without_a_tag(recipe: Recipe, synthetic: Path, tmp_path: Path) -> None:
    path = mix(recipe, [synthetic], tmp_path / "mixed", tag=None)
    prepare(load_recipe(path, Recipe), tmp_path / "data")
    assert sources_of(tmp_path / "data")[2:] == ["patru unu", "cinci"]


def test_noise_is_on_the_synthetic_source_only(
    recipe: Recipe, synthetic: Path, tmp_path: Path
) -> None:
    noise = NoiseConfig(swap=1, blank=0.5, seed=3)
    path = mix(recipe, [synthetic], tmp_path / "mixed", noise=noise)
    corpus = load_recipe(path, Recipe).data.train[1]
    wanted = [add_noise(line, i, noise) for i, line in enumerate(["patru unu", "cinci"])]
    assert list(read_lines(corpus.source)) == wanted
    assert list(read_lines(corpus.target)) == ["four one", "five"]


@pytest.mark.parametrize("languages", [("en", "ro"), ("ro", "de")])
def test_the_reverse_direction_is_refused(
    recipe: Recipe, tmp_path: Path, languages: tuple[str, str]
) -> None:
    source, target = write(tmp_path / "a", "unu"), write(tmp_path / "b", "one")
    filter_pairs(source, target, tmp_path / "filtered", FilterConfig(), languages)
    with pytest.raises(UserError, match="ro to en; its synthetic side must be ro"):
        mix(recipe, [tmp_path / "filtered"], tmp_path / "mixed")


def test_an_unfinished_filter_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no report\.json"):
        mix(recipe, [tmp_path], tmp_path / "mixed")


def test_what_the_recipe_leaves_open_stays_open(
    recipe: Recipe, synthetic: Path, tmp_path: Path
) -> None:
    mixed: dict[str, Any] = load_recipe(
        mix(recipe, [synthetic], tmp_path / "mixed"), Recipe
    ).model_dump(exclude_unset=True)
    assert sorted(mixed) == ["data", "subwords", "train"]
    assert mixed["subwords"] == {"kind": "words", "tags": ("<BT>",)}
