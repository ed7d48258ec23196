import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bertfused.attention import causal_bias
from bertfused.batch import Example
from bertfused.config import ModelConfig
from bertfused.model import DecoderState, build_model
from bertfused.noise import Noise
from docnmt.context import Encoded, GatedResidual, Packed, Sizes
from docnmt.layerwise import LayerWeighting, LayerwiseModel, ResetGate, SourceContextLayer
from tests.tiny_context import (
    ON_A_BASE,
    Given,
    by_steps,
    given,
    layer_by_hand,
    logits,
    own_parameters,
    tiny_context_model,
)
from tests.tiny_model import tiny_batch, tiny_examples

LAYERWISE = [name for name, own in ON_A_BASE.items() if own["model"] == "layerwise"]
# Of the sentences 0, 1, 2, then of the ones to translate, 3 and 4: source, target, BERT.
LENGTHS = [(4, 3, 5), (2, 5, 3), (6, 1, 4), (3, 4, 6), (5, 6, 2)]
PREVIOUS = [[0, 1, 2], [1]]


def sentences(fused: bool = False) -> list[Example]:
    return tiny_examples(LENGTHS, fused=fused)


def two_in_context(model: LayerwiseModel, fused: bool = False) -> Given:
    return given(model, sentences(fused), PREVIOUS, [3, 4], [])


def layerwise(
    options: dict[str, object], fusion: dict[str, object] | None = None, **more: object
) -> LayerwiseModel:
    model = tiny_context_model(options, fusion, **more)
    assert isinstance(model, LayerwiseModel)
    return model


# Size


def test_the_number_of_new_parameters_is_that_of_the_paper() -> None:
    config = ModelConfig(model_dim=512, ffn_dim=2048, heads=8, share_embeddings="none")
    with torch.device("meta"):
        base = build_model(config, None, source_size=9, target_size=9)
        model = LayerwiseModel(base, Sizes(512, 2048, 8, 0.1))
    own = own_parameters(model)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == own.keys()
    assert sum(p.numel() for p in own.values()) == 17_867_271
    biases = [p.numel() for name, p in own.items() if name.endswith("proj.bias")]
    # 8 attentions, each of 4 projections: in_proj is three of them, kv_proj is two.
    assert sum(biases) == 8 * 4 * 512
    assert sum(p.numel() for p in own.values()) - sum(biases) == 17_850_887


# Equations 1 and 2


def test_layers_are_weighted_by_a_softmax_after_a_norm() -> None:
    weighting = LayerWeighting(2)
    assert weighting.shares().tolist() == pytest.approx([1 / 3] * 3)
    with torch.no_grad():
        weighting.weights.copy_(torch.tensor([0, math.log(2), math.log(4)]))
    assert weighting.shares().tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    outputs = [torch.tensor([[own]]) for own in ([0.0, 2.0], [3.0, 1.0], [-5.0, 5.0])]
    # The norms are (-1, 1), (1, -1) and (-1, 1): -1/7 + 2/7 - 4/7 = -3/7.
    found = weighting(outputs)
    assert found[0, 0].tolist() == pytest.approx([-3 / 7, 3 / 7], abs=1e-5)


def test_as_many_weights_as_layers_and_embeddings() -> None:
    model = layerwise({"model": "layerwise"}, encoder_layers=3)
    assert model.weighting is not None
    assert model.weighting.weights.shape == (4,)


def test_without_weighting_the_last_layer_is_read() -> None:
    model = layerwise({"model": "layerwise", "layer_weighting": False}, norm="pre")
    own = two_in_context(model).encoded
    other = Encoded(own.base, own.batch)
    other.layers = [torch.full_like(layer, 7.0) for layer in own.layers[:-1]] + own.layers[-1:]
    assert torch.equal(model.source_states(own), model.source_states(other))


# Equations 3 to 6


def one_token_layer(reset_gate: ResetGate) -> SourceContextLayer:
    """Build a layer, 2 wide, whose attentions and FFN give back what they read, or nothing."""
    layer = SourceContextLayer(Sizes(2, 3, 1, 0.0), reset_gate, Noise())
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        attentions = [(layer.self_attention.in_proj, layer.self_attention.out_proj, 4)]
        if reset_gate != "none":
            cross = layer.cross_attention
            attentions.append((cross.kv_proj, cross.out_proj, 2))
            # sigmoid(ln 3) = 3/4 from the 3 of what is attended to, sigmoid(-ln 3) = 1/4 from the
            # 2 of the token itself
            layer.gate.weight.copy_(torch.tensor([[0, 0, 1 / 3, 0], [0, -1 / 2, 0, 0]]))
            layer.gate.weight.mul_(math.log(3))
        for projection, out, first in attentions:
            projection.weight[first : first + 2] = torch.eye(2)
            out.weight.copy_(torch.eye(2))
    return layer


def packed(states: list[list[float]]) -> Packed:
    """Make a batch of one sequence."""
    length = len(states)
    return Packed(torch.tensor(states), torch.arange(length)[None], torch.ones(1, length).bool())


def test_context_attends_to_itself_before_anything_else() -> None:
    found = one_token_layer("reset").attend(torch.tensor([[[1.0, 3.0]]]), None)
    assert found[0, 0].tolist() == pytest.approx([0, 4], abs=1e-4)  # norm(1, 3) = (-1, 1)


@pytest.mark.parametrize(
    ("reset_gate", "expected"),
    [
        ("reset", [3 / 4 * 1, 1 / 4 * 2]),
        ("reset_add", [3 / 4 * 1 + 3, 1 / 4 * 2 - 1]),
        ("none", [1, 2]),
    ],
)
def test_the_sentence_to_translate_resets_context(
    reset_gate: ResetGate, expected: list[float]
) -> None:
    layer = one_token_layer(reset_gate)
    found = layer.read_for(packed([[1.0, 2.0]]), torch.tensor([[[3.0, -1.0]]]), None)
    assert found[0].tolist() == pytest.approx(expected)


def test_a_feed_forward_follows_the_reset_gate() -> None:
    layer = one_token_layer("reset")
    with torch.no_grad():
        layer.ffn.up.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [0, 0]]))
        layer.ffn.down.weight.copy_(torch.tensor([[10.0, 0, 0], [0, 10, 0]]))
    # norm(0.75, 0.5) = (1, -1), of which relu leaves (1, 0)
    found = layer.read_for(packed([[1.0, 2.0]]), torch.tensor([[[3.0, -1.0]]]), None)
    assert found[0].tolist() == pytest.approx([0.75 + 10, 0.5], abs=1e-2)


def test_without_a_reset_gate_there_are_no_parameters_of_it() -> None:
    names = own_parameters(layerwise(ON_A_BASE["no reset gate"]))
    assert not [name for name in names if "source_layers.0.cross" in name]
    assert not [name for name in names if "source_layers.0.gate" in name]


# Equations 7 and 8


def test_a_gated_residual_mixes_element_by_element() -> None:
    gated = GatedResidual(2, 0.0)
    with torch.no_grad():
        gated.gate.weight.copy_(torch.tensor([[math.log(3), 0, 0, 0], [0, 0, 0, math.log(4)]]))
        gated.gate.bias.copy_(torch.tensor([0, math.log(2)]))
    residual, sublayer = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[5.0, 0.5]]])
    # g = sigmoid(ln 3) = 3/4 and sigmoid(ln 2 + ln 2) = 4/5
    expected = [0.75 * 1 + 0.25 * 5, 0.8 * 2 + 0.2 * 0.5]
    assert gated(residual, sublayer)[0, 0].tolist() == pytest.approx(expected)


def test_gates_start_at_their_bias_and_may_have_none() -> None:
    assert GatedResidual(3, 2.0).gate.bias.tolist() == [2.0] * 3
    assert GatedResidual(3, None).gate.bias is None


# The whole


def read_by_hand(layer: SourceContextLayer, x: Tensor, memory: Tensor) -> Tensor:
    own = x + layer.self_attention(layer.self_attention_norm(x), None)
    x = own
    if layer.reset_gate != "none":
        cross = layer.cross_attention(own, memory, None)
        x = torch.sigmoid(layer.gate(torch.cat([own, cross], dim=-1))) * own
        x = x + cross if layer.reset_gate == "reset_add" else x
    found: Tensor = x + layer.ffn(layer.ffn_norm(x))
    return found


def by_hand(model: LayerwiseModel, examples: list[Example]) -> Tensor:
    """Compute the logits of the last sentence after the others, one sentence at a time."""
    alone = [given(model, [example], [[0]], [0], []) for example in examples]
    *before, own = alone
    memory = own.current.memory.states
    sources, targets = [], []
    for distance, other in zip(range(len(before), 0, -1), before, strict=True):
        if model.source_positions is not None:
            outputs = other.encoded.layers
            last = nn.functional.layer_norm(outputs[-1], outputs[-1].shape[-1:])
            x = last if model.weighting is None else model.weighting(outputs)
            for layer in model.source_layers:
                assert isinstance(layer, SourceContextLayer)
                x = read_by_hand(layer, x, memory)
            sources.append(x + model.source_positions.weight[distance - 1])
        if model.target_positions is not None:
            batch, hidden = other.encoded.batch, other.encoded.hidden
            assert hidden is not None
            embedded = model.base.decoder.embed.tokens(batch.target) * math.sqrt(8)
            states = torch.cat([embedded, hidden], dim=-1)
            targets.append(states + model.target_positions.weight[distance - 1])
    source = [torch.cat(sources, dim=1)] if sources else []
    target = [torch.cat(targets, dim=1)] if targets else []
    for layer in model.input_layers:
        memory = layer_by_hand(layer, memory, None, source)
    x = own.current.hidden
    assert x is not None
    bias = causal_bias(x.shape[1], x.device)
    for layer in model.output_layers:
        x = layer_by_hand(layer, x, bias, [memory, *source, *target])
    found: Tensor = model.output(x)
    return found[0]


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("fused", [False, True])
@torch.inference_mode()
def test_the_model_is_what_its_equations_say(name: str, fused: bool) -> None:
    model = layerwise(ON_A_BASE[name], {} if fused else None)
    examples = sentences(fused)
    found = logits(model, two_in_context(model, fused))
    for row, (previous, wanted) in enumerate(zip(PREVIOUS, (3, 4), strict=True)):
        expected = by_hand(model, [examples[i] for i in (*previous, wanted)])
        own = found[row, : len(expected)]
        # Random weights make states of tens on the way to these logits.
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
        without = model.base(tiny_batch([examples[wanted]]))[0]
        assert float((own - without).abs().max()) > 1e-2


def test_whole_target_tokens_are_dropped_in_training() -> None:
    options = {"model": "layerwise", "dropout": 0.0, "target_dropout": 0.5, "source": False}
    model = layerwise(options).train()
    own = two_in_context(model)
    model.noise.reseed(5)
    found = model.hidden(own.current, own.source, own.target)
    model.noise.reseed(5)
    mask = model.noise.keep_mask(own.target.states[:, :1], 128)
    assert set(mask.flatten().tolist()) == {0.0, 1.0}
    dropped = replace(own.target, states=own.target.states * mask * 2)
    expected = model.eval().hidden(own.current, own.source, dropped)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, model.hidden(own.current, own.source, own.target))


# A start that changes nothing


@pytest.mark.parametrize(("norm", "fused"), [("post", True), ("pre", False)])
@pytest.mark.parametrize("name", [name for name in LAYERWISE if name != "no gates"])
@torch.inference_mode()
def test_with_gates_at_the_residual_the_base_is_left(norm: str, fused: bool, name: str) -> None:
    """Bit for bit, the whole target at once and step by step."""
    model = layerwise(ON_A_BASE[name], {} if fused else None, norm=norm)
    own = two_in_context(model, fused)
    expected = model.base.output(own.current.hidden)
    assert not torch.allclose(logits(model, own), expected)
    for layer in (*model.input_layers, *model.output_layers):
        for last in (layer.self_attention.out_proj, layer.ffn.down):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        for attention in layer.attentions:
            nn.init.constant_(attention.gate.gate.bias, math.inf)
    assert torch.equal(logits(model, own), expected)
    state, tokens = DecoderState(model.base, own.current.memory), own.current.decoder_input
    assert tokens is not None
    steps = [state.step(column).clone() for column in tokens.split(1, dim=1)]
    assert torch.equal(by_steps(model, own), torch.cat(steps, dim=1))


@torch.inference_mode()
def test_a_function_preserving_start_is_near_the_base() -> None:
    """Only what the gates let through is new; a random start is further away."""
    distances = []
    for start in ("function-preserving", "random"):
        model = layerwise({"model": "layerwise", "start": start}, moved=0.0)
        for layer in (*model.input_layers, *model.output_layers):
            for last in (layer.self_attention.out_proj, layer.ffn.down):
                assert bool(last.weight.any()) == (start == "random")
            for attention in layer.attentions:
                assert attention.gate.gate.bias.tolist() == [4.0] * 8
        own = two_in_context(model)
        difference = logits(model, own) - model.base.output(own.current.hidden)
        distances.append(float(difference.abs().mean()))
    assert 0 < distances[0] < distances[1]


def test_without_gates_there_are_plain_residuals() -> None:
    names = own_parameters(layerwise(ON_A_BASE["no gates"]))
    assert not [name for name in names if "gate.gate" in name]
