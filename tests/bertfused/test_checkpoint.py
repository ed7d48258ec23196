import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bertfused.batch import Batch, BertIds, Example, collate
from bertfused.checkpoint import (
    CARD,
    FINETUNED,
    WEIGHTS,
    EncoderCard,
    ModelCard,
    copy_tensors,
    encoder_card,
    hash_text_files,
    load_card,
    load_model,
    model_tensors,
    new_folder,
    open_encoder,
    read_tensors,
    save_model,
    warm_start,
    write_card,
    write_json,
    write_tensors,
)
from bertfused.config import FusionConfig
from bertfused.errors import UserError
from bertfused.loss import cross_entropy
from bertfused.model import FusedTransformer
from bertfused.pretrained import PretrainedEncoder
from tests.tiny_encoders import make_encoder, make_fused_run
from tests.tiny_run import make_run

ENCODER = EncoderCard(name="bert", bert_dim=8, weights="", wordpieces="")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder("bert", tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"


def batch(size: int = 30) -> Batch:
    """Two sentences with targets, and states of a pretrained encoder of width 8."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for source, target, length in ((5, 4, 6), (3, 6, 4)):
        ids = torch.randint(4, size, (source + target,), generator=generator).tolist()
        states = torch.randn(length, 8, generator=generator)
        examples.append(Example([*ids[:source], 2], [*ids[source:], 2], [3] * length, states))
    return collate(examples, BertIds(pad=0))


def loss(model: FusedTransformer, own: Batch | None = None) -> float:
    own = own or batch()
    assert own.target is not None
    assert own.target_mask is not None
    mask = own.target_mask
    with torch.no_grad():
        found = cross_entropy(model.hidden(own)[mask], model.output.weight, own.target[mask], 0.1)
    return float(found.total) / found.tokens


# Saving and loading


@pytest.mark.parametrize("fusion", [None, FusionConfig(order="bert-first", gates=(True, False))])
@pytest.mark.parametrize("share", ["all", "decoder", "none"])
def test_a_model_is_loaded_as_it_was_saved(
    tmp_path: Path, fusion: FusionConfig | None, share: str
) -> None:
    make_run(tmp_path / "run", fusion=fusion, share_embeddings=share, norm="pre")
    first = load_model(tmp_path / "run")
    save_model(
        tmp_path / "again", first.card, model_tensors(first.model), tmp_path / "run" / "model"
    )
    second = load_model(tmp_path / "again")
    assert second.card == first.card
    assert second.card.fusion == fusion
    assert second.source_tokenizer.encode("w3 w1") == first.source_tokenizer.encode("w3 w1")
    ours, theirs = model_tensors(first.model), model_tensors(second.model)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(first.model(batch()), second.model(batch()))
    assert not second.model.training


def test_a_shared_matrix_is_written_once(run: Path) -> None:
    tensors = read_tensors(run / "model" / WEIGHTS)
    assert "encoder.embed.tokens.weight" in tensors
    assert "decoder.embed.tokens.weight" not in tensors
    assert "output.weight" not in tensors


def test_a_model_folder_can_be_moved_and_opened_read_only(run: Path, tmp_path: Path) -> None:
    expected = load_model(run).model(batch())
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(run / "model", moved)
    shutil.rmtree(run)
    for path in moved.iterdir():
        path.chmod(0o444)
    assert torch.equal(load_model(moved).model(batch()), expected)


def test_a_run_is_found_by_its_folder_or_that_of_its_model(run: Path) -> None:
    assert load_model(run).folder == load_model(run / "model").folder == run / "model"


def test_what_is_no_run(tmp_path: Path) -> None:
    end = "; a run folder is made by train, import or average"
    with pytest.raises(UserError) as caught:
        load_model(tmp_path / "nothing")
    assert str(caught.value) == f"{tmp_path / 'nothing'} is not a folder{end}"
    with pytest.raises(UserError) as caught:
        load_model(tmp_path)
    assert str(caught.value) == f"{tmp_path} holds no model.json and no model/model.json{end}"
    with pytest.raises(UserError) as caught:
        load_card(tmp_path)
    assert str(caught.value) == f"{tmp_path} is not a model folder: cannot read model.json"


def test_saving_again_replaces_the_weights(run: Path) -> None:
    trained = load_model(run)
    tensors = {name: tensor + 1 for name, tensor in model_tensors(trained.model).items()}
    save_model(run / "model", trained.card, tensors, run / "model")
    again = model_tensors(load_model(run).model)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert not [path for path in (run / "model").iterdir() if "partial" in path.name]


def test_only_text_files_belong_to_the_hashes(tmp_path: Path) -> None:
    for name in (
        "dict.en.txt",
        "sentencepiece.en.model",
        "bpe.de.codes",
        "train.idx",
        "model.json",
    ):
        (tmp_path / name).write_text(name)
    (tmp_path / "dict.folder").mkdir()
    expected = ["bpe.de.codes", "dict.en.txt", "sentencepiece.en.model"]
    assert sorted(hash_text_files(tmp_path)) == expected


# Damage


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Invalid JSON: EOF while parsing"),
        ("[]", "Input should be an object"),
        ("{}", "source: Field required"),
        ('{"source": "en", "target": 3}', "target: Input should be a valid string"),
    ],
)
def test_a_damaged_card(run: Path, content: str, message: str) -> None:
    (run / "model" / CARD).write_text(content)
    with pytest.raises(UserError, match=rf"/model\.json is damaged: {message}"):
        load_model(run)


def test_a_card_of_the_future(run: Path) -> None:
    card = load_card(run / "model")
    write_card(run / "model", card.model_copy(update={"format": 2}))
    with pytest.raises(UserError, match=r"model\.json has format 2; this version reads format 1$"):
        load_model(run)


def test_a_card_with_unknown_keys(run: Path) -> None:
    path = run / "model" / CARD
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": 1}))
    with pytest.raises(UserError, match="extra: Extra inputs are not permitted"):
        load_model(run)


def test_a_dictionary_that_was_changed(run: Path) -> None:
    path = run / "model" / "dict.de.txt"
    path.write_text(path.read_text().replace("w3 ", "w999 "))
    with pytest.raises(UserError) as caught:
        load_model(run)
    assert str(caught.value) == f"{path} is not the file the model was trained with"


def test_a_dictionary_that_is_gone(run: Path) -> None:
    (run / "model" / "dict.de.txt").unlink()
    with pytest.raises(UserError, match=r"lacks dict\.de\.txt, which belongs to the model$"):
        load_model(run)


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_damaged_weights(run: Path, damage: str) -> None:
    path = run / "model" / WEIGHTS
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    with pytest.raises(UserError, match=r"^cannot read .*model\.safetensors: .+"):
        load_model(run)


def test_weights_of_another_model(run: Path) -> None:
    path = run / "model" / WEIGHTS
    tensors = read_tensors(path)
    name = "decoder.layers.0.ffn.up.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(UserError) as caught:
        load_model(run)
    message = f"{path} does not fit model.json: missing ['{name}'], unexpected nothing"
    assert str(caught.value) == message

    save_file(tensors | {"strange": torch.zeros(1)}, path)
    with pytest.raises(UserError, match=r"missing nothing, unexpected \['strange'\]$"):
        load_model(run)

    save_file(tensors | {name: torch.zeros(2, 3)}, path)
    with pytest.raises(UserError, match=rf"{name} is \(2, 3\), not \(24, 16\)$"):
        load_model(run)


def test_a_folder_that_cannot_be_written(run: Path) -> None:
    tensors = read_tensors(run / "model" / WEIGHTS)
    (run / "model" / WEIGHTS).unlink()
    (run / "model" / WEIGHTS / "in the way").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^cannot write .*model\.safetensors: .+"):
        write_tensors(run / "model" / WEIGHTS, tensors)
    assert not list((run / "model").glob("*.partial"))


def test_writing_replaces_at_once_and_keeps_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.zeros(2)})
    write_tensors(path, {"a": torch.ones(4).view(2, 2).T}, {"step": "3"})
    assert read_tensors(path)["a"].tolist() == [[1, 1], [1, 1]]
    assert [own.name for own in tmp_path.iterdir()] == ["a.safetensors"]


def test_json_is_written_readable(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ä": [1]})
    assert (tmp_path / "a.json").read_text("utf-8") == '{\n "ä": [\n  1\n ]\n}\n'


# Folders that appear at once


def test_a_new_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step-3"
    for content in ("first", "second"):  # the second replaces the first
        with new_folder(path) as folder:
            assert folder != path
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text(content)
            assert not path.exists() or content == "second"
        assert (path / "inner" / "file").read_text() == content
        assert list(path.parent.iterdir()) == [path]


def fill(path: Path, content: str, error: type[BaseException] | None = None) -> None:
    with new_folder(path) as folder:
        (folder / "file").write_text(content)
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_new(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "step-3"
    with pytest.raises(error):
        fill(path, "new", error)
    assert list(tmp_path.iterdir()) == []
    fill(path, "old")
    with pytest.raises(error):
        fill(path, "new", error)
    assert (path / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_kill_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "step-3.partial").mkdir()
    (tmp_path / "step-3.partial" / "half").write_text("")
    with new_folder(tmp_path / "step-3") as folder:
        (folder / "file").write_text("")
    assert os.listdir(tmp_path / "step-3") == ["file"]
    assert os.listdir(tmp_path) == ["step-3"]


# Warm start


def fused(run: Path, **options: object) -> tuple[FusedTransformer, FusionConfig]:
    """A network of the run's architecture, with fresh BERT attention."""
    fusion = FusionConfig.model_validate(options)
    card = load_card(run / "model")
    torch.manual_seed(11)
    built = card.model_copy(update={"fusion": fusion, "encoder": ENCODER}).build()
    return built.eval(), fusion


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"branch_weights": [0.3, 0.7]},
        {"branch_weights": [1, 1]},
        {"gates": [True, False]},
        {"encoder_attention": False},
        {"order": "bert-first"},
        {"order": "encoder-first"},
    ],
    ids=str,
)
def test_the_function_preserving_start_has_the_loss_of_the_nmt(
    tmp_path: Path, norm: str, options: dict[str, object]
) -> None:
    make_run(tmp_path / "run", norm=norm)
    expected = loss(load_model(tmp_path / "run").model)
    model, fusion = fused(tmp_path / "run", **options)
    assert abs(loss(model) - expected) > 1e-3
    warm_start(model, tmp_path / "run", fusion)
    assert loss(model) == pytest.approx(expected, abs=1e-5)
    other = batch()
    assert other.bert_states is not None  # whatever BERT says
    other = replace(other, bert_states=other.bert_states + 5)
    assert loss(model, other) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("start", ["paper", "function-preserving"])
def test_every_branch_of_a_fresh_start_can_learn(run: Path, start: str) -> None:
    """The output projection starts at 0, so the projections below it move from step 2 on."""
    model, fusion = fused(run, start=start)
    warm_start(model, run, fusion)
    own = batch()
    assert own.target_mask is not None
    model(own)[own.target_mask].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        below = ".bert_attention." in name and "out_proj" not in name
        if start == "paper" or not below:
            # fairseq's models have no use for the bias of keys: softmax does not see it
            assert name.endswith("kv_proj.bias") or parameter.grad.any(), name


def test_the_papers_start_is_the_nmt_at_weights_1_and_0(run: Path) -> None:
    expected = load_model(run).model(batch())
    model, fusion = fused(run, start="paper", branch_weights=[1, 0], drop_net=0)
    warm_start(model, run, fusion)
    assert torch.equal(model(batch()), expected)
    half, fusion = fused(run, start="paper")
    fresh = {n: t.clone() for n, t in model_tensors(half).items() if ".bert_attention." in n}
    warm_start(half, run, fusion)
    assert abs(loss(half) - loss(model)) > 1e-3
    assert fresh
    for name, tensor in fresh.items():  # random, as built
        assert torch.equal(model_tensors(half)[name], tensor)


def test_a_warm_start_says_what_it_took(run: Path) -> None:
    model, fusion = fused(run, decoder_attention=False)
    start = warm_start(model, run, fusion)
    names = [
        f"encoder.layers.{i}.bert_attention.{p}.{k}"
        for i in (0, 1)
        for p in ("q_proj", "kv_proj", "out_proj")
        for k in ("weight", "bias")
    ]
    assert start.fresh == tuple(names)
    total = len(model_tensors(model))
    assert str(start) == (
        f"loaded {total - 12} of {total} tensors\nstarted fresh: {', '.join(names)}"
    )


def test_a_plain_start_takes_everything(run: Path) -> None:
    trained = load_model(run)
    model = load_card(run / "model").build()
    start = warm_start(model, run, None)
    assert (start.fresh, start.unexpected) == ((), ())
    assert torch.equal(model.eval()(batch()), trained.model(batch()))
    assert str(start) == f"loaded {len(start.loaded)} of {len(start.loaded)} tensors"


def test_going_on_from_a_fused_model_changes_no_function(tmp_path: Path, bert: Path) -> None:
    make_fused_run(tmp_path / "run", bert)
    model, fusion = fused(tmp_path / "run")
    start = warm_start(model, tmp_path / "run", fusion)
    assert start.fresh == ()
    assert torch.equal(model(batch()), load_model(tmp_path / "run").model(batch()))


def test_layers_that_were_fused_before_stay_as_they_are(tmp_path: Path, bert: Path) -> None:
    """From BERT attention in the encoder alone to BERT attention everywhere."""
    make_fused_run(tmp_path / "run", bert, decoder_attention=False)
    model, fusion = fused(tmp_path / "run")
    start = warm_start(model, tmp_path / "run", fusion)
    assert {name.split(".")[0] for name in start.fresh} == {"decoder"}
    assert loss(model) == pytest.approx(loss(load_model(tmp_path / "run").model), abs=1e-5)


def test_from_a_fused_model_to_a_plain_one_is_said(tmp_path: Path, bert: Path) -> None:
    make_fused_run(tmp_path / "run", bert, encoder_attention=False, gates=[True, False])
    card = load_card(tmp_path / "run" / "model")
    plain = card.model_copy(update={"fusion": None, "encoder": None}).build()
    start = warm_start(plain, tmp_path / "run", None)
    assert len(start.unexpected) == 6
    last = str(start).splitlines()[-1]
    assert last.startswith("in the file but not in the model: decoder.layers.0.bert_attention.")


def refused(model: FusedTransformer, run: Path) -> str:
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    with pytest.raises(UserError, match=f"^cannot start from {run}: ") as caught:
        warm_start(model, run, FusionConfig())
    after = model_tensors(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return str(caught.value).removeprefix(f"cannot start from {run}: ")


def other_model(run: Path, **options: object) -> FusedTransformer:
    card = load_card(run / "model")
    changed = card.model.model_copy(update=options)
    return card.model_copy(update={"model": changed}).build()


def test_a_post_norm_model_does_not_start_a_pre_norm_one(run: Path) -> None:
    assert refused(other_model(run, norm="pre"), run) == (
        "it lacks encoder.norm.weight, encoder.norm.bias, decoder.norm.weight, decoder.norm.bias "
        "(is it a model of the same depth, norm and sharing of embeddings?)"
    )


def test_a_shallow_model_does_not_start_a_deep_one(run: Path) -> None:
    message = refused(other_model(run, encoder_layers=3), run)
    assert message.startswith("it lacks encoder.layers.2.self_attention.in_proj.weight, ")
    assert "encoder.layers.1" not in message


def test_shared_embeddings_do_not_start_separate_ones(run: Path) -> None:
    message = refused(other_model(run, share_embeddings="none"), run)
    assert message.startswith("it lacks decoder.embed.tokens.weight, output.weight (")


def test_a_vocabulary_of_another_size_is_refused(run: Path) -> None:
    card = load_card(run / "model")
    model = card.model_copy(update={"source_size": 41, "target_size": 41}).build()
    message = "encoder.embed.tokens.weight is (40, 16) there and (41, 16) here"
    assert refused(model, run) == message


def test_a_missing_tensor_is_named(run: Path) -> None:
    path = run / "model" / WEIGHTS
    tensors = read_tensors(path)
    del tensors["encoder.layers.1.ffn.up.bias"]
    save_file(tensors, path)
    message = refused(other_model(run), run)
    assert message.startswith("it lacks encoder.layers.1.ffn.up.bias (")


# The pretrained encoder of a model


def states_of(encoder: PretrainedEncoder, text: str = "the cat") -> Tensor:
    ids = torch.tensor([encoder.wordpieces.encode(text).ids])
    with torch.no_grad():
        return encoder(ids, torch.ones_like(ids, dtype=torch.bool))


def test_a_plain_model_has_no_encoder(run: Path) -> None:
    assert load_model(run).load_encoder() is None


def test_the_encoder_is_found_and_may_have_moved(tmp_path: Path, bert: Path) -> None:
    moving = tmp_path / "bert"
    shutil.copytree(bert, moving)
    make_fused_run(tmp_path / "run", moving, layer=1)
    trained = load_model(tmp_path / "run")
    encoder = trained.load_encoder()
    assert encoder is not None
    assert encoder.layer_numbers == [1]
    moving.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"^cannot load the model of encoder '.*bert'"):
        trained.load_encoder()
    moved = trained.load_encoder(str(tmp_path / "moved"))
    assert moved is not None
    assert torch.equal(states_of(moved), states_of(encoder))


@pytest.mark.parametrize("what", ["weights", "tokenizer"])
def test_another_encoder_is_refused(tmp_path: Path, bert: Path, what: str) -> None:
    make_fused_run(tmp_path / "run", bert)
    other = tmp_path / "other"
    if what == "weights":
        make_encoder("bert", other, seed=1)
    else:
        shutil.copytree(bert, other)
        path = other / "tokenizer.json"
        path.write_text(path.read_text().replace('"lowercase": true', '"lowercase": false'))
    expected = load_card(tmp_path / "run" / "model").encoder
    assert expected is not None
    theirs = expected.weights if what == "weights" else expected.wordpieces
    found = PretrainedEncoder(str(other))
    ours = found.fingerprint if what == "weights" else found.wordpieces.fingerprint
    with pytest.raises(UserError) as caught:
        load_model(tmp_path / "run").load_encoder(str(other))
    assert str(caught.value) == (
        f"encoder {other} is not the one this model was trained with ({bert}): the {what} have "
        f"sha256 {ours[:12]}, not {theirs[:12]}"
    )


def test_frozen_weights_are_not_stored(tmp_path: Path, bert: Path) -> None:
    make_fused_run(tmp_path / "run", bert)
    trained = load_model(tmp_path / "run")
    encoder = trained.load_encoder()
    save_model(
        tmp_path / "out", trained.card, model_tensors(trained.model), trained.folder, encoder
    )
    assert not (tmp_path / "out" / FINETUNED).exists()
    assert not [name for name in read_tensors(tmp_path / "out" / WEIGHTS) if "embeddings" in name]


@pytest.mark.parametrize("layer", [-1, -2, 1, "average"])
def test_a_fine_tuned_encoder_is_stored_and_found(
    tmp_path: Path, bert: Path, layer: int | str
) -> None:
    make_fused_run(tmp_path / "run", bert, finetune=True, layer=layer)
    trained = load_model(tmp_path / "run")
    with pytest.raises(UserError, match=r"lacks encoder, the encoder trained with the model$"):
        trained.load_encoder()
    assert trained.card.fusion is not None
    encoder = open_encoder(trained.card.fusion)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.05 * torch.sign(parameter))
    save_model(
        tmp_path / "out", trained.card, model_tensors(trained.model), trained.folder, encoder
    )
    again = load_model(tmp_path / "out").load_encoder()
    assert again is not None
    assert torch.equal(states_of(again), states_of(encoder))
    assert not torch.equal(states_of(again), states_of(open_encoder(trained.card.fusion)))


def test_an_encoder_is_described_by_its_hashes(bert: Path) -> None:
    encoder = PretrainedEncoder(str(bert))
    card = encoder_card(encoder)
    assert (card.name, card.bert_dim) == (str(bert), 8)
    assert card.weights == encoder.fingerprint
    assert card.wordpieces == encoder.wordpieces.fingerprint


# Small helpers


def test_tensors_are_copied_by_name() -> None:
    destination = {"a": torch.zeros(2, requires_grad=True), "b": torch.zeros(1)}
    copy_tensors({"b": torch.ones(1), "a": torch.ones(2), "c": torch.ones(9)}, destination)
    assert [tensor.tolist() for tensor in destination.values()] == [[1, 1], [1]]


def test_a_card_survives_its_file(run: Path) -> None:
    card = load_card(run / "model")
    assert ModelCard.model_validate_json(card.model_dump_json()) == card
