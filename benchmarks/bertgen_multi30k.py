"""BERTGEN on real text and images: does it translate, describe, and look at the picture?

Text of Multi30k in English, German and French (29,000 lines of each), grid features of the Flickr8k
images among its images (24% of them: 6,993 for training, 242 of val, 243 of test_2016_flickr; nine
cells of EfficientNet-Lite0, reduced to 256 numbers), multilingual E5-small to begin with.

One model is trained on all of: En-De and En-Fr, De-En, En-De with images, captions in English and
German. De-Fr is never trained: a zero-shot direction. Two systems have equal time: the paper's
bidirectional attention, and the prefix mode, which is another model. Each is evaluated on
test_2016_flickr: text alone on all 1,000 lines; with images on the 243 that have one, shown the
right image, that of another line, or none, and all of these again with the nouns of the source
hidden. What an image is worth is the difference between right and wrong ones, tested by paired
bootstrap; a text-only model is the same with none.

Nouns are found by spaCy where a pipeline is installed, else they are the words of the training
captions that often stand between a determiner and a word that follows nouns.
"""

import argparse
import importlib.util
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from common import REPOSITORY, SHARED, command, publish, shared_data, table

from bertfused.metrics import paired_bootstrap
from bertfused.text import read_lines

ENCODER = SHARED / "models" / "me5-small-pruned"
FEATURES = SHARED / "data" / "flickr8k-features"
SPACY = "en_core_web_sm"
TEXT = {"train": "train", "dev": "val", "test": "test_2016_flickr"}
IMAGES = {"train": ("train.part1", "train.part2"), "dev": ("val",), "test": ("test_2016_flickr",)}
# Name, source, target, whether it has images, whether it is trained.
TASKS: tuple[tuple[str, str | None, str, bool, bool], ...] = (
    ("en-de", "en", "de", False, True),
    ("en-fr", "en", "fr", False, True),
    ("de-en", "de", "en", False, True),
    ("en-de-image", "en", "de", True, True),
    ("caption-en", None, "en", True, True),
    ("caption-de", None, "de", True, True),
    ("de-fr", "de", "fr", False, False),
    ("de-fr-image", "de", "fr", True, False),
)
SHOWN = ("congruent", "shuffled", "none")
RECIPE: dict[str, Any] = {
    "model": {"encoder": str(ENCODER), "layers": 6, "dropout": 0.1, "attention_dropout": 0.0},
    "optim": {"lr": 4e-4, "warmup_steps": 400, "schedule": "inverse_sqrt", "clip_norm": 1.0},
    "train": {"batch_tokens": 1200, "validate_every": 200, "log_every": 20, "valid_lines": 50},
    "search": {"max_length_b": 60, "max_length_images": 60},
}
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "bidirectional": {"train": {"copies": 4}},
    "prefix": {"model": {"attention": "prefix"}},
}
DETERMINERS = {"a", "an", "the", "his", "her", "their", "two", "three", "some", "several"}
FOLLOWERS = {"in", "on", "is", "are", "with", "and", "at", "of", "to", "near", "while", "that"}


def write_texts(folder: Path) -> None:
    """Write the text of Multi30k."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in TEXT.items():
        for language in ("en", "de", "fr"):
            lines = list(read_lines(shared_data("multi30k") / f"{split}.{language}.gz"))
            (folder / f"{name}.{language}").write_text("".join(f"{own}\n" for own in lines))


def corpus(name: str, source: str | None, target: str, has_images: bool) -> dict[str, Any]:
    """Name the files of a corpus."""
    found: dict[str, Any] = {"target": f"{name}.{target}"}
    if source is not None:
        found["source"] = f"{name}.{source}"
    if has_images:
        found["images"] = [str(FEATURES / f"{own}.npz") for own in IMAGES[name]]
    return found


def write_recipe(folder: Path, system: str, minutes: float, quick: bool) -> Path:
    """Write the recipe of a system."""
    tasks = []
    for name, source, target, has_images, is_trained in TASKS:
        task: dict[str, Any] = {"name": name, "target": target, "images": has_images}
        if source is not None:
            task["source"] = source
        if is_trained:
            task["train"] = [corpus("train", source, target, has_images)]
            task["dev"] = corpus("dev", source, target, has_images)
        task["test"] = [corpus("test", source, target, has_images) | {"name": "test2016"}]
        tasks.append(task)
    values: dict[str, Any] = {name: dict(own) for name, own in RECIPE.items()}
    values["data"] = {"tasks": tasks, "max_wordpieces": 60}
    values["train"]["max_minutes"] = minutes
    for name, changes in SYSTEMS[system].items():
        values[name] |= changes
    if quick:
        values["model"]["layers"] = 1
        values["train"] |= {"max_steps": 2, "validate_every": 2, "valid_lines": 2}
        values["search"] |= {"max_length_b": 2, "max_length_images": 2}
    path = folder / f"{system}.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def nouns(lines: Sequence[str]) -> list[str]:
    """Return the nouns of English captions: spaCy's, or those that a rule of thumb finds."""
    if importlib.util.find_spec(SPACY) is not None:
        from bertfused.linguistics import load_tagger

        found = Counter(
            token.text.lower()
            for doc in load_tagger(SPACY).pipe(lines)
            for token in doc
            if token.pos_ == "NOUN"
        )
        return sorted(found)
    count, as_noun = Counter[str](), Counter[str]()
    for line in lines:
        words = line.lower().replace(",", " ,").replace(".", " .").split()
        count.update(words)
        for place, word in enumerate(words[:-1]):
            before = {*words[max(place - 2, 0) : place]}
            if before & DETERMINERS and words[place + 1] in FOLLOWERS | {",", "."}:
                as_noun[word] += 1
    known = DETERMINERS | FOLLOWERS
    return sorted(
        word
        for word, own in as_noun.items()
        if own >= 3 and own >= 0.15 * count[word] and word.isalpha() and word not in known
    )


class Experiment:
    """The systems, each trained and evaluated once, kept in a folder."""

    def __init__(self, folder: Path, minutes: float, quick: bool) -> None:
        self.folder, self.minutes, self.quick = folder, minutes, quick
        self.data = folder / "data"

    def run(self, system: str) -> dict[str, Any]:
        """Train and evaluate a system."""
        path = self.folder / f"{system}.json"
        if not path.exists():
            recipe = write_recipe(self.folder, system, self.minutes, self.quick)
            command("prepare", recipe, "--out", self.data, "--quiet", module="bertgen")
            run = self.folder / system
            command(
                *("train", recipe, "--data", self.data, "--out", run, "--resume", "--quiet"),
                module="bertgen",
            )
            path.write_text(json.dumps(self.evaluate(run), indent=1))
        results: dict[str, Any] = json.loads(path.read_text())
        return results

    def evaluate(self, run: Path) -> dict[str, Any]:
        """Score every task in every condition, and test right images against the others."""
        hidden = self.folder / "nouns"
        if not hidden.exists():
            lines = list(read_lines(self.folder / "train.en"))
            hidden.write_text("".join(f"{word}\n" for word in nouns(lines)))
        scores: list[dict[str, Any]] = []
        tests: list[dict[str, Any]] = []
        for name, source, _, has_images, _ in TASKS:
            for is_hidden in (False, True) if source == "en" else (False,):
                for shown in SHOWN if has_images else ("none",):
                    out = self.folder / f"{run.name}-{shown}{'-hidden' if is_hidden else ''}"
                    options = ["--hide", hidden] if is_hidden else []
                    report = json.loads(
                        command(
                            *("evaluate", run, "--data", self.data, "--task", name),
                            *("--split", "test2016", "--images", shown, "--output", out),
                            *("--json", *options),
                            module="bertgen",
                        )
                    )
                    (found,) = report["tasks"]
                    found |= {"shown": shown, "hidden": is_hidden}
                    scores.append(found | {"signature": report["signatures"][0]})
                if has_images:
                    tests.append(self.compare(run, name, is_hidden))
        return {"scores": scores, "tests": tests, "steps": self.steps(run)}

    def compare(self, run: Path, task: str, is_hidden: bool) -> dict[str, Any]:
        """Test what wrong and no images lose against right ones."""
        ending = "-hidden" if is_hidden else ""
        systems = {
            shown: list(
                read_lines(self.folder / f"{run.name}-{shown}{ending}" / f"{task}.test2016")
            )
            for shown in SHOWN
        }
        references = list(read_lines(self.data / f"{task}.test2016.raw.target"))
        found = paired_bootstrap(references, systems)
        values = {
            own.system: round(own.p_value, 4)
            for own in found
            if own.score.name == "BLEU" and own.p_value is not None
        }
        return {"task": task, "hidden": is_hidden, "p": values}

    @staticmethod
    def steps(run: Path) -> dict[str, Any]:
        """Return the curve of a training."""
        records = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
        return {
            "steps": records[-1]["step"],
            "valid_nll": [own["valid_nll"] for own in records if "valid_nll" in own],
        }


def report(found: dict[str, dict[str, Any]], minutes: float) -> str:
    """Return the results as Markdown."""
    columns = [
        (task, shown, is_hidden)
        for task, source, _, has_images, _ in TASKS
        for is_hidden in ((False, True) if source == "en" else (False,))
        for shown in (SHOWN if has_images else ("none",))
    ]
    rows = []
    for task, shown, is_hidden in columns:
        cells = []
        for system in found.values():
            own = next(
                own
                for own in system["scores"]
                if (own["task"], own["shown"], own["hidden"]) == (task, shown, is_hidden)
            )
            cells.append(f"{own['bleu']:.1f} ± {own['bleu_half_width']:.1f}, {own['chrf']:.1f}")
            lines = own["lines"]
        rows.append((task, lines, "hidden" if is_hidden else "", shown, *cells))
    tested = [
        (
            own["task"],
            "hidden" if own["hidden"] else "",
            name,
            own["p"]["shuffled"],
            own["p"]["none"],
        )
        for name, system in found.items()
        for own in system["tests"]
    ]
    signature = next(iter(found.values()))["scores"][0]["signature"]
    return "\n".join(
        [
            "## BERTGEN on Multi30k",
            "",
            "BLEU with half of its 95% interval, and chrF, on test_2016_flickr after "
            f"{minutes:.0f} minutes of one core for each system. Images are a 24% subset "
            "(Flickr8k) with grid features, so rows with images have 243 lines. De-Fr was never "
            "trained. Made by `benchmarks/bertgen_multi30k.py`.",
            "",
            table(("task", "lines", "nouns", "image", *found), rows),
            "",
            "Paired bootstrap, right images against wrong and none (p):",
            "",
            table(("task", "nouns", "system", "p, wrong", "p, none"), tested),
            "",
            f"BLEU: {signature}",
        ]
    )


def main() -> None:
    """Train and evaluate, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--minutes", type=float, default=150.0, help="of each system, one core")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "bertgen_multi30k")
    parser.add_argument("--quick", action="store_true", help="a few minutes, no meaning")
    args = parser.parse_args()
    shared_data("flickr8k-features")
    write_texts(args.out)
    experiment = Experiment(args.out, args.minutes, args.quick)
    found = {system: experiment.run(system) for system in args.systems}
    publish("bertgen-multi30k", report(found, args.minutes), found, args.out, quick=args.quick)


if __name__ == "__main__":
    main()
