from collections import Counter

import numpy as np
import pytest

from bertfused.subwords import Tokenizer, Words
from bertfused.vocab import MASK, Vocabulary
from tests.tiny_texts import Texts
from unsup.config import NoiseConfig
from unsup.noise import WordNoise, word_numbers

EOS = Vocabulary.eos
SYMBOLS = [f"w{i}" for i in range(40)]


def noise_of(**values: float) -> WordNoise:
    vocabulary = Vocabulary([*SYMBOLS, MASK], [*range(40, 0, -1), -1])
    config = NoiseConfig.model_validate({"shuffle": 0, "drop": 0, "blank": 0} | values)
    return WordNoise(Tokenizer(Words(), vocabulary), config)


def sentence(words: int) -> np.ndarray:
    return np.array([*range(4, 4 + words), EOS])


def test_without_noise_nothing_changes() -> None:
    assert noise_of()(sentence(7), np.random.default_rng(1)).tolist() == sentence(7).tolist()


@pytest.mark.parametrize("key", ["drop", "blank"])
def test_a_tenth_of_the_words_is_dropped_or_blanked(key: str) -> None:
    noise, random = noise_of(**{key: 0.1}), np.random.default_rng(1)
    noised = [noise(sentence(20), random) for _ in range(2000)]
    if key == "drop":
        changed = 2000 * 20 - sum(len(ids) - 1 for ids in noised)
    else:
        changed = sum(int((ids == noise.mask).sum()) for ids in noised)
    # The standard deviation of the share is sqrt(0.09 / 40,000) = 0.0015.
    assert changed / 40_000 == pytest.approx(0.1, abs=0.006)


def test_words_go_to_the_rank_of_their_place_and_a_draw() -> None:
    noise, random = noise_of(shuffle=3), np.random.default_rng(1)
    moves: Counter[int] = Counter()
    for _ in range(3000):
        ids = noise(sentence(12), random)
        assert sorted(ids[:-1]) == list(range(4, 16))
        assert ids[-1] == EOS
        moves.update(int(place) - (id - 4) for place, id in enumerate(ids[:-1]))
    assert set(moves) <= {-2, -1, 0, 1, 2}
    assert moves[2] > 0
    assert moves[-2] > 0
    # Two neighbours change places if U1 + 0 > U2 + 1 (both U(0, 3)): probability (2/3)^2 / 2.
    pairs = [noise(sentence(2), random)[0] == 5 for _ in range(4000)]
    assert np.mean(pairs) == pytest.approx(2 / 9, abs=0.03)


def test_one_word_always_stays() -> None:
    noise, random = noise_of(drop=0.9), np.random.default_rng(1)
    assert all(len(noise(sentence(2), random)) >= 2 for _ in range(200))


def test_an_empty_sentence_stays_empty() -> None:
    assert noise_of(drop=0.5)(np.array([EOS]), np.random.default_rng(1)).tolist() == [EOS]


def test_the_same_seed_gives_the_same_noise_and_another_gives_another() -> None:
    noise = noise_of(shuffle=3, drop=0.2, blank=0.2)
    first, again, other = (
        noise(sentence(30), np.random.default_rng(seed)).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


def spelled(texts: Texts, **values: float) -> tuple[WordNoise, np.ndarray, list[list[int]]]:
    """Return noise, a sentence, and the pieces of its words."""
    tokenizer = texts.data.tokenizers()[0]
    config = {"shuffle": 0, "drop": 0, "blank": 0} | values
    noise = WordNoise(tokenizer, NoiseConfig.model_validate(config))
    line = "badu unknownlongword mego qwertyuiop niza roku"
    ids = np.array([*tokenizer.encode(line), EOS])
    words = noise.words(ids)
    assert words.max() == 5
    assert len(words) > 10
    return noise, ids, [ids[:-1][words == word].tolist() for word in range(6)]


def test_the_pieces_of_a_word_move_and_go_together(texts: Texts) -> None:
    noise, ids, words = spelled(texts, shuffle=3, drop=0.2)
    random = np.random.default_rng(1)
    for _ in range(300):
        rest, found = noise(ids, random)[:-1].tolist(), []
        while rest:
            (word,) = [i for i in range(6) if rest[: len(words[i])] == words[i] and i not in found]
            found.append(word)
            del rest[: len(words[word])]
        assert 1 <= len(found) <= 6


def test_the_pieces_of_a_word_are_blanked_together(texts: Texts) -> None:
    noise, ids, words = spelled(texts, blank=0.3)
    random = np.random.default_rng(1)
    number = noise.words(ids)
    for _ in range(300):
        is_blank = noise(ids, random)[:-1] == noise.mask
        assert all(
            is_blank[number == word].all() or not is_blank[number == word].any()
            for word in range(len(words))
        )


def test_words_of_byte_pairs_go_on_after_their_sign() -> None:
    begins, goes_on = np.array([True] * 4), np.array([False, True, False, False])
    tokens = np.array([1, 0, 2, 1, 1, 3])
    assert word_numbers(tokens, begins, goes_on).tolist() == [0, 0, 1, 2, 2, 2]


def test_a_span_has_the_share_asked_for_and_lies_in_the_sentence() -> None:
    noise, random = noise_of(mass=0.5), np.random.default_rng(1)
    spans = [noise.span(10, random) for _ in range(500)]
    assert {span.stop - span.start for span in spans} == {5}
    assert {span.start for span in spans} == set(range(6))
    assert noise.span(1, random) == slice(0, 1)
