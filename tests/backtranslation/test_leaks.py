"""What stands in dev or test sets is kept out of all training text."""

import gzip
from pathlib import Path

import pytest

from backtranslation.config import MonolingualData
from backtranslation.leaks import clean_corpora, clean_mono, drop_leaked, normalised


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def data(tmp_path: Path) -> MonolingualData:
    """Write two corpora, dev, test and monolingual text of both languages."""
    write(tmp_path / "a.ro", "Unu.", "doi", "trei", "patru")
    write(tmp_path / "a.en", "one", "TWO!", "three", "four")
    write(tmp_path / "b.ro", "cinci", "")
    write(tmp_path / "b.en", "five", "?!")
    write(tmp_path / "dev.ro", "unu", "...")
    write(tmp_path / "dev.en", "another", "...")
    write(tmp_path / "test.ro", "altceva")
    write(tmp_path / "test.en", "“Two”, ")
    with gzip.open(tmp_path / "news.en.gz", "wt") as handle:
        handle.write("two\ntwo men\n\nFour\n")
    write(tmp_path / "more.en", "Another?", "ten")
    write(tmp_path / "mono.ro", "doi", "ALTCEVA")
    pairs = [
        {"source": tmp_path / f"{name}.ro", "target": tmp_path / f"{name}.en"} for name in "ab"
    ]
    return MonolingualData.model_validate(
        {
            "source": "ro",
            "target": "en",
            "train": pairs,
            "dev": {"source": tmp_path / "dev.ro", "target": tmp_path / "dev.en"},
            "test": [{"name": "t", "source": tmp_path / "test.ro", "target": tmp_path / "test.en"}],
            "mono": {
                "en": [tmp_path / "news.en.gz", tmp_path / "more.en"],
                "ro": [tmp_path / "mono.ro"],
            },
        }
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("A man, sleeping.", "a man sleeping"),
        ("  “A man”\u00a0– sleeping…", "a man sleeping"),
        ("Îl știu — ȘI?", "îl știu și"),
        ("it's", "its"),
        ("...", ""),
        ("$5 + 5", "$5 + 5"),  # symbols are no punctuation
    ],
)
def test_normalised(line: str, words: str) -> None:
    assert normalised(line) == words


def test_lines_of_dev_and_test_are_left_out_and_counted(
    data: MonolingualData, tmp_path: Path
) -> None:
    report = drop_leaked(data, tmp_path / "out")
    first, second = clean_corpora(data, tmp_path / "out")
    # "Unu." stands in dev, "TWO!" in test; "?!" has no words, so it is no line of dev.
    assert first.source.read_text() == "trei\npatru\n"
    assert first.target.read_text() == "three\nfour\n"
    assert second.source.read_text() == "cinci\n\n"
    assert second.target.read_text() == "five\n?!\n"
    assert clean_mono(tmp_path / "out", "en").read_text() == "two men\n\nFour\nten\n"
    assert clean_mono(tmp_path / "out", "ro").read_text() == "doi\n"
    assert [(own.lines, own.leaked) for own in report.corpora] == [(4, 2), (2, 0)]
    counts = {key: [(f.lines, f.leaked) for f in files] for key, files in report.mono.items()}
    assert counts == {"en": [(4, 1), (2, 1)], "ro": [(2, 1)]}
    assert report.table().loc["news.en.gz", "leaked"] == 1


def test_all_is_kept_if_asked_for(data: MonolingualData, tmp_path: Path) -> None:
    kept = data.model_copy(update={"keep_leaked": True})
    report = drop_leaked(kept, tmp_path / "out")
    assert sum(own.leaked for own in report.corpora) == 0
    assert clean_corpora(data, tmp_path / "out")[0].target.read_text().startswith("one\nTWO!\n")


def test_it_is_done_once_for_the_same_files(data: MonolingualData, tmp_path: Path) -> None:
    first = drop_leaked(data, tmp_path / "out")
    mark = clean_mono(tmp_path / "out", "en")
    written = mark.stat().st_mtime_ns
    assert drop_leaked(data, tmp_path / "out") == first
    assert mark.stat().st_mtime_ns == written
    write(tmp_path / "test.en", "ten")
    drop_leaked(data, tmp_path / "out")
    assert mark.read_text() == "two\ntwo men\n\nFour\n"
