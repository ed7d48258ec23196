"""Very small context-aware models of random weights, in memory and as run folders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from bertfused.batch import Example, pad_ids
from bertfused.checkpoint import ModelCard, load_card, load_model, model_tensors, save_model
from bertfused.config import ModelConfig
from bertfused.vocab import Vocabulary
from docnmt.cadec import draft_of
from docnmt.config import ConcatenationConfig, ContextConfig
from docnmt.context import (
    Context,
    ContextLayer,
    ContextModel,
    Current,
    Encoded,
    GatedAttention,
    Places,
    target_states,
)
from docnmt.models import build_context_model
from tests.tiny_encoders import make_fused_run
from tests.tiny_model import PLAIN, SOURCE_SIZE, TARGET_SIZE, tiny_batch, tiny_model
from tests.tiny_run import make_run

# [context] of every model on a frozen base, and of the main one's variants.
ON_A_BASE: dict[str, dict[str, object]] = {
    "layerwise": {"model": "layerwise"},
    "layerwise of 2 layers": {"model": "layerwise", "layers": 2},
    "last layer only": {"model": "layerwise", "layer_weighting": False},
    "reset_add": {"model": "layerwise", "reset_gate": "reset_add"},
    "no reset gate": {"model": "layerwise", "reset_gate": "none"},
    "no gates": {"model": "layerwise", "gates": False},
    "source only": {"model": "layerwise", "target": False},
    "target only": {"model": "layerwise", "source": False},
    "cadec": {"model": "cadec", "layers": 2},
    "zhang": {"model": "zhang"},
    "zhang of 2 layers": {"model": "zhang", "layers": 2, "sentences": 3},
}
CONCATENATED: dict[str, dict[str, object]] = {
    "2-to-1": {"model": "concatenation"},
    "2-to-2": {"model": "concatenation", "target": True},
    "4-to-4": {"model": "concatenation", "target": True, "sentences": 3},
}


def context_config(options: dict[str, object]) -> ContextConfig:
    """Make the configuration that [context] with these options is."""
    adapter: TypeAdapter[ContextConfig] = TypeAdapter(ContextConfig)
    return adapter.validate_python(options)


def tiny_card(**options: object) -> ModelCard:
    """Describe the base that ``tiny_model`` builds with the same options of [model]."""
    model = ModelConfig.model_validate({**PLAIN, **options})
    return ModelCard(
        source="en",
        target="de",
        source_size=SOURCE_SIZE,
        target_size=TARGET_SIZE,
        model=model,
        text_files={},
    )


def tiny_context_model(
    context: dict[str, object],
    fusion: dict[str, object] | None = None,
    *,
    moved: float = 0.3,
    seed: int = 9,
    **options: object,
) -> ContextModel:
    """Build a model on a ``tiny_model``.

    Args:
        context: [context] of the recipe.
        moved: How far the parameters of the context layers are from their starting values.
        options: Of the base, as in [model].
    """
    base = tiny_model(fusion, **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_context_model(base, tiny_card(**options), context_config(context))
        move(model, moved)
    return model.eval()


def move(model: ContextModel, distance: float) -> None:
    """Move what is trained away from where it starts, which would hide mistakes."""
    with torch.no_grad():
        for parameter in own_parameters(model).values():
            parameter += distance * torch.randn_like(parameter)


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the base does not have."""
    named = model.named_parameters()
    return {name: own for name, own in named if not name.startswith("base.")}


@dataclass(frozen=True)
class Given:
    """What a model is given to translate some sentences in context."""

    encoded: Encoded
    current: Current
    source: Context
    target: Context


def given(
    model: ContextModel,
    examples: Sequence[Example],
    previous: Sequence[Sequence[int]],
    wanted: Sequence[int],
    drafts: Sequence[Sequence[int]],
) -> Given:
    """Encode sentences, and collect the contexts of some of them.

    Args:
        examples: All sentences that are needed, with their targets.
        previous: For each wanted sentence the places of its previous ones, oldest first.
        wanted: Places of the sentences to be translated.
        drafts: Of each wanted sentence, for a model that reads them.
    """
    encoded = Encoded(model.base, tiny_batch(list(examples)))
    batch = encoded.batch
    assert batch.target is not None
    assert batch.target_mask is not None
    assert encoded.hidden is not None
    source = model.source_states(encoded)[batch.source_mask]
    target = target_states(model.base.decoder.embed, batch.target, encoded.hidden)
    current = encoded.select(torch.tensor(wanted))
    if model.wants_draft:
        ids, _ = pad_ids(drafts, Vocabulary.pad)
        current = replace(current, draft=draft_of(model.base, current, ids))
    target = target[batch.target_mask][:, : None if model.reads_target else 0]
    contexts = []
    for mask, flat in ((batch.source_mask, source), (batch.target_mask, target)):
        contexts.append(Places.of(previous, mask.sum(1).numpy()).gather(flat))
    return Given(encoded, current, *contexts)


def logits(model: ContextModel, own: Given) -> Tensor:
    """Compute the logits of every target token of the sentences to translate."""
    found: Tensor = model.output(model.hidden(own.current, own.source, own.target))
    return found


def by_steps(model: ContextModel, own: Given) -> Tensor:
    """Compute them as a search does, token by token."""
    assert own.current.decoder_input is not None
    decoder = model.start(own.current, own.source, own.target)
    columns = own.current.decoder_input.split(1, dim=1)
    return torch.cat([decoder.step(tokens).clone() for tokens in columns], dim=1)


def attend_by_hand(own: GatedAttention, x: Tensor, memory: Tensor) -> Tensor:
    """Compute attention to a memory without padding, and its gate, from their equations."""
    attended = own.attention(own.norm(x), memory, None)
    if own.gate is None:
        return x + attended
    gate = torch.sigmoid(own.gate.gate(torch.cat([x, attended], dim=-1)))
    return gate * x + (1 - gate) * attended


def layer_by_hand(
    layer: nn.Module, x: Tensor, bias: Tensor | None, memories: Sequence[Tensor]
) -> Tensor:
    """Compute a layer over memories without padding."""
    assert isinstance(layer, ContextLayer)
    x = x + layer.self_attention(layer.self_attention_norm(x), bias)
    for own, memory in zip(layer.attentions, memories, strict=True):
        assert isinstance(own, GatedAttention)
        x = attend_by_hand(own, x, memory)
    found: Tensor = x + layer.ffn(layer.ffn_norm(x))
    return found


# On disk


def make_context_run(
    folder: Path,
    context: dict[str, object],
    *,
    encoder: Path | None = None,
    fusion: dict[str, object] | None = None,
    previous: int = 0,
    **options: object,
) -> Path:
    """Write ``folder/model``, and its base as ``folder/base``; return ``folder``.

    Args:
        encoder: A tiny encoder; the base is fused with it.
        fusion: More of [fusion].
        previous: Sentences that the encoder reads before the current one.
        options: Of [model].
    """
    base = folder / "base"
    if encoder is None:
        make_run(base, **options)
    else:
        make_fused_run(base, encoder, **(fusion or {}))
    config = context_config(context)
    trained = load_model(base)
    card = load_card(base / "model").model_copy(
        update={
            "context": config.model_dump(mode="json"),
            "documents": {"previous": previous, "format": "blank"},
        }
    )
    network: nn.Module = trained.model
    if not isinstance(config, ConcatenationConfig):
        torch.manual_seed(9)
        model = build_context_model(trained.model, card, config)
        move(model, 0.2)
        network = model
    save_model(folder / "model", card, model_tensors(network), base / "model")
    return folder
