"""Generate English-German documents in which the translation depends on the previous sentence.

One path from the tables of `lexicon.py` to a document::

    template + slots --fill-->   SentencePair
    PHENOMENA[name](rng, split)  Iterator[list[Link]]   one sentence in all its translations,
                                                        each after a sentence that asks for it
    generate(seed, ...)          list[Document]         links and asides in a scene
    contrastive_items(seed, ...) list[ContrastiveItem]

Links are made in such groups only, so that in any split a sentence without its context stands
equally often with each of its translations. `split_of` keeps the combinations of evidence and
sentence apart. docs/demo_corpus.md shows examples of all this.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import fmean
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from bertfused.text import SentencePair, open_output
from docnmt import lexicon
from docnmt.contrastive import ContrastiveItem, write_contrastive

Split = Literal["train", "dev", "test"]
Evidence = TypeVar("Evidence", bound=Hashable)

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
# Documents of each split, and contrastive items of each phenomenon.
SIZES = MappingProxyType({"train": 500, "dev": 40, "test": 60, "contrastive": 180})
LINKS_PER_DOCUMENT = 4


# ---------------------------------------------------------------------------- what is generated


@dataclass(frozen=True)
class Document:
    """A short text, sentence by sentence."""

    sentences: tuple[SentencePair, ...]


@dataclass(frozen=True)
class Link:
    """A sentence that can be translated only after the sentences before it."""

    phenomenon: str
    context: tuple[SentencePair, ...]
    source: str
    candidates: tuple[str, ...]
    correct: int

    @property
    def sentences(self) -> tuple[SentencePair, ...]:
        """The context and the sentence with its right translation."""
        return (*self.context, SentencePair(self.source, self.candidates[self.correct]))


# ---------------------------------------------------------------------------- agreement


class Determiner(NamedTuple):
    """A determiner in one case: its forms for m, f, n and the endings of an adjective after it."""

    forms: tuple[str, str, str]
    endings: tuple[str, str, str]


def _ein_words(ein: str, stem: str) -> dict[str, Determiner]:
    """Decline ein, mein, dein, euer (stem eur-) or Ihr: nominative, accusative, dative."""
    e, en, em, er = (stem + ending for ending in ("e", "en", "em", "er"))
    return {
        ein: Determiner((ein, e, ein), ("er", "e", "es")),
        en: Determiner((en, e, ein), ("en", "e", "es")),
        em: Determiner((em, er, em), ("en", "en", "en")),
    }


# Both tables are read by the masculine form: its column is 0, feminine 1, neuter 2.
GENDERS = "mfn"
PRONOUNS = {"er": ("er", "sie", "es"), "ihn": ("ihn", "sie", "es")}
DETERMINERS = {
    "der": Determiner(("der", "die", "das"), ("e", "e", "e")),
    "den": Determiner(("den", "die", "das"), ("en", "e", "e")),
    "dem": Determiner(("dem", "der", "dem"), ("en", "en", "en")),
    **_ein_words("ein", "ein"),
    **_ein_words("mein", "mein"),
    **_ein_words("dein", "dein"),
    **_ein_words("euer", "eur"),
    **_ein_words("Ihr", "Ihr"),
}


@dataclass(frozen=True)
class EnglishNoun:
    """A noun that a template writes bare or with an article: ``{thing}, {thing:the}``.

    >>> f"{EnglishNoun('lamp', 'old'):a}"
    'an old lamp'
    """

    word: str
    attribute: str = ""

    def __format__(self, article: str) -> str:
        phrase = f"{self.attribute} {self.word}".strip()
        if article == "a" and phrase[0] in "aeiou":
            article = "an"
        return f"{article} {phrase}".strip()


@dataclass(frozen=True)
class GermanNoun:
    """A noun that a template writes with the determiner, or as the pronoun, of a masculine one.

    >>> f"{GermanNoun('Lampe', 'f', 'alt'):einem}, {GermanNoun('Lampe', 'f'):ihn}"
    'einer alten Lampe, sie'
    """

    word: str
    gender: str
    attribute: str = ""

    def __format__(self, masculine: str) -> str:
        column = GENDERS.index(self.gender)
        if masculine in PRONOUNS:
            return PRONOUNS[masculine][column]
        determiner = DETERMINERS[masculine]
        attribute = f"{self.attribute}{determiner.endings[column]} " if self.attribute else ""
        return f"{determiner.forms[column]} {attribute}{self.word}"


@dataclass(frozen=True)
class GermanPerson:
    """A name, or a relative of the speaker's with a gender; a template asks wer, wen or wem.

    >>> f"{GermanPerson('Anna'):wem}, {GermanPerson('Bruder', 'm'):wem}"
    'Anna, meinem Bruder'
    """

    name: str
    gender: str = ""

    def __format__(self, case: str) -> str:
        if not self.gender:
            return self.name
        mein = {"wer": "mein", "wen": "meinen", "wem": "meinem"}[case]
        return format(GermanNoun(self.name, self.gender), mein)


@dataclass(frozen=True)
class GermanAddress:
    """A form of address: a template writes the word for du, ``{you:hast}``.

    >>> f"{GermanAddress('ihr'):hast} {GermanAddress('ihr'):du}"
    'habt ihr'
    """

    form: str

    def __format__(self, informal: str) -> str:
        return lexicon.ADDRESS_FORMS[informal][lexicon.ADDRESS_FORMS["du"].index(self.form)]


# ---------------------------------------------------------------------------- templates


class Word(NamedTuple):
    """What a slot holds in each language: text, or a word that agrees as its template asks."""

    english: object
    german: object


NO_ATTRIBUTE = ("", "")


def thing(
    english: str, german: str, gender: str, attribute: tuple[str, str] = NO_ATTRIBUTE
) -> Word:
    """Make the slot of a noun, with an adjective in front of it or without."""
    return Word(EnglishNoun(english, attribute[0]), GermanNoun(german, gender, attribute[1]))


THINGS = {
    gender: [(english, german, gender) for english, german in nouns.items()]
    for gender, nouns in lexicon.THINGS.items()
}
PEOPLE = [Word(name, GermanPerson(name)) for name in lexicon.NAMES] + [
    Word(english, GermanPerson(*german)) for english, german in lexicon.KIN.items()
]
ADDRESSEES = {
    form: [Word(*names) for names in addressees.items()]
    for form, addressees in lexicon.ADDRESSEES.items()
}
# Each ambiguous noun as many times as it has pairs of sentences that tell its meanings apart.
Homonym = tuple[tuple[Word, tuple[str, str]], ...]  # for each meaning, the noun and a sentence
HOMONYMS: list[Homonym] = [
    tuple((thing(english, *german), cues[number]) for german, cues in meanings.items())
    for english, meanings in lexicon.HOMONYMS.items()
    for number in range(len(next(iter(meanings.values()))))
]


def fill(template: tuple[str, str], slots: Mapping[str, Word]) -> SentencePair:
    """Put words into a template and make both sentences begin with a capital."""
    english, german = template
    source = english.format(**{name: word.english for name, word in slots.items()})
    target = german.format(**{name: word.german for name, word in slots.items()})
    return SentencePair(source[0].upper() + source[1:], target[0].upper() + target[1:])


def draw_slots(rng: Random, not_who: Word | None = None) -> dict[str, Word]:
    """Draw a word for each slot that does not depend on another sentence."""
    tables = {
        "city": lexicon.CITIES,
        "day": lexicon.DAYS,
        "drink": lexicon.DRINKS,
        "look": lexicon.LOOKS,
        "number": lexicon.NUMBERS,
        "place": lexicon.PLACES,
    }
    slots = {name: Word(*rng.choice(list(table.items()))) for name, table in tables.items()}
    slots["who"] = rng.choice([person for person in PEOPLE if person != not_who])
    things = rng.sample([noun for nouns in THINGS.values() for noun in nouns], 2)
    slots["thing"], slots["item"] = (thing(*noun) for noun in things)
    return slots


# ---------------------------------------------------------------------------- phenomena


def split_of(evidence: int, sentence: int) -> Split:
    """Say in which split a sentence may follow a piece of evidence: 6 of 8 times in train.

    Args:
        evidence: Its number among the pieces of evidence for the same answer.
        sentence: Its number among the sentences of the phenomenon.
    """
    held_out: dict[int, Split] = {0: "dev", 4: "test"}
    return held_out.get((evidence + sentence) % 8, "train")


def usable(evidence: Sequence[Evidence], sentence: int, split: Split) -> list[Evidence]:
    """Keep the pieces of evidence that a sentence may follow in this split."""
    return [piece for number, piece in enumerate(evidence) if split_of(number, sentence) == split]


def least_used(rng: Random, uses: Counter[Evidence], pieces: Sequence[Evidence]) -> Evidence:
    """Draw one of the pieces drawn least often so far, so that all are trained on alike."""
    drawn = min(pieces, key=lambda piece: (uses[piece], rng.random()))
    uses[drawn] += 1
    return drawn


def pronoun(rng: Random, split: Split) -> Iterator[list[Link]]:
    """Make "it" er, sie or es by the gender of the thing named before."""
    uses: Counter[tuple[str, str, str]] = Counter()
    for number, template in cycle(enumerate(lexicon.IT_SENTENCES)):
        slots = draw_slots(rng)
        answers, contexts = [], []
        for nouns in THINGS.values():
            noun = least_used(rng, uses, usable(nouns, number, split))
            answers.append({"it": thing(*noun)})
            attribute = rng.choice([NO_ATTRIBUTE, rng.choice(list(lexicon.ATTRIBUTES.items()))])
            mention = rng.choice(lexicon.THING_MENTIONS)
            others = draw_slots(rng, not_who=slots["who"])
            contexts.append(fill(mention, {**others, "thing": thing(*noun, attribute)}))
        yield _links("pronoun", template, slots, answers, contexts)


def address(rng: Random, split: Split) -> Iterator[list[Link]]:
    """Make "you" du, ihr or Sie by whom the sentence before speaks to."""
    uses: Counter[Word] = Counter()
    for number, template in cycle(enumerate(lexicon.YOU_SENTENCES)):
        answers, contexts = [], []
        for form, addressees in ADDRESSEES.items():
            answers.append({"you": Word("you", GermanAddress(form))})
            addressee = least_used(rng, uses, usable(addressees, number, split))
            contexts.append(fill(rng.choice(lexicon.GREETINGS), {"addressee": addressee}))
        yield _links("address", template, draw_slots(rng), answers, contexts)


def repetition(rng: Random, split: Split) -> Iterator[list[Link]]:
    """Translate an ambiguous noun as it was meant in the sentence before."""
    uses: Counter[Homonym] = Counter()
    for number, template in cycle(enumerate(lexicon.HOMONYM_SENTENCES)):
        slots = draw_slots(rng)
        answers, contexts = [], []
        for noun, cue in least_used(rng, uses, usable(HOMONYMS, number, split)):
            answers.append({"it": noun})
            contexts.append(fill(cue, draw_slots(rng, not_who=slots["who"])))
        yield _links("repetition", template, slots, answers, contexts)


def _links(
    phenomenon: str,
    template: tuple[str, str],
    slots: Mapping[str, Word],
    answers: Sequence[Mapping[str, Word]],
    contexts: Sequence[SentencePair],
) -> list[Link]:
    """Put the same sentence after each of its contexts."""
    filled = [fill(template, {**slots, **answer}) for answer in answers]
    candidates = tuple(pair.target for pair in filled)
    return [
        Link(phenomenon, (context,), filled[0].source, candidates, correct)
        for correct, context in enumerate(contexts)
    ]


PHENOMENA: dict[str, Callable[[Random, Split], Iterator[list[Link]]]] = {
    "pronoun": pronoun,
    "address": address,
    "repetition": repetition,
}


# ---------------------------------------------------------------------------- documents


def generate(seed: int, documents: int, split: Split) -> list[Document]:
    """Generate the documents of a split: three or four links each, 8 to 12 sentences.

    In all of them together a linked sentence has each of its translations equally often.
    """
    rng = Random(f"{split} {seed}")
    links: list[Link] = []
    for groups in cycle([links_of(rng, split) for links_of in PHENOMENA.values()]):
        if len(links) + 3 > LINKS_PER_DOCUMENT * documents:
            break
        links += next(groups)
    rng.shuffle(links)
    return [_document(rng, links[number::documents]) for number in range(documents)]


def _document(rng: Random, links: Sequence[Link]) -> Document:
    """Set links and up to two asides between the opening and the closing of a scene."""
    openings, closings = rng.choice(lexicon.SCENES)

    def sentence(templates: lexicon.Templates) -> SentencePair:
        return fill(rng.choice(templates), draw_slots(rng))

    parts = [link.sentences for link in links]
    parts += [(sentence(lexicon.ASIDES),) for _ in range(rng.randint(0, 2))]
    rng.shuffle(parts)
    middle = [pair for part in parts for pair in part]
    return Document((sentence(openings), *middle, sentence(closings)))


def contrastive_items(seed: int, per_phenomenon: int) -> list[ContrastiveItem]:
    """Generate distinct contrastive items from the combinations held out for the test split.

    Args:
        seed: Seed of the random choices.
        per_phenomenon: Items of each phenomenon, at most; only whole groups are made.
    """
    rng = Random(f"contrastive {seed}")
    items: dict[ContrastiveItem, None] = {}  # a set that keeps the order
    for links_of in PHENOMENA.values():
        full = len(items) + per_phenomenon
        tries = islice(links_of(rng, "test"), 3 * per_phenomenon)
        for group in map(_items, tries):
            if len(items) + len(group) > full:
                break
            if items.keys().isdisjoint(group):
                items |= dict.fromkeys(group)
    return list(items)


def _items(links: Sequence[Link]) -> list[ContrastiveItem]:
    return [
        ContrastiveItem(
            source=link.source,
            candidates=link.candidates,
            correct=link.correct,
            context=tuple(pair.source for pair in link.context),
            category=link.phenomenon,
        )
        for link in links
    ]


def chance_level(items: Sequence[ContrastiveItem]) -> float:
    """Compute the expected accuracy of guessing, which is what a model without context has."""
    return fmean(1 / len(item.candidates) for item in items)


# ---------------------------------------------------------------------------- files


def write_corpus(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write train, dev, test (.en, .de; a blank line between documents) and contrastive.jsonl.

    Args:
        folder: Folder to write to; made if it is not there.
        seed: Seed of the random choices; the same seed writes the same bytes.
        sizes: Documents of each split, and contrastive items of each phenomenon.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        write_documents(folder, split, generate(seed, sizes[split], split))
    write_contrastive(folder / "contrastive.jsonl", contrastive_items(seed, sizes["contrastive"]))


def write_documents(folder: Path, split: Split, documents: Sequence[Document]) -> None:
    """Write a split's .en and .de, with a blank line between documents."""
    for side, language in enumerate(("en", "de")):
        with open_output(folder / f"{split}.{language}") as output:
            for number, document in enumerate(documents):
                if number:
                    output.write_line("")
                for pair in document.sentences:
                    output.write_line(pair[side])
