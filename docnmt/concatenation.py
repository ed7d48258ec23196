"""A plain Transformer that reads the previous sentences in front of the current one.

Tiedemann and Scherrer (2017), "Neural Machine Translation with Extended Context": 2-to-1 reads
the previous sentence, 2-to-2 translates it once more as well. Here there may be more than one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bertfused.batch import Example, drawn_batches, token_batches
from bertfused.config import SearchConfig
from bertfused.scoring import PairScore, target_log_probs
from bertfused.search import Hypothesis, normalised
from bertfused.translate import Member, SourceLine, Translator
from bertfused.vocab import Vocabulary
from docnmt.batches import DocumentExamples, target_of
from docnmt.config import ConcatenationConfig
from docnmt.sequential import Sentence, history_of

# Stands between joined sentences: in every dictionary, and in no text.
BREAK = Vocabulary.bos


class ConcatenatedExamples:
    """A split in which each sentence stands behind its previous ones.

    Args:
        limit: Tokens that either side may have.
    """

    def __init__(
        self, documents: DocumentExamples, config: ConcatenationConfig, limit: int
    ) -> None:
        self._documents = documents
        self._with_target, self._limit = config.target, limit
        lengths = [side.astype(np.int64) for side in documents.lengths[:2]]
        self.lengths: Sequence[NDArray[np.integer[Any]]] = [side.copy() for side in lengths]
        for i in range(len(documents)):
            joined = [*documents.previous(i), i]
            sizes = [(int(lengths[1][j]), int(config.target) * int(lengths[0][j])) for j in joined]
            for j in joined[first_that_fits(sizes, limit) : -1]:  # its EOS becomes the break
                self.lengths[0][i] += lengths[0][j] if config.target else 0
                self.lengths[1][i] += lengths[1][j]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, i: int) -> Example:
        previous = [self._documents[j] for j in self._documents.previous(i)]
        return join_example(
            self._documents[i], previous, with_target=self._with_target, limit=self._limit
        )

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[NDArray[np.int64]]:
        return drawn_batches(self.lengths, batch_tokens, generator, self._documents.corpora)


class ConcatenatedSystem:
    """Translates and scores with such a model.

    Where it writes the translations of previous sentences too, these are forced, and only what
    follows is its output.
    """

    def __init__(self, member: Member, config: ConcatenationConfig, device: torch.device) -> None:
        self.base = Translator([member], device)
        self.sentences = config.sentences
        self.reads_target = config.target

    def encode(
        self, sentences: Sequence[Sentence], search: SearchConfig, batch_tokens: int
    ) -> None:
        """Do nothing: every sentence is read anew with those before it."""

    @torch.inference_mode()
    def search(
        self, sentences: Sequence[Sentence], search: SearchConfig, nbest: int, seeds: Sequence[int]
    ) -> list[list[Hypothesis]]:
        member = self.base.members[0]
        member.model.eval()
        joined = [
            self._joined(
                replace(sentence.example, target=[]),
                [replace(before.example, target=before.ids) for before in sentence.previous],
            )
            for sentence in sentences
        ]
        beginnings = [target_of(example) for example in joined]
        wanted = self.base.prefix_ids([sentence.source_line.prefix for sentence in sentences])
        prefixes = [
            [*first, *then]
            for first, then in zip(beginnings, wanted or [[] for _ in sentences], strict=True)
        ]
        begun = [len(beginning) for beginning in beginnings]
        sources = [replace(example, target=None) for example in joined]
        # Ranked by what follows the beginning, another one may be the best.
        count = nbest if search.sampling else max(nbest, search.beam_size)
        found = self.base.run_search(
            member.start(sources, self.base.device),
            [len(sentence.example.source) for sentence in sentences],
            prefixes if any(prefixes) else None,
            search,
            count,
            seeds,
            begun=begun,
        )
        ranked = []
        for hypotheses, length in zip(found, begun, strict=True):
            ends = [_without_beginning(hypothesis, length, search) for hypothesis in hypotheses]
            ranked.append(sorted(ends, key=lambda hypothesis: -hypothesis.score)[:nbest])
        return ranked

    def finish(self, sentences: Sequence[Sentence]) -> None:
        for sentence in sentences:
            sentence.previous = ()

    def score(
        self,
        pairs: Sequence[tuple[SourceLine, str]],
        batch_tokens: int,
        label_smoothing: float,
    ) -> list[PairScore]:
        member = self.base.members[0]
        member.model.eval()
        histories = [history_of(line, target, 0)[-self.sentences - 1 :] for line, target in pairs]
        distinct = list(dict.fromkeys(pair for history in histories for pair in history))
        lines = [SourceLine(pair.source) for pair in distinct]
        targets = [pair.target for pair in distinct]
        whole = member.examples_with_targets(lines, targets, self.base.counts)
        examples = dict(zip(distinct, whole, strict=True))
        joined = [
            self._joined(examples[history[-1]], [examples[before] for before in history[:-1]])
            for history in histories
        ]
        tokens = [len(target_of(examples[history[-1]])) for history in histories]
        lengths = [
            np.array([len(target_of(example)) for example in joined], dtype=np.int64),
            np.array([len(example.source) for example in joined], dtype=np.int64),
        ]
        scores = [PairScore(0.0, 0)] * len(pairs)
        for numbers in token_batches(lengths, batch_tokens):
            log_probs = self._log_probs([joined[i] for i in numbers], label_smoothing)
            for i, row in zip(numbers, log_probs, strict=True):
                last = row[: len(target_of(joined[i]))][-tokens[i] :]
                scores[i] = PairScore(float(last.sum()), tokens[i])
        return scores

    @torch.inference_mode()
    def _log_probs(
        self, examples: Sequence[Example], label_smoothing: float
    ) -> Float[Tensor, "batch target"]:
        member = self.base.members[0]
        batch = member.batch(examples, self.base.device)
        assert batch.target is not None
        log_probs = member.model(batch).float().log_softmax(-1)
        return target_log_probs(log_probs, batch.target, label_smoothing).double()

    def _joined(self, example: Example, previous: Sequence[Example]) -> Example:
        limit = self.base.members[0].card.model.max_positions
        return join_example(example, previous, with_target=self.reads_target, limit=limit)


def _without_beginning(hypothesis: Hypothesis, length: int, search: SearchConfig) -> Hypothesis:
    """Cut off the first tokens of a hypothesis and score what is left."""
    log_probs = hypothesis.token_log_probs[length:]
    score = normalised(math.fsum(log_probs), len(log_probs), search)
    return Hypothesis(hypothesis.ids[length:], score, log_probs)


def first_that_fits(sizes: Sequence[tuple[int, int]], limit: int) -> int:
    """Say which of some sentences are joined: the oldest are left out until the others fit.

    Args:
        sizes: Source and target tokens of each, the current one last; 0 for a side not joined.
        limit: Tokens of either side. Half of those of the target are left to the current sentence.

    >>> first_that_fits([(5, 0), (3, 0), (2, 0)], limit=6)
    1
    """
    for first in range(len(sizes) - 1):
        source, target = (sum(side) for side in zip(*sizes[first:], strict=True))
        if max(source, target, 2 * (target - sizes[-1][1])) <= limit:
            return first
    return len(sizes) - 1


def join_example(
    example: Example, previous: Sequence[Example], *, with_target: bool, limit: int
) -> Example:
    """Put a sentence behind its previous ones, with a break after each of them.

    Args:
        with_target: Join the targets likewise, where there are some.
        limit: Tokens that either side may have; see ``first_that_fits``.
    """
    with_target = with_target and example.target is not None
    sizes = [
        (len(part.source), len(target_of(part)) if with_target else 0)
        for part in (*previous, example)
    ]
    previous = previous[first_that_fits(sizes, limit) :]
    source = [id for part in previous for id in (*map(int, part.source[:-1]), BREAK)]
    target = None if example.target is None else target_of(example)
    if with_target and target is not None:
        before = [id for part in previous for id in (*target_of(part)[:-1], BREAK)]
        target = [*before, *target]
    return Example([*source, *map(int, example.source)], target)
