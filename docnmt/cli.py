"""The ``docnmt`` command: the core's verbs on documents, and the demonstration."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from bertfused.commands import Mode, add_commands
from bertfused.config import Corpus, Recipe
from bertfused.console import Quiet, log_to_stderr, make_app, run_app
from bertfused.text import read_lines
from docnmt.config import DocumentRecipe
from docnmt.documents import (
    Columns,
    DocumentLine,
    Format,
    check_corpus,
    contexts,
    padded,
    read_corpus,
    read_input,
)

if TYPE_CHECKING:
    from bertfused.data import Split
    from bertfused.prepare import ParallelLine
    from bertfused.translate import SourceLine

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
    return in_context(lines, documents)


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


MODE = Mode(
    recipe=DocumentRecipe,
    corpora=corpora,
    documents=documents_of,
    source_lines=source_lines,
    targets=targets,
    dev_lines=dev_lines,
)
add_commands(app, MODE)


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


def main() -> None:
    """Run the command."""
    run_app(app)
