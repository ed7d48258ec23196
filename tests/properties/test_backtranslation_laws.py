"""Laws of back-translation over odd text: generate, filter, mix and prepare shift no line."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backtranslation import shards
from backtranslation.config import FilterConfig, NoiseConfig
from backtranslation.engines import Engine
from backtranslation.filters import filter_pairs
from backtranslation.generate import Generation, generate
from backtranslation.mix import mix
from backtranslation.shards import Translated, read_generated
from bertfused.config import Recipe, SearchConfig, load_recipe
from bertfused.data import DataFolder
from bertfused.prepare import prepare
from bertfused.subwords import load_tokenizer
from tests.tiny_run import make_run

BOM = b"\xef\xbb\xbf"
SEARCH = SearchConfig(beam_size=1, max_length_b=6)
LANGUAGES = ("de", "en")  # of the training; the text is English
# Drops what is empty, and nothing else.
LENIENT = FilterConfig(
    max_words=10**6,
    max_ratio=1e6,
    max_copied=1.0,
    max_repeats=10**6,
    source_scripts=(),
    target_scripts=(),
    keep_duplicates=True,
)

ODD = list("\t\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\x1f\x00\r\u00a0\u200b\u200d\u202e\ufeff\u2581")
ODD += [
    "👩\u200d👩\u200d👧",
    "e\u0301\u0323",
    "\u05e9\u05dc\u05d5\u05dd",
    "مرحبا",
    "\ufffd",
    "\ue000",
    " ",
]
WORDS = ["<BT>", "<unk>", "<s>", "</s>", "<pad>", "[SEP]", "[CLS]", "<0x0A>", "@@", "a man sees"]
BLANK = ["", " ", "   ", "\t", "\u3000", "\r", "\u2028"]
LONG = ["a man sees dogs . " * 30, "x" * 400, "\u2028" * 300]

lines = st.one_of(
    st.sampled_from([*BLANK, *WORDS, *LONG]),
    st.lists(st.sampled_from([*ODD, *WORDS, "dog ", "cat "]), max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=12),
)
ends = st.sampled_from(["\n", "\n", "\r\n"])


def files(size: int) -> st.SearchStrategy[bytes]:
    """Draw files: with or without a mark at the beginning and a line feed at the end."""
    return st.builds(
        lambda records, last, mark: mark + "".join(map("".join, records)).encode() + last.encode(),
        st.lists(st.tuples(lines, ends), max_size=size),
        lines | st.just(""),
        st.sampled_from([b"", b"", BOM]),
    )


def records(content: bytes) -> list[str]:
    """Split a file as the rules say, without the code under test."""
    content = content.removeprefix(BOM)
    *ended, last = content.decode().split("\n")
    return [line.removesuffix("\r") for line in ended] + ([last] if last else [])


def written(texts: Sequence[str]) -> bytes:
    """Return the file that holds texts; no carriage return is written before a line feed."""
    return "".join(f"{text.rstrip(chr(13))}\n" for text in texts).encode()


class Marking:
    """Writes the number of a line and the line; nothing, or blanks, for some that have text."""

    name = "marking"

    def text(self, line: str, number: int) -> str:
        if not line.strip() or number % 5 == 3:
            return ""
        return "\u2028 " if number % 7 == 4 else f"{number} {line}"

    def translate(self, lines: Sequence[str], first_line: int) -> Translated:
        return Translated(
            [self.text(line, first_line + i) for i, line in enumerate(lines)], Counter()
        )


@dataclass(frozen=True)
class Opened(Generation):
    """A generation with an engine that stands open."""

    opened: Engine = field(default_factory=Marking)

    def open_engine(self) -> Engine:
        return self.opened


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Make blocks small, and do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK", size)
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def generated(generation: Generation, out: Path, number: int) -> bytes:
    """Translate the shards, the last one first."""
    folder = generation.folder(out, number)
    for shard in range(number, 0, -1):
        manifest = generate(generation, folder, shard=shard)
    assert manifest is not None
    assert manifest.lines == manifest.done == len(records(generation.corpus.read_bytes()))
    return folder.text.read_bytes()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a little parallel text, and make a RUN from English that has its subwords."""
    folder = tmp_path_factory.mktemp("base")
    for language in LANGUAGES:
        (folder / f"train.{language}").write_text(
            "a man sees two dogs .\nthe cat </s> is here .\n" * 9
        )
    prepare(recipe(folder, subwords={"size": 278, "tags": ["<BT>"]}), folder / "data")
    tokenizer = load_tokenizer(folder / "data", "en")
    make_run(folder / "run", tokenizer=tokenizer, max_positions=30)
    return folder


def recipe(folder: Path, subwords: dict[str, object]) -> Recipe:
    files = {"source": folder / "train.de", "target": folder / "train.en"}
    data = {"source": "de", "target": "en", "train": [files], "dev": files, "max_tokens": 300}
    return Recipe.model_validate({"data": data, "subwords": subwords, "train": {"max_steps": 1}})


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    content=files(20),
    number=st.integers(2, 12),
    block=st.integers(1, 5),
    config=st.sampled_from([LENIENT, FilterConfig()]),
    noise=st.sampled_from([None, NoiseConfig(drop=0.2, swap=2)]),
)
def test_from_monolingual_text_to_training_data_no_line_is_lost_or_shifted(
    base: Path,
    content: bytes,
    number: int,
    block: int,
    config: FilterConfig,
    noise: NoiseConfig | None,
) -> None:
    real, marking = records(content), Marking()
    synthetic = [marking.text(line, i) for i, line in enumerate(real)]
    with tempfile.TemporaryDirectory() as name, blocks_of(block):
        folder = Path(name)
        mono = folder / "mono.en"
        mono.write_bytes(content)
        generation = Opened(base / "run", mono, SEARCH, engine="torch")
        assert generated(generation, folder / "whole", 1) == written(synthetic)
        assert generated(generation, folder / "parts", number) == written(synthetic)

        found = read_generated(folder / "parts", mono)
        assert (found.languages, found.lines) == (LANGUAGES, len(real))
        out = folder / "filtered"
        report = filter_pairs(found.text, mono, out, config, found.languages)
        assert report.pairs == len(real) == report.kept + sum(report.dropped.values())
        if config is LENIENT:
            empty = sum(not line.strip() for line in synthetic)
            assert report.dropped == ({"empty": empty} if empty else {})
        sources, targets = (
            (out / f"filtered.{side}").read_bytes().decode().split("\n")[:-1] for side in LANGUAGES
        )
        kept = [int(source.split(" ")[0]) for source in sources]
        assert kept == sorted(set(kept))
        assert written(sources) == written([synthetic[i] for i in kept])
        assert written(targets) == written([real[i] for i in kept])
        assert len(kept) == report.kept

        own = recipe(base, subwords={"reuse": base / "data"})
        mixed = mix(own, [out], folder / "mixed", upsample=2.0, noise=noise)
        check_data(mixed, folder / "data", len(kept))


def check_data(path: Path, out: Path, pairs: int) -> None:
    """Prepare a mixed recipe and compare what is stored with the text, pair by pair."""
    mixed = load_recipe(path, Recipe)
    corpus = mixed.data.train[1]
    counts = prepare(mixed, out).splits["train"]
    folder = DataFolder.open(out)
    source_side, target_side = folder.tokenizers()
    assert counts.records == 18 + pairs == counts.kept + counts.empty + counts.long
    text = zip(
        records(corpus.source.read_bytes()), records(corpus.target.read_bytes()), strict=True
    )
    fitting = [
        (source, target)
        for source, target in text
        if source.strip() and target.strip()
        if max(len(source_side.encode(source)), len(target_side.encode(target))) <= 300
    ]
    assert counts.corpora == (18, len(fitting))
    train, tag = folder.split("train"), source_side.vocabulary.tags["<BT>"]
    sides_ids = ([ids.tolist() for ids in side] for side in (train.source, train.target))
    stored = list(zip(*sides_ids, strict=True))
    assert all(tag not in source and tag not in target for source, target in stored[:18])
    assert all(source[0] == tag for source, _ in stored[18:])
    assert all(tag not in source[1:] and tag not in target for source, target in stored[18:])
    assert fitting == [
        (source_side.decode(source[1:]), target_side.decode(target))
        for source, target in stored[18:]
    ]


ENGINES = {
    "greedy": ("torch", SEARCH),
    "sampling": ("torch", SEARCH.model_copy(update={"sampling": "full", "seed": 5})),
    "ctranslate2": ("ctranslate2", SEARCH),
}


@pytest.fixture(scope="module", params=ENGINES)
def opened(request: pytest.FixtureRequest, base: Path) -> Opened:
    """Load the model once for all texts."""
    name, search = ENGINES[request.param]
    if name == "ctranslate2":
        pytest.importorskip("ctranslate2")
    generation = Opened(base / "run", base / "train.en", search, engine=name, device="cpu")
    return Opened(**{**vars(generation), "opened": Generation.open_engine(generation)})


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(content=files(8), number=st.integers(2, 12), block=st.integers(2, 9))
def test_a_model_translates_every_line_as_if_it_were_alone(
    opened: Opened, content: bytes, number: int, block: int
) -> None:
    real = records(content)
    alone = [opened.opened.translate([line], i).lines[0] for i, line in enumerate(real)]
    assert all(not text for line, text in zip(real, alone, strict=True) if not line.strip())
    with tempfile.TemporaryDirectory() as name, blocks_of(block):
        mono = Path(name, "mono.en")
        mono.write_bytes(content)
        generation = Opened(**{**vars(opened), "corpus": mono})
        whole = generated(generation, Path(name, "whole"), 1)
        assert whole == written(alone)
        assert generated(generation, Path(name, "parts"), number) == whole
