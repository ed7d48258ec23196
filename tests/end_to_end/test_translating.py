"""``bertfused translate`` through its command line."""

import gzip
import math
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from bertfused.text import read_lines
from bertfused.translate import Translator
from tests.end_to_end.children import finish, start
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import (
    LINES,
    best,
    command,
    fail,
    leftovers,
    records,
    succeed,
    text_of,
    translate,
    write_bert,
    write_lines,
)


def test_stdin_file_python_and_checkpoint_give_the_same(small: Small, tmp_path: Path) -> None:
    expected = translate(small.fused)
    assert len(expected) == len(LINES)
    assert expected[2] == ""
    assert all(line for i, line in enumerate(expected) if i != 2)
    source, output = write_lines(tmp_path / "in.en", LINES), tmp_path / "out.de"
    ran = succeed("bertfused translate", small.fused, "--input", source, "--output", output)
    assert ran.out == b""
    assert output.read_bytes() == text_of(expected)
    python = Translator.load(small.fused).translate(LINES)
    assert [translation.text for translation in python] == expected
    assert translate(small.fused / "model") == expected
    last = small.fused / "checkpoints" / "step-40"
    if (last / "model.safetensors").read_bytes() == (
        small.fused / "model" / "model.safetensors"
    ).read_bytes():
        assert translate(last) == expected


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_neither_batches_nor_order_change_a_translation(small: Small, kind: str) -> None:
    run = getattr(small, kind)
    lines = list(read_lines(small.text / "train.en"))[:40]
    expected = best(run, lines=lines)
    for options in (("--batch-tokens", 1), ("--batch-tokens", 30)):
        found = best(run, *options, lines=lines[::-1])[::-1]
        assert [own["text"] for own in found] == [own["text"] for own in expected]
        scores = [own["score"] for own in expected]
        assert [own["score"] for own in found] == pytest.approx(scores, abs=1e-4)


def test_odd_lines_stay_in_their_places(small: Small) -> None:
    odd = [b"", b"  ", b"\xe2\x80\xa8", b"cat\xe2\x80\xa8dog", b"cat\x00dog", b"\x0b\x0c\x1c"]
    odd += [b"cat\rdog", b"\xc2\x85", b"the cat\r", b"\xef\xbb\xbf", b"[SEP] </s> <unk>", b"dog"]
    ran = succeed("bertfused translate", small.fused, stdin=b"\n".join(odd))  # no "\n" at the end
    assert ran.out.count(b"\n") == len(odd)
    lines = ran.lines
    blank = [i for i, line in enumerate(odd) if not line.decode().strip()]
    assert blank == [0, 1, 2, 5, 7]
    assert [i for i, line in enumerate(lines) if not line] == blank
    assert lines[8] == translate(small.fused, lines=["the cat"])[0]
    assert lines[-1] == translate(small.fused, lines=["dog"])[0]


@pytest.mark.parametrize("stdin", [b"", b"\n", b"\n\n", b"dog"])
def test_no_line_and_blank_lines(small: Small, stdin: bytes) -> None:
    expected = stdin.count(b"\n") or len(stdin) > 0
    assert succeed("bertfused translate", small.plain, stdin=stdin).out.count(b"\n") == expected


def test_invalid_utf8_ends_without_an_output_file(small: Small, tmp_path: Path) -> None:
    (tmp_path / "in.en").write_bytes(b"the cat\ndog \xff\n")
    options = ["--input", tmp_path / "in.en", "--output", tmp_path / "out.de"]
    said = fail("bertfused translate", small.plain, *options)
    assert said == f"{tmp_path / 'in.en'}, line 2, byte offset 12: 0xff is not UTF-8"
    assert leftovers(tmp_path) == ["in.en"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files(small: Small, tmp_path: Path, suffix: str) -> None:
    if suffix == ".zst":
        pytest.importorskip("zstandard", reason="zstd is an extra")
    plain = write_lines(tmp_path / "in", LINES)
    packed = tmp_path / f"in{suffix}"
    succeed("bertfused translate", small.plain, "--input", plain, "--output", packed)
    assert list(read_lines(packed)) == translate(small.plain)
    if suffix == ".gz":
        assert gzip.decompress(packed.read_bytes()) == text_of(translate(small.plain))
    again = succeed("bertfused translate", small.plain, "--input", packed)
    assert again.lines == translate(small.plain, lines=list(read_lines(packed)))


def test_input_from_a_pipe_is_not_lost(small: Small) -> None:
    """As with --input <(zcat file): what was read once to be counted would not come again."""
    reading, writing = os.pipe()
    os.write(writing, text_of(LINES))
    os.close(writing)
    try:
        out = succeed("bertfused translate", small.plain, "--input", f"/dev/fd/{reading}").lines
    finally:
        os.close(reading)
    assert out == translate(small.plain)


def close_stdout() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)


def read_stdin(path: Path) -> None:
    os.dup2(os.open(path, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)


def test_real_streams(small: Small, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.en", LINES)
    log = tmp_path / "log"
    process = start(log, "bertfused translate", small.plain, before=partial(read_stdin, source))
    assert finish(process) == 0
    assert list(read_lines(log)) == translate(small.plain)


def test_a_reader_that_leaves_ends_it_quietly(small: Small, tmp_path: Path) -> None:
    """As with `| head -1`."""
    source, log = write_lines(tmp_path / "in.en", LINES * 10), tmp_path / "log"
    process = start(log, "bertfused translate", small.plain, "--input", source, before=close_stdout)
    assert finish(process) not in (0, 2)
    assert log.read_text() == ""


def test_beam_size_and_length_penalty(small: Small) -> None:
    greedy = best(small.plain, "--beam-size", 1)
    wide = best(small.plain, "--beam-size", 8, "--no-normalize")
    for own, other in zip(greedy, wide, strict=True):
        assert own["log_prob"] <= other["log_prob"] + 1e-5
    for penalty in (0.0, 2.0):
        for own in best(small.plain, "--length-penalty", penalty):
            length = max(len(own["token_log_probs"]), 1)
            assert own["score"] == pytest.approx(own["log_prob"] / length**penalty, abs=1e-5)
            assert own["log_prob"] == pytest.approx(math.fsum(own["token_log_probs"]))
    assert all(own["score"] == pytest.approx(own["log_prob"], abs=1e-5) for own in wide)
    lengths = [
        sum(len(own["tokens"]) for own in best(small.plain, "--length-penalty", penalty))
        for penalty in (-3.0, 3.0)
    ]
    assert lengths[0] < lengths[1]


def test_nbest_gives_that_many_lines_of_falling_scores(small: Small) -> None:
    lists = records(small.plain, "--nbest", 3, "--beam-size", 4)
    assert [len(record["hypotheses"]) for record in lists] == [3] * len(LINES)
    for record in lists:
        scores = [own["score"] for own in record["hypotheses"]]
        assert scores == sorted(scores, reverse=True)
    flat = [own["text"] for record in lists for own in record["hypotheses"]]
    assert translate(small.plain, "--nbest", 3, "--beam-size", 4) == flat
    assert [record["source"] for record in lists] == LINES


def test_format_fairseq(small: Small) -> None:
    hypotheses = best(small.plain)
    out = translate(small.plain, "--format", "fairseq")
    assert [line.split("\t")[0] for line in out] == [
        f"{letter}-{number}" for number in range(len(LINES)) for letter in "SHDP"
    ]
    for number, own in enumerate(hypotheses):
        source, tokens, text, positions = (line.split("\t") for line in out[4 * number :][:4])
        assert source[1] == LINES[number]
        assert (tokens[2], text[2]) == (" ".join(own["tokens"]), own["text"])
        assert float(tokens[1]) == pytest.approx(own["score"] / math.log(2), abs=1e-5)
        assert len(positions[1].split()) == len(own["token_log_probs"])


@pytest.mark.parametrize("sampling", ["full", "topk:3", "nucleus:0.8"])
def test_sampling_depends_on_seed_and_line_only(small: Small, sampling: str) -> None:
    lines = ["the cat", "old bird"] * 6
    options = ["--sampling", sampling, "--temperature", 2]
    drawn = translate(small.plain, *options, "--seed", 4, lines=lines)
    assert translate(small.plain, *options, "--seed", 4, "--batch-tokens", 9, lines=lines) == drawn
    assert translate(small.plain, *options, "--seed", 5, lines=lines) != drawn
    assert len(set(drawn)) > 2


def test_sampling_of_the_most_probable_token_is_greedy_search(small: Small) -> None:
    greedy = translate(small.plain, "--beam-size", 1)
    assert translate(small.plain, "--sampling", "topk:1") == greedy
    assert translate(small.plain, "--sampling", "full", "--temperature", 0.001) == greedy


def test_lengths(small: Small) -> None:
    shortest = best(small.plain, "--min-length", 9)
    assert all(len(own["tokens"]) >= 9 for own in shortest[:2])
    options = ["--min-length", 9, "--max-length-b", 2]  # the longest length wins
    ran = succeed("bertfused translate", small.plain, *options, stdin=text_of(LINES[:2]))
    assert [len(line.split()) for line in ran.lines] == [2, 2]
    assert "translations ended by the maximum length: 2" in ran.err
    # a * (3 tokens, EOS included) + 0
    short = best(small.plain, "--max-length-a", 2, "--max-length-b", 0, "--min-length", 20)
    assert len(short[1]["tokens"]) == 6


def test_no_repeat_ngram(small: Small) -> None:
    options = ["--min-length", 9, "--beam-size", 3]
    repeating = best(small.plain, *options)[1]["tokens"]
    assert len(set(repeating)) < len(repeating)
    free = best(small.plain, *options, "--no-repeat-ngram", 1)[1]["tokens"]
    assert len(set(free)) == len(free) >= 9


def test_prefix(small: Small, tmp_path: Path) -> None:
    prefixes = write_lines(tmp_path / "prefix", ["Vogel Vogel", "", "", "rot", "bei"])
    free, forced = translate(small.plain), translate(small.plain, "--prefix", prefixes)
    assert [line.split()[:2] for line in forced[:1]] == [["Vogel", "Vogel"]]
    assert forced[1:3] == free[1:3]
    assert [line.split()[0] for line in forced[3:]] == ["rot", "bei"]
    write_lines(prefixes, ["", "", ""])
    ran = command("bertfused translate", small.plain, "--prefix", prefixes, stdin=text_of(LINES))
    assert ran.code == 2
    assert ran.err == f"bertfused: error: {prefixes} has 3 lines, fewer than the input\n"


def test_diverse_beams_begin_differently(small: Small) -> None:
    options = ["--beam-size", 4, "--nbest", 4, "--diverse-groups", 2, "--diverse-strength", 50]
    first, *_ = records(small.plain, *options)
    assert len({own["tokens"][0] for own in first["hypotheses"]}) >= 2
    said = fail("bertfused translate", small.plain, "--beam-size", 3, "--diverse-groups", 2)
    assert "beam_size 3 is not a multiple of diverse_groups 2" in said


def test_unk_penalty(small: Small) -> None:
    assert not any("⁇" in line for line in translate(small.plain))
    options = ["--min-length", 3, "--max-length-b", 3]
    unknown = translate(small.plain, "--unk-penalty", -100, *options)
    assert unknown[0] == "⁇ ⁇ ⁇"


def test_an_ensemble_averages(small: Small) -> None:
    alone = best(small.plain)
    same = best(small.plain, "--ensemble", small.plain, "--ensemble", small.plain)
    assert [own["text"] for own in same] == [own["text"] for own in alone]
    expected = [own["log_prob"] for own in alone]
    assert [own["log_prob"] for own in same] == pytest.approx(expected, abs=1e-5)
    mixed = best(small.plain, "--ensemble", small.fused, "--prefix", os.devnull, lines=[])
    assert mixed == []
    mixed = best(small.plain, "--ensemble", small.fused)
    assert any(abs(own["log_prob"] - e) > 1e-3 for own, e in zip(mixed, expected, strict=True))


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_an_ensembles_first_token_has_the_mean_probability(small: Small, kind: str) -> None:
    """Of one word forced, from both models: the first token's probability is their mean."""
    runs = [small.plain, small.fused] if kind == "plain" else [small.fused, small.plain]
    prefix = ["--prefix", write_lines(small.text / "prefix", ["rot"])]
    single = [best(run, *prefix, lines=["red cat"])[0]["token_log_probs"][0] for run in runs]
    both = best(runs[0], "--ensemble", runs[1], *prefix, lines=["red cat"])[0]
    mean = math.log(sum(map(math.exp, single)) / 2)
    assert both["token_log_probs"][0] == pytest.approx(mean, abs=1e-5)


def test_the_encoder_may_move_but_not_change(small: Small, tmp_path: Path) -> None:
    moved = shutil.copytree(small.bert, tmp_path / "moved")
    assert translate(small.fused, "--encoder", moved) == translate(small.fused)
    other = write_bert(tmp_path / "other", seed=8)
    said = fail("bertfused translate", small.fused, "--encoder", other, stdin=b"cat\n")
    assert said.startswith(f"encoder {other} is not the one this model was trained with")
    said = fail("bertfused translate", small.fused, "--encoder", tmp_path / "none", stdin=b"cat\n")
    assert said.startswith(f"cannot load the model of encoder '{tmp_path / 'none'}'")


def test_encoder_precision_and_device(small: Small) -> None:
    expected = translate(small.fused)
    assert translate(small.fused, "--device", "cpu", "--encoder-precision", "fp32") == expected
    found = best(small.fused, "--encoder-precision", "bf16")
    scores = [own["score"] for own in best(small.fused)]
    assert [own["score"] for own in found] == pytest.approx(scores, abs=0.05)
    said = fail("bertfused translate", small.plain, "--device", "abacus", stdin=b"cat\n")
    assert said.startswith("device 'abacus' cannot be used here")


def test_long_lines(small: Small) -> None:
    lines = ["the cat", "red cat sees . " * 300]
    run = "bertfused translate", small.plain
    said = fail(*run, "--long", "error", stdin=text_of(lines))
    assert said == "line 2 has more than the 1023 tokens the model can read"
    cut = succeed(*run, "--long", "truncate", stdin=text_of(lines))
    split = succeed(*run, stdin=text_of(lines))
    assert "long lines: 1" in cut.err
    assert len(cut.lines) == len(split.lines) == 2
    assert split.lines[1].startswith(cut.lines[1])
    assert len(split.lines[1]) > len(cut.lines[1])
