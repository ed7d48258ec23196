"""The losses of context-aware training, and how their examples are put together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bertfused.batch import Example
from bertfused.config import FusionConfig, OptimConfig, TrainConfig
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import Examples
from bertfused.training import Place, Step, Trainer, steps
from docnmt.batches import DocumentExamples
from docnmt.concatenation import BREAK, ConcatenatedExamples
from docnmt.config import ConcatenationConfig, DocumentRecipe
from docnmt.fit import ContextLoss, set_up
from tests.tiny_context import ON_A_BASE, given, logits, own_parameters, tiny_context_model
from tests.tiny_model import tiny_examples
from tests.tiny_run import make_run

LENGTHS = [(4, 3, 2), (2, 5, 2), (3, 4, 2), (5, 6, 2), (2, 2, 2), (3, 1, 2), (6, 3, 2), (1, 2, 2)]
DOCIDS = ["a", "a", "a", "a", "b", "c", "c", ""]


class Split(Examples):
    """Examples that lie in memory."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._own = examples
        self.corpora = None
        self.lengths: Sequence[NDArray[np.integer[Any]]] = [
            np.array([len(own.target or ()) for own in examples]),
            np.array([len(own.source) for own in examples]),
        ]

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, i: int) -> Example:
        return self._own[i]


def split(sentences: int = 3) -> DocumentExamples:
    return DocumentExamples(Split(tiny_examples(LENGTHS, fused=False)), DOCIDS, sentences)


def module_of(name: str, label_smoothing: float = 0.1) -> ContextLoss:
    model = tiny_context_model(ON_A_BASE[name] | {"dropout": 0.0} | DETERMINED.get(name, {}))
    return ContextLoss(model, None, label_smoothing=label_smoothing, mask_special=False)


DETERMINED: dict[str, dict[str, object]] = {"layerwise": {"target_dropout": 0.0}}


def trainer_of(module: ContextLoss) -> Trainer:
    config = TrainConfig(max_steps=3, batch_tokens=100)
    return Trainer(module, OptimConfig(), config, device=torch.device("cpu"), precision="fp32")


@pytest.mark.parametrize("name", ["layerwise", "zhang"])
def test_the_loss_is_that_of_each_sentence_in_its_context(name: str) -> None:
    """In context by the whole model, without any by the base; nats, of the reference's tokens."""
    module, own = module_of(name, 0.0), split(2)
    module.eval()
    with torch.no_grad():
        loss = module.loss(module.collate(own, np.arange(8)))
        total = 0.0
        for i in range(8):
            before = list(own.previous(i))
            examples = [own[j] for j in (*before, i)]
            places = list(range(len(before))) or [0]  # itself, which is not read
            alone = given(module.model, examples, [places], [len(before)], [])
            assert alone.current.hidden is not None
            found = module.model.base.output(alone.current.hidden)
            if before:
                found = logits(module.model, alone)
            target = torch.tensor(own[i].target)
            log_probs = found[0, : len(target)].log_softmax(-1)
            total -= float(log_probs[range(len(target)), target].sum())
    assert loss.tokens == sum(lengths[1] for lengths in LENGTHS)
    assert float(loss.nll) == pytest.approx(total, rel=1e-5)
    assert float(loss.total) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("name", ["layerwise", "zhang"])
def test_accumulated_batches_are_one_big_batch(name: str) -> None:
    """Divided by all target tokens, not by those of each batch; whichever sentences they hold."""
    gradients = []
    for batches in ([[1, 2, 3, 6]], [[2], [6, 1], [3]]):
        module = module_of(name)
        trainer = trainer_of(module)
        tokens = sum(LENGTHS[i][1] for i in (1, 2, 3, 6))
        step = Step([np.array(own) for own in batches], tokens, Place(1))
        update = trainer.update(split(), step, 1)
        assert update.is_finite
        assert update.tokens == tokens
        gradients.append([p.grad for p in own_parameters(module.model).values()] + [update.nll])
    *ours, our_nll = gradients[0]
    *theirs, their_nll = gradients[1]
    assert our_nll == pytest.approx(their_nll, rel=1e-5)
    for own, other in zip(ours, theirs, strict=True):
        assert own is not None
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["layerwise", "cadec", "zhang"])
def test_an_update_moves_the_new_layers_only(name: str) -> None:
    module = module_of(name)
    trainer = trainer_of(module)
    before = {key: p.detach().clone() for key, p in module.model.named_parameters()}
    step = next(steps(split(), batch_tokens=100, accumulate=1, seed=1, start=Place()))
    update = trainer.update(split(), step, 1)
    assert update.is_finite
    assert 0 <= update.padding < 1
    assert module.model.training
    assert not module.model.base.training
    moved = {key for key, p in module.model.named_parameters() if not p.equal(before[key])}
    assert moved == own_parameters(module.model).keys() == trainer.parameters.keys()


@pytest.mark.parametrize("name", ["layerwise", "cadec"])
def test_a_step_key_decides_all_that_is_random(name: str) -> None:
    model = tiny_context_model(ON_A_BASE[name] | {"dropout": 0.3})
    module = ContextLoss(model, None, label_smoothing=0.1, mask_special=False).train()
    batch = module.collate(split(), np.arange(8))

    def loss(*key: int) -> float:
        module.begin_step(*key, drop_net=0.0)
        return float(module.loss(batch).total.detach())

    assert loss(1, 2, 0) == loss(1, 2, 0)
    assert loss(1, 2, 0) != loss(1, 2, 1)


# Joined sentences


def test_joined_sentences_have_a_break_after_each_but_the_last() -> None:
    own = split(2)
    sources = [list(own[i].source) for i in range(4)]
    targets = [[*map(int, own[i].target or ())] for i in range(4)]
    for with_target in (False, True):
        config = ConcatenationConfig(sentences=2, target=with_target)
        joined = ConcatenatedExamples(own, config, limit=100)
        assert list(joined[0].source) == sources[0]
        assert list(joined[3].source) == [
            *(*sources[1][:-1], BREAK),
            *(*sources[2][:-1], BREAK),
            *sources[3],
        ]
        before = [*targets[1][:-1], BREAK, *targets[2][:-1], BREAK] if with_target else []
        assert list(joined[3].target or ()) == [*before, *targets[3]]
        assert joined[3].source[-1] == 2


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("limit", [1, 6, 10, 14, 100])
def test_joined_sentences_are_as_long_as_they_say_and_within_the_limit(
    with_target: bool, limit: int
) -> None:
    own = split()
    config = ConcatenationConfig(sentences=3, target=with_target)
    joined = ConcatenatedExamples(own, config, limit)
    assert len(joined) == 8
    for i in range(8):
        lengths = [int(length[i]) for length in joined.lengths]
        assert lengths == [len(joined[i].target or ()), len(joined[i].source)]
        is_alone = lengths == [LENGTHS[i][1], LENGTHS[i][0]]
        assert is_alone or max(lengths[1], lengths[0] if with_target else 0) <= limit
        if limit == 100:
            assert is_alone == (not own.previous(i))
    found = np.concatenate(joined.batches(20, np.random.default_rng(1)))
    assert sorted(found.tolist()) == list(range(8))
    assert np.concatenate(joined.batches(20)).size == 8


def test_joined_sentences_do_not_start_from_a_fused_model(tmp_path: Path) -> None:
    """Its BERT attention would be dropped without a word."""
    make_run(tmp_path / "run", fusion=FusionConfig())
    files = {"source": "a", "target": "b"}
    recipe = DocumentRecipe.model_validate(
        {
            "data": {"source": "en", "target": "de", "train": [files], "dev": files},
            "context": {"model": "concatenation"},
            "train": {"max_steps": 1},
        }
    )
    data = DataFolder(tmp_path, ("en", "de"), None, {})
    with pytest.raises(UserError, match="which is BERT-fused"):
        set_up(recipe, data, tmp_path / "run", torch.device("cpu"))


def test_two_validations_of_the_same_weights_agree() -> None:
    """Also where drafts are drawn, and whatever was drawn before."""
    trainer, data = trainer_of(module_of("cadec")), split()
    losses = []
    for key in (1, 2):
        trainer.module.begin_step(key, drop_net=0.0)
        with trainer.evaluation():
            losses.append(float(trainer.mean_loss(data).nll))
    assert losses[0] == losses[1]
