"""Context-aware models from their descriptions: which class, of which sizes, from which folder."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from torch import nn

from bertfused.checkpoint import ModelCard, load_weights
from bertfused.errors import UserError
from bertfused.model import FusedTransformer
from bertfused.wordpieces import CARD
from docnmt.cadec import CadecModel
from docnmt.config import (
    CadecConfig,
    ConcatenationConfig,
    ContextConfig,
    FrozenBaseConfig,
    LayerwiseConfig,
    ZhangConfig,
)
from docnmt.context import ContextModel, Sizes
from docnmt.layerwise import LayerwiseModel
from docnmt.zhang import ZhangModel


def context_of(
    card: ModelCard, folder: Path
) -> LayerwiseConfig | CadecConfig | ZhangConfig | ConcatenationConfig:
    """Return the [context] of a model that has one.

    Args:
        folder: Of the model, for messages.

    Raises:
        UserError: If it is damaged, or of a newer version.
    """
    adapter: TypeAdapter[FrozenBaseConfig | ConcatenationConfig] = TypeAdapter(ContextConfig)
    try:
        return adapter.validate_python(card.context)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("context", *first["loc"])))
        raise UserError(f"{folder / CARD} is damaged: {place}: {first['msg']}") from error


def build_context_model(
    base: FusedTransformer, card: ModelCard, config: FrozenBaseConfig
) -> ContextModel:
    """Put fresh context layers on a base."""
    sizes = Sizes(
        model_dim=card.model.model_dim,
        ffn_dim=config.ffn_dim or card.model.ffn_dim,
        heads=card.model.decoder_heads or card.model.heads,
        dropout=config.dropout,
        activation=card.model.activation,
    )
    match config:
        case LayerwiseConfig():
            return LayerwiseModel(
                base,
                sizes,
                sentences=config.sentences,
                layers=config.layers,
                source=config.source,
                target=config.target,
                layer_weighting=config.layer_weighting,
                reset_gate=config.reset_gate,
                gates=config.gates,
                target_dropout=config.target_dropout,
                preserve_function=config.start == "function-preserving",
            )
        case CadecConfig():
            return CadecModel(base, sizes, sentences=config.sentences, layers=config.layers)
        case ZhangConfig():
            return ZhangModel(base, sizes, sentences=config.sentences, layers=config.layers)


def load_network(folder: Path, card: ModelCard) -> ContextModel | FusedTransformer:
    """Load the network of a context-aware model; a Transformer if it reads joined sentences."""
    config = context_of(card, folder)
    network: nn.Module = card.build()
    if not isinstance(config, ConcatenationConfig):
        assert isinstance(network, FusedTransformer)
        network = build_context_model(network, card, config)
    load_weights(folder, network)
    assert isinstance(network, ContextModel | FusedTransformer)
    return network.eval()
