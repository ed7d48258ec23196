"""Can a language be learned from text alone, where it surely can be?

A made-up language is English with another word for each word: strings of random syllables, one for
each type; digits and punctuation are its own. Three in ten of its types change places with the
word before them. The two monolingual texts are disjoint halves of Multi30k's English, the second
one put into that language: no sentence is known in both, and no word looks like its translation.

Claims: word-by-word translations by matching the words of the two texts (``words.induced``), then
training on them, denoising and back-translation, pass 60 BLEU in both directions in 10 minutes of
one core, all of it from text alone and chosen by round trips; and denoising alone ends in copies,
which the guard stops with a sentence. Refuted by less than 60, or by a training that goes on.
"""

import argparse
import json
import random
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import tomli_w
from common import REPOSITORY, children_seconds, command, publish, shared_data, table

from bertfused.text import read_lines

LANGUAGES = ("en", "xx")
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
RECIPE: dict[str, Any] = {
    "data": {
        "source": "en",
        "target": "xx",
        "mono": {"en": ["mono.en"], "xx": ["mono.xx"]},
        "dev": {"source": "dev.en", "target": "dev.xx"},
        "test": [{"name": "test", "source": "test.en", "target": "test.xx"}],
    },
    "subwords": {"kind": "words", "size": 5_000},
    "model": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "model_dim": 128,
        "ffn_dim": 256,
        "heads": 4,
        "dropout": 0.0,
        "norm": "pre",
    },
    "optim": {"lr": 4e-3, "warmup_steps": 300, "ema": 0.995},
    "words": {"induced": True, "refinements": 1},
    "objectives": {
        "words": "0:1,800:1,1000:0",
        "denoising": "0:1,400:1,401:0",
        "backtranslation": "0:0,800:0,801:1",
        "teacher": "average",
    },
    "train": {"batch_tokens": 500, "validate_every": 400, "log_every": 50},
    "validation": {"lines": 200},
}


def made_up(word: str) -> str:
    """Return the word of the made-up language; one without a letter stays."""
    if not any(character.isalpha() for character in word):
        return word
    draw = random.Random(word)
    syllables = (draw.choice(SYLLABLES) for _ in range(draw.randint(2, 4)))
    return "".join(syllables) + SYLLABLES[zlib.crc32(word.encode()) % len(SYLLABLES)]


def translate(line: str) -> str:
    """Put a line into the made-up language."""
    words: list[str] = []
    for word in line.split():
        moves = word.isalpha() and zlib.crc32(word[::-1].encode()) % 10 < 3
        words.insert(len(words) - bool(words and moves), made_up(word))
    return " ".join(words)


def tokenised(split: str) -> list[str]:
    """Return lower-cased text of Multi30k, punctuation apart."""
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer("en")
    lines = read_lines(shared_data("multi30k") / f"{split}.en.gz")
    return [moses.tokenize(line.lower(), return_str=True, escape=False) for line in lines]


def write_texts(folder: Path, lines: int, pairs: int) -> None:
    """Write two disjoint monolingual texts, and pairs to evaluate on."""
    folder.mkdir(parents=True, exist_ok=True)
    train = tokenised("train")
    texts = {"mono.en": train[:lines], "mono.xx": list(map(translate, train[-lines:]))}
    for name, split in (("dev", "val"), ("test", "test_2016_flickr")):
        english = tokenised(split)[:pairs]
        texts |= {f"{name}.en": english, f"{name}.xx": list(map(translate, english))}
    for name, text in texts.items():
        (folder / name).write_text("".join(f"{line}\n" for line in text))


def write_recipe(folder: Path, name: str, minutes: float, **changes: Any) -> Path:
    """Write a recipe that trains for so long."""
    sections = {key: {**RECIPE.get(key, {}), **value} for key, value in changes.items()}
    train = {**RECIPE["train"], **changes.get("train", {}), "max_minutes": minutes}
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(RECIPE | sections | {"train": train}))
    return path


def learn(folder: Path, minutes: float, **changes: Any) -> dict[str, Any]:
    """Prepare, train and evaluate; each once."""
    recipe, data, run = (folder / name for name in ("recipe.toml", "data", "run"))
    found = folder / "found.json"
    if not found.exists():
        write_recipe(folder, "recipe", minutes, **changes)
        seconds = {}
        for verb, arguments in {
            "prepare": (recipe, "--out", data, "--quiet"),
            "train": (recipe, "--data", data, "--out", run, "--resume", "--quiet"),
        }.items():
            before = children_seconds()
            command(verb, *arguments, module="unsup")
            seconds[verb] = children_seconds() - before
        report = json.loads(
            command("evaluate", run, "--data", data, "--tokenize", "none", "--json", module="unsup")
        )
        found.write_text(json.dumps({"seconds": seconds, **report}, indent=1))
    results: dict[str, Any] = json.loads(found.read_text())
    return results


def copies(folder: Path, minutes: float, **changes: Any) -> str:
    """Train by denoising alone; return the sentence that stopped it, or that nothing did."""
    objectives = {"denoising": "1", "words": "0", "backtranslation": "0", "teacher": "model"}
    recipe = write_recipe(
        folder,
        "denoising",
        minutes,
        objectives=objectives,
        validation={**RECIPE["validation"], "guard_from": 200},
        **changes,
    )
    line = [sys.executable, "-m", "unsup", "train", recipe, "--data", folder / "data", "--quiet"]
    line += ["--out", folder / f"denoising-{time.time_ns()}"]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True)
    if done.returncode == 0:
        return "nothing stopped it"
    return done.stderr.strip().splitlines()[-1].removeprefix("unsup: error: ")


def main() -> None:
    """Learn the made-up language, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="of training")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "unsup_sanity")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    args = parser.parse_args()
    folder, minutes, changes = args.out, args.minutes, {}
    if args.quick:
        minutes = 0.05
        changes = {"data": {"max_unknown": 1.0}, "train": {"validate_every": 3, "max_steps": 6}}
    write_texts(folder, 400 if args.quick else 14_500, 20 if args.quick else 10**9)
    results = learn(folder, minutes, **changes)
    stopped = copies(folder, minutes, **changes)
    scores = [own for own in results["directions"] if own["test"] == "test"]
    spent = sum(results["seconds"].values()) / 60
    rows = [
        (
            own["direction"],
            f"{own['bleu']:.1f}",
            f"{own['copied']:.3f}",
            f"{spent:.1f}",
            "yes" if own["bleu"] > 60 and spent <= 10 else "**no**",
        )
        for own in scores
    ]
    header = ("direction", "BLEU", "words copied", "CPU minutes", "over 60 in 10 minutes")
    text = [
        "## Unsupervised translation: a made-up language",
        "",
        "English and English with other words, three types in ten of which change places; two "
        "monolingual texts, no pairs, no dictionary. Made by `benchmarks/unsup_sanity.py`.",
        "",
        table(header, rows),
        "",
        f"Denoising alone: {stopped}.",
        "",
        f"BLEU: {results['signatures'][0]}",
    ]
    publish(
        "unsup-sanity", "\n".join(text), results | {"stopped": stopped}, folder, quick=args.quick
    )


if __name__ == "__main__":
    main()
