"""The ``backtranslation`` command: synthetic pairs from monolingual text, and the whole chain."""

import logging
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from backtranslation.config import (
    BacktranslationRecipe,
    ComputeType,
    EngineName,
    FilterConfig,
    MixConfig,
    NoiseConfig,
)
from bertfused.commands import search_options
from bertfused.config import Recipe, check_recipe, load_recipe
from bertfused.console import Quiet, log_to_stderr, make_app, progress, run_app
from bertfused.errors import UserError
from bertfused.options import (
    SEARCH_PANEL,
    BatchTokens,
    Device,
    Encoder,
    EncoderPrecision,
    LongLines,
    Lowercase,
    Out,
    RecipeFile,
    Run,
    Set,
    search_option,
)
from bertfused.progress import warn_of

_logger = logging.getLogger(__name__)

BOUNDS_PANEL = "Bounds"
NOISE_PANEL = "Noise on the words of what is written"

app = make_app(
    "backtranslation",
    "Back-translation: synthetic source sentences for monolingual text of the target language, in "
    "any number of shards; training on real and synthetic pairs, and the whole chain in one.",
)


def noise_option(key: str) -> Any:
    """Make the option of a noise setting, explained as its schema explains it."""
    return typer.Option(
        f"--noise-{key}",
        help=NoiseConfig.model_fields[key].description,
        rich_help_panel=NOISE_PANEL,
    )


def noise_config(drop: float, blank: float, swap: int, filler: str, seed: int) -> NoiseConfig:
    """Check the options of the noise."""
    values = {"drop": drop, "blank": blank, "swap": swap, "filler": filler, "seed": seed}
    return check_recipe(values, NoiseConfig, "noise options")


@app.command()
def generate(
    run: Run,
    mono: Annotated[
        Path,
        typer.Option("--mono", help="Text to translate, a sentence a line; .gz, .zst by suffix."),
    ],
    out: Out,
    shards: Annotated[
        int, typer.Option("--shards", min=1, help="Cut the text into so many ranges of lines.")
    ] = 1,
    shard: Annotated[
        int | None,
        typer.Option(
            "--shard",
            min=1,
            help="Translate only this one, counted from 1; whoever finishes the last one joins "
            "them. Without it, all of them in turn.",
        ),
    ] = None,
    ray: Annotated[
        int | None,
        typer.Option(
            "--ray",
            min=1,
            metavar="WORKERS",
            help="Hand the shards to so many workers of a Ray cluster, a processor each; all its "
            "machines see OUT.",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", help="Of the cluster, or auto; without it one starts on this machine."
        ),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            "--engine",
            help="auto: CTranslate2 where it is installed, the model is plain and the search is "
            "one that it can do; else our decoder.",
        ),
    ] = "auto",
    compute_type: Annotated[
        ComputeType,
        typer.Option("--compute-type", help="Of CTranslate2; int8 is faster, some lines change."),
    ] = "float32",
    beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
    length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
    sampling: Annotated[str | None, search_option("sampling")] = None,
    temperature: Annotated[float | None, search_option("temperature")] = None,
    seed: Annotated[int | None, search_option("seed", min=0)] = None,
    max_length_a: Annotated[float | None, search_option("max_length_a")] = None,
    max_length_b: Annotated[int | None, search_option("max_length_b", min=0)] = None,
    min_length: Annotated[int | None, search_option("min_length", min=0)] = None,
    no_repeat_ngram: Annotated[int | None, search_option("no_repeat_ngram", min=1)] = None,
    no_normalize: Annotated[
        bool,
        typer.Option(
            "--no-normalize",
            help="Score = log-probability, whatever the length.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = False,
    noise_drop: Annotated[float, noise_option("drop")] = 0.0,
    noise_blank: Annotated[float, noise_option("blank")] = 0.0,
    noise_swap: Annotated[int, noise_option("swap")] = 0,
    noise_filler: Annotated[str, noise_option("filler")] = "_",
    noise_seed: Annotated[int, noise_option("seed")] = 1,
    batch_tokens: BatchTokens = 4096,
    long: Annotated[
        LongLines,
        Lowercase,
        typer.Option(
            "--long",
            help="What to do with a line longer than model.max_positions: keep its beginning, "
            "translate it in pieces, or stop.",
        ),
    ] = "split",
    device: Device = "auto",
    encoder: Encoder = None,
    encoder_precision: EncoderPrecision = "fp32",
    quiet: Quiet = False,
) -> None:
    """Translate monolingual text with a RUN of the reverse direction, line for line.

    Writes OUT/synthetic.LANGUAGE and OUT/manifest.json. Called again after an interruption it goes
    on, and does nothing where all is done; what a line is translated as depends on neither.
    """
    log_to_stderr(quiet)
    if ray is not None and shard is not None:
        raise UserError("--ray translates all shards, --shard one of them: give one of the two")
    if ray is None and ray_address is not None:
        raise UserError("--ray-address needs --ray")
    from backtranslation.generate import Generation
    from backtranslation.generate import generate as generate_text
    from bertfused.checkpoint import load_card, model_folder

    search = search_options(
        load_card(model_folder(run)).search,
        beam_size=beam_size,
        length_penalty=length_penalty,
        sampling=sampling,
        temperature=temperature,
        seed=seed,
        max_length_a=max_length_a,
        max_length_b=max_length_b,
        min_length=min_length,
        no_repeat_ngram=no_repeat_ngram,
        normalize=False if no_normalize else None,
    )
    generation = Generation(
        run,
        mono,
        search,
        noise=noise_config(noise_drop, noise_blank, noise_swap, noise_filler, noise_seed),
        engine=engine,
        compute_type=compute_type,
        batch_tokens=batch_tokens,
        long=long,
        device=device,
        encoder=encoder,
        encoder_precision=encoder_precision,
    )
    folder = generation.folder(out, shards)
    with progress("lines", folder.lines_of(shard), quiet) as advance:
        if ray is None:
            manifest = generate_text(generation, folder, shard=shard, progress=advance)
        else:
            from backtranslation.cluster import generate_on_ray

            manifest = generate_on_ray(
                generation, folder, ray, address=ray_address, progress=advance
            )
    if manifest is None:
        _logger.info("shards to come: %s", folder.shards - folder.num_complete())
        return
    warn_of(manifest.counts)
    _logger.info("%s: %s lines", folder.text, f"{manifest.lines:,}")


def filter_option(key: str) -> Any:
    """Make the option of a bound, explained as its schema explains it."""
    return typer.Option(
        f"--{key.replace('_', '-')}",
        help=FilterConfig.model_fields[key].description,
        rich_help_panel=BOUNDS_PANEL,
    )


@app.command(name="filter")
def filter_(
    generated: Annotated[
        Path, typer.Argument(metavar="GENERATED", help="Folder that generate has finished.")
    ],
    mono: Annotated[Path, typer.Option("--mono", help="The text that it was made from.")],
    out: Out,
    min_words: Annotated[int, filter_option("min_words")] = 1,
    max_words: Annotated[int, filter_option("max_words")] = 250,
    max_ratio: Annotated[float, filter_option("max_ratio")] = 3.0,
    max_copied: Annotated[float, filter_option("max_copied")] = 0.8,
    max_repeats: Annotated[int, filter_option("max_repeats")] = 3,
    source_scripts: Annotated[list[str] | None, filter_option("source_scripts")] = None,
    target_scripts: Annotated[list[str] | None, filter_option("target_scripts")] = None,
    keep_duplicates: Annotated[
        bool,
        typer.Option(
            "--keep-duplicates",
            help=FilterConfig.model_fields["keep_duplicates"].description,
            rich_help_panel=BOUNDS_PANEL,
        ),
    ] = False,
    forward: Annotated[
        Path | None, typer.Option("--forward", help="RUN of the other direction, to score pairs.")
    ] = None,
    min_round_trip: Annotated[float | None, filter_option("min_round_trip")] = None,
    dictionaries: Annotated[
        Path | None,
        typer.Option(
            "--dictionaries",
            help="DATA or model folder of both languages, to report unknown tokens.",
        ),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the report: OUT/report.png.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Drop what is wrong with synthetic pairs at first sight; OUT/filtered.*, OUT/report.json."""
    log_to_stderr(quiet)
    from backtranslation.filters import filter_pairs, finished_report, made_from_files
    from backtranslation.plots import load_pyplot, plot_report
    from backtranslation.shards import read_generated
    from bertfused.subwords import load_tokenizer

    if (forward is None) != (min_round_trip is None):
        raise UserError("--forward and --min-round-trip are given together or not at all")
    bounds = {
        "min_words": min_words,
        "max_words": max_words,
        "max_ratio": max_ratio,
        "max_copied": max_copied,
        "max_repeats": max_repeats,
        "source_scripts": source_scripts,
        "target_scripts": target_scripts,
        "keep_duplicates": keep_duplicates,
        "min_round_trip": min_round_trip,
    }
    if plot:
        load_pyplot()  # before the work, not after it
    given = {key: value for key, value in bounds.items() if value is not None}
    config = check_recipe(given, FilterConfig, "filter options")
    synthetic = read_generated(generated, mono)
    score = weights = None
    if forward is not None:
        from bertfused.checkpoint import WEIGHTS, model_folder

        weights = model_folder(forward) / WEIGHTS
    made_from = made_from_files(synthetic.text, mono, weights)
    finished_report(out, config, made_from)  # of the same it is made anew, of other text refused
    if forward is not None:
        from backtranslation.round_trip import forward_scores

        score = forward_scores(forward, synthetic.languages, device)
    tokenizers = None
    if dictionaries is not None:
        tokenizers = {side: load_tokenizer(dictionaries, side) for side in synthetic.languages}
    with progress("pairs", synthetic.lines, quiet) as advance:
        report = filter_pairs(
            synthetic.text,
            mono,
            out,
            config,
            synthetic.languages,
            score=score,
            made_from=made_from,
            tokenizers=tokenizers,
            progress=advance,
        )
    typer.echo(report)
    _logger.info("%s pairs in %s", f"{report.kept:,}", out)
    if plot:
        plot_report(report, out / "report.png")


@app.command()
def mix(
    recipe: RecipeFile,
    synthetic: Annotated[
        list[Path],
        typer.Option("--synthetic", help="Folder that filter has finished; repeatable."),
    ],
    out: Out,
    upsample: Annotated[
        float,
        typer.Option("--upsample", help=MixConfig.model_fields["upsample"].description),
    ] = 1.0,
    tag: Annotated[
        str,
        typer.Option("--tag", help=MixConfig.model_fields["tag"].description),
    ] = "<BT>",
    noise_drop: Annotated[float, noise_option("drop")] = 0.0,
    noise_blank: Annotated[float, noise_option("blank")] = 0.0,
    noise_swap: Annotated[int, noise_option("swap")] = 0,
    noise_filler: Annotated[str, noise_option("filler")] = "_",
    noise_seed: Annotated[int, noise_option("seed")] = 1,
    overrides: Set = None,
    quiet: Quiet = False,
) -> None:
    """Write OUT/mixed.toml, the recipe with synthetic corpora beside its own.

    `bertfused prepare` and `train` take it as any other.
    """
    log_to_stderr(quiet)
    from backtranslation.mix import mix as write_mix

    noise = noise_config(noise_drop, noise_blank, noise_swap, noise_filler, noise_seed)
    config = check_recipe({"upsample": upsample, "tag": tag}, MixConfig, "mix options")
    loaded = load_recipe(recipe, Recipe, overrides or [])
    path = write_mix(
        loaded, synthetic, out, upsample=config.upsample, tag=config.tag or None, noise=noise
    )
    _logger.info("%s", path)


@app.command()
def train(
    recipe: RecipeFile,
    out: Out,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the chain in --out; start if there is none."),
    ] = False,
    overrides: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Run the whole chain of a recipe: baseline, reverse model, back-translation, fused model.

    Stages that are done are not done again; what is in OUT can be used by the other commands.
    """
    log_to_stderr(quiet)
    from backtranslation.chain import train_chain

    loaded = load_recipe(recipe, BacktranslationRecipe, overrides or [])
    train_chain(
        loaded,
        out,
        resume=resume,
        device=device,
        bar=partial(progress, quiet=quiet),
    )


@app.command()
def evaluate(
    chain: Annotated[Path, typer.Argument(metavar="CHAIN", help="Folder that train has written.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the scores and signatures as JSON.")
    ] = False,
    lowercase: Lowercase = False,
    batch_tokens: BatchTokens = 4096,
    device: Device = "auto",
    encoder: Encoder = None,
    quiet: Quiet = False,
) -> None:
    """Score the models of a chain on its test sets, each tested against the one before it.

    Models that are not trained yet are left out.
    """
    log_to_stderr(quiet)
    from backtranslation.evaluate import evaluate_chain

    report = evaluate_chain(
        chain,
        lowercase=lowercase,
        device=device,
        encoder=encoder,
        batch_tokens=batch_tokens,
        bar=partial(progress, quiet=quiet),
    )
    typer.echo(report.model_dump_json(indent=2) if as_json else report)


def main() -> None:
    """Run the command."""
    run_app(app)
