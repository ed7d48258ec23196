"""How a model without parallel text is judged: there and back, copies, wrong languages."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertfused.config import SearchConfig
from bertfused.fit import Validation
from bertfused.metrics import Score, bleu
from bertfused.store import IdStore
from bertfused.subwords import Tokenizer
from bertfused.translate import SourceLine, Translator
from unsup.config import ValidationConfig

_CHUNK = 10_000  # sentences counted at a time


def words_of(line: str) -> list[str]:
    """Return the lower-cased words of a line that are more than punctuation."""
    return [
        word
        for word in line.lower().split()
        if not all(unicodedata.category(character)[0] in "PS" for character in word)
    ]


def copy_rate(sources: Sequence[str], translations: Sequence[str]) -> float:
    """Return the share of the sources' words that stand in their translations too.

    Lower-cased, without punctuation; a word counts as often as it stands in both.
    """
    copied = total = 0
    for source, translation in zip(sources, translations, strict=True):
        words, found = Counter(words_of(source)), Counter(words_of(translation))
        copied += (words & found).total()
        total += words.total()
    return copied / max(total, 1)


def same_rate(sources: Sequence[str], translations: Sequence[str]) -> float:
    """Return the share of the sources that have words and are their own translation."""
    pairs = [
        words_of(source) == words_of(translation)
        for source, translation in zip(sources, translations, strict=True)
        if words_of(source)
    ]
    return sum(pairs) / max(len(pairs), 1)


class LanguageIdentity:
    """Tells two languages apart by the symbols of their monolingual texts.

    A sentence is of the language under whose unigram model, with one added to each count, its
    symbols are likelier.
    """

    def __init__(self, stores: tuple[IdStore, IdStore], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        size = len(tokenizer.vocabulary)
        counts = [1.0 + _counts(store, size) for store in stores]
        first, second = (np.log(own / own.sum()) for own in counts)
        self._evidence: NDArray[np.float64] = second - first

    def evidence(self, line: str) -> float:
        """Return how many nats likelier a line is in language 1 than in language 0."""
        return float(self._evidence[self._tokenizer.encode(line)].sum())

    def is_wrong(self, line: str, language: int) -> bool:
        """Say whether a line looks like the other language."""
        evidence = self.evidence(line)
        return evidence > 0 if language == 0 else evidence < 0


def _counts(store: IdStore, size: int) -> NDArray[np.float64]:
    counts = np.zeros(size)
    for start in range(0, len(store), _CHUNK):
        rows = range(start, min(start + _CHUNK, len(store)))
        counts += np.bincount(np.concatenate([store[row] for row in rows]), minlength=size)
    return counts


@dataclass(frozen=True)
class _Direction:
    """What was found of one direction."""

    name: str
    round_trip: float
    copied: float
    same: float
    wrong: float
    bleu: Score | None

    @property
    def values(self) -> dict[str, float | str]:
        measured = {
            "round_trip": self.round_trip,
            "copied": self.copied,
            "same": self.same,
            "wrong_language": self.wrong,
            **({} if self.bleu is None else {"bleu": self.bleu.value}),
        }
        values: dict[str, float | str] = {
            f"valid_{key}_{self.name}": value for key, value in measured.items()
        }
        return values if self.bleu is None else {**values, "valid_signature": self.bleu.signature}


class RoundTrip:
    """A ``fit.Validator``: monolingual lines there and back, pairs where there are some.

    A line whose translation looks like its own language comes back as nothing: a model that copies
    would have the best round trip of all.

    Args:
        translators: From language 0 into 1, and from 1 into 0.
        lines: Monolingual lines of each language.
        dev: Pairs, the source side in language 0.
    """

    def __init__(
        self,
        config: ValidationConfig,
        languages: tuple[str, str],
        translators: tuple[Translator, Translator],
        identity: LanguageIdentity,
        lines: tuple[list[str], list[str]],
        dev: tuple[list[str], list[str]] | None,
        search: SearchConfig,
    ) -> None:
        self.config, self.languages, self.translators = config, languages, translators
        self.identity, self.lines, self.dev, self.search = identity, lines, dev, search

    @property
    def translates(self) -> bool:
        return False

    @property
    def criterion(self) -> str:
        return "dev BLEU" if self.config.select == "bleu" else "round-trip BLEU"

    def validate(self, step: int, lines: Sequence[SourceLine]) -> Validation:
        """Translate in both directions with the weights as they are."""
        found = [self._direction(language) for language in range(2)]
        values: dict[str, float | str] = {}
        for direction in found:
            values |= direction.values
        of_pairs = [direction.bleu.value for direction in found if direction.bleu is not None]
        chosen = of_pairs if self.config.select == "bleu" else [d.round_trip for d in found]
        problem = self._problem(found) if step >= self.config.guard_from else None
        return Validation(sum(chosen) / 2, "; ".join(_describe(found)), values, problem)

    def _problem(self, found: Sequence[_Direction]) -> str | None:
        """Say that a model copies, or does not leave the language of the source."""
        config = self.config
        for own in found:
            if own.copied > config.max_copied:
                return (
                    f"the model copies: {own.copied:.0%} of the source's words stand in its "
                    f"translations {own.name}, more than validation.max_copied = "
                    f"{config.max_copied}; denoising alone does this, and a start that brings no "
                    "word of one language near one of the other"
                )
            if own.wrong > config.max_wrong:
                return (
                    f"{own.wrong:.0%} of the translations {own.name} look like the language of "
                    f"the source, more than validation.max_wrong = {config.max_wrong}"
                )
        return None

    def _names(self) -> list[str]:
        first, second = self.languages
        return [f"{first}-{second}", f"{second}-{first}"]

    def _direction(self, language: int) -> _Direction:
        sources = self.lines[language]
        there = self._translate(sources, language)
        wrong = [self.identity.is_wrong(line, 1 - language) for line in there]
        back = self._translate(there, 1 - language)
        kept = ["" if is_wrong else line for line, is_wrong in zip(back, wrong, strict=True)]
        score = None
        if self.dev is not None:
            translations = self._translate(self.dev[language], language)
            score = bleu(translations, self.dev[1 - language])
        return _Direction(
            self._names()[language],
            bleu(kept, sources).value,
            copy_rate(sources, there),
            same_rate(sources, there),
            sum(wrong) / len(wrong),
            score,
        )

    def _translate(self, lines: Sequence[str], language: int) -> list[str]:
        translations = self.translators[language].translate(lines, self.search)
        return [translation.text for translation in translations]


def _describe(found: Sequence[_Direction]) -> Iterator[str]:
    for own in found:
        score = "" if own.bleu is None else f" BLEU {own.bleu.value:.2f},"
        yield (
            f"{own.name}{score} round trip {own.round_trip:.2f}, {own.copied:.0%} copied, "
            f"{own.wrong:.0%} in the wrong language"
        )
