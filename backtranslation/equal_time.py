"""How long a plain model may be trained, to have had the time of a fused one.

What a step costs is timed side by side on the machine at hand, not taken from the logs of
trainings that ran one after the other beside whatever else the machine did.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from random import Random

from pydantic import Field

from bertfused.config import Section
from bertfused.data import Split
from bertfused.features import encode_rows
from bertfused.fit import Setup
from bertfused.pretrained import PretrainedEncoder
from bertfused.training import Place, Update, steps

_TURNS, _STEPS = 6, 5  # of each, the first turn not counted
_SENTENCES = 512  # encoded to learn what all cost


class Costs(Section):
    """What was measured, in seconds of wall-clock time."""

    made_from: dict[str, str] = Field(description="Hashes of what it is of.")
    fused_step: float = Field(gt=0, description="An update of the fused model.")
    plain_step: float = Field(gt=0, description="One of the plain model.")
    encoding: float = Field(ge=0, description="The states of all training text, kept on disk.")

    def plain_steps(self, fused_steps: int) -> int:
        """Return the updates of the plain model in the time that the fused one takes."""
        seconds = fused_steps * self.fused_step + self.encoding
        return max(round(seconds / self.plain_step), 1)


def step_seconds(setups: Mapping[str, Setup]) -> dict[str, float]:
    """Time updates of several models, which take turns; the median of each one's turns.

    Reading the examples is part of it, validation is not.
    """
    streams = {name: _updates(setup) for name, setup in setups.items()}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(_TURNS):
        for name, stream in streams.items():
            begin = time.perf_counter()
            for _ in itertools.islice(stream, _STEPS):
                pass
            seconds[name].append((time.perf_counter() - begin) / _STEPS)
    return {name: statistics.median(own[1:]) for name, own in seconds.items()}


def encoding_seconds(split: Split, encoder: PretrainedEncoder) -> float:
    """Estimate, from some sentences, the time to compute the states of all of a split."""
    assert split.bert is not None
    count = min(_SENTENCES, len(split))
    rows = [split.bert[i] for i in Random(1).sample(range(len(split)), count)]
    begin = time.perf_counter()
    encode_rows(rows, encoder)
    return (time.perf_counter() - begin) * sum(split.bert.sizes) / sum(map(len, rows))


def _updates(setup: Setup) -> Iterator[Update]:
    config = setup.recipe.train
    stream = steps(
        setup.train,
        batch_tokens=config.batch_tokens,
        accumulate=config.accumulate,
        seed=config.seed,
        start=Place(),
    )
    for number, step in enumerate(stream, start=1):
        yield setup.trainer.update(setup.train, step, number)
