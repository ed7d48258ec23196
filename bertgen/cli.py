"""The ``bertgen`` command: translation and captions from one BERT."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertfused.commands import search_options
from bertfused.config import load_recipe
from bertfused.console import Quiet, log_to_stderr, make_app, progress, run_app
from bertfused.errors import UserError
from bertfused.options import (
    BatchTokens,
    Data,
    Device,
    Force,
    Lowercase,
    Out,
    RecipeFile,
    Resume,
    Run,
    Set,
    search_option,
)
from bertfused.progress import warn_of
from bertfused.text import open_output, read_lines
from bertgen.config import GenRecipe, GenSearchConfig

if TYPE_CHECKING:
    from bertgen.generate import Generator, Input
    from bertgen.images import ImageFeatures

_logger = logging.getLogger(__name__)

app = make_app(
    "bertgen",
    "Translation, multimodal translation and captioning from one multilingual BERT.",
)

Into = Annotated[str, typer.Option("--to", help="Language to write.")]
ImageFiles = Annotated[
    list[Path] | None,
    typer.Option("--images", help="Features of images, .npz or .jsonl; repeatable."),
]
Cache = Annotated[
    bool | None,
    typer.Option(
        "--cache/--no-cache",
        help="Keep keys and values of past steps; only where model.attention is 'prefix', and by "
        "default there.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", show_default="stdout", help="What is written.")
]


@app.command()
def prepare(
    recipe: RecipeFile,
    out: Out,
    force: Force = False,
    overrides: Set = None,
    quiet: Quiet = False,
) -> None:
    """Turn text and features of images into a DATA folder, and report every line."""
    log_to_stderr(quiet)
    loaded = load_recipe(recipe, GenRecipe, overrides or [])
    from bertgen.prepare import prepare as prepare_data

    with progress("lines", None, quiet) as advance:
        report = prepare_data(loaded, out, force=force, progress=lambda what, n: advance(n))
    _logger.info("%s", report)


@app.command()
def train(
    recipe: RecipeFile,
    data: Data,
    out: Out,
    init: Annotated[
        Path | None,
        typer.Option("--init", help="RUN to take weights from, in place of model.encoder's."),
    ] = None,
    resume: Resume = False,
    overrides: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Train one model on all tasks; started by torchrun, in several processes."""
    log_to_stderr(quiet)
    loaded = load_recipe(recipe, GenRecipe, overrides or [])
    from bertfused.fit import train_run
    from bertgen.data import GenData
    from bertgen.fit import set_up

    with progress("steps", loaded.train.max_steps, quiet) as advance:
        train_run(
            loaded,
            GenData.open(data),
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
    to: Into,
    input: Annotated[
        Path | None, typer.Option("--input", show_default="stdin", help="Text to translate.")
    ] = None,
    images: ImageFiles = None,
    output: Output = None,
    beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
    length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
    max_length_b: Annotated[int | None, search_option("max_length_b", min=0)] = None,
    no_repeat_ngram: Annotated[int | None, search_option("no_repeat_ngram", min=1)] = None,
    sampling: Annotated[str | None, search_option("sampling")] = None,
    seed: Annotated[int | None, search_option("seed", min=0)] = None,
    cache: Cache = None,
    batch_tokens: BatchTokens = 4096,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Translate lines, with the images beside them if there are any."""
    log_to_stderr(quiet)
    from bertgen.generate import Generator, Input

    generator = Generator.load(run, device=device, cache=cache)
    search = search_options(
        generator.card.search,
        beam_size=beam_size,
        length_penalty=length_penalty,
        max_length_b=max_length_b,
        no_repeat_ngram=no_repeat_ngram,
        sampling=sampling,
        seed=seed,
    )
    by_row = {image.row: image for image in _read(images or [])}

    def inputs() -> Iterator[Input]:
        count = 0
        for count, line in enumerate(read_lines(input), start=1):
            (ids,) = generator.tokenizer.split([line])
            yield Input(ids, by_row.pop(count - 1, None) if ids else None)
        if by_row and max(by_row) >= count:
            raise UserError(f"there is an image of row {max(by_row)}, but {count:,} lines of text")

    _write(generator, inputs(), to, search, output, batch_tokens, quiet)


@app.command()
def caption(
    run: Run,
    to: Into,
    images: Annotated[
        list[Path],
        typer.Option("--images", help="Features of images, .npz or .jsonl; repeatable."),
    ],
    output: Output = None,
    beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
    length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
    no_repeat_ngram: Annotated[int | None, search_option("no_repeat_ngram", min=1)] = None,
    sampling: Annotated[str | None, search_option("sampling")] = None,
    seed: Annotated[int | None, search_option("seed", min=0)] = None,
    cache: Cache = None,
    batch_tokens: BatchTokens = 4096,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Describe images, a line for each, in the order of the files."""
    log_to_stderr(quiet)
    from bertgen.generate import Generator, Input

    generator = Generator.load(run, device=device, cache=cache)
    search = search_options(
        generator.card.search,
        beam_size=beam_size,
        length_penalty=length_penalty,
        no_repeat_ngram=no_repeat_ngram,
        sampling=sampling,
        seed=seed,
    )
    inputs = (Input((), image) for image in _read(images))
    _write(generator, inputs, to, search, output, batch_tokens, quiet)


@app.command()
def evaluate(
    run: Run,
    data: Data,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Name of a task; repeatable; default: all.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="dev or a test set; default: all of them.")
    ] = None,
    images: Annotated[
        Literal["congruent", "shuffled", "none"],
        typer.Option("--images", help="The right images, those of other lines, or none."),
    ] = "congruent",
    hide: Annotated[
        Path | None,
        typer.Option("--hide", help="File of words of the source that the model does not see."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder for what is written: TASK.SPLIT.")
    ] = None,
    lowercase: Lowercase = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Write and score dev and test sets, with the right images, wrong ones or none."""
    log_to_stderr(quiet)
    from bertgen.data import GenData
    from bertgen.evaluate import evaluate as evaluate_run
    from bertgen.generate import Generator

    words = (
        frozenset() if hide is None else frozenset(own.strip().lower() for own in read_lines(hide))
    )
    generator = Generator.load(run, device=device)
    report = evaluate_run(
        generator,
        GenData.open(data),
        tasks=task or (),
        split=split,
        shown=images,
        masked=words,
        search=search_options(generator.card.search, beam_size=beam_size),
        output=output,
        lowercase=lowercase,
    )
    typer.echo(report.model_dump_json(indent=2) if as_json else str(report))


@app.command("import")
def import_official(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="State dict of BERTGEN.")],
    vocab: Annotated[Path, typer.Option("--vocab", help="vocab.txt of its multilingual BERT.")],
    out: Out,
    heads: Annotated[
        int | None, typer.Option("--heads", min=1, help="Attention heads; default: one in 64 wide.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Read a checkpoint of the official code."""
    log_to_stderr(quiet)
    from bertgen.official import import_checkpoint

    import_checkpoint(checkpoint, vocab, out, heads)


def _read(files: list[Path]) -> "Iterator[ImageFeatures]":
    from bertgen.images import read_images

    for path in files:
        yield from read_images(path)


def _write(
    generator: "Generator",
    inputs: "Iterator[Input]",
    to: str,
    search: "GenSearchConfig",
    output: Path | None,
    batch_tokens: int,
    quiet: bool,
) -> None:
    """Write a line for each input, with a progress bar."""
    with progress("lines", None, quiet) as advance, open_output(output) as writer:
        for line in generator.write(inputs, to, search, batch_tokens=batch_tokens):
            writer.write_line(line)
            advance(1)
    warn_of(generator.counts)


def main() -> None:
    """Run the command."""
    run_app(app)
