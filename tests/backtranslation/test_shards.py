import doctest
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from backtranslation import shards as module
from backtranslation.shards import (
    MANIFEST,
    Manifest,
    ShardFolder,
    Translated,
    read_generated,
    shard_ranges,
)
from bertfused.errors import UserError
from bertfused.text import only_writer, sha256_file

BLOCK = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write 23 lines, with the characters that other tools split lines at, and two blank ones."""
    lines = [f"line {number}" for number in range(23)]
    lines[3], lines[7], lines[11], lines[12] = "", "a\tb", "a\u2028b\x0bc\x85d", " "
    path = tmp_path / "mono.en"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    return path


def translate(lines: list[str], first_line: int) -> Translated:
    """Number lines by where they stand in the corpus, and count the blank ones."""
    texts = [
        f"{first_line + i}: {line.upper()}" if line.strip() else "" for i, line in enumerate(lines)
    ]
    return Translated(texts, Counter(blank=texts.count("")))


def folder_of(out: Path, shards: int, **made_from: object) -> ShardFolder:
    return ShardFolder(out, "ro", 23, shards, {"corpus": "c", **made_from})


def write_all(folder: ShardFolder, corpus: Path) -> bytes:
    """Write every shard, the last one first, and join them."""
    for number in range(folder.shards, 0, -1):
        assert folder.join() is None
        list(folder.write(number, corpus, translate))
    assert folder.join() is not None
    return folder.text.read_bytes()


def test_examples_in_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 2048)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("lines", [0, 1, 4, 5, 23])
@pytest.mark.parametrize("shards", [1, 2, 3, 11])
def test_ranges_are_whole_blocks_and_all_lines(lines: int, shards: int) -> None:
    ranges = shard_ranges(lines, shards)
    assert len(ranges) == shards
    assert [number for part in ranges for number in part] == list(range(lines))
    assert all(part.start % BLOCK == 0 or part.start == lines for part in ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 2 * BLOCK


def test_any_number_of_shards_gives_the_same_text(tmp_path: Path, corpus: Path) -> None:
    whole, _ = translate(corpus.read_text(encoding="utf-8").split("\n")[:-1], 0)
    expected = "".join(f"{line}\n" for line in whole).encode()
    for shards in (1, 3, 11):
        folder = folder_of(tmp_path / str(shards), shards)
        assert write_all(folder, corpus) == expected
        manifest = Manifest.read(folder.folder / MANIFEST)
        assert manifest.counts == {"blank": 2}
        assert (manifest.lines, manifest.done, manifest.size) == (23, 23, len(expected))


@pytest.mark.parametrize("shards", [1, 12, 120])
def test_shards_are_joined_by_number_not_by_name(tmp_path: Path, shards: int) -> None:
    """Every shard but those beyond the blocks has lines; as names, 10 and 100 come before 2."""
    corpus = tmp_path / "mono.en"
    corpus.write_text("".join(f"line {number}\n" for number in range(480)))
    folder = replace(folder_of(tmp_path / "out", shards), lines=480)
    assert all(map(folder.lines_of, folder.numbers(None)))
    expected = "".join(f"{number}: LINE {number}\n" for number in range(480))
    assert write_all(folder, corpus) == expected.encode()


def test_no_translation_becomes_two_records(tmp_path: Path, corpus: Path) -> None:
    """One with a line feed would shift all that follow; a carriage return would be lost."""

    def ending(text: str) -> bytes:
        folder = folder_of(tmp_path / str(len(text)), 1)
        list(folder.write(1, corpus, lambda lines, _: Translated([text] * len(lines), Counter())))
        return folder.path(1).read_bytes()

    assert ending("a\rb\r\r") == b"a\rb\n" * 23
    with pytest.raises(ValueError, match="a record cannot hold a line feed"):
        ending("a\nb")


class Killed(BaseException):
    """What no handler expects, like the end of the process."""


@pytest.mark.parametrize("at", range(1, 12))
def test_killed_anywhere_it_goes_on_and_redoes_no_block(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before and after every write of text and manifest, and half-way through a text."""
    undisturbed = folder_of(tmp_path / "undisturbed", 2)
    write_all(undisturbed, corpus)
    folder, asked = folder_of(tmp_path / "killed", 2), []
    deaths = iter(range(at))

    def die(*_: object) -> None:
        if next(deaths, None) == at - 1:
            raise Killed

    def dying_translate(lines: list[str], first_line: int) -> Translated:
        die()
        asked.append(first_line)
        return translate(lines, first_line)

    write = Manifest.write

    def dying_write(self: Manifest, path: Path) -> None:
        die()
        write(self, path)
        die()

    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "write", dying_write)
        with suppress(Killed):
            for number in (1, 2):
                list(folder.write(number, corpus, dying_translate))
            folder.join()
    for partial in (folder.folder / "shards").glob("*.partial"):
        with open(partial, "ab") as handle:
            handle.write(b"torn li")
    again: list[int] = []

    def counting(lines: list[str], first_line: int) -> Translated:
        again.append(first_line)
        return translate(lines, first_line)

    for number in (1, 2):
        list(folder.write(number, corpus, counting))
    folder.join()
    files = [path.relative_to(undisturbed.folder) for path in undisturbed.folder.rglob("*")]
    assert sorted(files) == sorted(p.relative_to(folder.folder) for p in folder.folder.rglob("*"))
    for path in files:
        if (undisturbed.folder / path).is_file():
            assert (folder.folder / path).read_bytes() == (undisturbed.folder / path).read_bytes()
    assert len(set(asked) & set(again)) <= 1  # the block that was not yet recorded


def test_another_origin_or_number_of_shards_is_refused(tmp_path: Path, corpus: Path) -> None:
    folder = folder_of(tmp_path / "out", 2, beam=5)
    list(folder.write(1, corpus, translate))
    folder.check()
    with pytest.raises(UserError, match=r"made from something else: beam is 5 in 0001-of-0002"):
        folder_of(tmp_path / "out", 2, beam=4).check()
    with pytest.raises(UserError, match="shards is 2 in"):
        folder_of(tmp_path / "out", 3, beam=5).check()


def test_two_processes_do_not_write_one_shard(tmp_path: Path, corpus: Path) -> None:
    folder = folder_of(tmp_path, 1)
    first = folder.write(1, corpus, translate)
    assert next(first) == BLOCK
    with pytest.raises(UserError, match="another process is writing"):
        next(folder.write(1, corpus, translate))
    list(first)


def test_a_corpus_that_lost_lines_is_named(tmp_path: Path, corpus: Path) -> None:
    corpus.write_text("one\n")
    with pytest.raises(UserError, match="has become shorter than 23 lines"):
        list(folder_of(tmp_path / "out", 1).write(1, corpus, translate))


def test_a_damaged_manifest_is_named(tmp_path: Path, corpus: Path) -> None:
    folder = folder_of(tmp_path / "out", 1)
    list(folder.write(1, corpus, translate))
    path = folder.path(1).with_suffix(".json")
    path.write_text("{}")
    with pytest.raises(UserError, match=rf"{path} is damaged: made_from: Field required"):
        folder.check()


def test_who_joins_waits_for_another_who_does(tmp_path: Path, corpus: Path) -> None:
    folder = folder_of(tmp_path / "out", 1)
    list(folder.write(1, corpus, translate))
    thread = threading.Thread(target=folder.join)
    with only_writer(folder.folder):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not folder.text.exists()
    thread.join(10)
    assert folder.text.exists()


def test_only_a_finished_generation_of_the_same_text_is_read(tmp_path: Path, corpus: Path) -> None:
    folder = folder_of(tmp_path / "out", 1, languages=["en", "ro"])
    folder = replace(folder, made_from={**folder.made_from, "corpus": sha256_file(corpus)})
    list(folder.write(1, corpus, translate))
    with pytest.raises(UserError, match=r"is no folder that generate finished"):
        read_generated(folder.folder, corpus)
    folder.join()
    assert read_generated(folder.folder, corpus) == (folder.text, ("ro", "en"), 23)
    corpus.write_text("another\n")
    with pytest.raises(UserError, match="line i would not be of line i"):
        read_generated(folder.folder, corpus)
