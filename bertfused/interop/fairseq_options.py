"""fairseq's options of a Transformer, and the official BERT-fused code's, as our configuration."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from bertfused.config import FusionConfig, ModelConfig
from bertfused.errors import UserError

Options = dict[str, Any]

# What an option is when a checkpoint does not say it, by architecture over "transformer". The
# official BERT-fused code has the same under names with "_s2" or "transformerstack".
_DEFAULTS: Options = {
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
    "encoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_layers": 6,
    "decoder_attention_heads": 8,
    "decoder_normalize_before": False,
    "decoder_learned_pos": False,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "relu_dropout": 0.0,  # the older name of the one above
    "activation_fn": "relu",
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "share_all_embeddings": False,
    "share_decoder_input_output_embed": False,
    # the official BERT-fused code
    "encoder_ratio": 1.0,
    "bert_ratio": 1.0,
    "encoder_bert_dropout": False,
    "encoder_bert_dropout_ratio": 0.25,
    "encoder_bert_mixup": False,
    "bert_output_layer": -1,
    "bert_first": True,
    "mask_cls_sep": False,
    "finetune_bert": False,
}
_IWSLT: Options = {
    "encoder_ffn_embed_dim": 1024,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
_BIG: Options = {
    "encoder_embed_dim": 1024,
    "encoder_ffn_embed_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "dropout": 0.3,
}
_T2T: Options = {
    "encoder_normalize_before": True,
    "decoder_normalize_before": True,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
}
_TINY: Options = {
    "encoder_embed_dim": 64,
    "encoder_ffn_embed_dim": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
}
_ARCHITECTURES: dict[str, Options] = {
    "transformer": {},
    "transformer_wmt_en_de": {},
    "transformer_tiny": _TINY,
    "transformer_iwslt_de_en": _IWSLT,
    "transformer_vaswani_wmt_en_de_big": _BIG,
    "transformer_vaswani_wmt_en_fr_big": {**_BIG, "dropout": 0.1},
    "transformer_wmt_en_de_big": {**_BIG, "attention_dropout": 0.1},
    "transformer_wmt_en_de_big_t2t": {**_BIG, **_T2T},
}

_UNSUPPORTED = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "cross_self_attention",
    "decoder_layerdrop",
    "decoder_layers_to_keep",
    "encoder_layerdrop",
    "encoder_layers_to_keep",
    "merge_src_tgt_embed",
    "no_cross_attention",
    "no_decoder_final_norm",
    "no_token_positional_embeddings",
    "quant_noise_scalar",
)
# Of these a model has one value here.
_EQUAL = tuple(
    (f"encoder_{name}", f"decoder_{name}")
    for name in ("embed_dim", "ffn_embed_dim", "normalize_before", "learned_pos")
)
_LIMITS = ("max_source_positions", "max_target_positions")


def read_options(content: Mapping[str, Any], checkpoint: Path) -> Options:
    """Return all options of a checkpoint as one flat table, defaults included.

    Raises:
        UserError: If one of them is not supported here.
    """
    if content.get("args") is not None:
        stored = _as_table(content["args"])
    elif content.get("cfg") is not None:
        cfg = _as_table(content["cfg"])
        stored = {**_as_table(cfg.get("task")), **_as_table(cfg.get("model"))}
    else:
        raise UserError(f"{checkpoint} has neither args nor cfg, so it is no fairseq checkpoint")
    for side in ("encoder", "decoder"):  # hydra's configurations have a table for each
        for key, value in _as_table(stored.pop(side, None)).items():
            stored.setdefault(f"{side}_{key}", value)
    stored = {key: value for key, value in stored.items() if value is not None}
    options = {**_DEFAULTS, **_defaults_of(stored, checkpoint), **stored}
    for name in _UNSUPPORTED:
        if options.get(name):
            raise UserError(
                f"{checkpoint} was trained with {_flag(name)} {options[name]}, which is not "
                "supported here"
            )
    for source, target in (*_EQUAL, *([_LIMITS] if options["encoder_learned_pos"] else [])):
        if options[source] != options.setdefault(target, options[source]):
            raise UserError(
                f"{checkpoint} was trained with {_flag(source)} {options[source]} and "
                f"{_flag(target)} {options[target]}; they have to be equal here"
            )
    return options


def _as_table(value: Any) -> Options:
    if isinstance(value, argparse.Namespace):
        return dict(vars(value))
    return dict(value) if isinstance(value, Mapping) else {}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _defaults_of(stored: Options, checkpoint: Path) -> Options:
    name = str(stored.get("arch", stored.get("_name", "transformer")))
    plain = re.sub(r"^transformer(s2|stack|_s2)", "transformer", name)
    if plain not in _ARCHITECTURES:
        # One of the user's own; tensors show everything but the heads if its defaults differ.
        for option in ("encoder_attention_heads", "decoder_attention_heads"):
            if option not in stored:
                raise UserError(
                    f"{checkpoint} does not say {_flag(option)}, and the defaults of its "
                    f"architecture {name!r} are not known here"
                )
    return _ARCHITECTURES.get(plain, {})


def model_config(options: Options, checkpoint: Path) -> ModelConfig:
    """Translate the options of the Transformer.

    Raises:
        UserError: If a value is not possible here.
    """
    share: Literal["all", "decoder", "none"] = "none"
    if options["share_all_embeddings"]:
        share = "all"
    elif options["share_decoder_input_output_embed"]:
        share = "decoder"
    heads, decoder_heads = options["encoder_attention_heads"], options["decoder_attention_heads"]
    try:
        return ModelConfig(
            encoder_layers=options["encoder_layers"],
            decoder_layers=options["decoder_layers"],
            model_dim=options["encoder_embed_dim"],
            ffn_dim=options["encoder_ffn_embed_dim"],
            heads=heads,
            decoder_heads=None if decoder_heads == heads else decoder_heads,
            dropout=options["dropout"],
            attention_dropout=options["attention_dropout"],
            activation_dropout=options["activation_dropout"] or options["relu_dropout"],
            norm="pre" if options["encoder_normalize_before"] else "post",
            activation=options["activation_fn"],
            positions="learned" if options["encoder_learned_pos"] else "sinusoidal",
            max_positions=max(options[name] for name in _LIMITS),
            embedding_norm=options["layernorm_embedding"],
            scale_embeddings=not options["no_scale_embedding"],
            share_embeddings=share,
        )
    except ValidationError as error:
        raise _invalid(error, checkpoint) from error


def fusion_config(
    options: Options,
    model: ModelConfig,
    encoder: str,
    checkpoint: Path,
    *,
    sides: tuple[bool, bool],
    is_stacked: bool,
) -> FusionConfig:
    """Translate the options of the official BERT-fused code.

    Its drop-net rate is the probability of dropping one given branch, half the paper's p. With
    drop-net (or mixup, which needs it) it averages the branches in evaluation, without it sums
    them. Its layers are counted without the embeddings. Its stacked decoder reads neither of
    these options.

    Args:
        sides: Whether encoder and decoder have BERT attention.
        is_stacked: Whether the decoder's two attentions follow one another.
    """
    drops = bool(options["encoder_bert_dropout"]) and not is_stacked
    mixes = drops and bool(options["encoder_bert_mixup"])
    layer = -1 if is_stacked else options["bert_output_layer"]
    depth = max(model.encoder_layers, model.decoder_layers)
    stored_gates = () if is_stacked else options.get("bert_gates", ())
    gates = (*(gate == 1 for gate in stored_gates), *(True,) * (depth - len(stored_gates)))
    stacked_order = "bert-first" if options["bert_first"] else "encoder-first"
    values: Options = {
        "encoder": encoder,
        "layer": layer + 1 if layer >= 0 else layer,
        "drop_net": 2 * options["encoder_bert_dropout_ratio"] if drops and not mixes else 0.0,
        "mixup": mixes,
        "start": "paper",
        "encoder_attention": sides[0],
        "decoder_attention": sides[1],
        "gates": None if all(gates) else gates,
        "order": stacked_order if is_stacked else "parallel",
        "mask_special": options["mask_cls_sep"],
        "finetune": options["finetune_bert"],
    }
    if not (drops or is_stacked):
        values["branch_weights"] = (options["encoder_ratio"], options["bert_ratio"])
    try:
        return FusionConfig(**values)
    except ValidationError as error:
        raise _invalid(error, checkpoint) from error


def _invalid(error: ValidationError, checkpoint: Path) -> UserError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the model"
    return UserError(
        f"{checkpoint} has options that are not possible here: {where} = {first['input']!r}: "
        f"{first['msg']}"
    )


def export_options(config: ModelConfig) -> Options:
    """Say in fairseq's options what the network is."""
    options: Options = {"_name": "transformer", "arch": "transformer"}
    for side, layers, heads in (
        ("encoder", config.encoder_layers, config.heads),
        ("decoder", config.decoder_layers, config.decoder_heads or config.heads),
    ):
        options |= {
            f"{side}_layers": layers,
            f"{side}_attention_heads": heads,
            f"{side}_embed_dim": config.model_dim,
            f"{side}_ffn_embed_dim": config.ffn_dim,
            f"{side}_normalize_before": config.norm == "pre",
            f"{side}_learned_pos": config.positions == "learned",
        }
    return options | {
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "activation_fn": config.activation,
        "layernorm_embedding": config.embedding_norm,
        "no_scale_embedding": not config.scale_embeddings,
        "max_source_positions": config.max_positions,
        "max_target_positions": config.max_positions,
        "share_all_embeddings": config.share_embeddings == "all",
        "share_decoder_input_output_embed": config.share_embeddings != "none",
    }
