"""The ``unsup`` command: translation learned from two monolingual texts."""

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertfused.commands import search_options
from bertfused.config import load_recipe
from bertfused.console import Quiet, log_to_stderr, make_app, progress, run_app
from bertfused.errors import UserError
from bertfused.options import (
    BatchTokens,
    Data,
    Device,
    Encoder,
    Out,
    RecipeFile,
    Run,
    Set,
    search_option,
)
from bertfused.progress import warn_of
from bertfused.text import open_output, read_lines
from unsup.config import UnsupervisedRecipe

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
    force: Annotated[
        bool,
        typer.Option("--force", help="Make --out anew, complete or made from something else."),
    ] = False,
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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the newest checkpoint in --out; start if there is none."
        ),
    ] = False,
    overrides: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Pretrain on both texts: an XLM, to start from or to fuse, or a model by MASS."""
    log_to_stderr(quiet)
    loaded = load_recipe(recipe, UnsupervisedRecipe, overrides or [])
    from bertfused.data import DataFolder
    from unsup.fit import set_up_mass
    from unsup.pretrain import pretrain as pretrain_run
    from unsup.pretrain import set_up

    with progress("steps", loaded.train.max_steps, quiet) as advance:
        pretrain_run(
            loaded,
            DataFolder.open(data),
            out,
            resume=resume,
            device=device,
            set_up=set_up_mass if loaded.pretrain.objective == "mass" else set_up,
            on_update=lambda state, update: advance(1),
        )


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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the newest checkpoint in --out; start if there is none."
        ),
    ] = False,
    overrides: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Train one model for both directions, plain or fused; by torchrun in several processes."""
    log_to_stderr(quiet)
    loaded = load_recipe(recipe, UnsupervisedRecipe, overrides or [])
    from bertfused.data import DataFolder
    from bertfused.fit import train_run
    from unsup.fit import set_up

    with progress("steps", loaded.train.max_steps, quiet) as advance:
        train_run(
            loaded,
            DataFolder.open(data),
            out,
            lambda: (),
            init=init,
            resume=resume,
            device=device,
            set_up=set_up,
            on_update=lambda state, update: advance(1),
        )


@app.command()
def translate(
    run: Run,
    to: Annotated[
        str | None,
        typer.Option("--to", help="Language to translate into; without it the recipe's target."),
    ] = None,
    input: Annotated[
        Path | None, typer.Option("--input", show_default="stdin", help="Text to translate.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", show_default="stdout", help="Its translations.")
    ] = None,
    beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
    length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
    max_length_a: Annotated[float | None, search_option("max_length_a")] = None,
    max_length_b: Annotated[int | None, search_option("max_length_b", min=0)] = None,
    batch_tokens: BatchTokens = 4096,
    device: Device = "auto",
    encoder: Encoder = None,
    quiet: Quiet = False,
) -> None:
    """Translate a text, a sentence a line, in either direction."""
    log_to_stderr(quiet)
    from bertfused.checkpoint import load_card, model_folder
    from bertfused.translate import Translator

    card = load_card(model_folder(run))
    search = search_options(
        card.search,
        beam_size=beam_size,
        length_penalty=length_penalty,
        max_length_a=max_length_a,
        max_length_b=max_length_b,
    )
    target = to or card.target
    others = [language for language in card.languages if language != target]
    if not card.languages or len(others) == len(card.languages):
        raise UserError(f"{run} translates {card.directions}, not into {target!r}")
    translator = Translator.load(run, direction=(others[0], target), device=device, encoder=encoder)
    lines = read_lines(input)
    with open_output(output) as sink, progress("lines", None, quiet) as advance:
        for translation in translator.translate(lines, search, batch_tokens=batch_tokens):
            sink.write_line(translation.text)
            advance(1)
    warn_of(translator.counts)


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


def main() -> None:
    """Run the command."""
    run_app(app)
