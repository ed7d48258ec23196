"""Several processes train as one does, and end together."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import bertfused.fit
import bertfused.training
from bertfused.batch import token_batches
from bertfused.checkpoint import read_tensors
from bertfused.data import DataFolder
from bertfused.text import read_lines
from tests.end_to_end.children import die_at, finish, start
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import write_recipe

# An epoch has 7 batches: its last step has 3, and leaves one of two processes idle for a turn.
STEPS = {
    "train": {
        "max_steps": 7,
        "validate_every": 4,
        "batch_tokens": 240,
        "accumulate": 4,
        "log_every": 2,
    }
}
NOISE = {"model": {"dropout": 0.2}, "optim": {"clip_norm": 1.0, "ema": 0.9}}


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def train_in_two(
    log: Path, *args: object, before: Mapping[int, Callable[[], object]] | None = None
) -> list[int]:
    """Train in two processes that find one another as torchrun's do; return their statuses."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        start(
            log,
            "bertfused train",
            *args,
            before=(before or {}).get(rank),
            env={**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    return [finish(process) for process in processes]


def torchrun(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return subprocess.run(
        [*command, *map(str, args)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def fused(small: Small, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """Train a fused model in one process; return the arguments before --out, and the run."""
    lengths = DataFolder.open(small.data).split("train").lengths
    assert len(token_batches(lengths, 240)) == 7
    folder = tmp_path_factory.mktemp("processes")
    fusion = {"fusion": {"encoder": str(small.bert), "drop_net": 0.6}}
    recipe = write_recipe(folder / "recipe.toml", STEPS, NOISE, fusion)
    args = [recipe, "--data", small.data, "--init", small.plain]
    code = finish(start(folder / "log", "bertfused train", *args, "--out", folder / "run"))
    assert code == 0, (folder / "log").read_text()
    return args, folder / "run"


def distance(run: Path, other: Path) -> float:
    """Return the largest difference of anything that the last checkpoints of two runs hold.

    Biases of keys are left out: they add one number to all scores of a query, which softmax does
    not see, so their gradient is 0 but for rounding, and Adam blows that up to its usual steps.
    """
    largest = 0.0
    for file in ("model.safetensors", "training.safetensors"):
        ours, theirs = (
            read_tensors(folder / "checkpoints" / "step-7" / file) for folder in (run, other)
        )
        assert ours.keys() == theirs.keys()
        for name in ours:
            difference = (ours[name] - theirs[name]).abs()
            if difference.dim() and name.endswith("in_proj.bias"):  # queries, keys, values
                difference = difference.view(3, -1)[[0, 2]]
            if difference.dim() and name.endswith("kv_proj.bias"):  # keys, values
                difference = difference.view(2, -1)[1]
            largest = max(largest, float(difference.max()))
    return largest


def losses(run: Path) -> list[float]:
    logged = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
    return [own["nll"] if "nll" in own else own["valid_nll"] for own in logged]


def test_two_processes_of_torchrun_equal_one(
    fused: tuple[list[object], Path], tmp_path: Path
) -> None:
    args, one = fused
    ran = torchrun("-m", "bertfused", "train", *args, "--out", tmp_path / "run")
    assert ran.returncode == 0, ran.stderr
    assert distance(tmp_path / "run", one) < 1e-5
    assert losses(tmp_path / "run") == pytest.approx(losses(one), abs=1e-5)


def test_a_validation_may_need_more_positions_than_training(small: Small, tmp_path: Path) -> None:
    longer = {"search": {"min_length": 260, "max_length_b": 261, "beam_size": 1}}
    recipe = write_recipe(tmp_path / "recipe.toml", STEPS, longer)
    ran = torchrun(
        *("-m", "bertfused", "train", recipe, "--data", small.data, "--out", tmp_path / "run")
    )
    assert ran.returncode == 0, ran.stderr


def test_a_failing_process_ends_all_with_its_traceback(
    fused: tuple[list[object], Path], tmp_path: Path
) -> None:
    args, _ = fused
    log = tmp_path / "log"
    codes = train_in_two(log, *args, "--out", tmp_path / "run", before={1: fail_at_third_step})
    assert all(code not in (0, 2) for code in codes)
    assert "AssertionError: broken on purpose" in log.read_text()


def fail_at_third_step() -> None:
    update = bertfused.training.Trainer.update

    def failing(self: object, dataset: object, step: object, number: int) -> object:
        assert number < 3, "broken on purpose"
        return update(self, dataset, step, number)

    bertfused.training.Trainer.update = failing


def test_a_process_that_comes_late_finds_the_same_run(
    fused: tuple[list[object], Path], tmp_path: Path
) -> None:
    args, one = fused
    log, run = tmp_path / "log", tmp_path / "run"
    codes = train_in_two(log, *args, "--out", run, before={1: come_late})
    assert codes == [0, 0], log.read_text()
    assert distance(run, one) < 1e-5


def come_late() -> None:
    facts = bertfused.fit._facts

    def slowly(*args: object) -> object:
        time.sleep(1)
        return facts(*args)

    bertfused.fit._facts = slowly


def test_two_processes_killed_and_resumed_equal_one(
    fused: tuple[list[object], Path], tmp_path: Path
) -> None:
    args, one = fused
    log, run = tmp_path / "log", tmp_path / "run"
    for moment in (10, 60):
        codes = train_in_two(
            log, *args, "--out", run, "--resume", before={0: partial(die_at, moment, run)}
        )
        assert codes[0] == -9, log.read_text()
        assert codes[1] != 0, log.read_text()
    assert train_in_two(log, *args, "--out", run, "--resume") == [0, 0], log.read_text()
    assert distance(run, one) < 1e-5


def test_a_time_limit_ends_all_in_one_step(
    fused: tuple[list[object], Path], tmp_path: Path
) -> None:
    args, _ = fused
    log = tmp_path / "log"
    limit = ["--set", "train.max_steps=none", "--set", "train.max_minutes=0.01"]
    limit += ["--set", "optim.schedule=constant", "--set", "train.validate_every=1000"]
    codes = train_in_two(log, *args, *limit, "--out", tmp_path / "run", before={1: run_fast})
    assert codes == [0, 0], log.read_text()


def run_fast() -> None:
    """Let the clock of this process run five times as fast."""
    bertfused.training.time = SimpleNamespace(perf_counter=lambda: 5 * time.perf_counter())


def test_batches_are_not_left_over(fused: tuple[list[object], Path], tmp_path: Path) -> None:
    args, _ = fused
    log, run = tmp_path / "log", tmp_path / "run"
    codes = train_in_two(log, *args, "--set", "train.accumulate=3", "--out", run)
    assert codes == [2, 2]
    assert log.read_text().count("train.accumulate is 3, not a multiple of 2 processes") == 2
    assert not run.exists()
