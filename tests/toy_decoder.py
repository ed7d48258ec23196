"""Models small enough to enumerate, as decoders for the search."""

from functools import cache

import numpy as np
import torch
from torch import Tensor


@cache
def toy_logits(seed: int, prefix: tuple[int, ...], vocab: int, sharpness: float) -> np.ndarray:
    """Give logits that depend on every token of the prefix."""
    return sharpness * np.random.default_rng([seed, *prefix]).standard_normal(vocab)


class ToyDecoder:
    """A decoder whose cache is the list of prefixes: a wrong re-order gives other logits.

    Args:
        seeds: One model per sentence.
        log_probs: Hand out log-probabilities instead of logits.
    """

    def __init__(
        self,
        seeds: list[int],
        vocab: int = 12,
        sharpness: float = 1.5,
        log_probs: bool = False,
        device: str = "cpu",
    ) -> None:
        self.seeds, self.vocab, self.sharpness = seeds, vocab, sharpness
        self.log_probs, self.device = log_probs, device
        self.prefixes: list[list[tuple[int, ...]]] = [[()] for _ in seeds]
        self.calls: list[str] = []

    def step(self, tokens: Tensor) -> Tensor:
        self.calls.append("step")
        assert tokens.shape == (len(self.seeds), len(self.prefixes[0]))
        self.prefixes = [
            [(*prefix, token) for prefix, token in zip(beams, row, strict=True)]
            for beams, row in zip(self.prefixes, tokens.tolist(), strict=True)
        ]
        logits = [
            # The first token is the start symbol, which the model is not asked about.
            [toy_logits(seed, prefix[1:], self.vocab, self.sharpness) for prefix in beams]
            for seed, beams in zip(self.seeds, self.prefixes, strict=True)
        ]
        result = torch.from_numpy(np.array(logits, dtype=np.float32)).to(self.device)
        return result.log_softmax(-1) if self.log_probs else result

    def reorder(self, parents: Tensor) -> None:
        self.calls.append("reorder")
        assert parents.tolist() != [list(range(len(self.prefixes[0])))] * len(self.seeds)
        self.prefixes = [
            [beams[parent] for parent in row]
            for beams, row in zip(self.prefixes, parents.tolist(), strict=True)
        ]

    def keep(self, sentences: Tensor) -> None:
        self.calls.append("keep")
        assert len(sentences) < len(self.seeds)
        self.seeds = [self.seeds[row] for row in sentences.tolist()]
        self.prefixes = [self.prefixes[row] for row in sentences.tolist()]
