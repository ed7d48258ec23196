"""What a back-translation can be configured with; no torch is needed to read it."""

import itertools
import re
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from bertfused.config import CacheDtype, DataConfig, Recipe, SearchConfig, Section, check_recipe
from bertfused.errors import UserError

EngineName = Literal["auto", "torch", "ctranslate2"]
ComputeType = Literal["float32", "int8"]
StageName = Literal["baseline", "reverse", "bt", "fused"]


class NoiseConfig(Section):
    """How much noise the words of a text get."""

    drop: float = Field(0.0, ge=0, lt=1, description="Share of the words left out.")
    blank: float = Field(0.0, ge=0, lt=1, description="Share of the others replaced by filler.")
    swap: int = Field(0, ge=0, description="A word moves by this many places at most.")
    filler: str = Field("_", pattern=r"^\S+$", description="What stands for a blanked word.")
    seed: int = Field(1, ge=0, description="Seed of the noise; each line has its own stream.")

    @property
    def is_any(self) -> bool:
        """Whether it changes anything."""
        return bool(self.drop or self.blank or self.swap)


class FilterConfig(Section):
    """Bounds of the filter, [filter] in a recipe; a word is what stands between white space.

    Source is the side that is synthetic in the training of the recipe.
    """

    min_words: int = Field(1, ge=1, description="Fewest words of a side.")
    max_words: int = Field(250, ge=1, description="Most words of a side.")
    max_ratio: float = Field(3.0, gt=1, description="Words of the longer side to the shorter's.")
    max_copied: float = Field(
        0.8, gt=0, le=1, description="Share of the source's words that stand in the target too."
    )
    max_repeats: int = Field(
        3, ge=1, description="How often an n-gram of up to four words may stand in a row."
    )
    source_scripts: tuple[str, ...] = Field(
        ("LATIN",), description="Scripts of the source, as Unicode names its letters; '' for any."
    )
    target_scripts: tuple[str, ...] = Field(("LATIN",), description="Scripts of the target.")
    keep_duplicates: bool = Field(False, description="Keep pairs that were there before.")
    min_round_trip: float | None = Field(
        None,
        le=0,
        description="Least log-probability a token, in nats, of the target under a forward model.",
    )


class MonolingualData(DataConfig):
    """The text, [data] in a recipe, with monolingual text besides."""

    mono: dict[str, tuple[Path, ...]] = Field(
        description="Files of monolingual text by language, e.g. mono.en = ['news.en.gz']."
    )
    keep_leaked: bool = Field(
        False,
        description="Train on lines that stand in dev or test sets too, but for case and "
        "punctuation.",
    )

    @model_validator(mode="after")
    def _mono_is_of_these_languages(self) -> "MonolingualData":
        for language in (self.source, self.target):
            if not re.fullmatch(r"[A-Za-z0-9_]+", language):
                raise ValueError(f"language {language!r} has to be of letters, digits and '_'")
        for language in self.mono:
            if language not in (self.source, self.target):
                raise ValueError(
                    f"mono.{language} is of another language than {self.source} and {self.target}"
                )
        if not self.mono.get(self.target):
            raise ValueError(f"mono.{self.target} is missing: it is what is translated back")
        if any(corpus.docids is not None for corpus in (*self.train, self.dev, *self.test)):
            raise ValueError("docids have no use here: back-translation is of sentences")
        return self


class GenerateConfig(Section):
    """How monolingual text is translated, [generate] in a recipe."""

    engine: EngineName = Field("auto", description="As --engine of generate.")
    compute_type: ComputeType = Field("float32", description="Of CTranslate2.")
    shards: int = Field(1, ge=1, description="Ranges of lines that the text is cut into.")
    batch_tokens: int = Field(4096, ge=1, description="Source tokens of a batch.")
    search: dict[str, Any] = Field({}, description="Keys of [search] that are other ones here.")
    noise: NoiseConfig = Field(NoiseConfig(), description="Noise on the words that are written.")


class MixConfig(Section):
    """How real and synthetic pairs are put together, [mix] in a recipe."""

    upsample: float = Field(
        1.0, gt=0, description="Passes through the real pairs for each through the synthetic."
    )
    tag: str = Field(
        "<BT>",
        pattern=r"^\S*$",
        description="Symbol before synthetic source sentences; '' for none.",
    )
    noise: NoiseConfig = Field(NoiseConfig(), description="Noise on the synthetic source.")


class StageConfig(Section):
    """What is different in the training of one model: keys of the sections of the recipe."""

    model: dict[str, Any] = Field({}, description="Keys of [model].")
    optim: dict[str, Any] = Field({}, description="Keys of [optim].")
    train: dict[str, Any] = Field({}, description="Keys of [train].")


class FusedStageConfig(StageConfig):
    """The fused model, and the plain one that is trained on for as long."""

    cache: CacheDtype | None = Field(
        None, description="Keep the encoder's states on disk, in this precision."
    )
    control: bool = Field(
        True, description="Also train the plain model on, for the time that the fused one takes."
    )


class StagesConfig(Section):
    """The models of the chain, [stages.NAME] in a recipe."""

    baseline: StageConfig = Field(StageConfig(), description="On the real pairs.")
    reverse: StageConfig = Field(StageConfig(), description="Of the other direction.")
    bt: StageConfig = Field(StageConfig(), description="On real and synthetic pairs.")
    fused: FusedStageConfig = Field(FusedStageConfig(), description="With [fusion], from bt.")


class BacktranslationRecipe(Recipe):
    """A recipe of the whole chain, from the baseline to the fused model."""

    rounds: int = Field(1, ge=1, description="How often the text is translated back.")
    data: MonolingualData
    generate: GenerateConfig = GenerateConfig()
    filter: FilterConfig = FilterConfig()
    mix: MixConfig = MixConfig()
    stages: StagesConfig = StagesConfig()

    @model_validator(mode="after")
    def _stages_are_recipes(self) -> "BacktranslationRecipe":
        fused = self.stages.fused.model.keys()
        if other := [key for key in fused if not key.endswith("dropout")]:
            raise ValueError(
                f"stages.fused.model.{other[0]}: the network is that of bt; only its dropout may "
                "differ"
            )
        try:
            self.generate_search()
            for name in get_args(StageName):
                self.stage(name)
        except UserError as error:
            raise ValueError(str(error)) from error
        if self.rounds > 1 and not self.data.mono.get(self.data.source):
            raise ValueError(
                f"rounds = {self.rounds} needs data.mono.{self.data.source}: later rounds begin "
                "with a better reverse model"
            )
        return self

    def generate_search(self) -> SearchConfig:
        """Return the search of the back-translation.

        Raises:
            UserError: If the keys of [generate.search] do not fit.
        """
        values = self.search.model_dump() | self.generate.search
        return check_recipe(values, SearchConfig, "generate.search")

    def stage(self, name: StageName) -> Recipe:
        """Return the recipe of one model; only that of the fused one has [fusion].

        Raises:
            UserError: If the keys of the stage do not fit.
        """
        stages = [getattr(self.stages, name)]
        if name == "fused":  # its network is that of bt
            stages.insert(0, StageConfig(model=self.stages.bt.model))
        values = self.model_dump(exclude_unset=True, include=set(Recipe.model_fields))
        for key in {*MonolingualData.model_fields} - {*DataConfig.model_fields}:
            values["data"].pop(key, None)
        if name != "fused":
            values.pop("fusion", None)
        tag, subwords = self.mix.tag, self.subwords
        if tag and subwords.reuse is None and tag not in subwords.tags:
            tags = (*subwords.tags, tag)
            values["subwords"] = subwords.model_dump(exclude_unset=True) | {"tags": tags}
        for stage, section in itertools.product(stages, StageConfig.model_fields):
            values[section] = {**values.get(section, {}), **getattr(stage, section)}
        return check_recipe(values, Recipe, f"stages.{name}")
