"""How probable a forward model finds the real side of a synthetic pair."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from backtranslation.filters import ScorePairs
from bertfused.errors import UserError
from bertfused.scoring import score_pairs
from bertfused.text import SentencePair
from bertfused.translate import SourceLine, Translator


def forward_scores(run: Path, languages: tuple[str, str], device: str) -> ScorePairs:
    """Return what gives the log-probability a token of targets, EOS included, in nats.

    Args:
        run: From the first of the languages into the second.

    Raises:
        UserError: If it is of other languages.
    """
    translator = Translator.load(run, device=device)
    card = translator.members[0].card
    if (card.source, card.target) != languages:
        raise UserError(
            f"{run} translates {card.source} to {card.target}, not {' to '.join(languages)}"
        )

    def score(pairs: Iterable[SentencePair]) -> Iterator[float]:
        lines = ((SourceLine(pair.source), pair.target) for pair in pairs)
        for scored in score_pairs(translator, lines):
            yield scored.log_prob / scored.tokens

    return score
