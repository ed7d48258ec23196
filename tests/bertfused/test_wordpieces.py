import sys
from pathlib import Path

import pytest
import torch

from bertfused.batch import Example, collate
from bertfused.checkpoint import (
    CARD,
    encoder_card,
    load_model,
    model_tensors,
    open_encoder,
    save_model,
)
from bertfused.config import FusionConfig
from bertfused.errors import UserError
from bertfused.pretrained import PretrainedEncoder, load_wordpieces
from bertfused.subwords import Tokenizer, Words
from bertfused.vocab import Vocabulary
from bertfused.wordpieces import OwnWordpieces, PretrainedSubwords, own_model_folder
from tests.tiny_encoders import make_encoder, make_fused_run
from tests.tiny_run import make_run
from tests.tiny_xlm import HUB, make_hub_xlm, make_own_xlm, own_vocabulary

FUSED = r"is a fused model; only a plain one can stand in for BERT$"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model of words w0 = 4, w1 = 5, ... with 12 learned positions."""
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, positions="learned", max_positions=12, norm="pre")
    return folder


def encoder_of(run: Path, **options: object) -> PretrainedEncoder:
    return open_encoder(FusionConfig.model_validate({"encoder": str(run), **options}))


def test_the_template_of_an_nmt_is_sentences_that_end(run: Path) -> None:
    wordpieces = load_wordpieces(str(run))
    assert isinstance(wordpieces, OwnWordpieces)
    assert wordpieces.encode("w1 w2").ids == [5, 6, 2]
    assert wordpieces.encode("w1", ["w2 w3", ""]).ids == [6, 7, 2, 2, 5, 2]
    assert wordpieces.encode("w1 </s> <pad>").ids == [5, 3, 3, 2]
    assert (wordpieces.pad, wordpieces.separator, wordpieces.vocabulary_size) == (1, None, 40)
    assert (wordpieces.max_length, load_wordpieces(str(run), 7).max_length) == (12, 7)
    cut = wordpieces.encode("w1 w2", ["w3 " * 6, "w4 " * 6])
    assert cut.ids == [7] * 1 + [2] + [8] * 6 + [2, 5, 6, 2]
    assert cut.truncated == 5


def test_a_run_is_told_from_other_folders(run: Path, tmp_path: Path) -> None:
    assert own_model_folder(str(run)) == own_model_folder(str(run / "model")) == run / "model"
    assert own_model_folder(str(tmp_path)) is None
    assert own_model_folder("bert-base-cased") is None


@pytest.mark.parametrize("layer", [-1, 0, 1, "average"])
def test_states_are_those_of_the_nmts_own_encoder(run: Path, layer: int | str) -> None:
    encoder, model = encoder_of(run, layer=layer), load_model(run).model
    rows = [[5, 6, 2], [6, 7, 2, 5, 2]]
    batch = collate([Example([2], bert=row) for row in rows], encoder.bert_ids)
    found = encoder.attach(batch, mask_special=False).bert_states
    assert found is not None
    assert not found.requires_grad
    source = collate([Example(row) for row in rows])
    with torch.no_grad():
        states = list(model.encoder.layer_states(source))
    expected = torch.stack(states[1:]).mean(0) if layer == "average" else states[int(layer)]
    mask = source.source_mask
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-5)
    assert encoder.bert_dim == 16
    assert not encoder.uses_segments


def test_a_long_input_is_read_in_windows(run: Path) -> None:
    """Twelve positions were learned, and no more are asked for."""
    ids = torch.full((1, 40), 7)
    assert encoder_of(run)(ids, torch.ones_like(ids, dtype=torch.bool)).shape == (1, 40, 16)


def test_fingerprints_are_those_of_encoder_and_subwords(run: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other")
    first, second, other = encoder_of(run), encoder_of(run, layer=1), encoder_of(tmp_path / "other")
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert first.wordpieces.fingerprint == load_wordpieces(str(run)).fingerprint


def test_a_run_serves_as_the_encoder_of_another(run: Path, tmp_path: Path) -> None:
    fusion = FusionConfig(encoder=str(run))
    card = load_model(run).card
    fused = card.model_copy(
        update={"fusion": fusion, "encoder": encoder_card(open_encoder(fusion))}
    )
    save_model(tmp_path / "model", fused, model_tensors(fused.build()), run / "model")
    trained = load_model(tmp_path)
    encoder = trained.load_encoder()
    assert encoder is not None
    assert encoder.name == str(run)
    with pytest.raises(UserError, match=FUSED):
        load_wordpieces(str(tmp_path))


def test_encoders_that_cannot_stand_in(run: Path, tmp_path: Path) -> None:
    message = f"encoder {run} is a RUN of ours, which fusion.finetune cannot train"
    with pytest.raises(UserError) as caught:
        encoder_of(run, finetune=True)
    assert str(caught.value) == message

    make_fused_run(tmp_path / "fused", make_encoder("bert", tmp_path / "bert"))
    with pytest.raises(UserError, match=FUSED):
        encoder_of(tmp_path / "fused")


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"fusion": null, "source": "en"}'])
def test_a_damaged_card(tmp_path: Path, content: str) -> None:
    (tmp_path / CARD).write_text(content)
    with pytest.raises(UserError) as caught:
        load_wordpieces(str(tmp_path))
    assert str(caught.value) == f"{tmp_path / CARD} is damaged"


def test_the_subwords_are_saved_as_they_were(run: Path, tmp_path: Path) -> None:
    load_wordpieces(str(run)).save(tmp_path)
    name = "dict.en.txt"
    assert (tmp_path / name).read_bytes() == (run / "model" / name).read_bytes()


# The symbol for a hidden token


@pytest.mark.parametrize(("kind", "mask"), [("bert", 4), ("roberta", 260), ("xlmr", 43)])
def test_the_mask_of_an_encoder(kind: str, mask: int, tmp_path: Path) -> None:
    wordpieces = load_wordpieces(str(make_encoder(kind, tmp_path)))
    assert wordpieces.mask == mask
    assert wordpieces.reading("de") is wordpieces


def test_the_mask_of_our_own_subwords_is_a_tag(run: Path, tmp_path: Path) -> None:
    assert load_wordpieces(str(run)).mask is None
    make_run(tmp_path, tokenizer=Tokenizer(Words(), own_vocabulary()))
    assert load_wordpieces(str(tmp_path)).mask == 24


# XLM


def hub(*pieces: str) -> list[int]:
    return [HUB["</s>"], *(HUB[piece] for piece in pieces), HUB["</s>"]]


def test_the_template_of_a_published_xlm(tmp_path: Path) -> None:
    wordpieces = load_wordpieces(str(make_hub_xlm(tmp_path)))
    assert wordpieces.encode("The cat").ids == hub("the</w>", "cat</w>")
    assert wordpieces.encode("a", ["b"]).ids == hub("b</w>", "</s>", "a</w>")
    assert wordpieces.encode("").ids == hub()
    assert wordpieces.encode("a \u732b").ids == hub("a</w>", "<unk>")
    assert (wordpieces.pad, wordpieces.mask, wordpieces.separator) == (2, 5, None)
    assert (wordpieces.max_length, wordpieces.vocabulary_size) == (24, len(HUB))
    assert load_wordpieces(str(tmp_path), 7).max_length == 7
    for text in ("</s>", "a <special1> b", "<pad><s>"):
        _, *middle, _ = wordpieces.encode(text).ids
        assert not wordpieces.special & set(middle)
        assert len(middle) > 1


def test_a_published_xlm_splits_a_text_by_the_rules_of_its_language(tmp_path: Path) -> None:
    """An apostrophe belongs to the article before it in French, to what follows it in English."""
    english = load_wordpieces(str(make_hub_xlm(tmp_path)))
    french = english.reading("fr")
    assert english.encode("l'a").ids == hub("l</w>", "'", "a</w>")
    assert french.encode("l'a").ids == hub("l", "'</w>", "a</w>")
    assert english.encode("l'a").ids == hub("l</w>", "'", "a</w>")
    assert load_wordpieces(str(tmp_path), language="en").fingerprint == english.fingerprint
    assert load_wordpieces(str(tmp_path), language="fr").fingerprint == french.fingerprint
    assert english.fingerprint != french.fingerprint
    encoder = PretrainedEncoder(str(tmp_path), languages=("fr", "en"))
    assert [encoder.reader(number).encode("l'a").ids for number in (0, 1)] == [
        french.encode("l'a").ids,
        english.encode("l'a").ids,
    ]
    message = f"encoder {tmp_path} knows the languages en and fr, not 'de'"
    with pytest.raises(UserError) as caught:
        english.reading("de")
    assert str(caught.value) == message
    with pytest.raises(UserError) as caught:
        load_wordpieces(str(tmp_path), language="de")
    assert str(caught.value) == message


def test_a_published_xlm_needs_moses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hub_xlm(tmp_path)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(UserError, match=r"cannot load the tokenizer of .* install sacremoses"):
        load_wordpieces(str(tmp_path))


def test_a_pretrained_xlm_of_ours_reads_our_subwords(tmp_path: Path) -> None:
    make_own_xlm(tmp_path)
    for name in (tmp_path, tmp_path / "model"):
        wordpieces = load_wordpieces(str(name), language="fr")
        assert isinstance(wordpieces, PretrainedSubwords)
        assert wordpieces.encode("w1 w2").ids == [2, 5, 6, 2]
        assert wordpieces.encode("w1", ["w2 w3", ""]).ids == [2, 6, 7, 2, 2, 5, 2]
        assert wordpieces.encode("w1 </s> <mask>").ids == [2, 5, 3, 3, 2]
        assert (wordpieces.pad, wordpieces.mask, wordpieces.vocabulary_size) == (1, 24, 25)
    assert load_wordpieces(str(tmp_path), 7).max_length == 7
    wordpieces.save(tmp_path)
    assert (tmp_path / "dict.fr.txt").read_bytes() == (
        tmp_path / "model" / "dict.fr.txt"
    ).read_bytes()
    Vocabulary(["w0"], [1]).save(tmp_path / "model" / "dict.en.txt")
    with pytest.raises(UserError) as caught:
        load_wordpieces(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path / 'model'} is damaged: its dictionary has 5 symbols, but the encoder's "
        "config.json says 25"
    )
