"""The accelerator's paths against the CPU's: run with ``pytest -m gpu`` where there is one."""

from dataclasses import replace

import pytest
import torch

from bertfused.batch import Batch, Example, collate
from bertfused.config import FusionConfig, ModelConfig, SearchConfig
from bertfused.loss import cross_entropy
from bertfused.model import DecoderState, FusedTransformer, build_model
from bertfused.noise import Dropout, Noise
from bertfused.search import beam_search
from bertfused.training import autocast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CUDA = torch.device("cuda")
VOCABULARY, BERT_DIM = 400, 24


def fused_model(dropout: float = 0.0) -> FusedTransformer:
    torch.manual_seed(1)
    config = ModelConfig(
        encoder_layers=2, decoder_layers=2, model_dim=32, ffn_dim=64, heads=4, dropout=dropout
    )
    return build_model(
        config,
        FusionConfig(drop_net=0.0),
        source_size=VOCABULARY,
        target_size=VOCABULARY,
        bert_dim=BERT_DIM,
    )


def batch() -> Batch:
    generator = torch.Generator().manual_seed(2)

    def ids(length: int) -> list[int]:
        return [*torch.randint(4, VOCABULARY, (length,), generator=generator).tolist(), 2]

    made = collate([Example(ids(3 + i), ids(2 + 2 * i)) for i in range(6)])
    states = torch.randn(6, 9, BERT_DIM, generator=generator)
    mask = torch.arange(9)[None] < torch.arange(4, 10)[:, None]
    return replace(made, bert_states=states, bert_mask=mask)


def test_logits_equal_the_cpus() -> None:
    model = fused_model().eval()
    made = batch()
    assert made.target_mask is not None
    with torch.no_grad():
        on_cpu = model(made)
        on_cuda = model.to(CUDA)(made.to(CUDA)).cpu()
    assert torch.allclose(on_cpu[made.target_mask], on_cuda[made.target_mask], atol=1e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_loss_and_gradients_equal_the_cpus(precision: str, tolerance: float) -> None:
    gradients = []
    for device, own in ((torch.device("cpu"), "fp32"), (CUDA, precision)):
        model, made = fused_model().to(device).train(), batch().to(device)
        assert made.target is not None
        assert made.target_mask is not None
        with autocast(device, own):
            hidden = model.hidden(made)[made.target_mask]
            loss = cross_entropy(hidden, model.output.weight, made.target[made.target_mask], 0.1)
        (loss.total / loss.tokens).backward()
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]))
    scale = gradients[0].abs().max()
    assert (gradients[0] - gradients[1]).abs().max() < tolerance * scale


def test_hypotheses_equal_the_cpus() -> None:
    model, made = fused_model().eval(), batch()
    found = []
    for device in (torch.device("cpu"), CUDA):
        moved = made.to(device)
        with torch.inference_mode():
            state = DecoderState(model.to(device), model.encoder(moved))
            lengths = torch.full((6,), 12, device=device)
            found.append(beam_search(state, lengths, SearchConfig(beam_size=4)))
    for on_cpu, on_cuda in zip(*found, strict=True):
        assert [h.ids for h in on_cpu] == [h.ids for h in on_cuda]
        assert [h.score for h in on_cpu] == pytest.approx([h.score for h in on_cuda], abs=1e-4)


def test_masks_repeat_with_the_key_and_keep_the_expectation() -> None:
    noise = Noise()
    dropout = Dropout(0.25, noise)
    ones = torch.ones(1000, 1000, device=CUDA)
    noise.reseed(3, 1)
    first = dropout(ones)
    noise.reseed(3, 1)
    assert torch.equal(first, dropout(ones))
    noise.reseed(3, 2)
    assert not torch.equal(first, dropout(ones))
    assert first.mean().item() == pytest.approx(1.0, abs=0.005)
