from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from backtranslation import engines, shards
from backtranslation.config import NoiseConfig
from backtranslation.generate import Generation, generate
from backtranslation.noise import add_noise
from bertfused.checkpoint import load_card, write_card
from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.subwords import UNKNOWN
from bertfused.translate import Translator
from tests.tiny_encoders import make_encoder, make_fused_run
from tests.tiny_run import make_run

SEARCH = SearchConfig(beam_size=3, max_length_b=12)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK", 8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "plain")
    make_fused_run(root / "fused", make_encoder("bert", root / "bert"))
    return root


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write 50 lines of words of the dictionary and others; some are blank."""
    random = Random(3)
    lines = [
        " ".join(random.choices([*(f"w{i}" for i in range(30)), "x\u2028y"], k=n % 9))
        for n in range(50)
    ]
    path = tmp_path / "mono.en"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def text_of(generation: Generation, out: Path, number_of_shards: int = 1) -> list[str]:
    folder = generation.folder(out, number_of_shards)
    for shard in range(number_of_shards, 0, -1):
        manifest = generate(generation, folder, shard=shard)
    assert manifest is not None
    assert manifest.lines == 50
    return folder.text.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize("name", ["plain", "fused"])
@pytest.mark.parametrize("options", [{}, {"sampling": "topk:5", "seed": 3}])
def test_it_is_what_translate_gives_in_any_number_of_shards(
    runs: Path, corpus: Path, tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    search = SEARCH.model_copy(update=options)
    generation = Generation(runs / name, corpus, search, engine="torch")
    translator = Translator.load(runs / name, device="cpu")
    lines = corpus.read_text(encoding="utf-8").split("\n")[:-1]
    without_unknown = search.model_copy(update={"unk_penalty": 1e9})
    expected = [found.text for found in translator.translate(lines, without_unknown)]
    assert text_of(generation, tmp_path / "whole") == expected
    assert text_of(generation, tmp_path / "parts", 11) == expected
    assert UNKNOWN not in "".join(expected)
    assert [not line for line in expected] == [not line.strip() for line in lines]


def test_noise_is_of_the_line_not_of_the_shard(runs: Path, corpus: Path, tmp_path: Path) -> None:
    generation = Generation(runs / "plain", corpus, SEARCH, engine="torch")
    noisy = replace(generation, noise=NoiseConfig(drop=0.3, swap=2))
    plain = text_of(generation, tmp_path / "plain")
    whole = text_of(noisy, tmp_path / "whole")
    assert whole == text_of(noisy, tmp_path / "parts", 3)
    assert whole != plain
    assert whole == [add_noise(line, number, noisy.noise) for number, line in enumerate(plain)]


def test_ctranslate2_translates_the_same(runs: Path, corpus: Path, tmp_path: Path) -> None:
    """Greedily: this model never ends by itself, and a beam that is cut is ranked otherwise."""
    pytest.importorskip("ctranslate2")
    search = SEARCH.model_copy(update={"beam_size": 1})
    generation = Generation(runs / "plain", corpus, search)
    assert engines.choose_engine("auto", runs / "plain", search) == "ctranslate2"
    ours = text_of(replace(generation, engine="torch"), tmp_path / "torch")
    theirs = text_of(generation, tmp_path / "ctranslate2", 3)
    assert theirs == ours


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sampling": "full"}, "a stream of its own"),
        ({"max_length_a": 1.5}, "search.max_length_a"),
        ({"diverse_groups": 3}, "diverse"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_what_ctranslate2_cannot_do_our_decoder_does(
    runs: Path, options: dict[str, object], reason: str
) -> None:
    pytest.importorskip("ctranslate2")
    search = SEARCH.model_copy(update=options)
    assert engines.choose_engine("auto", runs / "plain", search) == "torch"
    with pytest.raises(UserError, match=f"--engine ctranslate2: .*{reason}"):
        engines.choose_engine("ctranslate2", runs / "plain", search)


def test_a_fused_model_is_ours(runs: Path) -> None:
    assert engines.choose_engine("auto", runs / "fused", SEARCH) == "torch"
    with pytest.raises(UserError, match="fused is fused"):
        engines.choose_engine("ctranslate2", runs / "fused", SEARCH)


def test_without_ctranslate2_auto_is_ours(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert engines.choose_engine("auto", runs / "plain", SEARCH) == "torch"
    with pytest.raises(UserError, match="not installed"):
        engines.choose_engine("ctranslate2", runs / "plain", SEARCH)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda g: replace(g, search=g.search.model_copy(update={"beam_size": 2})), "search"),
        (lambda g: replace(g, noise=NoiseConfig(drop=0.1)), "noise"),
        (lambda g: replace(g, long="truncate"), "long"),
        (lambda g: replace(g, corpus=g.run / "model" / "dict.en.txt"), "corpus"),
    ],
)
def test_a_folder_of_something_else_is_refused(
    runs: Path,
    corpus: Path,
    tmp_path: Path,
    change: Callable[[Generation], Generation],
    key: str,
) -> None:
    generation = Generation(runs / "plain", corpus, SEARCH, engine="torch")
    generate(generation, generation.folder(tmp_path / "out", 2), shard=2)
    with pytest.raises(UserError, match=f"made from something else: {key}[a-z_.]* is"):
        change(generation).folder(tmp_path / "out", 2)


def test_there_is_no_shard_beyond_the_last(runs: Path, corpus: Path, tmp_path: Path) -> None:
    generation = Generation(runs / "plain", corpus, SEARCH, engine="torch")
    with pytest.raises(UserError, match="there is no shard 3 of 2"):
        generate(generation, generation.folder(tmp_path / "out", 2), shard=3)


def test_a_model_that_reads_documents_is_refused(corpus: Path, tmp_path: Path) -> None:
    """It would be given no context."""
    make_run(tmp_path / "run")
    card = load_card(tmp_path / "run" / "model")
    write_card(tmp_path / "run" / "model", card.model_copy(update={"documents": {"previous": 1}}))
    generation = Generation(tmp_path / "run", corpus, SEARCH, engine="torch")
    with pytest.raises(UserError, match="run reads documents; generate needs a sentence-level"):
        generation.folder(tmp_path / "out", 1)
