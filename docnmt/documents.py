"""Read documents: which sentences belong together, and what stands before each of them.

One path from a file to a sentence with its context::

    read_corpus(source, target)  Iterator[DocumentLine]                  two sides, strictly paired
    read_input(path)             Iterator[DocumentLine | SeparatorLine]  one item an output line
      -> contexts(lines, previous)                                       Iterator[tuple[str, ...]]

The formats are described in docs/documents.md. Everything streams: apart from the identifiers of
the documents, memory does not grow with the file.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

from bertfused.errors import UserError
from bertfused.text import count_lines, read_lines
from docnmt.records import Record, Side, at, name_of
from docnmt.wmt import wmt_records

logger = logging.getLogger(__name__)

Format = Literal["blank", "d", "docids", "tsv", "jsonl", "wmt"]
Column = Annotated[StrictInt, Field(ge=0)] | Annotated[StrictStr, Field(min_length=1)]
First = TypeVar("First")
Second = TypeVar("Second")

LONG_DOCUMENT = 1000  # sentences; a corpus that is one longer document has probably lost its format


class Columns(BaseModel):
    """Where a record keeps its parts: numbers from 0 for tsv, names for jsonl."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    document: Column = Field(description="Column of the document's identifier.")
    source: Column = Field(description="Column of the source sentence.")
    target: Column | None = Field(
        default=None, description="Column of the target sentence, if any."
    )


DEFAULT_COLUMNS = {
    "tsv": Columns(document=0, source=2, target=3),
    "jsonl": Columns(document="document", source="source", target="target"),
}


class DocumentsConfig(BaseModel):
    """The [documents] section of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    previous: int = Field(
        default=1,
        ge=0,
        description="Source sentences before the current one given as context; 0 is none.",
    )
    segments: bool = Field(
        default=True,
        description="Mark context and sentence as the encoder's segments 0 and 1, if it has them.",
    )
    format: Format = Field(
        default="blank", description="How a file says where its documents begin."
    )
    columns: Columns | None = Field(
        default=None,
        description="Columns of tsv (numbers, default 0, 2, 3) or jsonl (names); no other format.",
    )

    @model_validator(mode="after")
    def _columns_fit_format(self) -> "DocumentsConfig":
        _check_columns(self.format, self.columns)
        return self


class DocumentLine(NamedTuple):
    """One sentence of a document; ``target`` is None where only the source was read."""

    document: str
    source: str
    target: str | None


class SeparatorLine(NamedTuple):
    """An input line that holds no sentence; ``text`` is what the output has in its place."""

    text: str


InputLine = DocumentLine | SeparatorLine


@dataclass(frozen=True)
class CorpusSummary:
    """What a checked corpus holds; ``longest`` counts the sentences of its longest document."""

    sentences: int
    documents: int
    longest: int


def read_corpus(
    source: Path,
    target: Path | None = None,
    *,
    format: Format = "blank",
    columns: Columns | None = None,
    docids: Path | None = None,
) -> Iterator[DocumentLine]:
    """Read a corpus sentence by sentence, in order, without its separator lines.

    Args:
        source: The source side; for tsv, jsonl and WMT XML the one file that holds both sides.
        target: The target side, the same path again where one file holds both, or None to read
            the source alone.
        docids: The file of document identifiers that format "docids" needs.

    Raises:
        UserError: On the first line that breaks the format or on which the sides disagree.
    """
    _check_options(format, columns, docids)
    sources = _records(source, "source", format, columns, docids, one_file=source == target)
    if target is None:
        pairs: Iterator[tuple[Record, Record | None]] = ((record, None) for record in sources)
    else:
        targets = _records(target, "target", format, columns, docids, one_file=source == target)
        pairs = _pair_sides(sources, targets, source, target, format)
    return _without_separators(pairs, source, format)


def read_input(
    path: Path | None,
    *,
    format: Format = "blank",
    columns: Columns | None = None,
    docids: Path | None = None,
) -> Iterator[InputLine]:
    """Read text to translate: one item for each line that the output must have.

    That is one a line, and one a record of tsv and jsonl or a segment of WMT files. Unlike a
    corpus, the input may hold empty documents.

    Args:
        path: The source side, or None for standard input.
    """
    _check_options(format, columns, docids)
    records = _records(path, "source", format, columns, docids)
    return (
        SeparatorLine(record.text)
        if record.document is None
        else DocumentLine(record.document, record.text, None)
        for record in records
    )


def document_ids(lines: Iterable[InputLine]) -> Iterator[str | None]:
    """Give each line its document, None for a separator: what d-BLEU joins lines by.

    >>> list(document_ids([DocumentLine("1", "Hello.", None), SeparatorLine("")]))
    ['1', None]
    """
    return (line.document if isinstance(line, DocumentLine) else None for line in lines)


def contexts(lines: Iterable[InputLine], previous: int) -> Iterator[tuple[str, ...]]:
    """Give each line the source sentences before it in its document, the nearest last.

    A blank sentence is no context, and a separator has none. To walk through lines and contexts
    together, split the iterator with ``itertools.tee``.

    Args:
        previous: The largest number of sentences, 0 or more.

    >>> talk = [DocumentLine("1", text, None) for text in ("Hello.", "", "Who is it?", "Me.")]
    >>> list(contexts(talk, previous=2))
    [(), ('Hello.',), ('Hello.',), ('Hello.', 'Who is it?')]
    """
    window: deque[str] = deque(maxlen=previous)
    document: str | None = None
    for line in lines:
        if isinstance(line, SeparatorLine):
            yield ()
            continue
        if line.document != document:
            window.clear()
            document = line.document
        yield tuple(window)
        if line.source.strip():
            window.append(line.source)


def padded(context: tuple[str, ...], previous: int) -> tuple[str, ...]:
    """Give the first sentence of a document an empty context.

    So the sentence to translate is in segment 1 everywhere.
    """
    return ("",) if previous and not context else context


def check_corpus(
    source: Path,
    target: Path | None = None,
    *,
    format: Format = "blank",
    columns: Columns | None = None,
    docids: Path | None = None,
) -> CorpusSummary:
    """Read a corpus to its end, so that a bad line is found before anything else is done.

    Takes what ``read_corpus`` takes and raises what it raises.
    """
    lines = read_corpus(source, target, format=format, columns=columns, docids=docids)
    return _summarize(lines, source, format)


def check_input(
    path: Path,
    *,
    format: Format = "blank",
    columns: Columns | None = None,
    docids: Path | None = None,
) -> CorpusSummary:
    """Read text to translate to its end, so that a bad line is found before a model is loaded."""
    lines = read_input(path, format=format, columns=columns, docids=docids)
    return _summarize(lines, path, format)


def _summarize(lines: Iterable[InputLine], path: Path, format: Format) -> CorpusSummary:
    sentences = documents = longest = current = 0
    document: str | None = None
    for line in lines:
        if isinstance(line, SeparatorLine):
            continue
        if line.document != document:
            document, current = line.document, 0
            documents += 1
        sentences += 1
        current += 1
        longest = max(longest, current)
    if documents == 1 and sentences > LONG_DOCUMENT:
        logger.warning(
            "%s: all %s sentences are one document; is the format right ('%s')?",
            path,
            f"{sentences:,}",
            format,
        )
    return CorpusSummary(sentences, documents, longest)


# ---- options


def _check_options(format: str, columns: Columns | None, docids: Path | None) -> None:
    if format not in get_args(Format):
        raise UserError(
            f"unknown document format {format!r}; it is one of {', '.join(get_args(Format))}"
        )
    try:
        _check_columns(format, columns)
    except ValueError as error:
        raise UserError(str(error)) from None
    if format == "docids" and docids is None:
        raise UserError("document format 'docids' needs a file of document identifiers (docids)")
    if format != "docids" and docids is not None:
        raise UserError(f"{docids} is a file of document identifiers, but the format is {format!r}")


def _check_columns(format: str, columns: Columns | None) -> None:
    if columns is None:
        return
    if format not in DEFAULT_COLUMNS:
        raise ValueError(f"columns are for document formats tsv and jsonl, not {format!r}")
    kind, word = (int, "numbers from 0") if format == "tsv" else (str, "names")
    for part, column in columns:
        if column is not None and not isinstance(column, kind):
            raise ValueError(f"columns of format {format!r} are {word}, but {part} = {column!r}")


# ---- one side of a file, line by line


def _records(
    path: Path | None,
    side: Side,
    format: Format,
    columns: Columns | None,
    docids: Path | None,
    one_file: bool = False,
) -> Iterator[Record]:
    match format:
        case "blank":
            return _blank_records(path)
        case "d":
            return _d_records(path)
        case "docids":
            assert docids is not None
            return _consecutive(_docid_records(path, docids), docids)
        case "tsv":
            return _consecutive(_tsv_records(path, side, columns or DEFAULT_COLUMNS["tsv"]), path)
        case "jsonl":
            columns = columns or DEFAULT_COLUMNS["jsonl"]
            return _consecutive(_jsonl_records(path, side, columns), path)
        case "wmt":
            return wmt_records(path, side, one_file)


def _blank_records(path: Path | None) -> Iterator[Record]:
    document = 0
    is_inside = False
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            is_inside = False
            yield Record(number, None, "")
            continue
        if not is_inside:
            is_inside = True
            document += 1
        yield Record(number, str(document), line)


def _d_records(path: Path | None) -> Iterator[Record]:
    document = 0
    for number, line in enumerate(read_lines(path), start=1):
        stripped = line.strip()
        if stripped == "<d>":
            document += 1
            yield Record(number, None, "<d>")
        elif stripped.startswith("<d>"):
            raise UserError(f"{at(path, number)}: a <d> line holds nothing else, not {stripped!r}")
        elif document == 0:
            raise UserError(f"{at(path, number)}: text before the first <d> line")
        else:
            yield Record(number, str(document), line)


def _docid_records(path: Path | None, docids: Path) -> Iterator[Record]:
    def unequal(lines: int, ids: int) -> str:
        return f"{name_of(path)} has {lines:,} lines but {docids} has {ids:,} document ids"

    pairs = _strict_zip(read_lines(path), read_lines(docids), unequal)
    for number, (line, document) in enumerate(pairs, start=1):
        if not document.strip():
            raise UserError(f"{at(docids, number)}: the document id is empty")
        yield Record(number, document.strip(), line)


def _tsv_records(path: Path | None, side: Side, columns: Columns) -> Iterator[Record]:
    text_column = _text_column(columns, side)
    for number, line in enumerate(read_lines(path), start=1):
        cells = line.split("\t")
        for part, column in (("document", columns.document), (side, text_column)):
            if int(column) >= len(cells):
                raise UserError(
                    f"{at(path, number)}: no column {column} ({part}; columns count from 0), "
                    f"the line has {len(cells)}"
                )
        document = cells[int(columns.document)].strip()
        if not document:
            raise UserError(f"{at(path, number)}: the document id is empty")
        yield Record(number, document, cells[int(text_column)])


def _jsonl_records(path: Path | None, side: Side, columns: Columns) -> Iterator[Record]:
    text_column = _text_column(columns, side)
    for number, line in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{at(path, number)}: not a JSON record") from None
        if not isinstance(record, dict):
            raise UserError(f"{at(path, number)}: not a JSON object")
        document = _json_text(record, columns.document, path, number).strip()
        if not document:
            raise UserError(f"{at(path, number)}: the document id is empty")
        text = _json_text(record, text_column, path, number)
        yield Record(number, document, text)


def _json_text(record: dict[str, Any], column: Column, path: Path | None, number: int) -> str:
    value = record.get(str(column))
    if value is None:
        raise UserError(f"{at(path, number)}: no column {column!r}")
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"{at(path, number)}: column {column!r} is not text")
    if "\n" in value:
        raise UserError(f"{at(path, number)}: column {column!r} holds a line break")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{at(path, number)}: column {column!r} holds half a surrogate pair")
    return value


def _text_column(columns: Columns, side: Side) -> Column:
    column = columns.source if side == "source" else columns.target
    if column is None:
        raise UserError("columns name no target, but the target side is to be read")
    return column


def _consecutive(records: Iterator[Record], path: Path | None) -> Iterator[Record]:
    """Refuse a document whose lines do not stand together: its windows would be wrong."""
    seen: set[str | None] = set()
    current: str | None = None
    for record in records:
        if record.document != current:
            current = record.document
            if current in seen:
                raise UserError(
                    f"{at(path, record.line)}: document {current!r} begins again; "
                    "the lines of a document must stand together"
                )
            seen.add(current)
        yield record


# ---- two sides


def _pair_sides(
    sources: Iterator[Record],
    targets: Iterator[Record],
    source: Path,
    target: Path,
    format: Format,
) -> Iterator[tuple[Record, Record]]:
    unit = "segments" if format == "wmt" else "lines"

    def unequal(first: int, second: int) -> str:
        return f"{source} has {first:,} {unit} but {target} has {second:,}"

    for left, right in _strict_zip(sources, targets, unequal):
        if (left.document is None) != (right.document is None):
            here, there = (
                (at(source, left.line), at(target, right.line))
                if left.document is None
                else (at(target, right.line), at(source, left.line))
            )
            kind = "a <d> line" if format == "d" else "blank"
            raise UserError(f"{here}, is {kind} but {there}, is not" + _counts(source, target))
        if (left.document, left.segment) != (right.document, right.segment):
            raise UserError(
                f"{at(source, left.line)}, is {_where(left)} but "
                f"{at(target, right.line)}, is {_where(right)}"
            )
        yield left, right


def _counts(source: Path, target: Path) -> str:
    """Add the line counts to a message when they differ, for that is then the likelier cause."""
    first, second = count_lines(source), count_lines(target)
    return "" if first == second else f" ({source} has {first:,} lines, {target} has {second:,})"


def _where(record: Record) -> str:
    segment = f"segment {record.segment!r} of " if record.segment else ""
    return f"{segment}document {record.document!r}"


def _strict_zip(
    first: Iterator[First], second: Iterator[Second], unequal: Callable[[int, int], str]
) -> Iterator[tuple[First, Second]]:
    """Pair two iterators; when one ends early, count what is left of the other and say so."""
    count = 0
    for left in first:
        try:
            right = next(second)
        except StopIteration:
            rest = sum(1 for _ in first)
            raise UserError(unequal(count + 1 + rest, count)) from None
        count += 1
        yield left, right
    rest = sum(1 for _ in second)
    if rest:
        raise UserError(unequal(count, count + rest))


def _without_separators(
    pairs: Iterator[tuple[Record, Record | None]], source: Path, format: Format
) -> Iterator[DocumentLine]:
    """Drop the separators and refuse documents without sentences."""
    # A blank line ends a document and so may not stand first; a <d> opens one, may not stand last.
    empty_from: int | None = 1 if format == "blank" else None
    for left, right in pairs:
        if left.document is not None:
            empty_from = None
            yield DocumentLine(left.document, left.text, None if right is None else right.text)
            continue
        if empty_from is not None:
            raise UserError(f"{at(source, empty_from)}: an empty document")
        empty_from = left.line if format == "d" else left.line + 1
    if format == "d" and empty_from is not None:
        raise UserError(f"{at(source, empty_from)}: an empty document")
