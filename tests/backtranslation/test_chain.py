"""The chain from one recipe: what its stages are made from, and how it goes on where it stopped."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sacrebleu import corpus_bleu, corpus_chrf

from backtranslation.chain import model_names, reverse_names, train_chain
from backtranslation.config import BacktranslationRecipe
from backtranslation.evaluate import evaluate_chain
from backtranslation.filters import read_report
from backtranslation.leaks import drop_leaked
from bertfused.config import Recipe, check_recipe, load_recipe, write_recipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.text import read_lines, sha256_file
from tests.tiny_encoders import make_encoder

# 18 steps: 4 each but for the 6 of bt.
SHORT = {"bt": {"train": {"max_steps": 6}}, "fused": {"control": False, "cache": "fp32"}}


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a language b whose words are those of a, and an encoder."""
    folder = tmp_path_factory.mktemp("text")
    random = Random(1)

    def sentences(count: int) -> list[str]:
        words = "abcdefgh"
        return [" ".join(random.choices(words, k=random.randrange(1, 6))) for _ in range(count)]

    for name, count in (("train", 60), ("dev", 8), ("test", 8)):
        lines = sentences(count)
        write(folder / f"{name}.a", lines)
        write(folder / f"{name}.b", [line.upper() for line in lines])
    write(folder / "mono.b", [line.upper() for line in sentences(50)] + ["", "XYZ"])
    write(folder / "mono.a", sentences(40))
    make_encoder("bert", folder / "encoder")
    return folder


def recipe_of(text: Path, **changes: Any) -> BacktranslationRecipe:
    values = {
        "data": {
            "source": "a",
            "target": "b",
            "train": [{"source": "train.a", "target": "train.b"}],
            "dev": {"source": "dev.a", "target": "dev.b"},
            "test": [{"name": "test", "source": "test.a", "target": "test.b"}],
            "mono": {"b": ["mono.b"], "a": ["mono.a"]},
            "max_unknown": 1.0,
        },
        "subwords": {"kind": "words", "shared": True},
        "model": {
            "encoder_layers": 1,
            "decoder_layers": 1,
            "model_dim": 16,
            "ffn_dim": 16,
            "heads": 2,
        },
        "fusion": {"encoder": "encoder", "drop_net": 0.5},
        "optim": {"lr": 0.02, "warmup_steps": 1},
        "train": {
            "batch_tokens": 200,
            "max_steps": 4,
            "validate_every": 2,
            "validate_bleu": False,
            "precision": "fp32",
        },
        "search": {"max_length_b": 5, "beam_size": 2},
        "filter": {
            "max_ratio": 99,
            "max_copied": 1,
            "max_repeats": 99,
            "target_scripts": ["LATIN", "GREEK"],
        },
        "generate": {"engine": "torch"},
        "mix": {"upsample": 2},
        "stages": {"bt": {"train": {"max_steps": 6}}, "fused": {"cache": "fp32"}},
    }
    return check_recipe(values | changes, BacktranslationRecipe, "recipe", folder=text)


def run(recipe: BacktranslationRecipe, out: Path, **options: Any) -> None:
    train_chain(recipe, out, device="cpu", **options)


def made(out: Path) -> dict[str, bytes]:
    """Read what must not depend on interruptions: text, ids, models."""
    suffixes = {".safetensors", ".bin", ".idx", ".a", ".b", ".toml"}
    files = {p.relative_to(out): p for p in out.rglob("*") if p.suffix in suffixes}
    return {
        str(name): path.read_bytes().replace(str(out).encode(), b"OUT")
        for name, path in files.items()
    }


@pytest.fixture(scope="module")
def chain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chains") / "chain"
    run(recipe_of(text, rounds=2), out)
    return out


def test_each_stage_is_made_from_the_ones_before(chain: Path) -> None:
    def made_from(run: str) -> tuple[str, str | None]:
        facts = json.loads((chain / run / "run.json").read_bytes())
        init = None if facts["init"] is None else Path(facts["init"]).name
        return Path(facts["data"]).name, init

    assert made_from("baseline") == ("baseline-data", None)
    assert made_from("reverse") == ("reverse-data", None)
    assert made_from("bt") == ("bt-data", None)
    assert made_from("reverse-2") == ("reverse-2-data", None)
    assert made_from("bt-2") == ("bt-2-data", None)
    assert made_from("fused") == ("bt-2-data", "bt-2")
    assert made_from("control") == ("bt-2-data", "bt-2")
    teachers = {"bt": "reverse", "reverse-2": "bt", "bt-2": "reverse-2"}
    for name, teacher in teachers.items():
        manifest = json.loads((chain / f"{name}-generated" / "manifest.json").read_bytes())
        weights = chain / teacher / "model" / "model.safetensors"
        assert manifest["made_from"]["model"] == sha256_file(weights)


def test_pairs_are_real_on_the_target_side_and_marked_on_the_source_side(chain: Path) -> None:
    for name, real in (("bt", "b"), ("bt-2", "b"), ("reverse-2", "a")):
        synthetic = "a" if real == "b" else "b"
        targets = list(read_lines(chain / f"{name}-filtered" / f"filtered.{real}"))
        assert set(targets) <= set(read_lines(chain / "text" / f"mono.{real}"))
        data = DataFolder.open(chain / f"{name}-data")
        assert data.languages == (synthetic, real)
        split = data.split("train")
        symbols = data.tokenizers()[0].vocabulary.symbols
        tagged = [symbols[ids[0]] == "<BT>" for ids in split.source]
        clean = len(list(read_lines(chain / "text" / "train.0.a")))
        assert tagged == [False] * clean + [True] * len(targets)
        report = read_report(chain / f"{name}-filtered")
        scripts = {synthetic: report.config.source_scripts, real: report.config.target_scripts}
        assert scripts == {"a": ("LATIN",), "b": ("LATIN", "GREEK")}
        recipe = load_recipe(chain / f"{name}.toml", Recipe)
        assert [corpus.weight for corpus in recipe.data.train] == [2, 1]


def test_one_dictionary_serves_all(chain: Path) -> None:
    dictionaries = {path.read_bytes() for path in chain.glob("*-data/dict.*.txt")}
    assert len(dictionaries) == 1


def test_the_control_is_the_plain_model_for_the_time_of_the_fused_one(chain: Path) -> None:
    control = load_recipe(chain / "control" / "config.toml", Recipe)
    costs = json.loads((chain / "control" / "costs.json").read_bytes())
    seconds = 4 * costs["fused_step"] + costs["encoding"]
    assert control.train.max_steps == round(seconds / costs["plain_step"])
    assert costs["encoding"] > 0
    assert costs["fused_step"] > costs["plain_step"]
    assert control.fusion is None
    fused = load_recipe(chain / "fused" / "config.toml", Recipe)
    assert fused.fusion is not None
    assert fused.model == control.model


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a chain without a pause."""
    out = tmp_path_factory.mktemp("chains") / "undisturbed"
    run(recipe_of(text, stages=SHORT), out)
    return out


@pytest.mark.parametrize(
    ("stage", "stop"),
    [
        ("lines", 100),  # of the 152 read for leaks
        ("lines", 199),  # the 47 that are generated besides
        ("pairs", 200),  # filtered
        ("steps", 12),  # of bt
        ("train sentences", 1),  # the encoder's states are computed
        ("steps", 17),  # of fused
    ],
)
def test_stopped_anywhere_it_ends_as_if_undisturbed(
    text: Path, tmp_path: Path, undisturbed: Path, stage: str, stop: int
) -> None:
    recipe = recipe_of(text, stages=SHORT)
    done = 0

    @contextmanager
    def stopping(what: str, total: int | None) -> Iterator[Any]:
        def advance(number: int) -> None:
            nonlocal done
            done += number * (what == stage)
            if what == stage and done >= stop:
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "stopped", bar=stopping)
    run(recipe, tmp_path / "stopped", resume=True)
    assert made(tmp_path / "stopped") == made(undisturbed)


def test_called_again_it_does_nothing(chain: Path, text: Path) -> None:
    recipe = recipe_of(text, rounds=2)
    before = made(chain)
    with pytest.raises(UserError, match=r"already holds a chain; continue it with --resume"):
        train_chain(recipe, chain)
    models = [path.stat().st_mtime_ns for path in chain.rglob("*.safetensors")]
    train_chain(recipe, chain, device="cpu", resume=True)
    assert made(chain) == before
    assert [path.stat().st_mtime_ns for path in chain.rglob("*.safetensors")] == models


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": {"max_length_b": 5, "beam_size": 3}}, "search.beam_size was 2 and is 3"),
        ({"mix": {"upsample": 3}}, "mix.upsample was 2.0 and is 3.0, and bt-mixed is made with it"),
        ({"filter": {"max_ratio": 9}}, "filter.max_copied was 1.0 and is 0.8, and bt-filtered"),
        ({"rounds": 3}, "rounds was 2 and is 3, and fused is made with it"),
        ({"fusion": None}, r"fusion\.[\w.]+ was .* and is None, and bt-data is made with it"),
        (
            {"stages": {"reverse": {"train": {"max_steps": 9}}, "fused": {"cache": "fp32"}}},
            "stages.bt.train.max_steps was 6 and is None, and bt is made with it",
        ),
    ],
)
def test_another_recipe_is_refused_before_anything_is_done(
    chain: Path, text: Path, changes: dict[str, Any], message: str
) -> None:
    before = made(chain)
    with pytest.raises(UserError, match=message):
        train_chain(recipe_of(text, **{"rounds": 2} | changes), chain, device="cpu", resume=True)
    assert made(chain) == before


def test_what_is_not_made_yet_may_change(undisturbed: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "chain"
    shutil.copytree(undisturbed, out)
    shutil.rmtree(out / "fused")
    stages = SHORT | {"fused": {"control": False, "train": {"max_steps": 2}}}
    run(recipe_of(text, stages=stages), out, resume=True)
    assert load_recipe(out / "fused" / "config.toml", Recipe).train.max_steps == 2


def test_a_moved_chain_goes_on(undisturbed: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "moved"
    shutil.copytree(undisturbed, out)
    shutil.rmtree(out / "fused")
    run(recipe_of(text, stages=SHORT), out, resume=True)
    weights = "fused/model/model.safetensors"
    assert (out / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_a_test_set_that_changed_is_refused(text: Path, undisturbed: Path, tmp_path: Path) -> None:
    recipe = recipe_of(text, stages=SHORT)
    changed = recipe.data.test[0].model_copy(update={"source": text / "dev.a"})
    data = recipe.data.model_copy(update={"test": (changed,)})
    out = tmp_path / "chain"
    shutil.copytree(undisturbed, out)
    write_recipe(out / "recipe.toml", recipe.model_copy(update={"data": data}))
    with pytest.raises(UserError, match=r"dev.a has changed since the training text was kept"):
        evaluate_chain(out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fusion": {"encoder": "nowhere"}}, "cannot load the .* of encoder 'nowhere'"),
        (
            {"generate": {"engine": "ctranslate2", "search": {"sampling": "full"}}},
            "engine ctranslate2: its sampling does not give each line a stream of its own",
        ),
    ],
)
def test_what_later_stages_lack_is_found_first(
    text: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    pytest.importorskip("ctranslate2")
    with pytest.raises(UserError, match=message):
        train_chain(recipe_of(text, **changes), tmp_path / "chain", device="cpu")
    assert not (tmp_path / "chain").exists()


def test_text_that_is_all_leaked_or_blank_is_refused(text: Path, tmp_path: Path) -> None:
    write(tmp_path / "mono.b", ["", *read_lines(text / "test.b")])
    data = recipe_of(text).data
    data = data.model_copy(update={"mono": {"b": (tmp_path / "mono.b",)}})
    recipe = recipe_of(text).model_copy(update={"data": data})
    with pytest.raises(UserError, match=r"data.mono.b has no line of text that is not in a dev"):
        train_chain(recipe, tmp_path / "chain", device="cpu")
    assert not (tmp_path / "chain" / "recipe.toml").exists()


def test_a_filter_that_keeps_nothing_stops_the_chain(text: Path, tmp_path: Path) -> None:
    recipe = recipe_of(text, filter={"min_words": 99, "max_words": 99})
    with pytest.raises(
        UserError, match="none of the 47 synthetic pairs is kept; most go for 'short'"
    ):
        run(recipe, tmp_path / "chain")


def test_several_processes_are_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"the chain runs in one process; .* torchrun"):
        train_chain(recipe_of(text), tmp_path / "chain")


def test_evaluation_tests_each_model_against_the_one_before(chain: Path) -> None:
    report = evaluate_chain(chain, device="cpu")
    own = [score for score in report.scores if score.metric == "BLEU"]
    assert [(score.model, score.direction, score.against) for score in own] == [
        ("baseline", "a-b", None),
        ("bt", "a-b", "baseline"),
        ("bt-2", "a-b", "bt"),
        ("control", "a-b", "bt-2"),
        ("fused", "a-b", "control"),
        ("reverse", "b-a", None),
        ("reverse-2", "b-a", "reverse"),
    ]
    assert len({score.score for score in report.scores if score.metric == "chrF2"}) > 2
    for score in report.scores:
        source, target = score.direction.split("-")
        data = "baseline-data" if target == "b" else "reverse-data"
        raw = chain / data / f"test.{source}-{target}.raw.{target}"
        hypotheses = list(read_lines(chain / "evaluation" / f"test.{score.model}.{target}"))
        metric = corpus_bleu if score.metric == "BLEU" else corpus_chrf
        assert score.score == pytest.approx(metric(hypotheses, [list(read_lines(raw))]).score)
        if score.against is not None:
            before = {s.model: s.score for s in report.scores if s.metric == score.metric}
            assert score.delta == pytest.approx(score.score - before[score.against])
            assert (score.p_value is None) == (score.delta == 0)
    assert str(report).count("\n reverse-2") + str(report).count("\nreverse-2") == 1
    assert json.loads((chain / "evaluation" / "report.json").read_bytes())["scores"]


def test_commands(chain: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    write_recipe(recipe, recipe_of(text, rounds=2))
    call("train", recipe, "--out", chain, "--resume", "--device", "cpu", "--quiet")
    printed = call("evaluate", chain, "--json", "--device", "cpu", "--quiet")
    assert json.loads(printed) == json.loads((chain / "evaluation" / "report.json").read_bytes())


def call(*arguments: object) -> str:
    line = [sys.executable, "-m", "backtranslation", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_evaluation_says_what_it_lacks(chain: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no chain: it has no recipe.toml"):
        evaluate_chain(tmp_path)
    recipe = recipe_of(text, rounds=2)
    write_recipe(tmp_path / "recipe.toml", recipe)
    with pytest.raises(UserError, match=r"has no trained model; go on with train --resume"):
        evaluate_chain(tmp_path)
    without = recipe.data.model_copy(update={"test": ()})
    write_recipe(tmp_path / "recipe.toml", recipe.model_copy(update={"data": without}))
    with pytest.raises(UserError, match=r"names no data.test to evaluate on"):
        evaluate_chain(tmp_path)


def test_evaluation_of_what_is_trained(
    undisturbed: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "chain"
    shutil.copytree(undisturbed, out)
    (out / "bt" / "report.md").unlink()
    report = evaluate_chain(out, device="cpu", lowercase=True)
    assert {(score.model, score.against) for score in report.scores} == {
        ("baseline", None),
        ("fused", "baseline"),
        ("reverse", None),
    }
    assert "bt is not trained yet" in caplog.text
    assert "case:lc" in str(report)


def test_the_search_of_the_generation_is_that_of_the_recipe_but_for_its_keys(text: Path) -> None:
    recipe = recipe_of(text, generate={"search": {"sampling": "full"}})
    assert recipe.generate_search() == recipe.search.model_copy(update={"sampling": "full"})


def test_damaged_reports_are_named(text: Path, tmp_path: Path) -> None:
    drop_leaked(recipe_of(text).data, tmp_path)
    (tmp_path / "report.json").write_text('{"lines":')
    with pytest.raises(UserError, match=r"report.json is damaged: "):
        drop_leaked(recipe_of(text).data, tmp_path)


def test_a_reused_dictionary_needs_the_tag(chain: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_of(text, subwords={"reuse": chain / "baseline-data"}, mix={"tag": "<XX>"})
    with pytest.raises(UserError, match=r"mix.tag = '<XX>' is no tag of the dictionary of"):
        train_chain(recipe, tmp_path / "chain", device="cpu")


def test_names_of_models(text: Path) -> None:
    plain = recipe_of(text, fusion=None)
    assert (model_names(plain), reverse_names(plain)) == (["baseline", "bt"], ["reverse"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "recipe: rounds = 0"),
        ({"mix": {"tag": "a b"}}, "recipe: mix.tag = 'a b'"),
        (
            {"search": {"beam_size": 4}, "generate": {"search": {"diverse_groups": 3}}},
            "generate.search: beam_size 4 is not a multiple of diverse_groups 3",
        ),
        (
            {"stages": {"bt": {"train": {"max_stepz": 1}}}},
            "stages.bt: unknown key train.max_stepz; did you mean 'max_steps'",
        ),
        ({"stages": {"bt2": {}}}, "unknown key stages.bt2; did you mean 'bt'"),
        (
            {"stages": {"fused": {"model": {"heads": 1}}}},
            "stages.fused.model.heads: the network is that of bt; only its dropout may differ",
        ),
        ({"stages": {"reverse": {"optim": {"lr": -1}}}}, "stages.reverse: optim.lr = -1"),
    ],
)
def test_mistakes_in_a_recipe(text: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(text, **changes)


@pytest.mark.parametrize(
    ("mono", "rounds", "message"),
    [
        ({"fr": ["mono.b"]}, 1, "mono.fr is of another language than a and b"),
        ({"a": ["mono.a"]}, 1, "mono.b is missing: it is what is translated back"),
        ({"a": ["mono.a"], "b": "mono.b"}, 1, "data.mono = 'mono.b': input should be a valid list"),
        ({"b": ["mono.b"]}, 2, "rounds = 2 needs data.mono.a"),
    ],
)
def test_mistakes_in_monolingual_text(
    text: Path, mono: dict[str, Any], rounds: int, message: str
) -> None:
    data = recipe_of(text).data.model_dump(exclude_unset=True) | {"mono": mono}
    with pytest.raises(UserError, match=message):
        recipe_of(text, data=data, rounds=rounds)
