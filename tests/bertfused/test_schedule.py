import doctest
import math

import pytest

from bertfused import schedule
from bertfused.schedule import drop_net_rate, learning_rate


def rates(steps: list[int], kind: str, *, warmup: int = 4, last: int | None = None) -> list[float]:
    return [
        learning_rate(
            step,
            schedule=kind,
            lr=0.8,
            warmup_steps=warmup,
            warmup_init_lr=0.2,
            max_steps=last,
        )
        for step in steps
    ]


def test_examples_in_the_documentation() -> None:
    assert doctest.testmod(schedule).failed == 0


@pytest.mark.parametrize("kind", ["inverse_sqrt", "linear", "constant"])
def test_warm_up_is_a_straight_line_to_the_highest_rate(kind: str) -> None:
    assert rates([1, 2, 3, 4], kind, last=10) == pytest.approx([0.35, 0.5, 0.65, 0.8])


def test_the_inverse_square_root_halves_at_four_times_the_step() -> None:
    assert rates([4, 9, 16, 64], "inverse_sqrt") == pytest.approx([0.8, 0.8 * 2 / 3, 0.4, 0.2])


def test_the_inverse_square_root_without_warm_up_starts_at_the_highest_rate() -> None:
    assert rates([1, 4], "inverse_sqrt", warmup=0) == pytest.approx([0.8, 0.4])


def test_the_straight_line_would_reach_zero_after_the_last_step() -> None:
    assert rates([4, 6, 10, 11, 20], "linear", last=10) == pytest.approx(
        [0.8, 0.8 * 5 / 7, 0.8 / 7, 0, 0]
    )


def test_a_straight_line_shorter_than_its_warm_up() -> None:
    assert rates([1, 2], "linear", last=2) == pytest.approx([0.35, 0.5])


def test_a_constant_rate_stays() -> None:
    assert rates([4, 5, 10**6], "constant") == pytest.approx([0.8] * 3)


def test_the_published_recipe() -> None:
    """5e-4 at step 4000, 1e-7 at step 0; fairseq: lr = 5e-4 sqrt(4000 / step) from there."""
    found = [
        learning_rate(
            step,
            schedule="inverse_sqrt",
            lr=5e-4,
            warmup_steps=4000,
            warmup_init_lr=1e-7,
            max_steps=None,
        )
        for step in (2000, 4000, 16_000, 100_000)
    ]
    assert found == pytest.approx([(5e-4 + 1e-7) / 2, 5e-4, 2.5e-4, 5e-4 * math.sqrt(0.04)])


def test_the_drop_net_rate_rises_to_its_own_value() -> None:
    found = [drop_net_rate(step, drop_net=0.8, warmup_steps=4) for step in (0, 1, 3, 4, 9)]
    assert found == pytest.approx([0, 0.2, 0.6, 0.8, 0.8])
    assert drop_net_rate(1, drop_net=0.8, warmup_steps=0) == 0.8
