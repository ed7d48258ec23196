"""What unsupervised training can be configured with; no torch is needed to read it."""

import functools
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from bertfused.config import (
    AnyRecipe,
    Corpus,
    SearchConfig,
    Section,
    SubwordsConfig,
    TextConfig,
)
from bertfused.vocab import MASK

Objective = Literal["denoising", "words", "backtranslation", "mass"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def _check_schedule(value: object) -> str:
    points(str(value))
    return str(value)


#: The weight of an objective by step: 1, or "0:1,1000:0.1,3000:0".
Schedule = Annotated[str, BeforeValidator(_check_schedule)]


@functools.cache
def points(schedule: str) -> tuple[tuple[int, float], ...]:
    """Return the corners of a weight that is piecewise linear in the step.

    >>> points("0:1,1000:0.1"), points("0.5")
    (((0, 1.0), (1000, 0.1)), ((0, 0.5),))

    Raises:
        ValueError: If it is no schedule.
    """
    number = r"(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
    if re.fullmatch(number, schedule):
        return ((0, float(schedule)),)
    parts = [part.strip() for part in schedule.split(",")]
    if not all(re.fullmatch(rf"\d+:({number})", part) for part in parts):
        raise ValueError(f"{schedule!r} is neither a weight nor like '0:1,1000:0.1,3000:0'")
    corners = tuple((int(step), float(weight)) for step, weight in (p.split(":") for p in parts))
    steps = [step for step, _ in corners]
    if steps[0] != 0 or steps != sorted(set(steps)):
        raise ValueError(f"the steps of {schedule!r} have to begin with 0 and to rise")
    return corners


class UnsupervisedData(TextConfig):
    """The text, [data] in a recipe: no pairs to train on."""

    mono: dict[str, tuple[Path, ...]] = Field(
        description="Files of monolingual text of both languages, e.g. mono.en = ['news.en.gz']."
    )
    dev: Corpus | None = Field(
        None, description="Pairs that training is watched on; they choose nothing by default."
    )

    @property
    def splits(self) -> dict[str, tuple[Corpus, ...]]:
        """The pairs for evaluation by the name of their split: dev and the test sets."""
        return {**({"dev": (self.dev,)} if self.dev is not None else {}), **super().splits}

    @property
    def monolingual(self) -> Mapping[str, tuple[Path, ...]]:
        """The files of text that is prepared, by language."""
        return self.mono

    @model_validator(mode="after")
    def _mono_is_of_both_languages(self) -> "UnsupervisedData":
        for language in (self.source, self.target):
            if not self.mono.get(language):
                raise ValueError(f"mono.{language} is missing")
        if other := [language for language in self.mono if language not in self.languages]:
            raise ValueError(
                f"mono.{other[0]} is of another language than {self.source} and {self.target}"
            )
        if self.max_ratio is not None:
            raise ValueError("max_ratio has no use here: there are no training pairs")
        return self

    @property
    def languages(self) -> tuple[str, str]:
        """Both languages, by number."""
        return self.source, self.target


class SharedSubwords(SubwordsConfig):
    """The subwords of both languages together, [subwords] in a recipe."""

    tags: tuple[str, ...] = Field(
        (MASK,), description="Symbols that no text has; one blanks words."
    )

    @model_validator(mode="after")
    def _are_shared(self) -> "SharedSubwords":
        if not self.shared:
            raise ValueError("shared = false: one encoder reads both languages with one dictionary")
        if MASK not in self.tags:
            raise ValueError(f"tags have to name {MASK!r}, which stands for blanked words")
        return self


class DictionaryFile(Section):
    """A dictionary of words."""

    path: Path = Field(description="Lines of a word, a tab and a translation; .gz, .zst by suffix.")
    language: str = Field(description="Language of the first word of a line.")


class WordsConfig(Section):
    """Word-by-word translations to begin with, [words] in a recipe.

    A word is what stands between spaces, so the text is best tokenised and lower-cased before.
    """

    dictionaries: tuple[DictionaryFile, ...] = Field(
        (), description="Where translations of words come from; those of each are read both ways."
    )
    encoder: str | None = Field(
        None,
        description="Folder or hub name of a multilingual encoder: words with near vectors are "
        "translations too.",
    )
    induced: bool = Field(
        False, description="Match the words of the two texts, with nothing but these texts."
    )
    spelling: float = Field(
        0.0, ge=0, description="Weight of like spelling in this match, for related languages."
    )
    refinements: int = Field(
        0,
        ge=0,
        description="Rounds in which lines are translated both ways, and the translations of "
        "words weighed by how often they were chosen.",
    )
    lm_weight: float = Field(
        1.0, ge=0, description="Of the trigram language model that chooses and orders words."
    )
    swap_cost: float = Field(
        1.5, ge=0, description="Nats for each pair of words that change places."
    )
    insert_cost: float = Field(
        1.0, ge=0, description="Nats for a frequent word put in between two others; 100 is never."
    )
    omit_cost: float = Field(
        6.0, ge=0, description="Nats for a frequent word that is left out; 100 is never."
    )
    reach: int = Field(1, ge=0, description="Places that a word may move ahead.")
    seed: int = Field(1, ge=0, description="Of the matching, if induced.")

    @model_validator(mode="after")
    def _have_a_source(self) -> "WordsConfig":
        has_resources = bool(self.dictionaries or self.encoder)
        if self.induced == has_resources:
            raise ValueError(
                "give dictionaries, an encoder or both; or induced = true, which uses neither"
            )
        return self


class EmbeddingsConfig(Section):
    """Subword embeddings to begin with, [embeddings] in a recipe."""

    encoder: str = Field(
        description="Folder or hub name of a multilingual encoder: a subword's embedding begins "
        "as the encoder's states of it, reduced to model_dim; without --init."
    )


class NoiseConfig(Section):
    """Noise on the words of a sentence, [noise] in a recipe (Lample et al., 2018, section 2.3)."""

    shuffle: float = Field(
        3.0, ge=0, description="Word i goes to the rank of i + U(0, shuffle): 3 moves it by 2."
    )
    drop: float = Field(0.1, ge=0, lt=1, description="Share of the words that are left out.")
    blank: float = Field(0.1, ge=0, lt=1, description=f"Share of the others that become {MASK}.")
    mass: float = Field(
        0.5, gt=0, lt=1, description="MASS: share of a sentence that is masked, in one span."
    )


class ObjectivesConfig(Section):
    """How much each objective counts at which step, [objectives] in a recipe.

    A weight, or corners between which it is linear: '0:1,1000:0.1,3000:0'.
    """

    denoising: Schedule = Field("1", description="A sentence from a noised copy of it.")
    words: Schedule = Field("0", description="A sentence from its word-by-word translation.")
    backtranslation: Schedule = Field(
        "1", description="A sentence from its translation by the model of that step."
    )
    mass: Schedule = Field("0", description="A span of a sentence from the rest of it (MASS).")
    teacher: Literal["model", "average"] = Field(
        "model",
        description="What translates back: the weights of the step, or their average (optim.ema).",
    )
    noise_words: bool = Field(True, description="Noise on word-by-word translations too.")

    @model_validator(mode="after")
    def _some_counts(self) -> "ObjectivesConfig":
        corners = {step for name in OBJECTIVES for step, _ in points(getattr(self, name))}
        for step in sorted({1} | {max(step, 1) for step in corners}):
            if not any(self.weight(name, step) for name in OBJECTIVES):
                raise ValueError(f"all objectives have weight 0 at step {step}")
        return self

    def weight(self, objective: Objective, step: int) -> float:
        """Return the weight of an objective at a step.

        >>> ObjectivesConfig(denoising="0:1,100:0").weight("denoising", 25)
        0.75
        """
        corners = points(getattr(self, objective))
        for (start, before), (end, after) in itertools.pairwise(corners):
            if step < end:
                return before + (after - before) * (step - start) / (end - start)
        return corners[-1][1]


class GenerateConfig(SearchConfig):
    """The search of back-translation in training, [generate] in a recipe: greedy, or sampling."""

    beam_size: int = Field(1, ge=1, le=10_000, description="Hypotheses kept at each step.")
    max_length_a: float = Field(
        1.3, ge=0, le=1e6, description="Longest output: a * source tokens + b; this is a."
    )
    max_length_b: int = Field(
        5, ge=0, le=10**6, description="Longest output: a * source tokens + b; this is b."
    )
    updates: int = Field(
        1,
        ge=1,
        description="Sentences of so many updates are translated at once, by the weights before "
        "the first of them: a few large searches are faster than many small ones.",
    )


class ValidationConfig(Section):
    """How a model in training is judged, [validation] in a recipe."""

    lines: int = Field(
        500, ge=1, description="Monolingual lines of each language, translated there and back."
    )
    select: Literal["round-trip", "bleu"] = Field(
        "round-trip",
        description="What the best model is best in: BLEU of lines translated there and back, "
        "which needs no pairs, or BLEU on the pairs of data.dev.",
    )
    max_copied: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Training stops once more of the source's words stand in translations; 1 is "
        "never.",
    )
    max_wrong: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Training stops once more of the translations look like the source's "
        "language; 1 is never.",
    )
    guard_from: int = Field(
        2000, ge=0, description="Step from which these two bounds count: a model begins by copying."
    )


class PretrainConfig(Section):
    """Pretraining on the monolingual texts, [pretrain] in a recipe."""

    objective: Literal["mlm", "mass"] = Field(
        "mlm",
        description="A masked language model (XLM), or a sequence-to-sequence model that predicts "
        "masked spans (MASS).",
    )
    mask_rate: float = Field(
        0.15, gt=0, lt=1, description="mlm: share of the tokens that is predicted."
    )
    language_smoothing: float = Field(
        0.7,
        ge=0,
        le=1,
        description="mlm: a language of the share p of all sentences is drawn with p ** this, "
        "over the sum of these; 1 draws by size, 0 all languages alike.",
    )
    valid_lines: int = Field(
        1000, ge=1, description="Last lines of each language's text, held out for validation."
    )


class PretrainRecipe(AnyRecipe):
    """A recipe with pretraining in it.

    Of [model] an XLM has the encoder's sizes, dropout, attention_dropout, activation and
    max_positions; there is no label smoothing.
    """

    pretrain: PretrainConfig = PretrainConfig()


class UnsupervisedRecipe(PretrainRecipe):
    """A recipe of unsupervised translation."""

    may_change = rf"{PretrainRecipe.may_change}|validation\.(max_copied|max_wrong|guard_from)"
    data: UnsupervisedData
    subwords: SharedSubwords = SharedSubwords()
    words: WordsConfig | None = None
    embeddings: EmbeddingsConfig | None = None
    noise: NoiseConfig = NoiseConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    generate: GenerateConfig = GenerateConfig()
    validation: ValidationConfig = ValidationConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> "UnsupervisedRecipe":
        if self.model.share_embeddings != "all":
            raise ValueError(
                f"model.share_embeddings = {self.model.share_embeddings!r}: the model reads and "
                "writes both languages, so 'all' it is"
            )
        if self.objectives.teacher == "average" and self.optim.ema is None:
            raise ValueError("objectives.teacher = 'average' needs optim.ema")
        if self.train.validate_every % self.generate.updates:
            raise ValueError(
                f"train.validate_every = {self.train.validate_every} is no multiple of "
                f"generate.updates = {self.generate.updates}: a resumed run would translate anew"
            )
        if self.validation.select == "bleu" and self.data.dev is None:
            raise ValueError("validation.select = 'bleu' needs data.dev")
        for dictionary in self.words.dictionaries if self.words is not None else ():
            if dictionary.language not in self.data.languages:
                raise ValueError(
                    f"words.dictionaries: {dictionary.path} begins with words of "
                    f"{dictionary.language!r}, which is none of the languages"
                )
        return self
