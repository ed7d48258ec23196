"""Context-aware models from their descriptions: which class, of which sizes, from which folder."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from torch import nn

from bertfused.checkpoint import ModelCard, load_card, load_weights, model_folder
from bertfused.errors import UserError
from bertfused.model import FusedTransformer
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
    card: ModelCard,
) -> LayerwiseConfig | CadecConfig | ZhangConfig | ConcatenationConfig:
    """Return the [context] of a model that has one.

    Raises:
        UserError: If it is damaged, or of a newer version.
    """
    adapter: TypeAdapter[FrozenBaseConfig | ConcatenationConfig] = TypeAdapter(ContextConfig)
    try:
        return adapter.validate_python(card.context)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("context", *first["loc"])))
        raise UserError(f"the model's card is damaged: {place}: {first['msg']}") from error


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


def load_network(run: Path) -> tuple[Path, ModelCard, ContextModel | FusedTransformer]:
    """Load the network of a context-aware RUN; a Transformer if it reads joined sentences.

    Returns:
        Also its folder and its card, which says what it is.
    """
    folder = model_folder(run)
    card = load_card(folder)
    if card.context is None:
        raise UserError(f"{run} is no context-aware model")
    config = context_of(card)
    network: nn.Module = card.build()
    if not isinstance(config, ConcatenationConfig):
        assert isinstance(network, FusedTransformer)
        network = build_context_model(network, card, config)
    load_weights(folder, network)
    assert isinstance(network, ContextModel | FusedTransformer)
    return folder, card, network.eval()
