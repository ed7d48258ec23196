import math

import pytest

from unsup.language_model import BEGIN, END, UNKNOWN, discounts, train_language_model

LINES = ["a b", "a c", "a b c"]


def test_probabilities_sum_to_one_after_every_history() -> None:
    model = train_language_model(["the man sees the dog", "a dog sees a man", "the dog sleeps", ""])
    words = model.unigrams
    for first in (BEGIN, *words):
        for second in (BEGIN, *words):
            total = math.fsum(math.exp(model.log_prob(first, second, word)) for word in words)
            assert total == pytest.approx(1)


def test_discounts_by_hand() -> None:
    # n1, n2, n3, n4 = 4, 2, 1, 1: Y = 4 / (4 + 4) = 1/2
    assert discounts([1, 1, 1, 1, 2, 2, 3, 4]) == pytest.approx(
        (1 - 2 / 2 * 2 / 4, 2 - 3 / 2 * 1 / 2, 3 - 4 / 2 * 1)
    )


def test_a_small_text_has_one_discount() -> None:
    assert discounts([1, 1, 2]) == (0.75, 0.75, 0.75)


def test_kneser_ney_by_hand() -> None:
    """One discount D = 3/4: no level has n-grams of each of the four counts.

    Different words before: a 1 (BEGIN), b 1 (a), c 2 (a, b), END 2 (b, c); 6 bigrams of 4 words.
    """
    model = train_language_model(LINES)
    uniform = 1 / 5  # a b c END UNKNOWN
    rest = 0.75 * 4 / 6
    assert math.exp(model.unigram("b")) == pytest.approx(0.25 / 6 + rest * uniform)
    assert math.exp(model.unigram(UNKNOWN)) == pytest.approx(rest * uniform)
    c = 1.25 / 6 + rest * uniform
    assert math.exp(model.unigram("c")) == pytest.approx(c)
    # After "a" (only ever after BEGIN): b and c, each with one different word before it.
    c_after_a = 0.25 / 2 + 0.75 * c
    # After "BEGIN a": b twice, c once.
    assert math.exp(model.log_prob(BEGIN, "a", "c")) == pytest.approx(0.25 / 3 + 0.5 * c_after_a)
    # "b a" was never seen: only "a" counts.
    assert math.exp(model.log_prob("b", "a", "c")) == pytest.approx(c_after_a)
    # After "a", c's neighbour END is known from the unigrams alone.
    end = 1.25 / 6 + rest * uniform
    assert math.exp(model.log_prob("b", "a", END)) == pytest.approx(0.75 * end)


def test_an_unseen_history_is_no_history() -> None:
    model = train_language_model(LINES)
    assert model.log_prob("zebra", "zebra", "b") == model.unigram("b")
    assert model.unigram("zebra") == model.unigram(UNKNOWN)


def test_sentence_and_perplexity() -> None:
    model = train_language_model(LINES)
    expected = (
        model.log_prob(BEGIN, BEGIN, "a")
        + model.log_prob(BEGIN, "a", "b")
        + model.log_prob("a", "b", END)
    )
    assert model.sentence_log_prob(["a", "b"]) == pytest.approx(expected)
    assert model.perplexity(["a b"]) == pytest.approx(math.exp(-expected / 3))


def test_the_same_text_gives_the_same_model() -> None:
    assert train_language_model(LINES) == train_language_model(iter(LINES))
    assert train_language_model([]).unigram("a") == pytest.approx(math.log(1 / 2))


def test_a_text_may_have_the_words_that_stand_for_its_ends() -> None:
    model = train_language_model(["a <s> b", "</s> <unk> a"])
    words = model.unigrams
    assert {"<s>", "</s>", "<unk>"} <= words.keys()
    for history in ((BEGIN, BEGIN), ("a", "<s>"), ("</s>", "<unk>")):
        total = math.fsum(math.exp(model.log_prob(*history, word)) for word in words)
        assert total == pytest.approx(1)
    assert model.unigram("nowhere") == model.unigram(UNKNOWN) < model.unigram("<unk>")
