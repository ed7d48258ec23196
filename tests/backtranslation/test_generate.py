from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from backtranslation import engines, shards
from backtranslation.config import FilterConfig, NoiseConfig
from backtranslation.filters import filter_pairs
from backtranslation.generate import Generation, generate
from backtranslation.noise import add_noise
from backtranslation.shards import read_generated
from bertfused.checkpoint import (
    WEIGHTS,
    hash_text_files,
    load_card,
    read_tensors,
    save_model,
    write_card,
)
from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.subwords import UNKNOWN, Tokenizer, Words
from bertfused.translate import Translator
from bertfused.vocab import Vocabulary
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


def test_ctranslate2_reads_lines_as_long_as_ours(tmp_path: Path) -> None:
    """Sinusoids have no end: max_positions may be more than CTranslate2's own limit, 1,024."""
    pytest.importorskip("ctranslate2")
    make_run(tmp_path / "run", max_positions=1500)
    (tmp_path / "mono.en").write_text(f"{'w1 w2 w3 ' * 400}\n{'w4 w5 w6 w7 ' * 500}\n")
    search = SearchConfig(beam_size=1, max_length_b=4)
    generation = Generation(tmp_path / "run", tmp_path / "mono.en", search, device="cpu")
    found = [
        replace(generation, engine=engine).open_engine().translate([line], 0)
        for line in (tmp_path / "mono.en").read_text().split("\n")[:-1]
        for engine in ("torch", "ctranslate2")
    ]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert [translated.counts["long lines"] for translated in found] == [0, 0, 1, 1]


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
    with pytest.raises(UserError, match=f"engine ctranslate2: .*{reason}"):
        engines.choose_engine("ctranslate2", runs / "plain", search)


def test_a_fused_model_is_ours(runs: Path) -> None:
    assert engines.choose_engine("auto", runs / "fused", SEARCH) == "torch"
    with pytest.raises(UserError, match="fused is fused"):
        engines.choose_engine("ctranslate2", runs / "fused", SEARCH)


def test_a_model_that_cannot_be_exported_is_ours(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ctranslate2")
    words = ["<unk>", *(f"w{number}" for number in range(35))]  # a word of that name: twice there
    tokenizer = Tokenizer(Words(), Vocabulary(words, range(36, 0, -1)))
    make_run(tmp_path / "run", tokenizer=tokenizer)
    generation = Generation(tmp_path / "run", corpus, SEARCH)
    found = text_of(generation, tmp_path / "out")
    assert "translating with our decoder: the dictionary has '<unk>' twice" in caplog.text
    assert found == text_of(replace(generation, engine="torch"), tmp_path / "ours")
    with pytest.raises(UserError, match="the dictionary has '<unk>' twice"):
        text_of(replace(generation, engine="ctranslate2"), tmp_path / "theirs")


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


def run_that_wants(symbol: str, folder: Path) -> Path:
    """Make a RUN that gives one symbol, special or the tag t, nearly all probability."""
    make_run(folder, share_embeddings="decoder", norm="pre")
    words = Vocabulary([f"d{i}" for i in range(24)] + ["t", "e"], [*range(24, 0, -1), -1, 0])
    card = load_card(folder / "model")
    Tokenizer(Words(), words).save(folder / "model", "de")
    wanted = words.tags["t"] if symbol == "t" else words.symbols.index(symbol)
    tensors = read_tensors(folder / "model" / WEIGHTS)
    embedding = tensors["decoder.embed.tokens.weight"]
    tensors["decoder.norm.bias"] += 200 * embedding[wanted] / embedding[wanted].norm() ** 2
    changed = card.model_copy(update={"text_files": hash_text_files(folder / "model")})
    save_model(folder / "model", changed, tensors, folder / "model")
    return folder


SEARCHES: list[dict[str, object]] = [
    {"beam_size": 1},
    {"beam_size": 5},
    {"sampling": "full"},
    {"sampling": "topk:3"},
    {"sampling": "nucleus:0.9", "temperature": 2.0},
]


@pytest.mark.parametrize("options", SEARCHES, ids=str)
@pytest.mark.parametrize("symbol", ["<unk>", "t"])
def test_a_model_that_wants_the_unknown_symbol_or_a_tag_never_writes_it(
    corpus: Path, tmp_path: Path, symbol: str, options: dict[str, object]
) -> None:
    run = run_that_wants(symbol, tmp_path / "run")
    search = SEARCH.model_copy(update=options)
    translator = Translator.load(run, device="cpu")
    freely = [found.text for found in translator.translate(["w1 w2", "w3"], search)]
    assert ("".join(freely).replace(UNKNOWN, "").strip() == "") == (symbol == "<unk>")
    sampled = "sampling" in options
    for engine in ("torch",) if sampled else ("torch", "ctranslate2"):
        if engine == "ctranslate2":
            pytest.importorskip("ctranslate2")
        generation = Generation(run, corpus, search, engine=engine, device="cpu")
        texts = text_of(generation, tmp_path / engine)
        words = {word for text in texts for word in text.split()}
        assert words
        assert words <= {f"d{i}" for i in range(24)} | {"e"}


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_an_empty_translation_is_an_empty_line(corpus: Path, tmp_path: Path, engine: str) -> None:
    """The filter then drops the pair, and counts it."""
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
    run = run_that_wants("</s>", tmp_path / "run")
    search = SEARCH.model_copy(update={"min_length": 0})
    generation = Generation(run, corpus, search, engine=engine, device="cpu")
    assert text_of(generation, tmp_path / "out", 3) == [""] * 50
    found = read_generated(tmp_path / "out", corpus)
    out = tmp_path / "filtered"
    report = filter_pairs(found.text, corpus, out, FilterConfig(), found.languages)
    assert (report.kept, report.dropped) == (0, {"empty": 50})


def test_a_line_with_a_tab_or_another_separator_stays_one_line(runs: Path, tmp_path: Path) -> None:
    lines = ["w1\tw2", "w1\u2028w2", "w3\x85w4\x0bw5\x0cw6\x1cw7", "w8\rw9", "\t", "\u2029", "w1"]
    path = tmp_path / "mono.en"
    path.write_bytes("\n".join(lines).encode())
    generation = Generation(runs / "plain", path, SEARCH, engine="torch")
    folder = generation.folder(tmp_path / "out", 2)
    manifest = generate(generation, folder)
    assert manifest is not None
    assert manifest.lines == 7
    apart = [" ".join(line.split()) for line in lines]
    translator = Translator.load(runs / "plain", device="cpu")
    search = SEARCH.model_copy(update={"unk_penalty": 1e9})
    expected = [found.text for found in translator.translate(apart, search)]
    assert folder.text.read_bytes().decode().split("\n")[:-1] == expected
    assert [not text for text in expected] == [False] * 4 + [True] * 2 + [False]
