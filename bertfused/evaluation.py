"""Score the translations of a test set: what ``evaluate`` prints."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bertfused import metrics
from bertfused.text import SentenceTest
from bertfused.translate import SourceLine, Translation

_logger = logging.getLogger(__name__)


def evaluation(
    translations: Sequence[Translation | str],
    pairs: Sequence[tuple[SourceLine | str, str]],
    *,
    lowercase: bool = False,
) -> dict[str, Any]:
    """Score translations: BLEU, chrF, and d-BLEU where there are documents."""
    hypotheses, references, documents = [], [], []
    for translation, (line, reference) in zip(translations, pairs, strict=True):
        if not isinstance(translation, str) and not isinstance(line, str):
            hypotheses.append(translation.text)
            references.append(reference)
            documents.append(line.document)
    for warning in metrics.check_texts(hypotheses, references):
        _logger.warning("%s", warning)
    scores = {
        "bleu": metrics.bleu(hypotheses, references, lowercase=lowercase),
        "chrf": metrics.chrf(hypotheses, references, lowercase=lowercase),
    }
    if None not in documents:
        scores["d-bleu"] = metrics.document_bleu(
            hypotheses, references, [str(name) for name in documents], lowercase=lowercase
        )
    return {
        key: {"value": score.value, "signature": score.signature, "text": str(score)}
        for key, score in scores.items()
    }


def bleu_by_pronouns(
    translations: Sequence[Translation | str],
    pairs: Sequence[tuple[SourceLine | str, str]],
    has_pronoun: SentenceTest,
    *,
    lowercase: bool = False,
) -> dict[str, Any]:
    """Score the sentences with a third-person pronoun in the source, and those without."""
    rows = [
        (line.text, translation.text, reference)
        for translation, (line, reference) in zip(translations, pairs, strict=True)
        if not isinstance(translation, str) and not isinstance(line, str)
    ]
    marks = has_pronoun(source for source, _, _ in rows)
    results: dict[str, Any] = {}
    for key, wanted, name in (
        ("bleu-pronoun", True, "with a third-person pronoun"),
        ("bleu-no-pronoun", False, "without"),
    ):
        group = [row for row, mark in zip(rows, marks, strict=True) if mark == wanted]
        value, signature, text = None, None, "none"
        if group:
            _, hypotheses, references = zip(*group, strict=True)
            score = metrics.bleu(hypotheses, references, lowercase=lowercase)
            value, signature, text = score.value, score.signature, str(score)
        results[key] = {
            "value": value,
            "signature": signature,
            "sentences": len(group),
            "text": f"{name} ({len(group):,} sentences): {text}",
        }
    return results


def readable(results: Mapping[str, Any]) -> Iterator[str]:
    """Write results as lines of text."""
    for key, value in results.items():
        yield value["text"] if isinstance(value, dict) else f"{key} = {value:.4f} nats a token"
