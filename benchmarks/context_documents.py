"""Do context-aware models translate real documents better for the same time? En-De and En-Fr.

On customer chats (bcontrast) and a game's dialogues (wesnoth) En-De, and on dialogues (diabla) and
the game's together En-Fr. From the same sentence-level NMT (base), and for the same extra CPU time
of updates on one thread:

- control: the NMT trained on;
- concatenation: it reads the previous sentence in front of the current one, and writes the current
  one (2-to-1) or both (2-to-2);
- Zhang et al. (2018) and CADec (Voita et al., 2019) on the frozen NMT;
- main: layer-wise weighting and input-aware gating (Xu et al., 2020) on the frozen NMT;
- fused: MiniLM reading previous and current sentence, fused into every layer;
- main on fused: half of the time for a fused NMT, half for the main model on top of it.

Encoding the text once for the fused ones is part of their time. The claim is refuted where main is
not better than control in BLEU, nor in contrastive accuracy (En-Fr, DiscEvalMT) above what a model
without context has, about 50%. One setting, one seed: a look at real text, not a tuned comparison.

Scores: sacreBLEU s-BLEU and d-BLEU, cased, 13a, beam 5; p of a paired bootstrap on s-BLEU.

What was found is kept system by system: several calls with other --corpora and --systems may go
side by side in one folder, and each reports on all that is there.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch
from common import (
    REPOSITORY,
    command,
    measure_step,
    one_at_a_time,
    publish,
    shared_data,
    table,
    timed,
    write_results,
)
from documents_en_de import LAYER, Corpus, campaign_split, recipe_sections, write_splits

from bertfused import metrics
from bertfused.commands import train_model
from bertfused.config import load_recipe
from bertfused.console import keep_freed_memory
from bertfused.evaluation import evaluation
from bertfused.prepare import prepare
from bertfused.text import open_output, read_lines
from docnmt.cli import MODE
from docnmt.config import DocumentRecipe
from docnmt.contrast import as_json, contrast
from docnmt.contrastive_formats import read_set
from docnmt.fit import set_up
from docnmt.translate import AnyTranslator, as_read, load, score

Row = tuple[str, str, str]
HELD_OUT = 8  # every eighth dialogue of diabla is for the test


@dataclass(frozen=True)
class Text:
    """Documents of one pair of languages.

    Attributes:
        rows: Gives (document, English, other language) of "train", "dev" or "test".
        sets: Contrastive sets, by name and file.
    """

    target: str
    rows: Callable[[str], list[Row]]
    sets: dict[str, str] = field(default_factory=dict)


def english_french(split: str) -> list[Row]:
    """Return the dialogues of both corpora: campaigns as ``campaign_split`` divides them."""
    rows = [line.split("\t") for line in read_lines(shared_data("diabla") / "diabla.tsv")]
    dialogues = list(dict.fromkeys(row[0] for row in rows))
    held_out = set(dialogues[HELD_OUT - 1 :: HELD_OUT])
    ours = []
    if split != "dev":
        ours = [(r[0], r[2], r[3]) for r in rows if (r[0] in held_out) == (split == "test")]
    game = [line.split("\t") for line in read_lines(shared_data("wesnoth") / "wesnoth.en-fr.tsv")]
    return ours + [(r[0], r[2], r[3]) for r in game if campaign_split(r[0]) == split]


TEXTS = {
    "bcontrast": Text("de", Corpus("bcontrast", "bcontrast").rows),
    "wesnoth": Text("de", Corpus("wesnoth", "wesnoth").rows),
    "en-fr": Text(
        "fr",
        english_french,
        {"anaphora": "anaphora.json", "lexical choice": "lexical-choice.json"},
    ),
}


@dataclass(frozen=True)
class System:
    """What is trained, and from what.

    Attributes:
        context: The recipe's [context].
        start: The system that it is trained from.
        share: Of the seconds of a trial.
    """

    title: str
    context: dict[str, Any] | None = None
    is_fused: bool = False
    start: str | None = "base"
    share: float = 1.0


CONCATENATION = {"model": "concatenation", "sentences": 1}
SYSTEMS = {
    "base": System("base", start=None),
    "control": System("control"),
    "two_to_one": System("concatenation, 2-to-1", {**CONCATENATION, "target": False}),
    "two_to_two": System("concatenation, 2-to-2", {**CONCATENATION, "target": True}),
    "zhang": System("Zhang et al.", {"model": "zhang"}),
    "cadec": System("CADec", {"model": "cadec"}),
    "main": System("main", {"model": "layerwise"}),
    "fused": System("fused", is_fused=True),
    "half_fused": System("fused, half of the time", is_fused=True, share=0.5),
    "main_on_fused": System("main on fused", {"model": "layerwise"}, True, "half_fused", 0.5),
}


@dataclass(frozen=True)
class Budget:
    """What everything may cost.

    Attributes:
        base_seconds: CPU seconds of the NMT.
        trial_seconds: CPU seconds of each system after it.
        lines: Of each split, at most.
        items: Of each contrastive set, at most.
        steps: Updates of everything, in place of those that the seconds allow.
        search: The recipe's [search].
    """

    base_seconds: float
    trial_seconds: float
    vocabulary: int = 4000
    lines: int | None = None
    items: int | None = None
    steps: int | None = None
    search: dict[str, Any] = field(default_factory=dict)


class Experiment:
    """All runs on one corpus, each done once and kept under ``folder``."""

    def __init__(self, folder: Path, corpus: str, budget: Budget) -> None:
        self.folder, self.name = folder / corpus, corpus
        self.text, self.budget = TEXTS[corpus], budget

    def recipe(self, system: str, steps: int) -> Path:
        """Write the recipe of a system."""
        kind = SYSTEMS[system]
        previous = 1 if kind.is_fused else 0
        sections = recipe_sections(self.text.target, steps, self.budget.vocabulary, previous)
        sections["search"] = self.budget.search
        if kind.context is not None:
            sections["context"] = kind.context
            del sections["model"]  # that of the system it is trained from
        elif kind.is_fused:
            sections["fusion"] = {"encoder": "minilm", "layer": LAYER, "drop_net": 0.0}
        if kind.is_fused:
            sections["subwords"]["reuse"] = str(self.folder / "data")
        path = self.folder / f"{system}.toml"
        path.write_text(tomli_w.dumps(sections))
        return path

    def data(self, system: str) -> Path:
        """Return the DATA folder of a system, made where it is missing."""
        is_fused = SYSTEMS[system].is_fused
        data = self.folder / ("fused-data" if is_fused else "data")
        if not (data / "data.toml").exists():
            recipe = load_recipe(self.recipe("fused" if is_fused else "base", 1), DocumentRecipe)
            documents = MODE.documents(recipe)
            prepare(recipe, data, reader=MODE.corpora(recipe), documents=documents)
        return data

    def encoding_seconds(self, system: str) -> float:
        """Encode the text for the fused systems once; return its CPU seconds."""
        if not SYSTEMS[system].is_fused:
            return 0.0
        arguments = ("cache-features", self.data(system), "--encoder", "minilm", "--layer", LAYER)
        return timed(self.folder / "cache-seconds", lambda: command(*arguments, "--quiet"))

    def steps(self, system: str, init: Path | None) -> int:
        """Return the updates that a system's seconds allow."""
        if self.budget.steps is not None:
            return self.budget.steps
        mark = self.folder / f"{system}-steps"
        if not mark.exists():
            kind, budget = SYSTEMS[system], self.budget
            seconds = budget.base_seconds if system == "base" else budget.trial_seconds
            seconds = kind.share * (seconds - self.encoding_seconds(system))
            recipe = self.recipe(system, 1)
            cost = measure_step(recipe, DocumentRecipe, self.data(system), set_up=set_up, init=init)
            mark.write_text(str(max(round(seconds / cost), 1)))
        return int(mark.read_text())

    def train(self, system: str) -> Path:
        """Train a system, after the one that it starts from; return its RUN."""
        out, start = self.folder / system, SYSTEMS[system].start
        if (out / "report.md").exists():
            return out
        init = None if start is None else self.train(start)
        print(f"training {out}", file=sys.stderr, flush=True)
        recipe = load_recipe(self.recipe(system, self.steps(system, init)), DocumentRecipe)
        options: dict[str, Any] = {"init": init, "resume": (out / "config.toml").exists()}
        train_model(MODE, recipe, self.data(system), out, quiet=True, **options)
        return out

    def go(self, systems: Sequence[str]) -> None:
        """Run systems that were not run before; another call in the same folder waits."""
        with one_at_a_time(self.folder):
            if not (self.folder / "test.tsv").exists():
                counts = write_splits(self.folder, self.text.rows, self.budget.lines)
                write_results(self.folder / "lines.json", counts)
            self.run("base")
            if any(SYSTEMS[system].is_fused for system in systems):
                self.encoding_seconds("fused")
        for system in systems:
            self.run(system)

    def run(self, system: str) -> None:
        """Train and test one system, unless that was done."""
        done = self.folder / "found" / f"{system}.json"
        if done.exists():
            return
        run, start = self.train(system), SYSTEMS[system].start
        translator = load(run, device="cpu")
        found = {
            "scores": self.translate(translator, system),
            "sets": {name: self.accuracy(translator, name) for name in self.text.sets},
            "steps": self.steps(system, None if start is None else self.folder / start),
            "encoding_seconds": self.encoding_seconds(system),
        }
        write_results(done, found)

    def translate(self, translator: AnyTranslator, system: str) -> dict[str, Any]:
        """Translate the test set and score it."""
        test = self.folder / "test.tsv"
        lines = list(MODE.source_lines(test, translator.documents))
        translations = list(translator.translate(lines))
        with open_output(self.folder / f"{system}.{self.text.target}") as writer:
            for translation in translations:
                writer.write_line(translation.text)
        return evaluation(translations, list(zip(lines, self.references(), strict=True)))

    def references(self) -> list[str]:
        """Return the human translations of the test set."""
        return [line.split("\t")[2] for line in read_lines(self.folder / "test.tsv")]

    def accuracy(self, translator: AnyTranslator, name: str) -> dict[str, object]:
        """Test a model on a contrastive set."""
        path = shared_data("discourse-en-fr") / self.text.sets[name]
        items = read_set(path, None)[: self.budget.items]
        reads = partial(as_read, translator)
        return as_json(name, contrast(items, partial(score, translator), as_read=reads))

    def results(self) -> dict[str, Any]:
        """Return what all calls so far have found, tested against the control if it is there."""
        paths = {name: self.folder / "found" / f"{name}.json" for name in SYSTEMS}
        systems = {n: json.loads(path.read_text()) for n, path in paths.items() if path.exists()}
        first = "control" if "control" in systems else "base"
        order = [first, *(name for name in systems if name != first)]
        outputs = {n: list(read_lines(self.folder / f"{n}.{self.text.target}")) for n in order}
        if len(outputs) > 1:
            for tested in metrics.paired_bootstrap(self.references(), outputs):
                if tested.score.name.startswith("BLEU") and tested.score.interval is not None:
                    systems[tested.system]["half_width"] = tested.score.interval.half_width
                    systems[tested.system]["p"] = tested.p_value if first == "control" else None
        lines = json.loads((self.folder / "lines.json").read_text())
        del lines["facts"]
        return {"corpus": self.name, "lines": lines, "systems": systems}


def accuracy_cell(found: dict[str, Any] | None) -> str:
    """Write an accuracy with its interval, in percent."""
    if found is None:
        return ""
    share, low, high = (100 * value for value in (found["accuracy"], *found["interval"]))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"


def report(results: list[dict[str, Any]], budget: Budget) -> str:
    """Return the results as Markdown."""
    sets = [name for text in TEXTS.values() for name in text.sets]
    rows = []
    for result in results:
        for name, found in result["systems"].items():
            p, half_width = found.get("p"), found.get("half_width")
            bleu = f"{found['scores']['bleu']['value']:.1f}"
            rows.append(
                [
                    result["corpus"],
                    SYSTEMS[name].title,
                    bleu if half_width is None else f"{bleu} ± {half_width:.1f}",
                    f"{found['scores']['d-bleu']['value']:.1f}",
                    "" if p is None else f"{p:.3f}",
                    *(accuracy_cell(found["sets"].get(key)) for key in sets),
                    f"{found['steps']:,}",
                    f"{found['encoding_seconds']:.0f}",
                ]
            )
    scores = results[0]["systems"]["base"]["scores"]
    lines = "; ".join(
        f"{result['corpus']} {', '.join(f'{n:,} {split}' for split, n in result['lines'].items())}"
        for result in results
    )
    header = ["corpus", "system", "s-BLEU", "d-BLEU", "p", *sets, "steps", "encoding s"]
    return "\n".join(
        [
            "## Real documents: context-aware models for equal time",
            "",
            f"{budget.base_seconds:.0f} CPU seconds for the sentence-level model (base), then "
            f"{budget.trial_seconds:.0f} for each system after it, encoding included; one seed. "
            "s-BLEU with its 95% interval; p of a paired bootstrap against control; contrastive "
            "accuracy in % with its 95% interval, about 50 for a model without context. Lines: "
            f"{lines}. Made by `benchmarks/context_documents.py`.",
            "",
            table(header, rows),
            "",
            f"Signatures: s-BLEU `{scores['bleu']['signature']}`, "
            f"d-BLEU `{scores['d-bleu']['signature']}`",
        ]
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "context_documents")
    parser.add_argument("--corpora", nargs="+", choices=TEXTS, default=list(TEXTS))
    choices = [name for name in SYSTEMS if name not in ("base", "half_fused")]
    parser.add_argument(
        "--systems",
        nargs="*",
        choices=choices,
        default=choices,
        help="those to run after the base; none: report on what there is",
    )
    parser.add_argument("--base-seconds", type=float, default=900)
    parser.add_argument("--trial-seconds", type=float, default=240)
    parser.add_argument("--quick", action="store_true", help="half a minute, no meaning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every command does
    budget = Budget(arguments.base_seconds, arguments.trial_seconds)
    corpora, systems = arguments.corpora, arguments.systems
    if arguments.quick:
        short = {"max_length_b": 5}  # a model without training never ends
        budget = Budget(1, 1, 400, lines=30, items=4, steps=2, search=short)
        corpora, systems = ["en-fr"], ["control", "two_to_two", "main", "main_on_fused"]
    for corpus in corpora:
        Experiment(arguments.folder, corpus, budget).go(systems)
    experiments = [Experiment(arguments.folder, corpus, budget) for corpus in TEXTS]
    results = [
        experiment.results() for experiment in experiments if (experiment.folder / "found").exists()
    ]
    text = report(results, budget)
    publish(
        "context-documents", text, {"results": results}, arguments.folder, quick=arguments.quick
    )


if __name__ == "__main__":
    main()
