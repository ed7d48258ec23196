"""Are training and beam search faster than fairseq's, with the same model on the same data?

One thread, CPU seconds of whole processes less their start-up: training for two numbers of
updates, generation of a small and a large part of the dev set, and the differences. Both read the
same DATA folder (ours is in fairseq's format) and decode with the same weights (``bertfused export
fairseq``); the share of equal translations is printed. Training tokens are real target tokens,
never padding. Ours and fairseq's take turns; ratios are of one turn each, the median is quoted.

The claim, training at least 2 times and beam-5 decoding at least 3 times as fast, is refuted by a
smaller median ratio. Ours trains in its default precision (bf16 products where the processor has
them) and in fp32; both ratios are printed.

fairseq is the wheel ve-fairseq 0.12.3 in an environment of its own: give its Python.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import REPOSITORY, command, publish, spread, table

from bertfused.config import Recipe, load_recipe
from bertfused.text import read_lines

# What makes fairseq run on a current torch, and lose no sentence.
ALWAYS = [
    "--cpu",
    "--num-workers",
    "0",
    "--data-buffer-size",
    "0",
    "--required-batch-size-multiple",
    "1",
]
PLUGIN = "import argparse, torch\ntorch.serialization.add_safe_globals([argparse.Namespace])\n"


def cpu_seconds(line: list[str]) -> tuple[float, str]:
    """Run a program on one thread; return its CPU seconds and what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        sys.exit(f"{' '.join(line)} failed:\n{printed[-2000:]}")
    return usage.ru_utime + usage.ru_stime, printed


class Sides:
    """Both programs on one DATA folder and one plain RUN."""

    def __init__(self, fairseq: Path, data: Path, run: Path, folder: Path) -> None:
        self.fairseq, self.data, self.run, self.folder = fairseq, data, run, folder
        self.config = load_recipe(run / "config.toml", Recipe)
        (folder / "plugin").mkdir(exist_ok=True)
        (folder / "plugin" / "__init__.py").write_text(PLUGIN)
        if not (folder / "exported").exists():
            command("export", "fairseq", run, "--out", folder / "exported", "--quiet")
        # fairseq reads its splits by name, without the text beside them.
        self.source = data / "valid.en-de.raw.en"

    def train_theirs(self, updates: int) -> tuple[float, float]:
        """Train with fairseq; return CPU seconds and target tokens."""
        model, optim = self.config.model, self.config.optim
        options = {
            "arch": "transformer",
            "encoder-layers": model.encoder_layers,
            "decoder-layers": model.decoder_layers,
            "encoder-embed-dim": model.model_dim,
            "decoder-embed-dim": model.model_dim,
            "encoder-ffn-embed-dim": model.ffn_dim,
            "decoder-ffn-embed-dim": model.ffn_dim,
            "encoder-attention-heads": model.heads,
            "decoder-attention-heads": model.heads,
            "dropout": model.dropout,
            "optimizer": "adam",
            "lr": optim.lr,
            "criterion": "label_smoothed_cross_entropy",
            "label-smoothing": optim.label_smoothing,
            "max-tokens": self.config.train.batch_tokens,
            "max-update": updates,
            "log-format": "json",
            "log-interval": 5,
        }
        line = [str(self.fairseq.parent / "fairseq-train"), str(self.data), "-s", "en", "-t", "de"]
        for key, value in options.items():
            line += [f"--{key}", str(value)]
        line += ["--share-all-embeddings", "--no-save", "--disable-validation", *ALWAYS]
        seconds, printed = cpu_seconds([*line, "--user-dir", str(self.folder / "plugin")])
        tokens = [float(found) for found in re.findall(r'train_inner.*"wpb": "([\d.]+)"', printed)]
        return seconds, 5 * sum(tokens)

    def train_ours(self, updates: int, precision: str) -> tuple[float, float]:
        """Train with ours; return CPU seconds and target tokens."""
        line = [sys.executable, str(Path(__file__)), "--steps", str(updates), precision]
        seconds, printed = cpu_seconds([*line, str(self.run / "config.toml"), str(self.data)])
        return seconds, float(printed.split()[-1])

    def decode_theirs(self, lines: int) -> tuple[float, list[str]]:
        """Generate with fairseq from the first lines of the dev set's ids."""
        part = self.folder / f"part{lines}"
        if not part.exists():
            self._part(part, lines)
        line = [str(self.fairseq.parent / "fairseq-generate"), str(part), "-s", "en", "-t", "de"]
        line += ["--path", str(self.folder / "exported" / "checkpoint.pt"), "--beam", "5"]
        line += ["--gen-subset", "valid", "--max-tokens", "4096", *ALWAYS]
        seconds, printed = cpu_seconds([*line, "--user-dir", str(self.folder / "plugin")])
        found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", printed, re.MULTILINE)
        ordered = [tokens for _, tokens in sorted((int(i), tokens) for i, tokens in found)]
        return seconds, ordered

    def decode_ours(self, lines: int) -> tuple[float, list[str]]:
        """Translate the same lines with ours."""
        text, output = self.folder / f"{lines}.en", self.folder / f"{lines}.jsonl"
        text.write_text("".join(f"{s}\n" for s in list(read_lines(self.source))[:lines]))
        line = [sys.executable, "-m", "bertfused", "translate", str(self.run), "--quiet"]
        line += ["--input", str(text), "--output", str(output), "--format", "jsonl"]
        seconds, _ = cpu_seconds([*line, "--device", "cpu"])
        records = [json.loads(record) for record in read_lines(output)]
        return seconds, [" ".join(record["hypotheses"][0]["tokens"]) for record in records]

    def _part(self, part: Path, lines: int) -> None:
        from bertfused.data import DataFolder
        from bertfused.store import IdStoreWriter

        part.mkdir()
        split = DataFolder.open(self.data).split("dev")
        for language, store in (("en", split.source), ("de", split.target)):
            with IdStoreWriter(part / f"valid.en-de.{language}", 10_000) as writer:
                for i in range(lines):
                    writer.append(store[i])
            name = f"dict.{language}.txt"
            (part / name).write_bytes((self.data / name).read_bytes())


def steps_of_ours(updates: int, precision: str, config: Path, data: Path) -> None:
    """Do some updates of a freshly built model and print its number of target tokens."""
    import itertools

    import torch

    from bertfused.console import keep_freed_memory
    from bertfused.data import DataFolder
    from bertfused.fit import build_trainer, examples
    from bertfused.training import Place, steps

    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    overrides = [f"train.precision={precision}", "fusion=none"]
    recipe = load_recipe(config, Recipe, overrides)
    folder = DataFolder.open(data)
    trainer, _, _ = build_trainer(recipe, folder)
    training = examples(folder, "train", None)
    tokens = 0
    stream = steps(
        training,
        batch_tokens=recipe.train.batch_tokens,
        accumulate=1,
        seed=1,
        start=Place(),
    )
    for number, step in enumerate(itertools.islice(stream, updates), start=1):
        tokens += trainer.update(training, step, number).tokens
    print(tokens)


def speed(measure: Callable[[int], tuple[float, float]], small: int, large: int) -> float:
    """Return work per CPU second between two amounts of work, so that start-up drops out."""
    (short, little), (long, much) = measure(small), measure(large)
    return (much - little) / (long - short)


def compare(sides: Sides, turns: int, updates: int, lines: int) -> dict[str, Any]:
    """Let both take turns."""
    results: dict[str, Any] = {"training": [], "training_fp32": [], "decoding": []}
    theirs, ours = sides.decode_theirs(lines)[1], sides.decode_ours(lines)[1]
    same = sum(a == b for a, b in zip(theirs, ours, strict=True))
    results["equal_translations"] = f"{same} of {lines}"
    for _ in range(turns):
        fairseq = speed(sides.train_theirs, 5, 5 + updates)
        for key, precision in (("training", "auto"), ("training_fp32", "fp32")):
            own = speed(lambda n, p=precision: sides.train_ours(n, p), 5, 5 + updates)
            results[key].append({"fairseq": fairseq, "ours": own, "ratio": own / fairseq})
        small = lines // 10
        fairseq = speed(lambda n: (sides.decode_theirs(n)[0], float(n)), small, lines)
        own = speed(lambda n: (sides.decode_ours(n)[0], float(n)), small, lines)
        results["decoding"].append({"fairseq": fairseq, "ours": own, "ratio": own / fairseq})
    return results


def report(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = []
    for key, unit in (
        ("training", "target tokens"),
        ("training_fp32", "target tokens"),
        ("decoding", "sentences"),
    ):
        turns = results[key]
        medians = [statistics.median(t[side] for t in turns) for side in ("fairseq", "ours")]
        ratios = spread([t["ratio"] for t in turns])
        rows.append([key.replace("_", ", "), unit, *(f"{m:,.0f}" for m in medians), ratios])
    return "\n".join(
        [
            "## Training and beam search: ours and fairseq's",
            "",
            "The same plain model and data, one thread; medians, and the ratio's median and spread "
            f"over {len(results['training'])} turns. Ours trains in its default precision and in "
            "fp32, fairseq in fp32. Made by `benchmarks/speed_vs_fairseq.py`.",
            "",
            table(["", "a CPU second", "fairseq", "ours", "ours to fairseq's"], rows),
            "",
            f"Equal translations: {results['equal_translations']}.",
        ]
    )


def main() -> None:
    """Run the benchmark, or the part of it that runs in a process of its own."""
    if sys.argv[1:2] == ["--steps"]:
        updates, precision, config, data = sys.argv[2:]
        steps_of_ours(int(updates), precision, Path(config), Path(data))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fairseq-python", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="a trained plain RUN, En-De")
    parser.add_argument("--data", type=Path, required=True, help="its DATA folder")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "speed_vs_fairseq")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--lines", type=int, default=1000)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sides = Sides(arguments.fairseq_python, arguments.data, arguments.run, arguments.out)
    results = compare(sides, arguments.turns, arguments.updates, arguments.lines)
    publish("speed-vs-fairseq", report(results), results, arguments.out)


if __name__ == "__main__":
    main()
