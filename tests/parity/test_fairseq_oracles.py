"""Two checkpoints of fairseq 0.12 against what fairseq computed from them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertfused.batch import Batch, Example, collate
from bertfused.checkpoint import TrainedModel, load_model
from bertfused.config import SearchConfig
from bertfused.interop.fairseq import import_fairseq
from bertfused.loss import cross_entropy
from bertfused.model import DecoderState
from bertfused.search import beam_search

PAD = 1


@dataclass(frozen=True)
class Oracle:
    """One of fairseq's models, imported, and what fairseq said of its test sentences."""

    trained: TrainedModel
    arrays: Any
    facts: dict[str, Any]

    def batch(self) -> Batch:
        """The sentences in fairseq's order; padded on the right, as ours are."""
        rows = zip(self.arrays["src_tokens"], self.arrays["target"], strict=True)
        return collate(
            [Example(source[source != PAD], target[target != PAD]) for source, target in rows]
        )


@pytest.fixture(scope="module", params=["A", "B"])
def oracle(
    request: pytest.FixtureRequest,
    shared_data: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Oracle:
    folder = shared_data(f"oracles/fairseq_{request.param}")
    run = tmp_path_factory.mktemp("imported") / request.param
    import_fairseq(folder / "checkpoint.pt", folder / "dict.en.txt", folder / "dict.de.txt", run)
    return Oracle(
        load_model(run),
        np.load(folder / "teacher_forced.npz"),
        json.loads((folder / "oracle.json").read_text()),
    )


@torch.inference_mode()
def test_states_and_log_probs_are_those_of_fairseq(oracle: Oracle) -> None:
    batch = oracle.batch()
    assert batch.target_mask is not None
    # fairseq pads the source on the left and stores (length, batch, dim)
    theirs = torch.from_numpy(oracle.arrays["encoder_out_TxBxC"]).transpose(0, 1)
    is_real = torch.from_numpy(oracle.arrays["src_tokens"] != PAD)
    states = oracle.trained.model.encoder(batch).states[batch.source_mask]
    torch.testing.assert_close(states, theirs[is_real], rtol=0, atol=2e-5)

    log_probs = oracle.trained.model(batch).log_softmax(-1)[batch.target_mask]
    theirs = torch.from_numpy(oracle.arrays["log_probs"])[batch.target_mask]
    torch.testing.assert_close(log_probs, theirs, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_decoding_step_by_step_gives_the_same_log_probs(oracle: Oracle) -> None:
    batch = oracle.batch()
    assert batch.decoder_input is not None
    assert batch.target_mask is not None
    state = DecoderState(oracle.trained.model, oracle.trained.model.encoder(batch))
    steps = [state.step(tokens[:, None])[:, 0] for tokens in batch.decoder_input.T]
    log_probs = torch.stack(steps, 1).log_softmax(-1)[batch.target_mask]
    theirs = torch.from_numpy(oracle.arrays["log_probs"])[batch.target_mask]
    torch.testing.assert_close(log_probs, theirs, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_loss_sums_are_those_of_fairseq(oracle: Oracle) -> None:
    batch, model = oracle.batch(), oracle.trained.model
    assert batch.target is not None
    assert batch.target_mask is not None
    hidden = model.hidden(batch)[batch.target_mask]
    target = batch.target[batch.target_mask]
    loss = cross_entropy(hidden, model.output.weight, target, oracle.facts["eps"])
    assert loss.tokens == oracle.facts["ntokens"]
    # sums of some hundred float32 numbers
    assert loss.nll.item() == pytest.approx(oracle.facts["nll_loss_sum_nats"], rel=2e-6)
    assert loss.total.item() == pytest.approx(
        oracle.facts["label_smoothed_loss_sum_nats"], rel=2e-6
    )


def test_lines_become_the_ids_of_fairseq(oracle: Oracle) -> None:
    for sentence in oracle.facts["sentences"]:  # "<unk>" in them is a word that is not known
        source = oracle.trained.source_tokenizer.encode(sentence["src"])
        target = oracle.trained.target_tokenizer.encode(sentence["tgt"])
        assert [*source, 2] == sentence["src_ids"]
        assert [*target, 2] == sentence["tgt_ids"]


SETTINGS = {
    "beam5_lenpen1": {},
    "beam5_lenpen0.6": {"length_penalty": 0.6},
    "beam5_unnormalized": {"normalize": False},
    "beam5_unkpen0.5_minlen5": {"unk_penalty": 0.5, "min_length": 5},
    # on CPUs 0.12 compares n-grams with the unused end of its buffer and blocks nothing
    "beam5_norepeat3_maxb15": {"max_length_b": 15},
    "greedy": {"beam_size": 1},
    "beam5_temp0.7": {"temperature": 0.7},
}


@pytest.mark.parametrize("name", SETTINGS)
@torch.inference_mode()
def test_hypotheses_are_those_of_fairseq(oracle: Oracle, name: str) -> None:
    config = SearchConfig(**SETTINGS[name])
    batch, model = oracle.batch(), oracle.trained.model
    # fairseq bounds every sentence of a batch by the longest one's bound
    longest = int(config.max_length_a * batch.source.shape[1] + config.max_length_b)
    longest = min(longest, oracle.trained.card.model.max_positions - 1)
    limits = torch.full((len(batch.source),), longest)
    found = beam_search(DecoderState(model, model.encoder(batch)), limits, config)
    for id, hypotheses in zip(oracle.arrays["ids"].tolist(), found, strict=True):
        expected = oracle.facts["beams"][name]["hyps"][str(id)]
        assert [h.ids for h in hypotheses] == [h["tokens"] for h in expected]
        for ours, theirs in zip(hypotheses, expected, strict=True):
            assert ours.score == pytest.approx(theirs["score"], abs=1e-4)
            assert ours.token_log_probs == pytest.approx(theirs["positional_scores"], abs=1e-4)
