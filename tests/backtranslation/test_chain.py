"""The chain from one recipe: what its stages are made from, and how it goes on where it stopped."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backtranslation.chain import model_names, reverse_names, train_chain
from backtranslation.config import BacktranslationRecipe
from backtranslation.evaluate import evaluate_chain
from backtranslation.mix import read_report
from bertfused.config import Recipe, check_recipe, load_recipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.text import read_lines
from tests.tiny_encoders import make_encoder

# Seconds that would be measured; another machine's would make other chains.
COSTS = {"fused step": 0.03, "plain step": 0.02}
SHORT = {"bt": {"train": {"max_steps": 6}}, "fused": {"control": False}}


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
        "subwords": {"kind": "words", "shared": True, "tags": ["<BT>"]},
        "model": {
            "encoder_layers": 1,
            "decoder_layers": 1,
            "model_dim": 16,
            "ffn_dim": 16,
            "heads": 2,
        },
        "fusion": {"encoder": "encoder", "drop_net": 0.5},
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
    out.mkdir(exist_ok=True)
    (out / "costs.json").write_text(json.dumps(COSTS))
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
        model = json.loads((chain / teacher / "run.json").read_bytes())
        assert manifest["made_from"]["languages"] == list(
            DataFolder.open(Path(model["data"])).languages
        )


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
    costs = json.loads((chain / "costs.json").read_bytes())
    seconds = 4 * COSTS["fused step"] + costs["cache"]
    assert control.train.max_steps == round(seconds / COSTS["plain step"])
    assert control.fusion is None
    fused = load_recipe(chain / "fused" / "config.toml", Recipe)
    assert fused.fusion is not None
    assert fused.model == control.model


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a chain of 18 steps: 4 each but for the 6 of bt."""
    out = tmp_path_factory.mktemp("chains") / "undisturbed"
    run(recipe_of(text, stages=SHORT), out)
    return out


@pytest.mark.parametrize("stop", [3, 12, 17])
def test_stopped_anywhere_it_ends_as_if_undisturbed(
    text: Path, tmp_path: Path, undisturbed: Path, stop: int
) -> None:
    recipe = recipe_of(text, stages=SHORT)
    done = 0

    @contextmanager
    def stopping(what: str, total: int | None) -> Iterator[Any]:
        def advance(_: int) -> None:
            nonlocal done
            done += what == "steps"
            if done == stop:
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


def test_another_recipe_is_refused_where_it_matters(chain: Path, text: Path) -> None:
    recipe = recipe_of(text, rounds=2, search={"max_length_b": 5, "beam_size": 3})
    with pytest.raises(UserError, match=r"was made from something else: search.beam_size is 2"):
        train_chain(recipe, chain, device="cpu", resume=True)
    train_chain(recipe_of(text, rounds=2), chain, device="cpu", resume=True)


def test_a_filter_that_keeps_nothing_stops_the_chain(text: Path, tmp_path: Path) -> None:
    recipe = recipe_of(text, filter={"min_words": 99, "max_words": 99})
    with pytest.raises(UserError, match=r"bt-filtered: the filter kept none of its pairs"):
        run(recipe, tmp_path / "chain")


def test_several_processes_are_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"the chain runs in one process; .* torchrun"):
        train_chain(recipe_of(text), tmp_path / "chain")


def test_evaluation_tests_each_model_against_the_one_before(chain: Path) -> None:
    from sacrebleu import corpus_bleu

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
    for score in own:
        source, target = score.direction.split("-")
        data = "baseline-data" if target == "b" else "reverse-data"
        raw = chain / data / f"test.{source}-{target}.raw.{target}"
        hypotheses = list(read_lines(chain / "evaluation" / f"test.{score.model}.{target}"))
        wanted = corpus_bleu(hypotheses, [list(read_lines(raw))]).score
        assert score.score == pytest.approx(wanted)
        assert (score.p_value is None) == (score.against is None)
    assert "reverse-2" in str(report)
    assert json.loads((chain / "evaluation" / "report.json").read_bytes())["scores"]


def test_names_of_models(text: Path) -> None:
    plain = recipe_of(text, fusion=None)
    assert (model_names(plain), reverse_names(plain)) == (["baseline", "bt"], ["reverse"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "recipe: rounds = 0"),
        ({"subwords": {"kind": "words"}}, r"mix.tag = '<BT>' has to be one of subwords.tags"),
        (
            {"stages": {"bt": {"train": {"max_stepz": 1}}}},
            "stages.bt: unknown key train.max_stepz; did you mean 'max_steps'",
        ),
        ({"stages": {"bt2": {}}}, "unknown key stages.bt2; did you mean 'bt'"),
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
        ({"b": ["mono.b"]}, 2, "rounds = 2 needs data.mono.a"),
    ],
)
def test_mistakes_in_monolingual_text(
    text: Path, mono: dict[str, Any], rounds: int, message: str
) -> None:
    data = recipe_of(text).data.model_dump(exclude_unset=True) | {"mono": mono}
    with pytest.raises(UserError, match=message):
        recipe_of(text, data=data, rounds=rounds)
