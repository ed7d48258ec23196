import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bertfused.errors import UserError
from bertfused.vocab import Vocabulary


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_lines_are_numbered_from_four(tmp_path: Path) -> None:
    v = Vocabulary.load(write(tmp_path / "dict.txt", "the 7\n\u2581c,at 2\nmadeupword0000 0\n"))
    assert (v.bos, v.pad, v.eos, v.unk) == (0, 1, 2, 3)
    assert v.symbols == ("<s>", "<pad>", "</s>", "<unk>", "the", "\u2581c,at", "madeupword0000")
    assert v.counts == (0, 0, 0, 0, 7, 2, 0)
    assert len(v) == 7
    assert [v.id_of(s) for s in ("the", "\u2581c,at", "The")] == [4, 5, v.unk]


def test_text_never_names_a_special_symbol() -> None:
    v = Vocabulary(["a"], [1])
    assert [v.id_of(s) for s in ("<s>", "<pad>", "</s>", "<unk>")] == [v.unk] * 4


def test_a_special_symbol_found_in_text_gets_a_number_of_its_own(tmp_path: Path) -> None:
    v = Vocabulary.from_counts(Counter({"a": 5, "</s>": 3}), pad_to=1)
    v.save(tmp_path / "dict.txt")
    assert (tmp_path / "dict.txt").read_text() == "a 5\n</s> 3 #fairseq:overwrite\n"
    assert Vocabulary.load(tmp_path / "dict.txt").id_of("</s>") == 5


def test_order_is_by_count_then_code_point_and_padding_to_eight() -> None:
    v = Vocabulary.from_counts(Counter({"b": 2, "é": 2, "a": 2, "Z": 9, "z": 0}))
    assert v.symbols[4:] == (
        *("Z", "a", "b", "é", "z"),
        *(f"madeupword000{i}" for i in range(7)),
    )
    assert v.counts[4:] == (9, 2, 2, 2, *[0] * 8)
    assert len(v) == 16


def test_padding_never_repeats_a_word_of_the_text() -> None:
    v = Vocabulary.from_counts(Counter({"madeupword0000": 3, "a": 1}))
    assert v.symbols[4:] == ("madeupword0000", "a", "madeupword0001", "madeupword0002")


def test_symbols_are_split_at_the_last_space_of_a_line_only(tmp_path: Path) -> None:
    symbols = ("a b", "\u00a0", "\u2028", "x\ry", "\ufeffq", "7", "")
    v = Vocabulary(symbols, range(7, 0, -1))
    v.save(tmp_path / "dict.txt")
    assert Vocabulary.load(tmp_path / "dict.txt") == v
    v = Vocabulary(["\ufeffq", "a"], [2, 1])  # no byte order mark: fairseq keeps it too
    v.save(tmp_path / "dict.txt")
    assert Vocabulary.load(tmp_path / "dict.txt") == v


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    assert Vocabulary.load(write(tmp_path / "dict.txt", "a 1\r\n")).counts[4:] == (1,)


def test_the_later_of_two_equal_symbols_counts_when_it_says_so(tmp_path: Path) -> None:
    text = "a 5\nb 4\na 3 #fairseq:overwrite\n"
    v = Vocabulary.load(write(tmp_path / "dict.txt", text))
    assert v.symbols[4:] == ("a", "b", "a")
    assert v.id_of("a") == 6
    v.save(tmp_path / "copy.txt")
    assert (tmp_path / "copy.txt").read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 5\nb 4\na 3\n", "line 3: 'a' already stands in line 1"),
        ("a 5\n</s> 3\n", "line 2: '</s>' already is special"),
        ("a 5\n\n", "line 2: '' is not '<symbol> <count>'"),
        ("a 5\nb\n", "line 2: 'b' is not '<symbol> <count>'"),
        ("a five\n", "line 1: 'a five' is not '<symbol> <count>'"),
        ("a 5 #fairseq:other\n", "line 1: 'a 5 #fairseq:other' is not '<symbol> <count>'"),
    ],
)
def test_a_malformed_dictionary_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "dict.txt", text)
    with pytest.raises(UserError) as error:
        Vocabulary.load(path)
    assert str(error.value) == f"{path}, {message}"


def test_what_a_file_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line feed"):
        Vocabulary(["a\nb"], [1]).save(tmp_path / "dict.txt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="2 symbols but 1 counts"):
        Vocabulary(["a", "b"], [1])


@pytest.mark.parametrize("name", ["bertnmt_tiny48", "fairseq_A", "fairseq_B"])
def test_dictionaries_of_fairseq_are_rebuilt_byte_for_byte(
    tmp_path: Path, shared_data: Callable[[str], Path], name: str
) -> None:
    for language in ("en", "de"):
        path = shared_data(f"oracles/{name}/dict.{language}.txt")
        v = Vocabulary.load(path)
        counts = Counter(
            {
                symbol: count
                for symbol, count in zip(v.symbols[4:], v.counts[4:], strict=True)
                if not symbol.startswith("madeupword")
            }
        )
        Vocabulary.from_counts(counts).save(tmp_path / "dict.txt")
        assert (tmp_path / "dict.txt").read_bytes() == path.read_bytes()
        assert v.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_tags_are_no_symbols_of_the_text(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts(Counter({"a": 2, "b": 0}), tags=["<BT>", "<2ro>"])
    assert vocabulary.symbols[4:] == ("a", "b", "<BT>", "<2ro>")
    assert vocabulary.tags == {"<BT>": 6, "<2ro>": 7}
    assert vocabulary.id_of("<BT>") == vocabulary.unk
    vocabulary.save(tmp_path / "dict.txt")
    assert (tmp_path / "dict.txt").read_text() == "a 2\nb 0\n<BT> -1\n<2ro> -1\n"
    assert Vocabulary.load(tmp_path / "dict.txt").tags == vocabulary.tags


@pytest.mark.parametrize("tag", ["a", "</s>"])
def test_a_symbol_of_the_text_cannot_be_a_tag(tag: str) -> None:
    with pytest.raises(UserError, match=f"{tag!r} cannot be a tag"):
        Vocabulary.from_counts(Counter({"a": 2}), tags=[tag])
