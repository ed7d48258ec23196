"""What an update consists of, and how lines are drawn and weighed."""

from itertools import combinations, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from bertfused.loss import Loss
from bertfused.store import IdStore, IdStoreWriter
from bertfused.training import Place
from bertgen.data import TaskSplit
from bertgen.images import ImageStore, write_images
from bertgen.training import Items, MaskLoss, TaskLosses, steps
from tests.tiny_bertgen import SYMBOLS, draw_ids, make_model

LENGTHS = {"few": [(3, 2), (1, 0), (5, 4)], "many": [(n % 4, 1 + n % 5) for n in range(20)]}
OPTIONS = {"batch_tokens": 60, "accumulate": 2, "seed": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tasks of text without images."""
    random = np.random.default_rng(0)
    write_images(tmp_path, [])
    for name, lengths in LENGTHS.items():
        for side in (0, 1):
            prefix = tmp_path / f"{name}.{('source', 'target')[side]}"
            with IdStoreWriter(prefix, 60) as writer:
                for own in lengths:
                    writer.append(draw_ids(own[side], random))
    return tmp_path


def split_of(folder: Path, name: str) -> TaskSplit:
    stores = (IdStore.open(folder / f"{name}.{side}") for side in ("source", "target"))
    return TaskSplit(folder / name, *stores, None)


def items_of(folder: Path, *names: str, **options: object) -> Items:
    splits = [(split_of(folder, name), 5) for name in names]
    return Items(splits, ImageStore(folder), "bidirectional", **options)


def test_every_task_is_in_every_update(folder: Path) -> None:
    items = items_of(folder, "few", "many")
    assert len(items) == 23
    for step in islice(steps(items, **OPTIONS, start=Place()), 20):
        tasks = [{int(i >= 3) for i in numbers} for numbers in step.examples]
        assert tasks == [{0}, {0}, {1}, {1}]
        targets = LENGTHS["few"] + LENGTHS["many"]
        wanted = sum(targets[i][1] + 1 for numbers in step.examples for i in numbers)
        assert step.target_tokens == wanted


def test_each_task_sees_all_its_lines_in_a_new_order(folder: Path) -> None:
    items = items_of(folder, "few", "many")
    batches = items.batches_of(1, 60, None)
    updates = islice(steps(items, **OPTIONS | {"accumulate": 1}, start=Place()), 2 * len(batches))
    seen = [step.examples[1].tolist() for step in updates]
    first, second = seen[: len(batches)], seen[len(batches) :]
    for epoch in (first, second):
        assert sorted(i for batch in epoch for i in batch) == list(range(3, 23))
    assert first != second


def test_updates_go_on_where_they_stopped(folder: Path) -> None:
    items = items_of(folder, "few", "many")
    whole = list(islice(steps(items, **OPTIONS, start=Place()), 9))
    rest = list(islice(steps(items, **OPTIONS, start=whole[3].after), 5))
    for before, after in zip(whole[4:], rest, strict=True):
        assert before.after == after.after
        assert [own.tolist() for own in before.examples] == [o.tolist() for o in after.examples]


def test_drawn_sequences_have_the_loss_of_all_in_the_mean(folder: Path) -> None:
    """Over all draws of two of a line's five sequences."""
    model = make_model(feature_dim=0).eval()
    module = MaskLoss(model, SYMBOLS, "bidirectional")
    numbers = np.array([2])
    whole = module.loss(module.collate(items_of(folder, "few"), numbers))
    assert whole.tokens == 5
    found = {}
    for seed in range(200):
        module.begin_step(1, seed, 0, drop_net=0.0)
        batch = module.collate(items_of(folder, "few", copies=2), numbers)
        loss = module.loss(batch)
        assert loss.tokens == 5
        places = (batch.sequences.queries.flatten() - batch.sequences.places[:, 0]).tolist()
        found[tuple(places)] = float(loss.total.detach())
    assert len(found) == len(list(combinations(range(5), 2)))
    mean = sum(found.values()) / len(found)
    assert mean == pytest.approx(float(whole.total.detach()), rel=1e-5)


def test_lines_that_are_too_long_for_validation_are_left_out(folder: Path) -> None:
    assert len(items_of(folder, "few", longest=4)) == 2
    assert len(items_of(folder, "many", rows=4)) == 4


def test_both_modes_predict_the_same_tokens(folder: Path) -> None:
    items, model = items_of(folder, "few"), make_model()
    numbers = np.array([0, 1, 2])
    batches = [
        MaskLoss(model, SYMBOLS, mode).collate(items, numbers)
        for mode in ("bidirectional", "prefix")
    ]
    assert torch.equal(batches[0].target, batches[1].target)
    assert batches[0].target[[2, 3, 8]].tolist() == [SYMBOLS.stop] * 3


def test_smoothing_is_not_in_what_is_logged(folder: Path) -> None:
    items, model = items_of(folder, "few"), make_model(feature_dim=0).eval()
    numbers = np.array([0, 1, 2])
    plain = MaskLoss(model, SYMBOLS, "bidirectional")
    smoothed = MaskLoss(model, SYMBOLS, "bidirectional", 0.1)
    losses = [own.loss(own.collate(items, numbers)) for own in (plain, smoothed)]
    assert float(losses[0].nll) == pytest.approx(float(losses[1].nll))
    assert float(losses[0].total.detach()) == pytest.approx(float(losses[0].nll))
    assert float(losses[1].total.detach()) != pytest.approx(float(losses[1].nll))


def test_the_tasks_weigh_alike_in_validation(folder: Path) -> None:
    class Losses:
        def mean_loss(self, items: Items) -> object:
            nll = torch.tensor(2.0 * len(items) if len(items) == 3 else 4.0 * len(items))
            return Loss(nll, nll, len(items))

    by_task = {name: items_of(folder, name) for name in ("few", "many")}
    found = TaskLosses.__new__(TaskLosses)
    object.__setattr__(found, "trainer", Losses())
    object.__setattr__(found, "by_task", by_task)
    assert found.validate(1, []).value == pytest.approx(-3.0)
