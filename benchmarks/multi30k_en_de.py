"""Does a frozen pretrained encoder help where bitext is short? Multi30k En-De, raw text.

Three systems on 3,000, 10,000 and all 29,000 training pairs:

- plain: an NMT of about 2M parameters, trained alone;
- control: the same NMT trained on for the same extra CPU time (warm), or a new one trained for
  the time of both together (scratch): the better of the two on dev;
- fused: the plain NMT with MiniLM fused into every layer, function-preserving start.

Control and fused get the same grid, the same CPU time a trial and the same number of trials;
settings and stopping points are chosen by dev loss, never on test. Equal time means equal CPU
seconds of updates on one thread: the cost of a step is measured for both and turned into a number
of steps, and the time to encode the training text once is taken off the fused system's share.

The claim is refuted if fused is not significantly better than the control at 3,000 and 10,000
pairs (paired bootstrap, p < 0.01), or is significantly worse at 29,000.

Scores: sacreBLEU on detokenised output against the raw reference, lower-cased, 13a, beam 5.
"""

import argparse
import itertools
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from common import (
    MULTI30K,
    REPOSITORY,
    SMALL_MODEL,
    command,
    measure_step,
    publish,
    side_by_side,
    table,
    timed,
    update_section,
    write_multi30k,
)

from bertfused import metrics
from bertfused.config import Recipe
from bertfused.text import read_lines

LAYER = 3  # the middle of MiniLM's six
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Size:
    """One amount of bitext: pairs, vocabulary, CPU seconds of the NMT and of each trial after."""

    pairs: int
    vocabulary: int
    base_seconds: float
    trial_seconds: float
    dropouts: tuple[float, ...]
    rates: tuple[float, ...]
    scratch: bool  # whether the control may also start from scratch, for the time of both
    new_lr_scale: float = 1.0  # of what fusion adds; the control has nothing of the kind
    tested: int | None = None


SIZES = (
    Size(3_000, 2_000, 100, 100, (0.3, 0.5), (1e-3, 2e-3), scratch=True),
    Size(10_000, 4_000, 150, 180, (0.2, 0.3), (2e-3,), scratch=True, new_lr_scale=3.0),
    Size(29_000, 6_000, 1_100, 400, (0.2,), (1e-3, 2e-3), scratch=False, new_lr_scale=3.0),
)
QUICK = (Size(200, 400, 2, 2, (0.3,), (1e-3,), scratch=False, tested=20),)


@dataclass(frozen=True)
class Trial:
    """One training: its system, setting and length."""

    system: str
    dropout: float
    rate: float
    steps: int
    seed: int = 1

    @property
    def name(self) -> str:
        return f"{self.system}-dropout{self.dropout}-lr{self.rate}-seed{self.seed}"


class Experiment:
    """All runs on one amount of bitext, each done once and kept under ``folder``."""

    def __init__(self, folder: Path, size: Size, jobs: int) -> None:
        self.folder = folder / str(size.pairs)
        self.size, self.jobs = size, jobs
        pairs = {"train": size.pairs, "val": size.tested, "test_2016_flickr": size.tested}
        write_multi30k(self.folder, pairs)

    def recipe(self, trial: Trial) -> Path:
        """Write the recipe of a trial."""
        sections: dict[str, Any] = {
            "data": MULTI30K,
            "subwords": {"size": self.size.vocabulary},
            "model": {**SMALL_MODEL, "dropout": trial.dropout},
            "optim": {
                "lr": trial.rate,
                "warmup_steps": min(600, max(trial.steps // 8, 1)),
                "schedule": "linear",
                "ema": 0.998,
            },
            "train": {
                "batch_tokens": 1024,
                "max_steps": trial.steps,
                "validate_every": math.ceil(trial.steps / 10),
                "validate_bleu": False,
                "log_every": 20,
                "seed": trial.seed,
                "keep_last": 1,
            },
        }
        if trial.system in ("fused", "data"):
            sections["fusion"] = {"encoder": "minilm", "layer": LAYER, "drop_net": 0.0}
            sections["optim"]["new_lr_scale"] = self.size.new_lr_scale
        path = self.folder / f"{trial.name}.toml"
        path.write_text(tomli_w.dumps(sections))
        return path

    def prepare(self) -> float:
        """Make the data and the feature cache; return the cache's CPU seconds."""
        recipe = self.recipe(Trial("data", 0.1, 1e-3, 1))
        command("prepare", recipe, "--out", self.folder / "data", "--quiet")
        options = ("--encoder", "minilm", "--layer", LAYER, "--quiet")
        return timed(
            self.folder / "cache-seconds",
            lambda: command("cache-features", self.folder / "data", *options),
        )

    def run(self, trial: Trial) -> dict[str, Any]:
        """Train, or read what an earlier call trained; return the best dev loss and its step."""
        out = self.folder / trial.name
        if not (out / "report.md").exists():
            arguments: list[object] = [self.recipe(trial), "--data", self.folder / "data"]
            arguments += ["--out", out, "--quiet", "--resume"]
            if trial.system in ("warm", "fused"):
                arguments += ["--init", self.base]
            command("train", *arguments)
        records = [json.loads(line) for line in read_lines(out / "metrics.jsonl")]
        curve = [(r["step"], r["valid_nll"]) for r in records if "valid_nll" in r]
        seconds = [r["seconds"] for r in records if "seconds" in r]
        step, nll = min(curve, key=lambda point: point[1])
        return {
            "trial": trial.name,
            "steps": max(record["step"] for record in records),
            "best_step": step,
            "dev_nll": nll,
            "seconds": seconds[-1] if seconds else 0.0,
            "curve": curve,
        }

    def translate(self, trial: Trial) -> Path:
        """Translate the test set with the best model of a trial."""
        output = self.folder / f"{trial.name}.hyp"
        if not output.exists():
            source = self.folder / "test_2016_flickr.en"
            run = self.folder / trial.name
            command("translate", run, "--input", source, "--output", output, "--quiet")
        return output

    @property
    def base(self) -> Path:
        return self.folder / self.plain.name

    plain: Trial

    def go(self) -> dict[str, Any]:
        """Run everything on this amount of bitext."""
        size = self.size
        cache_seconds = self.prepare()
        plain_cost, fused_cost = self.calibrate("plain"), self.calibrate("fused")
        steps = {"plain": round(size.base_seconds / plain_cost)}
        self.plain = Trial("plain", size.dropouts[0], 3e-3, steps["plain"])
        base = self.run(self.plain)
        steps["warm"] = round(size.trial_seconds / plain_cost)
        steps["scratch"] = steps["plain"] + steps["warm"]
        steps["fused"] = max(round((size.trial_seconds - cache_seconds) / fused_cost), 1)
        grid = list(itertools.product(size.dropouts, size.rates))
        trials = {
            system: [Trial(system, dropout, rate, steps[system]) for dropout, rate in grid]
            for system in ("warm", "fused")
        }
        trials["scratch"] = [
            Trial("scratch", dropout, 3e-3, steps["scratch"])
            for dropout in (size.dropouts if size.scratch else ())
        ]
        order = [trial for system in trials.values() for trial in system]
        done = dict(
            zip(
                order,
                side_by_side(self.jobs, [lambda t=t: self.run(t) for t in order]),
                strict=True,
            )
        )
        best = {
            "control": min(trials["warm"] + trials["scratch"], key=lambda t: done[t]["dev_nll"]),
            "fused": min(trials["fused"], key=lambda t: done[t]["dev_nll"]),
        }
        repeats = [replace(t, seed=seed) for t in best.values() for seed in SEEDS[1:]]
        side_by_side(self.jobs, [lambda t=t: self.run(t) for t in repeats])
        return {
            "pairs": size.pairs,
            "step_cost_ratio": fused_cost / plain_cost,
            "cache_seconds": cache_seconds,
            "plain": base,
            "trials": {system: [done[t] for t in own] for system, own in trials.items()},
            "best": {system: trial.name for system, trial in best.items()},
            "scores": self.scores(best),
        }

    def calibrate(self, system: str) -> float:
        """Return the seconds of one update of the plain or the fused model."""
        mark = self.folder / f"{system}-step-seconds"
        if not mark.exists():
            recipe = self.recipe(Trial(system, 0.3, 1e-3, 60))
            mark.write_text(str(measure_step(recipe, Recipe, self.folder / "data")))
        return float(mark.read_text())

    def scores(self, best: dict[str, Trial]) -> dict[str, Any]:
        """Score plain, and control and fused with three seeds; test fused against control."""
        references = list(read_lines(self.folder / "test_2016_flickr.de"))

        def score(trial: Trial) -> tuple[list[str], metrics.Score]:
            hypotheses = list(read_lines(self.translate(trial)))
            return hypotheses, metrics.bleu(hypotheses, references, lowercase=True)

        result: dict[str, Any] = {"plain": [score(self.plain)[1].value]}
        outputs: dict[str, list[list[str]]] = {}
        signature = ""
        for system, trial in best.items():
            found = [score(replace(trial, seed=seed)) for seed in SEEDS]
            outputs[system] = [hypotheses for hypotheses, _ in found]
            result[system] = [own.value for _, own in found]
            signature = found[0][1].signature
        result["p_values"] = []
        for control, fused in zip(outputs["control"], outputs["fused"], strict=True):
            systems = {"control": control, "fused": fused}
            tested = metrics.paired_bootstrap(references, systems, lowercase=True)
            result["p_values"] += [
                {"metric": own.score.name, "delta": own.delta, "p": own.p_value}
                for own in tested
                if own.system == "fused"
            ]
        result["signature"] = signature
        printed = command(
            *("evaluate", self.folder / best["fused"].name, "--json", "--shuffle-encoder"),
            *("--source", self.folder / "val.en", "--reference", self.folder / "val.de", "--quiet"),
        )
        result["encoder_use"] = json.loads(printed)["encoder_use"]
        return result


def with_seeds(values: list[float]) -> str:
    """Write a mean, and in brackets what each seed gave."""
    each = ", ".join(f"{value:.1f}" for value in values)
    return f"{statistics.mean(values):.1f} ({each})"


def report(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    rows = []
    for own in results:
        scores = own["scores"]
        bleu_tests = [t for t in scores["p_values"] if t["metric"].startswith("BLEU")]
        cells = [with_seeds(scores[system]) for system in ("plain", "control", "fused")]
        p_values = ", ".join(f"{t['p']:.3f}" for t in bleu_tests)
        rows.append(
            [
                f"{own['pairs']:,}",
                *cells,
                p_values,
                f"{scores['encoder_use']:.2f}",
                *own["best"].values(),
            ]
        )
    header = [
        "pairs",
        "plain",
        "control",
        "fused",
        "p",
        "encoder use (nats)",
        "control's setting",
        "fused's setting",
    ]
    lines = [
        "## Multi30k En-De: where a pretrained encoder pays",
        "",
        "BLEU on test_2016_flickr, mean over seeds (each seed); p of a paired bootstrap, fused "
        "against control, seed by seed. Made by `benchmarks/multi30k_en_de.py`.",
        "",
        table(header, rows),
        "",
        f"Signature: `{results[0]['scores']['signature']}`",
        "",
        "Trials (dev nats a token at the best checkpoint; same CPU time for each):",
        "",
    ]
    trials = [
        [f"{own['pairs']:,}", t["trial"], t["steps"], t["best_step"], f"{t['dev_nll']:.4f}"]
        for own in results
        for system in own["trials"].values()
        for t in (*system,)
    ]
    trials += [
        [
            f"{own['pairs']:,}",
            own["plain"]["trial"],
            own["plain"]["steps"],
            own["plain"]["best_step"],
            f"{own['plain']['dev_nll']:.4f}",
        ]
        for own in results
    ]
    lines.append(table(["pairs", "trial", "steps", "best step", "dev nats"], trials))
    ratios = ", ".join(f"{own['step_cost_ratio']:.2f}" for own in results)
    lines += ["", f"A fused step (cached states, both branches) costs {ratios} plain steps."]
    return "\n".join(lines)


def summary(results: list[dict[str, Any]]) -> str:
    """Return the table of the README."""
    rows = []
    for own in results:
        scores = own["scores"]
        means = [f"{statistics.mean(scores[s]):.1f}" for s in ("plain", "control", "fused")]
        rows.append([f"{own['pairs']:,}", *means, f"{scores['encoder_use']:.2f}"])
    header = [
        "training pairs",
        "plain NMT",
        "control",
        "MiniLM fused in",
        "nats a token lost with another sentence's states",
    ]
    return "\n".join(
        [
            "Multi30k English-German, BLEU on test_2016_flickr (lower-cased, 13a; mean of three "
            "seeds but for the plain NMT). The control is the plain NMT trained on, or a new one "
            "for the time of both where that was better on dev; the fused system starts from the "
            "plain NMT. Both take equal CPU time and are tuned on dev:",
            "",
            table(header, rows),
            "",
            "All figures are in [docs/results.md](docs/results.md), each with its signature, its "
            "significance and the script that made it.",
        ]
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "multi30k")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    parser.add_argument("--pairs", type=int, nargs="*", help="only these amounts of bitext")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else SIZES
    results = [
        Experiment(arguments.out, size, arguments.jobs).go()
        for size in sizes
        if not arguments.pairs or size.pairs in arguments.pairs
    ]
    own = {"results": results}
    publish("multi30k", report(results), own, arguments.out, quick=arguments.quick)
    if not arguments.quick:
        update_section(REPOSITORY / "README.md", "results", summary(results))


if __name__ == "__main__":
    main()
