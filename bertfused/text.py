r"""Read and write lines of text: the only place where files become sentences.

A record ends at ``\n`` and nowhere else, so every other separator (U+2028, U+0085, a form feed, a
lone CR, ...) is text. One CR before the ``\n`` is dropped and never written, a byte order mark is
dropped with a warning, NUL is text, and bytes that are not UTF-8 are an error with their place.
"""

import errno
import fcntl
import gzip
import hashlib
import logging
import os
import re
import secrets
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice, zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, cast

from bertfused.errors import UserError

_BOM = b"\xef\xbb\xbf"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_logger = logging.getLogger(__name__)


# Says of each of some sentences whether something is true of it.
SentenceTest = Callable[[Iterable[str]], list[bool]]


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def read_lines(path: Path | None, *, keep_bom: bool = False, skip: int = 0) -> Iterator[str]:
    """Yield the records of a text file without their line ends.

    Args:
        path: File to read, ``.gz`` and ``.zst`` decompressed; None is standard input.
        keep_bom: Leave a leading byte order mark in the first record.
        skip: So many records are passed over without being looked at, which is faster.

    Raises:
        UserError: If the file cannot be read, is damaged or is not UTF-8.
    """
    name = "standard input" if path is None else str(path)
    with _readable_errors(name):
        records = _records(path)
        offset = sum(map(len, islice(records, skip)))
        for number, record in enumerate(records, start=skip + 1):
            if number == 1 and not keep_bom and record.startswith(_BOM):
                _logger.warning("%s starts with a byte order mark; it is not read as text", name)
                offset = len(_BOM)
                record = record[offset:]
                if not record:  # nothing but the mark: an empty file
                    return
            try:
                line = record.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{name}, line {number}, byte offset {offset + error.start}: "
                    f"0x{record[error.start]:02x} is not UTF-8"
                ) from error
            offset += len(record)
            yield line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line


def read_pairs(source: Path, target: Path) -> Iterator[SentencePair]:
    """Yield line i of ``source`` with line i of ``target``.

    Raises:
        UserError: At the end of the shorter file, naming both counts, if they differ.
    """
    sources, targets = read_lines(source), read_lines(target)
    for pairs, (source_line, target_line) in enumerate(zip_longest(sources, targets)):
        if source_line is None or target_line is None:
            longer = pairs + 1 + sum(1 for _ in sources) + sum(1 for _ in targets)
            counts = (pairs, longer) if source_line is None else (longer, pairs)
            raise UserError(f"{source} has {counts[0]:,} lines but {target} has {counts[1]:,}")
        yield SentencePair(source_line, target_line)


def count_lines(path: Path) -> int:
    """Count the records that `read_lines` yields."""
    return sum(1 for _ in read_lines(path))


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with _readable_errors(str(path)), open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class LineWriter:
    """Writes records, each ended by one line feed."""

    def __init__(self, write: Callable[[bytes], object]):
        self._write = write

    def write_line(self, line: str) -> None:
        """Write one record.

        Raises:
            ValueError: If ``line`` holds a line feed and would be read back as two records.
        """
        if "\n" in line:
            raise ValueError(f"a record cannot hold a line feed: {line!r}")
        self._write(line.rstrip("\r").encode("utf-8") + b"\n")


@contextmanager
def open_output(path: Path | None) -> Iterator[LineWriter]:
    """Open a text file that gets its name only when the block ends without an exception.

    Args:
        path: File to write, ``.gz`` and ``.zst`` compressed; None is standard output.

    Raises:
        UserError: If the file cannot be written or the disk is full.
    """
    if path is None:
        yield LineWriter(sys.stdout.buffer.write)
        sys.stdout.buffer.flush()
        return
    with replace_file(path) as handle, _compressed(path, handle) as stream:
        yield LineWriter(stream.write)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there.

    Raises:
        UserError: If it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}") from error


@contextmanager
def only_writer(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes from writing into a folder meanwhile; a killed process keeps none out.

    Args:
        wait: For another process that is at it, in place of the error.

    Raises:
        UserError: If another process is at it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(f"another process is writing to {folder}") from None
        except OSError as error:
            _logger.warning("%s cannot be locked: %s", folder, error.strerror)  # some networks'
        yield
    finally:
        os.close(descriptor)


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces ``path`` only when the block ends without an exception.

    It is written beside its final name, fsynced and renamed; after an exception nothing of it is
    left and what stood under the name still does. Devices and pipes are written directly.

    Raises:
        UserError: If the file cannot be written or the disk is full.
    """
    with _writable_errors(path):
        if path.exists() and not path.is_file():  # renaming would replace the device itself
            with _create(path, path, "wb") as handle:
                yield handle
            return
        final = Path(os.path.realpath(path))  # a link keeps pointing to the new content
        partial = final.with_name(f".{final.name[:200]}.{secrets.token_hex(4)}.partial")
        try:
            with _create(partial, path, "xb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(partial, final)
        except BaseException:
            with suppress(OSError):  # where none could be made, none can be removed
                partial.unlink()
            raise
        _sync_folder(final.parent)


def remove_partials(folder: Path, names: str) -> None:
    """Remove what a killed process left of files that it was writing.

    Args:
        names: Regular expression of the names that they would have got.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if re.fullmatch(rf"\.({names})\.[0-9a-f]+\.partial", path.name):
            path.unlink(missing_ok=True)


def _records(path: Path | None) -> Iterator[bytes]:
    """Yield the records of a file as bytes, with their line ends."""
    if path is None and sys.stdin is None:
        raise OSError("it is closed")
    if path is None:
        yield from sys.stdin.buffer
    elif path.suffix in (".gz", ".zst") and path.is_file() and not path.stat().st_size:
        raise EOFError("an empty file is no compressed text, not even an empty one")
    elif path.suffix == ".zst":
        yield from _split_records(_zstd_chunks(path))
    else:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as handle:
            yield from handle


def _split_records(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for record in complete:
            yield record + b"\n"
    if rest:
        yield rest


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of all frames of a file.

    The library's own stream reader ends silently where a file was cut short.
    """
    zstandard = _import_zstandard(path)
    frame = None
    with open(path, "rb") as handle:
        while data := handle.read(1 << 16):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise OSError(f"damaged zstd data ({error})") from error
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("zstd data ends in the middle of a frame")


def _import_zstandard(path: Path) -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path} needs the package zstandard (pip install zstandard)") from error
    return zstandard


def _compressed(path: Path, handle: BinaryIO) -> AbstractContextManager[Any]:
    if path.suffix == ".gz":  # no name and no time, so that equal text makes equal files
        return gzip.GzipFile("", "wb", compresslevel=6, fileobj=handle, mtime=0)
    if path.suffix == ".zst":
        writer = _import_zstandard(path).ZstdCompressor().stream_writer(handle, closefd=False)
        return cast(AbstractContextManager[Any], writer)
    return nullcontext(handle)


def _create(file: Path, asked: Path, mode: str) -> BinaryIO:
    try:
        return cast(BinaryIO, open(file, mode))
    except OSError as error:
        raise UserError(f"cannot write {asked}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"cannot read {name}: {reason}") from error


@contextmanager
def _writable_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:  # an error of the caller's block, not of this file
            raise
        raise UserError(f"cannot write {path}: {error.strerror}") from error
