"""What does fusion cost: a training step, and beam-5 decoding, beside the plain model's?

One thread, CPU seconds, in one process; the systems take turns on the same work, a ratio is of
one turn, and the median is quoted.

Training: one update of the same micro-batch, of the plain model and of the fused one with cached
encoder states, at drop-net rates 0 (both attentions of every layer are computed) and 1 (one).

Decoding: the plain model, and a fused one that starts from it function-preserving, so that both
search the same and give the same translations, which is checked; with encoder states computed
before the clock starts, and with the encoder run online in fp32 and in bf16. How many translations
bf16 changes is counted with a fused model that was trained; states at hand must change none.

The claims are refuted by a larger median: a step costs at most 1.1 plain steps at drop-net rate 1
and at most 1.45 at 0; decoding costs at most 1.2 times the plain model's with states at hand and
at most 1.6 times with the encoder online.
"""

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from common import (
    REPOSITORY,
    SmallModels,
    peak_memory,
    publish,
    spread,
    table,
    text_to_translate,
)

from bertfused.batch import Example, collate
from bertfused.checkpoint import load_model
from bertfused.config import Recipe, SearchConfig, load_recipe
from bertfused.console import keep_freed_memory
from bertfused.data import DataFolder
from bertfused.fit import build_trainer, examples
from bertfused.training import Place, steps
from bertfused.translate import Member, SourceLine, Translator

SEARCH = SearchConfig(beam_size=5)
QUICK_SEARCH = SearchConfig(beam_size=5, max_length_b=5)  # a model without training never ends
T = TypeVar("T")
STEPS = {
    "plain": ["fusion=none"],
    "fused, drop-net 1": ["fusion.drop_net=1.0"],
    "fused, drop-net 0": ["fusion.drop_net=0.0"],
}


@dataclass(frozen=True)
class Models:
    """A plain RUN, a fused RUN of the same dictionaries, and its DATA with cached states."""

    plain: Path
    fused: Path
    data: Path

    @property
    def recipe(self) -> Path:
        return self.fused / "config.toml"


def in_turn(systems: dict[str, T], turn: int) -> list[tuple[str, T]]:
    """Return the systems in an order that is reversed every other turn."""
    return list(systems.items())[:: 1 if turn % 2 == 0 else -1]


def time_training(models: Models, updates: int, warm_up: int) -> dict[str, Any]:
    """Time updates of freshly built models, one of each in turn on the same micro-batch.

    Args:
        warm_up: Updates of each before those that are counted.
    """
    folder = DataFolder.open(models.data)
    loaded = {name: load_recipe(models.recipe, Recipe, own) for name, own in STEPS.items()}
    trainers = {name: build_trainer(own, folder)[0] for name, own in loaded.items()}
    sets = {name: examples(folder, "train", own.module.encoder) for name, own in trainers.items()}
    fused = sets["fused, drop-net 1"]
    if fused[0].bert_states is None:
        sys.exit(f"{models.data} has no cached states of the encoder of {models.fused}")
    tokens = loaded["plain"].train.batch_tokens
    stream = steps(fused, batch_tokens=tokens, accumulate=1, seed=1, start=Place())
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    padding = []
    for number, step in enumerate(itertools.islice(stream, warm_up + updates), start=1):
        for name, trainer in in_turn(trainers, number):
            begin = time.process_time()
            update = trainer.update(sets[name], step, number)
            seconds[name].append(time.process_time() - begin)
        padding.append(update.padding)
    return {
        "seconds": {name: own[warm_up:] for name, own in seconds.items()},
        "batch_tokens": tokens,
        "padding": statistics.mean(padding),
        "precision": trainers["plain"].precision,
        "peak_mib": peak_memory(),
    }


@dataclass
class MemberWithStates(Member):
    """A fused model to which the pretrained encoder's states are known beforehand.

    Args:
        known: By line of text, an example with the states.
    """

    known: dict[str, Example]

    def examples(self, lines: Sequence[SourceLine], counts: Counter[str]) -> list[Example]:
        """Make the ids of lines, with the states for them."""
        unread = Member(self.card, self.model, self.source, self.target, None)
        known = [self.known[line.text] for line in lines]
        return [
            replace(example, bert=own.bert, bert_states=own.bert_states)
            for example, own in zip(unread.examples(lines, counts), known, strict=True)
        ]


def fused_from(plain: Path, recipe: Path, data: Path) -> Member:
    """Return a fused model that computes what the plain one does."""
    folder = DataFolder.open(data)
    loaded = load_recipe(recipe, Recipe, ["fusion.start=function-preserving"])
    trainer, card, _ = build_trainer(loaded, folder, init=plain)
    return Member(card, trainer.module.model, *folder.tokenizers(), trainer.module.encoder)


def ways(member: Member, lines: list[str]) -> dict[str, Translator]:
    """Return translators with a fused model, one for each way to get the encoder's states."""
    device = torch.device("cpu")
    bf16 = replace(member, encoder=copy.deepcopy(member.encoder).to(torch.bfloat16))
    return {
        "fused, states at hand": Translator([with_states(member, lines)], device),
        "fused, encoder in fp32": Translator([member], device),
        "fused, encoder in bf16": Translator([bf16], device),
    }


@torch.inference_mode()
def with_states(member: Member, lines: list[str]) -> MemberWithStates:
    """Return a member that has the encoder's states of some lines."""
    assert member.encoder is not None
    known = {}
    for line in lines:
        (example,) = member.examples([SourceLine(line)], Counter())
        batch = collate([example], member.encoder.bert_ids)
        assert batch.bert is not None and batch.bert_mask is not None
        states = member.encoder(batch.bert, batch.bert_mask, batch.bert_segments)[0]
        known[line] = replace(example, bert_states=states)
    parts = (member.card, member.model, member.source, member.target, member.encoder)
    return MemberWithStates(*parts, known)


def texts(
    systems: dict[str, Translator], lines: list[str], search: SearchConfig
) -> dict[str, list[str]]:
    """Translate with every system."""
    return {
        name: [own.text for own in translator.translate(lines, search)]
        for name, translator in systems.items()
    }


def time_decoding(
    models: Models, lines: list[str], turns: int, search: SearchConfig
) -> dict[str, Any]:
    """Translate with every system once, which warms it up, and then in turns."""
    trained = Member.of(load_model(models.fused))
    given = texts(ways(trained, lines), lines, search)
    started = fused_from(models.plain, models.recipe, models.data)
    systems = {"plain": Translator.load(models.plain, device="cpu"), **ways(started, lines)}
    same = texts(systems, lines, search)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(turns):
        for name, translator in in_turn(systems, turn):
            begin = time.process_time()
            list(translator.translate(lines, search))
            seconds[name].append(time.process_time() - begin)
    return {
        "lines": len(lines),
        "seconds": seconds,
        "unlike_plain": {name: different(own, same["plain"]) for name, own in same.items()},
        "changed": {
            name: different(own, given["fused, encoder in fp32"]) for name, own in given.items()
        },
        "peak_mib": peak_memory(),
    }


def different(ours: list[str], theirs: list[str]) -> int:
    """Return how many lines differ."""
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


def ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    """Return what each turn of a system cost in those of the plain model."""
    return [own / plain for own, plain in zip(seconds[name], seconds["plain"], strict=True)]


def report(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    training, decoding = results["training"], results["decoding"]
    step_rows = [
        [name, f"{1000 * statistics.median(own):.0f}", spread(ratios(training["seconds"], name))]
        for name, own in training["seconds"].items()
    ]
    decoding_rows = [
        [
            name,
            f"{decoding['lines'] / statistics.median(own):.0f}",
            spread(ratios(decoding["seconds"], name)),
            decoding["unlike_plain"][name],
            decoding["changed"].get(name, ""),
        ]
        for name, own in decoding["seconds"].items()
    ]
    updates = len(training["seconds"]["plain"])
    return "\n".join(
        [
            "## What fusion costs",
            "",
            "CPU seconds on one thread beside the plain model's: median of the turns and spread. "
            "Made by `benchmarks/fusion_overhead.py`.",
            "",
            f"Training, {training['batch_tokens']:,} tokens a step in {training['precision']}, "
            f"cached encoder states, {updates} updates; {training['padding']:.1%} of the positions "
            f"are padding; peak memory {training['peak_mib']:,.0f} MiB with all three models:",
            "",
            table(["step", "CPU ms", "in plain steps"], step_rows),
            "",
            f"Decoding, beam {SEARCH.beam_size}, fp32, {decoding['lines']:,} lines, "
            f"{len(decoding['seconds']['plain'])} turns; the fused model starts from the plain one "
            "and computes the same. The last column is of a trained fused model: its translations "
            "that are not those of the encoder in fp32. Peak memory "
            f"{decoding['peak_mib']:,.0f} MiB with all models:",
            "",
            table(
                [
                    "model",
                    "sentences a CPU second",
                    "in plain seconds",
                    "not as plain",
                    "changed when trained",
                ],
                decoding_rows,
            ),
        ]
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", type=Path, help="a plain RUN; else a small one is trained")
    parser.add_argument("--fused", type=Path, help="a fused RUN; else a small one is trained")
    parser.add_argument("--data", type=Path, help="DATA of the fused RUN with cached states")
    parser.add_argument("--source", type=Path, help="text to translate; else Multi30k's test set")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "fusion_overhead")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    arguments = parser.parse_args()
    given = [arguments.plain, arguments.fused, arguments.data]
    if any(given) and not all(given):
        parser.error("give --plain, --fused and --data together, or none of them")
    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    small = SmallModels(arguments.out / "models", 5_000, 4_000, 600)
    updates, lines, turns = arguments.updates, arguments.lines, arguments.turns
    warm_up, search = 5, SEARCH
    if arguments.quick:
        small = SmallModels(arguments.out / "quick-models", 100, 400, 1)
        updates, lines, turns = 1, 4, 1
        warm_up, search = 0, QUICK_SEARCH
    parts = given if all(given) else [small.plain(), small.fused(), small.data()]
    models = Models(*parts)
    text_lines = text_to_translate(arguments.source, lines)
    results = {
        "training": time_training(models, updates, warm_up),
        "decoding": time_decoding(models, text_lines, turns, search),
    }
    publish("fusion-overhead", report(results), results, arguments.out, quick=arguments.quick)


if __name__ == "__main__":
    main()
