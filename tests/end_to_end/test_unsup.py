"""The commands of ``unsup``, in one process and in two, killed and not."""

import json
import random
from functools import partial
from pathlib import Path

import pytest

from bertfused.checkpoint import load_model, read_tensors
from bertfused.translate import Translator
from tests.end_to_end.children import die_at, finish, start
from tests.end_to_end.corpus import fail, succeed
from tests.end_to_end.test_processes import torchrun
from tests.end_to_end.test_resume import check_loadable, contents
from tests.tiny_encoders import make_encoder
from tests.tiny_texts import Texts, make_texts

ALL = ["objectives.denoising=0:1,4:0.5", "objectives.mass=0.3", "objectives.teacher=average"]
ALL += ["optim.ema=0.9", "generate.sampling=topk:3", "generate.updates=3", "train.accumulate=2"]
SETTINGS = [word for setting in ALL for word in ("--set", setting)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(texts: Texts) -> Path:
    out, log = texts.folder / "run", texts.folder / "log"
    assert finish(start(log, *train_into(texts, out))) == 0, log.read_text()
    return out


def train_into(texts: Texts, out: Path) -> list[object]:
    recipe = texts.folder / "recipe.toml"
    return ["unsup train", recipe, "--data", texts.folder / "data", *SETTINGS, "--out", out]


def test_preparation_counts_every_line_and_does_nothing_twice(texts: Texts, tmp_path: Path) -> None:
    recipe = texts.folder / "recipe.toml"
    said = succeed("unsup prepare", recipe, "--out", tmp_path / "data").err
    assert "mono.ab: 120 lines = 120 kept + 0 empty + 0 over 250 tokens" in said
    assert (tmp_path / "data/mono.ab.bin").read_bytes() == (
        texts.folder / "data/mono.ab.bin"
    ).read_bytes()
    again = succeed("unsup prepare", recipe, "--out", tmp_path / "data").err
    assert "is complete; nothing to do" in again
    refused = fail(
        "unsup prepare", recipe, "--out", tmp_path / "data", "--set", "data.max_tokens=9"
    )
    assert "was made from something else: max_tokens differs" in refused


def test_killed_in_the_middle_of_back_translation_ends_the_same(
    texts: Texts, run: Path, tmp_path: Path
) -> None:
    killed, log = tmp_path / "b" / "run", tmp_path / "log"
    draw, kills = random.Random(3), 0
    for _ in range(5):
        moment = partial(die_at, draw.randint(1, 70), killed)
        command = train_into(texts, killed)
        code = finish(start(log, *command, "--resume", before=moment))
        assert code in (0, -9), log.read_text()
        kills += code == -9
        check_loadable(killed)
    assert kills > 1
    assert finish(start(log, *train_into(texts, killed), "--resume")) == 0, log.read_text()
    assert contents(killed) == contents(run)


def test_two_processes_of_torchrun_equal_one(texts: Texts, run: Path, tmp_path: Path) -> None:
    _, *command = train_into(texts, tmp_path / "run")
    ran = torchrun("-m", "unsup", "train", *command)
    assert ran.returncode == 0, ran.stderr
    ours, theirs = (
        read_tensors(own / "checkpoints/step-6/training.safetensors")
        for own in (tmp_path / "run", run)
    )
    for name, tensor in ours.items():
        if name.startswith("average.") and "in_proj.bias" not in name and "kv_proj" not in name:
            assert (tensor - theirs[name]).abs().max() < 1e-4, name


def test_both_directions_are_translated_and_evaluated(
    texts: Texts, run: Path, tmp_path: Path
) -> None:
    lines = (texts.folder / "dev.xy").read_text()
    back = succeed("unsup translate", run, "--to", "ab", stdin=lines.encode()).out.decode()
    forth = (texts.folder / "dev.ab").read_bytes()
    there = succeed("unsup translate", run, "--to", "xy", stdin=forth)
    assert back.count("\n") == there.out.count(b"\n") == 8
    translator = Translator.load(run, to="ab")
    assert [own.text for own in translator.translate(lines.splitlines())] == back.splitlines()
    report = json.loads(
        succeed(
            *("unsup evaluate", run, "--data", texts.folder / "data", "--json"),
            *("--output", tmp_path / "found"),
        ).out
    )
    assert [(own["test"], own["direction"]) for own in report["directions"]] == [
        ("dev", "ab-xy"),
        ("small", "ab-xy"),
        ("dev", "xy-ab"),
        ("small", "xy-ab"),
    ]
    assert (tmp_path / "found/dev.xy-ab").read_text() == back
    assert report["directions"][0]["copied_by_reference"] == 0.0
    table = succeed("unsup evaluate", run, "--data", texts.folder / "data").out.decode()
    assert "xy-ab" in table
    assert "nrefs:1|" in table


def test_another_language_is_refused(run: Path) -> None:
    for program in ("unsup", "bertfused", "docnmt"):
        said = fail(f"{program} translate", run, "--to", "de")
        assert said == "the model translates between ab and xy, not into 'de'"


def test_the_other_commands_take_both_directions(texts: Texts, run: Path, tmp_path: Path) -> None:
    lines = (texts.folder / "dev.xy").read_bytes()
    both = [
        succeed(f"{program} translate", run, "--to", "ab", "--nbest", 2, stdin=lines).out
        for program in ("unsup", "bertfused")
    ]
    assert both[0] == both[1]
    assert both[0].count(b"\n") == 16
    pairs = ["--source", texts.folder / "dev.ab", "--target", texts.folder / "dev.xy"]
    assert succeed("bertfused score", run, "--to", "xy", *pairs).out.count(b"\n") == 8
    said = fail("bertfused score", run, *pairs)
    assert said == f"{run} translates between ab and xy; give --to ab or --to xy"
    assert fail("unsup translate", run, stdin=lines) == said
    references = ["--source", texts.folder / "dev.xy", "--reference", texts.folder / "dev.ab"]
    assert fail("bertfused evaluate", run, *references) == said
    translations = tmp_path / "dev.ab"
    back = ["--to", "ab", "--output", translations]
    succeed("bertfused evaluate", run, *references, *back)
    alone = succeed("unsup translate", run, "--to", "ab", stdin=lines).out
    assert translations.read_bytes() == alone
    succeed("bertfused average", run, "--best", 2, "--out", tmp_path / "average")
    assert load_model(tmp_path / "average").card.languages == ("ab", "xy")


def test_evaluation_needs_pairs(texts: Texts, run: Path, tmp_path: Path) -> None:
    recipe = texts.folder / "recipe.toml"
    bare = ["--set", "data.dev=none", "--set", "data.test=none"]
    succeed("unsup prepare", recipe, "--out", tmp_path / "bare", *bare)
    said = fail("unsup evaluate", run, "--data", tmp_path / "bare")
    assert said == f"{tmp_path / 'bare'} was prepared without dev and test sets"


def test_what_is_left_is_one_model_for_both_directions(run: Path) -> None:
    card = load_model(run).card
    assert card.languages == ("ab", "xy")
    assert card.language_ids == (0, 1)
    report = (run / "report.md").read_text()
    assert "chosen by round-trip BLEU" in report
    assert "| round trip ab-xy |" in report.replace("| step ", "")


def test_a_model_that_copies_is_stopped_and_saved(texts: Texts, tmp_path: Path) -> None:
    command = ["unsup train", texts.folder / "recipe.toml", "--data", texts.folder / "data"]
    bounds = ["validation.guard_from=1", "validation.max_wrong=0.000001"]
    options = [word for setting in bounds for word in ("--set", setting)]
    said = fail(*command, "--out", tmp_path / "run", *options)
    assert "step 3: " in said
    assert "look like the language of the source" in said or "the model copies" in said
    assert (tmp_path / "run/checkpoints/step-3").is_dir()
    assert "chosen by round-trip BLEU" in (tmp_path / "run/report.md").read_text()
    relaxed = ["--set", "validation.max_wrong=1", "--set", "validation.max_copied=1", "--resume"]
    said = succeed(*command, "--out", tmp_path / "run", *options, *relaxed).err
    assert "resuming with validation.max_wrong = 1.0 (was 1e-06)" in said


def test_what_does_not_fit_the_data_is_refused(texts: Texts, run: Path, tmp_path: Path) -> None:
    recipe = texts.folder / "recipe.toml"
    train = ["unsup train", recipe, "--data", texts.folder / "data", "--out", tmp_path / "run"]
    other = options(data={"source": "xy", "target": "ab"})
    assert "is of ab and xy, in this order, but the recipe of xy and ab" in fail(*train, *other)
    succeed("unsup prepare", recipe, "--out", tmp_path / "bare", "--set", "data.dev=none")
    bare = ["unsup train", recipe, "--data", tmp_path / "bare", "--out", tmp_path / "run"]
    assert "has no data.dev" in fail(*bare, "--set", "validation.select=bleu")
    assert "there is no such folder" in fail(*train, "--init", tmp_path / "typo")
    swapped = tmp_path / "swapped"
    succeed("unsup prepare", recipe, "--out", swapped, *other, "--set", "data.dev=none")
    turned = ["unsup train", recipe, "--data", swapped, "--out", tmp_path / "run", *other]
    said = fail(*turned, "--init", run)
    assert "which translates between ab and xy; this model translates between xy and ab" in said
    assert not (tmp_path / "run").exists()


def test_words_need_translations_of_them(texts: Texts, tmp_path: Path) -> None:
    command = ["unsup train", texts.folder / "recipe.toml", "--data", texts.folder / "data"]
    said = fail(*command, "--out", tmp_path / "run", "--set", "objectives.words=1")
    assert "has none; prepare it with a [words] section" in said
    assert not (tmp_path / "run").exists()


XLM = {
    "ffn_dim": 64,
    "norm": "post",
    "activation": "gelu",
    "positions": "learned",
    "max_positions": 80,
    "embedding_norm": True,
    "scale_embeddings": False,
}


def child(log: Path, *command: object) -> str:
    """Run a command away from the shape checks, which slow the word-by-word search down."""
    assert finish(start(log, *map(str, command))) == 0, log.read_text()
    return log.read_text()


def options(**sections: dict[str, object]) -> list[str]:
    """Return --set options; the values as TOML writes them."""
    settings = [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in sections.items()
        for key, value in values.items()
    ]
    return [word for setting in settings for word in ("--set", setting)]


def test_pretrained_started_and_fused(texts: Texts, tmp_path: Path) -> None:
    recipe, data = texts.folder / "recipe.toml", texts.folder / "data"
    pretraining = options(model=XLM, pretrain={"valid_lines": 20})
    said = succeed(
        "unsup pretrain", recipe, "--data", data, "--out", tmp_path / "xlm", *pretraining
    )
    assert "masked perplexity" in said.err
    plain = tmp_path / "plain"
    changes = options(model=XLM)
    train = ["unsup train", recipe, "--data", data, *changes]
    said = succeed(*train, "--init", tmp_path / "xlm", "--out", plain)
    assert "304 of 304 symbols are in its vocabulary" in said.err
    fused = tmp_path / "fused"
    fusion = options(fusion={"encoder": str(tmp_path / "xlm"), "drop_net": 0.5})
    succeed(*train, *fusion, "--init", plain, "--out", fused)
    before, after = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (plain, fused)
    )
    best = max((own for own in before if "valid_value" in own), key=lambda own: own["valid_value"])
    first = next(own for own in after if own["step"] == 0)
    assert first["valid_value"] == best["valid_value"]  # the start computes what the plain one does
    out = succeed("unsup translate", fused, "--to", "ab", stdin=b"qegor qemab\n\n").out
    assert out.count(b"\n") == 2


def test_pretrained_by_masked_spans(texts: Texts, tmp_path: Path) -> None:
    recipe, data = texts.folder / "recipe.toml", texts.folder / "data"
    mass = options(pretrain={"objective": "mass", "valid_lines": 20})
    command = ["unsup pretrain", recipe, "--data", data, *mass]
    assert "masked perplexity" in succeed(*command, "--out", tmp_path / "mass").err
    train = ["unsup train", recipe, "--data", data, "--out", tmp_path / "run"]
    said = succeed(*train, "--init", tmp_path / "mass", "--set", "train.max_steps=2")
    assert f"warm start from {tmp_path / 'mass'}: loaded" in said.err
    refused = fail(*command, "--out", tmp_path / "none", "--set", "pretrain.valid_lines=120")
    assert "120 lines of 'ab', of which the last 120 (pretrain.valid_lines) are held out" in refused


def test_embeddings_begin_from_an_encoder(texts: Texts, run: Path, tmp_path: Path) -> None:
    encoder = make_encoder("bert", tmp_path / "encoder")
    train = ["unsup train", texts.folder / "recipe.toml", "--data", texts.folder / "data"]
    train += options(embeddings={"encoder": str(encoder)}, train={"max_steps": 2})
    assert f"embeddings begin as {encoder} has them" in succeed(*train, "--out", tmp_path / "a").err
    refused = fail(*train, "--init", run, "--out", tmp_path / "b")
    assert f"[embeddings] says how a fresh model begins, but this one begins from {run}" in refused
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", ["induced", "dictionary"])
def test_words_begin_from_the_texts_or_from_a_dictionary(
    texts: Texts, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "words.tsv").write_text("baba\tqabab\nbadu\tqudab (n)\n\nbame bame\tx\n")
    words: dict[str, object] = {"induced": True, "refinements": 1}
    extra = options(words=words)
    if kind == "dictionary":
        file = f"{{path = '{tmp_path / 'words.tsv'}', language = 'ab'}}"
        extra = ["--set", f"words.dictionaries=[{file}]"]
    recipe, data = texts.folder / "recipe.toml", tmp_path / "data"
    prepare = ["unsup prepare", recipe, "--out", data, *extra]
    said = child(tmp_path / "log", *prepare)
    assert "word by word from ab: " in said
    assert "word by word from xy: " in said
    if kind == "dictionary":
        assert "2 pairs, left out 1 no pair, 1 several words" in said
    assert "are complete" in child(tmp_path / "again", *prepare)
    other = [*prepare, "--set", "words.swap_cost=0.5"]
    refused = f"of {data} were made with another words.swap_cost; prepare with --force"
    assert refused in fail(*other)
    assert refused in fail(
        *("unsup train", recipe, "--data", data, "--out", tmp_path / "swapped", *extra),
        *options(words={"swap_cost": 0.5}, objectives={"words": 1}),
    )
    (data / ".words.ab-xy.bin.0123abcd.partial").touch()
    assert "are complete" not in child(tmp_path / "other", *other, "--force")
    assert not list(data.glob(".*.partial"))
    child(tmp_path / "back", *prepare, "--force")
    if kind == "dictionary":
        (data / "data.toml").write_text((data / "data.toml").read_text() + "\n")
        stale = ["unsup train", recipe, "--data", data, "--out", tmp_path / "stale"]
        assert "are of other data than are there" in fail(*stale, *options(objectives={"words": 1}))
        child(tmp_path / "anew", *prepare)
    train = ["unsup train", recipe, "--data", data, "--out", tmp_path / "run"]
    said = succeed(*train, *options(objectives={"words": 1}), "--set", "train.log_every=1").err
    assert "step 6" in said
    logged = (tmp_path / "run/metrics.jsonl").read_text()
    assert "words_nll" in logged
    if kind == "dictionary":
        child(tmp_path / "changed", *prepare, "--set", "words.swap_cost=0.7", "--force")
        resumed = [*train, *options(objectives={"words": 1}), "--resume"]
        assert "it was trained on other data" in fail(*resumed, "--set", "train.max_steps=9")
