"""How much synthetic text is good? 0, 1, 2 and 5 times the real pairs (Zhu et al., 2020, table 12).

The paper's IWSLT'14 En-De model gains from 1M and 2M back-translated sentences and loses from 15M
on (160,000 real pairs). Here the synthetic pairs are those of the Ro-En chain, the first so many
of them; every model has the same settings, updates and subwords, real pairs pass once for each
time through the synthetic ones, and the best checkpoint is chosen on dev.

The claim, that some amount of synthetic text beats none, is refuted if no amount is significantly
better than 0 on the test set (paired bootstrap on BLEU, p < 0.05, with every seed that is run).
"""

import argparse
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

from common import REPOSITORY, command, publish, side_by_side, table

from backtranslation.plots import load_pyplot
from bertfused import metrics
from bertfused.config import Corpus, Recipe, load_recipe, write_recipe
from bertfused.text import count_lines, open_output, read_lines, sha256_file

IMAGES = REPOSITORY / "docs" / "images"


class Study:
    """Trainings on growing amounts of the synthetic pairs of a chain."""

    def __init__(self, chain: Path, folder: Path, steps: int, validate_every: int) -> None:
        self.folder = folder = folder / f"{steps}-{sha256_file(chain / 'bt.toml')[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = load_recipe(chain / "bt.toml", Recipe)
        self.real, self.synthetic = self.recipe.data.train
        self.pairs = count_lines(self.real.source)
        self.steps, self.validate_every = steps, validate_every

    def corpora(self, multiple: int) -> tuple[Corpus, ...]:
        """Return the real pairs, and so many times as many synthetic ones."""
        real = self.real.model_copy(update={"weight": 1.0})
        if not multiple:
            return (real,)
        paths = {}
        for side in ("source", "target"):
            path: Path = getattr(self.synthetic, side)
            paths[side] = self.folder / f"synthetic.{multiple}.{side}"
            lines = list(islice(read_lines(path), multiple * self.pairs))
            if len(lines) < multiple * self.pairs:
                raise SystemExit(f"{path} has too few lines for {multiple} times {self.pairs:,}")
            with open_output(paths[side]) as writer:
                for line in lines:
                    writer.write_line(line)
        return (real, self.synthetic.model_copy(update=paths))

    def run(self, multiple: int, seed: int) -> Path:
        """Train and translate the test set, unless that was done; returns the translations."""
        name = f"{multiple}x-seed{seed}"
        output = self.folder / f"{name}.hyp"
        if output.exists():
            return output
        data = self.recipe.data.model_copy(update={"train": self.corpora(multiple)})
        train = self.recipe.train.model_copy(
            update={"max_steps": self.steps, "validate_every": self.validate_every, "seed": seed}
        )
        path = self.folder / f"{name}.toml"
        write_recipe(path, self.recipe.model_copy(update={"data": data, "train": train}))
        prepared = self.folder / f"{name}-data"
        command("prepare", path, "--out", prepared, "--quiet")
        run = self.folder / name
        command("train", path, "--data", prepared, "--out", run, "--resume", "--quiet")
        source = data.test[0].source
        command("translate", run, "--input", source, "--output", output, "--quiet")
        return output

    def results(self, outputs: dict[tuple[int, int], Path]) -> list[dict[str, Any]]:
        """Score the translations, each against those of the model without synthetic pairs."""
        references = list(read_lines(self.recipe.data.test[0].target))
        texts = {key: list(read_lines(path)) for key, path in outputs.items()}
        found = []
        for (multiple, seed), lines in texts.items():
            systems = {"0x": texts[0, seed], f"{multiple}x": lines}
            if multiple:
                tested = metrics.paired_bootstrap(references, systems)
                own = [t for t in tested if t.system != "0x" and t.score.name == "BLEU"]
                bleu, p_value = own[0].score, own[0].p_value
            else:
                bleu, p_value = metrics.bleu(lines, references), None
            found.append(
                {
                    "multiple": multiple,
                    "seed": seed,
                    "bleu": bleu.value,
                    "p": p_value,
                    "signature": bleu.signature,
                }
            )
        return found


def report(study: Study, results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    rows = []
    for multiple in dict.fromkeys(own["multiple"] for own in results):
        own = [result for result in results if result["multiple"] == multiple]
        scores = ", ".join(f"{result['bleu']:.2f}" for result in own)
        p_values = ", ".join(f"{result['p']:.3f}" for result in own if result["p"] is not None)
        mean = statistics.mean(result["bleu"] for result in own)
        pairs = f"{study.pairs:,} + {multiple * study.pairs:,}"
        rows.append([f"{multiple}x", pairs, f"{mean:.2f}", scores, p_values])
    return "\n".join(
        [
            "## Ro-En: how much synthetic text",
            "",
            f"BLEU on the test set of RO-STS by real + synthetic pairs, {study.steps:,} updates "
            "each; p of a paired bootstrap against 0x, seed by seed. Made by "
            "`benchmarks/backtranslation_scaling.py` from the chain above.",
            "",
            table(["synthetic", "pairs", "BLEU", "each seed", "p"], rows),
            "",
            f"Signature: `{results[0]['signature']}`",
            "",
            "![BLEU by amount of synthetic text](images/backtranslation_scaling.png)",
        ]
    )


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw BLEU by the amount of synthetic text, a line a seed."""
    pyplot = load_pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(5, 3))
    for seed in dict.fromkeys(own["seed"] for own in results):
        own = [result for result in results if result["seed"] == seed]
        multiples = [result["multiple"] for result in own]
        axes.plot(multiples, [r["bleu"] for r in own], marker="o", label=f"seed {seed}")
        axes.set_xticks(multiples)
    axes.set_xlabel("synthetic pairs / real pairs")
    axes.set_ylabel("BLEU, test set")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = REPOSITORY / "runs" / "backtranslation_ro_en" / "full" / "chain"
    parser.add_argument("--chain", type=Path, default=default, help="a finished chain")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "backtranslation_scaling")
    parser.add_argument("--multiples", type=int, nargs="+", default=[0, 1, 2, 5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    arguments = parser.parse_args()
    if arguments.multiples[0] != 0:
        parser.error("--multiples begins with 0, which the others are tested against")
    steps = 2 if arguments.quick else arguments.steps
    study = Study(arguments.chain, arguments.out, steps, max(steps // 10, 1))
    order = [(multiple, seed) for seed in arguments.seeds for multiple in arguments.multiples]
    tasks = [lambda key=key: study.run(*key) for key in order]
    outputs = dict(zip(order, side_by_side(arguments.jobs, tasks), strict=True))
    results = study.results(outputs)
    images = arguments.out if arguments.quick else IMAGES
    plot(results, images / "backtranslation_scaling.png")
    found = {"steps": study.steps, "pairs": study.pairs, "results": results}
    text = report(study, results)
    publish("backtranslation-scaling", text, found, arguments.out, quick=arguments.quick)


if __name__ == "__main__":
    main()
