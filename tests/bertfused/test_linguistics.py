"""Sentences and pronouns by spaCy: rules, a pipeline in a folder, and every message."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import spacy
from hypothesis import given, settings
from hypothesis import strategies as st
from spacy.language import Language

from bertfused import linguistics
from bertfused.errors import UserError
from bertfused.linguistics import (
    PIECE,
    load_splitter,
    load_tagger,
    rule_based,
    split_sentences,
    third_person,
)
from tests.tiny_pipelines import write_pronoun_pipeline

ENGLISH = rule_based("en")


def split(text: str, splitter: Language = ENGLISH) -> list[str]:
    (sentences,) = split_sentences([text], splitter)
    return sentences


def words(text: str) -> str:
    return "".join(text.split())


# ---- rules


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "Mr. Smith of St. Paul got up at 5 p.m. on Jan. 5.|He ate (e.g. bread).|Why?!|Yes."),
        ("de", "Dr. Klein kam z. B. am 3. Mai.|Er ging.|Wozu?"),
        ("fr", "M. Dupont est là.|Où ça ?|Ici !"),
        ("ro", "A venit.|Cine?"),
        ("xx", "A dog.|A cat."),
    ],
)
def test_rules_of_the_language(language: str, text: str) -> None:
    expected = text.split("|")
    assert split(" ".join(expected), rule_based(language)) == expected


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", 'He left.|"Why?"|she asked.|He said "Go."|Then he left.'),
        ("en", "He left.|(See below.)|[1] is new.|“Why?”|(“Yes.”)|'No.'|It (one) is so."),
        ("en", 'He left.|  ("Why?")|\t"So."|'),
        ("de", "Er ging.|„Wer?“|»Ja.«|«Ja.»|Er kam."),
        ("fr", "Il dit : « Oui. »|Puis.|« Non. »|«Oui.»|Il va."),
        ("es", "Hola.|¿Qué?|¡Bien!"),
    ],
)
@pytest.mark.parametrize("space", [" ", "\u00a0"])
def test_marks_stay_with_what_they_open_and_close(language: str, text: str, space: str) -> None:
    text = text.replace(" ", space)
    expected = [sentence.strip() for sentence in text.split("|") if sentence]
    assert split(text.replace("|", space), rule_based(language)) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("See No. 5.", ["See No.", "5."]),  # no abbreviation of spaCy's
        ("He came from the U.S. Then he left.", ["He came from the U.S. Then he left."]),
        ("It was plan B. He left.", ["It was plan B. He left."]),
        ("Well... Maybe… Yes.", ["Well... Maybe… Yes."]),
        ("He left.Then he came.", ["He left.", "Then he came."]),
        ("He left!Then he came.", ["He left!Then he came."]),  # no white space, no tokens
        ("A headline without a full stop", ["A headline without a full stop"]),
    ],
)
def test_what_rules_cannot_know(text: str, found: list[str]) -> None:
    assert split(text) == found


def test_marks_alone_are_no_sentence() -> None:
    assert split(".\u2028") == ["."]
    assert split("Why? ... !\u00a0» ( ") == ["Why? ... !\u00a0» ("]


def test_abbreviations_can_be_added() -> None:
    splitter = rule_based("en", ["No.", "Fig."])
    expected = ["See No. 5 (Fig. 3).", "No. I do.", "He said no.", "Why?"]
    for _ in range(2):
        assert split(" ".join(expected), splitter) == expected


# ---- nothing is lost

ODD = list("\u2028\u2029\u0085\v\f\x1c\x1d\x1e\x1f\r\x00\ufeff\u00a0\u202f\u3000\t 😀é\u200b\u0301")
MARKS = [
    ". ",
    "! ",
    "?",
    "。",
    ".",
    '"',
    " (",
    ") ",
    "« ",
    " »",
    "„",
    "“",
    "…",
    "Mr. ",
    "p.m.",
    "a",
]
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n")),
    st.lists(st.sampled_from(ODD + MARKS)).map("".join),
)


def check(paragraphs: list[str], splitter: Language) -> None:
    found = list(split_sentences(paragraphs, splitter))
    assert [words("".join(own)) for own in found] == [words(text) for text in paragraphs]
    for text, own in zip(paragraphs, found, strict=True):
        assert all(sentence and sentence == sentence.strip() for sentence in own)
        rest = text
        for sentence in own:  # white space inside a sentence is kept too
            before, _, rest = rest.partition(sentence)
            assert not before.strip()


@given(st.lists(texts, max_size=5))
def test_all_but_white_space_is_kept(paragraphs: list[str]) -> None:
    check(paragraphs, ENGLISH)


@settings(max_examples=50)
@given(st.lists(texts.map(lambda text: text * 3), max_size=5), st.integers(1, 12))
def test_all_but_white_space_is_kept_piece_by_piece(paragraphs: list[str], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linguistics, "PIECE", piece)
        check(paragraphs, ENGLISH)


def test_a_line_may_be_longer_than_spacy_takes() -> None:
    expected = [f"This is {'long ' * 40}sentence {number} of Mr. Smith." for number in range(5000)]
    text = " ".join(expected)
    assert len(text) > ENGLISH.max_length
    assert split(text) == expected


@pytest.mark.parametrize("text", ["word, " * 50_000, "x" * (3 * PIECE)])
def test_a_sentence_without_end_is_cut(text: str, caplog: pytest.LogCaptureFixture) -> None:
    sentences = split(text)
    assert words("".join(sentences)) == words(text)
    assert max(map(len, sentences)) < 2 * PIECE
    assert "a sentence of more than 100,000 characters is cut: '" in caplog.text


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linguistics, "PIECE", 10_000)

    def paragraphs(count: int) -> Iterator[str]:
        return (f"The word w{i} is new, and so is v{i}. " * 20 for i in range(count))

    tracemalloc.start()
    splitter = rule_based("en")
    peaks, strings = [], []
    for count in (50, 200):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        assert sum(map(len, split_sentences(paragraphs(count), splitter))) == 20 * count
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        strings.append(len(splitter.vocab.strings))
    tracemalloc.stop()
    assert strings[0] == strings[1]
    assert peaks[1] < 1.5 * peaks[0]


# ---- pronouns


@pytest.fixture(scope="module")
def pronouns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pronoun_pipeline(tmp_path_factory.mktemp("pipelines") / "pronouns")


def test_third_person(pronouns: Path) -> None:
    marks = {
        "The lamp is new.": False,
        "It is here.": True,
        "I see you.": False,
        "": False,
        "\u2028 \x00": False,
        "THEY left, and he?": True,
        "Italy": False,
        "x" * 1_000_001 + " it": True,
    }
    assert third_person(iter(marks), load_tagger(pronouns)) == list(marks.values())


def test_a_pronoun_needs_both_part_of_speech_and_person() -> None:
    tagger = spacy.blank("en")
    ruler = tagger.add_pipe("attribute_ruler")
    ruler.add([[{"ORTH": "me"}]], {"POS": "PRON", "MORPH": "Person=1|Number=Sing"})
    ruler.add([[{"ORTH": "goes"}]], {"POS": "VERB", "MORPH": "Number=Sing|Person=3"})
    ruler.add([[{"ORTH": "who"}]], {"POS": "PRON"})
    ruler.add([[{"ORTH": "her"}]], {"POS": "PRON", "MORPH": "Gender=Fem|Person=3"})
    assert third_person(["me", "goes", "who", "her"], tagger) == [False, False, False, True]


def test_an_installed_model() -> None:
    """Runs where one is installed."""
    installed = sorted(name for name in spacy.util.get_installed_models() if name[:3] == "en_")
    if not installed:
        pytest.skip("no English spaCy model is installed")
    sentences = ["The lamp is new.", "It is on the table.", "I like her."]
    assert third_person(sentences, load_tagger(installed[0])) == [False, True, True]
    assert split(" ".join(sentences), load_splitter(installed[0])) == sentences


# ---- pipelines in a folder, and messages


def test_a_splitter_in_a_folder(tmp_path: Path) -> None:
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer", config={"punct_chars": [";"]})
    pipeline.to_disk(tmp_path / "semicolons")
    splitter = load_splitter(tmp_path / "semicolons")
    assert split("One; two. Three; four", splitter) == ["One;", "two. Three;", "four"]


@pytest.mark.parametrize(
    ("language", "abbreviations", "message"),
    [
        ("xyz", [], "spaCy has no language 'xyz'; 'xx' has rules for any with full stops"),
        ("", [], "spaCy has no language ''; "),
        ("punctuation", [], "spaCy has no language 'punctuation'; "),
        ("en", ["z. B."], "an abbreviation is one word, not 'z. B.'"),
        ("en", [""], "an abbreviation is one word, not ''"),
        ("zh", ["No."], "spaCy's tokenizer of language 'zh' takes no abbreviations"),
    ],
)
def test_bad_rules(language: str, abbreviations: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        rule_based(language, abbreviations)
    assert str(error.value).startswith(message)


def test_a_language_that_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def blank(name: str) -> Language:
        raise ImportError("Thai needs PyThaiNLP")

    monkeypatch.setattr(spacy, "blank", blank)
    with pytest.raises(UserError, match="language 'th' needs a package: Thai needs"):
        rule_based("th")


@pytest.mark.parametrize("load", [load_splitter, load_tagger])
@pytest.mark.parametrize("name", ["en_absent_sm", "en", "", "."])
def test_no_such_pipeline(name: str, load: object, tmp_path: Path) -> None:
    assert callable(load)
    with pytest.raises(UserError) as error:
        load(name)
    assert str(error.value) == (
        f"no spaCy pipeline {name!r} is installed (python -m spacy download NAME) or stands in a "
        "folder of that name"
    )


@pytest.mark.parametrize("load", [load_splitter, load_tagger])
def test_a_pipeline_that_cannot_be_loaded(load: object, pronouns: Path, tmp_path: Path) -> None:
    assert callable(load)
    with pytest.raises(UserError, match="spaCy cannot load the pipeline 'numpy': load"):
        load("numpy")
    broken = spacy.load(pronouns)
    broken.to_disk(tmp_path / "broken")
    config = tmp_path / "broken" / "config.cfg"
    config.write_text(config.read_text().replace('"attribute_ruler"', '"unheard_of"'))
    with pytest.raises(UserError) as error:
        load(tmp_path / "broken")
    assert str(error.value).startswith(f"spaCy cannot load the pipeline '{tmp_path}/broken': ")
    assert "\n" not in str(error.value)


def test_pipelines_without_what_is_needed(pronouns: Path, tmp_path: Path) -> None:
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(UserError) as error:
        load_tagger(tmp_path / "blank")
    assert str(error.value) == (
        f"the spaCy pipeline '{tmp_path}/blank' finds no pronouns: it has no morphologizer or "
        "attribute_ruler"
    )
    with pytest.raises(UserError) as error:
        load_splitter(pronouns)
    assert str(error.value) == (
        f"the spaCy pipeline '{pronouns}' finds no sentences: it has no parser, senter or "
        "sentencizer"
    )
