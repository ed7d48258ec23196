"""Where translations of single words come from: a dictionary, or vectors of the words.

Vectors of both languages in one space are a multilingual encoder's (`encode_words`) or are made
from the two texts alone (`unsup.induction`).
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from bertfused.pretrained import PretrainedEncoder
from bertfused.text import read_lines

Matrix = Float[np.ndarray, "source target"]


class Candidate(NamedTuple):
    """A translation of a word ("" leaves it out), with its log-probability in nats."""

    word: str
    log_prob: float


@dataclass(frozen=True)
class Lexicon:
    """Give a few translations of each source word; a word without any is copied."""

    entries: Mapping[str, Sequence[Candidate]]

    def candidates(self, word: str) -> Sequence[Candidate]:
        """Return the translations of a word, the most probable first."""
        return self.entries.get(word) or (Candidate(word, 0.0),)

    def copied(self, words: Iterable[str]) -> Counter[str]:
        """Count the words that have no translation but themselves, or to be left out."""
        return Counter(
            word for word in words if {own.word for own in self.candidates(word)} <= {word, ""}
        )


@dataclass(frozen=True)
class Dictionary:
    """Hold pairs of single words, and the number of lines left out for each reason."""

    pairs: frozenset[tuple[str, str]]
    left_out: Mapping[str, int]

    def __or__(self, other: "Dictionary") -> "Dictionary":
        left_out = Counter(self.left_out) + Counter(other.left_out)
        return Dictionary(self.pairs | other.pairs, left_out)


def read_dictionary(path: Path, *, is_reversed: bool = False) -> Dictionary:
    """Read lines of "headword, tab, translation", lower-cased, what is in brackets taken away.

    Args:
        is_reversed: The headwords are of the target language.

    Raises:
        UserError: If the file cannot be read.
    """
    pairs, left_out = set(), Counter[str]()
    for line in read_lines(path):
        fields = [_bare(field) for field in line.split("\t")]
        if len(fields) != 2 or not all(fields):
            left_out["no pair"] += 1
        elif any(len(field.split()) > 1 for field in fields):
            left_out["several words"] += 1
        else:
            pairs.add((fields[1], fields[0]) if is_reversed else (fields[0], fields[1]))
    return Dictionary(frozenset(pairs), left_out)


def _bare(field: str) -> str:
    return re.sub(r"\([^)]*\)?|\[[^]]*\]?|\.\.\.", " ", field.lower()).strip(" ,;!?")


class Inflections:
    """Tell which words may be forms of one word, by endings that many words exchange.

    Of two words with a common beginning of ``min_stem`` letters or more, the endings ("ing", "s")
    are a rule; its weight is the logarithm of how many pairs of words follow it, against the rule
    that most follow.
    """

    def __init__(self, words: Iterable[str], *, min_stem: int = 3, max_ending: int = 4) -> None:
        self._min_stem, self._max_ending = min_stem, max_ending
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for word in sorted({word for word in words if word.isalpha()}):
            for stem in self._stems(word):
                self._by_stem[stem].append(word)
        rules = Counter(
            (word[len(stem) :], other[len(stem) :])
            for stem, words in self._by_stem.items()
            for word in words
            for other in words
            if word != other and word[: len(stem) + 1] != other[: len(stem) + 1]
        )
        most = max(rules.values(), default=1)
        self._rules = {rule: math.log(count / most) for rule, count in rules.items() if count > 2}

    def related(self, word: str) -> dict[str, float]:
        """Return the weights of the words that may be forms of this one, itself with 0."""
        found = {}
        for stem in self._stems(word):
            for other in self._by_stem.get(stem, ()):
                weight = self._rules.get((word[len(stem) :], other[len(stem) :]))
                if weight is not None:
                    found[other] = weight
        return found | {word: 0.0}

    def _stems(self, word: str) -> Iterator[str]:
        for length in range(max(self._min_stem, len(word) - self._max_ending), len(word) + 1):
            yield word[:length]


def from_dictionary(
    dictionary: Dictionary,
    source_counts: Counter[str],
    target_counts: Counter[str],
    *,
    max_candidates: int = 12,
    inflection_weight: float = 1.0,
    frequency_weight: float = 0.5,
) -> Lexicon:
    """Look the words of the source text up, and the target's forms of what is found.

    A candidate's log-probability is, up to a constant, ``inflection_weight`` times the weights of
    the rules from the word to the headword and from its translation to the form in the target's
    text, plus ``frequency_weight`` times the logarithm of the form's count.
    """
    translations: dict[str, list[str]] = defaultdict(list)
    for headword, translation in sorted(dictionary.pairs):
        translations[headword].append(translation)
    source_forms = Inflections(source_counts.keys() | translations.keys())
    target_forms = Inflections(target_counts.keys() | {target for _, target in dictionary.pairs})
    entries = {}
    for word in source_counts:
        scores: dict[str, float] = {}
        for headword, weight in source_forms.related(word).items():
            for translation in translations.get(headword, ()):
                for form, form_weight in target_forms.related(translation).items():
                    if form in target_counts:
                        score = inflection_weight * (weight + form_weight)
                        score += frequency_weight * math.log(target_counts[form])
                        scores[form] = max(score, scores.get(form, -math.inf))
        if scores:
            entries[word] = normalised(scores, max_candidates)
    return Lexicon(entries)


@dataclass(frozen=True)
class WordVectors:
    """Hold a vector of length one, or of zeros, for each word."""

    words: tuple[str, ...]
    vectors: Float[np.ndarray, "words dim"]


def encode_words(
    words: Iterable[str],
    encoder: PretrainedEncoder,
    language: int = 0,
    *,
    prefix: str = "query: ",
    batch_size: int = 256,
) -> WordVectors:
    """Return the mean of an encoder's states over each word, less the mean of all words.

    Args:
        language: Number of the words' one among the encoder's ``languages``.
        prefix: Read before each word, and left out of the mean; E5's models are trained with one.
    """
    ordered = tuple(sorted(words, key=lambda word: (len(word), word)))  # little padding
    pieces = encoder.reader(language)
    begin = len(pieces.encode(prefix.rstrip()).ids) - 1  # after the prefix, without the end
    found = []
    for start in range(0, len(ordered), batch_size):
        batch = [pieces.encode(prefix + word).ids for word in ordered[start : start + batch_size]]
        ids = torch.full((len(batch), max(map(len, batch))), pieces.pad)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, row_ids in enumerate(batch):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            mask[row, : len(row_ids)] = True
        with torch.no_grad():
            states = encoder(ids, mask, language=torch.full((len(batch),), language))
        for row, row_ids in enumerate(batch):
            own = states[row, begin : len(row_ids) - 1]
            nothing = states.new_zeros(states.shape[2])  # of a word that the tokenizer drops
            found.append((own.mean(0) if len(own) else nothing).numpy())
    vectors = np.stack(found)
    return WordVectors(ordered, unit_length(vectors - vectors.mean(0)))


def unit_length(vectors: Float[np.ndarray, "words dim"]) -> Float[np.ndarray, "words dim"]:
    """Give each row the length one; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-9))


def csls(similarities: Matrix, neighbours: int = 10) -> Matrix:
    """Return cosines less the mean cosine of either word with its nearest neighbours.

    Cross-domain similarity local scaling (Conneau et al., 2018, eq. 3): it holds words back that
    are near to everything. ``2 cos(x, y) - r(x) - r(y)``.
    """
    of_source = _mean_of_largest(similarities, neighbours)
    of_target = _mean_of_largest(similarities.T, neighbours)
    return np.asarray(2 * similarities - of_source[:, None] - of_target[None])


def _mean_of_largest(similarities: Matrix, neighbours: int) -> Float[np.ndarray, "source"]:
    count = min(neighbours, similarities.shape[1])
    return np.asarray(-np.partition(-similarities, count - 1, axis=1)[:, :count].mean(1))


def from_vectors(
    source: WordVectors,
    target: WordVectors,
    target_counts: Counter[str],
    *,
    known: Lexicon | None = None,
    num_neighbours: int = 5,
    max_candidates: int = 12,
    similarity_weight: float = 1.5,
    frequency_weight: float = 0.5,
    least_known: float = -4.0,
) -> Lexicon:
    """Translate into the nearest neighbours by CSLS, and weigh what is known anew.

    Where a word is known, a translation's log-probability there, ``least_known`` for a neighbour
    that is no known translation, gets ``similarity_weight * csls`` added. For an unknown word it
    is this plus ``frequency_weight`` times the logarithm of the target word's count; a word that
    the target's text has too may be copied. Tokens without a letter are always copied.
    """
    closeness = csls(source.vectors @ target.vectors.T)
    places = {word: place for place, word in enumerate(target.words)}
    count = min(num_neighbours, len(places))
    nearest = np.argpartition(-closeness, count - 1, axis=1)[:, :count]
    entries = {} if known is None else dict(known.entries)
    for word, row, near in zip(source.words, closeness, nearest, strict=True):
        if not has_letter(word):
            continue
        neighbours = {target.words[place] for place in near}
        translations = {} if known is None else dict(known.entries.get(word, ()))
        if translations:
            scores = dict.fromkeys(neighbours - {word}, least_known) | translations
        else:
            also = neighbours | ({word} & places.keys())
            scores = {form: frequency_weight * math.log(target_counts[form]) for form in also}
        for form in scores:
            if form in places:
                scores[form] += similarity_weight * float(row[places[form]])
        entries[word] = normalised(scores, max_candidates)
    return Lexicon(entries)


def with_omission(
    lexicon: Lexicon, source_counts: Counter[str], *, num_words: int = 30, log_prob: float = -6.0
) -> Lexicon:
    """Let the most frequent words of the source text, no punctuation, have no translation."""
    words = [word for word in sorted(source_counts) if has_letter(word)]
    frequent = nlargest(num_words, words, key=source_counts.__getitem__)
    left_out = Candidate("", log_prob)
    entries = {word: (*lexicon.candidates(word), left_out) for word in frequent}
    return Lexicon({**lexicon.entries, **entries})


def has_letter(word: str) -> bool:
    """Tell words from numbers and punctuation."""
    return any(character.isalpha() for character in word)


def normalised(scores: Mapping[str, float], max_candidates: int) -> tuple[Candidate, ...]:
    """Return the best as log-probabilities."""
    best = nlargest(max_candidates, sorted(scores), key=scores.__getitem__)
    top = scores[best[0]]
    total = top + math.log(math.fsum(math.exp(scores[word] - top) for word in best))
    return tuple(Candidate(word, scores[word] - total) for word in best)
