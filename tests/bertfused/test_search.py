"""The search against numbers worked out by hand, exhaustive enumeration, and its own edges."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bertfused import search
from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.search import (
    Ensemble,
    Hypothesis,
    SpecialIds,
    beam_search,
    line_seeds,
    longest,
    sample,
    sampled_candidates,
)
from tests.toy_decoder import ToyDecoder, toy_logits

EOS, UNK, A, B = 2, 3, 4, 5


class TableDecoder:
    """A model of one sentence that always has the same six probabilities."""

    def __init__(self, probabilities: list[float]) -> None:
        self.log_probs = torch.tensor(probabilities).log()

    def step(self, tokens: Tensor) -> Tensor:
        return self.log_probs.expand(*tokens.shape, -1).clone()

    def reorder(self, parents: Tensor) -> None:
        pass

    def keep(self, sentences: Tensor) -> None:
        raise AssertionError("a batch of one has nothing to drop")


def lengths(*values: int) -> Tensor:
    return torch.tensor(values)


def ids_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.ids for hypothesis in hypotheses] for hypotheses in found]


def test_beam_search_by_hand() -> None:
    # p(EOS) = .2, p(a) = .5, p(b) = .3, at every step, at most two tokens, beam 2, no length norm.
    # Step 0, EOS banned by min_length 1: a .5, b .3 go on.
    # Step 1: aa .25, ab .15 = ba .15 = a EOS .1, ...: nothing ends among the first two.
    # Step 2, the longest length: aa EOS .05 and ab EOS .03 (or ba EOS, its equal) end.
    decoder = TableDecoder([0, 0, 0.2, 0, 0.5, 0.3])
    config = SearchConfig(beam_size=2, normalize=False)
    ((first, second),) = beam_search(decoder, lengths(2), config)
    assert first.ids == [A, A, EOS]
    assert first.score == pytest.approx(math.log(0.05))
    assert first.token_log_probs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.2)])
    assert sorted(second.ids[:2]) == [A, B]
    assert second.score == pytest.approx(math.log(0.03))


def test_length_penalty_divides_by_a_power_of_the_length_with_eos() -> None:
    decoder = TableDecoder([0, 0, 0.2, 0, 0.5, 0.3])
    ((best, _),) = beam_search(decoder, lengths(2), SearchConfig(beam_size=2, length_penalty=0.6))
    assert best.score == pytest.approx(math.log(0.05) / 3**0.6)


def test_eos_below_the_beam_does_not_count() -> None:
    # b's end (.3 * .6) ranks third of the candidates of step 1, behind aa and ab; beam 2 drops it.
    class Model(TableDecoder):
        def step(self, tokens: Tensor) -> Tensor:
            table = {
                EOS: [0, 0, 0, 0, 0.7, 0.3],
                UNK: [0, 0, 1, 0, 0, 0],  # impossible itself
                A: [0, 0, 0.02, 0, 0.5, 0.48],
                B: [0, 0, 0.6, 0, 0.2, 0.2],
            }
            rows = [[table[token] for token in row] for row in tokens.tolist()]
            return torch.tensor(rows).log()

    config = SearchConfig(beam_size=2, normalize=False)
    found = beam_search(Model([1.0]), lengths(2), config)
    assert [B, EOS] not in ids_of(found)[0]
    wider = beam_search(Model([1.0]), lengths(2), SearchConfig(beam_size=3, normalize=False))
    assert [B, EOS] in ids_of(wider)[0]


def test_a_wide_beam_is_an_exhaustive_search() -> None:
    seeds = [11, 12, 13]
    found = beam_search(ToyDecoder(seeds, vocab=6), lengths(3, 2, 3), SearchConfig(beam_size=40))
    for seed, limit, hypotheses in zip(seeds, (3, 2, 3), found, strict=True):
        scores = {}
        for length in range(1, limit + 1):
            for tokens in itertools.product((UNK, A, B), repeat=length):
                ids = (*tokens, EOS)
                log_probs = [
                    torch.from_numpy(toy_logits(seed, ids[:i], 6, 1.5)).log_softmax(0)[ids[i]]
                    for i in range(len(ids))
                ]
                scores[ids] = float(sum(log_probs)) / len(ids)
        best = sorted(scores, key=lambda ids: -scores[ids])
        assert [tuple(hypothesis.ids) for hypothesis in hypotheses] == best
        for hypothesis in hypotheses:
            assert hypothesis.score == pytest.approx(scores[tuple(hypothesis.ids)], abs=1e-5)


def test_beam_one_is_greedy() -> None:
    seeds = list(range(20))
    decoder = ToyDecoder(seeds)
    found = beam_search(decoder, torch.full((20,), 15), SearchConfig(beam_size=1))
    for seed, (hypothesis,) in zip(seeds, found, strict=True):
        ids: list[int] = []
        while not ids or ids[-1] != EOS:
            logits = toy_logits(seed, tuple(ids), 12, 1.5).copy()
            banned = [0, 1] if ids else [0, 1, EOS]
            logits[banned] = -np.inf
            ids.append(EOS if len(ids) == 15 else int(logits.argmax()))
        assert hypothesis.ids == ids
    assert "reorder" not in decoder.calls


def test_finished_sentences_leave_in_bulk() -> None:
    decoder = ToyDecoder([1] * 32)
    beam_search(decoder, torch.arange(1, 33), SearchConfig(beam_size=2, min_length=40))
    # One sentence ends at each step; a quarter must have ended before the rest is copied.
    assert 3 < decoder.calls.count("keep") < 16
    assert decoder.calls.count("step") == 33


def test_the_decoder_is_not_reordered_after_the_last_step() -> None:
    decoder = ToyDecoder([3])
    beam_search(decoder, lengths(1), SearchConfig(beam_size=4))
    assert decoder.calls == ["step", "reorder", "step"]


@pytest.mark.parametrize("log_probs", [False, True])
def test_logits_and_log_probs_are_the_same(log_probs: bool) -> None:
    found = beam_search(ToyDecoder([5], log_probs=log_probs), lengths(9), SearchConfig())
    other = beam_search(ToyDecoder([5], log_probs=not log_probs), lengths(9), SearchConfig())
    assert ids_of(found) == ids_of(other)
    assert found[0][0].score == pytest.approx(other[0][0].score, abs=1e-6)


def test_temperature_divides_logits() -> None:
    config = SearchConfig(temperature=0.7)
    found = beam_search(ToyDecoder([5], sharpness=1.4), lengths(9), config)
    other = beam_search(ToyDecoder([5], sharpness=2.0), lengths(9), SearchConfig())
    assert ids_of(found) == ids_of(other)
    assert found[0][0].score == pytest.approx(other[0][0].score, abs=1e-5)


def test_unk_penalty_is_taken_after_normalising() -> None:
    decoder = TableDecoder([0, 0, 0.2, 0.8, 0, 0])
    config = SearchConfig(beam_size=1, unk_penalty=0.5)
    ((hypothesis,),) = beam_search(decoder, lengths(1), config)
    assert hypothesis.token_log_probs == pytest.approx([math.log(0.8) - 0.5, math.log(0.2)])


def test_pad_and_bos_are_never_generated_but_keep_their_probability() -> None:
    decoder = TableDecoder([0.4, 0.3, 0.1, 0, 0.2, 0])
    ((hypothesis,),) = beam_search(decoder, lengths(1), SearchConfig(beam_size=1))
    assert hypothesis.ids == [A, EOS]
    assert hypothesis.token_log_probs == pytest.approx([math.log(0.2), math.log(0.1)])


def test_other_special_ids() -> None:
    special = SpecialIds(bos=3, pad=0, eos=5, unk=1, start=3)
    decoder = TableDecoder([0.2, 0.1, 0.25, 0.2, 0.05, 0.2])
    ((hypothesis,),) = beam_search(decoder, lengths(1), SearchConfig(beam_size=1), special=special)
    assert hypothesis.ids == [2, 5]


def test_a_longest_length_of_zero_is_the_empty_translation() -> None:
    found = beam_search(ToyDecoder([1, 2]), lengths(0, 3), SearchConfig(beam_size=3))
    assert ids_of(found)[0] == [[EOS]]
    assert all(len(ids) > 1 for ids in ids_of(found)[1])


def test_no_sentences() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    assert beam_search(ToyDecoder([]), empty, SearchConfig()) == []
    assert sample(ToyDecoder([]), empty, SearchConfig(), seeds=[]) == []


def test_a_beam_wider_than_the_vocabulary() -> None:
    found = beam_search(ToyDecoder([7], vocab=6), lengths(1), SearchConfig(beam_size=10))
    assert sorted(ids_of(found)[0]) == [[UNK, EOS], [A, EOS], [B, EOS]]


def test_a_prefix_may_end_the_translation() -> None:
    prefixes = [[A, B, EOS], []]
    found = beam_search(ToyDecoder([1, 2]), lengths(9, 9), SearchConfig(), prefixes=prefixes)
    assert ids_of(found)[0] == [[A, B, EOS]]
    assert len(found[1]) == 5
    alone = ToyDecoder([1])
    beam_search(alone, lengths(9), SearchConfig(), prefixes=[[A, B, EOS]])
    assert alone.calls.count("step") == 3


def test_a_longest_length_cuts_a_prefix() -> None:
    found = beam_search(ToyDecoder([1]), lengths(2), SearchConfig(), prefixes=[[A, B, A, B]])
    assert ids_of(found)[0] == [[A, B, EOS]]


def test_a_forced_token_is_exempt_from_the_other_rules() -> None:
    config = SearchConfig(no_repeat_ngram=1, min_length=4)
    found = beam_search(ToyDecoder([1]), lengths(9), config, prefixes=[[0, A, A, EOS]])
    assert ids_of(found)[0] == [[0, A, A, EOS]]


def test_what_was_begun_is_no_part_of_a_length_or_of_a_repeat() -> None:
    decoder = TableDecoder([0, 0, 0.5, 0, 0.3, 0.2])  # the same at every step
    for options in ({"min_length": 2}, {"no_repeat_ngram": 1, "min_length": 0}):
        config = SearchConfig.model_validate({"beam_size": 2, "normalize": False, **options})
        (alone,) = beam_search(decoder, lengths(5), config)
        (behind,) = beam_search(decoder, lengths(7), config, prefixes=[[A, B]], begun=[2])
        (counted,) = beam_search(decoder, lengths(7), config, prefixes=[[A, B]])
        assert [own.ids[2:] for own in behind] == [own.ids for own in alone]
        assert [own.ids[2:] for own in counted] != [own.ids for own in alone]


def test_nbest() -> None:
    every = beam_search(ToyDecoder([1, 2]), lengths(9, 9), SearchConfig())
    some = beam_search(ToyDecoder([1, 2]), lengths(9, 9), SearchConfig(), nbest=2)
    assert some == [hypotheses[:2] for hypotheses in every]
    with pytest.raises(UserError, match="nbest is 6; beam_size 5 allows"):
        beam_search(ToyDecoder([1]), lengths(9), SearchConfig(), nbest=6)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_sentence_without_any_translation_is_named(beam_size: int) -> None:
    decoder = TableDecoder([math.nan] * 6)
    with pytest.raises(UserError, match="sentence 0 of the batch has no translation"):
        beam_search(decoder, lengths(3), SearchConfig(beam_size=beam_size))
    config = SearchConfig(beam_size=beam_size, no_repeat_ngram=1, min_length=9)
    with pytest.raises(UserError, match="min_length and no_repeat_ngram leave no token"):
        beam_search(TableDecoder([0, 0, 0.2, 0, 0.5, 0.3]), lengths(20), config)


def test_sampling_from_nan_is_an_error_too() -> None:
    with pytest.raises(UserError, match="sentence 0 of the batch has no translation"):
        sample(TableDecoder([math.nan] * 6), lengths(3), SearchConfig(), seeds=[1])


def test_the_longest_length_follows_from_the_source() -> None:
    config = SearchConfig(max_length_a=1.2, max_length_b=3)
    assert longest(config, lengths(5, 7, 40), positions=30).tolist() == [9, 11, 29]
    assert longest(SearchConfig(), lengths(5), positions=1024).tolist() == [200]


def test_seeds_differ_by_seed_and_line() -> None:
    seeds = [line_seeds(seed, range(100)) for seed in range(5)]
    assert len({seed for row in seeds for seed in row}) == 500


def test_an_ensemble_averages_probabilities() -> None:
    members = [TableDecoder([0, 0, 0.2, 0, 0.5, 0.3]), TableDecoder([0, 0, 0.6, 0, 0.1, 0.3])]
    result = Ensemble(members).step(torch.tensor([[2, 2]]))
    assert result.exp().tolist() == [[pytest.approx([0, 0, 0.4, 0, 0.3, 0.3])] * 2]


def test_the_temperature_of_an_ensemble_is_its_members() -> None:
    members = [TableDecoder([0.5, 0.5]), TableDecoder([0.9, 0.1])]
    result = Ensemble(members, temperature=0.5).step(torch.tensor([[2]]))
    # p ** 2, normalised: (.5, .5) and (.81, .01) / .82
    assert result.exp().tolist() == [
        [pytest.approx([(0.5 + 0.81 / 0.82) / 2, (0.5 + 0.01 / 0.82) / 2])]
    ]


def test_an_ensemble_of_equals_is_its_member() -> None:
    seeds, limits = list(range(8)), torch.arange(2, 10)
    alone = beam_search(ToyDecoder(seeds), limits, SearchConfig())
    members = [ToyDecoder(list(seeds)) for _ in range(3)]
    together = beam_search(Ensemble(members), limits, SearchConfig())
    assert ids_of(together) == ids_of(alone)
    assert members[0].calls == members[2].calls
    assert {"reorder", "keep"} < set(members[0].calls)


def test_diverse_groups_by_hand() -> None:
    # Two groups of one beam. Group 0 ranks two, a .5 and b .3, and group 1 penalises both: with
    # strength 1, a has .5 / e = .18 and still beats unk's .1; with 2, .5 / e**2 = .07 does not.
    decoder = TableDecoder([0, 0, 0.1, 0.1, 0.5, 0.3])
    mild = SearchConfig(beam_size=2, diverse_groups=2, diverse_strength=1, normalize=False)
    strong = mild.model_copy(update={"diverse_strength": 2.0})
    first_tokens = [
        [hypothesis.ids[0] for hypothesis in beam_search(decoder, lengths(1), config)[0]]
        for config in (mild, strong)
    ]
    assert first_tokens == [[A, A], [A, UNK]]


def test_penalties_of_diversity_stay_in_the_scores() -> None:
    decoder = TableDecoder([0, 0, 0.1, 0.1, 0.5, 0.3])
    config = SearchConfig(beam_size=2, diverse_groups=2, diverse_strength=1, normalize=False)
    ((first, second),) = beam_search(decoder, lengths(1), config)
    assert first.score == pytest.approx(math.log(0.5 * 0.1))
    assert second.score == pytest.approx(math.log(0.5 * 0.1) - 2)  # a once, EOS once


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum(
        (count - total * p) ** 2 / (total * p)
        for count, p in zip(counts, probabilities, strict=True)
    )


def first_tokens(config: SearchConfig, decoder: TableDecoder) -> list[int]:
    (hypotheses,) = sample(decoder, lengths(1), config, seeds=[20], num_samples=4000)
    tokens = [hypothesis.ids[0] for hypothesis in hypotheses]
    return [tokens.count(token) for token in range(6)]


# Degrees of freedom 3, 2, 1: chi-square exceeds these with probability .001.
@pytest.mark.parametrize(
    ("options", "expected", "critical"),
    [
        ({"min_length": 0}, [0, 0, 0.1, 0.2, 0.4, 0.3], 16.27),
        ({}, [0, 0, 0, 2 / 9, 4 / 9, 3 / 9], 13.82),
        ({"sampling": "topk:2"}, [0, 0, 0, 0, 4 / 7, 3 / 7], 10.83),
        ({"sampling": "nucleus:0.7"}, [0, 0, 0, 0, 4 / 7, 3 / 7], 10.83),
        ({"sampling": "nucleus:0.8"}, [0, 0, 0, 2 / 9, 4 / 9, 3 / 9], 13.82),
        ({"sampling": "nucleus:0.2"}, [0, 0, 0, 0, 1, 0], 0.0),
        ({"temperature": 0.5}, [0, 0, 0, 4 / 29, 16 / 29, 9 / 29], 13.82),
    ],
)
def test_samples_follow_the_distribution(
    options: dict[str, object], expected: list[float], critical: float
) -> None:
    decoder = TableDecoder([0, 0, 0.1, 0.2, 0.4, 0.3])
    counts = first_tokens(SearchConfig.model_validate(options), decoder)
    possible = [(count, p) for count, p in zip(counts, expected, strict=True) if p]
    assert sum(count for count, _ in possible) == 4000
    assert chi_square([c for c, _ in possible], [p for _, p in possible]) <= critical


def test_a_sample_goes_on_from_itself() -> None:
    # Second tokens, given the first: each sample's own prefix decides.
    config = SearchConfig(min_length=2)
    (hypotheses,) = sample(
        ToyDecoder([4], vocab=6), lengths(2), config, seeds=[9], num_samples=4000
    )
    for first in (UNK, A, B):
        second = [h.ids[1] for h in hypotheses if h.ids[0] == first]
        logits = torch.from_numpy(toy_logits(4, (first,), 6, 1.5))
        expected = logits[3:].softmax(0).tolist()
        counts = np.bincount(second, minlength=6)[3:].tolist()
        assert chi_square(counts, expected) <= 13.82


@pytest.mark.parametrize("options", [{"top_k": 5, "top_p": None}, {"top_k": None, "top_p": 0.9}])
def test_tokens_of_almost_equal_weight_do_not_change_places(options: dict[str, Any]) -> None:
    """Rounding in another batch may swap their order, but not what is drawn."""
    probabilities = [0, 0, 0.12, 0.08, 0.2, 0.2, 0.2, 0.2]
    uniforms = torch.linspace(0, 0.999, 400, dtype=torch.float64)[None]
    drawn = []
    for heavier in (4, 5, 6, 7):
        weights = torch.tensor(probabilities)
        weights[heavier] += 1e-7
        found = sampled_candidates(
            weights.log()[None, None], torch.zeros(1, 1), uniforms, **options
        )
        drawn.append(found.tokens)
    assert all((own != drawn[0]).sum() <= 1 for own in drawn)  # at a boundary, as 1e-7 moved it


def test_a_nucleus_wider_than_the_first_look() -> None:
    # 100 tokens of weight 3, 897 others of weight 1 (no BOS, PAD, EOS): a fifth of the total of
    # 1,197 is 80 of the heavy ones.
    class Wide(TableDecoder):
        def __init__(self) -> None:
            weights = torch.ones(1000)
            weights[500:600] = 3
            self.log_probs = weights.log()

    config = SearchConfig(sampling="nucleus:0.2")
    (hypotheses,) = sample(Wide(), lengths(1), config, seeds=[1], num_samples=3000)
    drawn = {hypothesis.ids[0] for hypothesis in hypotheses}
    assert len(drawn) == 80
    assert drawn < set(range(500, 600))


@pytest.mark.parametrize("vocab", [3, 255, 256, 1000, 1024])
def test_draws_are_proportional_and_never_impossible(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(2, vocab, generator=generator) ** 8
    weights[:, ::3] = 0
    weights[:, -1] = 0
    uniforms = torch.arange(100_000, dtype=torch.float64) / 100_000  # an even sweep of [0, 1)
    drawn = search._draw(weights, uniforms.expand(2, -1))
    for row, tokens in zip(weights.double(), drawn, strict=True):
        shares = torch.bincount(tokens, minlength=vocab) / 100_000
        torch.testing.assert_close(shares, (row / row.sum()).float(), atol=2.1e-5, rtol=0)
        assert not shares[row == 0].any()
    edges = torch.tensor([[0.0, 1 - 2**-53]] * 2, dtype=torch.float64)
    assert weights.gather(1, search._draw(weights, edges)).all()


@pytest.mark.parametrize("vocab", [128 * 40, 128 * 40 + 1, 128 * 41 - 1, 6000])
@pytest.mark.parametrize("beams", [1, 5])
@pytest.mark.parametrize("count", [2, 10])
def test_chunked_top_k_is_exact(
    vocab: int, beams: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SMALL", 0)
    generator = torch.Generator().manual_seed(vocab + beams)
    for levels in (3, 1000, 10**6):  # many ties, some, none
        logits = torch.randint(-levels, 0, (7, beams, vocab), generator=generator) / 7
        logits[:, :, :3] = -math.inf
        logits[3, :, : vocab - 1] = -math.inf  # fewer than count are possible
        scores = torch.randn(7, beams, generator=generator)
        scores[5] = -math.inf  # a finished sentence
        best = search.top_candidates(logits.clone(), scores, count)
        sums = logits + scores[:, :, None]
        expected = sums.view(7, -1).sort(descending=True).values[:, :count]
        torch.testing.assert_close(best.scores, expected, rtol=0, atol=0)
        rows = torch.arange(7)[:, None]
        torch.testing.assert_close(sums[rows, best.parents, best.tokens], best.scores)
        for sentence in (0, 1, 2, 3, 4, 6):
            places = (best.parents[sentence] * vocab + best.tokens[sentence]).tolist()
            possible = int((best.scores[sentence] > -math.inf).sum())
            assert len(set(places[:possible])) == possible


def test_log_softmax_works_in_place_and_in_float32() -> None:
    logits = torch.randn(4, 100)
    expected = logits.double().log_softmax(-1).float()
    torch.testing.assert_close(search.log_softmax(logits.clone()), expected)
    half = search.log_softmax(logits.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, logits.bfloat16().float().log_softmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"no_repeat_ngram": 2}, {"diverse_groups": 5}]
    + [{"sampling": name} for name in ("full", "topk:20", "nucleus:0.9")],
)
def test_gpu_and_cpu_find_the_same(options: dict[str, object]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    config = SearchConfig.model_validate(options)
    found = []
    for device in ("cpu", "cuda"):
        decoder = ToyDecoder(list(range(12)), vocab=3000, device=device)
        limits = torch.arange(4, 16, device=device)
        prefixes = [[A], *([[]] * 11)]
        if config.sampling:
            seeds = range(12)
            found += [
                sample(decoder, limits, config, seeds=seeds, num_samples=3, prefixes=prefixes)
            ]
        else:
            found += [beam_search(decoder, limits, config, prefixes=prefixes)]
    assert ids_of(found[0]) == ids_of(found[1])
    for ours, theirs in zip(*found, strict=True):
        scores = [hypothesis.score for hypothesis in theirs]
        assert [hypothesis.score for hypothesis in ours] == pytest.approx(scores, abs=1e-4)


def test_what_no_translation_has_is_not_even_sampled() -> None:
    special = SpecialIds(never=(4, 3))
    decoder = TableDecoder([0, 0, 0.1, 0.3, 0.5, 0.1])
    found = beam_search(decoder, lengths(4), SearchConfig(beam_size=2), special=special)
    drawn = sample(
        decoder,
        lengths(4),
        SearchConfig(sampling="full"),
        seeds=[1],
        num_samples=50,
        special=special,
    )
    assert {
        id for (nbest) in (*found, *drawn) for hypothesis in nbest for id in hypothesis.ids
    } == {2, 5}
