import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bertfused.attention import (
    CrossAttention,
    KeysValues,
    SelfAttention,
    SlotStore,
    attend,
    causal_bias,
    padding_bias,
    softmax,
    split_heads,
)
from bertfused.noise import Dropout, Noise

INF = math.inf
DIM, HEADS = 12, 3


def randomised(module: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4, generator=generator)
    return module


def random(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def torch_attention(memory_dim: int, ours: SelfAttention | CrossAttention) -> nn.Module:
    """Torch's own attention with the weights of ours."""
    theirs = nn.MultiheadAttention(
        DIM, HEADS, kdim=memory_dim, vdim=memory_dim, batch_first=True, dropout=0.0
    )
    with torch.no_grad():
        if isinstance(ours, SelfAttention):
            weights = ours.in_proj.weight.chunk(3)
            theirs.in_proj_bias.copy_(ours.in_proj.bias)
        else:
            weights = (ours.q_proj.weight, *ours.kv_proj.weight.chunk(2))
            theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.kv_proj.bias]))
        if theirs.in_proj_weight is not None:
            theirs.in_proj_weight.copy_(torch.cat(weights))
        else:
            for name, weight in zip(("q", "k", "v"), weights, strict=True):
                getattr(theirs, f"{name}_proj_weight").copy_(weight)
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
        theirs.out_proj.bias.copy_(ours.out_proj.bias)
    return theirs


def gradients(output: Tensor, keep: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of an arbitrary function of those rows of the output that count."""
    weight = random(*output.shape, seed=9)
    return list(torch.autograd.grad((output * weight)[keep].sum(), inputs))


def in_projection_gradients(module: nn.Module) -> list[Tensor]:
    """The parameters of torch's attention in the order of ours: q, k, v, bias, output."""
    packed = module.in_proj_weight
    parts = [packed] if packed is not None else [getattr(module, f"{n}_proj_weight") for n in "qkv"]
    return [*parts, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias]


MASKS = {
    "no padding": torch.ones(2, 5, dtype=torch.bool),
    "padding": torch.tensor([[True] * 5, [True, True, True, False, False]]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_self_attention_and_its_gradients_are_those_of_torch(mask: Tensor, causal: bool) -> None:
    ours = randomised(SelfAttention(DIM, HEADS, 0.0, Noise()))
    assert isinstance(ours, SelfAttention)
    theirs = torch_attention(DIM, ours)
    x = random(2, 5, DIM).requires_grad_()
    bias = padding_bias(mask)
    if causal:
        triangle = causal_bias(5, x.device)
        bias = triangle if bias is None else triangle + bias
    output = ours(x, bias)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    expected, _ = theirs(x, x, x, key_padding_mask=~mask, attn_mask=hidden)
    torch.testing.assert_close(output[mask], expected[mask], rtol=0, atol=1e-5)

    parameters = [ours.in_proj.weight, ours.in_proj.bias, *ours.out_proj.parameters()]
    found = gradients(output, mask, [x, *parameters])
    wanted = gradients(expected, mask, [x, *in_projection_gradients(theirs)])
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory_dim", [DIM, 7])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("projected", [False, True])
def test_cross_attention_and_its_gradients_are_those_of_torch(
    memory_dim: int, mask: Tensor, projected: bool
) -> None:
    ours = randomised(CrossAttention(DIM, memory_dim, HEADS, 0.0, Noise()))
    assert isinstance(ours, CrossAttention)
    theirs = torch_attention(memory_dim, ours)
    x, memory = random(2, 4, DIM).requires_grad_(), random(2, 5, memory_dim).requires_grad_()
    output = ours(x, ours.project(memory) if projected else memory, padding_bias(mask))
    expected, _ = theirs(x, memory, memory, key_padding_mask=~mask)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)

    everything = torch.ones(2, 4, dtype=torch.bool)
    parameters = [ours.q_proj.weight, ours.kv_proj.weight, *ours.out_proj.parameters()]
    found = gradients(output, everything, [x, memory, *parameters])
    theirs_parameters = in_projection_gradients(theirs)
    wanted = gradients(expected, everything, [x, memory, *theirs_parameters])
    *projections, _, out_weight, out_bias = wanted[2:]
    whole = torch.cat(projections) if memory_dim == DIM else None
    query = projections[0] if whole is None else whole[:DIM]
    keys_values = torch.cat(projections[1:]) if whole is None else whole[DIM:]
    wanted = [*wanted[:2], query, keys_values, out_weight, out_bias]
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_a_bias_hides_padding_and_is_absent_without_any() -> None:
    assert padding_bias(torch.ones(2, 3, dtype=torch.bool)) is None
    assert padding_bias(None) is None
    bias = padding_bias(torch.tensor([[True, True, False], [True, False, False]]))
    assert bias is not None
    assert bias.shape == (2, 1, 1, 3)
    assert bias.flatten(1).tolist() == [[0, 0, -INF], [0, -INF, -INF]]


def test_a_causal_bias_hides_the_future() -> None:
    expected = [[0, -INF, -INF], [0, 0, -INF], [0, 0, 0]]
    assert causal_bias(3, torch.device("cpu")).tolist() == expected


def test_attention_by_hand() -> None:
    """One head, width 4: logits are q·k / 2; a query that knows nothing takes the mean."""
    query = torch.tensor([[[[2.0, 0, 0, 0], [0, 0, 0, 0]]]])
    keys = torch.tensor([[[[math.log(3), 0, 0, 0], [0, 0, 0, 0]]]])
    values = torch.tensor([[[[8.0, 0, 0, 0], [0, 4.0, 0, 0]]]])
    output = attend(query, keys, values, None, Dropout(0.0, Noise()))
    torch.testing.assert_close(output, torch.tensor([[[6.0, 1, 0, 0], [4, 2, 0, 0]]]))


def test_heads_and_parts_are_cut_in_the_order_of_the_matrix() -> None:
    x = torch.arange(24.0).view(1, 2, 12)  # 2 positions; 3 parts of 2 heads of 2
    query, keys, values = split_heads(x, 3, 2)
    assert query.tolist() == [[[[0, 1], [12, 13]], [[2, 3], [14, 15]]]]
    assert keys.tolist() == [[[[4, 5], [16, 17]], [[6, 7], [18, 19]]]]
    assert values.tolist() == [[[[8, 9], [20, 21]], [[10, 11], [22, 23]]]]


def test_attention_dropout_zeroes_weights_while_training_only() -> None:
    noise = Noise()
    attention = randomised(SelfAttention(DIM, HEADS, 0.5, noise))
    assert isinstance(attention, SelfAttention)
    x = random(2, 5, DIM)
    noise.reseed(4)
    noisy = attention.train()(x, None)
    noise.reseed(4)
    query, keys, values = split_heads(attention.in_proj(x), 3, HEADS)
    weights = (query @ keys.transpose(-1, -2) / 2).softmax(-1)  # head_dim is 4
    dropped = weights * noise.keep_mask(weights, 128) * 2
    expected = attention.out_proj((dropped @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(noisy, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(attention.eval()(x, None), noisy, atol=1e-3)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_store_returns_all_that_was_appended_past_its_first_capacity(beams: int) -> None:
    store, given = SlotStore(), []
    storages = set()
    for step in range(70):
        given.append(random(2, HEADS, beams, 4, seed=step))
        stored = store.append(given[-1])
        storages.add(stored.data_ptr())
        assert store.slots == (step + 1) * beams
        assert torch.equal(stored, torch.cat(given, dim=2))
    assert 1 < len(storages) < 6  # it grew, but not at every step


def test_a_store_keeps_sentences_in_the_order_asked_for() -> None:
    store = SlotStore()
    store.keep(torch.tensor([1]))  # nothing there yet
    first, second = random(3, HEADS, 2, 4), random(2, HEADS, 2, 4, seed=3)
    store.append(first)
    store.keep(torch.tensor([2, 0]))
    stored = store.append(second)
    assert torch.equal(stored, torch.cat([first[[2, 0]], second], dim=2))


def test_keys_and_values_are_selected_together() -> None:
    keys, values = random(3, HEADS, 2, 4), random(3, HEADS, 2, 4, seed=3)
    chosen = KeysValues(keys, values).select(torch.tensor([2, 0]))
    assert torch.equal(chosen.keys, keys[[2, 0]])
    assert torch.equal(chosen.values, values[[2, 0]])


def glorot(rows: int, columns: int) -> float:
    return math.sqrt(6 / (rows + columns))


@pytest.mark.parametrize(
    ("make", "name", "bound"),
    [
        (lambda: SelfAttention(64, 4, 0.0, Noise()), "in_proj", glorot(192, 64)),
        (lambda: SelfAttention(64, 4, 0.0, Noise()), "out_proj", glorot(64, 64)),
        # fairseq: a gain of 1/sqrt(2) where queries, keys and values are as wide as the model
        (lambda: CrossAttention(64, 64, 4, 0.0, Noise()), "q_proj", glorot(64, 64) / 2**0.5),
        (lambda: CrossAttention(64, 64, 4, 0.0, Noise()), "kv_proj", glorot(64, 64) / 2**0.5),
        (lambda: CrossAttention(64, 32, 4, 0.0, Noise()), "q_proj", glorot(64, 64)),
        (lambda: CrossAttention(64, 32, 4, 0.0, Noise()), "kv_proj", glorot(64, 32)),
        (lambda: CrossAttention(64, 32, 4, 0.0, Noise()), "out_proj", glorot(64, 64)),
    ],
)
def test_weights_start_as_those_of_fairseq(
    make: Callable[[], nn.Module], name: str, bound: float
) -> None:
    torch.manual_seed(3)
    projection = make().get_submodule(name)
    assert isinstance(projection, nn.Linear)
    weight = projection.weight.detach()
    assert 0.98 * bound < float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert not projection.bias.any()


# The softmax


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_softmax_is_torchs(keys: int, dtype: torch.dtype) -> None:
    bias = torch.zeros(2, 1, 1, keys, dtype=torch.promote_types(dtype, torch.float32))
    bias[0, :, :, keys // 2 + 1 :] = -INF
    for own_bias in (None, bias):
        logits = random(2, 3, 5, keys).to(dtype).requires_grad_()
        double = logits.detach().double().requires_grad_()
        found = softmax(logits, own_bias, 0.7)
        expected = (0.7 * double + (0 if own_bias is None else own_bias)).softmax(-1)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
        weight = random(*found.shape, seed=4)
        (gradient,) = torch.autograd.grad((found * weight).sum(), logits)
        (exact,) = torch.autograd.grad((expected * weight).sum(), double)
        torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=2 * tolerance)
        with torch.no_grad():
            assert torch.equal(softmax(logits.detach().clone(), own_bias, 0.7), found)


def test_without_gradients_the_softmax_overwrites_its_logits() -> None:
    logits = random(1, 1, 2, 20)
    with torch.no_grad():
        assert softmax(logits, None, 1.0).data_ptr() == logits.data_ptr()


def test_slots_that_are_kept_stand_in_the_order_asked_for() -> None:
    store = SlotStore()
    first, more = random(2, 3, 4, 5), random(2, 3, 1, 5, seed=4)
    store.append(first)
    store.keep_slots(torch.tensor([[3, 0], [1, 2]]))
    stored = store.append(more)
    assert torch.equal(stored[0], torch.cat([first[0][:, [3, 0]], more[0]], dim=1))
    assert torch.equal(stored[1], torch.cat([first[1][:, [1, 2]], more[1]], dim=1))
    assert torch.equal(store.of(1, torch.tensor([False, True, True])), stored[1][:, 1:])
