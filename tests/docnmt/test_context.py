import numpy as np
import pytest
import torch
from torch import Tensor

from bertfused.batch import Example
from docnmt.context import Context, Encoded, Places, target_states
from tests.tiny_context import ON_A_BASE, given, logits, own_parameters, tiny_context_model
from tests.tiny_model import tiny_batch, tiny_examples, tiny_model

LENGTHS = [(4, 3, 5), (2, 5, 3), (3, 4, 6), (5, 6, 2)]
SIZES = np.array([2, 1, 3])  # tokens 10 11 | 20 | 30 31 32
FLAT = torch.tensor([[10.0, -10], [11, -11], [20, -20], [30, -30], [31, -31], [32, -32]])


def table(context: Context, values: Tensor) -> list[list[float]]:
    """Lay a number of each token out as its contexts, without padding."""
    padded = context.pad(values[:, :1].float())[:, :, 0]
    return [row[mask].tolist() for row, mask in zip(padded, context.mask, strict=True)]


def test_contexts_are_the_previous_sentences_oldest_first() -> None:
    context = Places.of([[0, 1], [2], [1, 2, 0]], SIZES).gather(FLAT)
    assert table(context, context.states) == [
        [10, 11, 20],
        [30, 31, 32],
        [20, 30, 31, 32, 10, 11],
    ]
    assert table(context, -context.states[:, 1:]) == table(context, context.states)
    assert table(context, context.distance[:, None]) == [
        [2, 2, 1],
        [1, 1, 1],
        [3, 2, 2, 2, 1, 1],
    ]
    assert context.mask.sum(1).tolist() == [3, 3, 6]


def test_places_survive_a_move() -> None:
    places = Places.of([[0, 2], [1]], SIZES)
    context, moved = places.gather(FLAT), places.to(torch.device("cpu")).gather(FLAT)
    assert torch.equal(moved.states, context.states)
    assert torch.equal(moved.mask, context.mask)


@torch.inference_mode()
def test_the_base_sees_each_sentence_by_itself() -> None:
    base = tiny_model()
    batch = tiny_batch(tiny_examples(LENGTHS, fused=False))
    encoded = Encoded(base, batch)
    assert encoded.hidden is not None
    assert torch.equal(base.output(encoded.hidden), base(batch))
    assert len(encoded.layers) == 3
    chosen = encoded.select(torch.tensor([3, 1]))
    assert torch.equal(chosen.source, batch.source[[3, 1]])
    assert torch.equal(chosen.memory.states, encoded.layers[-1][[3, 1]])
    assert chosen.hidden is not None
    assert torch.equal(chosen.hidden, encoded.hidden[[3, 1]])


def test_a_target_token_is_its_embedding_beside_the_state_that_predicted_it() -> None:
    embed = tiny_model().decoder.embed
    hidden = torch.arange(16.0).view(1, 2, 8)
    found = target_states(embed, torch.tensor([[5, 2]]), hidden)
    assert torch.equal(found[:, :, 8:], hidden)
    expected = embed.tokens.weight[[5, 2]].detach() * 8**0.5
    torch.testing.assert_close(found[0, :, :8], expected)


@pytest.mark.parametrize("name", ["layerwise", "cadec", "zhang"])
def test_the_base_stays_as_it_is(name: str) -> None:
    """It has no gradient, no dropout and no change by an update; all else has a gradient."""
    model = tiny_context_model(ON_A_BASE[name], dropout=0.5).train()
    assert model.training
    assert not any(module.training for module in model.base.modules())
    others = [own for own in model.modules() if own not in set(model.base.modules())]
    assert all(module.training for module in others)
    examples = tiny_examples(LENGTHS, fused=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(own_parameters(model).values(), lr=0.1, weight_decay=0.1)
    own = given(model, examples, [[0, 1], [2]], [2, 3], [[5, 2], [6, 7, 2]])
    logits(model, own).square().sum().backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        is_base = key.startswith("base.")
        assert torch.equal(parameter, before[key]) == is_base, key
        assert (parameter.grad is None) == is_base, key


def changed(examples: list[Example], place: int) -> list[Example]:
    """Change a sentence's target, as if it had been translated otherwise."""
    other = Example(examples[place].source, [9, 9, 9, 2])
    return [*examples[:place], other, *examples[place + 1 :]]


@pytest.mark.parametrize("name", ["layerwise", "source only", "cadec", "zhang"])
@torch.inference_mode()
def test_a_model_reads_the_sides_it_says(name: str) -> None:
    model = tiny_context_model(ON_A_BASE[name])
    examples = tiny_examples(LENGTHS, fused=False)
    found = [
        logits(model, given(model, own, [[0, 1]], [3], [[5, 2]]))
        for own in (examples, changed(examples, 0))
    ]
    assert torch.equal(*found) != model.reads_target
