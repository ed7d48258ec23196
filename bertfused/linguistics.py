"""What is known about language: where sentences end, which of them hold a pronoun.

The only module that knows spaCy. Rules need no trained model: ``rule_based`` makes the pipeline of
a language. ``load_splitter`` and ``load_tagger`` take a pipeline that is installed or stands in a
folder.
"""

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import spacy
from spacy.language import Language
from spacy.tokens import Doc, Token

from bertfused.errors import UserError

# Characters that a pipeline is given at once, so that its memory has a bound; spaCy refuses more
# than a million.
PIECE = 100_000

_logger = logging.getLogger(__name__)


def rule_based(language: str, abbreviations: Sequence[str] = ()) -> Language:
    """Make a pipeline that ends sentences at ".", "!", "?" and their like in other scripts.

    A full stop inside a token of spaCy's tokenizer ends no sentence, so the abbreviations that
    spaCy knows are safe.

    Args:
        language: Code such as "en"; "xx" has no abbreviations and suits other languages.
        abbreviations: Further tokens, e.g. "No.".

    Raises:
        UserError: If spaCy has no such language, lacks a package for it or cannot take its
            abbreviations, or if one of these is not one word.
    """
    try:
        pipeline = spacy.blank(language)
    except (ImportError, AttributeError) as error:  # the latter for a module that is no language
        if isinstance(error, ImportError) and not str(error).startswith("[E048]"):
            raise UserError(f"language {language!r} needs a package: {error}") from error
        raise UserError(
            f"spaCy has no language {language!r}; 'xx' has rules for any with full stops"
        ) from error
    add_special_case = getattr(pipeline.tokenizer, "add_special_case", None)
    for abbreviation in abbreviations:
        if abbreviation.split() != [abbreviation]:
            raise UserError(f"an abbreviation is one word, not {abbreviation!r}")
        if add_special_case is None:  # Chinese, for one
            raise UserError(f"spaCy's tokenizer of language {language!r} takes no abbreviations")
        add_special_case(abbreviation, [{"ORTH": abbreviation}])
    pipeline.add_pipe("sentencizer")
    pipeline.add_pipe("opening_marks")
    return pipeline


def load_splitter(name: str | Path) -> Language:
    """Load a pipeline that finds sentences.

    Raises:
        UserError: If there is none of this name, or it finds no sentences.
    """
    pipeline = _load(name, without=("ner", "lemmatizer"))
    if not pipeline("One sentence. Another.").has_annotation("SENT_START"):
        raise UserError(
            f"the spaCy pipeline {str(name)!r} finds no sentences: it has no parser, senter or "
            "sentencizer"
        )
    return pipeline


def load_tagger(name: str | Path) -> Language:
    """Load a pipeline that finds parts of speech and their person.

    Raises:
        UserError: If there is none of this name, or it has no component for that.
    """
    pipeline = _load(name, without=("parser", "senter", "ner", "lemmatizer"))
    if not {"morphologizer", "attribute_ruler"} & set(pipeline.pipe_factories.values()):
        raise UserError(
            f"the spaCy pipeline {str(name)!r} finds no pronouns: it has no morphologizer or "
            "attribute_ruler"
        )
    pipeline.max_length = sys.maxsize  # the bound is for the components left out
    return pipeline


def split_sentences(paragraphs: Iterable[str], splitter: Language) -> Iterator[list[str]]:
    """Split each paragraph into sentences, without the white space around them.

    Nothing else is changed or lost: joined, the sentences hold the characters of the paragraph.
    Sentences longer than ``PIECE`` are cut, with a warning.
    """
    for batch in _batches(paragraphs):
        # What spaCy remembers of every new word would grow with the text.
        with splitter.memory_zone():
            if len(batch[0]) > PIECE:
                found = [list(_split_long(batch[0], splitter))]
            else:
                found = [_sentences(doc) for doc in splitter.pipe(batch)]
        yield from (
            [sentence.strip() for sentence in sentences if sentence.strip()] for sentences in found
        )


def third_person(sentences: Iterable[str], tagger: Language) -> list[bool]:
    """Tell for each sentence whether a pronoun of the third person is in it.

    These are the tokens with POS=PRON and Person=3 (Universal Dependencies): personal, reflexive
    and, where the pipeline counts them among the pronouns, possessive ones.
    """
    return [any(map(_is_third_person, doc)) for doc in tagger.pipe(sentences)]


@Language.component("opening_marks")
def opening_marks(doc: Doc) -> Doc:
    """Begin a sentence with the quotes and brackets that open it, and with no others.

    The sentencizer begins it with the first token after a full stop that is no mark, and so finds
    'He left. "' and 'Why?" she asked.' Here a mark that is joined to the first word, or that opens
    in any place as "«" does, goes with that word if white space stands before it.
    """
    # 1 for a token that starts a sentence, else -1. Set one by one they take quadratic time.
    array: Any = doc.to_array("SENT_START")  # unsigned, and spaCy takes no other
    starts = array.view("int64")
    for sentence in list(doc.sents)[1:]:
        starts[sentence.start] = -1
        word = next((token for token in sentence if not (token.is_punct or token.is_space)), None)
        if word is not None:
            starts[_with_opening_marks(doc, word.i)] = 1
    return doc.from_array(["SENT_START"], array)


def _with_opening_marks(doc: Doc, word: int) -> int:
    """Return the first of the marks that open a sentence with this first word, else the word."""
    start = word
    for mark in range(word - 1, 0, -1):
        token = doc[mark]
        if not token.is_space:
            is_opening = token.is_left_punct and not token.is_right_punct
            is_joined = not (token.whitespace_ or doc[mark + 1].is_space)
            if not token.is_punct or not (is_opening or is_joined):
                break
            if doc[mark - 1].whitespace_ or doc[mark - 1].is_space:
                start = mark
    return start


def _is_third_person(token: Token) -> bool:
    return token.pos_ == "PRON" and "3" in token.morph.get("Person", [])


def _load(name: str | Path, without: Sequence[str]) -> Language:
    try:
        return spacy.load(name, exclude=without)
    except OSError as error:
        raise UserError(
            f"no spaCy pipeline {str(name)!r} is installed (python -m spacy download NAME) or "
            "stands in a folder of that name"
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        # A package it needs, a package that is no pipeline, a component nobody has registered.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"spaCy cannot load the pipeline {str(name)!r}: {reason}") from error


def _batches(paragraphs: Iterable[str]) -> Iterator[list[str]]:
    """Group paragraphs to at most ``PIECE`` characters; a longer one stands alone."""
    batch: list[str] = []
    size = 0
    for paragraph in paragraphs:
        if batch and size + len(paragraph) > PIECE:
            yield batch
            batch, size = [], 0
        batch.append(paragraph)
        size += len(paragraph)
    if batch:
        yield batch


def _split_long(paragraph: str, splitter: Language) -> Iterator[str]:
    """Split piece by piece; the last sentence of a piece may go on in the next."""
    # Up to so many characters, cut where a word ends if there is such a place.
    pieces = re.findall(rf".{{1,{PIECE}}}(?!\S)|.{{1,{PIECE}}}", paragraph, re.DOTALL)
    rest = ""
    for piece in pieces:
        *complete, rest = _sentences(splitter(rest + piece))
        yield from complete
        if len(rest) >= PIECE:
            _logger.warning(
                "a sentence of more than %s characters is cut: %r", f"{PIECE:,}", rest[:40]
            )
            yield rest
            rest = ""
    yield rest


def _sentences(doc: Doc) -> list[str]:
    return [sentence.text_with_ws for sentence in doc.sents]
