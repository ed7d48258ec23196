"""Translation without a pair: English and French, English and Romanian.

Of each language a monolingual text, no sentence of one the translation of the other's
(`unsup_texts.py`). Two settings that know different things, kept apart:

    strict      the two texts and nothing else: words matched in them; round trips choose
    resources   a dictionary where there is one (freedict, of En-Fr), the words near in me5, an
                encoder that has seen parallel text in its own training, and embeddings from it

For each: the word-by-word translations that training begins with (the floor), the model trained on
them (with noise) and then by back-translation, one trained on them only (what back-translation
adds), and me5 fused into the first, against that one trained on for as long. A supervised model on
as many pairs is the ceiling. Minutes are of updates on one core, validations left out.

Scores are BLEU on tokenised text (sacreBLEU, tokenize none; 13a on the same beside it), beam 5.
The claims, for En-Fr: strict passes 20 BLEU in both directions; with resources 34 is passed, 38 the
goal; at most 9% of the source's words stand in the translations (of the references 3.6% and 3.3%),
at most 1% of the sentences are their own. Refuted by the table. En-Ro is reported as measured.

What was found is kept in docs/results/unsup_pairs.json, stage by stage, and the tables are made of
all that stands there.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from common import REPOSITORY, SHARED, command, facts, publish, shared_data, table
from unsup_texts import Texts, english_french, english_romanian

from backtranslation.plots import load_pyplot
from bertfused.metrics import bleu
from bertfused.text import read_lines
from unsup.config import WordsConfig
from unsup.language_model import train_language_model
from unsup.prepare import make_lexicons
from unsup.validation import copy_rate, same_rate
from unsup.word_by_word import WordByWord, translate_lines

DOCS = REPOSITORY / "docs"
ENCODER = str(SHARED / "models" / "me5-small-pruned")
FREEDICT = [
    {"path": str(SHARED / "data" / "freedict" / f"{name}.tsv"), "language": language}
    for name, language in (("eng-fra", "en"), ("fra-eng", "fr"))
]


@dataclass(frozen=True)
class Pair:
    """Two languages, and what is known of their words."""

    source: str
    target: str
    texts: Callable[[], Texts]
    test: str
    dictionaries: list[dict[str, str]]

    @property
    def directions(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.source, self.target), (self.target, self.source)

    def words(self, setting: str) -> dict[str, Any]:
        """Return the section [words] of a setting."""
        if setting == "strict":
            return {"induced": True, "refinements": 2}
        return {"dictionaries": self.dictionaries, "encoder": ENCODER}


PAIRS = {
    "en-fr": Pair("en", "fr", english_french, "test2016", FREEDICT),
    "en-ro": Pair("en", "ro", english_romanian, "rosts", []),
}
SETTINGS = ("strict", "resources")
STAGES = ("floors", "bt", "words only", "fused", "control", "supervised")
RECIPE: dict[str, Any] = {
    "subwords": {"size": 6000},
    "model": {
        "encoder_layers": 4,
        "decoder_layers": 4,
        "model_dim": 128,
        "ffn_dim": 512,
        "heads": 4,
        "dropout": 0.2,
        "norm": "pre",
    },
    "optim": {"lr": 4e-3, "warmup_steps": 400, "ema": 0.995},
    "objectives": {
        "words": "0:1,1200:1,1500:0.25",
        "denoising": "0",
        "backtranslation": "0:0,1200:0,1201:1",
        "teacher": "average",
    },
    "generate": {"updates": 4},
    "train": {"batch_tokens": 1000, "validate_every": 400, "log_every": 50},
    "validation": {"lines": 300},
    "search": {"beam_size": 5},
}
# Trained on from the best model, at about the learning rate that it ended with.
LATER: dict[str, dict[str, Any]] = {
    "objectives": {"words": "0", "denoising": "0", "backtranslation": "1", "teacher": "average"},
    "optim": {"lr": 1.2e-3, "warmup_steps": 200},
}
# Weights that are new in a fused model learn faster.
FUSED: dict[str, dict[str, Any]] = {
    "fusion": {"encoder": ENCODER, "drop_net": 0.0},
    "optim": {**LATER["optim"], "new_lr_scale": 3.0},
}


class Experiment:
    """Texts, trainings and their results, each made once and kept in a folder."""

    def __init__(self, name: str, folder: Path, minutes: float, later: float, quick: bool) -> None:
        self.name, self.pair, self.folder = name, PAIRS[name], folder / name
        self.minutes, self.later, self.quick = minutes, later, quick
        self.texts = self.folder / "text"

    def write_texts(self) -> None:
        """Write the monolingual texts, the pairs to evaluate on and those of the ceiling."""
        self.texts.mkdir(parents=True, exist_ok=True)
        for name, lines in self.pair.texts().items():
            most = None
            if self.quick:
                most = 300 if name.startswith(("mono", "pairs")) else 20
            (self.texts / name).write_text("".join(f"{line}\n" for line in lines[:most]))

    def text(self, name: str) -> list[str]:
        """Return the lines of a text."""
        return list(read_lines(self.texts / name))

    def run(self, setting: str, stage: str) -> dict[str, Any]:
        """Run a stage if it was not; return what was found, and by minute."""
        path = self.folder / f"{setting} {stage}.json"
        if not path.exists():
            if not self.texts.exists():
                self.write_texts()
            found = self.floors(setting) if stage == "floors" else self.trained(setting, stage)
            curve = None if stage in ("floors", "supervised") else self.curve(f"{setting}-{stage}")
            path.write_text(json.dumps({"facts": facts(), "found": found, "curve": curve}))
        results: dict[str, Any] = json.loads(path.read_text())
        return results

    def floors(self, setting: str) -> list[dict[str, Any]]:
        """Translate the test set word by word: with a first candidate, chosen, and so on."""
        words = self.pair.words(setting)
        stages = {"word by word": words}
        if setting == "resources" and (dictionaries := self.pair.dictionaries):
            stages = {
                "dictionary, first word": {"dictionaries": dictionaries},
                "dictionary, word by word": {"dictionaries": dictionaries},
                "and words near in me5": words,
            }
        languages = (self.pair.source, self.pair.target)
        texts = {language: self.text(f"mono.{language}") for language in languages}
        models = {language: train_language_model(lines) for language, lines in texts.items()}
        found = []
        for name, values in stages.items():
            config = WordsConfig.model_validate(values)
            lexicons = make_lexicons(config, languages, texts, models)
            for source, target in self.pair.directions:
                lines = self.text(f"test.{source}")
                if name.endswith("first word"):
                    hypotheses = [
                        " ".join(lexicons[source].candidates(w)[0].word for w in line.split())
                        for line in lines
                    ]
                else:
                    search = WordByWord(lexicons[source], models[target])
                    hypotheses = list(translate_lines(lines, search))
                found.append(self.scored(name, source, target, hypotheses))
        return found

    def trained(self, setting: str, stage: str) -> list[dict[str, Any]]:
        """Prepare and train, and score the test set in both directions."""
        if stage == "supervised":
            return [found for way in self.pair.directions for found in self.supervised(*way)]
        changes: dict[str, dict[str, Any]] = {"words": self.pair.words(setting)}
        if setting == "resources" and stage in ("bt", "words only"):
            changes["embeddings"] = {"encoder": ENCODER}
        if stage == "words only":
            changes["objectives"] = {"words": "1", "backtranslation": "0"}
        elif stage in ("fused", "control"):
            changes |= LATER
        if stage == "fused":
            changes |= FUSED
        is_later = stage in ("fused", "control")
        recipe = self.recipe(f"{setting}-{stage}", self.later if is_later else None, changes)
        data, run = self.folder / f"{setting}-data", self.folder / f"{setting}-{stage}"
        command("prepare", recipe, "--out", data, "--quiet", module="unsup")
        start = ("--init", self.folder / f"{setting}-bt") if is_later else ()
        command(
            *("train", recipe, "--data", data, "--out", run, *start, "--resume", "--quiet"),
            module="unsup",
        )
        return [
            self.translated(stage, run, source, target, "unsup", "--to", target)
            for source, target in self.pair.directions
        ]

    def recipe(self, name: str, minutes: float | None, changes: dict[str, dict[str, Any]]) -> Path:
        """Write a recipe."""
        source, target = self.pair.source, self.pair.target
        data = {
            "source": source,
            "target": target,
            "mono": {source: [f"mono.{source}"], target: [f"mono.{target}"]},
            "dev": {"source": f"dev.{source}", "target": f"dev.{target}"},
            "test": [
                {"name": self.pair.test, "source": f"test.{source}", "target": f"test.{target}"}
            ],
        }
        values = {"data": data, **{key: dict(value) for key, value in RECIPE.items()}}
        values["train"]["max_minutes"] = self.minutes if minutes is None else minutes
        if self.quick:
            values["subwords"]["size"] = 1500
            values["train"] |= {"max_steps": 8, "validate_every": 4, "log_every": 4}
            values["validation"]["lines"] = 10
        for key, own in changes.items():
            values[key] = {**values.get(key, {}), **own}
        path = self.texts / f"{name}.toml"
        path.write_text(tomli_w.dumps(values))
        return path

    def supervised(self, source: str, target: str) -> list[dict[str, Any]]:
        """Train one direction on pairs."""
        values = {
            "data": {
                "source": source,
                "target": target,
                "train": [{"source": f"pairs.{source}", "target": f"pairs.{target}"}],
                "dev": {"source": f"dev.{source}", "target": f"dev.{target}"},
            },
            "subwords": RECIPE["subwords"] | ({"size": 1500} if self.quick else {}),
            "model": RECIPE["model"],
            "optim": {key: RECIPE["optim"][key] for key in ("lr", "warmup_steps")},
            "train": {
                "batch_tokens": 2000,
                "max_minutes": self.later,
                "validate_every": 250,
                "validate_bleu": False,
                **({"max_steps": 6, "validate_every": 3} if self.quick else {}),
            },
            "search": RECIPE["search"],
        }
        name = f"supervised-{source}-{target}"
        recipe = self.texts / f"{name}.toml"
        recipe.write_text(tomli_w.dumps(values))
        data, run = self.folder / f"{name}-data", self.folder / name
        command("prepare", recipe, "--out", data, "--quiet")
        command("train", recipe, "--data", data, "--out", run, "--resume", "--quiet")
        return [self.translated("supervised", run, source, target, "bertfused")]

    def translated(
        self, system: str, run: Path, source: str, target: str, module: str, *options: str
    ) -> dict[str, Any]:
        """Translate the test set and score it."""
        output = run.with_name(f"{run.name}.{source}-{target}")
        text = self.texts / f"test.{source}"
        command(
            *("translate", run, *options, "--input", text, "--output", output, "--quiet"),
            module=module,
        )
        return self.scored(system, source, target, list(read_lines(output)))

    def scored(
        self, system: str, source: str, target: str, hypotheses: list[str]
    ) -> dict[str, Any]:
        """Score translations of the test set."""
        sources, references = self.text(f"test.{source}"), self.text(f"test.{target}")
        score = bleu(hypotheses, references, tokenize="none")
        assert score.parts is not None
        samples = zip(sources, references, hypotheses, strict=True)
        return {
            "system": system,
            "direction": f"{source}-{target}",
            "bleu": score.value,
            "signature": score.signature,
            "bleu_13a": bleu(hypotheses, references).value,
            "brevity": score.parts.brevity_penalty,
            "copied": copy_rate(sources, hypotheses),
            "same": same_rate(sources, hypotheses),
            "samples": [list(lines) for lines in samples][:2],
        }

    def curve(self, name: str) -> dict[str, list[float]]:
        """Return dev BLEU and the share of copied words of a run, by minutes of updates."""
        minutes, found = 0.0, {"minutes": []}
        for line in read_lines(self.folder / name / "metrics.jsonl"):
            record = json.loads(line)
            minutes = record.get("seconds", 60 * minutes) / 60
            if "valid_value" in record:
                found["minutes"].append(minutes)
                for kind in ("bleu", "copied"):
                    for source, target in self.pair.directions:
                        key = f"{kind}_{source}-{target}"
                        found.setdefault(key, []).append(record[f"valid_{key}"])
        return found


Kept = dict[str, dict[str, dict[str, Any]]]  # what was found, by pair and by "setting stage"


def read_kept(path: Path) -> Kept:
    """Return what was found so far."""
    kept: Kept = json.loads(path.read_text()) if path.exists() else {}
    return kept


def curves_of(kept: Kept, pair: str) -> dict[str, dict[str, list[float]]]:
    """Return the curves of a pair's trainings."""
    stages = kept.get(pair, {}).items()
    return {stage: result["curve"] for stage, result in stages if result["curve"]}


def plot(kept: Kept, path: Path) -> None:
    """Draw BLEU and copies by minute, a row for each pair."""
    pyplot = load_pyplot()
    pairs = [pair for pair in PAIRS if curves_of(kept, pair)]
    figure, axes = pyplot.subplots(len(pairs), 2, figsize=(10, 4 * len(pairs)), squeeze=False)
    for pair, row in zip(pairs, axes, strict=True):
        colours = {name: f"C{i}" for i, name in enumerate(curves_of(kept, pair))}
        for name, curve in curves_of(kept, pair).items():
            for kind, axis in zip(("bleu", "copied"), row, strict=True):
                for way, style in zip(PAIRS[pair].directions, ("-", "--"), strict=True):
                    direction = "-".join(way)
                    values, label = curve[f"{kind}_{direction}"], f"{name}, {direction}"
                    axis.plot(curve["minutes"], values, style, color=colours[name], label=label)
        row[0].set_ylabel("dev BLEU (greedy, 13a), watched and not used")
        row[1].set_ylabel("share of the source's words in translations")
        for axis in row:
            axis.set_xlabel("minutes of updates on one core")
        row[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def found_in(kept: Kept) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return what was found by setting and system, then by direction."""
    systems: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for setting in SETTINGS:
        for stage in STAGES:
            for pair in PAIRS:
                result = kept.get(pair, {}).get(f"{setting} {stage}", {"found": [], "curve": None})
                minutes = {} if not result["curve"] else {"minutes": result["curve"]["minutes"][-1]}
                for own in result["found"]:
                    key = ("pairs" if stage == "supervised" else setting, own["system"])
                    systems.setdefault(key, {})[own["direction"]] = own | minutes
    return dict(sorted(systems.items(), key=lambda item: item[0][0] == "pairs"))


def tables(kept: Kept) -> list[str]:
    """Return the table of scores, of four columns, and that of copies and lengths."""
    directions = ["-".join(way) for pair in PAIRS.values() for way in pair.directions]
    scores, rest = [], []
    for (setting, system), found in found_in(kept).items():
        own = [found.get(direction) for direction in directions]
        name = f"{setting}: {system}"
        scores.append([name, *(f"{s['bleu']:.1f} ({s['bleu_13a']:.1f})" if s else "" for s in own)])
        cells = (
            f"{s['copied']:.3f}, {s['same']:.1%}, {s['brevity']:.3f}"
            + (f", {s['minutes']:.0f}" if "minutes" in s else "")
            if s
            else ""
            for s in own
        )
        rest.append([name, *cells])
    return [
        table(("system", *directions), scores),
        "",
        "Share of the source's words in the translations, share of translations that are the "
        "source, brevity penalty, minutes of updates:",
        "",
        table(("system", *directions), rest),
    ]


def samples(kept: Kept) -> list[str]:
    """Return the first translations of what back-translation trained."""
    text = []
    for (setting, system), found in found_in(kept).items():
        for own in found.values() if system == "bt" else ():
            lines = ["\n".join(f"> {line}  " for line in sample) for sample in own["samples"]]
            text += [f"{setting}, {own['direction']}: source, reference, translation", ""]
            text += ["\n>\n".join(lines), ""]
    return text


def report(kept: Kept, image: str) -> str:
    """Return the results as Markdown."""
    machines = sorted({r["facts"]["processor"] for own in kept.values() for r in own.values()})
    signature = next(iter(next(iter(found_in(kept).values())).values()))["signature"]
    text = [
        "## Unsupervised translation: English and French, English and Romanian",
        "",
        "En-Fr: disjoint halves of Multi30k, 14,500 sentences each, test_2016_flickr. En-Ro: "
        "disjoint halves of RO-STS, with captions and glosses beside them, its test set. "
        "Lower-cased and tokenised, beam 5, BLEU on tokenised text (13a on the same beside it). "
        "Strict knows the two texts only; resources are freedict (En-Fr) and me5, which has seen "
        "parallel text. The weights of the matching are those that round trips choose "
        f"(`benchmarks/unsup_matching.py`). Made by `benchmarks/unsup_pairs.py` on "
        f"{', '.join(machines)}.",
        "",
        *tables(kept),
        "",
        f"BLEU: {signature}",
        "",
    ]
    if image:
        text += [f"![by minute]({image})", ""]
    return "\n".join(text + samples(kept))


def main() -> None:
    """Run what was asked for, and print all that is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", nargs="*", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--minutes", type=float, default=60.0, help="of bt and words only")
    parser.add_argument("--later", type=float, default=20.0, help="of the others")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "unsup_pairs")
    parser.add_argument("--quick", action="store_true", help="a few minutes, no meaning")
    args = parser.parse_args()
    shared_data("freedict")
    results = (args.out if args.quick else DOCS / "results") / "unsup_pairs.json"
    kept = read_kept(results)
    for pair in args.pairs:
        experiment = Experiment(pair, args.out, args.minutes, args.later, args.quick)
        for setting in args.settings:
            for stage in args.stages:
                if stage == "supervised" and setting != SETTINGS[-1]:
                    continue  # once, it is of no setting
                found = experiment.run(setting, stage)
                kept = read_kept(results)  # what another run has found meanwhile stays
                kept.setdefault(pair, {})[f"{setting} {stage}"] = found
                results.parent.mkdir(parents=True, exist_ok=True)
                results.write_text(json.dumps(kept, indent=1) + "\n")
    name = ""
    if any(curves_of(kept, pair) for pair in kept):
        name = "images/unsup_pairs.png"
        plot(kept, (args.out if args.quick else DOCS) / name)
    publish("unsup-pairs", report(kept, name), {"kept": kept}, args.out, quick=args.quick)


if __name__ == "__main__":
    main()
