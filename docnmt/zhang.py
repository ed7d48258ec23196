"""Context attention inside every layer of a frozen Transformer.

Zhang et al. (EMNLP 2018), "Improving the Transformer Translation Model with Document-Level
Context". The previous source sentences are one sequence; a small encoder reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bertfused.attention import SelfAttentionCache, causal_bias, padding_bias
from bertfused.layers import DecoderLayer, EncoderLayer, sinusoids
from bertfused.model import BeamSlots, FusedTransformer, Memory
from bertfused.noise import Dropout
from docnmt.context import (
    Context,
    ContextLayer,
    ContextModel,
    Current,
    Encoded,
    GatedAttention,
    GatedResidual,
    ProjectedMemory,
    Sizes,
)


class ZhangModel(ContextModel):
    """The frozen base, with context attention after the self-attention of each of its layers.

    The gates are ``g = sigmoid(Wx x + Wy y);  g x + (1 - g) y`` of residual x and attention y,
    without a bias. The context encoder reads the base's own source embeddings. It is pre-norm, as
    the new sub-layers are, whatever the base is.
    """

    reads_target = False
    reads_base = False

    def __init__(
        self, base: FusedTransformer, sizes: Sizes, *, sentences: int = 2, layers: int = 1
    ) -> None:
        super().__init__(base)
        self.sentences = sentences
        self.output = base.output
        self.dropout = Dropout(sizes.dropout, self.noise)
        self.context_layers = nn.ModuleList(
            ContextLayer(sizes, [], self.noise) for _ in range(layers)
        )

        def attentions(depth: int) -> nn.ModuleList:
            return nn.ModuleList(
                GatedAttention(
                    sizes.attention(sizes.model_dim, self.noise),
                    GatedResidual(sizes.model_dim, bias=None),
                    Dropout(sizes.dropout, self.noise),
                )
                for _ in range(depth)
            )

        self.encoder_attentions = attentions(len(base.encoder.layers))
        self.decoder_attentions = attentions(len(base.decoder.layers))

    def source_states(self, encoded: Encoded) -> Float[Tensor, "batch source model_dim"]:
        """Return the embeddings; the encoder reads all context sentences as one sequence."""
        embed = self.base.encoder.embed
        embedded: Tensor = embed.tokens(encoded.batch.source) * embed.scale
        return embedded

    def hidden(
        self, current: Current, source: Context, target: Context
    ) -> Float[Tensor, "batch target model_dim"]:
        assert current.decoder_input is not None
        decoder = self.base.decoder
        memory, context = self.memory(current, source)
        context_bias, memory_bias = padding_bias(source.mask), padding_bias(memory.mask)
        bert_bias = padding_bias(memory.bert_mask)
        x = decoder.embed(current.decoder_input)
        bias = causal_bias(x.shape[1], x.device)
        for layer, attention in self.decoder_pairs():
            x = attention(layer.attend_own(x, bias), context, context_bias)
            x = layer.attend_memory(x, memory.states, memory_bias, memory.bert_states, bert_bias)
            x = layer.feed_forward(x)
        normed: Tensor = x if decoder.norm is None else decoder.norm(x)
        return normed

    def start(self, current: Current, source: Context, target: Context) -> "ZhangDecoder":
        memory, context = self.memory(current, source)
        return ZhangDecoder(self, memory, context, source.mask)

    def memory(
        self, current: Current, source: Context
    ) -> tuple[Memory, Float[Tensor, "batch context model_dim"]]:
        """Encode the sentences in context; return their memory and the encoded contexts."""
        base, bias = self.base.encoder, padding_bias(current.memory.mask)
        context_bias = padding_bias(source.mask)
        joined = source.pad(source.states)
        positions = sinusoids(joined.shape[1], joined.shape[2])
        context = self.dropout(joined + positions.to(joined))
        for layer in self.context_layers:
            context = layer(context, context_bias)
        bert_states, bert_mask = current.memory.bert_states, current.memory.bert_mask
        bert_bias = padding_bias(bert_mask)
        x = base.embed(current.source)
        for layer, attention in zip(base.layers, self.encoder_attentions, strict=True):
            assert isinstance(layer, EncoderLayer)
            x = attention(layer.attend(x, bias, bert_states, bert_bias), context, context_bias)
            x = layer.feed_forward(x)
        states = x if base.norm is None else base.norm(x)
        return Memory(states, current.memory.mask, bert_states, bert_mask), context

    def decoder_pairs(self) -> Iterator[tuple[DecoderLayer, GatedAttention]]:
        """Pair each decoder layer of the base with its context attention."""
        for layer, attention in zip(self.base.decoder.layers, self.decoder_attentions, strict=True):
            assert isinstance(layer, DecoderLayer)
            assert isinstance(attention, GatedAttention)
            yield layer, attention


@dataclass
class _LayerState:
    """What one decoder layer needs at every step."""

    layer: DecoderLayer
    attention: GatedAttention
    cache: SelfAttentionCache
    memory: ProjectedMemory
    context: ProjectedMemory
    bert: ProjectedMemory | None


class ZhangDecoder:
    """The model in the middle of some sentences."""

    def __init__(
        self,
        model: ZhangModel,
        memory: Memory,
        context: Float[Tensor, "batch context model_dim"],
        context_mask: Bool[Tensor, "batch context"],
    ) -> None:
        self._decoder, self._output = model.base.decoder, model.output
        self._slots = BeamSlots(len(context), context.device)
        self._position = 0
        self._layers = []
        for layer, attention in model.decoder_pairs():
            bert = None
            if layer.bert_attention is not None:
                assert memory.bert_states is not None
                assert memory.bert_mask is not None
                bert = ProjectedMemory.of(
                    layer.bert_attention, memory.bert_states, memory.bert_mask
                )
            self._layers.append(
                _LayerState(
                    layer,
                    attention,
                    self._slots.new_cache(),
                    ProjectedMemory.of(layer.cross_attention, memory.states, memory.mask),
                    ProjectedMemory.of(attention.attention, context, context_mask),
                    bert,
                )
            )

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        self._slots.append(tokens)
        x = self._decoder.embed.at_step(tokens, self._position)
        self._position += 1
        for state in self._layers:
            memory, context, bert = state.memory, state.context, state.bert
            x = state.layer.attend_own(x, self._slots.bias, state.cache)
            x = state.attention(x, context.keys_values, context.bias)
            x = state.layer.attend_memory(
                x,
                memory.keys_values,
                memory.bias,
                None if bert is None else bert.keys_values,
                None if bert is None else bert.bias,
            )
            x = state.layer.feed_forward(x)
        normed = x if self._decoder.norm is None else self._decoder.norm(x)
        logits: Tensor = self._output(normed)
        return logits

    def reorder(self, parents: Int[Tensor, "batch beams"]) -> None:
        self._slots.reorder(parents)

    def keep(self, sentences: Int[Tensor, "kept"]) -> None:
        self._slots.keep(sentences)
        for state in self._layers:
            state.memory = state.memory.select(sentences)
            state.context = state.context.select(sentences)
            state.bert = None if state.bert is None else state.bert.select(sentences)
