"""Laws of text, dictionaries, subwords and stores over random input."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertfused.store import IdStore, IdStoreWriter
from bertfused.subwords import UNKNOWN, BytePairs, Tokenizer, Words, train_subwords
from bertfused.text import SentencePair, count_lines, open_output, read_lines, read_pairs
from bertfused.vocab import Vocabulary

ODD = list("\u2028\u2029\u0085\v\f\x1c\x1d\x1e\x1f\r\x00\ufeff\u2581\u2585\u2047\u00a0\t 😀é")
LITERALS = ["</s>", "<unk>", "<pad>", "<s>", "<0x41>", "</w>", "\r\r", "  ", "a man", "\U000f0000"]

characters = st.characters(exclude_categories=["Cs"], exclude_characters="\n")
lines = st.one_of(
    st.text(characters),
    st.lists(st.sampled_from(ODD + LITERALS) | characters).map("".join),
)
suffixes = st.sampled_from(["", ".gz", ".zst"])


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("pieces")
    text = folder / "text"
    text.write_text("a man sees two dogs .\nthe unknown words </s> of a man .\n" * 20, "utf-8")
    return train_subwords("sentencepiece", {"en": [text]}, 280, folder)["en"]


@given(st.lists(lines), suffixes)
def test_as_many_records_are_read_as_were_written(written: list[str], suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"text{suffix}")
        with open_output(path) as output:
            for line in written:
                output.write_line(line)
        read = list(read_lines(path))
        assert count_lines(path) == len(read)
    expected = [line.rstrip("\r") for line in written]
    if expected and expected[0].startswith("\ufeff"):  # not told apart from a byte order mark
        expected[0] = expected[0][1:]
    assert read == expected


@given(st.lists(lines), st.booleans(), st.booleans())
def test_line_ends_are_not_text(text: list[str], windows: bool, ended: bool) -> None:
    text = [line.replace("\r", "") for line in text]
    content = "".join(line + ("\r\n" if windows else "\n") for line in text)
    if not ended and text and text[-1]:
        content = content.removesuffix("\n").removesuffix("\r")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert list(read_lines(path)) == text


@given(st.lists(st.tuples(lines, lines)))
def test_pairs_stay_pairs(written: list[tuple[str, str]]) -> None:
    pairs = [SentencePair(f"s{source}s", f"t{target}t") for source, target in written]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target.gz")
        with open_output(source) as sources, open_output(target) as targets:
            for pair in pairs:
                sources.write_line(pair.source)
                targets.write_line(pair.target)
        assert list(read_pairs(source, target)) == pairs


@given(line=lines)
def test_sentencepiece_returns_the_text(pieces: Tokenizer, line: str) -> None:
    ids = pieces.encode(line)
    assert pieces.decode(ids) == line
    assert all(id > pieces.vocabulary.unk for id in ids)


@given(ids=st.lists(st.integers(0, 279)))
def test_any_numbers_decode_to_one_record_that_can_be_read_back(
    pieces: Tokenizer, ids: list[int]
) -> None:
    text = pieces.decode(ids)
    assert "\n" not in text
    assert pieces.decode(pieces.encode(text)) == text


@given(lines)
def test_words_return_the_text_but_for_its_spaces(line: str) -> None:
    tokenizer = Tokenizer(Words(), Vocabulary.from_counts(Counter(line.split())))
    assert tokenizer.decode(tokenizer.encode(line)) == " ".join(line.split())
    assert all(id > 3 for id in tokenizer.encode(line))


@given(lines)
def test_byte_pairs_return_the_text_but_for_its_spaces(line: str) -> None:
    line = line.replace("@", "")  # "@@" at the end of a word is the sign that joins two
    subwords = BytePairs(["#version: 0.2", "m a", "ma n</w>", "< /", "s ></w>"])
    tokenizer = Tokenizer(subwords, Vocabulary.from_counts(Counter(subwords.split(line))))
    assert tokenizer.decode(tokenizer.encode(line)) == " ".join(line.split())


@given(lines)
def test_unknown_words_never_print_the_name_of_a_special_symbol(line: str) -> None:
    tokenizer = Tokenizer(Words(), Vocabulary([], []))
    assert tokenizer.decode(tokenizer.encode(line)) == " ".join([UNKNOWN] * len(line.split()))


@given(st.dictionaries(lines, st.integers(0, 10**12)), st.integers(1, 16))
def test_dictionaries_are_read_as_they_were_written(counts: dict[str, int], pad_to: int) -> None:
    vocabulary = Vocabulary.from_counts(Counter(counts), pad_to)
    assert len(vocabulary) % pad_to == 0
    assert len(vocabulary) < 4 + len(counts) + pad_to
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dict.txt")
        vocabulary.save(path)
        loaded = Vocabulary.load(path)
    assert loaded == vocabulary
    assert loaded.sha256 == vocabulary.sha256
    for symbol, count in counts.items():
        assert loaded.counts[loaded.id_of(symbol)] == count
        assert loaded.symbols[loaded.id_of(symbol)] == symbol


@given(st.lists(st.lists(st.integers(0, 69_999))), st.booleans())
def test_stores_are_read_as_they_were_written(sentences: list[list[int]], small: bool) -> None:
    size = 65_499 if small else 70_000
    sentences = [[id % size for id in sentence] for sentence in sentences]
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "train.en-de.en")
        with IdStoreWriter(prefix, size) as writer:
            for sentence in sentences:
                writer.append(sentence)
        opened = IdStore.open(prefix)
        assert [ids.tolist() for ids in opened] == sentences
        assert opened.sizes.tolist() == [len(sentence) for sentence in sentences]
