"""Translate documents sentence after sentence, each in the context of what came before it.

Many documents go side by side, so that a batch is full although a sentence waits for the one
before it::

    lines -> Sentence (ids, previous sentences)     a window of lines
      -> System.encode(sentences)                   every sentence once
      -> rounds: System.search(next sentence of each document) -> System.finish
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from bertfused.batch import Example, token_batches
from bertfused.config import SearchConfig
from bertfused.model import Memory
from bertfused.scoring import PairScore
from bertfused.search import Hypothesis, line_seeds
from bertfused.translate import (
    Long,
    SourceLine,
    Translated,
    Translation,
    Translator,
    join_parts,
)
from docnmt.documents import padded

# Lines looked at together; the bound on memory, and on how many documents go side by side.
_WINDOW = 2048
# Sampling streams kept apart within a line that is split.
_PARTS = 1 << 16


@dataclass(eq=False)
class Sentence:
    """A sentence of a document on its way to a translation.

    Attributes:
        line: Its line in the window; ``part`` counts the pieces of a line that was too long.
        previous: The sentences before it, oldest first, without blank ones.
        ids: Its translation, EOS last.
        memory: What the base's encoder made of it.
        source_states, target_states: What it gives to the sentences after it.
        draft: A translation by the base, for a model that corrects one.
    """

    line: int
    part: int
    source_line: SourceLine
    example: Example
    previous: tuple["Sentence", ...] = ()
    ids: list[int] | None = None
    memory: Memory | None = None
    source_states: Float[Tensor, "length width"] | None = None
    target_states: Float[Tensor, "length width"] | None = None
    draft: list[int] | None = None


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

    def encode(
        self, sentences: Sequence[Sentence], search: SearchConfig, batch_tokens: int
    ) -> None:
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
        """Score targets in the given contexts; label-smoothed if that is not 0."""
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
            texts = self.system.base.cut_to_fit(
                line.text, long, f"line {line.number or number + i + 1}"
            )
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
        sentences = [sentence for document in documents for sentence in document]
        self.system.encode(sentences, search, batch_tokens)
        for batch in rounds(documents, batch_tokens, one_by_one=self.system.reads_target):
            keys = [(number + sentence.line) * _PARTS + sentence.part for sentence in batch]
            hypotheses = self.system.search(batch, search, nbest, line_seeds(search.seed, keys))
            for sentence, nbest_list in zip(batch, hypotheses, strict=True):
                sentence.ids = nbest_list[0].ids
                translated = tuple(map(self.system.base.translated, nbest_list))
                found[sentence.line][sentence.part] = translated
            self.system.finish(batch)
        return [
            Translation(line.text, join_parts([parts[i] for i in sorted(parts)], nbest, search))
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
            alike = [sentence for sentence in ready if bool(sentence.previous) == has_context]
            yield from by_length(alike, batch_tokens)[::-1]


def by_length(sentences: Sequence[Sentence], batch_tokens: int) -> list[list[Sentence]]:
    """Put sentences of like length together, the shortest first."""
    lengths = np.array([len(sentence.example.source) for sentence in sentences], dtype=np.int64)
    return [[sentences[i] for i in batch] for batch in token_batches([lengths], batch_tokens)]


class Pair(NamedTuple):
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
    return [pair for pair in pairs if pair[0].strip() or pair[1].strip()]


def history_of(line: SourceLine, target: str, bert_previous: int) -> list[Pair]:
    """List the sentences of a context, oldest first, and the sentence itself at the end."""
    before: deque[str] = deque(maxlen=bert_previous)
    history = []
    for source, translation in [*paired_context(line), (line.text, target)]:
        history.append(Pair(source, padded(tuple(before), bert_previous), translation))
        if source.strip():
            before.append(source)
    return history
