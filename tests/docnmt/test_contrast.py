"""Contrastive evaluation: what is right by hand, the laws of the published sets, the command."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch

from bertfused.checkpoint import (
    ModelCard,
    hash_text_files,
    load_card,
    model_tensors,
    save_model,
    write_card,
)
from bertfused.config import ModelConfig
from bertfused.errors import UserError
from bertfused.model import build_model
from bertfused.scoring import PairScore, score_pairs
from bertfused.subwords import train_subwords
from bertfused.translate import SourceLine, Translator
from docnmt.contrast import Accuracy, Judged, contrast, item_records, table
from docnmt.contrastive import ContrastiveItem, write_contrastive
from docnmt.contrastive_formats import read_set
from docnmt.grammar import contrastive_items
from docnmt.translate import as_read, load, reads_context, score
from tests.end_to_end.corpus import fail, succeed
from tests.tiny_encoders import make_encoder, make_fused_run
from tests.tiny_pipelines import write_pronoun_pipeline
from tests.tiny_run import TINY, make_run

Pairs = Sequence[tuple[SourceLine, str]]


def alone(line: SourceLine) -> SourceLine:
    return SourceLine(line.text)


def make_text_run(folder: Path, sources: list[Path], targets: list[Path], seed: int) -> Path:
    """Write a sentence-level RUN of random weights, with subwords of the given texts."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    tokenizers = train_subwords(
        "sentencepiece", {"en": sources, "xx": targets}, 1000, texts, shared=False
    )
    sizes = {language: len(own.vocabulary) for language, own in tokenizers.items()}
    config = ModelConfig(**TINY, share_embeddings="none")
    torch.manual_seed(seed)
    model = build_model(config, None, source_size=sizes["en"], target_size=sizes["xx"])
    card = ModelCard(
        source="en",
        target="xx",
        source_size=sizes["en"],
        target_size=sizes["xx"],
        model=config,
        text_files=hash_text_files(texts),
    )
    save_model(folder / "model", card, model_tensors(model), texts)
    return folder


@pytest.fixture(scope="module")
def consistency(shared_data: Callable[[str], Path]) -> Path:
    return shared_data("data/voita-consistency")


@pytest.fixture(scope="module")
def discourse(shared_data: Callable[[str], Path]) -> Path:
    return shared_data("data/discourse-en-fr")


@pytest.fixture(scope="module", params=[1, 2])
def russian(
    request: pytest.FixtureRequest, consistency: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_text_run(
        tmp_path_factory.mktemp("run") / "ru",
        sorted(consistency.glob("*.src")),
        sorted(consistency.glob("*.dst")),
        request.param,
    )


@pytest.fixture(scope="module", params=[1, 2])
def french(
    request: pytest.FixtureRequest, discourse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_text_run(
        tmp_path_factory.mktemp("run") / "fr",
        sorted(discourse.glob("*.en")),
        sorted(discourse.glob("*.fr")),
        request.param,
    )


# ---------------------------------------------------------------------------- by hand


def given(scores: dict[str, float]) -> Callable[[Pairs], Iterable[PairScore]]:
    """Score candidates by a table."""
    return lambda pairs: [PairScore(scores[target], 1) for _, target in pairs]


BEST = ("x", "y", "z")  # of log-probabilities -1, -2 and -2
TABLE = {"x": -1.0, "y": -2.0, "z": -2.0}


@pytest.mark.parametrize(
    ("candidates", "correct", "is_correct", "is_tie"),
    [
        (("x", "y", "z"), 0, True, False),  # that the others tie does not matter
        (("y", "x", "z"), 1, True, False),
        (("x", "y", "z"), 1, False, False),
        (("y", "z"), 0, False, True),
        (("y", "z"), 1, False, True),
        (("x", "y", "x"), 0, False, True),  # the right one stands there twice
        (("y", "x", "x"), 0, False, False),
    ],
)
def test_the_right_candidate_must_be_strictly_the_best(
    candidates: tuple[str, ...], correct: int, is_correct: bool, is_tie: bool
) -> None:
    item = ContrastiveItem("s", candidates, correct)
    result = contrast([item], given(TABLE))
    (judged,) = result.judged
    assert judged == Judged(item, tuple(TABLE[own] for own in candidates))
    assert (judged.is_correct, judged.is_tie) == (is_correct, is_tie)
    assert result.overall == Accuracy(int(is_correct), 1, int(is_tie))


def test_accuracies_by_distance_and_category() -> None:
    right = ContrastiveItem("s", ("x", "y"), 0, category="b", distance=3)
    wrong = replace(right, correct=1, distance=1)
    tied = ContrastiveItem("s", ("y", "z"), 0, category="a", distance=1)
    unknown = ContrastiveItem("s", ("x", "y"), 0)
    result = contrast([right, wrong, tied, unknown], given(TABLE))
    assert result.overall == Accuracy(correct=2, items=4, ties=1)
    assert list(result.by_distance.items()) == [(1, Accuracy(0, 2, 1)), (3, Accuracy(1, 1, 0))]
    assert list(result.by_category.items()) == [
        ("b", Accuracy(1, 2, 0)),
        ("a", Accuracy(0, 1, 1)),
    ]
    assert table(result) == "\n".join(
        [
            "            accuracy     95% interval  correct    items     ties",
            "all           50.00%   15.00 to 85.00        2        4        1",
            "distance 1     0.00%    0.00 to 65.76        0        2        1",
            "distance 3   100.00%  20.65 to 100.00        1        1        0",
            "b             50.00%    9.45 to 90.55        1        2        0",
            "a              0.00%    0.00 to 79.35        0        1        1",
        ]
    )


def test_accuracies_with_a_pronoun_and_without() -> None:
    right = ContrastiveItem("It fell.", ("x", "y"), 0)
    wrong = replace(right, correct=1)
    other = replace(right, source="The cup fell.")
    result = contrast(
        [right, wrong, other], given(TABLE), has_pronoun=lambda own: ["It" in line for line in own]
    )
    assert result.by_pronoun == {"with pronoun": Accuracy(1, 2, 0), "without": Accuracy(1, 1, 0)}
    assert "with pronoun    50.00%" in table(result)
    assert contrast([right], given(TABLE)).by_pronoun == {}


def test_the_command_finds_pronouns(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    items = [ContrastiveItem(f"{word} w1", ("w1", "w2"), 0) for word in ("it", "w5", "w6")]
    write_contrastive(tmp_path / "set.jsonl", items)
    tagger = write_pronoun_pipeline(tmp_path / "tagger")
    options = ["--set", tmp_path / "set.jsonl", "--by-pronouns", tagger, "--json"]
    (found,) = json.loads("".join(succeed("docnmt contrast", tmp_path / "run", *options).lines))
    assert [own["items"] for own in found["by_pronoun"].values()] == [1, 2]


def test_the_interval_is_where_the_score_test_does_not_reject() -> None:
    """Wilson's interval ends where (share - p)^2 = z^2 p (1 - p) / n."""
    for accuracy in (Accuracy(231, 500, 0), Accuracy(1, 10, 0), Accuracy(3, 3, 0)):
        for end in accuracy.interval:
            distance = (accuracy.share - end) ** 2 * accuracy.items
            assert distance == pytest.approx(1.959964**2 * end * (1 - end), rel=1e-5, abs=1e-12)
    low, high = Accuracy(231, 500, 0).interval
    assert (round(low, 4), round(high, 4)) == (0.4188, 0.5058)
    assert Accuracy(0, 5, 0).interval[0] == 0.0
    assert Accuracy(5, 5, 0).interval[1] == 1.0
    assert (Accuracy(0, 0, 0).share, Accuracy(0, 0, 0).interval) == (0.0, (0.0, 1.0))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ((0.0, math.nan), "candidate 1 has a log-probability of nan"),
        ((math.inf, 0.0), "candidate 0 has a log-probability of inf"),
        ((-math.inf, -math.inf), "all candidates have a log-probability of -inf"),
    ],
)
def test_scores_that_are_no_numbers(scores: tuple[float, float], message: str) -> None:
    items = [ContrastiveItem("s", ("x", "y"), 0), ContrastiveItem("s", ("v", "w"), 0)]
    found = {"x": -1.0, "y": -math.inf, **dict(zip("vw", scores, strict=True))}
    with pytest.raises(UserError) as error:
        contrast(items, given(found), name="set.jsonl")
    assert str(error.value) == f"set.jsonl, item 2: {message}"
    assert contrast(items[:1], given(found)).overall.correct == 1


def test_a_candidate_of_probability_0_is_null_in_the_records() -> None:
    items = [ContrastiveItem("s", ("x", "y"), 0, category="a", distance=2)]
    (record,) = item_records("set.jsonl", contrast(items, given({"x": -1.0, "y": -math.inf})))
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "set": "set.jsonl",
        "item": 1,
        "scores": [-1.0, None],
        "correct": 0,
        "is_correct": True,
        "is_tie": False,
        "category": "a",
        "distance": 2,
    }


def test_every_candidate_is_scored_after_its_own_context() -> None:
    item = ContrastiveItem("s", ("x", "y"), 1, ("a", "b"), (("c", "d"), ("e",)))
    seen: list[tuple[SourceLine, str]] = []

    def score(pairs: Pairs) -> Iterable[PairScore]:
        seen.extend(pairs)
        return given(TABLE)(pairs)

    bare = ContrastiveItem("s", ("x", "z"), 0, ("a", "b"))
    contrast([item, bare, item], score)
    assert seen == [
        (SourceLine("s", ("a", "b"), target_context=("c", "d")), "x"),
        (SourceLine("s", ("a", "b"), target_context=("e",)), "y"),
        (SourceLine("s", ("a", "b")), "x"),
        (SourceLine("s", ("a", "b")), "z"),
    ]
    seen.clear()
    contrast([item, bare], score, as_read=alone)
    assert seen == [(SourceLine("s"), own) for own in ("x", "y", "z")]


def test_equal_pairs_have_one_score_whatever_the_scorer_does() -> None:
    """A scorer whose every answer is another number cannot tell equal candidates apart."""
    numbers = count()

    def score(pairs: Pairs) -> Iterable[PairScore]:
        return [PairScore(-float(next(numbers)), 1) for _ in pairs]

    twice = ContrastiveItem("s", ("x", "x"), 0, ("a",), (("b",), ("b",)))
    elsewhere = ContrastiveItem("s", ("x", "x"), 0, ("a",), (("b",), ("c",)))
    result = contrast([twice, elsewhere], score)
    assert [own.is_tie for own in result.judged] == [True, False]
    result = contrast([twice, elsewhere], score, as_read=alone)
    assert [own.is_tie for own in result.judged] == [True, True]


LINE = SourceLine("s", ("a", "b", "c"), target_context=("d", "e", "f"))


def test_a_sentence_level_model_reads_a_line_alone(tmp_path: Path) -> None:
    make_run(tmp_path)
    translator = Translator.load(tmp_path, device="cpu")
    assert not reads_context(translator)
    assert as_read(translator, LINE) == SourceLine("s")


def make_document_run(folder: Path) -> None:
    """Write ``folder/run``, fused with an encoder that reads two previous sentences."""
    make_fused_run(folder / "run", make_encoder("bert", folder / "bert"))
    card = load_card(folder / "run" / "model")
    documents = {"previous": 2, "format": "blank"}
    write_card(folder / "run" / "model", card.model_copy(update={"documents": documents}))


def test_a_fused_model_reads_previous_source_sentences(tmp_path: Path) -> None:
    make_document_run(tmp_path)
    translator = Translator.load(tmp_path / "run", device="cpu")
    assert reads_context(translator)
    assert as_read(translator, LINE) == SourceLine("s", ("b", "c"))
    assert as_read(translator, SourceLine("s")) == SourceLine("s")


# ---------------------------------------------------------------------------- laws


@pytest.mark.parametrize(
    ("name", "accuracy"),
    [("deixis", Accuracy(250, 500, 0)), ("lex_cohesion", Accuracy(231, 500, 0))],
)
@pytest.mark.parametrize("batch_tokens", [500, 4096])
def test_a_model_without_context_guesses_on_the_consistency_sets(
    russian: Path, consistency: Path, name: str, accuracy: Accuracy, batch_tokens: int
) -> None:
    """50.00% and 46.20%, whatever the model: every choice stands in as many right groups."""
    items = read_set(consistency / f"{name}_dev.json")
    translator = load(russian, device="cpu")
    scorer = partial(score, translator, batch_tokens=batch_tokens)
    result = contrast(items, scorer, as_read=partial(as_read, translator))
    assert result.overall == accuracy
    assert f"{100 * accuracy.share:.2f}%" in {"50.00%", "46.20%"}


def test_a_model_without_context_guesses_on_the_lexical_choice_set(
    french: Path, discourse: Path
) -> None:
    score = partial(score_pairs, Translator.load(french, device="cpu"))
    for name in ("lexical-choice.json", "lexical_choice.current.en"):
        result = contrast(read_set(discourse / name), score, as_read=alone)
        assert result.overall == Accuracy(100, 200, 0)


def test_a_model_without_context_guesses_on_the_anaphora_set_but_for_one_block(
    french: Path, discourse: Path
) -> None:
    """In one block the two wordings of a translation are not used alike: 99, 100 or 101 of 200."""
    items = read_set(discourse / "anaphora.json")
    score = partial(score_pairs, Translator.load(french, device="cpu"))
    assert contrast(items, score, as_read=alone).overall.correct in (99, 100, 101)
    odd = "The whole purpose of life is to find love and they are so bad at it."
    others = [item for item in items if item.source != odd]
    assert contrast(others, score, as_read=alone).overall == Accuracy(98, 196, 0)


@pytest.mark.parametrize("prefer", [-1.0, 1.0])
def test_how_far_the_anaphora_set_is_from_balance(discourse: Path, prefer: float) -> None:
    items = read_set(discourse / "anaphora.json")

    def score(pairs: Pairs) -> Iterable[PairScore]:
        wording = {"ils s'y": 1.0, "elles le font": 0.5, "elles s'y": -1.0, "ils le font": -0.5}
        for _, target in pairs:
            found = [value for part, value in wording.items() if f"et {part}" in target]
            yield PairScore(prefer * found[0] if found else Random(target).random(), 1)

    assert contrast(items, score, as_read=alone).overall == Accuracy(100 + int(prefer), 200, 0)


def test_the_page_shows_what_a_model_without_context_gets_on_the_demonstrations_set() -> None:
    def score(pairs: Pairs) -> Iterable[PairScore]:
        return [PairScore(Random(repr(pair)).random(), 1) for pair in pairs]

    shown = table(contrast(contrastive_items(1, 24), score, as_read=alone))
    page = Path(__file__).parents[2] / "docs" / "contrastive.md"
    assert shown in page.read_text(encoding="utf-8")
    assert "| the demonstration's | exactly 38.9%" in page.read_text(encoding="utf-8")
    assert "  38.89%" in shown


@pytest.mark.parametrize("previous", [1, 2, 3])
@pytest.mark.parametrize(("name", "correct"), [("deixis", 250), ("lex_cohesion", 231)])
def test_a_model_that_reads_the_source_only_guesses_on_the_consistency_sets(
    consistency: Path, name: str, correct: int, previous: int
) -> None:
    """What is right depends on the target context alone."""

    def score(pairs: Pairs) -> Iterable[PairScore]:
        return [PairScore(Random(repr(pair)).random(), 1) for pair in pairs]

    items = read_set(consistency / f"{name}_dev.json")
    result = contrast(
        items, score, as_read=lambda line: SourceLine(line.text, line.context[-previous:])
    )
    assert result.overall == Accuracy(correct, 500, 0)


def test_the_right_candidate_always_stands_first_in_deixis(consistency: Path) -> None:
    items = read_set(consistency / "deixis_dev.json")
    assert {item.correct for item in items} == {0}


@pytest.mark.parametrize(
    "name",
    ["deixis_dev.json", "lex_cohesion_dev.json", "anaphora.json", "lexical-choice.json"],
)
def test_a_constant_scorer_gets_nothing(consistency: Path, discourse: Path, name: str) -> None:
    folder = consistency if "dev" in name else discourse
    items = read_set(folder / name)
    result = contrast(items, lambda pairs: [PairScore(-3.0, 1)] * len(pairs))
    assert result.overall == Accuracy(0, len(items), len(items))


# ---------------------------------------------------------------------------- the command


def test_the_command(russian: Path, consistency: Path, tmp_path: Path) -> None:
    sets = [consistency / "deixis_dev.json", consistency / "lex_cohesion_dev.json"]
    options = [option for path in sets for option in ("--set", path)]
    output = tmp_path / "scores.jsonl"
    ran = succeed("docnmt contrast", russian, *options, "--output", output)
    first, second = ran.out.decode().split("\n\n")
    title, _, overall, *rest = first.splitlines()
    assert title == str(sets[0])
    assert overall == "all           50.00%   45.63 to 54.37      250      500        0"
    assert [line.split()[0] for line in rest] == ["distance"] * 3
    assert second.splitlines()[2].split() == [
        "all", "46.20%", "41.88", "to", "50.58", "231", "500", "0"
    ]  # fmt: skip
    assert f"{russian} reads no context, so its accuracy is what guessing gives" in ran.err
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["set"] for record in records] == [str(path) for path in sets for _ in range(500)]
    assert [record["item"] for record in records] == 2 * list(range(1, 501))
    for record in records:
        best = max(record["scores"])
        assert record["is_correct"] == (record["scores"][record["correct"]] == best)
    assert sum(record["is_correct"] for record in records) == 481
    assert records[0].keys() == {
        "set", "item", "scores", "correct", "is_correct", "is_tie", "category", "distance"
    }  # fmt: skip

    results = json.loads(succeed("docnmt contrast", russian, *options, "--json", "--quiet").out)
    assert [result["set"] for result in results] == [str(path) for path in sets]
    assert results[1]["accuracy"] == 0.462
    assert results[1]["interval"] == pytest.approx([0.4188, 0.5058], abs=1e-4)
    assert results[1]["by_distance"]["2"]["items"] == 170
    assert results[1]["by_category"] == {}


def test_the_commands_scores_are_those_of_score(french: Path, tmp_path: Path) -> None:
    item = ContrastiveItem("It rang.", ("Elle sonnait.", "Il sonnait."), 0, category="bell")
    path, output = tmp_path / "set.jsonl", tmp_path / "scores.jsonl"
    write_contrastive(path, [item])
    for options, keywords in (([], {}), (["--label-smoothing", 0.1], {"label_smoothing": 0.1})):
        succeed("docnmt contrast", french, "--set", path, "--output", output, *options)
        pairs = [(SourceLine(item.source), candidate) for candidate in item.candidates]
        expected = score_pairs(Translator.load(french, device="cpu"), pairs, **keywords)
        record = json.loads(output.read_text())
        assert record["scores"] == pytest.approx([own.log_prob for own in expected], abs=1e-4)
        assert record["category"] == "bell"
        assert record["distance"] is None


def test_a_set_without_context_is_said_to_be_one(tmp_path: Path) -> None:
    make_document_run(tmp_path)
    items = [ContrastiveItem("w1 w2", ("w3", "w4"), 0), ContrastiveItem("w1", ("w4", "w4"), 0)]
    write_contrastive(tmp_path / "bare.jsonl", items)
    write_contrastive(tmp_path / "own.jsonl", [replace(item, context=("a",)) for item in items])
    sets = ["--set", tmp_path / "bare.jsonl", "--set", tmp_path / "own.jsonl"]
    ran = succeed("docnmt contrast", tmp_path / "run", *sets, "--json")
    assert [line for line in ran.err.splitlines() if "context" in line] == [
        f"{tmp_path / 'bare.jsonl'} holds no context sentences"
    ]
    assert [result["ties"] for result in json.loads(ran.out)] == [1, 1]


def test_a_broken_set_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("{}\n")
    said = fail("docnmt contrast", tmp_path / "no run", "--set", path)
    assert said == f"{path}, line 1: 'candidates' is missing"
