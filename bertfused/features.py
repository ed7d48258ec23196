"""A cache of the frozen encoder's states: computed once, read from disk in every epoch.

One cache belongs to one DATA folder and one encoder: ``features/<key>/<split>.{bin,idx}`` where
the key is made of the encoder's fingerprint, its layers and the precision. The ``.bin`` file is
the states of all examples one after the other, the ``.idx`` file their lengths in wordpieces.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bertfused.batch import pad_ids, token_batches
from bertfused.config import CacheDtype
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.pretrained import PretrainedEncoder
from bertfused.progress import Bar, no_bar
from bertfused.store import IdStore
from bertfused.text import only_writer, replace_file

_logger = logging.getLogger(__name__)

DTYPES: dict[CacheDtype, type[np.floating]] = {"fp16": np.float16, "fp32": np.float32}
# Examples encoded before any of their states is written: the bound on memory.
_CHUNK = 2048


class FeatureCache:
    """States of one split, memory-mapped."""

    def __init__(self, prefix: Path, width: int, dtype: type[np.floating]) -> None:
        lengths = np.fromfile(prefix.with_suffix(".idx"), dtype=np.int32)
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        data = prefix.with_suffix(".bin")
        if not data.is_file():
            raise UserError(f"{data} is missing, but {prefix.name}.idx is there")
        if data.stat().st_size != self._starts[-1] * width * np.dtype(dtype).itemsize:
            raise UserError(f"{data} is damaged: its size does not fit {prefix.name}.idx")
        shape = (int(self._starts[-1]), width)
        self._states: NDArray[np.floating] = np.empty((0, width), dtype)
        if shape[0]:  # nothing cannot be mapped
            self._states = np.memmap(data, dtype=dtype, mode="r", shape=shape)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, i: int) -> Float[Tensor, "bert state_width"]:
        return torch.from_numpy(np.array(self._states[self._starts[i] : self._starts[i + 1]]))


def cache_folder(data: Path, encoder: PretrainedEncoder, dtype: CacheDtype) -> Path:
    """Return where the cache of this encoder lies in a DATA folder."""
    layers = f"{encoder.layer} {encoder.layer_numbers} {encoder.wordpieces.max_length}"
    key = f"{encoder.fingerprint} {layers} {encoder.uses_segments} {dtype}"
    return data / "features" / hashlib.sha256(key.encode()).hexdigest()[:16]


def open_cache(data: Path, encoder: PretrainedEncoder, split: str) -> FeatureCache | None:
    """Open the cache of a split if there is one, fp32 before fp16."""
    names: tuple[CacheDtype, ...] = ("fp32", "fp16")
    for name in names:
        prefix = cache_folder(data, encoder, name) / split
        if prefix.with_suffix(".idx").is_file():
            return FeatureCache(prefix, encoder.state_width, DTYPES[name])
    return None


def cache_features(
    data: DataFolder, encoder: PretrainedEncoder, dtype: CacheDtype, bar: Bar = no_bar
) -> None:
    """Write the caches of the training and dev sets of a DATA folder, unless they are there.

    Args:
        encoder: On the device where it is to run.
        dtype: Of the files.
        bar: Shows how many sentences are done.

    Raises:
        UserError: If the folder was not prepared for this encoder, or another process writes it.
    """
    made_with = data.report.encoder if data.report is not None else None
    with only_writer(data.path):
        for name in ("train", "dev"):
            split = data.split(name)
            if split.bert is None:
                raise UserError(f"{data.path} holds no ids for a pretrained encoder")
            if made_with is not None and made_with.fingerprint != encoder.wordpieces.fingerprint:
                raise UserError(
                    f"{data.path} was prepared for the encoder {made_with.name}, not {encoder.name}"
                )
            prefix = cache_folder(data.path, encoder, dtype) / split.prefix.name
            if prefix.with_suffix(".idx").is_file():
                _logger.info("%s is cached already", name)
                continue
            with bar(f"{name} sentences", len(split)) as advance:
                write_cache(split.bert, encoder, prefix, dtype, progress=advance)
            size = prefix.with_suffix(".bin").stat().st_size / 1e6
            _logger.info(
                "%s: %s sentences, %.1f MB in %s", name, f"{len(split):,}", size, prefix.parent
            )


def write_cache(
    store: IdStore,
    encoder: PretrainedEncoder,
    prefix: Path,
    dtype: CacheDtype,
    *,
    batch_tokens: int = 4096,
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Encode every example of a store and write its states.

    Args:
        store: The encoder's ids.
        prefix: Path of the two files without suffix; they appear when they are complete.
        dtype: Of the file.
        progress: Called with the number of examples done since the last call.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(prefix.with_suffix(".bin")) as handle:
        for start in range(0, len(store), _CHUNK):
            rows = [store[i] for i in range(start, min(start + _CHUNK, len(store)))]
            for states in encode_rows(rows, encoder, batch_tokens):
                handle.write(states.numpy().astype(DTYPES[dtype]).tobytes())
            progress(len(rows))
    with replace_file(prefix.with_suffix(".idx")) as handle:
        handle.write(np.asarray(store.sizes, dtype=np.int32).tobytes())


@torch.inference_mode()
def encode_rows(
    rows: list[NDArray[np.int64]], encoder: PretrainedEncoder, batch_tokens: int = 4096
) -> list[Float[Tensor, "bert state_width"]]:
    """Return the states of some examples, in fp32 on the CPU; ``rows`` are the encoder's ids."""
    ids = encoder.bert_ids
    lengths = np.array([len(row) for row in rows])
    states: list[Tensor] = [torch.empty(0)] * len(rows)
    device = next(encoder.parameters()).device
    for batch in token_batches([lengths], batch_tokens):
        bert, mask = pad_ids([rows[i] for i in batch], ids.pad)
        segments = None
        if ids.separator is not None:
            segments, _ = pad_ids([ids.segments(rows[i]) for i in batch], 0)
            segments = segments.to(device)
        output = encoder(bert.to(device), mask.to(device), segments).float().cpu()
        for row, i in enumerate(batch):
            states[i] = output[row, : lengths[i]]
    return states
