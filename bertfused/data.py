"""The DATA folder: prepared text as ids, opened without being loaded.

The folder is in fairseq's format, so one made by fairseq's preprocess command or by the official
BERT-fused code opens as well. Ours has ``data.toml`` besides, which says what it was made from; it
is written last, so a folder without it is either unfinished or somebody else's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from bertfused.config import Section, load_recipe
from bertfused.errors import UserError
from bertfused.store import IdStore
from bertfused.subwords import Tokenizer, load_tokenizer
from bertfused.text import read_lines

REPORT = "data.toml"
UNFINISHED = "unfinished"  # a file that stands in the folder while it is being made

_INDEX = re.compile(r"(train|valid|test\d*)\.([^.-]+)-([^.-]+)\.[^.]+\.idx")


class InputFile(Section):
    """One file that text was read from."""

    role: str = Field(description="Its place in the recipe, e.g. 'data.train.0.source'.")
    path: str = Field(description="Where it was; only for people to read.")
    sha256: str = Field(description="Hash of its bytes.")


class EncoderReport(Section):
    """The pretrained encoder whose ids are stored."""

    name: str = Field(description="As in fusion.encoder.")
    fingerprint: str = Field(description="Hash of its tokenizer.")
    vocabulary_size: int = Field(description="Its ids are below this.")
    max_wordpieces: int | None = Field(None, description="As in fusion.max_wordpieces.")


class DictionaryReport(Section):
    """The subwords and the dictionary of one language."""

    kind: str = Field(description="As in subwords.kind.")
    size: int = Field(description="Symbols, the special ones included.")
    sha256: str = Field(description="Hash of the subword model and the dictionary.")


class SplitReport(Section):
    """What became of the records of one split.

    In training data the odd pairs were dropped, elsewhere they were kept and only counted.
    """

    file: str = Field(description="The split's name on disk: train, valid, test, test1, ...")
    records: int = Field(0, description="Pairs read.")
    kept: int = Field(0, description="Pairs stored.")
    corpora: tuple[int, ...] = Field((), description="Of these, of each corpus, in their order.")
    empty: int = Field(0, description="Pairs with a side that has no text.")
    long: int = Field(0, description="Other pairs with more than data.max_tokens tokens a side.")
    unbalanced: int = Field(0, description="Other pairs beyond data.max_ratio.")
    documents: int = Field(0, description="Pairs stored that belong to a document.")
    source_tokens: int = Field(0, description="Tokens stored, end symbols not counted.")
    target_tokens: int = Field(0, description="Tokens stored, end symbols not counted.")
    source_unknown: int = Field(0, description="Of these, not in the dictionary.")
    target_unknown: int = Field(0, description="Of these, not in the dictionary.")
    wordpieces: int = Field(0, description="Ids for the encoder, special ones included.")
    cut_wordpieces: int = Field(0, description="Wordpieces of context that did not fit.")

    @property
    def odd(self) -> int:
        """Number of pairs that are empty, long or unbalanced."""
        return self.empty + self.long + self.unbalanced

    @property
    def unknown_rates(self) -> tuple[float, float]:
        """Share of the tokens of source and target that the dictionary does not have."""
        return (
            self.source_unknown / max(self.source_tokens, 1),
            self.target_unknown / max(self.target_tokens, 1),
        )


class MonolingualReport(Section):
    """What became of the lines of one language's monolingual text."""

    records: int = Field(0, description="Lines read.")
    kept: int = Field(0, description="Lines stored.")
    empty: int = Field(0, description="Lines without text, dropped.")
    long: int = Field(0, description="Lines with more than data.max_tokens tokens, dropped.")
    tokens: int = Field(0, description="Tokens stored, end symbols not counted.")
    unknown: int = Field(0, description="Of these, not in the dictionary.")


class PrepareReport(Section):
    """What a DATA folder was made from and what is in it; the content of ``data.toml``."""

    source: str = Field(description="Source language.")
    target: str = Field(description="Target language.")
    max_tokens: int = Field(description="As in data.max_tokens.")
    max_ratio: float | None = Field(None, description="As in data.max_ratio.")
    subwords: dict[str, Any] = Field(description="How they were learned, or what was reused.")
    tags: dict[str, str] = Field({}, description="By the numbers of the training corpora.")
    documents: dict[str, Any] | None = Field(
        None, description="How the encoder's context was formed; absent where it had none."
    )
    encoder: EncoderReport | None = None
    dictionaries: dict[Literal["source", "target"], DictionaryReport] = Field(
        {}, description="Both sides' dictionaries."
    )
    splits: dict[str, SplitReport] = Field({}, description="By their names in the recipe.")
    mono: dict[str, MonolingualReport] = Field({}, description="By language.")
    files: tuple[InputFile, ...] = Field(description="All that was read.")

    def __str__(self) -> str:
        """Return the report as lines of text."""
        lines = [f"{self.source}-{self.target}"]
        for side, dictionary in self.dictionaries.items():
            language = getattr(self, side)
            lines.append(f"{language}: {dictionary.kind}, {dictionary.size:,} symbols")
        if self.encoder is not None:
            context = "with context" if self.documents is not None else "without context"
            lines.append(f"encoder: {self.encoder.name}, {context}")
        for name, split in self.splits.items():
            lines += self._split_lines(name, split)
        for language, mono in self.mono.items():
            lines += [
                f"mono.{language}: {mono.records:,} lines = {mono.kept:,} kept + {mono.empty:,} "
                f"empty + {mono.long:,} over {self.max_tokens} tokens; {mono.tokens:,} tokens, "
                f"{mono.unknown / max(mono.tokens, 1):.2%} unknown"
            ]
        lines += [f"{file.role}: {file.path} sha256 {file.sha256}" for file in self.files]
        return "\n".join(lines)

    def _split_lines(self, name: str, split: SplitReport) -> list[str]:
        odd = (
            f"{split.empty:,} empty",
            f"{split.long:,} over {self.max_tokens} tokens",
            f"{split.unbalanced:,} unbalanced",
        )
        if split.file == "train":
            records = f"{split.records:,} pairs = {' + '.join((f'{split.kept:,} kept', *odd))}"
        else:
            records = f"{split.records:,} pairs, all kept ({', '.join(odd)})"
        source_unknown, target_unknown = split.unknown_rates
        parts = [
            f"{self.source} {split.source_tokens:,} tokens, {source_unknown:.2%} unknown",
            f"{self.target} {split.target_tokens:,} tokens, {target_unknown:.2%} unknown",
        ]
        if self.encoder is not None:
            cut = f"{split.cut_wordpieces:,} of context cut off"
            parts.append(f"{split.wordpieces:,} wordpieces, {cut}")
        return [f"{name} ({split.file}): {records}", f"  {'; '.join(parts)}"]


@dataclass(frozen=True)
class Split:
    """One split of a DATA folder; its stores are mapped, not loaded.

    Attributes:
        source: Source sentences, each ending in EOS.
        target: Their translations.
        bert: The same source sentences as the pretrained encoder reads them.
        prefix: Folder and name of the split on disk, ``DATA/train``.
    """

    source: IdStore
    target: IdStore
    bert: IdStore | None
    prefix: Path
    languages: tuple[str, str]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> tuple[npt.NDArray[np.integer], ...]:
        """Tokens of each example: of the target, the source and, if stored, the encoder's input."""
        bert = () if self.bert is None else (self.bert.sizes,)
        return (self.target.sizes, self.source.sizes, *bert)

    @property
    def docids(self) -> list[str] | None:
        """The document of each example, read from disk; an empty one stands for none."""
        path = Path(f"{self.prefix}.docids")
        return list(read_lines(path)) if path.exists() else None

    @property
    def source_text(self) -> Path:
        """File with the source as it was read.

        Raises:
            UserError: If the folder has no text of this split, as of training data.
        """
        return self._text(self.languages[0])

    @property
    def target_text(self) -> Path:
        """File with the target as it was read; raises as `source_text` does."""
        return self._text(self.languages[1])

    def _text(self, language: str) -> Path:
        path = raw_text(self.prefix, self.languages, language)
        if not path.exists():
            raise UserError(f"there is no text beside the ids: {path} does not exist")
        return path


@dataclass(frozen=True)
class DataFolder:
    """A DATA folder.

    Attributes:
        languages: Source and target.
        report: What it was made from, unless another program made it.
    """

    path: Path
    languages: tuple[str, str]
    report: PrepareReport | None
    _files: Mapping[str, str] = field(repr=False)  # splits on disk by their names in the recipe

    @staticmethod
    def open(path: Path) -> "DataFolder":
        """Open a folder of ours, of fairseq or of the official BERT-fused code.

        Raises:
            UserError: If it is none of these, or its making was interrupted.
        """
        if (path / REPORT).exists():
            report = load_recipe(path / REPORT, PrepareReport)
            files = {name: split.file for name, split in report.splits.items()}
            return DataFolder(path, (report.source, report.target), report, files)
        if (path / UNFINISHED).exists():
            raise UserError(f"{path} is not complete; run prepare again")
        languages = _guess_languages(path)
        recipe_names = {"valid": "dev"}
        on_disk = sorted({match[1] for match in _indices(path)})
        return DataFolder(path, languages, None, {recipe_names.get(f, f): f for f in on_disk})

    @property
    def splits(self) -> list[str]:
        """Names of the splits: train, dev and those of the test sets."""
        return list(self._files)

    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Load the subwords of source and target.

        Raises:
            UserError: If they are not those that the text was prepared with.
        """
        source, target = (load_tokenizer(self.path, language) for language in self.languages)
        reports = {} if self.report is None else self.report.dictionaries
        made = {str(side): report.sha256 for side, report in reports.items()}
        for side, tokenizer in (("source", source), ("target", target)):
            if made.get(side, tokenizer.sha256) != tokenizer.sha256:
                raise UserError(
                    f"the {side} subwords or dictionary of {self.path} are not those that its "
                    "text was prepared with"
                )
        return source, target

    def mono(self, language: str) -> IdStore:
        """Open the monolingual text of a language, each sentence ending in EOS.

        Raises:
            UserError: If there is none.
        """
        if self.report is None or language not in self.report.mono:
            raise UserError(f"{self.path} has no monolingual text of {language!r}")
        return IdStore.open(mono_prefix(self.path, language))

    def split(self, name: str) -> Split:
        """Open a split by its name in the recipe.

        Raises:
            UserError: If there is none of that name, or its files disagree in length.
        """
        if name not in self._files:
            raise UserError(f"{self.path} has no split {name!r}, only {', '.join(self.splits)}")
        prefix = self.path / self._files[name]
        source, target = (ids_prefix(prefix, self.languages, side) for side in self.languages)
        bert = bert_prefix(prefix, self.languages)
        split = Split(
            source=IdStore.open(source),
            target=IdStore.open(target),
            bert=IdStore.open(bert) if Path(f"{bert}.idx").exists() else None,
            prefix=prefix,
            languages=self.languages,
        )
        for other, lengths in zip((target, source, bert), split.lengths, strict=False):
            if len(lengths) != len(split):
                raise UserError(
                    f"{source} has {len(split):,} sentences but {other} has {len(lengths):,}"
                )
        return split


def mono_prefix(folder: Path, language: str) -> Path:
    """Return the path of the store of monolingual text: ``DATA/mono.en``."""
    return folder / f"mono.{language}"


def ids_prefix(prefix: Path, languages: tuple[str, str], language: str) -> Path:
    """Return the path of a side's store: ``train.en-de.de`` of ``train``."""
    return Path(f"{prefix}.{'-'.join(languages)}.{language}")


def bert_prefix(prefix: Path, languages: tuple[str, str]) -> Path:
    """Return the path of the store of the encoder's ids: ``train.bert.en-de.en`` of ``train``."""
    return Path(f"{prefix}.bert.{'-'.join(languages)}.{languages[0]}")


def raw_text(prefix: Path, languages: tuple[str, str], language: str) -> Path:
    """Return the path of a side's text: ``valid.en-de.raw.de`` of ``valid``."""
    return Path(f"{prefix}.{'-'.join(languages)}.raw.{language}")


def _indices(path: Path) -> list[re.Match[str]]:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    return [match for file in path.iterdir() if (match := _INDEX.fullmatch(file.name))]


def _guess_languages(path: Path) -> tuple[str, str]:
    """Read the languages off names like ``train.en-de.en.idx``."""
    pairs = sorted({(match[2], match[3]) for match in _indices(path)})
    if len(pairs) == 1:
        return pairs[0]
    if pairs:
        names = ", ".join("-".join(pair) for pair in pairs)
        raise UserError(f"{path} has several pairs of languages: {names}")
    raise UserError(f"{path} is no data folder: it has neither {REPORT} nor a train.*-*.*.idx")
