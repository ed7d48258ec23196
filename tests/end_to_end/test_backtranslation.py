"""Generation as its users run it: as a process, which may be killed at any moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.tiny_run import make_run

LINES = 9000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a RUN and monolingual text."""
    folder = tmp_path_factory.mktemp("generation")
    make_run(folder / "run")
    random = Random(1)
    words = [f"w{number}" for number in range(36)]
    lines = [" ".join(random.choices(words, k=random.randrange(9))) for _ in range(LINES)]
    (folder / "mono.en").write_text("".join(f"{line}\n" for line in lines))
    return folder


def start(folder: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "backtranslation", "generate", str(folder / "run")]
    command += ["--mono", str(folder / "mono.en"), "--out", str(out), "--max-length-b", "6"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--engine", "torch", "--quiet", *options],
        env=environment,
        stderr=subprocess.DEVNULL,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_killed_ten_times_it_ends_as_if_undisturbed(folder: Path, tmp_path: Path) -> None:
    options = ("--shards", "2", "--sampling", "topk:5", "--noise-drop", "0.1")
    began = time.monotonic()
    undisturbed = start(folder, tmp_path / "undisturbed", *options)
    assert undisturbed.wait() == 0
    seconds = time.monotonic() - began
    random, killed = Random(2), 0
    for _ in range(10):
        process = start(folder, tmp_path / "killed", *options)
        time.sleep(seconds * random.uniform(0.3, 0.7))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 5
    assert start(folder, tmp_path / "killed", *options).wait() == 0
    assert files(tmp_path / "killed") == files(tmp_path / "undisturbed")


@pytest.mark.slow
def test_processes_share_the_shards_and_the_last_one_joins_them(
    folder: Path, tmp_path: Path
) -> None:
    assert start(folder, tmp_path / "whole").wait() == 0
    processes = [
        start(folder, tmp_path / "parts", "--shards", "3", "--shard", str(number))
        for number in (1, 2, 3)
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    name = "synthetic.de"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Two at one shard: the second is told so, unless the first is done by then.
    first, second = (start(folder, tmp_path / "both") for _ in range(2))
    assert sorted([first.wait(), second.wait()]) in ([0, 0], [0, 2])
    assert (tmp_path / "both" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_workers_of_ray_give_the_same(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert start(folder, tmp_path / "whole").wait() == 0
    assert start(folder, tmp_path / "ray", "--ray", "2", "--shards", "3").wait() == 0
    name = "synthetic.de"
    assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
