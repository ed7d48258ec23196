"""BERTGEN as it is usually computed: padded copies, each with its regions, and logits everywhere.

What ``bertgen`` saves is held against this, in the tests and in ``bertgen_speed.py``. It uses the
model's parameters, and none of its code but the geometry of boxes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from bertgen.layout import Images, Source, Symbols
from bertgen.model import BertGen, Layer, geometry

_IGNORED = -1


def naive_logits(
    model: BertGen, texts: Sequence[Sequence[int]], images: Images, image_of: Sequence[int]
) -> Tensor:
    """Return logits at all text positions of padded rows: [rows, text, vocab].

    Args:
        texts: Of each row, with its symbols and its mask.
        image_of: Number of the image beside each row, -1 for none.
    """
    width = max(map(len, texts))
    sizes = [0 if image < 0 else int(images.sizes[image]) for image in image_of]
    length = max(len(text) + size for text, size in zip(texts, sizes, strict=True)) + 1
    dim = model.end.numel()
    rows, real = [], torch.zeros(len(texts), length, dtype=torch.bool)
    for row, (text, image, size) in enumerate(zip(texts, image_of, sizes, strict=True)):
        start = int(images.first[image]) if image >= 0 else 0
        span = slice(start, start + size)
        given = torch.cat([geometry(images.boxes[span]), images.features[span]], dim=1)
        projection = model.objects.projection
        objects = functional.relu(
            functional.linear(given, projection.weight, projection.bias)
        )  # again for every row
        whole = objects[0] if image >= 0 else torch.zeros(dim, dtype=model.end.dtype)
        words = model.words.weight[list(text)] + _norm(model.objects.text_norm, whole)
        end = len(text)
        embedded = [
            words + model.types.weight[0] + model.positions.weight[:end],
            _norm(model.objects.norm, objects)
            + model.objects.word
            + model.types.weight[2]
            + model.positions.weight[end],
            (model.end + model.types.weight[2] + model.positions.weight[end + 1])[None],
        ]
        x = _norm(model.norm, torch.cat(embedded))
        rows.append(functional.pad(x, (0, 0, 0, length - len(x))))
        real[row, : len(x)] = True
    x = torch.stack(rows)
    for layer in model.stack():
        x = _layer(layer, x, real)
    head, states = model.head, x[:, :width]
    hidden = functional.linear(states, head.transform.weight, head.transform.bias)
    return functional.linear(
        _norm(head.norm, functional.gelu(hidden)), model.words.weight, head.bias
    )


def naive_loss(
    model: BertGen,
    sources: Sequence[Source],
    targets: Sequence[Sequence[int]],
    images: Images,
    symbols: Symbols,
) -> Tensor:
    """Return the sum of the losses of all copies of some lines."""
    texts, labels, image_of = [], [], []
    for source, target in zip(sources, targets, strict=True):
        head = [source.into, symbols.cls, *source.ids.tolist(), symbols.sep]
        for end, label in enumerate([*target, symbols.stop]):
            texts.append([*head, *target[:end], symbols.mask, symbols.sep])
            labels.append(label)
            image_of.append(source.image)
    logits = naive_logits(model, texts, images, image_of)
    wanted = torch.full(logits.shape[:2], _IGNORED)
    for row, (text, label) in enumerate(zip(texts, labels, strict=True)):
        wanted[row, len(text) - 2] = label
    return functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def naive_greedy(
    model: BertGen,
    sources: Sequence[Source],
    images: Images,
    symbols: Symbols,
    max_length: int,
    never: Sequence[int] = (),
) -> list[list[int]]:
    """Write greedily, all rows to the end of the longest."""
    written: list[list[int]] = [[] for _ in sources]
    finished = [False] * len(sources)
    for _ in range(max_length):
        texts = [
            [source.into, symbols.cls, *source.ids, symbols.sep, *own, symbols.mask, symbols.sep]
            for source, own in zip(sources, written, strict=True)
        ]
        logits = naive_logits(model, texts, images, [source.image for source in sources])
        for row, text in enumerate(texts):
            scores = logits[row, len(text) - 2].clone()
            scores[list(never)] = -torch.inf
            best = int(scores.argmax())
            finished[row] |= best == symbols.stop
            written[row].append(best)
        if all(finished):
            break
    return [own[: own.index(symbols.stop)] if symbols.stop in own else own for own in written]


def _layer(layer: Layer, x: Tensor, real: Tensor) -> Tensor:
    queries, keys, values = (
        own.unflatten(2, (layer.heads, -1)).transpose(1, 2)
        for own in _linear(layer.query_key_value, x).chunk(3, dim=2)
    )
    scores = queries @ keys.transpose(2, 3) / queries.size(3) ** 0.5
    weights = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(3)
    attended = (weights @ values).transpose(1, 2).flatten(2)
    x = _norm(layer.attention_norm, x + _linear(layer.output, attended))
    inner = functional.gelu(_linear(layer.up, x))
    return _norm(layer.ffn_norm, x + _linear(layer.down, inner))


def _linear(module: torch.nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, module.weight, module.bias)


def _norm(module: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)
