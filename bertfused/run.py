"""The run folder: what a training writes, resumes from, and is made into at the end.

::

    RUN/config.toml          the resolved recipe
    RUN/run.json             data, start, versions: what else the numbers depend on
    RUN/model/               the best model so far; all that translate needs
    RUN/checkpoints/step-N/  a model folder plus the state of training
    RUN/metrics.jsonl        every logged value        RUN/tensorboard/   the same, to look at
    RUN/log.txt              what was printed          RUN/report.md      the end in one page
"""

import gc
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tomli_w
import torch
import torch.distributed as dist
from torch import nn

from bertfused.checkpoint import (
    WEIGHTS,
    load_card,
    new_folder,
    read_json,
    read_tensors,
    remove_folder,
    save_model,
    write_json,
    write_tensors,
)
from bertfused.config import RecipeT, RunRecipe, flatten, load_recipe
from bertfused.data import REPORT
from bertfused.errors import UserError
from bertfused.pretrained import PretrainedEncoder
from bertfused.text import read_lines, remove_partials, replace_file
from bertfused.training import Place, Trainer, TrainState

_logger = logging.getLogger(__name__)

_TRAINING = "training.safetensors"
_STATE = "training.json"


@runtime_checkable
class Card(Protocol):
    """What a run says of its model; for an NMT a ``ModelCard``."""

    @property
    def kind(self) -> str:
        """What sort of model it is, for the report."""
        ...

    @property
    def directions(self) -> str:
        """What it translates, for the report."""
        ...

    def save(
        self, folder: Path, model: nn.Module, encoder: PretrainedEncoder | None, text_folder: Path
    ) -> None:
        """Write the model, and the subword files and dictionaries of ``text_folder``, to a folder.

        Where a model stands already, only its weights are replaced.
        """
        ...


class RunFolder:
    """Files of one run. Only the first of several processes writes."""

    def __init__(self, path: Path, *, is_first: bool = True) -> None:
        self.path = path
        self.is_first = is_first
        self._board: Any = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoints(self) -> dict[int, Path]:
        """Return the complete checkpoints by step, oldest first."""
        folder = self.path / "checkpoints"
        found = folder.glob("step-*") if folder.is_dir() else []
        steps = {
            int(path.name[5:]): path
            for path in found
            if path.name[5:].isdigit() and (path / _STATE).is_file()
        }
        return dict(sorted(steps.items()))

    def check_new(self) -> None:
        """Refuse a folder in which there is a run already, or data.

        Raises:
            UserError: If there is.
        """
        if (self.path / REPORT).exists():
            raise UserError(f"{self.path} is a DATA folder; give another one for the run")
        if (self.path / "config.toml").exists():
            raise UserError(f"{self.path} already holds a run; continue it with --resume")

    def create(self, recipe: RunRecipe, facts: dict[str, Any]) -> None:
        """Start a run in the folder; raises as ``check_new`` does."""
        self.check_new()
        write_json(self.path / "run.json", facts)
        self.write_config(recipe)

    def write_config(self, recipe: RunRecipe) -> None:
        """Write the resolved recipe."""
        with replace_file(self.path / "config.toml") as handle:
            handle.write(tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True)).encode())

    def remove_leftovers(self) -> None:
        """Remove what a killed process was writing, and checkpoints that it was dropping."""
        remove_partials(self.path, r"(config|run|metrics|report)\.\w+")
        remove_partials(self.path / "model", ".*")
        for pattern in ("step-*.partial", "step-*.old"):
            for folder in (self.path / "checkpoints").glob(pattern):
                shutil.rmtree(folder)

    def check_config(self, recipe: RunRecipe, facts: dict[str, Any]) -> None:
        """Refuse to resume with options that change what is computed; say which others changed.

        Raises:
            UserError: Naming the first such option.
        """
        before = read_config(self.path, type(recipe))
        old, new = flatten(before.model_dump(mode="json")), flatten(recipe.model_dump(mode="json"))
        for key in sorted(old.keys() | new.keys()):
            # What the data say of text and subwords is in their hash, whatever the files' names.
            if old.get(key) == new.get(key) or key.startswith(("data.", "subwords.reuse")):
                continue
            is_steps = key == "train.max_steps" and recipe.optim.schedule == "linear"
            if is_steps or not re.fullmatch(recipe.may_change, key):
                raise UserError(
                    f"cannot resume {self.path}: {key} was {old.get(key)!r} and is {new.get(key)!r}"
                )
            _logger.warning("resuming with %s = %r (was %r)", key, new.get(key), old.get(key))
        weights = [before.weights, recipe.weights]
        if weights[0] != weights[1] and {1.0} != {*weights[0], *weights[1]}:
            raise UserError(
                f"cannot resume {self.path}: the weights of the training corpora were "
                f"{weights[0]} and are {weights[1]}"
            )
        known = read_json(self.path / "run.json", "data_sha256", "init", "init_sha256")
        for key in facts.keys() | known.keys():
            is_of_data = key.endswith("_sha256") and key != "init_sha256"
            if is_of_data and known.get(key) != facts.get(key):
                raise UserError(f"cannot resume {self.path}: it was trained on other data")
        if known["init_sha256"] != facts["init_sha256"]:
            start = "without --init" if known["init"] is None else f"with --init {known['init']}"
            raise UserError(f"cannot resume {self.path}: it was started {start}, as it was then")

    def forget_after(self, step: int) -> None:
        """Drop the metrics logged after a step: they will be logged again."""
        if self.is_first and self.metrics.exists():
            kept = [line for line in read_lines(self.metrics) if _step_of(line) <= step]
            with replace_file(self.metrics) as handle:
                handle.write("".join(line + "\n" for line in kept).encode())

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append values to metrics.jsonl, and the numbers among them to TensorBoard."""
        if not self.is_first:
            return
        with self.metrics.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps({"step": step} | values) + "\n")
        board = self._tensorboard(step)
        for key, value in values.items():
            if board is not None and isinstance(value, float | int):
                board.add_scalar(key, value, step)

    def _tensorboard(self, step: int) -> Any:
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._board = False
            else:
                self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=step)
        return self._board or None

    def save(
        self,
        trainer: Trainer,
        state: TrainState,
        card: Card,
        text_folder: Path,
        keep: set[int],
    ) -> None:
        """Write a checkpoint, and drop those that are not to be kept."""
        if not self.is_first:
            return
        with new_folder(self.path / "checkpoints" / f"step-{state.step}") as folder:
            save_evaluated(folder, trainer, card, text_folder)
            write_tensors(folder / _TRAINING, trainer.state_tensors())
            write_json(folder / _STATE, asdict(state))
        for step, path in self.checkpoints().items():
            if step not in keep | {state.step}:
                remove_folder(path)

    def resume(self, trainer: Trainer) -> TrainState:
        """Restore the newest checkpoint; a run killed before its first one starts again."""
        newest = list(self.checkpoints().items())[-1:]
        for step, folder in newest:
            try:
                trainer.load_state_tensors(read_tensors(folder / _TRAINING))
            except KeyError as error:
                raise UserError(
                    f"{folder / _TRAINING} is of another model: it lacks {error.args[0]}"
                ) from error
            values = read_json(folder / _STATE, "step", "place")
            try:
                state = TrainState(**values | {"place": Place(**values["place"])})
            except TypeError as error:
                raise UserError(f"{folder / _STATE} is damaged: {error}") from error
            _logger.info("resuming after step %d", step)
            self.forget_after(step)
            return state
        self.forget_after(-1)
        return TrainState()


def save_evaluated(folder: Path, trainer: Trainer, card: Card, text_folder: Path) -> None:
    """Write a model folder with the weights that evaluation uses."""
    with trainer.evaluation():
        card.save(folder, trainer.module.model, trainer.module.encoder, text_folder)


def _step_of(line: str) -> float:
    """Return the step of a line of metrics, infinity if it was cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_config(run: Path, schema: type[RecipeT]) -> RecipeT:
    """Read the resolved recipe of a run."""
    return load_recipe(run / "config.toml", schema)


@contextmanager
def processes() -> Iterator[tuple[bool, torch.device | None]]:
    """Join the other processes when started by torchrun.

    Yields whether this is the first process, and the device that is this process's own. What was
    built to exchange gradients has to be dropped in the block: if it held the last reference to
    the group, this would be destroyed under the interpreter's lock, for which the group's own
    threads may be waiting. After an error the group is left as it is: the process has to end, so
    that torchrun ends the others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True, None
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield dist.get_rank() == 0, device
    gc.collect()
    dist.destroy_process_group()


@contextmanager
def log_to(path: Path | None) -> Iterator[None]:
    """Copy the log to a file as well."""
    if path is None:
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root = logging.getLogger()  # of all packages: modes have their own
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def average(run: Path, *, last: int | None, best: int | None, out: Path) -> list[int]:
    """Average the weights of some checkpoints of a run into a new RUN; return their steps.

    Raises:
        UserError: If the run has fewer checkpoints, or ``out`` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists already; give a new folder")
    folder = RunFolder(run)
    found = folder.checkpoints()
    wanted = last or best or 0
    if len(found) < wanted or wanted < 1:
        raise UserError(f"{run} has {len(found)} checkpoints, not {wanted} (see train.keep_last)")
    steps = list(found)[-wanted:]
    if best is not None:
        values = {}
        for line in read_lines(folder.metrics):
            if _step_of(line) < math.inf and "valid_value" in (record := json.loads(line)):
                values[record["step"]] = record["valid_value"]
        if not values:
            raise UserError(f"{run} has logged nothing that says which checkpoints are best")
        steps = sorted(found, key=lambda step: -values.get(step, -math.inf))[:wanted]
    card = load_card(found[steps[0]])
    if card.fusion is not None and card.fusion.finetune:
        raise UserError(f"{run} has a fine-tuned encoder, which is not averaged")
    total = read_tensors(found[steps[0]] / WEIGHTS)
    for step in steps[1:]:
        for name, tensor in read_tensors(found[step] / WEIGHTS).items():
            total[name] += tensor
    mean = {name: tensor / len(steps) for name, tensor in total.items()}
    with new_folder(out) as made:
        save_model(made / "model", card, mean, found[steps[0]])
    return sorted(steps)
