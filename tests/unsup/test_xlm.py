import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from bertfused.batch import Batch, Example, collate
from bertfused.checkpoint import model_tensors
from bertfused.config import FusionConfig, ModelConfig
from bertfused.errors import UserError
from bertfused.model import FusedTransformer, build_model
from bertfused.vocab import Vocabulary
from tests.tiny_encoders import make_encoder
from tests.tiny_xlm import DIM, HUB, MODEL, make_hub_xlm, make_own_xlm, own_vocabulary
from unsup.xlm import start_from_xlm

LANGUAGES = ("fr", "en")  # the other way round than in the XLMs
SYMBOLS = own_vocabulary().symbols
# Of subword-nmt's byte pairs, as a published XLM knows them, and others.
PAIRS = Vocabulary(["the", "cat", "th@@", "e", "dog", "zz@@", "<mask>"], [6, 5, 4, 3, 2, 1, -1])


def network(
    size: int = len(SYMBOLS),
    *,
    fusion: FusionConfig | None = None,
    languages: int = 2,
    **options: object,
) -> FusedTransformer:
    torch.manual_seed(3)
    return build_model(
        ModelConfig.model_validate({**MODEL, **options}),
        fusion,
        source_size=size,
        target_size=size,
        bert_dim=8,
        languages=languages,
    ).eval()


def states_of_xlm(path: Path, ids: list[int], lang: int) -> Tensor:
    """The states of one unpadded sentence, by transformers itself."""
    model = transformers.AutoModel.from_pretrained(path).eval()
    langs = torch.full((1, len(ids)), lang)
    with torch.inference_mode():
        states: Tensor = model(torch.tensor([ids]), langs=langs).last_hidden_state[0]
    return states


def batch_of(rows: list[list[int]], languages: list[int]) -> Batch:
    batch = collate([Example(row) for row in rows])
    return replace(batch, source_language=torch.tensor(languages))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_own_xlm(tmp_path_factory.mktemp("xlm") / "own")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hub_xlm(tmp_path_factory.mktemp("xlm") / "hub")


# The same function


def test_the_encoder_computes_what_the_xlm_does(own: Path) -> None:
    model = network()
    start_from_xlm(model, str(own), SYMBOLS, LANGUAGES)
    rows = [[2, 5, 6, 7, 2], [2, 24, 2], [2, 4, 3, 9, 10, 11, 12, 2]]
    for languages in ([0, 1, 0], [1, 0, 1]):
        with torch.inference_mode():
            states = model.encoder(batch_of(rows, languages)).states
        for row, number, found in zip(rows, languages, states, strict=True):
            expected = states_of_xlm(own / "model", row, 1 - number)
            torch.testing.assert_close(found[: len(row)], expected, rtol=0, atol=1e-5)


def test_the_encoder_computes_what_a_published_xlm_does(hub: Path) -> None:
    """For what both know; each has numbers of its own for it."""
    model = network(len(PAIRS))
    start_from_xlm(model, str(hub), PAIRS.symbols, LANGUAGES)
    ours = [2, *map(PAIRS.id_of, ["the", "cat", "th@@", "e"]), 3, PAIRS.tags["<mask>"], 2]
    pieces = ["</s>", "the</w>", "cat</w>", "th", "e</w>", "<unk>", "<special1>", "</s>"]
    for number in (0, 1):
        with torch.inference_mode():
            states = model.encoder(batch_of([ours, [2]], [number, 0])).states[0]
        expected = states_of_xlm(hub, [HUB[piece] for piece in pieces], 1 - number)
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)


def test_the_decoder_has_the_layers_too_but_for_its_attention_to_the_encoder(own: Path) -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    start = start_from_xlm(model, str(own), SYMBOLS, LANGUAGES)
    assert start.fresh == tuple(name for name in before if "cross_attention" in name)
    assert set(start.loaded) | set(start.fresh) == set(before)
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, before[name]) == (name in start.fresh)
    encoder, decoder = model.encoder.layers, model.decoder.layers
    for ours, theirs in zip(encoder, decoder, strict=True):
        for one, other in (
            (ours.self_attention, theirs.self_attention),
            (ours.attention_norm, theirs.self_attention_norm),
            (ours.ffn, theirs.ffn),
            (ours.ffn_norm, theirs.ffn_norm),
        ):
            assert isinstance(one, torch.nn.Module)
            assert isinstance(other, torch.nn.Module)
            for a, b in zip(one.parameters(), other.parameters(), strict=True):
                assert torch.equal(a, b)
    assert model.output.weight is model.encoder.embed.tokens.weight


def test_without_attention_to_the_encoder_the_decoder_is_a_causal_xlm(own: Path) -> None:
    """Its first position sees itself only, as that of a sentence of one token."""
    model = network()
    start_from_xlm(model, str(own), SYMBOLS, LANGUAGES)
    ids = torch.tensor([[2, 7, 8]])
    x = model.decoder.embed(ids, torch.tensor([0]))
    bias = torch.full((3, 3), -math.inf).triu_(1)
    for layer in model.decoder.layers:
        x = layer.feed_forward(layer.attend_own(x, bias))  # type: ignore[operator]
    expected = states_of_xlm(own / "model", [2], 1)
    torch.testing.assert_close(x[0, :1], expected, rtol=0, atol=1e-5)


# The dictionary


def test_symbols_are_found_by_what_they_spell(hub: Path) -> None:
    model = network(len(PAIRS))
    before = model.output.weight.detach().clone()
    start = start_from_xlm(model, str(hub), PAIRS.symbols, LANGUAGES)
    assert start.notes == ("9 of 11 symbols are in its vocabulary",)
    assert "9 of 11 symbols are in its vocabulary" in str(start)
    table = transformers.AutoModel.from_pretrained(hub).embeddings.weight
    theirs = ["<s>", "<pad>", "</s>", "<unk>", "the</w>", "cat</w>", "th", "e</w>", None, None]
    for row, piece in enumerate([*theirs, "<special1>"]):
        expected = before[row] if piece is None else table[HUB[piece]]
        assert torch.equal(model.output.weight[row], expected)


def test_a_dictionary_of_others(hub: Path, own: Path) -> None:
    with pytest.raises(UserError) as caught:
        start_from_xlm(network(), str(hub), SYMBOLS, LANGUAGES)
    assert str(caught.value) == (
        f"cannot start from {hub}: only 5 of the 25 symbols of the dictionary are in its "
        "vocabulary; prepare the data with its own byte pairs (subwords.kind = 'bpe')"
    )
    swapped = [*SYMBOLS[:4], SYMBOLS[5], SYMBOLS[4], *SYMBOLS[6:]]
    with pytest.raises(UserError) as caught:
        start_from_xlm(network(), str(own), swapped, LANGUAGES)
    assert str(caught.value) == (
        f"cannot start from {own}: its dict.en.txt is not that of the data; prepare them with "
        f"subwords.reuse = '{own / 'model'}'"
    )


# What cannot start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "sinusoidal"}, 'an XLM needs positions = "learned" in [model]'),
        (
            {"norm": "pre", "activation": "relu", "scale_embeddings": True},
            'an XLM needs norm = "post", activation = "gelu", scale_embeddings = false in [model]',
        ),
        ({"embedding_norm": False}, "an XLM needs embedding_norm = true in [model]"),
        ({"share_embeddings": "decoder"}, 'an XLM needs share_embeddings = "all" in [model]'),
        ({"encoder_layers": 2}, "model.encoder_layers is 2, but 3 there"),
        ({"decoder_layers": 4}, "model.decoder_layers is 4, but 3 there"),
        ({"model_dim": 16, "ffn_dim": 64}, "model.model_dim is 16, but 8 there"),
        ({"ffn_dim": 16}, "model.ffn_dim is 16, but 32 there"),
        ({"heads": 4}, "model.heads is 4, but 2 there"),
        ({"decoder_heads": 4}, "model.decoder_heads is 4, but 2 there"),
        ({"max_positions": 25}, "model.max_positions is 25, but 24 there"),
    ],
)
def test_networks_of_other_kinds(own: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"cannot start from {own}: {message}") + "$"):
        start_from_xlm(network(**options), str(own), SYMBOLS, LANGUAGES)  # type: ignore[arg-type]


def test_languages_that_do_not_fit(own: Path) -> None:
    message = "the network has embeddings of 0 languages, not of 2"
    with pytest.raises(UserError, match=message):
        start_from_xlm(network(languages=0), str(own), SYMBOLS, LANGUAGES)
    with pytest.raises(UserError, match="knows the languages en and fr, not 'de'"):
        start_from_xlm(network(), str(own), SYMBOLS, ("en", "de"))


def test_an_encoder_of_another_family(tmp_path: Path) -> None:
    path = make_encoder("bert", tmp_path)
    with pytest.raises(UserError, match=r"^cannot start from .*: it is no XLM, but 'bert'$"):
        start_from_xlm(network(), str(path), SYMBOLS, LANGUAGES)


def test_fewer_positions_are_the_first_ones(own: Path) -> None:
    model, xlm = network(max_positions=10), transformers.AutoModel.from_pretrained(own / "model")
    start_from_xlm(model, str(own), SYMBOLS, LANGUAGES)
    assert model.encoder.embed.positions is not None
    assert torch.equal(model.encoder.embed.positions.weight, xlm.position_embeddings.weight[:10])


def test_an_xlm_without_language_embeddings_leaves_ours_fresh(tmp_path: Path) -> None:
    path, model = make_hub_xlm(tmp_path, use_lang_emb=False), network(len(PAIRS))
    start = start_from_xlm(model, str(path), PAIRS.symbols, LANGUAGES)
    fresh = {name for name in start.fresh if "cross_attention" not in name}
    assert fresh == {f"{side}.embed.languages.weight" for side in ("encoder", "decoder")}


def test_attention_to_a_pretrained_encoder_starts_fresh(own: Path) -> None:
    model = network(fusion=FusionConfig())
    start = start_from_xlm(model, str(own), SYMBOLS, LANGUAGES)
    assert all("cross_attention" in name or "bert_attention" in name for name in start.fresh)
    assert any("bert_attention" in name for name in start.fresh)
    assert model.encoder.embed.tokens.embedding_dim == DIM
