"""A task that is solved or not: say the words in the other language and in reverse order."""

from pathlib import Path

import pytest

from bertfused.text import read_lines
from tests.end_to_end.children import train
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import succeed, write_corpus, write_recipe

EASY = {
    "model": {"dropout": 0.0, "ffn_dim": 64},
    "optim": {"lr": 0.005, "warmup_steps": 30, "label_smoothing": 0.0},
    "train": {"batch_tokens": 1000, "max_steps": 450, "validate_every": 1000},
    "search": {"beam_size": 5},
}


@pytest.fixture(scope="module")
def folder(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a plain model; leave it in ``run``."""
    folder = tmp_path_factory.mktemp("reversal")
    write_corpus(folder, {"train": 500, "dev": 20, "test": 100}, order=lambda ids: ids[::-1])
    recipe = write_recipe(folder / "recipe.toml", EASY)
    fusion = {"fusion": {"encoder": str(small.bert), "drop_net": 0.0}}
    write_recipe(folder / "fused.toml", EASY, fusion)
    succeed("bertfused prepare", folder / "fused.toml", "--out", folder / "data")
    train("bertfused train", recipe, "--data", folder / "data", "--out", folder / "run")
    return folder


def translated(run: Path, split: Path) -> list[str]:
    return succeed("bertfused translate", run, "--input", split.with_suffix(".en")).lines


def test_training_sentences_are_learned_exactly(folder: Path) -> None:
    expected = list(read_lines(folder / "train.de"))
    assert translated(folder / "run", folder / "train") == expected


def test_other_sentences_are_mostly_right(folder: Path) -> None:
    expected = list(read_lines(folder / "test.de"))
    found = translated(folder / "run", folder / "test")
    right = sum(own == reference for own, reference in zip(found, expected, strict=True))
    assert right >= 85  # of 100


def test_a_fused_model_starts_where_the_plain_one_ended(folder: Path) -> None:
    """One update with a learning rate of almost nothing leaves the start as it was."""
    run = folder / "fused"
    succeed(
        *("bertfused train", folder / "fused.toml", "--data", folder / "data", "--out", run),
        *("--init", folder / "run", "--set", "optim.lr=1e-9", "--set", "train.max_steps=1"),
    )
    assert translated(run, folder / "test") == translated(folder / "run", folder / "test")
