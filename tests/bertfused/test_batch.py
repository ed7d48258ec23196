import doctest
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertfused import batch as module
from bertfused.batch import (
    Batch,
    BertIds,
    Corpora,
    Example,
    collate,
    drawn_batches,
    pad_ids,
    padding_share,
    token_batches,
)

T, F = True, False
Ids = NDArray[np.int64]


def listed(tensor: Tensor | None) -> list[object]:
    assert tensor is not None
    return tensor.tolist()


def test_examples_in_the_documentation() -> None:
    assert doctest.testmod(module).failed == 0


# Collation


def test_rows_are_padded_on_the_right() -> None:
    ids, mask = pad_ids([[5, 6, 7], [8], np.array([9, 10], dtype=np.int32)], 1)
    assert ids.tolist() == [[5, 6, 7], [8, 1, 1], [9, 10, 1]]
    assert mask.tolist() == [[T, T, T], [T, F, F], [T, T, F]]
    assert ids.dtype == torch.int64


def test_a_batch_by_hand() -> None:
    """The decoder's input is the target shifted by one, EOS first."""
    batch = collate([Example([5, 6, 2], [7, 2]), Example([8, 2], [9, 10, 11, 2])])
    assert listed(batch.source) == [[5, 6, 2], [8, 2, 1]]
    assert listed(batch.source_mask) == [[T, T, T], [T, T, F]]
    assert listed(batch.target) == [[7, 2, 1, 1], [9, 10, 11, 2]]
    assert listed(batch.target_mask) == [[T, T, F, F], [T, T, T, T]]
    shifted = batch.decoder_input
    assert shifted is not None
    assert shifted[0, :2].tolist() == [2, 7]
    assert shifted[1].tolist() == [2, 9, 10, 11]
    assert (batch.bert, batch.bert_mask, batch.bert_segments, batch.bert_states) == (None,) * 4
    assert (batch.tokens, batch.positions) == (11, 14)


def test_a_batch_without_targets() -> None:
    batch = collate([Example([5, 6, 2]), Example([2])])
    assert (batch.target, batch.target_mask, batch.decoder_input) == (None, None, None)
    assert (batch.tokens, batch.positions) == (4, 6)


def test_wordpieces_and_their_segments_by_hand() -> None:
    """Padding id 3, [SEP] 9; the sentence is segment 1 where a context stands before it."""
    examples = [
        Example([5, 2], bert=[8, 5, 9, 6, 6, 9, 7, 9]),
        Example([6, 2], bert=[8, 4, 9]),
    ]
    batch = collate(examples, BertIds(pad=3, separator=9))
    assert listed(batch.bert) == [[8, 5, 9, 6, 6, 9, 7, 9], [8, 4, 9, 3, 3, 3, 3, 3]]
    assert listed(batch.bert_mask) == [[T] * 8, [T, T, T, F, F, F, F, F]]
    assert listed(batch.bert_segments) == [[0, 0, 0, 0, 0, 0, 1, 1], [0] * 8]
    assert collate(examples, BertIds(pad=3)).bert_segments is None


@pytest.mark.parametrize(
    ("ids", "segments"),
    [
        ([8, 9], [0, 0]),  # an empty sentence
        ([8, 9, 9], [0, 0, 1]),  # an empty context and an empty sentence
        ([8, 9, 5, 9], [0, 0, 1, 1]),  # an empty context
        ([8, 5, 9, 9], [0, 0, 0, 1]),
        ([5, 6], [0, 0]),  # the middle of a long sentence
        ([5, 9, 6, 9, 7, 9], [0, 0, 0, 0, 1, 1]),
    ],
)
def test_segments_begin_after_the_last_separator_but_one(
    ids: list[int], segments: list[int]
) -> None:
    assert BertIds(pad=0, separator=9).segments(np.array(ids)).tolist() == segments


def test_cached_states_are_padded_with_zeros() -> None:
    states = [torch.ones(3, 2), 2 * torch.ones(1, 2)]
    examples = [Example([5, 2], bert=[8] * len(own), bert_states=own) for own in states]
    batch = collate(examples, BertIds(pad=0))
    assert listed(batch.bert_states) == [[[1, 1]] * 3, [[2, 2], [0, 0], [0, 0]]]
    assert listed(batch.bert_mask) == [[T, T, T], [T, F, F]]


def test_a_batch_moves_as_a_whole() -> None:
    example = Example([5, 2], [6, 2], [8, 9], torch.ones(2, 3), languages=(1, 0))
    moved = collate([example], BertIds(pad=0, separator=9)).to(torch.device("meta"))
    assert isinstance(moved, Batch)
    assert {value.device.type for value in vars(moved).values()} == {"meta"}


# Token batches


def realistic(count: int = 3000, seed: int = 1) -> list[Ids]:
    """Target, source and wordpiece lengths that hang together as those of Multi30k do."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(2.6, 0.5, count), 1, 100).astype(np.int64)
    target = np.clip(source * rng.normal(1.0, 0.15, count), 1, 120).astype(np.int64)
    return [target, source, source + rng.integers(2, 6, count)]


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 300, 4096])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("most", [None, 7])
def test_laws_of_token_batches(streams: int, budget: int, shuffled: bool, most: int | None) -> None:
    lengths = realistic(500)[:streams]
    generator = np.random.default_rng(3) if shuffled else None
    batches = token_batches(lengths, budget, generator=generator, max_sentences=most)
    assert sorted(np.concatenate(batches).tolist()) == list(range(500))
    for batch in batches:
        longest = max(int(own[batch].max()) for own in lengths[:2])
        assert len(batch) == 1 or len(batch) * longest <= budget
        assert most is None or len(batch) <= most


def test_a_batch_is_as_full_as_the_order_allows() -> None:
    """No two neighbouring batches of an unshuffled epoch would fit into one."""
    lengths = realistic(500)
    batches = token_batches(lengths, 300)
    for first, second in pairwise(batches):
        enlarged = np.append(first, second[0])
        assert len(enlarged) * max(int(own[enlarged].max()) for own in lengths[:2]) > 300


@pytest.mark.parametrize("seed", [1, 2])
def test_padding_of_sentences_is_below_five_per_cent(seed: int) -> None:
    """Source and target together; the wordpieces, of which nothing is asked, below ten."""
    target, source, bert = realistic(100_000, seed)
    batches = token_batches([target, source, bert], 4096, generator=np.random.default_rng(seed))
    real = target.sum() + source.sum()
    padded = sum(len(b) * (int(target[b].max()) + int(source[b].max())) for b in batches)
    assert 1 - real / padded < 0.05
    assert padding_share(iter(batches), bert) < 0.10


def test_padding_share_by_hand() -> None:
    lengths = np.array([1, 3, 2, 2])
    batches = [np.array([0, 1]), np.array([2, 3])]
    assert padding_share(iter(batches), lengths) == pytest.approx(0.2)  # 8 of 10 are real
    assert padding_share(iter([]), lengths) == 1


def test_the_second_stream_goes_up_and_down_in_turn() -> None:
    """At the seam between two target lengths the neighbours' sources are alike."""
    target = np.array([2, 2, 2, 3, 3, 3, 4, 4, 4])
    source = np.array([5, 1, 3, 1, 5, 3, 3, 1, 5])
    (order,) = token_batches([target, source], 1000)
    assert target[order].tolist() == [2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert source[order].tolist() == [1, 3, 5, 5, 3, 1, 1, 3, 5]


def test_the_generator_alone_decides_the_order() -> None:
    lengths = realistic(400)

    def order(seed: int) -> list[list[int]]:
        generator = np.random.default_rng(seed)
        return [batch.tolist() for batch in token_batches(lengths, 300, generator=generator)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(map(len, order(1))) == sorted(map(len, order(2)))


def test_without_a_generator_short_sentences_come_first() -> None:
    lengths = realistic(400)
    order = np.concatenate(token_batches(lengths, 300))
    assert lengths[0][order].tolist() == sorted(lengths[0].tolist())
    ties = token_batches([np.array([2, 2, 1, 2])], 100)
    assert [batch.tolist() for batch in ties] == [[2, 0, 1, 3]]


def test_a_shuffled_epoch_mixes_short_and_long_batches() -> None:
    lengths = realistic(2000)
    batches = token_batches(lengths, 500, generator=np.random.default_rng(1))
    means = [float(lengths[0][batch].mean()) for batch in batches]
    rises = sum(a < b for a, b in pairwise(means))
    assert 0.35 < rises / len(means) < 0.65


def test_an_example_over_the_budget_stands_alone() -> None:
    batches = token_batches([np.array([3, 50, 3])], 10)
    assert [batch.tolist() for batch in batches] == [[0, 2], [1]]


def test_the_longer_side_counts() -> None:
    target, source = np.array([2, 2, 2, 2]), np.array([5, 5, 5, 5])
    assert [len(batch) for batch in token_batches([target, source], 10)] == [2, 2]
    # the wordpieces do not
    wordpieces = np.array([50] * 4)
    assert [len(b) for b in token_batches([target, source, wordpieces], 20)] == [4]


def test_no_examples_give_no_batches() -> None:
    assert token_batches([np.array([], dtype=np.int64)], 10) == []


# Corpora


def test_an_epoch_passes_through_each_corpus_by_its_weight() -> None:
    corpora = Corpora([3, 2, 4, 0], [2.0, 1.0, 0.5, 3.0])
    parts = []
    for seed in range(20):
        epoch = corpora.epoch(np.random.default_rng(seed)).tolist()
        assert epoch[:8] == [0, 0, 1, 1, 2, 2, 3, 4]
        assert len(set(epoch[8:])) == 2
        parts += epoch[8:]
    assert set(parts) == {5, 6, 7, 8}  # another half in every epoch
    assert len(Corpora([100], [1.25]).epoch(np.random.default_rng(1))) == 125


def test_batches_of_weighed_corpora() -> None:
    lengths = [np.array([3, 5, 4]), np.array([3, 3, 3])]
    corpora = Corpora([1, 2], [3.0, 1.0])
    batches = drawn_batches(lengths, 8, np.random.default_rng(1), corpora)
    assert sorted(np.concatenate(batches).tolist()) == [0, 0, 0, 1, 2]
    assert all(len(batch) * max(lengths[0][batch]) <= 8 for batch in batches)
    in_order = drawn_batches(lengths, 8, None, corpora)
    assert sorted(np.concatenate(in_order).tolist()) == [0, 1, 2]


def test_groups_are_counted_in_the_corpus_in_which_they_begin() -> None:
    assert Corpora([3, 0, 2], [1.0, 2.0, 3.0]).of_groups([0, 1, 3]) == Corpora(
        [2, 0, 1], [1.0, 2.0, 3.0]
    )
