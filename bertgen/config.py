"""What BERTGEN can be configured with; no torch is needed to read it."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from bertfused.config import Decay, LoopConfig, OptimConfig, RunRecipe, SearchConfig, Section

SPLITS = ("train", "dev")  # what no test set may be called


class Corpus(Section):
    """Text, and images beside it; line i of each file belongs to line i of the others."""

    source: Path | None = Field(None, description="Text to translate; .gz and .zst by suffix.")
    target: Path = Field(description="What is to be written.")
    images: tuple[Path, ...] = Field(
        (), description="Features of the images beside some of the lines, .npz or .jsonl."
    )
    name: str | None = Field(None, description="Name of a test set.")


class Task(Section):
    """A task: from text, from images or from both, into a language."""

    name: str = Field(pattern=r"^[\w-]+$", description="E.g. 'en-de', 'caption-de'.")
    source: str | None = Field(None, description="Language to translate from; none of captions.")
    target: str = Field(pattern=r"^\w+$", description="Language to write.")
    images: bool = Field(False, description="Images are read; lines without one are left out.")
    train: tuple[Corpus, ...] = Field((), description="Training corpora; none of a zero-shot task.")
    dev: Corpus | None = Field(None, description="Development set.")
    test: tuple[Corpus, ...] = Field((), description="Test sets, each with a name.")

    @property
    def splits(self) -> dict[str, tuple[Corpus, ...]]:
        """The corpora by the name of their split: train, dev and the test sets."""
        dev = (self.dev,) if self.dev is not None else ()
        found = {"train": self.train, "dev": dev}
        found |= {str(corpus.name): (corpus,) for corpus in self.test}
        return {name: corpora for name, corpora in found.items() if corpora}

    @model_validator(mode="after")
    def _corpora_fit(self) -> "Task":
        if self.source is None and not self.images:
            raise ValueError(f"task {self.name!r} reads neither text nor images")
        names = [corpus.name for corpus in self.test]
        if None in names or len({*names}) < len(names) or {*names} & {*SPLITS}:
            raise ValueError(f"every test set of task {self.name!r} needs a name of its own")
        for name in names:
            if not re.fullmatch(r"[\w-][\w.-]*", name or ""):
                raise ValueError(f"name {name!r} of a test set is to be part of file names")
        for name, corpora in self.splits.items():
            for corpus in corpora:
                if (corpus.source is not None) != (self.source is not None):
                    raise ValueError(
                        f"{name} of task {self.name!r} has to have source text "
                        "exactly if the task has a source language"
                    )
                if bool(corpus.images) != self.images:
                    raise ValueError(
                        f"{name} of task {self.name!r} has to have images exactly if the task has"
                    )
        return self


class DataConfig(Section):
    """The tasks, [data] in a recipe. Paths are relative to the recipe."""

    tasks: tuple[Task, ...] = Field(min_length=1, description="What is learned and evaluated.")
    max_wordpieces: int = Field(
        120, ge=1, description="Training lines with more wordpieces a side are left out, counted."
    )

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that are written, in order."""
        return tuple(dict.fromkeys(task.target for task in self.tasks))

    @model_validator(mode="after")
    def _tasks_have_names(self) -> "DataConfig":
        names = [task.name for task in self.tasks]
        if len({*names}) < len(names):
            raise ValueError("every task needs a name of its own")
        if not any(task.train for task in self.tasks):
            raise ValueError("no task has text to train on")
        return self


class ModelConfig(Section):
    """The network, [model] in a recipe: that of the encoder it begins from."""

    encoder: str = Field(
        description="Folder or hub name of a BERT that knows all the languages: its tokenizer is "
        "used, and training begins with its weights."
    )
    visual: Path | None = Field(
        None,
        description="State dict of a VL-BERT of the same width, whose positions, types, visual "
        "layers and [END] are taken, as in the paper; without it positions and type are the "
        "encoder's, and the others begin fresh.",
    )
    layers: int | None = Field(None, ge=1, description="Its lowest layers only; default: all.")
    attention: Literal["bidirectional", "prefix"] = Field(
        "bidirectional",
        description="bidirectional: everything sees everything, as in the paper; prefix: what is "
        "written is not seen by what it is made from, about ten times cheaper.",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout rate of embeddings and branches.")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of attention weights.")


class GenOptimConfig(OptimConfig):
    """The optimiser, [optim] in a recipe; the defaults are the paper's."""

    lr: float = Field(1.3e-5, gt=0, description="Highest learning rate.")
    warmup_steps: int = Field(16_000, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["inverse_sqrt", "linear", "constant"] = Field(
        "linear", description="Decay after warm-up; 'linear' reaches 0 at train.max_steps."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Adam's decay rates.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Mass given to wrong tokens.")


class GenLoopConfig(LoopConfig):
    """The training loop, [train] in a recipe."""

    batch_tokens: int = Field(
        4096, ge=1, description="Positions of a micro-batch, all sequences of its lines counted."
    )
    copies: int | None = Field(
        None,
        ge=1,
        description="bidirectional: of the n + 1 sequences of a line so many are drawn each epoch, "
        "weighted so that the mean loss is that of all; default: all.",
    )
    valid_lines: int = Field(200, ge=1, description="Lines of each dev set used in validation.")


class GenSearchConfig(SearchConfig):
    """Decoding, [search] in a recipe; greedy as in the paper."""

    beam_size: int = Field(1, ge=1, le=10_000, description="Hypotheses kept at each step.")
    min_length: int = Field(0, ge=0, description="At least this many tokens before [STOP].")
    max_length_b: int = Field(
        300, ge=0, le=10**6, description="Longest output: a * source tokens + b; this is b."
    )
    max_length_images: int = Field(
        150, ge=0, le=10**6, description="Longest output where an image is read."
    )


class GenRecipe(RunRecipe):
    """A whole recipe of BERTGEN."""

    data: DataConfig
    model: ModelConfig
    optim: GenOptimConfig = GenOptimConfig()
    train: GenLoopConfig
    search: GenSearchConfig = GenSearchConfig()

    @model_validator(mode="after")
    def _copies_are_of_one_mode(self) -> "GenRecipe":
        if self.model.attention == "prefix" and self.train.copies is not None:
            raise ValueError("train.copies has no use with model.attention = 'prefix'")
        return self
