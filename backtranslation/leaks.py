"""Keep out of all training text what stands in the dev and test sets.

A line is known by its words: in lower case, without punctuation.
"""

import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from backtranslation.config import MonolingualData
from bertfused.config import Corpus, Section, load_section, save_section
from bertfused.text import (
    make_folder,
    open_output,
    read_lines,
    read_pairs,
    sha256_file,
)

if TYPE_CHECKING:
    from pandas import DataFrame

REPORT = "report.json"


@cache
def _no_punctuation() -> dict[int, None]:
    characters = map(chr, range(sys.maxunicode + 1))
    return {ord(c): None for c in characters if unicodedata.category(c).startswith("P")}


def normalised(line: str) -> str:
    """Return the words of a line in lower case, without punctuation.

    >>> normalised("  Ana are mere, nu-i așa? ")
    'ana are mere nui așa'
    """
    return " ".join(line.lower().translate(_no_punctuation()).split())


class Leaks(Section):
    """How many lines of a file, or pairs of two, were left out."""

    files: tuple[str, ...] = Field(description="What was read.")
    lines: int = Field(description="Lines or pairs read.")
    leaked: int = Field(description="Of these, left out.")
    blank: int = Field(0, description="Of the others, without text; these stay.")


class LeakReport(Section):
    """What was read for the training, and what was left out."""

    made_from: dict[str, str] = Field(description="Hashes of the files, by what they are.")
    keep_leaked: bool = Field(description="Whether all was kept.")
    corpora: tuple[Leaks, ...] = Field(description="The parallel corpora.")
    mono: dict[str, tuple[Leaks, ...]] = Field(description="The monolingual files, by language.")

    def table(self) -> "DataFrame":
        """Return a row for each file, or pair of files."""
        from pandas import DataFrame

        leaks = [*self.corpora, *(own for files in self.mono.values() for own in files)]
        names = [" ".join(Path(file).name for file in own.files) for own in leaks]
        return DataFrame(
            {"lines": [own.lines for own in leaks], "leaked": [own.leaked for own in leaks]},
            index=names,
        )


def drop_leaked(
    data: MonolingualData,
    out: Path,
    progress: Callable[[int], object] = lambda lines: None,
) -> LeakReport:
    """Write the training text without the lines that dev and test sets have.

    ::

        OUT/train.0.ro, OUT/train.0.en   each parallel corpus; a pair goes if either side leaks
        OUT/mono.en                      all monolingual text of a language, in order

    Where they were written before from the same files, nothing is done.

    Args:
        progress: Called with the lines or pairs read since the last call.

    Raises:
        UserError: If a file cannot be read, or the sides of a corpus differ in length.
    """
    make_folder(out)
    made_from = hashes(data)
    path = out / REPORT
    if path.exists():
        report = load_section(path, LeakReport)
        if (report.made_from, report.keep_leaked) == (made_from, data.keep_leaked):
            return report
        path.unlink()  # written last, so that with it all files are whole
    known = {data.source: set[str](), data.target: set[str]()}
    for corpus in () if data.keep_leaked else (data.dev, *data.test):
        for language, side in ((data.source, corpus.source), (data.target, corpus.target)):
            known[language].update(filter(None, map(normalised, read_lines(side))))
    report = LeakReport(
        made_from=made_from,
        keep_leaked=data.keep_leaked,
        corpora=tuple(
            _write_pairs(corpus, clean, known[data.source], known[data.target], progress)
            for corpus, clean in zip(data.train, clean_corpora(data, out), strict=True)
        ),
        mono={
            language: _write_lines(paths, clean_mono(out, language), known[language], progress)
            for language, paths in data.mono.items()
        },
    )
    save_section(path, report)
    return report


def hashes(data: MonolingualData) -> dict[str, str]:
    """Hash the files of a recipe, by what they are: train.0.source, mono.en.1."""
    return {role: sha256_file(path) for role, path in _files(data).items()}


def _files(data: MonolingualData) -> dict[str, Path]:
    corpora = {f"train.{number}": corpus for number, corpus in enumerate(data.train)}
    corpora |= {"dev": data.dev, **{f"test.{corpus.name}": corpus for corpus in data.test}}
    files = {f"{name}.source": corpus.source for name, corpus in corpora.items()}
    files |= {f"{name}.target": corpus.target for name, corpus in corpora.items()}
    for language, paths in data.mono.items():
        files |= {f"mono.{language}.{number}": path for number, path in enumerate(paths)}
    return files


def clean_corpora(data: MonolingualData, out: Path) -> tuple[Corpus, ...]:
    """Return the parallel corpora as ``drop_leaked`` wrote them."""
    return tuple(
        corpus.model_copy(
            update={
                "source": out / f"train.{number}.{data.source}",
                "target": out / f"train.{number}.{data.target}",
            }
        )
        for number, corpus in enumerate(data.train)
    )


def clean_mono(out: Path, language: str) -> Path:
    """Return where ``drop_leaked`` wrote the monolingual text of a language."""
    return out / f"mono.{language}"


def _write_pairs(
    corpus: Corpus,
    clean: Corpus,
    sources: set[str],
    targets: set[str],
    progress: Callable[[int], object],
) -> Leaks:
    pairs = leaked = 0
    with open_output(clean.source) as source, open_output(clean.target) as target:
        for pair in read_pairs(corpus.source, corpus.target):
            pairs += 1
            progress(1)
            if normalised(pair.source) in sources or normalised(pair.target) in targets:
                leaked += 1
                continue
            source.write_line(pair.source)
            target.write_line(pair.target)
    return Leaks(files=(str(corpus.source), str(corpus.target)), lines=pairs, leaked=leaked)


def _write_lines(
    paths: Sequence[Path], clean: Path, known: set[str], progress: Callable[[int], object]
) -> tuple[Leaks, ...]:
    found = []
    with open_output(clean) as writer:
        for path in paths:
            lines = leaked = blank = 0
            for line in read_lines(path):
                lines += 1
                progress(1)
                if normalised(line) in known:
                    leaked += 1
                else:
                    blank += not line.strip()
                    writer.write_line(line)
            found.append(Leaks(files=(str(path),), lines=lines, leaked=leaked, blank=blank))
    return tuple(found)
