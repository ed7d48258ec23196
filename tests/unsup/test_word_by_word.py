import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import pytest

from unsup.language_model import BEGIN, END, LanguageModel, train_language_model
from unsup.lexicon import Candidate, Lexicon
from unsup.word_by_word import WordByWord, count_choices, refined, steps, translate_lines

FRENCH = [
    "un chien noir court .",
    "le chat noir dort .",
    "un grand chat court .",
    "le chien dort .",
]


def lexicon(**entries: Sequence[str]) -> Lexicon:
    """Give all translations of a word the same probability."""
    return Lexicon(
        {
            source: tuple(Candidate(word, -math.log(len(targets))) for word in targets)
            for source, targets in entries.items()
        }
    )


ENGLISH = lexicon(a=["un", "le"], the=["le", "un"], dog=["chien"], cat=["chat"], black=["noir"])


def translate(line: str, words: Lexicon = ENGLISH, **weights: float | None) -> str:
    model = train_language_model(FRENCH)
    search = WordByWord(words, model, **weights)  # type: ignore[arg-type]
    return next(translate_lines([line], search))


def test_the_language_model_chooses_and_swaps() -> None:
    assert translate("the black cat", swap_cost=0.1, insert_cost=None) == "le chat noir"


def test_a_high_cost_forbids_swaps() -> None:
    assert translate("the black cat", swap_cost=50.0, insert_cost=None) == "le noir chat"


def test_words_without_translation_are_copied() -> None:
    assert translate("the zebra 7", insert_cost=None) == "le zebra 7"


def test_a_word_may_be_left_out() -> None:
    words = Lexicon({**ENGLISH.entries, "does": (Candidate("", -1.0),)})
    assert translate("the cat does", words, insert_cost=None) == "le chat"


def test_a_word_is_put_in_where_the_text_has_it() -> None:
    assert translate("a cat", lexicon(a=["un"], cat=["chat"]), insert_cost=-5.0) == "un grand chat"
    assert translate("a cat", lexicon(a=["un"], cat=["chat"]), insert_cost=50.0) == "un chat"


def test_no_words_have_no_translation() -> None:
    assert translate("") == ""


@pytest.mark.parametrize("reach", [0, 1, 2])
def test_a_wide_beam_finds_the_best_of_all(reach: int) -> None:
    model = train_language_model(FRENCH)
    chooser = random.Random(reach)
    vocabulary = sorted(model.unigrams.keys() - {END})
    for _ in range(4):
        entries = {
            source: (
                *(Candidate(word, -chooser.random() * 3) for word in chooser.sample(vocabulary, 2)),
                Candidate("", -3.0),
            )
            for source in "abcd"
        }
        search = WordByWord(
            Lexicon(entries), model, swap_cost=0.5, insert_cost=None, reach=reach, beam_size=10_000
        )
        scores = enumerated("abcd", entries, model, reach=reach, swap_cost=0.5)
        assert search.best("abcd").score == pytest.approx(max(scores))


def enumerated(
    words: Sequence[str],
    entries: dict[str, tuple[Candidate, ...]],
    model: LanguageModel,
    *,
    reach: int,
    swap_cost: float,
) -> Iterator[float]:
    """Score all choices in all orders in which no word moves over the first one left too far."""
    for order in permutations(range(len(words))):
        left = list(range(len(words)))
        inversions, furthest = 0, 0
        for position in order:
            furthest = max(furthest, position - left[0])
            inversions += left.index(position)
            left.remove(position)
        if furthest > reach:
            continue
        for chosen in product(*(entries[words[position]] for position in order)):
            sentence = [candidate.word for candidate in chosen if candidate.word]
            lexical = sum(candidate.log_prob for candidate in chosen)
            yield lexical - swap_cost * inversions + model.sentence_log_prob(sentence)


def test_the_score_is_the_sum_of_its_parts() -> None:
    model = train_language_model(FRENCH)
    best = WordByWord(ENGLISH, model, swap_cost=0.1, lm_weight=0.5, insert_cost=None).best(
        ["the", "black", "cat"]
    )
    assert [(step.position, step.added) for step in steps(best)] == [
        (0, ("le",)),
        (2, ("chat",)),
        (1, ("noir",)),
    ]
    expected = math.log(1 / 2) - 0.1 + 0.5 * model.sentence_log_prob(["le", "chat", "noir"])
    assert best.score == pytest.approx(expected)
    assert steps(best)[0].previous == BEGIN


def test_choices_are_counted_by_source_word() -> None:
    search = WordByWord(ENGLISH, train_language_model(FRENCH), insert_cost=None)
    counts = count_choices(["the cat", "the dog"], search)
    assert counts == {
        "the": Counter(le=2),
        "cat": Counter(chat=1),
        "dog": Counter(chien=1),
    }


def test_refining_adds_both_directions_counts_to_the_old_probabilities() -> None:
    old = Lexicon({"a": (Candidate("un", math.log(0.5)), Candidate("le", math.log(0.5)))})
    new = refined(old, {"a": Counter(un=3)}, {"le": Counter(a=1)}, prior=2.0)
    assert new.candidates("a") == (
        Candidate("un", pytest.approx(math.log(4 / 6))),
        Candidate("le", pytest.approx(math.log(2 / 6))),
    )
