"""Generate documents and four contrastive suites, each solvable with one kind of context only.

Built as the document grammar is (`grammar.py`), on the tables of `suites_lexicon.py`::

    SUITES[category](rng, split)       Iterator[list[Link]]   one sentence with both translations,
                                                              each after what asks for it, one to
                                                              three sentences away
    suite_documents(seed, ...)         list[Document]         one link of each suite in a scene
    suite_items(category, seed, ...)   list[ContrastiveItem]  after three previous sentences

The two links of a group differ, besides the right answer, on one side of their evidence alone: in
German for deixis and lexical cohesion, in English for both kinds of ellipsis. So whoever does not
see the text of that side, nor states made from it, guesses, and is right in exactly half of the
items. docs/suites.md shows examples.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from types import MappingProxyType

from bertfused.errors import UserError
from bertfused.text import SentencePair, make_folder
from docnmt import lexicon, suites_lexicon
from docnmt.contrastive import ContrastiveItem, write_contrastive
from docnmt.grammar import (
    SPLITS,
    Document,
    Evidence,
    Link,
    Split,
    Word,
    draw_slots,
    fill,
    least_used,
    thing,
    usable,
    write_documents,
)

# Documents of each split, and items of each suite.
SIZES = MappingProxyType({"train": 700, "dev": 40, "test": 60, "items": 240})
CONTEXT = 3  # previous sentences of an item, and the largest distance of its evidence


# ---------------------------------------------------------------------------- agreement


@dataclass(frozen=True)
class EitherAddress:
    """The informal (0) or formal (1) address; a template writes both renderings.

    >>> f"{EitherAddress(0):du hast/Sie haben}, {EitherAddress(1):du hast/Sie haben}"
    'du hast, Sie haben'
    """

    number: int

    def __format__(self, renderings: str) -> str:
        return renderings.split("/")[self.number]


@dataclass(frozen=True)
class GermanMotion:
    """A way to get somewhere: a template writes the form of "hinfahren" for it.

    >>> fly = GermanMotion("fliegen", "geflogen")
    >>> f"{fly:hinfahren}, {fly:hingefahren}"
    'hinfliegen, hingeflogen'
    """

    infinitive: str
    participle: str

    def __format__(self, driving: str) -> str:
        forms = {"hinfahren": self.infinitive, "hingefahren": self.participle}
        return f"hin{forms[driving]}"


# ---------------------------------------------------------------------------- suites


def deixis(rng: Random, split: Split) -> Iterator[list[Link]]:
    """Translate "you" by du or Sie, as German, and only German, did before."""
    answers = [{"you": Word("you", EitherAddress(number))} for number in (0, 1)]
    cues = suites_lexicon.YOU_CUES
    for template, cue, asides in _occasions(rng, split, suites_lexicon.YOU_SENTENCES, cues):
        slots = _slots(rng)
        others = _slots(rng, not_who=slots["who"])
        evidence = [fill(cue, {**others, **answer}) for answer in answers]
        yield _links("deixis", template, slots, answers, evidence, asides)


def lexical_cohesion(rng: Random, split: Split) -> Iterator[list[Link]]:
    """Translate a noun by the one of two synonyms by which it was translated before."""
    nouns = list(suites_lexicon.SYNONYMS)
    for template, noun, asides in _occasions(rng, split, lexicon.HOMONYM_SENTENCES, nouns):
        slots = _slots(rng)
        others = _slots(rng, not_who=slots["who"])
        mention = rng.choice(lexicon.THING_MENTIONS)
        synonyms = [thing(noun, *german) for german in suites_lexicon.SYNONYMS[noun]]
        evidence = [fill(mention, {**others, "thing": synonym}) for synonym in synonyms]
        answers = [{"it": synonym} for synonym in synonyms]
        yield _links("lexical cohesion", template, slots, answers, evidence, asides)


def verb_phrase_ellipsis(rng: Random, split: Split) -> Iterator[list[Link]]:
    """Repeat in German the verb to which an auxiliary refers, which was said in English only."""
    pairs = range(len(suites_lexicon.MOTIONS))
    for template, pair, asides in _occasions(rng, split, suites_lexicon.AUXILIARY_SENTENCES, pairs):
        kind, motions = suites_lexicon.MOTIONS[pair]
        slots = _slots(rng)
        others = _slots(rng, not_who=slots["who"])
        others["there"] = _word(rng, suites_lexicon.DESTINATIONS[kind])
        modal = rng.choice(suites_lexicon.MODALS)
        answers = [
            {"motion": Word(english, GermanMotion(*german))} for english, german in motions.items()
        ]
        evidence = [fill(modal, {**others, **answer}) for answer in answers]
        yield _links("VP ellipsis", template, slots, answers, evidence, asides)


def inflection_ellipsis(rng: Random, split: Split) -> Iterator[list[Link]]:
    """Give an answer the case of what was asked for, which only English says."""
    deeds = suites_lexicon.DEEDS
    for template, (past, verb, german), asides in _occasions(
        rng, split, suites_lexicon.ANSWERS, deeds
    ):
        asked = {
            "some": _word(rng, suites_lexicon.ASKED_FOR),
            "others": _word(rng, suites_lexicon.OTHERS),
            "past": Word(past, german),
            "verb": Word(verb, german),
        }
        evidence = [fill(question, asked) for question in suites_lexicon.QUESTIONS]
        man, cases = rng.choice(list(suites_lexicon.MEN.items()))
        answers = [{"man": Word(man, case)} for case in cases]
        yield _links("inflection ellipsis", template, _slots(rng), answers, evidence, asides)


SUITES: dict[str, Callable[[Random, Split], Iterator[list[Link]]]] = {
    "deixis": deixis,
    "lexical cohesion": lexical_cohesion,
    "VP ellipsis": verb_phrase_ellipsis,
    "inflection ellipsis": inflection_ellipsis,
}


def _occasions(
    rng: Random, split: Split, sentences: lexicon.Templates, evidence: Sequence[Evidence]
) -> Iterator[tuple[tuple[str, str], Evidence, list[SentencePair]]]:
    """Go through the sentences, each with a piece of evidence and the asides in between.

    Distances take turns, and so do the pieces of evidence of one sentence.
    """
    uses: dict[int, Counter[Evidence]] = defaultdict(Counter)
    # 16 sentences and 3 distances have no common divisor, so that all of them meet.
    distances = cycle(range(1, CONTEXT + 1))
    for (number, template), distance in zip(cycle(enumerate(sentences)), distances, strict=True):
        piece = least_used(rng, uses[number], usable(evidence, number, split))
        yield template, piece, _asides(rng, distance - 1)


def _links(
    category: str,
    template: tuple[str, str],
    slots: Mapping[str, Word],
    answers: Sequence[Mapping[str, Word]],
    evidence: Sequence[SentencePair],
    asides: Sequence[SentencePair],
) -> list[Link]:
    """Put the same sentence after each piece of evidence, with the same asides in between."""
    filled = [fill(template, {**slots, **answer}) for answer in answers]
    candidates = tuple(pair.target for pair in filled)
    return [
        Link(category, (piece, *asides), filled[0].source, candidates, correct)
        for correct, piece in enumerate(evidence)
    ]


def _slots(rng: Random, not_who: Word | None = None) -> dict[str, Word]:
    slots = draw_slots(rng, not_who)
    item, german = rng.choice(list(suites_lexicon.POSSESSIONS.items()))
    return {**slots, "item": thing(item, *german)}


def _word(rng: Random, table: Mapping[str, str]) -> Word:
    return Word(*rng.choice(list(table.items())))


def _asides(rng: Random, number: int) -> list[SentencePair]:
    """Draw sentences about different things."""
    return [
        fill(
            rng.choice(suites_lexicon.ASIDES),
            {
                "aside": thing(english, *german),
                "quality": _word(rng, suites_lexicon.QUALITIES),
                "day": _word(rng, lexicon.DAYS),
            },
        )
        for english, german in rng.sample(list(suites_lexicon.ASIDE_THINGS.items()), number)
    ]


# ---------------------------------------------------------------------------- documents


def suite_documents(seed: int, documents: int, split: Split) -> list[Document]:
    """Generate the documents of a split: one link of each suite each, 10 to 18 sentences.

    In all of them together a linked sentence has both of its translations equally often, and so
    has it after its English context (deixis, lexical cohesion) or its German one (ellipsis). An
    odd number of documents leaves one of them with an opening and a closing only.
    """
    rng = Random(f"suites {split} {seed}")
    columns = [_whole_groups(rng, suite(rng, split), documents) for suite in SUITES.values()]
    return [
        _document(rng, [link for links in columns for link in links[number : number + 1]])
        for number in range(documents)
    ]


def _whole_groups(rng: Random, groups: Iterator[list[Link]], most: int) -> list[Link]:
    links: list[Link] = []
    for group in groups:
        if len(links) + len(group) > most:
            break
        links += group
    rng.shuffle(links)
    return links


def _document(rng: Random, links: list[Link]) -> Document:
    """Set links between the opening and the closing of a scene."""
    openings, closings = rng.choice(lexicon.SCENES)
    rng.shuffle(links)
    middle = [pair for link in links for pair in link.sentences]
    opening, closing = (fill(rng.choice(part), draw_slots(rng)) for part in (openings, closings))
    return Document((opening, *middle, closing))


def suite_items(category: str, seed: int, items: int) -> list[ContrastiveItem]:
    """Generate distinct items of a suite from the combinations held out for the test split.

    Args:
        category: The suite's name in `SUITES`.
        seed: Seed of the random choices.
        items: At most so many; only whole groups, of two, are made.

    Raises:
        UserError: If the suite does not have so many distinct ones.
    """
    rng = Random(f"suites {category} {seed}")
    made: dict[ContrastiveItem, None] = {}  # a set that keeps the order
    tries = 3 * items + 1
    for links in islice(SUITES[category](rng, "test"), tries):
        group = _items(links, _asides(rng, CONTEXT - len(links[0].context)))
        if len(made) + len(group) > items:
            return list(made)
        if made.keys().isdisjoint(group):
            made |= dict.fromkeys(group)
    raise UserError(
        f"{category}: {tries:,} tries gave {len(made):,} distinct items, but {items:,} are wanted"
    )


def _items(links: Sequence[Link], before: Sequence[SentencePair]) -> list[ContrastiveItem]:
    """Make an item of each link, after the same sentences."""
    return [
        ContrastiveItem(
            source=link.source,
            candidates=link.candidates,
            correct=link.correct,
            context=tuple(pair.source for pair in (*before, *link.context)),
            target_contexts=(tuple(pair.target for pair in (*before, *link.context)),)
            * len(link.candidates),
            category=link.phenomenon,
            distance=len(link.context),
        )
        for link in links
    ]


# ---------------------------------------------------------------------------- files


def write_suites(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write train, dev, test (.en, .de; a blank line between documents) and four suites (.jsonl).

    Args:
        folder: Folder to write to; made if it is not there.
        seed: Seed of the random choices; the same seed writes the same bytes.
        sizes: Documents of each split, and items of each suite.
    """
    make_folder(folder)
    for split in SPLITS:
        write_documents(folder, split, suite_documents(seed, sizes[split], split))
    for category in SUITES:
        items = suite_items(category, seed, sizes["items"])
        write_contrastive(folder / suite_file(category), items)


def suite_file(category: str) -> str:
    """Name the file of a suite.

    >>> suite_file("VP ellipsis")
    'vp_ellipsis.jsonl'
    """
    return f"{category.lower().replace(' ', '_')}.jsonl"
