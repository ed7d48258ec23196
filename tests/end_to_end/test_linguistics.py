"""``docnmt split-sentences`` and ``evaluate --by-pronouns`` through their command lines."""

import gzip
import json
from pathlib import Path

import pytest
import sacrebleu
import spacy
from hypothesis import given, settings
from hypothesis import strategies as st

from bertfused.text import read_lines
from docnmt.documents import DocumentLine, Format, SeparatorLine, read_input
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import fail, leftovers, succeed, uncoloured, write_lines
from tests.tiny_pipelines import write_pronoun_pipeline

SPLIT = "docnmt split-sentences --language en"


def split(text: str, *options: object) -> list[str]:
    return succeed(SPLIT, *options, stdin=text.encode()).lines


# ---- split-sentences

RAW = """Mr. Smith has a lamp. It is
new. He likes it.

Who is it? \t
Me.\r


The end. Or not"""


def test_a_line_is_a_paragraph_and_a_blank_line_ends_a_document() -> None:
    ran = succeed(SPLIT, stdin=RAW.encode())
    assert ran.lines == [
        *("Mr. Smith has a lamp.", "It is", "new.", "He likes it.", ""),
        *("Who is it?", "Me.", ""),
        *("The end.", "Or not"),
    ]
    assert ran.err == "documents: 3, sentences: 8\n"
    assert succeed(SPLIT, "--quiet", stdin=RAW.encode()).err == ""
    assert succeed(SPLIT, stdin=ran.out).out == ran.out


def test_wrapped_lines_are_joined() -> None:
    assert split(RAW, "--wrapped") == [
        *("Mr. Smith has a lamp.", "It is new.", "He likes it.", ""),
        *("Who is it?", "Me.", ""),
        *("The end.", "Or not"),
    ]
    joined = split("One\ntwo. Three\n\nfour.\n", "--wrapped", "--documents", "file")
    assert joined == ["One two.", "Three", "four."]


def test_each_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"One. Two.\n\nThree.")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"\n\nFour.\n\n"))
    (tmp_path / "empty.txt").write_bytes(b" \n")
    files = [word for path in sorted(tmp_path.iterdir()) for word in ("--input", path)]
    output = tmp_path / "out.gz"
    ran = succeed(SPLIT, *files, "--documents", "file", "--output", output)
    assert list(read_lines(output)) == ["One.", "Two.", "Three.", "", "Four."]
    assert f"{tmp_path}/empty.txt holds no text\n" in ran.err
    blank = succeed(SPLIT, *files).lines
    assert blank == ["One.", "Two.", "", "Three.", "", "Four."]


def test_d_lines_in_and_out() -> None:
    text = "<d>\nOne. Two.\n\nThree.\n<d>\n<d> \r\nFour.\n<d>\n"
    ran = succeed(SPLIT, "--documents", "d", "--format", "d", stdin=text.encode())
    assert ran.lines == ["<d>", "One.", "Two.", "Three.", "<d>", "Four."]
    assert "standard input: empty documents left out: 2\n" in ran.err
    assert split(text, "--documents", "d") == ["One.", "Two.", "Three.", "", "Four."]
    assert split("One.\n\nTwo.", "--format", "d") == ["<d>", "One.", "<d>", "Two."]


def test_nothing_gives_nothing() -> None:
    for format in ("blank", "d"):
        ran = succeed(SPLIT, "--format", format, stdin=b"\n \n")
        assert (ran.lines, ran.err.splitlines()) == (
            [],
            ["standard input holds no text", "documents: 0, sentences: 0"],
        )


def test_abbreviations() -> None:
    assert split("See No. 5 in Fig. 3.") == ["See No.", "5 in Fig.", "3."]
    both = ["--abbreviation", "No.", "--abbreviation", "Fig."]
    assert split("See No. 5 in Fig. 3.", *both) == ["See No. 5 in Fig. 3."]


def test_a_pipeline_in_a_folder(tmp_path: Path) -> None:
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer", config={"punct_chars": [";"]})
    pipeline.to_disk(tmp_path / "semicolons")
    stdin = b"One; two. Three."
    ran = succeed("docnmt split-sentences --pipeline", tmp_path / "semicolons", stdin=stdin)
    assert ran.lines == ["One;", "two. Three."]


lines = st.lists(
    st.lists(st.sampled_from([*"\r\u2028\u0085\u00a0\x00é. ", "a. B", "<d>", "Mr. X", '"'])).map(
        "".join
    ),
    max_size=8,
)


@settings(max_examples=25)
@given(lines, st.booleans(), st.sampled_from(["blank", "file"]))
def test_documents_and_their_text_are_kept(text: list[str], wrapped: bool, documents: str) -> None:
    options = ["--documents", documents, *(["--wrapped"] if wrapped else [])]
    found = split("\n".join(text), *options)
    expected: list[str] = [""]
    for line in text:
        if line.strip() or documents == "file":
            expected[-1] += "".join(line.split())
        else:
            expected.append("")
    assert [own for own in expected if own] == [
        "".join("".join(document).split()) for document in documents_of(found)
    ]


def documents_of(found: list[str]) -> list[list[str]]:
    """Read lines of the format "blank", none of which is an empty document."""
    documents: list[list[str]] = [[]]
    for line in found:
        if line:
            documents[-1].append(line)
        else:
            documents.append([])
    assert all(documents) or documents == [[]]
    return [document for document in documents if document]


@pytest.mark.parametrize("format", ["blank", "d"])
def test_the_output_is_what_the_other_commands_read(tmp_path: Path, format: Format) -> None:
    split(RAW, "--format", format, "--output", tmp_path / "out")
    read = list(read_input(tmp_path / "out", format=format))
    assert sum(isinstance(line, SeparatorLine) for line in read) == (2 if format == "blank" else 3)
    names = [line.document for line in read if isinstance(line, DocumentLine)]
    assert names == ["1", "1", "1", "1", "2", "2", "3", "3"]


@pytest.mark.parametrize(
    ("line", "stdin", "message"),
    [
        ("", b"", "split-sentences needs --language or --pipeline, and not both"),
        (
            "--language en --pipeline x",
            b"",
            "split-sentences needs --language or --pipeline, and not both",
        ),
        (
            "--pipeline x --abbreviation No.",
            b"",
            "--abbreviation adds to the rules of --language, not to a --pipeline",
        ),
        (
            "--language english",
            b"",
            "spaCy has no language 'english'; 'xx' has rules for any with full stops",
        ),
        (
            "--pipeline en_absent_sm",
            b"",
            "no spaCy pipeline 'en_absent_sm' is installed (python -m spacy download NAME) or "
            "stands in a folder of that name",
        ),
        ("--language en --documents d", b"a", "standard input, line 1: text before the first <d>"),
        (
            "--language en --format d",
            b"A dog. <d> is a tag.",
            "in format 'd' a sentence may not begin with <d>, as '<d> is a tag.' does",
        ),
        ("--language en", b"a\n\xff", "standard input, line 2, byte offset 2: 0xff is not UTF-8"),
        ("--language en --input absent", b"", "cannot read absent: No such file or directory"),
    ],
)
def test_messages(line: str, stdin: bytes, message: str, tmp_path: Path) -> None:
    said = fail(f"docnmt split-sentences {line}", "--output", tmp_path / "out", stdin=stdin)
    assert said.startswith(message)
    assert leftovers(tmp_path) == []


def test_help() -> None:
    text = uncoloured(succeed("docnmt split-sentences --help").out.decode())
    for word in ("--language", "--pipeline", "--documents", "--wrapped", "blank|d|file"):
        assert word in text


# ---- evaluate --by-pronouns


@pytest.fixture(scope="module")
def cats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a pipeline to which "cat" is a pronoun."""
    return write_pronoun_pipeline(tmp_path_factory.mktemp("pipelines") / "cats", ["cat"])


def test_bleu_by_pronouns(small: Small, cats: Path, tmp_path: Path) -> None:
    source, reference = small.text / "test.en", small.text / "test.de"
    output = tmp_path / "hyp"
    files = ["--source", source, "--reference", reference, "--output", output]
    ran = succeed("bertfused evaluate", small.plain, *files, "--by-pronouns", cats, "--json")
    results = json.loads(ran.out)
    rows = list(zip(*map(read_lines, (source, output, reference)), strict=True))
    for key, wanted in (("bleu-pronoun", True), ("bleu-no-pronoun", False)):
        group = [row for row in rows if ("cat" in row[0].split()) == wanted]
        _, hypotheses, references = zip(*group, strict=True)
        assert 0 < len(group) == results[key]["sentences"] < 12
        expected = sacrebleu.corpus_bleu(hypotheses, [references]).score
        assert results[key]["value"] == pytest.approx(expected)
        assert results[key]["signature"] == results["bleu"]["signature"]
    printed = succeed("bertfused evaluate", small.plain, *files, "--by-pronouns", cats).lines
    assert printed[2:] == [results[key]["text"] for key in ("bleu-pronoun", "bleu-no-pronoun")]
    num_cats = results["bleu-pronoun"]["sentences"]
    assert printed[2].startswith(
        f"with a third-person pronoun ({num_cats} sentences): BLEU|nrefs:1"
    )
    assert printed[3].startswith(f"without ({12 - num_cats} sentences): BLEU|nrefs:1")
    assert printed[:2] == succeed("bertfused evaluate", small.plain, *files).lines


def test_a_group_may_be_empty(small: Small, cats: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "en", ["old dog", "red fish"])
    reference = write_lines(tmp_path / "de", ["alt Hund", "rot Fisch"])
    files = ["--source", source, "--reference", reference, "--by-pronouns", cats]
    printed = succeed("bertfused evaluate", small.plain, *files).lines
    assert printed[2] == "with a third-person pronoun (0 sentences): none"
    assert printed[3].startswith("without (2 sentences): BLEU|")
    write_lines(source, ["", "old dog", "", "", "red fish"])  # separators are no sentences
    write_lines(reference, ["", "alt Hund", "", "", "rot Fisch"])
    assert succeed("docnmt evaluate", small.plain, *files).lines[-2:] == printed[-2:]
    results = json.loads(succeed("docnmt evaluate", small.plain, *files, "--json").out)
    assert (results["bleu-pronoun"]["value"], results["bleu-pronoun"]["sentences"]) == (None, 0)


def test_a_missing_pipeline_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    files = ["--source", tmp_path / "en", "--reference", tmp_path / "de"]
    said = fail("docnmt evaluate", tmp_path / "run", *files, "--by-pronouns", "en_absent_sm")
    assert said == (
        "no spaCy pipeline 'en_absent_sm' is installed (python -m spacy download NAME) or stands "
        "in a folder of that name"
    )
    spacy.blank("en").to_disk(tmp_path / "blank")
    said = fail("docnmt evaluate", tmp_path / "run", *files, "--by-pronouns", tmp_path / "blank")
    assert said.endswith("finds no pronouns: it has no morphologizer or attribute_ruler")
