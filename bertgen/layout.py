"""What the model reads: sequences of text, regions and [END], laid out without padding.

Bidirectional (Mitzalis et al., 2021), a sequence for each token y_t that is to be written::

    [TO_XX] [CLS] source [SEP] y_1 .. y_t-1 [MASK] [SEP] | image, region_1 .. region_K | [END]

The prefix mode, a departure that a model has to be trained with: one sequence for all tokens, with
a mask beside each place. Source, regions and [END] see each other, y_t what is before it, and
[MASK]_t what y_t would see, and itself::

    [TO_XX] [CLS] source [SEP] | regions | [END] | y_1 .. y_n | [MASK]_1 .. [MASK]_n+1

Text has the positions 0, 1, ...; all regions share the one after the text (after the source, in
the prefix mode), [END] has the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Symbols:
    """Numbers of the symbols that no text has.

    Attributes:
        into: Of [TO_XX], by language.
    """

    cls: int
    sep: int
    mask: int
    stop: int
    pad: int
    into: dict[str, int]


@dataclass(frozen=True)
class Images:
    """The regions of some images, one image after the other; each begins with the whole of it.

    Attributes:
        features: Of each region; the whole image has the mean of its regions'.
        boxes: x1, y1, x2, y2 as shares of the image's width and height.
        first: Row in which each image begins.
        sizes: Regions of each image, the whole one counted.
    """

    features: Float[Tensor, "regions feature_dim"]
    boxes: Float[Tensor, "regions 4"]
    first: Int[Tensor, " images"]
    sizes: Int[Tensor, " images"]

    def to(self, device: torch.device) -> "Images":
        return Images(*(getattr(self, own.name).to(device) for own in fields(self)))

    @staticmethod
    def none(feature_dim: int) -> "Images":
        """Return no images."""
        nothing = torch.zeros(0, dtype=torch.long)
        return Images(torch.zeros(0, feature_dim), torch.zeros(0, 4), nothing, nothing)


@dataclass(frozen=True)
class Sequences:
    """Sequences whose positions are packed: all text, then all regions, then all [END].

    Attributes:
        ids: Of the text positions, sequence after sequence.
        image: Beside each text position, the number of its image; -1 for none.
        regions: The row of ``Images`` at each region's position.
        positions: The number of each position in its sequence, for the position embedding.
        places: Where the positions of each sequence lie; any at padding.
        flat: Where each position lies among the flattened ``places``.
        mask: What each position of a sequence sees; one row for all of them where that is alike.
        queries: Where the predicted positions of each sequence lie; any at padding.
        is_query: False at padding.
        query_mask: What each of these sees.
    """

    ids: Int[Tensor, " text"]
    image: Int[Tensor, " text"]
    regions: Int[Tensor, " objects"]
    positions: Int[Tensor, " positions"]
    places: Int[Tensor, "sequences length"]
    flat: Int[Tensor, " positions"]
    mask: Bool[Tensor, "sequences #length length"]
    queries: Int[Tensor, "sequences predicted"]
    is_query: Bool[Tensor, "sequences predicted"]
    query_mask: Bool[Tensor, "sequences #predicted length"]

    def to(self, device: torch.device) -> "Sequences":
        return Sequences(*(getattr(self, own.name).to(device) for own in fields(self)))

    @property
    def num_ends(self) -> int:
        return len(self.positions) - len(self.ids) - len(self.regions)


@dataclass(frozen=True)
class Source:
    """What is to be put into words.

    Attributes:
        ids: Of a sentence, without symbols; none of a caption.
        into: Number of [TO_XX].
        image: Number of the image beside it among ``Images``, -1 for none.
    """

    ids: Ids
    into: int
    image: int = -1


def unrolled(
    sources: Sequence[Source], targets: Sequence[Ids], images: Images, symbols: Symbols
) -> Sequences:
    """Lay out sequences that each predict the token after a target's beginning.

    Args:
        targets: What is written so far of each.
    """
    texts = []
    for source, target in zip(sources, targets, strict=True):
        head = (source.into, symbols.cls, *source.ids, symbols.sep)
        texts.append(np.array((*head, *target, symbols.mask, symbols.sep), dtype=np.int64))
    lengths = np.array([len(text) for text in texts])
    packed = _pack(texts, [source.image for source in sources], images)
    at_mask = np.cumsum(lengths)[:, None] - 2
    real = packed.is_real[:, None]
    return packed.sequences(real, at_mask, np.ones_like(at_mask, dtype=bool), real)


def with_prefix(
    sources: Sequence[Source], targets: Sequence[Ids], images: Images, symbols: Symbols
) -> Sequences:
    """Lay out sequences that each predict all tokens of a target, and [STOP]."""
    texts, heads, sizes = [], [], []
    for source, target in zip(sources, targets, strict=True):
        before = (source.into, symbols.cls, *source.ids, symbols.sep)
        masks = [symbols.mask] * (len(target) + 1)
        texts.append(np.array((*before, *target, *masks), dtype=np.int64))
        heads.append(len(before))
        sizes.append(len(target))
    packed = _pack(texts, [source.image for source in sources], images)
    # The turn of each place: 0 before all, 2t of y_t, 2t - 1 of [MASK]_t; padding is seen by none.
    turns = np.zeros(packed.places.shape, dtype=np.int64)
    is_mask = np.zeros(packed.places.shape, dtype=bool)
    queries = np.zeros((len(texts), max(sizes) + 1), dtype=np.int64)
    is_query = np.zeros(queries.shape, dtype=bool)
    rows = np.zeros(queries.shape, dtype=np.int64)
    positions = packed.positions
    for row, (head, size) in enumerate(zip(heads, sizes, strict=True)):
        at = slice(head + size, head + 2 * size + 1)
        turns[row, head : head + size] = 2 * np.arange(1, size + 1)
        turns[row, at] = 2 * np.arange(1, size + 2) - 1
        is_mask[row, at] = True
        queries[row, : size + 1] = packed.places[row, at]
        rows[row, : size + 1] = np.arange(at.start, at.stop)
        is_query[row, : size + 1] = True
        positions[packed.places[row, at]] = head + np.arange(size + 1)
        others = packed.places[row, at.stop :][packed.is_real[row, at.stop :]]
        positions[others[:-1]], positions[others[-1]] = head, head + 1
    is_seen = packed.is_real & ~is_mask
    mask = is_seen[:, None] & (turns[:, None] <= turns[:, :, None])
    mask |= np.eye(mask.shape[1], dtype=bool) & is_mask[:, None]
    query_mask = np.take_along_axis(mask, rows[:, :, None], axis=1)
    return packed.sequences(mask, queries, is_query, query_mask)


def last_with_prefix(
    sources: Sequence[Source], targets: Sequence[Ids], images: Images, symbols: Symbols
) -> Sequences:
    """Lay out sequences of the prefix mode that each predict the token after the target only."""
    found = with_prefix(sources, targets, images, symbols)
    last = found.is_query.sum(1, keepdim=True) - 1
    rows = last[:, :, None].expand(-1, -1, found.query_mask.size(2))
    return replace(
        found,
        queries=found.queries.gather(1, last),
        is_query=torch.ones_like(last, dtype=torch.bool),
        query_mask=found.query_mask.gather(1, rows),
    )


def prefixes(sources: Sequence[Source], images: Images, symbols: Symbols) -> Sequences:
    """Lay out what the sequences of the prefix mode begin with; nothing is predicted."""
    texts = [
        np.array((source.into, symbols.cls, *source.ids, symbols.sep), dtype=np.int64)
        for source in sources
    ]
    packed = _pack(texts, [source.image for source in sources], images)
    none = np.zeros((len(texts), 0), dtype=np.int64)
    real = packed.is_real[:, None]
    return packed.sequences(real, none, none.astype(bool), real)


@dataclass(frozen=True)
class _Packed:
    """Packed positions, before it is said which of them see and predict what."""

    ids: Ids
    image: Ids
    regions: Ids
    positions: Ids
    places: Ids
    is_real: NDArray[np.bool_]

    def sequences(
        self,
        mask: NDArray[np.bool_],
        queries: Ids,
        is_query: NDArray[np.bool_],
        query_mask: NDArray[np.bool_],
    ) -> Sequences:
        flat = np.empty(len(self.positions), dtype=np.int64)
        flat[self.places[self.is_real]] = np.flatnonzero(self.is_real)
        arrays = (self.ids, self.image, self.regions, self.positions, self.places, flat)
        rest = (mask, queries, is_query, query_mask)
        return Sequences(*(torch.from_numpy(array) for array in (*arrays, *rest)))


def _pack(texts: Sequence[Ids], image_of: Sequence[int], images: Images) -> _Packed:
    """Put texts, the regions beside them and an [END] for each one after the other."""
    lengths = np.array([len(text) for text in texts])
    first, sizes = images.first.numpy(), images.sizes.numpy()
    counts = np.array([int(sizes[image]) if image >= 0 else 0 for image in image_of])
    regions = [
        np.arange(first[image], first[image] + count)
        for image, count in zip(image_of, counts.tolist(), strict=True)
        if image >= 0
    ]
    text_total, region_total = int(lengths.sum()), int(counts.sum())
    text_start = np.cumsum(lengths) - lengths
    region_start = text_total + np.cumsum(counts) - counts
    places = np.zeros((len(texts), int((lengths + counts).max()) + 1), dtype=np.int64)
    is_real = np.zeros(places.shape, dtype=bool)
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        end = length + count
        places[row, :length] = text_start[row] + np.arange(length)
        places[row, length:end] = region_start[row] + np.arange(count)
        places[row, end] = text_total + region_total + row
        is_real[row, : end + 1] = True
    positions = [
        *(np.arange(length) for length in lengths.tolist()),
        np.repeat(lengths, counts),
        lengths + 1,
    ]
    return _Packed(
        np.concatenate(texts),
        np.repeat(np.array(image_of, dtype=np.int64), lengths),
        np.concatenate(regions) if regions else np.zeros(0, dtype=np.int64),
        np.concatenate(positions),
        places,
        is_real,
    )
