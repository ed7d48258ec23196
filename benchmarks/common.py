"""What the benchmark scripts share: where data is, how results are written, equal time."""

import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bertfused.config import Recipe, load_recipe
from bertfused.data import DataFolder
from bertfused.fit import build_trainer, examples
from bertfused.training import Place, steps

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


def shared_data(name: str) -> Path:
    """Return a folder of ../shared/data, or stop with a sentence where it is absent."""
    path = SHARED / "data" / name
    if not path.exists():
        sys.exit(f"this benchmark reads ../shared/data/{name}, which is absent here")
    return path


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


def timed(mark: Path, task: Callable[[], object]) -> float:
    """Do a task in child processes once and keep their CPU seconds in a file; return them."""
    if not mark.exists():
        begin = _children_seconds()
        task()
        mark.write_text(str(_children_seconds() - begin))
    return float(mark.read_text())


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_step(recipe: Path, schema: type[Recipe], data: Path) -> float:
    """Time updates of a freshly built model in this process's CPU seconds; the median of 30."""
    torch.set_num_threads(1)
    loaded = load_recipe(recipe, schema)
    folder = DataFolder.open(data)
    trainer, _, _ = build_trainer(loaded, folder)
    training = examples(folder, "train", trainer.module.encoder)
    tokens = loaded.train.batch_tokens
    updates = steps(training.lengths, batch_tokens=tokens, accumulate=1, seed=1, start=Place())
    seconds = []
    for number, step in enumerate(itertools.islice(updates, 40), start=1):
        begin = time.process_time()
        trainer.update(training, step, number)
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds[10:])
