"""Contrastive sets: each format from small files, and one sentence for each that is broken."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertfused.errors import UserError
from docnmt.contrastive import ContrastiveItem, read_contrastive, write_contrastive
from docnmt.contrastive_formats import SetFormat, guess_format, read_set
from tests.end_to_end.corpus import write_lines

# ---------------------------------------------------------------------------- JSON lines

LEAST = {"source": "It rang.", "candidates": ["Sie klingelte.", "Er klingelte."], "correct": 1}


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_an_item_may_say_only_what_it_must(tmp_path: Path) -> None:
    path = write_json(tmp_path / "set.jsonl", LEAST)
    item = ContrastiveItem("It rang.", ("Sie klingelte.", "Er klingelte."), 1)
    assert read_set(path) == read_contrastive(path) == [item]
    write_contrastive(tmp_path / "again.jsonl", [item])
    assert json.loads((tmp_path / "again.jsonl").read_text()) == LEAST


def test_target_context_is_shared_or_of_each_candidate(tmp_path: Path) -> None:
    shared = {**LEAST, "target_context": ["Eins.", "Zwei."], "context": ["One.", "Two."]}
    own = {**LEAST, "target_context": [["Eins."], ["Zwei."]], "distance": 0, "category": "x"}
    path = write_lines(tmp_path / "set.jsonl", map(json.dumps, (shared, own)))
    first, second = read_set(path)
    assert first.context == ("One.", "Two.")
    assert first.target_contexts == (("Eins.", "Zwei."), ("Eins.", "Zwei."))
    assert first.distance is None
    assert second.target_contexts == (("Eins.",), ("Zwei.",))
    assert (second.distance, second.category) == (0, "x")


@pytest.mark.parametrize(
    "item",
    [
        ContrastiveItem("a\u2028b", ("ü", "é"), 0, ("c",), (("d",), ("d",)), "kind", 3),
        ContrastiveItem("a", ("b", "b", "c"), 2, (), (("d", "e"), ("d",), ()), "", 0),
        ContrastiveItem("a", ("b", "c"), 0, (), ((), ())),
        ContrastiveItem("a", ("b", "c"), 0, ("", "x"), ()),
    ],
)
def test_written_items_are_read_back(tmp_path: Path, item: ContrastiveItem) -> None:
    path = tmp_path / "set.jsonl.gz"
    write_contrastive(path, [item, item])
    assert read_set(path) == [item, item]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1]", "a JSON object is expected, not [1]"),
        ({"contexts": []}, "unknown key 'contexts'; the keys are context, source, candidates, "),
        ({"source": None}, "'source' must be a string, not null"),
        ({"source": " "}, "the source sentence is blank"),
        ({"candidates": "ab"}, "'candidates' must be a list of strings, not \"ab\""),
        ({"candidates": ["a", 1]}, "'candidates' must be a list of strings, not [\"a\", 1]"),
        ({"candidates": ["a"], "correct": 0}, "1 candidate(s), but an item has two or more"),
        ({"candidates": ["a", ""]}, "a candidate is blank"),
        ({"correct": 2}, "candidate 2 cannot be the right one of 2, counted from 0"),
        ({"correct": -1}, "candidate -1 cannot be the right one of 2, counted from 0"),
        ({"correct": True}, "'correct' must be a whole number, not true"),
        ({"correct": 0.5}, "'correct' must be a whole number, not 0.5"),
        ({"context": "a" * 99}, f"'context' must be a list of strings, not \"{'a' * 38}…"),
        ({"target_context": [["a"]]}, "1 target contexts for 2 candidates"),
        ({"target_context": [["a"], [1]]}, "'target_context' must be a list of strings, not [1]"),
        ({"target_context": ["a", ["b"]]}, "'target_context' must be a list of strings, not ["),
        ({"distance": -2}, "the distance -2 is negative"),
        ({"distance": "2"}, "'distance' must be a whole number, not \"2\""),
        ({"category": 1}, "'category' must be a string, not 1"),
        ({"category": "\ud800"}, "'category' holds half a surrogate pair"),
        ({"source": "\udc00 a"}, "'source' holds half a surrogate pair"),
        ({"candidates": ["a", "\ud800"]}, "'candidates' holds half a surrogate pair"),
        (f'{{"correct": {"1" * 5000}}}', "not JSON: Exceeds the limit"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, change: Any, message: str) -> None:
    line = change if isinstance(change, str) else json.dumps({**LEAST, **change})
    path = write_lines(tmp_path / "set.jsonl", [json.dumps(LEAST), line])
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value).startswith(f"{path}, line 2: {message}")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for key in LEAST:
        path = write_json(tmp_path / "set.jsonl", {k: v for k, v in LEAST.items() if k != key})
        with pytest.raises(UserError, match=f"line 1: '{key}' is missing"):
            read_set(path)


# ---------------------------------------------------------------------------- Voita

VOITA = {
    "src": "A . _eos B . _eos C .",
    "dst": ["a . _eos b . _eos c .", "a . _eos d . _eos c ."],
    "true_ind": 1,
    "ctx_dist": 2,
}


def test_voita(tmp_path: Path) -> None:
    other = {**VOITA, "true_ind": 0}
    del other["ctx_dist"]
    path = write_json(tmp_path / "deixis.json", [VOITA, other])
    first, second = read_set(path)
    assert first == ContrastiveItem(
        "C .", ("c .", "c ."), 1, ("A .", "B ."), (("a .", "b ."), ("a .", "d .")), "", 2
    )
    assert (second.correct, second.distance) == (0, None)
    assert read_set(path, "voita") == [first, second]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": ["a . _eos b .", "a"]}, "3 source sentences but 2 of a translation"),
        ({"src": "A . _eos B . _eos "}, "a blank sentence beside _eos"),
        ({"src": "A . _eos B _eos"}, "a blank sentence beside _eos"),
        ({"dst": [1]}, "'dst' must be a list of strings, not [1]"),
        ({"true_ind": 5}, "candidate 5 cannot be the right one of 2, counted from 0"),
        ({"true_ind": None}, "'true_ind' must be a whole number, not null"),
    ],
)
def test_broken_voita(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_json(tmp_path / "deixis.json", [VOITA, {**VOITA, **change}])
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == f"{path}, item 2: {message}"


def test_flattened_sets_do_not_say_what_is_right(tmp_path: Path) -> None:
    for suffix in ("src", "dst"):
        path = write_lines(tmp_path / f"deixis_dev.{suffix}", ["A . _eos B ."])
        with pytest.raises(UserError) as error:
            read_set(path)
        assert str(error.value) == (
            f"{path}: flattened sets do not say which candidate is right; name the JSON of the set"
        )


# ---------------------------------------------------------------------------- ContraPro

CONTRAPRO = {
    "src segment": "It rang.",
    "ref segment": "Sie klingelte.",
    "src pronoun": "It",
    "ref pronoun": "sie",
    "ante distance": 1,
    "errors": [
        {"contrastive": "Er klingelte.", "replacement": "er"},
        {"contrastive": "Es klingelte.", "replacement": "es"},
    ],
    "document id": "1921.de",
}
SECOND = {
    **CONTRAPRO,
    "ref pronoun": "Er",
    "ante distance": -1,
    "errors": CONTRAPRO["errors"][:1],  # type: ignore[index]
}


def write_contrapro(folder: Path, name: str = "contrapro", part: str = "text") -> Path:
    """Write two items with two lines of context each; the second begins its document."""
    write_lines(folder / f"{name}.{part}.en", ["It rang."] * 3 + ["It fell."] * 2)
    targets = ["Sie klingelte.", "Er klingelte.", "Es klingelte.", "Er fiel.", "Sie fiel."]
    write_lines(folder / f"{name}.{part}.de", targets)
    write_lines(folder / f"{name}.context.en", ["A.", "A bell."] * 3 + ["", "A cup."] * 2)
    write_lines(folder / f"{name}.context.de", ["Eins.", "Eine Glocke."] * 3 + ["", "Tasse."] * 2)
    return folder / f"{name}.{part}.en"


FIRST_ITEM = ContrastiveItem(
    "It rang.",
    ("Sie klingelte.", "Er klingelte.", "Es klingelte."),
    0,
    ("A.", "A bell."),
    (("Eins.", "Eine Glocke."),) * 3,
)
SECOND_ITEM = ContrastiveItem(
    "It fell.", ("Er fiel.", "Sie fiel."), 0, ("A cup.",), (("Tasse.",),) * 2
)


def test_contrapro_text(tmp_path: Path) -> None:
    path = write_contrapro(tmp_path)
    assert read_set(path) == read_set(path, "contrapro") == [FIRST_ITEM, SECOND_ITEM]
    current = write_contrapro(tmp_path, "other", "current")
    assert read_set(current, "contrapro") == [FIRST_ITEM, SECOND_ITEM]


def test_contrapro_text_ends_an_item_where_the_reference_stands_again(tmp_path: Path) -> None:
    write_lines(tmp_path / "x.text.en", ["It is it."] * 4)
    write_lines(tmp_path / "x.text.de", ["er sie", "es sie", "er sie", "er es"])
    for language in ("en", "de"):
        write_lines(tmp_path / f"x.context.{language}", ["A."] * 4)
    found = read_set(tmp_path / "x.text.en")
    assert [item.candidates for item in found] == [("er sie", "es sie"), ("er sie", "er es")]


def test_contrapro_text_with_its_json(tmp_path: Path) -> None:
    write_json(tmp_path / "contrapro.json", [CONTRAPRO, SECOND])
    first, second = read_set(write_contrapro(tmp_path))
    assert first.candidates == FIRST_ITEM.candidates
    assert (first.category, first.distance) == ("it:sie", 1)
    assert (second.category, second.distance) == ("it:er", None)
    assert second.context == ("A cup.",)


def test_the_json_beside_a_text_may_be_compressed(tmp_path: Path) -> None:
    write_json(tmp_path / "contrapro.json", [CONTRAPRO, SECOND])
    path = write_contrapro(tmp_path)
    expected = read_set(path)
    found = tmp_path / "contrapro.json"
    (tmp_path / "contrapro.json.gz").write_bytes(gzip.compress(found.read_bytes()))
    found.unlink()
    assert read_set(path) == expected


def test_contexts_of_no_sentences_are_refused(tmp_path: Path) -> None:
    path = write_contrapro(tmp_path)
    for side in ("text.en", "text.de"):
        write_lines(tmp_path / f"contrapro.{side}", [])
    with pytest.raises(UserError, match="has 10 lines, no multiple of the 0 of "):
        read_set(path)


def test_contrapro_json_alone_has_no_context(tmp_path: Path) -> None:
    path = write_json(tmp_path / "contrapro.json", [CONTRAPRO, SECOND])
    first, second = read_set(path)
    assert first == ContrastiveItem(
        "It rang.", FIRST_ITEM.candidates, 0, category="it:sie", distance=1
    )
    assert second.candidates == ("Sie klingelte.", "Er klingelte.")


def test_compressed_text_files(tmp_path: Path) -> None:
    write_contrapro(tmp_path)
    for path in list(tmp_path.iterdir()):
        with gzip.open(f"{path}.gz", "wb") as handle:
            handle.write(path.read_bytes())
        path.unlink()
    assert read_set(tmp_path / "contrapro.text.en.gz") == [FIRST_ITEM, SECOND_ITEM]


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("text.de", ["a"] * 4, "{path} has 5 lines but {folder}/contrapro.text.de has 4"),
        (
            "context.en",
            ["a"] * 9,
            "{folder}/contrapro.context.en has 9 lines, no multiple of the 5 of {path}",
        ),
        (
            "context.de",
            [],
            "{folder}/contrapro.context.de has 0 lines, no multiple of the 5 of {path}",
        ),
        ("text.en", list("abcde"), "{path}, line 1: 1 candidate(s), but an item has two or more"),
        ("text.de", ["x", " ", "y", "z", "v"], "{path}, line 1: a candidate is blank"),
    ],
)
def test_broken_contrapro_text(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    path = write_contrapro(tmp_path)
    write_lines(tmp_path / f"contrapro.{name}", lines)
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == message.format(path=path, folder=tmp_path)


def test_contrapro_text_that_is_not_that_of_its_json(tmp_path: Path) -> None:
    path = write_contrapro(tmp_path)
    found = write_json(tmp_path / "contrapro.json", [CONTRAPRO])
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == f"{path} has 5 lines, but {found} has 3 candidates"
    write_json(found, [SECOND, CONTRAPRO])
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == (
        f"{path}: lines 3 and 4 have different source sentences, but their translations belong "
        "together; is contrapro.text.en the source side?"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"errors": 1}, "'errors' must be a list, not 1"),
        ({"errors": []}, "1 candidate(s), but an item has two or more"),
        ({"errors": [{}]}, "'contrastive' is missing"),
        ({"ante distance": None}, "'ante distance' must be a whole number, not null"),
        ({"ref pronoun": 3}, "'ref pronoun' must be a string, not 3"),
    ],
)
def test_broken_contrapro_json(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_json(tmp_path / "contrapro.json", [CONTRAPRO, {**CONTRAPRO, **change}])
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == f"{path}, item 2: {message}"


# ---------------------------------------------------------------------------- DiscEvalMT

ANAPHORA = {
    "2": {
        "src": ["A bell.", "It rang."],
        "trg": [
            {
                "correct": ["Une cloche.", "Elle sonnait."],
                "incorrect": ["Une cloche.", "Il sonnait."],
                "type": "f.sg",
            },
            {
                "semi-correct": ["Un grelot.", "Il sonnait."],
                "incorrect": ["Un grelot.", "Elle sonnait."],
                "type": "m.sg",
            },
        ],
    }
}
LEXICAL = {
    "1": {
        "type": "disambig",
        "examples": [
            {
                "src": ["A bell.", "It rang."],
                "trg": {
                    "correct": ["Une cloche.", "Elle sonnait."],
                    "incorrect": ["Une cloche.", "Il sonnait."],
                },
            }
        ],
    }
}
BELL = ContrastiveItem(
    "It rang.",
    ("Elle sonnait.", "Il sonnait."),
    0,
    ("A bell.",),
    (("Une cloche.",), ("Une cloche.",)),
    "f.sg",
    1,
)


def test_discevalmt_json(tmp_path: Path) -> None:
    first, second = read_set(write_json(tmp_path / "anaphora.json", ANAPHORA))
    assert first == BELL
    assert second.candidates == ("Il sonnait.", "Elle sonnait.")
    assert (second.category, second.target_contexts[0]) == ("m.sg", ("Un grelot.",))
    (lexical,) = read_set(write_json(tmp_path / "lexical.json", LEXICAL))
    assert lexical.candidates == BELL.candidates
    assert lexical.category == "disambig"


def write_discevalmt(folder: Path) -> Path:
    write_lines(folder / "x.current.en", ["It rang."] * 4)
    write_lines(folder / "x.prev.en", ["A bell."] * 4)
    targets = ["Elle sonnait.", "Il sonnait.", "Il sonnait.", "Elle sonnait."]
    write_lines(folder / "x.current.fr", targets)
    write_lines(folder / "x.prev.fr", ["Une cloche."] * 2 + ["Un grelot."] * 2)
    return folder / "x.current.en"


def test_discevalmt_text(tmp_path: Path) -> None:
    expected = read_set(write_json(tmp_path / "x.json", ANAPHORA))
    found = read_set(write_discevalmt(tmp_path))
    uncategorised = [item.__class__(**{**vars(item), "category": ""}) for item in expected]
    assert found == uncategorised


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"7": 1}, ", block '7': a JSON object is expected, not 1"),
        ({"7": {}}, ", block '7': 'src' is missing"),
        ({"7": {"src": ["a"], "trg": [{}]}}, ", block '7': 'correct' is missing"),
        (
            {"7": {"src": ["a"], "trg": [{"correct": ["a", "b"], "incorrect": ["c", "d"]}]}},
            ", block '7': 1 sentences where the previous and the current stand",
        ),
        (
            {"7": {"examples": [{"src": ["a", "b"]}]}},
            ", block '7': a JSON object is expected, not null",
        ),
        ({"7": {"examples": 1}}, ", block '7': 'examples' must be a list, not 1"),
        ({}, " has no items"),
    ],
)
def test_broken_discevalmt_json(tmp_path: Path, value: object, message: str) -> None:
    path = write_json(tmp_path / "anaphora.json", value)
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == f"{path}{message}"


def break_target(folder: Path) -> Path:
    return write_discevalmt(folder).with_name("x.current.fr")


def break_count(folder: Path) -> Path:
    path = write_discevalmt(folder)
    for side in ("current.en", "current.fr", "prev.en", "prev.fr"):
        write_lines(folder / f"x.{side}", ["A."] * 3)
    return path


def break_context(folder: Path) -> Path:
    path = write_discevalmt(folder)
    write_lines(folder / "x.prev.en", ["A.", "B.", "C.", "C."])
    return path


def break_target_context(folder: Path) -> Path:
    path = write_discevalmt(folder)
    (folder / "x.prev.fr").unlink()
    return path


def break_translations(folder: Path) -> Path:
    path = write_discevalmt(folder)
    (folder / "x.current.fr").unlink()
    return path


def break_uniqueness(folder: Path) -> Path:
    path = write_discevalmt(folder)
    write_lines(folder / "x.current.de", [])
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            break_target,
            "{path}: lines 1 and 2 have different source sentences, but their translations belong "
            "together; is x.current.fr the source side?",
        ),
        (break_count, "{path} has 3 lines, but right and wrong ones come in pairs"),
        (
            break_context,
            "{path}: lines 1 and 2 have different source contexts, but their translations belong "
            "together; is x.current.en the source side?",
        ),
        (break_target_context, "{path}: x.prev.fr, its context sentences, is not beside it"),
        (
            break_translations,
            "{path}: one file x.current.* of translations is wanted; found: none",
        ),
        (
            break_uniqueness,
            "{path}: one file x.current.* of translations is wanted; found: x.current.de, "
            "x.current.fr",
        ),
    ],
)
def test_broken_discevalmt_text(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(tmp_path)
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == message.format(path=path)


# ---------------------------------------------------------------------------- k lines


@pytest.mark.parametrize("context", ["context", "c2.context"])
def test_k_lines_of_context(tmp_path: Path, context: str) -> None:
    write_lines(tmp_path / "Subs.current.src", ["It rang."] * 2 + ["It fell."] * 2)
    targets = ["Elle sonnait.", "Il sonnait.", "Elle tombait.", "Elle tombait."]
    write_lines(tmp_path / "Subs.current.trg", targets)
    sources = ["A.", "A bell."] * 2 + ["", ""] * 2
    write_lines(tmp_path / f"Subs.{context}.src", sources)
    write_lines(tmp_path / f"Subs.{context}.trg", [line.lower() for line in sources])
    write_lines(tmp_path / "Subs.c1.context.src", ["other"] * 4)
    path = tmp_path / "Subs.current.src"
    found = read_set(path)
    assert found == read_set(path, "klines")
    assert found == [
        ContrastiveItem(
            "It rang.", ("Elle sonnait.", "Il sonnait."), 0, ("A.", "A bell."),
            (("a.", "a bell."),) * 2,
        ),
        ContrastiveItem("It fell.", ("Elle tombait.",) * 2, 0, (), ((), ())),
    ]  # fmt: skip


def test_the_longest_context_is_taken(tmp_path: Path) -> None:
    for side in ("src", "trg"):
        write_lines(tmp_path / f"x.current.{side}", ["b", "b"])
        for size in (1, 2, 10):
            lines = [str(number) for number in range(size)]
            write_lines(tmp_path / f"x.c{size}.context.{side}", lines * 2)
    (item,) = read_set(tmp_path / "x.current.src")
    assert len(item.context) == 10


# ---------------------------------------------------------------------------- which format


@pytest.mark.parametrize(
    ("name", "others", "expected"),
    [
        ("a.jsonl", [], "jsonl"),
        ("a.jsonl.zst", [], "jsonl"),
        ("contrapro.text.en", [], "contrapro"),
        ("a.current.en", ["a.prev.en"], "discevalmt"),
        ("a.current.en.gz", ["a.prev.en.gz"], "discevalmt"),
        ("a.current.src", ["a.context.src"], "klines"),
        ("a.current.src", ["a.c3.context.src"], "klines"),
    ],
)
def test_a_name_tells_the_format(
    tmp_path: Path, name: str, others: list[str], expected: SetFormat
) -> None:
    for other in (name, *others):
        (tmp_path / other).touch()
    assert guess_format(tmp_path / name) == expected


NO_SET = "{path} is no contrastive set: neither Voita's, ContraPro's nor DiscEvalMT's"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            "",
            "{path}: the name does not tell the format; give --format "
            "voita|contrapro|discevalmt|klines|jsonl",
        ),
        (
            "a.current.en",
            "",
            "{path}: the name does not tell the format; give --format "
            "voita|contrapro|discevalmt|klines|jsonl",
        ),
        ("a.json", "[]", NO_SET),
        ("a.json", "[{}]", NO_SET),
        ("a.json", "7", NO_SET),
        ("a.json", "", "{path}: not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("a.json", "[1,\n2", "{path}: not JSON: Expecting ',' delimiter: line 2 column 2 (char 5)"),
        ("a.jsonl", "", "{path} has no items"),
        ("b.json", None, "{path} does not exist; name the JSON of a set, or its file of source "
                         "sentences"),
    ],
)  # fmt: skip
def test_what_is_no_set(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        read_set(path)
    assert str(error.value) == message.format(path=path)


def test_a_format_that_was_given_is_taken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name the JSON"):
        read_set(tmp_path)
    path = write_json(tmp_path / "a.json", {"1": 1})
    with pytest.raises(UserError, match=r"a\.json: a JSON list is expected"):
        read_set(path, "voita")
    path = write_lines(tmp_path / "a.txt", [json.dumps(LEAST)])
    assert len(read_set(path, "jsonl")) == 1
    for format, part in (("contrapro", "text"), ("klines", "current"), ("discevalmt", "current")):
        with pytest.raises(UserError) as error:
            read_set(path, format)
        assert str(error.value) == (
            f"{path}: a set in text is named by its source sentences, NAME.{part}.LANGUAGE"
        )


# ---------------------------------------------------------------------------- published files


@pytest.mark.parametrize(
    ("name", "count", "distances"),
    [("deixis", 1000, {1: 180, 2: 154, 3: 166}), ("lex_cohesion", 1124, {1: 198, 2: 170, 3: 132})],
)
def test_the_published_consistency_sets(
    shared_data: Callable[[str], Path], name: str, count: int, distances: dict[int, int]
) -> None:
    folder = shared_data("data/voita-consistency")
    items = read_set(folder / f"{name}_dev.json")
    assert len(items) == 500
    assert sum(len(item.candidates) for item in items) == count
    assert {d: sum(item.distance == d for item in items) for d in (1, 2, 3)} == distances
    assert all(len(item.context) == 3 for item in items)


@pytest.mark.parametrize("name", ["anaphora", "lexical_choice"])
def test_both_forms_of_the_published_discourse_sets_agree(
    shared_data: Callable[[str], Path], name: str
) -> None:
    folder = shared_data("data/discourse-en-fr")
    items = read_set(folder / f"{name.replace('_', '-')}.json")
    found = read_set(folder / f"{name}.current.en")
    assert len(found) == 200
    assert [item.__class__(**{**vars(item), "category": ""}) for item in items] == found
    assert {item.category for item in items} == (
        {"m.sg", "f.sg", "m.pl", "f.pl"}
        if name == "anaphora"
        else {"repet", "disambig", "repet, disambig"}
    )
