"""What changes with the step: learning rate and drop-net rate, as pure functions of it."""

import math


def learning_rate(
    step: int,
    *,
    schedule: str,
    lr: float,
    warmup_steps: int,
    warmup_init_lr: float,
    max_steps: int | None,
) -> float:
    """Return the rate of the update that makes step ``step - 1`` into ``step`` (1, 2, ...).

    Linear warm-up from ``warmup_init_lr``, then ``lr sqrt(warmup_steps / step)``, a straight line
    to 0 at ``max_steps``, or ``lr`` for ever.

    >>> options = dict(lr=1.0, warmup_steps=4, warmup_init_lr=0.0, max_steps=None)
    >>> [learning_rate(step, schedule="inverse_sqrt", **options) for step in (1, 4, 16)]
    [0.25, 1.0, 0.5]
    """
    if step < warmup_steps:
        return warmup_init_lr + (lr - warmup_init_lr) * step / warmup_steps
    if schedule == "inverse_sqrt":
        return lr * math.sqrt(max(warmup_steps, 1) / step)
    if schedule == "linear":
        assert max_steps is not None
        return lr * max(0.0, (max_steps - step + 1) / max(max_steps - warmup_steps + 1, 1))
    return lr


def drop_net_rate(step: int, *, drop_net: float, warmup_steps: int) -> float:
    """Return the drop-net rate of a step: it rises linearly from 0 over ``warmup_steps``."""
    return drop_net * min(1.0, step / warmup_steps) if warmup_steps else drop_net
