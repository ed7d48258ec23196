"""Contrastive evaluation: does the model prefer the right translation in context?"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bertfused.scoring import score_pairs
from bertfused.translate import SourceLine, Translator
from docnmt.grammar import ContrastiveItem


@dataclass(frozen=True)
class Accuracy:
    """How often the right candidate was strictly the most probable; a tie is wrong."""

    correct: int
    items: int
    ties: int

    @property
    def share(self) -> float:
        return self.correct / self.items if self.items else 0.0


def contrastive_accuracy(
    translator: Translator, items: Sequence[ContrastiveItem]
) -> dict[str, Accuracy]:
    """Score every candidate after its item's context; accuracy by phenomenon, and "all".

    Raises:
        ValueError: If the model gives a log-probability that is not a number.
    """
    pairs = [
        (SourceLine(item.source, context=item.context), candidate)
        for item in items
        for candidate in item.candidates
    ]
    scores = iter([score.log_prob for score in score_pairs(translator, pairs)])
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for item in items:
        own = [next(scores) for _ in item.candidates]
        if any(score != score for score in own):
            raise ValueError(f"a candidate of {item.source!r} has a log-probability of nan")
        best = max(own)
        is_tie = own.count(best) > 1 and own[item.correct] == best
        is_correct = own[item.correct] == best and not is_tie
        for key in (item.phenomenon, "all"):
            for position, count in enumerate((is_correct, 1, is_tie)):
                counts[key][position] += count
    return {key: Accuracy(*own) for key, own in counts.items()}
