"""How fast is the layer-wise model? A training step and decoding, beside CADec's and the base's.

One thread, CPU seconds, in one process; the systems take turns on the same work, a ratio is of
one turn, and the median is quoted.

Training: one update on the same sentences of the main model (layer-wise weighting and input-aware
gating), of CADec and of Zhang et al.'s, on top of the same frozen base: a large one with random
weights, and a small trained one. CADec draws the drafts of half of its batches from references and
samples those of the other half, so both kinds are timed on every batch, and a step of CADec is the
mean of the two. A base with random weights samples as many tokens as the reference has. Target
tokens are real ones, without padding.

Decoding, on both bases: the same documents in context, sentence after sentence, and by the base as
single sentences: all in full batches, and for comparison in the same rounds as the others, a
sentence of each document at a time. With random weights a translation is as long as its source.
Before that all are translated by the trained models in small batches too, and the lines that come
out otherwise are counted: there should be none.

The claims are refuted by the median: main trains on at least 1.8 times as many tokens a second as
CADec, decodes at least 1.8 times as fast as CADec, and takes at most 1.5 times as long as the
base.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import REPOSITORY, peak_memory, publish, spread, table
from context_documents import Budget, Experiment
from documents_en_de import recipe_sections
from jaxtyping import Int
from torch import Tensor

from bertfused.config import SearchConfig, check_recipe
from bertfused.console import keep_freed_memory
from bertfused.data import DataFolder
from bertfused.fit import DevSet, Setup
from bertfused.packed import pack_linears
from bertfused.run import save_evaluated
from bertfused.training import Place, steps
from bertfused.translate import SourceLine, Translator
from docnmt import cadec
from docnmt.cli import MODE
from docnmt.config import DocumentRecipe
from docnmt.fit import set_up
from docnmt.sequential import DocumentLineTranslator
from docnmt.translate import AnyTranslator, load

CPU = torch.device("cpu")
CONTEXTS = {"main": "layerwise", "cadec": "cadec", "zhang": "zhang"}
# Of each kind of step, the system and the share of CADec's batches with drafts of references.
REFERENCES, SAMPLES = "CADec, drafts of references", "CADec, sampled drafts"
STEPS = {
    "main": ("main", 1.0),
    REFERENCES: ("cadec", 1.0),
    SAMPLES: ("cadec", 0.0),
    "Zhang et al.": ("zhang", 1.0),
}
TITLES = {
    "base": "base",
    "base_in_rounds": "base, in rounds",
    "main": "main",
    "cadec": "CADec",
    "zhang": "Zhang et al.",
}
LEAST_CADEC, MOST_BASE = 1.8, 1.5


@dataclass(frozen=True)
class Runs:
    """What ``context_documents.py`` leaves for one corpus.

    Attributes:
        data: DATA of all RUNs.
        test: The documents to translate.
    """

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def test(self) -> Path:
        return self.folder / "test.tsv"

    def lines(self, translator: AnyTranslator) -> list[SourceLine]:
        """Read the documents as a model reads them."""
        found = MODE.source_lines(self.test, translator.documents)
        return [line for line in found if isinstance(line, SourceLine)]

    def check(self) -> None:
        """Stop with a sentence where something is missing."""
        for name in ("base", *CONTEXTS, "data", "test.tsv"):
            if not (self.folder / name).exists():
                sys.exit(
                    f"{self.folder / name} is missing; make it with context_documents.py "
                    "--systems main cadec zhang"
                )


def random_base(folder: Path, data: Path, sizes: dict[str, int]) -> Path:
    """Write a base of given sizes with random weights."""
    out = folder / "random-base"
    sections = recipe_sections("xx", 1, 1, 0)
    del sections["subwords"]
    sections["model"] |= sizes
    recipe = check_recipe(sections, DocumentRecipe, "the base", folder=folder)
    setup = set_up(recipe, DataFolder.open(data), None, CPU)
    save_evaluated(out, setup.trainer, setup.card, data)
    return out


# ---------------------------------------------------------------------------- training


def setups(base: Path, data: Path, batch_tokens: int) -> dict[str, Setup]:
    """Put fresh context layers of each kind on a base."""
    sections = recipe_sections("xx", 1000, 1, 0)
    del sections["subwords"], sections["model"]
    sections["train"]["batch_tokens"] = batch_tokens
    folder = DataFolder.open(data)
    found = {}
    for name, model in CONTEXTS.items():
        sections["context"] = {"model": model}
        recipe = check_recipe(sections, DocumentRecipe, model, folder=data)
        found[name] = set_up(recipe, folder, base, CPU)
    return found


@contextmanager
def drafts(share: float, *, natural_lengths: bool) -> Iterator[None]:
    """Set the share of CADec's batches whose drafts are of references.

    Args:
        natural_lengths: End each sample where its reference ends, at the latest.
    """
    with patch.object(cadec, "REFERENCE_SHARE", share):
        if not natural_lengths:
            yield
            return
        with patch.object(cadec, "longest", reference_lengths):
            yield


def reference_lengths(
    config: SearchConfig, lengths: Int[Tensor, "batch"], positions: int
) -> Int[Tensor, "batch"]:
    """Take the place of ``bertfused.search.longest``; one more token is the end symbol."""
    return lengths.clamp(min=2) - 1


def time_training(
    base: Path, data: Path, batch_tokens: int, turns: int, warm_up: int, *, is_random: bool
) -> dict[str, Any]:
    """Time updates, one of each kind in turn on the same sentences."""
    systems = setups(base, data, batch_tokens)
    stream = steps(
        systems["main"].train, batch_tokens=batch_tokens, accumulate=1, seed=1, start=Place()
    )
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    tokens = []
    for number, step in enumerate(itertools.islice(stream, warm_up + turns), start=1):
        for kind, (name, share) in in_turn(STEPS, number):
            with drafts(share, natural_lengths=is_random):
                begin = time.process_time()
                systems[name].trainer.update(systems[name].train, step, number)
                seconds[kind].append(time.process_time() - begin)
        tokens.append(step.target_tokens)
    card = systems["main"].card.model
    return {
        "seconds": {kind: times[warm_up:] for kind, times in seconds.items()},
        "tokens": tokens[warm_up:],
        "precision": systems["main"].trainer.precision,
        "model": card.model_dump(mode="json"),
        "new_parameters": {
            name: sum(parameter.numel() for parameter in setup.trainer.parameters.values())
            for name, setup in systems.items()
        },
        "is_random": is_random,
        "peak_mib": peak_memory(),
    }


def in_turn(systems: dict[str, Any], turn: int) -> list[tuple[str, Any]]:
    """Return the systems in an order that is reversed every other turn."""
    return list(systems.items())[:: 1 if turn % 2 == 0 else -1]


def with_cadec(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Add a step of CADec as it trains: the mean of both kinds of drafts."""
    both = zip(seconds[REFERENCES], seconds[SAMPLES], strict=True)
    return {"main": seconds["main"], "CADec": [statistics.mean(pair) for pair in both], **seconds}


# ---------------------------------------------------------------------------- decoding


def first_documents(lines: list[SourceLine], documents: int) -> list[SourceLine]:
    """Return the lines of the first documents."""
    names = list(dict.fromkeys(line.document for line in lines))[:documents]
    return [line for line in lines if line.document in set(names)]


def random_translators(base: Path, data: Path) -> dict[str, AnyTranslator]:
    """Return the base and fresh context layers of each kind on it, as they would be loaded."""
    translators: dict[str, AnyTranslator] = {"base": Translator.load(base, device="cpu")}
    for name, setup in setups(base, data, batch_tokens=1000).items():
        pack_linears(setup.trainer.module, CPU)
        assert isinstance(setup.validator, DevSet)
        translator = setup.validator.translator
        assert isinstance(translator, DocumentLineTranslator)
        translators[name] = translator
    return translators


def time_decoding(
    translators: dict[str, AnyTranslator],
    lines: list[SourceLine],
    turns: int,
    search: SearchConfig | None = None,
    *,
    is_random: bool = False,
) -> dict[str, Any]:
    """Translate documents with every system, in turns.

    Trained ones do it twice before: to be warmed up, and in small batches.
    """
    base = translators["base"]
    assert isinstance(base, Translator)
    systems: dict[str, Callable[..., list[str]]] = {
        name: partial(texts, system, lines, search) for name, system in translators.items()
    }
    systems["base_in_rounds"] = partial(texts_in_rounds, base, lines, search)
    given: dict[str, list[str]] = {}
    small: dict[str, list[str]] = {}
    if not is_random:
        given = {name: translate() for name, translate in systems.items()}
        small = {name: translate(batch_tokens=100) for name, translate in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(turns):
        for name, translate in in_turn(systems, turn):
            begin = time.process_time()
            given[name] = translate()
            seconds[name].append(time.process_time() - begin)
    card = base.members[0].card.model
    return {
        "lines": len(lines),
        "documents": len({line.document for line in lines}),
        "seconds": seconds,
        "changed": {name: different(given[name], other) for name, other in small.items()},
        "unlike_base": {name: different(other, given["base"]) for name, other in given.items()},
        "model": card.model_dump(mode="json"),
        "is_random": is_random,
        "peak_mib": peak_memory(),
    }


def texts(
    translator: AnyTranslator,
    lines: list[SourceLine],
    search: SearchConfig | None,
    batch_tokens: int = 4096,
) -> list[str]:
    """Translate lines."""
    return [
        translation.text
        for translation in translator.translate(lines, search, batch_tokens=batch_tokens)
    ]


def texts_in_rounds(
    translator: AnyTranslator,
    lines: list[SourceLine],
    search: SearchConfig | None,
    batch_tokens: int = 4096,
) -> list[str]:
    """Translate the first lines of all documents, then the second ones, and so on."""
    rounds: dict[int, list[int]] = defaultdict(list)
    met: Counter[str | None] = Counter()
    for number, line in enumerate(lines):
        rounds[met[line.document]].append(number)
        met[line.document] += 1
    found = [""] * len(lines)
    for numbers in rounds.values():
        translated = texts(translator, [lines[i] for i in numbers], search, batch_tokens)
        for i, text in zip(numbers, translated, strict=True):
            found[i] = text
    return found


def different(ours: list[str], theirs: list[str]) -> int:
    """Return how many lines differ."""
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------------- report


def ratios(seconds: dict[str, list[float]], name: str, other: str) -> list[float]:
    """Return what each turn of a system cost in those of another."""
    return [a / b for a, b in zip(seconds[name], seconds[other], strict=True)]


def kind_of_base(found: dict[str, Any]) -> str:
    """Describe the base of some measurements."""
    model, weights = found["model"], "random weights" if found["is_random"] else "trained"
    layers = f"{model['encoder_layers']} + {model['decoder_layers']} layers"
    return f"a base of {layers}, width {model['model_dim']}, {weights}"


def report_training(found: dict[str, Any]) -> list[str]:
    """Write one table of training steps."""
    seconds = with_cadec(found["seconds"])
    new = {"main": "main", "CADec": "cadec", "Zhang et al.": "zhang"}
    rows = [
        [
            name,
            f"{found['new_parameters'][new[name]]:,}" if name in new else "",
            f"{1000 * statistics.median(times):,.0f}",
            f"{statistics.median(n / s for n, s in zip(found['tokens'], times, strict=True)):,.0f}",
            spread(ratios(seconds, name, "main")),
        ]
        for name, times in seconds.items()
    ]
    return [
        f"Training on {kind_of_base(found)}; {found['precision']}, "
        f"{statistics.mean(found['tokens']):,.0f} target tokens a step, {len(found['tokens'])} "
        "turns:",
        "",
        table(
            ["step", "trained parameters", "CPU ms", "target tokens a CPU second", "in main's"],
            rows,
        ),
        "",
    ]


def report_decoding(found: dict[str, Any]) -> list[str]:
    """Write one table of translating documents."""
    seconds = found["seconds"]
    rows = [
        [
            TITLES[name],
            f"{found['lines'] / statistics.median(seconds[name]):.1f}",
            spread(ratios(seconds, name, "base")),
            spread(ratios(seconds, name, "main")),
            found["unlike_base"][name],
            found["changed"].get(name, ""),
        ]
        for name in TITLES
    ]
    return [
        f"Decoding {found['documents']} documents of {found['lines']:,} sentences on "
        f"{kind_of_base(found)}; beam 5, fp32, {len(seconds['base'])} turns. Peak memory "
        f"{found['peak_mib']:,.0f} MiB with all models:",
        "",
        table(
            [
                *("model", "sentences a CPU second", "in the base's time", "in main's time"),
                *("not as the base", "changed in small batches"),
            ],
            rows,
        ),
        "",
    ]


def verdicts(results: dict[str, Any]) -> list[list[str]]:
    """Hold the medians against the claims."""
    rows = []
    for found in results["training"]:
        median = statistics.median(ratios(with_cadec(found["seconds"]), "CADec", "main"))
        claim = f"a step of CADec costs at least {LEAST_CADEC} of main's, width "
        rows.append(verdict(claim, found, median, median >= LEAST_CADEC))
    for found in results["decoding"]:
        median = statistics.median(ratios(found["seconds"], "cadec", "main"))
        claim = f"CADec decodes in at least {LEAST_CADEC} times main's time, width "
        rows.append(verdict(claim, found, median, median >= LEAST_CADEC))
        median = statistics.median(ratios(found["seconds"], "main", "base"))
        claim = f"main decodes in at most {MOST_BASE} times the base's time, width "
        rows.append(verdict(claim, found, median, median <= MOST_BASE))
    return rows


def verdict(claim: str, found: dict[str, Any], median: float, holds: bool) -> list[str]:
    """Write one row; the claim ends in the width of the base."""
    return [f"{claim}{found['model']['model_dim']}", f"{median:.2f}", "yes" if holds else "**no**"]


def report(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    return "\n".join(
        [
            "## Context-aware models: speed",
            "",
            "CPU seconds on one thread, in one process: median of the turns and spread. Made by "
            "`benchmarks/context_speed.py`.",
            "",
            *(line for found in results["training"] for line in report_training(found)),
            *(line for found in results["decoding"] for line in report_decoding(found)),
            table(["claim", "median", "holds"], verdicts(results)),
        ]
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    documents = REPOSITORY / "runs" / "context_documents" / "bcontrast"
    parser.add_argument(
        "--runs", type=Path, default=documents, help="what context_documents.py left of a corpus"
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "context_speed")
    parser.add_argument("--model-dim", type=int, default=512, help="of the base of random weights")
    parser.add_argument("--ffn-dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6, help="on either side")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--documents", type=int, default=50)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--random-turns", type=int, default=2, help="of decoding on that base")
    parser.add_argument("--quick", action="store_true", help="half a minute, no meaning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every command does
    runs, search = Runs(arguments.runs), None
    sizes = {
        "model_dim": arguments.model_dim,
        "ffn_dim": arguments.ffn_dim,
        "heads": arguments.heads,
        "encoder_layers": arguments.layers,
        "decoder_layers": arguments.layers,
    }
    updates, warm_up, turns = arguments.updates, 3, arguments.turns
    batch_tokens, count = arguments.batch_tokens, arguments.documents
    if arguments.quick:
        search = SearchConfig(max_length_b=5)  # a model without training never ends
        budget = Budget(1, 1, 400, lines=60, steps=1, search={"max_length_b": 5})
        Experiment(arguments.out, "bcontrast", budget).go(list(CONTEXTS))
        runs = Runs(arguments.out / "bcontrast")
        sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
        updates, warm_up, turns, batch_tokens, count = 2, 0, 1, 200, 3
    runs.check()
    base = random_base(arguments.out, runs.data, sizes)
    trained = {name: load(runs.folder / name, device="cpu") for name in ("base", *CONTEXTS)}
    lines = first_documents(runs.lines(trained["base"]), count)
    results = {
        "training": [
            time_training(folder, runs.data, batch_tokens, updates, warm_up, is_random=is_random)
            for folder, is_random in ((base, True), (runs.folder / "base", False))
        ],
        "decoding": [
            time_decoding(
                random_translators(base, runs.data),
                lines,
                min(turns, arguments.random_turns),
                SearchConfig(max_length_a=1.0, max_length_b=0),
                is_random=True,
            ),
            time_decoding(trained, lines, turns, search),
        ],
    }
    publish("context-speed", report(results), results, arguments.out, quick=arguments.quick)


if __name__ == "__main__":
    main()
