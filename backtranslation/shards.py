"""A corpus cut into shards, each written by one process at a time, and joined in order.

::

    DIR/shards/0003-of-0011.ro.partial   the blocks that are translated so far
    DIR/shards/0003-of-0011.ro           all of them
    DIR/shards/0003-of-0011.json         what they are made from, and how far
    DIR/synthetic.ro, DIR/manifest.json  all shards in order, once the last is complete

A shard is a range of whole blocks of lines, and a block is translated on its own. So neither the
number of shards nor an interruption changes what a line is translated beside.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from bertfused.config import Section, flatten, load_section, save_section
from bertfused.errors import UserError
from bertfused.text import (
    LineWriter,
    make_folder,
    only_writer,
    read_lines,
    replace_file,
    sha256_file,
)

BLOCK = 2048  # lines
MANIFEST = "manifest.json"


class Manifest(Section):
    """What a shard, or all of them together, is made from, and how far it is."""

    made_from: dict[str, Any] = Field(description="All that decides the text.")
    shards: int = Field(description="How many there are.")
    first_line: int = Field(description="Number of its first line in the corpus, from 0.")
    lines: int = Field(description="Lines it is to have.")
    done: int = Field(0, description="Lines it has.")
    size: int = Field(0, description="Bytes of these.")
    sha256: str | None = Field(None, description="Hash of the whole text.")
    counts: dict[str, int] = Field({}, description="Lines that were cut, by reason.")

    @staticmethod
    def read(path: Path) -> "Manifest":
        return load_section(path, Manifest)

    def write(self, path: Path) -> None:
        save_section(path, self)

    @property
    def is_complete(self) -> bool:
        return self.sha256 is not None


class Translated(NamedTuple):
    """The translations of a block, and what was changed or cut in it, by reason."""

    lines: list[str]
    counts: Counter[str]


# Translates a block, given the number of its first line in the corpus.
TranslateBlock = Callable[[list[str], int], Translated]


def shard_ranges(lines: int, shards: int) -> list[range]:
    """Cut a corpus into ranges of whole blocks; where blocks are few, some are empty.

    >>> shard_ranges(5000, 2)
    [range(0, 4096), range(4096, 5000)]
    """
    blocks = -(-lines // BLOCK)
    edges = [min(lines, -(-blocks * number // shards) * BLOCK) for number in range(shards + 1)]
    return [range(start, end) for start, end in pairwise(edges)]


@dataclass(frozen=True)
class ShardFolder:
    """The folder of a generation.

    Args:
        language: Of the translations.
        lines: Lines of the corpus.
        shards: How many it is cut into.
        made_from: What decides the text: hashes of corpus and model, options of the search.
    """

    folder: Path
    language: str
    lines: int
    shards: int
    made_from: Mapping[str, Any]

    @property
    def text(self) -> Path:
        """All translations, in order."""
        return self.folder / f"synthetic.{self.language}"

    def check(self) -> None:
        """Refuse a folder that was begun from something else, or with other shards.

        Raises:
            UserError: If it was.
        """
        wanted = Manifest(made_from=dict(self.made_from), shards=self.shards, first_line=0, lines=0)
        expected = Manifest.model_validate_json(wanted.model_dump_json())  # tuples are lists there
        found = [*(self.folder / "shards").glob("*.json"), *self.folder.glob(MANIFEST)]
        for path in sorted(found):
            manifest = Manifest.read(path)
            there, here = (
                flatten({**m.made_from, "shards": m.shards}) for m in (manifest, expected)
            )
            for key in sorted({*there, *here}):
                if there.get(key) != here.get(key):
                    raise UserError(
                        f"{self.folder} was made from something else: {key} is "
                        f"{there.get(key)!r} in {path.name} and {here.get(key)!r} now; give "
                        "another --out"
                    )

    def path(self, number: int) -> Path:
        """Return where shard ``number``, from 1, stands once it is complete."""
        return self.folder / "shards" / f"{number:04d}-of-{self.shards:04d}.{self.language}"

    def numbers(self, shard: int | None) -> Sequence[int]:
        """Return the number of a shard, or of all without one.

        Raises:
            UserError: If there is no such shard.
        """
        if shard is None:
            return range(1, self.shards + 1)
        if not 1 <= shard <= self.shards:
            raise UserError(f"there is no shard {shard} of {self.shards}; they count from 1")
        return (shard,)

    def lines_of(self, shard: int | None) -> int:
        """Count the lines of a shard, or of all without one."""
        ranges = shard_ranges(self.lines, self.shards)
        return sum(len(ranges[number - 1]) for number in self.numbers(shard))

    def done(self, number: int) -> int:
        """Count the lines of a shard that are translated."""
        manifest = self._manifest(number)
        return 0 if manifest is None else manifest.done

    def is_complete(self, number: int) -> bool:
        manifest = self._manifest(number)
        return manifest is not None and manifest.is_complete

    def num_complete(self) -> int:
        """Count the complete shards."""
        return sum(map(self.is_complete, self.numbers(None)))

    def _manifest(self, number: int) -> Manifest | None:
        path = self.path(number).with_suffix(".json")
        return Manifest.read(path) if path.exists() else None

    def write(self, number: int, corpus: Path, translate: TranslateBlock) -> Iterator[int]:
        """Translate a shard from where it stands; yields the number of lines of each block.

        Raises:
            UserError: If another process writes it.
        """
        make_folder(self.folder / "shards")
        path = self.path(number)
        partial, manifest_file = path.with_name(f"{path.name}.partial"), path.with_suffix(".json")
        lines = shard_ranges(self.lines, self.shards)[number - 1]
        with _locked(partial if not path.exists() else path) as handle:
            manifest = self._manifest(number) or Manifest(
                made_from=dict(self.made_from),
                shards=self.shards,
                first_line=lines.start,
                lines=len(lines),
            )
            if manifest.is_complete:
                return
            if not path.exists():
                handle.truncate(manifest.size)
                handle.seek(manifest.size)
                writer = LineWriter(handle.write)
                rest = range(lines.start + manifest.done, lines.stop)
                for block in _blocks(corpus, rest):
                    translated = translate(block, lines.start + manifest.done)
                    assert len(translated.lines) == len(block)
                    for line in translated.lines:
                        writer.write_line(line)
                    handle.flush()
                    os.fsync(handle.fileno())
                    counts = Counter(manifest.counts)
                    counts.update(translated.counts)
                    manifest = manifest.model_copy(
                        update={
                            "done": manifest.done + len(block),
                            "size": handle.tell(),
                            "counts": dict(sorted(counts.items())),
                        }
                    )
                    manifest.write(manifest_file)
                    yield len(block)
                if manifest.done != len(lines):
                    raise UserError(f"{corpus} has become shorter than {self.lines:,} lines")
                partial.rename(path)
            manifest.model_copy(update={"sha256": sha256_file(path)}).write(manifest_file)

    def join(self) -> Manifest | None:
        """Join the shards in order if all are complete; returns what was made, else ``None``."""
        if self.num_complete() < self.shards:
            return None
        manifest_file = self.folder / MANIFEST
        with only_writer(self.folder, wait=True):
            if manifest_file.exists() and self.text.exists():
                return Manifest.read(manifest_file)
            counts: Counter[str] = Counter()
            with replace_file(self.text) as handle:
                for number in self.numbers(None):
                    with open(self.path(number), "rb") as shard:
                        shutil.copyfileobj(shard, handle, 1 << 20)
                    counts.update(Manifest.read(self.path(number).with_suffix(".json")).counts)
            manifest = Manifest(
                made_from=dict(self.made_from),
                shards=self.shards,
                first_line=0,
                lines=self.lines,
                done=self.lines,
                size=self.text.stat().st_size,
                sha256=sha256_file(self.text),
                counts=dict(sorted(counts.items())),
            )
            manifest.write(manifest_file)
        return manifest


class Synthetic(NamedTuple):
    """Text that was generated, line for line beside what it was made from.

    ``languages`` are those of the training: the synthetic one first.
    """

    text: Path
    languages: tuple[str, str]
    lines: int


def read_generated(folder: Path, corpus: Path) -> Synthetic:
    """Find what a finished generation wrote.

    Raises:
        UserError: If it is not finished, or was made from another corpus.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{folder} is no folder that generate finished: it has no {MANIFEST}")
    manifest = Manifest.read(path)
    if manifest.made_from["corpus"] != sha256_file(corpus):
        raise UserError(f"{folder} was not made from {corpus}: line i would not be of line i")
    real, synthetic = manifest.made_from["languages"]
    return Synthetic(folder / f"synthetic.{synthetic}", (synthetic, real), manifest.lines)


def _blocks(corpus: Path, lines: range) -> Iterator[list[str]]:
    wanted = islice(read_lines(corpus, skip=lines.start), len(lines))
    while block := list(islice(wanted, BLOCK)):
        yield block


@contextmanager
def _locked(path: Path) -> Iterator[Any]:
    """Open a file to go on with, and keep other processes from it meanwhile."""
    with open(path, "ab+") as handle:
        try:
            flock(handle, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {path}") from None
        yield handle
