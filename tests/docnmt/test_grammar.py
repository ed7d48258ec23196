"""The bundled grammar: its German, and what it promises about held-out and contrastive items."""

import doctest
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from random import Random

import pytest

from bertfused.text import SentencePair, read_pairs
from docnmt import grammar, lexicon
from docnmt.contrastive import ContrastiveItem, read_contrastive
from docnmt.grammar import (
    Document,
    EnglishNoun,
    GermanAddress,
    GermanNoun,
    GermanPerson,
    chance_level,
    contrastive_items,
    generate,
    write_corpus,
)

SEEDS = (1, 2, 7)
GENDER_OF = {noun: gender for gender, nouns in lexicon.THINGS.items() for noun in nouns}
FORM_OF = {name: form for form, names in lexicon.ADDRESSEES.items() for name in names}
CUES = {
    cue: (english, german[0])
    for english, meanings in lexicon.HOMONYMS.items()
    for german, cues in meanings.items()
    for cue, _ in cues
}
SENTENCES = {
    "pronoun": lexicon.IT_SENTENCES,
    "address": lexicon.YOU_SENTENCES,
    "repetition": lexicon.HOMONYM_SENTENCES,
}


@cache
def documents(seed: int, split: grammar.Split) -> list[Document]:
    return generate(seed, grammar.SIZES[split], split)


@cache
def items(seed: int) -> list[ContrastiveItem]:
    return contrastive_items(seed, grammar.SIZES["contrastive"])


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@cache
def pattern(template: str) -> re.Pattern[str]:
    regex = re.escape(template)
    regex = regex.replace(re.escape("{it:the}"), f"the (?:{'|'.join(lexicon.HOMONYMS)})")
    return re.compile(re.sub(r"\\{[a-z:]+\\}", "(.+)", regex), re.IGNORECASE)


def match(template: str, sentence: str) -> re.Match[str] | None:
    """Read a sentence by the English side of a template, knowing nothing of how it was made."""
    return pattern(template).fullmatch(sentence)


@cache
def read_sentence(sentence: str) -> tuple[str, int] | None:
    """Find the phenomenon and the template of a sentence that depends on another one."""
    found = [
        (phenomenon, number)
        for phenomenon, templates in SENTENCES.items()
        for number, (template, _) in enumerate(templates)
        if match(template, sentence)
    ]
    assert len(found) <= 1, (sentence, found)
    return found[0] if found else None


@cache
def read_evidence(phenomenon: str, sentence: str) -> str:
    """Find what a sentence says that fixes the answer: a noun, an addressee or a cue."""
    if phenomenon == "pronoun":
        found = [word for word in words(sentence) if word in GENDER_OF]
    elif phenomenon == "address":
        greetings = [match(template, sentence) for template, _ in lexicon.GREETINGS]
        found = [greeting[1] for greeting in greetings if greeting]
    else:
        found = [cue for cue in CUES if match(cue, sentence)]
    assert len(found) == 1, (phenomenon, sentence, found)
    return found[0]


def linked_pairs(texts: list[Document]) -> Iterator[tuple[str, int, SentencePair, SentencePair]]:
    for text in texts:
        for number, pair in enumerate(text.sentences):
            if kind := read_sentence(pair.source):
                assert number > 0
                yield (*kind, text.sentences[number - 1], pair)


def combinations(texts: list[Document]) -> set[tuple[str, int, str]]:
    return {
        (phenomenon, number, read_evidence(phenomenon, context.source))
        for phenomenon, number, context, _ in linked_pairs(texts)
    }


# ---------------------------------------------------------------------------- German and English


@pytest.mark.parametrize(
    ("masculine", "expected"),
    [
        ("der", "der alte Hut, die alte Uhr, das alte Bild"),
        ("den", "den alten Hut, die alte Uhr, das alte Bild"),
        ("dem", "dem alten Hut, der alten Uhr, dem alten Bild"),
        ("ein", "ein alter Hut, eine alte Uhr, ein altes Bild"),
        ("einen", "einen alten Hut, eine alte Uhr, ein altes Bild"),
        ("einem", "einem alten Hut, einer alten Uhr, einem alten Bild"),
        ("euer", "euer alter Hut, eure alte Uhr, euer altes Bild"),
        ("euren", "euren alten Hut, eure alte Uhr, euer altes Bild"),
        ("Ihren", "Ihren alten Hut, Ihre alte Uhr, Ihr altes Bild"),
        ("er", "er, sie, es"),
        ("ihn", "ihn, sie, es"),
    ],
)
def test_a_german_noun_agrees_with_its_determiner(masculine: str, expected: str) -> None:
    nouns = [GermanNoun(*noun, "alt") for noun in (("Hut", "m"), ("Uhr", "f"), ("Bild", "n"))]
    assert ", ".join(format(noun, masculine) for noun in nouns) == expected


def test_people_are_declined() -> None:
    asked = ("wer", "wen", "wem")
    father, mother, anna = (
        GermanPerson("Vater", "m"),
        GermanPerson("Mutter", "f"),
        GermanPerson("Anna"),
    )
    assert [format(father, case) for case in asked] == [
        "mein Vater",
        "meinen Vater",
        "meinem Vater",
    ]
    assert [format(mother, case) for case in asked] == [
        "meine Mutter",
        "meine Mutter",
        "meiner Mutter",
    ]
    assert [format(anna, case) for case in asked] == ["Anna", "Anna", "Anna"]


def test_english_articles() -> None:
    umbrella = EnglishNoun("umbrella")
    assert f"{umbrella}, {umbrella:the}, {umbrella:a}" == "umbrella, the umbrella, an umbrella"
    assert f"{EnglishNoun('umbrella', 'small'):a}" == "a small umbrella"


def test_a_possessive_agrees_with_owner_and_noun() -> None:
    template = ("Please show me your {item}.", "{you:zeig} mir bitte {item:{you:deinen}}.")
    key, cup = grammar.thing("key", "Schlüssel", "m"), grammar.thing("cup", "Tasse", "f")
    filled = [
        grammar.fill(template, {"item": item, "you": grammar.Word("you", GermanAddress(form))})
        for form in ("du", "ihr", "Sie")
        for item in (key, cup)
    ]
    assert [pair.target for pair in filled] == [
        "Zeig mir bitte deinen Schlüssel.",
        "Zeig mir bitte deine Tasse.",
        "Zeigt mir bitte euren Schlüssel.",
        "Zeigt mir bitte eure Tasse.",
        "Zeigen Sie mir bitte Ihren Schlüssel.",
        "Zeigen Sie mir bitte Ihre Tasse.",
    ]
    assert filled[0].source == "Please show me your key."


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(grammar)
    assert result.attempted > 0
    assert result.failed == 0


def test_sentences_are_clean() -> None:
    for split in grammar.SPLITS:
        for text in documents(1, split):
            for sentence in (side for pair in text.sentences for side in pair):
                assert re.fullmatch(r"[A-ZÄÖÜ][\w ,]*[.?]", sentence), sentence
                assert "  " not in sentence
                assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", sentence.replace(" an ", " "))


def test_the_tables_are_balanced_and_unambiguous() -> None:
    for table in (lexicon.THINGS, lexicon.ADDRESSEES):
        assert len({len(column) for column in table.values()}) == 1
    for meanings in lexicon.HOMONYMS.values():
        assert len(meanings) == 2
        assert len({len(cues) for cues in meanings.values()}) == 1
    assert len(GENDER_OF) == sum(map(len, lexicon.THINGS.values())) == 72
    assert len(FORM_OF) == sum(map(len, lexicon.ADDRESSEES.values())) == 48
    assert len(CUES) == 64
    talked_about = {word for name in (*lexicon.NAMES, *lexicon.KIN) for word in words(name)}
    assert talked_about.isdisjoint(word for name in FORM_OF for word in words(name))


# ---------------------------------------------------------------------------- translations


def test_pronouns_have_the_gender_of_the_noun_before() -> None:
    pronouns = {"m": {"er", "ihn"}, "f": {"sie"}, "n": {"es"}}
    for split in grammar.SPLITS:
        for phenomenon, _, context, pair in linked_pairs(documents(1, split)):
            if phenomenon == "pronoun":
                gender = GENDER_OF[read_evidence(phenomenon, context.source)]
                used = set(words(pair.target.lower())) & {"er", "ihn", "sie", "es"}
                assert len(used) == 1
                assert used <= pronouns[gender], (context, pair)


def test_address_is_chosen_by_the_addressee() -> None:
    du, ihr, sie = (
        {word for form in column for word in words(form)}
        for column in zip(*lexicon.ADDRESS_FORMS.values(), strict=True)
    )
    columns = {"du": du | {"deine"}, "ihr": ihr | {"eure"}, "Sie": sie | {"Ihre"}}
    for split in grammar.SPLITS:
        for phenomenon, _, context, pair in linked_pairs(documents(1, split)):
            if phenomenon == "address":
                form = FORM_OF[read_evidence(phenomenon, context.source)]
                others = set().union(*(columns[other] for other in columns.keys() - {form}))
                # "Ihr" may be a capital "ihr" only at the beginning of a sentence.
                target = pair.target[0].lower() + pair.target[1:]
                used = set(words(target)) & (columns[form] | others)
                assert used <= columns[form], (context, pair)
                assert used - others, (context, pair)


# One word for each slot, so that a whole table of sentences can be written out.
FIXED = {
    "who": grammar.Word("my brother", GermanPerson("Bruder", "m")),
    "item": grammar.thing("cup", "Tasse", "f"),
    "day": grammar.Word("Monday", "Montag"),
    "city": grammar.Word("Rome", "Rom"),
    "drink": grammar.Word("tea", "Tee"),
    "place": grammar.Word("in the garden", "im Garten"),
    "number": grammar.Word("ten", "zehn"),
    "look": grammar.Word("old", "alt"),
}


def targets(templates: lexicon.Templates, **slots: grammar.Word) -> list[str]:
    return [grammar.fill(template, {**FIXED, **slots}).target for template in templates]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def test_every_sentence_with_it_by_hand() -> None:
    expected = """
        Er sieht sehr alt aus.
        Er gehört meinem Bruder.
        Er hat zehn Euro gekostet.
        Er ist am Montag verschwunden.
        Er kommt aus Rom.
        Er erinnert meinen Bruder an Rom.
        Am Montag war er im Garten.
        Ich glaube, dass er meinem Bruder gefallen wird.
        Mein Bruder mag ihn sehr.
        Wir brauchen ihn am Montag.
        Morgen gebe ich ihn meinem Bruder.
        Mein Bruder hat ihn im Garten gefunden.
        Mein Bruder will ihn in Rom verkaufen.
        Wir haben ihn seit zehn Jahren.
        Hat mein Bruder ihn aus Rom mitgebracht?
        Mein Bruder hat ihn im Garten versteckt.
    """
    for gender, pronoun in (("m", None), ("f", "sie"), ("n", "es")):
        agreeing = expected
        if pronoun:
            agreeing = re.sub(r"\b(er|ihn)\b", pronoun, agreeing)
            agreeing = re.sub(r"\bEr\b", pronoun.capitalize(), agreeing)
        thing = grammar.thing("thing", "Ding", gender)
        assert targets(lexicon.IT_SENTENCES, it=thing) == lines(agreeing)


def test_every_mention_of_a_thing_by_hand() -> None:
    expected = """
        Hier ist der rote Hut.
        Wo ist der rote Hut?
        Das ist ein roter Hut.
        Nur ein roter Hut fehlt.
        Mein Bruder sucht den roten Hut.
        Mein Bruder hat mir einen roten Hut gezeigt.
        Wir haben wieder über den roten Hut gesprochen.
        Was ist mit dem roten Hut passiert?
        Mein Bruder hat nach dem roten Hut gefragt.
    """
    hat = grammar.thing("hat", "Hut", "m", ("red", "rot"))
    assert targets(lexicon.THING_MENTIONS, thing=hat) == lines(expected)


def test_every_sentence_with_a_repeated_noun_by_hand() -> None:
    expected = """
        Mein Bruder spricht oft über den Kran.
        Mein Bruder erinnert sich sehr gut an den Kran.
        Hier ist ein Foto von dem Kran.
        Mein Bruder möchte den Kran auch sehen.
        Wir werden den Kran nie vergessen.
        Mein Bruder hat mir den Kran beschrieben.
        Mein Bruder hat von dem Kran geträumt.
        Was wissen wir über den Kran?
        Mein Bruder hat den Kran fotografiert.
        Der Kran hat uns alle überrascht.
        Der Kran ist in Rom berühmt.
        Hat mein Bruder den Kran bemerkt?
        Mein Bruder hat den Kran am Montag gezeichnet.
        Mein Bruder hat eine Geschichte über den Kran geschrieben.
        Hat der Kran allen gefallen?
        Am Montag habe ich an den Kran gedacht.
    """
    crane = grammar.thing("crane", "Kran", "m")
    assert targets(lexicon.HOMONYM_SENTENCES, it=crane) == lines(expected)


def test_every_cue_holds_its_noun_in_both_languages() -> None:
    for english, meanings in lexicon.HOMONYMS.items():
        for (german, _), cues in meanings.items():
            for source, target in cues:
                assert english in words(source)
                assert {german, f"{german}ses"} & set(words(target)), target


def test_every_form_of_address_by_hand() -> None:
    expected = """
        Wo wohnst du? | Wo wohnt ihr? | Wo wohnen Sie?
        Hast du am Montag Zeit? | Habt ihr am Montag Zeit? | Haben Sie am Montag Zeit?
        Kannst du Anna helfen? | Könnt ihr Anna helfen? | Können Sie Anna helfen?
        Möchtest du etwas Tee? | Möchtet ihr etwas Tee? | Möchten Sie etwas Tee?
        Du musst im Garten warten. | Ihr müsst im Garten warten. | Sie müssen im Garten warten.
        Wann kommst du nach Rom? | Wann kommt ihr nach Rom? | Wann kommen Sie nach Rom?
        Ich glaube, dass du Anna kennst. | Ich glaube, dass ihr Anna kennt. | Ich glaube, dass Sie Anna kennen.
        Wie lange bleibst du in Rom? | Wie lange bleibt ihr in Rom? | Wie lange bleiben Sie in Rom?
        Anna hat dich in Rom gesehen. | Anna hat euch in Rom gesehen. | Anna hat Sie in Rom gesehen.
        Ich rufe dich am Montag an. | Ich rufe euch am Montag an. | Ich rufe Sie am Montag an.
        Anna möchte dir danken. | Anna möchte euch danken. | Anna möchte Ihnen danken.
        Anna erwartet dich im Garten. | Anna erwartet euch im Garten. | Anna erwartet Sie im Garten.
        Ist das deine Tasse? | Ist das eure Tasse? | Ist das Ihre Tasse?
        Zeig mir bitte deine Tasse. | Zeigt mir bitte eure Tasse. | Zeigen Sie mir bitte Ihre Tasse.
        Gib Anna bitte deine Tasse. | Gebt Anna bitte eure Tasse. | Geben Sie Anna bitte Ihre Tasse.
        Setz dich bitte neben Anna. | Setzt euch bitte neben Anna. | Setzen Sie sich bitte neben Anna.
    """  # noqa: E501
    anna = grammar.Word("Anna", GermanPerson("Anna"))
    columns = [
        targets(lexicon.YOU_SENTENCES, who=anna, you=grammar.Word("you", GermanAddress(form)))
        for form in ("du", "ihr", "Sie")
    ]
    assert [" | ".join(row) for row in zip(*columns, strict=True)] == lines(expected)


def test_a_repeated_noun_keeps_its_meaning() -> None:
    for split in grammar.SPLITS:
        for phenomenon, _, context, pair in linked_pairs(documents(1, split)):
            if phenomenon == "repetition":
                english, german = CUES[read_evidence(phenomenon, context.source)]
                assert english in words(pair.source.lower())
                assert german in words(pair.target), (context, pair)


# ---------------------------------------------------------------------------- documents


@pytest.mark.parametrize("seed", SEEDS)
def test_documents_have_the_promised_size(seed: int) -> None:
    train = documents(seed, "train")
    assert len(train) == 500
    for split in grammar.SPLITS:
        assert {len(text.sentences) for text in documents(seed, split)} <= set(range(8, 13))
    assert 4000 <= sum(len(text.sentences) for text in train) <= 6000
    for side in (0, 1):
        types = {word for text in train for pair in text.sentences for word in words(pair[side])}
        assert 300 <= len(types) <= 500


def test_generation_depends_on_the_seed_alone() -> None:
    assert generate(3, 20, "dev") == generate(3, 20, "dev")
    assert generate(3, 20, "dev") != generate(4, 20, "dev")
    assert generate(3, 20, "dev") != generate(3, 20, "test")
    assert contrastive_items(3, 12) == contrastive_items(3, 12) != contrastive_items(4, 12)


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_any_number_of_documents(number: int) -> None:
    assert len(generate(1, number, "train")) == number


def test_every_document_is_different() -> None:
    texts = [text for split in grammar.SPLITS for text in documents(1, split)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_context_training_says_nothing_about_the_answer(seed: int) -> None:
    targets: dict[str, Counter[str]] = defaultdict(Counter)
    for _, _, _, pair in linked_pairs(documents(seed, "train")):
        targets[pair.source][pair.target] += 1
    assert len(targets) > 400
    for source, counts in targets.items():
        assert len(counts) in (2, 3), source
        assert len(set(counts.values())) == 1, source


@pytest.mark.parametrize("seed", SEEDS)
def test_evidence_occurs_about_equally_often(seed: int) -> None:
    links: dict[str, Counter[str]] = defaultdict(Counter)
    for phenomenon, _, context, _ in linked_pairs(documents(seed, "train")):
        links[phenomenon][read_evidence(phenomenon, context.source)] += 1
    assert {phenomenon: len(counts) for phenomenon, counts in links.items()} == {
        "pronoun": 72,
        "address": 48,
        "repetition": 64,
    }
    for counts in links.values():
        assert min(counts.values()) >= 5
        assert max(counts.values()) <= min(counts.values()) + 2


@pytest.mark.parametrize("seed", SEEDS)
def test_each_thing_stands_elsewhere_with_its_article(seed: int) -> None:
    counts: Counter[str] = Counter()
    for text in documents(seed, "train"):
        for pair in text.sentences:
            if " and " in pair.source or " your " in pair.source:
                counts.update(word for word in words(pair.source) if word in GENDER_OF)
    assert min(counts[noun] for noun in GENDER_OF) >= 5


# ---------------------------------------------------------------------------- held out


@pytest.mark.parametrize(("train_seed", "seed"), [(1, 1), (1, 2), (7, 1)])
def test_held_out_combinations_are_not_in_training(train_seed: int, seed: int) -> None:
    train = combinations(documents(train_seed, "train"))
    dev, test = (combinations(documents(seed, split)) for split in ("dev", "test"))
    contrastive = {
        (
            item.category,
            read_sentence(item.source)[1],  # type: ignore[index]
            read_evidence(item.category, item.context[-1]),
        )
        for item in items(seed)
    }
    assert train.isdisjoint(dev | test | contrastive)
    assert dev.isdisjoint(test | contrastive)
    assert min(map(len, (train, dev, test, contrastive))) > 100


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_words_are_all_in_training(seed: int) -> None:
    held_out = [
        pair
        for split in ("dev", "test")
        for text in documents(seed, split)
        for pair in text.sentences
    ]
    for side in (0, 1):
        known = {
            word
            for text in documents(seed, "train")
            for pair in text.sentences
            for word in words(pair[side])
        }
        asked = {word for pair in held_out for word in words(pair[side])}
        for item in items(seed):
            for text in item.candidates if side else (*item.context, item.source):
                asked |= set(words(text))
        assert asked <= known


def test_splits_share_no_linked_pair() -> None:
    train, dev, test = (
        {(context, pair) for _, _, context, pair in linked_pairs(documents(1, split))}
        for split in grammar.SPLITS
    )
    assert train.isdisjoint(dev)
    assert train.isdisjoint(test)
    assert dev.isdisjoint(test)


# ---------------------------------------------------------------------------- contrastive items


@pytest.mark.parametrize("seed", SEEDS)
def test_contrastive_answers_are_balanced_for_each_source(seed: int) -> None:
    answers: dict[tuple[str, tuple[str, ...]], Counter[int]] = defaultdict(Counter)
    for item in items(seed):
        answers[item.source, item.candidates][item.correct] += 1
    assert len({source for source, _ in answers}) == len(answers)
    for (_, candidates), counts in answers.items():
        assert set(counts) == set(range(len(candidates)))
        assert len(set(counts.values())) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scorer_without_context_is_at_chance_exactly(seed: int) -> None:
    def score(source: str, candidate: str) -> float:
        return Random(f"{seed} {source} {candidate}").random()

    expected = {"pronoun": 1 / 3, "address": 1 / 3, "repetition": 1 / 2}
    for phenomenon, chance in expected.items():
        chosen = [item for item in items(seed) if item.category == phenomenon]
        right = 0
        for item in chosen:
            scores = [score(item.source, candidate) for candidate in item.candidates]
            right += scores.index(max(scores)) == item.correct
        assert len(chosen) == 180
        assert right / len(chosen) == pytest.approx(chance, abs=1e-12)
        assert chance_level(chosen) == pytest.approx(chance, abs=1e-12)


def test_contrastive_items_are_distinct_and_never_more_than_asked_for() -> None:
    assert len(set(items(1))) == len(items(1)) == 540
    counts = Counter(item.category for item in contrastive_items(1, 10))
    assert counts == {"pronoun": 9, "address": 9, "repetition": 10}
    assert contrastive_items(1, 0) == []
    many = contrastive_items(1, 600)
    assert len(set(many)) == len(many) <= 1800


def test_candidates_differ_in_the_dependent_words_only() -> None:
    dependent = {
        "pronoun": {"Er", "Sie", "Es", "er", "sie", "es", "ihn"},
        "address": {
            word
            for forms in lexicon.ADDRESS_FORMS.values()
            for form in forms
            for word in words(form) + words(form.capitalize())
        }
        | {"deine", "eure", "Ihre"},
        "repetition": {"der", "die", "das", "den", "dem", "Der", "Die", "Das"}
        | {noun for meanings in lexicon.HOMONYMS.values() for noun, _ in meanings},
    }
    for item in items(1):
        assert len(set(item.candidates)) == len(item.candidates)
        first, *others = (words(candidate) for candidate in item.candidates)
        for other in others:
            for change, a, b, c, d in SequenceMatcher(None, first, other).get_opcodes():
                if change != "equal":
                    assert set(first[a:b] + other[c:d]) <= dependent[item.category], item


def test_a_contrastive_item_by_hand() -> None:
    found = [item for item in items(1) if match("It cost {number} euros.", item.source)]
    for item in found:
        number = {"ten": "zehn", "twelve": "zwölf", "fifteen": "fünfzehn", "twenty": "zwanzig"}[
            words(item.source)[2]
        ]
        assert item.candidates == tuple(
            f"{pronoun} hat {number} Euro gekostet." for pronoun in ("Er", "Sie", "Es")
        )
        noun = next(word for word in words(item.context[0]) if word in GENDER_OF)
        assert "mfn"[item.correct] == GENDER_OF[noun]
    assert len(found) >= 9


# ---------------------------------------------------------------------------- files


def test_files(tmp_path: Path) -> None:
    sizes = {"train": 12, "dev": 3, "test": 4, "contrastive": 12}
    write_corpus(tmp_path / "new" / "corpus", 5, sizes)
    folder = tmp_path / "new" / "corpus"
    names = {f"{split}.{language}" for split in grammar.SPLITS for language in ("en", "de")}
    assert {path.name for path in folder.iterdir()} == names | {"contrastive.jsonl"}
    for split in grammar.SPLITS:
        expected: list[SentencePair] = []
        for text in generate(5, sizes[split], split):
            expected += [*([SentencePair("", "")] if expected else []), *text.sentences]
        assert list(read_pairs(folder / f"{split}.en", folder / f"{split}.de")) == expected
    assert read_contrastive(folder / "contrastive.jsonl") == contrastive_items(5, 12)
    first = (folder / "contrastive.jsonl").read_text("utf-8").split("\n")[0]
    item = contrastive_items(5, 12)[0]
    assert json.loads(first) == {
        "context": list(item.context),
        "source": item.source,
        "candidates": list(item.candidates),
        "correct": item.correct,
        "category": "pronoun",
    }


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    sizes = {"train": 4, "dev": 2, "test": 2, "contrastive": 6}
    for name in ("a", "b"):
        write_corpus(tmp_path / name, 1, sizes)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
