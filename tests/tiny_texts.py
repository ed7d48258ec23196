"""Two small monolingual texts of made-up words, prepared."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w

from bertfused.config import check_recipe
from bertfused.data import DataFolder
from unsup.config import UnsupervisedRecipe
from unsup.prepare import prepare

SYLLABLES = ["ba", "du", "me", "ni", "ro", "ti", "vo", "za", "ge", "ku"]
NAMES = {"ab": [first + second for first in SYLLABLES[:5] for second in SYLLABLES]}
NAMES["xy"] = [f"q{word[::-1]}" for word in NAMES["ab"]]

TINY = {
    "model": {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "model_dim": 16,
        "ffn_dim": 32,
        "heads": 2,
        "dropout": 0.1,
    },
    "subwords": {"size": 300},
    "optim": {"lr": 3e-3, "warmup_steps": 5},
    "train": {
        "batch_tokens": 300,
        "max_steps": 6,
        "validate_every": 3,
        "log_every": 2,
        "precision": "fp32",
    },
    "validation": {"lines": 10},
}


@dataclass(frozen=True)
class Texts:
    """A recipe of two texts, as a file, and what was prepared of it."""

    folder: Path
    recipe: UnsupervisedRecipe
    data: DataFolder

    def with_(self, **sections: dict[str, object]) -> UnsupervisedRecipe:
        """Return the recipe with other values."""
        values = self.recipe.model_dump(exclude_unset=True)
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
        return check_recipe(values, UnsupervisedRecipe, "recipe")


def sentences(language: str, count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, count)
    return [" ".join(random.choice(NAMES[language], size=length)) + " ." for length in lengths]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def make_texts(folder: Path) -> Texts:
    """Write and prepare two texts; ``folder`` has recipe.toml and data/."""
    files = {
        name: str(write(folder / f"mono.{name}", sentences(name, 120, seed)))
        for seed, name in enumerate(NAMES)
    }
    pairs = sentences("ab", 8, 5)
    write(folder / "dev.ab", pairs)
    translated = [
        " ".join(f"q{word[::-1]}" if word != "." else word for word in line.split())
        for line in pairs
    ]
    write(folder / "dev.xy", translated)
    dev = {"source": str(folder / "dev.ab"), "target": str(folder / "dev.xy")}
    values = TINY | {
        "data": {
            "source": "ab",
            "target": "xy",
            "mono": {name: [file] for name, file in files.items()},
            "dev": dev,
            "test": [dev | {"name": "small"}],
        }
    }
    (folder / "recipe.toml").write_text(tomli_w.dumps(values))
    recipe = check_recipe(values, UnsupervisedRecipe, "recipe", folder)
    prepare(recipe, folder / "data")
    return Texts(folder, recipe, DataFolder.open(folder / "data"))
