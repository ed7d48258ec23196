"""Does the layer-wise model use the context that a phenomenon needs? Four contrastive suites.

In each suite of docs/suites.md one kind of context, and only one, tells right from wrong: the
previous German sentences for deixis and lexical cohesion, the English ones for both kinds of
ellipsis. On the text that goes with them, for each seed a sentence-level model (base) and, trained
on top of it from one recipe of docnmt/recipes each:

- main: layer-wise weighting and input-aware gating (Xu et al., 2020);
- its ablations: no gates, no layer weighting, source context only, target context only, and two
  other forms of the reset gate;
- baselines that read as many sentences: concatenation (2-to-2), Zhang et al. (2018), CADec.

The claims are refuted where, in any seed, the base is not exactly at chance in all suites; main is
under 95% in one; source only is not exactly at chance in deixis and lexical cohesion or under 95%
in the ellipses; or target only is under 95% in deixis and lexical cohesion. Target only may be
above chance in the ellipses: it reads German sentences as states of the frozen decoder, which
attended to the English ones and so can carry the verb that German leaves out.

What was found is kept run by run: several calls with other --seeds and --systems may go side by
side in one folder, and each reports on all that is there.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from common import REPOSITORY, one_at_a_time, publish, table, write_results

from bertfused.commands import train_model
from bertfused.config import load_recipe
from bertfused.console import keep_freed_memory
from bertfused.prepare import prepare
from docnmt.cli import MODE
from docnmt.config import DocumentRecipe
from docnmt.contrast import as_json, contrast
from docnmt.contrastive import read_contrastive
from docnmt.grammar import chance_level
from docnmt.layerwise import LayerwiseModel
from docnmt.on_base import ContextSystem
from docnmt.sequential import DocumentLineTranslator
from docnmt.suites import SIZES, SUITES, suite_file, write_suites
from docnmt.translate import AnyTranslator, as_read, load, score

RECIPES = REPOSITORY / "docnmt" / "recipes"
# By name, the recipe and what the table calls the system.
SYSTEMS = {
    "base": ("suites", "sentence-level"),
    "main": ("suites_layerwise", "main"),
    "no_gates": ("suites_no_gates", "main, no gates"),
    "no_layer_weighting": ("suites_no_layer_weighting", "main, no layer weighting"),
    "reset_add": ("suites_reset_add", "main, reset gate with addition"),
    "no_reset": ("suites_no_reset", "main, no reset gate"),
    "source_only": ("suites_source_only", "main, source context only"),
    "target_only": ("suites_target_only", "main, target context only"),
    "concatenation": ("suites_concatenation", "concatenation"),
    "zhang": ("suites_zhang", "Zhang et al."),
    "cadec": ("suites_cadec", "CADec"),
}
# Those that the claims are about, and the ablations of the paper.
NEEDED = ("main", "no_gates", "no_layer_weighting", "source_only", "target_only")
GERMAN, ENGLISH = ("deixis", "lexical cohesion"), ("VP ellipsis", "inflection ellipsis")
LEAST = 0.95
# Of training: so many that 1,500 steps pass through them less than twice.
DOCUMENTS = 8000


@dataclass(frozen=True)
class Claim:
    """What the accuracy of a system on some suites must be in every seed."""

    system: str
    suites: tuple[str, ...]
    at_chance: bool

    def holds(self, runs: Sequence[dict[str, Any]]) -> bool:
        """Look at the runs of the system."""
        found = [run["suites"][suite] for run in runs for suite in self.suites]
        if self.at_chance:
            return all(suite["accuracy"] == suite["chance"] for suite in found)
        return all(suite["accuracy"] >= LEAST for suite in found)

    def __str__(self) -> str:
        wanted = "exactly at chance" if self.at_chance else f"at least {LEAST:.0%}"
        return f"{SYSTEMS[self.system][1]}: {wanted} in {', '.join(self.suites)}"


CLAIMS = (
    Claim("base", (*GERMAN, *ENGLISH), True),
    Claim("main", (*GERMAN, *ENGLISH), False),
    Claim("source_only", GERMAN, True),
    Claim("source_only", ENGLISH, False),
    Claim("target_only", GERMAN, False),
)


@dataclass(frozen=True)
class Experiment:
    """All runs, each done once and kept under ``folder``.

    Args:
        sizes: Of text and suites.
        steps: Updates of every system on top of the base; None: as its recipe says.
        overrides: Further changes to all recipes.
    """

    folder: Path
    sizes: dict[str, int]
    steps: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def text(self) -> Path:
        return self.folder / "text"

    def recipe(self, system: str, seed: int) -> DocumentRecipe:
        """Read the recipe of a system for a seed."""
        path, overrides = RECIPES / f"{SYSTEMS[system][0]}.toml", [f"train.seed={seed}"]
        if self.steps is not None and system != "base":
            overrides.append(f"train.max_steps={self.steps}")
        overrides += self.overrides
        return load_recipe(path, DocumentRecipe, overrides, folder=self.text)

    def make_data(self) -> None:
        """Write text, suites and DATA; another call in the same folder waits for them."""
        with one_at_a_time(self.folder):
            data = self.folder / "data"
            if data.exists():
                return
            write_suites(self.text, seed=1, sizes=self.sizes)
            recipe, unfinished = self.recipe("base", 1), self.folder / "data.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            documents = MODE.documents(recipe)
            prepare(recipe, unfinished, reader=MODE.corpora(recipe), documents=documents)
            unfinished.rename(data)

    def run(self, system: str, seed: int) -> None:
        """Train and test one system, unless that was done."""
        done = self.folder / "found" / f"{system}-seed{seed}.json"
        recipe = self.recipe(system, seed)
        if done.exists():
            steps = json.loads(done.read_text())["steps"]
            if steps != recipe.train.max_steps:
                sys.exit(f"{done} is of {steps} steps, not {recipe.train.max_steps}; remove it")
            return
        out = self.folder / f"{system}-seed{seed}"
        init = None if system == "base" else self.folder / f"base-seed{seed}"
        resume = (out / "config.toml").exists()
        print(f"training {out}", file=sys.stderr, flush=True)
        train_model(MODE, recipe, self.folder / "data", out, init=init, resume=resume, quiet=True)
        translator = load(out, device="cpu")
        found = {
            "system": system,
            "seed": seed,
            "steps": recipe.train.max_steps,
            "suites": {suite: self.accuracies(translator, suite) for suite in SUITES},
            "layer_shares": layer_shares(translator),
        }
        write_results(done, found)

    def accuracies(self, translator: AnyTranslator, suite: str) -> dict[str, Any]:
        """Test a model on one suite."""
        items = read_contrastive(self.text / suite_file(suite))
        result = contrast(items, partial(score, translator), as_read=partial(as_read, translator))
        return {**as_json(suite, result), "chance": chance_level(items)}

    def found(self) -> dict[str, list[dict[str, Any]]]:
        """Return what all calls so far have found, by system and in the order of seeds."""
        runs = [json.loads(path.read_text()) for path in (self.folder / "found").glob("*.json")]
        runs.sort(key=lambda run: run["seed"])
        by_system = {name: [run for run in runs if run["system"] == name] for name in SYSTEMS}
        return {name: found for name, found in by_system.items() if found}


def layer_shares(translator: AnyTranslator) -> list[float] | None:
    """Return the learned shares of the encoder's layers, 0 being the embeddings."""
    system = translator.system if isinstance(translator, DocumentLineTranslator) else None
    model = system.model if isinstance(system, ContextSystem) else None
    if not isinstance(model, LayerwiseModel) or model.weighting is None:
        return None
    shares: list[float] = model.weighting.shares().tolist()
    return shares


def percent(values: Sequence[float]) -> str:
    """Write the mean of some shares in percent, and their least and greatest where they differ.

    >>> percent([0.5, 0.5]), percent([0.9, 1.0])
    ('50.0', '95.0 (90.0 to 100.0)')
    """
    mean, low, high = (100 * share for share in (statistics.mean(values), min(values), max(values)))
    return f"{mean:.1f}" if low == high else f"{mean:.1f} ({low:.1f} to {high:.1f})"


def report(found: dict[str, list[dict[str, Any]]], documents: int, images: Sequence[str]) -> str:
    """Return the results as Markdown; a claim about a system that was not run is left out."""
    chance = {suite: found["base"][0]["suites"][suite]["chance"] for suite in SUITES}
    rows = [
        [
            SYSTEMS[name][1],
            len(runs),
            f"{runs[0]['steps']:,}",
            *(percent([run["suites"][suite]["accuracy"] for run in runs]) for suite in SUITES),
        ]
        for name, runs in found.items()
    ]
    rows.append(["chance", "", "", *(f"{100 * share:.1f}" for share in chance.values())])
    shares = [
        [SYSTEMS[name][1], run["seed"], *(f"{share:.3f}" for share in run["layer_shares"])]
        for name, runs in found.items()
        for run in runs
        if run["layer_shares"]
    ]
    layers = range(len(shares[0]) - 2) if shares else ()
    claims = [
        [claim, "yes" if claim.holds(found[claim.system]) else "**no**"]
        for claim in CLAIMS
        if claim.system in found
    ]
    items = found["base"][0]["suites"]["deixis"]["items"]
    return "\n".join(
        [
            "## Contrastive suites: which context a model uses",
            "",
            f"{documents:,} training documents. Accuracy in % on {items} items a suite, mean over "
            "seeds (least to greatest); a tie is wrong. Steps are those on top of the "
            "sentence-level model of the same seed. Target context is states of the decoder, "
            "which attended to the English sentences: it may tell in the ellipses, too. Made by "
            "`benchmarks/context_suites.py`.",
            "",
            table(["system", "seeds", "steps", *SUITES], rows),
            "",
            table(["claim, for every seed", "holds"], claims),
            "",
            "Learned weights of the frozen encoder's layers, 0 being the word embeddings:",
            "",
            table(["system", "seed", *layers], shares),
            *(f"\n![{Path(image).stem.replace('_', ' ')}]({image})" for image in images),
        ]
    )


# ---------------------------------------------------------------------------- plots


def plot(found: dict[str, list[dict[str, Any]]], folder: Path) -> list[Path]:
    """Draw the layer weights and the accuracy by distance; return the files."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plots needs matplotlib: pip install 'bert-fused-nmt[plot]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "savefig.dpi": 110, "savefig.bbox": "tight"})
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "context_suites_layers.png", folder / "context_suites_distance.png"]
    for path, draw in zip(paths, (draw_layers, draw_distances), strict=True):
        figure = draw(pyplot, found)
        figure.savefig(path, metadata={"Software": None})
        pyplot.close(figure)
    return paths


def draw_layers(pyplot: Any, found: dict[str, list[dict[str, Any]]]) -> Any:
    """Draw a bar for each layer and seed of the main model."""
    runs = [run for run in found["main"] if run["layer_shares"]]
    figure, axes = pyplot.subplots(figsize=(4.5, 2.8))
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        shares = run["layer_shares"]
        places = [layer + (number - (len(runs) - 1) / 2) * width for layer in range(len(shares))]
        axes.bar(places, shares, width, label=f"seed {run['seed']}")
    layers = range(len(runs[0]["layer_shares"]))
    axes.axhline(1 / len(layers), color="gray", linewidth=0.8, linestyle="--")
    axes.set_xticks(list(layers), ["embeddings", *(f"layer {layer}" for layer in layers[1:])])
    axes.set_ylabel("share")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(runs), frameon=False)
    return figure


def draw_distances(pyplot: Any, found: dict[str, list[dict[str, Any]]]) -> Any:
    """Draw for each suite the accuracies of all systems by the distance of the evidence."""
    figure, panels = pyplot.subplots(1, len(SUITES), figsize=(11, 3), sharey=True)
    markers = "osv^<>DPX*h"
    for suite, axes in zip(SUITES, panels, strict=True):
        for (name, runs), marker in zip(found.items(), cycle(markers), strict=False):
            distances = list(runs[0]["suites"][suite]["by_distance"])
            means = [
                100
                * statistics.mean(
                    run["suites"][suite]["by_distance"][distance]["accuracy"] for run in runs
                )
                for distance in distances
            ]
            axes.plot(distances, means, marker=marker, markersize=4, label=SYSTEMS[name][1])
        axes.set_title(suite)
        axes.set_xlabel("sentences back")
        axes.set_ylim(0, 103)
    panels[0].set_ylabel("accuracy, %")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "context_suites")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--systems",
        nargs="*",
        choices=[name for name in SYSTEMS if name != "base"],
        default=NEEDED,
        help="those to train after the base; none: report on what there is",
    )
    parser.add_argument("--steps", type=int, help="of each; else as its recipe says")
    parser.add_argument("--plots", type=Path, help="folder for the plots, e.g. docs/images")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every command does
    experiment = Experiment(arguments.folder, {**SIZES, "train": DOCUMENTS}, arguments.steps)
    seeds = arguments.seeds
    if arguments.quick:
        sizes = {"train": 60, "dev": 8, "test": 8, "items": 12}
        few = ("subwords.size=400", "train.max_steps=2", "train.batch_tokens=300")
        experiment = Experiment(arguments.folder, sizes, overrides=few)
        seeds = [1]
    experiment.make_data()
    for seed in seeds:
        for system in ("base", *arguments.systems):
            experiment.run(system, seed)
    found = experiment.found()
    paths = plot(found, arguments.plots) if arguments.plots and "main" in found else []
    images = [os.path.relpath(path, REPOSITORY / "docs") for path in paths]
    results = {"runs": [run for runs in found.values() for run in runs]}
    text = report(found, experiment.sizes["train"], images)
    publish("context-suites", text, results, arguments.folder, quick=arguments.quick)


if __name__ == "__main__":
    main()
