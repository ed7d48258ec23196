"""Noise on the words of a sentence: dropped, blanked, swapped.

"Understanding Back-Translation at Scale" (Edunov et al., EMNLP 2018, section 3) drops and blanks
0.1 each and swaps by up to 3 places.
"""

import numpy as np

from backtranslation.config import NoiseConfig


def add_noise(line: str, number: int, config: NoiseConfig) -> str:
    """Return the noisy line ``number``; at least one word stays.

    White space between words becomes one space. The words that are left are ordered by their place
    plus a draw from U[0, swap + 1).
    """
    words = line.split()
    if not words:
        return line
    random = np.random.default_rng([config.seed, number])
    keep, blank, move = random.random((3, len(words)))
    kept = [i for i in range(len(words)) if keep[i] >= config.drop] or [int(keep.argmax())]
    words = [config.filler if blank[i] < config.blank else words[i] for i in kept]
    if config.swap:
        places = np.arange(len(words)) + (config.swap + 1) * move[kept]
        words = [words[i] for i in places.argsort(kind="stable")]
    return " ".join(words)
