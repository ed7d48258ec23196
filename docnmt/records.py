"""One record of a document file, and how its place is named in messages."""

from pathlib import Path
from typing import Literal, NamedTuple

Side = Literal["source", "target"]


class Record(NamedTuple):
    """One line of a file: a sentence of a document, or, without a document, a separator."""

    line: int
    document: str | None
    text: str
    segment: str = ""  # WMT only


def name_of(path: Path | None) -> str:
    """Name a file, or standard input."""
    return "standard input" if path is None else str(path)


def at(path: Path | None, line: int) -> str:
    """Name a place in a file."""
    return f"{name_of(path)}, line {line}"
