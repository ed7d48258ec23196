"""The four contrastive suites: their German, and what no one can know who sees only a part."""

import doctest
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest
from typer.testing import CliRunner

from bertfused.errors import UserError
from bertfused.text import SentencePair, read_pairs
from docnmt import grammar, lexicon, suites
from docnmt import suites_lexicon as tables
from docnmt.cli import app
from docnmt.contrastive import ContrastiveItem, read_contrastive
from docnmt.grammar import Document, GermanPerson, Link, Word, chance_level
from docnmt.suites import (
    SIZES,
    SUITES,
    EitherAddress,
    GermanMotion,
    suite_documents,
    suite_items,
    write_suites,
)

SEEDS = (1, 2, 7)
CATEGORIES = ("deixis", "lexical cohesion", "VP ellipsis", "inflection ellipsis")
TARGET_SIDE = {"deixis", "lexical cohesion"}
SENTENCES = {
    "deixis": tables.YOU_SENTENCES,
    "lexical cohesion": lexicon.HOMONYM_SENTENCES,
    "VP ellipsis": tables.AUXILIARY_SENTENCES,
    "inflection ellipsis": tables.ANSWERS,
}
EVIDENCE = {
    "deixis": tables.YOU_CUES,
    "lexical cohesion": lexicon.THING_MENTIONS,
    "VP ellipsis": tables.MODALS,
    "inflection ellipsis": tables.QUESTIONS,
}
# The verb of an English sentence, with its pair.
MOTION_OF = {
    english: (pair, german)
    for pair, (_, motions) in enumerate(tables.MOTIONS)
    for english, german in motions.items()
}
SYNONYMS = {word for pair in tables.SYNONYMS.values() for word, _ in pair}
INFORMAL = ["du", "dich", "dir", "dein", "deine", "deinen"]
FORMAL = ["Sie", "Ihnen", "Ihr", "Ihre", "Ihren"]


@cache
def documents(seed: int, split: grammar.Split) -> list[Document]:
    return suite_documents(seed, SIZES[split], split)


@cache
def items(seed: int, category: str) -> list[ContrastiveItem]:
    return suite_items(category, seed, SIZES["items"])


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


# ---------------------------------------------------------------------------- reading the text

# What a slot of an English template can hold; a bracketed part of a pattern is an answer's word.
SLOTS = {
    "who": [*lexicon.NAMES, *lexicon.KIN],
    "man": [*tables.MEN],
    "motion": [*MOTION_OF],
    "it:the": [f"the {noun}" for noun in tables.SYNONYMS],
    "thing:the": [f"the {noun}" for noun in tables.SYNONYMS],
    "thing:a": [f"{article} {noun}" for noun in tables.SYNONYMS for article in ("a", "an")],
    "item:the": [f"the {item}" for item in tables.POSSESSIONS],
    "item": [*tables.POSSESSIONS],
    "past": [past for past, _, _ in tables.DEEDS],
    "verb": [verb for _, verb, _ in tables.DEEDS],
}


@cache
def pattern(template: str) -> re.Pattern[str]:
    def alternatives(slot: re.Match[str]) -> str:
        return f"({'|'.join(SLOTS.get(slot[1], ['[^.,]+']))})"

    regex = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    return re.compile(re.sub(r"{([a-z:]+)}", alternatives, regex), re.IGNORECASE)


@cache
def numbers(sentence: str, templates: lexicon.Templates) -> list[int]:
    """Find the templates of a table to which an English sentence can belong."""
    return [n for n, (source, _) in enumerate(templates) if pattern(source).fullmatch(sentence)]


class Found(NamedTuple):
    """A sentence that depends on another one, as found in a text."""

    category: str
    number: int
    sentences: tuple[SentencePair, ...]  # from the evidence to the sentence itself

    @property
    def distance(self) -> int:
        return len(self.sentences) - 1

    @property
    def evidence(self) -> SentencePair:
        return self.sentences[0]


def find(texts: list[Document]) -> Iterator[Found]:
    for text in texts:
        for position, pair in enumerate(text.sentences):
            kinds = [(c, n) for c in CATEGORIES for n in numbers(pair.source, SENTENCES[c])]
            assert len(kinds) <= 1, (pair, kinds)
            for category, number in kinds:
                for distance in (1, 2, 3):
                    earlier = text.sentences[position - distance]
                    if numbers(earlier.source, EVIDENCE[category]):
                        span = text.sentences[position - distance : position + 1]
                        yield Found(category, number, span)
                        break
                else:
                    raise AssertionError(f"nothing in {text} says how to translate {pair}")


def as_document(item: ContrastiveItem) -> Document:
    context = zip(item.context, item.target_contexts[0], strict=True)
    current = SentencePair(item.source, item.candidates[item.correct])
    return Document((*(SentencePair(*pair) for pair in context), current))


def piece(category: str, evidence: SentencePair) -> str:
    """Name what of a piece of evidence may not meet a sentence in two splits."""
    if category == "deixis":
        return str(numbers(evidence.source, EVIDENCE[category]))
    table: Collection[str] = {
        "lexical cohesion": [*tables.SYNONYMS],
        "VP ellipsis": [*MOTION_OF],
        "inflection ellipsis": [form for deed in tables.DEEDS for form in deed[:2]],
    }[category]
    found = {word for word in table if re.search(rf"\b{word}\b", evidence.source)}
    assert len(found) == 1, (evidence, found)
    return found.pop()


def combinations(texts: list[Document]) -> set[tuple[str, int, str]]:
    return {
        (link.category, link.number, piece(link.category, link.evidence)) for link in find(texts)
    }


# ---------------------------------------------------------------------------- German


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(suites)
    assert result.attempted > 0
    assert result.failed == 0


FIXED = {
    "who": Word("my brother", GermanPerson("Bruder", "m")),
    "item": grammar.thing("key", "Schlüssel", "m"),
    "day": Word("Monday", "Montag"),
    "city": Word("Rome", "Rom"),
    "place": Word("in the garden", "im Garten"),
    "there": Word("to Rome", "nach Rom"),
    "motion": Word("fly", GermanMotion("fliegen", "geflogen")),
    "aside": grammar.thing("yard", "Hof", "m"),
    "quality": Word("cold", "kalt"),
}


def sides(templates: lexicon.Templates, **slots: Word) -> list[str]:
    filled = [grammar.fill(template, {**FIXED, **slots}) for template in templates]
    return [f"{pair.source} = {pair.target}" for pair in filled]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def addressed(templates: lexicon.Templates) -> list[str]:
    informal, formal = (
        [grammar.fill(t, {**FIXED, "you": Word("you", EitherAddress(n))}) for t in templates]
        for n in (0, 1)
    )
    assert [pair.source for pair in informal] == [pair.source for pair in formal]
    return [f"{a.target} | {b.target}" for a, b in zip(informal, formal, strict=True)]


def test_every_sentence_with_you_by_hand() -> None:
    assert addressed(tables.YOU_SENTENCES) == lines("""
        Wo wohnst du? | Wo wohnen Sie?
        Hast du am Montag Zeit? | Haben Sie am Montag Zeit?
        Kannst du meinem Bruder helfen? | Können Sie meinem Bruder helfen?
        Du musst im Garten bleiben. | Sie müssen im Garten bleiben.
        Wann kommst du nach Rom? | Wann kommen Sie nach Rom?
        Ich glaube, dass du meinen Bruder kennst. | Ich glaube, dass Sie meinen Bruder kennen.
        Ich rufe dich am Montag an. | Ich rufe Sie am Montag an.
        Mein Bruder möchte dir danken. | Mein Bruder möchte Ihnen danken.
        Mein Bruder erwartet dich im Garten. | Mein Bruder erwartet Sie im Garten.
        Ist das dein Schlüssel? | Ist das Ihr Schlüssel?
        Zeig mir bitte deinen Schlüssel. | Zeigen Sie mir bitte Ihren Schlüssel.
        Gib meinem Bruder bitte den Schlüssel. | Geben Sie meinem Bruder bitte den Schlüssel.
        Setz dich bitte neben meinen Bruder. | Setzen Sie sich bitte neben meinen Bruder.
        Was suchst du im Garten? | Was suchen Sie im Garten?
        Mein Bruder hat das für dich gekauft. | Mein Bruder hat das für Sie gekauft.
        Was brauchst du am Montag? | Was brauchen Sie am Montag?
    """)


def test_every_cue_of_address_by_hand() -> None:
    assert addressed(tables.YOU_CUES) == lines("""
        Du hast deinen Schlüssel vergessen. | Sie haben Ihren Schlüssel vergessen.
        Du bist sehr geduldig. | Sie sind sehr geduldig.
        Öffne bitte die Tür. | Öffnen Sie bitte die Tür.
        Wo hast du das gelernt? | Wo haben Sie das gelernt?
        Dein Schlüssel ist im Garten. | Ihr Schlüssel ist im Garten.
        Mein Bruder hat dir am Montag geschrieben. | Mein Bruder hat Ihnen am Montag geschrieben.
        Ich habe dich im Garten gesehen. | Ich habe Sie im Garten gesehen.
        Was möchtest du trinken? | Was möchten Sie trinken?
        Wie alt bist du? | Wie alt sind Sie?
        Sprichst du Englisch? | Sprechen Sie Englisch?
        Du siehst müde aus. | Sie sehen müde aus.
        Warte bitte im Garten. | Warten Sie bitte im Garten.
        Was liest du? | Was lesen Sie?
        Ich glaube dir. | Ich glaube Ihnen.
        Wie heißt du? | Wie heißen Sie?
        Mein Bruder hat dich am Montag gehört. | Mein Bruder hat Sie am Montag gehört.
    """)


def test_every_ellipsis_of_a_verb_by_hand() -> None:
    assert sides(tables.MODALS) == lines("""
        My brother must fly to Rome. = Mein Bruder muss nach Rom.
        My brother may fly to Rome. = Mein Bruder darf nach Rom.
        My brother wants to fly to Rome. = Mein Bruder will nach Rom.
        My brother would like to fly to Rome. = Mein Bruder möchte nach Rom.
        My brother is supposed to fly to Rome. = Mein Bruder soll nach Rom.
        My brother cannot fly to Rome. = Mein Bruder kann nicht nach Rom.
        On Monday, my brother must fly to Rome. = Am Montag muss mein Bruder nach Rom.
        Today, my brother must fly to Rome. = Heute muss mein Bruder nach Rom.
    """)
    assert sides(tables.AUXILIARY_SENTENCES) == lines("""
        My brother did, on Monday. = Mein Bruder ist am Montag hingeflogen.
        My brother already has. = Mein Bruder ist schon hingeflogen.
        My brother never has. = Mein Bruder ist noch nie hingeflogen.
        My brother will, on Monday. = Mein Bruder wird am Montag hinfliegen.
        My brother did last year. = Mein Bruder ist letztes Jahr hingeflogen.
        My brother has twice. = Mein Bruder ist zweimal hingeflogen.
        Perhaps my brother will. = Vielleicht wird mein Bruder hinfliegen.
        On Monday, my brother did. = Am Montag ist mein Bruder hingeflogen.
        I think that my brother did. = Ich glaube, dass mein Bruder hingeflogen ist.
        I think that my brother will. = Ich glaube, dass mein Bruder hinfliegen wird.
        We did, on Monday. = Wir sind am Montag hingeflogen.
        Did my brother last year? = Ist mein Bruder letztes Jahr hingeflogen?
        I will tomorrow. = Ich werde morgen hinfliegen.
        Only my brother has so far. = Bisher ist nur mein Bruder hingeflogen.
        Will my brother on Monday? = Wird mein Bruder am Montag hinfliegen?
        Nobody ever has. = Niemand ist je hingeflogen.
    """)


def test_every_ellipsis_of_inflection_by_hand() -> None:
    asked = {
        "some": Word("guests", "Gäste"),
        "others": Word("neighbours", "Nachbarn"),
        "past": Word("invited", "eingeladen"),
        "verb": Word("invite", "eingeladen"),
    }
    assert sides(tables.QUESTIONS, **asked) == lines("""
        Which guests invited the neighbours? = Welche Gäste haben die Nachbarn eingeladen?
        Which guests did the neighbours invite? = Welche Gäste haben die Nachbarn eingeladen?
    """)
    assert sides(tables.ANSWERS, man=Word("my son", "meinen Sohn")) == lines("""
        Only my son. = Nur meinen Sohn.
        Perhaps my son. = Vielleicht meinen Sohn.
        Certainly my son. = Bestimmt meinen Sohn.
        Probably my son. = Wahrscheinlich meinen Sohn.
        Even my son. = Sogar meinen Sohn.
        Not my son. = Nicht meinen Sohn.
        Not only my son. = Nicht nur meinen Sohn.
        At least my son. = Zumindest meinen Sohn.
        Above all, my son. = Vor allem meinen Sohn.
        Unfortunately, only my son. = Leider nur meinen Sohn.
        My son, of course. = Natürlich meinen Sohn.
        My son, I think. = Meinen Sohn, glaube ich.
        My son, for example. = Zum Beispiel meinen Sohn.
        As always, my son. = Wie immer meinen Sohn.
        On Monday, only my son. = Am Montag nur meinen Sohn.
        First of all, my son. = Zuerst meinen Sohn.
    """)


def test_every_aside_by_hand() -> None:
    assert sides(tables.ASIDES) == lines("""
        The yard was cold. = Der Hof war kalt.
        The yard was cold again. = Der Hof war wieder kalt.
        The yard is still cold. = Der Hof ist noch kalt.
        On Monday, the yard was cold. = Am Montag war der Hof kalt.
        In the evening, the yard was cold. = Am Abend war der Hof kalt.
        The yard is always so cold. = Der Hof ist immer so kalt.
    """)


def test_men_differ_in_the_accusative() -> None:
    articles = {"mein": "meinen", "der": "den", "ein": "einen", "Herr": "Herrn"}
    weak = {"Student": "Studenten", "Junge": "Jungen", "Kollege": "Kollegen"}
    for nominative, accusative in tables.MEN.values():
        first, *middle, noun = nominative.split()
        if first == "Herr":
            assert accusative == f"{articles[first]} {noun}"
        else:
            declined = [articles[first], *(f"{adjective}n" for adjective in middle)]
            assert accusative == " ".join([*declined, weak.get(noun, noun)])


@pytest.mark.parametrize("split", grammar.SPLITS)
def test_sentences_are_clean(split: grammar.Split) -> None:
    for text in documents(1, split):
        for sentence in (side for pair in text.sentences for side in pair):
            assert re.fullmatch(r"[A-ZÄÖÜ][\w ,]*[.?]", sentence), sentence
            assert "  " not in sentence
            assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", sentence.replace(" an ", " "))
        for pair in text.sentences:
            assert pair.source[-1] == pair.target[-1]


# ---------------------------------------------------------------------------- translations


def formal_words(target: str) -> set[str]:
    return set(words(target)) & set(FORMAL)


def informal_words(target: str) -> set[str]:
    return set(words(target.lower())) & set(INFORMAL)


# Imperatives show their address without a word for "you".
COMMANDS = {"Öffne", "Warte", "Zeig", "Gib", "Setz"}


def is_formal(target: str) -> bool:
    formal = bool(formal_words(target))
    assert formal != bool(informal_words(target) or COMMANDS & set(words(target))), target
    return formal


def noun_of(target: str) -> str:
    found = SYNONYMS & set(words(target))
    assert len(found) == 1, target
    return found.pop()


def form_of_motion(target: str) -> str:
    found = [word for word in words(target) if word.startswith("hin")]
    assert len(found) == 1, target
    return found[0].removeprefix("hin")


def is_right(link: Found) -> bool:
    """Judge a translation by its evidence: by German for deixis and cohesion, else by English."""
    evidence, current = link.evidence, link.sentences[-1]
    if link.category == "deixis":
        return is_formal(evidence.target) == is_formal(current.target)
    if link.category == "lexical cohesion":
        return noun_of(evidence.target) == noun_of(current.target)
    if link.category == "VP ellipsis":
        _, forms = MOTION_OF[piece(link.category, evidence)]
        return form_of_motion(current.target) in forms
    (man,) = (man for man in tables.MEN if re.search(man, current.source, re.IGNORECASE))
    cases = tables.MEN[man]
    right = cases[" did " in evidence.source]
    return right.lower() in current.target.lower()


@pytest.mark.parametrize("split", grammar.SPLITS)
def test_documents_are_translated_as_their_evidence_asks(split: grammar.Split) -> None:
    links = list(find(documents(1, split)))
    assert Counter(link.category for link in links) == dict.fromkeys(CATEGORIES, SIZES[split])
    assert all(is_right(link) for link in links)


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_right_candidate_and_no_other_fits_the_evidence(category: str) -> None:
    for item in items(1, category):
        for number, candidate in enumerate(item.candidates):
            before = as_document(item).sentences[:-1]
            text = Document((*before, SentencePair(item.source, candidate)))
            (link,) = find([text])
            assert link.category == item.category == category
            assert link.distance == item.distance
            assert is_right(link) == (number == item.correct), item


def test_between_evidence_and_sentence_nothing_matters() -> None:
    for link in find(documents(1, "train")):
        for pair in link.sentences[1:-1]:
            assert numbers(pair.source, tables.ASIDES), pair
    for category in CATEGORIES:
        for item in items(1, category):
            assert item.distance is not None
            evidence = item.context[-item.distance]
            assert numbers(evidence, EVIDENCE[category])
            assert all(numbers(s, tables.ASIDES) for s in item.context if s != evidence)


def test_asides_speak_of_nothing_that_a_suite_asks_for() -> None:
    for category in CATEGORIES:
        for item in items(1, category):
            assert item.distance is not None
            pairs = as_document(item).sentences[:-1]
            for pair in (*pairs[: -item.distance], *pairs[len(pairs) - item.distance + 1 :]):
                assert not formal_words(pair.target) | informal_words(pair.target)
                assert SYNONYMS.isdisjoint(words(pair.target))
                assert {"you", "your", "did", "has", "will"}.isdisjoint(words(pair.source.lower()))


def test_a_document_addresses_one_person_in_one_way() -> None:
    for text in documents(1, "train"):
        targets = [
            pair.target
            for pair in text.sentences
            if numbers(pair.source, (*tables.YOU_CUES, *tables.YOU_SENTENCES))
        ]
        assert len(targets) == 2
        assert len({is_formal(target) for target in targets}) == 1


# ---------------------------------------------------------------------------- what one may see

Views = Callable[[ContrastiveItem], tuple[object, ...]]


def sentence_alone(item: ContrastiveItem) -> tuple[object, ...]:
    return (item.source,)


def source_side(item: ContrastiveItem) -> tuple[object, ...]:
    return (item.source, item.context)


def target_side(item: ContrastiveItem) -> tuple[object, ...]:
    return (item.source, item.target_contexts)


def everything(item: ContrastiveItem) -> tuple[object, ...]:
    return (item.source, item.context, item.target_contexts)


BLIND = [(category, sentence_alone) for category in CATEGORIES] + [
    (category, source_side if category in TARGET_SIDE else target_side) for category in CATEGORIES
]
SEEING = [
    (category, view)
    for category in CATEGORIES
    for view in (target_side if category in TARGET_SIDE else source_side, everything)
]


def correct_by_view(own: list[ContrastiveItem], view: Views) -> dict[object, Counter[str]]:
    groups: dict[object, Counter[str]] = defaultdict(Counter)
    for item in own:
        groups[view(item), item.candidates][item.candidates[item.correct]] += 1
    return groups


def accuracy(own: list[ContrastiveItem], score: Callable[[ContrastiveItem, str], float]) -> float:
    """Measure as contrastive evaluation does: a tie is wrong."""
    right = 0
    for item in own:
        scores = [score(item, candidate) for candidate in item.candidates]
        best = max(scores)
        right += scores.count(best) == 1 and scores[item.correct] == best
    return right / len(own)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("category", "view"), BLIND)
def test_without_its_kind_of_context_both_answers_are_alike(
    category: str, view: Views, seed: int
) -> None:
    for counts in correct_by_view(items(seed, category), view).values():
        assert len(counts) == 2
        assert len(set(counts.values())) == 1, counts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("category", "view"), BLIND)
@pytest.mark.parametrize("salt", range(3))
def test_a_scorer_without_its_kind_of_context_is_exactly_at_chance(
    category: str, view: Views, seed: int, salt: int
) -> None:
    own = items(seed, category)

    def score(item: ContrastiveItem, candidate: str) -> float:
        return crc32(repr((salt, view(item), candidate)).encode())

    assert chance_level(own) == 0.5
    assert accuracy(own, score) == 0.5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("category", "view"), SEEING)
def test_with_its_kind_of_context_there_is_one_answer(
    category: str, view: Views, seed: int
) -> None:
    for counts in correct_by_view(items(seed, category), view).values():
        assert len(counts) == 1, counts


@pytest.mark.parametrize("category", CATEGORIES)
def test_what_every_scorer_must_get(category: str) -> None:
    own = items(1, category)
    assert accuracy(own, lambda item, candidate: 0.0) == 0.0
    assert accuracy(own, lambda item, candidate: candidate == item.candidates[0]) == 0.5


@pytest.mark.parametrize("reach", [0, 1, 2, 3])
@pytest.mark.parametrize("category", CATEGORIES)
def test_an_oracle_that_reads_so_far_back_guesses_beyond(category: str, reach: int) -> None:
    def score(item: ContrastiveItem, candidate: str) -> float:
        before = as_document(item).sentences[3 - reach : 3]
        if not any(numbers(pair.source, EVIDENCE[category]) for pair in before):
            return crc32(candidate.encode())
        (link,) = find([Document((*before, SentencePair(item.source, candidate)))])
        return float(is_right(link))

    assert accuracy(items(1, category), score) == pytest.approx(reach / 3 + (3 - reach) / 6)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_its_kind_of_context_training_says_nothing_about_the_answer(seed: int) -> None:
    answers: dict[object, Counter[str]] = defaultdict(Counter)
    for link in find(documents(seed, "train")):
        current = link.sentences[-1]
        seen = 0 if link.category in TARGET_SIDE else 1
        # Of all sentences with "did", those that can have one of the same two answers.
        key: tuple[object, ...] = (link.category, current.source)
        if link.category == "VP ellipsis":
            key += (MOTION_OF[piece(link.category, link.evidence)][0],)
        answers[key][current.target] += 1
        context = tuple(pair[seen] for pair in link.sentences[:-1])
        answers[(*key, context)][current.target] += 1
    assert len(answers) > 1000
    for counts in answers.values():
        assert len(counts) == 2, counts
        assert len(set(counts.values())) == 1, counts


# ---------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("seed", SEEDS)
def test_documents_and_items_have_the_promised_size(seed: int) -> None:
    train = documents(seed, "train")
    assert len(train) == 700
    assert sum(len(text.sentences) for text in train) == 9792
    assert {len(text.sentences) for text in train} <= set(range(10, 19))
    for side, expected in enumerate((307, 389)):
        types = {word for text in train for pair in text.sentences for word in words(pair[side])}
        assert len(types) == expected
    assert [len(documents(seed, split)) for split in ("dev", "test")] == [40, 60]
    for category in CATEGORIES:
        own = items(seed, category)
        assert len(own) == len(set(own)) == 240
        assert Counter(item.distance for item in own) == {1: 80, 2: 80, 3: 80}
        assert Counter(item.correct for item in own) == {0: 120, 1: 120}
        assert {len(item.context) for item in own} == {3}
        assert {item.category for item in own} == {category}


@pytest.mark.parametrize("seed", SEEDS)
def test_evidence_stands_at_all_distances_alike(seed: int) -> None:
    counts = Counter((link.category, link.distance) for link in find(documents(seed, "train")))
    assert len(counts) == 12
    assert max(counts.values()) <= min(counts.values()) + 2


@pytest.mark.parametrize("seed", SEEDS)
def test_each_sentence_follows_all_evidence_of_training_alike(seed: int) -> None:
    counts: dict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    for link in find(documents(seed, "train")):
        counts[link.category][link.number, piece(link.category, link.evidence)] += 1
    # 16 sentences follow 6 of 8 pieces; a question has two forms, each counted for itself.
    assert {category: len(own) for category, own in counts.items()} == {
        "deixis": 16 * 12,
        "lexical cohesion": 16 * 12,
        "VP ellipsis": 16 * 12,
        "inflection ellipsis": 2 * 16 * 12,
    }
    for own in counts.values():
        assert max(own.values()) <= 2 * min(own.values())


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_any_number_of_documents(number: int) -> None:
    texts = suite_documents(1, number, "train")
    assert len(texts) == number
    assert len(list(find(texts))) == 4 * (number // 2 * 2)


def test_only_whole_groups_of_items() -> None:
    assert [len(suite_items("deixis", 1, number)) for number in (0, 1, 2, 7)] == [0, 0, 2, 6]


def test_too_few_distinct_items_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tuple(SentencePair(text, text.upper()) for text in "abc")
    group = [Link("deixis", before, "you", ("du", "Sie"), correct) for correct in (0, 1)]
    monkeypatch.setitem(SUITES, "deixis", lambda rng, split: repeat(group))
    assert [item.correct for item in suite_items("deixis", 1, 3)] == [0, 1]
    with pytest.raises(UserError) as error:
        suite_items("deixis", 1, 4)
    assert str(error.value) == "deixis: 13 tries gave 2 distinct items, but 4 are wanted"


# ---------------------------------------------------------------------------- held out


@pytest.mark.parametrize(("train_seed", "seed"), [(1, 1), (1, 2), (7, 1)])
def test_held_out_combinations_are_not_in_training(train_seed: int, seed: int) -> None:
    train = combinations(documents(train_seed, "train"))
    dev, test = (combinations(documents(seed, split)) for split in ("dev", "test"))
    own = combinations([as_document(item) for c in CATEGORIES for item in items(seed, c)])
    assert train.isdisjoint(dev | test | own)
    assert dev.isdisjoint(test | own)
    assert min(map(len, (train, dev, test, own))) > 80


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_words_are_all_in_training(seed: int) -> None:
    held_out = [
        pair
        for split in ("dev", "test")
        for text in documents(seed, split)
        for pair in text.sentences
    ]
    for item in (item for category in CATEGORIES for item in items(seed, category)):
        held_out += as_document(item).sentences
        held_out += [SentencePair(item.source, candidate) for candidate in item.candidates]
    train = [pair for text in documents(seed, "train") for pair in text.sentences]
    for side in (0, 1):
        known = Counter(word for pair in train for word in words(pair[side]))
        anywhere = Counter(word for pair in train for word in words(pair[side].lower()))
        asked = {word for pair in held_out for word in words(pair[side])}
        assert asked <= known.keys()
        assert {word for word in asked if anywhere[word.lower()] < 5} == set()


# ---------------------------------------------------------------------------- files


def test_files_hold_what_was_generated(tmp_path: Path) -> None:
    sizes = {"train": 20, "dev": 4, "test": 6, "items": 12}
    write_suites(tmp_path / "a", seed=5, sizes=sizes)
    write_suites(tmp_path / "b", seed=5, sizes=sizes)
    write_suites(tmp_path / "c", seed=6, sizes=sizes)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(
        [
            *(f"{split}.{side}" for split in grammar.SPLITS for side in ("en", "de")),
            "deixis.jsonl",
            "lexical_cohesion.jsonl",
            "vp_ellipsis.jsonl",
            "inflection_ellipsis.jsonl",
        ]
    )
    for name in names:
        written = [(tmp_path / folder / name).read_bytes() for folder in "abc"]
        assert written[0] == written[1] != written[2]
    pairs = list(read_pairs(tmp_path / "a" / "dev.en", tmp_path / "a" / "dev.de"))
    expected: list[SentencePair] = []
    for text in suite_documents(5, 4, "dev"):
        expected += [*text.sentences, SentencePair("", "")]
    assert pairs == expected[:-1]
    for category in SUITES:
        path = tmp_path / "a" / suites.suite_file(category)
        assert read_contrastive(path) == suite_items(category, 5, 12)


def test_the_command_writes_the_default_sizes(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["suites", "--out", str(tmp_path), "--seed", "2"])
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert len(read_contrastive(tmp_path / "deixis.jsonl")) == 240
    texts = (tmp_path / "train.en").read_text(encoding="utf-8").split("\n\n")
    assert len(texts) == SIZES["train"]
    assert tuple(texts[0].split("\n")) == tuple(
        pair.source for pair in documents(2, "train")[0].sentences
    )


def test_the_command_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    for out, message in (
        (tmp_path, f"{tmp_path} is not empty; name another folder with --out"),
        (tmp_path / "mine", f"cannot make the folder {tmp_path / 'mine'}: File exists"),
    ):
        result = CliRunner().invoke(app, ["suites", "--out", str(out)])
        assert isinstance(result.exception, UserError)
        assert str(result.exception) == message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_command_writes_as_many_documents_as_asked(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["suites", "--out", str(tmp_path), "--documents", "6"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "train.de").read_text(encoding="utf-8").count("\n\n") == 5


def test_the_page_shows_what_is_generated(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "suites.md").read_text(encoding="utf-8")
    lines = re.sub(r"^[* ] ", "", page, flags=re.MULTILINE).splitlines()
    rows = {tuple(re.split(r" {2,}", line.strip())) for line in lines}
    assert rows >= {tuple(pair) for pair in documents(1, "train")[0].sentences}
    for category in CATEGORIES:
        for item in items(1, category)[2:6]:
            assert item.distance is not None
            evidence = as_document(item).sentences[-1 - item.distance]
            assert (*evidence, item.source, item.candidates[item.correct]) in rows
    record = tmp_path / "item.jsonl"
    record.write_text(page.partition("```json\n")[2].partition("```")[0], encoding="utf-8")
    assert read_contrastive(record) == [items(1, "deixis")[2]]
