import doctest
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backtranslation import filters as module
from backtranslation.config import FilterConfig
from backtranslation.filters import (
    FilterReport,
    filter_pairs,
    finished_report,
    longest_run,
    made_from_files,
    reason_to_drop,
)
from bertfused.errors import UserError
from bertfused.text import SentencePair, read_lines

LANGUAGES = ("ro", "en")


def test_examples_in_the_documentation() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("o pisică doarme", "a cat sleeps", None),
        ("", "a cat", "empty"),
        ("o pisică", " \u3000", "empty"),
        ("a  cat", "a cat ", "identical"),
        ("da", "yes", None),
        ("da da da da", "yes", "ratio"),
        ("da da da", "yes", None),
        ("w " * 251, "v " * 251, "long"),
        ("a cat sleeps on it", "on a cat sleeps it now", "copied"),
        ("unu doi trei patru unu", "he he he he he", "repeated"),
        ("кот спит тут", "the cat sleeps", "script"),
        ("pisica кот doarme", "the cat sleeps", None),
        ("1 2 3", "3 4 5", None),
    ],
)
def test_reasons_by_hand(source: str, target: str, reason: str | None) -> None:
    assert reason_to_drop(SentencePair(source, target), FilterConfig()) == reason


@pytest.mark.parametrize(
    ("text", "times"),
    [("", 0), ("a", 1), ("a b", 1), ("a a", 2), ("x a b a b", 2), ("a b c a b c a b c d", 3)],
)
def test_runs_by_hand(text: str, times: int) -> None:
    assert longest_run(text) == times


def test_any_script_is_allowed_on_request() -> None:
    pair = SentencePair("кот спит тут", "the cat sleeps")
    for any_script in ((), ("",)):
        assert reason_to_drop(pair, FilterConfig(source_scripts=any_script)) is None


def write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    return path


LINE = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r") | st.sampled_from(" \t\u2028\x0b\x85")
)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(LINE, LINE), max_size=30))
def test_lines_in_are_lines_out_and_dropped_and_pairs_stay_pairs(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    source = write(folder / "source", [first for first, _ in pairs])
    target = write(folder / "target", [second for _, second in pairs])
    report = filter_pairs(source, target, folder / "out", FilterConfig(), LANGUAGES)
    assert report.pairs == len(pairs) == report.kept + sum(report.dropped.values())
    kept = [list(read_lines(folder / "out" / f"filtered.{side}")) for side in LANGUAGES]
    rest = iter(list(zip(read_lines(source), read_lines(target), strict=True)))
    assert len(kept[0]) == len(kept[1]) == report.kept
    assert all(pair in rest for pair in zip(*kept, strict=True))  # in order, none shifted
    assert json.loads((folder / "out" / "report.json").read_text())["kept"] == report.kept


def test_the_first_of_equal_pairs_stays(tmp_path: Path) -> None:
    source = write(tmp_path / "s", ["un a", "doi b", "un a", "un a"])
    target = write(tmp_path / "t", ["one x", "two y", "one x", "one z"])
    report = filter_pairs(source, target, tmp_path / "out", FilterConfig(), LANGUAGES)
    assert list(read_lines(tmp_path / "out" / "filtered.en")) == ["one x", "two y", "one z"]
    assert (report.dropped, report.duplicates) == ({"duplicate": 1}, 1)
    keeping = FilterConfig(keep_duplicates=True)
    report = filter_pairs(source, target, tmp_path / "all", keeping, LANGUAGES)
    assert (report.kept, report.dropped, report.duplicates) == (4, {}, 1)


def test_a_forward_model_sees_only_what_is_left(tmp_path: Path) -> None:
    seen: list[SentencePair] = []

    def score(pairs: Iterable[SentencePair]) -> Iterator[float]:
        for pair in pairs:
            seen.append(pair)
            yield -float(len(pair.target))

    source = write(tmp_path / "s", ["un a", "", "doi b", "trei"])
    target = write(tmp_path / "t", ["one", "x", "two too", "three"])
    config = FilterConfig(min_round_trip=-5)
    report = filter_pairs(source, target, tmp_path / "out", config, LANGUAGES, score=score)
    assert [pair.target for pair in seen] == ["one", "two too", "three"]
    assert report.dropped == {"empty": 1, "round trip": 1}
    assert list(read_lines(tmp_path / "out" / "filtered.ro")) == ["un a", "trei"]


def test_the_report_by_hand(tmp_path: Path) -> None:
    source = write(tmp_path / "s", ["un a", "", "doi unu trei patru"])
    target = write(tmp_path / "t", ["one a", "x", "two"])
    report = filter_pairs(source, target, tmp_path / "out", FilterConfig(), LANGUAGES)
    assert report.ratios["1.0"] == 1
    assert report.ratios["4.0"] == 1
    assert report.copied == (0.5 + 0) / 2
    table = report.table()
    assert table["pairs"].to_dict() == {"kept": 1, "empty": 1, "ratio": 1}
    again = FilterReport.model_validate_json((tmp_path / "out" / "report.json").read_bytes())
    assert again == report


def test_files_of_different_length_leave_nothing(tmp_path: Path) -> None:
    source, target = write(tmp_path / "s", ["un"] * 3), write(tmp_path / "t", ["one"] * 2)
    with pytest.raises(UserError, match=r"3 lines but .* has 2"):
        filter_pairs(source, target, tmp_path / "out", FilterConfig(), LANGUAGES)
    assert list((tmp_path / "out").iterdir()) == []


def test_other_bounds_and_other_text_are_refused(tmp_path: Path) -> None:
    source, target = write(tmp_path / "s", ["a b"]), write(tmp_path / "t", ["c d"])
    made_from = made_from_files(source, target, None)
    out = tmp_path / "out"
    assert finished_report(out, FilterConfig(), made_from) is None
    report = filter_pairs(source, target, out, FilterConfig(), LANGUAGES)
    assert finished_report(out, FilterConfig(), made_from) == report
    with pytest.raises(UserError, match=r"out was filtered with max_ratio = 3\.0, not 2\.0"):
        finished_report(out, FilterConfig(max_ratio=2), made_from)
    with pytest.raises(UserError, match="out was filtered from other text or by another model"):
        finished_report(out, FilterConfig(), made_from_files(source, source, None))
    with pytest.raises(UserError, match="out was filtered from other text or by another model"):
        finished_report(out, FilterConfig(), made_from_files(source, target, source))
