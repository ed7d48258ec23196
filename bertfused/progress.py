"""What long work says about itself, to whoever shows it: how much is done, and what was cut."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

_logger = logging.getLogger(__name__)

# Given what is counted and how many there are, if that is known, shows while the block lasts how
# many of them are done: called with those done since the last call.
Bar = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]


def no_bar(what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing."""
    return nullcontext(lambda done: None)


def warn_of(counts: Mapping[str, int]) -> None:
    """Report what had to be cut or changed, one line for each reason."""
    for reason, count in counts.items():
        if count:
            _logger.warning("%s: %s", reason, f"{count:,}")
