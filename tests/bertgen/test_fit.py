"""What a model begins from."""

from pathlib import Path

import pytest
import torch
import transformers

from bertfused.errors import UserError
from bertfused.pretrained import load_masked_lm
from bertgen.fit import start_from_bert
from bertgen.model import BertGen

SIZES = {"vocab_size": 20, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3}
SIZES |= {"intermediate_size": 16, "max_position_embeddings": 30}


def write_bert(folder: Path, *, has_head: bool) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    kind = transformers.BertForMaskedLM if has_head else transformers.BertModel
    model = kind(transformers.BertConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def make_model(**options: int) -> BertGen:
    sizes = {"vocab_size": 24, "model_dim": 12, "layers": 2, "heads": 3, "ffn_dim": 16}
    return BertGen(**{**sizes, "feature_dim": 4, "max_positions": 30, **options})


@pytest.mark.parametrize("has_head", [True, False])
def test_the_weights_of_a_bert_are_taken_and_the_others_are_fresh(
    tmp_path: Path, has_head: bool
) -> None:
    """With its own rows for words; the head only where there is one."""
    theirs = write_bert(tmp_path / "bert", has_head=has_head)
    bert = theirs.bert if has_head else theirs
    model = make_model()
    start = start_from_bert(model, str(tmp_path / "bert"))
    words = bert.embeddings.word_embeddings.weight
    assert torch.equal(model.words.weight[:20], words)
    assert torch.equal(model.types.weight[:2], bert.embeddings.token_type_embeddings.weight)
    layer = bert.encoder.layer[1]
    assert torch.equal(model.stack()[1].down.weight, layer.output.dense.weight)
    assert torch.equal(model.stack()[1].query_key_value.bias[12:24], layer.attention.self.key.bias)
    fresh = {"end", "objects.word", "objects.projection.weight", "objects.projection.bias"}
    fresh |= {
        f"objects.{norm}.{own}" for norm in ("norm", "text_norm") for own in ("weight", "bias")
    }
    head = {f"head.{own}.{k}" for own in ("transform", "norm") for k in ("weight", "bias")}
    assert set(start.fresh) == fresh | (set() if has_head else head | {"head.bias"})
    if has_head:
        assert torch.equal(model.head.bias[:20], theirs.cls.predictions.bias)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert", has_head=False)
    with pytest.raises(UserError, match=r"is \(.*12.*\) in .*bert and \(.*24.*\) here"):
        start_from_bert(make_model(model_dim=24), str(tmp_path / "bert"))
    with pytest.raises(UserError, match="cannot load the config of encoder"):
        load_masked_lm(str(tmp_path))
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot load the model of encoder"):
        load_masked_lm(str(tmp_path / "bert"))
