"""What a recipe says of masked language modelling."""

from pydantic import Field

from bertfused.config import AnyRecipe, Section


class PretrainConfig(Section):
    """Masked language modelling, [pretrain] in a recipe."""

    mask_rate: float = Field(0.15, gt=0, lt=1, description="Share of the tokens that is predicted.")
    language_smoothing: float = Field(
        0.7,
        ge=0,
        le=1,
        description="A language of the share p of all sentences is drawn with p ** this, over the "
        "sum of these; 1 draws by size, 0 all languages alike.",
    )
    valid_lines: int = Field(
        1000, ge=1, description="Last lines of each language's text, held out for validation."
    )


class PretrainRecipe(AnyRecipe):
    """A recipe with masked language modelling in it.

    Of [model] it has the encoder's sizes, dropout, attention_dropout, activation and max_positions;
    there is no label smoothing.
    """

    pretrain: PretrainConfig = PretrainConfig()
