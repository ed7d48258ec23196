"""The official BERTGEN modules: what they computed, against ours."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.search import SpecialIds, beam_search
from bertgen.card import load_model
from bertgen.decode import UnrolledDecoder
from bertgen.layout import Images, Sequences, Source, Symbols, unrolled
from bertgen.model import BertGen, geometry
from bertgen.official import UNUSED, from_official, import_checkpoint, visual_parts

STOP, MASK, SEP, PAD = 1, 103, 102, 0
SYMBOLS = Symbols(cls=101, sep=SEP, mask=MASK, stop=STOP, pad=PAD, into={"en": 16, "de": 17})
TASKS = ("mmt", "mt", "ic")


@dataclass(frozen=True)
class Oracle:
    found: dict[str, Any]
    vocab: Path
    model: BertGen


@pytest.fixture(scope="module")
def oracle(shared_data: Callable[[str], Path]) -> Oracle:
    folder = shared_data("oracles/bertgen_tiny")
    found = torch.load(folder / "bertgen_tiny_oracle.pt", weights_only=True)
    model = BertGen(
        vocab_size=200, model_dim=32, layers=2, heads=4, ffn_dim=64, feature_dim=2048
    ).eval()
    model.load_state_dict(from_official(found["state_dict"]))
    return Oracle(found, folder / "tiny_vocab" / "vocab.txt", model)


def images_of(given: dict[str, torch.Tensor]) -> Images:
    """Take the regions of a batch apart; rows padded with -2 are none."""
    if "boxes" not in given:
        return Images.none(2048)
    rows = [own[own[:, 0] > -1] for own in given["boxes"]]
    sizes = torch.tensor([len(own) for own in rows])
    shares = [
        own[:, :4] / info[[0, 1, 0, 1]] for own, info in zip(rows, given["im_info"], strict=True)
    ]
    features = torch.cat([own[:, 4:] for own in rows])
    return Images(features, torch.cat(shares), sizes.cumsum(0) - sizes, sizes)


def source_of(ids: list[int], image: int) -> tuple[Source, list[int]]:
    """Read "[TO_XX] [CLS] source [SEP] ..." back; return what follows too."""
    end = ids.index(SEP)
    return Source(np.array(ids[2:end], dtype=np.int64), ids[0], image), ids[end + 1 :]


def batch_of(given: dict[str, torch.Tensor]) -> tuple[Sequences, Images, list[int], list[int]]:
    """Lay a batch out; return the column of each mask, and what stands there, besides."""
    images, sources, targets, columns, labels = images_of(given), [], [], [], []
    for row, (text, label) in enumerate(
        zip(given["text"].tolist(), given["mlm_labels"].tolist(), strict=True)
    ):
        ids = [id for id in text if id != PAD]
        source, rest = source_of(ids, row if len(images.sizes) else -1)
        sources.append(source)
        targets.append(np.array(rest[:-2], dtype=np.int64))
        assert rest[-2:] == [MASK, SEP]
        columns.append(ids.index(MASK))
        labels.append(label[columns[-1]])
    return unrolled(sources, targets, images, SYMBOLS), images, columns, labels


def test_geometry(oracle: Oracle) -> None:
    given = oracle.found["inputs"]["mmt"]
    ours = geometry(images_of(given).boxes[:5]).view(5, 4, 512)
    assert torch.allclose(ours, oracle.found["coord_embed_mmt0"], atol=1e-5, rtol=0)


def test_the_states_of_all_layers(oracle: Oracle) -> None:
    sequences, images, *_ = batch_of(oracle.found["inputs"]["mmt"])
    model, real = oracle.model, oracle.found["mmt_attention_mask"]
    x = model.embed(sequences, model.objects(images))
    states = [oracle.found["mmt_embedding"], *oracle.found["mmt_layers"]]
    for layer, theirs in zip([None, *model.stack()], states, strict=True):
        x = x if layer is None else layer(x, sequences)
        for row in range(2):
            ours = x[sequences.places[row, sequences.mask[row, 0]]]
            assert torch.allclose(ours, theirs[row][real[row]], atol=1e-5, rtol=0)


def test_logits_losses_and_gradients(oracle: Oracle) -> None:
    model, total, count = oracle.model, torch.zeros(()), 0
    model.zero_grad()
    for task, theirs, loss in zip(
        TASKS, oracle.found["train"]["logits"], oracle.found["train"]["task_losses"], strict=True
    ):
        sequences, images, columns, labels = batch_of(oracle.found["inputs"][task])
        logits = model(sequences, model.objects(images))
        assert torch.allclose(logits, theirs[[0, 1], columns], atol=1e-5, rtol=0)
        own = functional.cross_entropy(logits, torch.tensor(labels), reduction="sum")
        assert own.item() / 2 == pytest.approx(loss.item(), abs=1e-5)
        total, count = total + own, count + 2
    (total / count).backward()
    assert total.item() / count == pytest.approx(oracle.found["train"]["loss"].item(), abs=1e-5)
    theirs = from_official(oracle.found["train"]["grads"])
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient is not None
        assert torch.allclose(gradient, theirs[name], atol=1e-5, rtol=0), name


@pytest.mark.parametrize(("task", "cap"), [("mt", 300), ("mmt", 150), ("ic", 150)])
def test_greedy_outputs(oracle: Oracle, task: str, cap: int) -> None:
    """The official loop writes one token more than its cap."""
    images = images_of(oracle.found["inputs"][task])
    text = oracle.found["gen_inputs"][task][0] if task != "mmt" else None
    text = oracle.found["inputs"]["mmt"]["text"] if text is None else text
    sources = [
        source_of(row, number if len(images.sizes) else -1)[0]
        for number, row in enumerate(text.tolist())
    ]
    with torch.inference_mode():
        found = beam_search(
            UnrolledDecoder(oracle.model, sources, images, SYMBOLS),
            torch.full((2,), cap + 1),
            SearchConfig(beam_size=1),
            special=SpecialIds(bos=SYMBOLS.cls, pad=PAD, eos=STOP, unk=100, start=STOP),
        )
    names = oracle.vocab.read_text().split("\n")
    for hypotheses, theirs in zip(found, oracle.found["generated"][task], strict=True):
        ours = " ".join(names[id] for id in hypotheses[0].ids[:-1]).replace(" ##", "")
        assert ours == theirs


def test_a_checkpoint_is_imported(oracle: Oracle, tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in oracle.found["state_dict"].items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "checkpoint.pt")
    import_checkpoint(tmp_path / "checkpoint.pt", oracle.vocab, tmp_path / "run", heads=4)
    card, model, tokenizer = load_model(tmp_path / "run")
    assert card.symbols.stop == STOP
    assert card.symbols.into == {"en": 16, "de": 17, "fr": 18, "cs": 19, "tr": 20}
    assert (card.symbols.cls, card.symbols.mask, card.symbols.unk) == (101, MASK, 100)
    theirs = dict(oracle.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name])
    names = oracle.vocab.read_text().split("\n")
    assert tokenizer.split(["the man"]) == [[names.index("the"), names.index("man")]]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"model"}


def test_the_papers_size(oracle: Oracle) -> None:
    """89,317,115 without word embeddings; two tensors of it are never used, and not ours."""
    with torch.device("meta"):
        model = BertGen(
            vocab_size=119_547,
            model_dim=768,
            layers=12,
            heads=12,
            ffn_dim=3072,
            feature_dim=2048,
        )
    ours = sum(parameter.numel() for parameter in model.parameters()) - model.words.weight.numel()
    assert [name for name in UNUSED if name not in oracle.found["state_dict"]] == []
    assert ours + 2048 + 768 == 89_317_115


def test_the_visual_parts_of_another_checkpoint_are_taken(oracle: Oracle, tmp_path: Path) -> None:
    """As the paper takes them from a VL-BERT, whose names these are."""
    torch.save(oracle.found["state_dict"], tmp_path / "vlbert.pt")
    found = visual_parts(tmp_path / "vlbert.pt")
    theirs = dict(oracle.model.named_parameters())
    assert {name for name in theirs if not name.startswith(("words", "layers", "head"))} == {*found}
    for name, tensor in found.items():
        assert torch.equal(tensor, theirs[name]), name
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="has no tensor of a VL-BERT"):
        visual_parts(tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no")
    with pytest.raises(UserError, match="it is no file of PyTorch"):
        visual_parts(tmp_path / "text.pt")
    with pytest.raises(UserError, match=r"none.pt: No such file or directory$"):
        visual_parts(tmp_path / "none.pt")
