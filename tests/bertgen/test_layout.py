import numpy as np
import torch

from bertgen.layout import Source, last_with_prefix, prefixes, unrolled, with_prefix
from tests.tiny_bertgen import SYMBOLS, make_images, make_lines

IDS = np.array([10, 11], dtype=np.int64)


def test_a_sequence_by_hand() -> None:
    """[TO] [CLS] 10 11 [SEP] 20 [MASK] [SEP] | image, 2 regions | [END]; and one without image."""
    images = make_images([2, 3])
    sources = [Source(IDS, 5, 1), Source(IDS[:0], 6)]
    targets = [np.array([20]), np.array([], dtype=np.int64)]
    laid = unrolled(sources, targets, images, SYMBOLS)
    assert laid.ids.tolist() == [5, 2, 10, 11, 3, 20, 4, 3, 6, 2, 3, 4, 3]
    assert laid.image.tolist() == [1] * 8 + [-1] * 5
    assert laid.regions.tolist() == [2, 3, 4]
    assert laid.positions.tolist() == [*range(8), *range(5), 8, 8, 8, 9, 6]
    assert laid.places.tolist()[0] == [*range(8), 13, 14, 15, 16]
    assert laid.places.tolist()[1][:6] == [*range(8, 13), 17]
    assert laid.mask[1, 0].tolist() == [True] * 6 + [False] * 6
    assert laid.places.flatten()[laid.flat].tolist() == list(range(18))
    assert laid.queries.tolist() == [[6], [11]]
    assert laid.num_ends == 2


def test_the_prefix_mode_by_hand() -> None:
    """[TO] [CLS] [SEP] 20 21 [MASK] [MASK] [MASK] | image | [END]: who sees whom."""
    laid = with_prefix([Source(IDS[:0], 5, 0)], [np.array([20, 21])], make_images([1]), SYMBOLS)
    assert laid.ids.tolist() == [5, 2, 3, 20, 21, 4, 4, 4]
    assert laid.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 3, 4]
    assert laid.queries.tolist() == [[5, 6, 7]]
    before = "1110000011"
    rows = [before, before, before, "1111000011", "1111100011"]
    rows += ["1110010011", "1111001011", "1111100111", before, before]
    assert ["".join(str(int(own)) for own in row) for row in laid.mask[0].tolist()] == rows
    assert torch.equal(laid.query_mask[0], laid.mask[0, 5:8])


def test_the_last_prediction_alone() -> None:
    sources, targets = make_lines([(2, 3), (4, 0), (0, 5)], [0, -1, 1])
    images = make_images([2, 1])
    every = with_prefix(sources, targets, images, SYMBOLS)
    last = last_with_prefix(sources, targets, images, SYMBOLS)
    for row, target in enumerate(targets):
        assert last.queries[row].tolist() == [every.queries[row, len(target)]]
        assert torch.equal(last.query_mask[row, 0], every.query_mask[row, len(target)])


def test_what_a_prefix_is() -> None:
    sources, _ = make_lines([(2, 3), (4, 0)], [0, -1])
    laid = prefixes(sources, make_images([2]), SYMBOLS)
    assert laid.queries.shape == (2, 0)
    assert laid.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 5, 5, 6, 8]
