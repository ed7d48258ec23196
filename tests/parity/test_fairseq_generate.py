"""Exported models in fairseq's own commands (the package ve-fairseq, an optional extra)."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bertfused.batch import Example, collate
from bertfused.checkpoint import load_model
from bertfused.config import SearchConfig
from bertfused.interop.fairseq import export_fairseq
from bertfused.model import DecoderState
from bertfused.search import beam_search
from tests.tiny_run import make_run

# fairseq loads with torch.load alone, which since torch 2.6 refuses its own options.
USER_DIR = """
import argparse
import torch
torch.serialization.add_safe_globals([argparse.Namespace])
"""
LINES = ["w1 w2 w3", "w30 w8", "w5 unheard w5 w6 w7 w9"]
PATH = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("fairseq-generate", path=PATH) is None, reason="ve-fairseq is not installed"
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "pre", "positions": "learned", "max_positions": 64, "embedding_norm": True},
        {"share_embeddings": "none", "decoder_heads": 2, "activation": "gelu"},
    ],
    ids=str,
)
def test_fairseq_generate_finds_our_translations(
    tmp_path: Path, options: dict[str, object]
) -> None:
    make_run(tmp_path / "run", **options)
    out = tmp_path / "out"
    export_fairseq(tmp_path / "run", out)
    lines = [line.replace("w", "e") for line in LINES] if "share_embeddings" in options else LINES
    for language in ("en", "de"):
        (tmp_path / f"test.{language}").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "__init__.py").write_text(USER_DIR)
    run(
        tmp_path,
        *("fairseq-preprocess", "-s", "en", "-t", "de", "--testpref", "test"),
        *("--srcdict", out / "dict.en.txt", "--tgtdict", out / "dict.de.txt"),
        *("--destdir", "bin", "--workers", "1"),
    )
    printed = run(
        tmp_path,
        *("fairseq-generate", "bin", "--path", out / "checkpoint.pt", "--user-dir", "user"),
        *("-s", "en", "-t", "de", "--cpu", "--num-workers", "0", "--max-len-b", "20"),
        *("--required-batch-size-multiple", "1", "--beam", "3"),
    )

    trained = load_model(tmp_path / "run")
    batch = collate([Example([*trained.source_tokenizer.encode(line), 2]) for line in lines])
    with torch.inference_mode():
        state = DecoderState(trained.model, trained.model.encoder(batch))
        found = beam_search(state, torch.full((len(lines),), 20), SearchConfig(beam_size=3))
    symbols = trained.target_tokenizer.vocabulary.symbols
    for number, (best, *_) in enumerate(found):
        line = re.search(rf"^H-{number}\t(\S+)\t(.*)$", printed, re.MULTILINE)
        assert line is not None, printed
        assert line[2] == " ".join(symbols[id] for id in best.ids[:-1])
        assert float(line[1]) == pytest.approx(best.score / math.log(2), abs=1e-4)


def run(folder: Path, *command: object) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout
