"""The BERT-fused Transformer: embeddings, encoder, decoder, and decoding step by step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bertfused.attention import (
    CrossAttention,
    KeysValues,
    SelfAttention,
    SelfAttentionCache,
    SlotStore,
    causal_bias,
    padding_bias,
)
from bertfused.batch import Batch
from bertfused.config import FusionConfig, ModelConfig
from bertfused.errors import UserError
from bertfused.layers import (
    BranchMixer,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    sinusoids,
)
from bertfused.noise import Dropout, Noise
from bertfused.vocab import Vocabulary

_FORGET_EVERY = 6  # steps


@dataclass(frozen=True)
class Memory:
    """What the decoder attends to: encoder output and the pretrained encoder's states."""

    states: Float[Tensor, "batch source model_dim"]
    mask: Bool[Tensor, "batch source"]
    bert_states: Float[Tensor, "batch bert bert_dim"] | None = None
    bert_mask: Bool[Tensor, "batch bert"] | None = None
    target_language: Int[Tensor, " batch"] | None = None


class Embedding(nn.Module):
    """Token embeddings times sqrt(model_dim) plus positions, then optional norm, then dropout.

    Args:
        languages: Number of languages, each with an embedding that is added to its tokens' (Lample
            & Conneau, 2019); 0 for none.
        scale: Whether the token embeddings are multiplied.
    """

    table: Tensor

    def __init__(
        self,
        tokens: nn.Embedding,
        learned_positions: int | None,
        *,
        languages: int = 0,
        scale: bool = True,
        norm: bool,
        dropout: Dropout,
    ) -> None:
        super().__init__()
        model_dim = tokens.embedding_dim
        self.tokens = tokens
        self.scale = math.sqrt(model_dim) if scale else 1.0
        self.dropout = dropout
        self.norm = nn.LayerNorm(model_dim) if norm else None
        self.positions: nn.Embedding | None = None
        if learned_positions is None:
            self.register_buffer("table", sinusoids(256, model_dim), persistent=False)
        else:
            self.positions = nn.Embedding(learned_positions, model_dim)
            nn.init.normal_(self.positions.weight, std=model_dim**-0.5)
        self.languages: nn.Embedding | None = None
        if languages:
            self.languages = nn.Embedding(languages, model_dim)
            nn.init.normal_(self.languages.weight, std=model_dim**-0.5)

    def forward(
        self, ids: Int[Tensor, "batch length"], language: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length model_dim"]:
        """Embed the tokens of whole sentences."""
        positions = self._positions(0, ids.shape[1])
        dropped: Tensor = self.dropout(self._embed(ids, positions, language))
        return dropped

    def at_step(
        self,
        ids: Int[Tensor, "batch beams"],
        position: int,
        language: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch beams model_dim"]:
        """Embed, in a search, tokens that all stand at one position."""
        return self._embed(ids, self._positions(position, 1), language)

    def _embed(
        self,
        ids: Int[Tensor, "batch length"],
        positions: Float[Tensor, "#length model_dim"],
        language: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch length model_dim"]:
        x = torch.add(positions, self.tokens(ids), alpha=self.scale)
        if self.languages is not None:
            assert language is not None
            x = x + self.languages(language)[:, None]
        normed: Tensor = x if self.norm is None else self.norm(x)
        return normed

    def _positions(self, start: int, length: int) -> Float[Tensor, "length model_dim"]:
        if self.positions is not None:
            if start + length > self.positions.num_embeddings:
                raise UserError(
                    f"a sentence has {start + length} tokens, but the model has learned only "
                    f"{self.positions.num_embeddings} positions (model.max_positions)"
                )
            return self.positions.weight[start : start + length]
        if start + length > len(self.table):
            size = 2 * (start + length)
            with torch.inference_mode(False):  # training goes on with it
                self.table = sinusoids(size, self.table.shape[1]).to(self.table.device)
        return self.table[start : start + length]


class Encoder(nn.Module):
    """Embeddings and encoder layers."""

    def __init__(
        self, embed: Embedding, layers: list[EncoderLayer], final_norm: nn.LayerNorm | None
    ) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self.norm = final_norm

    def forward(self, batch: Batch) -> Memory:
        *_, states = self.layer_states(batch)
        return Memory(
            states, batch.source_mask, batch.bert_states, batch.bert_mask, batch.target_language
        )

    def layer_states(self, batch: Batch) -> Iterator[Float[Tensor, "batch source model_dim"]]:
        """Yield the embeddings, then every layer's output; the last one is the encoder's."""
        x = self.embed(batch.source, batch.source_language)
        bias = padding_bias(batch.source_mask)
        bert_bias = padding_bias(batch.bert_mask)
        for layer in self.layers:
            yield x
            x = layer(x, bias, batch.bert_states, bert_bias)
        yield x if self.norm is None else self.norm(x)


class EncoderAsPretrained(nn.Module):
    """A trained NMT's encoder that is called, and answers, as a transformers encoder.

    It is the control without pretraining (the paper's table 6, "another Transformer's encoder in
    place of BERT", which it does not describe further).
    """

    def __init__(self, own: Encoder) -> None:
        super().__init__()
        self.own = own
        self.config = SimpleNamespace(
            hidden_size=own.embed.tokens.embedding_dim, num_hidden_layers=len(own.layers)
        )

    def forward(
        self,
        input_ids: Int[Tensor, "batch source"],
        attention_mask: Int[Tensor, "batch source"] | None = None,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Return ``hidden_states``, embeddings first, and the last of them by name too."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = tuple(self.own.layer_states(Batch(source=input_ids, source_mask=mask.bool())))
        return SimpleNamespace(last_hidden_state=states[-1], hidden_states=states)


class Decoder(nn.Module):
    """Embeddings and decoder layers, over a whole target or one step of every beam."""

    def __init__(
        self, embed: Embedding, layers: list[DecoderLayer], final_norm: nn.LayerNorm | None
    ) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self.norm = final_norm

    def forward(
        self, decoder_input: Int[Tensor, "batch target"], memory: Memory
    ) -> Float[Tensor, "batch target model_dim"]:
        """Return the last hidden states. Padding needs no mask: it stands after real tokens."""
        x = self.embed(decoder_input, memory.target_language)
        bias = causal_bias(x.shape[1], x.device)
        memory_bias = padding_bias(memory.mask)
        bert_bias = padding_bias(memory.bert_mask)
        for layer in self.layers:
            x = layer(x, bias, memory.states, memory_bias, memory.bert_states, bert_bias)
        normed: Tensor = x if self.norm is None else self.norm(x)
        return normed


class FusedTransformer(nn.Module):
    """An encoder-decoder Transformer, plain or with BERT attention in its layers.

    The pretrained encoder is not part of it: its states arrive in the batch.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, output: nn.Linear, noise: Noise) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.output = output
        self.noise = noise
        self._mixers = [module for module in self.modules() if isinstance(module, BranchMixer)]

    @property
    def uses_bert(self) -> bool:
        return any(
            isinstance(module, EncoderLayer | DecoderLayer) and module.bert_attention is not None
            for module in self.modules()
        )

    def hidden(self, batch: Batch) -> Float[Tensor, "batch target model_dim"]:
        """Return the decoder's last states for a batch with targets, before the vocabulary."""
        assert batch.decoder_input is not None
        states: Tensor = self.decoder(batch.decoder_input, self.encoder(batch))
        return states

    def forward(self, batch: Batch) -> Float[Tensor, "batch target vocab"]:
        """Return the logits of every target token given those before it."""
        logits: Tensor = self.output(self.hidden(batch))
        return logits

    def begin_step(self, *key: int, drop_net: float | None = None) -> None:
        """Set the randomness of the next forward pass, and the drop-net rate if it changes."""
        self.noise.reseed(*key)
        if drop_net is not None:
            for mixer in self._mixers:
                mixer.drop_net = drop_net


class BeamSlots:
    """Which slots of the self-attention caches are the past of each beam.

    The past tokens of all beams of a sentence are slots of one cache (``new_cache``, one a layer);
    ``bias`` says which slots are a beam's own ancestors, so re-ordering beams moves that small
    table and nothing else. Slots that are no beam's ancestors any more are forgotten from time to
    time.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.bias = torch.empty(batch, 1, 1, 0, device=device)
        self._stores: list[SlotStore] = []
        self._steps = self._forgot_at = 0

    def new_cache(self) -> SelfAttentionCache:
        return SelfAttentionCache(self.new_store(), self.new_store())

    def new_store(self) -> SlotStore:
        self._stores.append(SlotStore())
        return self._stores[-1]

    def append(self, tokens: Int[Tensor, "batch beams"]) -> None:
        """Give every beam one slot more; each layer then appends to its own cache."""
        batch, beams = tokens.shape
        new_slots = torch.full((beams, beams), -math.inf, device=tokens.device).fill_diagonal_(0)
        self.bias = torch.cat([self.bias, new_slots.expand(batch, 1, beams, beams)], dim=3)
        self._steps += 1

    def reorder(self, parents: Int[Tensor, "batch beams"]) -> None:
        """Let beam j of each sentence go on from its old beam ``parents[:, j]``."""
        index = parents[:, None, :, None].expand(-1, -1, -1, self.bias.shape[3])
        self.bias = self.bias.gather(2, index)
        if self._steps - self._forgot_at >= _FORGET_EVERY:
            self._forget_dead_slots()

    def _forget_dead_slots(self) -> None:
        self._forgot_at = self._steps
        is_dead = (self.bias == -math.inf).all(2)[:, 0]
        most = int((~is_dead).sum(1).max())  # of any sentence; the others keep some dead ones
        if most == is_dead.shape[1]:
            return
        slots = is_dead.byte().argsort(dim=1, stable=True)[:, :most]
        for store in self._stores:
            store.keep_slots(slots)
        index = slots[:, None, None, :].expand(-1, -1, self.bias.shape[2], -1)
        self.bias = self.bias.gather(3, index)

    def keep(self, sentences: Int[Tensor, "kept"]) -> None:
        """Drop all other sentences."""
        for store in self._stores:
            store.keep(sentences)
        self.bias = self.bias[sentences]

    def past(
        self, store: SlotStore, places: Int[Tensor, "beams 2"]
    ) -> list[Float[Tensor, "heads _ width"]]:
        """Return what the tokens of some beams (sentence, beam) left in a store, oldest first."""
        sentences, beams = places.unbind(1)
        is_ancestor = self.bias[sentences, 0, beams] == 0
        return [
            store.of(i, slots) for i, slots in zip(sentences.tolist(), is_ancestor, strict=True)
        ]


class DecoderState:
    """A decoder in the middle of some sentences: a ``search.StatefulDecoder``.

    Beams share what belongs to their sentence: keys and values of the memory exist once, and a
    beam is one more query.
    """

    def __init__(self, model: FusedTransformer, memory: Memory) -> None:
        self._embed, self._norm, self._output = (
            model.decoder.embed,
            model.decoder.norm,
            model.output,
        )
        self._layers = [layer for layer in model.decoder.layers if isinstance(layer, DecoderLayer)]
        self._memory = [layer.cross_attention.project(memory.states) for layer in self._layers]
        self._bert: list[KeysValues | None] = [
            None
            if layer.bert_attention is None or memory.bert_states is None
            else layer.bert_attention.project(memory.bert_states)
            for layer in self._layers
        ]
        self._memory_bias = padding_bias(memory.mask)
        self._bert_bias = padding_bias(memory.bert_mask)
        self._language = memory.target_language
        #: Of this decoder's layers, and of any layers on top of it.
        self.slots = BeamSlots(len(memory.states), memory.states.device)
        self._caches = [self.slots.new_cache() for _ in self._layers]
        self._states: SlotStore | None = None
        self._position = 0

    def advance(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams model_dim"]:
        """Append one token to every beam and return the last hidden states."""
        self.slots.append(tokens)
        x = self._embed.at_step(tokens, self._position, self._language)
        self._position += 1
        for layer, cache, memory, bert in zip(
            self._layers, self._caches, self._memory, self._bert, strict=True
        ):
            x = layer(x, self.slots.bias, memory, self._memory_bias, bert, self._bert_bias, cache)
        normed: Tensor = x if self._norm is None else self._norm(x)
        if self._states is not None:
            self._states.append(normed[:, None])
        return normed

    def keep_states(self) -> None:
        """Before the first step: keep the last hidden states of every step."""
        assert not self._position
        self._states = self.slots.new_store()

    def states(self, places: Int[Tensor, "beams 2"]) -> list[Float[Tensor, "_ model_dim"]]:
        """Return the kept states of all steps so far of some beams (sentence, beam)."""
        assert self._states is not None
        return [states[0] for states in self.slots.past(self._states, places)]

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        """Append one token to every beam and return the logits of the next."""
        logits: Tensor = self._output(self.advance(tokens))
        return logits

    def reorder(self, parents: Int[Tensor, "batch beams"]) -> None:
        """Let beam j of each sentence go on from its old beam ``parents[:, j]``."""
        self.slots.reorder(parents)

    def keep(self, sentences: Int[Tensor, "kept"]) -> None:
        """Drop all other sentences."""
        self.slots.keep(sentences)
        self._memory = [memory.select(sentences) for memory in self._memory]
        self._bert = [None if bert is None else bert.select(sentences) for bert in self._bert]
        if self._memory_bias is not None:
            self._memory_bias = self._memory_bias[sentences]
        if self._bert_bias is not None:
            self._bert_bias = self._bert_bias[sentences]
        if self._language is not None:
            self._language = self._language[sentences]


def build_model(
    config: ModelConfig,
    fusion: FusionConfig | None,
    *,
    source_size: int,
    target_size: int,
    bert_dim: int | None = None,
    languages: int = 0,
) -> FusedTransformer:
    """Build the network with fresh weights.

    Args:
        fusion: ``None`` builds the plain NMT.
        source_size: Source vocabulary, specials included.
        target_size: Target vocabulary, specials included.
        bert_dim: Width of the pretrained encoder's states, needed with ``fusion``.
        languages: How many languages have embeddings, on both sides; 0 for none.

    Raises:
        ValueError: If embeddings are to be shared between vocabularies of different size, or
            gates do not fit the number of layers.
    """
    noise = Noise()
    embeddings = _embeddings(config, source_size, target_size)
    learned = config.max_positions if config.positions == "learned" else None
    encoder_gates, decoder_gates = _gates(config, fusion)

    def attention(heads: int, memory_dim: int | None = None) -> CrossAttention:
        return CrossAttention(
            config.model_dim, memory_dim or config.model_dim, heads, config.attention_dropout, noise
        )

    def parts(heads: int) -> tuple[SelfAttention, FeedForward, BranchMixer]:
        mixer = BranchMixer(
            fusion.drop_net if fusion and not fusion.drop_net_warmup_steps else 0.0,
            fusion is not None and fusion.mixup,
            fusion.branch_weights if fusion else (1.0, 0.0),
            noise,
        )
        ffn = FeedForward(
            config.model_dim, config.ffn_dim, config.activation, config.activation_dropout, noise
        )
        self_attention = SelfAttention(config.model_dim, heads, config.attention_dropout, noise)
        return self_attention, ffn, mixer

    pre_norm = config.norm == "pre"
    encoder_layers, decoder_layers = [], []
    for is_fused in encoder_gates:
        self_attention, ffn, mixer = parts(config.heads)
        bert = attention(config.heads, bert_dim) if is_fused else None
        dropout = Dropout(config.dropout, noise)
        encoder_layers.append(
            EncoderLayer(self_attention, bert, mixer, ffn, pre_norm=pre_norm, dropout=dropout)
        )
    heads = config.decoder_heads or config.heads
    for is_fused in decoder_gates:
        self_attention, ffn, mixer = parts(heads)
        bert = attention(heads, bert_dim) if is_fused else None
        decoder_layers.append(
            DecoderLayer(
                self_attention,
                attention(heads),
                bert,
                mixer,
                ffn,
                pre_norm=pre_norm,
                dropout=Dropout(config.dropout, noise),
                order=fusion.order if fusion else "parallel",
            )
        )

    def embed(tokens: nn.Embedding) -> Embedding:
        dropout = Dropout(config.dropout, noise)
        return Embedding(
            tokens,
            learned,
            languages=languages,
            scale=config.scale_embeddings,
            norm=config.embedding_norm,
            dropout=dropout,
        )

    def final_norm() -> nn.LayerNorm | None:
        return nn.LayerNorm(config.model_dim) if pre_norm else None

    source_embedding, target_embedding, output = embeddings
    encoder = Encoder(embed(source_embedding), encoder_layers, final_norm())
    decoder = Decoder(embed(target_embedding), decoder_layers, final_norm())
    return FusedTransformer(encoder, decoder, output, noise)


def _embeddings(
    config: ModelConfig, source_size: int, target_size: int
) -> tuple[nn.Embedding, nn.Embedding, nn.Linear]:
    def embedding(size: int) -> nn.Embedding:
        table = nn.Embedding(size, config.model_dim, padding_idx=Vocabulary.pad)
        nn.init.normal_(table.weight, std=config.model_dim**-0.5)
        nn.init.zeros_(table.weight[Vocabulary.pad])
        return table

    target = embedding(target_size)
    if config.share_embeddings == "all":
        if source_size != target_size:
            raise ValueError(
                f"share_embeddings = 'all' needs one vocabulary, but the source has {source_size} "
                f"entries and the target {target_size}"
            )
        source = target
    else:
        source = embedding(source_size)
    output = nn.Linear(config.model_dim, target_size, bias=False)
    if config.share_embeddings == "none":
        nn.init.normal_(output.weight, std=config.model_dim**-0.5)
    else:
        output.weight = target.weight
    return source, target, output


def _gates(config: ModelConfig, fusion: FusionConfig | None) -> tuple[list[bool], list[bool]]:
    """Return which encoder and which decoder layers have BERT attention."""
    depths = (config.encoder_layers, config.decoder_layers)
    if fusion is None:
        return [False] * depths[0], [False] * depths[1]
    gates = fusion.gates if fusion.gates is not None else (True,) * max(depths)
    if len(gates) != max(depths):
        raise ValueError(
            f"fusion.gates has {len(gates)} entries but the model has {max(depths)} layers"
        )
    return (
        [gate and fusion.encoder_attention for gate in gates[: depths[0]]],
        [gate and fusion.decoder_attention for gate in gates[: depths[1]]],
    )
