"""The ``bertfused`` command: sentence-level translation, and what all modes need besides."""

import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertfused.commands import (
    Mode,
    add_commands,
    load_translator,
    score_sentences,
    sentence_lines,
    set_up_sentences,
)
from bertfused.config import CacheDtype, Recipe
from bertfused.console import Quiet, log_to_stderr, make_app, progress, run_app
from bertfused.errors import UserError
from bertfused.options import (
    Device,
    Encoder,
    Lowercase,
    Out,
    Run,
)
from bertfused.text import read_lines

if TYPE_CHECKING:
    from bertfused.data import Split
    from bertfused.translate import SourceLine

_logger = logging.getLogger(__name__)

app = make_app(
    "bertfused",
    "Translation with a frozen pretrained encoder in every layer: prepare text, train a plain NMT, "
    "train the fused model from it, translate, evaluate.",
)


def _dev_lines(split: "Split", documents: Mapping[str, Any] | None) -> Iterator["SourceLine"]:
    if documents is not None:
        raise UserError("this data was prepared from documents; use the docnmt command")
    from bertfused.translate import SourceLine

    return (SourceLine(line) for line in read_lines(split.source_text))


def _corpora(recipe: Recipe) -> Any:
    from bertfused.prepare import read_corpus

    return read_corpus


add_commands(
    app,
    Mode(
        recipe=Recipe,
        corpora=_corpora,
        documents=lambda recipe: None,
        source_lines=sentence_lines,
        targets=lambda source, target, documents: read_lines(target),
        dev_lines=_dev_lines,
        load=load_translator,
        score=score_sentences,
        set_up=set_up_sentences,
    ),
)


@app.command()
def compare(
    systems: Annotated[
        list[Path],
        typer.Argument(metavar="HYP...", help="Translations, line by line; the baseline first."),
    ],
    reference: Annotated[
        Path, typer.Option("--reference", help="Human translations, detokenised, line by line.")
    ],
    lowercase: Lowercase = False,
    resamples: Annotated[
        int,
        typer.Option("--resamples", min=2, help="Bootstrap samples; no p is under 1 / (this + 1)."),
    ] = 1000,
    quiet: Quiet = False,
) -> None:
    """Compare translations: BLEU, chrF, and a paired bootstrap test against the first."""
    log_to_stderr(quiet)
    from bertfused import metrics

    references = list(read_lines(reference))
    hypotheses = {str(path): list(read_lines(path)) for path in systems}
    for name, lines in hypotheses.items():
        for warning in metrics.check_texts(
            lines, references, hypothesis_name=name, reference_name=str(reference)
        ):
            _logger.warning("%s", warning)
    found = metrics.paired_bootstrap(
        references, hypotheses, lowercase=lowercase, resamples=resamples
    )
    typer.echo(metrics.format_comparison(found))


@app.command()
def average(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder with checkpoints.")],
    out: Out,
    last: Annotated[
        int | None,
        typer.Option(
            "--last", min=1, help="This many of the newest; train.keep_last must be as many."
        ),
    ] = None,
    best: Annotated[
        int | None,
        typer.Option("--best", min=1, help="This many of the best on dev; see train.keep_best."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Average the weights of checkpoints into a new RUN."""
    log_to_stderr(quiet)
    from bertfused.run import average as average_checkpoints

    if (last is None) == (best is None):
        raise UserError("give one of --last N and --best N")
    steps = average_checkpoints(run, last=last, best=best, out=out)
    _logger.info("averaged the checkpoints of steps %s", ", ".join(map(str, steps)))


@app.command("cache-features")
def cache_features(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="DATA folder, prepared from a recipe with fusion."),
    ],
    encoder: Annotated[str, typer.Option("--encoder", help="As fusion.encoder of the recipe.")],
    layer: Annotated[
        str, typer.Option("--layer", help="As fusion.layer: a number, average or stochastic.")
    ] = "-1",
    last_layers: Annotated[
        int, typer.Option("--last-layers", min=1, help="As fusion.last_layers.")
    ] = 4,
    dtype: Annotated[
        CacheDtype,
        typer.Option("--dtype", help="Of the file: 2 or 4 bytes times encoder width a wordpiece."),
    ] = "fp16",
    no_segments: Annotated[
        bool, typer.Option("--no-segments", help="As fusion.segments = false.")
    ] = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Compute the frozen encoder's states of training and dev data once, for all epochs."""
    log_to_stderr(quiet)
    from bertfused.checkpoint import open_encoder
    from bertfused.config import FusionConfig, check_recipe
    from bertfused.data import DataFolder
    from bertfused.features import cache_features as cache
    from bertfused.translate import choose_device

    folder = DataFolder.open(data)
    values: dict[str, Any] = {
        "encoder": encoder,
        "layer": int(layer) if re.fullmatch(r"-?\d+", layer) else layer,
        "last_layers": last_layers,
        "segments": not no_segments,
    }
    made_with = folder.report.encoder if folder.report is not None else None
    if made_with is not None and made_with.max_wordpieces is not None:
        values["max_wordpieces"] = made_with.max_wordpieces
    fusion = check_recipe(values, FusionConfig, "options")
    loaded = open_encoder(fusion, languages=folder.languages[:1]).to(choose_device(device))
    cache(folder, loaded, dtype, partial(progress, quiet=quiet))


@app.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="RUN|DATA", help="Run or DATA folder.")],
) -> None:
    """Say what a run, a model or a DATA folder holds."""
    from bertfused.data import DataFolder

    if (path / "data.toml").exists():
        typer.echo(str(DataFolder.open(path).report))
        return
    from bertfused.checkpoint import WEIGHTS, load_card, model_folder, read_tensors

    folder = model_folder(path)
    card = load_card(folder)
    size = sum(tensor.numel() for tensor in read_tensors(folder / WEIGHTS).values())
    typer.echo(f"{card.source}-{card.target}, {size:,} parameters")
    typer.echo(card.model_dump_json(indent=1, exclude={"text_files"}))


import_app = typer.Typer(help="Read other people's checkpoints.", no_args_is_help=True)
import_app.callback()(lambda: None)  # or a single subcommand would take the place of the group
export_app = typer.Typer(help="Write models for other people's programs.", no_args_is_help=True)
app.add_typer(import_app, name="import")
app.add_typer(export_app, name="export")


@import_app.command("fairseq")
def import_fairseq(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="fairseq checkpoint.")],
    source_dict: Annotated[
        Path, typer.Option("--source-dict", help="Its dict.LANGUAGE.txt of the source.")
    ],
    target_dict: Annotated[
        Path, typer.Option("--target-dict", help="Of the target; for a joined one its twin.")
    ],
    out: Out,
    encoder: Encoder = None,
    codes: Annotated[
        Path | None,
        typer.Option(
            "--codes", help="Its subword-nmt codes; without them, give text that is split already."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Import a Transformer of fairseq 0.7 to 0.12 or of the official BERT-fused code."""
    log_to_stderr(quiet)
    from bertfused.interop.fairseq import import_fairseq as read

    read(checkpoint, source_dict, target_dict, out, encoder=encoder, codes=codes)


@export_app.command("fairseq")
def export_fairseq(run: Run, out: Out, quiet: Quiet = False) -> None:
    """Write a plain model as a checkpoint for fairseq-generate."""
    log_to_stderr(quiet)
    from bertfused.interop.fairseq import export_fairseq as write

    write(run, out)


@export_app.command("ctranslate2")
def export_ctranslate2(run: Run, out: Out, quiet: Quiet = False) -> None:
    """Write a plain model for CTranslate2."""
    log_to_stderr(quiet)
    from bertfused.interop.ctranslate2 import export_ctranslate2 as write

    write(run, out)


def main() -> None:
    """Run the command."""
    run_app(app)
