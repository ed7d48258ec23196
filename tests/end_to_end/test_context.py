"""Context-aware models through the command line, from text to contrastive scores."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bertfused.checkpoint import read_tensors
from docnmt.contrastive import ContrastiveItem, write_contrastive
from tests.end_to_end.children import die_at, finish, start, train
from tests.end_to_end.corpus import (
    RECIPE,
    command,
    fail,
    sentences,
    succeed,
    text_of,
    write_lines,
    write_recipe,
)

WEIGHTS = Path("model", "model.safetensors")
KINDS: dict[str, dict[str, object]] = {
    "layerwise": {"model": "layerwise"},
    "cadec": {"model": "cadec", "layers": 1},
    "zhang": {"model": "zhang"},
    "2-to-1": {"model": "concatenation"},
    "2-to-2": {"model": "concatenation", "target": True},
}
SHORT = {"train": {"max_steps": 4, "validate_every": 2, "log_every": 1, "batch_tokens": 60}}
NO_FUSION: dict[str, Any] = {"documents": {"previous": 0}}


def documents(count: int, seed: int) -> list[list[tuple[str, str]]]:
    """Make documents of 1, 2, 3, 1, ... sentences and their translations."""
    pairs = zip(*sentences(3 * count, seed=seed), strict=True)
    return [[next(pairs) for _ in range(1 + i % 3)] for i in range(count)]


def write_documents(folder: Path, sizes: dict[str, int]) -> None:
    """Write the corpora that RECIPE names, with a blank line between documents."""
    for seed, (split, count) in enumerate(sizes.items()):
        found = documents(count, seed)
        for side, suffix in enumerate(("en", "de")):
            lines: list[str] = []
            for document in found:
                lines += ["", *(pair[side] for pair in document)]
            write_lines(folder / f"{split}.{suffix}", lines[1:])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare documents in ``data``, and train a base in ``base``."""
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder, {"train": 60, "dev": 5, "test": 5})
    recipe = write_recipe(folder / "base.toml", NO_FUSION, {"train": {"validate_every": 80}})
    succeed("docnmt prepare", recipe, "--out", folder / "data")
    train("docnmt train", recipe, "--data", folder / "data", "--out", folder / "base")
    return folder


def arguments(work: Path, folder: Path, kind: str, *changes: dict[str, Any]) -> list[object]:
    """Write a recipe beside the text; return the command that trains it, up to ``--out``."""
    context = {"context": KINDS[kind]} if kind in KINDS else {}
    recipe = write_recipe(folder / f"{kind}.toml", NO_FUSION, SHORT, context, *changes)
    values = recipe.read_text()
    for split in ("train", "dev", "test"):
        values = values.replace(f'"{split}.', f'"{work}/{split}.')
    recipe.write_text(values)
    options = ["--data", work / "data", "--init", work / "base", "--quiet"]
    return ["docnmt train", recipe, *options, "--out"]


@pytest.fixture(scope="module")
def runs(work: Path) -> dict[str, Path]:
    """Train every kind for a few steps."""
    found = {}
    for kind in KINDS:
        found[kind] = work / kind
        train(*arguments(work, work, kind), found[kind])
    return found


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Path:
    return runs[request.param]


def metrics(run: Path) -> Iterator[dict[str, Any]]:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        yield json.loads(line)


# Training


def test_only_the_new_layers_are_trained(work: Path, run: Path) -> None:
    base, own = read_tensors(work / "base" / WEIGHTS), read_tensors(run / WEIGHTS)
    if run.name in ("2-to-1", "2-to-2"):
        assert base.keys() == own.keys()
        assert not all(own[name].equal(tensor) for name, tensor in base.items())
        return
    for name, tensor in base.items():
        assert own[f"base.{name}"].equal(tensor)
    newest = read_tensors(run / "checkpoints" / "step-4" / "model.safetensors")
    oldest = read_tensors(run / "checkpoints" / "step-2" / "model.safetensors")
    changed = {name for name, tensor in newest.items() if not tensor.equal(oldest[name])}
    assert changed == {name for name in newest if not name.startswith("base.")}
    report = (run / "report.md").read_text()
    assert "- warm start: loaded " in report


def test_the_first_validation_is_before_the_first_update(work: Path, run: Path) -> None:
    steps = [own["step"] for own in metrics(run) if "valid_nll" in own]
    assert steps == [0, 2, 4]


def test_the_perplexity_of_the_dev_set_is_that_of_its_scores(work: Path, run: Path) -> None:
    pairs = ["--source", work / "dev.en", "--target", work / "dev.de"]
    for own in metrics(run):
        if own["step"] not in (2, 4) or "valid_nll" not in own:
            continue
        checkpoint = run / "checkpoints" / f"step-{own['step']}"
        lines = succeed("docnmt score", checkpoint, *pairs).lines
        log_probs, tokens = zip(*(map(float, line.split("\t")) for line in lines), strict=True)
        nll = -sum(log_probs) / sum(tokens)
        # The drafts of cadec's training are noised, those of scores are not; and a 2-to-2 model is
        # trained to write the sentence before again.
        if run.name in ("cadec", "2-to-2"):
            assert nll == pytest.approx(own["valid_nll"], rel=0.5)
        else:
            assert nll == pytest.approx(own["valid_nll"], abs=1e-4)
            assert math.exp(nll) == pytest.approx(own["valid_perplexity"], rel=1e-3)


def test_the_bleu_of_the_dev_set_is_that_of_evaluate(work: Path, run: Path) -> None:
    found = [own for own in metrics(run) if own["step"] == 4 and "valid_bleu" in own]
    pairs = ["--source", work / "dev.en", "--reference", work / "dev.de", "--json"]
    evaluated = json.loads(succeed("docnmt evaluate", run / "checkpoints" / "step-4", *pairs).out)
    assert evaluated["bleu"]["value"] == found[0]["valid_bleu"]
    assert evaluated.keys() == {"bleu", "chrf", "d-bleu"}


# What the commands make of them


def test_lines_out_are_lines_in_and_their_scores_are_the_searchs(
    work: Path, run: Path, tmp_path: Path
) -> None:
    lines = (work / "test.en").read_text().split("\n")[:-1]
    stdin = text_of(lines)
    found = succeed("docnmt translate", run, stdin=stdin).lines
    assert [bool(line) for line in found] == [bool(line) for line in lines]
    records = succeed("docnmt translate", run, "--format", "jsonl", stdin=stdin).lines
    target = write_lines(tmp_path / "out.de", found)
    pairs = ["--source", work / "test.en", "--target", target]
    scores = succeed("docnmt score", run, *pairs).lines
    for record, line in zip(map(json.loads, records), scores, strict=True):
        if "separator" in record:
            assert line == "0.000000\t0"
        else:
            best = record["hypotheses"][0]["log_prob"]
            assert float(line.split("\t")[0]) == pytest.approx(best, abs=1e-4)


def test_results_are_not_lost_with_their_files(run: Path, tmp_path: Path) -> None:
    """What cannot be written is found before the work; what then cannot be, after the report."""
    items = tmp_path / "items.jsonl"
    write_lines(items, ['{"source": "a", "candidates": ["a", "b"], "correct": 0}'])
    missing = tmp_path / "missing" / "scores"
    said = fail("docnmt contrast", run, "--set", items, "--output", missing)
    assert str(missing) in said
    sources = write_lines(tmp_path / "a.en", ["a"])
    line = ("docnmt evaluate", run, "--source", sources, "--reference", sources)
    assert str(missing) in fail(*line, "--output", missing)
    assert not missing.parent.exists()


@pytest.mark.parametrize("context", ['{"model": "other"}', '{"model": "layerwise", "new": 1}'])
def test_a_damaged_description_is_named(run: Path, tmp_path: Path, context: str) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    card = copy / "model" / "model.json"
    found = json.loads(card.read_text())
    card.write_text(json.dumps({**found, "context": json.loads(context)}))
    said = fail("docnmt translate", copy, "--input", write_lines(tmp_path / "a", ["a"]))
    assert said.startswith(f"{card} is damaged: context")


def test_contrastive_accuracy_is_counted(run: Path, tmp_path: Path) -> None:
    items = [
        ContrastiveItem(
            source="old dog",
            candidates=("alt Hund", "alt Katze"),
            correct=0,
            context=("the cat sees",),
            target_contexts=(("die Katze sieht",), ("der Katze sieht",)),
        ),
        ContrastiveItem(source="bird", candidates=("Vogel", "Fisch"), correct=0),
    ]
    write_contrastive(tmp_path / "set.jsonl", items)
    ran = succeed("docnmt contrast", run, "--set", tmp_path / "set.jsonl", "--json")
    (result,) = json.loads(ran.out)
    assert result["items"] == 2
    assert "reads no context" not in ran.err


def test_info_says_what_a_run_is(run: Path) -> None:
    out = succeed("bertfused info", run).out.decode()
    size = sum(tensor.numel() for tensor in read_tensors(run / WEIGHTS).values())
    assert out.startswith(f"en-de, {size:,} parameters")
    card = json.loads(out.partition("\n")[2])
    assert KINDS[run.name].items() <= card["context"].items()
    assert card["documents"] == {"previous": 0, "format": "blank"}


def test_checkpoints_are_averaged(work: Path, run: Path, tmp_path: Path) -> None:
    succeed("bertfused average", run, "--last", 2, "--out", tmp_path / "average")
    stdin = (work / "test.en").read_bytes()
    found = succeed("docnmt translate", tmp_path / "average", stdin=stdin).lines
    assert len(found) == stdin.count(b"\n")


def test_the_sentence_level_commands_refuse_a_run(work: Path, run: Path, tmp_path: Path) -> None:
    pairs = ["--source", work / "test.en"]
    expected = f"{run} is a context-aware model, which only the docnmt command reads"
    assert fail("bertfused translate", run, stdin=b"cat\n") == expected
    assert fail("bertfused score", run, *pairs, "--target", work / "test.de") == expected
    assert fail("bertfused evaluate", run, *pairs, "--reference", work / "test.de") == expected
    for format in ("fairseq", "ctranslate2"):
        said = fail(f"bertfused export {format}", run, "--out", tmp_path / "out")
        assert said == expected
    assert not (tmp_path / "out").exists()


def test_a_run_is_in_no_ensemble(work: Path, run: Path) -> None:
    expected = "a context-aware model cannot be part of an ensemble"
    assert fail("docnmt translate", run, "--ensemble", work / "base", stdin=b"cat\n") == expected
    assert fail("docnmt translate", work / "base", "--ensemble", run, stdin=b"cat\n") == expected


def test_documents_in_joined_sentences_go_on_from_such_a_run(
    work: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    (*words, out) = arguments(work, tmp_path, "2-to-2")
    words[words.index(work / "base")] = runs["2-to-1"]
    succeed(*words, "--set", "train.max_steps=1", out, tmp_path / "run")


# Interruptions


@pytest.mark.parametrize("kind", ["layerwise", "cadec", "2-to-2"])
def test_killed_and_resumed_equals_not_killed(
    work: Path, runs: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    changes = {"optim": {"ema": 0.9}, "train": {"accumulate": 2}}
    line = arguments(work, tmp_path, kind, changes)
    whole, killed, log = tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "log"
    assert finish(start(log, *line, whole)) == 0, log.read_text()
    draw = random.Random(kind)
    kills = 0
    for _ in range(3):
        moment = partial(die_at, draw.randint(20, 90), killed)
        code = finish(start(log, *line, killed, "--resume", before=moment))
        assert code in (0, -9), log.read_text()
        kills += code == -9
    assert kills > 0
    assert finish(start(log, *line, killed, "--resume")) == 0, log.read_text()
    for name in (WEIGHTS, Path("checkpoints", "step-4", "training.safetensors")):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    clocks = {"seconds", "tokens_per_second"}
    ours, theirs = (
        [{key: own for key, own in record.items() if key not in clocks} for record in metrics(run)]
        for run in (killed, whole)
    )
    assert ours == theirs


def test_another_context_is_not_resumed(work: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    line = arguments(work, tmp_path, "layerwise")
    said = fail(*line, runs["layerwise"], "--resume", "--set", "context.sentences=2")
    assert said == (f"cannot resume {runs['layerwise']}: context.sentences was 3 and is 2")


# What does not fit together


def refused(work: Path, tmp_path: Path, kind: str, *changes: Any, **options: Path) -> str:
    """Train what cannot be trained; ``options`` replace the command's."""
    line = arguments(work, tmp_path, kind, *changes)
    for name, value in options.items():
        line[line.index(f"--{name}") + 1] = value
    said = fail(*line, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return said


@pytest.mark.parametrize("kind", ["layerwise", "cadec", "zhang"])
def test_layers_on_top_of_nothing_are_refused(work: Path, tmp_path: Path, kind: str) -> None:
    line = arguments(work, tmp_path, kind)
    del line[line.index("--init") : line.index("--init") + 2]
    assert fail(*line, tmp_path / "run") == (
        f"context.model = '{kind}' is trained on top of a sentence-level RUN; name it with --init"
    )


def test_joined_sentences_may_start_from_nothing(work: Path, tmp_path: Path) -> None:
    line = arguments(work, tmp_path, "2-to-1")
    del line[line.index("--init") : line.index("--init") + 2]
    succeed(*line, tmp_path / "run", "--set", "train.max_steps=1")


@pytest.mark.parametrize("kind", ["layerwise", "2-to-1", "base"])
@pytest.mark.parametrize("start", ["zhang", "2-to-2"])
def test_a_context_aware_start_is_refused(
    work: Path, runs: dict[str, Path], tmp_path: Path, kind: str, start: str
) -> None:
    if (kind, start) == ("2-to-1", "2-to-2"):
        return
    assert refused(work, tmp_path, kind, init=runs[start]) == (
        f"cannot start from {runs[start]}, which is context-aware itself; name a sentence-level "
        "RUN with --init"
    )


@pytest.mark.parametrize("kind", ["layerwise", "2-to-1"])
def test_another_base_than_the_recipes_is_refused(work: Path, tmp_path: Path, kind: str) -> None:
    said = refused(work, tmp_path, kind, {"model": {"heads": 4}})
    assert said == (
        "model.heads: not as in the RUN to start from, whose [model] is taken over; leave [model] "
        "out of the recipe"
    )


def test_a_base_is_taken_over_where_the_recipe_has_none(work: Path, tmp_path: Path) -> None:
    line = arguments(work, tmp_path, "zhang")
    recipe = Path(str(line[1]))
    text = recipe.read_text()
    start = text.index("[model]")
    recipe.write_text(text[:start] + text[text.index("[", start + 1) :])
    run = tmp_path / "run"
    succeed(*line, run, "--set", "train.max_steps=1")
    assert f"model_dim = {RECIPE['model']['model_dim']}" in (run / "config.toml").read_text()
    succeed(*line, run, "--set", "train.max_steps=1", "--resume")


@pytest.mark.parametrize("kind", ["layerwise", "2-to-1"])
def test_documents_that_data_were_not_made_of_are_refused(
    work: Path, tmp_path: Path, kind: str
) -> None:
    assert refused(work, tmp_path, kind, {"documents": {"previous": 0, "format": "d"}}) == (
        f"documents.format is 'd', but {work / 'data'} was prepared with 'blank'"
    )


def test_a_tag_of_another_format_is_told_of(work: Path, tmp_path: Path) -> None:
    """It is a sentence of this model, whose documents end at blank lines."""
    path = write_lines(tmp_path / "a", ["old dog", "", " <d>", "bird", "<d>"])
    ran = succeed("docnmt translate", work / "base", "--input", path)
    assert len(ran.out.decode().splitlines()) == 5
    assert ran.err.count("is '<d>', which is translated: blank lines separate") == 1
    assert "line 3 is '<d>'" in ran.err


def test_fusion_that_the_base_has_not_is_refused(work: Path, tmp_path: Path, bert: Path) -> None:
    fusion = {"fusion": {"encoder": str(bert)}}
    assert refused(work, tmp_path, "layerwise", fusion) == (
        "fusion: not as in the RUN to start from, whose [fusion] is taken over; leave [fusion] "
        "out of the recipe"
    )
    assert refused(work, tmp_path, "2-to-1", fusion) == (
        "context.model = 'concatenation' is a plain model; leave [fusion] out"
    )


def test_data_without_documents_are_refused(work: Path, tmp_path: Path) -> None:
    lines = [line for line in (work / "train.en").read_text().split("\n") if line]
    others = [line for line in (work / "train.de").read_text().split("\n") if line]
    for split in ("train", "dev", "test"):
        write_lines(tmp_path / f"{split}.en", lines)
        write_lines(tmp_path / f"{split}.de", others)
    recipe = write_recipe(tmp_path / "sentences.toml")
    data = tmp_path / "data"
    succeed("bertfused prepare", recipe, "--out", data)
    for kind in ("layerwise", "2-to-1"):
        said = refused(work, tmp_path, kind, data=data)
        assert said == f"{data} was prepared sentence by sentence; prepare it with docnmt"


def test_documents_of_one_sentence_are_refused(work: Path, tmp_path: Path) -> None:
    for side in ("en", "de"):
        found = [line for line in (work / f"train.{side}").read_text().split("\n") if line]
        apart = [own for line in found for own in (line, "")][:-1]
        for split in ("train", "dev", "test"):
            write_lines(tmp_path / f"{split}.{side}", apart)
    recipe = write_recipe(
        tmp_path / "apart.toml", NO_FUSION, {"subwords": {"reuse": str(work / "data")}}
    )
    data = tmp_path / "data"
    succeed("docnmt prepare", recipe, "--out", data)
    for kind in ("layerwise", "2-to-1"):
        said = refused(work, tmp_path, kind, data=data)
        assert said == f"no sentence of {data} has a previous one in its document"


def test_another_dictionary_is_refused(work: Path, tmp_path: Path) -> None:
    write_documents(tmp_path, {"train": 3, "dev": 2, "test": 2})
    recipe = write_recipe(tmp_path / "few.toml", NO_FUSION)
    data = tmp_path / "data"
    succeed("docnmt prepare", recipe, "--out", data, "--set", "data.max_unknown=1")
    for kind in ("layerwise", "2-to-1"):
        assert refused(work, tmp_path, kind, data=data) == (
            f"cannot start from {work / 'base'}: its dict.en.txt is not that of {data}; prepare "
            f"the data with subwords.reuse = '{work / 'base' / 'model'}'"
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("context.layesr=2", "unknown key context.layesr; did you mean 'layers'?"),
        ("context.model=layer", "context.model = 'layer': input should be 'layerwise', 'cadec', "),
        ("context.model=none", "context.model is missing; it is 'layerwise', 'cadec', 'zhang' or"),
        ("context.sentences=0", "context.sentences = 0: input should be greater than or equal"),
    ],
)
def test_a_wrong_key_is_named(work: Path, tmp_path: Path, override: str, message: str) -> None:
    line = arguments(work, tmp_path, "layerwise")
    assert message in fail(*line, tmp_path / "run", "--set", override)


def test_a_model_of_no_side_is_refused(work: Path, tmp_path: Path) -> None:
    line = arguments(work, tmp_path, "layerwise")
    off = ["--set", "context.source=false", "--set", "context.target=false"]
    said = fail(*line, tmp_path / "run", *off)
    assert said.endswith("context: source and target are both false: no context would be read")


def test_other_peoples_encoder_use_is_not_measured(work: Path, runs: dict[str, Path]) -> None:
    pairs = ["--source", work / "test.en", "--reference", work / "test.de"]
    said = fail("docnmt evaluate", runs["layerwise"], *pairs, "--shuffle-encoder")
    assert said == "--shuffle-encoder does not measure context-aware models"


# On a fused base


@pytest.fixture(scope="module")
def fused(work: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare documents and train a base whose BERT, fine-tuned, reads one sentence before."""
    folder = tmp_path_factory.mktemp("fused")
    write_documents(folder, {"train": 12, "dev": 3, "test": 3})
    changes = {
        "fusion": {"encoder": str(bert), "finetune": True},
        "documents": {"previous": 1},
        "subwords": {"reuse": str(work / "data")},
    }
    recipe = write_recipe(folder / "base.toml", SHORT, changes)
    succeed("docnmt prepare", recipe, "--out", folder / "data", "--set", "data.max_unknown=1")
    init = ["--init", work / "base"]
    succeed("docnmt train", recipe, "--data", folder / "data", "--out", folder / "base", *init)
    return folder


def test_a_fine_tuned_encoder_is_part_of_the_frozen_base(fused: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"context": KINDS["layerwise"], "optim": {"weight_decay": 0.1}}
    recipe = write_recipe(fused / "context.toml", SHORT, changes)
    line = ["docnmt train", recipe, "--data", fused / "data", "--init", fused / "base"]
    run = tmp_path / "run"
    succeed(*line, "--out", run)
    before, after = (
        read_tensors(own / "model" / "encoder" / "model.safetensors")
        for own in (fused / "base", run)
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.equal(after[name]), name
    stdin = (fused / "test.en").read_bytes()
    found = succeed("docnmt translate", run, "--format", "jsonl", stdin=stdin).lines
    best = [json.loads(line).get("hypotheses", [{"text": ""}])[0] for line in found]
    target = write_lines(tmp_path / "out.de", [own["text"] for own in best])
    pairs = ["--source", fused / "test.en", "--target", target]
    scores = succeed("docnmt score", run, *pairs).lines
    for own, score in zip(best, scores, strict=True):
        if own["text"]:
            assert float(score.split("\t")[0]) == pytest.approx(own["log_prob"], abs=1e-4)


def test_another_context_of_the_encoder_than_the_bases_is_refused(
    work: Path, fused: Path, tmp_path: Path
) -> None:
    base = fused / "base"
    data = work / "data"
    assert refused(work, tmp_path, "layerwise", init=base) == (
        f"{data} was prepared with documents.previous = 0, but the RUN to start from was trained "
        "with 1"
    )


def test_the_console_says_what_it_trains(work: Path, tmp_path: Path) -> None:
    line = [own for own in arguments(work, tmp_path, "layerwise") if own != "--quiet"]
    said = command(*line, tmp_path / "run", "--set", "train.max_steps=1").err
    assert "warm start from" in said
    assert "started fresh: " in said
    assert "weighting.weights" in said
    assert " more are frozen) on " in said
    assert "context.model = 'layerwise'" in (tmp_path / "run" / "report.md").read_text()
