"""CADec: a second decoder that corrects a first translation in context.

Voita, Sennrich and Titov (ACL 2019), "When a Good Translation is Wrong in Context". The base is
frozen; all sentences are encoded and decoded by it separately.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bertfused.attention import causal_bias, padding_bias
from bertfused.batch import shift_right
from bertfused.config import SearchConfig
from bertfused.model import BeamSlots, DecoderState, Embedding, FusedTransformer
from bertfused.noise import Dropout, Noise
from bertfused.search import longest, sample
from bertfused.vocab import Vocabulary
from docnmt.context import (
    Context,
    ContextLayer,
    ContextModel,
    Current,
    Draft,
    Encoded,
    GatedAttention,
    LayerStack,
    Packed,
    Sizes,
    padded_index,
    target_states,
)

REFERENCE_SHARE = 0.5  # of the batches whose drafts are noised references, not samples
REFERENCE_NOISE, SAMPLE_NOISE = 0.2, 0.1
SAMPLE_TEMPERATURE = 0.5
# Samples end at this times the reference's tokens, plus this: one that never ends would be what a
# whole batch waits for. The paper does not say.
SAMPLE_LENGTH = 1.5, 5


class CadecModel(ContextModel):
    """The base, and the second decoder with an output projection that starts as the base's.

    Every state carries the distance of its sentence as a one-hot vector, 0 for the current one.
    """

    wants_draft = True

    def __init__(
        self, base: FusedTransformer, sizes: Sizes, *, sentences: int = 3, layers: int = 6
    ) -> None:
        super().__init__(base)
        self.sentences = sentences
        width = sizes.model_dim
        memory_dims = (width + sentences + 1, 2 * width + sentences + 1)

        def attentions() -> list[GatedAttention]:
            """Attend to source states, then to first-pass target states; without gates."""
            return [
                GatedAttention(
                    sizes.attention(dim, self.noise), None, Dropout(sizes.dropout, self.noise)
                )
                for dim in memory_dims
            ]

        self.layers = nn.ModuleList(
            ContextLayer(sizes, attentions(), self.noise) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(sizes.dropout, self.noise)
        self.output = nn.Linear(width, base.output.out_features, bias=False)
        with torch.no_grad():
            self.output.weight.copy_(base.output.weight)

    def source_states(self, encoded: Encoded) -> Float[Tensor, "batch source model_dim"]:
        return encoded.memory.states

    def hidden(
        self, current: Current, source: Context, target: Context
    ) -> Float[Tensor, "batch target model_dim"]:
        assert current.decoder_input is not None
        memories, masks = self.memories(current, source, target)
        biases = [padding_bias(mask) for mask in masks]
        x = self.dropout(self.base.decoder.embed(current.decoder_input))
        bias = causal_bias(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, bias, memories, biases)
        normed: Tensor = self.norm(x)
        return normed

    def start(self, current: Current, source: Context, target: Context) -> "CadecDecoder":
        return CadecDecoder(self, *self.memories(current, source, target))

    def memories(
        self, current: Current, source: Context, target: Context
    ) -> tuple[list[Packed], list[Bool[Tensor, "batch _"]]]:
        """Join contexts and current sentence along time, on the source and on the target side."""
        assert current.draft is not None
        draft = current.draft
        joined = [
            self._joined(source, current.memory.states, current.memory.mask),
            self._joined(target, draft.states, draft.mask),
        ]
        return joined, [memory.mask for memory in joined]

    def _joined(
        self,
        context: Context,
        current: Float[Tensor, "batch length width"],
        mask: Bool[Tensor, "batch length"],
    ) -> Packed:
        one_hot = functional.one_hot(context.distance, self.sentences + 1)
        before = torch.cat([context.states, one_hot.to(context.states)], dim=1)
        current_hot = functional.one_hot(torch.zeros_like(mask.long()), self.sentences + 1)
        current_tokens = torch.cat([current, current_hot.to(current)], dim=2)[mask]
        index = torch.cat([context.index, len(before) + padded_index(mask)], dim=1)
        return Packed(
            torch.cat([before, current_tokens]), index, torch.cat([context.mask, mask], dim=1)
        )


class CadecDecoder:
    """The second decoder in the middle of some sentences."""

    def __init__(
        self,
        model: CadecModel,
        memories: Sequence[Packed],
        masks: Sequence[Bool[Tensor, "batch _"]],
    ) -> None:
        self._embed, self._norm, self._output = model.base.decoder.embed, model.norm, model.output
        self._slots = BeamSlots(len(masks[0]), masks[0].device)
        self._stack = LayerStack(model.layers, self._slots, memories, masks)
        self._position = 0

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        self._slots.append(tokens)
        x = self._embed.at_step(tokens, self._position)
        self._position += 1
        logits: Tensor = self._output(self._norm(self._stack.advance(x)))
        return logits

    def reorder(self, parents: Int[Tensor, "batch beams"]) -> None:
        self._slots.reorder(parents)

    def keep(self, sentences: Int[Tensor, "kept"]) -> None:
        self._slots.keep(sentences)
        self._stack.keep(sentences)


MakeDraft = Callable[[Sequence[int], Current, Int[Tensor, "rows target"]], Draft]


def training_drafts(base: FusedTransformer, noise: Noise) -> MakeDraft:
    """Decide how the drafts of one training batch are drawn (Voita et al., 2019, section 5.1).

    They are noised references, in ``REFERENCE_SHARE`` of the batches, or noised samples.

    Returns:
        Draws drafts for some sentences, given their numbers, what is known of them, and their
        references.
    """
    from_references = noise.uniform() < REFERENCE_SHARE

    def draw(numbers: Sequence[int], current: Current, target: Int[Tensor, "rows target"]) -> Draft:
        return training_draft(base, current, target, noise, from_references=from_references)

    return draw


@torch.no_grad()
def training_draft(
    base: FusedTransformer,
    current: Current,
    target: Int[Tensor, "rows target"],
    noise: Noise,
    *,
    from_references: bool,
) -> Draft:
    """Draw the drafts of some sentences: noised references, or noised samples from the base."""
    ids, rate = target, REFERENCE_NOISE
    if not from_references:
        ids, rate = _samples(base, current, target, noise), SAMPLE_NOISE
    return draft_of(base, current, _noised(ids, rate, base.output.out_features, noise))


@torch.no_grad()
def draft_of(base: FusedTransformer, current: Current, draft: Int[Tensor, "batch draft"]) -> Draft:
    """Represent given drafts by what the base's decoder makes of them."""
    hidden = base.decoder(shift_right(draft), current.memory)
    embed: Embedding = base.decoder.embed
    return Draft(target_states(embed, draft, hidden), draft != Vocabulary.pad)


def _samples(
    base: FusedTransformer, current: Current, target: Int[Tensor, "batch target"], noise: Noise
) -> Int[Tensor, "batch draft"]:
    limit = SearchConfig(max_length_a=SAMPLE_LENGTH[0], max_length_b=SAMPLE_LENGTH[1])
    config = SearchConfig(sampling="full", temperature=SAMPLE_TEMPERATURE)
    seeds = [noise.integer(2**62) for _ in range(len(target))]
    learned = base.decoder.embed.positions
    positions = 2**20 if learned is None else learned.num_embeddings
    max_lengths = longest(limit, (target != Vocabulary.pad).sum(1), positions)
    found = sample(DecoderState(base, current.memory), max_lengths, config, seeds=seeds)
    rows = [torch.tensor(hypotheses[0].ids, device=target.device) for hypotheses in found]
    return nn.utils.rnn.pad_sequence(rows, True, Vocabulary.pad)


def _noised(
    ids: Int[Tensor, "batch draft"], rate: float, vocabulary: int, noise: Noise
) -> Int[Tensor, "batch draft"]:
    """Replace tokens by random ones; the first and the last two (one is EOS) stay."""
    generator = np.random.default_rng(noise.integer(2**62))
    draws = torch.from_numpy(generator.random(ids.shape)).to(ids.device)
    words = torch.from_numpy(generator.integers(4, vocabulary, ids.shape)).to(ids.device)
    place = torch.arange(ids.shape[1], device=ids.device)[None]
    lengths = (ids != Vocabulary.pad).sum(1, keepdim=True)
    may_change = (place > 0) & (place < lengths - 2)
    return torch.where((draws < rate) & may_change, words, ids)
