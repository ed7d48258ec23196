"""How BERTGEN learns: from the lines of all tasks, each unrolled into sequences with one mask.

A line with n target wordpieces is n + 1 sequences, of which the last predicts [STOP]; its loss is
their sum, and only what stands at the masks counts. An update takes micro-batches of every task
(Mitzalis et al., 2021, section 3.2). What ``model.attention = "prefix"`` is: ``bertgen.layout``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from bertfused.batch import token_batches
from bertfused.fit import Validation
from bertfused.loss import Loss
from bertfused.training import LossModule, Place, Step, Stream, Trainer
from bertfused.translate import SourceLine
from bertgen.data import TaskSplit
from bertgen.images import ImageStore
from bertgen.layout import Images, Sequences, Source, Symbols, unrolled, with_prefix
from bertgen.model import BertGen

Numbers = NDArray[np.int64]
Attention = Literal["bidirectional", "prefix"]


@dataclass(frozen=True)
class Item:
    """A line of a task: what is read, and what is to be written.

    Attributes:
        image: Number of the image in DATA, or -1.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    into: int
    image: int


class Items:
    """The lines of some tasks, one task after the other.

    Args:
        splits: With the number of each one's [TO_XX].
        attention: Says how many positions a line costs.
        copies: Sequences drawn of each line, at most; None for all.
        rows: Of each split only so many lines, evenly spread; None for all.
        longest: Lines with more wordpieces on a side are left out.
    """

    def __init__(
        self,
        splits: Sequence[tuple[TaskSplit, int]],
        images: ImageStore,
        attention: Attention,
        copies: int | None = None,
        rows: int | None = None,
        longest: int | None = None,
    ) -> None:
        self._splits, self.images, self.copies = splits, images, copies
        self._rows = [_chosen(split, rows, longest) for split, _ in splits]
        self._ends = np.cumsum([len(own) for own in self._rows])
        costs = [
            self._costs(split, own, attention)
            for (split, _), own in zip(splits, self._rows, strict=True)
        ]
        #: Positions that a line takes, all its sequences together.
        self.lengths: Sequence[NDArray[np.integer[Any]]] = [np.concatenate(costs)]
        sizes = [
            split.target.sizes[own] for (split, _), own in zip(splits, self._rows, strict=True)
        ]
        self._targets = np.concatenate(sizes).astype(np.int64)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, i: int) -> Any:
        task = int(np.searchsorted(self._ends, i, side="right"))
        row = int(self._rows[task][i - int(self._ends[task])])  # counted from the end of its task
        split, into = self._splits[task]
        source = np.zeros(0, dtype=np.int64) if split.source is None else split.source[row]
        image = -1 if split.images is None else int(split.images[row])
        return Item(source, split.target[row], into, image)

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[Numbers]:
        """Group the lines of every task; no batch is of two tasks."""
        tasks = range(len(self._splits))
        return [own for task in tasks for own in self.batches_of(task, batch_tokens, generator)]

    def batches_of(
        self, task: int, batch_tokens: int, generator: np.random.Generator | None
    ) -> list[Numbers]:
        """Group the lines of a task; as many batches whatever the generator."""
        end, size = int(self._ends[task]), len(self._rows[task])
        lengths = [self.lengths[0][end - size : end]]
        return [
            end - size + rows for rows in token_batches(lengths, batch_tokens, generator=generator)
        ]

    def predictions(self, numbers: Numbers) -> int:
        """Count what there is to predict in some lines: their wordpieces, and [STOP]."""
        return int(self._targets[numbers].sum()) + len(numbers)

    @property
    def num_tasks(self) -> int:
        return len(self._splits)

    def _costs(self, split: TaskSplit, rows: Numbers, attention: Attention) -> Numbers:
        targets = split.target.sizes[rows].astype(np.int64)
        fixed = np.full(len(rows), 5, dtype=np.int64)  # [TO_XX] [CLS] [SEP] [SEP] [END]
        if split.source is not None:
            fixed += split.source.sizes[rows]
        if split.images is not None:
            fixed += self.images.sizes(split.images[rows])
        if attention == "prefix":
            cost: Numbers = fixed + 2 * targets
            return cost
        sequences = targets + 1
        if self.copies is not None:
            sequences = np.minimum(sequences, self.copies)
        cost = sequences * (fixed + 1 + targets // 2)
        return cost


def _chosen(split: TaskSplit, count: int | None, longest: int | None) -> Numbers:
    """Choose lines of a split."""
    rows = np.arange(len(split))
    for store in (split.source, split.target):
        if store is not None and longest is not None:
            rows = rows[store.sizes[rows] <= longest]
    if count is None or count >= len(rows):
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))]


def steps(
    dataset: Items, *, batch_tokens: int, accumulate: int, seed: int, start: Place
) -> Iterator[Step]:
    """Yield updates for ever: ``accumulate`` micro-batches of every task.

    Each task goes through its lines in an order of its own, a function of seed and epoch. The
    position of a place is the number of updates; its epoch is how often the largest task was seen.
    """
    streams = [
        Stream(partial(dataset.batches_of, task, batch_tokens), (seed, task))
        for task in range(dataset.num_tasks)
    ]
    largest, step = max(map(len, streams)), start.position
    while True:
        numbers = range(step * accumulate, (step + 1) * accumulate)
        micro = [stream[number] for stream in streams for number in numbers]
        step += 1
        predictions = sum(map(dataset.predictions, micro))
        yield Step(micro, predictions, Place(step * accumulate // largest, step))


@dataclass(frozen=True)
class GenBatch:
    """Sequences, and what stands at their masks.

    Attributes:
        weights: Of the losses: how many sequences of its line each one stands for.
    """

    sequences: Sequences
    images: Images
    target: Int[Tensor, " predictions"]
    weights: Float[Tensor, " predictions"]

    def to(self, device: torch.device) -> "GenBatch":
        return GenBatch(
            self.sequences.to(device),
            self.images.to(device),
            self.target.to(device),
            self.weights.to(device),
        )

    @property
    def tokens(self) -> int:
        """Real positions."""
        return len(self.sequences.positions)

    @property
    def positions(self) -> int:
        """The same: there is no padding, but in attention."""
        return len(self.sequences.positions)


class MaskLoss(LossModule):
    """The loss at the masks of the sequences that lines are unrolled into."""

    model: BertGen

    def __init__(
        self, model: BertGen, symbols: Symbols, attention: Attention, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(model, None)
        self.symbols, self.attention = symbols, attention
        self.label_smoothing = label_smoothing
        self._random = np.random.default_rng()

    def begin_step(self, *key: int, drop_net: float) -> None:
        self.model.noise.reseed(*key)
        self._random = np.random.default_rng(key)

    def collate(self, dataset: Items, numbers: Numbers) -> GenBatch:
        items = [dataset[int(i)] for i in numbers]
        used = list(dict.fromkeys(item.image for item in items if item.image >= 0))
        images = dataset.images.batch(used)
        place = {image: number for number, image in enumerate(used)} | {-1: -1}
        sources = [Source(item.source, item.into, place[item.image]) for item in items]
        ends = [np.append(item.target, self.symbols.stop) for item in items]
        if self.attention == "prefix":
            targets = [item.target for item in items]
            sequences = with_prefix(sources, targets, images, self.symbols)
            target = np.concatenate(ends)
            return GenBatch(sequences, images, torch.from_numpy(target), torch.ones(len(target)))
        drawn = [self._draw(len(end), dataset.copies) for end in ends]
        sequences = unrolled(
            [source for source, turns in zip(sources, drawn, strict=True) for _ in turns],
            [end[:turn] for end, turns in zip(ends, drawn, strict=True) for turn in turns],
            images,
            self.symbols,
        )
        target = np.concatenate([end[turns] for end, turns in zip(ends, drawn, strict=True)])
        weights = [
            np.full(len(turns), len(end) / len(turns), dtype=np.float32)
            for end, turns in zip(ends, drawn, strict=True)
        ]
        return GenBatch(
            sequences, images, torch.from_numpy(target), torch.from_numpy(np.concatenate(weights))
        )

    def loss(self, batch: GenBatch) -> Loss:
        logits = self.model(batch.sequences, self.model.objects(batch.images)).float()
        nll = functional.cross_entropy(logits, batch.target, reduction="none")
        total = nll
        if self.label_smoothing:
            total = functional.cross_entropy(
                logits, batch.target, reduction="none", label_smoothing=self.label_smoothing
            )
        weights = batch.weights
        count = round(float(weights.sum()))
        return Loss((total * weights).sum(), (nll.detach() * weights).sum(), count)

    def _draw(self, size: int, copies: int | None) -> Numbers:
        """Draw which sequences of a line are used, in order."""
        if copies is None or copies >= size:
            return np.arange(size)
        return np.sort(self._random.choice(size, copies, replace=False))


@dataclass(frozen=True)
class TaskLosses:
    """Validation by the loss of the dev set of each task; the mean over them chooses."""

    trainer: Trainer
    by_task: Mapping[str, Items]

    @property
    def translates(self) -> bool:
        return False

    @property
    def criterion(self) -> str:
        return "the mean log-perplexity over the tasks"

    def validate(self, step: int, lines: Sequence[SourceLine]) -> Validation:
        """Find the perplexity of a wordpiece, task by task."""
        nlls = {}
        for task, items in self.by_task.items():
            loss = self.trainer.mean_loss(items)
            nlls[task] = float(loss.nll) / loss.tokens
        mean = sum(nlls.values()) / len(nlls)
        perplexities = {task: math.exp(min(nll, 50)) for task, nll in nlls.items()}
        values: dict[str, float | str] = {"valid_nll": mean}
        values |= {f"valid_perplexity_{task}": value for task, value in perplexities.items()}
        each = ", ".join(f"{task} {value:.2f}" for task, value in perplexities.items())
        return Validation(-mean, f"perplexity {each}", values)
