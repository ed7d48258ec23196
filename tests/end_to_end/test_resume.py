"""A run that is killed, whenever, and resumed ends as if nothing had happened."""

import json
import random
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bertfused.checkpoint import load_model, read_tensors
from bertfused.run import RunFolder
from tests.end_to_end.children import copy_at_each, die_at, finish, start
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import fail, succeed, write_recipe

# An epoch is 4 batches, so two steps, the second of one batch; what is logged is no multiple of
# what is saved.
SHORT = {
    "train": {"max_steps": 11, "validate_every": 4, "log_every": 3, "accumulate": 3},
    "optim": {"clip_norm": 1.0},
}
CLOCKS = {"seconds", "tokens_per_second", "generation_seconds"}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"optim": {"ema": 0.9}, "model": {"dropout": 0.3, "attention_dropout": 0.1}},
    "bf16": {"train": {"precision": "bf16", "select": "bleu", "keep_last": 1}},
    "fused": {"fusion": {"drop_net": 0.6, "drop_net_warmup_steps": 8}, "optim": {"ema": 0.9}},
    "cached": {"fusion": {"drop_net": 1.0, "layer": "stochastic", "last_layers": 2}},
    "finetuned": {"fusion": {"drop_net": 0.6, "finetune": True, "layer": -2}},
}


def metrics(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: own for key, own in r.items() if key not in CLOCKS} for r in records]


def contents(run: Path) -> dict[str, object]:
    """Return all that a run left, without clocks and without what tells of its interruptions."""
    found: dict[str, object] = {"metrics": metrics(run)}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_dir() or ".partial" in name or name.startswith(("tensorboard/", "log.txt")):
            continue
        if name.endswith("training.json"):
            state = json.loads(path.read_text())
            assert state.pop("seconds") > 0
            found[name] = state
        elif name == "report.md":
            found[name] = re.sub(r"[\d,]+ s in updates", "", path.read_text())
        elif name not in ("metrics.jsonl", "run.json"):
            found[name] = path.read_bytes()
    return found


def check_loadable(run: Path) -> None:
    """Every checkpoint opens, and once there is one, so does the best model."""
    checkpoints = list(RunFolder(run).checkpoints().values())
    for folder in checkpoints:
        json.loads((folder / "training.json").read_text())
        read_tensors(folder / "training.safetensors")
    for folder in [*checkpoints, *([run] if checkpoints else [])]:
        load_model(folder).load_encoder()


def arguments(small: Small, folder: Path, variant: str) -> list[object]:
    """Write the recipe of a variant; return what ``train`` needs."""
    recipe, data = folder / "recipe.toml", small.data
    changes = VARIANTS[variant]
    if "fusion" in changes:
        changes = changes | {"fusion": changes["fusion"] | {"encoder": str(small.bert)}}
    write_recipe(recipe, SHORT, changes)
    if variant == "cached":
        data = folder / "data"
        shutil.copytree(small.data, data)
        layer = ("--layer", "stochastic", "--last-layers", 2)
        succeed("bertfused cache-features", data, "--encoder", small.bert, *layer)
    init = ["--init", small.plain] if "fusion" in changes else []
    return ["bertfused train", recipe, "--data", data, *init, "--out"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_and_resumed_equals_not_killed(small: Small, tmp_path: Path, variant: str) -> None:
    train = arguments(small, tmp_path, variant)
    whole, killed, log = tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "log"
    assert finish(start(log, *train, whole)) == 0, log.read_text()
    draw = random.Random(variant)
    kills = 0
    for attempt in range(6):
        if attempt % 3 < 2:  # in the middle of what is done with files
            moment = partial(die_at, draw.randint(1, 90), killed)
            process = start(log, *train, killed, "--resume", before=moment)
        else:  # or of anything
            process = start(log, *train, killed, "--resume")
            time.sleep(draw.uniform(0.1, 0.8))
            process.kill()
        code = finish(process)
        assert code in (0, -9), log.read_text()
        kills += code == -9
        check_loadable(killed)
    assert kills > 1
    assert finish(start(log, *train, killed, "--resume")) == 0, log.read_text()
    assert contents(killed) == contents(whole)
    check_loadable(killed)


@pytest.mark.parametrize("variant", ["plain", "finetuned"])
def test_whenever_it_is_killed_the_checkpoints_open(
    small: Small, tmp_path: Path, variant: str
) -> None:
    train = arguments(small, tmp_path, variant)
    run, log, copies = tmp_path / "run", tmp_path / "log", tmp_path / "copies"
    options = ["--set", "train.keep_last=1", "--set", "train.keep_best=0"]
    before = partial(copy_at_each, run, copies)
    assert finish(start(log, *train, run, *options, before=before)) == 0, log.read_text()
    numbers = sorted(int(path.name) for path in copies.iterdir())
    assert len(numbers) > 60
    last, seen = 0, set()
    for number in numbers:
        copy = copies / str(number)
        newest = max(RunFolder(copy).checkpoints(), default=0)
        assert newest >= last, f"the checkpoint of step {last} is gone before there is a newer one"
        last = newest
        state = tuple(sorted((str(p.relative_to(copy)), p.stat().st_size) for p in copy.rglob("*")))
        if state not in seen:
            check_loadable(copy)
        seen.add(state)
    assert last == 11


@pytest.fixture(scope="module")
def short(small: Small, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """Train for 4 steps; return the command without its last arguments, and the run."""
    folder = tmp_path_factory.mktemp("short")
    recipe = write_recipe(folder / "recipe.toml", SHORT)
    train = ["bertfused train", recipe, "--data", small.data, "--quiet"]
    train += ["--set", "optim.schedule=inverse_sqrt", "--set", "train.max_steps=4"]
    run = folder / "run"
    succeed(*train, "--out", run)
    return train, run


def test_a_line_of_metrics_that_was_cut_short_is_written_again(
    short: tuple[list[object], Path], tmp_path: Path
) -> None:
    train, run = short
    shutil.copytree(run, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 4, "epo')
    succeed(*train, "--out", tmp_path / "run", "--resume")
    assert contents(tmp_path / "run") == contents(run)


def test_what_a_killed_run_was_writing_is_taken_away(
    short: tuple[list[object], Path], tmp_path: Path
) -> None:
    train, run = short
    left = tmp_path / "run"
    shutil.copytree(run, left)
    for name in ("checkpoints/step-2.partial", "checkpoints/step-1.old"):
        shutil.copytree(left / "model", left / name)
    for name in (".report.md.01ab.partial", "model/.model.safetensors.01ab.partial"):
        (left / name).touch()
    (left / ".translations.de.01ab.partial").touch()  # another command may be writing it
    succeed(*train, "--out", left, "--resume")
    (left / ".translations.de.01ab.partial").unlink()
    assert contents(left) == contents(run)


def test_a_finished_run_without_its_model_says_so(
    short: tuple[list[object], Path], tmp_path: Path
) -> None:
    train, run = short
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    said = fail(*train, "--out", tmp_path / "run", "--resume")
    assert said.startswith(f"{tmp_path / 'run' / 'model'} is not there")


def test_a_finished_run_stays_as_it_is(short: tuple[list[object], Path]) -> None:
    train, run = short
    before = contents(run)
    assert "already holds a run; continue it with --resume" in fail(*train, "--out", run)
    succeed(*train, "--out", run, "--resume")
    assert contents(run) == before


def test_more_steps_are_accepted_loudly(short: tuple[list[object], Path], tmp_path: Path) -> None:
    train, run = short
    longer = [*train, "--set", "train.max_steps=9", "--set", "train.log_every=1", "--out"]
    succeed(*longer, tmp_path / "at-once" / "run")
    resumed = tmp_path / "resumed" / "run"
    shutil.copytree(run, resumed)
    said = succeed(*longer, resumed, "--resume").err
    assert "resuming with train.max_steps = 9 (was 4)" in said
    assert "resuming with train.log_every = 1 (was 3)" in said
    ours, theirs = contents(resumed), contents(tmp_path / "at-once" / "run")
    del ours["metrics"], theirs["metrics"]
    assert ours == theirs  # the resolved recipe too
    logged = [record["step"] for record in metrics(resumed) if "nll" in record]
    assert logged == [3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.lr=0.02", "optim.lr was 0.01 and is 0.02"),
        ("train.seed=5", "train.seed was 1 and is 5"),
        ("train.accumulate=1", "train.accumulate was 3 and is 1"),
        ("train.batch_tokens=400", "train.batch_tokens was 500 and is 400"),
        ("model.dropout=0", "model.dropout was 0.1 and is 0.0"),
        ("optim.ema=0.9", "optim.ema was None and is 0.9"),
        ("optim.clip_norm=none", "optim.clip_norm was 1.0 and is None"),
        (
            "data.train=[{source = 'a', target = 'b', weight = 2}]",
            "the weights of the training corpora were [1.0] and are [2.0]",
        ),
    ],
)
def test_other_options_are_refused(
    short: tuple[list[object], Path], change: str, message: str
) -> None:
    train, run = short
    before = contents(run)
    said = fail(*train, "--set", change, "--out", run, "--resume")
    assert said == f"cannot resume {run}: {message}"
    assert contents(run) == before


def test_another_number_of_steps_of_a_linear_schedule_is_refused(
    small: Small, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", SHORT)
    train = ["bertfused train", recipe, "--data", small.data, "--out", tmp_path / "run"]
    succeed(*train, "--set", "train.max_steps=2")
    said = fail(*train, "--set", "train.max_steps=3", "--resume")
    assert said == f"cannot resume {tmp_path / 'run'}: train.max_steps was 2 and is 3"


def test_other_data_and_another_start_are_refused(
    small: Small, short: tuple[list[object], Path], tmp_path: Path
) -> None:
    train, run = list(short[0]), short[1]
    said = fail(*train, "--init", small.plain, "--out", run, "--resume")
    assert said == f"cannot resume {run}: it was started without --init, as it was then"
    succeed("bertfused prepare", small.recipe, "--out", tmp_path / "data")
    train[3] = tmp_path / "data"
    said = fail(*train, "--out", run, "--resume")
    assert said == f"cannot resume {run}: it was trained on other data"


def test_a_warm_start_is_resumed_with_the_same_start_only(small: Small) -> None:
    again = ["bertfused train", small.fused_recipe, "--data", small.data, "--out", small.fused]
    said = fail(*again, "--set", "train.max_steps=40", "--resume")
    expected = f"cannot resume {small.fused}: it was started with --init {small.plain}"
    assert said.startswith(expected)


def test_a_checkpoint_of_another_model_is_named(
    short: tuple[list[object], Path], tmp_path: Path
) -> None:
    train, run = short
    copy = shutil.copytree(run, tmp_path / "run")
    (path,) = copy.rglob("training.safetensors")
    save_file({"weight.other": torch.zeros(1)}, path)
    said = fail(*train, "--out", copy, "--resume")
    assert said.startswith(f"{path} is of another model: it lacks weight.")


@pytest.mark.parametrize("name", ["run.json", "training.json"])
@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"step": 1, "place": {"no": 1}}'])
def test_a_run_with_a_damaged_file_is_not_resumed(
    short: tuple[list[object], Path], tmp_path: Path, name: str, content: str
) -> None:
    train, run = short
    copy = shutil.copytree(run, tmp_path / "run")
    (damaged,) = copy.rglob(name)
    damaged.write_text(content)
    assert fail(*train, "--out", copy, "--resume").startswith(f"{damaged} is damaged: ")
