from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertfused import scoring
from bertfused.checkpoint import load_model
from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.scoring import PairScore, score_pairs
from bertfused.translate import Member, SourceLine, Translator
from tests.tiny_encoders import make_encoder, make_fused_run
from tests.tiny_run import make_run

SEARCH = SearchConfig(beam_size=3, max_length_a=1.0, max_length_b=3)
SOURCES = [
    SourceLine("w1 w2 w3"),
    SourceLine("w4", ("w5 w6", "w7")),
    SourceLine("w8 w9 w10 w11 w12 nothing known", ("w1",)),
    SourceLine("w13 w14"),
    SourceLine("w2 w3 w4 w5", ("w30",)),
]
TARGETS = ["w3 w4", "", "w1 w2 w3 w4 w5 w6", "unknown w7", "w8"]
PAIRS = list(zip(SOURCES, TARGETS, strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "plain")
    make_fused_run(root / "fused", make_encoder("bert", root / "bert"))
    make_fused_run(root / "hidden", root / "bert", mask_special=True, layer="average")
    make_run(root / "learned", positions="learned", max_positions=5)
    return root


@pytest.fixture(scope="module", params=[["plain"], ["fused"], ["hidden"], ["plain", "fused"]])
def translator(request: pytest.FixtureRequest, runs: Path) -> Translator:
    """A model, or an ensemble."""
    first, *others = (runs / name for name in request.param)
    return Translator.load(first, ensemble=others, device="cpu")


@pytest.fixture(scope="module")
def fused(runs: Path) -> Translator:
    return Translator.load(runs / "fused", device="cpu")


def mean_probabilities(translator: Translator, source: SourceLine, target: str) -> torch.Tensor:
    """The distribution of each target token, averaged over the members."""
    means: list[torch.Tensor] = []
    for member in translator.members:
        (example,) = member.examples_with_targets([source], [target], Counter())
        with torch.inference_mode():
            logits = member.model(member.batch([example], torch.device("cpu")))
        means.append(logits[0].double().softmax(-1))
    return torch.stack(means).mean(0)


def naive(translator: Translator, source: SourceLine, target: str) -> PairScore:
    """Sum the log of the mean probability of each token, given those before it."""
    (member, *_) = translator.members
    ids = [member.target.vocabulary.id_of(word) for word in target.split()] + [2]
    means = torch.zeros(len(ids), dtype=torch.float64)
    for own in translator.members:
        (example,) = own.examples([source], translator.counts)
        batch = own.batch([replace(example, target=ids)], torch.device("cpu"))
        with torch.no_grad():
            probabilities = own.model(batch)[0].double().softmax(-1)
        means += probabilities[range(len(ids)), ids] / len(translator.members)
    return PairScore(float(means.log().sum()), len(ids))


def assert_alike(found: list[PairScore], expected: list[PairScore]) -> None:
    assert [own.tokens for own in found] == [other.tokens for other in expected]
    for own, other in zip(found, expected, strict=True):
        assert own.log_prob == pytest.approx(other.log_prob, abs=1e-4)


def test_scores_are_sums_of_log_probabilities(translator: Translator) -> None:
    expected = [naive(translator, source, target) for source, target in PAIRS]
    assert [own.tokens for own in expected] == [3, 1, 7, 3, 2]
    assert_alike(list(score_pairs(translator, PAIRS)), expected)


def test_smoothed_scores_are_of_the_averaged_probabilities(translator: Translator) -> None:
    """0.8 of the right token and 0.2 shared by all others: training's loss, negative."""
    target = translator.members[0].target
    for (source, text), found in zip(
        PAIRS, score_pairs(translator, PAIRS, label_smoothing=0.2), strict=True
    ):
        log_probs = mean_probabilities(translator, source, text).log()
        ids = [*target.encode(text), target.vocabulary.eos]
        weights = torch.full_like(log_probs, 0.2 / (log_probs.shape[1] - 1))
        weights[range(len(ids)), ids] = 0.8
        assert found.log_prob == pytest.approx(float((weights * log_probs).sum()), abs=1e-3)


@pytest.mark.parametrize("batch_tokens", [1, 8, 10_000])
def test_batches_change_nothing(
    translator: Translator, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(score_pairs(translator, PAIRS))
    monkeypatch.setattr(scoring, "_WINDOW", 2)
    order = [3, 0, 4, 1, 2]
    pairs = [PAIRS[i] for i in order]
    found = list(score_pairs(translator, pairs, batch_tokens=batch_tokens))
    assert_alike(found, [expected[i] for i in order])


def test_the_score_of_a_translation_is_what_the_search_found(translator: Translator) -> None:
    found = list(translator.translate(SOURCES, SEARCH, nbest=3))
    hypotheses = [own for translation in found for own in translation.hypotheses]
    repeated = [source for source in SOURCES for _ in range(3)]
    # "<unk>" among the tokens is, read as a word, unknown again
    pairs = zip(repeated, (" ".join(own.tokens) for own in hypotheses), strict=True)
    scores = list(score_pairs(translator, pairs))
    for own, score in zip(hypotheses, scores, strict=True):
        assert score.tokens == len(own.token_log_probs)
        assert score.log_prob == pytest.approx(own.log_prob, abs=1e-4)
        assert score.log_prob / score.tokens == pytest.approx(own.score, abs=1e-4)


def test_an_empty_target_is_the_end_of_sentence_alone(translator: Translator) -> None:
    (score,) = score_pairs(translator, [(SOURCES[0], "")])
    assert score.tokens == 1
    assert score.log_prob < 0


def test_an_empty_source_is_scored_too(translator: Translator) -> None:
    (score,) = score_pairs(translator, [(SourceLine(""), "w1")])
    assert_alike([score], [naive(translator, SourceLine(""), "w1")])


def test_no_pairs_have_no_scores(translator: Translator) -> None:
    assert list(score_pairs(translator, [])) == []


def test_shuffled_states_are_those_of_the_next_sentence(fused: Translator) -> None:
    found = list(score_pairs(fused, PAIRS, shuffle_encoder=True))
    (member,) = fused.members
    for i, (source, target) in enumerate(PAIRS):
        own, other = member.examples([source, SOURCES[(i + 1) % 5]], fused.counts)
        ids = [*member.target.encode(target), 2]
        batch = member.batch([replace(own, target=ids, bert=other.bert)], torch.device("cpu"))
        with torch.no_grad():
            log_probs = member.model(batch)[0].log_softmax(-1)
        expected = float(log_probs[range(len(ids)), ids].sum())
        assert found[i].log_prob == pytest.approx(expected, abs=1e-4)
        assert found[i].tokens == len(ids)
    assert found != list(score_pairs(fused, PAIRS))


def test_shuffling_changes_nothing_where_there_is_no_encoder(runs: Path) -> None:
    plain = Translator.load(runs / "plain", device="cpu")
    assert_alike(
        list(score_pairs(plain, PAIRS, shuffle_encoder=True)), list(score_pairs(plain, PAIRS))
    )


def test_an_ensemble_averages_probabilities_not_their_logarithms(runs: Path) -> None:
    members = [Member.of(load_model(runs / name)) for name in ("plain", "fused")]
    pair = Translator(members, torch.device("cpu"))
    singles = [Translator([member], torch.device("cpu")) for member in members]
    (both,) = score_pairs(pair, [(SOURCES[0], "")])
    each = [next(score_pairs(single, [(SOURCES[0], "")])).log_prob for single in singles]
    mean = torch.tensor(each).double().exp().mean().log()
    assert each[0] != pytest.approx(each[1], abs=1e-2)
    assert both.log_prob == pytest.approx(float(mean), abs=1e-5)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_pair_beyond_the_learned_positions_is_refused(runs: Path, side: str) -> None:
    learned = Translator.load(runs / "learned", device="cpu")
    long, short = "w1 w2 w3 w4 w5", "w1 w2 w3 w4"
    assert len(list(score_pairs(learned, [(SourceLine(short), short)]))) == 1
    pair = (SourceLine(long), short) if side == "source" else (SourceLine(short), long)
    with pytest.raises(
        UserError, match="a sentence has 6 tokens, but the model has learned only 5"
    ):
        list(score_pairs(learned, [pair]))
