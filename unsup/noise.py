"""Noise on sentences of ids: words shuffled, dropped and blanked; spans masked."""

import numpy as np
from numpy.typing import NDArray

from bertfused.subwords import Tokenizer
from bertfused.vocab import MASK, Vocabulary
from unsup.config import NoiseConfig

Ids = NDArray[np.integer]


class WordNoise:
    """Noise that moves, drops and blanks whole words.

    A sentence is ids that end in EOS; EOS stays where it is. The three steps, in this order, are
    those of "Unsupervised Machine Translation Using Monolingual Corpora Only" (Lample et al.,
    2018, section 2.3): word i goes to the rank of i + U(0, shuffle) among all; each is dropped
    with probability ``drop``, though one stays; all pieces of a word that is left become MASK with
    probability ``blank``.
    """

    def __init__(self, tokenizer: Tokenizer, config: NoiseConfig) -> None:
        self.config = config
        self.mask = tokenizer.vocabulary.tags[MASK]
        self.symbols = np.array(tokenizer.vocabulary.ordinary)
        self._begins, self._goes_on = word_ends(tokenizer)

    def words(self, ids: Ids) -> NDArray[np.int64]:
        """Number the word of each token; EOS is not one of them."""
        return word_numbers(ids[:-1], self._begins, self._goes_on)

    def __call__(self, ids: Ids, random: np.random.Generator) -> NDArray[np.int64]:
        """Return a noised copy."""
        tokens, words = ids[:-1].astype(np.int64), self.words(ids)
        if not len(tokens):
            return ids.astype(np.int64)
        config, count = self.config, int(words[-1]) + 1
        move, drop, blank = random.random((3, count))
        if config.shuffle:
            ranks = (np.arange(count) + config.shuffle * move).argsort(kind="stable").argsort()
            order = ranks[words].argsort(kind="stable")
            tokens, words = tokens[order], words[order]
        keep = drop >= config.drop
        if not keep.any():
            keep[drop.argmax()] = True
        tokens = np.where(blank[words] < config.blank, self.mask, tokens)
        return np.append(tokens[keep[words]], Vocabulary.eos)

    def span(self, length: int, random: np.random.Generator) -> slice:
        """Choose the span that MASS masks in a sentence of so many ids (Song et al., 2019)."""
        size = span_size(length, self.config.mass)
        start = int(random.integers(length - size + 1))
        return slice(start, start + size)


def span_size(length: int, share: float) -> int:
    """Return how many ids of a sentence MASS masks."""
    return max(1, round(share * length))


def word_ends(tokenizer: Tokenizer) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Say of each symbol whether it begins a word, and whether the next one goes on with it."""
    symbols, kind = tokenizer.vocabulary.symbols, tokenizer.subwords.kind
    begins = np.array([kind != "sentencepiece" or s.startswith("\u2581") for s in symbols])
    goes_on = np.array([kind == "bpe" and s.endswith("@@") for s in symbols])
    begins[list(tokenizer.vocabulary.tags.values())] = True
    return begins, goes_on


def word_numbers(
    tokens: Ids, begins: NDArray[np.bool_], goes_on: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Number the word of each token from 0."""
    is_first = begins[tokens]
    is_first[1:] &= ~goes_on[tokens[:-1]]
    is_first[:1] = True
    return is_first.cumsum() - 1
