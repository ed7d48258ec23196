"""A spaCy pipeline without a trained model, for tests that need some tagger."""

from collections.abc import Sequence
from pathlib import Path

import spacy

PRONOUNS = ["he", "him", "his", "she", "her", "hers", "it", "its", "they", "them", "their"]


def write_pronoun_pipeline(folder: Path, pronouns: Sequence[str] = PRONOUNS) -> Path:
    """Write a pipeline that knows the pronouns of the third person by heart."""
    pipeline = spacy.blank("en")
    ruler = pipeline.add_pipe("attribute_ruler")
    ruler.add([[{"LOWER": {"IN": list(pronouns)}}]], {"POS": "PRON", "MORPH": "Person=3"})
    pipeline.to_disk(folder)
    return folder
