"""Sentences as numbers on disk, in fairseq's binary formats, read without loading them.

A store is two files. ``PREFIX.bin`` holds the numbers of all sentences one after the other,
``PREFIX.idx`` says where each begins:

- ``MMIDIDX`` (read and written): version, type, N sizes (int32), N byte offsets (int64).
- ``TNTIDX`` (read only, fairseq before 0.9): version, type, N + 1 dimension offsets, N + 1 data
  offsets in elements, the sizes (all int64); ``.bin`` holds every number plus 1.
"""

import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from bertfused.errors import UserError
from bertfused.text import replace_file

_Bytes = npt.NDArray[np.uint8]
_Integers = npt.NDArray[np.integer]

_MMAP_MAGIC = b"MMIDIDX\x00\x00"
_CACHED_MAGIC = b"TNTIDX\x00\x00"
_MMAP_HEADER = struct.Struct("<QBQ")
_CACHED_HEADER = struct.Struct("<QQQQQ")
# Codes 6 and 7 are floating-point numbers, which no sentence is made of.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
    9: np.dtype("<u4"),
    10: np.dtype("<u8"),
}
_CHUNK = 1 << 16  # sentences indexed at a time


@dataclass(frozen=True, eq=False)
class IdStore:
    """A memory-mapped store of sentences.

    Attributes:
        sizes: Tokens of each sentence, its end symbol included.
    """

    sizes: _Integers
    _offsets: _Integers  # where each sentence begins in _ids
    _unit: int  # of the offsets, per element
    _ids: _Integers
    _shift: int  # what the file adds to each number

    @staticmethod
    def open(prefix: Path) -> "IdStore":
        """Map ``prefix.idx`` and ``prefix.bin``.

        Raises:
            UserError: If a file is missing, of another format, or cut short.
        """
        index, data = _map(_with_suffix(prefix, "idx")), _map(_with_suffix(prefix, "bin"))
        magic = index[: len(_MMAP_MAGIC)].tobytes()
        if magic == _MMAP_MAGIC:
            return _read_mmap(index, data, prefix)
        if magic.startswith(_CACHED_MAGIC):
            return _read_cached(index, data, prefix)
        raise UserError(f"{prefix}.idx is neither an MMIDIDX nor a TNTIDX index of fairseq")

    def part(self, rows: slice) -> "IdStore":
        """Return some of the sentences that stand one after the other."""
        return replace(self, sizes=self.sizes[rows], _offsets=self._offsets[: len(self)][rows])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        i = range(len(self))[i]
        start = int(self._offsets[i]) // self._unit
        ids = self._ids[start : start + int(self.sizes[i])]
        return ids.astype(np.int64) - self._shift

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        return (self[i] for i in range(len(self)))


class IdStoreWriter:
    """Writes an ``MMIDIDX`` store whose files get their names only when the block succeeds.

    Memory does not grow with the number of sentences.

    Args:
        prefix: Path of the files without ``.bin`` and ``.idx``.
        vocabulary_size: Numbers are below it; below 65,500 they take two bytes, else four.
    """

    def __init__(self, prefix: Path, vocabulary_size: int):
        self._prefix = prefix
        self._vocabulary_size = vocabulary_size
        self._code = 8 if vocabulary_size < 65_500 else 4
        self._stack = ExitStack()

    def __enter__(self) -> "IdStoreWriter":
        with ExitStack() as stack:
            # Left in reverse order: the data gets its name before the index that points into it.
            self._index = stack.enter_context(replace_file(_with_suffix(self._prefix, "idx")))
            self._data = stack.enter_context(replace_file(_with_suffix(self._prefix, "bin")))
            self._sizes = stack.enter_context(tempfile.TemporaryFile(dir=self._prefix.parent))
            stack.push(self._finish)
            self._stack = stack.pop_all()
        return self

    def append(self, ids: Sequence[int] | _Integers) -> None:
        """Add a sentence, its end symbol included.

        Raises:
            ValueError: If a number is not in the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not 0 <= array.min() <= array.max() < self._vocabulary_size:
            raise ValueError(f"{ids} has a number outside 0..{self._vocabulary_size - 1}")
        self._data.write(array.astype(_DTYPES[self._code]).tobytes())
        self._sizes.write(struct.pack("<i", array.size))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _finish(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the index, unless the block failed."""
        if error is not None:
            return
        number = self._sizes.tell() // 4
        self._index.write(_MMAP_MAGIC + _MMAP_HEADER.pack(1, self._code, number))
        for sizes in self._size_chunks():
            self._index.write(sizes.tobytes())
        offset = 0
        for sizes in self._size_chunks():
            ends = offset + np.cumsum(sizes, dtype=np.int64) * _DTYPES[self._code].itemsize
            self._index.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
            offset = int(ends[-1])
        # Killed between the two renames, an old index must not point into the new data.
        _with_suffix(self._prefix, "idx").unlink(missing_ok=True)

    def _size_chunks(self) -> Iterator[npt.NDArray[np.int32]]:
        self._sizes.seek(0)
        while chunk := self._sizes.read(4 * _CHUNK):
            yield np.frombuffer(chunk, dtype="<i4")


def _with_suffix(prefix: Path, suffix: str) -> Path:
    """Append a suffix; ``train.en-de.de`` already has dots that must stay."""
    return prefix.with_name(f"{prefix.name}.{suffix}")


def _map(path: Path) -> _Bytes:
    try:
        if path.stat().st_size == 0:  # which mmap refuses
            return np.empty(0, dtype=np.uint8)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _read_mmap(index: _Bytes, data: _Bytes, prefix: Path) -> IdStore:
    version, code, number = _unpack(_MMAP_HEADER, index, len(_MMAP_MAGIC), prefix)
    dtype = _dtype(version, code, prefix)
    start = len(_MMAP_MAGIC) + _MMAP_HEADER.size
    _require(len(index) == start + 12 * number, prefix, "idx")
    sizes = index[start : start + 4 * number].view("<i4")
    offsets = index[start + 4 * number :].view("<i8")
    end = int(offsets[-1]) + int(sizes[-1]) * dtype.itemsize if number else 0
    _require(len(data) == end, prefix, "bin")
    _check_index(sizes, offsets, dtype.itemsize, end, prefix)
    return IdStore(sizes, offsets, dtype.itemsize, data.view(dtype), 0)


def _read_cached(index: _Bytes, data: _Bytes, prefix: Path) -> IdStore:
    version, code, width, number, dimensions = _unpack(
        _CACHED_HEADER, index, len(_CACHED_MAGIC), prefix
    )
    dtype = _dtype(version, code, prefix)
    if width != dtype.itemsize or dimensions != number:
        raise UserError(f"{prefix}.idx does not index plain sentences")
    start = len(_CACHED_MAGIC) + _CACHED_HEADER.size + 8 * (number + 1)  # after the dimensions
    middle = start + 8 * (number + 1)
    _require(len(index) == middle + 8 * number, prefix, "idx")
    offsets = index[start:middle].view("<i8")
    sizes = index[middle:].view("<i8")
    _require(len(data) == int(offsets[-1]) * dtype.itemsize, prefix, "bin")
    _check_index(sizes, offsets, 1, int(offsets[-1]), prefix)
    return IdStore(sizes, offsets, 1, data.view(dtype), 1)


def _unpack(header: struct.Struct, index: _Bytes, start: int, prefix: Path) -> tuple[int, ...]:
    _require(len(index) >= start + header.size, prefix, "idx")
    return header.unpack(index[start : start + header.size].tobytes())


def _dtype(version: int, code: int, prefix: Path) -> np.dtype[Any]:
    if version != 1 or code not in _DTYPES:
        raise UserError(
            f"{prefix}.idx has version {version} and type {code}; "
            f"sentences are read of version 1 and types {', '.join(map(str, _DTYPES))}"
        )
    return _DTYPES[code]


def _check_index(sizes: _Integers, offsets: _Integers, unit: int, total: int, prefix: Path) -> None:
    """Refuse an index whose sentences do not lie one after the other, up to the end."""
    end, is_right = 0, True
    for start in range(0, len(sizes), _CHUNK):
        own = sizes[start : start + _CHUNK].astype(np.int64)
        ends = end + np.cumsum(own) * unit
        begins = np.concatenate(([end], ends[:-1]))
        is_right &= bool((own >= 0).all() and (begins == offsets[start : start + len(own)]).all())
        end = int(ends[-1])
    if not is_right or end != total:
        raise UserError(f"{prefix}.idx is damaged: its offsets are not the sums of its sizes")


def _require(is_whole: bool, prefix: Path, suffix: str) -> None:
    if not is_whole:
        raise UserError(f"{prefix}.{suffix} is damaged: its length is not what {prefix}.idx says")
