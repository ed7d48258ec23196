"""Make a DATA folder: text to subwords, ids, and a report of every record.

::

    reader(corpus)                Iterator[ParallelLine]   text, read in chunks
      -> Tokenizer.encode_batch   ids of both sides
      -> filter_reason            which training pairs are dropped
      -> IdStoreWriter            train.en-de.en.{bin,idx} ...

The folder counts as complete once it has ``data.toml``, which is written last. Memory does not
grow with the corpus.
"""

import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import tomli_w

from bertfused.config import Corpus, FusionConfig, SubwordsConfig, TextConfig
from bertfused.data import (
    REPORT,
    UNFINISHED,
    DataFolder,
    DictionaryReport,
    EncoderReport,
    InputFile,
    MonolingualReport,
    PrepareReport,
    SplitReport,
    bert_prefix,
    ids_prefix,
    mono_prefix,
    raw_text,
)
from bertfused.errors import UserError
from bertfused.store import IdStoreWriter
from bertfused.subwords import Tokenizer, load_tokenizer, train_subwords
from bertfused.text import (
    make_folder,
    only_writer,
    open_output,
    read_lines,
    read_pairs,
    remove_partials,
    replace_file,
    sha256_file,
)
from bertfused.vocab import Vocabulary

Reason = Literal["empty", "long", "unbalanced"]

_CHUNK = 2048  # pairs encoded at a time
_TEXT = ".text"  # folder of the text that subwords are learned from
_OWN = (
    r"(train|valid|test\d*)\.(docids|[^.]+\.raw\.[^.]+|(bert\.)?[^.]+\.[^.]+\.(bin|idx))"
    r"|mono\.[^.]+\.(bin|idx)"
    r"|dict\.[^.]+\.txt|sentencepiece\.[^.]+\.model|bpe\.[^.]+\.codes"
)
_logger = logging.getLogger(__name__)


class ParallelLine(NamedTuple):
    """A sentence, its translation, and what came before it.

    ``context`` is the source sentences given to the pretrained encoder along with this one, the
    oldest first; ``document`` is the name of the document it stands in, ``corpus`` the number of
    its corpus among those of its split.
    """

    source: str
    target: str
    context: tuple[str, ...] = ()
    document: str | None = None
    corpus: int = 0


@runtime_checkable
class DataRecipe(Protocol):
    """The sections of a recipe that preparation needs."""

    @property
    def data(self) -> TextConfig: ...
    @property
    def subwords(self) -> SubwordsConfig: ...
    @property
    def fusion(self) -> FusionConfig | None: ...


@runtime_checkable
class BertInput(Protocol):
    """Ids for the pretrained encoder, and how many wordpieces of context were cut off."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def truncated(self) -> int: ...


@runtime_checkable
class BertTokenizer(Protocol):
    """Whatever turns sentences into ids for the pretrained encoder."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(
        self, sentences: Sequence[str], contexts: Sequence[Sequence[str]]
    ) -> Sequence[BertInput]:
        """Encode sentences, each with its context."""
        ...


def read_corpus(corpus: Corpus) -> Iterator[ParallelLine]:
    """Read a corpus sentence by sentence, without context.

    Raises:
        UserError: If its files do not have the same number of lines.
    """
    pairs = read_pairs(corpus.source, corpus.target)
    if corpus.docids is None:
        return (ParallelLine(*pair) for pair in pairs)
    documents = read_pairs(corpus.source, corpus.docids)
    return (
        ParallelLine(*pair, document=document)
        for pair, (_, document) in zip(pairs, documents, strict=True)
    )


def prepare(
    recipe: DataRecipe,
    out: Path,
    *,
    reader: Callable[[Corpus], Iterable[ParallelLine]] = read_corpus,
    documents: Mapping[str, Any] | None = None,
    force: bool = False,
    progress: Callable[[str, int], object] = lambda split, pairs: None,
) -> PrepareReport:
    """Make the DATA folder ``out``.

    Training pairs are dropped, and counted, if a side is empty or over ``data.max_tokens`` tokens
    or the sides are out of proportion. In dev and test sets every pair stays. Monolingual lines
    are dropped as training pairs are.

    Args:
        recipe: Its sections data, subwords and fusion are used.
        out: The folder; one that was left unfinished is made anew.
        reader: Reads a corpus; a training corpus is read twice when subwords are learned.
        documents: How the reader forms contexts, recorded in ``data.toml``; None if it does not.
        force: Make the folder again even if it is complete.
        progress: Called with the name of the split and the pairs read since the last call.

    Returns:
        What was done; if ``out`` is complete and was made from the same, what was done then.

    Raises:
        UserError: If the input is wrong, too much of it is unknown, ``out`` holds other data, or
            another process is making it.
    """
    wordpieces = None
    if recipe.fusion is not None:
        wordpieces = _load_wordpieces(recipe.fusion, recipe.data.source)
    if (out / "config.toml").exists():
        raise UserError(f"{out} holds a run; give another folder")
    tokenizers = _reused_tokenizers(recipe)
    planned = _plan(recipe, tokenizers, wordpieces, documents)
    make_folder(out)
    with only_writer(out):
        if not force and (complete := _complete_report(out, planned)) is not None:
            _logger.info("%s is complete; nothing to do", out)
            return complete
        begin(out, _OWN, (_TEXT, "features"))
        if tokenizers is None:
            tokenizers = _learn_subwords(recipe, out, reader)
        for tokenizer, language in zip(tokenizers, _languages(recipe), strict=True):
            tokenizer.save(out, language)
        encoders = _Encoders(*tokenizers, wordpieces)
        # The small splits first: what is wrong in them is found before the long work.
        reports = {}
        for split in reversed(_splits(recipe.data)):
            chunks = _chunks(_parallel_lines(split, reader), split.name, progress)
            reports[split.name] = _write_split(split, chunks, recipe.data, encoders, out)
        by_language = dict(zip(_languages(recipe), tokenizers, strict=True))
        report = planned.model_copy(
            update={
                "dictionaries": _describe_dictionaries(tokenizers),
                "splits": {split.name: reports[split.name] for split in _splits(recipe.data)},
                "mono": {
                    language: _write_mono(
                        language, recipe.data, by_language[language], out, progress
                    )
                    for language in recipe.data.monolingual
                },
            }
        )
        with replace_file(out / REPORT) as handle:
            handle.write(tomli_w.dumps(report.model_dump(mode="json", exclude_none=True)).encode())
        (out / UNFINISHED).unlink()
    return report


def filter_reason(
    source: Sequence[int],
    target: Sequence[int],
    max_tokens: int,
    max_ratio: float | None,
) -> Reason | None:
    """Say what is wrong with a training pair, None if nothing.

    >>> filter_reason([5] * 4, [6], max_tokens=10, max_ratio=3.0)
    'unbalanced'
    """
    shorter, longer = sorted((len(source), len(target)))
    if shorter == 0:
        return "empty"
    if longer > max_tokens:
        return "long"
    if max_ratio is not None and longer > max_ratio * shorter:
        return "unbalanced"
    return None


@dataclass(frozen=True)
class _Split:
    """A split to be made: its name in the recipe and on disk, and what it is read from."""

    name: str
    file: str
    corpora: tuple[Corpus, ...]


@dataclass(frozen=True)
class _Encoders:
    """What turns text into ids."""

    source: Tokenizer
    target: Tokenizer
    bert: BertTokenizer | None


@dataclass(frozen=True)
class _Pair:
    """A pair to be stored, and its ids: source, target and, if wanted, the encoder's."""

    line: ParallelLine
    ids: list[list[int]]


def _languages(recipe: DataRecipe) -> tuple[str, str]:
    return recipe.data.source, recipe.data.target


def _splits(data: TextConfig) -> list[_Split]:
    files = {"train": "train", "dev": "valid"}
    files |= {str(corpus.name): f"test{i or ''}" for i, corpus in enumerate(data.test)}
    return [_Split(name, files[name], corpora) for name, corpora in data.splits.items()]


def _load_wordpieces(fusion: FusionConfig, language: str) -> BertTokenizer:
    from bertfused.pretrained import load_wordpieces  # heavy, and not needed without fusion

    return load_wordpieces(fusion.encoder, fusion.max_wordpieces, language)


def _reused_tokenizers(recipe: DataRecipe) -> tuple[Tokenizer, Tokenizer] | None:
    folder = recipe.subwords.reuse
    if folder is None:
        return None
    source, target = _languages(recipe)
    return load_tokenizer(folder, source), load_tokenizer(folder, target)


def _plan(
    recipe: DataRecipe,
    reused: tuple[Tokenizer, Tokenizer] | None,
    wordpieces: BertTokenizer | None,
    documents: Mapping[str, Any] | None,
) -> PrepareReport:
    """Describe what the folder is to be made from."""
    data, fusion = recipe.data, recipe.fusion
    for language in _languages(recipe):
        if not re.fullmatch(r"[A-Za-z0-9_]+", language):
            raise UserError(f"language {language!r} has to be of letters, digits and '_'")
    if data.source == data.target:
        raise UserError(f"data.source and data.target are both {data.source!r}")
    encoder = None
    if fusion is not None and wordpieces is not None:
        encoder = EncoderReport(
            name=fusion.encoder,
            fingerprint=wordpieces.fingerprint,
            vocabulary_size=wordpieces.vocabulary_size,
            max_wordpieces=fusion.max_wordpieces,
        )
    if reused is not None:
        subwords = {"reused": [tokenizer.sha256 for tokenizer in reused]}
    else:
        names = {"kind", "size", "shared", *(["tags"] if recipe.subwords.tags else [])}
        subwords = recipe.subwords.model_dump(mode="json", include=names)
    training = data.splits.get("train", ())
    tags = {str(i): corpus.tag for i, corpus in enumerate(training) if corpus.tag is not None}
    known = recipe.subwords.tags if reused is None else reused[0].vocabulary.tags
    for number, tag in tags.items():
        if tag not in known:
            raise UserError(
                f"data.train.{number}: {tag!r} is no tag of the dictionary; name it in "
                "subwords.tags when the dictionary is made"
            )
    return PrepareReport(
        source=data.source,
        target=data.target,
        max_tokens=data.max_tokens,
        max_ratio=data.max_ratio,
        subwords=subwords,
        tags=tags,
        documents=None if documents is None else _as_toml(documents),
        encoder=encoder,
        files=tuple(_input_files(data)),
    )


def _as_toml(value: Any) -> Any:
    """Return a value as it is when it comes back from a file: without None, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _as_toml(entry) for key, entry in value.items() if entry is not None}
    return [_as_toml(entry) for entry in value] if isinstance(value, list | tuple) else value


def _input_files(data: TextConfig) -> Iterator[InputFile]:
    hashes: dict[Path, str] = {}  # one file may hold both sides
    for language, paths in data.monolingual.items():
        for number, file in enumerate(paths):
            role = f"mono.{language}.{number}"
            yield InputFile(role=role, path=str(file), sha256=sha256_file(file))
    for split in _splits(data):
        for number, corpus in enumerate(split.corpora):
            corpus_name = f"{split.name}.{number}" if split.name == "train" else split.name
            for side in ("source", "target", "docids"):
                path: Path | None = getattr(corpus, side)
                if path is None:
                    continue
                if path not in hashes:
                    hashes[path] = sha256_file(path)
                yield InputFile(role=f"{corpus_name}.{side}", path=str(path), sha256=hashes[path])


def _complete_report(out: Path, planned: PrepareReport) -> PrepareReport | None:
    """Return the report of a complete folder made from the same, None if there is no such folder.

    Raises:
        UserError: If it was made from something else.
    """
    if not (out / REPORT).exists():
        return None
    report = DataFolder.open(out).report
    assert report is not None
    check_same(out, _identity(report), _identity(planned))
    return report


def _identity(report: PrepareReport) -> dict[str, object]:
    """Return what decides the content of a folder: no names of files, no results."""
    results = {"dictionaries", "splits", "mono", "files", "encoder"}
    values = report.model_dump(mode="json", exclude=results)
    encoder = report.encoder and report.encoder.model_dump(exclude={"name"})
    files = {file.role: file.sha256 for file in report.files}
    return {**values, "encoder": encoder, **files}


def check_same(out: Path, made: Mapping[str, object], planned: Mapping[str, object]) -> None:
    """Refuse a DATA folder that was made from something else than is planned.

    Raises:
        UserError: Naming the first difference.
    """
    for key in [*planned, *made]:
        if made.get(key) != planned.get(key):
            raise UserError(
                f"{out} was made from something else: {key} differs; "
                "give another folder, or take this one away"
            )


def begin(out: Path, own: str, folders: Sequence[str]) -> None:
    """Mark a DATA folder as unfinished, and remove what an earlier preparation left in it.

    Args:
        own: Regular expression of the names of files that preparation makes.
        folders: What it makes besides.

    Raises:
        UserError: If there is data in it that this program did not make.
    """
    names = (path.name for path in out.iterdir())
    found = sorted(name for name in names if re.fullmatch(own, name))
    is_ours = (out / REPORT).exists() or (out / UNFINISHED).exists()
    if found and not is_ours:
        raise UserError(f"{out} holds data of another program ({found[0]}); give another folder")
    (out / UNFINISHED).touch()
    (out / REPORT).unlink(missing_ok=True)
    remove_partials(out, rf"{own}|{re.escape(REPORT)}")
    for name in found:
        (out / name).unlink()
    for folder in folders if is_ours else ():
        shutil.rmtree(out / folder, ignore_errors=True)


def _learn_subwords(
    recipe: DataRecipe, out: Path, reader: Callable[[Corpus], Iterable[ParallelLine]]
) -> tuple[Tokenizer, Tokenizer]:
    """Learn subwords from the training text as the reader gives it."""
    source, target = _languages(recipe)
    folder = out / _TEXT
    folder.mkdir()
    mono, config = recipe.data.monolingual, recipe.subwords
    files = {language: list(mono.get(language, ())) for language in (source, target)}
    for split in (split for split in _splits(recipe.data) if split.name == "train"):
        pairs = folder / f"train.{source}", folder / f"train.{target}"
        with open_output(pairs[0]) as sources, open_output(pairs[1]) as targets:
            for line in _parallel_lines(split, reader):
                sources.write_line(line.source)
                targets.write_line(line.target)
        files[source].insert(0, pairs[0])
        files[target].insert(0, pairs[1])
    try:
        tokenizers = train_subwords(
            config.kind,
            files,
            None if config.kind == "words" else config.size,
            out,
            shared=config.shared,
            tags=config.tags,
        )
    except UserError as error:
        raise UserError(str(error).replace(f"{folder}/", "")) from error
    shutil.rmtree(folder)
    return tokenizers[source], tokenizers[target]


def _describe_dictionaries(
    tokenizers: tuple[Tokenizer, Tokenizer],
) -> dict[Literal["source", "target"], DictionaryReport]:
    source, target = (
        DictionaryReport(
            kind=tokenizer.subwords.kind, size=len(tokenizer.vocabulary), sha256=tokenizer.sha256
        )
        for tokenizer in tokenizers
    )
    return {"source": source, "target": target}


def _parallel_lines(
    split: _Split, reader: Callable[[Corpus], Iterable[ParallelLine]]
) -> Iterator[ParallelLine]:
    """Read the corpora of a split one after the other."""
    for number, corpus in enumerate(split.corpora):
        for line in reader(corpus):
            document = line.document
            if document is not None and len(split.corpora) > 1:
                document = f"{number}/{document}"  # two corpora may both have a document "1"
            yield line._replace(document=document, corpus=number)


def _chunks(
    lines: Iterator[ParallelLine], name: str, progress: Callable[[str, int], object]
) -> Iterator[list[ParallelLine]]:
    """Cut lines into chunks and report each one that is done."""
    while chunk := list(islice(lines, _CHUNK)):
        yield chunk
        progress(name, len(chunk))


def _write_mono(
    language: str,
    data: TextConfig,
    tokenizer: Tokenizer,
    out: Path,
    progress: Callable[[str, int], object],
) -> MonolingualReport:
    """Encode the monolingual text of a language, and leave out what is not to be kept."""
    counts: Counter[str] = Counter()
    lines = chain.from_iterable(read_lines(path) for path in data.monolingual[language])
    with IdStoreWriter(mono_prefix(out, language), len(tokenizer.vocabulary)) as writer:
        while chunk := list(islice(lines, _CHUNK)):
            counts["records"] += len(chunk)
            for ids in tokenizer.encode_batch([_text(line) for line in chunk]):
                reason = filter_reason(ids, ids, data.max_tokens, None)
                counts[reason or "kept"] += 1
                if reason is None:
                    counts["tokens"] += len(ids)
                    counts["unknown"] += ids.count(Vocabulary.unk)
                    writer.append([*ids, Vocabulary.eos])
            progress(f"mono.{language}", len(chunk))
    where = ", ".join(map(str, data.monolingual[language]))
    if not counts["kept"]:
        raise UserError(
            f"no line of mono.{language} is left of the {counts['records']:,} in {where}"
        )
    rate = counts["unknown"] / counts["tokens"]
    _check_unknown(rate, f"{language} tokens of {where}", data)
    return MonolingualReport.model_validate(counts)


def _write_split(
    split: _Split,
    chunks: Iterable[list[ParallelLine]],
    data: TextConfig,
    encoders: _Encoders,
    out: Path,
) -> SplitReport:
    """Encode a split; its files get their names when all of it is done."""
    prefix, languages = out / split.file, (data.source, data.target)
    stores = [(ids_prefix(prefix, languages, data.source), len(encoders.source.vocabulary))]
    stores += [(ids_prefix(prefix, languages, data.target), len(encoders.target.vocabulary))]
    if encoders.bert is not None:
        stores += [(bert_prefix(prefix, languages), encoders.bert.vocabulary_size)]
    docids = Path(f"{prefix}.docids")
    counts: Counter[str] = Counter()
    by_corpus = [0] * len(split.corpora)
    with ExitStack() as stack:
        writers = [stack.enter_context(IdStoreWriter(*store)) for store in stores]
        texts = [
            stack.enter_context(open_output(raw_text(prefix, languages, language)))
            for language in (languages if split.file != "train" else ())
        ]
        documents = stack.enter_context(open_output(docids))
        for pair in chain.from_iterable(_encode(c, split, data, encoders, counts) for c in chunks):
            for writer, ids in zip(writers, pair.ids, strict=True):
                writer.append(ids)
            for text, sentence in zip(texts, pair.line[:2], strict=False):
                text.write_line(sentence)
            documents.write_line(pair.line.document or "")
            by_corpus[pair.line.corpus] += 1
    if not counts["documents"]:
        docids.unlink()
    report = SplitReport.model_validate({"file": split.file, "corpora": by_corpus, **counts})
    _check(split, report, data)
    return report


def _encode(
    chunk: list[ParallelLine],
    split: _Split,
    data: TextConfig,
    encoders: _Encoders,
    counts: Counter[str],
) -> Iterator[_Pair]:
    """Encode lines and leave out the training pairs that are not to be kept."""
    sources = encoders.source.encode_batch([_text(line.source) for line in chunk])
    targets = encoders.target.encode_batch([_text(line.target) for line in chunk])
    counts["records"] += len(chunk)
    kept = []
    for line, source, target in zip(chunk, sources, targets, strict=True):
        reason = filter_reason(source, target, data.max_tokens, data.max_ratio)
        if reason is not None:
            counts[reason] += 1
        if reason is None or split.file != "train":
            kept.append((line, source, target))
    if encoders.bert is not None:
        inputs = encoders.bert.encode_batch(
            [line.source for line, _, _ in kept], [line.context for line, _, _ in kept]
        )
        counts["wordpieces"] += sum(len(input.ids) for input in inputs)
        counts["cut_wordpieces"] += sum(input.truncated for input in inputs)
    counts["kept"] += len(kept)
    tags = _tags(split, encoders.source.vocabulary)
    for i, (line, source, target) in enumerate(kept):
        counts["documents"] += line.document is not None
        counts["source_tokens"] += len(source)
        counts["target_tokens"] += len(target)
        counts["source_unknown"] += source.count(Vocabulary.unk)
        counts["target_unknown"] += target.count(Vocabulary.unk)
        ids = [[*tags[line.corpus], *source, Vocabulary.eos], [*target, Vocabulary.eos]]
        yield _Pair(line, ids if encoders.bert is None else [*ids, inputs[i].ids])


def _tags(split: _Split, vocabulary: Vocabulary) -> list[list[int]]:
    """Return what begins the source sentences of each corpus."""
    tags = [corpus.tag for corpus in split.corpora]
    return [[] if tag is None else [vocabulary.tags[tag]] for tag in tags]


def _text(line: str) -> str:
    """White space alone is no text."""
    return line if line.strip() else ""


def _check(split: _Split, report: SplitReport, data: TextConfig) -> None:
    dropped = report.odd if split.file == "train" else 0
    assert report.records == report.kept + dropped
    where = ", ".join(str(corpus.source) for corpus in split.corpora)
    if not report.kept:
        raise UserError(f"no pair of {split.name} is left of the {report.records:,} in {where}")
    for language, rate in zip((data.source, data.target), report.unknown_rates, strict=True):
        _check_unknown(rate, f"{language} tokens of {split.name}", data)


def _check_unknown(rate: float, what: str, data: TextConfig) -> None:
    if rate > data.max_unknown:
        raise UserError(
            f"{rate:.1%} of the {what} are not in the dictionary, more than data.max_unknown = "
            f"{data.max_unknown}; is the text split into words as the dictionary expects?"
        )
