"""Documents: the formats, the pairing of two sides, windows, and every message a user can get."""

import io
import json
import logging
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bertfused.errors import UserError
from bertfused.text import read_lines
from docnmt.documents import (
    LONG_DOCUMENT,
    Columns,
    CorpusSummary,
    DocumentLine,
    DocumentsConfig,
    Format,
    InputLine,
    SeparatorLine,
    _check_options,
    check_corpus,
    check_input,
    contexts,
    document_ids,
    read_corpus,
    read_input,
)

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return write_file


# ---- the formats, read as corpora


def test_blank_line_ends_a_document_on_both_sides(write: Write) -> None:
    source = write("x.en", "Hello.\nWho is it?\n \t\nBye.\n\n")
    target = write("x.de", "Hallo.\nWer ist da?\n\nTschüs.\n\n")
    assert list(read_corpus(source, target)) == [
        DocumentLine("1", "Hello.", "Hallo."),
        DocumentLine("1", "Who is it?", "Wer ist da?"),
        DocumentLine("2", "Bye.", "Tschüs."),
    ]


def test_d_line_opens_a_document_whatever_spaces_and_cr_surround_it(write: Write) -> None:
    source = write("x.en", "<d>\r\nHello.  \r\n\r\n <d>  \r\nBye.\r\n")
    target = write("x.de", "<d>\nHallo.\n\n<d>\nTschüs.\n")
    assert list(read_corpus(source, target, format="d")) == [
        DocumentLine("1", "Hello.  ", "Hallo."),
        DocumentLine("1", "", ""),
        DocumentLine("2", "Bye.", "Tschüs."),
    ]


def test_docids_give_each_line_its_document(write: Write) -> None:
    source, target = write("x.en", "a\n\nc\n"), write("x.de", "A\nB\nC\n")
    docids = write("x.docids", "talk 1\ntalk 1\nnews/2\n")
    assert list(read_corpus(source, target, format="docids", docids=docids)) == [
        DocumentLine("talk 1", "a", "A"),
        DocumentLine("talk 1", "", "B"),
        DocumentLine("news/2", "c", "C"),
    ]


def test_tsv_is_plain_tabs_and_holds_both_sides(write: Write) -> None:
    path = write("x.tsv", 'd1\tann\t"Hello\tHallo\nd2\tbob\tBye\t\n')
    assert list(read_corpus(path, path, format="tsv")) == [
        DocumentLine("d1", '"Hello', "Hallo"),
        DocumentLine("d2", "Bye", ""),
    ]
    swapped = Columns(document=0, source=3, target=2)
    assert next(read_corpus(path, path, format="tsv", columns=swapped)).source == "Hallo"


def test_jsonl_columns_are_names_and_ids_may_be_numbers(write: Write) -> None:
    rows = [{"talk": 7, "en": "a\u2028b", "de": "A"}, {"talk": 8, "en": "c", "de": "C"}]
    path = write("x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns(document="talk", source="en", target="de")
    assert list(read_corpus(path, path, format="jsonl", columns=columns)) == [
        DocumentLine("7", "a\u2028b", "A"),
        DocumentLine("8", "c", "C"),
    ]


WMT_XML = """<?xml version='1.0' encoding='utf-8'?>
<dataset id="newstest2021"><collection id="general">
  <doc origlang="en" id="news.1&#10;">
    <src lang="en"><p>
      <seg id="1">R&amp;D &lt;b&gt; &#233;</seg>
      <seg id="2">Two
        lines.</seg></p>
    </src>
    <ref lang="de" translator="A"><p><seg id="1">F&amp;E</seg><seg id="2">Zwei.</seg></p></ref>
    <ref lang="de" translator="B"><p><seg id="1">no</seg><seg id="2">no</seg></p></ref>
    <hyp system="S"><p><seg id="1">no</seg><seg id="2">no</seg></p></hyp>
  </doc>
  <doc origlang="en" id="suite" testsuite="x"><src lang="en"><seg id="1">no</seg></src></doc>
  <doc origlang="en" id="news.2">
    <src lang="en"><seg id="1">Last.</seg></src><ref lang="de"><seg id="1"/></ref>
  </doc>
</collection></dataset>
"""


def test_wmt_xml_gives_segments_and_the_first_reference(write: Write) -> None:
    path = write("x.xml", WMT_XML)
    assert list(read_corpus(path, path, format="wmt")) == [
        DocumentLine("news.1", "R&D <b> é", "F&E"),
        DocumentLine("news.1", "Two lines.", "Zwei."),
        DocumentLine("news.2", "Last.", ""),
    ]


def test_wmt_test_suite_documents_are_counted_not_dropped_silently(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check_input(write("x.xml", WMT_XML), format="wmt")
    assert "1 test-suite documents skipped" in caplog.text


def sgm(kind: str, *segments: str, document: str = "bbc.1") -> str:
    lines = [f'<seg id="{number}">{text}</seg>\n' for number, text in enumerate(segments, start=1)]
    return (
        f'<{kind} setid="t" srclang="any">\n<DOC sysid="ref" docid="{document}" genre="news">\n'
        f"<hl>\n{lines[0]}</hl>\n<p>\n{''.join(lines[1:])}</p>\n</DOC>\n</{kind}>\n"
    )


def test_wmt_sgm_is_read_leniently(write: Write) -> None:
    source = write("x-src.en.sgm", sgm("srcset", "AT&T &amp; co", "a < b &foo;"))
    target = write("x-ref.de.sgm", sgm("refset", "AT&amp;T", "über"))
    assert list(read_corpus(source, target, format="wmt")) == [
        DocumentLine("bbc.1", "AT&T & co", "AT&T"),
        DocumentLine("bbc.1", "a < b &foo;", "über"),
    ]


def test_source_alone_has_no_target(write: Write) -> None:
    assert list(read_corpus(write("x.en", "a\n"))) == [DocumentLine("1", "a", None)]


def test_lines_arrive_before_the_file_has_been_read(write: Write) -> None:
    path = write("x.jsonl", '{"document": 1, "source": "a"}\nbroken\n')
    assert next(read_corpus(path, format="jsonl")) == DocumentLine("1", "a", None)
    xml = write("x.xml", WMT_XML.replace("</dataset>", ""))
    assert next(read_input(xml, format="wmt")) == DocumentLine("news.1", "R&D <b> é", None)


# ---- input to translate: one item an output line


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("blank", "\na\n \n\nb", ["", "a", "", "", "b"]),
        ("d", "<d> \n<d>\na\n\nb\n", ["<d>", "<d>", "a", "", "b"]),
    ],
)
def test_every_input_line_has_its_place_in_the_output(
    write: Write, format: Format, text: str, expected: list[str]
) -> None:
    items = list(read_input(write("x.en", text), format=format))
    copied = [item.text if isinstance(item, SeparatorLine) else item.source for item in items]
    assert copied == expected


def test_blank_sentence_inside_a_document_is_no_separator(write: Write) -> None:
    items = list(read_input(write("x.en", "<d>\na\n\n"), format="d"))
    assert items == [
        SeparatorLine("<d>"),
        DocumentLine("1", "a", None),
        DocumentLine("1", "", None),
    ]
    assert list(document_ids(items)) == [None, "1", "1"]


def test_records_and_segments_have_one_output_line_each(write: Write) -> None:
    tsv = write("x.tsv", "d1\t-\ta\nd1\t-\t\nd2\t-\tb\n")
    assert [line.source for line in read_corpus(tsv, format="tsv")] == ["a", "", "b"]
    assert list(document_ids(read_input(tsv, format="tsv"))) == ["d1", "d1", "d2"]
    xml = write("x.xml", WMT_XML)
    assert list(document_ids(read_input(xml, format="wmt"))) == ["news.1", "news.1", "news.2"]


def test_input_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"<d>\na\n<d>b\n")))
    lines = read_input(None, format="d")
    assert [next(lines), next(lines)] == [SeparatorLine("<d>"), DocumentLine("1", "a", None)]
    with pytest.raises(UserError, match="standard input, line 3: a <d> line holds nothing else"):
        next(lines)


# ---- windows


@given(
    documents=st.lists(
        st.lists(st.sampled_from(["", " ", "x", "y"]), min_size=1, max_size=8), max_size=6
    ),
    previous=st.integers(0, 4),
)
def test_windows_are_the_preceding_sentences_of_the_same_document(
    documents: list[list[str]], previous: int
) -> None:
    """Every sentence gets one window, in order, and nothing leaks from another document."""
    lines = [
        # Numbering makes each sentence unlike every other, so that a leak cannot hide.
        DocumentLine(str(number), f"{text}{number}.{place}" if text.strip() else text, None)
        for number, document in enumerate(documents)
        for place, text in enumerate(document)
    ]
    windows = list(contexts(iter(lines), previous))
    assert len(windows) == len(lines)
    for index, (line, window) in enumerate(zip(lines, windows, strict=True)):
        before = [
            other.source
            for other in lines[:index]
            if other.document == line.document and other.source.strip()
        ]
        assert window == tuple(before[max(0, len(before) - previous) :])


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=5))
def test_windows_of_a_file_do_not_cross_its_separators(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[str]]
) -> None:
    path = tmp_path_factory.mktemp("documents") / "x.en"
    path.write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")
    lines = list(read_input(path))
    windows = list(contexts(lines, previous=1))
    expected: list[tuple[str, ...]] = []
    for document in documents:
        expected += [(), *((text,) for text in document[:-1]), ()]
    assert windows == expected[:-1]


def test_separators_have_no_context() -> None:
    lines: list[InputLine] = [
        DocumentLine("1", "a", None),
        SeparatorLine(""),
        DocumentLine("2", "b", None),
    ]
    assert list(contexts(lines, previous=3)) == [(), (), ()]


# ---- what is refused, and where


@pytest.mark.parametrize(
    ("format", "source", "target", "message"),
    [
        ("blank", "a\n\nb\n", "A\nB\nC\n", "x.en, line 2, is blank but {}x.de, line 2, is not"),
        ("blank", "a\nb\nc\n", "A\n\nC\n", "x.de, line 2, is blank but {}x.en, line 2, is not"),
        (
            "blank",
            "a\nb\n\n",
            "A\n\n",
            "x.de, line 2, is blank but {}x.en, line 2, is not ({}x.en has 3 lines, {}x.de has 2)",
        ),
        ("blank", "a\nb\n", "A\n", "x.en has 2 lines but {}x.de has 1"),
        ("blank", "a\n", "A\nB\nC\n", "x.en has 1 lines but {}x.de has 3"),
        ("blank", "a\n\n\nb\n", "A\n\n\nB\n", "x.en, line 3: an empty document"),
        ("blank", "\na\n", "\nA\n", "x.en, line 1: an empty document"),
        (
            "d",
            "<d>\na\n<d>\nb\n",
            "<d>\nA\nB\nC\n",
            "x.en, line 3, is a <d> line but {}x.de, line 3",
        ),
        (
            "d",
            "<d>\na\n",
            "<d>\nA\n<d> B\n",
            "x.de, line 3: a <d> line holds nothing else, not '<d> B'",
        ),
        ("d", "a\n<d>\n", "A\n<d>\n", "x.en, line 1: text before the first <d> line"),
        ("d", "<d>\n<d>\na\n", "<d>\n<d>\nA\n", "x.en, line 1: an empty document"),
        ("d", "<d>\na\n<d>\n", "<d>\nA\n<d>\n", "x.en, line 3: an empty document"),
    ],
)
def test_text_corpora_are_refused_with_file_and_line(
    write: Write, format: Format, source: str, target: str, message: str
) -> None:
    paths = write("x.en", source), write("x.de", target)
    with pytest.raises(UserError) as error:
        check_corpus(*paths, format=format)
    folder = f"{paths[0].parent}/"
    assert folder + message.replace("{}", folder) in str(error.value)


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        (
            "tsv",
            "d\t-\ta\tA\nd\t-\n",
            "line 2: no column 2 (source; columns count from 0), the line has 2",
        ),
        ("tsv", "\t-\ta\tA\n", "line 1: the document id is empty"),
        ("tsv", "d\t-\ta\ne\t-\tb\nd\t-\tc\n", "line 3: document 'd' begins again"),
        ("jsonl", '{"document": "d", "source": "a"}\n\n', "line 2: not a JSON record"),
        ("jsonl", "[" * 100_000, "line 1: not a JSON record"),
        ("jsonl", "[1]\n", "line 1: not a JSON object"),
        ("jsonl", '{"document": "d"}\n', "line 1: no column 'source'"),
        ("jsonl", '{"document": "", "source": "a"}\n', "line 1: the document id is empty"),
        ("jsonl", '{"document": "d", "source": ["a"]}\n', "line 1: column 'source' is not text"),
        ("jsonl", '{"document": true, "source": "a"}\n', "line 1: column 'document' is not text"),
        (
            "jsonl",
            r'{"document": "d", "source": "a\nb"}',
            "line 1: column 'source' holds a line break",
        ),
        ("jsonl", r'{"document": "d", "source": "\ud83d"}', "'source' holds half a surrogate pair"),
    ],
)
def test_records_are_refused_with_file_and_line(
    write: Write, format: Format, text: str, message: str
) -> None:
    path = write("x", text)
    with pytest.raises(UserError) as error:
        check_input(path, format=format)
    assert str(path) in str(error.value) or "half a surrogate" in message
    assert message in str(error.value)


def test_missing_target_column(write: Write) -> None:
    path = write("x.tsv", "d\t-\ta\n")
    with pytest.raises(UserError, match="line 1: no column 3 \\(target"):
        check_corpus(path, path, format="tsv")
    with pytest.raises(UserError, match="columns name no target"):
        check_corpus(path, path, format="tsv", columns=Columns(document=0, source=2))


def test_docids_are_refused_with_file_and_line(write: Write) -> None:
    text = write("x.en", "a\nb\nc\n")
    for ids, message in [
        ("1\n2\n", "x.en has 3 lines but .*x.docids has 2 document ids"),
        ("1\n1\n2\n2\n", "x.en has 3 lines but .*x.docids has 4 document ids"),
        ("1\n\n2\n", "x.docids, line 2: the document id is empty"),
        ("1\n2\n1\n", "x.docids, line 3: document '1' begins again"),
    ]:
        with pytest.raises(UserError, match=message):
            check_input(text, format="docids", docids=write("x.docids", ids))


WMT_ERRORS = [
    ("hello\n", "line 1: not XML: syntax error"),
    ("", "line 1: not XML: no element found"),
    ('<dataset>\n<doc id="1"><src><seg>a</src></doc></dataset>', "line 2: not XML: mismatched tag"),
    ("<dataset>\n</dataset>", "has no <doc>"),
    ("<dataset>\n<doc></doc></dataset>", "line 2: a <doc> without an id"),
    ('<dataset>\n<doc id="1"><ref/></doc></dataset>', "line 2: document '1' has no src segments"),
    ('<dataset>\n<seg id="1">a</seg></dataset>', "line 2: <seg> outside a <doc>"),
    (
        '<dataset>\n<doc id="1"><seg id="1">a</seg></doc>\n<doc id="1"><seg id="1">b</seg></doc>'
        "</dataset>",
        "line 3: document '1' begins again",
    ),
    ('<srcset>\n<doc docid="1">\n<seg id="1">a</seg>\n', "ends inside document '1'"),
    ('<srcset>\n<doc docid="1"><seg id="1">a</seg></doc>\n', "ends inside <srcset>"),
    (
        '<srcset>\n<doc docid="1">\n<seg id="1">a\n<seg id="2">b</seg>',
        "line 4: <seg> inside a <seg>",
    ),
    ('<srcset>\n<doc docid="1"><seg id="1">a</doc>\n', "line 2: </doc> inside a <seg>"),
    (
        '<srcset>\n<doc docid="1"><seg id="1">a</seg>\n<doc docid="2">',
        "line 3: <doc> inside document '1'",
    ),
]


@pytest.mark.parametrize(("text", "message"), WMT_ERRORS)
def test_wmt_files_are_refused_with_file_and_line(write: Write, text: str, message: str) -> None:
    path = write("x.xml", text)
    with pytest.raises(UserError) as error:
        check_input(path, format="wmt")
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE dataset [<!ENTITY x SYSTEM "secret.txt">]>',
        '<!DOCTYPE dataset [<!ENTITY a "ha"><!ENTITY x "&a;&a;&a;">]>',
        '<!DOCTYPE dataset [<!ENTITY % x SYSTEM "secret.txt"> %x;]>',
        '<!DOCTYPE dataset SYSTEM "secret.dtd">',
    ],
)
def test_wmt_entities_are_neither_fetched_nor_expanded(write: Write, doctype: str) -> None:
    write("secret.txt", "secret")
    write("secret.dtd", '<!ENTITY x "secret">')
    body = '<dataset><doc id="1"><src><seg id="1">&x;</seg></src></doc></dataset>'
    with pytest.raises(UserError, match=r"line [12]: entity '[ax]'"):
        check_input(write("x.xml", f"{doctype}\n{body}"), format="wmt")


def test_wmt_entity_declared_in_sgm_stays_text(write: Write) -> None:
    text = '<!DOCTYPE mteval [<!ENTITY x "secret">]>\n' + sgm("srcset", "&x;")
    assert [line.source for line in read_corpus(write("x.sgm", text), format="wmt")] == ["&x;"]


def test_wmt_sides_must_have_the_same_documents_and_segments(write: Write) -> None:
    source = write("src.sgm", sgm("srcset", "a", "b"))
    for target, message in [
        (
            sgm("refset", "A", "B", document="cnn.2"),
            "src.sgm, line 4, is segment '1' of document 'bbc.1'",
        ),
        (sgm("refset", "A"), "src.sgm has 2 segments but .*ref.sgm has 1"),
        (sgm("refset", "A", "B", "C"), "src.sgm has 2 segments but .*ref.sgm has 3"),
    ]:
        with pytest.raises(UserError, match=message):
            check_corpus(source, write("ref.sgm", target), format="wmt")
    with pytest.raises(UserError, match="line 4: <seg> outside <src> and <ref>"):
        check_corpus(source, source, format="wmt")


def test_options_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    with pytest.raises(UserError, match="unknown document format 'xml'; it is one of blank, d"):
        _check_options("xml", None, None)
    with pytest.raises(UserError, match="needs a file of document identifiers"):
        read_corpus(path, format="docids")
    with pytest.raises(UserError, match="but the format is 'blank'"):
        read_corpus(path, docids=path)
    with pytest.raises(UserError, match="'tsv' are numbers from 0, but document = 'a'"):
        read_input(path, format="tsv", columns=Columns(document="a", source=1))


def test_one_long_document_is_a_warning(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    check_corpus(write("short.en", "a\n" * LONG_DOCUMENT))
    assert not caplog.records
    summary = check_corpus(write("x.en", "a\n" * (LONG_DOCUMENT + 1)))
    assert summary == CorpusSummary(LONG_DOCUMENT + 1, documents=1, longest=LONG_DOCUMENT + 1)
    assert "all 1,001 sentences are one document; is the format right ('blank')?" in caplog.text


# ---- configuration


def test_config_defaults_and_limits() -> None:
    config = DocumentsConfig()
    assert (config.previous, config.segments, config.format) == (1, True, "blank")
    columns = {"document": "d", "source": "s", "target": "t"}
    jsonl = DocumentsConfig.model_validate({"format": "jsonl", "columns": columns})
    assert jsonl.columns == Columns(document="d", source="s", target="t")
    for wrong in (
        {"previous": -1},
        {"format": "xml"},
        {"prevoius": 1},
        {"columns": columns},
        {"format": "tsv", "columns": columns},
        {"format": "tsv", "columns": {"document": 0, "source": -1}},
        {"format": "jsonl", "columns": {"document": 0, "source": 1}},
    ):
        with pytest.raises(ValidationError):
            DocumentsConfig.model_validate(wrong)


def test_config_fields_are_described() -> None:
    for model in (DocumentsConfig, Columns):
        assert all(field.description for field in model.model_fields.values())


# ---- real corpora


def test_ted_talks(shared_data: Callable[[str], Path]) -> None:
    folder = shared_data("data/docmt-ted")
    for split, documents, lines in (("dev", 93, 9060), ("test", 23, 2294)):
        source, target = (folder / f"IWSLT2017.{split}.{language}" for language in ("en", "de"))
        summary = check_corpus(source, target, format="d")
        assert (summary.sentences, summary.documents) == (lines - documents, documents)
        items = list(read_input(source, format="d"))
        copied = [item.text if isinstance(item, SeparatorLine) else item.source for item in items]
        assert copied == ["<d>" if line.strip() == "<d>" else line for line in read_lines(source)]
        windows = list(contexts(items, previous=1))
        for (first, _), (second, window) in pairwise(zip(items, windows, strict=True)):
            if isinstance(second, DocumentLine):
                assert window == ((first.source,) if isinstance(first, DocumentLine) else ())


@pytest.mark.parametrize(
    ("name", "file", "documents"),
    [
        ("bcontrast", "train.tsv", 550),
        ("bcontrast", "dev.tsv", 78),
        ("bcontrast", "test1.tsv", 78),
        ("diabla", "diabla.tsv", 144),
        ("wesnoth", "wesnoth.en-de.tsv", 301),
        ("wesnoth", "wesnoth.en-fr.tsv", 294),
    ],
)
def test_dialogues(
    shared_data: Callable[[str], Path], name: str, file: str, documents: int
) -> None:
    path = shared_data(f"data/{name}") / file
    lines = list(read_corpus(path, path, format="tsv"))
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [tuple(line) for line in lines] == [(row[0], row[2], row[3]) for row in rows]
    assert len(list(groupby(line.document for line in lines))) == documents
    assert check_corpus(path, path, format="tsv").documents == documents
    first_windows = sum(not window for window in contexts(lines, previous=3))
    assert first_windows == documents


def test_one_corpus_says_the_same_in_every_format(
    shared_data: Callable[[str], Path], write: Write
) -> None:
    path = shared_data("data/bcontrast") / "dev.tsv"
    lines = list(read_corpus(path, path, format="tsv"))
    documents = [list(group) for _, group in groupby(lines, key=lambda line: line.document)]
    text = "\n\n".join("\n".join(line.source for line in document) for document in documents)
    marked = "".join(
        "<d>\n" + "".join(f"{line.source}\n" for line in document) for document in documents
    )
    records = "".join(json.dumps(line._asdict()) + "\n" for line in lines)
    sources = "".join(f"{line.source}\n" for line in lines)
    docids = write("x.docids", "".join(f"{line.document}\n" for line in lines))
    expected = list(contexts(lines, previous=2))
    for found in (
        read_corpus(write("blank", text)),
        read_corpus(write("d", marked), format="d"),
        read_corpus(write("jsonl", records), format="jsonl"),
        read_corpus(write("plain", sources), format="docids", docids=docids),
    ):
        assert list(contexts(found, previous=2)) == expected
