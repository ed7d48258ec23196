import math

import pytest
import torch
from torch import Tensor

from bertfused.attention import causal_bias
from bertfused.batch import Example, pad_ids
from bertfused.config import ModelConfig
from bertfused.model import build_model
from bertfused.noise import Noise
from bertfused.vocab import Vocabulary
from docnmt.cadec import CadecModel, draft_of, training_draft
from docnmt.context import Current, Encoded, Sizes, target_states
from tests.tiny_context import (
    Given,
    given,
    layer_by_hand,
    logits,
    own_parameters,
    tiny_context_model,
)
from tests.tiny_model import TARGET_SIZE, tiny_batch, tiny_examples, tiny_model

CADEC = {"model": "cadec", "layers": 2}
# Of the sentences 0, 1, 2, then of the ones to translate, 3 and 4: source, target, BERT.
LENGTHS = [(4, 3, 5), (2, 5, 3), (6, 1, 4), (3, 4, 6), (5, 6, 2)]
PREVIOUS = [[0, 1, 2], [1]]
DRAFTS = [[5, 6, 7, 2], [8, 2]]


def cadec(**options: object) -> CadecModel:
    model = tiny_context_model(CADEC, **options)
    assert isinstance(model, CadecModel)
    return model


def sentences(fused: bool = False) -> list[Example]:
    return tiny_examples(LENGTHS, fused=fused)


def two_in_context(model: CadecModel, fused: bool = False) -> Given:
    return given(model, sentences(fused), PREVIOUS, [3, 4], DRAFTS)


# Size and start


def test_the_number_of_new_parameters_is_the_papers() -> None:
    """6 layers of 5,788,160 and a norm of 1,024; 512 wide, memories 512 + 4 and 1,024 + 4 wide.

    A layer: self-attention 4 (512^2 + 512); attention to the source 2 (512^2 + 512) for queries and
    output and 2 (516 * 512 + 512) for keys and values; to the draft the same with 1,028; FFN
    2 * 512 * 2048 + 2048 + 512; 4 norms of 1,024.
    """
    config = ModelConfig(model_dim=512, ffn_dim=2048, heads=8, share_embeddings="none")
    with torch.device("meta"):
        base = build_model(config, None, source_size=9, target_size=11)
        model = CadecModel(base, Sizes(512, 2048, 8, 0.1))
    own = own_parameters(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == own.keys()
    assert own.pop("output.weight").shape == (11, 512)
    square, ffn = 512**2 + 512, 2 * 512 * 2048 + 2048 + 512
    memories = 2 * (2 * square) + 2 * (516 * 512 + 512) + 2 * (1028 * 512 + 512)
    expected = 6 * (4 * square + memories + ffn + 4 * 1024) + 1024
    assert sum(p.numel() for p in own.values()) == expected == 34_729_984


def test_the_output_starts_as_the_bases_and_is_its_own() -> None:
    for share in ("decoder", "none"):
        model = cadec(moved=0.0, share_embeddings=share)
        assert torch.equal(model.output.weight, model.base.output.weight)
        assert model.output.weight.requires_grad
        assert not model.base.output.weight.requires_grad
        with torch.no_grad():
            model.output.weight += 1
        assert not torch.equal(model.output.weight, model.base.output.weight)


# The whole


def by_hand(model: CadecModel, examples: list[Example], draft: list[int]) -> Tensor:
    """Compute the logits of the last sentence after the others, one sentence at a time."""
    alone = [given(model, [example], [[0]], [0], [draft]) for example in examples]

    def at(distance: int, states: Tensor) -> Tensor:
        one_hot = torch.zeros(*states.shape[:2], model.sentences + 1)
        one_hot[:, :, distance] = 1
        return torch.cat([states, one_hot], dim=2)

    sources, targets = [], []
    for distance, other in zip(range(len(alone) - 1, -1, -1), alone, strict=True):
        batch, hidden = other.encoded.batch, other.encoded.hidden
        target = batch.target
        if not distance:
            target = torch.tensor([draft])
            hidden = model.base.decoder(torch.tensor([[2, *draft[:-1]]]), other.current.memory)
        assert hidden is not None
        embedded = model.base.decoder.embed.tokens(target) * math.sqrt(8)
        sources.append(at(distance, other.current.memory.states))
        targets.append(at(distance, torch.cat([embedded, hidden], dim=2)))
    memories = [torch.cat(sources, dim=1), torch.cat(targets, dim=1)]
    decoder_input = alone[-1].current.decoder_input
    assert decoder_input is not None
    x = model.base.decoder.embed(decoder_input)
    bias = causal_bias(x.shape[1], x.device)
    for layer in model.layers:
        x = layer_by_hand(layer, x, bias, memories)
    found: Tensor = model.output(model.norm(x))
    return found[0]


@pytest.mark.parametrize("fused", [False, True])
@torch.inference_mode()
def test_the_model_is_what_its_equations_say(fused: bool) -> None:
    model = cadec(fusion={} if fused else None)
    examples = sentences(fused)
    found = logits(model, two_in_context(model, fused))
    rows = zip(PREVIOUS, (3, 4), DRAFTS, strict=True)
    for row, (previous, wanted, draft) in enumerate(rows):
        expected = by_hand(model, [examples[i] for i in (*previous, wanted)], draft)
        # Random weights make states of tens on the way to these logits.
        torch.testing.assert_close(found[row, : len(expected)], expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_the_draft_matters() -> None:
    model = cadec()
    found = [
        logits(model, given(model, sentences(), PREVIOUS, [3, 4], drafts))
        for drafts in (DRAFTS, [[5, 6, 9, 2], [8, 2]])
    ]
    assert float((found[0][0] - found[1][0]).abs().max()) > 1e-2
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-5)


# Drafts of training


def currents(lengths: list[int]) -> tuple[Current, Tensor]:
    """Encode sentences with references of these lengths."""
    examples = tiny_examples([(4, length, 2) for length in lengths], fused=False)
    encoded = Encoded(tiny_model(), tiny_batch(examples))
    target = encoded.batch.target
    assert target is not None
    return encoded.select(torch.arange(len(lengths))), target


def ids_of(states: Tensor) -> Tensor:
    """Read off draft states which tokens they represent."""
    embed = tiny_model().decoder.embed
    distances = torch.cdist(states[..., :8], (embed.tokens.weight * embed.scale)[None])
    assert float(distances.min(2).values.max()) < 1e-2
    return distances.argmin(2)


def noise(seed: int) -> Noise:
    found = Noise()
    found.reseed(seed)
    return found


@torch.no_grad()
def test_a_reference_is_noised_but_for_its_ends() -> None:
    current, target = currents([400, 300, 3, 2, 1])
    draft = training_draft(tiny_model(), current, target, noise(1), from_references=True)
    ids = ids_of(draft.states)
    assert torch.equal(draft.mask, target != Vocabulary.pad)
    assert torch.equal(ids[2:][draft.mask[2:]], target[2:][draft.mask[2:]])
    assert torch.equal(ids[:, 0], target[:, 0])
    for row, length in ((0, 400), (1, 300)):
        assert torch.equal(ids[row, length - 2 : length], target[row, length - 2 : length])
    middle = draft.mask.clone()
    middle[:, 0] = middle[0, 398:] = middle[1, 298:] = middle[2:] = False
    changed = ids[middle] != target[middle]
    # 0.2 of 694, of which one in 9 is drawn as it was
    assert float(changed.double().mean()) == pytest.approx(0.2 * 8 / 9, abs=0.05)
    assert set(ids[middle][changed].tolist()) == set(range(4, TARGET_SIZE))


@pytest.mark.parametrize("from_references", [True, False])
def test_a_key_decides_the_draft(from_references: bool) -> None:
    current, target = currents([30, 20])

    def draw(seed: int) -> Tensor:
        own = training_draft(
            tiny_model(), current, target, noise(seed), from_references=from_references
        )
        return own.states

    first = draw(1)
    assert torch.equal(draw(1), first)
    other = draw(2)
    assert other.shape != first.shape or not torch.equal(other, first)


@torch.no_grad()
def test_a_sample_is_the_bases_own_and_ends() -> None:
    current, target = currents([8, 3])
    draft = training_draft(tiny_model(), current, target, noise(3), from_references=False)
    ids = ids_of(draft.states)
    for row, (own, mask) in enumerate(zip(ids, draft.mask, strict=True)):
        tokens = own[mask].tolist()
        assert tokens[-1] == Vocabulary.eos
        assert Vocabulary.eos not in tokens[:-1]
        assert len(tokens) <= 1.5 * (8, 3)[row] + 5 + 1


def test_a_sample_does_not_pass_the_learned_positions_of_the_base() -> None:
    """It may have 1.5 times the tokens of the reference and 5 more, but no more than there are."""
    options = {"positions": "learned", "max_positions": 12}
    base = tiny_model(**options)
    examples = tiny_examples([(4, 12, 2)] * 8, fused=False)
    encoded = Encoded(base, tiny_batch(examples))
    assert encoded.batch.target is not None
    current = encoded.select(torch.arange(8))
    for seed in range(5):
        target = encoded.batch.target
        draft = training_draft(base, current, target, noise(seed), from_references=False)
        assert draft.states.shape[1] <= 12


@torch.inference_mode()
def test_a_draft_is_represented_as_a_translation_of_that_sentence_is() -> None:
    current, target = currents([5, 3])
    base = tiny_model()
    assert current.hidden is not None
    draft = draft_of(base, current, target)
    expected = target_states(base.decoder.embed, target, current.hidden)
    torch.testing.assert_close(draft.states, expected)
    ids, mask = pad_ids([[2], [7, 8, 2]], Vocabulary.pad)
    assert torch.equal(draft_of(base, current, ids).mask, mask)
