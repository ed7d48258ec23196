import gzip
import io
import logging
import os
import resource
import sys
from pathlib import Path

import pytest
import zstandard

from bertfused.errors import UserError
from bertfused.text import (
    SentencePair,
    count_lines,
    only_writer,
    open_output,
    read_lines,
    read_pairs,
    remove_partials,
    replace_file,
    sha256_file,
)

SEPARATORS = "\u2028\u2029\u0085\v\f\x1c\x1d\x1e\x1f\x00"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n\n", ["a", ""]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\r\r\n", ["a\r"]),
        (b"a\r", ["a\r"]),
        (SEPARATORS.join("abc").encode() + b"\n", [SEPARATORS.join("abc")]),
        (b" a  b \n", [" a  b "]),
        (b"a\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),  # a mark only at the beginning of the file
    ],
)
def test_a_record_ends_at_a_line_feed_and_nowhere_else(
    tmp_path: Path, content: bytes, lines: list[str]
) -> None:
    path = write(tmp_path / "text", content)
    assert list(read_lines(path)) == lines
    assert count_lines(path) == len(lines)


@pytest.mark.parametrize(
    ("content", "lines"), [(b"\xef\xbb\xbfa\nb\n", ["a", "b"]), (b"\xef\xbb\xbf", [])]
)
def test_a_byte_order_mark_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, lines: list[str]
) -> None:
    path = write(tmp_path / "text", content)
    with caplog.at_level(logging.WARNING):
        assert list(read_lines(path)) == lines
    assert caplog.messages == [f"{path} starts with a byte order mark; it is not read as text"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_invalid_utf8_is_an_error_with_its_place(tmp_path: Path, mark: bytes) -> None:
    path = write(tmp_path / "text", mark + "é\n".encode() + b"ab\xffc\n")
    offset = len(mark) + 5
    with pytest.raises(UserError) as error:
        list(read_lines(path))
    assert str(error.value) == f"{path}, line 2, byte offset {offset}: 0xff is not UTF-8"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_records_can_be_passed_over(tmp_path: Path, suffix: str, mark: str) -> None:
    """Those that follow keep their numbers and offsets in messages."""
    content = f"{mark}a\u2028\n\r\n\x85\x0bb\rc\nd".encode()
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = write(tmp_path / f"text{suffix}", packed(content))
    whole = list(read_lines(path))
    assert len(whole) == 4
    for skip in range(6):
        assert list(read_lines(path, skip=skip)) == whole[skip:]
    path = write(tmp_path / f"bad{suffix}", packed(content + b"\n\xff\n"))
    with pytest.raises(UserError, match=rf"line 5, byte offset {len(content) + 1}: 0xff"):
        list(read_lines(path, skip=3))


def test_standard_input_obeys_the_same_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO("a\u2028b\rc\r\nd".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(read_lines(None)) == ["a\u2028b\rc", "d"]


def test_a_closed_standard_input_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match=r"^cannot read standard input: it is closed$"):
        list(read_lines(None))


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ours = [".a.toml.0123abcd.partial", ".b.toml.89.partial"]
    others = [".c.txt.0123abcd.partial", "a.toml.0123.partial", ".a.toml.partial", "a.toml"]
    for name in (*ours, *others):
        (tmp_path / name).touch()
    remove_partials(tmp_path, r"\w+\.toml")
    assert {path.name for path in tmp_path.iterdir()} == {*others}
    remove_partials(tmp_path / "nowhere", ".*")


def test_gzip_members_and_zstandard_frames_are_all_read(tmp_path: Path) -> None:
    parts = [b"a\nb", b"c\nd\n"]
    zipped = write(tmp_path / "t.gz", b"".join(gzip.compress(part) for part in parts))
    compress = zstandard.ZstdCompressor().compress
    framed = write(tmp_path / "t.zst", b"".join(compress(part) for part in parts))
    assert list(read_lines(zipped)) == list(read_lines(framed)) == ["a", "bc", "d"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("lost", [1, 9, 2000])
def test_a_compressed_file_that_was_cut_short_is_an_error(
    tmp_path: Path, suffix: str, lost: int
) -> None:
    whole = "".join(f"{i * i * 7919 % 99991}\n" for i in range(20_000)).encode()
    compressed = (
        gzip.compress(whole) if suffix == ".gz" else zstandard.ZstdCompressor().compress(whole)
    )
    path = write(tmp_path / f"t{suffix}", compressed[:-lost])
    with pytest.raises(UserError, match=f"^cannot read {path}: "):
        list(read_lines(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("content", [b"plain text\n", b""])
def test_a_compressed_name_on_other_content_is_an_error(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    path = write(tmp_path / f"t{suffix}", content)
    with pytest.raises(UserError, match=f"^cannot read {path}: "):
        list(read_lines(path))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_missing_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"absent{suffix}"
    with pytest.raises(UserError, match=f"^cannot read {path}: No such file"):
        list(read_lines(path))


def test_zstandard_is_named_when_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.zst", b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"t\.zst needs the package zstandard"):
        list(read_lines(path))


def test_pairs_go_line_by_line(tmp_path: Path) -> None:
    source = write(tmp_path / "s", "a\u2028\n\nb\n".encode())
    target = write(tmp_path / "t", b"x\ny\nz")
    expected = [SentencePair("a\u2028", "x"), SentencePair("", "y"), SentencePair("b", "z")]
    assert list(read_pairs(source, target)) == expected


@pytest.mark.parametrize(("source_lines", "target_lines"), [(1000, 1003), (1003, 1000), (0, 1)])
def test_unequal_files_are_an_error_with_both_counts(
    tmp_path: Path, source_lines: int, target_lines: int
) -> None:
    source = write(tmp_path / "s", b"a\n" * source_lines)
    target = write(tmp_path / "t", b"\n" * target_lines)
    with pytest.raises(UserError) as error:
        list(read_pairs(source, target))
    assert str(error.value) == (
        f"{source} has {source_lines:,} lines but {target} has {target_lines:,}"
    )


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_what_is_written_is_read_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    lines = ["a", "", f" {SEPARATORS} ", "\ufeffb", "c\rd"]
    with open_output(path) as output:
        for line in lines:
            output.write_line(line)
        assert not path.exists()
    assert list(read_lines(path)) == lines
    assert names(tmp_path) == [path.name]


def test_compressed_output_depends_on_the_text_alone(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        with open_output(tmp_path / name) as output:
            output.write_line("x")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_carriage_return_is_never_written_before_a_line_feed(tmp_path: Path) -> None:
    with open_output(tmp_path / "out") as output:
        output.write_line("a\r\r")
    assert (tmp_path / "out").read_bytes() == b"a\n"


def test_a_record_cannot_hold_a_line_feed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line feed"), open_output(tmp_path / "out") as output:
        output.write_line("a\nb")


def test_standard_output_gets_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    with open_output(None) as output:
        output.write_line("é\u2028")
    assert content.getvalue() == "é\u2028\n".encode()


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    path = write(tmp_path / "out", b"old\n")

    def interrupted() -> None:
        with open_output(path) as output:
            output.write_line("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old\n"
    assert names(tmp_path) == ["out"]


def test_replace_file_replaces(tmp_path: Path) -> None:
    path = write(tmp_path / "out", b"old")
    with replace_file(path) as handle:
        handle.write(b"\x00\xff")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["out"]


def test_a_link_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "file", b"old")
    (tmp_path / "link").symlink_to("file")
    with replace_file(tmp_path / "link") as handle:
        handle.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"out{suffix}", b"old\n")

    def fill() -> None:
        with open_output(path) as output:
            for i in range(100_000):
                output.write_line(str(i * i * 7919 % 99991))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UserError, match=f"^cannot write {path}: File too large$"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old\n"
    assert names(tmp_path) == [path.name]


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open_output(path) as output:
        output.write_line("a")
    assert os.read(reader, 100) == b"a\n"
    os.close(reader)
    assert path.is_fifo()


@pytest.mark.parametrize("name", [".", "absent/out"])
def test_a_name_that_cannot_be_written_is_an_error(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(UserError, match=f"^cannot write {tmp_path}.*: (Is a dir|No such file)"),
        open_output(tmp_path / name),
    ):
        pass


def test_an_error_of_the_block_is_not_taken_for_one_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), open_output(tmp_path / "out"):
        open(tmp_path / "absent").close()


def test_sha256_file(tmp_path: Path) -> None:
    # FIPS 180-2, appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_file(write(tmp_path / "abc", b"abc")) == expected
    with pytest.raises(UserError, match="cannot read"):
        sha256_file(tmp_path / "absent")


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        with (
            pytest.raises(UserError, match=f"another process is writing to {tmp_path}"),
            only_writer(tmp_path),
        ):
            pass
        with only_writer(tmp_path.parent):
            pass
    with only_writer(tmp_path):
        pass
