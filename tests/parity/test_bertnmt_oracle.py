"""A checkpoint of the official BERT-fused code against what that code computed from it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertfused.batch import Batch, BertIds, Example, collate
from bertfused.checkpoint import TrainedModel, load_model
from bertfused.config import SearchConfig
from bertfused.interop.fairseq import import_fairseq
from bertfused.model import DecoderState
from bertfused.pretrained import PretrainedEncoder
from bertfused.search import beam_search
from bertfused.store import IdStore
from bertfused.vocab import Vocabulary

NAME = "oracles/bertnmt_tiny48"


@dataclass(frozen=True)
class Oracle:
    """The official model, imported, with its BERT and the official results."""

    trained: TrainedModel
    encoder: PretrainedEncoder
    arrays: Any
    sentences: list[dict[str, Any]]

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Some of the sentences, with BERT's states."""
        chosen = [self.sentences[number] for number in numbers]
        examples = [Example(s["src_ids"], s["tgt_ids"], s["bert_ids"]) for s in chosen]
        wordpieces = self.encoder.wordpieces
        batch = collate(examples, BertIds(wordpieces.pad, wordpieces.separator))
        return self.encoder.attach(batch, mask_special=False)


@pytest.fixture(scope="module")
def oracle(shared_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = shared_data(NAME)
    run = tmp_path_factory.mktemp("imported") / "bertnmt"
    import_fairseq(
        folder / "checkpoint.pt",
        folder / "dict.en.txt",
        folder / "dict.de.txt",
        run,
        encoder=str(folder / "bert"),
        codes=folder / "code.bpe",
    )
    trained = load_model(run)
    encoder = trained.load_encoder()
    assert encoder is not None
    facts = json.loads((folder / "oracle.json").read_text())
    return Oracle(trained, encoder, np.load(folder / "oracle.npz"), facts["sentences"])


@torch.inference_mode()
def test_each_sentence_alone_gives_the_official_numbers(oracle: Oracle) -> None:
    for number in range(len(oracle.sentences)):
        batch = oracle.batch([number])
        logits = oracle.trained.model(batch)
        for ours, name in (
            (batch.bert_states, "bert_out"),
            (oracle.trained.model.encoder(batch).states, "enc_out"),
            (logits.log_softmax(-1), "logprobs"),
        ):
            assert ours is not None
            theirs = torch.from_numpy(oracle.arrays[f"single_{name}_{number}"])
            torch.testing.assert_close(ours[0], theirs, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_all_sentences_together_give_the_official_numbers(oracle: Oracle) -> None:
    """The official code pads BERT's input on the left by default, where its states are wrong."""
    batch = oracle.batch(oracle.arrays["batch_order"].tolist())
    assert batch.target_mask is not None
    assert batch.bert is not None
    assert (batch.bert.numpy() == oracle.arrays["rightpad_bert_input"]).all()
    log_probs = oracle.trained.model(batch).log_softmax(-1)
    mask = batch.target_mask
    theirs = torch.from_numpy(oracle.arrays["rightpad_logprobs"])
    torch.testing.assert_close(log_probs[mask], theirs[mask], rtol=0, atol=1e-4)
    left_padded = torch.from_numpy(oracle.arrays["batch_logprobs"])
    assert (log_probs[mask] - left_padded[mask]).abs().max() > 0.5


@torch.inference_mode()
def test_beam_search_finds_the_official_hypotheses(oracle: Oracle) -> None:
    model = oracle.trained.model
    batch = oracle.batch(range(len(oracle.sentences)))
    limits = torch.full((len(oracle.sentences),), 200)
    found = beam_search(DecoderState(model, model.encoder(batch)), limits, SearchConfig())
    for sentence, hypotheses in zip(oracle.sentences, found, strict=True):
        expected = sentence["beam5_single"]
        assert [h.ids for h in hypotheses] == [h["tokens"] for h in expected]
        for ours, theirs in zip(hypotheses, expected, strict=True):
            assert ours.score == pytest.approx(theirs["score"], abs=1e-4)
            assert ours.token_log_probs == pytest.approx(theirs["positional_scores"], abs=1e-4)
            assert oracle.trained.target_tokenizer.decode(ours.ids) == theirs["text_debpe"]


def test_raw_lines_become_the_official_ids(oracle: Oracle) -> None:
    for sentence in oracle.sentences:
        assert oracle.encoder.wordpieces.encode(sentence["src_raw"]).ids == sentence["bert_ids"]
        words = sentence["src_bpe"].replace("@@ ", "")
        assert [*oracle.trained.source_tokenizer.encode(words), 2] == sentence["src_ids"]


def test_the_official_data_folder_is_readable(shared_data: Callable[[str], Path]) -> None:
    folder = shared_data(f"{NAME}/databin")
    sizes = {side: len(Vocabulary.load(folder / f"dict.{side}.txt")) for side in ("en", "de")}
    for split in ("train", "valid", "test"):
        stores = {side: IdStore.open(folder / f"{split}.en-de.{side}") for side in sizes}
        bert = IdStore.open(folder / f"{split}.bert.en-de.en")
        assert len(bert) == len(stores["en"]) == len(stores["de"]) > 0
        for side, store in stores.items():
            assert all(ids[-1] == Vocabulary.eos and ids.max() < sizes[side] for ids in store)
        assert all((ids[0], ids[-1]) == (3, 4) for ids in bert)  # [CLS] and [SEP] of this BERT


def test_the_official_data_folder_holds_the_sentences_of_the_oracle(
    oracle: Oracle, shared_data: Callable[[str], Path]
) -> None:
    folder = shared_data(f"{NAME}/databin")
    stored = {
        tuple(source.tolist()): bert.tolist()
        for source, bert in zip(
            IdStore.open(folder / "test.en-de.en"),
            IdStore.open(folder / "test.bert.en-de.en"),
            strict=True,
        )
    }
    for sentence in oracle.sentences:
        assert stored[tuple(sentence["src_ids"])] == sentence["bert_ids"]


def test_the_plain_model_it_started_from_is_readable(
    shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shared_data(NAME)
    card = import_fairseq(
        folder / "nmt_plain_fairseq0.7.1.pt",
        folder / "dict.en.txt",
        folder / "dict.de.txt",
        tmp_path / "plain",
    )
    assert card.fusion is None
    assert card.encoder is None
    assert not load_model(tmp_path / "plain").model.uses_bert
