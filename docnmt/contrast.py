"""Contrastive evaluation: does the model prefer the right translation in context?

::

    items --score_items--> for each item the score of each candidate
          --contrast-->    ContrastResult: accuracy overall, by distance and by category
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

from bertfused.errors import UserError
from bertfused.scoring import PairScore
from bertfused.text import SentenceTest
from bertfused.translate import SourceLine
from docnmt.contrastive import ContrastiveItem

Score = Callable[[list[tuple[SourceLine, str]]], Iterable[PairScore]]
AsRead = Callable[[SourceLine], SourceLine]

_Z = NormalDist().inv_cdf(0.975)  # of 95%, two-sided


@dataclass(frozen=True)
class Accuracy:
    """How often the right candidate was strictly the most probable; a tie is wrong.

    Attributes:
        ties: Items whose right candidate shares the best score with another one.
    """

    correct: int
    items: int
    ties: int

    @property
    def share(self) -> float:
        return self.correct / self.items if self.items else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the share s of n items (Wilson, 1927).

        ::

            (s + z²/2n  ±  z sqrt(s (1 - s) / n + z²/4n²)) / (1 + z²/n)
        """
        if not self.items:
            return 0.0, 1.0
        ratio = _Z**2 / self.items
        middle = self.share + ratio / 2
        spread = _Z * math.sqrt(self.share * (1 - self.share) / self.items + ratio**2 / (4 * _Z**2))
        low, high = (middle - spread) / (1 + ratio), (middle + spread) / (1 + ratio)
        return max(low, 0.0), min(high, 1.0)


@dataclass(frozen=True)
class Judged:
    """An item's scores, one for each candidate in nats, and what they say."""

    item: ContrastiveItem
    scores: tuple[float, ...]

    @property
    def is_tie(self) -> bool:
        return self._is_best and self.scores.count(max(self.scores)) > 1

    @property
    def is_correct(self) -> bool:
        return self._is_best and not self.is_tie

    @property
    def _is_best(self) -> bool:
        return self.scores[self.item.correct] == max(self.scores)


@dataclass(frozen=True)
class ContrastResult:
    """Accuracies on a set; items of no known distance or category are in the first one only.

    Attributes:
        by_pronoun: Of the sentences with a third-person pronoun and of the others, if asked for.
    """

    overall: Accuracy
    by_distance: dict[int, Accuracy]
    by_category: dict[str, Accuracy]
    by_pronoun: dict[str, Accuracy]
    judged: tuple[Judged, ...]


def contrast(
    items: Sequence[ContrastiveItem],
    score: Score,
    *,
    name: str = "the set",
    as_read: AsRead = lambda line: line,
    has_pronoun: SentenceTest | None = None,
) -> ContrastResult:
    """Score every candidate after its own context and count what was right.

    Args:
        score: Gives the log-probability of each target after its source line.
        name: What messages call the set.
        as_read: Leaves of a line what the model reads; pairs equal after that have one score.
        has_pronoun: Says which source sentences have a third-person pronoun.

    Raises:
        UserError: If scores are not numbers, or all candidates of an item have probability 0.
    """
    judged = tuple(
        Judged(item, scores)
        for item, scores in zip(items, score_items(items, score, as_read), strict=True)
    )
    distances: dict[int, list[Judged]] = defaultdict(list)
    categories: dict[str, list[Judged]] = defaultdict(list)
    for number, judged_item in enumerate(judged, start=1):
        _check_scores(judged_item.scores, f"{name}, item {number}")
        item = judged_item.item
        if item.distance is not None:
            distances[item.distance].append(judged_item)
        if item.category:
            categories[item.category].append(judged_item)
    return ContrastResult(
        _accuracy(judged),
        {distance: _accuracy(distances[distance]) for distance in sorted(distances)},
        {category: _accuracy(group) for category, group in categories.items()},
        {} if has_pronoun is None else _by_pronoun(judged, has_pronoun),
        judged,
    )


def _by_pronoun(judged: Sequence[Judged], has_pronoun: SentenceTest) -> dict[str, Accuracy]:
    marks = has_pronoun(judged_item.item.source for judged_item in judged)
    groups: dict[bool, list[Judged]] = {True: [], False: []}
    for judged_item, mark in zip(judged, marks, strict=True):
        groups[mark].append(judged_item)
    return {"with pronoun": _accuracy(groups[True]), "without": _accuracy(groups[False])}


def score_items(
    items: Sequence[ContrastiveItem], score: Score, as_read: AsRead
) -> list[tuple[float, ...]]:
    """Score the candidates of items, equal pairs once.

    In another batch the same pair has another rounding error, so that scoring it twice would
    tell apart what the model does not.
    """
    pairs_of_items = [list(_pairs(item, as_read)) for item in items]
    distinct = list(dict.fromkeys(pair for pairs in pairs_of_items for pair in pairs))
    scores = dict(zip(distinct, score(distinct), strict=True))
    return [tuple(scores[pair].log_prob for pair in pairs) for pairs in pairs_of_items]


def _pairs(item: ContrastiveItem, as_read: AsRead) -> Iterable[tuple[SourceLine, str]]:
    contexts = item.target_contexts or ((),) * len(item.candidates)
    for candidate, context in zip(item.candidates, contexts, strict=True):
        line = SourceLine(item.source, context=item.context, target_context=context)
        yield as_read(line), candidate


def _check_scores(scores: Sequence[float], where: str) -> None:
    for candidate, score in enumerate(scores):
        if math.isnan(score) or score == math.inf:
            raise UserError(f"{where}: candidate {candidate} has a log-probability of {score}")
    if max(scores) == -math.inf:
        raise UserError(f"{where}: all candidates have a log-probability of -inf")


def _accuracy(judged: Sequence[Judged]) -> Accuracy:
    return Accuracy(
        correct=sum(judged_item.is_correct for judged_item in judged),
        items=len(judged),
        ties=sum(judged_item.is_tie for judged_item in judged),
    )


# ---------------------------------------------------------------------------- reports


def table(result: ContrastResult) -> str:
    """Lay out accuracies as text."""
    rows = [("all", result.overall)]
    rows += [(f"distance {key}", accuracy) for key, accuracy in result.by_distance.items()]
    if len(result.by_category) > 1:
        rows += result.by_category.items()
    rows += result.by_pronoun.items()
    width = max(len(label) for label, _ in rows)
    lines = [f"{'':{width}}  accuracy     95% interval  correct    items     ties"]
    for label, accuracy in rows:
        low, high = accuracy.interval
        interval = f"{100 * low:.2f} to {100 * high:.2f}"
        lines.append(
            f"{label:{width}}  {100 * accuracy.share:7.2f}%  {interval:>15}"
            f"{accuracy.correct:>9,}{accuracy.items:>9,}{accuracy.ties:>9,}"
        )
    return "\n".join(lines)


def as_json(name: str, result: ContrastResult) -> dict[str, object]:
    """Give the accuracies of a set as an object for JSON."""
    return {
        "set": name,
        **_accuracy_json(result.overall),
        "by_distance": _group_json(result.by_distance),
        "by_category": _group_json(result.by_category),
        "by_pronoun": _group_json(result.by_pronoun),
    }


def _group_json(group: Mapping[int, Accuracy] | Mapping[str, Accuracy]) -> dict[str, object]:
    return {str(key): _accuracy_json(accuracy) for key, accuracy in group.items()}


def _accuracy_json(accuracy: Accuracy) -> dict[str, object]:
    return {"accuracy": accuracy.share, "interval": accuracy.interval, **asdict(accuracy)}


def item_records(name: str, result: ContrastResult) -> Iterator[dict[str, object]]:
    """Give each item's scores as an object for a line of JSON; -inf, which it lacks, is None."""
    for number, judged_item in enumerate(result.judged, start=1):
        item = judged_item.item
        yield {
            "set": name,
            "item": number,
            "scores": tuple(None if score == -math.inf else score for score in judged_item.scores),
            "correct": item.correct,
            "is_correct": judged_item.is_correct,
            "is_tie": judged_item.is_tie,
            "category": item.category,
            "distance": item.distance,
        }
