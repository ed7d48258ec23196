"""The commands of ``bertgen``, in one process and in two, killed and not."""

import json
import random
import shutil
import tomllib
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tomli_w
import torch

from bertfused.checkpoint import read_tensors
from bertfused.config import load_recipe
from bertfused.run import RunFolder
from bertgen.card import load_model
from bertgen.config import GenRecipe
from bertgen.data import GenData
from bertgen.fit import set_up
from bertgen.generate import Generator
from tests.end_to_end.children import die_at, finish, start
from tests.end_to_end.corpus import fail, succeed, write_lines
from tests.end_to_end.test_processes import torchrun
from tests.end_to_end.test_resume import contents
from tests.tiny_encoders import make_encoder

WORDS = {"ab": ["red", "dog", "cat", "sees", "old"], "xy": ["tor", "gom", "tax", "sied", "alz"]}
BOXES = np.array([[0, 0, 1, 1], [0, 0, 0.5, 1], [0.5, 0, 1, 1]], dtype=np.float32)


class Made(NamedTuple):
    """A recipe, its DATA, and a run of it."""

    folder: Path
    recipe: Path
    data: Path
    run: Path


def lines(count: int, seed: int) -> dict[str, list[str]]:
    draw = random.Random(seed)
    picked = [[draw.randrange(5) for _ in range(draw.randint(1, 3))] for _ in range(count)]
    return {
        lang: [" ".join(own[i] for i in line) for line in picked] for lang, own in WORDS.items()
    }


def write_images(path: Path, rows: list[int]) -> Path:
    features = np.random.default_rng(len(rows)).normal(size=(len(rows), 3, 4)).astype(np.float16)
    np.savez(path, allow_pickle=False, features=features, boxes=BOXES, rows=np.array(rows))
    return path


def write_corpora(folder: Path) -> dict[str, object]:
    """Write text and images, an encoder, and return a recipe."""
    make_encoder("bert", folder / "bert")
    for name, count in (("train", 30), ("dev", 6), ("test", 5)):
        for language, text in lines(count, len(name)).items():
            write_lines(folder / f"{name}.{language}", text)
        write_images(folder / f"{name}.npz", list(range(0, count, 2)))
    text = {"source": "ab", "target": "xy"}
    images = {"images": True}

    def corpus(name: str, *sides: str, images: bool = False) -> dict[str, object]:
        found: dict[str, object] = {
            side: f"{name}.{language}" for side, language in zip(sides, ("ab", "xy"), strict=False)
        }
        return found | ({"images": [f"{name}.npz"]} if images else {})

    both, shown = partial(corpus, images=False), partial(corpus, images=True)
    tasks = [
        {
            "name": "plain",
            **text,
            "train": [both("train", "source", "target")],
            "dev": both("dev", "source", "target"),
            "test": [both("test", "source", "target") | {"name": "late"}],
        },
        {
            "name": "multi",
            **text,
            **images,
            "train": [shown("train", "source", "target")],
            "dev": shown("dev", "source", "target"),
        },
        {
            "name": "caption",
            "target": "ab",
            **images,
            "train": [shown("train", "target")],
            "dev": shown("dev", "target"),
        },
        {
            "name": "back",
            "source": "xy",
            "target": "ab",
            "test": [{"name": "late", "source": "test.xy", "target": "test.ab"}],
        },
    ]
    return {
        "data": {"tasks": tasks, "max_wordpieces": 8},
        "model": {"encoder": "bert", "layers": 2},
        "optim": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant"},
        "train": {
            "batch_tokens": 300,
            "max_steps": 6,
            "validate_every": 3,
            "log_every": 2,
            "copies": 2,
            "accumulate": 2,
            "precision": "fp32",
        },
        "search": {"max_length_b": 9, "max_length_images": 7},
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("bertgen")
    recipe = folder / "recipe.toml"
    recipe.write_text(tomli_w.dumps(write_corpora(folder)))
    succeed("bertgen prepare", recipe, "--out", folder / "data")
    found = Made(folder, recipe, folder / "data", folder / "run")
    assert finish(start(folder / "log", *train_into(found, found.run))) == 0
    return found


def train_into(made: Made, out: Path, *options: object) -> list[object]:
    return ["bertgen train", made.recipe, "--data", made.data, "--out", out, *options]


def test_preparation_counts_every_line_and_does_nothing_twice(made: Made, tmp_path: Path) -> None:
    said = succeed("bertgen prepare", made.recipe, "--out", tmp_path / "data").err
    assert "multi train: 30 lines = " in said
    assert "15 without an image" in said
    assert "back late: 5 lines = 5 kept" in said
    assert "26 lines" not in said
    again = succeed("bertgen prepare", made.recipe, "--out", tmp_path / "data").err
    assert "is complete; nothing to do" in again
    longer = ["--set", "data.max_wordpieces=9"]
    refused = fail("bertgen prepare", made.recipe, "--out", tmp_path / "data", *longer)
    assert "was made from something else: max_wordpieces differs" in refused
    succeed("bertgen prepare", made.recipe, "--out", tmp_path / "data", *longer, "--force")
    (tmp_path / "other").mkdir()
    shutil.copy(made.data / "plain.dev.target.bin", tmp_path / "other")
    refused = fail("bertgen prepare", made.recipe, "--out", tmp_path / "other")
    assert "holds data of another program (plain.dev.target.bin)" in refused


def test_killed_and_resumed_ends_the_same(made: Made, tmp_path: Path) -> None:
    killed, log = tmp_path / "b" / "run", tmp_path / "log"
    draw, kills = random.Random(2), 0
    for _ in range(4):
        moment = partial(die_at, draw.randint(1, 60), killed)
        code = finish(start(log, *train_into(made, killed, "--resume"), before=moment))
        assert code in (0, -9), log.read_text()
        kills += code == -9
        for folder in RunFolder(killed).checkpoints().values():
            load_model(folder)
    assert kills > 1
    assert finish(start(log, *train_into(made, killed, "--resume"))) == 0, log.read_text()
    assert contents(killed) == contents(made.run)


def test_two_processes_of_torchrun_equal_one(made: Made, tmp_path: Path) -> None:
    _, *command = train_into(made, tmp_path / "run")
    ran = torchrun("-m", "bertgen", "train", *command)
    assert ran.returncode == 0, ran.stderr
    ours, theirs = (
        read_tensors(own / "model/model.safetensors") for own in (tmp_path / "run", made.run)
    )
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() < 1e-4 or "query_key_value.bias" in name, name


def test_every_input_gives_a_line(made: Made, tmp_path: Path) -> None:
    text = b"red dog\n\nold cat\n"
    plain = succeed("bertgen translate", made.run, "--to", "xy", stdin=text).out
    assert plain.count(b"\n") == 3
    assert plain.split(b"\n")[1] == b""
    generator = Generator.load(made.run)
    given = text.decode().splitlines()
    assert [*generator.translate(given, "xy")] == plain.decode().splitlines()
    images = write_images(tmp_path / "some.npz", [0, 2])
    shown = ["--images", images, "--output", tmp_path / "out"]
    succeed("bertgen translate", made.run, "--to", "xy", *shown, stdin=text)
    assert (tmp_path / "out").read_text().count("\n") == 3
    captions = succeed("bertgen caption", made.run, "--to", "ab", "--images", images).out
    assert captions.count(b"\n") == 2
    wide = succeed("bertgen translate", made.run, "--to", "xy", "--beam-size", 3, stdin=text)
    assert wide.out.count(b"\n") == 3


def test_a_line_that_is_too_long_is_read_as_far_as_there_is_room(
    made: Made, tmp_path: Path
) -> None:
    """The encoder has 24 positions: 7 for symbols and 16 to write leave one letter to be read."""
    options = ["--to", "xy", "--max-length-b", 300]
    long = succeed("bertgen translate", made.run, *options, stdin=b"red dog sees old cat\n")
    short = succeed("bertgen translate", made.run, *options, stdin=b"r\n")
    assert long.out == short.out
    assert (
        "sentences longer than the model has positions for: their end was not read: 1" in long.err
    )
    assert "sentences longer" not in short.err
    shown = ["--images", write_images(tmp_path / "one.npz", [0])]
    succeed("bertgen translate", made.run, *options, *shown, stdin=b"red dog sees old cat\n")


def test_sets_are_evaluated_with_images_without_and_with_wrong_ones(
    made: Made, tmp_path: Path
) -> None:
    command = ["bertgen evaluate", made.run, "--data", made.data]
    report = json.loads(succeed(*command, "--json", "--output", tmp_path / "found").out)
    sets = [(own["task"], own["split"], own["images"], own["lines"]) for own in report["tasks"]]
    assert sorted(sets) == sorted(
        [
            ("plain", "dev", None, 6),
            ("plain", "late", None, 5),
            ("multi", "dev", "congruent", 3),
            ("caption", "dev", "congruent", 3),
            ("back", "late", None, 5),
        ]
    )
    assert (tmp_path / "found" / "back.late").read_text().count("\n") == 5
    one = ["--task", "multi", "--split", "dev", "--json"]
    for shown in ("shuffled", "none"):
        (found,) = json.loads(succeed(*command, *one, "--images", shown).out)["tasks"]
        assert found["images"] == shown
    write_lines(tmp_path / "nouns", ["dog", "Cat"])
    assert b"nrefs:1|" in succeed(*command, "--task", "plain", "--hide", tmp_path / "nouns").out
    assert "has no task 'none'" in fail(*command, "--task", "none")
    assert "has no 'none' of task 'plain'" in fail(*command, "--task", "plain", "--split", "none")


def test_the_prefix_mode_is_trained_and_keeps_what_it_has_read(made: Made, tmp_path: Path) -> None:
    options = ["--set", "model.attention=prefix", "--set", "train.copies=none"]
    succeed(*train_into(made, tmp_path / "run", *options))
    text = b"red dog\nold cat\n"
    command = ["bertgen translate", tmp_path / "run", "--to", "xy"]
    kept = succeed(*command, stdin=text).out
    assert succeed(*command, "--no-cache", stdin=text).out == kept
    refused = fail("bertgen translate", made.run, "--to", "xy", "--cache", stdin=text)
    assert refused.startswith("keys and values cannot be kept for a model with bidirectional")
    refused = fail(*train_into(made, tmp_path / "other", "--init", tmp_path / "run"))
    assert "it was trained with prefix attention; weights of one mode do not work in" in refused
    assert "has no use with" in fail(*train_into(made, tmp_path / "other", *options[:2]))


def test_what_is_new_in_it_learns_at_a_rate_of_its_own(made: Made) -> None:
    """The visual layers of a BERT that had none, by optim.new_lr_scale."""
    recipe = load_recipe(made.recipe, GenRecipe, ["optim.new_lr_scale=3"])
    trainer = set_up(recipe, GenData.open(made.data), None, torch.device("cpu")).trainer
    scales = {
        id(parameter): group["lr_scale"]
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    found = {name: scales[id(own)] for name, own in trainer.parameters.items()}
    assert (found["end"], found["objects.projection.weight"]) == (3.0, 3.0)
    assert (found["words.weight"], found["layers.0.up.weight"]) == (1.0, 1.0)


def test_a_run_begins_from_another(made: Made, tmp_path: Path) -> None:
    said = succeed(*train_into(made, tmp_path / "run", "--init", made.run)).err
    assert f"warm start from {made.run}: loaded" in said
    report = (made.run / "report.md").read_text()
    assert "plain, multi, caption, " in report
    assert "BERTGEN with bidirectional attention" in report


def test_an_image_beside_no_line_is_refused(made: Made, tmp_path: Path) -> None:
    values = tomllib.loads(made.recipe.read_text())
    dev = values["data"]["tasks"][1]["dev"]
    for rows, message in (
        ([99], f"has an image of row 99, but {made.folder / 'dev.xy'} has 6 lines"),
        ([2, 2], "has two images of row 2"),
    ):
        dev["images"] = [str(write_images(tmp_path / "other.npz", rows))]
        (made.folder / "other.toml").write_text(tomli_w.dumps(values))
        said = fail("bertgen prepare", made.folder / "other.toml", "--out", tmp_path / "data")
        assert message in said
        assert not (tmp_path / "data" / "data.toml").exists()


def test_mistakes(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = b"red\n"
    said = fail("bertgen translate", made.run, "--to", "de", stdin=text)
    assert said == "the model writes xy, ab, not 'de'"
    assert "is not a folder" in fail("bertgen translate", "none", "--to", "xy", stdin=text)
    assert "holds no model of bertgen" in fail("bertgen translate", ".", "--to", "xy", stdin=text)
    images = write_images(tmp_path / "far.npz", [3])
    shown = ["--to", "xy", "--images", images, "--output", "out"]
    said = fail("bertgen translate", made.run, *shown, stdin=text)
    assert said == "there is an image of row 3, but 1 lines of text"
    assert not (tmp_path / "out").exists()
    assert "none is not a folder" in fail(*train_into(made._replace(data=Path("none")), Path("r")))
    other = ["--set", "model.layers=9"]
    assert "model.layers is 9, but" in fail(*train_into(made, Path("r"), *other))
    said = fail("bertgen caption", made.run, "--to", "ab", "--images", "none.npz")
    assert said.startswith("cannot read none.npz: ")
    assert not (tmp_path / "r").exists()
