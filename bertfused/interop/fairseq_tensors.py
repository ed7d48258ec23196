"""fairseq's tensors as ours and back. Old layouts are first brought into that of 0.9 and later."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertfused.checkpoint import model_tensors
from bertfused.config import ModelConfig
from bertfused.errors import UserError
from bertfused.model import FusedTransformer
from bertfused.vocab import Vocabulary

State = dict[str, Tensor]

BERT = "bert_encoder."  # what the tensors of the pretrained encoder begin with

_SOURCE, _TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
_OUTPUT = "decoder.output_projection.weight"
# Our modules, and theirs whose rows stand in ours one below the other.
_MODULES = {
    "embed.tokens": ["embed_tokens"],
    "embed.positions": ["embed_positions"],
    "embed.norm": ["layernorm_embedding"],
    "norm": ["layer_norm"],
    "self_attention.in_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention.out_proj": ["self_attn.out_proj"],
    "cross_attention.q_proj": ["encoder_attn.q_proj"],
    "cross_attention.kv_proj": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "cross_attention.out_proj": ["encoder_attn.out_proj"],
    "bert_attention.q_proj": ["bert_attn.q_proj"],
    "bert_attention.kv_proj": ["bert_attn.k_proj", "bert_attn.v_proj"],
    "bert_attention.out_proj": ["bert_attn.out_proj"],
    "attention_norm": ["self_attn_layer_norm"],
    "self_attention_norm": ["self_attn_layer_norm"],
    "cross_attention_norm": ["encoder_attn_layer_norm"],
    "bert_attention_norm": ["bert_attn_layer_norm"],
    "ffn.up": ["fc1"],
    "ffn.down": ["fc2"],
    "ffn_norm": ["final_layer_norm"],
}
# Marks of versions, position tables that are computed, and zeros that 0.12.2 stores under names
# one letter away from real ones.
_NO_WEIGHTS = re.compile(
    r"(en|de)coder\.(version|embed_positions\.(_float_tensor|weights)"
    r"|layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias))"
)
_FIRST_POSITION = Vocabulary.pad + 1  # learned positions are counted from here


def read_state(content: Mapping[str, Any], checkpoint: Path) -> State:
    """Return the tensors of a checkpoint under their newest names, those of the NMT in float32.

    Raises:
        UserError: If there is no encoder and decoder of fairseq among them.
    """
    stored = content.get("model")
    if (
        not isinstance(stored, Mapping)
        or not all(isinstance(tensor, Tensor) for tensor in stored.values())
        or not {_SOURCE, _TARGET} <= stored.keys()
    ):
        raise UserError(f"{checkpoint} holds no encoder and decoder of fairseq")
    for side in ("encoder", "decoder"):
        # Of such a checkpoint fairseq leaves the norm after the last layer out, stored or not.
        is_old = float(stored.get(f"{side}.version", torch.ones(1))) < 2
        if is_old and f"{side}.layer_norm.weight" in stored:
            raise UserError(f"{checkpoint} is of an early fairseq without a norm after the layers")
    state: State = {}
    for name, tensor in stored.items():
        if name.startswith(BERT):
            state[name] = tensor
        elif not _NO_WEIGHTS.fullmatch(name):
            state |= _renamed(name, tensor.float())
    return state


def _renamed(name: str, tensor: Tensor) -> State:
    """Bring one tensor of before 0.9 into the newer layout."""
    if name == "decoder.embed_out":
        return {_OUTPUT: tensor}
    module, _, last = name.rpartition(".")
    if module.endswith("_attn"):
        if last.startswith("in_proj_"):
            kind = last.removeprefix("in_proj_")
            parts = zip("qkv", tensor.chunk(3), strict=True)
            return {f"{module}.{letter}_proj.{kind}": rows for letter, rows in parts}
        if last.endswith("_proj_weight"):
            return {f"{module}.{last.removesuffix('_weight')}.weight": tensor}
    return {name: tensor}


def bert_attention_sides(state: State) -> tuple[bool, bool]:
    """Say whether the encoder and whether the decoder has BERT attention."""
    fused = [name for name in state if ".bert_attn." in name]
    return (
        any(name.startswith("encoder.") for name in fused),
        any(name.startswith("decoder.") for name in fused),
    )


def is_stacked(state: State) -> bool:
    """Say whether the decoder's BERT attention has a norm, and so a residual, of its own."""
    return any(".bert_attn_layer_norm." in name for name in state)


def drop_closed_gates(state: State, gates: tuple[bool, ...], own_ratio: float) -> None:
    """Remove BERT attention behind closed gates, which is stored but never computed.

    Such a layer still multiplies its own attention by the ratio, which goes into the weights.
    """
    for layer, is_open in enumerate(gates):
        for side, attention in (("encoder", "self_attn"), ("decoder", "encoder_attn")):
            prefix = f"{side}.layers.{layer}."
            hidden = [name for name in state if name.startswith(f"{prefix}bert_attn.")]
            if is_open or not hidden:
                continue
            for name in hidden:
                del state[name]
            for kind in ("weight", "bias"):
                name = f"{prefix}{attention}.out_proj.{kind}"
                state[name] = state[name] * own_ratio


def take_tensors(
    state: State, model: FusedTransformer, config: ModelConfig, checkpoint: Path
) -> State:
    """Return the tensors of our model, taken from fairseq's.

    Raises:
        UserError: If one is missing, has another shape, or is left over.
    """
    left = {name: tensor for name, tensor in state.items() if not name.startswith(BERT)}
    tensors: State = {}
    for name, ours in model_tensors(model).items():
        theirs = _their_names(name)
        if missing := [part for part in theirs if part not in left]:
            raise UserError(f"{checkpoint} lacks the tensor {missing[0]}")
        tensor = torch.cat([left.pop(part) for part in theirs])
        if name.endswith("embed.positions.weight"):
            tensor = tensor[_FIRST_POSITION:]
        if tensor.shape != ours.shape:
            raise UserError(
                f"{' + '.join(theirs)} of {checkpoint} makes {tuple(tensor.shape)}, but the "
                f"options beside it ask for {tuple(ours.shape)}"
            )
        tensors[name] = tensor
    for copy, original in _copies(config).items():
        if not left.pop(copy, state[original]).equal(state[original]):
            raise UserError(f"{checkpoint} shares {copy} with {original}, but they differ")
    if left:
        raise UserError(f"{checkpoint} has tensors unknown here: {', '.join(left)}")
    return tensors


def export_state(model: FusedTransformer, config: ModelConfig) -> State:
    """Return our tensors as fairseq 0.12 stores them."""
    state: State = {f"{side}.version": torch.tensor([3.0]) for side in ("encoder", "decoder")}
    for name, tensor in model_tensors(model).items():
        if name.endswith("embed.positions.weight"):
            unused = tensor.new_zeros(_FIRST_POSITION, tensor.shape[1])
            tensor = torch.cat([unused, tensor])
        theirs = _their_names(name)
        for part, rows in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            state[part] = rows.clone()
    for copy, original in _copies(config).items():
        state[copy] = state[original]
    return state


def _their_names(name: str) -> list[str]:
    """Return the tensors that one of ours consists of."""
    if name == "output.weight":
        return [_OUTPUT]
    parts = re.fullmatch(r"((?:en|de)coder\.(?:layers\.\d+\.)?)(.+)(\.weight|\.bias)", name)
    assert parts is not None, name
    return [f"{parts[1]}{module}{parts[3]}" for module in _MODULES[parts[2]]]


def _copies(config: ModelConfig) -> dict[str, str]:
    """Return the names under which a shared embedding is stored again."""
    if config.share_embeddings == "all":
        return {_TARGET: _SOURCE, _OUTPUT: _SOURCE}
    return {_OUTPUT: _TARGET} if config.share_embeddings == "decoder" else {}


def embedding_sizes(state: State) -> tuple[int, int]:
    """Return the numbers of source and target symbols."""
    return len(state[_SOURCE]), len(state[_TARGET])
