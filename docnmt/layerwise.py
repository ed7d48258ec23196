"""The context-aware model of Xu, Xiong, van Genabith and Liu (IJCAI 2020).

"Efficient Context-Aware Neural Machine Translation with Layer-Wise Weighting and Input-Aware
Gating": a few light layers on top of a frozen sentence-level Transformer. No code of it was
published; where the paper leaves a choice open, docs/context_aware.md says what is done here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bertfused.attention import Bias, SelfAttention, causal_bias, padding_bias
from bertfused.layers import feed_forward_sublayer
from bertfused.model import DecoderState, FusedTransformer
from bertfused.noise import Dropout, Noise
from docnmt.context import (
    Context,
    ContextLayer,
    ContextModel,
    Current,
    Encoded,
    GatedAttention,
    GatedResidual,
    LayerStack,
    Packed,
    Sizes,
    sigmoid_gate,
)

ResetGate = Literal["reset", "reset_add", "none"]
# Where the bias of a gated residual starts: sigmoid(4) = 0.98 of the residual. (From 2, 0.88, the
# gates of some seeds closed on what the attention to the target context had not learned yet.)
GATE_BIAS = 4.0


class LayerWeighting(nn.Module):
    """A learned average of the outputs of a frozen encoder's layers.

    Equations 1 and 2::

        p_i = exp(w_i) / sum_j exp(w_j);  sum_i p_i norm(o_i),  i = 0 (embeddings) .. layers

    The paper does not norm the outputs; their scales differ by much.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(layers + 1))

    def shares(self) -> Float[Tensor, "layers"]:
        shares: Tensor = self.weights.softmax(0)
        return shares

    def forward(
        self, outputs: Sequence[Float[Tensor, "batch source model_dim"]]
    ) -> Float[Tensor, "batch source model_dim"]:
        normed = torch.stack([functional.layer_norm(o, o.shape[-1:]) for o in outputs])
        mixed: Tensor = torch.tensordot(self.shares().to(normed), normed, dims=1)
        return mixed


class SourceContextLayer(nn.Module):
    """Read a context sentence for what it says about the sentence to translate.

    Equations 3 to 6::

        context = x + self-attention(norm(x))                   for each context sentence
        cross = attention(context, encoder output of the sentence to translate)
        y = sigmoid(W [context | cross] + b) * context          "reset"; "reset_add": + cross
        y + FFN(norm(y))

    The residuals and norms are ours, and that ``cross`` has dropout.
    """

    def __init__(self, sizes: Sizes, reset_gate: ResetGate, noise: Noise) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(sizes.model_dim)
        self.self_attention = SelfAttention(sizes.model_dim, sizes.heads, 0.0, noise)
        self.dropout = Dropout(sizes.dropout, noise)
        self.reset_gate = reset_gate
        if reset_gate != "none":
            self.cross_attention = sizes.attention(sizes.model_dim, noise)
            self.gate = nn.Linear(2 * sizes.model_dim, sizes.model_dim)
            nn.init.xavier_uniform_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)
        self.ffn_norm = nn.LayerNorm(sizes.model_dim)
        self.ffn = sizes.feed_forward(noise)

    def attend(
        self, x: Float[Tensor, "batch length model_dim"], bias: Bias
    ) -> Float[Tensor, "batch length model_dim"]:
        """Compute eq. 3, which knows nothing of the sentence to translate."""
        return self.dropout.add(x, self.self_attention(self.self_attention_norm(x), bias))

    def read_for(
        self, context: Packed, memory: Float[Tensor, "batch source model_dim"], bias: Bias
    ) -> Float[Tensor, "tokens model_dim"]:
        """Compute eq. 4 to 6, for the sentences with this encoder output."""
        x = context.states
        if self.reset_gate != "none":
            cross = self.dropout(self._cross(context, memory, bias)).to(x)
            x = sigmoid_gate(self.gate, x, cross) * x
            if self.reset_gate == "reset_add":
                x = x + cross
        return feed_forward_sublayer(x[None], self.ffn, self.ffn_norm, self.dropout, True)[0]

    def _cross(
        self, context: Packed, memory: Float[Tensor, "batch source model_dim"], bias: Bias
    ) -> Float[Tensor, "tokens model_dim"]:
        attention = self.cross_attention
        queries = context.pad(attention.q_proj(context.states))
        collected = attention.collect(queries, attention.project(memory), bias)
        cross: Tensor = attention.out_proj(collected[context.mask])
        return cross


class LayerwiseModel(ContextModel):
    """Layer-wise weighting and input-aware gating on a frozen base (Xu et al., IJCAI 2020).

    The layers of context encoding and the context-aware layers of input and output are ``layers``
    each. Ablations: ``layer_weighting=False`` reads the encoder's last layer only, ``gates=False``
    has plain residuals, ``source`` or ``target`` False leaves that side's context out.
    """

    def __init__(
        self,
        base: FusedTransformer,
        sizes: Sizes,
        *,
        sentences: int = 3,
        layers: int = 1,
        source: bool = True,
        target: bool = True,
        layer_weighting: bool = True,
        reset_gate: ResetGate = "reset",
        gates: bool = True,
        target_dropout: float = 0.1,
        preserve_function: bool = True,
    ) -> None:
        super().__init__(base)
        noise, width = self.noise, sizes.model_dim
        self.sentences, self.reads_target = sentences, target
        self.output = base.output

        def attention(memory_dim: int) -> GatedAttention:
            gate = GatedResidual(width, GATE_BIAS) if gates else None
            dropout = Dropout(sizes.dropout, noise)
            return GatedAttention(sizes.attention(memory_dim, noise), gate, dropout)

        self.weighting = None
        self.source_positions = self.target_positions = None
        self.source_layers = nn.ModuleList()
        if source:
            if layer_weighting:
                self.weighting = LayerWeighting(len(base.encoder.layers))
            for _ in range(layers):
                self.source_layers.append(SourceContextLayer(sizes, reset_gate, noise))
            self.source_positions = _positions(sentences, width)
        if target:
            self.target_positions = _positions(sentences, 2 * width)
        self.token_dropout = Dropout(target_dropout, noise)
        memory_dims = [width, *([width] if source else []), *([2 * width] if target else [])]
        self.input_layers, self.output_layers = nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            contexts = [attention(width)] if source else []
            self.input_layers.append(ContextLayer(sizes, contexts, noise))
            attentions = [attention(dim) for dim in memory_dims]
            self.output_layers.append(ContextLayer(sizes, attentions, noise))
        if preserve_function:
            self._preserve_function()

    def _preserve_function(self) -> None:
        """Start where the new layers pass their input on, but for what their gates let through."""
        for layer in (*self.input_layers, *self.output_layers):
            assert isinstance(layer, ContextLayer)
            last = [layer.self_attention.out_proj, layer.ffn.down]
            for attention in layer.attentions:
                assert isinstance(attention, GatedAttention)
                if attention.gate is None:
                    last.append(attention.attention.out_proj)
            for projection in last:
                nn.init.zeros_(projection.weight)
                nn.init.zeros_(projection.bias)

    def source_states(self, encoded: Encoded) -> Float[Tensor, "batch source model_dim"]:
        """Weight the layers of the encoder (eq. 1, 2) and attend within the sentence (eq. 3)."""
        if not self.source_layers:
            return encoded.memory.states[:, :, :0]
        if self.weighting is not None:
            x = self.weighting(encoded.layers)
        else:
            x = functional.layer_norm(encoded.memory.states, encoded.memory.states.shape[-1:])
        first = self.source_layers[0]
        assert isinstance(first, SourceContextLayer)
        return first.attend(x, padding_bias(encoded.memory.mask))

    def hidden(
        self, current: Current, source: Context, target: Context
    ) -> Float[Tensor, "batch target model_dim"]:
        assert current.hidden is not None
        memories, masks = self._memories(current, source, target)
        biases = [padding_bias(mask) for mask in masks]
        x = current.hidden
        bias = causal_bias(x.shape[1], x.device)
        for layer in self.output_layers:
            x = layer(x, bias, memories, biases)
        return x

    def start(self, current: Current, source: Context, target: Context) -> "LayerwiseDecoder":
        return LayerwiseDecoder(self, current, *self._memories(current, source, target))

    def _memories(
        self, current: Current, source: Context, target: Context
    ) -> tuple[list[Tensor | Packed], list[Bool[Tensor, "batch _"]]]:
        """Return what the output layers attend to, and its masks."""
        x, mask = current.memory.states, current.memory.mask
        bias = padding_bias(mask)
        contexts: list[Packed] = []
        masks = []
        if self.source_layers:
            contexts.append(self._source_context(current, source))
            masks.append(source.mask)
        context_biases = [padding_bias(context_mask) for context_mask in masks]
        for layer in self.input_layers:
            x = layer(x, bias, contexts, context_biases)
        if self.target_positions is not None:
            contexts.append(self._target_context(target))
            masks.append(target.mask)
        return [x, *contexts], [mask, *masks]

    def _source_context(self, current: Current, source: Context) -> Context:
        assert self.source_positions is not None
        memory, bias = current.memory.states, padding_bias(current.memory.mask)
        context = source
        for number, layer in enumerate(self.source_layers):
            assert isinstance(layer, SourceContextLayer)
            if number:
                padded = layer.attend(context.pad(context.states), _own_sentence_bias(context))
                context = replace(context, states=padded[context.mask])
            context = replace(context, states=layer.read_for(context, memory, bias))
        states = context.states + _at(self.source_positions, context.distance)
        return replace(context, states=states)

    def _target_context(self, target: Context) -> Context:
        assert self.target_positions is not None
        states = target.states
        if self.token_dropout.is_active:
            states = states * self.token_dropout(torch.ones_like(states[:, :1]))
        return replace(target, states=states + _at(self.target_positions, target.distance))


class LayerwiseDecoder:
    """The model in the middle of some sentences: the base's decoder with layers on top."""

    def __init__(
        self,
        model: LayerwiseModel,
        current: Current,
        memories: Sequence[Float[Tensor, "batch _ _"] | Packed],
        masks: Sequence[Bool[Tensor, "batch _"]],
    ) -> None:
        self._base = DecoderState(model.base, current.memory)
        self._output = model.output
        self._stack = LayerStack(model.output_layers, self._base.slots, memories, masks)

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        logits: Tensor = self._output(self._stack.advance(self._base.advance(tokens)))
        return logits

    def keep_states(self) -> None:
        self._base.keep_states()

    def states(self, places: Int[Tensor, "beams 2"]) -> list[Float[Tensor, "_ model_dim"]]:
        return self._base.states(places)

    def reorder(self, parents: Int[Tensor, "batch beams"]) -> None:
        self._base.reorder(parents)

    def keep(self, sentences: Int[Tensor, "kept"]) -> None:
        self._base.keep(sentences)
        self._stack.keep(sentences)


def _positions(sentences: int, width: int) -> nn.Embedding:
    table = nn.Embedding(sentences, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def _at(positions: nn.Embedding, distance: Int[Tensor, "tokens"]) -> Float[Tensor, "tokens width"]:
    """Return the embedding of each token's sentence."""
    embedded: Tensor = positions(distance - 1)
    return embedded


def _own_sentence_bias(context: Context) -> Float[Tensor, "batch 1 length length"]:
    """Return the bias with which a token attends to its own sentence only."""
    distance = context.distance[context.index].masked_fill(~context.mask, -1)
    is_same = distance[:, :, None] == distance[:, None, :]
    bias = torch.zeros(is_same.shape, device=is_same.device)
    return bias.masked_fill_(~is_same, -torch.inf)[:, None]
