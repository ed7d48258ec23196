import pytest
from hypothesis import given
from hypothesis import strategies as st

from backtranslation.config import NoiseConfig
from backtranslation.noise import add_noise

WORDS = " ".join(f"w{number}" for number in range(2000))


def test_without_noise_a_line_is_itself() -> None:
    assert not NoiseConfig(filler="#", seed=4).is_any
    assert add_noise("a  b", 0, NoiseConfig()) == "a b"


def test_shares_are_those_asked_for() -> None:
    dropped = add_noise(WORDS, 0, NoiseConfig(drop=0.1)).split()
    assert 1740 < len(dropped) < 1860
    assert [w for w in WORDS.split() if w in set(dropped)] == dropped
    blanked = add_noise(WORDS, 0, NoiseConfig(blank=0.2, filler="#")).split()
    assert 330 < blanked.count("#") < 470
    assert all(new in ("#", old) for new, old in zip(blanked, WORDS.split(), strict=True))


@pytest.mark.parametrize("swap", [1, 3])
def test_a_word_moves_by_so_many_places_at_most(swap: int) -> None:
    swapped = add_noise(WORDS, 0, NoiseConfig(swap=swap)).split()
    moves = [abs(place - int(word[1:])) for place, word in enumerate(swapped)]
    assert max(moves) == swap
    assert sorted(swapped) == sorted(WORDS.split())


@given(st.text(), st.floats(0, 0.99), st.integers(0, 5))
def test_something_stays_of_every_line(line: str, share: float, swap: int) -> None:
    noisy = add_noise(line, 3, NoiseConfig(drop=share, blank=share, swap=swap))
    assert "\n" not in noisy or "\n" in line
    assert bool(noisy.split()) == bool(line.split())
    assert len(noisy.split()) <= len(line.split())


def test_each_line_and_seed_has_a_stream_of_its_own() -> None:
    noise = NoiseConfig(drop=0.5)
    assert add_noise(WORDS, 1, noise) == add_noise(WORDS, 1, noise)
    assert add_noise(WORDS, 1, noise) != add_noise(WORDS, 2, noise)
    assert add_noise(WORDS, 1, noise) != add_noise(WORDS, 1, NoiseConfig(drop=0.5, seed=2))
