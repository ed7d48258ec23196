"""Several processes train as one does."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bertfused.checkpoint import read_tensors
from tests.end_to_end.children import finish, start
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import fail, write_recipe

# An epoch is 5 batches, so its last step has one batch only and leaves the second process idle.
TRAIN = {"max_steps": 7, "validate_every": 5, "log_every": 2, "accumulate": 2}


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def train(
    folder: Path, *arguments: object, before: dict[int, Callable[[], object]] | None = None
) -> list[int]:
    """Train in two processes; return their exit statuses."""
    port = str(free_port())
    processes = [
        start(
            folder / f"log.{rank}",
            "bertfused train",
            *arguments,
            before=(before or {}).get(rank),
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]
    return [finish(process) for process in processes]


def test_probe(small: Small, tmp_path: Path) -> None:
    fusion = {"encoder": str(small.bert), "drop_net": 0.6}
    recipe = write_recipe(tmp_path / "r.toml", {"train": TRAIN, "fusion": fusion, "model": {"dropout": 0.2}, "optim": {"clip_norm": 1.0}})
    args = [recipe, "--data", small.data, "--init", small.plain, "--out"]
    t=time.time()
    assert finish(start(tmp_path / "log", "bertfused train", *args, tmp_path / "one")) == 0, (tmp_path/"log").read_text()
    print(time.time()-t); t=time.time()
    assert train(tmp_path, *args, tmp_path / "two") == [0, 0], (tmp_path/"log.0").read_text()+ (tmp_path/"log.1").read_text()
    print(time.time()-t)
    one = read_tensors(tmp_path/"one"/"checkpoints"/"step-7"/"model.safetensors")
    two = read_tensors(tmp_path/"two"/"checkpoints"/"step-7"/"model.safetensors")
    for n in one:
        print(n, float((one[n]-two[n]).abs().max()))
    print((tmp_path/"one/metrics.jsonl").read_text())
    print((tmp_path/"two/metrics.jsonl").read_text())
    print((tmp_path/"log.1").read_text())
