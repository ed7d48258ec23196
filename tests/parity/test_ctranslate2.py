"""Exported models in CTranslate2 itself."""

from pathlib import Path

import pytest
import torch

from bertfused.batch import Example, collate
from bertfused.checkpoint import load_model
from bertfused.config import FusionConfig, SearchConfig
from bertfused.errors import UserError
from bertfused.interop.ctranslate2 import export_ctranslate2
from bertfused.model import DecoderState
from bertfused.search import beam_search
from tests.tiny_run import make_run

ctranslate2 = pytest.importorskip("ctranslate2")

VARIANTS = [
    {},
    {"norm": "pre"},
    {"activation": "gelu", "share_embeddings": "decoder"},
    {"positions": "learned", "max_positions": 32, "embedding_norm": True},
    {"share_embeddings": "none", "decoder_heads": 2, "decoder_layers": 1},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_scores_and_hypotheses_are_ours(tmp_path: Path, options: dict[str, object]) -> None:
    make_run(tmp_path / "run", **options)
    export_ctranslate2(tmp_path / "run", tmp_path / "out")
    trained = load_model(tmp_path / "run")
    source_symbols = trained.source_tokenizer.vocabulary.symbols
    target_symbols = trained.target_tokenizer.vocabulary.symbols
    sources, targets = [[5, 9, 12, 6], [20, 3, 7], [8]], [[6, 6, 28], [9], [15, 4, 22, 11]]
    translator = ctranslate2.Translator(str(tmp_path / "out"), device="cpu")
    lines = [[source_symbols[id] for id in ids] for ids in sources]

    scored = translator.score_batch(lines, [[target_symbols[id] for id in ids] for ids in targets])
    with torch.inference_mode():
        pairs = zip(sources, targets, strict=True)
        batch = collate([Example([*source, 2], [*target, 2]) for source, target in pairs])
        log_probs = trained.model(batch).log_softmax(-1)
        for row, ids, theirs in zip(log_probs, targets, scored, strict=True):
            ours = row[torch.arange(len(ids) + 1), [*ids, 2]].tolist()
            assert theirs.log_probs == pytest.approx(ours, abs=1e-4)

        state = DecoderState(trained.model, trained.model.encoder(batch))
        found = beam_search(state, torch.full((3,), 20), SearchConfig(beam_size=1))
    results = translator.translate_batch(
        lines, beam_size=1, max_decoding_length=20, suppress_sequences=[["<s>"], ["<pad>"]]
    )
    for (ours,), theirs in zip(found, results, strict=True):
        assert [target_symbols[id] for id in ours.ids[:-1]] == theirs.hypotheses[0]


def test_dictionaries_stand_beside_the_model(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    export_ctranslate2(tmp_path / "run", tmp_path / "out", ["w1 w2", "", "w7"])
    for name in ("dict.en.txt", "dict.de.txt"):
        written = (tmp_path / "out" / name).read_bytes()
        assert written == (tmp_path / "run" / "model" / name).read_bytes()


def test_nothing_is_left_if_the_translations_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setattr("bertfused.interop.ctranslate2.sinusoids", lambda *size: torch.zeros(size))
    with pytest.raises(UserError, match=r"CTranslate2 translates .* nothing was exported"):
        export_ctranslate2(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fused_model_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run", fusion=FusionConfig())
    with pytest.raises(UserError, match="no place for a second encoder"):
        export_ctranslate2(tmp_path / "run", tmp_path / "out")


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(UserError, match="exists already"):
        export_ctranslate2(tmp_path / "run", tmp_path / "run")
