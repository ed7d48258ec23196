"""What the context-aware models share: a frozen base, joined contexts, and gated attention.

A sentence is encoded once, wherever it is needed: as the sentence to translate, and as context of
those after it. On the way from there to a translation in context::

    Encoded(base, batch)                  each sentence alone, by the frozen base
    model.source_states(...)              what a sentence gives to those after it, source side
    target_states(...)                    the same, target side
    Places.gather(flat states) Context    the contexts of each sentence of a batch, joined
    model.hidden(current, source, target) states before the vocabulary
    model.start(current, source, target)  a decoder for the search
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bertfused.attention import (
    Bias,
    CrossAttention,
    KeysValues,
    SelfAttention,
    SelfAttentionCache,
    padding_bias,
)
from bertfused.batch import Batch
from bertfused.config import Activation
from bertfused.layers import FeedForward, feed_forward_sublayer
from bertfused.model import BeamSlots, Embedding, FusedTransformer, Memory
from bertfused.noise import Dropout, Noise
from bertfused.search import Decoder


@dataclass(frozen=True)
class Packed:
    """Sequences of a batch without padding: their tokens one after the other.

    What is done token by token is done on these; only attention itself needs padded sequences.

    Attributes:
        index: For each place of the padded sequences, its token; any where there is none.
    """

    states: Float[Tensor, "tokens width"]
    index: Int[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length"]

    def pad(self, tokens: Float[Tensor, "tokens any_width"]) -> Float[Tensor, "batch length _"]:
        """Lay out the tokens (or what was made of them) as padded sequences."""
        padded = tokens.index_select(0, self.index.flatten())
        return padded.view(*self.index.shape, tokens.shape[1])

    def project(self, attention: CrossAttention) -> KeysValues:
        """Project the tokens as a memory."""
        return attention.lay_out(self.pad(attention.kv_proj(self.states)))


@dataclass(frozen=True)
class Context(Packed):
    """The context of each sentence of a batch: its previous sentences, joined, oldest first.

    Attributes:
        distance: Of each token's sentence: 1 for the one just before.
    """

    distance: Int[Tensor, "tokens"]


@dataclass(frozen=True)
class Places:
    """Where the tokens of contexts stand among the tokens of all sentences.

    Attributes:
        tokens: The number of each token, context after context.
        distance: As in ``Context``.
        mask: Of the padded contexts.
    """

    tokens: Int[Tensor, "tokens"]
    distance: Int[Tensor, "tokens"]
    mask: Bool[Tensor, "batch length"]

    @staticmethod
    def of(previous: Sequence[Sequence[int]], lengths: NDArray[np.integer]) -> "Places":
        """Find the places of contexts, of which none is empty: no attention is over nothing.

        Args:
            previous: For each sentence the numbers of its previous ones, oldest first.
            lengths: Tokens of every sentence, in the order of the numbers.
        """
        assert all(previous)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = []
        for numbers in previous:
            parts = [
                np.stack(np.broadcast_arrays(np.arange(starts[n], starts[n + 1]), distance))
                for n, distance in zip(numbers, range(len(numbers), 0, -1), strict=True)
            ]
            rows.append(np.concatenate(parts, axis=1))
        sizes = np.array([row.shape[1] for row in rows])
        tokens, distance = torch.from_numpy(np.concatenate(rows, axis=1)).unbind(0)
        mask = np.arange(sizes.max())[None, :] < sizes[:, None]
        return Places(tokens, distance, torch.from_numpy(mask))

    def to(self, device: torch.device) -> "Places":
        return Places(self.tokens.to(device), self.distance.to(device), self.mask.to(device))

    def gather(self, flat: Float[Tensor, "all_tokens width"]) -> Context:
        """Collect the states of the contexts."""
        states = flat.index_select(0, self.tokens)
        return Context(states, padded_index(self.mask), self.mask, self.distance)


def padded_index(mask: Bool[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """Number the real places of padded sequences, row by row; the others get some number.

    >>> padded_index(torch.tensor([[True, False], [True, True]])).tolist()
    [[0, 0], [1, 2]]
    """
    return (mask.flatten().cumsum(0) - 1).clamp(min=0).view(mask.shape)


@dataclass(frozen=True)
class Draft:
    """A first translation of each sentence of a batch, as ``target_states`` represents it."""

    states: Float[Tensor, "batch draft width"]
    mask: Bool[Tensor, "batch draft"]


@dataclass(frozen=True)
class Current:
    """Sentences to translate in context, and what the base knows of them.

    Attributes:
        source: Their ids.
        memory: The base's encoder output.
        decoder_input: Ids, while targets are given.
        hidden: The base's last decoder states for them.
        draft: Where the model wants one.
    """

    source: Int[Tensor, "batch source"]
    memory: Memory
    decoder_input: Int[Tensor, "batch target"] | None = None
    hidden: Float[Tensor, "batch target model_dim"] | None = None
    draft: Draft | None = None


class Encoded:
    """A batch of sentences, each by itself, as the frozen base sees it; made when asked for.

    Args:
        batch: With the pretrained encoder's states, if the base reads them.
    """

    def __init__(self, base: FusedTransformer, batch: Batch) -> None:
        self.base = base
        self.batch = batch

    @cached_property
    def layers(self) -> list[Float[Tensor, "batch source model_dim"]]:
        """The embeddings, then the output of every encoder layer."""
        with torch.no_grad():
            return list(self.base.encoder.layer_states(self.batch))

    @cached_property
    def memory(self) -> Memory:
        return replace(self.mask_alone, states=self.layers[-1])

    @cached_property
    def mask_alone(self) -> Memory:
        """The memory without the base's states, for a model that makes its own."""
        batch = self.batch
        states = torch.empty(*batch.source.shape, 0, device=batch.source.device)
        return Memory(states, batch.source_mask, batch.bert_states, batch.bert_mask)

    @cached_property
    def hidden(self) -> Float[Tensor, "batch target model_dim"]:
        """The last decoder states for the targets."""
        assert self.batch.decoder_input is not None
        with torch.no_grad():
            states: Tensor = self.base.decoder(self.batch.decoder_input, self.memory)
        return states

    def select(self, rows: Int[Tensor, "rows"], *, with_states: bool = True) -> Current:
        """Take some of the sentences, to translate them in context.

        Args:
            with_states: Whether the base's own states are wanted.
        """
        memory = self.memory if with_states else self.mask_alone
        decoder_input = self.batch.decoder_input
        return Current(
            self.batch.source[rows],
            Memory(
                memory.states[rows],
                memory.mask[rows],
                None if memory.bert_states is None else memory.bert_states[rows],
                None if memory.bert_mask is None else memory.bert_mask[rows],
            ),
            None if decoder_input is None else decoder_input[rows],
            self.hidden[rows] if with_states and decoder_input is not None else None,
        )


@torch.no_grad()
def target_states(
    embed: Embedding,
    target: Int[Tensor, "*places"],
    hidden: Float[Tensor, "*places model_dim"],
) -> Float[Tensor, "*places two_model_dim"]:
    """Represent target tokens: the embedding of each beside the decoder state that predicted it.

    (Voita et al., 2019; Xu et al., 2020.) The embedding is scaled as in the decoder's input.
    """
    return torch.cat([embed.tokens(target) * embed.scale, hidden.to(embed.tokens.weight)], dim=-1)


class ContextModel(nn.Module, ABC):
    """Context layers on a frozen base.

    Attributes:
        sentences: Previous sentences that it reads.
        reads_target: Whether it reads their translations.
        reads_base: Whether it reads states of the base, and not its weights alone.
        wants_draft: Whether it corrects a translation of the base.
        output: Projection of its last states to the vocabulary.
    """

    sentences: int
    reads_target = True
    reads_base = True
    wants_draft = False
    output: nn.Linear

    def __init__(self, base: FusedTransformer) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.noise = Noise()

    def train(self, mode: bool = True) -> "ContextModel":
        """Set the mode of the context layers; the frozen base has no dropout in either."""
        super().train(mode)
        self.base.eval()
        return self

    @abstractmethod
    def source_states(self, encoded: Encoded) -> Float[Tensor, "batch source width"]:
        """Say what each sentence gives to those after it, whichever they are."""

    @abstractmethod
    def hidden(
        self, current: Current, source: Context, target: Context
    ) -> Float[Tensor, "batch target model_dim"]:
        """Return the last states for sentences with given targets, before the vocabulary."""

    @abstractmethod
    def start(self, current: Current, source: Context, target: Context) -> Decoder:
        """Return a decoder before the first token."""


@dataclass(frozen=True)
class Sizes:
    """Widths and rates that all new layers of a model have in common."""

    model_dim: int
    ffn_dim: int
    heads: int
    dropout: float
    activation: Activation = "relu"

    def attention(self, memory_dim: int, noise: Noise) -> CrossAttention:
        """Make an attention; its weights have no dropout, as in the papers."""
        return CrossAttention(self.model_dim, memory_dim, self.heads, 0.0, noise)

    def feed_forward(self, noise: Noise) -> FeedForward:
        """Make a feed-forward sub-layer, without dropout inside."""
        return FeedForward(self.model_dim, self.ffn_dim, self.activation, 0.0, noise)


def sigmoid_gate(
    linear: nn.Linear,
    first: Float[Tensor, "*places model_dim"],
    second: Float[Tensor, "*places model_dim"],
) -> Float[Tensor, "*places model_dim"]:
    """Compute sigmoid(W [first | second] + b).

    Joined, the two need one product in place of two. With gradients that would keep a copy of both
    for the backward pass, and take their gradients apart again; so there they are not joined.
    """
    if not torch.is_grad_enabled():
        joined: Tensor = linear(torch.cat([first, second.to(first)], dim=-1))
        return joined.to(first).sigmoid_()
    width = first.shape[-1]
    logits = functional.linear(first, linear.weight[:, :width], linear.bias)
    logits = logits + functional.linear(second, linear.weight[:, width:])
    return logits.to(first).sigmoid_()


class GatedResidual(nn.Module):
    """Mix a residual with a sub-layer's output, element by element (Xu et al., 2020).

    Equations 7 and 8::

        g = sigmoid(W [residual | sublayer] + b);  g * residual + (1 - g) * sublayer

    Args:
        bias: Where ``b`` starts; None has no ``b``.
    """

    def __init__(self, model_dim: int, bias: float | None) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * model_dim, model_dim, bias=bias is not None)
        nn.init.xavier_uniform_(self.gate.weight)
        if bias is not None:
            nn.init.constant_(self.gate.bias, bias)

    def forward(
        self,
        residual: Float[Tensor, "batch length model_dim"],
        sublayer: Float[Tensor, "batch length model_dim"],
    ) -> Float[Tensor, "batch length model_dim"]:
        sublayer = sublayer.to(residual)
        return torch.lerp(sublayer, residual, sigmoid_gate(self.gate, residual, sublayer))


class GatedAttention(nn.Module):
    """Attention to a memory as a pre-norm sub-layer with a gated residual, or a plain one.

    Args:
        gate: ``None`` adds the attention to the residual.
    """

    def __init__(
        self, attention: CrossAttention, gate: GatedResidual | None, dropout: Dropout
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(attention.q_proj.in_features)
        self.attention = attention
        self.gate = gate
        self.dropout = dropout

    def forward(
        self,
        x: Float[Tensor, "batch queries model_dim"],
        memory: Float[Tensor, "batch keys memory_dim"] | KeysValues | Packed,
        bias: Bias,
    ) -> Float[Tensor, "batch queries model_dim"]:
        if isinstance(memory, Packed):
            memory = memory.project(self.attention)
        attended = self.attention(self.norm(x), memory, bias)
        if self.gate is None:
            return self.dropout.add(x, attended)
        gated: Tensor = self.gate(x, self.dropout(attended))
        return gated


class ContextLayer(nn.Module):
    """Self-attention, attention to one memory after the other, FFN; pre-norm."""

    def __init__(self, sizes: Sizes, attentions: Sequence[GatedAttention], noise: Noise) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(sizes.model_dim)
        self.self_attention = SelfAttention(sizes.model_dim, sizes.heads, 0.0, noise)
        self.attentions = nn.ModuleList(attentions)
        self.ffn_norm = nn.LayerNorm(sizes.model_dim)
        self.ffn = sizes.feed_forward(noise)
        self.dropout = Dropout(sizes.dropout, noise)

    def project(
        self,
        memories: Sequence[Float[Tensor, "batch _ _"] | Packed],
        masks: Sequence[Bool[Tensor, "batch _"]],
    ) -> list["ProjectedMemory"]:
        """Project the memories once for all steps of a search."""
        projected = []
        for attention, memory, mask in zip(self.attentions, memories, masks, strict=True):
            assert isinstance(attention, GatedAttention)
            projected.append(ProjectedMemory.of(attention.attention, memory, mask))
        return projected

    def forward(
        self,
        x: Float[Tensor, "batch length model_dim"],
        bias: Bias,
        memories: Sequence[Float[Tensor, "batch _ _"] | KeysValues | Packed] = (),
        memory_biases: Sequence[Bias] = (),
        cache: SelfAttentionCache | None = None,
    ) -> Float[Tensor, "batch length model_dim"]:
        """Compute the layer; with a cache, for one new token of each beam (see SelfAttention)."""
        attended = self.self_attention(self.self_attention_norm(x), bias, cache)
        x = self.dropout.add(x, attended)
        for attention, memory, memory_bias in zip(
            self.attentions, memories, memory_biases, strict=True
        ):
            x = attention(x, memory, memory_bias)
        return feed_forward_sublayer(x, self.ffn, self.ffn_norm, self.dropout, pre_norm=True)


@dataclass(frozen=True)
class ProjectedMemory:
    """Keys, values and padding of what a decoder attends to, once for all beams."""

    keys_values: KeysValues
    bias: Bias

    @staticmethod
    def of(
        attention: CrossAttention,
        memory: Float[Tensor, "batch keys width"] | Packed,
        mask: Bool[Tensor, "batch keys"],
    ) -> "ProjectedMemory":
        if isinstance(memory, Packed):
            return ProjectedMemory(memory.project(attention), padding_bias(mask))
        return ProjectedMemory(attention.project(memory), padding_bias(mask))

    def select(self, sentences: Int[Tensor, "kept"]) -> "ProjectedMemory":
        bias = None if self.bias is None else self.bias[sentences]
        return ProjectedMemory(self.keys_values.select(sentences), bias)


class LayerStack:
    """Context layers in the middle of decoding some sentences.

    Args:
        slots: The past of the beams; whoever owns the stack appends and re-orders there.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        slots: BeamSlots,
        memories: Sequence[Float[Tensor, "batch _ _"] | Packed],
        masks: Sequence[Bool[Tensor, "batch _"]],
    ) -> None:
        self._layers: list[ContextLayer] = []
        for layer in layers:
            assert isinstance(layer, ContextLayer)
            self._layers.append(layer)
        self._slots = slots
        self._caches = [slots.new_cache() for _ in self._layers]
        self._memories = [layer.project(memories, masks) for layer in self._layers]

    def advance(
        self, x: Float[Tensor, "batch beams model_dim"]
    ) -> Float[Tensor, "batch beams model_dim"]:
        for layer, cache, memories in zip(self._layers, self._caches, self._memories, strict=True):
            keys_values = [memory.keys_values for memory in memories]
            biases = [memory.bias for memory in memories]
            x = layer(x, self._slots.bias, keys_values, biases, cache)
        return x

    def keep(self, sentences: Int[Tensor, "kept"]) -> None:
        self._memories = [
            [memory.select(sentences) for memory in memories] for memories in self._memories
        ]
