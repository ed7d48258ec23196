"""Score the models of a chain on its test sets, each against the one before it."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from backtranslation.chain import RECIPE, model_names, reverse_names, reversed_recipe
from backtranslation.config import BacktranslationRecipe
from bertfused import metrics
from bertfused.config import Corpus, Recipe, Section, load_recipe
from bertfused.errors import UserError
from bertfused.features import Bar, no_bar
from bertfused.text import count_lines, make_folder, open_output, read_lines, replace_file
from bertfused.translate import Translator

if TYPE_CHECKING:
    from pandas import DataFrame

REPORT = "report.json"


class SystemScore(Section):
    """One metric of one model on one test set."""

    test: str
    model: str
    direction: str = Field(description="Languages, as in ro-en.")
    metric: str
    score: float
    against: str | None = Field(None, description="The model it is tested against.")
    delta: float | None = Field(None, description="Its score less that one's.")
    p_value: float | None = Field(None, description="Of a paired bootstrap test.")
    signature: str


class ChainReport(Section):
    """The scores of a chain."""

    scores: tuple[SystemScore, ...]

    def __str__(self) -> str:
        """Return a table for each test set, and the signatures."""
        tests = dict.fromkeys(score.test for score in self.scores)
        parts = [f"{test}\n{self.table(test).to_string(index=False)}" for test in tests]
        signatures = {score.metric: score.signature for score in self.scores}
        parts.append("\n".join(f"{metric}: {text}" for metric, text in signatures.items()))
        return "\n\n".join(parts)

    def table(self, test: str) -> "DataFrame":
        """Return a row for each model, with the p-values of its differences to another."""
        from pandas import DataFrame

        rows: dict[str, dict[str, str]] = {}
        for score in self.scores:
            if score.test != test:
                continue
            row = rows.setdefault(score.model, {"model": score.model, "direction": score.direction})
            row[score.metric] = f"{score.score:.2f}"
            row["against"] = score.against or ""
            p_value = score.p_value
            row[f"p ({score.metric})"] = "" if p_value is None else f"{p_value:.4f}"
        return DataFrame(list(rows.values()))


def evaluate_chain(out: Path, *, device: str = "auto", bar: Bar = no_bar) -> ChainReport:
    """Translate the test sets with every model of a chain, and score them.

    Each model is tested against the one before it by paired bootstrap resampling. Writes
    OUT/evaluation: the translations, and ``report.json``.

    Raises:
        UserError: If the chain is not finished, or its recipe names no test set.
    """
    path = out / RECIPE
    if not path.exists():
        raise UserError(f"{out} holds no chain: it has no {RECIPE}")
    recipe = load_recipe(path, BacktranslationRecipe)
    if not recipe.data.test:
        raise UserError(f"{path} names no data.test to evaluate on")
    directions = ((recipe, model_names(recipe)), (reversed_recipe(recipe), reverse_names(recipe)))
    for _, names in directions:
        for name in names:
            if not (out / name / "report.md").exists():
                raise UserError(f"{out / name} is not trained; go on with train --resume")
    folder = out / "evaluation"
    make_folder(folder)
    scores: list[SystemScore] = []
    for own, names in directions:
        outputs = {name: _translate(out / name, own, folder, device, bar) for name in names}
        for corpus in own.data.test:
            files = {name: outputs[name][str(corpus.name)] for name in names}
            scores += _score(own, corpus, files)
    report = ChainReport(scores=tuple(scores))
    with replace_file(folder / REPORT) as handle:
        handle.write(f"{report.model_dump_json(indent=2)}\n".encode())
    return report


def _translate(run: Path, recipe: Recipe, folder: Path, device: str, bar: Bar) -> dict[str, Path]:
    """Translate the test sets; returns the files by name of the set."""
    translator = Translator.load(run, device=device)
    files = {}
    for corpus in recipe.data.test:
        path = folder / f"{corpus.name}.{run.name}.{recipe.data.target}"
        with bar("lines", count_lines(corpus.source)) as advance, open_output(path) as writer:
            for translation in translator.translate(read_lines(corpus.source)):
                writer.write_line(translation.text)
                advance(1)
        files[str(corpus.name)] = path
    return files


def _score(recipe: Recipe, corpus: Corpus, files: dict[str, Path]) -> list[SystemScore]:
    """Score translations of a test set, each against those before it."""
    references = list(read_lines(corpus.target))
    hypotheses = {name: list(read_lines(path)) for name, path in files.items()}
    where = {
        "test": str(corpus.name),
        "direction": f"{recipe.data.source}-{recipe.data.target}",
    }
    scores = []
    before: str | None = None
    for name, lines in hypotheses.items():
        if before is None:
            found = (metrics.bleu(lines, references), metrics.chrf(lines, references))
            scores += [_system_score(name, score, where) for score in found]
        else:
            pair = {before: hypotheses[before], name: lines}
            scores += [
                _system_score(name, compared.score, where).model_copy(
                    update={"against": before, "delta": compared.delta, "p_value": compared.p_value}
                )
                for compared in metrics.paired_bootstrap(references, pair)
                if compared.system == name
            ]
        before = name
    return scores


def _system_score(name: str, score: metrics.Score, where: dict[str, str]) -> SystemScore:
    return SystemScore(
        model=name,
        metric=score.name,
        score=score.value,
        signature=score.signature,
        **where,
    )
