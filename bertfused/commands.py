"""The verbs that every mode has: prepare, train, translate, score and evaluate.

A mode says how its text is read (``Mode``); the commands and their options are the same.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from bertfused.config import AnyRecipe, Corpus, Recipe, SearchConfig, load_recipe
from bertfused.console import Quiet, log_to_stderr, progress
from bertfused.errors import UserError
from bertfused.options import (
    SEARCH_PANEL,
    BatchTokens,
    ByPronouns,
    Data,
    Device,
    Encoder,
    EncoderPrecision,
    Force,
    LongLines,
    Lowercase,
    Out,
    RecipeFile,
    Resume,
    Run,
    Set,
    Source,
    To,
    search_option,
)
from bertfused.progress import warn_of
from bertfused.text import SentenceTest, count_lines, open_output, read_lines

if TYPE_CHECKING:
    import torch

    from bertfused.data import DataFolder, Split
    from bertfused.fit import SetUp, Setup
    from bertfused.prepare import ParallelLine
    from bertfused.scoring import PairScore
    from bertfused.translate import LineTranslator, SourceLine, Translation, Translator

_logger = logging.getLogger(__name__)


SearchT = TypeVar("SearchT", bound=SearchConfig)
SourceLines = Callable[[Path | None, Mapping[str, Any] | None], Iterator["SourceLine | str"]]


@dataclass(frozen=True)
class Mode:
    """How a mode reads text.

    Attributes:
        recipe: Schema of its recipes.
        corpora: Gives the reader of the corpora of a recipe.
        documents: What a DATA folder and a model must remember of the documents of a recipe.
        source_lines: Reads a file (or standard input) to translate; a ``str`` is a line that is
            no sentence, and stands in the output as it is. Takes what ``documents`` gave.
        targets: Reads the target side of a source file, line for line. Takes the same.
        dev_lines: The source lines of a split, with their contexts. Takes the same.
        load: Loads a RUN of the mode, with the options of ``Translator.load``.
        score: Scores pairs, as ``scoring.score_pairs`` does, with what ``load`` gave.
        set_up: Builds what a recipe trains; see ``fit.set_up``.
    """

    recipe: type[Recipe]
    corpora: Callable[[Recipe], Callable[[Corpus], Iterable["ParallelLine"]]]
    documents: Callable[[Recipe], Mapping[str, Any] | None]
    source_lines: SourceLines
    targets: Callable[[Path, Path, Mapping[str, Any] | None], Iterator[str]]
    dev_lines: Callable[["Split", Mapping[str, Any] | None], Iterator["SourceLine"]]
    load: Callable[..., "LineTranslator"]
    score: Callable[..., Iterator["PairScore"]]
    set_up: "SetUp"


def sentence_lines(
    path: Path | None, documents: Mapping[str, Any] | None
) -> Iterator["SourceLine | str"]:
    """Read the lines of a file, each a sentence by itself."""
    if documents is not None:
        raise UserError("this model reads documents; use the docnmt command")
    from bertfused.translate import SourceLine

    return (SourceLine(line) for line in read_lines(path))


def load_translator(run: Path, **options: Any) -> "LineTranslator":
    """Load a sentence-level RUN; options as of ``Translator.load``."""
    from bertfused.translate import Translator

    return Translator.load(run, **options)


def score_sentences(
    translator: "Translator", pairs: Iterable[tuple["SourceLine", str]], **options: Any
) -> Iterator["PairScore"]:
    """Score pairs with a sentence-level RUN; options as of ``scoring.score_pairs``."""
    from bertfused.scoring import score_pairs

    return score_pairs(translator, pairs, **options)


def set_up_sentences(
    recipe: AnyRecipe, data: "DataFolder", init: Path | None, device: "torch.device"
) -> "Setup":
    """Set up the training of a sentence-level RUN."""
    from bertfused.fit import set_up

    return set_up(recipe, data, init, device)


def add_commands(app: typer.Typer, mode: Mode) -> None:
    """Add the verbs to the command of a mode."""

    @app.command()
    def prepare(
        recipe: RecipeFile,
        out: Out,
        force: Force = False,
        overrides: Set = None,
        quiet: Quiet = False,
    ) -> None:
        """Turn text into a DATA folder: subwords, ids, and a report of every record."""
        log_to_stderr(quiet)
        from bertfused.prepare import prepare as prepare_data

        loaded = load_recipe(recipe, mode.recipe, overrides or [])
        with progress("pairs", None, quiet) as advance:
            report = prepare_data(
                loaded,
                out,
                reader=mode.corpora(loaded),
                documents=mode.documents(loaded),
                force=force,
                progress=lambda split, pairs: advance(pairs),
            )
        _logger.info("%s", report)

    @app.command()
    def train(
        recipe: RecipeFile,
        data: Data,
        out: Out,
        init: Annotated[
            Path | None,
            typer.Option("--init", help="RUN to take weights from, e.g. the plain NMT to fuse."),
        ] = None,
        resume: Resume = False,
        overrides: Set = None,
        device: Device = "auto",
        quiet: Quiet = False,
    ) -> None:
        """Train a model, plain or fused; started by torchrun, in several processes."""
        log_to_stderr(quiet)
        loaded = load_recipe(recipe, mode.recipe, overrides or [])
        train_model(mode, loaded, data, out, init=init, resume=resume, device=device, quiet=quiet)

    add_translate(app, mode.load, mode.source_lines)

    @app.command()
    def score(
        run: Run,
        source: Source,
        target: Annotated[
            Path, typer.Option("--target", help="Its translations, line i of line i of the source.")
        ],
        to: To = None,
        output: Annotated[
            Path | None, typer.Option("--output", show_default="stdout", help="The scores.")
        ] = None,
        batch_tokens: BatchTokens = 4096,
        device: Device = "auto",
        encoder: Encoder = None,
        encoder_precision: EncoderPrecision = "fp32",
        quiet: Quiet = False,
    ) -> None:
        """Print "sum of natural log-probabilities <tab> tokens" for every pair, EOS included."""
        log_to_stderr(quiet)
        from bertfused.scoring import PairScore

        _check_direction(run, to)
        translator = mode.load(
            run, to=to, device=device, encoder=encoder, encoder_precision=encoder_precision
        )
        documents = translator.documents
        pairs, structure = tee(read_pairs_of(mode, source, target, documents))
        sentences = ((s, t) for s, t in pairs if not isinstance(s, str))
        scores = mode.score(translator, sentences, batch_tokens=batch_tokens)
        total = lines_to_come(source)
        with progress("pairs", total, quiet) as advance, open_output(output) as writer:
            for line, _ in structure:
                score = PairScore(0.0, 0) if isinstance(line, str) else next(scores)
                writer.write_line(f"{score.log_prob:.6f}\t{score.tokens}")
                advance(1)
        warn_of(translator.counts)

    @app.command()
    def evaluate(
        run: Run,
        source: Source,
        reference: Annotated[
            Path, typer.Option("--reference", help="Human translations, detokenised, line by line.")
        ],
        to: To = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the scores and signatures as one JSON object.")
        ] = False,
        output: Annotated[
            Path | None, typer.Option("--output", help="File to write the translations to as well.")
        ] = None,
        beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
        length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
        max_length_a: Annotated[float | None, search_option("max_length_a")] = None,
        max_length_b: Annotated[int | None, search_option("max_length_b", min=0)] = None,
        lowercase: Lowercase = False,
        shuffle_encoder: Annotated[
            bool,
            typer.Option(
                "--shuffle-encoder",
                help="Also print how many nats a reference token costs more with another "
                "sentence's encoder states: 0 means that the encoder is not used.",
            ),
        ] = False,
        by_pronouns: ByPronouns = None,
        batch_tokens: BatchTokens = 4096,
        device: Device = "auto",
        encoder: Encoder = None,
        encoder_precision: EncoderPrecision = "fp32",
        quiet: Quiet = False,
    ) -> None:
        """Translate a test set and print BLEU and chrF with signatures; d-BLEU for documents."""
        log_to_stderr(quiet)
        from bertfused.evaluation import bleu_by_pronouns, evaluation, readable

        has_pronoun = None if by_pronouns is None else pronoun_finder(by_pronouns)
        _check_direction(run, to)
        translator = mode.load(
            run, to=to, device=device, encoder=encoder, encoder_precision=encoder_precision
        )
        search = search_options(
            translator.search,
            beam_size=beam_size,
            length_penalty=length_penalty,
            max_length_a=max_length_a,
            max_length_b=max_length_b,
        )
        documents = translator.documents
        pairs = list(read_pairs_of(mode, source, reference, documents))
        # Opened first, so that hours of translating are not lost to a name that cannot be written.
        with nullcontext() if output is None else open_output(output) as writer:
            with progress("lines", len(pairs), quiet) as advance:
                translations = []
                lines = (line for line, _ in pairs)
                for translation in translate_lines(
                    translator, lines, search, batch_tokens=batch_tokens
                ):
                    translations.append(translation)
                    advance(1)
            results = evaluation(translations, pairs, lowercase=lowercase)
            if has_pronoun is not None:
                results |= bleu_by_pronouns(translations, pairs, has_pronoun, lowercase=lowercase)
            if shuffle_encoder:
                results |= encoder_use(mode, translator, source, reference, batch_tokens)
            typer.echo(json.dumps(results) if as_json else "\n".join(readable(results)))
            if writer is not None:
                for translation in translations:
                    writer.write_line(
                        translation if isinstance(translation, str) else translation.text
                    )
        warn_of(translator.counts)


def add_translate(
    app: typer.Typer, load: Callable[..., "LineTranslator"], source_lines: SourceLines
) -> None:
    """Add the verb ``translate``; the rest as of ``Mode``."""

    @app.command()
    def translate(
        run: Run,
        to: To = None,
        input: Annotated[
            Path | None,
            typer.Option("--input", show_default="stdin", help="Text to translate."),
        ] = None,
        output: Annotated[
            Path | None,
            typer.Option("--output", show_default="stdout", help="Its translations."),
        ] = None,
        beam_size: Annotated[int | None, search_option("beam_size", min=1)] = None,
        length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
        nbest: Annotated[
            int,
            typer.Option(
                "--nbest", min=1, help="Translations of each line, best first, on as many lines."
            ),
        ] = 1,
        sampling: Annotated[str | None, search_option("sampling")] = None,
        temperature: Annotated[float | None, search_option("temperature")] = None,
        seed: Annotated[int | None, search_option("seed", min=0)] = None,
        batch_tokens: BatchTokens = 4096,
        format: Annotated[
            Literal["plain", "jsonl", "fairseq"],
            typer.Option(
                "--format", help="Of the output; jsonl and fairseq have scores and tokens."
            ),
        ] = "plain",
        long: Annotated[
            LongLines,
            typer.Option(
                "--long",
                help="What to do with a line longer than model.max_positions: keep its beginning, "
                "translate it in pieces, or stop.",
            ),
        ] = "split",
        device: Device = "auto",
        max_length_a: Annotated[float | None, search_option("max_length_a")] = None,
        max_length_b: Annotated[int | None, search_option("max_length_b", min=0)] = None,
        min_length: Annotated[int | None, search_option("min_length", min=0)] = None,
        no_repeat_ngram: Annotated[int | None, search_option("no_repeat_ngram", min=1)] = None,
        prefix: Annotated[
            Path | None,
            typer.Option(
                "--prefix",
                help="File with the beginning each translation must have, line by line; a blank "
                "line forces nothing.",
            ),
        ] = None,
        diverse_groups: Annotated[int | None, search_option("diverse_groups", min=1)] = None,
        diverse_strength: Annotated[float | None, search_option("diverse_strength")] = None,
        unk_penalty: Annotated[float | None, search_option("unk_penalty")] = None,
        no_normalize: Annotated[
            bool,
            typer.Option(
                "--no-normalize",
                help="Score = log-probability, whatever the length.",
                rich_help_panel=SEARCH_PANEL,
            ),
        ] = False,
        ensemble: Annotated[
            list[Path] | None,
            typer.Option(
                "--ensemble", help="One more RUN, whose probabilities are averaged in; repeatable."
            ),
        ] = None,
        encoder: Encoder = None,
        encoder_precision: EncoderPrecision = "fp32",
        quiet: Quiet = False,
    ) -> None:
        """Translate lines, one output line for each input line."""
        log_to_stderr(quiet)
        _check_direction(run, to)
        translator = load(
            run,
            ensemble=ensemble or (),
            to=to,
            device=device,
            encoder=encoder,
            encoder_precision=encoder_precision,
        )
        search = search_options(
            translator.search,
            beam_size=beam_size,
            length_penalty=length_penalty,
            sampling=sampling,
            temperature=temperature,
            seed=seed,
            max_length_a=max_length_a,
            max_length_b=max_length_b,
            min_length=min_length,
            no_repeat_ngram=no_repeat_ngram,
            diverse_groups=diverse_groups,
            diverse_strength=diverse_strength,
            unk_penalty=unk_penalty,
            normalize=False if no_normalize else None,
        )
        if nbest > 1 and not search.sampling and nbest > search.beam_size:
            raise UserError(f"--nbest {nbest} needs a --beam-size of {nbest} or more")
        lines = source_lines(input, translator.documents)
        if prefix is not None:
            lines = with_prefixes(lines, prefix)
        total = lines_to_come(input)
        with progress("lines", total, quiet) as advance, open_output(output) as writer:
            for number, translation in enumerate(
                translate_lines(
                    translator,
                    lines,
                    search,
                    nbest=nbest,
                    batch_tokens=batch_tokens,
                    long=long,
                )
            ):
                for line in format_translation(translation, number, format):
                    writer.write_line(line)
                advance(1)
        warn_of(translator.counts)


def _check_direction(run: Path, to: str | None) -> None:
    """Refuse to guess which of its directions a model is to translate in."""
    from bertfused.checkpoint import load_card, model_folder

    card = load_card(model_folder(run))
    if to is None and card.languages:
        choices = " or ".join(f"--to {language}" for language in card.languages)
        raise UserError(f"{run} translates {card.directions}; give {choices}")


def train_model(
    mode: Mode,
    recipe: Recipe,
    data: Path,
    out: Path,
    *,
    init: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> None:
    """Train with a progress bar."""
    from bertfused.data import DataFolder
    from bertfused.fit import train_run

    folder = DataFolder.open(data)
    documents = folder.report.documents if folder.report is not None else None
    check_documents(mode, recipe, data, documents)
    with progress("steps", recipe.train.max_steps, quiet) as advance:
        train_run(
            recipe,
            folder,
            out,
            lambda: mode.dev_lines(folder.split("dev"), documents),
            init=init,
            resume=resume,
            device=device,
            set_up=mode.set_up,
            on_update=lambda state, update: advance(1),
        )


def check_documents(
    mode: Mode, recipe: Recipe, data: Path, prepared: Mapping[str, Any] | None
) -> None:
    """Refuse data whose contexts are not those of the recipe.

    Raises:
        UserError: Naming what differs.
    """
    wanted = mode.documents(recipe)
    if wanted is None and prepared is not None:
        raise UserError(f"{data} was prepared from documents; use the docnmt command")
    if wanted is not None and prepared is None:
        raise UserError(f"{data} was prepared sentence by sentence; prepare it with docnmt")
    if wanted is None or prepared is None or recipe.fusion is None:
        return
    for key in sorted({*wanted, *prepared}):
        if wanted.get(key) != prepared.get(key):
            raise UserError(
                f"{data} was prepared with documents.{key} = {prepared.get(key)!r}, but the "
                f"recipe has {wanted.get(key)!r}"
            )


def lines_to_come(path: Path | None) -> int | None:
    """Count the lines of a file for a progress bar; what flows through a pipe is not there yet."""
    return count_lines(path) if path is not None and path.is_file() else None


def search_options(search: SearchT, **options: Any) -> SearchT:
    """Replace the settings that were given.

    Raises:
        UserError: If a value is out of range, or two exclude each other.
    """
    from bertfused.config import check_recipe

    given = {key: value for key, value in options.items() if value is not None}
    return check_recipe(search.model_dump() | given, type(search), "search options")


def with_prefixes(
    lines: Iterable["SourceLine | str"], prefixes: Path
) -> Iterator["SourceLine | str"]:
    """Give each line the beginning that its translation must have; a blank one forces nothing."""
    from dataclasses import replace

    forced = read_lines(prefixes)
    for number, line in enumerate(lines, start=1):
        if (prefix := next(forced, None)) is None:
            raise UserError(f"{prefixes} has {number - 1:,} lines, fewer than the input")
        yield line if isinstance(line, str) else replace(line, prefix=prefix.strip() or None)
    if next(forced, None) is not None:
        raise UserError(f"{prefixes} has more lines than the input")


def translate_lines(
    translator: "LineTranslator",
    lines: Iterable["SourceLine | str"],
    search: SearchConfig,
    **options: Any,
) -> Iterator["Translation | str"]:
    """Translate the sentences among lines; the others come back as they are, in their places."""
    sentences, structure = tee(lines)
    translations = translator.translate(
        (line for line in sentences if not isinstance(line, str)), search, **options
    )
    for line in structure:
        yield line if isinstance(line, str) else next(translations)


def format_translation(translation: "Translation | str", number: int, format: str) -> list[str]:
    """Return the output lines of one input line.

    "fairseq" is what its generate command prints, scores in base 2 included.
    """
    import math

    if isinstance(translation, str):
        return [json.dumps({"separator": translation}) if format == "jsonl" else translation]
    if format == "plain":
        return [hypothesis.text for hypothesis in translation.hypotheses]
    if format == "jsonl":
        hypotheses = [
            {
                "text": hypothesis.text,
                "score": hypothesis.score,
                "log_prob": hypothesis.log_prob,
                "tokens": hypothesis.tokens,
                "token_log_probs": hypothesis.token_log_probs,
            }
            for hypothesis in translation.hypotheses
        ]
        record = {"source": translation.source, "hypotheses": hypotheses}
        return [json.dumps(record, ensure_ascii=False)]
    lines = [f"S-{number}\t{translation.source}"]
    for hypothesis in translation.hypotheses:
        score = hypothesis.score / math.log(2)
        positional = " ".join(f"{value / math.log(2):.4f}" for value in hypothesis.token_log_probs)
        lines += [
            f"H-{number}\t{score}\t{' '.join(hypothesis.tokens)}",
            f"D-{number}\t{score}\t{hypothesis.text}",
            f"P-{number}\t{positional}",
        ]
    return lines


def read_pairs_of(
    mode: Mode, source: Path, target: Path, documents: Mapping[str, Any] | None
) -> Iterator[tuple["SourceLine | str", str]]:
    """Pair the lines of a source file with those of a target file.

    Raises:
        UserError: If they are not equally many.
    """
    targets = mode.targets(source, target, documents)
    for number, line in enumerate(mode.source_lines(source, documents), start=1):
        if (target_line := next(targets, None)) is None:
            raise UserError(
                f"{target} has {number - 1:,} lines but {source} has {count_lines(source):,}"
            )
        if isinstance(line, str) and target_line.strip() != line.strip():
            raise UserError(
                f"{target}, line {number}: {target_line!r} stands where {source} separates "
                "documents"
            )
        yield line, target_line
    if next(targets, None) is not None:
        raise UserError(
            f"{target} has {count_lines(target):,} lines but {source} has {count_lines(source):,}"
        )


def pronoun_finder(pipeline: str) -> SentenceTest:
    """Load what tells which sentences have a pronoun of the third person.

    Raises:
        UserError: If there is no such pipeline.
    """
    from bertfused.linguistics import load_tagger, third_person

    tagger = load_tagger(pipeline)
    return lambda sentences: third_person(sentences, tagger)


def encoder_use(
    mode: Mode, translator: "LineTranslator", source: Path, reference: Path, batch_tokens: int
) -> dict[str, Any]:
    """Measure what another sentence's encoder states cost, in nats a reference token."""
    from bertfused.translate import Translator

    if not isinstance(translator, Translator):
        raise UserError("--shuffle-encoder does not measure context-aware models")
    if translator.members[0].encoder is None:
        raise UserError("--shuffle-encoder needs a fused model")
    documents = translator.documents
    pairs = [
        (line, target)
        for line, target in read_pairs_of(mode, source, reference, documents)
        if not isinstance(line, str)
    ]
    means = []
    for shuffle in (False, True):
        scores = list(
            mode.score(translator, pairs, batch_tokens=batch_tokens, shuffle_encoder=shuffle)
        )
        means.append(-sum(s.log_prob for s in scores) / sum(s.tokens for s in scores))
    return {"nll": means[0], "nll_shuffled": means[1], "encoder_use": means[1] - means[0]}
