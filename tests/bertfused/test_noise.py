import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from bertfused.noise import Dropout, Noise

LIKE = torch.empty(300, 401)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keyed(*key: int) -> Noise:
    noise = Noise()
    noise.reseed(*key)
    return noise


@pytest.mark.parametrize("threshold", [1, 26, 77, 128, 250])
def test_a_mask_is_zero_as_often_as_asked(threshold: int) -> None:
    mask = keyed(1).keep_mask(LIKE, threshold)
    assert mask.shape == LIKE.shape
    assert mask.dtype == torch.float32
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    rate, size = threshold / 256, LIKE.numel()
    spread = math.sqrt(rate * (1 - rate) / size)
    assert abs(float((mask == 0).float().mean()) - rate) < 4 * spread


def test_elements_of_a_mask_are_independent() -> None:
    mask = keyed(2).keep_mask(LIKE, 128)
    for other in (mask.roll(1, dims=1), mask.roll(8, dims=1), mask.roll(1, dims=0)):
        assert abs(float((mask == other).float().mean()) - 0.5) < 4 * 0.5 / math.sqrt(LIKE.numel())


def test_a_key_decides_all_draws() -> None:
    def draws(noise: Noise) -> tuple[list[float], list[int], list[float]]:
        masks = [noise.keep_mask(torch.empty(9), 100) for _ in range(3)]
        return (
            [noise.uniform() for _ in range(4)],
            [noise.integer(10**6) for _ in range(4)],
            torch.cat(masks).tolist(),
        )

    noise = keyed(3, 14, 15)
    first = draws(noise)
    noise.reseed(3, 14, 15)
    assert draws(noise) == first
    assert draws(keyed(3, 14, 15)) == first
    for other in ((3, 14, 16), (3, 15, 15), (4, 14, 15), (3, 14)):
        assert all(a != b for a, b in zip(draws(keyed(*other)), first, strict=True))


def test_successive_masks_differ() -> None:
    noise = keyed(1)
    assert not torch.equal(noise.keep_mask(LIKE, 128), noise.keep_mask(LIKE, 128))


def test_masks_do_not_move_the_other_draws() -> None:
    noise = keyed(5)
    noise.keep_mask(LIKE, 77)
    noise.keep_mask(torch.empty(3), 77)
    assert noise.uniform() == keyed(5).uniform()


def test_uniform_draws_fill_the_unit_interval() -> None:
    noise = keyed(6)
    draws = [noise.uniform() for _ in range(4000)]
    assert min(draws) >= 0
    assert max(draws) < 1
    assert abs(sum(draws) / 4000 - 0.5) < 4 * math.sqrt(1 / 12 / 4000)


def test_integers_are_drawn_from_all_below_the_bound() -> None:
    noise = keyed(7)
    draws = [noise.integer(3) for _ in range(3000)]
    for value in range(3):
        assert abs(draws.count(value) - 1000) < 4 * math.sqrt(3000 * 2 / 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), (0, 4)])
def test_masks_are_the_same_in_every_precision(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    expected = keyed(8).keep_mask(torch.empty(shape), 100)
    mask = keyed(8).keep_mask(torch.empty(shape, dtype=dtype), 100)
    assert mask.dtype == dtype
    assert torch.equal(mask.float(), expected)


@pytest.mark.parametrize(
    ("rate", "rounded"),
    [
        (0.0, Fraction(0)),
        (0.1, Fraction(26, 256)),
        (0.3, Fraction(77, 256)),
        (0.5, Fraction(1, 2)),
        (0.001, Fraction(0)),
        (0.9999, Fraction(255, 256)),
    ],
)
def test_a_rate_is_rounded_to_a_multiple_of_one_256th(rate: float, rounded: Fraction) -> None:
    dropout = Dropout(rate, Noise())
    assert Fraction(dropout.threshold, 256) == rounded
    assert dropout.scale == pytest.approx(float(1 / (1 - rounded)), rel=1e-12)
    assert dropout.is_active == (rounded > 0)


def test_dropout_keeps_the_expectation() -> None:
    dropout = Dropout(0.3, keyed(9))
    values = dropout(torch.ones(200_000))
    assert values.unique().tolist() == pytest.approx([0, 256 / 179])
    assert float(values.mean()) == pytest.approx(1, abs=0.006)


def test_dropout_is_off_in_evaluation_and_at_rate_zero() -> None:
    x, residual = random(4, 5), random(4, 5, seed=2)
    for dropout in (Dropout(0.5, Noise()).eval(), Dropout(0.0, Noise())):
        assert dropout(x) is x
        assert torch.equal(dropout.add(residual, x, 0.5), residual + 0.5 * x)
        assert torch.equal(dropout.add(residual, x), residual + x)


def test_dropout_and_its_gradient() -> None:
    noise = keyed(10)
    dropout = Dropout(0.25, noise)
    x = random(6, 7).requires_grad_()
    output = dropout(x)
    keep = keyed(10).keep_mask(x, 64)
    torch.testing.assert_close(output, x * keep * (4 / 3))
    weight = random(6, 7, seed=3)
    (gradient,) = torch.autograd.grad((output * weight).sum(), x)
    torch.testing.assert_close(gradient, weight * keep * (4 / 3))


@pytest.mark.parametrize("weight", [1.0, 0.5, 2.0])
def test_add_is_residual_plus_weighted_dropout_with_its_gradients(weight: float) -> None:
    dropout = Dropout(0.25, keyed(11))
    residual = random(6, 7).requires_grad_()
    branch = random(6, 7, seed=2).requires_grad_()
    output = dropout.add(residual, branch, weight)
    keep = keyed(11).keep_mask(branch, 64)
    torch.testing.assert_close(output, residual + weight * (4 / 3) * keep * branch)
    seen = random(6, 7, seed=3)
    gradients = torch.autograd.grad((output * seen).sum(), [residual, branch])
    torch.testing.assert_close(gradients[0], seen)
    torch.testing.assert_close(gradients[1], seen * keep * weight * (4 / 3))


def test_add_takes_a_branch_in_bfloat16() -> None:
    """Under autocast the branch is bfloat16 and the residual stream float32."""
    dropout = Dropout(0.25, keyed(12))
    residual = random(6, 7).requires_grad_()
    branch = random(6, 7, seed=2).bfloat16().requires_grad_()
    output = dropout.add(residual, branch, 0.5)
    assert output.dtype == torch.float32
    keep = keyed(12).keep_mask(torch.empty(6, 7), 64)
    torch.testing.assert_close(
        output, residual + keep * branch.float() * (2 / 3), rtol=1e-2, atol=1e-2
    )
    gradients = torch.autograd.grad(output.sum(), [residual, branch])
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(gradients[1].float(), keep * (2 / 3), rtol=1e-2, atol=1e-2)
