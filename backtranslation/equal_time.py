"""How long a plain model may be trained, to have had the time of a fused one.

Steps are timed side by side on the machine at hand, not taken from the logs of trainings that ran
one after the other beside whatever else the machine did. What was measured is kept: an
interrupted chain goes on with the same numbers.
"""

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bertfused.fit import Setup
from bertfused.text import replace_file
from bertfused.training import Place, Update, steps

_TURNS, _UPDATES = 6, 5  # of each, the first turn not counted


class Costs:
    """Seconds that things took, by name, kept in a file.

    Args:
        path: The file; none is no costs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = json.loads(path.read_bytes()) if path.exists() else {}

    def keep(self, seconds: Mapping[str, float]) -> None:
        """Remember more of them."""
        self.seconds |= seconds
        with replace_file(self._path) as handle:
            handle.write(f"{json.dumps(self.seconds, indent=2)}\n".encode())

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Time a block, unless that was done: when it is done again there is less to do."""
        begin = time.perf_counter()
        yield
        if name not in self.seconds:
            self.keep({name: time.perf_counter() - begin})


def step_seconds(setups: Mapping[str, Setup]) -> dict[str, float]:
    """Time updates of several models, which take turns; the median of each one's turns."""
    streams = {name: _updates(setup) for name, setup in setups.items()}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(_TURNS):
        for name, stream in streams.items():
            begin = time.perf_counter()
            for _ in itertools.islice(stream, _UPDATES):
                pass
            seconds[name].append((time.perf_counter() - begin) / _UPDATES)
    return {name: statistics.median(own[1:]) for name, own in seconds.items()}


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
