import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bertfused import store
from bertfused.errors import UserError
from bertfused.store import IdStore, IdStoreWriter
from bertfused.vocab import Vocabulary

SENTENCES = [[4, 5, 2], [2], [6, 300, 7, 2]]


def write(prefix: Path, sentences: list[list[int]], vocabulary_size: int = 1000) -> Path:
    with IdStoreWriter(prefix, vocabulary_size) as writer:
        for sentence in sentences:
            writer.append(sentence)
    return prefix


def parts(prefix: Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.idx"), Path(f"{prefix}.bin")


def read(prefix: Path) -> list[list[int]]:
    return [ids.tolist() for ids in IdStore.open(prefix)]


@pytest.mark.parametrize(
    ("vocabulary_size", "code", "letter", "width"),
    [(65_499, 8, "H", 2), (65_500, 4, "i", 4)],
)
def test_files_are_laid_out_as_fairseq_wants_them(
    tmp_path: Path, vocabulary_size: int, code: int, letter: str, width: int
) -> None:
    index, data = parts(write(tmp_path / "train.en-de.en", SENTENCES, vocabulary_size))
    offsets = [0, 3 * width, 4 * width]
    assert index.read_bytes() == b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQ3i3q", 1, code, 3, 3, 1, 4, *offsets
    )
    assert data.read_bytes() == struct.pack(f"<8{letter}", 4, 5, 2, 2, 6, 300, 7, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [data.name, index.name]


@pytest.mark.parametrize("sentences", [SENTENCES, [], [[], [4, 2], []]])
def test_what_is_written_is_read_back(tmp_path: Path, sentences: list[list[int]]) -> None:
    opened = IdStore.open(write(tmp_path / "a", sentences))
    assert len(opened) == len(sentences)
    assert [ids.tolist() for ids in opened] == sentences
    assert opened.sizes.tolist() == [len(sentence) for sentence in sentences]


def test_the_index_is_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = [[4] * (i % 5) + [2] for i in range(23)]
    whole = parts(write(tmp_path / "whole", sentences))
    monkeypatch.setattr(store, "_CHUNK", 4)
    chunks = parts(write(tmp_path / "chunks", sentences))
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in chunks]


def test_indexing_is_that_of_a_sequence(tmp_path: Path) -> None:
    opened = IdStore.open(write(tmp_path / "a", SENTENCES))
    assert opened[-1].tolist() == SENTENCES[-1]
    assert opened[2].dtype == np.int64
    for i in (3, -4):
        with pytest.raises(IndexError):
            opened[i]


def test_sentences_can_be_changed_without_changing_the_store(tmp_path: Path) -> None:
    opened = IdStore.open(write(tmp_path / "a", SENTENCES))
    opened[0][0] = 9
    assert opened[0].tolist() == SENTENCES[0]


@pytest.mark.parametrize("bad", [-1, 1000, 70_000])
def test_numbers_outside_the_vocabulary_are_refused(tmp_path: Path, bad: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.999"):
        write(tmp_path / "a", [[4, 2], [bad, 2]])
    assert not list(tmp_path.iterdir())


def test_an_exception_leaves_the_old_store(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", SENTENCES)

    def interrupted() -> None:
        with IdStoreWriter(prefix, 1000) as writer:
            writer.append([4, 2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read(prefix) == SENTENCES
    assert len(list(tmp_path.iterdir())) == 2


def test_a_store_is_replaced(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", SENTENCES)
    assert read(write(prefix, SENTENCES[1:])) == SENTENCES[1:]


@pytest.mark.parametrize("code", [1, 3, 4, 5, 8, 9, 10])
def test_every_integer_type_is_read(tmp_path: Path, code: int) -> None:
    letter = {1: "B", 3: "h", 4: "i", 5: "q", 8: "H", 9: "I", 10: "Q"}[code]
    width = struct.calcsize(f"<{letter}")
    index, data = parts(tmp_path / "a")
    index.write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQ2i2q", 1, code, 2, 1, 2, 0, width))
    data.write_bytes(struct.pack(f"<3{letter}", 2, 100, 2))
    assert read(tmp_path / "a") == [[2], [100, 2]]


def cached(prefix: Path, code: int = 4, dimensions: int = 2) -> Path:
    """Write [[4, 2], [5, 6, 2]] in the format of fairseq 0.6."""
    header = struct.pack("<QQQQQ", 1, code, 4, 2, dimensions)
    content = struct.pack("<3q3q2q", 0, 1, 2, 0, 2, 5, 2, 3)
    index, data = parts(prefix)
    index.write_bytes(b"TNTIDX\x00\x00" + header + content)
    data.write_bytes(struct.pack("<5i", 5, 3, 6, 7, 3))
    return prefix


def test_the_older_format_adds_one_to_every_number(tmp_path: Path) -> None:
    opened = IdStore.open(cached(tmp_path / "a"))
    assert [ids.tolist() for ids in opened] == [[4, 2], [5, 6, 2]]
    assert opened.sizes.tolist() == [2, 3]


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path, older: bool, which: int) -> None:
    prefix = cached(tmp_path / "a") if older else write(tmp_path / "a", SENTENCES)
    path = parts(prefix)[which]
    content = path.read_bytes()
    for end in range(9, len(content)):
        path.write_bytes(content[:end])
        with pytest.raises(UserError, match=f"^{path} is damaged: "):
            IdStore.open(prefix)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "neither an MMIDIDX nor a TNTIDX"),
        (b"something else", "neither an MMIDIDX nor a TNTIDX"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 2, 4, 0), "version 2 and type 4"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 6, 0), "version 1 and type 6"),
    ],
)
def test_other_content_is_an_error(tmp_path: Path, index: bytes, message: str) -> None:
    index_path, data_path = parts(tmp_path / "a")
    index_path.write_bytes(index)
    data_path.write_bytes(b"")
    with pytest.raises(UserError, match=message):
        IdStore.open(tmp_path / "a")


def test_an_older_store_of_other_shapes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not index plain sentences"):
        IdStore.open(cached(tmp_path / "a", dimensions=4))


@pytest.mark.parametrize("sizes", [(2, 2, 4), (3, 1, 5), (3, -1, 6)])
def test_sizes_that_are_not_those_of_the_offsets_are_an_error(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    index, _ = parts(write(tmp_path / "a", SENTENCES))
    content = bytearray(index.read_bytes())
    content[26:38] = struct.pack("<3i", *sizes)
    index.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.(idx|bin) is damaged"):
        IdStore.open(tmp_path / "a")


def test_an_older_index_that_does_not_agree_with_itself_is_an_error(tmp_path: Path) -> None:
    index, _ = parts(cached(tmp_path / "a"))
    content = bytearray(index.read_bytes())
    content[-8:] = struct.pack("<q", 9)
    index.write_bytes(content)
    with pytest.raises(UserError, match="its offsets are not the sums of its sizes"):
        IdStore.open(tmp_path / "a")


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_file_is_named(tmp_path: Path, missing: int) -> None:
    path = parts(write(tmp_path / "a", SENTENCES))[missing]
    path.unlink()
    with pytest.raises(UserError, match=f"^cannot read {path}: No such file"):
        IdStore.open(tmp_path / "a")


def test_the_official_data_folder_holds_what_its_oracle_says(
    shared_data: Callable[[str], Path],
) -> None:
    folder = shared_data("oracles/bertnmt_tiny48")
    sentences = json.loads((folder / "oracle.json").read_text())["sentences"]
    source = IdStore.open(folder / "databin/test.en-de.en")
    target = IdStore.open(folder / "databin/test.en-de.de")
    bert = IdStore.open(folder / "databin/test.bert.en-de.en")
    assert len(source) == len(target) == len(bert) == 300
    for i, sentence in enumerate(sentences):
        assert source[i].tolist() == sentence["src_ids"]
        assert target[i].tolist() == sentence["tgt_ids"]
        assert bert[i].tolist() == sentence["bert_ids"]


def test_the_official_dictionary_counts_what_the_official_store_holds(
    shared_data: Callable[[str], Path],
) -> None:
    folder = shared_data("oracles/bertnmt_tiny48")
    vocabulary = Vocabulary.load(folder / "dict.en.txt")
    counts: Counter[int] = Counter()
    for language in ("en", "de"):  # one dictionary for both
        opened = IdStore.open(folder / f"databin/train.en-de.{language}")
        assert opened.sizes.tolist() == [len(ids) for ids in opened]
        for ids in opened:
            counts.update(ids.tolist())
    assert counts[vocabulary.eos] == 6000
    for id in range(4, len(vocabulary)):
        assert counts[id] == vocabulary.counts[id]
