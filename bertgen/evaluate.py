"""Evaluate a model on the sets of a DATA folder: with the right images, wrong ones or none."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from pydantic import Field

from bertfused.config import Section
from bertfused.errors import UserError
from bertfused.metrics import bleu, chrf
from bertfused.progress import warn_of
from bertfused.text import make_folder, open_output
from bertgen.config import GenSearchConfig
from bertgen.data import GenData, TaskSplit
from bertgen.generate import Generator, Input

Shown = Literal["congruent", "shuffled", "none"]


class TaskReport(Section):
    """What was found on one set of one task."""

    task: str
    split: str
    images: Shown | None = Field(description="What was shown; None in a task without images.")
    lines: int
    bleu: float
    bleu_half_width: float = Field(description="Half of its 95% interval.")
    chrf: float
    length_ratio: float = Field(description="Words of the output to those of the references.")


class GenEvaluation(Section):
    """All sets, with the signatures of the scores."""

    tasks: tuple[TaskReport, ...]
    signatures: tuple[str, ...]

    def __str__(self) -> str:
        table = pd.DataFrame([task.model_dump() for task in self.tasks])
        return "\n".join([table.round(3).to_string(index=False), "", *self.signatures])


def evaluate(
    generator: Generator,
    data: GenData,
    *,
    tasks: Sequence[str] = (),
    split: str | None = None,
    shown: Shown = "congruent",
    masked: frozenset[str] = frozenset(),
    search: GenSearchConfig | None = None,
    output: Path | None = None,
    lowercase: bool = False,
) -> GenEvaluation:
    """Write what the sources and images of some sets ask for, and score it.

    Args:
        tasks: Names of tasks; all if none are given.
        split: A split; all dev and test sets if None.
        shown: Which images: the right ones, those of other lines, or none (text alone).
        masked: Words of the source that the model does not see, lower-cased.
        output: Folder for what is written: TASK.SPLIT.

    Raises:
        UserError: If there is no such task or split, or the model is of another tokenizer.
    """
    if data.report.symbols != generator.card.symbols:
        raise UserError(f"{data.path} was prepared for another vocabulary than the model has")
    wanted = list(tasks) or list(data.report.tasks)
    if unknown := [task for task in wanted if task not in data.report.tasks]:
        raise UserError(
            f"{data.path} has no task {unknown[0]!r}; it has {', '.join(data.report.tasks)}"
        )
    found: list[TaskReport] = []
    signatures: dict[str, None] = {}
    for task in wanted:
        names = [name for name in data.splits(task) if name != "train"]
        for name in names if split is None else [split]:
            own = data.split(task, name)
            inputs = task_inputs(own, data, generator, shown, masked)
            about = data.report.tasks[task]
            hypotheses = list(generator.write(inputs, about["target"], search))
            references = own.text("target")
            if output is not None:
                make_folder(output)
                with open_output(output / f"{task}.{name}") as sink:
                    for line in hypotheses:
                        sink.write_line(line)
            score = bleu(hypotheses, references, lowercase=lowercase, resamples=1000)
            characters = chrf(hypotheses, references, lowercase=lowercase)
            signatures |= {score.signature: None, characters.signature: None}
            assert score.interval is not None
            words = [sum(len(line.split()) for line in side) for side in (hypotheses, references)]
            found.append(
                TaskReport(
                    task=task,
                    split=name,
                    images=shown if "images" in about else None,
                    lines=len(references),
                    bleu=score.value,
                    bleu_half_width=score.interval.half_width,
                    chrf=characters.value,
                    length_ratio=words[0] / max(words[1], 1),
                )
            )
    warn_of(generator.counts)
    return GenEvaluation(tasks=tuple(found), signatures=tuple(signatures))


def task_inputs(
    split: TaskSplit, data: GenData, generator: Generator, shown: Shown, masked: frozenset[str]
) -> list[Input]:
    """Return the inputs of a set.

    Shuffled images are those of another line: each line sees the image of the one half the set
    further on, so that none sees its own unless two lines share one.
    """
    count = len(split)
    sources: list[list[int]] = [[] for _ in range(count)]
    if split.source is not None:
        lines = split.text("source")
        sources = generator.tokenizer.split([hide_words(line, masked) for line in lines])
    if split.images is None or shown == "none":
        return [Input(ids) for ids in sources]
    numbers = split.images
    if shown == "shuffled":
        numbers = np.roll(numbers, count // 2)
    return [
        Input(ids, data.images[number])
        for ids, number in zip(sources, numbers.tolist(), strict=True)
    ]


def hide_words(line: str, words: frozenset[str]) -> str:
    """Put "..." in the place of some words.

    >>> hide_words("A Dog, a cat.", frozenset({"dog"}))
    'A ..., a cat.'
    """
    return re.sub(r"\w+", lambda m: "..." if m[0].lower() in words else m[0], line)
