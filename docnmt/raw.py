"""Make documents of sentences from raw text.

::

    read_paragraphs(paths)               Iterator[Paragraph]    text, and the document it is of
      -> split_sentences (linguistics)   Iterator[list[str]]    a list a paragraph
      -> split_documents                 Iterator[str]          lines of the format "blank" or "d"

Everything streams: memory grows with the longest paragraph only.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, tee
from pathlib import Path
from typing import Literal, NamedTuple

from bertfused.errors import UserError
from bertfused.text import read_lines
from docnmt.documents import DocumentLine, InputLine, SeparatorLine, read_input
from docnmt.records import name_of

RawDocuments = Literal["blank", "d", "file"]

_logger = logging.getLogger(__name__)


class Paragraph(NamedTuple):
    """Text whose sentences end within it; ``document`` is the same in all of a document."""

    document: str
    text: str


def read_paragraphs(
    paths: Sequence[Path | None], *, documents: RawDocuments = "blank", wrapped: bool = False
) -> Iterator[Paragraph]:
    """Read raw text. The end of a file always ends a document.

    Args:
        paths: Files, or None for standard input.
        documents: What else ends one: a blank line, a line ``<d>`` that opens the next, or
            nothing, so that a file is a document. In the last two a blank line ends a paragraph.
        wrapped: Lines up to the next blank one are a paragraph, and are joined by spaces;
            otherwise each line is a paragraph.

    Raises:
        UserError: If a file cannot be read, or has text before the first ``<d>``.
    """
    for number, path in enumerate(paths, start=1):
        opened = filled = 0
        last = None
        for document, lines in groupby(_read(path, documents), key=_document_of):
            if document is None:
                opened += sum(isinstance(line, SeparatorLine) for line in lines)
                continue
            filled += document != last
            last = document
            texts = (line.source for line in lines if isinstance(line, DocumentLine))
            for text in [" ".join(texts)] if wrapped else texts:
                yield Paragraph(f"{number}.{document}", text)
        if not filled:
            _logger.warning("%s holds no text", name_of(path))
        elif documents == "d" and opened > filled:
            _logger.warning("%s: empty documents left out: %s", name_of(path), opened - filled)


def split_documents(
    paragraphs: Iterable[Paragraph],
    split: Callable[[Iterable[str]], Iterable[list[str]]],
    *,
    format: Literal["blank", "d"] = "blank",
) -> Iterator[str]:
    """Write documents one sentence a line, in one of the formats of docs/documents.md.

    Args:
        split: Gives the sentences of each text.

    Raises:
        UserError: If a sentence would be read back as a ``<d>`` line.
    """
    paragraphs, again = tee(paragraphs)
    texts = (paragraph.text for paragraph in again)
    current = None
    num_documents = num_sentences = 0
    for paragraph, sentences in zip(paragraphs, split(texts), strict=True):
        if paragraph.document != current:
            if format == "d":
                yield "<d>"
            elif current is not None:
                yield ""
            current = paragraph.document
            num_documents += 1
        for sentence in sentences:
            if format == "d" and sentence.startswith("<d>"):
                raise UserError(
                    f"in format 'd' a sentence may not begin with <d>, as {sentence[:40]!r} does"
                )
            yield sentence
        num_sentences += len(sentences)
    _logger.info("documents: %s, sentences: %s", f"{num_documents:,}", f"{num_sentences:,}")


def _read(path: Path | None, documents: RawDocuments) -> Iterator[InputLine]:
    if documents == "file":
        return (DocumentLine("1", line, None) for line in read_lines(path))
    return read_input(path, format=documents)


def _document_of(line: InputLine) -> str | None:
    """Return the document of a line of text, None for a blank line and for a separator."""
    return line.document if isinstance(line, DocumentLine) and line.source.strip() else None
