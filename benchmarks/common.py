"""What the benchmark scripts share: where data is, how results are written, equal time."""

import fcntl
import gzip
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from bertfused.config import Recipe, load_recipe
from bertfused.console import keep_freed_memory
from bertfused.data import DataFolder
from bertfused.fit import SetUp, set_up
from bertfused.text import read_lines
from bertfused.training import Place, steps

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"

# Of a recipe: an NMT of about 2M parameters, and Multi30k as ``write_multi30k`` lays it out.
SMALL_MODEL = {
    "encoder_layers": 4,
    "decoder_layers": 4,
    "model_dim": 128,
    "ffn_dim": 256,
    "heads": 4,
}
MULTI30K = {
    "source": "en",
    "target": "de",
    "train": [{"source": "train.en", "target": "train.de"}],
    "dev": {"source": "val.en", "target": "val.de"},
}


def shared_data(name: str) -> Path:
    """Return a folder of ../shared/data, or stop with a sentence where it is absent."""
    path = SHARED / "data" / name
    if not path.exists():
        sys.exit(f"this benchmark reads ../shared/data/{name}, which is absent here")
    return path


def write_multi30k(folder: Path, splits: Mapping[str, int | None]) -> None:
    """Write the first pairs of splits of Multi30k En-De as text; None: all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        for language in ("en", "de"):
            packed = shared_data("multi30k") / f"{split}.{language}.gz"
            text = gzip.decompress(packed.read_bytes()).split(b"\n")[:-1][:pairs]
            (folder / f"{split}.{language}").write_bytes(b"\n".join(text) + b"\n")


def text_to_translate(source: Path | None, lines: int) -> list[str]:
    """Return the first lines that are not blank of a file, or of Multi30k's English test set."""
    source = source or shared_data("multi30k") / "test_2016_flickr.en.gz"
    return [line for line in read_lines(source) if line.strip()][:lines]


def command(*arguments: object, module: str = "bertfused") -> str:
    """Run one of our commands on one thread and return what it printed.

    A failure stops the benchmark with the command's own words.
    """
    line = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def side_by_side(jobs: int, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run tasks, ``jobs`` at a time; results in order."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda task: task(), tasks))


def facts() -> dict[str, Any]:
    """Return what a figure depends on besides the script: versions, hardware, commit."""
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor,
        "cores": os.cpu_count(),
    }


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write one JSON file with the facts beside the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"facts": facts(), **results}, indent=1) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def update_section(document: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of a section of a document, or append it."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text.strip()}\n{end}"
    old = document.read_text() if document.exists() else "# Results\n"
    if begin in old:
        before, _, rest = old.partition(begin)
        document.write_text(before + block + rest.partition(end)[2])
    else:
        document.write_text(f"{old.rstrip()}\n\n{block}\n")


def publish(
    section: str, text: str, results: Mapping[str, Any], out: Path, *, quick: bool = False
) -> None:
    """Print a report, keep its figures in ``out``, and make it a section of docs/results.md."""
    print(text)
    write_results(out / "results.json", results)
    if not quick:
        update_section(REPOSITORY / "docs" / "results.md", section, text)


def spread(values: Sequence[float]) -> str:
    """Write the median of some values, and in brackets their least and greatest.

    >>> spread([1.0, 4.0, 2.0])
    '2.00 (1.00 to 4.00)'
    """
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def peak_memory() -> float:
    """Return the most memory this process has had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(frozen=True)
class SmallModels:
    """Plain and fused models of a part of Multi30k En-De: to measure speed with, not quality.

    Each is trained by the commands once and kept under ``folder``, the fused one from the plain.

    Args:
        steps: Updates of each.
    """

    folder: Path
    pairs: int
    vocabulary: int
    steps: int
    encoder: str = "minilm"
    layer: int = 3

    def recipe(self) -> Path:
        """Write the recipe of the fused model."""
        write_multi30k(self.folder, {"train": self.pairs, "val": min(self.pairs, 200)})
        sections: dict[str, Any] = {
            "data": MULTI30K,
            "subwords": {"size": self.vocabulary},
            "model": {**SMALL_MODEL, "dropout": 0.2},
            "fusion": {"encoder": self.encoder, "layer": self.layer, "drop_net": 0.0},
            "optim": {"lr": 3e-3, "warmup_steps": max(self.steps // 8, 1), "schedule": "linear"},
            "train": {
                "batch_tokens": 1024,
                "max_steps": self.steps,
                "validate_every": self.steps,
                "validate_bleu": False,
            },
        }
        path = self.folder / "recipe.toml"
        path.write_text(tomli_w.dumps(sections))
        return path

    def data(self) -> Path:
        """Return the DATA folder, with cached states of the encoder."""
        data = self.folder / "data"
        if not (data / "features").exists():
            command("prepare", self.recipe(), "--out", data, "--quiet")
            options = ("--encoder", self.encoder, "--layer", self.layer, "--quiet")
            command("cache-features", data, *options)
        return data

    def plain(self) -> Path:
        """Return the RUN of the plain model."""
        return self._train("plain", "--set", "fusion=none")

    def fused(self) -> Path:
        """Return the RUN of the fused model."""
        return self._train("fused", "--init", self.plain())

    def _train(self, name: str, *options: object) -> Path:
        out = self.folder / name
        if not (out / "report.md").exists():
            given = ("--data", self.data(), "--out", out, "--quiet", "--resume", *options)
            command("train", self.recipe(), *given)
        return out


def timed(mark: Path, task: Callable[[], object]) -> float:
    """Do a task in child processes once and keep their CPU seconds in a file; return them."""
    if not mark.exists():
        begin = children_seconds()
        task()
        mark.write_text(str(children_seconds() - begin))
    return float(mark.read_text())


def children_seconds() -> float:
    """Return the processor's seconds of the ended processes that this one started."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_step(
    recipe: Path,
    schema: type[Recipe],
    data: Path,
    *,
    set_up: SetUp = set_up,
    init: Path | None = None,
) -> float:
    """Time updates in this process's CPU seconds; the mean of 30 after 10 that are not counted.

    Not the median: a model may do other work in some updates, as CADec does that samples drafts.

    Args:
        set_up: Builds what is trained, from a RUN ``init`` if there is one.
    """
    torch.set_num_threads(1)
    keep_freed_memory()  # as every command does
    loaded = load_recipe(recipe, schema)
    setup = set_up(loaded, DataFolder.open(data), init, torch.device("cpu"))
    tokens = loaded.train.batch_tokens
    updates = steps(setup.train, batch_tokens=tokens, accumulate=1, seed=1, start=Place())
    seconds = []
    for number, step in enumerate(itertools.islice(updates, 40), start=1):
        begin = time.process_time()
        setup.trainer.update(setup.train, step, number)
        seconds.append(time.process_time() - begin)
    return statistics.mean(seconds[10:])


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process after the other do something in a folder; make it if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
