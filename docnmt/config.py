"""The recipe of document-level translation: the core's, with [documents] and [context]."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bertfused.config import Recipe, Section
from docnmt.documents import DocumentsConfig

Sentences = Annotated[
    int, Field(ge=1, le=16, description="Previous sentences the model reads at most.")
]
FfnDim = Annotated[
    int | None, Field(ge=1, description="Width inside the new feed-forward layers; the base's.")
]
DropoutRate = Annotated[float, Field(ge=0, lt=1, description="Dropout rate of the new layers.")]


class LayerwiseConfig(Section):
    """Layer-wise weighting and input-aware gating (Xu et al., 2020) on a frozen base."""

    model: Literal["layerwise"] = Field("layerwise", description="This model.")
    sentences: Sentences = 3
    layers: int = Field(1, ge=1, description="New layers of each kind, the paper's M.")
    source: bool = Field(True, description="Read the previous source sentences.")
    target: bool = Field(True, description="Read their translations.")
    layer_weighting: bool = Field(
        True, description="Average all encoder layers; false reads the last one."
    )
    reset_gate: Literal["reset", "reset_add", "none"] = Field(
        "reset",
        description="How a context token is gated by the sentence to translate; reset_add adds "
        "what it attends to there; none leaves that attention out.",
    )
    gates: bool = Field(True, description="Gated residuals; false adds as a Transformer does.")
    ffn_dim: FfnDim = None
    dropout: DropoutRate = 0.1
    target_dropout: float = Field(
        0.1, ge=0, lt=1, description="Rate at which whole target context tokens are zeroed."
    )
    start: Literal["function-preserving", "random"] = Field(
        "function-preserving",
        description="New self-attention and FFN at zero, so that the start is nearly the base.",
    )

    @model_validator(mode="after")
    def _reads_something(self) -> "LayerwiseConfig":
        if not (self.source or self.target):
            raise ValueError("source and target are both false: no context would be read")
        fields = type(self).model_fields
        for side, keys in (
            ("source", ("layer_weighting", "reset_gate")),
            ("target", ("target_dropout",)),
        ):
            for key in keys:
                if not getattr(self, side) and getattr(self, key) != fields[key].default:
                    raise ValueError(f"{key} has no meaning with {side} = false")
        return self


class CadecConfig(Section):
    """A second decoder that corrects a draft of the frozen base (Voita et al., 2019)."""

    model: Literal["cadec"] = Field("cadec", description="This model.")
    sentences: Sentences = 3
    layers: int = Field(6, ge=1, description="Layers of the second decoder.")
    ffn_dim: FfnDim = None
    dropout: DropoutRate = 0.1


class ZhangConfig(Section):
    """Context attention in every layer of the frozen base (Zhang et al., 2018)."""

    model: Literal["zhang"] = Field("zhang", description="This model.")
    sentences: Sentences = 2
    layers: int = Field(1, ge=1, description="Layers of the context encoder.")
    ffn_dim: FfnDim = None
    dropout: DropoutRate = 0.1


class ConcatenationConfig(Section):
    """A plain Transformer that reads the previous sentences in front of the current one."""

    model: Literal["concatenation"] = Field("concatenation", description="This model.")
    sentences: Sentences = 1
    target: bool = Field(
        False,
        description="Write their translations too (2-to-2); false writes the current one's only.",
    )


FrozenBaseConfig = LayerwiseConfig | CadecConfig | ZhangConfig
ContextConfig = Annotated[FrozenBaseConfig | ConcatenationConfig, Field(discriminator="model")]


class DocumentRecipe(Recipe):
    """A recipe whose corpora are documents."""

    documents: DocumentsConfig = Field(
        default=DocumentsConfig(), description="How documents are read, and the context used."
    )
    context: ContextConfig | None = Field(
        None, description="The context-aware model that is trained from a sentence-level RUN."
    )

    @model_validator(mode="before")
    @classmethod
    def _segments_are_the_encoders(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Hand documents.segments to the section that the encoder is built from."""
        fusion, documents = values.get("fusion"), values.get("documents")
        if isinstance(fusion, dict) and isinstance(documents, dict) and "segments" in documents:
            return {**values, "fusion": {**fusion, "segments": documents["segments"]}}
        return values
