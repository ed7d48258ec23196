"""Does back-translation help, and a multilingual encoder on top of it? Ro-En, 5,000 pairs.

The chain of Zhu et al. (2020), section 5.4, in small: a baseline on 5,000 pairs of RO-STS, a
reverse model, English text translated back by it, a model on both kinds of pairs, and that model
with a multilingual encoder fused in, beside the same model trained on without it for equal time.

The claim is refuted if the model with back-translated data is not significantly better than the
baseline (paired bootstrap on BLEU, p < 0.05), or the fused one not better than its control.

Text. The two sentences of an item of RO-STS are neighbours and nearly the same, and sentences come
back in other items: what hangs together so is one group, and a group goes as a whole to the bitext
or to the monolingual text, or away if dev or test has a sentence of it. Dev and test keep the
first pair of each English sentence. English of the other groups and of Multi30k is the
monolingual text; the chain itself leaves out of it what stands in dev or test.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from common import REPOSITORY, SHARED, command, publish, shared_data, table

from backtranslation.config import BacktranslationRecipe
from backtranslation.equal_time import Costs
from backtranslation.filters import read_report
from backtranslation.leaks import LeakReport, normalised
from bertfused.config import load_recipe, load_section, write_recipe
from bertfused.text import SentencePair, open_output, read_lines, read_pairs

RECIPE = REPOSITORY / "backtranslation" / "recipes" / "ro_en_small.toml"
ENCODER = SHARED / "models" / "me5-small-pruned"
BITEXT = 5_000
# Seconds, not hours: nothing is learned.
QUICK = (
    *("model.encoder_layers=1", "model.decoder_layers=1", "model.model_dim=16", "fusion.layer=1"),
    *("model.ffn_dim=16", "train.max_steps=4", "train.validate_every=4", "subwords.size=500"),
    *("stages.bt.train={}", "stages.fused.train={}", "optim.warmup_steps=1"),
    *("search.max_length_b=5", "search.beam_size=1", "filter.max_ratio=99"),
)


def read_ro_sts(split: str) -> list[SentencePair]:
    """Read a split of RO-STS, Romanian and English."""
    folder = shared_data("ro-sts")
    return list(read_pairs(folder / f"RO-STS.{split}.ro", folder / f"RO-STS.{split}.en"))


def forms(pair: SentencePair) -> list[tuple[str, str]]:
    """Return what the sentences of a pair are known by, with their languages."""
    return [("ro", normalised(pair.source)), ("en", normalised(pair.target))]


def unique(pairs: Iterable[SentencePair]) -> list[SentencePair]:
    """Keep the first pair of each English sentence, but for case and punctuation."""
    first: dict[str, SentencePair] = {}
    for pair in pairs:
        first.setdefault(normalised(pair.target), pair)
    return list(first.values())


def groups(pairs: list[SentencePair]) -> list[list[SentencePair]]:
    """Put together the pairs of items that share a sentence, in either language."""
    owner = list(range(len(pairs)))

    def root(i: int) -> int:
        while owner[i] != i:
            owner[i] = owner[owner[i]]
            i = owner[i]
        return i

    seen: dict[tuple[str, str], int] = {}
    for i, pair in enumerate(pairs):
        owner[root(i)] = root(i - i % 2)  # the other half of the item
        for text in forms(pair):
            owner[root(i)] = root(seen.setdefault(text, i))
    found: dict[int, list[SentencePair]] = {}
    for i, pair in enumerate(pairs):
        found.setdefault(root(i), []).append(pair)
    return list(found.values())


def write_text(folder: Path, bitext: int, mono: int | None, tested: int | None) -> dict[str, int]:
    """Write the text of the chain; returns the numbers of lines.

    Args:
        bitext: Pairs of the bitext.
        mono: Lines of monolingual text at most.
        tested: Pairs of dev and of test at most.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held_out = {split: unique(read_ro_sts(split)) for split in ("dev", "test")}
    known = {
        (side, normalised(t)) for p in held_out.values() for q in p for side, t in enumerate(q)
    }
    clean = [
        group
        for group in groups(read_ro_sts("train"))
        if not any((side, normalised(t)) in known for pair in group for side, t in enumerate(pair))
    ]
    Random(1).shuffle(clean)
    train: list[SentencePair] = []
    while len(train) < bitext:
        train += unique(clean.pop())
    english = [pair.target for group in clean for pair in unique(group)]
    english += read_lines(shared_data("multi30k") / "train.en.gz")
    Random(2).shuffle(english)
    splits = {"train": train[:bitext], **{name: p[:tested] for name, p in held_out.items()}}
    for name, pairs in splits.items():
        for language, lines in (
            ("ro", (p.source for p in pairs)),
            ("en", (p.target for p in pairs)),
        ):
            _write(folder / f"{name}.{language}", lines)
    _write(folder / "mono.en", english[:mono])
    return {name: len(pairs) for name, pairs in splits.items()} | {"mono": len(english[:mono])}


def _write(path: Path, lines: Iterable[str]) -> None:
    with open_output(path) as writer:
        for line in lines:
            writer.write_line(line)


def minutes_in_updates(chain: Path) -> float:
    """Add up the time that all models of a chain were trained."""
    seconds = 0.0
    for path in chain.glob("*/metrics.jsonl"):
        records = [json.loads(line) for line in read_lines(path)]
        seconds += max(record.get("seconds", 0.0) for record in records)
    return seconds / 60


def encoder_use(folder: Path) -> float:
    """Measure what another sentence's encoder states cost on dev, in nats a token."""
    printed = command(
        *("evaluate", folder / "chain" / "fused", "--json", "--shuffle-encoder", "--quiet"),
        *("--source", folder / "dev.ro", "--reference", folder / "dev.en"),
    )
    return float(json.loads(printed)["encoder_use"])


def report(folder: Path, scores: list[dict[str, Any]], use: float) -> str:
    """Return the results as Markdown; ``use`` is that of the encoder."""
    leaks = load_section(folder / "chain" / "text" / "report.json", LeakReport)
    costs = load_section(folder / "chain" / "control" / "costs.json", Costs)
    kept = read_report(folder / "chain" / "bt-filtered")
    models = list(dict.fromkeys(score["model"] for score in scores))
    rows = []
    for model in models:
        own = {score["metric"]: score for score in scores if score["model"] == model}
        bleu, chrf = own["BLEU"], own["chrF2"]
        p_values = [own[key]["p_value"] for key in ("BLEU", "chrF2")]
        against = bleu["against"]
        rows.append(
            [
                model,
                bleu["direction"],
                f"{bleu['score']:.2f} ± {bleu['half_width']:.2f}",
                f"{chrf['score']:.2f} ± {chrf['half_width']:.2f}",
                "" if against is None else f"{against}: {', '.join(map(p_cell, p_values))}",
            ]
        )
    signatures = {score["metric"]: score["signature"] for score in scores}
    (mono,) = leaks.mono["en"]
    counts = ", ".join(f"{number:,} {reason}" for reason, number in kept.dropped.items())
    return "\n".join(
        [
            "## Ro-En: back-translation, then a multilingual encoder",
            "",
            f"RO-STS, {sum(c.lines - c.leaked for c in leaks.corpora):,} pairs; "
            f"{mono.lines:,} lines of English text, of which {mono.leaked:,} stand in dev or test "
            f"and were left out; {kept.kept:,} synthetic pairs kept, dropped: {counts or 'none'}. "
            f"p of a paired bootstrap against the row named, BLEU and chrF; the control is bt "
            f"trained on for the time that fused took, a step of which cost "
            f"{costs.fused_step / costs.plain_step:.2f} of its own, and the encoder's states "
            f"{costs.encoding:.0f} s once. With another sentence's states fused loses "
            f"{use:.3f} nats a token of dev. {minutes_in_updates(folder / 'chain'):.0f} minutes of "
            "updates in all. Made by `benchmarks/backtranslation_ro_en.py`.",
            "",
            table(["model", "direction", "BLEU", "chrF", "p against"], rows),
            "",
            f"Signatures: BLEU `{signatures['BLEU']}`, chrF `{signatures['chrF2']}`",
        ]
    )


def p_cell(p_value: float | None) -> str:
    """Write a p-value; there is none where the scores are equal."""
    return "equal" if p_value is None else f"{p_value:.3f}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "backtranslation_ro_en")
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    arguments = parser.parse_args()
    folder = arguments.out / ("quick" if arguments.quick else "full")
    if arguments.quick:
        write_text(folder, bitext=200, mono=300, tested=20)
    else:
        write_text(folder, BITEXT, None, None)
    overrides = [f"fusion.encoder={ENCODER}", *(QUICK if arguments.quick else ()), *arguments.set]
    recipe = load_recipe(RECIPE, BacktranslationRecipe, overrides, folder=folder)
    path = folder / "recipe.toml"
    write_recipe(path, recipe)
    chain = folder / "chain"
    command("train", path, "--out", chain, "--resume", module="backtranslation")
    printed = command("evaluate", chain, "--json", "--quiet", module="backtranslation")
    scores = json.loads(printed)["scores"]
    use = encoder_use(folder)
    found = {"scores": scores, "encoder_use": use}
    text = report(folder, scores, use)
    publish("backtranslation-ro-en", text, found, folder, quick=arguments.quick)


if __name__ == "__main__":
    main()
