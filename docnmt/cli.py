"""The ``docnmt`` command: the core's verbs on documents, and the demonstration."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from bertfused.commands import (
    Mode,
    add_commands,
    pronoun_finder,
)
from bertfused.config import AnyRecipe, Corpus, Recipe
from bertfused.console import Quiet, log_to_stderr, make_app, progress, run_app
from bertfused.errors import UserError
from bertfused.options import (
    BatchTokens,
    ByPronouns,
    Device,
    Encoder,
    EncoderPrecision,
    Run,
)
from bertfused.progress import warn_of
from bertfused.text import make_folder, open_output, read_lines
from docnmt.config import DocumentRecipe
from docnmt.contrastive_formats import SetFormat, read_set
from docnmt.documents import (
    Columns,
    DocumentLine,
    Format,
    InputLine,
    check_corpus,
    contexts,
    padded,
    read_corpus,
    read_input,
)

if TYPE_CHECKING:
    import torch

    from bertfused.data import DataFolder, Split
    from bertfused.fit import Setup
    from bertfused.prepare import ParallelLine
    from bertfused.scoring import PairScore
    from bertfused.translate import LineTranslator, SourceLine
    from docnmt.translate import AnyTranslator

_logger = logging.getLogger(__name__)

# Formats whose files tell themselves apart from plain text by their suffix.
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "tsv": (".tsv",),
    "jsonl": (".jsonl",),
    "wmt": (".xml", ".sgm", ".sgml"),
}

app = make_app(
    "docnmt",
    "Translation of documents: the pretrained encoder reads the previous sentences too. "
    "Context-aware models, trained from a sentence-level one, read them without such an encoder, "
    "and can read their translations. "
    "What needs no documents (compare, average, cache-features, ...) is in bertfused.",
)


def corpora(recipe: Recipe) -> Callable[[Corpus], Iterable["ParallelLine"]]:
    """Give the reader of a recipe's corpora: sentences with their contexts and documents.

    All of them are read once to their ends before that, so that a bad line is found first.
    """
    documents = cast(DocumentRecipe, recipe).documents
    for corpus in (*recipe.data.train, recipe.data.dev, *recipe.data.test):
        check_corpus(
            corpus.source,
            corpus.target,
            format=documents.format,
            columns=documents.columns,
            docids=corpus.docids,
        )

    def read(corpus: Corpus) -> Iterator["ParallelLine"]:
        from bertfused.prepare import ParallelLine

        lines, again = tee(
            read_corpus(
                corpus.source,
                corpus.target,
                format=documents.format,
                columns=documents.columns,
                docids=corpus.docids,
            )
        )
        windows = contexts(again, documents.previous)
        for line, window in zip(lines, windows, strict=True):
            context = padded(window, documents.previous)
            yield ParallelLine(line.source, line.target or "", context, line.document)

    return read


def documents_of(recipe: Recipe) -> dict[str, Any]:
    """Return what DATA and model must remember of [documents]."""
    values = cast(DocumentRecipe, recipe).documents.model_dump(mode="json", exclude_none=True)
    del values["segments"]  # the encoder's, and kept with it
    return values


def source_lines(
    path: Path | None, documents: Mapping[str, Any] | None
) -> Iterator["SourceLine | str"]:
    """Read text to translate with its contexts; separators come as they are."""
    from docnmt.translate import in_context

    if documents is None:
        _logger.warning("this model was trained on sentences: no context is used")
    format, options = _input_format(path, documents)
    lines = read_input(path, format=format, **options)
    if format == "blank":
        lines = _told_of_tags(lines)
    return in_context(lines, documents)


def _told_of_tags(lines: Iterable[InputLine]) -> Iterator[InputLine]:
    """Warn of the tag of another format, which here is a sentence."""
    is_told = False
    for number, line in enumerate(lines, start=1):
        if not is_told and isinstance(line, DocumentLine) and line.source.strip() == "<d>":
            _logger.warning(
                "line %s is '<d>', which is translated: blank lines separate this model's "
                "documents",
                f"{number:,}",
            )
            is_told = True
        yield line


def targets(source: Path, target: Path, documents: Mapping[str, Any] | None) -> Iterator[str]:
    """Read the target side, one line for each line of the source."""
    format, options = _input_format(target, documents)
    if format not in _SUFFIXES:
        return read_lines(target)
    return (line.target or "" for line in read_corpus(source, target, format=format, **options))


def dev_lines(split: "Split", documents: Mapping[str, Any] | None) -> Iterator["SourceLine"]:
    """Read the source of a prepared split with its contexts."""
    from docnmt.translate import in_context

    texts = read_lines(split.source_text)
    docids = split.docids or []
    lines = (DocumentLine(docid, text, None) for docid, text in zip(docids, texts, strict=True))
    return (line for line in in_context(lines, documents) if not isinstance(line, str))


def _input_format(
    path: Path | None, documents: Mapping[str, Any] | None
) -> tuple[Format, dict[str, Any]]:
    """Say how a file is read: as the recipe's corpora, if it looks like them, else as text.

    Text has blank lines between documents.
    """
    format: Format = documents["format"] if documents else "blank"
    if format in _SUFFIXES:
        if path is None or path.suffix not in _SUFFIXES[format]:
            return "blank", {}
        columns = documents.get("columns") if documents else None
        return format, {"columns": None if columns is None else Columns(**columns)}
    if format == "docids":
        docids = None if path is None else path.with_name(path.name + ".docids")
        if docids is None or not docids.exists():
            return "blank", {}
        return format, {"docids": docids}
    return format, {}


def load_run(run: Path, **options: Any) -> "LineTranslator":
    """Load a RUN of any kind."""
    from docnmt.translate import load

    return load(run, **options)


def score_lines(
    translator: "AnyTranslator", pairs: Iterable[tuple["SourceLine", str]], **options: Any
) -> Iterator["PairScore"]:
    """Score the lines of documents."""
    from docnmt.translate import score_documents

    return score_documents(translator, pairs, **options)


def set_up_run(
    recipe: AnyRecipe, data: "DataFolder", init: Path | None, device: "torch.device"
) -> "Setup":
    """Set up the training of a model with [context] or without."""
    from docnmt.fit import set_up

    return set_up(recipe, data, init, device)


MODE = Mode(
    recipe=DocumentRecipe,
    corpora=corpora,
    documents=documents_of,
    source_lines=source_lines,
    targets=targets,
    dev_lines=dev_lines,
    load=load_run,
    score=score_lines,
    set_up=set_up_run,
)
add_commands(app, MODE)


@app.command()
def contrast(
    run: Run,
    sets: Annotated[
        list[Path],
        typer.Option(
            "--set",
            metavar="F",
            help="A contrastive test set: its JSON or JSON lines, or, where it is text files, that "
            "of the source sentences (NAME.text.en, NAME.current.en, NAME.current.src), with the "
            "others beside it; repeatable.",
        ),
    ],
    format: Annotated[
        SetFormat | None,
        typer.Option(
            "--format", help="Of the sets; see docs/contrastive.md.", show_default="from F itself"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File for the scores of each item, as JSON lines."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the accuracies as one JSON list, a set in each.")
    ] = False,
    by_pronouns: ByPronouns = None,
    label_smoothing: Annotated[
        float,
        typer.Option(
            "--label-smoothing",
            min=0.0,
            max=1.0,
            help="Score by the label-smoothed loss with this much smoothing, as CADec's authors.",
        ),
    ] = 0.0,
    batch_tokens: BatchTokens = 4096,
    device: Device = "auto",
    encoder: Encoder = None,
    encoder_precision: EncoderPrecision = "fp32",
    quiet: Quiet = False,
) -> None:
    """Print how often the right one of several translations is the most probable; ties are wrong.

    By distance and by category of the items too, each with a 95% confidence interval.
    """
    log_to_stderr(quiet)
    items = {path: read_set(path, format) for path in sets}
    has_pronoun = None if by_pronouns is None else pronoun_finder(by_pronouns)
    from docnmt import contrast as judging
    from docnmt.translate import as_read, load, reads_context

    translator = load(run, device=device, encoder=encoder, encoder_precision=encoder_precision)
    in_context = reads_context(translator)
    if not in_context:
        _logger.warning("%s reads no context, so its accuracy is what guessing gives", run)
    results = {}
    # Opened first, so that hours of scoring are not lost to a name that cannot be written.
    with nullcontext() if output is None else open_output(output) as writer:
        for path, set_items in items.items():
            if in_context and not any(item.context or item.target_contexts for item in set_items):
                _logger.warning("%s holds no context sentences", path)
            results[str(path)] = judging.contrast(
                set_items,
                partial(
                    _scores,
                    translator,
                    str(path),
                    quiet,
                    batch_tokens=batch_tokens,
                    label_smoothing=label_smoothing,
                ),
                name=str(path),
                as_read=partial(as_read, translator),
                has_pronoun=has_pronoun,
            )
        if as_json:
            typer.echo(json.dumps([judging.as_json(*result) for result in results.items()]))
        else:
            tables = [f"{name}\n{judging.table(result)}" for name, result in results.items()]
            typer.echo("\n\n".join(tables))
        if writer is not None:
            for name, result in results.items():
                for record in judging.item_records(name, result):
                    writer.write_line(json.dumps(record))
    warn_of(translator.counts)


def _scores(
    translator: "AnyTranslator",
    name: str,
    quiet: bool,
    pairs: list[tuple["SourceLine", str]],
    **options: Any,
) -> Iterator["PairScore"]:
    """Score pairs with a progress bar."""
    from docnmt.translate import score

    with progress(name, len(pairs), quiet) as advance:
        for pair_score in score(translator, pairs, **options):
            advance(1)
            yield pair_score


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for text, data and both runs.")] = Path(
        "runs/demo"
    ),
    quiet: Quiet = False,
) -> None:
    """Train with and without document context on a generated corpus, and test both: minutes."""
    log_to_stderr(quiet)
    from docnmt.demo import run_demo

    run_demo(MODE, out, quiet=quiet)


@app.command()
def split_sentences(
    input: Annotated[
        list[Path] | None,
        typer.Option(
            "--input",
            show_default="stdin",
            help="Raw text; repeatable: the end of a file ends a document.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", show_default="stdout", help="Its sentences.")
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            help="Whose rules to use, e.g. en: sentences end at full stops but those of spaCy's "
            "abbreviations. xx: any language, no abbreviations.",
        ),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            "--pipeline",
            help="In place of rules, a trained spaCy pipeline, installed (en_core_web_sm) or in "
            "a folder.",
        ),
    ] = None,
    abbreviation: Annotated[
        list[str] | None,
        typer.Option(
            "--abbreviation",
            help="One more word, e.g. No., whose full stop ends no sentence; repeatable; with "
            "--language only.",
        ),
    ] = None,
    documents: Annotated[
        Literal["blank", "d", "file"],
        typer.Option(
            "--documents",
            help="What separates documents in a file: blank lines, <d> lines, or nothing: then a "
            "file is a document, and blank lines separate its paragraphs.",
        ),
    ] = "blank",
    wrapped: Annotated[
        bool,
        typer.Option(
            "--wrapped",
            help="Sentences go on from line to line, up to a blank line; otherwise they end where "
            "lines end.",
        ),
    ] = False,
    format: Annotated[
        Literal["blank", "d"],
        typer.Option(
            "--format",
            help="Of the output: a blank line between documents, or a line <d> before each.",
        ),
    ] = "blank",
    quiet: Quiet = False,
) -> None:
    """Turn raw text into documents with one sentence a line, to translate or to prepare."""
    log_to_stderr(quiet)
    if (language is None) == (pipeline is None):
        raise UserError("split-sentences needs --language or --pipeline, and not both")
    if pipeline is not None and abbreviation:
        raise UserError("--abbreviation adds to the rules of --language, not to a --pipeline")
    from bertfused import linguistics
    from docnmt.raw import read_paragraphs, split_documents

    if language is not None:
        splitter = linguistics.rule_based(language, abbreviation or ())
    else:
        assert pipeline is not None
        splitter = linguistics.load_splitter(pipeline)
    paragraphs = read_paragraphs(input or [None], documents=documents, wrapped=wrapped)
    lines = split_documents(
        paragraphs, lambda texts: linguistics.split_sentences(texts, splitter), format=format
    )
    with progress("lines", None, quiet) as advance, open_output(output) as writer:
        for line in lines:
            writer.write_line(line)
            advance(1)


@app.command()
def suites(
    out: Annotated[Path, typer.Option("--out", help="Folder for the text and the test sets.")],
    documents: Annotated[int, typer.Option("--documents", min=1, help="Of training.")] = 700,
    seed: Annotated[int, typer.Option("--seed", help="The same seed writes the same bytes.")] = 1,
    quiet: Quiet = False,
) -> None:
    """Write documents and four contrastive test sets, each for one kind of context (En-De)."""
    log_to_stderr(quiet)
    from docnmt.suites import SIZES, write_suites

    make_folder(out)
    if any(out.iterdir()):
        raise UserError(f"{out} is not empty; name another folder with --out")
    write_suites(out, seed, {**SIZES, "train": documents})
    _logger.info("wrote train, dev, test and four contrastive sets to %s", out)


def main() -> None:
    """Run the command."""
    run_app(app)
