"""The state dicts of the official BERTGEN and of BERT: their names for our tensors.

Only this module knows these names. Of the official tensors two are never used, and are left out:
``object_mask_visual_embedding`` and ``aux_text_visual_embedding``.
"""

import logging
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bertfused.checkpoint import new_folder
from bertfused.errors import UserError
from bertfused.pretrained import TransformersWordpieces, make_bert_tokenizer
from bertfused.text import read_lines
from bertgen.card import GenCard, Sizes, load_weights
from bertgen.data import TOKENIZER, SymbolsReport
from bertgen.model import GEOMETRY_DIM

_logger = logging.getLogger(__name__)

UNUSED = ("object_mask_visual_embedding.weight", "aux_text_visual_embedding.weight")
_TIED = "vlbert.mlm_head.predictions.decoder.weight"
_VECTORS = {
    "object_linguistic_embeddings.weight": "objects.word",
    "vlbert.end_embedding.weight": "end",
}
_NAMES = {
    "image_feature_extractor.obj_downsample.1": "objects.projection",
    "vlbert.word_embeddings": "words",
    "vlbert.position_embeddings": "positions",
    "vlbert.token_type_embeddings": "types",
    "vlbert.embedding_LayerNorm": "norm",
    "vlbert.visual_ln_text": "objects.text_norm",
    "vlbert.visual_ln_object": "objects.norm",
    "vlbert.mlm_head.predictions.transform.dense": "head.transform",
    "vlbert.mlm_head.predictions.transform.LayerNorm": "head.norm",
}
_IN_LAYER = {
    "attention.output.dense": "output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "ffn_norm",
}
_LANGUAGES = {"tu": "tr"}  # Turkish, which the official code calls so
_QUERY_KEY_VALUE = ("query", "key", "value")


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors of an official state dict.

    Raises:
        KeyError: Naming a tensor that it lacks, or one that is unknown.
    """
    left = {name: tensor for name, tensor in state.items() if name not in (*UNUSED, _TIED)}
    found = {ours: left.pop(theirs)[0] for theirs, ours in _VECTORS.items()}
    found["head.bias"] = left.pop("vlbert.mlm_head.predictions.bias")
    for theirs, ours in _NAMES.items():
        for kind in ("weight", "bias"):
            if kind == "weight" or f"{theirs}.bias" in left:
                found[f"{ours}.{kind}"] = left.pop(f"{theirs}.{kind}")
    found |= layers_of(left, "vlbert.encoder.")
    if left:
        raise KeyError(next(iter(left)))
    return found


def layers_of(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the tensors of BERT's layers out of a state dict, and give them our names."""
    numbers = {
        int(m[1]) for name in state if (m := re.match(rf"{re.escape(prefix)}layer\.(\d+)\.", name))
    }
    found = {}
    for number in sorted(numbers):
        theirs = f"{prefix}layer.{number}"
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{theirs}.attention.self.{own}.{kind}") for own in _QUERY_KEY_VALUE]
            found[f"layers.{number}.query_key_value.{kind}"] = torch.cat(parts)
            for name, ours in _IN_LAYER.items():
                found[f"layers.{number}.{ours}.{kind}"] = state.pop(f"{theirs}.{name}.{kind}")
    return found


def from_bert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors of the state dict of a BERT, with or without a head."""
    left = dict(state)
    found = layers_of(left, "encoder.")
    for theirs, ours in {
        "embeddings.word_embeddings.weight": "words.weight",
        "embeddings.position_embeddings.weight": "positions.weight",
        "embeddings.token_type_embeddings.weight": "types.weight",
        "embeddings.LayerNorm.weight": "norm.weight",
        "embeddings.LayerNorm.bias": "norm.bias",
        "cls.predictions.transform.dense.weight": "head.transform.weight",
        "cls.predictions.transform.dense.bias": "head.transform.bias",
        "cls.predictions.transform.LayerNorm.weight": "head.norm.weight",
        "cls.predictions.transform.LayerNorm.bias": "head.norm.bias",
        "cls.predictions.bias": "head.bias",
    }.items():
        if theirs in left:
            found[ours] = left[theirs]
    return found


def visual_parts(path: Path) -> dict[str, Tensor]:
    """Return our tensors of what the paper takes from a VL-BERT, by its state dict.

    Raises:
        UserError: If the file holds none of them.
    """
    state, found = read_state(path), {}
    for theirs, ours in {**_NAMES, **_VECTORS}.items():
        if not ours.startswith(("objects", "positions", "types", "norm", "end")):
            continue
        if theirs in _VECTORS and theirs in state:
            found[ours] = state[theirs][0]
        for kind in ("weight", "bias"):
            if (name := f"{theirs}.{kind}") in state:
                found[f"{ours}.{kind}"] = state[name]
    if not found:
        raise UserError(f"{path} has no tensor of a VL-BERT")
    return found


def import_checkpoint(checkpoint: Path, vocab: Path, out: Path, heads: int | None = None) -> None:
    """Make a RUN of an official checkpoint: a state dict, or a file that has one inside.

    Args:
        vocab: Its vocabulary; the names [STOP] and [TO_XX] say where these symbols are.
        heads: Of attention; default: one for each 64 of the width.

    Raises:
        UserError: If the files are not what they should be, or ``out`` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists already; give a new folder")
    state = read_state(checkpoint)
    try:
        tensors = from_official(state)
    except KeyError as error:
        raise UserError(
            f"{checkpoint} is no BERTGEN: {error.args[0]} is missing or unknown"
        ) from error
    vocab_size, model_dim = tensors["words.weight"].shape
    max_positions = len(tensors["positions.weight"])
    sizes = Sizes(
        vocab_size=vocab_size,
        model_dim=model_dim,
        layers=sum(name.endswith(".up.bias") for name in tensors),
        heads=heads or max(model_dim // 64, 1),
        ffn_dim=len(tensors["layers.0.up.bias"]),
        feature_dim=tensors["objects.projection.weight"].shape[1] - GEOMETRY_DIM,
        max_positions=max_positions,
    )
    if model_dim % sizes.heads:
        raise UserError(f"--heads {sizes.heads} does not divide the width {model_dim}")
    with new_folder(out) as made:
        tokenizer = make_bert_tokenizer(vocab, made / TOKENIZER, max_positions)
        if tokenizer.vocabulary_size != vocab_size:
            raise UserError(
                f"{vocab} has {tokenizer.vocabulary_size:,} entries, the checkpoint {vocab_size:,}"
            )
        card = GenCard(
            sizes=sizes,
            attention="bidirectional",
            symbols=_symbols(vocab, tokenizer),
            tokenizer=tokenizer.fingerprint,
            tasks=("imported",),
        )
        model = card.build()
        load_weights(model, tensors, str(checkpoint))
        card.save(made / "model", model, None, made)
        shutil.rmtree(made / TOKENIZER)
    unused = [name for name in UNUSED if name in state]
    _logger.info("imported %s tensors; never used: %s", len(tensors), ", ".join(unused))


def _symbols(vocab: Path, tokenizer: TransformersWordpieces) -> SymbolsReport:
    """Find the symbols of the official code by their names in a vocabulary."""
    names = list(read_lines(vocab))
    into = {
        _LANGUAGES.get(found[1].lower(), found[1].lower()): number
        for number, name in enumerate(names)
        if (found := re.fullmatch(r"\[TO_(\w+)\]", name))
    }
    if "[STOP]" not in names or not into:
        raise UserError(f"{vocab} has no [STOP] or no [TO_XX]; give the one of the official code")
    return SymbolsReport.model_validate(
        {
            **tokenizer.symbols,
            "vocab_size": len(names),
            "stop": names.index("[STOP]"),
            "into": into,
        }
    )


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a state dict, or a file that has one inside; "module." before names is dropped.

    Raises:
        UserError: If there is none.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(
            f"cannot read {path}: it is no file of PyTorch, or has more in it than tensors"
        ) from error
    while isinstance(loaded, dict) and "state_dict" in loaded:
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(own, Tensor) for own in loaded.values()):
        raise UserError(f"{path} holds no state dict")
    return {name.removeprefix("module."): tensor for name, tensor in loaded.items()}
