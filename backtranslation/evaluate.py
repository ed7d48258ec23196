"""Score the models of a chain on its test sets, each against the one before it."""

import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from backtranslation import leaks
from backtranslation.chain import RECIPE, model_names, reverse_names, reversed_recipe
from backtranslation.config import BacktranslationRecipe
from bertfused import metrics
from bertfused.checkpoint import load_card, model_folder
from bertfused.config import Corpus, Recipe, Section, load_recipe, load_section, save_section
from bertfused.errors import UserError
from bertfused.progress import Bar, no_bar, warn_of
from bertfused.text import count_lines, make_folder, open_output, read_lines, sha256_file
from bertfused.translate import Translator

if TYPE_CHECKING:
    from pandas import DataFrame

_logger = logging.getLogger(__name__)

REPORT = "report.json"
_RESAMPLES = 1000


class SystemScore(Section):
    """One metric of one model on one test set."""

    test: str = Field(description="Name of the test set.")
    model: str
    direction: str = Field(description="Languages, as in ro-en.")
    metric: str
    score: float
    half_width: float = Field(description="Of its 95% interval.")
    against: str | None = Field(None, description="The model it is tested against.")
    delta: float | None = Field(None, description="Its score less that one's.")
    p_value: float | None = Field(None, description="Of a paired bootstrap; none if delta is 0.")
    signature: str


class ChainReport(Section):
    """The scores of a chain."""

    scores: tuple[SystemScore, ...]

    def __str__(self) -> str:
        """Return a table for each test set, and the signatures."""
        tests = dict.fromkeys(score.test for score in self.scores)
        parts = [f"{test}\n{self.table(test).to_string(index=False)}" for test in tests]
        signatures = dict.fromkeys(f"{score.metric}: {score.signature}" for score in self.scores)
        return "\n\n".join([*parts, "\n".join(signatures)])

    def table(self, test: str) -> "DataFrame":
        """Return a row for each model, with the p-values of its differences to another."""
        from pandas import DataFrame

        rows: dict[str, dict[str, str]] = {}
        for score in self.scores:
            if score.test == test:
                row = rows.setdefault(
                    score.model,
                    {
                        "model": score.model,
                        "direction": score.direction,
                        "against": score.against or "",
                    },
                )
                p_value = score.p_value
                row[score.metric] = f"{score.score:.2f} ± {score.half_width:.2f}"
                row[f"p ({score.metric})"] = "" if p_value is None else f"{p_value:.4f}"
        return DataFrame(list(rows.values()))


def evaluate_chain(
    out: Path,
    *,
    lowercase: bool = False,
    device: str = "auto",
    encoder: str | None = None,
    batch_tokens: int = 4096,
    bar: Bar = no_bar,
) -> ChainReport:
    """Translate the test sets with every trained model of a chain, and score them.

    Each model is tested against the one before it by paired bootstrap resampling (Koehn, 2004).
    Writes OUT/evaluation: the translations, and ``report.json``.

    Args:
        lowercase: Ignore case.
        encoder: Another place of the pretrained encoder, if it has moved.
        batch_tokens: Source tokens of a batch.

    Raises:
        UserError: If no model is trained, the recipe names no test set, or a test set has changed.
    """
    path = out / RECIPE
    if not path.exists():
        raise UserError(f"{out} holds no chain: it has no {RECIPE}")
    recipe = load_recipe(path, BacktranslationRecipe)
    if not recipe.data.test:
        raise UserError(f"{path} names no data.test to evaluate on")
    directions = ((recipe, model_names(recipe)), (reversed_recipe(recipe), reverse_names(recipe)))
    trained = [
        name for _, names in directions for name in names if (out / name / "report.md").exists()
    ]
    if not trained:
        raise UserError(f"{out} has no trained model; go on with train --resume")
    _check_tests(recipe, out)
    folder = out / "evaluation"
    make_folder(folder)
    scores: list[SystemScore] = []
    for own, names in directions:
        files: dict[str, dict[str, Path]] = {str(corpus.name): {} for corpus in own.data.test}
        for name in names:
            if name not in trained:
                _logger.warning("%s is not trained yet", out / name)
                continue
            translator = _load(out / name, device, encoder)
            for corpus in own.data.test:
                _logger.info("%s: %s", name, corpus.name)
                file = folder / f"{corpus.name}.{name}.{own.data.target}"
                _translate(translator, corpus.source, file, batch_tokens, bar)
                files[str(corpus.name)][name] = file
        for corpus in own.data.test:
            if found := files[str(corpus.name)]:
                scores += _score(own, corpus, found, lowercase)
    report = ChainReport(scores=tuple(scores))
    save_section(folder / REPORT, report)
    return report


def _check_tests(recipe: BacktranslationRecipe, out: Path) -> None:
    """Refuse test sets that the training text was not kept clear of."""
    checked = load_section(out / "text" / leaks.REPORT, leaks.LeakReport).made_from
    for corpus in recipe.data.test:
        for side in ("source", "target"):
            path: Path = getattr(corpus, side)
            if checked.get(f"test.{corpus.name}.{side}") != sha256_file(path):
                raise UserError(f"{path} has changed since the training text was kept clear of it")


def _load(run: Path, device: str, encoder: str | None) -> Translator:
    is_fused = load_card(model_folder(run)).fusion is not None
    return Translator.load(run, device=device, encoder=encoder if is_fused else None)


def _translate(
    translator: Translator, source: Path, output: Path, batch_tokens: int, bar: Bar
) -> None:
    translator.counts.clear()
    with bar("lines", count_lines(source)) as advance, open_output(output) as writer:
        lines = read_lines(source)
        for translation in translator.translate(lines, batch_tokens=batch_tokens):
            writer.write_line(translation.text)
            advance(1)
    warn_of(translator.counts)


def _score(
    recipe: Recipe, corpus: Corpus, files: Mapping[str, Path], lowercase: bool
) -> list[SystemScore]:
    """Score translations of a test set, each against those before it."""
    references = list(read_lines(corpus.target))
    texts = {name: list(read_lines(path)) for name, path in files.items()}
    where = (str(corpus.name), f"{recipe.data.source}-{recipe.data.target}")
    (first, lines), *_ = texts.items()
    alone = (
        metrics.bleu(lines, references, lowercase=lowercase, resamples=_RESAMPLES),
        metrics.chrf(lines, references, lowercase=lowercase, resamples=_RESAMPLES),
    )
    scores = [_system_score(where, metrics.Comparison(first, own, 0.0, None)) for own in alone]
    for before, name in pairwise(texts):
        pair = {before: texts[before], name: texts[name]}
        tested = metrics.paired_bootstrap(
            references, pair, lowercase=lowercase, resamples=_RESAMPLES
        )
        scores += [_system_score(where, own, before) for own in tested if own.system == name]
    return scores


def _system_score(
    where: tuple[str, str], own: metrics.Comparison, against: str | None = None
) -> SystemScore:
    test, direction = where
    assert own.score.interval is not None
    return SystemScore(
        test=test,
        model=own.system,
        direction=direction,
        metric=own.score.name,
        score=own.score.value,
        half_width=own.score.interval.half_width,
        against=against,
        delta=None if against is None else own.delta,
        # The library gives a system and its copy the smallest p-value there is.
        p_value=own.p_value if own.delta else None,
        signature=own.score.signature,
    )
