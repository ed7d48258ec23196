"""WMT's document files: the XML of 2021 and later, and the older SGML-like ones."""

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any
from xml.parsers import expat

from bertfused.errors import UserError
from bertfused.text import read_lines
from docnmt.records import Record, Side, at, name_of

logger = logging.getLogger(__name__)

# The files before 2021 look like XML but often are not (bare ampersands), so these roots are
# scanned for the few tags that matter; every other file must be well-formed.
_SGML_ROOTS = ("srcset", "refset", "tstset", "mteval", "doc")
_SGML_TAG = re.compile(r"<(/?)(srcset|refset|tstset|doc|seg)\b([^>]*)>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""([\w:-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_REFERENCE = re.compile(r"&(?:(amp|lt|gt|quot|apos)|#([0-9]{1,7})|#[xX]([0-9a-fA-F]{1,6}));")
_NAMED = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_LINES_BEFORE_ROOT = 100


def wmt_records(path: Path | None, side: Side, one_file: bool) -> Iterator[Record]:
    """Read the segments of one side; ``one_file`` says that the file holds both."""
    lines = read_lines(path)
    head = list(islice(lines, _LINES_BEFORE_ROOT))
    root = re.search(r"<([A-Za-z]\w*)", "\n".join(head))
    lines = chain(head, lines)
    reader = _WmtReader(path, side, one_file)
    is_sgml = root is not None and root[1].lower() in _SGML_ROOTS
    for _ in _scan_sgml(lines, reader) if is_sgml else _parse_xml(lines, reader):
        yield from reader.take()
    reader.finish()
    if reader.testsuites:
        logger.info("%s: %d test-suite documents skipped", name_of(path), reader.testsuites)


class _WmtReader:
    """Collect the segments of one side from the tags and the text of a WMT file."""

    def __init__(self, path: Path | None, side: Side, one_file: bool) -> None:
        self.path = path
        self.wanted = "src" if side == "source" else "ref"
        self.one_file = one_file
        self.testsuites = 0
        self._records: list[Record] = []
        self._seen: set[str] = set()
        self._open_sets: list[str] = []
        self._document: str | None = None
        self._element: str | None = None  # src, ref or hyp
        self._has_side = False  # the first <ref> of a document counts, others do not
        self._has_segment = False
        self._is_testsuite = False
        self._segment: tuple[int, str] | None = None  # line and id
        self._text: list[str] = []

    def open(self, name: str, attributes: dict[str, str], line: int) -> None:
        if self._segment is not None and name in ("doc", "seg"):
            raise UserError(f"{at(self.path, line)}: <{name}> inside a <seg>")
        if name == "doc":
            self._open_document(attributes, line)
        elif name in ("src", "ref", "hyp"):
            self._element = name
        elif name == "seg":
            if self._document is None:
                raise UserError(f"{at(self.path, line)}: <seg> outside a <doc>")
            if self.one_file and self._element is None:
                raise UserError(
                    f"{at(self.path, line)}: <seg> outside <src> and <ref>; this file holds one "
                    "side, name the other side's file too"
                )
            self._segment = line, attributes.get("id", "")
            self._text.clear()
        elif name.endswith("set") and name != "dataset":
            self._open_sets.append(name)

    def _open_document(self, attributes: dict[str, str], line: int) -> None:
        document = " ".join((attributes.get("docid") or attributes.get("id") or "").split())
        if self._document is not None:
            raise UserError(f"{at(self.path, line)}: <doc> inside document {self._document!r}")
        if not document:
            raise UserError(f"{at(self.path, line)}: a <doc> without an id")
        self._is_testsuite = "testsuite" in attributes  # as sacreBLEU: it has no references
        if self._is_testsuite:
            self.testsuites += 1
        elif document in self._seen:
            raise UserError(f"{at(self.path, line)}: document {document!r} begins again")
        self._seen.add(document)
        self._document = document
        self._element = None
        self._has_side = self._has_segment = False

    def close(self, name: str, line: int) -> None:
        if name == "seg" and self._segment is not None and self._document is not None:
            if self._is_wanted():
                text = re.sub(r"[ \t]*[\r\n]+[ \t]*", " ", "".join(self._text).strip(" \t\r\n"))
                self._records.append(
                    Record(self._segment[0], self._document, text, self._segment[1])
                )
                self._has_segment = True
            self._segment = None
        elif name in ("src", "ref", "hyp"):
            self._has_side = self._has_side or name == self.wanted
            self._element = None
        elif name == "doc":
            if self._segment is not None:
                raise UserError(f"{at(self.path, line)}: </doc> inside a <seg>")
            if not self._has_segment and not self._is_testsuite:
                where = at(self.path, line)
                raise UserError(
                    f"{where}: document {self._document!r} has no {self.wanted} segments"
                )
            self._document = None
        elif self._open_sets and name == self._open_sets[-1]:
            self._open_sets.pop()

    def text(self, text: str) -> None:
        if self._segment is not None:
            self._text.append(text)

    def take(self) -> list[Record]:
        records, self._records = self._records, []
        return records

    def finish(self) -> None:
        if self._document is not None:
            raise UserError(f"{name_of(self.path)} ends inside document {self._document!r}")
        if self._open_sets:
            raise UserError(f"{name_of(self.path)} ends inside <{self._open_sets[-1]}>")
        if not self._seen:
            raise UserError(f"{name_of(self.path)} has no <doc>; is it a WMT file?")

    def _is_wanted(self) -> bool:
        if self._is_testsuite:
            return False
        return self._element is None or (self._element == self.wanted and not self._has_side)


def _parse_xml(lines: Iterable[str], reader: _WmtReader) -> Iterator[None]:
    """Feed well-formed XML to the reader, a line a step; entities of its own are refused."""
    parser = expat.ParserCreate()

    def refuse_entity(name: str, *_: Any) -> None:
        raise UserError(
            f"{at(reader.path, parser.CurrentLineNumber)}: entity {name!r}; WMT files may only "
            "use the five of XML"
        )

    parser.EntityDeclHandler = refuse_entity
    parser.SkippedEntityHandler = refuse_entity
    parser.StartElementHandler = lambda name, attributes: reader.open(
        name, attributes, parser.CurrentLineNumber
    )
    parser.EndElementHandler = lambda name: reader.close(name, parser.CurrentLineNumber)
    parser.CharacterDataHandler = reader.text
    try:
        for line in lines:
            parser.Parse(line + "\n")
            yield
        parser.Parse("", True)
    except expat.ExpatError as error:
        problem = expat.ErrorString(error.code)
        raise UserError(f"{at(reader.path, error.lineno)}: not XML: {problem}") from None


def _scan_sgml(lines: Iterable[str], reader: _WmtReader) -> Iterator[None]:
    """Feed the older, SGML-like files to the reader, a line a step."""
    for number, line in enumerate(lines, start=1):
        position = 0
        for tag in _SGML_TAG.finditer(line):
            reader.text(_unescape(line[position : tag.start()]))
            position = tag.end()
            if tag[1]:
                reader.close(tag[2].lower(), number)
            else:
                reader.open(tag[2].lower(), _attributes(tag[3]), number)
        reader.text(_unescape(line[position:]) + "\n")
        yield


def _attributes(text: str) -> dict[str, str]:
    """Read the attributes of a tag.

    >>> _attributes('docid="a&amp;b" genre=news')
    {'docid': 'a&b', 'genre': 'news'}
    """
    return {
        match[1].lower(): _unescape(match[2] or match[3] or match[4] or "")
        for match in _ATTRIBUTE.finditer(text)
    }


def _unescape(text: str) -> str:
    """Replace XML's own five entities and character numbers; any other ampersand is text.

    >>> _unescape("AT&T &lt;3 &amp; &#233;&foo;")
    'AT&T <3 & é&foo;'
    """

    def character(match: re.Match[str]) -> str:
        if match[1]:
            return _NAMED[match[1]]
        code = int(match[2]) if match[2] else int(match[3], 16)
        is_character = code < 0xD800 or 0xDFFF < code <= 0x10FFFF
        return chr(code) if is_character else match[0]

    return _REFERENCE.sub(character, text)
