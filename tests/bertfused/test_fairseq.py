"""Import from and export to fairseq, without fairseq.

The checkpoints read here are written by the tests themselves: ``export_fairseq``'s newest layout,
taken apart by hand into older ones. Real ones are in tests/parity.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from bertfused.checkpoint import load_model, read_tensors
from bertfused.config import FusionConfig
from bertfused.errors import UserError
from bertfused.interop.fairseq import export_fairseq, import_fairseq
from bertfused.interop.fairseq_options import read_options
from bertfused.interop.pickles import load_pickle
from tests.tiny_run import make_run

Content = dict[str, Any]
WEIGHTS = Path("model", "model.safetensors")


class Checkpoint:
    """A checkpoint on disk with its dictionaries, to be changed and imported."""

    def __init__(self, folder: Path, **options: object) -> None:
        make_run(folder / "run", **options)
        export_fairseq(folder / "run", folder / "out")
        self.folder = folder
        self.path = folder / "out" / "checkpoint.pt"
        self.content: Content = load_pickle(self.path)
        self.options: argparse.Namespace = self.content["cfg"]["model"]
        self.state: dict[str, Tensor] = self.content["model"]

    def read(self, **more: Any) -> Path:
        """Import it as it is now; return the run folder."""
        self.content["model"] = self.state
        torch.save(self.content, self.path)
        dictionaries = [self.path.with_name(f"dict.{side}.txt") for side in ("en", "de")]
        import_fairseq(self.path, *dictionaries, self.folder / "imported", **more)
        return self.folder / "imported"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


def assert_same_weights(run: Path, other: Path) -> None:
    theirs = read_tensors(other / WEIGHTS)
    ours = read_tensors(run / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.equal(theirs[name]), name


VARIANTS = [
    {},
    {"norm": "pre", "activation": "gelu"},
    {"positions": "learned", "max_positions": 50, "embedding_norm": True},
    {"share_embeddings": "decoder", "decoder_layers": 1},
    {"share_embeddings": "none", "decoder_heads": 2, "encoder_layers": 1, "dropout": 0.25},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_exported_then_imported_is_the_same_model(
    tmp_path: Path, options: dict[str, object]
) -> None:
    run = Checkpoint(tmp_path, **options).read()
    assert_same_weights(run, tmp_path / "run")
    ours, theirs = load_model(run).card, load_model(tmp_path / "run").card
    assert ours == theirs


def test_exported_names_and_shapes_are_those_of_fairseq(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, positions="learned", max_positions=50)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.state.items()}
    assert shapes["encoder.embed_positions.weight"] == (52, 16)
    assert shapes["decoder.layers.1.encoder_attn.k_proj.weight"] == (16, 16)
    assert shapes["decoder.output_projection.weight"] == (40, 16)
    assert not checkpoint.state["encoder.embed_positions.weight"][:2].any()
    ours = read_tensors(tmp_path / "run" / WEIGHTS)
    merged = ours["encoder.layers.0.self_attention.in_proj.weight"]
    for number, letter in enumerate("qkv"):
        rows = checkpoint.state[f"encoder.layers.0.self_attn.{letter}_proj.weight"]
        assert rows.equal(merged[16 * number : 16 * (number + 1)])
    merged = ours["decoder.layers.0.cross_attention.kv_proj.bias"]
    assert checkpoint.state["decoder.layers.0.encoder_attn.v_proj.bias"].equal(merged[16:])


def merge(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the tensors the names and layout of fairseq 0.7 and 0.8."""
    old: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            old[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            old[name] = tensor
    return old


def test_merged_projections_of_before_0_9_are_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, share_embeddings="none")
    state = merge(checkpoint.state)
    state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
    state["encoder.embed_positions._float_tensor"] = torch.zeros(1)
    state["decoder.embed_positions.weights"] = torch.zeros(9, 16)
    checkpoint.state = state
    assert_same_weights(checkpoint.read(), tmp_path / "run")


def test_a_shared_output_that_is_not_stored_is_no_loss(checkpoint: Checkpoint) -> None:
    del checkpoint.state["decoder.output_projection.weight"]
    assert_same_weights(checkpoint.read(), checkpoint.folder / "run")


def test_zeros_that_0_12_2_stores_are_passed_over(checkpoint: Checkpoint) -> None:
    checkpoint.state["encoder.layers.0.in_proj_weight"] = torch.zeros(48, 16)
    checkpoint.state["encoder.layers.0.fc1_bias"] = torch.zeros(24)
    assert_same_weights(checkpoint.read(), checkpoint.folder / "run")


def test_half_precision_becomes_single(checkpoint: Checkpoint) -> None:
    checkpoint.state = {name: tensor.half() for name, tensor in checkpoint.state.items()}
    assert all(
        tensor.dtype == torch.float32
        for tensor in read_tensors(checkpoint.read() / WEIGHTS).values()
    )


def test_options_of_old_checkpoints_are_a_namespace(checkpoint: Checkpoint) -> None:
    checkpoint.content["args"] = checkpoint.options
    del checkpoint.content["cfg"]
    assert_same_weights(checkpoint.read(), checkpoint.folder / "run")


def test_options_may_be_tables_of_each_side(checkpoint: Checkpoint) -> None:
    flat = vars(checkpoint.options)
    nested: dict[str, Any] = {"encoder": {}, "decoder": {}}
    for name, value in flat.items():
        side, _, rest = name.partition("_")
        table = nested.get(side, nested)
        table[rest if side in nested else name] = value
    checkpoint.content["cfg"]["model"] = nested
    assert load_model(checkpoint.read()).card.model.heads == 4


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({}, (512, 2048, 6, 8, 8, False, 0.1)),
        ({"arch": "transformer_iwslt_de_en"}, (512, 1024, 6, 4, 4, False, 0.1)),
        ({"arch": "transformer_s2_iwslt_de_en"}, (512, 1024, 6, 4, 4, False, 0.1)),
        ({"arch": "transformerstack_iwslt_de_en"}, (512, 1024, 6, 4, 4, False, 0.1)),
        ({"arch": "transformers2", "dropout": 0.3}, (512, 2048, 6, 8, 8, False, 0.3)),
        ({"arch": "transformer_wmt_en_de_big"}, (1024, 4096, 6, 16, 16, False, 0.3)),
        ({"arch": "transformer_wmt_en_de_big_t2t"}, (1024, 4096, 6, 16, 16, True, 0.3)),
        ({"arch": "transformer_vaswani_wmt_en_fr_big"}, (1024, 4096, 6, 16, 16, False, 0.1)),
        ({"_name": "transformer_tiny", "encoder_layers": 3}, (64, 64, 3, 2, 2, False, 0.1)),
        (
            {"arch": "mine", "encoder_attention_heads": 1, "decoder_attention_heads": 2},
            (512, 2048, 6, 1, 2, False, 0.1),
        ),
    ],
)
def test_absent_options_are_the_architectures(
    stored: dict[str, object], expected: tuple[object, ...]
) -> None:
    options = read_options({"args": argparse.Namespace(**stored)}, Path("x.pt"))
    names = (
        *("decoder_embed_dim", "decoder_ffn_embed_dim", "encoder_layers"),
        *("encoder_attention_heads", "decoder_attention_heads", "decoder_normalize_before"),
        "dropout",
    )
    assert tuple(options[name] for name in names) == expected


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"adaptive_softmax_cutoff": "100,200"}, "--adaptive-softmax-cutoff 100,200, which is not"),
        ({"encoder_layerdrop": 0.2}, "--encoder-layerdrop 0.2, which is not"),
        ({"cross_self_attention": True}, "--cross-self-attention True, which is not"),
        (
            {"encoder_normalize_before": True},
            "--encoder-normalize-before True and --decoder-normalize-before False; they have",
        ),
        ({"decoder_embed_dim": 256}, "--encoder-embed-dim 512 and --decoder-embed-dim 256; they"),
        (
            {"encoder_learned_pos": 1, "decoder_learned_pos": 1, "max_source_positions": 9},
            "--max-source-positions 9 and --max-target-positions 1024; they have to be equal",
        ),
        ({"arch": "lstm"}, "does not say --encoder-attention-heads, .* architecture 'lstm'"),
    ],
)
def test_options_that_are_not_supported_are_named(stored: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^x.pt .*{message}"):
        read_options({"args": argparse.Namespace(**stored)}, Path("x.pt"))


def no_options(checkpoint: Checkpoint) -> None:
    del checkpoint.content["cfg"]


def other_activation(checkpoint: Checkpoint) -> None:
    checkpoint.options.activation_fn = "tanh"


def odd_heads(checkpoint: Checkpoint) -> None:
    checkpoint.options.encoder_attention_heads = 3


def no_decoder(checkpoint: Checkpoint) -> None:
    checkpoint.state = {n: t for n, t in checkpoint.state.items() if n.startswith("encoder")}


def no_layer(checkpoint: Checkpoint) -> None:
    del checkpoint.state["decoder.layers.1.fc2.bias"]


def another_layer(checkpoint: Checkpoint) -> None:
    checkpoint.state["encoder.layers.0.conv.weight"] = torch.zeros(3)


def wider(checkpoint: Checkpoint) -> None:
    checkpoint.options.encoder_ffn_embed_dim = checkpoint.options.decoder_ffn_embed_dim = 32


def not_shared(checkpoint: Checkpoint) -> None:
    checkpoint.state["decoder.embed_tokens.weight"] = torch.zeros(40, 16)


def longer_dictionary(checkpoint: Checkpoint) -> None:
    with checkpoint.path.with_name("dict.de.txt").open("a") as handle:
        handle.write("new 1\n")


def early_version(checkpoint: Checkpoint) -> None:
    checkpoint.options.encoder_normalize_before = True
    checkpoint.options.decoder_normalize_before = True
    checkpoint.state["encoder.layer_norm.weight"] = torch.ones(16)
    del checkpoint.state["encoder.version"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_options, "neither args nor cfg"),
        (other_activation, "activation = 'tanh': Input should be 'relu' or 'gelu'"),
        (odd_heads, "model_dim 16 is not a multiple of 3 heads"),
        (no_decoder, "holds no encoder and decoder"),
        (no_layer, r"lacks the tensor decoder\.layers\.1\.fc2\.bias"),
        (another_layer, r"tensors unknown here: encoder\.layers\.0\.conv\.weight"),
        (wider, r"encoder\.layers\.0\.fc1\.weight of .* makes \(24, 16\), but .* \(32, 16\)"),
        (not_shared, r"shares decoder\.embed_tokens\.weight with encoder.* but they differ"),
        (longer_dictionary, r"dict\.de\.txt has 41 symbols .* trained with 40"),
        (early_version, "early fairseq without a norm after the layers"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    checkpoint: Checkpoint, change: Any, message: str
) -> None:
    change(checkpoint)
    with pytest.raises(UserError, match=message) as error:
        checkpoint.read()
    assert "\n" not in str(error.value)
    assert not (checkpoint.folder / "imported").exists()


def test_languages_are_those_of_the_caller_the_checkpoint_or_the_dictionaries(
    checkpoint: Checkpoint,
) -> None:
    run = checkpoint.read(target_language="nl")
    card = load_model(run).card
    assert (card.source, card.target) == ("en", "nl")
    del checkpoint.options.source_lang, checkpoint.options.target_lang
    checkpoint.content["cfg"]["task"] = None
    torch.save(checkpoint.content, checkpoint.path)
    paths = [checkpoint.folder / name for name in ("dict.fr.txt", "dict.txt")]
    for path in paths:
        path.write_bytes(checkpoint.path.with_name("dict.en.txt").read_bytes())
    with pytest.raises(UserError, match=r"the name of .*/dict\.txt says its language"):
        import_fairseq(checkpoint.path, *paths, checkpoint.folder / "again")
    card = import_fairseq(
        checkpoint.path, *paths, checkpoint.folder / "again", target_language="ro"
    )
    assert (card.source, card.target) == ("fr", "ro")


def test_one_language_has_one_dictionary(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, share_embeddings="none")
    with pytest.raises(UserError, match="differ but are both of 'en'"):
        checkpoint.read(target_language="en")


def test_where_it_came_from_is_written_down(checkpoint: Checkpoint) -> None:
    origin = json.loads((checkpoint.read() / "import.json").read_text())
    assert origin["checkpoint"] == str(checkpoint.path)
    assert len(origin["sha256"]) == 64
    assert origin["options"]["encoder_embed_dim"] == 16


def test_lines_are_split_by_codes_if_there_are_some(checkpoint: Checkpoint) -> None:
    codes = checkpoint.folder / "codes"
    codes.write_text("#version: 0.2\nw 1</w>\n")
    tokenizer = load_model(checkpoint.read(codes=codes)).source_tokenizer
    symbols = tokenizer.vocabulary.symbols
    assert [symbols[id] for id in tokenizer.encode("w1 w2")] == ["w1", "<unk>", "<unk>"]


def test_existing_folders_are_left_alone(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "imported").mkdir()
    (checkpoint.folder / "imported" / "mine").touch()
    with pytest.raises(UserError, match="imported exists already"):
        checkpoint.read()
    with pytest.raises(UserError, match="out exists already"):
        export_fairseq(checkpoint.folder / "run", checkpoint.folder / "out")


def test_fused_models_are_not_exported(tmp_path: Path) -> None:
    make_run(tmp_path / "run", fusion=FusionConfig())
    with pytest.raises(UserError, match="is a fused model; only plain ones"):
        export_fairseq(tmp_path / "run", tmp_path / "out")


# The official BERT-fused code


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of width 8 and 2 layers, in a folder."""
    folder = tmp_path_factory.mktemp("bert") / "bert"
    config = transformers.BertConfig(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=20,
    )
    torch.manual_seed(3)
    transformers.BertModel(config).save_pretrained(folder)
    symbols = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c", "d", "e"]
    (folder / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in symbols))
    return folder


class FusedCheckpoint(Checkpoint):
    """A checkpoint as the official code writes it."""

    def __init__(self, folder: Path, bert: Path, sides: str = "encoder decoder") -> None:
        super().__init__(folder)
        self.content["args"] = self.options
        del self.content["cfg"]
        self.options.arch = "transformer_s2_iwslt_de_en"
        self.options.bert_model_name = str(bert)
        self.options.bert_gates = [1, 1]
        self.bert = transformers.BertModel.from_pretrained(bert)
        for name, tensor in self.bert.state_dict().items():
            self.state[f"bert_encoder.{name}"] = tensor
        generator = torch.Generator().manual_seed(5)
        shapes = {
            "q_proj_weight": (16, 16),
            "k_proj_weight": (16, 8),
            "v_proj_weight": (16, 8),
            "in_proj_bias": (48,),
            "out_proj.weight": (16, 16),
            "out_proj.bias": (16,),
        }
        for side in sides.split():
            for layer in range(2):
                for name, shape in shapes.items():
                    tensor = torch.randn(shape, generator=generator)
                    self.state[f"{side}.layers.{layer}.bert_attn.{name}"] = tensor

    def stack(self) -> None:
        """Make it one of ``transformerstack``, whose BERT attention has its own norm."""
        self.options.arch = "transformerstack_iwslt_de_en"
        for layer in range(2):
            for kind in ("weight", "bias"):
                name = f"decoder.layers.{layer}.bert_attn_layer_norm.{kind}"
                self.state[name] = torch.full((16,), 0.1 + layer)


def test_separate_projections_of_bert_attention_are_joined(tmp_path: Path, bert: Path) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    theirs = dict(checkpoint.state)
    ours = read_tensors(checkpoint.read() / WEIGHTS)
    for side in ("encoder", "decoder"):
        prefix, attention = f"{side}.layers.1.bert_attn", f"{side}.layers.1.bert_attention"
        kv = torch.cat([theirs[f"{prefix}.{letter}_proj_weight"] for letter in "kv"])
        assert ours[f"{attention}.q_proj.weight"].equal(theirs[f"{prefix}.q_proj_weight"])
        assert ours[f"{attention}.kv_proj.weight"].equal(kv)
        assert ours[f"{attention}.q_proj.bias"].equal(theirs[f"{prefix}.in_proj_bias"][:16])
        assert ours[f"{attention}.kv_proj.bias"].equal(theirs[f"{prefix}.in_proj_bias"][16:])
        assert ours[f"{attention}.out_proj.bias"].equal(theirs[f"{prefix}.out_proj.bias"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"drop_net": 0.0, "branch_weights": (1.0, 1.0), "order": "parallel", "layer": -1}),
        ({"encoder_ratio": 0.3, "bert_ratio": 0.7}, {"branch_weights": (0.3, 0.7)}),
        (
            {"encoder_bert_dropout": True, "encoder_bert_dropout_ratio": 0.3, "bert_ratio": 0.7},
            {"drop_net": 0.6, "branch_weights": (0.5, 0.5), "mixup": False},
        ),
        ({"encoder_bert_dropout": True}, {"drop_net": 0.5}),
        (
            {"encoder_bert_dropout": True, "encoder_bert_mixup": True},
            {"drop_net": 0.0, "branch_weights": (0.5, 0.5), "mixup": True},
        ),
        ({"encoder_bert_mixup": True}, {"mixup": False, "branch_weights": (1.0, 1.0)}),
        ({"mask_cls_sep": True}, {"mask_special": True}),
        ({"bert_output_layer": 0}, {"layer": 1}),
        ({"bert_output_layer": -2}, {"layer": -2}),
    ],
)
def test_fusion_options_are_translated(
    tmp_path: Path, bert: Path, options: dict[str, object], expected: dict[str, object]
) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    vars(checkpoint.options).update(options)
    trained = load_model(checkpoint.read())
    fusion = trained.card.fusion
    assert fusion is not None
    assert {name: getattr(fusion, name) for name in expected} == expected
    assert trained.load_encoder() is not None


@pytest.mark.parametrize("bert_first", [True, False])
def test_the_stacked_decoder_has_an_order_and_no_weights(
    tmp_path: Path, bert: Path, bert_first: bool
) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert, sides="decoder")
    checkpoint.stack()
    checkpoint.options.bert_first = bert_first
    checkpoint.options.encoder_bert_dropout = True  # which it never reads
    checkpoint.options.bert_output_layer = 0
    run = checkpoint.read()
    fusion = load_model(run).card.fusion
    assert fusion is not None
    assert fusion.order == ("bert-first" if bert_first else "encoder-first")
    assert (fusion.encoder_attention, fusion.drop_net, fusion.layer) == (False, 0.0, -1)
    norm = read_tensors(run / WEIGHTS)["decoder.layers.1.bert_attention_norm.weight"]
    assert norm.tolist() == pytest.approx([1.1] * 16)


@pytest.mark.parametrize("sides", ["encoder", "decoder"])
def test_bert_attention_may_be_on_one_side_only(tmp_path: Path, bert: Path, sides: str) -> None:
    fusion = load_model(FusedCheckpoint(tmp_path, bert, sides).read()).card.fusion
    assert fusion is not None
    assert (fusion.encoder_attention, fusion.decoder_attention) == (
        sides == "encoder",
        sides == "decoder",
    )


def test_closed_gates_drop_bert_attention_and_keep_the_ratio(tmp_path: Path, bert: Path) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    checkpoint.options.bert_gates = [0, 1]
    checkpoint.options.encoder_ratio = 0.5
    theirs = {name: tensor.clone() for name, tensor in checkpoint.state.items()}
    run = checkpoint.read()
    ours, fusion = read_tensors(run / WEIGHTS), load_model(run).card.fusion
    assert fusion is not None
    assert fusion.gates == (False, True)
    for side, name, attention in (
        ("encoder", "self_attn", "self_attention"),
        ("decoder", "encoder_attn", "cross_attention"),
    ):
        assert not any(key.startswith(f"{side}.layers.0.bert") for key in ours)
        for layer, factor in ((0, 0.5), (1, 1.0)):
            stored = theirs[f"{side}.layers.{layer}.{name}.out_proj.weight"]
            weight = ours[f"{side}.layers.{layer}.{attention}.out_proj.weight"]
            assert weight.equal(factor * stored)


def test_another_bert_is_refused(tmp_path: Path, bert: Path) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    checkpoint.state["bert_encoder.encoder.layer.1.output.dense.bias"] = torch.ones(8)
    with pytest.raises(UserError, match=r"is not the encoder of .*layer\.1\.output\.dense\.bias"):
        checkpoint.read()


def test_a_bert_stored_in_half_precision_is_still_the_same(tmp_path: Path, bert: Path) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    checkpoint.state = {name: tensor.half() for name, tensor in checkpoint.state.items()}
    card = load_model(checkpoint.read()).card
    assert card.encoder is not None
    assert card.encoder.name == str(bert)


def test_a_bert_that_is_not_there_is_asked_for(tmp_path: Path, bert: Path) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    checkpoint.options.bert_model_name = str(tmp_path / "gone")
    with pytest.raises(UserError, match=r"was trained with .*gone"):
        checkpoint.read()
    assert checkpoint.read(encoder=str(bert)).is_dir()


def test_a_bert_without_a_name_is_asked_for(tmp_path: Path, bert: Path) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    del checkpoint.options.bert_model_name
    with pytest.raises(UserError, match="does not name its encoder"):
        checkpoint.read()


def test_a_plain_model_takes_no_bert(checkpoint: Checkpoint, bert: Path) -> None:
    with pytest.raises(UserError, match="is a plain Transformer"):
        checkpoint.read(encoder=str(bert))


@pytest.mark.parametrize("layer", [-1, 0])
@torch.inference_mode()
def test_a_fine_tuned_bert_comes_from_the_checkpoint(
    tmp_path: Path, bert: Path, layer: int
) -> None:
    checkpoint = FusedCheckpoint(tmp_path, bert)
    checkpoint.options.finetune_bert = True
    checkpoint.options.bert_output_layer = layer
    for name, tensor in checkpoint.state.items():
        if name.startswith("bert_encoder."):
            checkpoint.state[name] = 1.5 * tensor + 0.1
    trained = load_model(checkpoint.read())
    encoder = trained.load_encoder()
    assert encoder is not None
    tuned = checkpoint.bert.eval()
    for tensor in tuned.parameters():
        tensor.mul_(1.5).add_(0.1)
    ids = torch.tensor([[2, 5, 6, 3]])
    theirs = tuned(ids, output_hidden_states=True).hidden_states[1:][layer]
    ours = encoder(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# Reading pickles


class Attack:
    """When unpickled the ordinary way, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, is_zip: bool) -> None:
    path, trace = tmp_path / "bad.pt", tmp_path / "trace"
    content = {"args": argparse.Namespace(x=Attack(trace)), "model": {}}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        UserError, match=r"bad\.pt is refused: it wants to call posix\.mkdir"
    ) as error:
        load_pickle(path)
    assert "\n" not in str(error.value)
    assert not trace.exists()
    torch.load(path, weights_only=False)  # the attack is a real one
    assert trace.exists()


def test_classes_of_fairseq_are_refused_unless_they_are_meters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("fairseq.meters")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fairseq", ModuleType("fairseq"))
        patch.setitem(sys.modules, "fairseq.meters", module)
        for name in ("TimeMeter", "Other"):
            kind = type(name, (), {"__module__": "fairseq.meters"})
            setattr(module, name, kind)
            meter = kind()
            meter.start = 1.0
            torch.save({"meter": meter, "kept": 5}, tmp_path / name)
    assert load_pickle(tmp_path / "TimeMeter")["kept"] == 5
    with pytest.raises(UserError, match=r"wants to call fairseq\.meters\.Other"):
        load_pickle(tmp_path / "Other")


def test_arrays_of_eval_bleu_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"counts": np.arange(4), "bleu": np.float64(1.5)}, path)
    content = load_pickle(path)
    assert content["counts"].tolist() == [0, 1, 2, 3]
    assert content["bleu"] == 1.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a checkpoint"),
        (b"text\n", "is not a checkpoint"),
        (b"PK\x03\x04 cut", "is not a checkpoint"),
        (b"\x80\x04\x95\x05\x00", "is not a checkpoint"),
    ],
)
def test_other_files_are_no_checkpoints(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_pickle(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone\.pt: No such file"):
        load_pickle(tmp_path / "gone.pt")


def test_a_list_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "x.pt")
    with pytest.raises(UserError, match="holds a list"):
        load_pickle(tmp_path / "x.pt")
