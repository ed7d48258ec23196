import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bertfused.attention import CrossAttention, SelfAttention, causal_bias, padding_bias
from bertfused.config import Order
from bertfused.layers import BranchMixer, DecoderLayer, EncoderLayer, FeedForward, sinusoids
from bertfused.noise import Dropout, Noise

DIM, FFN, HEADS, BERT = 8, 12, 2, 6
Weights = tuple[float, float]


def random(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def randomised(layer: nn.Module) -> nn.Module:
    """Double precision, and norms and biases that differ from their starting values."""
    with torch.no_grad():
        for seed, parameter in enumerate(layer.double().parameters()):
            parameter.data = 0.5 * random(*parameter.shape, seed=seed)
    return layer


def encoder_layer(
    mixer: BranchMixer, *, fused: bool = True, pre_norm: bool = False, dropout: float = 0.0
) -> EncoderLayer:
    noise = mixer.noise
    layer = EncoderLayer(
        SelfAttention(DIM, HEADS, 0.0, noise),
        CrossAttention(DIM, BERT, HEADS, 0.0, noise) if fused else None,
        mixer,
        FeedForward(DIM, FFN, "relu", 0.0, noise),
        pre_norm=pre_norm,
        dropout=Dropout(dropout, noise),
    )
    randomised(layer)
    return layer


def decoder_layer(
    mixer: BranchMixer, *, fused: bool = True, pre_norm: bool = False, order: Order = "parallel"
) -> DecoderLayer:
    noise = mixer.noise
    layer = DecoderLayer(
        SelfAttention(DIM, HEADS, 0.0, noise),
        CrossAttention(DIM, DIM, HEADS, 0.0, noise),
        CrossAttention(DIM, BERT, HEADS, 0.0, noise) if fused else None,
        mixer,
        FeedForward(DIM, FFN, "gelu", 0.0, noise),
        pre_norm=pre_norm,
        dropout=Dropout(0.0, noise),
        order=order,
    )
    randomised(layer)
    return layer


# The equations, in loops over sentences, positions, heads and keys.

See = Callable[[int, int, int], bool]  # sentence, query, key


def naive_attention(
    attention: SelfAttention | CrossAttention, x: Tensor, memory: Tensor, see: See
) -> Tensor:
    """Softmax-weighted means of values, head by head."""
    if isinstance(attention, SelfAttention):
        weights = attention.in_proj.weight.chunk(3)
        biases = attention.in_proj.bias.chunk(3)
    else:
        weights = (attention.q_proj.weight, *attention.kv_proj.weight.chunk(2))
        biases = (attention.q_proj.bias, *attention.kv_proj.bias.chunk(2))
    size = DIM // HEADS
    output = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for position in range(x.shape[1]):
            query = weights[0] @ x[i, position] + biases[0]
            joined = []
            for head in range(HEADS):
                own = slice(head * size, (head + 1) * size)
                total, mass = torch.zeros(size, dtype=x.dtype), torch.zeros((), dtype=x.dtype)
                for j in range(memory.shape[1]):
                    if not see(i, position, j):
                        continue
                    key = weights[1] @ memory[i, j] + biases[1]
                    value = weights[2] @ memory[i, j] + biases[2]
                    share = (query[own] @ key[own] / math.sqrt(size)).exp()
                    total, mass = total + share * value[own], mass + share
                joined.append(total / mass)
            output[i, position] = attention.out_proj(torch.cat(joined))
    return output


def naive_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def naive_ffn(layer: EncoderLayer | DecoderLayer, x: Tensor) -> Tensor:
    hidden = x @ layer.ffn.up.weight.T + layer.ffn.up.bias
    if isinstance(layer, EncoderLayer):
        hidden = hidden.clamp(min=0)
    else:
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ layer.ffn.down.weight.T + layer.ffn.down.bias


def residual(
    x: Tensor, norm: nn.LayerNorm, pre_norm: bool, f: Callable[[Tensor], Tensor]
) -> Tensor:
    """One sub-layer: x + f(norm(x)), or norm(x + f(x))."""
    return x + f(naive_norm(norm, x)) if pre_norm else naive_norm(norm, x + f(x))


def mask_sees(mask: Tensor) -> See:
    return lambda i, query, key: bool(mask[i, key])


def naive_encoder(layer: EncoderLayer, x: Tensor, mask: Tensor, bert: "Bert", w: Weights) -> Tensor:
    """Equation 1."""

    def both(h: Tensor) -> Tensor:
        own = naive_attention(layer.self_attention, h, h, mask_sees(mask))
        if layer.bert_attention is None:
            return own
        return w[0] * own + w[1] * naive_attention(
            layer.bert_attention, h, bert.states, mask_sees(bert.mask)
        )

    x = residual(x, layer.attention_norm, layer.pre_norm, both)
    return residual(x, layer.ffn_norm, layer.pre_norm, lambda h: naive_ffn(layer, h))


def naive_decoder(
    layer: DecoderLayer, x: Tensor, memory: Tensor, mask: Tensor, bert: "Bert", w: Weights
) -> Tensor:
    """Equation 2, or one of the stacks of appendix B.2."""
    pre = layer.pre_norm

    def own(h: Tensor) -> Tensor:
        return naive_attention(layer.cross_attention, h, memory, mask_sees(mask))

    def other(h: Tensor) -> Tensor:
        assert layer.bert_attention is not None
        return naive_attention(layer.bert_attention, h, bert.states, mask_sees(bert.mask))

    x = residual(
        x,
        layer.self_attention_norm,
        pre,
        lambda h: naive_attention(layer.self_attention, h, h, lambda i, query, key: key <= query),
    )
    if layer.bert_attention is None:
        x = residual(x, layer.cross_attention_norm, pre, own)
    elif layer.order == "parallel":
        mixed = lambda h: w[0] * own(h) + w[1] * other(h)  # noqa: E731
        x = residual(x, layer.cross_attention_norm, pre, mixed)
    elif layer.order == "bert-first":
        x = residual(x, layer.bert_attention_norm, pre, other)
        x = residual(x, layer.cross_attention_norm, pre, own)
    else:
        x = residual(x, layer.cross_attention_norm, pre, own)
        x = residual(x, layer.bert_attention_norm, pre, other)
    return residual(x, layer.ffn_norm, pre, lambda h: naive_ffn(layer, h))


class Bert:
    """States of a pretrained encoder for two sentences, one of them padded."""

    def __init__(self) -> None:
        self.states = random(2, 4, BERT, seed=21)
        self.mask = torch.tensor([[True] * 4, [True, True, False, False]])
        bias = padding_bias(self.mask)
        assert bias is not None
        self.bias = bias.double()


KINDS = [(False, (1.0, 0.0)), (True, (0.5, 0.5)), (True, (1.0, 2.0))]
MASK = torch.tensor([[True, True, False], [True] * 3])


def bias_of(mask: Tensor) -> Tensor:
    bias = padding_bias(mask)
    assert bias is not None
    return bias.double()


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(("fused", "weights"), KINDS)
def test_the_encoder_layer_is_equation_1(pre_norm: bool, fused: bool, weights: Weights) -> None:
    mixer = BranchMixer(0.0, False, weights, Noise())
    layer, bert = encoder_layer(mixer, fused=fused, pre_norm=pre_norm), Bert()
    x = random(2, 3, DIM, seed=20)
    output = layer(x, bias_of(MASK), bert.states if fused else None, bert.bias if fused else None)
    expected = naive_encoder(layer, x, MASK, bert, weights)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("order", ["parallel", "bert-first", "encoder-first"])
@pytest.mark.parametrize(("fused", "weights"), KINDS)
def test_the_decoder_layer_is_equation_2(
    pre_norm: bool, order: Order, fused: bool, weights: Weights
) -> None:
    mixer = BranchMixer(0.0, False, weights, Noise())
    layer = decoder_layer(mixer, fused=fused, pre_norm=pre_norm, order=order)
    bert, x, memory = Bert(), random(2, 3, DIM, seed=20), random(2, 3, DIM, seed=22)
    output = layer(
        x,
        causal_bias(3, x.device).double(),
        memory,
        bias_of(MASK),
        bert.states if fused else None,
        bert.bias if fused else None,
    )
    expected = naive_decoder(layer, x, memory, MASK, bert, weights)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


def test_the_two_branches_of_a_layer_have_dropout_masks_of_their_own() -> None:
    """Gives x + drop(a) / 2 + drop(b) / 2; the FFN contributes nothing here."""
    mixer = BranchMixer(0.0, False, (0.5, 0.5), Noise())
    layer, bert = encoder_layer(mixer, dropout=0.5), Bert()
    nn.init.zeros_(layer.ffn.down.weight)
    nn.init.zeros_(layer.ffn.down.bias)
    x = random(2, 3, DIM, seed=20)
    mixer.noise.reseed(5)
    output = layer(x, None, bert.states, bert.bias)
    a, b = layer.self_attention(x, None), layer.bert_attention(x, bert.states, bert.bias)
    mixer.noise.reseed(5)
    first, second = (mixer.noise.keep_mask(x, 128) for _ in range(2))
    assert not torch.equal(first, second)
    expected = layer.ffn_norm(layer.attention_norm(x + first * a + second * b))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_feed_forward_network_drops_inside(activation: str) -> None:
    noise = Noise()
    ffn = FeedForward(DIM, FFN, activation, 0.5, noise)
    randomised(ffn)
    x = random(2, 3, DIM)
    noise.reseed(1)
    output = ffn(x)
    noise.reseed(1)
    hidden = getattr(functional, activation)(ffn.up(x))
    expected = ffn.down(hidden * 2 * noise.keep_mask(hidden, 128))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


def shares(mixer: BranchMixer, number: int = 8000) -> dict[Weights, float]:
    drawn: dict[Weights, float] = {}
    for _ in range(number):
        weights = mixer.draw()
        drawn[weights] = drawn.get(weights, 0) + 1 / number
    return drawn


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_branches_are_drawn_as_equation_3_says(p: float) -> None:
    drawn = shares(BranchMixer(p, False, (0.5, 0.5), Noise()))
    expected = {(1.0, 0.0): p / 2, (0.0, 1.0): p / 2, (0.5, 0.5): 1 - p}
    assert set(drawn) == {weights for weights, share in expected.items() if share}
    for weights, share in drawn.items():
        spread = math.sqrt(expected[weights] * (1 - expected[weights]) / 8000)
        assert abs(share - expected[weights]) <= 4 * spread + 1e-9


def test_the_bounds_of_equation_3() -> None:
    """(1, 0) below p/2, (0, 1) from 1 - p/2 on."""

    class Scripted(Noise):
        draws = iter([0.0, 0.1999, 0.2, 0.7999, 0.8, 0.999])

        def uniform(self) -> float:
            return next(self.draws)

    mixer = BranchMixer(0.4, False, (0.5, 0.5), Scripted())
    assert [mixer.draw() for _ in range(6)] == [
        (1, 0),
        (1, 0),
        (0.5, 0.5),
        (0.5, 0.5),
        (0, 1),
        (0, 1),
    ]


@pytest.mark.parametrize("mixup", [False, True])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (1.0, 1.0)])
def test_the_expectation_over_draws_is_the_weights_of_evaluation(
    weights: Weights, mixup: bool
) -> None:
    """True for equal weights, the paper's and the official sum."""
    mixer = BranchMixer(0.7, mixup, weights, Noise())
    draws = torch.tensor([mixer.draw() for _ in range(8000)])
    torch.testing.assert_close(draws.sum(1), torch.full((8000,), sum(weights)))
    spread = sum(weights) / 2 / math.sqrt(8000)
    torch.testing.assert_close(draws.mean(0), torch.tensor(weights), rtol=0, atol=4 * spread)


def test_mixup_draws_the_whole_interval() -> None:
    mixer = BranchMixer(0.0, True, (0.5, 0.5), Noise())
    own = torch.tensor([mixer.draw()[0] for _ in range(4000)])
    for edge in (0.1, 0.25, 0.5, 0.9):
        assert float((own < edge).float().mean()) == pytest.approx(edge, abs=0.035)


@pytest.mark.parametrize("mixup", [False, True])
def test_evaluation_uses_the_weights_and_draws_nothing(mixup: bool) -> None:
    noise = Noise()
    mixer = BranchMixer(1.0, mixup, (0.3, 0.6), noise).eval()
    assert [mixer.draw() for _ in range(5)] == [(0.3, 0.6)] * 5
    other = Noise()
    assert noise.uniform() == other.uniform()


class Forced(BranchMixer):
    """Gives the weights it is told to."""

    def draw(self) -> Weights:
        return self.weights


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_an_undrawn_branch_is_not_computed(
    weights: Weights, decoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer, bert = Forced(1.0, False, weights, Noise()), Bert()
    layer: EncoderLayer | DecoderLayer
    x = random(2, 3, DIM, seed=20)
    if decoder:
        layer = decoder_layer(mixer)
        own, arguments = layer.cross_attention, (x, None, x, None, bert.states, bert.bias)
    else:
        layer = encoder_layer(mixer)
        own, arguments = layer.self_attention, (x, None, bert.states, bert.bias)
    called = []
    assert layer.bert_attention is not None
    for name, branch in (("own", own), ("bert", layer.bert_attention)):
        branch.register_forward_hook(lambda *_, name=name: called.append(name))
    layer(*arguments).square().sum().backward()
    assert called == (["own"] if weights[0] else ["bert"])
    undrawn = layer.bert_attention if weights[0] else own
    assert all(parameter.grad is None for parameter in undrawn.parameters())
    drawn = own if weights[0] else layer.bert_attention
    assert all(parameter.grad is not None for parameter in drawn.parameters())


@pytest.mark.parametrize("model_dim", [2, 6, 7])
def test_sinusoids_are_those_of_fairseq(model_dim: int) -> None:
    """[sines | cosines] of (i + 2) exp(-ln(10000) j / (d/2 - 1)), and a zero if d is odd."""
    table, half = sinusoids(40, model_dim), model_dim // 2
    assert table.shape == (40, model_dim)
    for i in range(40):
        angles = [(i + 2) * 10000 ** (-j / max(half - 1, 1)) for j in range(half)]
        row = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        expected = torch.tensor(row + [0.0] * (model_dim % 2))
        torch.testing.assert_close(table[i], expected, rtol=0, atol=1e-5)


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    assert torch.equal(sinusoids(600, 16)[:256], sinusoids(256, 16))
