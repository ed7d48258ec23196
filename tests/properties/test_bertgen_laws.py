"""Laws of BERTGEN's sequences over random lengths and numbers of regions."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertgen.layout import Sequences, unrolled, with_prefix
from tests.tiny_bertgen import SYMBOLS, make_images, make_lines

LENGTH = st.integers(0, 40)
LINES = st.lists(st.tuples(LENGTH, LENGTH, st.integers(-1, 2)), min_size=1, max_size=6)
SIZES = st.lists(st.integers(1, 50), min_size=3, max_size=3)


def check_places(found: Sequences, rows: int) -> None:
    """Each position stands in one sequence, once, and each mask is a mask."""
    flat = found.places.flatten()[found.flat]
    assert flat.tolist() == list(range(len(found.positions)))
    assert len(set(found.flat.tolist())) == len(found.flat)
    assert found.places.shape[0] == rows
    assert found.num_ends == rows
    masks = found.queries[found.is_query]
    assert (found.ids[masks] == SYMBOLS.mask).all()
    assert int((found.ids == SYMBOLS.mask).sum()) == len(masks)


@given(lines=LINES, sizes=SIZES, seed=st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_no_sequence_loses_its_mask(
    lines: list[tuple[int, int, int]], sizes: list[int], seed: int
) -> None:
    images = make_images(sizes)
    pairs, image_of = [own[:2] for own in lines], [own[2] for own in lines]
    sources, targets = make_lines(pairs, image_of, seed)
    turns = [(i, end) for i, own in enumerate(targets) for end in range(len(own) + 1)]
    found = unrolled(
        [sources[i] for i, _ in turns], [targets[i][:end] for i, end in turns], images, SYMBOLS
    )
    check_places(found, len(turns))
    for row, (i, end) in enumerate(turns):
        size = sizes[image_of[i]] if image_of[i] >= 0 else 0
        text = 3 + len(sources[i].ids) + end + 2
        assert int(found.mask[row, 0].sum()) == text + size + 1
        ids = found.ids[found.places[row, :text]].tolist()
        assert ids[:2] == [sources[i].into, SYMBOLS.cls]
        assert ids[-2:] == [SYMBOLS.mask, SYMBOLS.sep]
        assert ids[3 + len(sources[i].ids) : -2] == targets[i][:end].tolist()
        assert int(found.positions[found.places[row, :text]][-1]) == text - 1


@given(lines=LINES, sizes=SIZES, seed=st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_a_mask_of_the_prefix_mode_sees_what_is_before_it(
    lines: list[tuple[int, int, int]], sizes: list[int], seed: int
) -> None:
    pairs, image_of = [own[:2] for own in lines], [own[2] for own in lines]
    sources, targets = make_lines(pairs, image_of, seed)
    found = with_prefix(sources, targets, make_images(sizes), SYMBOLS)
    check_places(found, len(lines))
    assert found.mask.any(2).all()  # a row without anything to see would not be finite
    for row, target in enumerate(targets):
        size = sizes[image_of[row]] if image_of[row] >= 0 else 0
        before = 3 + len(sources[row].ids) + size + 1
        seen = found.query_mask[row][found.is_query[row]].sum(1)
        assert seen.tolist() == [before + turn + 1 for turn in range(len(target) + 1)]
        for turn in range(len(target) + 1):
            places = found.places[row][found.query_mask[row, turn]]
            text = places[places < len(found.ids)]
            assert int((found.ids[text] == SYMBOLS.mask).sum()) == 1
    assert torch.equal(found.is_query.sum(1), torch.tensor([len(own) + 1 for own in targets]))
    assert np.isfinite(found.positions.numpy()).all()
