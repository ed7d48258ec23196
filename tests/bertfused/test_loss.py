import math

import pytest
import torch
from torch import Tensor

import bertfused.loss as loss_module
from bertfused.loss import Loss, cross_entropy

VOCAB, DIM = 11, 6


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make 64 rows of logits at a time, and gradients of 10 of them."""
    monkeypatch.setattr(loss_module, "_CPU_LOGITS", 64 * VOCAB + 3)
    monkeypatch.setattr(loss_module, "_IN_CACHE", 10 * VOCAB)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = random(tokens, DIM), random(VOCAB, DIM, seed=2)
    target = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(3))
    return hidden, weight, target


def naive(hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, float]:
    """Label-smoothed loss as fairseq 0.12's, token by token in double precision.

    There: eps_i = eps / (V - 1); loss = (1 - eps - eps_i) * nll + eps_i * sum of all -log p.
    """
    total, nll = torch.zeros((), dtype=torch.float64), 0.0
    for state, correct in zip(hidden, target.tolist(), strict=True):
        log_probs = (weight @ state).log_softmax(0)
        share = smoothing / (len(weight) - 1)
        total = total - (1 - smoothing - share) * log_probs[correct] - share * log_probs.sum()
        nll -= float(log_probs[correct].detach())
    return total, nll


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 600])
def test_loss_and_gradients_are_those_of_the_formula(tokens: int, smoothing: float) -> None:
    hidden, weight, target = inputs(tokens)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = cross_entropy(hidden, weight, target, smoothing)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    total, nll = naive(*doubles, target, smoothing)
    assert loss.tokens == tokens
    assert float(loss.total.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    assert float(loss.nll) == pytest.approx(nll, rel=1e-5)

    (loss.total * 0.7).backward()  # as where the mean is taken
    (total * 0.7).backward()
    for own, double in zip((hidden, weight), doubles, strict=True):
        assert own.grad is not None
        assert double.grad is not None
        torch.testing.assert_close(own.grad, double.grad.float(), rtol=1e-4, atol=1e-5)


def test_loss_by_hand() -> None:
    """Two symbols with logits 0 and log 3, so probabilities 1/4 and 3/4; the second is right.

    With smoothing 0.1 the other symbol has the mass 0.1 and the right one 0.9.
    """
    weight = torch.tensor([[0.0], [math.log(3)]])
    loss = cross_entropy(torch.ones(1, 1), weight, torch.tensor([1]), 0.1)
    assert float(loss.nll) == pytest.approx(-math.log(0.75))
    assert float(loss.total) == pytest.approx(-0.9 * math.log(0.75) - 0.1 * math.log(0.25))


def test_large_logits_do_not_overflow() -> None:
    weight = torch.tensor([[0.0], [1000.0], [-1000.0]])
    loss = cross_entropy(torch.ones(2, 1), weight, torch.tensor([1, 0]), 0.0)
    assert float(loss.total) == 1000


def test_no_tokens_lose_nothing() -> None:
    hidden, weight, target = inputs(0)
    loss = cross_entropy(hidden.requires_grad_(), weight, target, 0.1)
    loss.total.backward()
    assert (float(loss.total.detach()), float(loss.nll), loss.tokens) == (0, 0, 0)


@pytest.mark.parametrize("which", ["neither", "hidden", "weight"])
def test_gradients_reach_what_wants_them(which: str) -> None:
    hidden, weight, target = inputs(5)
    wanted = {"hidden": [hidden], "weight": [weight], "neither": []}[which]
    for tensor in wanted:
        tensor.requires_grad_()
    loss = cross_entropy(hidden, weight, target, 0.1)
    assert loss.total.requires_grad == bool(wanted)
    assert not loss.nll.requires_grad
    if wanted:
        loss.total.backward()
    assert [tensor.grad is not None for tensor in (hidden, weight)] == [
        which == "hidden",
        which == "weight",
    ]


def test_nothing_is_kept_for_gradients_without_grad() -> None:
    hidden, weight, target = inputs(5)
    with torch.no_grad():
        loss = cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), target, 0.1)
    assert not loss.total.requires_grad


def test_shared_weights_collect_the_gradient_of_both_uses() -> None:
    """Tied embeddings: the matrix gives the states and the logits."""
    _, weight, target = inputs(8)
    weight.requires_grad_()
    cross_entropy(weight[target], weight, target, 0.1).total.backward()
    double = weight.detach().double().requires_grad_()
    naive(double[target], double, target, 0.1)[0].backward()
    assert weight.grad is not None
    assert double.grad is not None
    torch.testing.assert_close(weight.grad, double.grad.float(), rtol=1e-4, atol=1e-5)


def loss_under_autocast(hidden: Tensor, weight: Tensor, target: Tensor) -> Loss:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(hidden, weight, target, 0.1)


def test_double_precision_stays_so() -> None:
    hidden, weight, target = inputs(70)
    doubles = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    loss, (total, nll) = cross_entropy(*doubles, target, 0.1), naive(*doubles, target, 0.1)
    torch.testing.assert_close(loss.total, total, rtol=1e-12, atol=0)
    assert float(loss.nll) == pytest.approx(nll, rel=1e-12)
    ours, theirs = (torch.autograd.grad(own, doubles) for own in (loss.total, total))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tokens", [5, 600])
def test_bfloat16_products_cost_two_digits_and_the_sums_stay_fp32(tokens: int) -> None:
    """Products of 6 terms with 8 bits each; sums and gradients are kept in the inputs' type."""
    hidden, weight, target = inputs(tokens)
    hidden.requires_grad_()
    weight.requires_grad_()
    low = loss_under_autocast(hidden, weight, target)
    assert low.total.dtype == torch.float32
    found = torch.autograd.grad(low.total, [hidden, weight])
    exact = cross_entropy(hidden, weight, target, 0.1)
    expected = torch.autograd.grad(exact.total, [hidden, weight])
    assert float(low.total.detach()) == pytest.approx(float(exact.total.detach()), rel=5e-3)
    assert float(low.total.detach()) != float(exact.total.detach())  # it did run in bfloat16
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == torch.float32
        assert float((own - other).norm() / other.norm()) < 2e-2
