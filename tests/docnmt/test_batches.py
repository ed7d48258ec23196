import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertfused.batch import Corpora, Example
from bertfused.fit import Examples
from docnmt.batches import DocumentExamples, collate_in_context
from tests.tiny_model import tiny_examples


class Lengths(Examples):
    """A split of which only the lengths are known: of targets, and of sources."""

    def __init__(
        self, targets: list[int], sources: list[int], corpora: Corpora | None = None
    ) -> None:
        self.lengths = [np.array(own, dtype=np.int32) for own in (targets, sources)]
        self.corpora = corpora

    def __len__(self) -> int:
        return len(self.lengths[0])

    def __getitem__(self, i: int) -> Example:
        return Example([*range(1, self.lengths[1][i]), 2], [*range(1, self.lengths[0][i]), 2])


def documents(
    docids: str, *, sentences: int = 2, targets: list[int] | None = None, **options: bool
) -> DocumentExamples:
    """Make a split; each character of ``docids`` is the document of a sentence, "-" is none."""
    ids = [own.replace("-", "") for own in docids]
    split = Lengths(targets or [3] * len(ids), [3] * len(ids))
    return DocumentExamples(split, ids, sentences, **options)


def lists(batches: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


# Which sentences stand before which


def test_previous_sentences_are_those_of_the_document() -> None:
    split = documents("aaaabba")
    found = [split.previous(i) for i in range(7)]
    assert found == [(), (0,), (0, 1), (1, 2), (), (4,), ()]
    assert len(split) == 7
    assert split[3].source == [1, 2, 2]


def test_a_sentence_without_a_document_has_no_context_and_is_none() -> None:
    split = documents("--a-a")
    assert [split.previous(i) for i in range(5)] == [()] * 5


def test_a_blank_sentence_is_no_context() -> None:
    """As in translating, where one is blank if it has no source text."""
    split = DocumentExamples(Lengths([3, 3, 1, 3], [3, 1, 3, 3]), ["a"] * 4, 2)
    assert [split.previous(i) for i in range(4)] == [(), (0,), (0,), (0, 2)]


@given(
    st.lists(st.sampled_from("aabc-"), max_size=30).map("".join),
    st.integers(1, 5),
)
def test_context_is_what_a_reader_of_lines_remembers(docids: str, sentences: int) -> None:
    split = documents(docids, sentences=sentences)
    before: list[int] = []
    for i, own in enumerate(docids):
        if own == "-" or (i and own != docids[i - 1]):
            before = []
        assert list(split.previous(i)) == before[-sentences:]
        before.append(i)


# Batches


def test_documents_fill_batches_in_order() -> None:
    split = documents("aaabbc", targets=[3, 3, 2, 2, 6, 1])
    assert lists(split.batches(6)) == [[0, 1], [2, 3], [4], [5]]
    assert lists(split.batches(100)) == [[0, 1, 2, 3, 4, 5]]
    assert lists(split.batches(1)) == [[i] for i in range(6)]


def test_the_longer_side_counts() -> None:
    split = DocumentExamples(Lengths([1, 1, 5], [4, 4, 1]), ["a"] * 3, 1)
    # 1 + 1 and 4 + 4; then 1 + 1 + 5 and 4 + 4 + 1
    assert lists(split.batches(8)) == [[0, 1], [2]]
    assert lists(split.batches(9)) == [[0, 1, 2]]


def test_what_has_no_context_is_left_out_of_training_only() -> None:
    split = documents("aab-cc", only_in_context=True)
    assert lists(split.batches(100)) == [[0, 1, 2, 3, 4, 5]]
    found = np.concatenate(split.batches(100, np.random.default_rng(1)))
    assert sorted(found.tolist()) == [1, 5]
    nothing = documents("a-b", only_in_context=True)
    assert nothing.batches(100, np.random.default_rng(1)) == []


def test_no_sentences_make_no_batches() -> None:
    assert documents("").batches(10) == []
    assert documents("").batches(10, np.random.default_rng(1)) == []


@given(
    st.lists(st.sampled_from("aaabc-"), min_size=1, max_size=30).map("".join),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=30, max_size=30),
    st.integers(1, 30),
    st.booleans(),
    st.none() | st.integers(0, 99),
)
def test_every_sentence_is_in_one_batch_within_the_budget(
    docids: str,
    lengths: list[tuple[int, int]],
    budget: int,
    only_in_context: bool,
    seed: int | None,
) -> None:
    targets, sources = (list(own)[: len(docids)] for own in zip(*lengths, strict=True))
    ids = [own.replace("-", "") for own in docids]
    split = DocumentExamples(Lengths(targets, sources), ids, 2, only_in_context=only_in_context)

    def draw() -> list[list[int]]:
        return lists(split.batches(budget, None if seed is None else np.random.default_rng(seed)))

    found = draw()
    assert found == draw()
    everything = [i for batch in found for i in batch]
    expected = list(range(len(docids)))
    if only_in_context and seed is not None:
        expected = [i for i in expected if split.previous(i)]
    assert (everything if seed is None else sorted(everything)) == expected
    for batch in found:
        longest = max(sum(own[i] for i in batch) for own in (targets, sources))
        assert len(batch) == 1 or longest <= budget


def test_a_generator_shuffles_documents_and_not_the_sentences_in_them() -> None:
    split = documents("aaabbbcccddd")
    batches = lists(split.batches(9, np.random.default_rng(3)))
    assert all(batch == list(range(batch[0], batch[0] + 3)) for batch in batches)
    orders = {str(lists(split.batches(9, np.random.default_rng(seed)))) for seed in range(5)}
    assert len(orders) > 1


# Tensors


@pytest.mark.parametrize("group_tokens", [1, 12, 1000])
def test_each_sentence_is_in_one_group_and_each_wanted_one_in_one_task(
    group_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docnmt.batches.GROUP_TOKENS", group_tokens)
    examples = tiny_examples([(4, 3, 2), (2, 5, 2), (3, 4, 2), (5, 6, 2), (2, 2, 2)], fused=False)
    batch = collate_in_context(examples, [[0, 1], [], [3]], [2, 3, 4], None)
    batch = batch.to(torch.device("cpu"))
    rows = [
        row[mask].tolist()
        for group in batch.groups
        for row, mask in zip(group.source, group.source_mask, strict=True)
    ]
    assert sorted(rows) == sorted(list(example.source) for example in examples)
    assert batch.tokens == sum(len(e.source) + len(e.target or ()) for e in examples)
    assert batch.positions >= batch.tokens
    flat = [id for row in rows for id in row]
    seen = []
    for task in batch.tasks:
        sources = batch.groups[task.group].source[task.rows]
        for number, ids in zip(task.numbers, sources, strict=True):
            seen.append(number)
            expected = examples[(2, 3, 4)[number]].source
            assert ids.tolist()[: len(expected)] == expected
        assert (task.source is None) == (task.numbers == (1,))
        if task.source is not None:
            context = task.source.gather(torch.tensor(flat)[:, None].float())
            for number, ids, mask in zip(
                task.numbers, context.pad(context.states)[:, :, 0], context.mask, strict=True
            ):
                before = ([0, 1], [], [3])[number]
                assert ids[mask].tolist() == [id for i in before for id in examples[i].source]
    assert sorted(seen) == [0, 1, 2]


def test_documents_of_a_heavier_corpus_come_again_whole() -> None:
    """Sentences 0 to 2 are of a corpus that an epoch passes through twice, 3 and 4 of another."""
    split = Lengths([3] * 5, [3] * 5, Corpora([3, 2], [2.0, 1.0]))
    examples = DocumentExamples(split, ["a", "a", "b", "c", "c"], 2)
    order = np.concatenate(examples.batches(3, np.random.default_rng(1))).tolist()
    assert sorted(order) == [0, 0, 1, 1, 2, 2, 3, 4]
    batches = lists(examples.batches(6, np.random.default_rng(1)))
    assert sorted(batch for batch in batches if len(batch) == 2)[-1] == [3, 4]
    assert lists(examples.batches(100)) == [[0, 1, 2, 3, 4]]  # validation reads each once
