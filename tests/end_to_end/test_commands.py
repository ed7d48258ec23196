"""Every verb of ``bertfused`` but ``translate`` through its command line."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu
import torch
from typer.main import get_command

from bertfused import __version__
from bertfused.checkpoint import load_card, load_model, read_tensors
from bertfused.cli import app as bertfused_app
from bertfused.text import only_writer, read_lines
from bertgen.cli import app as bertgen_app
from docnmt.cli import app as docnmt_app
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import (
    LINES,
    MAIN,
    best,
    command,
    fail,
    leftovers,
    succeed,
    translate,
    uncoloured,
    write_bert,
    write_lines,
    write_recipe,
)
from unsup.cli import app as unsup_app

# ---- the command itself


@pytest.mark.parametrize("program", MAIN)
def test_version(program: str) -> None:
    assert succeed(f"{program} --version").out.decode() == f"{program} {__version__}\n"


@pytest.mark.parametrize("program", MAIN)
def test_help_is_quick_and_loads_no_torch(program: str) -> None:
    """Every verb's --help, in one process: it is all imports, and they are made once."""
    apps = {"bertfused": bertfused_app, "docnmt": docnmt_app, "unsup": unsup_app}
    apps |= {"bertgen": bertgen_app}
    verbs = list(get_command(apps[program]).commands)
    assert {"prepare", "train", "translate", "evaluate"} <= set(verbs)
    assert all(verb in succeed(f"{program} --help").out.decode() for verb in verbs)
    script = (
        "import sys\n"
        f"from {program}.cli import main\n"
        "for verb in sys.argv[1:]:\n"
        "    sys.argv = [sys.argv[0], verb, '--help']\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'sacrebleu'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-c", script, *verbs], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Usage") == len(verbs)
    # Processor time, which does not depend on what else the machine is doing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_a_wrong_option_is_a_mistake_of_the_user() -> None:
    ran = command("bertfused translate run --beam-width 3")
    assert (ran.code, ran.out) == (2, b"")
    assert "No such option: --beam-width" in uncoloured(ran.err)


# ---- prepare, train, info


def test_prepare_reports_every_record_and_does_nothing_twice(text: Path, tmp_path: Path) -> None:
    for side, more in (("en", ["", "old cat", "bird " * 9]), ("de", ["der", "alt", "Vogel"])):
        lines = list(read_lines(text / f"train.{side}"))
        write_lines(tmp_path / f"train.{side}", [*lines, *more])
        shutil.copy(text / f"dev.{side}", tmp_path)
        shutil.copy(text / f"test.{side}", tmp_path)
    recipe = write_recipe(tmp_path / "recipe.toml", {"data": {"max_tokens": 8}})
    data = tmp_path / "data"
    ran = succeed("bertfused prepare", recipe, "--out", data)
    assert ran.out == b""
    assert "train (train): 303 pairs = 301 kept + 1 empty + 1 over 8 tokens + 0 unbal" in ran.err
    assert "dev (valid): 20 pairs, all kept" in ran.err
    assert "late (test): 12 pairs, all kept" in ran.err
    assert succeed("bertfused info", data).out.decode() in ran.err
    again = succeed("bertfused prepare", recipe, "--out", data)
    assert f"{data} is complete; nothing to do" in again.err
    said = fail("bertfused prepare", recipe, "--out", data, "--set", "data.max_tokens=9")
    assert said.startswith(f"{data} was made from something else: max_tokens differs")
    succeed("bertfused prepare", recipe, "--out", data, "--set", "data.max_tokens=9", "--force")
    assert "303 pairs = 302 kept" in succeed("bertfused info", data).out.decode()


def test_train_writes_a_run_and_nothing_on_stdout(small: Small, tmp_path: Path) -> None:
    steps = ["--set", "train.max_steps=3", "--set", "train.log_every=2"]
    run = tmp_path / "run"
    ran = succeed("bertfused train", small.recipe, "--data", small.data, *steps, "--out", run)
    assert ran.out == b""
    assert "step 3: dev loss" in ran.err
    names = ["checkpoints", "config.toml", "log.txt", "metrics.jsonl", "model", "report.md"]
    assert leftovers(run) == [*names, "run.json", "tensorboard"]
    assert leftovers(run / "checkpoints") == ["step-3"]
    assert "step 3: dev loss" in (run / "log.txt").read_text()
    assert "- 3 updates" in (run / "report.md").read_text()
    again = tmp_path / "again"
    ran = succeed("bertfused train", run / "config.toml", "--data", small.data, "--out", again)
    weights = Path("model", "model.safetensors")
    assert (again / weights).read_bytes() == (run / weights).read_bytes()


def test_without_an_update_there_is_no_model(small: Small, tmp_path: Path) -> None:
    train = ["bertfused train", small.recipe, "--data", small.data, "--set", "train.max_steps=0"]
    said = succeed(*train, "--set", "optim.schedule=inverse_sqrt", "--out", tmp_path / "run").err
    assert said.endswith("no update was made: there is no model\n")
    assert not (tmp_path / "run" / "model").exists()


def test_a_folder_that_another_process_writes_to_is_refused(small: Small, tmp_path: Path) -> None:
    train = ["bertfused train", small.recipe, "--data", small.data, "--set", "train.max_steps=1"]
    for folder, line in (
        (tmp_path / "data", ["bertfused prepare", small.recipe]),
        (tmp_path / "run", train),
    ):
        folder.mkdir()
        with only_writer(folder):
            assert fail(*line, "--out", folder) == f"another process is writing to {folder}"
        assert leftovers(folder) == []
        succeed(*line, "--out", folder)


def test_data_of_other_subwords_are_refused(small: Small, tmp_path: Path) -> None:
    train = ["bertfused train", small.recipe, "--data", small.data, "--out", tmp_path / "run"]
    said = fail(*train, "--set", "subwords.kind=sentencepiece")
    assert said == (
        f"{small.data} was prepared with subwords.kind = 'words', but the recipe says "
        "'sentencepiece'"
    )
    # Without a word on subwords the data's are used; words have no number.
    for number, change in enumerate(("subwords=none", "subwords.size=77")):
        steps = ("--set", "train.max_steps=1", "--set", change)
        succeed(*train[:-1], tmp_path / f"run{number}", *steps)


def test_an_encoder_for_a_plain_model_is_refused(small: Small) -> None:
    said = fail("bertfused translate", small.plain, "--encoder", small.bert, stdin=b"cat\n")
    assert said == f"{small.plain} is a plain model: it reads no encoder '{small.bert}'"
    both = ("--ensemble", small.fused, "--encoder", small.bert)
    succeed("bertfused translate", small.plain, *both, stdin=b"cat\n")


def test_quiet_says_nothing(small: Small, tmp_path: Path) -> None:
    train = ["bertfused train", small.recipe, "--data", small.data, "--quiet"]
    assert succeed(*train, "--set", "train.max_steps=1", "--out", tmp_path / "run").err == ""
    assert "step 1" in (tmp_path / "run" / "log.txt").read_text()  # it is not said, but kept
    assert succeed("bertfused translate", small.plain, "--quiet", stdin=b"cat\n").err == ""


def test_info_describes_a_run(small: Small) -> None:
    first, *rest = succeed("bertfused info", small.fused).lines
    size = sum(p.numel() for p in load_model(small.fused).model.parameters())
    assert first == f"en-de, {size:,} parameters"
    card = json.loads("\n".join(rest))
    assert card["fusion"]["drop_net"] == 0.5
    assert card["encoder"]["name"] == str(small.bert)


def test_the_first_validation_of_a_warm_start_is_the_plain_models(small: Small) -> None:
    plain = [json.loads(line) for line in read_lines(small.plain / "metrics.jsonl")]
    fused = json.loads(next(read_lines(small.fused / "metrics.jsonl")))
    assert fused["step"] == 0
    lowest = min(record["valid_nll"] for record in plain if "valid_nll" in record)
    assert fused["valid_nll"] == pytest.approx(lowest, abs=1e-5)


# ---- score and evaluate


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_score_is_that_of_the_search(small: Small, tmp_path: Path, kind: str) -> None:
    run = getattr(small, kind)
    source = small.text / "dev.en"
    found = best(run, lines=list(read_lines(source)))
    output = write_lines(tmp_path / "out.de", [own["text"] for own in found])
    out = succeed("bertfused score", run, "--source", source, "--target", output).lines
    assert len(out) == len(found) == 20
    for line, own in zip(out, found, strict=True):
        log_prob, tokens = line.split("\t")
        assert float(log_prob) == pytest.approx(own["log_prob"], abs=1e-4)
        assert int(tokens) == len(own["tokens"]) + 1
    pairs = ["--source", source, "--target", output, "--output", tmp_path / "scores"]
    succeed("bertfused score", run, *pairs, "--batch-tokens", 7)
    again = list(read_lines(tmp_path / "scores"))
    for one, two in zip(again, out, strict=True):
        assert float(one.split("\t")[0]) == pytest.approx(float(two.split("\t")[0]), abs=1e-4)


def dev_set(small: Small) -> list[object]:
    return ["--source", small.text / "dev.en", "--reference", small.text / "dev.de"]


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_validation_in_training_equals_evaluate(small: Small, tmp_path: Path, kind: str) -> None:
    run: Path = getattr(small, kind)
    logged = {}
    for line in read_lines(run / "metrics.jsonl"):
        record = json.loads(line)
        if "valid_bleu" in record:
            logged[record["step"]] = record
    checkpoints = sorted((run / "checkpoints").iterdir())
    assert len(checkpoints) >= 2
    for folder in checkpoints:
        record = logged[int(folder.name.removeprefix("step-"))]
        output = tmp_path / "out.de"
        options = ["--json", "--output", output]
        found = json.loads(succeed("bertfused evaluate", folder, *dev_set(small), *options).out)
        assert found["bleu"]["value"] == record["valid_bleu"] > 0
        assert found["bleu"]["signature"] == record["valid_signature"]
        translated = translate(folder, lines=list(read_lines(small.text / "dev.en")))
        assert list(read_lines(output)) == translated
        reference = list(read_lines(small.text / "dev.de"))
        assert sacrebleu.corpus_bleu(translated, [reference]).score == record["valid_bleu"]


def test_without_bleu_the_dev_set_needs_no_text(small: Small, tmp_path: Path) -> None:
    """As in a folder that fairseq made."""
    data = tmp_path / "data"
    shutil.copytree(small.data, data)
    for path in data.glob("*.raw.*"):
        path.unlink()
    recipe = write_recipe(tmp_path / "recipe.toml", {"train": {"max_steps": 2}})
    train = ["bertfused train", recipe, "--data", data, "--out", tmp_path / "run"]
    assert "there is no text beside the ids" in fail(*train)
    said = succeed(*train, "--set", "train.validate_bleu=false").err
    assert "step 2: dev loss" in said
    assert "BLEU" not in said


def test_evaluate_prints_scores_with_signatures(small: Small) -> None:
    out = succeed("bertfused evaluate", small.plain, *dev_set(small)).lines
    found = json.loads(succeed("bertfused evaluate", small.plain, *dev_set(small), "--json").out)
    assert out == [found["bleu"]["text"], found["chrf"]["text"]]
    assert out[0].startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert out[1].startswith("chrF2|nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    lower = succeed("bertfused evaluate", small.plain, *dev_set(small), "--lowercase").lines
    assert "case:lc" in lower[0]


def test_shuffled_encoder_states(small: Small, tmp_path: Path) -> None:
    options = [*dev_set(small), "--json", "--shuffle-encoder"]
    found = json.loads(succeed("bertfused evaluate", small.fused, *options).out)
    pairs = ["--source", small.text / "dev.en", "--target", small.text / "dev.de"]
    scores = [line.split("\t") for line in succeed("bertfused score", small.fused, *pairs).lines]
    mean = -sum(float(score) for score, _ in scores) / sum(int(count) for _, count in scores)
    assert found["nll"] == pytest.approx(mean, abs=1e-4)
    assert found["encoder_use"] == pytest.approx(found["nll_shuffled"] - found["nll"])
    assert found["nll_shuffled"] != pytest.approx(found["nll"], abs=1e-6)
    readable = succeed("bertfused evaluate", small.fused, *dev_set(small), "--shuffle-encoder")
    assert readable.lines[2] == f"nll = {found['nll']:.4f} nats a token"
    said = fail("bertfused evaluate", small.plain, *dev_set(small), "--shuffle-encoder")
    assert said == "--shuffle-encoder needs a fused model"


def test_compare(small: Small, tmp_path: Path) -> None:
    reference = small.text / "dev.de"
    right = list(read_lines(reference))
    one = write_lines(tmp_path / "one", [line.split()[0] for line in right])
    out = succeed("bertfused compare", one, reference, "--reference", reference).out.decode()
    table, _, signatures = out.partition("\n\n")
    _, baseline, better = table.splitlines()
    assert baseline.startswith(str(one))
    assert "p = " not in baseline
    assert better.startswith(str(reference))
    assert "100.00" in better
    assert "*" in better
    assert "BLEU: nrefs:1|bs:1000|seed:12345" in signatures
    write_lines(one, right[:-1])
    said = fail("bertfused compare", reference, one, "--reference", reference)
    assert said == f"{one} has 19 lines but {reference} has 20"


# ---- average, cache-features, import, export


def test_average(small: Small, tmp_path: Path) -> None:
    checkpoints = [small.plain / "checkpoints" / name for name in ("step-70", "step-80")]
    weights = [read_tensors(folder / "model.safetensors") for folder in checkpoints]
    ran = succeed("bertfused average", small.plain, "--last", 2, "--out", tmp_path / "last")
    assert "averaged the checkpoints of steps 70, 80" in ran.err
    found = read_tensors(tmp_path / "last" / "model" / "model.safetensors")
    assert found.keys() == weights[0].keys()
    for name, tensor in found.items():
        expected = (weights[0][name] + weights[1][name]) / 2
        torch.testing.assert_close(tensor, expected)
    assert len(translate(tmp_path / "last")) == len(LINES)
    losses = {}
    for line in read_lines(small.plain / "metrics.jsonl"):
        record = json.loads(line)
        if "valid_nll" in record:
            losses[record["step"]] = record["valid_nll"]
    ran = succeed("bertfused average", small.plain, "--best", 1, "--out", tmp_path / "best")
    assert f"averaged the checkpoints of steps {min((70, 80), key=losses.get)}" in ran.err
    said = fail("bertfused average", small.plain, "--last", 9, "--out", tmp_path / "none")
    checkpoints_found = len(list((small.plain / "checkpoints").iterdir()))
    assert said.startswith(f"{small.plain} has {checkpoints_found} checkpoints, not 9")
    assert not (tmp_path / "none").exists()
    said = fail("bertfused average", small.plain, "--out", tmp_path / "none")
    assert said == "give one of --last N and --best N"


def test_a_cache_of_features_changes_nothing_but_rounding(small: Small, tmp_path: Path) -> None:
    data = shutil.copytree(small.data, tmp_path / "data")
    train = ["bertfused train", small.fused_recipe, "--set", "train.max_steps=4", "--data", data]
    cache = ["bertfused cache-features", data, "--encoder", small.bert, "--dtype", "fp32"]

    def losses(name: str) -> list[float]:
        succeed(*train, "--out", tmp_path / name, "--set", "train.log_every=1")
        logged = [json.loads(line) for line in read_lines(tmp_path / name / "metrics.jsonl")]
        return [own["nll"] if "nll" in own else own["valid_nll"] for own in logged]

    online = losses("online")
    with only_writer(data):
        assert fail(*cache) == f"another process is writing to {data}"
    ran = succeed(*cache)
    assert ran.out == b""
    assert "train: 300 sentences" in ran.err
    assert "train is cached already" in succeed(*cache).err
    assert losses("cached") == pytest.approx(online, abs=1e-5)
    for path in (data / "features").rglob("train.bin"):  # it is read indeed
        path.write_bytes(bytes(path.stat().st_size))
    assert losses("zeros") != pytest.approx(online, abs=1e-3)


def test_cache_features_refuses_other_encoders_and_plain_data(small: Small, tmp_path: Path) -> None:
    succeed("bertfused prepare", small.recipe, "--out", tmp_path / "plain")
    said = fail("bertfused cache-features", tmp_path / "plain", "--encoder", small.bert)
    assert said == f"{tmp_path / 'plain'} holds no ids for a pretrained encoder"
    other = write_bert(tmp_path / "other", ["cat"])
    said = fail("bertfused cache-features", small.data, "--encoder", other)
    assert said == f"{small.data} was prepared for the encoder {small.bert}, not {other}"
    said = fail("bertfused cache-features", small.data, "--encoder", small.bert, "--layer", "top")
    assert "fusion.layer" in said or "layer" in said
    assert not (small.data / "features").exists()


def test_export_and_import_fairseq(small: Small, tmp_path: Path) -> None:
    ran = succeed("bertfused export fairseq", small.plain, "--out", tmp_path / "fairseq")
    assert ran.out == b""
    (checkpoint,) = (tmp_path / "fairseq").glob("*.pt")
    dictionaries = [
        *("--source-dict", tmp_path / "fairseq" / "dict.en.txt"),
        *("--target-dict", tmp_path / "fairseq" / "dict.de.txt"),
    ]
    again = tmp_path / "again"
    ran = succeed("bertfused import fairseq", checkpoint, *dictionaries, "--out", again)
    assert ran.out == b""
    search = ["--beam-size", 2, "--max-length-b", 20]
    expected = best(small.plain, *search)
    found = best(again, *search)
    assert [own["text"] for own in found] == [own["text"] for own in expected]
    scores = [own["score"] for own in expected]
    assert [own["score"] for own in found] == pytest.approx(scores, abs=1e-5)
    said = fail("bertfused export fairseq", small.fused, "--out", tmp_path / "none")
    assert said == f"{small.fused} is a fused model; only plain ones can be exported to fairseq"
    assert not (tmp_path / "none").exists()


def test_import_refuses_what_is_no_checkpoint(small: Small, tmp_path: Path) -> None:
    dictionaries = [
        *("--source-dict", small.data / "dict.en.txt"),
        *("--target-dict", small.data / "dict.de.txt"),
    ]
    for content in (b"", b"some text", b"cos\nsystem\n(S'true'\ntR."):
        (tmp_path / "model.pt").write_bytes(content)
        options = [*dictionaries, "--out", tmp_path / "out"]
        said = fail("bertfused import fairseq", tmp_path / "model.pt", *options)
        assert str(tmp_path / "model.pt") in said
        assert not (tmp_path / "out").exists()


def test_export_ctranslate2(small: Small, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    ran = succeed("bertfused export ctranslate2", small.plain, "--out", tmp_path / "ct2")
    assert ran.out == b""
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), intra_threads=1)
    lines = [line for line in LINES if line]
    found = translator.translate_batch(
        [line.split() for line in lines], beam_size=1, max_decoding_length=20
    )
    expected = [own["tokens"] for own in best(small.plain, "--beam-size", 1, lines=lines)]
    assert [own.hypotheses[0] for own in found] == expected
    said = fail("bertfused export ctranslate2", small.fused, "--out", tmp_path / "none")
    assert "is a fused model" in said
    assert not (tmp_path / "none").exists()


# ---- mistakes


TRANSLATE_MISTAKES = [
    ("--nbest 5", "--nbest 5 needs a --beam-size of 5 or more"),
    ("--sampling best", "sampling is 'best'; allowed are full, topk:K with K >= 1 and"),
    ("--temperature 0", "temperature"),
    ("--sampling full --diverse-groups 2", "sampling and diverse_groups exclude each other"),
    ("--input none.en", "cannot read none.en: No such file or directory"),
    ("--input .", "cannot read .: Is a directory"),
    ("--output none/out.de", "cannot write none/out.de: No such file or directory"),
    (f"--output {'o' * 300}", "File name too long"),
    ("--prefix none.de", "cannot read none.de: No such file or directory"),
    ("--ensemble none", "none is not a folder; a run folder is made by train, import or average"),
    ("--device abacus", "device 'abacus' cannot be used here"),
]


@pytest.mark.parametrize(("options", "message"), TRANSLATE_MISTAKES)
def test_mistakes_in_translate(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = options.split()
    words += [] if "--output" in words else ["--output", "out.de"]
    said = fail("bertfused translate", small.plain, *words, stdin=b"the cat\n")
    assert message in said
    assert leftovers(tmp_path) == []


def test_an_ensemble_needs_one_vocabulary(small: Small, tmp_path: Path) -> None:
    recipe = write_recipe(small.text / "few.toml", {"data": {"max_tokens": 2}})
    succeed("bertfused prepare", recipe, "--out", tmp_path / "data", "--set", "data.max_unknown=1")
    data = ["--data", tmp_path / "data", "--set", "train.max_steps=1"]
    shutil.copy(small.data / "dict.en.txt", tmp_path / "other.txt")
    succeed("bertfused train", recipe, *data, "--out", tmp_path / "run")
    if (tmp_path / "data" / "dict.de.txt").read_bytes() != (
        small.data / "dict.de.txt"
    ).read_bytes():
        said = fail("bertfused translate", small.plain, "--ensemble", tmp_path / "run")
        assert said == "the models of an ensemble must have one target vocabulary"


TRAIN_MISTAKES = [
    ("--set model.dropuot=0.1", "unknown key model.dropuot; did you mean 'dropout'?"),
    ("--set train.max_steps=many", "train.max_steps = 'many'"),
    ("--set train.max_steps", "--set needs key=value, not 'train.max_steps'"),
    ("--set model.heads=3", "model_dim 32 is not a multiple of 3 heads"),
    ("--set train.max_steps=none", "give max_steps, max_epochs, max_minutes or patience"),
    ("--data none", "none is not a folder"),
    ("--init none", "none is not a folder; a run folder is made by train, import or average"),
    ("--init PLAIN --set model.encoder_layers=2", "it lacks encoder.layers.1."),
    ("--init PLAIN --set model.norm=pre", "it lacks "),
    ("--init PLAIN --set model.ffn_dim=16", "encoder.layers.0.ffn"),
    ("--out FILE", "cannot make the folder"),
    (f"--out {'o' * 300}", "File name too long"),
    ("--out DATA", "is a DATA folder; give another one for the run"),
    ("--set optim.lr=1e38 --set optim.warmup_steps=0", "updates in a row was not finite"),
]


@pytest.mark.parametrize(("options", "message"), TRAIN_MISTAKES)
def test_mistakes_in_train(small: Small, tmp_path: Path, options: str, message: str) -> None:
    file = write_lines(tmp_path / "file", ["text"])
    words = options.replace("PLAIN", str(small.plain)).replace("FILE", str(file)).split()
    words = [str(small.data) if word == "DATA" else word for word in words]
    words += [] if "--data" in words else ["--data", str(small.data)]
    words += [] if "--out" in words else ["--out", str(tmp_path / "run")]
    assert message in fail("bertfused train", small.recipe, *words)
    if "finite" not in message:
        assert leftovers(tmp_path) == ["file"]


def test_a_fused_recipe_needs_data_with_ids_of_the_encoder(small: Small, tmp_path: Path) -> None:
    succeed("bertfused prepare", small.recipe, "--out", tmp_path / "data")
    data = ["--data", tmp_path / "data", "--out", tmp_path / "run"]
    said = fail("bertfused train", small.fused_recipe, *data)
    assert said == (
        f"{tmp_path / 'data'} holds no ids for a pretrained encoder; prepare it with a [fusion] "
        "section"
    )
    other = write_bert(tmp_path / "other", ["cat"])
    data = ["--data", small.data, "--out", tmp_path / "run", "--set", f"fusion.encoder={other}"]
    said = fail("bertfused train", small.fused_recipe, *data)
    assert "whose tokenizer is not that of" in said
    assert not (tmp_path / "run").exists()


def test_a_finetuned_encoder_belongs_to_its_model(small: Small, tmp_path: Path) -> None:
    run, data = tmp_path / "run", ["--data", small.data]
    train = ["bertfused train", small.fused_recipe, *data, "--set", "train.max_steps=2"]
    tune = [*train, "--set", "fusion.finetune=true", "--set", "fusion.layer=-2"]
    succeed(*tune, "--out", run)
    record = json.loads(list(read_lines(run / "metrics.jsonl"))[-1])
    found = json.loads(succeed("bertfused evaluate", run, *dev_set(small), "--json").out)
    assert found["bleu"]["value"] == record["valid_bleu"]
    scores = succeed(
        *("bertfused score", run, "--encoder", small.bert, "--source", small.text / "dev.en"),
        *("--target", small.text / "dev.de"),
    ).lines
    sums = [float(line.split("\t")[0]) for line in scores]
    tokens = [int(line.split("\t")[1]) for line in scores]
    assert -sum(sums) / sum(tokens) == pytest.approx(record["valid_nll"], abs=1e-4)
    said = fail("bertfused average", run, "--last", 1, "--out", tmp_path / "mean")
    assert said == f"{run} has a fine-tuned encoder, which is not averaged"
    own = run / "model" / "encoder"
    said = fail(*train, "--init", run, "--out", tmp_path / "more")
    assert said == (
        f"cannot start from {run}: its encoder was fine-tuned; set fusion.encoder = '{own}'"
    )
    shutil.rmtree(own)
    said = fail("bertfused translate", run, stdin=b"cat\n")
    assert said == f"{run / 'model'} lacks encoder, the encoder trained with the model"


def test_unequal_files_name_both_counts(small: Small, tmp_path: Path) -> None:
    short = write_lines(tmp_path / "short.de", list(read_lines(small.text / "dev.de"))[:7])
    source = small.text / "dev.en"
    for verb, option in (("score", "--target"), ("evaluate", "--reference")):
        output = ["--output", tmp_path / "out"]
        for first, second in ((source, short), (short, source)):
            said = fail(
                f"bertfused {verb}", small.plain, "--source", first, option, second, *output
            )
            counts = {source: 20, short: 7}
            assert said == f"{second} has {counts[second]} lines but {first} has {counts[first]}"
    recipe = write_recipe(small.text / "unequal.toml")
    said = fail(
        *("bertfused prepare", recipe, "--out", tmp_path / "data"),
        *("--set", f"data.dev.target='{short}'"),
    )
    assert said == f"{source} has 20 lines but {short} has 7"
    assert not (tmp_path / "data" / "data.toml").exists()
    said = fail("bertfused train", recipe, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert said == f"{tmp_path / 'data'} is not complete; run prepare again"


def test_mistakes_in_recipes(small: Small, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    out = ["--out", tmp_path / "data"]
    said = fail("bertfused prepare", recipe, *out)
    assert said == f"cannot read {recipe}: No such file or directory"
    recipe.write_text("[data\n")
    assert fail("bertfused prepare", recipe, *out).startswith(f"{recipe} is not valid TOML")
    write_recipe(recipe, {"documents": {"previous": 1}})
    said = fail("bertfused prepare", recipe, *out)
    assert said.startswith(f"{recipe}: unknown key documents")
    write_recipe(recipe)
    said = fail("bertfused prepare", recipe, *out)
    assert said == f"cannot read {tmp_path / 'train.en'}: No such file or directory"
    assert leftovers(tmp_path) == ["recipe.toml"]


@pytest.mark.parametrize("damage", ["weights", "card", "dictionary"])
def test_damaged_models(small: Small, tmp_path: Path, damage: str) -> None:
    model = shutil.copytree(small.plain / "model", tmp_path / "model")
    name, content, message = {
        "weights": ("model.safetensors", b"12345678901234567890", "cannot read"),
        "card": ("model.json", b"{}", "is damaged"),
        "dictionary": ("dict.en.txt", b"cat 1\n", "is not the file the model was trained with"),
    }[damage]
    (model / name).write_bytes(content)
    said = fail("bertfused translate", model, stdin=b"cat\n")
    assert message in said
    assert name in said


def test_a_run_is_not_a_card(small: Small) -> None:
    assert load_card(small.plain / "model").source == "en"
    said = fail("bertfused info", small.text)
    assert "holds no model.json" in said
