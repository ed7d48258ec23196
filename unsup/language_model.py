"""A trigram language model over words: interpolated modified Kneser-Ney (Chen & Goodman, 1999).

With ``c`` the counts of trigrams, and below them the number of different words seen before an
n-gram, an n-gram's probability after its history ``h`` is (section 3, eq. 26)::

    p(w | h) = max(c(h w) - D(c(h w)), 0) / c(h .)  +  gamma(h) p(w | h without its first word)
    gamma(h) = (D1 N1(h) + D2 N2(h) + D3 N3(h)) / c(h .)

``Ni(h)`` is the number of words seen ``i`` times after ``h`` (``N3``: three times or more), and the
discounts come from the number ``n_i`` of n-grams seen ``i`` times::

    Y = n1 / (n1 + 2 n2)    D1 = 1 - 2 Y n2 / n1    D2 = 2 - 3 Y n3 / n2    D3 = 3 - 4 Y n4 / n3

Below the unigrams stands the uniform distribution over all words, the end and one unknown word.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# No word of a line has a space in it, so no text can hold these.
BEGIN, END, UNKNOWN = "<s> ", "</s> ", "<unk> "

# Where a text is too small for the discounts: Kneser and Ney's one discount, at a usual value.
_SMALL_TEXT = (0.75, 0.75, 0.75)


@dataclass(frozen=True)
class History:
    """Hold what may follow one history.

    Attributes:
        log_probs: Of the words seen after it, in nats, the shorter histories' share included.
        backoff: Log of the weight of the shorter history, for all other words.
    """

    log_probs: Mapping[str, float]
    backoff: float


@dataclass(frozen=True)
class LanguageModel:
    """Give log-probabilities of words after the two words before them, in nats.

    A sentence begins after ``BEGIN BEGIN`` and ends with ``END``. Words that the text had not are
    all ``UNKNOWN``.
    """

    trigrams: Mapping[tuple[str, str], History]
    bigrams: Mapping[str, History]
    unigrams: Mapping[str, float]

    def log_prob(self, first: str, second: str, word: str) -> float:
        """Return log p(word | first second)."""
        backoff = 0.0
        history = self.trigrams.get((first, second))
        if history is not None:
            found = history.log_probs.get(word)
            if found is not None:
                return found
            backoff = history.backoff
        history = self.bigrams.get(second)
        if history is not None:
            found = history.log_probs.get(word)
            if found is not None:
                return backoff + found
            backoff += history.backoff
        return backoff + self.unigram(word)

    def unigram(self, word: str) -> float:
        """Return log p(word), whatever stands before it."""
        found = self.unigrams.get(word)
        return self.unigrams[UNKNOWN] if found is None else found

    def sentence_log_prob(self, words: Sequence[str]) -> float:
        """Return the log-probability of a sentence with its end."""
        padded = (BEGIN, BEGIN, *words, END)
        return math.fsum(map(self.log_prob, padded, padded[1:], padded[2:]))

    def perplexity(self, lines: Iterable[str]) -> float:
        """Return the perplexity a word, the ends of sentences counted as words."""
        log_prob, words = 0.0, 0
        for line in lines:
            sentence = line.split()
            log_prob += self.sentence_log_prob(sentence)
            words += len(sentence) + 1
        return math.exp(-log_prob / max(words, 1))


def train_language_model(lines: Iterable[str]) -> LanguageModel:
    """Learn from lines of words that are split by spaces."""
    trigrams: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        padded = (BEGIN, BEGIN, *line.split(), END)
        trigrams.update(zip(padded, padded[1:], padded[2:], strict=False))
    bigrams = Counter(trigram[1:] for trigram in trigrams)
    unigrams = Counter(bigram[1:] for bigram in bigrams)
    vocabulary = {word for (word,) in unigrams} | {END, UNKNOWN}
    uniform = 1 / len(vocabulary)
    alone = _smoothed(unigrams, lambda _, word: uniform).get((), _Smoothed({}, 1.0))
    singles = dict.fromkeys(sorted(vocabulary), alone.rest * uniform) | alone.probabilities
    after_one = _smoothed(bigrams, lambda _, word: singles[word])
    after_two = _smoothed(
        trigrams, lambda history, word: after_one[history[1:]].probabilities[word]
    )
    return LanguageModel(
        trigrams={(h[0], h[1]): found.in_logs() for h, found in after_two.items()},
        bigrams={h[0]: found.in_logs() for h, found in after_one.items()},
        unigrams={word: math.log(probability) for word, probability in singles.items()},
    )


@dataclass(frozen=True)
class _Smoothed:
    """Hold the probabilities of the words seen after a history, and gamma, for the others."""

    probabilities: dict[str, float]
    rest: float

    def in_logs(self) -> History:
        logs = {word: math.log(value) for word, value in self.probabilities.items()}
        return History(logs, math.log(self.rest))


def discounts(counts: Iterable[int]) -> tuple[float, float, float]:
    """Return what is taken from a count of 1, of 2, and of 3 or more (eq. 26)."""
    times = Counter(counts)
    n1, n2, n3, n4 = (times[i] for i in range(1, 5))
    if not (n1 and n2 and n3 and n4):
        return _SMALL_TEXT
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    usable = all(0 < discount < i for i, discount in enumerate(found, start=1))
    return found if usable else _SMALL_TEXT


def _smoothed(
    counts: Counter[tuple[str, ...]], shorter: Callable[[tuple[str, ...], str], float]
) -> dict[tuple[str, ...], _Smoothed]:
    """Interpolate the n-grams of one length, by history.

    Args:
        shorter: Gives the probability of a word after the history without its first word.
    """
    taken = discounts(counts.values())
    by_history: dict[tuple[str, ...], dict[str, int]] = {}
    for ngram, count in counts.items():
        by_history.setdefault(ngram[:-1], {})[ngram[-1]] = count
    smoothed = {}
    for history, words in by_history.items():
        total = sum(words.values())
        rest = math.fsum(taken[min(count, 3) - 1] for count in words.values()) / total
        probabilities = {
            word: (count - taken[min(count, 3) - 1]) / total + rest * shorter(history, word)
            for word, count in words.items()
        }
        smoothed[history] = _Smoothed(probabilities, rest)
    return smoothed
