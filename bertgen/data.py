"""The DATA folder of BERTGEN: what every task reads and writes, as ids.

::

    DATA/data.toml                 what it was made from, and what of it; written last
    DATA/tokenizer/                the encoder's
    DATA/TASK.SPLIT.{source,target}.{bin,idx}   wordpieces, without symbols
    DATA/TASK.SPLIT.images.npy     number of the image beside each line
    DATA/TASK.SPLIT.raw.{source,target}         text of dev and test sets, for evaluation
    DATA/images.*                  all images (bertgen.images)
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from bertfused.config import Section, load_recipe
from bertfused.data import REPORT, InputFile
from bertfused.errors import UserError
from bertfused.store import IdStore
from bertfused.text import read_lines
from bertgen.images import ImageStore
from bertgen.layout import Symbols

Numbers = NDArray[np.int64]
TOKENIZER = "tokenizer"


class SymbolsReport(Section):
    """Numbers of the symbols that no text has, in a vocabulary of so many entries."""

    vocab_size: int
    cls: int
    sep: int
    mask: int
    pad: int
    unk: int
    stop: int
    into: dict[str, int]

    @property
    def symbols(self) -> Symbols:
        """The same, as the layout needs them."""
        return Symbols(self.cls, self.sep, self.mask, self.stop, self.pad, dict(self.into))


class SplitReport(Section):
    """What became of the lines of a split."""

    task: str
    split: str
    lines: int = Field(description="Read.")
    kept: int
    empty: int = Field(description="Left out: without text on a side.")
    long: int = Field(description="Left out: of more than data.max_wordpieces wordpieces.")
    without_image: int = Field(description="Left out: no image beside them.")
    unknown: float = Field(description="Share of unknown wordpieces.")

    def __str__(self) -> str:
        text = (
            f"{self.task} {self.split}: {self.lines:,} lines = {self.kept:,} kept + {self.empty:,} "
            f"empty + {self.long:,} too long + {self.without_image:,} without an image"
        )
        return text + f", {self.unknown:.2%} of the wordpieces unknown"


class GenReport(Section):
    """What a DATA folder was made from, and what became of it; the content of ``data.toml``."""

    encoder: str
    tokenizer: str = Field(description="sha256 of the encoder's tokenizer.")
    max_wordpieces: int
    symbols: SymbolsReport
    tasks: dict[str, dict[str, str]] = Field(description="Languages of each task, and its modes.")
    files: tuple[InputFile, ...]
    images: int = 0
    feature_dim: int = 0
    splits: tuple[SplitReport, ...] = ()

    def __str__(self) -> str:
        lines = [str(split) for split in self.splits]
        return "\n".join(
            [*lines, f"{self.images:,} images, features of {self.feature_dim} numbers"]
        )


@dataclass(frozen=True)
class TaskSplit:
    """The lines of a split of a task.

    Attributes:
        source: None of captions.
        images: None of text alone.
    """

    prefix: Path
    source: IdStore | None
    target: IdStore
    images: Numbers | None

    def __len__(self) -> int:
        return len(self.target)

    def text(self, side: str) -> list[str]:
        """Return the text of a dev or test set.

        Raises:
            UserError: If it is not there.
        """
        return list(read_lines(self.prefix.with_name(f"{self.prefix.name}.raw.{side}")))


@dataclass(frozen=True)
class GenData:
    """A DATA folder, opened."""

    path: Path
    report: GenReport
    images: ImageStore

    @staticmethod
    def open(path: Path) -> "GenData":
        """Open a folder.

        Raises:
            UserError: If it is none of BERTGEN's, or not complete.
        """
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; bertgen prepare makes one")
        if not (path / REPORT).is_file():
            raise UserError(f"{path} has no {REPORT}: its preparation was not finished")
        report = load_recipe(path / REPORT, GenReport)
        return GenData(path, report, ImageStore(path))

    def splits(self, task: str) -> list[str]:
        """Return the names of a task's splits."""
        return [own.split for own in self.report.splits if own.task == task]

    def split(self, task: str, split: str) -> TaskSplit:
        """Open a split.

        Raises:
            UserError: If it is missing or damaged.
        """
        if split not in self.splits(task):
            known = ", ".join(f"{own.task} {own.split}" for own in self.report.splits)
            raise UserError(f"{self.path} has no {split!r} of task {task!r}; it has {known}")
        prefix, about = self.path / f"{task}.{split}", self.report.tasks[task]
        source = None if "source" not in about else IdStore.open(Path(f"{prefix}.source"))
        images = None
        if "images" in about:
            path = Path(f"{prefix}.images.npy")
            try:
                images = np.load(path, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise UserError(f"cannot read {path}: {error}") from error
        return TaskSplit(prefix, source, IdStore.open(Path(f"{prefix}.target")), images)
