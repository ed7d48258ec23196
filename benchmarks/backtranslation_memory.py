"""Does back-translation need more memory for more text?

Its stages run on texts of 10,000 to 1,000,000 short lines, each in a process of its own, whose
resident memory is taken after every block:

- generate, with an engine that only renames words, so that all it does is read and write; with a
  tiny model without training, greedily, in CTranslate2 and in our decoder;
- filter, which remembers all pairs to find duplicates, and so has to grow;
- mix, with noise, and prepare, of what the filter kept.

The claim: after the first tenth of the lines a stage, the filter excepted, gets no more than 16 MiB
larger, and ten times the lines raise its peak by no more than that. It is refuted by a stage that
does; what the filter takes for each pair is measured, and the claim for it is 160 bytes at most.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import tomli_w
import torch
from common import REPOSITORY, command, publish, table

from backtranslation.config import FilterConfig, NoiseConfig
from backtranslation.engines import Engine
from backtranslation.filters import filter_pairs
from backtranslation.generate import Generation, generate
from backtranslation.mix import mix
from backtranslation.plots import load_pyplot
from backtranslation.shards import Translated, read_generated
from bertfused.config import Recipe, SearchConfig, load_recipe
from bertfused.console import keep_freed_memory
from bertfused.prepare import prepare
from bertfused.text import open_output

WORDS = 1000
BOUND = 16.0  # MiB
FILTER_BOUND = 160  # bytes a pair
STAGES = (
    "generate, no model",
    "generate, CTranslate2",
    "generate, torch",
    "filter",
    "mix, prepare",
)
GREEDY = SearchConfig(beam_size=1, max_length_b=8)  # a model without training never ends

MODEL = {
    "subwords": {"kind": "words", "shared": False},
    "model": {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "model_dim": 32,
        "ffn_dim": 32,
        "heads": 2,
        "share_embeddings": "none",
    },
    "train": {"max_steps": 1, "validate_bleu": False},
}


def resident() -> float:
    """Return the memory this process has, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def peak() -> float:
    """Return the most it has had, in MiB; unlike rusage's, not that of the process it came from."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@dataclass
class Samples:
    """Resident memory by the lines done."""

    lines: list[int] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def add(self, lines: int) -> None:
        self.lines.append(lines + (self.lines[-1] if self.lines else 0))
        self.mib.append(resident())


class Renames:
    """An engine that writes v7 for w7."""

    name = "none"

    def translate(self, lines: Sequence[str], first_line: int) -> Translated:
        return Translated([line.replace("w", "v") for line in lines], Counter())


class WithoutModel(Generation):
    """A generation whose model is not asked."""

    def open_engine(self) -> Engine:
        return Renames()


def mono(folder: Path, lines: int) -> Path:
    """Write a text of lines of three to eight words: w17 w932 w4."""
    path = folder / f"mono.{lines}.de"
    if not path.exists():
        words, random = [f"w{i}" for i in range(WORDS)], Random(1)
        with open_output(path) as writer:
            for _ in range(lines):
                writer.write_line(" ".join(random.choices(words, k=random.randrange(3, 9))))
    return path


def write_recipe(folder: Path, source: str, target: str) -> Path:
    """Write a recipe, and a parallel text that has every word twice."""
    for language, letter in (("de", "w"), ("en", "v")):
        words = [f"{letter}{i} {letter}{WORDS - 1 - i}\n" for i in range(WORDS)]
        (folder / f"train.{language}").write_text("".join(words))
    files = {"source": str(folder / f"train.{source}"), "target": str(folder / f"train.{target}")}
    data = {"source": source, "target": target, "train": [files], "dev": files}
    path = folder / f"{source}-{target}.toml"
    path.write_text(tomli_w.dumps({"data": data, **MODEL}))
    return path


def tiny_run(folder: Path) -> Path:
    """Return a RUN from de to en, w to v."""
    data, run = folder / "reverse-data", folder / "reverse"
    if not (run / "report.md").exists():
        recipe = write_recipe(folder, "de", "en")
        command("prepare", recipe, "--out", data, "--quiet")
        command("train", recipe, "--data", data, "--out", run, "--quiet", "--resume")
    return run


def do(stage: str, folder: Path, lines: int, samples: Samples) -> None:
    """Do one stage; ``folder`` has what the stages before it wrote."""
    text, run = mono(folder, lines), folder / "reverse"
    generated, filtered = folder / f"generated.{lines}", folder / f"filtered.{lines}"
    if stage == "filter":
        synthetic = read_generated(generated, text)
        config, languages = FilterConfig(), synthetic.languages
        filter_pairs(synthetic.text, text, filtered, config, languages, progress=samples.add)
        return
    if stage == "mix, prepare":
        recipe = load_recipe(folder / "en-de.toml", Recipe)
        noise = NoiseConfig(drop=0.1, blank=0.1, swap=3)
        mixed = load_recipe(
            mix(recipe, [filtered], folder / f"mixed.{lines}", upsample=2.0, noise=noise), Recipe
        )

        def progress(split: str, pairs: int) -> None:
            samples.add(pairs)

        prepare(mixed, folder / f"data.{lines}", progress=progress)
        return
    engine = stage.rpartition(" ")[2].lower()
    out = generated if engine == "model" else folder / f"{engine}.{lines}"
    generation = (
        WithoutModel(run, text, GREEDY)
        if engine == "model"
        else Generation(run, text, GREEDY, engine=engine)
    )
    generate(generation, generation.folder(out, 7), progress=samples.add)


def measure(stage: str, folder: Path, lines: int) -> dict[str, Any]:
    """Do a stage in a process of its own."""
    line = [sys.executable, __file__, "--folder", str(folder), "--stage", stage]
    done = subprocess.run(
        [*line, "--lines", str(lines)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{stage} of {lines} lines failed:\n{done.stderr}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def measured_here(stage: str, folder: Path, lines: int) -> dict[str, Any]:
    """Do a stage in this process; return its samples, 100 at most, and the figures about them."""
    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    samples, begin = Samples(), time.process_time()
    do(stage, folder, lines, samples)
    later = next(i for i, done in enumerate(samples.lines) if 10 * done >= samples.lines[-1])
    step = -(-len(samples.lines) // 100)
    return {
        "stage": stage,
        "lines": lines,
        "early": samples.mib[later],
        "late": max(samples.mib[later:]),
        "end": samples.mib[-1],
        "peak": peak(),
        "seconds": time.process_time() - begin,
        "samples": {"lines": samples.lines[::step], "mib": samples.mib[::step]},
    }


def claims(results: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Say what is claimed of the longest text, and whether it holds."""
    for stage in STAGES:
        *_, before, last = [result for result in results if result["stage"] == stage]
        if stage == "filter":
            pair = bytes_a_pair(before, last)
            yield f"filter: {pair:.0f} bytes a pair, at most {FILTER_BOUND}", pair <= FILTER_BOUND
            continue
        more, higher = last["late"] - last["early"], last["peak"] - before["peak"]
        yield f"{stage}: after a tenth of the lines {more:+.1f} MiB at most", more <= BOUND
        yield f"{stage}: ten times the lines, peak {higher:+.1f} MiB", higher <= BOUND


def bytes_a_pair(before: dict[str, Any], last: dict[str, Any]) -> float:
    """Return by how much the peak grew with each pair."""
    grown: float = (last["peak"] - before["peak"]) * 2**20
    return grown / (last["lines"] - before["lines"])


def report(results: list[dict[str, Any]], image: str) -> str:
    """Return the results as Markdown."""
    rows = []
    for result in results:
        mib = [f"{result[key]:.0f}" for key in ("early", "end", "late", "peak")]
        speed = result["lines"] / result["seconds"]
        rows.append([result["stage"], f"{result['lines']:,}", *mib, f"{speed:,.0f}"])
    header = ["stage", "lines", "a tenth done", "end", "most since", "peak", "lines a CPU second"]
    made = [[claim, "yes" if holds else "**no**"] for claim, holds in claims(results)]
    return "\n".join(
        [
            "## Memory of back-translation",
            "",
            "Resident memory in MiB, of which most is the libraries'; short lines, a tiny model, "
            "greedy search, one thread. Made by `benchmarks/backtranslation_memory.py`.",
            "",
            table(header, rows),
            "",
            table(["claim (16 MiB or less unless it says otherwise)", "holds"], made),
            "",
            f"![Memory by the lines done]({image})",
        ]
    )


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the memory of each stage on its longest text."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for stage in STAGES:
        *_, last = [result for result in results if result["stage"] == stage]
        lines, mib = last["samples"]["lines"], last["samples"]["mib"]
        label = f"{stage} ({last['lines']:,} lines)"
        axes.plot([100 * done / lines[-1] for done in lines], mib, label=label)
    axes.set_xlabel("% of the lines")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    """Run the benchmark, or with --stage one stage of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = REPOSITORY / "docs" / "images"
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / Path(__file__).stem)
    parser.add_argument("--plots", type=Path, default=images, help="where the plot goes")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.stage:
        print(json.dumps(measured_here(arguments.stage, folder, arguments.lines)))
        return
    folder.mkdir(parents=True, exist_ok=True)
    tiny_run(folder)
    write_recipe(folder, "en", "de")
    sizes = (40, 400) if arguments.quick else (10_000, 100_000, 1_000_000)
    results = []
    for stage in STAGES:
        results += [kept(folder, stage, lines) for lines in sizes]
    name = f"{Path(__file__).stem}.png"
    plot(results, arguments.plots / name)
    text = report(results, f"images/{name}")
    publish("backtranslation-memory", text, {"stages": results}, folder, quick=arguments.quick)


def kept(folder: Path, stage: str, lines: int) -> dict[str, Any]:
    """Measure a stage unless it was measured before."""
    path = folder / f"{stage.replace(', ', '-').replace(' ', '-')}.{lines}.json"
    if not path.exists():
        path.write_text(json.dumps(measure(stage, folder, lines)))
    measured: dict[str, Any] = json.loads(path.read_text())
    return measured


if __name__ == "__main__":
    main()
