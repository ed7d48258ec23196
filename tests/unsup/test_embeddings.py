from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bertfused.config import ModelConfig
from bertfused.model import FusedTransformer, build_model
from bertfused.pretrained import PretrainedEncoder
from tests.tiny_encoders import make_encoder
from unsup.embeddings import start_embeddings

TEXTS = ["", "", "", "", "cat", "dog", "sat", "cat", ""]  # "cat" and "cat@@", a mask at the end


def model_of(width: int, size: int = len(TEXTS)) -> FusedTransformer:
    torch.manual_seed(1)
    config = ModelConfig(model_dim=width, ffn_dim=8, heads=2, share_embeddings="all")
    return build_model(config, None, source_size=size, target_size=size, bert_dim=None)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PretrainedEncoder:
    return PretrainedEncoder(str(make_encoder("bert", tmp_path_factory.mktemp("encoder"))))


@pytest.mark.parametrize("width", [2, 64])
def test_rows_begin_as_states(encoder: PretrainedEncoder, width: int) -> None:
    model, fresh = model_of(width), model_of(width)
    before, after = (own.encoder.embed.tokens.weight.detach() for own in (fresh, model))
    assert start_embeddings(model, TEXTS, encoder) == 4
    kept = [0, 1, 2, 3, 8]
    assert torch.equal(after[kept], before[kept])
    assert model.output.weight.data_ptr() == after.data_ptr()
    own = min(width, 3)  # of three texts there are no more components
    assert torch.equal(after[4, :own], after[7, :own])  # the same text
    assert after[4:8, :own].norm(dim=1) == pytest.approx(1, abs=1e-5)
    assert torch.equal(after[4:8, own:], before[4:8, own:])
    if own == 3:  # then the components only turn the states
        states = torch.stack([mean_state(encoder, text) for text in ("cat", "dog", "sat")])
        states = torch.nn.functional.normalize(states - states.mean(0))
        ours = after[[4, 5, 6], :own]
        assert ours @ ours.T == pytest.approx(states @ states.T, abs=1e-5)


def mean_state(encoder: PretrainedEncoder, word: str) -> torch.Tensor:
    """Return the mean of the states of a word's own pieces, read after "query: "."""
    begin = len(encoder.wordpieces.encode("query:").ids) - 1
    ids = torch.tensor(encoder.wordpieces.encode(f"query: {word}").ids)[None]
    with torch.no_grad():
        states: torch.Tensor = encoder(ids, torch.ones_like(ids, dtype=torch.bool))
    return states[0, begin:-1].mean(0)


def test_translations_begin_near_each_other(shared_data: Callable[[str], Path]) -> None:
    encoder = PretrainedEncoder(str(shared_data("models/me5-small-pruned")))
    texts = ["dog", "water", "seven", "chien", "eau", "sept"]
    model = model_of(16, 8)
    start_embeddings(model, [*texts, "", ""], encoder)
    rows = model.encoder.embed.tokens.weight.detach()
    assert (rows[:3] @ rows[3:6].T).argmax(1).tolist() == [0, 1, 2]
