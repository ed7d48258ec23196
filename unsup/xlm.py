"""XLM (Lample & Conneau, 2019): made, saved as transformers reads it, and the start of an NMT.

Besides unsup.pretrain it serves as the frozen encoder of any model: ``fusion.encoder`` names its
RUN (see ``bertfused.pretrained``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from bertfused.checkpoint import (
    WEIGHTS,
    WarmStart,
    copy_tensors,
    copy_text_files,
    model_tensors,
    write_tensors,
)
from bertfused.config import ModelConfig
from bertfused.errors import UserError
from bertfused.layers import DecoderLayer, EncoderLayer
from bertfused.model import FusedTransformer
from bertfused.pretrained import (
    PretrainedEncoder,
    XlmWordpieces,
    language_ids,
    load_pretrained,
    load_wordpieces,
    resolve_encoder,
)
from bertfused.subwords import load_tokenizer
from bertfused.text import make_folder, replace_file
from bertfused.vocab import MASK, Vocabulary
from bertfused.wordpieces import dictionary_languages

_TOKENS = "encoder.embed.tokens.weight"  # on both sides, and the output
_FEWEST_FOUND = 0.5  # of a dictionary's symbols, in the vocabulary of an XLM of others


def build_xlm(config: ModelConfig, vocabulary: Vocabulary, languages: Sequence[str]) -> Any:
    """Build an XLM with an output for masked tokens (transformers' XLMWithLMHeadModel), fresh.

    Its norms have the epsilon of ours, where published ones have 1e-12, so that an NMT that starts
    from it computes what it does.

    Args:
        config: Depth and widths are the encoder's; XLM is always post-norm, with learned positions
            and a norm after the embeddings.
        vocabulary: With a tag for masked tokens.
        languages: Each gets an embedding.

    Raises:
        UserError: If XLM cannot have such sizes.
    """
    from transformers import XLMConfig, XLMWithLMHeadModel

    if config.ffn_dim != 4 * config.model_dim:
        raise UserError(
            f"model.ffn_dim is {config.ffn_dim}, but XLM's is always 4 * model_dim, "
            f"{4 * config.model_dim} here"
        )
    xlm = XLMConfig(
        vocab_size=len(vocabulary),
        emb_dim=config.model_dim,
        n_layers=config.encoder_layers,
        n_heads=config.heads,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        gelu_activation=config.activation == "gelu",
        max_position_embeddings=config.max_positions,
        embed_init_std=config.model_dim**-0.5,
        layer_norm_eps=nn.LayerNorm(1).eps,
        n_langs=len(languages),
        bos_token_id=vocabulary.bos,
        pad_token_id=vocabulary.pad,
        eos_token_id=vocabulary.eos,
        unk_index=vocabulary.unk,
        mask_index=vocabulary.tags[MASK],
        mask_token_id=vocabulary.tags[MASK],
        architectures=["XLMWithLMHeadModel"],
    )
    # Published ones name their languages so; the class has no such field.
    xlm.lang2id = {language: number for number, language in enumerate(languages)}
    xlm.id2lang = dict(enumerate(languages))
    return XLMWithLMHeadModel(xlm)


@dataclass(frozen=True)
class XlmCard:
    """What a run of masked language modelling says of its model: a ``bertfused.run.Card``."""

    languages: tuple[str, ...]

    @property
    def kind(self) -> str:
        """What sort of model it is, for the report."""
        return "a masked language model (XLM)"

    @property
    def directions(self) -> str:
        """Say of which languages."""
        return " and ".join(self.languages)

    def save(
        self, folder: Path, model: nn.Module, encoder: PretrainedEncoder | None, text_folder: Path
    ) -> None:
        """Write the model as transformers reads it, and our subwords and dictionaries beside it."""
        make_folder(folder)
        copy_text_files(text_folder, folder)
        config: Any = model.config
        with replace_file(folder / "config.json") as handle:
            handle.write(config.to_json_string(use_diff=False).encode())
        write_tensors(folder / WEIGHTS, model_tensors(model), {"format": "pt"})


def start_from_xlm(
    model: FusedTransformer, name: str, symbols: Sequence[str], languages: Sequence[str]
) -> WarmStart:
    """Take over an XLM's weights on both sides of an NMT, as Lample & Conneau (2019) do.

    The encoder then computes what the XLM does. A layer of the decoder has the self-attention, the
    FFN and their norms of the XLM's layer; its attention to the encoder starts fresh. Departures
    from XLM's own code: the output has no bias, and our source has no </s> before it. Norms of a
    published XLM have another epsilon, 1e-12 (see ``build_xlm``).

    Args:
        name: Folder, RUN of ``unsup pretrain`` or hub name.
        symbols: The dictionary of the NMT, which its sides share.
        languages: Names in the order of the NMT's numbers.

    Raises:
        UserError: If network, dictionary or languages are not the XLM's.
    """
    path = resolve_encoder(name)
    xlm = load_pretrained("model", path)
    if xlm.config.model_type != "xlm":
        raise UserError(f"cannot start from {name}: it is no XLM, but {xlm.config.model_type!r}")
    _check_kind(model, xlm.config, name)
    _check_sizes(model, xlm.config, name, len(languages))
    rows = _rows_of_symbols(path, name, symbols)
    theirs, ours = xlm.state_dict(), model_tensors(model)
    taken = _as_ours(theirs, xlm.config.n_layers)
    for side in ("encoder", "decoder"):
        positions = f"{side}.embed.positions.weight"
        taken[positions] = theirs["position_embeddings.weight"][: len(ours[positions])]
        if (numbers := language_ids(name, xlm.config, languages)) is not None:
            taken[f"{side}.embed.languages.weight"] = theirs["lang_embeddings.weight"][numbers]
    is_found = rows >= 0
    taken[_TOKENS] = ours[_TOKENS].clone()
    taken[_TOKENS][is_found] = theirs["embeddings.weight"][rows[is_found]]
    copy_tensors(taken, {key: ours[key] for key in taken})
    return WarmStart(
        loaded=tuple(key for key in ours if key in taken),
        fresh=tuple(key for key in ours if key not in taken),
        unexpected=("pred_layer.proj.bias",),
        notes=(f"{int(is_found.sum()):,} of {len(symbols):,} symbols are in its vocabulary",),
    )


def _as_ours(xlm: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Name the tensors of an XLM's layers, and of the norm before them, as both our sides do."""
    ours = {}
    for side, norm in (("encoder", "attention_norm"), ("decoder", "self_attention_norm")):
        for kind in ("weight", "bias"):
            ours[f"{side}.embed.norm.{kind}"] = xlm[f"layer_norm_emb.{kind}"]
            for i in range(layers):
                attention = f"attentions.{i}"
                ours |= {
                    f"{side}.layers.{i}.{part}.{kind}": tensor
                    for part, tensor in {
                        "self_attention.in_proj": torch.cat(
                            [xlm[f"{attention}.{letter}_lin.{kind}"] for letter in "qkv"]
                        ),
                        "self_attention.out_proj": xlm[f"{attention}.out_lin.{kind}"],
                        norm: xlm[f"layer_norm1.{i}.{kind}"],
                        "ffn.up": xlm[f"ffns.{i}.lin1.{kind}"],
                        "ffn.down": xlm[f"ffns.{i}.lin2.{kind}"],
                        "ffn_norm": xlm[f"layer_norm2.{i}.{kind}"],
                    }.items()
                }
    return ours


def _check_kind(model: FusedTransformer, xlm: Any, name: str) -> None:
    """Refuse a network that does not compute what an XLM does; say what it has to be."""
    embed, layer = model.encoder.embed, _first_layer(model)
    activation = "gelu" if xlm.gelu_activation else "relu"
    tables = (embed.tokens.weight, model.decoder.embed.tokens.weight, model.output.weight)
    has_to_be = {
        'norm = "post"': not layer.pre_norm,
        f'activation = "{activation}"': layer.ffn.activation is getattr(functional, activation),
        'positions = "learned"': embed.positions is not None,
        "embedding_norm = true": embed.norm is not None,
        "scale_embeddings = false": embed.scale == 1,
        'share_embeddings = "all"': all(table is tables[0] for table in tables),
    }
    if wrong := [key for key, is_so in has_to_be.items() if not is_so]:
        raise UserError(f"cannot start from {name}: an XLM needs {', '.join(wrong)} in [model]")


def _check_sizes(model: FusedTransformer, xlm: Any, name: str, languages: int) -> None:
    """Refuse a network of other sizes than the XLM's; it may have fewer positions."""
    embed, layer, decoder_layer = model.encoder.embed, _first_layer(model), model.decoder.layers[0]
    assert isinstance(decoder_layer, DecoderLayer)
    assert embed.positions is not None
    positions = embed.positions.num_embeddings
    for key, ours, theirs in (
        ("encoder_layers", len(model.encoder.layers), xlm.n_layers),
        ("decoder_layers", len(model.decoder.layers), xlm.n_layers),
        ("model_dim", embed.tokens.embedding_dim, xlm.emb_dim),
        ("ffn_dim", layer.ffn.up.out_features, 4 * xlm.emb_dim),
        ("heads", layer.self_attention.heads, xlm.n_heads),
        ("decoder_heads", decoder_layer.self_attention.heads, xlm.n_heads),
        ("max_positions", positions, xlm.max_position_embeddings),
    ):
        if ours != theirs and not (key == "max_positions" and ours < theirs):
            raise UserError(f"cannot start from {name}: model.{key} is {ours}, but {theirs} there")
    known = 0 if embed.languages is None else embed.languages.num_embeddings
    if known != languages:
        raise UserError(
            f"cannot start from {name}: the network has embeddings of {known} languages, not of "
            f"{languages}"
        )


def _first_layer(model: FusedTransformer) -> EncoderLayer:
    layer = model.encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    return layer


def _rows_of_symbols(path: str, name: str, symbols: Sequence[str]) -> Int[Tensor, " vocab"]:
    """Return which row of an XLM's embeddings each symbol has; -1 for none.

    An XLM of ours has the symbols themselves. One of others has byte pairs: our "wor@@ ld" is its
    "wor ld</w>".
    """
    if languages := dictionary_languages(Path(path)):
        if load_tokenizer(Path(path), languages[0]).vocabulary.symbols != tuple(symbols):
            raise UserError(
                f"cannot start from {name}: its dict.{languages[0]}.txt is not that of the data; "
                f"prepare them with subwords.reuse = '{path}'"
            )
        return torch.arange(len(symbols))
    wordpieces = load_wordpieces(path)
    assert isinstance(wordpieces, XlmWordpieces)
    found = [_row_of(symbol, number, wordpieces) for number, symbol in enumerate(symbols)]
    rows = torch.tensor([-1 if row is None else row for row in found])
    count = int((rows >= 0).sum())
    if count < _FEWEST_FOUND * len(symbols):
        raise UserError(
            f"cannot start from {name}: only {count:,} of the {len(symbols):,} symbols of the "
            "dictionary are in its vocabulary; prepare the data with its own byte pairs "
            "(subwords.kind = 'bpe')"
        )
    return rows


def _row_of(symbol: str, number: int, wordpieces: XlmWordpieces) -> int | None:
    if symbol == MASK:
        return wordpieces.mask
    if number <= Vocabulary.unk:  # special symbols have the same names there
        return wordpieces.id_of(symbol)
    is_open = symbol.endswith("@@")
    return wordpieces.id_of(symbol.removesuffix("@@") if is_open else f"{symbol}</w>")
