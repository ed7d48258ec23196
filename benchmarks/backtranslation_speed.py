"""How much monolingual text is back-translated in a second, by us and by others?

One plain RUN, and one fused RUN, on the same lines of Multi30k's English training text, with beam 5
and with sampling from the whole distribution; one thread. Compared are

- ours, plain and fused: our decoder, block by block as ``backtranslation generate --engine torch``
  gives it the text, from lines to lines;
- CTranslate2 in fp32 and int8, alone: ``ctranslate2.Translator`` on the model that ``bertfused
  export ctranslate2`` wrote, from subwords to subwords, all lines at once, so that it can sort them
  by length, in batches of the number of tokens that was fastest of a few on a part of the text;
- ``backtranslation generate --engine ctranslate2``, the command: the same with our reading,
  sharding, manifests and writing (it refuses to sample);
- ``fairseq-generate`` in fp32 on ids and on the weights that ``bertfused export fairseq`` wrote.

The first two are timed in this process after they were warmed up, the others, which are programs,
for a part and for all of the text, so that start-up drops out of the difference; all in CPU
seconds. Nothing writes the unknown symbol. They take turns, in another order each time; a ratio is
of the speeds in one turn, in real target tokens, EOS counted (of `generate`, which writes text, in
lines), and its median is quoted. What was measured is kept in a file as it comes: a benchmark that
was stopped goes on.

The figures mean nothing where the beam search of the same model in fp32 gives other translations,
but for near ties: their share is printed, and too few equal ones stop the benchmark. The claims are
refuted by smaller medians: ours, plain, has at least 0.75 of CTranslate2's speed in fp32 and 3
times fairseq's with beam 5; generation with CTranslate2 takes at most 1.1 times its time alone.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ctranslate2
import torch
from common import (
    REPOSITORY,
    SmallModels,
    command,
    publish,
    shared_data,
    spread,
    table,
    text_to_translate,
)
from speed_vs_fairseq import ALWAYS, PLUGIN, cpu_seconds

from backtranslation.shards import BLOCK
from bertfused.checkpoint import load_card, model_folder
from bertfused.config import SearchConfig
from bertfused.console import keep_freed_memory
from bertfused.store import IdStoreWriter
from bertfused.subwords import Tokenizer, load_tokenizer
from bertfused.translate import Translator
from bertfused.vocab import Vocabulary

BATCH_TOKENS = 4096  # of all but CTranslate2 alone
LEAST_EQUAL = 0.95
COLUMNS = ("lines", "target tokens", "to CTranslate2's, fp32")
SEARCHES: dict[str, dict[str, Any]] = {"beam 5": {"beam_size": 5}, "sampling": {"sampling": "full"}}

PLAIN, FUSED, INT8, FAIRSEQ = "ours, plain", "ours, fused", "CTranslate2, int8", "fairseq"
ALONE, GENERATE = "CTranslate2, fp32", "generate with CTranslate2, fp32"


@dataclass(frozen=True)
class Done:
    """What a system did with some lines.

    Attributes:
        tokens: Target tokens, EOS counted.
    """

    seconds: float
    tokens: int
    texts: list[str]


class System(Protocol):
    """Translates the first lines of the text; ``searches`` are those that it can do.

    The seconds of one that starts anew have its start-up in them.
    """

    @property
    def searches(self) -> Sequence[str]: ...
    @property
    def starts_anew(self) -> bool: ...
    def __call__(self, search: str, lines: int) -> Done: ...


@dataclass(frozen=True)
class Task:
    """The text, a plain RUN for it, and a folder for what the programs read and write."""

    run: Path
    lines: list[str]
    searches: Mapping[str, SearchConfig]
    folder: Path

    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        folder = model_folder(self.run)
        card = load_card(folder)
        return load_tokenizer(folder, card.source), load_tokenizer(folder, card.target)

    def exported(self, program: str) -> Path:
        """Return the plain model as a program reads it."""
        folder = self.folder / program
        if not folder.exists():
            command("export", program, self.run, "--out", folder, "--quiet")
        return folder


class Ours:
    """Our decoder in this process."""

    searches = tuple(SEARCHES)
    starts_anew = False

    def __init__(self, run: Path, task: Task) -> None:
        self.task = task
        self.translator = Translator.load(run, device="cpu")

    def __call__(self, search: str, lines: int) -> Done:
        # As generate has it: the unknown symbol is out of reach.
        config = self.task.searches[search].model_copy(update={"unk_penalty": 1e9})
        texts, tokens = [], 0
        begin = time.process_time()
        for start in range(0, lines, BLOCK):
            block = self.task.lines[start : min(start + BLOCK, lines)]
            for translation in self.translator.translate(
                block, config, batch_tokens=BATCH_TOKENS, first_line=start
            ):
                texts.append(translation.text)
                tokens += len(translation.hypotheses[0].tokens) + 1
        return Done(time.process_time() - begin, tokens, texts)


class Alone:
    """CTranslate2 in this process, on pieces that are encoded already.

    Attributes:
        batch_tokens: Of a batch, for each search.
    """

    searches = tuple(SEARCHES)
    starts_anew = False

    def __init__(self, compute_type: str, task: Task) -> None:
        self.task = task
        self.translator = ctranslate2.Translator(
            str(task.exported("ctranslate2")),
            device="cpu",
            compute_type=compute_type,
            intra_threads=1,
            inter_threads=1,
        )
        source, self.target = task.tokenizers()
        symbols = source.vocabulary.symbols
        self.pieces = [[symbols[id] for id in ids] for ids in source.encode_batch(task.lines)]
        never = (Vocabulary.bos, Vocabulary.pad, Vocabulary.unk)
        self.never = [[self.target.vocabulary.symbols[id]] for id in never]
        self.batch_tokens = dict.fromkeys(SEARCHES, BATCH_TOKENS)

    def __call__(self, search: str, lines: int) -> Done:
        config = self.task.searches[search]
        begin = time.process_time()
        results = self.translator.translate_batch(
            self.pieces[:lines],
            max_batch_size=self.batch_tokens[search],
            batch_type="tokens",
            beam_size=1 if config.sampling else config.beam_size,
            sampling_topk=0 if config.sampling else 1,  # 0 is all of the vocabulary
            length_penalty=config.length_penalty,
            max_decoding_length=config.max_length_b,
            max_input_length=0,
            suppress_sequences=self.never,
        )
        seconds = time.process_time() - begin
        found = [result.hypotheses[0] for result in results]
        id_of = self.target.vocabulary.id_of
        texts = [self.target.decode([id_of(symbol) for symbol in symbols]) for symbols in found]
        return Done(seconds, sum(map(len, found)) + len(found), texts)

    def fastest(self, sizes: Sequence[int], lines: int) -> dict[str, int]:
        """Find the fastest of some sizes of a batch, for each search."""
        found = {}
        for search in self.searches:
            seconds = {}
            for size in sizes:
                self.batch_tokens[search] = size
                seconds[size] = self(search, lines).seconds
            found[search] = min(sizes, key=lambda size: seconds[size])
        return found


class Generate:
    """The command ``backtranslation generate`` with CTranslate2."""

    searches = ("beam 5",)
    starts_anew = True

    def __init__(self, task: Task) -> None:
        self.task = task
        _, self.target = task.tokenizers()

    def __call__(self, search: str, lines: int) -> Done:
        mono = self.task.folder / f"{lines}.txt"
        mono.write_text("".join(f"{line}\n" for line in self.task.lines[:lines]))
        config = self.task.searches[search]
        line = [sys.executable, "-m", "backtranslation", "generate", str(self.task.run), "--quiet"]
        line += ["--mono", str(mono), "--engine", "ctranslate2", "--device", "cpu"]
        line += ["--beam-size", str(config.beam_size), "--max-length-b", str(config.max_length_b)]
        with tempfile.TemporaryDirectory(dir=self.task.folder) as folder:
            out = Path(folder, "generated")
            seconds, _ = cpu_seconds([*line, "--out", str(out)])
            (written,) = out.glob("synthetic.*")
            texts = written.read_text().split("\n")[:-1]
        tokens = sum(map(len, self.target.encode_batch(texts))) + lines
        return Done(seconds, tokens, texts)


class Fairseq:
    """The command ``fairseq-generate``, on ids."""

    searches = tuple(SEARCHES)
    starts_anew = True

    def __init__(self, python: Path, task: Task) -> None:
        self.program, self.task = python.parent / "fairseq-generate", task
        self.source, self.target = task.tokenizers()
        self.checkpoint = task.exported("fairseq") / "checkpoint.pt"
        card = load_card(model_folder(task.run))
        self.languages = (card.source, card.target)
        self.plugin = task.folder / "plugin"
        self.plugin.mkdir(exist_ok=True)
        (self.plugin / "__init__.py").write_text(PLUGIN)

    def __call__(self, search: str, lines: int) -> Done:
        config, (source, target) = self.task.searches[search], self.languages
        line = [str(self.program), str(self._data(lines)), "-s", source, "-t", target]
        line += ["--path", str(self.checkpoint), "--gen-subset", "test", "--unkpen", "1e9"]
        line += ["--max-tokens", str(BATCH_TOKENS), "--max-len-b", str(config.max_length_b)]
        if config.sampling:
            line += ["--sampling", "--beam", "1", "--nbest", "1"]
        else:
            line += ["--beam", str(config.beam_size)]
        seconds, printed = cpu_seconds([*line, *ALWAYS, "--user-dir", str(self.plugin)])
        found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", printed, re.MULTILINE)
        ordered = [symbols.split() for _, symbols in sorted((int(i), s) for i, s in found)]
        id_of = self.target.vocabulary.id_of
        texts = [self.target.decode([id_of(symbol) for symbol in symbols]) for symbols in ordered]
        return Done(seconds, sum(map(len, ordered)) + len(ordered), texts)

    def _data(self, lines: int) -> Path:
        """Write the ids of the first lines, and the dictionaries."""
        source, target = self.languages
        data = self.task.folder / f"ids{lines}"
        if not (data / f"dict.{target}.txt").exists():
            data.mkdir(exist_ok=True)
            with IdStoreWriter(data / f"test.{source}-{target}.{source}", 60_000) as writer:
                for ids in self.source.encode_batch(self.task.lines[:lines]):
                    writer.append([*ids, Vocabulary.eos])
            for language in self.languages:
                name = f"dict.{language}.txt"
                (data / name).write_bytes((model_folder(self.task.run) / name).read_bytes())
        return data


def measure(system: System, search: str, lines: int) -> dict[str, float]:
    """Return the seconds and target tokens of some lines; of most of them, if start-up counts."""
    whole = system(search, lines)
    if not system.starts_anew:
        return {"seconds": whole.seconds, "tokens": whole.tokens, "lines": lines}
    few = max(1, lines // 50)
    part = system(search, few)
    return {
        "seconds": whole.seconds - part.seconds,
        "tokens": whole.tokens - part.tokens,
        "lines": lines - few,
    }


def agreement(systems: Mapping[str, System], lines: int) -> dict[str, float]:
    """Compare the beam search of the plain model with ours; returns the shares of equal lines."""
    ours = systems[PLAIN]("beam 5", lines).texts
    shares = {}
    for name in (ALONE, INT8, GENERATE, FAIRSEQ):
        if name in systems:
            theirs = systems[name]("beam 5", lines).texts
            shares[name] = sum(a == b for a, b in zip(ours, theirs, strict=True)) / lines
    return shares


class Kept:
    """A JSON file to which each figure is added as it comes."""

    def __init__(self, path: Path, made_from: dict[str, Any]) -> None:
        self.path = path
        self.figures: dict[str, Any] = {"made from": made_from}
        if path.exists():
            self.figures = json.loads(path.read_text())
            if self.figures["made from"] != made_from:
                sys.exit(f"{path} was made from {self.figures['made from']}; give another --out")

    def get(self, key: str, make: Any) -> Any:
        """Return a figure that is there, or make it."""
        if key not in self.figures:
            self.figures[key] = make()
            written = self.path.with_suffix(".new")
            written.write_text(json.dumps(self.figures, indent=1) + "\n")
            written.replace(self.path)
        return self.figures[key]


def compare(systems: Mapping[str, System], kept: Kept, turns: int, lines: int) -> dict[str, Any]:
    """Let the systems take turns; returns their figures by search and system, one a turn."""
    todo = [
        (search, name) for search in SEARCHES for name, s in systems.items() if search in s.searches
    ]
    results: dict[str, dict[str, list[Any]]] = {search: {} for search in SEARCHES}
    for turn in range(turns):
        for search, name in todo[turn % len(todo) :] + todo[: turn % len(todo)]:
            found = kept.get(
                f"{turn + 1}. {search}: {name}",
                lambda search=search, name=name: measure(systems[name], search, lines),
            )
            results[search].setdefault(name, []).append(found)
    return results


def speeds(figures: Sequence[Mapping[str, float]], unit: str) -> list[float]:
    """Return lines or tokens a second of each turn."""
    return [turn[unit] / turn["seconds"] for turn in figures]


def ratios(results: Mapping[str, Any], name: str, other: str, unit: str = "tokens") -> list[float]:
    """Return the speed of a system to that of another, turn by turn."""
    pairs = zip(speeds(results[name], unit), speeds(results[other], unit), strict=True)
    return [speed / reference for speed, reference in pairs]


def report(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    measured, facts = results["measured"], results["compared"]
    rows = []
    for name in measured["beam 5"]:
        row = [name]
        for figures in measured.values():
            if name not in figures:
                row += ["", "", ""]
                continue
            unit = "lines" if name == GENERATE else "tokens"
            medians = [statistics.median(speeds(figures[name], u)) for u in ("lines", "tokens")]
            row += [f"{median:,.0f}" for median in medians]
            row.append("1" if name == ALONE else spread(ratios(figures, name, ALONE, unit)))
        rows.append(row)
    header = ["", *(f"{search}: {what}" for search in measured for what in COLUMNS)]
    equal = ", ".join(f"{name} {share:.1%}" for name, share in facts["equal"].items())
    sizes = "; ".join(
        f"{name}: " + ", ".join(f"{size:,} ({search})" for search, size in found.items())
        for name, found in facts["batch tokens"].items()
    )
    return "\n".join(
        [
            "## Back-translation: speed",
            "",
            f"{facts['lines']:,} lines, one thread, a CPU second; medians, and the ratio's median "
            f"and spread over {facts['turns']} turns; CTranslate2 {ctranslate2.__version__}. Made "
            "by `benchmarks/backtranslation_speed.py`.",
            "",
            table(header, rows),
            "",
            table(["claim", "beam 5", "holds", "sampling"], gates(measured)),
            "",
            f"Translations of beam 5 equal to ours, plain, of {facts['checked']:,}: {equal}. "
            f"Tokens of CTranslate2's batches, the fastest of a few: {sizes}.",
        ]
    )


def gates(measured: Mapping[str, Any]) -> list[list[str]]:
    """Return the claims, as rows."""
    rows = []
    for other, least in ((ALONE, 0.75), (FAIRSEQ, 3)):
        found = {
            search: ratios(figures, PLAIN, other)
            for search, figures in measured.items()
            if other in figures
        }
        if found:
            holds = statistics.median(found["beam 5"]) >= least
            claim = f"{PLAIN}, at least {least} times as fast as {other}"
            shown = [spread(found[search]) for search in SEARCHES]
            rows.append([claim, shown[0], "yes" if holds else "**no**", shown[1]])
    times = ratios(measured["beam 5"], ALONE, GENERATE, "lines")
    holds = statistics.median(times) <= 1.1
    claim = f"{GENERATE}, in at most 1.1 times its time alone"
    rows.append([claim, spread(times), "yes" if holds else "**no**", ""])
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a plain RUN from English; else a small one")
    parser.add_argument("--fused", type=Path, help="a fused RUN; else a small one is trained")
    parser.add_argument("--fairseq-python", type=Path, help="else fairseq is left out")
    parser.add_argument("--source", type=Path, help="text to translate; else Multi30k's training")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "backtranslation_speed")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    arguments = parser.parse_args()
    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    lines, turns, sizes = arguments.lines, arguments.turns, [512, 1024, 2048, 4096, 8192]
    small = SmallModels(arguments.out / "models", 5_000, 4_000, 600)
    options: dict[str, Any] = {}
    if arguments.quick:
        small = SmallModels(arguments.out / "quick-models", 100, 400, 1)
        lines, turns, sizes = 8, 1, [256, 512]
        options = {"max_length_b": 5}  # a model without training never ends
    run, fused = arguments.run or small.plain(), arguments.fused or small.fused()
    text = text_to_translate(arguments.source or shared_data("multi30k") / "train.en.gz", lines)
    searches = {name: SearchConfig(**given, **options) for name, given in SEARCHES.items()}
    made_from = {"run": str(run), "fused": str(fused), "lines": len(text)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(arguments.out / "turns.json", made_from)
    task = Task(run, text, searches, arguments.out)
    alone = {ALONE: Alone("float32", task), INT8: Alone("int8", task)}
    systems: dict[str, System] = {PLAIN: Ours(run, task), FUSED: Ours(fused, task), **alone}
    systems[GENERATE] = Generate(task)
    if arguments.fairseq_python:
        systems[FAIRSEQ] = Fairseq(arguments.fairseq_python, task)

    few = max(1, len(text) // 5)
    for name, system in systems.items():
        if not system.starts_anew:
            for search in system.searches:
                system(search, few)  # warm
        if isinstance(system, Alone):
            chosen = kept.get(f"batch tokens of {name}", lambda s=system: s.fastest(sizes, few))
            system.batch_tokens = chosen
    equal = kept.get("equal", lambda: agreement(systems, few))
    fp32 = {name: share for name, share in equal.items() if name != INT8}
    if min(fp32.values()) < LEAST_EQUAL and not arguments.quick:
        sys.exit(f"the translations are not the same, so that no speed is comparable: {fp32}")
    results = {
        "compared": {
            "lines": len(text),
            "turns": turns,
            "checked": few,
            "equal": equal,
            "batch tokens": {name: system.batch_tokens for name, system in alone.items()},
            "made from": made_from,
        },
        "measured": compare(systems, kept, turns, len(text)),
    }
    publish("backtranslation-speed", report(results), results, arguments.out, quick=arguments.quick)


if __name__ == "__main__":
    main()
