"""Word translations from two texts alone, neither parallel nor with a dictionary.

Each text gives vectors of its words; a rotation that lays one language's on the other's is found by
self-learning (Artetxe et al., 2018, "A robust self-learning method for fully unsupervised
cross-lingual mappings of word embeddings"). The first guess compares the sorted similarities of a
word to all words of its own language, which are alike for a word and its translation (section
3.2). Departures: what the rotation cannot see, how frequent a word is and where in the sentence
it stands, is added to the similarities all along, without which little text gives no good first
guess; and the frequent words are matched first, the rarer ones join.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from bertfused.errors import UserError
from unsup.lexicon import (
    Lexicon,
    Matrix,
    csls,
    has_letter,
    normalised,
    unit_length,
)


@dataclass(frozen=True)
class TextWords:
    """Hold what a text says of its words, the most frequent first.

    Attributes:
        vectors: From the words around them, of length one.
        log_frequencies: Logarithms of their shares of the text.
        places: Square roots of the shares of their places, in eighths of the sentence.
    """

    words: tuple[str, ...]
    vectors: Float[np.ndarray, "words dim"]
    log_frequencies: Float[np.ndarray, "words"]
    places: Float[np.ndarray, "words places"]


def describe_words(
    lines: Sequence[str],
    *,
    min_count: int = 4,
    max_words: int = 5000,
    dim: int = 100,
    window: int = 5,
) -> TextWords:
    """Describe the most frequent words of a text, those that it has ``min_count`` times or more.

    The vectors are the first ``dim`` left singular vectors of the positive pointwise mutual
    information of words in a window, weighted by the distance's inverse, times the singular values'
    square roots (Levy et al., 2015), with contexts' counts to the power 0.75; centred.
    """
    sentences = [line.split() for line in lines]
    counts = Counter(word for sentence in sentences for word in sentence)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    words = tuple(word for word in frequent if counts[word] >= min_count)
    if not words:
        raise UserError(f"no word stands {min_count} times in a text: too little to match words by")
    index = {word: place for place, word in enumerate(words)}
    ids = [
        np.array([index.get(word, -1) for word in sentence], dtype=int) for sentence in sentences
    ]
    information = _mutual_information(_cooccurrences(ids, len(words), window))
    values, directions = np.linalg.eigh(information @ information.T)
    values, directions = values[::-1][:dim], directions[:, ::-1][:, :dim]
    vectors = np.zeros((len(words), dim))
    vectors[:, : len(values)] = unit_length(directions * np.maximum(values, 0.0) ** 0.25)
    frequencies = np.array([counts[word] for word in words]) / counts.total()
    return TextWords(
        words,
        unit_length(vectors - vectors.mean(0)),
        np.log(frequencies),
        _places(ids, len(words)),
    )


def _cooccurrences(
    ids: Sequence[Int[np.ndarray, "_"]], num_words: int, window: int
) -> Float[np.ndarray, "words contexts"]:
    """Add up 1 / distance over all pairs of words in a window, the sentence's ends a word too."""
    edge, gap = num_words, [-1] * window
    stream = np.concatenate([np.array([edge, *row, edge, *gap]) for row in ids])
    size = num_words + 1
    total = np.zeros(size * size)
    for distance in range(1, window + 1):
        left, right = stream[:-distance], stream[distance:]
        seen = (left >= 0) & (right >= 0)
        total += np.bincount(left[seen] * size + right[seen], minlength=size * size) / distance
    square = total.reshape(size, size)
    return np.asarray((square + square.T)[:-1])


def _mutual_information(
    counts: Float[np.ndarray, "words contexts"],
) -> Float[np.ndarray, "words contexts"]:
    """Return the positive pointwise mutual information of each word with each context."""
    words, contexts = counts.sum(1, keepdims=True), counts.sum(0) ** 0.75
    ratios = counts * contexts.sum() / np.maximum(words * contexts, 1e-12)
    return np.asarray(np.log(np.maximum(ratios, 1.0)))


def _places(
    ids: Sequence[Int[np.ndarray, "_"]], num_words: int, parts: int = 8
) -> Float[np.ndarray, "words places"]:
    counts = np.full((num_words, parts), 0.5)
    for row in ids:
        known = row >= 0
        np.add.at(counts, (row[known], np.arange(len(row))[known] * parts // len(row)), 1)
    return np.asarray(np.sqrt(counts / counts.sum(1, keepdims=True)))


@dataclass(frozen=True)
class Match:
    """Hold how alike each source word and each target word are, by CSLS and what is added to it.

    ``agreement`` is the mean of this over the words that are each other's nearest: the larger, the
    better the match, as far as can be told without a dictionary.
    """

    closeness: Matrix
    agreement: float

    def reversed(self) -> "Match":
        """Return the match from the target's side."""
        return Match(self.closeness.T, self.agreement)


def match_words(
    source: TextWords,
    target: TextWords,
    *,
    seed: int = 0,
    first_words: int = 300,
    most_words: int = 2400,
    num_rounds: int = 20,
    least_kept: float = 0.3,
    frequency_weight: float = 0.2,
    place_weight: float = 2.0,
    other: Matrix | None = None,
) -> Match:
    """Match the words of two texts by self-learning.

    Each round rotates the source's vectors so that those of the pairs found before lie together
    (orthogonal Procrustes), and pairs each word with the nearest of the other language, either way.
    A random part of the similarities is not looked at, less and less from round to round, so that
    a wrong beginning can be left (section 3.3). The ``first_words`` most frequent words of both
    languages are matched first, then twice as many, up to ``most_words``.

    Args:
        num_rounds: For each number of words.
        least_kept: The share of similarities looked at in the first of these rounds.
        frequency_weight: Of the difference of log-frequencies.
        place_weight: Of the overlap of the places in the sentence (Bhattacharyya coefficient).
        other: Added to the similarities, such as those of spelling.
    """
    generator = np.random.default_rng(seed)
    gaps = np.abs(source.log_frequencies[:, None] - target.log_frequencies[None])
    extra = place_weight * (source.places @ target.places.T) - frequency_weight * gaps
    extra = extra if other is None else extra + other
    size = min(first_words, len(source.words), len(target.words))
    likeness = _profiles(source.vectors[:size]) @ _profiles(target.vectors[:size]).T
    pairs = _nearest(csls(likeness) + extra[: likeness.shape[0], : likeness.shape[1]])
    while True:
        for kept in np.linspace(least_kept, 1.0, num_rounds):
            rotated = _rotate(source.vectors, target.vectors, *pairs)
            closeness = csls(rotated[:size] @ target.vectors[:size].T)
            closeness += extra[: closeness.shape[0], : closeness.shape[1]]
            unseen = generator.random(closeness.shape) >= kept
            pairs = _nearest(np.where(unseen, -np.inf, closeness))
        if size >= min(most_words, max(len(source.words), len(target.words))):
            break
        size = min(2 * size, most_words)
    closeness = csls(_rotate(source.vectors, target.vectors, *pairs) @ target.vectors.T) + extra
    forward, backward = closeness.argmax(1), closeness.argmax(0)
    mutual = backward[forward] == np.arange(len(forward))
    return Match(closeness, float(closeness.max(1)[mutual].mean()))


def induced(
    source: TextWords,
    target: TextWords,
    match: Match,
    *,
    max_candidates: int = 10,
    sharpness: float = 10.0,
) -> Lexicon:
    """Translate each word into those that match it best; log-probabilities are by ``sharpness``.

    Tokens without a letter that both texts have are copied.
    """
    shared = {word for word in target.words if not has_letter(word)}
    entries = {}
    for word, row in zip(source.words, match.closeness, strict=True):
        if word not in shared:
            best = np.argsort(-row, kind="stable")[:max_candidates].tolist()
            scores = {target.words[place]: sharpness * float(row[place]) for place in best}
            entries[word] = normalised(scores, max_candidates)
    return Lexicon(entries)


def spelling_similarities(source: Sequence[str], target: Sequence[str]) -> Matrix:
    """Return the cosines of words as bags of two and three letters, for languages with cognates."""
    bags = [[Counter(_letter_groups(word)) for word in words] for words in (source, target)]
    index = {group: i for i, group in enumerate(sorted(set().union(*bags[0], *bags[1])))}
    rows = [np.zeros((len(side), len(index)), dtype=np.float32) for side in bags]
    for side, matrix in zip(bags, rows, strict=True):
        for row, bag in enumerate(side):
            matrix[row, [index[group] for group in bag]] = list(bag.values())
    return np.asarray(unit_length(rows[0]) @ unit_length(rows[1]).T)


def _letter_groups(word: str) -> list[str]:
    marked = f"<{word}>"
    return [marked[i : i + size] for size in (2, 3) for i in range(len(marked) - size + 1)]


def _profiles(vectors: Float[np.ndarray, "words dim"]) -> Float[np.ndarray, "words words"]:
    """Return each word's sorted similarities to all words of its language, as unit vectors.

    They are those of the square root of the matrix of similarities (eq. 2).
    """
    left, values, _ = np.linalg.svd(vectors, full_matrices=False)
    profiles = unit_length(np.sort((left * values) @ left.T, axis=1))
    return unit_length(profiles - profiles.mean(0))


def _nearest(closeness: Matrix) -> tuple[Int[np.ndarray, "pairs"], Int[np.ndarray, "pairs"]]:
    """Pair each word with its nearest, for both languages."""
    sources, targets = map(np.arange, closeness.shape)
    return (
        np.concatenate([sources, closeness.argmax(0)]),
        np.concatenate([closeness.argmax(1), targets]),
    )


def _rotate(
    source: Float[np.ndarray, "sources dim"],
    target: Float[np.ndarray, "targets dim"],
    source_pairs: Int[np.ndarray, "pairs"],
    target_pairs: Int[np.ndarray, "pairs"],
) -> Float[np.ndarray, "sources dim"]:
    left, _, right = np.linalg.svd(source[source_pairs].T @ target[target_pairs])
    return np.asarray(source @ (left @ right))
