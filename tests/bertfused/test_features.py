from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bertfused import features
from bertfused.batch import Example, collate
from bertfused.errors import UserError
from bertfused.features import FeatureCache, cache_folder, open_cache, write_cache
from bertfused.pretrained import PretrainedEncoder
from bertfused.store import IdStore, IdStoreWriter
from tests.tiny_encoders import LIMIT, make_encoder

TEXTS = ["a b", "the cat sat", "", "x", "on a mat 42", "abcdefghij " * 5]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PretrainedEncoder]:
    folder = make_encoder("bert", tmp_path_factory.mktemp("encoder") / "bert")
    return lambda *layer, **options: PretrainedEncoder(str(folder), *layer, **options)


def rows_of(encoder: PretrainedEncoder) -> list[list[int]]:
    """Ids of some sentences, every second one with a context; one is beyond the limit."""
    contexts = [["c d"] if i % 2 else [] for i in range(len(TEXTS))]
    return [own.ids for own in encoder.wordpieces.encode_batch(TEXTS, contexts)]


def store_of(prefix: Path, encoder: PretrainedEncoder, rows: list[list[int]]) -> IdStore:
    with IdStoreWriter(prefix, encoder.wordpieces.vocabulary_size) as writer:
        for row in rows:
            writer.append(row)
    return IdStore.open(prefix)


def online(encoder: PretrainedEncoder, row: list[int]) -> Tensor:
    """States of one sentence alone."""
    batch = collate([Example([2], bert=row)], encoder.bert_ids)
    assert batch.bert is not None
    assert batch.bert_mask is not None
    return encoder(batch.bert, batch.bert_mask, batch.bert_segments)[0]


@pytest.mark.parametrize("layer", [-1, 0, "average", "stochastic"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp16", 2e-3)])
def test_a_cache_holds_what_the_encoder_computes(
    tmp_path: Path,
    bert: Callable[..., PretrainedEncoder],
    layer: int | str,
    dtype: str,
    tolerance: float,
) -> None:
    """fp16 has 11 bits, and the states are below 4."""
    encoder = bert(layer, last_layers=2)
    rows = rows_of(encoder)
    assert max(map(len, rows)) > LIMIT
    store = store_of(tmp_path / "ids", encoder, rows)
    assert open_cache(tmp_path, encoder, "train") is None
    done: list[int] = []
    prefix = cache_folder(tmp_path, encoder, dtype) / "train"
    write_cache(store, encoder, prefix, dtype, batch_tokens=20, progress=done.append)
    assert sum(done) == len(rows)

    cache = open_cache(tmp_path, encoder, "train")
    assert cache is not None
    assert len(cache) == len(rows)
    for i, row in enumerate(rows):
        assert cache[i].dtype == {"fp32": torch.float32, "fp16": torch.float16}[dtype]
        assert cache[i].shape == (len(row), encoder.state_width)
        expected = online(encoder, row)
        torch.testing.assert_close(cache[i].float(), expected, rtol=0, atol=tolerance)


def test_a_batch_with_cached_states_is_that_with_online_ones(
    tmp_path: Path, bert: Callable[..., PretrainedEncoder]
) -> None:
    encoder = bert("stochastic", last_layers=3)
    rows = rows_of(encoder)
    prefix = cache_folder(tmp_path, encoder, "fp32") / "train"
    write_cache(store_of(tmp_path / "ids", encoder, rows), encoder, prefix, "fp32")
    cache = open_cache(tmp_path, encoder, "train")
    assert cache is not None
    chosen = [4, 0, 5]
    found = []
    for states in ([cache[i] for i in chosen], [None] * 3):
        examples = [
            Example([2], bert=rows[i], bert_states=own)
            for i, own in zip(chosen, states, strict=True)
        ]
        batch = encoder.attach(collate(examples, encoder.bert_ids), mask_special=False)
        assert batch.bert_mask is not None
        assert batch.bert_states is not None
        found.append(batch.bert_states[batch.bert_mask])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_many_examples_are_written_in_chunks(
    tmp_path: Path, bert: Callable[..., PretrainedEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_CHUNK", 4)
    encoder = bert()
    rows = rows_of(encoder)
    done: list[int] = []
    store = store_of(tmp_path / "ids", encoder, rows)
    write_cache(store, encoder, tmp_path / "cache" / "train", "fp32", progress=done.append)
    assert done == [4, 2]
    cache = FeatureCache(tmp_path / "cache" / "train", encoder.state_width, np.float32)
    for i, row in enumerate(rows):
        torch.testing.assert_close(cache[i], online(encoder, row), rtol=0, atol=1e-5)


def test_a_cache_belongs_to_one_encoder_and_one_way_to_use_it(
    tmp_path: Path, bert: Callable[..., PretrainedEncoder]
) -> None:
    other = make_encoder("bert", tmp_path / "other", seed=1)
    encoders = [
        bert(),
        bert(1),
        bert("average"),
        bert("stochastic", last_layers=2),
        bert("stochastic", last_layers=3),
        bert(max_wordpieces=10),
        bert(segments=False),
        PretrainedEncoder(str(other)),
    ]
    keys = [cache_folder(tmp_path, encoder, d) for encoder in encoders for d in ("fp16", "fp32")]
    assert len(set(keys)) == len(keys)
    assert {key.parent for key in keys} == {tmp_path / "features"}
    # the last layer is the same, however it is asked for; its name is not
    assert cache_folder(tmp_path, bert(), "fp32") == keys[1]


def test_fp32_is_preferred(tmp_path: Path, bert: Callable[..., PretrainedEncoder]) -> None:
    encoder = bert()
    store = store_of(tmp_path / "ids", encoder, rows_of(encoder))
    for dtype, expected in (("fp16", torch.float16), ("fp32", torch.float32)):
        write_cache(store, encoder, cache_folder(tmp_path, encoder, dtype) / "train", dtype)
        cache = open_cache(tmp_path, encoder, "train")
        assert cache is not None
        assert cache[0].dtype == expected
    assert open_cache(tmp_path, encoder, "valid") is None


def test_an_empty_split_has_an_empty_cache(
    tmp_path: Path, bert: Callable[..., PretrainedEncoder]
) -> None:
    encoder = bert()
    prefix = cache_folder(tmp_path, encoder, "fp32") / "test"
    write_cache(store_of(tmp_path / "ids", encoder, []), encoder, prefix, "fp32")
    cache = open_cache(tmp_path, encoder, "test")
    assert cache is not None
    assert len(cache) == 0


@pytest.mark.parametrize("change", [b"", b"\0\0", None])
def test_a_cache_of_the_wrong_size_is_refused(
    tmp_path: Path, bert: Callable[..., PretrainedEncoder], change: bytes | None
) -> None:
    encoder = bert()
    prefix = cache_folder(tmp_path, encoder, "fp32") / "train"
    write_cache(store_of(tmp_path / "ids", encoder, rows_of(encoder)), encoder, prefix, "fp32")
    data = prefix.with_suffix(".bin")
    content = data.read_bytes()
    data.write_bytes(content + change if change else content[:-4])
    with pytest.raises(UserError) as caught:
        open_cache(tmp_path, encoder, "train")
    assert str(caught.value) == f"{data} is damaged: its size does not fit train.idx"


def test_a_cache_without_its_states_is_refused(
    tmp_path: Path, bert: Callable[..., PretrainedEncoder]
) -> None:
    encoder = bert()
    prefix = cache_folder(tmp_path, encoder, "fp32") / "train"
    write_cache(store_of(tmp_path / "ids", encoder, rows_of(encoder)), encoder, prefix, "fp32")
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(UserError, match=r"train\.bin is missing, but train\.idx is there"):
        open_cache(tmp_path, encoder, "train")


def test_an_interrupted_cache_is_not_there(
    tmp_path: Path, bert: Callable[..., PretrainedEncoder]
) -> None:
    encoder = bert()
    store = store_of(tmp_path / "ids", encoder, rows_of(encoder))
    prefix = cache_folder(tmp_path, encoder, "fp32") / "train"

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_cache(store, encoder, prefix, "fp32", progress=interrupt)
    assert list(prefix.parent.iterdir()) == []
    assert open_cache(tmp_path, encoder, "train") is None
