"""Translate documents sentence after sentence, each in the context of what came before it.

Many documents go side by side, so that a batch is full although a sentence waits for the one
before it::

    lines -> Sentence (ids, previous sentences)     a window of lines
      -> System.encode(sentences)                   every sentence once
      -> rounds: System.search(next sentence of each document) -> System.finish
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertfused.batch import Example, pad_ids, token_batches
from bertfused.config import SearchConfig
from bertfused.model import DecoderState, Memory
from bertfused.scoring import PairScore, target_log_probs
from bertfused.search import Decoder, Hypothesis, line_seeds
from bertfused.translate import (
    Long,
    Member,
    SourceLine,
    Translated,
    Translation,
    Translator,
    join_parts,
)
from bertfused.vocab import Vocabulary
from docnmt.batches import collate_in_context, predict, target_of
from docnmt.cadec import draft_of
from docnmt.config import ConcatenationConfig
from docnmt.context import Context, ContextModel, Current, Places, encode
from docnmt.documents import padded

# Lines looked at together; the bound on memory, and on how many documents go side by side.
_WINDOW = 2048
# Sampling streams kept apart within a line that is split.
_PARTS = 1 << 16
# Stands between joined sentences: in every dictionary, and in no text.
BREAK = Vocabulary.bos


@dataclass(eq=False)
class Sentence:
    """A sentence of a document on its way to a translation.

    Attributes:
        line: Its line in the window; ``part`` counts the pieces of a line that was too long.
        previous: The sentences before it, oldest first, without blank ones.
        ids: Its translation, EOS last.
        memory: What the base's encoder made of it.
        source, target: What it gives to the sentences after it.
    """

    line: int
    part: int
    source_line: SourceLine
    example: Example
    previous: tuple["Sentence", ...] = ()
    ids: list[int] | None = None
    memory: Memory | None = None
    source: Float[Tensor, "length width"] | None = None
    target: Float[Tensor, "length width"] | None = None


@runtime_checkable
class System(Protocol):
    """What knows how one kind of model reads the previous sentences.

    Attributes:
        base: Translator of single sentences: text, limits, counts, device.
        sentences: Previous sentences that are read.
        reads_target: Whether a sentence waits for the translation of the one before.
    """

    base: Translator
    sentences: int
    reads_target: bool

    def encode(self, sentences: Sequence[Sentence], batch_tokens: int) -> None:
        """Do what does not depend on translations."""

    def search(
        self, sentences: Sequence[Sentence], search: SearchConfig, nbest: int, seeds: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """Translate sentences whose previous ones are translated; all have some, or none has."""
        ...

    def finish(self, sentences: Sequence[Sentence]) -> None:
        """Keep of translated sentences what those after them need."""

    def score(
        self,
        pairs: Sequence[tuple[SourceLine, str]],
        batch_tokens: int,
        label_smoothing: float,
    ) -> list[PairScore]:
        """Score targets in the given contexts."""
        ...


class DocumentLineTranslator:
    """Translates the lines of documents in order, as ``bertfused.translate.Translator`` does.

    Consecutive lines of one document belong together; a line without one has no context.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.counts: Counter[str] = system.base.counts

    @property
    def documents(self) -> dict[str, Any] | None:
        return self.system.base.members[0].card.documents

    @property
    def search(self) -> SearchConfig:
        return self.system.base.search

    def translate(
        self,
        lines: Iterable[str | SourceLine],
        search: SearchConfig | None = None,
        *,
        nbest: int = 1,
        batch_tokens: int = 4096,
        long: Long = "split",
        first_line: int = 0,
    ) -> Iterator[Translation]:
        """Translate lines; options as of ``Translator.translate``.

        The best translation of a sentence is the context of the next ones. The pieces of a line
        that is too long are consecutive sentences.
        """
        search = search or self.search
        iterator, number = iter(lines), first_line
        before: deque[Sentence] = deque(maxlen=self.system.sentences)
        document: str | None = None
        while window := list(islice(iterator, _WINDOW)):
            given = [line if isinstance(line, SourceLine) else SourceLine(line) for line in window]
            documents: list[list[Sentence]] = []
            for sentence in self._sentences(given, number, long):
                name = sentence.source_line.document
                if name is None or name != document or not documents:
                    documents.append([])
                if name is None or name != document:
                    before.clear()
                document = name
                sentence.previous = tuple(before)
                before.append(sentence)
                documents[-1].append(sentence)
            yield from self._window(given, documents, number, search, nbest, batch_tokens)
            number += len(window)

    def _sentences(
        self, lines: Sequence[SourceLine], number: int, long: Long
    ) -> Iterator[Sentence]:
        places, sources = [], []
        for i, line in enumerate(lines):
            if not line.text.strip():
                continue
            texts = self.system.base.fit(line.text, long, f"line {number + i + 1}")
            for part, text in enumerate(texts):
                prefix = None if part else line.prefix  # it begins the line, not every piece
                places.append((i, part))
                sources.append(replace(line, text=text, prefix=prefix))
        examples = self.system.base.members[0].examples(sources, self.counts)
        for place, source, example in zip(places, sources, examples, strict=True):
            yield Sentence(*place, source, example)

    def _window(
        self,
        lines: Sequence[SourceLine],
        documents: Sequence[Sequence[Sentence]],
        number: int,
        search: SearchConfig,
        nbest: int,
        batch_tokens: int,
    ) -> list[Translation]:
        found: list[dict[int, tuple[Translated, ...]]] = [{} for _ in lines]
        self.system.encode([own for document in documents for own in document], batch_tokens)
        for batch in rounds(documents, batch_tokens, one_by_one=self.system.reads_target):
            keys = [(number + own.line) * _PARTS + own.part for own in batch]
            hypotheses = self.system.search(batch, search, nbest, line_seeds(search.seed, keys))
            for sentence, own in zip(batch, hypotheses, strict=True):
                sentence.ids = own[0].ids
                found[sentence.line][sentence.part] = tuple(map(self.system.base.translated, own))
            self.system.finish(batch)
        return [
            Translation(line.text, join_parts([parts[i] for i in sorted(parts)], nbest))
            for line, parts in zip(lines, found, strict=True)
        ]

    def score(
        self,
        pairs: Iterable[tuple[SourceLine, str]],
        *,
        batch_tokens: int = 4096,
        label_smoothing: float = 0.0,
    ) -> Iterator[PairScore]:
        """Score targets, each in the context that its source line holds on both sides."""
        iterator = iter(pairs)
        while window := list(islice(iterator, _WINDOW)):
            yield from self.system.score(window, batch_tokens, label_smoothing)


def rounds(
    documents: Sequence[Sequence[Sentence]], batch_tokens: int, *, one_by_one: bool
) -> Iterator[list[Sentence]]:
    """Yield batches of sentences that may be translated together.

    Each round is the next sentence of every document, cut by length; what has no context stays
    apart. If translations are not read, one round is all.
    """
    turns = range(max(map(len, documents), default=0)) if one_by_one else range(1)
    for turn in turns:
        if one_by_one:
            ready = [document[turn] for document in documents if turn < len(document)]
        else:
            ready = [sentence for document in documents for sentence in document]
        for has_context in (False, True):
            own = [sentence for sentence in ready if bool(sentence.previous) == has_context]
            lengths = np.array([len(sentence.example.source) for sentence in own], dtype=np.int64)
            for batch in token_batches([lengths], batch_tokens)[::-1]:
                yield [own[i] for i in batch]


class ContextSystem:
    """A model with context layers on a frozen base."""

    def __init__(self, model: ContextModel, member: Member, device: torch.device) -> None:
        self.model = model.to(device)
        self.base = Translator([member], device)
        self.sentences = model.sentences
        self.reads_target = model.reads_target

    @torch.inference_mode()
    def encode(self, sentences: Sequence[Sentence], batch_tokens: int) -> None:
        self.model.eval()
        member = self.base.members[0]
        lengths = np.array([len(own.example.source) for own in sentences], dtype=np.int64)
        for numbers in token_batches([lengths], batch_tokens):
            batch = [sentences[i] for i in numbers]
            encoded = encode(
                self.model.base,
                member.batch([own.example for own in batch], self.base.device),
            )
            states, memory = self.model.source_states(encoded), encoded.memory
            for row, own in enumerate(batch):
                length = len(own.example.source)
                bert_states = bert_mask = None
                if memory.bert_states is not None and memory.bert_mask is not None:
                    # Not to the last True of the mask: special positions may be hidden.
                    pieces = len(own.example.bert if own.example.bert is not None else ())
                    bert_states = memory.bert_states[row : row + 1, :pieces]
                    bert_mask = memory.bert_mask[row : row + 1, :pieces]
                own.source = states[row, :length]
                own.memory = Memory(
                    memory.states[row : row + 1, :length],
                    memory.mask[row : row + 1, :length],
                    bert_states,
                    bert_mask,
                )

    @torch.inference_mode()
    def search(
        self, sentences: Sequence[Sentence], search: SearchConfig, nbest: int, seeds: Sequence[int]
    ) -> list[list[Hypothesis]]:
        current = self._current(sentences)
        lengths = [len(own.example.source) for own in sentences]
        decoder: Decoder = DecoderState(self.model.base, current.memory)
        if sentences[0].previous:
            if self.model.wants_draft:
                best = search.model_copy(update={"sampling": None})
                drafts = self.base.find(decoder, lengths, None, best, 1, seeds)
                ids, _ = pad_ids([own[0].ids for own in drafts], Vocabulary.pad)
                draft = draft_of(self.model.base, current, ids.to(self.base.device))
                current = replace(current, draft=draft)
            decoder = self.model.start(
                current, self._context(sentences, "source"), self._context(sentences, "target")
            )
        forced = None
        if any(own.source_line.prefix is not None for own in sentences):
            target = self.base.members[0].target
            forced = [target.encode(own.source_line.prefix or "") for own in sentences]
        return self.base.find(decoder, lengths, forced, search, nbest, seeds)

    @torch.inference_mode()
    def finish(self, sentences: Sequence[Sentence]) -> None:
        """Represent the translations by what the base's decoder makes of them."""
        if self.reads_target:
            base, current = self.model.base, self._current(sentences)
            rows = [own.ids or [Vocabulary.eos] for own in sentences]
            states = draft_of(base, current, pad_ids(rows, Vocabulary.pad)[0].to(self.base.device))
            for row, own in enumerate(sentences):
                own.target = states.states[row, : len(rows[row])]
        for own in sentences:
            own.memory, own.previous = None, ()

    def _current(self, sentences: Sequence[Sentence]) -> Current:
        memories = [own.memory for own in sentences if own.memory is not None]
        source, mask = pad_ids([own.example.source for own in sentences], Vocabulary.pad)
        bert = [
            (own.bert_states[0], own.bert_mask[0])
            for own in memories
            if own.bert_states is not None and own.bert_mask is not None
        ]
        device = self.base.device
        memory = Memory(
            pad_sequence([own.states[0] for own in memories], batch_first=True),
            mask.to(device),
            pad_sequence([states for states, _ in bert], batch_first=True) if bert else None,
            pad_sequence([own for _, own in bert], batch_first=True) if bert else None,
        )
        return Current(source.to(device), memory)

    def _context(self, sentences: Sequence[Sentence], side: str) -> Context:
        """Join what the previous sentences of each sentence give to it."""
        needed = list(dict.fromkeys(before for own in sentences for before in own.previous))
        place = {own: number for number, own in enumerate(needed)}
        given = [own.source if side == "source" else own.target for own in needed]
        states = [own for own in given if own is not None]
        if len(states) < len(needed):  # a side that is not read
            states = [torch.zeros(1, 0, device=self.base.device) for _ in needed]
        lengths = np.array([len(own) for own in states], dtype=np.int64)
        places = Places.of(
            [[place[before] for before in own.previous] for own in sentences], lengths
        )
        return places.to(self.base.device).gather(torch.cat(states))

    @torch.inference_mode()
    def score(
        self,
        pairs: Sequence[tuple[SourceLine, str]],
        batch_tokens: int,
        label_smoothing: float,
    ) -> list[PairScore]:
        self.model.eval()
        documents = self.base.members[0].card.documents
        bert_previous = documents["previous"] if documents else 0
        histories = [_history(line, target, bert_previous) for line, target in pairs]
        distinct = list(dict.fromkeys(own for history in histories for own in history))
        examples = dict(zip(distinct, self._examples(distinct), strict=True))
        drafts = self._drafts([history[-1] for history in histories], examples, batch_tokens)
        scores = [PairScore(0.0, 0)] * len(pairs)
        lengths = [
            np.array([len(target_of(examples[own[-1]])) for own in histories], dtype=np.int64),
            np.array([len(examples[own[-1]].source) for own in histories], dtype=np.int64),
        ]
        for batch in token_batches(lengths, batch_tokens):
            own_histories = [histories[i] for i in batch]
            own_drafts = None if drafts is None else [drafts[i] for i in batch]
            own_scores = self._score(own_histories, examples, own_drafts, label_smoothing)
            for i, score in zip(batch, own_scores, strict=True):
                scores[i] = score
        return scores

    def _score(
        self,
        histories: Sequence[Sequence["_Pair"]],
        examples: Mapping["_Pair", Example],
        drafts: Sequence[Sequence[int]] | None,
        label_smoothing: float,
    ) -> list[PairScore]:
        member = self.base.members[0]
        before = list(dict.fromkeys(own for history in histories for own in self._read(history)))
        place = {own: len(histories) + number for number, own in enumerate(before)}
        batch = collate_in_context(
            [examples[history[-1]] for history in histories] + [examples[own] for own in before],
            [[place[own] for own in self._read(history)] for history in histories],
            range(len(histories)),
            None if member.encoder is None else member.encoder.bert_ids,
        ).to(self.base.device)
        fusion = member.card.fusion
        scores = [PairScore(0.0, 0)] * len(histories)
        for own in predict(
            self.model,
            member.encoder,
            batch,
            mask_special=fusion is not None and fusion.mask_special,
            drafts=drafts,
        ):
            log_probs = own.output(own.hidden).float().log_softmax(-1)
            picked = target_log_probs(log_probs, own.target, label_smoothing)
            sums, tokens = picked.double().mul(own.mask).sum(1).tolist(), own.mask.sum(1).tolist()
            for number, total, count in zip(own.task.numbers, sums, tokens, strict=True):
                scores[number] = PairScore(total, count)
        return scores

    def _read(self, history: Sequence["_Pair"]) -> Sequence["_Pair"]:
        """Return those of the previous sentences that the model reads."""
        return history[:-1][-self.sentences :]

    def _examples(self, sentences: Sequence["_Pair"]) -> list[Example]:
        member = self.base.members[0]
        lines = [SourceLine(own.source, own.bert_context) for own in sentences]
        targets = member.target.encode_batch([own.target for own in sentences])
        return [
            replace(example, target=[*ids, Vocabulary.eos])
            for example, ids in zip(member.examples(lines, self.base.counts), targets, strict=True)
        ]

    def _drafts(
        self,
        sentences: Sequence["_Pair"],
        examples: Mapping["_Pair", Example],
        batch_tokens: int,
    ) -> list[list[int]] | None:
        """Translate sentences with the base, where the model wants that."""
        if not self.model.wants_draft:
            return None
        distinct = list(dict.fromkeys(own._replace(target="") for own in sentences))
        named = {own._replace(target=""): own for own in sentences}
        whole = [
            Sentence(i, 0, SourceLine(own.source), replace(examples[named[own]], target=None))
            for i, own in enumerate(distinct)
        ]
        self.encode(whole, batch_tokens)
        found = {}
        best = self.base.search.model_copy(update={"sampling": None})
        for batch in rounds([[own] for own in whole], batch_tokens, one_by_one=False):
            hypotheses = self.search(batch, best, 1, [0] * len(batch))
            for own, draft in zip(batch, hypotheses, strict=True):
                found[distinct[own.line]] = draft[0].ids
        return [found[own._replace(target="")] for own in sentences]


class _Pair(NamedTuple):
    """A sentence and its translation, and what the pretrained encoder reads before it."""

    source: str
    bert_context: tuple[str, ...]
    target: str


def paired_context(line: SourceLine) -> list[tuple[str, str]]:
    """Pair a line's previous sentences with their translations, oldest first, without blank ones.

    The nearest sentences of both sides belong together; a side that lacks some has empty ones.

    >>> paired_context(SourceLine("Me.", ("Hello.", "", "Who?"), target_context=("Wer?",)))
    [('Hello.', ''), ('Who?', 'Wer?')]
    """
    count = max(len(line.context), len(line.target_context))
    sources = [*[""] * (count - len(line.context)), *line.context]
    targets = [*[""] * (count - len(line.target_context)), *line.target_context]
    pairs = zip(sources, targets, strict=True)
    return [(source, own) for source, own in pairs if source.strip() or own.strip()]


def _history(line: SourceLine, target: str, bert_previous: int) -> list[_Pair]:
    """List the sentences of a context, oldest first, and the sentence itself at the end."""
    before: deque[str] = deque(maxlen=bert_previous)
    history = []
    for source, own in [*paired_context(line), (line.text, target)]:
        history.append(_Pair(source, padded(tuple(before), bert_previous), own))
        if source.strip():
            before.append(source)
    return history


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
        (len(own.source), len(target_of(own)) if with_target else 0) for own in (*previous, example)
    ]
    previous = previous[first_that_fits(sizes, limit) :]
    source = [id for own in previous for id in (*map(int, own.source[:-1]), BREAK)]
    target = None if example.target is None else target_of(example)
    if with_target and target is not None:
        before = [id for own in previous for id in (*target_of(own)[:-1], BREAK)]
        target = [*before, *target]
    return Example([*source, *map(int, example.source)], target)


class ConcatenatedSystem:
    """A plain Transformer that reads the previous sentences in front of the current one.

    Where it writes their translations too, these are forced, and only what follows is its output.
    """

    def __init__(self, member: Member, config: ConcatenationConfig, device: torch.device) -> None:
        self.base = Translator([member], device)
        self.sentences = config.sentences
        self.reads_target = config.target

    def encode(self, sentences: Sequence[Sentence], batch_tokens: int) -> None:
        """Do nothing: every sentence is read anew with those before it."""

    @torch.inference_mode()
    def search(
        self, sentences: Sequence[Sentence], search: SearchConfig, nbest: int, seeds: Sequence[int]
    ) -> list[list[Hypothesis]]:
        member = self.base.members[0]
        member.model.eval()
        joined = [
            self._joined(
                replace(own.example, target=[]),
                [replace(before.example, target=before.ids) for before in own.previous],
            )
            for own in sentences
        ]
        prefixes = [
            [*target_of(own), *member.target.encode(sentence.source_line.prefix or "")]
            for own, sentence in zip(joined, sentences, strict=True)
        ]
        begun = [len(target_of(own)) for own in joined]
        decoder = member.start([replace(own, target=None) for own in joined], self.base.device)
        lengths = [len(own.example.source) for own in sentences]
        forced = prefixes if any(prefixes) else None
        # Ranked by what follows the beginning, another one may be the best.
        count = nbest if search.sampling else max(nbest, search.beam_size)
        found = self.base.find(decoder, lengths, forced, search, count, seeds, begun=begun)
        return [
            sorted(
                (_without_beginning(own, length, search) for own in hypotheses),
                key=lambda own: -own.score,
            )[:nbest]
            for hypotheses, length in zip(found, begun, strict=True)
        ]

    def finish(self, sentences: Sequence[Sentence]) -> None:
        for own in sentences:
            own.previous = ()

    def score(
        self,
        pairs: Sequence[tuple[SourceLine, str]],
        batch_tokens: int,
        label_smoothing: float,
    ) -> list[PairScore]:
        member = self.base.members[0]
        member.model.eval()
        histories = [_history(line, target, 0)[-self.sentences - 1 :] for line, target in pairs]
        distinct = list(dict.fromkeys(own for history in histories for own in history))
        sources = member.examples([SourceLine(own.source) for own in distinct], self.base.counts)
        targets = member.target.encode_batch([own.target for own in distinct])
        examples = {
            own: replace(example, target=[*ids, Vocabulary.eos])
            for own, example, ids in zip(distinct, sources, targets, strict=True)
        }
        joined = [
            self._joined(examples[own[-1]], [examples[before] for before in own[:-1]])
            for own in histories
        ]
        own_tokens = [len(target_of(examples[own[-1]])) for own in histories]
        lengths = [
            np.array([len(target_of(own)) for own in joined], dtype=np.int64),
            np.array([len(own.source) for own in joined], dtype=np.int64),
        ]
        scores = [PairScore(0.0, 0)] * len(pairs)
        for numbers in token_batches(lengths, batch_tokens):
            log_probs = self._log_probs([joined[i] for i in numbers], label_smoothing)
            for i, row in zip(numbers, log_probs, strict=True):
                own = row[: len(target_of(joined[i]))][-own_tokens[i] :]
                scores[i] = PairScore(float(own.sum()), own_tokens[i])
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
    divisor = len(log_probs) ** search.length_penalty if search.normalize else 1.0
    return Hypothesis(hypothesis.ids[length:], math.fsum(log_probs) / divisor, log_probs)
