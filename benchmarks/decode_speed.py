"""How fast is our beam search beside CTranslate2's, with the same weights on the same text?

A plain RUN, fp32, beam 5, one thread. ``bertfused.Translator`` is timed from text to text;
CTranslate2, on the model that ``bertfused export ctranslate2`` wrote, from subwords to subwords,
which is a little less to do, and at the best of a few sizes of its batches. Both run in this
process and take turns; a turn is one translation of the whole text by each, measured in CPU
seconds. The ratio is of the speeds of one turn, ours to theirs; the median is quoted.

The claim, at least 0.7 of CTranslate2's speed (the goal is all of it), is refuted by a smaller
median. The figures mean nothing where the translations, compared subword by subword, are not the
same but for a few near ties.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from common import (
    REPOSITORY,
    SmallModels,
    command,
    peak_memory,
    publish,
    spread,
    table,
    text_to_translate,
)

from bertfused.config import SearchConfig
from bertfused.console import keep_freed_memory
from bertfused.translate import Translator

SEARCH = SearchConfig(beam_size=5, length_penalty=1.0)
QUICK_SEARCH = SearchConfig(beam_size=5, max_length_b=5)  # a model without training never ends

Subwords = Sequence[str]


def cpu_seconds(task: Callable[[], Any]) -> float:
    """Do a task; return the CPU seconds of this process, all threads together."""
    begin = time.process_time()
    task()
    return time.process_time() - begin


class Sides:
    """Both translators on one text, each of which gives the subwords of the best hypotheses."""

    def __init__(self, run: Path, exported: Path, lines: list[str], search: SearchConfig) -> None:
        self.lines, self.search = lines, search
        self.own = Translator.load(run, device="cpu")
        self.other = ctranslate2.Translator(
            str(exported), device="cpu", compute_type="float32", intra_threads=1, inter_threads=1
        )
        member = self.own.members[0]
        symbols = member.source.vocabulary.symbols
        self.source = [[symbols[id] for id in ids] for ids in member.source.encode_batch(lines)]
        self.longest = min(search.max_length_b, member.card.model.max_positions - 1)

    def ours(self) -> list[Subwords]:
        translations = self.own.translate(self.lines, self.search)
        return [translation.hypotheses[0].tokens for translation in translations]

    def theirs(self, batch_size: int) -> list[Subwords]:
        results = self.other.translate_batch(
            self.source,
            max_batch_size=batch_size,
            beam_size=self.search.beam_size,
            length_penalty=self.search.length_penalty,
            max_decoding_length=self.longest,
            suppress_sequences=[["<s>"], ["<pad>"]],  # as our search
        )
        return [result.hypotheses[0] for result in results]


def compare(sides: Sides, turns: int, batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Compare the translations, which warms both up, and let both take turns."""
    ours = sides.ours()
    memory = peak_memory()
    theirs = sides.theirs(batch_sizes[0])
    same = sum(tuple(a) == tuple(b) for a, b in zip(ours, theirs, strict=True))
    best = min(batch_sizes, key=lambda size: cpu_seconds(lambda: sides.theirs(size)))
    measured = []
    tasks = [("ours", sides.ours), ("ctranslate2", lambda: sides.theirs(best))]
    for turn in range(turns):
        order = tasks[:: 1 if turn % 2 == 0 else -1]  # who begins takes turns too
        seconds = {side: cpu_seconds(task) for side, task in order}
        measured.append(seconds | {"ratio": seconds["ctranslate2"] / seconds["ours"]})
    return {
        "turns": measured,
        "lines": len(ours),
        "target_tokens": sum(map(len, ours)) + len(ours),  # EOS included
        "equal_translations": same,
        "their_batch_size": best,
        "peak_mib": {"ours": memory, "both": peak_memory()},
        "ctranslate2": ctranslate2.__version__,
    }


def report(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    turns, rows = results["turns"], []
    for side in ("ours", "ctranslate2"):
        seconds = statistics.median(turn[side] for turn in turns)
        speeds = (results["lines"] / seconds, results["target_tokens"] / seconds)
        rows.append([side, *(f"{speed:,.0f}" for speed in speeds)])
    memory = results["peak_mib"]
    return "\n".join(
        [
            "## Beam search: ours and CTranslate2's",
            "",
            f"Plain model, beam 5, fp32, one thread, {results['lines']:,} lines; CTranslate2 "
            f"{results['ctranslate2']}. Made by `benchmarks/decode_speed.py`.",
            "",
            table(["", "sentences a CPU second", "target tokens a CPU second"], rows),
            "",
            f"Ours to theirs, median of {len(turns)} turns and spread: "
            f"{spread([turn['ratio'] for turn in turns])}.",
            "",
            f"Equal translations: {results['equal_translations']:,} of {results['lines']:,}. "
            f"CTranslate2's best batch size: {results['their_batch_size']}. Peak memory: "
            f"{memory['ours']:,.0f} MiB with ours, {memory['both']:,.0f} MiB with both in one "
            "process.",
        ]
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a plain RUN; else a small one is trained")
    parser.add_argument("--source", type=Path, help="text to translate; else Multi30k's test set")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "decode_speed")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    arguments = parser.parse_args()
    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    small = SmallModels(arguments.out / "models", 5_000, 4_000, 600)
    lines, turns, batch_sizes = arguments.lines, arguments.turns, [32, 64, 128, 256]
    search = SEARCH
    if arguments.quick:
        small = SmallModels(arguments.out / "quick-models", 100, 400, 1)
        lines, turns, batch_sizes, search = 8, 2, [8], QUICK_SEARCH
    run = arguments.run or small.plain()
    text_lines = text_to_translate(arguments.source, lines)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "exported")
        command("export", "ctranslate2", run, "--out", exported, "--quiet")
        sides = Sides(run, exported, text_lines, search)
    results = compare(sides, turns, batch_sizes)
    publish("decoding", report(results), results, arguments.out, quick=arguments.quick)


if __name__ == "__main__":
    main()
