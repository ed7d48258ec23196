import math

import pytest
import torch
from torch import Tensor, nn

from bertfused.attention import causal_bias
from bertfused.batch import Example
from bertfused.config import ModelConfig
from bertfused.layers import DecoderLayer, EncoderLayer, sinusoids
from bertfused.model import DecoderState, build_model
from docnmt.context import GatedResidual, Sizes
from docnmt.zhang import ZhangModel
from tests.tiny_context import (
    ON_A_BASE,
    Given,
    attend_by_hand,
    by_steps,
    given,
    layer_by_hand,
    logits,
    own_parameters,
    tiny_context_model,
)
from tests.tiny_model import tiny_examples

NAMES = [name for name, own in ON_A_BASE.items() if own["model"] == "zhang"]
LENGTHS = [(4, 3, 5), (2, 5, 3), (3, 4, 6), (5, 6, 2)]
PREVIOUS = [[0, 1], [1]]


def zhang(
    name: str = "zhang", fusion: dict[str, object] | None = None, **more: object
) -> ZhangModel:
    model = tiny_context_model(ON_A_BASE[name], fusion, **more)
    assert isinstance(model, ZhangModel)
    return model


def sentences(fused: bool = False) -> list[Example]:
    return tiny_examples(LENGTHS, fused=fused)


def two_in_context(model: ZhangModel, fused: bool = False) -> Given:
    return given(model, sentences(fused), PREVIOUS, [2, 3], [])


def test_the_number_of_new_parameters_is_the_papers() -> None:
    """One layer that reads the context, and attention to it in each of 12 layers.

    The first: self-attention 4 (512^2 + 512), FFN 2 * 512 * 2048 + 2048 + 512, 2 norms of 1,024.
    The others: attention 4 (512^2 + 512), a norm of 1,024, a gate of 2 * 512^2.
    """
    config = ModelConfig(model_dim=512, ffn_dim=2048, heads=8, share_embeddings="none")
    with torch.device("meta"):
        base = build_model(config, None, source_size=9, target_size=9)
        model = ZhangModel(base, Sizes(512, 2048, 8, 0.1))
    own = own_parameters(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == own.keys()
    attention = 4 * (512**2 + 512)
    reader = attention + 2 * 512 * 2048 + 2048 + 512 + 2 * 1024
    expected = reader + 12 * (attention + 1024 + 2 * 512**2)
    assert sum(p.numel() for p in own.values()) == expected == 22_063_616


def test_gates_have_no_bias_and_translations_are_not_read() -> None:
    model = zhang()
    assert not model.reads_target
    for module in model.modules():
        if isinstance(module, GatedResidual):
            assert module.gate.bias is None


def by_hand(model: ZhangModel, examples: list[Example]) -> Tensor:
    """Compute the logits of the last sentence of a post-norm base without BERT."""
    *before, own = [given(model, [example], [[0]], [0], []) for example in examples]
    encoder, decoder = model.base.encoder, model.base.decoder
    ids = torch.cat([other.encoded.batch.source for other in before], dim=1)
    context = encoder.embed.tokens(ids) * math.sqrt(8) + sinusoids(ids.shape[1], 8)
    for layer in model.context_layers:
        context = layer_by_hand(layer, context, None, [])
    memory = encoder.embed(own.current.source)
    for layer, attention in zip(encoder.layers, model.encoder_attentions, strict=True):
        assert isinstance(layer, EncoderLayer)
        memory = layer.attention_norm(memory + layer.self_attention(memory, None))
        memory = attend_by_hand(attention, memory, context)
        memory = layer.ffn_norm(memory + layer.ffn(memory))
    assert own.current.decoder_input is not None
    x = decoder.embed(own.current.decoder_input)
    bias = causal_bias(x.shape[1], x.device)
    for layer, attention in zip(decoder.layers, model.decoder_attentions, strict=True):
        assert isinstance(layer, DecoderLayer)
        x = layer.self_attention_norm(x + layer.self_attention(x, bias))
        x = attend_by_hand(attention, x, context)
        x = layer.cross_attention_norm(x + layer.cross_attention(x, memory, None))
        x = layer.ffn_norm(x + layer.ffn(x))
    found: Tensor = model.output(x)
    return found[0]


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_the_model_is_what_its_equations_say(name: str) -> None:
    model, examples = zhang(name), sentences()
    found = logits(model, two_in_context(model))
    for row, (previous, wanted) in enumerate(zip(PREVIOUS, (2, 3), strict=True)):
        expected = by_hand(model, [examples[i] for i in (*previous, wanted)])
        # Random weights make states of tens on the way to these logits.
        torch.testing.assert_close(found[row, : len(expected)], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("fused", [False, True])
@torch.inference_mode()
def test_with_gates_at_the_residual_the_base_is_left(norm: str, fused: bool) -> None:
    """Bit for bit.

    A gate has no bias to force it with, but attention has one: where its output is 1 everywhere,
    the gate's weights on it decide alone.
    """
    model = zhang(fusion={} if fused else None, norm=norm)
    own = two_in_context(model, fused)
    expected = model.base.output(own.current.hidden)
    assert not torch.allclose(logits(model, own), expected)
    for attention in (*model.encoder_attentions, *model.decoder_attentions):
        nn.init.zeros_(attention.attention.out_proj.weight)
        nn.init.ones_(attention.attention.out_proj.bias)
        nn.init.zeros_(attention.gate.gate.weight[:, :8])
        nn.init.constant_(attention.gate.gate.weight[:, 8:], 10)
    assert torch.equal(logits(model, own), expected)
    state, tokens = DecoderState(model.base, own.current.memory), own.current.decoder_input
    assert tokens is not None
    steps = [state.step(column).clone() for column in tokens.split(1, dim=1)]
    assert torch.equal(by_steps(model, own), torch.cat(steps, dim=1))
