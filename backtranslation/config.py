"""What a back-translation can be configured with; no torch is needed to read it."""

from pydantic import Field

from bertfused.config import Section


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
    """Bounds of the filter, [filter] in a recipe; a word is what stands between white space."""

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
