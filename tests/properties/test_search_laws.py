"""Laws of the search: equal to a naive one written from fairseq's description, and batch-blind."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertfused.config import SearchConfig
from bertfused.search import Hypothesis, beam_search, sample
from tests.toy_decoder import ToyDecoder, toy_logits

BOS, PAD, EOS, UNK, VOCAB = 0, 1, 2, 3, 12
LAWS = settings(max_examples=60, deadline=None, derandomize=True)

Found = list[tuple[list[int], float]]

options = st.fixed_dictionaries(
    {
        "beam_size": st.integers(1, 4),
        "length_penalty": st.sampled_from([0.0, 0.6, 1.0, 2.0]),
        "normalize": st.booleans(),
        "min_length": st.integers(0, 4),
        "no_repeat_ngram": st.sampled_from([None, 2, 3]),
        "unk_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "temperature": st.sampled_from([1.0, 0.7]),
    }
)
sentences = st.lists(
    st.tuples(
        st.integers(0, 10**6),  # the model
        st.integers(4, 9),  # its longest length
        st.lists(st.integers(4, VOCAB - 1), max_size=3),  # its prefix
    ),
    min_size=1,
    max_size=7,
)
sharpnesses = st.sampled_from([0.3, 1.5, 4.0])


def next_log_probs(
    seed: int, ids: list[int], sharpness: float, config: SearchConfig
) -> list[float]:
    logits = [float(x) / config.temperature for x in toy_logits(seed, tuple(ids), VOCAB, sharpness)]
    normaliser = math.log(sum(math.exp(x) for x in logits))
    result = [x - normaliser for x in logits]
    result[UNK] -= config.unk_penalty
    return result


def banned(ids: list[int], token: int, longest: int, config: SearchConfig) -> bool:
    if len(ids) >= longest:
        return token != EOS
    if token in (BOS, PAD) or (token == EOS and len(ids) < config.min_length):
        return True
    size = config.no_repeat_ngram
    if not size or len(ids) < size:
        return False
    ngrams = [ids[i : i + size] for i in range(len(ids) - size + 1)]
    return [*ids[len(ids) - size + 1 :], token] in ngrams


def naive_beam_search(
    seed: int, longest: int, prefix: list[int], sharpness: float, config: SearchConfig
) -> Found:
    """Search one sentence with lists, in double precision, without a cache."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: Found = []
    for step in range(longest + 1):
        candidates = []
        for total, ids in beams:
            log_probs = next_log_probs(seed, ids, sharpness, config)
            for token, log_prob in enumerate(log_probs):
                if step < min(len(prefix), longest):
                    allowed = token == prefix[step]
                else:
                    allowed = not banned(ids, token, longest, config)
                if allowed:
                    candidates.append((total + log_prob, [*ids, token]))
        candidates = sorted(candidates, reverse=True)[: 2 * config.beam_size]
        for total, ids in candidates[: config.beam_size]:
            if ids[-1] == EOS and len(finished) < config.beam_size:
                length = len(ids) ** config.length_penalty if config.normalize else 1
                finished.append((ids, total / length))
        beams = [candidate for candidate in candidates if candidate[1][-1] != EOS]
        beams = beams[: config.beam_size]
        if len(finished) == config.beam_size:
            break
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])


def assert_same(hypotheses: list[Hypothesis], expected: Found) -> None:
    assert [hypothesis.ids for hypothesis in hypotheses] == [ids for ids, _ in expected]
    for hypothesis, (_, score) in zip(hypotheses, expected, strict=True):
        assert math.isclose(hypothesis.score, score, abs_tol=2e-5)


@LAWS
@given(options, sentences, sharpnesses)
def test_equals_a_naive_search(
    chosen: dict[str, object],
    batch: list[tuple[int, int, list[int]]],
    sharpness: float,
) -> None:
    config = SearchConfig.model_validate(chosen)
    seeds, limits, prefixes = map(list, zip(*batch, strict=True))
    decoder = ToyDecoder(seeds, VOCAB, sharpness)
    found = beam_search(decoder, torch.tensor(limits), config, prefixes=prefixes)
    for hypotheses, (seed, longest, prefix) in zip(found, batch, strict=True):
        assert_same(hypotheses, naive_beam_search(seed, longest, prefix, sharpness, config))


@LAWS
@given(options, sentences, sharpnesses)
def test_hypotheses_obey_the_rules(
    chosen: dict[str, object],
    batch: list[tuple[int, int, list[int]]],
    sharpness: float,
) -> None:
    config = SearchConfig.model_validate(chosen)
    seeds, limits, prefixes = map(list, zip(*batch, strict=True))
    arguments = (torch.tensor(limits), config)
    searched = beam_search(ToyDecoder(seeds, VOCAB, sharpness), *arguments, prefixes=prefixes)
    sampled = sample(
        ToyDecoder(seeds, VOCAB, sharpness),
        *arguments,
        prefixes=prefixes,
        seeds=seeds,
        num_samples=3,
    )
    for found in (searched, sampled):
        for hypotheses, (seed, longest, prefix) in zip(found, batch, strict=True):
            scores = [hypothesis.score for hypothesis in hypotheses]
            assert scores == sorted(scores, reverse=True)
            for hypothesis in hypotheses:
                *ids, last = hypothesis.ids
                assert last == EOS
                assert not {BOS, PAD, EOS} & set(ids)
                assert config.min_length <= len(ids) <= longest
                assert ids[: len(prefix)] == prefix
                size = config.no_repeat_ngram
                if size:
                    free = range(max(len(prefix) - size + 1, 0), len(ids) - size + 1)
                    ngrams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
                    assert all(ngrams[i] not in ngrams[:i] for i in free)
                expected = [
                    next_log_probs(seed, hypothesis.ids[:i], sharpness, config)[token]
                    for i, token in enumerate(hypothesis.ids)
                ]
                for log_prob, other in zip(hypothesis.token_log_probs, expected, strict=True):
                    assert math.isclose(log_prob, other, abs_tol=2e-5)
                length = len(hypothesis.ids) ** config.length_penalty if config.normalize else 1
                assert math.isclose(hypothesis.score, sum(expected) / length, abs_tol=5e-5)


@LAWS
@given(options, sentences, sharpnesses, st.sampled_from([None, "full", "topk:3", "nucleus:0.6"]))
def test_batch_mates_change_nothing(
    chosen: dict[str, object],
    batch: list[tuple[int, int, list[int]]],
    sharpness: float,
    sampling: str | None,
) -> None:
    config = SearchConfig.model_validate({**chosen, "sampling": sampling})

    def decode(part: list[tuple[int, int, list[int]]]) -> list[list[Hypothesis]]:
        seeds, limits, prefixes = map(list, zip(*part, strict=True))
        decoder, tensor = ToyDecoder(seeds, VOCAB, sharpness), torch.tensor(limits)
        if sampling is None:
            return beam_search(decoder, tensor, config, prefixes=prefixes)
        return sample(decoder, tensor, config, seeds=seeds, num_samples=3, prefixes=prefixes)

    together = decode(batch)
    assert decode(batch[::-1]) == together[::-1]
    assert [decode([sentence])[0] for sentence in batch] == together


@LAWS
@given(st.integers(0, 10**6), st.sampled_from([(4, 2), (4, 4), (6, 3)]), st.integers(4, 8))
def test_diverse_groups_equal_a_naive_search(
    seed: int, sizes: tuple[int, int], longest: int
) -> None:
    width, groups = sizes
    config = SearchConfig(beam_size=width, diverse_groups=groups, diverse_strength=0.5)
    (hypotheses,) = beam_search(ToyDecoder([seed], 16), torch.tensor([longest]), config)

    beams: list[tuple[float, list[int]]] = [(0.0, [])] * width
    finished: Found = []
    for step in range(longest + 1):
        used = dict.fromkeys(range(16), 0)
        ranked = []
        for group in range(groups):
            own = beams[group::groups] if step else beams[:1]
            candidates = []
            for total, ids in own:
                logits = torch.from_numpy(toy_logits(seed, tuple(ids), 16, 1.5))
                for token, log_prob in enumerate(logits.log_softmax(0).tolist()):
                    if not banned(ids, token, longest, config):
                        candidates.append((total + log_prob - 0.5 * used[token], [*ids, token]))
            candidates = sorted(candidates, reverse=True)[: 2 * width // groups]
            for _, ids in candidates:
                used[ids[-1]] += 1
            ranked.append(candidates)
        ranks = range(max(map(len, ranked)))
        mixed = [own[rank] for rank in ranks for own in ranked if rank < len(own)]
        for total, ids in mixed[:width]:
            if ids[-1] == EOS and len(finished) < width:
                finished.append((ids, total / len(ids)))
        beams = [candidate for candidate in mixed if candidate[1][-1] != EOS][:width]
        if len(finished) == width:
            break
    assert_same(hypotheses, sorted(finished, key=lambda hypothesis: -hypothesis[1]))


@LAWS
@given(st.integers(0, 10**6), st.integers(3, 8))
def test_diversity_without_strength_in_one_group_is_beam_search(seed: int, longest: int) -> None:
    limits = torch.tensor([longest])
    plain = beam_search(ToyDecoder([seed]), limits, SearchConfig(beam_size=4))
    config = SearchConfig(beam_size=4, diverse_groups=1, diverse_strength=3)
    assert beam_search(ToyDecoder([seed]), limits, config) == plain


@LAWS
@given(st.integers(0, 10**6))
def test_a_strong_penalty_starts_each_group_with_another_token(seed: int) -> None:
    config = SearchConfig(beam_size=3, diverse_groups=3, diverse_strength=100)
    (hypotheses,) = beam_search(ToyDecoder([seed]), torch.tensor([1]), config)
    # Each group looks at two tokens and so bars two for the groups after it.
    assert len({hypothesis.ids[0] for hypothesis in hypotheses}) == 3


@LAWS
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_samples_depend_on_the_seed_alone(seed: int, other: int) -> None:
    def draw(value: int, limits: list[int]) -> list[list[int]]:
        decoder = ToyDecoder([1] * len(limits), VOCAB, 0.3)
        seeds = [value] * len(limits)
        found = sample(decoder, torch.tensor(limits), SearchConfig(), seeds=seeds, num_samples=4)
        return [hypothesis.ids for hypothesis in found[0]]

    assert draw(seed, [30]) == draw(seed, [30, 8])
    if seed != other:
        assert draw(seed, [30]) != draw(other, [30])
