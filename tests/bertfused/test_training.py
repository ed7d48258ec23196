import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bertfused.batch import BertIds, Example, token_batches
from bertfused.config import OptimConfig, TrainConfig
from bertfused.errors import UserError
from bertfused.layers import BranchMixer
from bertfused.pretrained import PretrainedEncoder
from bertfused.training import (
    Place,
    Step,
    Trainer,
    TrainState,
    TranslationLoss,
    Update,
    autocast,
    choose_precision,
    is_finished,
    steps,
    train,
)
from tests.tiny_encoders import make_encoder
from tests.tiny_model import BERT_DIM, tiny_examples, tiny_model

CPU = torch.device("cpu")
LENGTHS = [(5, 4, 6), (3, 6, 4), (2, 2, 2), (7, 5, 8), (4, 4, 5), (6, 3, 7)]


class Examples:
    """A data set in memory."""

    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples
        streams = [
            [len(e.target or ()) for e in examples],
            [len(e.source) for e in examples],
        ]
        self.lengths = [np.array(stream, dtype=np.int64) for stream in streams]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Example:
        return self.examples[i]

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[np.ndarray]:
        return token_batches(self.lengths, batch_tokens, generator=generator)


DATA = Examples(tiny_examples(LENGTHS))


def step_of(*batches: Sequence[int], data: Examples = DATA) -> Step:
    numbers = [np.array(batch) for batch in batches]
    tokens = sum(int(data.lengths[0][batch].sum()) for batch in numbers)
    return Step(numbers, tokens, Place(0, len(batches)))


OPTIM: dict[str, Any] = {"lr": 0.01, "warmup_steps": 0, "schedule": "constant"}


def trainer_of(
    fusion: dict[str, object] | None = None,
    *,
    encoder: PretrainedEncoder | None = None,
    optim: dict[str, Any] | None = None,
    drop_net: tuple[float, int] = (0.0, 0),
    fresh: Sequence[str] = (),
    dropout: float = 0.0,
    smoothing: float = 0.1,
    precision: str = "fp32",
    **options: Any,
) -> Trainer:
    model = tiny_model(fusion, dropout=dropout)
    module = TranslationLoss(model, encoder, label_smoothing=smoothing, mask_special=False)
    config = TrainConfig.model_validate({"max_steps": 100, "batch_tokens": 30, **options})
    return Trainer(
        module,
        OptimConfig.model_validate({**OPTIM, **(optim or {})}),
        config,
        drop_net=drop_net,
        fresh=fresh,
        device=CPU,
        precision=precision,
    )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("bert", tmp_path_factory.mktemp("encoder") / "bert")


def plain(data: Examples = DATA) -> Examples:
    return Examples([replace(e, bert=None, bert_states=None) for e in data.examples])


PLAIN_DATA = plain()


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in trainer.parameters.items():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    return found


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.parameters.items()}


# The order of the data


def long_data() -> Examples:
    rng = np.random.default_rng(1)
    return Examples(
        [Example([5] * source, [5] * target) for source, target in rng.integers(2, 30, (200, 2))]
    )


def first_steps(
    number: int, start: Place | None = None, *, seed: int = 3, accumulate: int = 2
) -> list[Step]:
    return list(
        islice(
            steps(
                long_data(),
                batch_tokens=200,
                accumulate=accumulate,
                seed=seed,
                start=start or Place(),
            ),
            number,
        )
    )


def as_lists(found: list[Step]) -> list[object]:
    return [([b.tolist() for b in s.examples], s.target_tokens, s.after) for s in found]


@pytest.mark.parametrize("accumulate", [1, 2, 7])
def test_steps_resume_at_any_place(accumulate: int) -> None:
    """Past the end of two epochs, the last step of which may be shorter."""
    whole = first_steps(70, accumulate=accumulate)
    assert whole[-1].after.epoch >= 2
    for done in range(0, 60):
        rest = first_steps(8, whole[done].after, accumulate=accumulate)
        assert as_lists(rest) == as_lists(whole[done + 1 : done + 9])


def test_an_epoch_uses_every_example_once_and_begins_the_next_at_its_start() -> None:
    found = first_steps(80)
    for epoch in (0, 1):
        own = [
            s
            for before, s in zip([Place(), *(s.after for s in found)], found, strict=False)
            if before.epoch == epoch
        ]
        numbers = np.concatenate([batch for s in own for batch in s.examples])
        assert sorted(numbers.tolist()) == list(range(200))
        assert own[-1].after == Place(epoch + 1, 0)
        assert [s.after.position for s in own[:-1]] == list(range(2, 2 * len(own), 2))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    per_epoch = next(i for i, s in enumerate(first_steps(80)) if s.after.epoch) + 1
    found = as_lists(first_steps(2 * per_epoch))
    assert [examples for examples, *_ in found[:per_epoch]] != [
        examples for examples, *_ in found[per_epoch:]
    ]
    assert as_lists(first_steps(5, seed=3)) == as_lists(first_steps(5, seed=3))
    assert as_lists(first_steps(5, seed=3)) != as_lists(first_steps(5, seed=4))


def test_a_step_knows_its_target_tokens() -> None:
    target = long_data().lengths[0]
    for step in first_steps(10):
        assert step.target_tokens == sum(int(target[batch].sum()) for batch in step.examples)


def test_batches_of_an_epoch_keep_to_the_budget() -> None:
    lengths = long_data().lengths
    for step in first_steps(10):
        assert 1 <= len(step.examples) <= 2
        for batch in step.examples:
            assert len(batch) * max(int(own[batch].max()) for own in lengths) <= 200


# One update


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulated_batches_give_the_gradient_of_one_big_batch(smoothing: float) -> None:
    """Divided by all target tokens once, not a mean of means: the batches differ in length."""
    results = []
    for step in (step_of([0, 1, 2, 3]), step_of([0, 3], [1, 2]), step_of([2], [0, 1], [3])):
        trainer = trainer_of(smoothing=smoothing)
        update = trainer.update(PLAIN_DATA, step, 1)
        results.append((update, gradients(trainer)))
    (one, expected), *others = results
    assert one.tokens == 17
    for update, found in others:
        assert update.nll == pytest.approx(one.nll, rel=1e-5)
        assert update.norm == pytest.approx(one.norm, rel=1e-4)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_an_update_by_hand() -> None:
    """Gradient of the mean label-smoothed loss, then one step of Adam from zero moments."""
    trainer = trainer_of(smoothing=0.1, optim={"weight_decay": 0.1, "eps": 1e-3})
    before, step = weights(trainer), step_of([0, 1], [2])
    batch = trainer.module.collate(PLAIN_DATA, np.array([0, 1, 2]))
    assert batch.target is not None
    log_probs = trainer.module.model(batch).log_softmax(-1)
    total = torch.zeros(())
    for row, target in zip(log_probs, batch.target.tolist(), strict=True):
        for own, token in zip(row, target, strict=True):
            if token != 1:
                total = total - (0.9 - 0.1 / 12) * own[token] - 0.1 / 12 * own.sum()
    (total / 12).backward()
    expected = {name: p.grad.clone() for name, p in trainer.parameters.items()}
    trainer.optimizer.zero_grad(set_to_none=False)
    update = trainer.update(PLAIN_DATA, step, 1)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert update.norm == pytest.approx(norm, rel=1e-4)
    assert (update.tokens, update.lr, update.is_finite) == (12, 0.01, True)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients(trainer)[name], gradient, rtol=1e-4, atol=1e-6)
        decayed = before[name] * (1 - 0.01 * 0.1)
        moved = decayed - 0.01 * gradient / (gradient.abs() + 1e-3)
        torch.testing.assert_close(weights(trainer)[name], moved, rtol=1e-4, atol=1e-5)


def test_the_mean_of_an_update_is_without_smoothing() -> None:
    updates = [trainer_of(smoothing=s).update(PLAIN_DATA, step_of([0, 1]), 1) for s in (0.0, 0.3)]
    assert updates[0].nll == pytest.approx(updates[1].nll, rel=1e-6)


def test_padding_is_the_share_of_positions_without_tokens() -> None:
    """Sources of 5 and 3, targets of 4 and 6: 18 tokens in 2 x 5 + 2 x 6 positions."""
    update = trainer_of().update(PLAIN_DATA, step_of([0, 1]), 1)
    assert update.padding == pytest.approx(1 - 18 / 22)


@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_gradients_are_clipped_to_a_norm(limit: float | None) -> None:
    free = trainer_of()
    free.update(PLAIN_DATA, step_of([0, 1]), 1)
    trainer = trainer_of(optim={"clip_norm": limit})
    update = trainer.update(PLAIN_DATA, step_of([0, 1]), 1)
    assert update.norm > 1  # that before clipping
    scale = 0.5 / update.norm if limit == 0.5 else 1
    for name, gradient in gradients(free).items():
        torch.testing.assert_close(gradients(trainer)[name], gradient * scale, rtol=1e-3, atol=1e-7)


def test_the_rate_follows_the_schedule() -> None:
    trainer = trainer_of(optim={"schedule": "inverse_sqrt", "warmup_steps": 4, "lr": 0.8})
    found = [trainer.update(PLAIN_DATA, step_of([0]), number).lr for number in (2, 4, 16)]
    assert found == pytest.approx([0.4, 0.8, 0.4], rel=1e-5)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)


def test_fresh_tensors_have_a_rate_of_their_own() -> None:
    fresh = [name for name, _ in tiny_model({}).named_parameters() if "bert_attention" in name]
    trainer = trainer_of({}, fresh=fresh, encoder=None, optim={"new_lr_scale": 5.0})
    named = {id(p): name for name, p in trainer.parameters.items()}
    old, new = trainer.optimizer.param_groups
    assert {named[id(p)] for p in new["params"]} == set(fresh)
    assert {named[id(p)] for p in old["params"]} == set(trainer.parameters) - set(fresh)
    trainer._move(1, 0.01)
    assert (old["lr"], new["lr"]) == pytest.approx((0.01, 0.05))


def test_dropout_is_drawn_by_seed_step_and_micro_batch() -> None:
    def nll(number: int, *, seed: int = 1, swapped: bool = False) -> float:
        trainer = trainer_of(dropout=0.3, seed=seed)
        batches = ([1], [0]) if swapped else ([0], [1])
        return trainer.update(PLAIN_DATA, step_of(*batches), number).nll

    assert nll(1) == nll(1)
    assert len({nll(1), nll(2), nll(1, seed=2), nll(1, swapped=True)}) == 4


# BERT attention in an update


class StatesEncoder(PretrainedEncoder):
    """Hands on the states that examples carry."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.layer = -1
        self.bert_dim = BERT_DIM
        self.bert_ids = BertIds(pad=0)


def drawn_by(trainer: Trainer, number: int) -> list[tuple[float, float]]:
    """What the mixers of a one-layer-a-side model drew in an update of one batch."""
    found: list[tuple[float, float]] = []
    for module in trainer.module.model.modules():
        if isinstance(module, BranchMixer):
            module.draw = lambda own=module: found.append(BranchMixer.draw(own)) or found[-1]
    trainer.update(DATA, step_of([0, 1]), number)
    return found


def test_an_undrawn_branch_has_a_zero_gradient_and_decays() -> None:
    """As with the official code's multiplication by zero: moments decay, weights too."""
    trainer = trainer_of(
        {"encoder_attention": False, "gates": [True, False]},
        encoder=StatesEncoder(),
        drop_net=(1.0, 0),
        optim={"weight_decay": 0.1},
    )
    own, other = "decoder.layers.0.cross_attention.", "decoder.layers.0.bert_attention."
    prefix = {(1.0, 0.0): other, (0.0, 1.0): own}
    seen = set()
    state = trainer.optimizer.state
    # Both branches need moments before these can decay.
    number = 0
    while len(seen) < 2 or number < 6:
        number += 1
        moments = {
            name: state[p]["exp_avg"].clone()
            for name, p in trainer.parameters.items()
            if p in state
        }
        before = weights(trainer)
        (weights_drawn,) = {w for w in drawn_by(trainer, number) if w != (0.5, 0.5)}
        undrawn = prefix[weights_drawn]
        for name, gradient in gradients(trainer).items():
            if name.startswith(undrawn):
                assert not gradient.any()
                if name in moments and seen == set(prefix.values()):
                    found = state[trainer.parameters[name]]["exp_avg"]
                    torch.testing.assert_close(found, 0.9 * moments[name])
                    assert not torch.equal(weights(trainer)[name], before[name])
            elif name.startswith((own, other)) and not name.endswith("kv_proj.bias"):
                assert gradient.any(), name
        seen.add(undrawn)


def test_the_drop_net_rate_of_a_step_is_that_of_the_schedule() -> None:
    trainer = trainer_of({}, encoder=StatesEncoder(), drop_net=(0.8, 10))
    rates = []
    for number in (1, 5, 10, 20):
        trainer.update(DATA, step_of([0, 1]), number)
        mixers = [m for m in trainer.module.model.modules() if isinstance(m, BranchMixer)]
        (rate,) = {mixer.drop_net for mixer in mixers}
        rates.append(rate)
    assert rates == pytest.approx([0.08, 0.4, 0.8, 0.8])


def bert_examples(encoder: PretrainedEncoder) -> Examples:
    ids = [encoder.wordpieces.encode(text).ids for text in ("a b", "the cat", "x", "on", "", "z z")]
    examples = tiny_examples(LENGTHS, fused=False)
    return Examples([replace(e, bert=row) for e, row in zip(examples, ids, strict=True)])


def fused_trainer(
    encoder: PretrainedEncoder, mask_special: bool = False, **options: Any
) -> Trainer:
    model = tiny_model({}, bert_dim=encoder.bert_dim, **options)
    module = TranslationLoss(model, encoder, label_smoothing=0.1, mask_special=mask_special)
    config = TrainConfig(max_steps=5)
    optim = OptimConfig.model_validate(OPTIM)
    return Trainer(module, optim, config, device=CPU, precision="fp32")


def test_a_frozen_encoder_is_no_parameter_and_stays(bert: Path) -> None:
    encoder = PretrainedEncoder(str(bert))
    trainer = fused_trainer(encoder)
    before = [p.clone() for p in encoder.parameters()]
    assert not [name for name in trainer.parameters if name.startswith("bert.")]
    trainer.update(bert_examples(encoder), step_of([0, 1]), 1)
    for own, other in zip(encoder.parameters(), before, strict=True):
        assert torch.equal(own, other)
        assert own.grad is None
    assert not encoder.training


def test_fine_tuning_moves_the_encoder_but_not_its_pooler(bert: Path) -> None:
    encoder = PretrainedEncoder(str(bert), finetune=True)
    trainer = fused_trainer(encoder)
    before = {name: p.clone() for name, p in encoder.named_parameters()}
    own = {name for name in trainer.parameters if name.startswith("bert.")}
    assert own == {f"bert.{name}" for name in before if "pooler" not in name}
    trainer.update(bert_examples(encoder), step_of([0, 1]), 1)
    moved = {name for name, p in encoder.named_parameters() if not torch.equal(p, before[name])}
    assert "model.embeddings.word_embeddings.weight" in moved
    assert "model.encoder.layer.0.attention.self.query.weight" in moved
    assert not [name for name in moved if "pooler" in name]


def test_a_layer_is_drawn_in_training_and_the_mean_taken_in_evaluation(bert: Path) -> None:
    encoder = PretrainedEncoder(str(bert), "stochastic", last_layers=3)
    trainer = fused_trainer(encoder)
    data, drawn = bert_examples(encoder), []
    noise = trainer.module.model.noise
    draw = noise.integer
    noise.integer = lambda high: drawn.append(draw(high)) or drawn[-1]  # type: ignore[method-assign]
    for number in range(1, 13):
        trainer.update(data, step_of([0, 1]), number)
    assert len(drawn) == 12
    assert set(drawn) == {0, 1, 2}
    trainer.module.eval()
    trainer.mean_loss(data)
    assert len(drawn) == 12


def test_special_positions_are_hidden_from_the_model_where_wanted(bert: Path) -> None:
    encoder = PretrainedEncoder(str(bert))
    data = bert_examples(encoder)
    losses = []
    for mask_special in (False, True):
        trainer = fused_trainer(encoder, mask_special)
        trainer.module.eval()
        losses.append(float(trainer.mean_loss(data).nll))
    assert losses[0] != pytest.approx(losses[1], abs=1e-3)


# Averaged weights


def test_averaged_weights_by_hand() -> None:
    """The average is d * average + (1 - d) * weights, d = min(0.9, (1 + step) / (10 + step))."""
    trainer = trainer_of(optim={"ema": 0.9})
    expected = weights(trainer)
    for number in (1, 2, 3, 200):
        trainer.update(PLAIN_DATA, step_of([number % 3]), number)
        decay = min(0.9, (1 + number) / (10 + number))
        for name, own in weights(trainer).items():
            expected[name] = decay * expected[name] + (1 - decay) * own
    assert trainer.average is not None
    for name, average in trainer.average.items():
        torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_uses_the_averages_and_puts_the_weights_back() -> None:
    trainer = trainer_of(optim={"ema": 0.9}, dropout=0.2)
    trainer.update(PLAIN_DATA, step_of([0]), 1)
    own = weights(trainer)
    assert trainer.average is not None

    def failing() -> None:
        with trainer.evaluation():
            assert not trainer.module.training
            assert trainer.average is not None
            for name, weight in weights(trainer).items():
                assert torch.equal(weight, trainer.average[name])
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, own[name])
        assert name.endswith("kv_proj.bias") or not torch.equal(weight, trainer.average[name])
    trainer.update(PLAIN_DATA, step_of([0]), 2)
    assert trainer.module.training


def test_without_averages_evaluation_is_of_the_weights() -> None:
    trainer = trainer_of()
    own = weights(trainer)
    with trainer.evaluation():
        assert all(torch.equal(weight, own[name]) for name, weight in weights(trainer).items())
        assert not trainer.module.training


# Loss over a data set


def test_the_loss_of_a_data_set_is_the_sum_over_its_sentences() -> None:
    trainer = trainer_of(smoothing=0.1, dropout=0.3)
    trainer.module.eval()
    losses = [
        trainer.module.loss(trainer.module.collate(PLAIN_DATA, np.array([i]))) for i in range(6)
    ]
    found = trainer.mean_loss(PLAIN_DATA)
    assert found.tokens == 24
    assert float(found.total) == pytest.approx(
        sum(float(o.total.detach()) for o in losses), rel=1e-5
    )
    assert float(found.nll) == pytest.approx(sum(float(o.nll) for o in losses), rel=1e-5)
    wide = trainer_of(smoothing=0.1, batch_tokens=1000)
    wide.module.eval()
    assert float(wide.mean_loss(PLAIN_DATA).total) == pytest.approx(float(found.total), rel=1e-5)


# Updates that are not finite


def poisoned(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.module.model.output.weight[3] = math.inf


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    trainer = trainer_of(optim={"ema": 0.9})
    trainer.update(PLAIN_DATA, step_of([0]), 1)
    healthy = weights(trainer)
    poisoned(trainer)
    before, state = weights(trainer), {k: v.clone() for k, v in trainer.state_tensors().items()}
    update = trainer.update(PLAIN_DATA, step_of([0]), 2)
    assert not update.is_finite
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, before[name])
    for name, tensor in trainer.state_tensors().items():
        assert torch.equal(tensor, state[name])
    with torch.no_grad():  # and what follows is not spoilt by it
        trainer.module.model.output.weight.copy_(healthy["decoder.embed.tokens.weight"])
    assert trainer.update(PLAIN_DATA, step_of([0]), 3).is_finite
    assert all(bool(weight.isfinite().all()) for weight in weights(trainer).values())


class Scripted(Trainer):
    """A trainer whose updates are finite or not as told."""

    def __init__(self, outcomes: Iterator[bool], config: TrainConfig) -> None:
        self.config, self.outcomes, self.seen = config, outcomes, []  # type: ignore[var-annotated]
        self.world = 1

    def update(self, dataset: Any, step: Step, number: int) -> Update:
        self.seen.append((number, [batch.tolist() for batch in step.examples]))
        return Update(1.0, step.target_tokens, 1.0, 0.1, 0.0, next(self.outcomes))


def scripted(outcomes: str, **options: Any) -> tuple[Scripted, TrainState, list[Any]]:
    """Run ``train``; in ``outcomes`` "." is a good update and "x" a bad one."""
    config = TrainConfig.model_validate({"batch_tokens": 12, "validate_every": 4, **options})
    trainer = Scripted(iter([o == "." for o in outcomes]), config)
    state, events = TrainState(), []
    train(
        trainer,
        PLAIN_DATA,
        state,
        log=lambda own, update, seconds: events.append(("log", own.step, update.is_finite)),
        checkpoint=lambda own: events.append(("checkpoint", own.step)),
    )
    return trainer, state, events


def test_training_goes_on_after_bad_updates_and_counts_them() -> None:
    trainer, state, events = scripted("..x.xx....", max_steps=10)
    assert (state.step, state.skipped) == (10, 3)
    assert [number for number, _ in trainer.seen] == list(range(1, 11))
    logged = [finite for kind, _, *finite in events if kind == "log"]
    assert logged == [[own == "."] for own in "..x.xx...."]
    assert [step for kind, step, *_ in events if kind == "checkpoint"] == [4, 8, 10]


def test_training_stops_after_ten_bad_updates_in_a_row() -> None:
    scripted("." * 3 + "x" * 9 + "." + "x" * 9, max_steps=22)
    with pytest.raises(UserError) as caught:
        scripted("......" + "x" * 10, max_steps=100)
    order = [
        batch.tolist()
        for epoch in range(20)
        for batch in token_batches(
            PLAIN_DATA.lengths, 12, generator=np.random.default_rng([1, epoch])
        )
    ]
    examples = ", ".join(map(str, order[15]))
    assert str(caught.value) == (
        "the loss or gradient of 10 updates in a row was not finite; the last, step 16, began with "
        f"training pairs {examples}; the checkpoint of step 12 is good; try a lower optim.lr or a "
        "clip_norm"
    )


# The loop


def test_a_last_checkpoint_is_written_once() -> None:
    for total, expected in ((8, [4, 8]), (9, [4, 8, 9]), (3, [3])):
        _, _, events = scripted("." * total, max_steps=total)
        assert [step for kind, step, *_ in events if kind == "checkpoint"] == expected


def test_training_goes_on_where_it_was() -> None:
    trainer, *_ = scripted("." * 20, max_steps=20)
    config = TrainConfig(batch_tokens=12, validate_every=4, max_steps=7)
    resumed = Scripted(iter([True] * 30), config)
    state = TrainState()
    ignore: Any = lambda *_: None  # noqa: E731
    train(resumed, PLAIN_DATA, state, log=ignore, checkpoint=ignore)
    resumed.config = config.model_copy(update={"max_steps": 20})
    state = TrainState(step=state.step, place=state.place)
    train(resumed, PLAIN_DATA, state, log=ignore, checkpoint=ignore)
    assert resumed.seen == trainer.seen


def test_a_finished_training_does_nothing() -> None:
    trainer, state, events = scripted("", max_steps=0)
    assert (trainer.seen, state.step, events) == ([], 0, [])


@pytest.mark.parametrize(
    ("limit", "state", "finished"),
    [
        ({"max_steps": 3}, TrainState(step=2), False),
        ({"max_steps": 3}, TrainState(step=3), True),
        ({"max_steps": 0}, TrainState(), True),
        ({"max_epochs": 2}, TrainState(place=Place(1, 9)), False),
        ({"max_epochs": 2}, TrainState(place=Place(2, 0)), True),
        ({"max_minutes": 0.5}, TrainState(seconds=29.9), False),
        ({"max_minutes": 0.5}, TrainState(seconds=30.0), True),
        ({"patience": 2}, TrainState(stale=1), False),
        ({"patience": 2}, TrainState(stale=2), True),
        ({"max_steps": 9, "patience": 2}, TrainState(step=3, stale=2), True),
        ({"max_steps": 9, "max_epochs": 2}, TrainState(step=9, stale=2), True),
    ],
)
def test_when_training_is_finished(
    limit: dict[str, float], state: TrainState, finished: bool
) -> None:
    assert is_finished(state, TrainConfig.model_validate(limit)) == finished


# Saving and going on


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_restored_trainer_goes_on_bit_for_bit(ema: float | None) -> None:
    options: dict[str, Any] = {"optim": {"ema": ema}, "dropout": 0.2, "encoder": StatesEncoder()}
    fusion: dict[str, object] = {"drop_net": 0.5}
    trainer = trainer_of(fusion, drop_net=(0.5, 0), **options)
    batches = [[0, 1], [2, 3], [4], [5, 0]]
    for number in (1, 2):
        trainer.update(DATA, step_of(batches[number - 1]), number)
    saved = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    kinds = {name.partition(".")[0] for name in saved}
    assert kinds == {"weight", "optimizer"} | ({"average"} if ema else set())
    restored = trainer_of(fusion, drop_net=(0.5, 0), **options)
    with torch.no_grad():
        for parameter in restored.parameters.values():
            parameter.zero_()
    restored.load_state_tensors(saved)
    for own in (trainer, restored):
        for number in (3, 4):
            own.update(DATA, step_of(batches[number - 1]), number)
    found = restored.state_tensors()
    for name, tensor in trainer.state_tensors().items():
        assert torch.equal(found[name], tensor), name


def test_a_trainer_before_its_first_update_is_restored_too() -> None:
    trainer, other = trainer_of(optim={"ema": 0.5}), trainer_of(optim={"ema": 0.5})
    other.load_state_tensors(trainer.state_tensors())
    for own in (trainer, other):
        own.update(PLAIN_DATA, step_of([0]), 1)
    found = other.state_tensors()
    assert all(torch.equal(found[n], tensor) for n, tensor in trainer.state_tensors().items())


# Precision and processes


def test_a_precision_that_is_named_is_taken() -> None:
    assert choose_precision("fp32", CPU) == "fp32"
    assert choose_precision("bf16", CPU) == "bf16"


@pytest.mark.parametrize("supported", [False, True])
def test_auto_is_bfloat16_where_the_processor_is_fast_at_it(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "bf16" if supported else "fp32"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    assert choose_precision("auto", CPU) == expected
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert choose_precision("auto", torch.device("cuda")) == expected


def test_autocast_is_for_products_only() -> None:
    x = torch.ones(2, 2)
    with autocast(CPU, "bf16"):
        assert (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32
    with autocast(CPU, "fp32"):
        assert (x @ x).dtype == torch.float32


def test_bfloat16_updates_are_near_those_of_fp32() -> None:
    """8 bits of mantissa: 0.4 % a product."""
    updates = []
    for precision in ("fp32", "bf16"):
        trainer = trainer_of({}, encoder=StatesEncoder(), precision=precision, dropout=0.2)
        updates.append(trainer.update(DATA, step_of([0, 1], [3]), 1))
        assert {tensor.dtype for tensor in weights(trainer).values()} == {torch.float32}
    low, high = updates[1], updates[0]
    assert low.nll == pytest.approx(high.nll, rel=0.02)
    assert low.norm == pytest.approx(high.norm, rel=0.1)
    assert low.nll != high.nll


def test_micro_batches_must_be_shared_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UserError) as caught:
        trainer_of(accumulate=3)
    assert str(caught.value) == "train.accumulate is 3, not a multiple of 2 processes"
