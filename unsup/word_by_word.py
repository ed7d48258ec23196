"""Translate word by word: one word for each, chosen and put in order by a language model.

The search finds the translation with the highest score::

    sum of lexicon log-probabilities  +  lm_weight * log-probability of the language model
    -  swap_cost * inversions  -  insert_cost * words put in

as in phrase-based translation with phrases of one word (Koehn et al., 2003). An inversion is a
pair of source words whose translations stand in the other order.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from unsup.language_model import BEGIN, END, LanguageModel
from unsup.lexicon import Candidate, Lexicon, normalised

# The first four fields of a hypothesis.
_State = tuple[int, int, str, str]


class Hypothesis(NamedTuple):
    """Hold the beginning of a translation.

    Attributes:
        first: All source words before this place are translated, and it is not.
        later: Bit ``i`` says that the source word ``first + i`` is translated too.
        previous: The last word but one.
        last: The last word.
        score: As at the top of this module.
        promise: ``score`` less what the translated source words should have scored, which makes
            hypotheses comparable that have translated different words.
        parent: The hypothesis that this one made longer.
        position: The source word that did it.
        added: Its translation: nothing, a word, or a word after one that was put in.
    """

    first: int
    later: int
    previous: str
    last: str
    score: float
    promise: float
    parent: "Hypothesis | None"
    position: int
    added: tuple[str, ...]


class WordByWord:
    """Search for word-by-word translations.

    Args:
        lm_weight: Of the language model beside the lexicon.
        swap_cost: Of each inversion, in nats.
        insert_cost: Of a target word without source; ``None`` allows none.
        num_fillers: The target's most frequent words that may be put in, where the language model
            has seen them between the same two words.
        reach: The furthest that a word may move ahead; 1 swaps neighbours.
        beam_size: Hypotheses kept for each number of translated words.
    """

    def __init__(
        self,
        lexicon: Lexicon,
        language_model: LanguageModel,
        *,
        lm_weight: float = 1.0,
        swap_cost: float = 1.5,
        insert_cost: float | None = 1.0,
        num_fillers: int = 30,
        reach: int = 1,
        beam_size: int = 10,
    ) -> None:
        self._lexicon, self._language_model = lexicon, language_model
        self._lm_weight, self._swap_cost = lm_weight, swap_cost
        self._insert_cost = 0.0 if insert_cost is None else insert_cost
        self._reach, self._beam_size = reach, beam_size
        count = 0 if insert_cost is None else num_fillers
        self._fillers = _fillers(language_model, count)

    def best(self, words: Sequence[str]) -> Hypothesis:
        """Return the best translation that the beam finds."""
        candidates = [self._lexicon.candidates(word) for word in words]
        expected = [self._expected(options) for options in candidates]
        stack = [Hypothesis(0, 0, BEGIN, BEGIN, 0.0, 0.0, None, -1, ())]
        for _ in words:
            longer: dict[_State, Hypothesis] = {}
            for hypothesis in stack:
                self._grow(hypothesis, candidates, expected, longer)
            stack = nlargest(self._beam_size, longer.values(), key=attrgetter("promise"))
        return max(map(self._ended, stack), key=attrgetter("score"))

    def _expected(self, options: Iterable[Candidate]) -> float:
        """Return the most that a word may score, as far as its neighbours do not matter."""
        unigram, weight = self._language_model.unigram, self._lm_weight
        return max(
            log_prob + (weight * unigram(word) if word else 0.0) for word, log_prob in options
        )

    def _grow(
        self,
        hypothesis: Hypothesis,
        candidates: Sequence[Sequence[Candidate]],
        expected: Sequence[float],
        longer: dict[_State, Hypothesis],
    ) -> None:
        """Translate one more source word in all ways; of equal states the best stays in ``longer``.

        What two hypotheses of one state may yet become, and what that adds, is the same.
        """
        start, later, previous, last, score, promise = hypothesis[:6]
        log_prob, weight = self._language_model.log_prob, self._lm_weight

        def offer(state: _State, total: float, added: tuple[str, ...]) -> None:
            rival = longer.get(state)
            if rival is None or total > rival.score:
                longer[state] = Hypothesis(*state, total, total + due, hypothesis, position, added)

        inversions = 0
        for offset in range(min(self._reach + 1, len(candidates) - start)):
            if later >> offset & 1:
                continue
            position = start + offset
            place = _covered(start, later, offset)
            due = promise - score - expected[position]
            for word, lexical in candidates[position]:
                base = score + lexical - self._swap_cost * inversions
                if not word:
                    offer((*place, previous, last), base, ())
                    continue
                total = base + weight * log_prob(previous, last, word)
                offer((*place, last, word), total, (word,))
                for filler in self._fillers.get((last, word), ()):
                    between = log_prob(previous, last, filler) + log_prob(last, filler, word)
                    total = base - self._insert_cost + weight * between
                    offer((*place, filler, word), total, (filler, word))
            inversions += 1

    def _ended(self, hypothesis: Hypothesis) -> Hypothesis:
        end = self._language_model.log_prob(hypothesis.previous, hypothesis.last, END)
        return hypothesis._replace(score=hypothesis.score + self._lm_weight * end)


def steps(hypothesis: Hypothesis) -> list[Hypothesis]:
    """Return the hypotheses that led to one, each a word longer, the empty one left out."""
    found = []
    while hypothesis.parent is not None:
        found.append(hypothesis)
        hypothesis = hypothesis.parent
    return found[::-1]


def count_choices(lines: Iterable[str], search: WordByWord) -> dict[str, Counter[str]]:
    """Translate lines; count for each source word how often it became which word, or none ("")."""
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        words = line.split()
        for step in steps(search.best(words)):
            chosen = step.added[-1] if step.added else ""
            counts.setdefault(words[step.position], Counter())[chosen] += 1
    return counts


def refined(
    lexicon: Lexicon,
    forward: Mapping[str, Counter[str]],
    backward: Mapping[str, Counter[str]],
    *,
    prior: float = 10.0,
) -> Lexicon:
    """Estimate the probabilities anew from translations, one round of Viterbi training.

    ``p(target | source) = (count + prior * p_old) / (count(source) + prior)``, counted in
    translations of the source text and, the other way round, of the target text. The probability
    of no translation stays.

    Args:
        forward: What `count_choices` gives from source to target.
        backward: What it gives from target to source.
        prior: How many observations the old probabilities are worth.
    """
    counts = {word: Counter(chosen) for word, chosen in forward.items()}
    for target, chosen in backward.items():
        for source, count in chosen.items():
            counts.setdefault(source, Counter())[target] += count
    entries = {}
    for word, old in lexicon.entries.items():
        seen = counts.get(word, Counter[str]())
        scores = {
            candidate: math.log(seen[candidate] + prior * math.exp(log_prob))
            for candidate, log_prob in old
            if candidate
        }
        entries[word] = normalised(scores, len(scores))
        entries[word] += tuple(candidate for candidate in old if not candidate.word)
    return Lexicon(entries)


def translate_lines(lines: Iterable[str], search: WordByWord) -> Iterator[str]:
    """Translate lines of words that are split by spaces."""
    for line in lines:
        yield " ".join(word for step in steps(search.best(line.split())) for word in step.added)


def _covered(start: int, later: int, offset: int) -> tuple[int, int]:
    """Return ``first`` and ``later`` after the source word ``start + offset`` is translated."""
    later |= 1 << offset
    while later & 1:
        start, later = start + 1, later >> 1
    return start, later


def _fillers(
    language_model: LanguageModel, count: int, most: int = 2
) -> Mapping[tuple[str, str], Sequence[str]]:
    """Return which of the ``count`` most frequent words were seen between two words, best first."""
    unigrams = language_model.unigrams
    frequent = set(nlargest(count, sorted(unigrams.keys() - {END}), key=unigrams.__getitem__))
    between: dict[tuple[str, str], dict[str, float]] = {}
    for (before, filler), history in language_model.trigrams.items():
        if filler in frequent:
            log_prob = language_model.bigrams[before].log_probs[filler]
            for after, then in history.log_probs.items():
                between.setdefault((before, after), {})[filler] = log_prob + then
    return {
        pair: nlargest(most, sorted(found), key=found.__getitem__)
        for pair, found in between.items()
    }
