"""Make a DATA folder of BERTGEN: text to wordpieces, images into one store, everything counted."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tomli_w

from bertfused.data import REPORT, UNFINISHED, InputFile
from bertfused.errors import UserError
from bertfused.prepare import begin, check_same
from bertfused.pretrained import (
    TransformersWordpieces,
    load_pretrained,
    load_tokenizer,
    resolve_encoder,
)
from bertfused.store import IdStoreWriter
from bertfused.text import (
    make_folder,
    only_writer,
    open_output,
    read_lines,
    read_pairs,
    replace_file,
    sha256_file,
)
from bertgen.config import Corpus, DataConfig, GenRecipe, Task
from bertgen.data import TOKENIZER, GenData, GenReport, SplitReport, SymbolsReport
from bertgen.images import ImageStore, write_images

_logger = logging.getLogger(__name__)

_CHUNK = 2048
_OWN = (
    r"[\w-]+\.[\w.-]+\.((source|target)\.(bin|idx)|images\.npy|raw\.(source|target))"
    r"|images\.(features\.bin|npz)"
)
# Of M-BERT's vocabulary the official code takes rows that no text has.
_SPARE = {"stop": 1, "en": 16, "de": 17, "fr": 18, "cs": 19, "tr": 20}

Progress = Callable[[str, int], object]
ImageNumbers = Mapping[Path, Mapping[int, int]]


def prepare(
    recipe: GenRecipe,
    out: Path,
    *,
    force: bool = False,
    progress: Progress = lambda what, lines: None,
) -> GenReport:
    """Make the DATA folder ``out``.

    Training lines are left out, and counted, if a side is empty or too long, or no image stands
    beside them. Of dev and test sets only lines without an image are, in tasks that read images.

    Returns:
        What was done; if ``out`` is complete and was made from the same, what was done then.

    Raises:
        UserError: If the input is wrong, ``out`` holds something else, or another process is
            making it.
    """
    if (out / "config.toml").exists():
        raise UserError(f"{out} holds a run; give another folder")
    wordpieces = load_tokenizer(resolve_encoder(recipe.model.encoder))
    planned = _plan(recipe, wordpieces)
    make_folder(out)
    with only_writer(out):
        if not force and (complete := _complete_report(out, planned)) is not None:
            _logger.info("%s is complete; nothing to do", out)
            return complete
        begin(out, _OWN, (TOKENIZER,))
        wordpieces.save(out / TOKENIZER)
        config = load_pretrained("config", resolve_encoder(recipe.model.encoder))
        config.save_pretrained(out / TOKENIZER)
        files = [
            path
            for task in recipe.data.tasks
            for _, corpus in _corpora(task)
            for path in corpus.images
        ]
        numbers = write_images(out, list(dict.fromkeys(files)))
        images = ImageStore(out)
        splits = [
            _write_split(
                out / f"{task.name}.{name}",
                task,
                name,
                _read(task, corpora, numbers),
                wordpieces,
                recipe.data.max_wordpieces,
                progress,
            )
            for task in recipe.data.tasks
            for name, corpora in reversed(task.splits.items())  # small ones first
        ]
        report = planned.model_copy(
            update={
                "images": len(images),
                "feature_dim": images.feature_dim,
                "splits": tuple(splits),
            }
        )
        with replace_file(out / REPORT) as handle:
            handle.write(tomli_w.dumps(report.model_dump(mode="json", exclude_none=True)).encode())
        (out / UNFINISHED).unlink()
    return report


def number_symbols(
    name: str, wordpieces: TransformersWordpieces, languages: Sequence[str]
) -> SymbolsReport:
    """Give numbers to [STOP] and the [TO_XX].

    In the vocabulary of M-BERT those of the official code, rows "[unusedN]"; in others new ones.

    Raises:
        UserError: If the tokenizer is of no BERT.
    """
    config = load_pretrained("config", resolve_encoder(name))
    if config.model_type != "bert":
        raise UserError(f"{name} is a {config.model_type!r}; BERTGEN begins from a 'bert'")
    found, size = dict(wordpieces.symbols), wordpieces.vocabulary_size
    if missing := [key for key in ("cls", "sep", "pad", "unk") if found[key] is None]:
        raise UserError(f"the tokenizer of {name} has no {missing[0]!r} token")
    if found["mask"] is None:
        found["mask"], size = size, size + 1
    spare = [_SPARE[key] for key in ("stop", *languages) if key in _SPARE]
    if len(spare) > len(languages) and wordpieces.pieces(spare) == [f"[unused{i}]" for i in spare]:
        stop, *into = spare
    else:
        stop, *into = range(size, size + 1 + len(languages))
        size += 1 + len(languages)
    return SymbolsReport.model_validate(
        {**found, "vocab_size": size, "stop": stop, "into": dict(zip(languages, into, strict=True))}
    )


def _plan(recipe: GenRecipe, wordpieces: TransformersWordpieces) -> GenReport:
    data = recipe.data
    symbols = number_symbols(recipe.model.encoder, wordpieces, data.languages)
    return GenReport(
        encoder=recipe.model.encoder,
        tokenizer=wordpieces.fingerprint,
        max_wordpieces=data.max_wordpieces,
        symbols=symbols,
        tasks=describe_tasks(data),
        files=tuple(_input_files(data)),
    )


def describe_tasks(data: DataConfig) -> dict[str, dict[str, str]]:
    """Say of each task what it reads and writes."""
    tasks = {}
    for task in data.tasks:
        about = {"target": task.target, **({"images": "yes"} if task.images else {})}
        tasks[task.name] = about | ({"source": task.source} if task.source is not None else {})
    return tasks


def _corpora(task: Task) -> Iterator[tuple[str, Corpus]]:
    for name, corpora in task.splits.items():
        for corpus in corpora:
            yield name, corpus


def _input_files(data: DataConfig) -> Iterator[InputFile]:
    hashes: dict[Path, str] = {}
    for task in data.tasks:
        for number, (name, corpus) in enumerate(_corpora(task)):
            named = {"source": corpus.source, "target": corpus.target}
            named |= {f"images.{i}": path for i, path in enumerate(corpus.images)}
            for side, path in named.items():
                if path is None:
                    continue
                if path not in hashes:
                    hashes[path] = sha256_file(path)
                role = f"{task.name}.{name}.{number}.{side}"
                yield InputFile(role=role, path=str(path), sha256=hashes[path])


def _complete_report(out: Path, planned: GenReport) -> GenReport | None:
    if not (out / REPORT).exists():
        return None
    report = GenData.open(out).report
    check_same(out, _identity(report), _identity(planned))
    return report


def _identity(report: GenReport) -> dict[str, object]:
    """Return what decides the content of a folder: no names of files, no results."""
    results = {"encoder", "files", "images", "feature_dim", "splits"}
    values = report.model_dump(mode="json", exclude=results)
    return values | {file.role: file.sha256 for file in report.files}


class _Line(NamedTuple):
    """A line of a corpus: its sides, and the number of the image beside it (-1: none is)."""

    texts: tuple[str, ...]
    image: int


def _read(task: Task, corpora: Sequence[Corpus], numbers: ImageNumbers) -> Iterator[_Line]:
    """Read corpora line by line.

    Raises:
        UserError: If their files do not have equally many lines, or an image stands beside none.
    """
    for corpus in corpora:
        image_of: dict[int, int] = {}
        for path in corpus.images:
            if twice := image_of.keys() & numbers[path].keys():
                raise UserError(f"{path}: another file has an image of row {min(twice)} too")
            image_of |= numbers[path]
        count = 0
        for count, texts in enumerate(_read_sides(corpus), start=1):
            yield _Line(texts, image_of.get(count - 1, -1))
        if image_of and max(image_of) >= count:
            raise UserError(
                f"{corpus.images[0]} has an image of row {max(image_of)}, but {corpus.target} has "
                f"{count:,} lines"
            )


def _read_sides(corpus: Corpus) -> Iterator[tuple[str, ...]]:
    if corpus.source is None:
        return ((line,) for line in read_lines(corpus.target))
    return (tuple(pair) for pair in read_pairs(corpus.source, corpus.target))


def _write_split(
    prefix: Path,
    task: Task,
    name: str,
    lines: Iterator[_Line],
    wordpieces: TransformersWordpieces,
    max_wordpieces: int,
    progress: Progress,
) -> SplitReport:
    """Write the lines of a split that are kept, and count the others."""
    sides = ["target"] if task.source is None else ["source", "target"]
    counts, images, is_training = Counter[str](), [], name == "train"
    with ExitStack() as stack:
        size = wordpieces.vocabulary_size
        stores = [stack.enter_context(IdStoreWriter(_of(prefix, side), size)) for side in sides]
        raw = []
        if not is_training:
            raw = [stack.enter_context(open_output(_of(prefix, f"raw.{side}"))) for side in sides]
        while chunk := list(islice(lines, _CHUNK)):
            encoded = wordpieces.split([text for line in chunk for text in line.texts])
            for number, line in enumerate(chunk):
                ids = encoded[number * len(sides) : (number + 1) * len(sides)]
                reason = _reason(line, ids, max_wordpieces, is_training, task.images)
                counts[reason or "kept"] += 1
                if reason is not None:
                    continue
                images.append(line.image)
                for store, own in zip(stores, ids, strict=True):
                    store.append(own)
                    counts["pieces"] += len(own)
                    counts["unknown"] += sum(id == wordpieces.symbols["unk"] for id in own)
                for writer, text in zip(raw, line.texts, strict=False):
                    writer.write_line(text)
            progress(f"{task.name} {name}", len(chunk))
    if not counts["kept"]:
        raise UserError(f"nothing is left of {name} of task {task.name!r}")
    if task.images:
        with replace_file(_of(prefix, "images.npy")) as handle:
            np.save(handle, np.array(images), allow_pickle=False)
    reasons = {reason: counts[reason] for reason in ("kept", "empty", "long", "without_image")}
    return SplitReport(
        task=task.name,
        split=name,
        lines=sum(reasons.values()),
        unknown=counts["unknown"] / max(counts["pieces"], 1),
        **reasons,
    )


def _reason(
    line: _Line, ids: Sequence[Sequence[int]], longest: int, is_training: bool, needs_image: bool
) -> str | None:
    """Say why a line is left out, None if it is kept."""
    if needs_image and line.image < 0:
        return "without_image"
    if is_training and not all(ids):
        return "empty"
    if is_training and max(map(len, ids)) > longest:
        return "long"
    return None


def _of(prefix: Path, ending: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{ending}")
