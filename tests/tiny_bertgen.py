"""A small model of BERTGEN with random weights, images and lines for it."""

from collections.abc import Sequence

import numpy as np
import torch

from bertgen.layout import Images, Source, Symbols
from bertgen.model import BertGen

VOCAB, FEATURES = 60, 5
SYMBOLS = Symbols(cls=2, sep=3, mask=4, stop=1, pad=0, into={"ab": 5, "xy": 6})


def make_model(seed: int = 0, **options: object) -> BertGen:
    """Build a model in which every parameter matters."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "model_dim": 12, "layers": 3, "heads": 3, "ffn_dim": 20}
    sizes |= {"feature_dim": FEATURES, "max_positions": 80, "dropout": 0.0}
    model = BertGen(**{**sizes, "attention_dropout": 0.0, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def make_images(sizes: Sequence[int], seed: int = 0) -> Images:
    """Draw images with so many regions, the whole image counted."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    features = torch.randn(total, FEATURES, generator=generator)
    corners = torch.rand(total, 2, 2, generator=generator).sort(1).values.flatten(1)
    counts = torch.tensor(list(sizes), dtype=torch.long)
    first = counts.cumsum(0) - counts
    corners[first] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    return Images(features, corners, first, counts)


def draw_ids(count: int, random: np.random.Generator) -> np.ndarray:
    """Draw words."""
    return random.integers(7, VOCAB, count)


def make_lines(
    lengths: Sequence[tuple[int, int]], image_of: Sequence[int], seed: int = 0
) -> tuple[list[Source], list[np.ndarray]]:
    """Draw sources and targets of so many words, with images beside them."""
    random = np.random.default_rng(seed)
    sources = [
        Source(draw_ids(source, random), 5 + number % 2, image)
        for number, ((source, _), image) in enumerate(zip(lengths, image_of, strict=True))
    ]
    return sources, [draw_ids(target, random) for _, target in lengths]
