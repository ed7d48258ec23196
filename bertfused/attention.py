"""Multi-head attention over a sequence itself or over a memory, in training and step by step."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bertfused.noise import Dropout, Noise

# What is added to attention logits; a dimension of 1 is for all.
Bias = Float[Tensor, "... _queries _keys"] | None

_VECTOR = 16  # float32 numbers


def padding_bias(
    mask: Bool[Tensor, "batch keys"] | None,
) -> Float[Tensor, "batch 1 1 keys"] | None:
    """Turn a mask into what is added to attention logits: 0 on real tokens, -inf elsewhere.

    ``None`` when nothing is padded, which spares every layer the addition, or there is no mask.
    (Not looked up on an accelerator, where reading the answer would wait for the device.)
    """
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    bias = torch.zeros(mask.shape, device=mask.device)
    return bias.masked_fill_(~mask, -math.inf)[:, None, None, :]


def causal_bias(length: int, device: torch.device) -> Float[Tensor, "length length"]:
    """Return the bias with which position i attends to positions 0..i only."""
    return torch.full((length, length), -math.inf, device=device).triu_(1)


def attend(
    query: Float[Tensor, "batch heads queries head_dim"],
    keys: Float[Tensor, "batch heads keys head_dim"],
    values: Float[Tensor, "batch heads keys head_dim"],
    bias: Bias,
    dropout: Dropout,
) -> Float[Tensor, "batch queries model_dim"]:
    """Compute softmax(query keys^T / sqrt(head_dim) + bias) values and join the heads.

    On the CPU the plain products are used: the fused kernel's backward pass is several times
    slower at the lengths of sentences. On an accelerator the fused kernel is, except while
    attention dropout is on, whose masks must come from the run's own generator.
    """
    if query.device.type != "cpu" and not dropout.is_active:
        bias = None if bias is None else bias.to(query.dtype)
        joined = functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
    else:
        with _in_its_own_precision(query):
            logits = torch.matmul(query, keys.transpose(-1, -2))
            weights = softmax(logits, bias, scale=query.shape[-1] ** -0.5)
            joined = torch.matmul(dropout(weights), values)
    return joined.transpose(1, 2).flatten(2)


def _in_its_own_precision(x: Tensor) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def softmax(
    logits: Float[Tensor, "batch heads queries keys"],
    bias: Bias,
    scale: float,
) -> Float[Tensor, "batch heads queries keys"]:
    """Take the softmax over the keys of scale * logits + bias, in float32 at least.

    Without gradients the logits are overwritten.
    """
    if torch.is_grad_enabled():
        weights: Tensor = _Softmax.apply(logits, bias, scale)  # type: ignore[no-untyped-call]
        return weights
    return _softmax_(logits.to(_wide(logits)).mul_(scale), bias).to(logits.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _softmax_(logits: Tensor, bias: Bias) -> Tensor:
    """Overwrite logits with the softmax of their sum with ``bias``.

    On CPUs torch's kernel is some five times slower than its parts on rows shorter than a vector
    of the processor, as those of sentences often are.
    """
    if bias is not None:
        logits += bias
    if logits.device.type != "cpu" or logits.shape[-1] >= _VECTOR:
        return torch.softmax(logits, -1, out=logits)
    logits -= logits.amax(-1, keepdim=True)
    logits.exp_()
    logits /= logits.sum(-1, keepdim=True)
    return logits


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        scaled = torch.mul(logits.to(_wide(logits)), scale)
        weights = _softmax_(scaled, bias).to(logits.dtype)
        ctx.save_for_backward(weights)
        ctx.scale = scale  # type: ignore[attr-defined]
        return weights

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors  # type: ignore[attr-defined]
        wide = weights.to(_wide(weights))
        product = gradient * wide
        product -= wide * product.sum(-1, keepdim=True)
        product *= ctx.scale  # type: ignore[attr-defined]
        return product.to(gradient.dtype), None, None


@dataclass
class KeysValues:
    """Projected keys and values of a memory, one per sentence, whatever the number of beams."""

    keys: Float[Tensor, "batch heads keys head_dim"]
    values: Float[Tensor, "batch heads keys head_dim"]

    def select(self, sentences: Int[Tensor, "kept"]) -> "KeysValues":
        return KeysValues(self.keys[sentences], self.values[sentences])


class SlotStore:
    """What every token generated so far left behind, for all beams of a sentence together.

    Each step appends one slot per beam, and re-ordering beams moves none: which slots are the past
    of a beam is kept in a bias (see ``model.BeamSlots``). ``keep_slots`` drops some.
    """

    def __init__(self) -> None:
        self.slots = 0
        self._stored: Float[Tensor, "batch heads capacity width"] | None = None

    def append(
        self, added: Float[Tensor, "batch heads beams width"]
    ) -> Float[Tensor, "batch heads slots width"]:
        """Add a slot for each beam; return all there are."""
        end = self.slots + added.shape[2]
        if self._stored is None or end > self._stored.shape[2]:
            self._grow(added, max(2 * end, 16 * added.shape[2]))
        assert self._stored is not None
        self._stored[:, :, self.slots : end] = added
        self.slots = end
        return self._stored[:, :, :end]

    def _grow(self, like: Tensor, capacity: int) -> None:
        batch, heads, _, width = like.shape
        grown = like.new_empty(batch, heads, capacity, width)
        if self._stored is not None:
            grown[:, :, : self.slots] = self._stored[:, :, : self.slots]
        self._stored = grown

    def keep(self, sentences: Int[Tensor, "kept"]) -> None:
        if self._stored is not None:
            self._stored = self._stored[sentences]

    def keep_slots(self, slots: Int[Tensor, "batch kept"]) -> None:
        """Forget all other slots of each sentence; the kept ones stand in this order."""
        self.slots = slots.shape[1]
        if self._stored is not None:
            stored = self._stored
            index = slots[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])
            stored[:, :, : self.slots] = stored.gather(2, index)

    def of(self, sentence: int, slots: Bool[Tensor, "slots"]) -> Float[Tensor, "heads _ width"]:
        """Return some slots of a sentence, the oldest first."""
        assert self._stored is not None
        return self._stored[sentence, :, : self.slots][:, slots]


@dataclass(frozen=True)
class SelfAttentionCache:
    """Keys and values of every token generated so far."""

    keys: SlotStore
    values: SlotStore


def split_heads(
    x: Float[Tensor, "batch length parts_model_dim"], parts: int, heads: int
) -> tuple[Float[Tensor, "batch heads length head_dim"], ...]:
    """Cut the last dimension into ``parts`` equal parts and each part into heads.

    On the CPU the parts are in float32 at least: for bfloat16 a product is compiled for each of
    the many shapes that batches of sentences have, which takes longer than the product.
    """
    batch, length, width = x.shape
    split = x.view(batch, length, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4)
    if x.device.type == "cpu":
        split = split.to(_wide(x), memory_format=torch.contiguous_format)
    return split.unbind(0)


class SelfAttention(nn.Module):
    """Attention of a sequence over itself, with queries, keys and values from one product."""

    def __init__(self, model_dim: int, heads: int, attention_dropout: float, noise: Noise) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(model_dim, 3 * model_dim)
        self.out_proj = nn.Linear(model_dim, model_dim)
        self.dropout = Dropout(attention_dropout, noise)
        # Of the whole (3 model_dim, model_dim) matrix, which is what fairseq's 1/sqrt(2) gain is.
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        x: Float[Tensor, "batch length model_dim"],
        bias: Bias,
        cache: SelfAttentionCache | None = None,
    ) -> Float[Tensor, "batch length model_dim"]:
        """Attend over ``x``, or, with a cache, over all that was given to the cache so far.

        With a cache ``length`` is the number of beams: one new token of each.
        """
        query, keys, values = split_heads(self.in_proj(x), 3, self.heads)
        if cache is not None:
            keys, values = cache.keys.append(keys), cache.values.append(values)
        attended: Tensor = self.out_proj(attend(query, keys, values, bias, self.dropout))
        return attended


class CrossAttention(nn.Module):
    """Attention over a memory: the encoder's output, or a pretrained encoder's states.

    Args:
        memory_dim: Width of the memory; its keys and values are projected to ``model_dim``.
    """

    def __init__(
        self, model_dim: int, memory_dim: int, heads: int, attention_dropout: float, noise: Noise
    ) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(model_dim, model_dim)
        self.kv_proj = nn.Linear(memory_dim, 2 * model_dim)
        self.out_proj = nn.Linear(model_dim, model_dim)
        self.dropout = Dropout(attention_dropout, noise)
        gain = 2**-0.5 if memory_dim == model_dim else 1.0  # fairseq's rule
        nn.init.xavier_uniform_(self.q_proj.weight, gain)
        for half in self.kv_proj.weight.data.chunk(2):
            nn.init.xavier_uniform_(half, gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        for projection in (self.q_proj, self.kv_proj, self.out_proj):
            nn.init.zeros_(projection.bias)

    def project(self, memory: Float[Tensor, "batch keys memory_dim"]) -> KeysValues:
        """Project a memory, and lay it out as the products of every step of a search read it."""
        return self.lay_out(self.kv_proj(memory))

    def lay_out(self, projected: Float[Tensor, "batch keys two_model_dim"]) -> KeysValues:
        """Lay out what ``kv_proj`` made of a memory."""
        keys, values = split_heads(projected, 2, self.heads)
        return KeysValues(keys.contiguous(), values.contiguous())

    def forward(
        self,
        x: Float[Tensor, "batch queries model_dim"],
        memory: Float[Tensor, "batch keys memory_dim"] | KeysValues,
        bias: Bias,
    ) -> Float[Tensor, "batch queries model_dim"]:
        """Attend from ``x`` to ``memory``, given as states or as their keys and values.

        In decoding ``queries`` are the beams of a sentence, and ``project`` was called once.
        """
        if not isinstance(memory, KeysValues):
            memory = self.project(memory)
        attended: Tensor = self.out_proj(self.collect(self.q_proj(x), memory, bias))
        return attended

    def collect(
        self,
        queries: Float[Tensor, "batch queries model_dim"],
        memory: KeysValues,
        bias: Bias,
    ) -> Float[Tensor, "batch queries model_dim"]:
        """Attend between the projections: from what ``q_proj`` made to what ``out_proj`` takes."""
        (query,) = split_heads(queries, 1, self.heads)
        return attend(query, memory.keys, memory.values, bias, self.dropout)
