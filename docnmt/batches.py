"""Batches of sentences in their documents: each is encoded once, also as context of others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from bertfused.batch import Batch, BertIds, Corpora, Example, collate, token_batches
from bertfused.fit import Examples
from bertfused.pretrained import PretrainedEncoder
from docnmt.cadec import MakeDraft
from docnmt.context import ContextModel, Encoded, Places, target_states

# Padded tokens of a group: sentences of one batch differ in length, those of a group hardly.
GROUP_TOKENS = 2048


@dataclass(frozen=True)
class Task:
    """Sentences of one group to be predicted: in their contexts, or without any by the base.

    Attributes:
        rows: Which sentences of the group.
        numbers: The place of each row's sentence in ``wanted``.
    """

    group: int
    rows: Int[Tensor, "rows"]
    numbers: tuple[int, ...]
    source: Places | None
    target: Places | None


@dataclass(frozen=True)
class ContextBatch:
    """Sentences in groups of like length, and which of them are to be predicted in which context.

    The sentences are numbered through the groups; the places of contexts refer to the tokens of
    all of them in that order.
    """

    groups: tuple[Batch, ...]
    tasks: tuple[Task, ...]

    def to(self, device: torch.device) -> "ContextBatch":
        def moved(task: Task) -> Task:
            return replace(
                task,
                rows=task.rows.to(device),
                source=None if task.source is None else task.source.to(device),
                target=None if task.target is None else task.target.to(device),
            )

        groups = tuple(group.to(device) for group in self.groups)
        return ContextBatch(groups, tuple(map(moved, self.tasks)))

    @property
    def tokens(self) -> int:
        """Real tokens on source and target."""
        return sum(group.tokens for group in self.groups)

    @property
    def positions(self) -> int:
        """Positions on source and target, padding included."""
        return sum(group.positions for group in self.groups)


def collate_in_context(
    examples: Sequence[Example],
    previous: Sequence[Sequence[int]],
    wanted: Sequence[int],
    bert_ids: BertIds | None,
) -> ContextBatch:
    """Make one batch.

    Args:
        examples: All sentences that are needed, with their targets.
        previous: For each wanted sentence the places of its previous ones among ``examples``,
            oldest first.
        wanted: The places of those to be predicted.
    """
    lengths = [
        np.array([len(target_of(example)) for example in examples], dtype=np.int64),
        np.array([len(example.source) for example in examples], dtype=np.int64),
    ]
    order = token_batches(lengths, GROUP_TOKENS)
    place_of = {int(i): place for place, i in enumerate(np.concatenate(order))}
    flat = [side[np.concatenate(order)] for side in lengths]
    contexts = {
        i: (number, [place_of[j] for j in before])
        for number, (i, before) in enumerate(zip(wanted, previous, strict=True))
    }
    groups, tasks = [], []
    for group, members in enumerate(order):
        groups.append(collate([examples[i] for i in members], bert_ids))
        found = [(row, *contexts[int(i)]) for row, i in enumerate(members) if int(i) in contexts]
        for has_context in (True, False):
            entries = [entry for entry in found if bool(entry[2]) == has_context]
            if not entries:
                continue
            rows, numbers, before = zip(*entries, strict=True)
            source, target = (
                (Places.of(before, flat[1]), Places.of(before, flat[0]))
                if has_context
                else (None, None)
            )
            tasks.append(Task(group, torch.tensor(rows), numbers, source, target))
    return ContextBatch(tuple(groups), tuple(tasks))


def target_of(example: Example) -> Sequence[int]:
    """Return the target of an example that has one."""
    assert example.target is not None
    return example.target if isinstance(example.target, list) else [*map(int, example.target)]


@dataclass(frozen=True)
class Prediction:
    """The states from which the targets of a task are predicted.

    Attributes:
        output: Projection to the vocabulary; the base's where there was no context.
    """

    task: Task
    hidden: Float[Tensor, "rows target model_dim"]
    target: Int[Tensor, "rows target"]
    mask: Bool[Tensor, "rows target"]
    output: nn.Linear


def predict(
    model: ContextModel,
    encoder: PretrainedEncoder | None,
    batch: ContextBatch,
    *,
    mask_special: bool = False,
    draft: MakeDraft | None = None,
) -> Iterator[Prediction]:
    """Run a context model over a batch with targets.

    Args:
        draft: Makes the drafts of the sentences of a task, for a model that corrects some.
    """
    groups = batch.groups
    if encoder is not None:
        groups = tuple(encoder.attach(group, None, mask_special=mask_special) for group in groups)
    encoded = [Encoded(model.base, group) for group in groups]
    sources = torch.cat([model.source_states(group)[group.batch.source_mask] for group in encoded])
    targets = torch.cat([_target_states(model, group) for group in encoded])
    for task in batch.tasks:
        group = encoded[task.group]
        assert group.batch.target is not None and group.batch.target_mask is not None
        target, mask = group.batch.target[task.rows], group.batch.target_mask[task.rows]
        if task.source is None or task.target is None:
            yield Prediction(task, group.hidden[task.rows], target, mask, model.base.output)
            continue
        current = group.select(task.rows, with_states=model.reads_base)
        if draft is not None:
            current = replace(current, draft=draft(task.numbers, current, target))
        hidden = model.hidden(current, task.source.gather(sources), task.target.gather(targets))
        yield Prediction(task, hidden, target, mask, model.output)


def _target_states(model: ContextModel, encoded: Encoded) -> Float[Tensor, "tokens width"]:
    batch = encoded.batch
    assert batch.target is not None and batch.target_mask is not None
    if not model.reads_target:
        return torch.empty(int(batch.target_mask.sum()), 0, device=batch.target.device)
    states = target_states(model.base.decoder.embed, batch.target, encoded.hidden)
    return states[batch.target_mask]


class DocumentExamples:
    """A split as the training of a context-aware model reads it: in order, document by document.

    Args:
        docids: The document of each example; those without one have no context.
        sentences: Previous sentences that are read. One without source text is no context.
        only_in_context: Leave out of training what has no context.
    """

    def __init__(
        self,
        examples: Examples,
        docids: Sequence[str],
        sentences: int,
        *,
        only_in_context: bool = False,
    ) -> None:
        self._examples = examples
        self.lengths = examples.lengths
        self._only_in_context = only_in_context
        starts = [i for i, name in enumerate(docids) if not i or not name or name != docids[i - 1]]
        self._documents = [
            np.arange(start, end, dtype=np.int64) for start, end in pairwise([*starts, len(docids)])
        ]
        self._corpora = None if examples.corpora is None else examples.corpora.of_groups(starts)
        self._sentences = sentences
        sizes = [len(document) for document in self._documents]
        self._starts = np.repeat(np.array(starts, dtype=np.int64), sizes)
        self._is_blank = self.lengths[1] <= 1
        whole = np.concatenate([[0], np.cumsum(~self._is_blank)])  # before each sentence
        self._has_context = (whole[:-1] > whole[self._starts]) & (sentences > 0)

    @property
    def corpora(self) -> Corpora | None:
        """What the split consists of, sentence by sentence."""
        return self._examples.corpora

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, i: int) -> Example:
        return self._examples[i]

    @property
    def have_context(self) -> bool:
        """Whether any sentence has a previous one."""
        return bool(self._has_context.any())

    def previous(self, i: int) -> tuple[int, ...]:
        """Return the numbers of the previous sentences of a sentence, oldest first."""
        found: list[int] = []
        for before in range(i - 1, int(self._starts[i]) - 1, -1):
            if len(found) == self._sentences:
                break
            if not self._is_blank[before]:
                found.append(before)
        return tuple(reversed(found))

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[NDArray[np.int64]]:
        """Fill batches with documents, in random order with a generator.

        A batch has ``batch_tokens`` real tokens on its longer side, or one sentence. Sentences
        without context are left out where that was asked for, but not without a generator.
        """
        documents = self._documents
        if generator is not None:
            corpora = self._corpora
            numbers = np.arange(len(documents)) if corpora is None else corpora.epoch(generator)
            documents = [documents[i] for i in generator.permutation(numbers)]
        order = np.concatenate([np.empty(0, dtype=np.int64), *documents])
        if generator is not None and self._only_in_context:
            order = order[self._has_context[order]]
        batches, start, sums = [], 0, np.zeros(2, dtype=np.int64)
        sizes = np.stack([self.lengths[0][order], self.lengths[1][order]], axis=1)
        for place, size in enumerate(sizes.astype(np.int64)):
            sums = sums + size
            if place > start and sums.max() > batch_tokens:
                batches.append(order[start:place])
                start, sums = place, size
        if len(order):
            batches.append(order[start:])
        if generator is not None:
            generator.shuffle(batches)
        return batches
