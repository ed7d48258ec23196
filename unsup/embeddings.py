"""Subword embeddings to begin with, from a multilingual encoder: like meanings, like rows."""

from collections.abc import Sequence

import numpy as np
import torch

from bertfused.model import FusedTransformer
from bertfused.pretrained import PretrainedEncoder
from unsup.lexicon import encode_words, unit_length


def start_embeddings(
    model: FusedTransformer, texts: Sequence[str], encoder: PretrainedEncoder
) -> int:
    """Let the rows of subwords begin as an encoder's states of them; return how many there are.

    A row is the mean of the states over the subword, read alone, on the first principal components
    of all of them, of length one, as long as a fresh row is on average. States match more words of
    two languages than the encoder's own word table does. Where the model is wider than the encoder
    the other dimensions stay as they are.

    Args:
        model: Has one table of embeddings for all.
        texts: What each subword reads as, by number; "" keeps its row.
    """
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        if text:
            rows.setdefault(text, []).append(row)
    found = encode_words(rows, encoder)
    table = model.encoder.embed.tokens.weight
    _, _, components = np.linalg.svd(found.vectors, full_matrices=False)
    vectors = unit_length(found.vectors @ components[: table.shape[1]].T)
    with torch.no_grad():
        for text, vector in zip(found.words, vectors, strict=True):
            table[rows[text], : len(vector)] = torch.from_numpy(vector)
    return sum(map(len, rows.values()))
