from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backtranslation.config import FilterConfig, NoiseConfig
from backtranslation.filters import filter_pairs
from backtranslation.generate import Generation, generate
from backtranslation.mix import mix
from backtranslation.noise import add_noise
from backtranslation.shards import read_generated
from bertfused.checkpoint import hash_text_files, load_card, write_card
from bertfused.config import Recipe, SearchConfig, load_recipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import set_up
from bertfused.prepare import prepare
from bertfused.text import read_lines
from tests.tiny_run import make_run


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


def test_several_corpora_are_one_training_and_nothing_is_concatenated(
    recipe: Recipe, synthetic: Path, tmp_path: Path
) -> None:
    path = mix(recipe, [synthetic, synthetic], tmp_path / "mixed", upsample=1.5)
    assert list((tmp_path / "mixed").iterdir()) == [path]
    mixed = load_recipe(path, Recipe)
    data = DataFolder.open(prepared(mixed, tmp_path / "data"))
    assert data.report is not None
    assert data.report.splits["train"].corpora == (2, 2, 2)
    training = set_up(mixed, data, None, torch.device("cpu")).train
    numbers = np.concatenate(training.batches(100, np.random.default_rng(1))).tolist()
    assert [numbers.count(i) for i in range(6)] == [3, 3, 1, 1, 1, 1]


def prepared(recipe: Recipe, out: Path) -> Path:
    prepare(recipe, out)
    return out


@pytest.mark.parametrize("languages", [("ro", "en"), ("en", "ro")])
def test_the_direction_is_that_of_the_run_from_the_text_to_the_mix(
    tmp_path: Path, languages: tuple[str, str]
) -> None:
    """A RUN from en to ro makes pairs for a training from ro to en, and for no other."""
    make_run(tmp_path / "run")
    card = load_card(tmp_path / "run" / "model")
    model = tmp_path / "run" / "model"
    for old, new in (("de", "ro"), ("en", "en")):
        (model / f"dict.{old}.txt").rename(model / f"dict.{new}.txt")
    write_card(
        model, card.model_copy(update={"target": "ro", "text_files": hash_text_files(model)})
    )
    mono = write(tmp_path / "mono.en", "w1 w2", "", "w3 w4")
    search = SearchConfig(beam_size=1, max_length_b=4)
    generation = Generation(tmp_path / "run", mono, search, engine="torch")
    generate(generation, generation.folder(tmp_path / "generated", 1))
    found = read_generated(tmp_path / "generated", mono)
    assert (found.text.name, found.languages) == ("synthetic.ro", ("ro", "en"))
    keeping = FilterConfig(max_repeats=9)
    filter_pairs(found.text, mono, tmp_path / "filtered", keeping, found.languages)
    assert list(read_lines(tmp_path / "filtered" / "filtered.en")) == ["w1 w2", "w3 w4"]
    source, target = languages
    files = {"source": mono, "target": mono}
    data = {"source": source, "target": target, "train": [files], "dev": files}
    sections = {"data": data, "subwords": {"kind": "words"}, "train": {"max_steps": 1}}
    recipe = Recipe.model_validate(sections)
    if languages == ("en", "ro"):
        with pytest.raises(UserError, match="its synthetic side must be en"):
            mix(recipe, [tmp_path / "filtered"], tmp_path / "mixed")
        return
    mixed = load_recipe(mix(recipe, [tmp_path / "filtered"], tmp_path / "mixed"), Recipe)
    corpus = mixed.data.train[1]
    assert (corpus.source.name, corpus.target.name) == ("filtered.ro", "filtered.en")
