from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.children import train
from tests.end_to_end.corpus import succeed, write_bert, write_corpus, write_recipe


class Small(NamedTuple):
    """A small corpus, and what the commands made of it."""

    text: Path
    bert: Path
    recipe: Path
    fused_recipe: Path
    data: Path
    plain: Path
    fused: Path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder, {"train": 300, "dev": 20, "test": 12})
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, text: Path, bert: Path) -> Small:
    """Prepare and train a plain and a fused model by the commands."""
    root = tmp_path_factory.mktemp("small")
    recipe = write_recipe(text / "recipe.toml")
    fusion = {"fusion": {"encoder": str(bert), "drop_net": 0.5}}
    fused_recipe = write_recipe(text / "fused.toml", fusion)
    small = Small(text, bert, recipe, fused_recipe, root / "data", root / "plain", root / "fused")
    succeed("bertfused prepare", fused_recipe, "--out", small.data)
    train("bertfused train", recipe, "--data", small.data, "--out", small.plain)
    start = ["--init", small.plain, "--set", "train.max_steps=40"]
    train("bertfused train", fused_recipe, "--data", small.data, "--out", small.fused, *start)
    return small
