from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bertfused.config import SearchConfig
from bertfused.translate import Translator
from tests.tiny_texts import Texts
from unsup.config import ValidationConfig
from unsup.validation import LanguageIdentity, RoundTrip, copy_rate, same_rate, words_of


def test_words_are_lower_cased_and_punctuation_is_none() -> None:
    assert words_of("A Man , in l' air - 5 . «") == ["a", "man", "in", "l'", "air", "5"]


def test_a_copied_word_counts_as_often_as_it_stands_in_both() -> None:
    assert copy_rate(["a b b c ."], ["b x . B b"]) == 2 / 4
    assert copy_rate(["a b", "."], ["a b", "."]) == 1.0
    assert copy_rate(["."], ["."]) == 0.0


def test_a_line_is_the_same_if_its_words_are() -> None:
    assert same_rate(["A b .", "c d", "..."], ["a b", "d c", "..."]) == 1 / 2


def identity_of(texts: Texts) -> LanguageIdentity:
    stores = texts.data.mono("ab"), texts.data.mono("xy")
    return LanguageIdentity(stores, texts.data.tokenizers()[0])


def test_a_language_is_known_by_its_words(texts: Texts) -> None:
    identity = identity_of(texts)
    first, second = texts.data.split("dev").source_text, texts.data.split("dev").target_text
    for language, path in enumerate((first, second)):
        for line in path.read_text().splitlines():
            assert not identity.is_wrong(line, language)
            assert identity.is_wrong(line, 1 - language)


class Fake(Translator):
    """Translates by a function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def translate(self, lines: Any, *args: Any, **options: Any) -> Iterator[Any]:
        return (SimpleNamespace(text=self._function(line)) for line in lines)


def swap(line: str) -> str:
    return " ".join(
        w if w == "." else w[:0:-1] if w[0] == "q" else f"q{w[::-1]}" for w in line.split()
    )


def copy(line: str) -> str:
    return line


def round_trip(texts: Texts, function: Any, **config: Any) -> RoundTrip:
    split = texts.data.split("dev")
    dev = tuple(path.read_text().splitlines() for path in (split.source_text, split.target_text))
    return RoundTrip(
        ValidationConfig.model_validate(config),
        ("ab", "xy"),
        (Fake(function), Fake(function)),
        identity_of(texts),
        cast(Any, dev),
        cast(Any, dev),
        SearchConfig(),
    )


@pytest.mark.parametrize("select", ["round-trip", "bleu"])
def test_the_right_translation_has_the_best_value(texts: Texts, select: str) -> None:
    right = round_trip(texts, swap, select=select).validate(10_000, [])
    assert right.value == pytest.approx(100)
    assert right.problem is None
    assert (
        right.values["valid_bleu_ab-xy"] == right.values["valid_bleu_xy-ab"] == pytest.approx(100)
    )
    assert right.values["valid_copied_xy-ab"] == 0.0


def test_a_copy_comes_back_as_nothing_and_stops_training(texts: Texts) -> None:
    copied = round_trip(texts, copy)
    found = copied.validate(5000, [])
    assert found.value == 0.0
    assert found.values["valid_copied_ab-xy"] == found.values["valid_same_xy-ab"] == 1.0
    assert found.problem is not None
    assert found.problem.startswith("the model copies: 100% of the source's words stand in its")
    assert copied.validate(10, []).problem is None
    assert round_trip(texts, copy, max_copied=1, max_wrong=1).validate(5000, []).problem is None


def test_translations_into_the_wrong_language_stop_training(texts: Texts) -> None:
    def wrong(line: str) -> str:
        return " ".join(line.split()[::-1]).replace("ba", "du").replace("ab", "ud")

    found = round_trip(texts, wrong, max_copied=1).validate(5000, [])
    assert found.problem is not None
    assert "100% of the translations ab-xy look like the language of the source" in found.problem
