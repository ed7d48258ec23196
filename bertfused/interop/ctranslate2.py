"""CTranslate2's model folders. It has no second encoder, so only plain Transformers fit in."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from bertfused.attention import CrossAttention, SelfAttention
from bertfused.batch import Example, collate
from bertfused.checkpoint import (
    WEIGHTS,
    ModelCard,
    TrainedModel,
    load_card,
    load_model,
    model_folder,
    new_folder,
)
from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.interop.folders import refuse_existing
from bertfused.layers import DecoderLayer, EncoderLayer, FeedForward, sinusoids
from bertfused.model import DecoderState, Embedding
from bertfused.search import beam_search
from bertfused.subwords import Tokenizer, load_tokenizer
from bertfused.text import sha256_file
from bertfused.vocab import Vocabulary

# CTranslate2 cuts its input here by default; its tables of positions have at least so many rows.
_POSITIONS = 1024


def export_ctranslate2(run: Path, out: Path, lines: Sequence[str] = ()) -> None:
    """Write a CTranslate2 model folder, with dictionaries and subword models beside it.

    The folder appears only if CTranslate2 then translates as we do, greedily.

    Args:
        lines: Source lines to compare on (blank ones no model sees); by default random symbols.

    Raises:
        UserError: If the model is fused, if CTranslate2 is not installed, or if the translations
            differ.
    """
    refuse_existing(out)
    try:
        from ctranslate2.specs import TransformerSpec  # noqa: F401
    except ImportError as error:
        raise UserError(
            "export to CTranslate2 needs its package (pip install ctranslate2)"
        ) from error
    trained = load_model(run)
    if trained.card.fusion is not None:
        raise UserError(f"{run} is a fused model; CTranslate2 has no place for a second encoder")
    if trained.card.languages:
        raise UserError(f"{run} has embeddings of languages; CTranslate2 has no place for them")
    specification = _specification(trained)
    specification.validate()
    specification.optimize()
    with new_folder(out) as folder:
        specification.save(str(folder))
        trained.source_tokenizer.save(folder, trained.card.source)
        trained.target_tokenizer.save(folder, trained.card.target)
        _check(trained, folder, lines)


def unsuited_search(search: SearchConfig) -> str | None:
    """Say why CTranslate2 would not find what our search finds, ``None`` if it would.

    Its sampling has one seed for all lines, so that a line's text would change with its batch.
    """
    if search.sampling:
        return "its sampling does not give each line a stream of its own"
    if search.max_length_a:
        return "its longest output does not depend on the source (search.max_length_a)"
    if search.diverse_groups:
        return "it has no diverse beam search"
    if search.temperature != 1:
        return "its beam search has no temperature"
    return None


def exported(run: Path) -> Path:
    """Export a RUN into a temporary folder, which lasts while the program does; once.

    Raises:
        UserError: As of `export_ctranslate2`.
    """
    return _exported(run, sha256_file(model_folder(run) / WEIGHTS))


@cache
def _exported(run: Path, weights: str) -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    export_ctranslate2(run, Path(folder) / "model")
    return Path(folder) / "model"


class CTranslate2Search:
    """CTranslate2's greedy and beam search on a plain RUN, exported to a temporary folder.

    Nothing that it writes is unknown or a tag.

    Args:
        device: "cpu", "cuda", "cuda:1", ...; "auto" is a GPU if there is one.
        compute_type: As CTranslate2 names them, e.g. "float32" or "int8".
        threads: Of one batch.

    Raises:
        UserError: As of `export_ctranslate2`.
    """

    def __init__(self, run: Path, *, device: str, compute_type: str, threads: int) -> None:
        model = exported(run)
        import ctranslate2

        kind, _, index = device.partition(":")
        self._translator = ctranslate2.Translator(
            str(model),
            device=kind,
            device_index=int(index or 0),
            compute_type=compute_type,
            intra_threads=threads,
        )
        card = load_card(run_folder := model_folder(run))
        source, target = (
            load_tokenizer(run_folder, language).vocabulary
            for language in (card.source, card.target)
        )
        self._source, self._target = source.symbols, target
        never = (Vocabulary.bos, Vocabulary.pad, Vocabulary.unk, *target.tags.values())
        self._never = [[target.symbols[id]] for id in never]

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        search: SearchConfig,
        *,
        longest: int,
        batch_tokens: int,
    ) -> list[list[int]]:
        """Translate ids, EOS excluded on both sides.

        Args:
            longest: Most tokens of a translation.
            batch_tokens: Source tokens of a batch.
        """
        results = self._translator.translate_batch(
            [[self._source[id] for id in ids] for ids in sources],
            max_batch_size=batch_tokens,
            batch_type="tokens",
            beam_size=search.beam_size,
            length_penalty=search.length_penalty if search.normalize else 0.0,
            no_repeat_ngram_size=search.no_repeat_ngram or 0,
            min_decoding_length=search.min_length,
            max_decoding_length=longest,
            max_input_length=0,
            suppress_sequences=self._never,
        )
        return [
            [self._target.id_of(symbol) for symbol in result.hypotheses[0]] for result in results
        ]


def _specification(trained: TrainedModel) -> Any:
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation
    from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec

    model, config = trained.model, trained.card.model
    options = {
        "pre_norm": config.norm == "pre",
        "activation": Activation.RELU if config.activation == "relu" else Activation.GELU,
        "layernorm_embedding": config.embedding_norm,
    }
    encoder = TransformerEncoderSpec(config.encoder_layers, config.heads, **options)
    decoder = TransformerDecoderSpec(
        config.decoder_layers, config.decoder_heads or config.heads, **options
    )
    encoder.scale_embeddings = decoder.scale_embeddings = config.scale_embeddings
    positions = max(_POSITIONS, config.max_positions)
    _set_embedding(encoder, encoder.embeddings[0], model.encoder.embed, positions)
    _set_embedding(decoder, decoder.embeddings, model.decoder.embed, positions)
    for spec, layer in zip(encoder.layer, model.encoder.layers, strict=True):
        assert isinstance(layer, EncoderLayer)
        _set_self_attention(spec.self_attention, layer.self_attention, layer.attention_norm)
        _set_ffn(spec.ffn, layer.ffn, layer.ffn_norm)
    for spec, layer in zip(decoder.layer, model.decoder.layers, strict=True):
        assert isinstance(layer, DecoderLayer)
        _set_self_attention(spec.self_attention, layer.self_attention, layer.self_attention_norm)
        _set_cross_attention(spec.attention, layer.cross_attention, layer.cross_attention_norm)
        _set_ffn(spec.ffn, layer.ffn, layer.ffn_norm)
    for spec, norm in ((encoder, model.encoder.norm), (decoder, model.decoder.norm)):
        if norm is not None:
            _set_norm(spec.layer_norm, norm)
    _set_linear(decoder.projection, model.output)

    specification = TransformerSpec(encoder, decoder)
    specification.register_source_vocabulary(_symbols(trained.source_tokenizer))
    specification.register_target_vocabulary(_symbols(trained.target_tokenizer))
    specification.config.decoder_start_token = specification.config.eos_token  # as fairseq
    specification.config.add_source_eos = True
    return specification


def _symbols(tokenizer: Tokenizer) -> list[str]:
    symbols = list(tokenizer.vocabulary.symbols)
    if len(set(symbols)) < len(symbols):
        twice = next(symbol for symbol in symbols if symbols.count(symbol) > 1)
        raise UserError(f"the dictionary has {twice!r} twice, which CTranslate2 cannot tell apart")
    return symbols


def _set_embedding(spec: Any, tokens: Any, embedding: Embedding, positions: int) -> None:
    tokens.weight = embedding.tokens.weight.detach()
    if embedding.positions is None:
        table = sinusoids(positions, embedding.tokens.embedding_dim)
    else:
        table = embedding.positions.weight.detach()
    spec.position_encodings.encodings = table
    if embedding.norm is not None:
        _set_norm(spec.layernorm_embedding, embedding.norm)


def _set_self_attention(spec: Any, attention: SelfAttention, norm: nn.LayerNorm) -> None:
    _set_norm(spec.layer_norm, norm)
    for part, linear in zip(spec.linear, (attention.in_proj, attention.out_proj), strict=True):
        _set_linear(part, linear)


def _set_cross_attention(spec: Any, attention: CrossAttention, norm: nn.LayerNorm) -> None:
    _set_norm(spec.layer_norm, norm)
    linears = (attention.q_proj, attention.kv_proj, attention.out_proj)
    for part, linear in zip(spec.linear, linears, strict=True):
        _set_linear(part, linear)


def _set_ffn(spec: Any, ffn: FeedForward, norm: nn.LayerNorm) -> None:
    _set_norm(spec.layer_norm, norm)
    _set_linear(spec.linear_0, ffn.up)
    _set_linear(spec.linear_1, ffn.down)


def _set_norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = norm.weight.detach(), norm.bias.detach()


def _set_linear(spec: Any, linear: nn.Linear) -> None:
    spec.weight = linear.weight.detach()
    if linear.bias is not None:
        spec.bias = linear.bias.detach()


def _check(trained: TrainedModel, folder: Path, lines: Sequence[str]) -> None:
    """Compare greedy translations, token by token.

    Raises:
        UserError: If one differs.
    """
    import ctranslate2

    longest = min(64, trained.card.model.max_positions - 1)
    sources = [trained.source_tokenizer.encode(line) for line in lines if line.strip()]
    sources = sources or _random_sources(trained.card, longest)
    symbols = trained.source_tokenizer.vocabulary.symbols
    results = ctranslate2.Translator(str(folder), device="cpu").translate_batch(
        [[symbols[id] for id in ids] for ids in sources],
        beam_size=1,
        max_decoding_length=longest,
        suppress_sequences=[[symbols[Vocabulary.bos]], [symbols[Vocabulary.pad]]],  # as our search
    )
    for ids, ours, result in zip(sources, _greedy(trained, sources, longest), results, strict=True):
        theirs = result.hypotheses[0]
        if ours != theirs:
            raise UserError(
                f"CTranslate2 translates {' '.join(symbols[id] for id in ids)!r} as "
                f"{' '.join(theirs)!r}, not as {' '.join(ours)!r}; nothing was exported"
            )


def _random_sources(card: ModelCard, longest: int) -> list[list[int]]:
    random = Random(0)
    ordinary = range(Vocabulary.unk + 1, card.source_size)
    return [random.choices(ordinary, k=length) for length in range(1, min(17, longest))]


@torch.inference_mode()
def _greedy(
    trained: TrainedModel, sources: Sequence[Sequence[int]], longest: int
) -> list[list[str]]:
    batch = collate([Example([*ids, Vocabulary.eos]) for ids in sources])
    state = DecoderState(trained.model, trained.model.encoder(batch))
    limits = torch.full((len(sources),), longest)
    found = beam_search(state, limits, SearchConfig(beam_size=1))
    symbols = trained.target_tokenizer.vocabulary.symbols
    return [[symbols[id] for id in best.ids[:-1]] for (best,) in found]
