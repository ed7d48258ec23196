"""Small text, a small pretrained encoder, and the real commands, called in this process."""

import io
import json
import logging
import random
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import tomli_w
import torch

from bertfused.cli import main as bertfused
from bertgen.cli import main as bertgen
from docnmt.cli import main as docnmt
from unsup.cli import main as unsup

MAIN = {"bertfused": bertfused, "docnmt": docnmt, "unsup": unsup, "bertgen": bertgen}
ENGLISH = ["the", "old", "red", "cat", "dog", "sees", "hears", "fish", "bird", "near"]
GERMAN = ["der", "alt", "rot", "Katze", "Hund", "sieht", "hört", "Fisch", "Vogel", "bei"]

RECIPE = {
    "data": {
        "source": "en",
        "target": "de",
        "train": [{"source": "train.en", "target": "train.de"}],
        "dev": {"source": "dev.en", "target": "dev.de"},
        "test": [{"name": "late", "source": "test.en", "target": "test.de"}],
    },
    "subwords": {"kind": "words"},
    "model": {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "model_dim": 32,
        "ffn_dim": 32,
        "heads": 2,
        "dropout": 0.1,
    },
    "optim": {"lr": 0.01, "warmup_steps": 10, "schedule": "linear"},
    "train": {
        "batch_tokens": 500,
        "max_steps": 80,
        "validate_every": 35,
        "log_every": 10,
        "precision": "fp32",
    },
    "search": {"beam_size": 2, "max_length_b": 20},
}


class Ran(NamedTuple):
    """What a command left: exit status, bytes on stdout, text on stderr."""

    code: int
    out: bytes
    err: str

    @property
    def lines(self) -> list[str]:
        *lines, rest = self.out.decode().split("\n")
        assert rest == "", "the last record of the output has no end"
        return lines


def command(line: str, *args: object, stdin: bytes = b"") -> Ran:
    """Run a command as its console script would, in this process.

    Args:
        line: The program and its first words, e.g. "bertfused import fairseq".
        args: More arguments, which may hold spaces.
    """
    program, *words = line.split()
    streams = {
        "stdin": io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"),
        "stdout": io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True),
        "stderr": io.StringIO(),
    }
    handlers = logging.getLogger().handlers[:]
    with patch.multiple(sys, argv=[program, *words, *map(str, args)], **streams):
        try:
            MAIN[program]()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            logging.getLogger().handlers[:] = handlers
        out = sys.stdout.buffer.getvalue()
    return Ran(code, out, streams["stderr"].getvalue())


def uncoloured(text: str) -> str:
    """Take the colours out of a help page, which has them where a CI server asks for them."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def succeed(line: str, *args: object, stdin: bytes = b"") -> Ran:
    ran = command(line, *args, stdin=stdin)
    assert ran.code == 0, ran.err
    return ran


def fail(line: str, *args: object, stdin: bytes = b"") -> str:
    """Run a command that must end as a user's mistake; return its one sentence."""
    ran = command(line, *args, stdin=stdin)
    assert ran.code == 2, ran
    *_, last = ran.err.splitlines()
    program = line.split()[0]
    assert last.startswith(f"{program}: error: "), ran.err
    assert "Traceback" not in ran.err
    return last.removeprefix(f"{program}: error: ")


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def write_recipe(path: Path, *changes: dict[str, dict[str, object]]) -> Path:
    """Write RECIPE with sections changed, one key at a time."""
    sections = {name: dict(values) for name, values in RECIPE.items()}
    for change in changes:
        for name, values in change.items():
            sections[name] = sections.get(name, {}) | values
    path.write_bytes(tomli_w.dumps(sections).encode())
    assert tomllib.loads(path.read_text())
    return path


def sentences(
    count: int, *, seed: int, order: Callable[[list[int]], list[int]] = list
) -> tuple[list[str], list[str]]:
    """Draw sentences of 2 to 6 different words, and translate them word for word."""
    draw = random.Random(seed)
    english, german = [], []
    for _ in range(count):
        ids = draw.sample(range(len(ENGLISH)), draw.randint(2, 6))
        english.append(" ".join(ENGLISH[i] for i in ids))
        german.append(" ".join(GERMAN[i] for i in order(ids)))
    return english, german


def write_corpus(
    folder: Path, sizes: dict[str, int], order: Callable[[list[int]], list[int]] = list
) -> None:
    """Write train, dev and test sentences as RECIPE names them."""
    for seed, (split, size) in enumerate(sizes.items()):
        for side, lines in zip(("en", "de"), sentences(size, seed=seed, order=order), strict=True):
            write_lines(folder / f"{split}.{side}", lines)


def write_bert(folder: Path, words: Sequence[str] = ENGLISH, *, seed: int = 3) -> Path:
    """Make a BERT of random weights, 12 wide, with a limit of 32 wordpieces."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces += dict.fromkeys([*words, *letters, *(f"##{letter}" for letter in letters)])
    write_lines(folder / "vocab.txt", pieces)
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


# What the commands are given and give

LINES = ["the cat sees the dog", "old bird", "", "fish hears red cat near the dog", "dog"]


def text_of(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def translate(run: Path, *options: object, lines: Sequence[str] = LINES) -> list[str]:
    return succeed("bertfused translate", run, *options, stdin=text_of(lines)).lines


def records(run: Path, *options: object, lines: Sequence[str] = LINES) -> list[dict[str, Any]]:
    out = translate(run, "--format", "jsonl", *options, lines=lines)
    return [json.loads(line) for line in out]


def best(run: Path, *options: object, lines: Sequence[str] = LINES) -> list[dict[str, Any]]:
    """Return the best hypothesis of each line."""
    return [record["hypotheses"][0] for record in records(run, *options, lines=lines)]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
