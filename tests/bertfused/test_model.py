import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from bertfused.batch import Batch
from bertfused.checkpoint import copy_tensors, model_tensors
from bertfused.config import FusionConfig, ModelConfig, SearchConfig
from bertfused.errors import UserError
from bertfused.layers import BranchMixer, DecoderLayer, EncoderLayer, sinusoids
from bertfused.loss import cross_entropy
from bertfused.model import DecoderState, Embedding, FusedTransformer, Memory, build_model
from bertfused.noise import Dropout, Noise
from bertfused.search import beam_search, sample
from tests.tiny_model import BERT_DIM, PLAIN, tiny_batch, tiny_examples, tiny_model

LENGTHS = [(5, 4, 6), (3, 6, 4), (1, 1, 2)]


def batch(fused: bool = True) -> Batch:
    return tiny_batch(tiny_examples(LENGTHS, fused=fused))


def adopt(model: FusedTransformer, other: FusedTransformer) -> FusedTransformer:
    """Give ``model`` all weights that it shares with ``other``."""
    tensors, theirs = model_tensors(model), model_tensors(other)
    copy_tensors(theirs, {name: tensors[name] for name in tensors.keys() & theirs.keys()})
    return model


# Fusion that is not there


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(
    "fusion",
    [
        {"gates": [False, False]},
        {"encoder_attention": False, "decoder_attention": False},
        {"branch_weights": [1, 0], "drop_net": 0},
    ],
    ids=["gates off", "no attention", "BERT weight 0"],
)
def test_fusion_that_is_off_equals_the_plain_model_bit_for_bit(
    norm: str, fusion: dict[str, object]
) -> None:
    plain = tiny_model(norm=norm, dropout=0.3)
    fused = adopt(tiny_model(fusion, norm=norm, dropout=0.3, seed=6), plain)
    assert torch.equal(fused(batch()), plain(batch(fused=False)))

    results = []
    for model, own in ((plain.train(), batch(fused=False)), (fused.train(), batch())):
        model.begin_step(3, 1)
        output = model(own)
        output.square().sum().backward()
        results.append((output, {n: p.grad for n, p in model.named_parameters()}))
    (expected, wanted), (output, found) = results
    assert torch.equal(output, expected)
    for name, gradient in wanted.items():
        other = found[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(other, gradient)


def test_gates_that_are_off_leave_no_bert_parameters() -> None:
    plain = {name for name, _ in tiny_model().named_parameters()}
    for fusion in (
        {"gates": [False, False]},
        {"gates": [False, False], "order": "bert-first"},
        {"encoder_attention": False, "decoder_attention": False},
    ):
        model = tiny_model(fusion)
        assert {name for name, _ in model.named_parameters()} == plain
        assert not model.uses_bert
    assert tiny_model({}).uses_bert


@pytest.mark.parametrize(
    ("fusion", "depths", "fused"),
    [
        ({}, (2, 3), {"encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"}),
        ({"gates": [True, False, True]}, (2, 3), {"encoder.0", "decoder.0", "decoder.2"}),
        ({"gates": [False, True, True]}, (3, 1), {"encoder.1", "encoder.2"}),
        ({"encoder_attention": False}, (2, 1), {"decoder.0"}),
        ({"decoder_attention": False, "gates": [False, True]}, (2, 1), {"encoder.1"}),
    ],
)
def test_gate_i_belongs_to_encoder_and_decoder_layer_i(
    fusion: dict[str, object], depths: tuple[int, int], fused: set[str]
) -> None:
    model = tiny_model(fusion, encoder_layers=depths[0], decoder_layers=depths[1])
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, EncoderLayer | DecoderLayer) and module.bert_attention is not None:
            found.add(name.replace("layers.", ""))
    assert found == fused


def test_gates_must_fit_the_depth() -> None:
    with pytest.raises(ValueError, match=r"fusion\.gates has 2 entries but the model has 3 layers"):
        tiny_model({"gates": [True, False]}, encoder_layers=1, decoder_layers=3)


# Embeddings and sharing


@pytest.mark.parametrize(
    ("share", "absent"),
    [
        ("all", {"decoder.embed.tokens.weight", "output.weight"}),
        ("decoder", {"output.weight"}),
        ("none", set()),
    ],
)
def test_shared_matrices_are_one_parameter(share: str, absent: set[str]) -> None:
    matrices = {
        "encoder.embed.tokens.weight",
        "decoder.embed.tokens.weight",
        "output.weight",
    }
    names = {name for name, _ in tiny_model(share_embeddings=share).named_parameters()}
    assert matrices - names == absent


def test_one_matrix_needs_one_vocabulary() -> None:
    message = (
        "share_embeddings = 'all' needs one vocabulary, but the source has 17 entries and the "
        "target 13"
    )
    config = ModelConfig.model_validate({**PLAIN, "share_embeddings": "all"})
    with pytest.raises(ValueError, match=re.escape(message)):
        build_model(config, None, source_size=17, target_size=13)


def embedding(learned: int | None, *, norm: bool = False, rate: float = 0.0) -> Embedding:
    torch.manual_seed(2)
    return Embedding(nn.Embedding(9, 6), learned, norm=norm, dropout=Dropout(rate, Noise()))


def test_embeddings_are_scaled_and_have_positions_added() -> None:
    ids = torch.tensor([[4, 5, 2], [6, 2, 1]])
    own = embedding(None)
    expected = own.tokens.weight[ids] * math.sqrt(6) + sinusoids(3, 6)
    torch.testing.assert_close(own(ids), expected)
    learned = embedding(5)
    assert learned.positions is not None
    expected = learned.tokens.weight[ids] * math.sqrt(6) + learned.positions.weight[:3]
    torch.testing.assert_close(learned(ids), expected)
    expected = learned.tokens.weight[ids] * math.sqrt(6) + learned.positions.weight[2]
    torch.testing.assert_close(learned.at_step(ids, 2), expected)


def test_a_sentence_beyond_the_learned_positions_is_refused() -> None:
    message = (
        "a sentence has 6 tokens, but the model has learned only 5 positions (model.max_positions)"
    )
    own = embedding(5)
    own(torch.full((1, 5), 4))
    with pytest.raises(UserError, match=re.escape(message)):
        own(torch.full((1, 6), 4))
    with pytest.raises(UserError, match=re.escape(message)):
        own.at_step(torch.full((1, 2), 4), 5)


def test_embeddings_are_normed_before_dropout() -> None:
    ids = torch.tensor([[4, 5, 2]])
    own = embedding(None, norm=True, rate=0.5)
    assert own.norm is not None
    nn.init.normal_(own.norm.weight)
    normed = own.norm(own.tokens.weight[ids] * math.sqrt(6) + sinusoids(3, 6))
    own.dropout.noise.reseed(3)
    keep = own.dropout.noise.keep_mask(normed, 128)
    own.dropout.noise.reseed(3)
    torch.testing.assert_close(own(ids), normed * keep * 2)


def test_positions_past_the_table_make_it_grow() -> None:
    own = embedding(None)
    ids = torch.full((1, 700), 4)
    with torch.inference_mode():  # as in a validation; training must go on with what it leaves
        own(ids)
    output = own(ids)
    expected = own.tokens.weight[4] * math.sqrt(6) + sinusoids(700, 6)
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-4)
    output.sum().backward()


# What one sentence's logits depend on


@pytest.mark.parametrize("fused", [False, True])
def test_no_target_token_sees_the_future(fused: bool) -> None:
    model, own = tiny_model({} if fused else None), batch(fused)
    assert own.decoder_input is not None
    expected = model(own)
    for position in range(1, own.decoder_input.shape[1]):
        other = own.decoder_input.clone()
        other[:, position:] = (other[:, position:] + 3) % 13
        output = model(replace(own, decoder_input=other))
        assert torch.equal(output[:, :position], expected[:, :position])
        assert (output[:, position] != expected[:, position]).any(1).all()


def test_each_stream_matters() -> None:
    model, own = tiny_model({}), batch()
    expected = model(own)
    assert own.bert_states is not None
    changes = {
        "source": replace(own, source=(own.source + 1) % 17),
        "BERT": replace(own, bert_states=own.bert_states.flip(0)),
    }
    for name, changed in changes.items():
        assert float((model(changed) - expected).detach().abs().max()) > 1e-2, name


def test_what_stands_behind_a_mask_changes_nothing() -> None:
    model, own = tiny_model({}), batch()
    mask, bert_mask = own.source_mask, own.bert_mask
    assert bert_mask is not None
    assert own.bert_states is not None
    other = replace(
        own,
        source=torch.where(mask, own.source, 9),
        bert_states=torch.where(bert_mask[..., None], own.bert_states, 7.0),
    )
    torch.testing.assert_close(model(other), model(own), rtol=0, atol=1e-6)


def test_the_encoder_yields_the_states_of_every_layer() -> None:
    """Post-norm: layer i's states are those of a model cut off after layer i."""
    model, own = tiny_model({}), batch()
    states = list(model.encoder.layer_states(own))
    assert len(states) == 3
    torch.testing.assert_close(states[0], model.encoder.embed(own.source))
    assert torch.equal(states[2], model.encoder(own).states)
    del model.encoder.layers[1]
    assert torch.equal(model.encoder(own).states, states[1])


# Randomness


def test_a_step_key_decides_dropout_and_drop_net() -> None:
    model, own = tiny_model({"drop_net": 0.5}, dropout=0.2).train(), batch()

    def run(*key: int) -> torch.Tensor:
        model.begin_step(*key)
        return model(own).detach()

    assert torch.equal(run(1, 2, 3), run(1, 2, 3))
    assert not torch.equal(run(1, 2, 3), run(1, 2, 4))


def test_a_step_may_change_the_drop_net_rate() -> None:
    model = tiny_model({"drop_net": 0.5})
    mixers = [module for module in model.modules() if isinstance(module, BranchMixer)]
    model.begin_step(1)
    assert {mixer.drop_net for mixer in mixers} == {0.5}
    model.begin_step(1, drop_net=0.25)
    assert {mixer.drop_net for mixer in mixers} == {0.25}


def test_a_rising_drop_net_rate_starts_at_zero() -> None:
    model = tiny_model({"drop_net": 1.0, "drop_net_warmup_steps": 10})
    mixers = [module for module in model.modules() if isinstance(module, BranchMixer)]
    assert {mixer.drop_net for mixer in mixers} == {0.0}


def test_every_layer_draws_for_itself() -> None:
    model = tiny_model({"drop_net": 1.0}, encoder_layers=4, decoder_layers=4).train()
    drawn = []
    for module in model.modules():
        if isinstance(module, BranchMixer):
            module.draw = lambda own=module: drawn.append(BranchMixer.draw(own)) or drawn[-1]
    model.begin_step(1)
    model(batch())
    assert len(drawn) == 8
    assert set(drawn) == {(1.0, 0.0), (0.0, 1.0)}


def test_dropout_rates_are_where_they_belong() -> None:
    model = tiny_model({}, dropout=0.25, attention_dropout=0.5, activation_dropout=0.125)
    rates = {
        name: module.threshold / 256
        for name, module in model.named_modules()
        if isinstance(module, Dropout)
    }
    for name, rate in rates.items():
        expected = 0.5 if "attention" in name else 0.125 if "ffn" in name else 0.25
        assert rate == expected, name
    assert len(rates) == 2 + 2 * 4 + 2 * 5


# Step by step


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_long_cached_decoding_equals_the_whole_at_once(norm: str) -> None:
    """Past the cache's first capacity (16 slots a beam) and the position table (256 rows)."""
    model = tiny_model({}, decoder_layers=1, norm=norm)
    with torch.inference_mode():
        memory = model.encoder(tiny_batch(tiny_examples([(5, 2, 6)])))
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 13, (1, 300), generator=generator)
        state = DecoderState(model, memory)
        cached = torch.cat([state.step(ids[:, i : i + 1]) for i in range(300)], dim=1)
        expected = model.output(model.decoder(ids, memory))
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-4)


def test_slots_of_dead_beams_are_forgotten() -> None:
    """All beams of sentence 0 follow its beam 2 for ever; those of sentence 1 stay apart."""
    model = tiny_model()
    own = batch(fused=False)
    steps, beams = 30, 3
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        memory = model.encoder(own)
        memory = Memory(memory.states[:2], memory.mask[:2], None, None)
        state = DecoderState(model, memory)
        tokens = torch.full((2, 1), 2)
        sequences = [[[2]], [[2]]]
        for step in range(steps):
            logits = state.step(tokens)
            parents = torch.tensor([[2] * beams, [0, 1, 2]] if step else [[0] * beams] * 2)
            tokens = torch.randint(4, 13, (2, beams), generator=generator)
            state.reorder(parents)
            sequences = [
                [[*old[p], int(t)] for p, t in zip(row, new, strict=True)]
                for old, row, new in zip(sequences, parents.tolist(), tokens.tolist(), strict=True)
            ]
        logits = state.step(tokens)
        for sentence in range(2):
            whole = Memory(
                memory.states[[sentence] * beams], memory.mask[[sentence] * beams], None, None
            )
            decoded = model.decoder(torch.tensor(sequences[sentence]), whole)
            expected = model.output(decoded)[:, -1]
            torch.testing.assert_close(logits[sentence], expected, rtol=0, atol=1e-4)

        alone = DecoderState(model, Memory(memory.states[:1], memory.mask[:1], None, None))
        tokens = torch.full((1, 1), 2)
        for step in range(steps):
            alone.step(tokens)
            alone.reorder(torch.tensor([[2 if step else 0] * beams]))
            tokens = torch.randint(4, 13, (1, beams), generator=generator)
        assert alone.slots.bias.shape[3] < steps + 7 * beams  # of 3 * 30


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [None, "full"])
def test_a_search_keeps_the_states_that_predicted_each_token(sampling: str | None) -> None:
    """Through re-ordered beams, forgotten slots and sentences that left the batch before."""
    model = tiny_model()
    memory = model.encoder(batch(fused=False))
    decoder = DecoderState(model, memory)
    decoder.keep_states()
    limits = torch.tensor([30, 9, 2])
    config = SearchConfig(beam_size=4, sampling=sampling, min_length=2)
    find = partial(sample, seeds=[1, 2, 3], num_samples=4) if sampling else partial(beam_search)
    found = find(decoder, limits, config, states_of=decoder.states)
    assert max(len(best.ids) for hypotheses in found for best in hypotheses) > 16
    for i, hypotheses in enumerate(found):
        own = Memory(memory.states[i : i + 1], memory.mask[i : i + 1], None, None)
        for hypothesis in hypotheses:
            expected = model.decoder(torch.tensor([[2, *hypothesis.ids[:-1]]]), own)[0]
            assert hypothesis.states is not None
            torch.testing.assert_close(hypothesis.states, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_learned_positions_are_used_step_by_step() -> None:
    model = tiny_model(positions="learned", max_positions=6)
    memory = model.encoder(batch(fused=False))
    ids = torch.tensor([[2, 5, 6, 7, 8, 9]] * 3)
    state = DecoderState(model, memory)
    cached = torch.cat([state.step(ids[:, i : i + 1]) for i in range(6)], dim=1)
    expected = model.output(model.decoder(ids, memory))
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-5)
    assert model.decoder.embed.positions is not None
    assert not torch.allclose(model.decoder.embed.positions.weight[0], sinusoids(1, 8)[0])


@torch.inference_mode()
def test_keys_and_values_of_a_memory_are_projected_once() -> None:
    model, own = tiny_model({}), batch()
    projected = []
    for layer in model.decoder.layers:
        for attention in (layer.cross_attention, layer.bert_attention):
            attention.kv_proj.register_forward_hook(lambda *_: projected.append(1))
    state = DecoderState(model, model.encoder(own))
    assert len(projected) == 4
    state.step(torch.full((3, 1), 2))
    state.reorder(torch.zeros(3, 5, dtype=torch.long))
    state.step(torch.full((3, 5), 4))
    assert len(projected) == 4


# The equations, once more for the whole


def test_the_parts_of_a_forward_pass() -> None:
    model, own = tiny_model({}), batch()
    assert own.decoder_input is not None
    memory = model.encoder(own)
    assert isinstance(memory, Memory)
    assert torch.equal(memory.mask, own.source_mask)
    hidden = model.hidden(own)
    assert torch.equal(hidden, model.decoder(own.decoder_input, memory))
    assert torch.equal(model(own), hidden @ model.output.weight.T)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_paper_mixes_with_one_half_in_evaluation(norm: str) -> None:
    """Weights (1/2, 1/2): doubling both output projections equals the sum of the branches."""
    paper, total = tiny_model({}, norm=norm), tiny_model({"branch_weights": [1, 1]}, norm=norm)
    adopt(total, paper)
    with torch.no_grad():
        for layer in [*total.encoder.layers, *total.decoder.layers]:
            own = getattr(layer, "cross_attention", layer.self_attention)
            for projection in (own.out_proj, layer.bert_attention.out_proj):
                projection.weight.mul_(0.5)
                projection.bias.mul_(0.5)
    torch.testing.assert_close(total(batch()), paper(batch()), rtol=0, atol=1e-5)


def test_the_padding_embedding_starts_at_zero() -> None:
    model = build_model(
        ModelConfig.model_validate(PLAIN),
        FusionConfig(),
        source_size=17,
        target_size=13,
        bert_dim=BERT_DIM,
    )
    assert not model.encoder.embed.tokens.weight[1].any()
    assert not model.decoder.embed.tokens.weight[1].any()
    table = model.encoder.embed.tokens.weight.detach()
    assert float(table[2:].std()) == pytest.approx(8**-0.5, rel=0.2)


def test_loss_from_hidden_states_is_that_of_the_logits() -> None:
    model, own = tiny_model({}), batch()
    assert own.target is not None
    assert own.target_mask is not None
    loss = cross_entropy(
        model.hidden(own)[own.target_mask], model.output.weight, own.target[own.target_mask], 0.0
    )
    log_probs = model(own).log_softmax(-1)
    naive = -sum(
        float(log_probs[i, j, token].detach())
        for i, row in enumerate(own.target.tolist())
        for j, token in enumerate(row)
        if token != 1
    )
    assert loss.tokens == 11
    assert float(loss.nll) == pytest.approx(naive, rel=1e-5)
