"""Very small XLMs: one as published ones lie on a hub, and one as ``unsup pretrain`` leaves it."""

import json
from pathlib import Path

import torch
import transformers

from bertfused.config import ModelConfig
from bertfused.subwords import Tokenizer, Words
from bertfused.vocab import Vocabulary
from unsup.xlm import XlmCard, build_xlm

DIM, DEPTH, LIMIT = 8, 3, 24  # width, layers, positions

#: The [model] of an NMT that can start from them.
MODEL = {
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "model_dim": DIM,
    "ffn_dim": 4 * DIM,
    "heads": 2,
    "norm": "post",
    "activation": "gelu",
    "positions": "learned",
    "max_positions": LIMIT,
    "embedding_norm": True,
    "scale_embeddings": False,
    "share_embeddings": "all",
}

_SPECIAL = ["<s>", "</s>", "<pad>", "<unk>", *(f"<special{i}>" for i in range(10))]
_LETTERS = "abcdefghijklmnopqrstuvwxyz.,<>/'"
_MERGES = ["t h", "th e</w>", "c a", "ca t</w>"]
HUB = {
    piece: id
    for id, piece in enumerate(
        [*_SPECIAL, *(f"{c}</w>" for c in _LETTERS), *_LETTERS, "th", "the</w>", "ca", "cat</w>"]
    )
}


def make_hub_xlm(folder: Path, *, seed: int = 0, **options: object) -> Path:
    """Write an XLM of English and French in the files of ``xlm-mlm-enfr-1024``."""
    config = transformers.XLMConfig(
        **{
            "vocab_size": len(HUB),
            "emb_dim": DIM,
            "n_layers": DEPTH,
            "n_heads": 2,
            "max_position_embeddings": LIMIT,
            "n_langs": 2,
            "lang2id": {"en": 0, "fr": 1},
            "id2lang": {"0": "en", "1": "fr"},
            "bos_index": 0,
            "eos_index": 1,
            "pad_index": 2,
            "layer_norm_eps": 1e-5,
            **options,
        }
    )
    torch.manual_seed(seed)
    _save(transformers.XLMWithLMHeadModel(config), folder)
    (folder / "vocab.json").write_text(json.dumps(HUB))
    (folder / "merges.txt").write_text("".join(f"{merge} 9\n" for merge in _MERGES))
    return folder


def own_vocabulary() -> Vocabulary:
    """Words w0 = 4, w1 = 5, ..., w19, and a mask."""
    words = [f"w{number}" for number in range(20)]
    return Vocabulary([*words, "<mask>"], [*range(20, 0, -1), -1])


def make_own_xlm(run: Path, *, seed: int = 0) -> Path:
    """Write RUN/model with an XLM of English and French over ``own_vocabulary``."""
    vocabulary, texts = own_vocabulary(), run / "texts"
    texts.mkdir(parents=True)
    for language in ("en", "fr"):
        Tokenizer(Words(), vocabulary).save(texts, language)
    torch.manual_seed(seed)
    model = build_xlm(ModelConfig.model_validate(MODEL), vocabulary, ("en", "fr"))
    _move(model)
    XlmCard(("en", "fr")).save(run / "model", model, None, texts)
    return run


def _save(model: transformers.PreTrainedModel, folder: Path) -> None:
    _move(model)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)


def _move(model: transformers.PreTrainedModel) -> None:
    """Give norms and biases values that hide no mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
