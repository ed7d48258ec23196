import importlib.util
import math
import os

import pandas as pd
import pytest

from bertfused.errors import UserError
from bertfused.metrics import (
    BleuParts,
    Comparison,
    Interval,
    Score,
    bleu,
    check_texts,
    chrf,
    comparison_table,
    document_bleu,
    format_comparison,
    join_documents,
    paired_approximate_randomization,
    paired_bootstrap,
)

REFERENCES = ["the cat sat on the mat", "a dog runs in the park", "it is raining again today"]
HALF_RIGHT = ["the cat sat on a mat", "one dog runs in the park", "rain falls again today"]


def test_bleu_of_one_sentence_is_the_formula() -> None:
    # "a b c d e" against "a b c d x y": precisions 4/5, 3/4, 2/3, 1/2; penalty exp(1 - 6/5).
    score = bleu(["a b c d e"], ["a b c d x y"])
    expected = math.exp(1 - 6 / 5) * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert score.name == "BLEU"
    assert score.value == pytest.approx(100 * expected)
    assert score.parts is not None
    assert score.parts.brevity_penalty == pytest.approx(math.exp(-0.2))
    assert (score.parts.hypothesis_length, score.parts.reference_length) == (5, 6)
    assert score.parts.precisions == pytest.approx((80, 75, 200 / 3, 50))


def test_signature_says_how_the_score_was_made() -> None:
    plain = bleu(REFERENCES, REFERENCES).signature
    assert plain.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    other = bleu(REFERENCES, REFERENCES, lowercase=True, tokenize="none", resamples=50, seed=3)
    assert other.signature.startswith("nrefs:1|bs:50|seed:3|case:lc|eff:no|tok:none|smooth:exp")
    assert chrf(REFERENCES, REFERENCES).signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_equal_text_scores_100_and_case_counts_only_if_asked(metric) -> None:
    upper = [line.upper() for line in REFERENCES]
    assert metric(REFERENCES, REFERENCES).value == pytest.approx(100)
    assert metric(upper, REFERENCES).value < 1
    assert metric(upper, REFERENCES, lowercase=True).value == pytest.approx(100)


def test_tokenizer_splits_as_named() -> None:
    assert bleu(["a b c d."], ["a b c d ."]).value == pytest.approx(100)
    assert bleu(["a b c d."], ["a b c d ."], tokenize="none").value < 100
    assert bleu(["我们 在 这里 吃饭"], ["我们在这里吃饭"], tokenize="zh").value == pytest.approx(
        100
    )


@pytest.mark.skipif(importlib.util.find_spec("MeCab") is not None, reason="MeCab is installed")
def test_missing_tokenizer_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"'ja-mecab' is not installed; pip install 'sacrebleu\[ja"):
        bleu(["猫"], ["猫"], tokenize="ja-mecab")


def test_interval_only_where_asked_and_it_follows_the_seed() -> None:
    assert bleu(HALF_RIGHT, REFERENCES).interval is None
    first = bleu(HALF_RIGHT, REFERENCES, resamples=100, seed=1).interval
    assert first == bleu(HALF_RIGHT, REFERENCES, resamples=100, seed=1).interval
    assert first != bleu(HALF_RIGHT, REFERENCES, resamples=100, seed=2).interval
    constant = chrf(["a b c"] * 3, ["a b c"] * 3, resamples=20).interval
    assert constant is not None
    assert (constant.mean, constant.half_width) == pytest.approx((100, 0))


@pytest.mark.parametrize("before", [None, "77"])
def test_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    if before is None:
        monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    else:
        monkeypatch.setenv("SACREBLEU_SEED", before)
    score = bleu(HALF_RIGHT, REFERENCES, resamples=10)
    assert "seed:12345" in score.signature
    assert os.environ.get("SACREBLEU_SEED") == before


def test_unequal_lengths_are_refused_with_both_counts() -> None:
    three, four = ["a"] * 1003, ["a"] * 1004
    message = "hypotheses has 1,003 lines but references has 1,004"
    for score in (bleu, chrf):
        with pytest.raises(UserError, match=message):
            score(three, four)
    with pytest.raises(UserError, match=message):
        document_bleu(three, four, ["1"] * 1004)
    with pytest.raises(UserError, match=r"document ids has 2 lines but text has 1,003"):
        document_bleu(three, three, ["1"] * 2)
    with pytest.raises(UserError, match=r"hyp\.de has 1,003 lines but ref\.de has 1,004"):
        check_texts(three, four, hypothesis_name="hyp.de", reference_name="ref.de")
    with pytest.raises(UserError, match=r"fused has 1,003 lines but references has 1,004"):
        paired_bootstrap(four, {"plain": four, "fused": three})


def test_too_little_to_compute_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to score: hypotheses and references have no lin"):
        bleu([], [])
    with pytest.raises(UserError, match="at least 2 samples, but 1 was asked for"):
        chrf(REFERENCES, REFERENCES, resamples=1)


def test_chrf_of_resamples_with_and_without_a_match() -> None:
    score = chrf(["abcdefg", *["x"] * 3], ["abcdefg", *["y"] * 3], resamples=50)
    assert score.interval is not None
    assert 0 < score.interval.mean < 100
    with pytest.raises(UserError, match="at least two systems, but there is 1"):
        paired_bootstrap(REFERENCES, {"plain": REFERENCES})
    with pytest.raises(UserError, match="at least 2 samples, but 0 was asked for"):
        paired_approximate_randomization(REFERENCES, {"a": REFERENCES, "b": REFERENCES}, trials=0)


@pytest.mark.parametrize(
    ("docids", "documents"),
    [
        (["1", "1", "1", "2"], ["A. B.", "C."]),
        (["1", "1", "", "2"], ["A. B.", "C."]),
        (["1", "2", "2", "1"], ["A.", "B.", "C."]),
        (["1", "", "", "1"], ["A. B. C."]),
        (["", "1", "1", "2"], ["A. B.", "C."]),
        (["", "", "", ""], ["A. B. C."]),
        (["x", "x", "y", "z"], ["A. B.", "", "C."]),
    ],
)
def test_lines_join_by_document(docids: list[str], documents: list[str]) -> None:
    assert join_documents(["A.", "B.", "", "C."], docids) == documents


def test_document_bleu_scores_documents_as_lines() -> None:
    # One 4-gram crosses the sentence boundary of document 1, so d-BLEU is not the sentences' BLEU.
    hypotheses, references = ["a b", "c d", "p q r s"], ["a b", "c d", "p q r t"]
    score = document_bleu(hypotheses, references, ["1", "1", "2"])
    joined = bleu(["a b c d", "p q r s"], ["a b c d", "p q r t"])
    assert score.name == "d-BLEU"
    assert (score.value, score.signature) == (joined.value, joined.signature)
    assert score.value != pytest.approx(bleu(hypotheses, references).value)


def test_clean_text_has_no_warnings() -> None:
    texts = ["Hello, world.", "", "Prix : 3 € ; c'est tout !", "user@@home", "Wait ..."]
    assert check_texts(texts, texts) == []


@pytest.mark.parametrize(
    ("hypothesis", "reference", "start"),
    [
        ("trans@@ lation", "translation", "hyp.de, line 21: a subword mark"),
        ("trans@@", "translation", "hyp.de, line 21: a subword mark"),
        ("translation", "\u2581translation", "ref.de, line 21: a subword mark"),
        ("\ufefftranslation", "translation", "hyp.de, line 21: a byte order mark"),
        ("translation", " ", "ref.de, line 21: the reference is empty"),
    ],
)
def test_warning_names_text_and_line(hypothesis: str, reference: str, start: str) -> None:
    clean = ["Hello, world."] * 20
    warnings = check_texts(
        [*clean, hypothesis],
        [*clean, reference],
        hypothesis_name="hyp.de",
        reference_name="ref.de",
    )
    assert len(warnings) == 1
    assert warnings[0].startswith(start)


def test_many_lines_of_one_trouble_make_one_warning() -> None:
    warnings = check_texts(["x", "a@@ b", "c@@ d", "e@@ f"], ["x"] * 4)
    assert len(warnings) == 1
    assert warnings[0].startswith("hypotheses, line 2: ")
    assert warnings[0].endswith("(3 such lines)")


def test_tokenised_text_is_told_from_a_stray_space() -> None:
    detokenised, tokenised = ["Hello, world."] * 19, ["Hello , world ."]
    assert check_texts(detokenised + tokenised, detokenised * 1 + ["Hi."]) == []
    warnings = check_texts(tokenised * 20, ["Hello, world."] * 20)
    assert [warning.split(":")[0] for warning in warnings] == ["hypotheses, line 1"]
    assert "looks tokenised" in warnings[0]
    assert check_texts(tokenised * 20, tokenised * 20, tokenize="none") == []


def test_paired_bootstrap_tells_real_differences_from_none() -> None:
    references = REFERENCES * 20
    systems = {
        "plain": HALF_RIGHT * 20,
        "fused": references,
        "same": list(HALF_RIGHT * 20),
    }
    results = {(c.system, c.score.name): c for c in paired_bootstrap(references, systems)}
    assert list(results) == [(name, metric) for name in systems for metric in ("BLEU", "chrF2")]
    for metric, function in (("BLEU", bleu), ("chrF2", chrf)):
        assert results["plain", metric].p_value is None
        assert results["plain", metric].delta == 0
        fused, plain = results["fused", metric], results["plain", metric]
        assert fused.p_value == pytest.approx(1 / 1001)
        assert fused.delta == pytest.approx(fused.score.value - plain.score.value)
        assert results["same", metric].delta == 0
        assert plain.score.value == function(systems["plain"], references).value
        assert "bs:1000|seed:12345" in plain.score.signature


def test_randomization_gives_p_values_without_intervals() -> None:
    references = REFERENCES * 10
    systems = {"plain": HALF_RIGHT * 10, "fused": references}
    results = paired_approximate_randomization(references, systems, trials=200)
    assert [c.p_value for c in results] == [None, None, pytest.approx(1 / 201), 1 / 201]
    assert all(c.score.interval is None for c in results)
    assert "ar:200|seed:12345" in results[0].score.signature


COMPARISONS = [
    Comparison("plain", Score("BLEU", 30.0, "tok:13a", Interval(30.125, 1.0)), 0.0, None),
    Comparison("plain", Score("chrF2", 50.0, "nc:6"), 0.0, None),
    Comparison("fused", Score("BLEU", 32.5, "tok:13a", Interval(32.25, 1.5)), 2.5, 0.01),
    Comparison("fused", Score("chrF2", 50.5, "nc:6"), 0.5, 0.2),
]


def test_table_has_one_row_for_each_system_and_metric() -> None:
    table = comparison_table(COMPARISONS)
    assert table[["system", "metric"]].to_numpy().tolist() == [
        ["plain", "BLEU"],
        ["plain", "chrF2"],
        ["fused", "BLEU"],
        ["fused", "chrF2"],
    ]
    row = table.iloc[2]
    assert (row["score"], row["mean"], row["half_width"]) == (32.5, 32.25, 1.5)
    assert (row["delta"], row["p_value"], row["signature"]) == (2.5, 0.01, "tok:13a")
    missing = pd.isna(table[["mean", "p_value"]]).to_numpy().tolist()
    assert missing == [[False, True], [True, True], [False, False], [True, False]]


def test_comparison_reads_as_text() -> None:
    lines = format_comparison(COMPARISONS).splitlines()
    assert lines[0].split() == ["BLEU", "chrF2"]
    assert " ".join(lines[1].split()) == "plain 30.00 (30.12 ± 1.00) 50.00"
    assert " ".join(lines[2].split()) == "fused 32.50 (32.25 ± 1.50) p = 0.0100* 50.50 p = 0.2000"
    assert lines[3:] == ["", "BLEU: tok:13a", "chrF2: nc:6"]


def test_no_difference_is_not_marked_as_significant() -> None:
    # sacreBLEU's p-value of a system against its own copy is the smallest there is.
    results = paired_bootstrap(REFERENCES, {"a": HALF_RIGHT, "b": HALF_RIGHT}, resamples=99)
    assert results[2].p_value == pytest.approx(0.01)
    assert "p = 0.0100" in format_comparison(results)
    assert "*" not in format_comparison(results)


def test_score_reads_as_one_line() -> None:
    assert str(Score("chrF2", 51.234, "nc:6")) == "chrF2|nc:6 = 51.23"
    parts = BleuParts(0.5, 10, 20, (50.0, 25.0))
    assert str(Score("BLEU", 12.0, "tok:13a", Interval(12.5, 0.25), parts)) == (
        "BLEU|tok:13a = 12.00 (μ = 12.50 ± 0.25)"
        " 50.0/25.0 (BP = 0.500 ratio = 0.500 hyp_len = 10 ref_len = 20)"
    )
