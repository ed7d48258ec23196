"""Our scores are those that the ``sacrebleu`` command prints for the same text."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bertfused.metrics import (
    Comparison,
    bleu,
    chrf,
    paired_approximate_randomization,
    paired_bootstrap,
)

TEXT = "The cat, a dog's house; it ran (quickly) to Zürich — 3.5 km, 'twice'. Why? Eh! 我们 été"
WORDS = TEXT.split(" ")


def corpus(seed: int, size: int = 40) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 15))) for _ in range(size)]


def damaged(lines: list[str], rate: float, seed: int) -> list[str]:
    """Replace, drop and upper-case words, each at a third of the rate."""
    generator = random.Random(seed)

    def change(word: str) -> str:
        draw = generator.random() * 3 / rate
        return generator.choice(WORDS) if draw < 1 else "" if draw < 2 else word.upper()

    return [
        " ".join(change(word) if generator.random() < rate else word for word in line.split())
        for line in lines
    ]


REFERENCES = corpus(0)
SYSTEMS = {
    "plain.txt": damaged(REFERENCES, 0.4, 1),
    "fused.txt": damaged(REFERENCES, 0.37, 2),
    "better.txt": damaged(REFERENCES, 0.05, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lines in {"ref.txt": REFERENCES, **SYSTEMS}.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8", newline="\n")
    return tmp_path


def sacrebleu(folder: Path, *arguments: str, seed: int | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SACREBLEU_SEED"}
    environment["PYTHONIOENCODING"] = "utf-8"
    if seed is not None:
        environment["SACREBLEU_SEED"] = str(seed)
    command = [sys.executable, "-m", "sacrebleu", "ref.txt", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, encoding="utf-8"
    )
    return done.stdout


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("tokenize", ["13a", "zh", "none"])
def test_bleu_line_is_the_commands(folder: Path, tokenize, lowercase: bool) -> None:
    options = [
        "-i",
        "plain.txt",
        "-m",
        "bleu",
        "--tokenize",
        tokenize,
        "-f",
        "text",
        "-w",
        "2",
        "--force",
    ]
    line = sacrebleu(folder, *options, *(["-lc"] if lowercase else []))
    score = bleu(SYSTEMS["plain.txt"], REFERENCES, tokenize=tokenize, lowercase=lowercase)
    assert f"{score}\n" == line


def test_line_with_interval_is_the_commands(folder: Path) -> None:
    options = ["-i", "plain.txt", "-m", "bleu", "chrf", "-f", "text", "-w", "2"]
    lines = sacrebleu(folder, *options, "--confidence", "--confidence-n", "300", seed=7)
    ours = [
        bleu(SYSTEMS["plain.txt"], REFERENCES, resamples=300, seed=7),
        chrf(SYSTEMS["plain.txt"], REFERENCES, resamples=300, seed=7),
    ]
    assert [" ".join(line.split()) for line in lines.splitlines()] == [str(score) for score in ours]


def read_latex(output: str) -> tuple[list[str], dict[str, str]]:
    """Take the command's output apart: the table's rows, then the signature of each metric."""
    rows, signatures = [], {}
    for line in output.splitlines():
        if line.endswith(r"\\") and "CI" not in line and "System" not in line:
            rows.append(" & ".join(" ".join(cell.split()) for cell in line[:-2].split("&")))
        elif line.startswith(" - ") and "|version:" in line:
            name, signature = line[3:].split()
            signatures[name] = signature
    return rows, signatures


def as_latex(comparisons: list[Comparison]) -> list[str]:
    """Write comparisons as the rows of the command's table, to fifteen decimals."""
    rows: dict[str, str] = {}
    for comparison in comparisons:
        start = "Baseline: " if comparison.p_value is None else ""
        cell = f" & {comparison.score.value:.15f}"
        if comparison.score.interval is not None:
            interval = comparison.score.interval
            cell += f" ({interval.mean:.15f} ± {interval.half_width:.15f})"
        if comparison.p_value is not None:
            cell += f" (p = {comparison.p_value:.4f})" + "*" * (comparison.p_value <= 0.05)
        system = comparison.system
        rows[system] = rows.get(system, start + system) + cell
    return list(rows.values())


def signatures_of(comparisons: list[Comparison]) -> dict[str, str]:
    return {comparison.score.name: comparison.score.signature for comparison in comparisons}


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("seed", [None, 4321])
def test_paired_bootstrap_is_the_commands(folder: Path, seed: int | None, lowercase: bool) -> None:
    options = ["-i", *SYSTEMS, "-m", "bleu", "chrf", "--paired-bs", "--paired-bs-n", "400"]
    options += ["-lc", "--chrf-lowercase"] if lowercase else []
    output = sacrebleu(folder, *options, "-f", "latex", "-w", "15", seed=seed)
    ours = paired_bootstrap(
        REFERENCES, SYSTEMS, lowercase=lowercase, resamples=400, seed=seed or 12345
    )
    assert (as_latex(ours), signatures_of(ours)) == read_latex(output)
    p_values = [comparison.p_value for comparison in ours if comparison.p_value is not None]
    assert min(p_values) < 0.05 < max(p_values)


def test_paired_bootstrap_with_defaults_is_the_commands_to_the_last_bit(folder: Path) -> None:
    # The command cannot write chrF as JSON: its interval is a numpy.float32.
    output = sacrebleu(folder, "-i", *SYSTEMS, "-m", "bleu", "--paired-bs", "-f", "json")
    table, _ = json.JSONDecoder().raw_decode(output)
    ours = [c for c in paired_bootstrap(REFERENCES, SYSTEMS) if c.score.name == "BLEU"]
    for comparison, row in zip(ours, table, strict=True):
        interval = comparison.score.interval
        assert interval is not None
        assert row["system"].endswith(comparison.system)
        assert row["BLEU"] == {
            "score": comparison.score.value,
            "p_value": comparison.p_value,
            "mean": interval.mean,
            "ci": interval.half_width,
        }


def test_paired_randomization_is_the_commands(folder: Path) -> None:
    options = ["-i", *SYSTEMS, "-m", "bleu", "chrf", "--paired-ar", "--paired-ar-n", "300"]
    output = sacrebleu(folder, *options, "-f", "latex", "-w", "15")
    ours = paired_approximate_randomization(REFERENCES, SYSTEMS, trials=300)
    assert (as_latex(ours), signatures_of(ours)) == read_latex(output)
