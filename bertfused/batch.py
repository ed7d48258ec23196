"""Batches: which examples go together, and their padded tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bertfused.vocab import Vocabulary


@dataclass(frozen=True)
class Example:
    """One sentence (pair) as ids; source and target end in EOS.

    Attributes:
        languages: Numbers of its source and target language, for a model of several directions.
    """

    source: Sequence[int] | NDArray[np.integer]
    target: Sequence[int] | NDArray[np.integer] | None = None
    bert: Sequence[int] | NDArray[np.integer] | None = None
    bert_states: Tensor | None = None
    languages: tuple[int, int] | None = None


@dataclass(frozen=True)
class BertIds:
    """What collation must know of the pretrained encoder's ids.

    Args:
        pad: Its padding id (not always 0).
        separator: The id that closes each part of its input, if segment ids are wanted: the
            last part, the sentence itself, is segment 1 when a context stands before it.
    """

    pad: int
    separator: int | None = None

    def segments(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return 0 for the context (or for a sentence alone), 1 for what follows it.

        >>> BertIds(pad=0, separator=9).segments(np.array([8, 5, 9, 6, 7, 9]))
        array([0, 0, 0, 1, 1, 1])
        """
        ends = np.flatnonzero(ids == self.separator)
        segments = np.zeros_like(ids)
        if len(ends) > 1:
            segments[ends[-2] + 1 :] = 1
        return segments


@dataclass(frozen=True)
class Batch:
    """Padded tensors of some examples; every mask is True on real tokens.

    ``decoder_input`` starts with EOS, as fairseq's does, and ``target`` ends in it.
    """

    source: Int[Tensor, "batch source"]
    source_mask: Bool[Tensor, "batch source"]
    decoder_input: Int[Tensor, "batch target"] | None = None
    target: Int[Tensor, "batch target"] | None = None
    target_mask: Bool[Tensor, "batch target"] | None = None
    bert: Int[Tensor, "batch bert"] | None = None
    bert_segments: Int[Tensor, "batch bert"] | None = None
    bert_mask: Bool[Tensor, "batch bert"] | None = None
    bert_states: Float[Tensor, "batch bert bert_dim"] | None = None
    source_language: Int[Tensor, " batch"] | None = None
    target_language: Int[Tensor, " batch"] | None = None

    def to(self, device: torch.device) -> "Batch":
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    @property
    def tokens(self) -> int:
        """Real tokens on source and target."""
        target = 0 if self.target_mask is None else int(self.target_mask.sum())
        return int(self.source_mask.sum()) + target

    @property
    def positions(self) -> int:
        """Positions on source and target, padding included."""
        return self.source.numel() + (0 if self.target is None else self.target.numel())


def pad_ids(
    rows: Sequence[Sequence[int] | NDArray[np.integer]], pad: int
) -> tuple[Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """Right-pad rows of ids; return them with their mask."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max())[None, :] < lengths[:, None]
    ids = np.full(mask.shape, pad, dtype=np.int64)
    ids[mask] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return torch.from_numpy(ids), torch.from_numpy(mask)


def collate(examples: Sequence[Example], bert_ids: BertIds | None = None) -> Batch:
    """Make one batch. ``bert_ids`` is needed when the examples carry the encoder's ids."""
    source, source_mask = pad_ids([example.source for example in examples], Vocabulary.pad)
    batch = Batch(source=source, source_mask=source_mask)
    if examples[0].target is not None:
        targets = [example.target for example in examples if example.target is not None]
        target, target_mask = pad_ids(targets, Vocabulary.pad)
        batch = replace(
            batch, target=target, target_mask=target_mask, decoder_input=shift_right(target)
        )
    if examples[0].bert is not None:
        assert bert_ids is not None
        batch = _add_bert(batch, examples, bert_ids)
    languages = [example.languages for example in examples if example.languages is not None]
    if languages:
        of_sources, of_targets = torch.tensor(languages).unbind(1)
        batch = replace(batch, source_language=of_sources, target_language=of_targets)
    return batch


def shift_right(target: Int[Tensor, "batch target"]) -> Int[Tensor, "batch target"]:
    """Make the decoder's input of targets: EOS, and each token one place later.

    >>> shift_right(torch.tensor([[5, 6, 2], [7, 2, 1]])).tolist()
    [[2, 5, 6], [2, 7, 2]]
    """
    decoder_input = target.roll(1, dims=1)
    decoder_input[:, 0] = Vocabulary.eos
    return decoder_input


def _add_bert(batch: Batch, examples: Sequence[Example], bert_ids: BertIds) -> Batch:
    rows = [np.asarray(example.bert, dtype=np.int64) for example in examples]
    bert, bert_mask = pad_ids(rows, bert_ids.pad)
    batch = replace(batch, bert=bert, bert_mask=bert_mask)
    if bert_ids.separator is not None:
        segments, _ = pad_ids([bert_ids.segments(row) for row in rows], 0)
        batch = replace(batch, bert_segments=segments)
    states = [example.bert_states for example in examples if example.bert_states is not None]
    if states:
        batch = replace(batch, bert_states=torch.nn.utils.rnn.pad_sequence(states, True))
    return batch


@dataclass(frozen=True)
class Corpora:
    """Corpora whose examples stand one after the other.

    Args:
        sizes: Examples of each.
        weights: How often an epoch passes through each.
    """

    sizes: Sequence[int]
    weights: Sequence[float]

    def epoch(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw the numbers of an epoch's examples, in order: all of a corpus once or several times.

        Of a fraction of a passage a random part is drawn, rounded to whole examples.
        """
        numbers, start = [np.empty(0, dtype=np.int64)], 0
        for size, weight in zip(self.sizes, self.weights, strict=True):
            whole, rest = divmod(round(weight * size), max(size, 1))
            drawn = generator.permutation(size)[:rest]
            passed = np.concatenate([np.repeat(np.arange(size), whole), drawn])
            numbers.append(start + np.sort(passed))
            start += size
        return np.concatenate(numbers)

    def of_groups(self, starts: Sequence[int]) -> "Corpora":
        """Count groups of examples, such as documents, in place of examples.

        Args:
            starts: The first example of each.
        """
        ends = np.cumsum(self.sizes)
        corpus = np.searchsorted(ends, np.asarray(starts, dtype=np.int64), side="right")
        return Corpora(np.bincount(corpus, minlength=len(ends)).tolist(), self.weights)


def token_batches(
    lengths: Sequence[NDArray[np.integer]],
    batch_tokens: int,
    *,
    generator: np.random.Generator | None = None,
    max_sentences: int | None = None,
) -> list[NDArray[np.int64]]:
    """Group examples of like length under a budget of padded tokens.

    A batch of n examples costs n times its longest side, as fairseq counts ``--max-tokens``;
    an example over the budget forms a batch alone. The order is by the first length, within it
    by the second (up and down in turn, so that neighbours stay alike at the seams), and so on.

    Args:
        lengths: One array a stream (target, source, BERT, ...), tokens of each example.
        batch_tokens: Padded tokens a batch may have on its longest side. The encoder's
            wordpieces are grouped by, but not counted.
        generator: Shuffles examples of equal length, and the batches; ``None`` keeps both in
            order.
        max_sentences: Most examples a batch may have.

    Returns:
        Arrays of example numbers.
    """
    count = len(lengths[0])
    order = np.arange(count) if generator is None else generator.permutation(count)
    first = lengths[0][order].astype(np.int64)
    keys = [first]
    for length in lengths[1:]:
        keys.append(np.where(first % 2 == 0, 1, -1) * length[order].astype(np.int64))
    order = order[np.lexsort(keys[::-1])]
    longest = np.maximum.reduce([length[order] for length in lengths[:2]]).tolist()
    batches, start, widest = [], 0, 0
    for position, length in enumerate(longest):
        size = position - start + 1
        widest = max(widest, length)
        if size > 1 and (widest * size > batch_tokens or size > (max_sentences or size)):
            batches.append(order[start:position])
            start, widest = position, length
    if count:
        batches.append(order[start:])
    if generator is not None:
        generator.shuffle(batches)
    return batches


def drawn_batches(
    lengths: Sequence[NDArray[np.integer]],
    batch_tokens: int,
    generator: np.random.Generator | None,
    corpora: Corpora | None,
) -> list[NDArray[np.int64]]:
    """Group the examples of an epoch as `token_batches` does, each corpus by its weight."""
    if generator is None or corpora is None:
        return token_batches(lengths, batch_tokens, generator=generator)
    numbers = corpora.epoch(generator)
    drawn = [stream[numbers] for stream in lengths]
    return [numbers[batch] for batch in token_batches(drawn, batch_tokens, generator=generator)]


def padding_share(batches: Iterator[NDArray[np.int64]], lengths: NDArray[np.integer]) -> float:
    """Return the share of padded positions among all positions of one stream's batches."""
    real = total = 0
    for batch in batches:
        real += int(lengths[batch].sum())
        total += len(batch) * int(lengths[batch].max())
    return 1 - real / max(total, 1)
