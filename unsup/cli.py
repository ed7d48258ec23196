"""The ``unsup`` command: translation learned from two monolingual texts."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertfused.commands import add_translate, load_translator, search_options, sentence_lines
from bertfused.config import load_recipe
from bertfused.console import Quiet, log_to_stderr, make_app, progress, run_app
from bertfused.options import (
    Data,
    Device,
    Encoder,
    Force,
    Out,
    RecipeFile,
    Resume,
    Run,
    Set,
    search_option,
)
from unsup.config import UnsupervisedRecipe

if TYPE_CHECKING:
    from bertfused.fit import SetUp

_logger = logging.getLogger(__name__)

app = make_app(
    "unsup",
    "Unsupervised translation: two monolingual texts, denoising, on-the-fly back-translation, and "
    "a multilingual encoder fused on top.",
)


@app.command()
def prepare(
    recipe: RecipeFile,
    out: Out,
    force: Force = False,
    overrides: Set = None,
    quiet: Quiet = False,
) -> None:
    """Turn monolingual text into a DATA folder: subwords, ids, word-by-word translations."""
    log_to_stderr(quiet)
    from unsup.prepare import prepare as prepare_data

    loaded = load_recipe(recipe, UnsupervisedRecipe, overrides or [])
    with progress("lines", None, quiet) as advance:
        reports = prepare_data(
            loaded, out, force=force, progress=lambda what, lines: advance(lines)
        )
    for report in reports:
        if report is not None:
            _logger.info("%s", report)


@app.command()
def pretrain(
    recipe: RecipeFile,
    data: Data,
    out: Out,
    resume: Resume = False,
    overrides: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Pretrain on both texts: an XLM, to start from or to fuse, or a model by MASS."""
    log_to_stderr(quiet)
    loaded = load_recipe(recipe, UnsupervisedRecipe, overrides or [])
    from unsup.fit import set_up_mass
    from unsup.pretrain import set_up

    is_mass = loaded.pretrain.objective == "mass"
    set_up_run = set_up_mass if is_mass else set_up
    _train(loaded, data, out, set_up_run, resume=resume, device=device, quiet=quiet)


@app.command()
def train(
    recipe: RecipeFile,
    data: Data,
    out: Out,
    init: Annotated[
        Path | None,
        typer.Option(
            "--init", help="RUN to take weights from: of pretrain, or the plain model to fuse."
        ),
    ] = None,
    resume: Resume = False,
    overrides: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Train one model for both directions, plain or fused; by torchrun in several processes."""
    log_to_stderr(quiet)
    loaded = load_recipe(recipe, UnsupervisedRecipe, overrides or [])
    from unsup.fit import set_up

    _train(loaded, data, out, set_up, init=init, resume=resume, device=device, quiet=quiet)


add_translate(app, load_translator, sentence_lines)


@app.command()
def evaluate(
    run: Run,
    data: Data,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for the translations: SET.LANGUAGE-LANGUAGE."),
    ] = None,
    tokenize: Annotated[
        Literal["13a", "none"],
        typer.Option(
            "--tokenize", help="BLEU's tokenizer: 13a, or none for text that is tokenised already."
        ),
    ] = "13a",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
    device: Device = "auto",
    encoder: Encoder = None,
    quiet: Quiet = False,
) -> None:
    """Translate the dev and test sets of DATA both ways: BLEU, chrF, and what was copied."""
    log_to_stderr(quiet)
    from bertfused.checkpoint import load_card, model_folder
    from unsup.evaluate import evaluate as evaluate_run

    search = search_options(load_card(model_folder(run)).search, beam_size=beam_size)
    report = evaluate_run(
        run,
        data,
        search=search,
        output=output,
        tokenize=tokenize,
        lowercase=lowercase,
        device=device,
        encoder=encoder,
    )
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))


def _train(
    recipe: UnsupervisedRecipe,
    data: Path,
    out: Path,
    set_up: "SetUp",
    *,
    init: Path | None = None,
    resume: bool,
    device: str,
    quiet: bool,
) -> None:
    """Train with a progress bar."""
    from bertfused.data import DataFolder
    from bertfused.fit import train_run

    with progress("steps", recipe.train.max_steps, quiet) as advance:
        train_run(
            recipe,
            DataFolder.open(data),
            out,
            lambda: (),
            init=init,
            resume=resume,
            device=device,
            set_up=set_up,
            on_update=lambda state, update: advance(1),
        )


def main() -> None:
    """Run the command."""
    run_app(app)
