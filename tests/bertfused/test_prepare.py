import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertfused import prepare as module
from bertfused.config import Corpus, Recipe, check_recipe
from bertfused.data import UNFINISHED, DataFolder
from bertfused.errors import UserError
from bertfused.prepare import ParallelLine, filter_reason, prepare, read_corpus
from bertfused.text import sha256_file
from bertfused.wordpieces import WordpieceInput

Make = Callable[..., Recipe]
Pair = tuple[str, str]

TRAIN = [("a b", "x y"), ("b", "y y"), ("a a a", "x")]
DEV = [("a", "x"), ("", "y")]
TEST = [("b a", "y x")]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes corpora and makes their recipe."""

    def write(name: str, lines: Sequence[str]) -> Path:
        path = tmp_path / name
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        return path

    def corpus(name: str, pairs: Sequence[Pair]) -> dict[str, Path]:
        return {
            "source": write(f"{name}.en", [source for source, _ in pairs]),
            "target": write(f"{name}.de", [target for _, target in pairs]),
        }

    def recipe(
        train: Sequence[Pair] = TRAIN,
        dev: Sequence[Pair] = DEV,
        test: Sequence[Pair] = TEST,
        sections: dict[str, Any] | None = None,
        **data: Any,
    ) -> Recipe:
        values = {
            "data": {
                "source": "en",
                "target": "de",
                "train": [corpus("train", train)],
                "dev": corpus("val", dev),
                "test": [{"name": "news", **corpus("news", test)}],
                **data,
            },
            "subwords": {"kind": "words"},
            "train": {"max_steps": 1},
            **(sections or {}),
        }
        return check_recipe(values, Recipe, "recipe")

    return recipe


@dataclass
class FakeWordpieces:
    """An encoder of at most 8 characters: one number a character, 1 before and 2 after it."""

    vocabulary_size = 200
    fingerprint = "f" * 64

    def encode_batch(
        self, sentences: Sequence[str], contexts: Sequence[Sequence[str]]
    ) -> list[WordpieceInput]:
        inputs = []
        for sentence, context in zip(sentences, contexts, strict=True):
            before = [ord(c) for part in context for c in [*part, chr(2)]]
            cut = max(0, len(before) + len(sentence) - 8)
            inputs.append(WordpieceInput([1, *before[cut:], *map(ord, sentence), 2], cut))
        return inputs


@pytest.fixture
def fake_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertfused.pretrained.load_wordpieces", lambda *arguments: FakeWordpieces())


def texts(folder: DataFolder, split: str) -> list[Pair]:
    """Decode what is stored."""
    source, target = folder.tokenizers()
    stores = folder.split(split)
    assert all(ids[-1] == 2 for store in (stores.source, stores.target) for ids in store)
    return [
        (source.decode(a[:-1].tolist()), target.decode(b[:-1].tolist()))
        for a, b in zip(stores.source, stores.target, strict=True)
    ]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def stores(split: str) -> set[str]:
    return {f"{split}.en-de.{language}.{suffix}" for language in ("en", "de") for suffix in SUFFIX}


SUFFIX = ("bin", "idx")


def test_folder_has_what_fairseq_and_evaluation_need(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "new" / "data"
    report = prepare(make(), out)
    raw = {f"{split}.en-de.raw.{side}" for split in ("valid", "test") for side in ("en", "de")}
    ids = stores("train") | stores("valid") | stores("test")
    assert names(out) == {"data.toml", "dict.en.txt", "dict.de.txt"} | raw | ids
    folder = DataFolder.open(out)
    assert folder.report == report
    assert folder.languages == ("en", "de")
    assert folder.splits == ["train", "dev", "news"]
    assert texts(folder, "train") == TRAIN
    assert texts(folder, "dev") == DEV
    assert texts(folder, "news") == TEST
    assert folder.split("dev").source_text.read_text() == "a\n\n"
    assert folder.split("news").target_text.read_text() == "y x\n"
    assert folder.split("dev").source[1].tolist() == [2]
    assert folder.split("train").docids is None


def test_tests_are_numbered_as_fairseq_numbers_them(make: Make, tmp_path: Path) -> None:
    recipe = make()
    news = recipe.data.test[0]
    tests = tuple(news.model_copy(update={"name": name}) for name in ("news", "talks", "chat"))
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"test": tests})})
    prepare(recipe, tmp_path / "data")
    folder = DataFolder.open(tmp_path / "data")
    prefixes = [folder.split(name).prefix.name for name in ("news", "talks", "chat")]
    assert prefixes == ["test", "test1", "test2"]


def test_odd_training_pairs_are_dropped_and_counted_and_no_others(
    make: Make, tmp_path: Path
) -> None:
    odd = [("", "x"), ("a", " \t"), ("", ""), ("a b a b a", "x x x"), ("a a a a", "x")]
    recipe = make(train=[TRAIN[0], *odd, TRAIN[1]], dev=odd, test=odd, max_tokens=4, max_ratio=3.0)
    report = prepare(recipe, tmp_path / "data")
    train, dev = report.splits["train"], report.splits["dev"]
    assert (train.records, train.kept) == (7, 2)
    assert (train.empty, train.long, train.unbalanced) == (3, 1, 1)
    assert (dev.records, dev.kept, dev.odd) == (5, 5, 5)
    folder = DataFolder.open(tmp_path / "data")
    assert texts(folder, "train") == [TRAIN[0], TRAIN[1]]
    assert texts(folder, "dev") == [(s, t.strip()) for s, t in odd]
    assert "7 pairs = 2 kept + 3 empty + 1 over 4 tokens + 1 unbalanced" in str(report)


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ((0, 3), "empty"),
        ((3, 0), "empty"),
        ((10, 10), None),
        ((11, 10), "long"),
        ((10, 11), "long"),
        ((4, 8), None),
        ((4, 9), "unbalanced"),
        ((9, 4), "unbalanced"),
    ],
)
def test_filter_bounds_are_inclusive(lengths: tuple[int, int], reason: str | None) -> None:
    source, target = ([5] * length for length in lengths)
    assert filter_reason(source, target, max_tokens=10, max_ratio=2.0) == reason


def test_corpora_are_concatenated_in_order(make: Make, tmp_path: Path) -> None:
    recipe = make()
    first = recipe.data.train[0]
    second = recipe.data.test[0]
    data = recipe.data.model_copy(update={"train": (second, first, second)})
    prepare(recipe.model_copy(update={"data": data}), tmp_path / "data")
    assert texts(DataFolder.open(tmp_path / "data"), "train") == [*TEST, *TRAIN, *TEST]


def test_unequal_line_counts_are_named_and_leave_no_complete_folder(
    make: Make, tmp_path: Path
) -> None:
    recipe = make()
    recipe.data.dev.target.write_text("x\n")
    with pytest.raises(UserError, match=r"val\.en has 2 lines but .*val\.de has 1"):
        prepare(recipe, tmp_path / "data")
    with pytest.raises(UserError, match="is not complete"):
        DataFolder.open(tmp_path / "data")


def test_a_missing_file_is_found_before_any_work(make: Make, tmp_path: Path) -> None:
    recipe = make()
    recipe.data.dev.target.unlink()
    with pytest.raises(UserError, match=r"cannot read .*val\.de"):
        prepare(recipe, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_too_many_unknown_tokens_stop(make: Make, tmp_path: Path) -> None:
    dev = [("a a a a a a a a", "x"), ("q r", "x")]
    with pytest.raises(UserError, match=r"20\.0% of the en tokens of dev .*max_unknown = 0\.1;"):
        prepare(make(dev=dev), tmp_path / "data")
    report = prepare(make(dev=dev, max_unknown=0.2), tmp_path / "data")
    assert report.splits["dev"].unknown_rates == (0.2, 0.0)
    assert "20.00% unknown" in str(report)


def test_nothing_left_to_train_on_stops(make: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no pair of train is left of the 3"):
        prepare(make(max_tokens=1, train=TRAIN[:1] * 3), tmp_path / "data")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"target": "en"}, "are both 'en'"),
        ({"target": "../de"}, r"language '\.\./de'"),
        ({"target": "de-AT"}, "language 'de-AT'"),
    ],
)
def test_languages_that_cannot_be_in_names_are_refused(
    make: Make, tmp_path: Path, data: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(make(**data), tmp_path / "data")


def test_subwords_are_learned_from_training_text_once(make: Make, tmp_path: Path) -> None:
    pairs = [(f"the cat number {i} sat", f"die Katze Nummer {i} saß") for i in range(50)]
    sections = {"subwords": {"size": 290}}
    report = prepare(make(train=pairs, sections=sections), tmp_path / "data")
    folder = DataFolder.open(tmp_path / "data")
    source, target = folder.tokenizers()
    assert source.sha256 == target.sha256 == report.dictionaries["source"].sha256
    assert len(source.vocabulary) == report.dictionaries["source"].size == 296
    assert texts(folder, "train") == pairs
    assert not {name for name in names(tmp_path / "data") if name.startswith(".")}


def test_subwords_that_are_not_shared_are_two(make: Make, tmp_path: Path) -> None:
    report = prepare(
        make(sections={"subwords": {"kind": "words", "shared": False}}), tmp_path / "data"
    )
    source, target = DataFolder.open(tmp_path / "data").tokenizers()
    assert source.sha256 != target.sha256
    assert source.encode("x") == [source.vocabulary.unk]
    assert "en: words, 8 symbols" in str(report)


def test_a_size_that_does_not_fit_names_no_temporary_file(make: Make, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"size is 9000, but the text in train\.en, train\.de allows"
    ):
        prepare(make(sections={"subwords": {"size": 9000}}), tmp_path / "data")


def test_subwords_of_another_folder_are_used_as_they_are(make: Make, tmp_path: Path) -> None:
    first = prepare(make(), tmp_path / "first")
    reuse = {"subwords": {"reuse": tmp_path / "first"}}
    second = prepare(make(train=[("b", "x")], sections=reuse), tmp_path / "second")
    assert second.dictionaries == first.dictionaries
    assert second.subwords == {"reused": [d.sha256 for d in first.dictionaries.values()]}
    assert texts(DataFolder.open(tmp_path / "second"), "dev") == DEV


def test_a_complete_folder_is_left_alone(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "data"
    first = prepare(make(), out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with caplog.at_level("INFO"):
        assert prepare(make(), out) == first
    assert "is complete; nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


def test_a_complete_folder_stays_complete_when_the_files_have_moved(
    make: Make, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    recipe = make()
    first = prepare(recipe, out)
    dev = recipe.data.dev
    moved = dev.source.rename(tmp_path / "moved.en")
    data = recipe.data.model_copy(update={"dev": dev.model_copy(update={"source": moved})})
    assert prepare(recipe.model_copy(update={"data": data}), out) == first


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"train": TRAIN[:2]}, r"train\.0\.source"),
        ({"dev": [("a", "x"), ("b", "y")]}, r"dev\.source"),
        ({"max_tokens": 7}, "max_tokens"),
        ({"test": [], "data_test": ()}, r"news\.source"),
        ({"sections": {"subwords": {"kind": "words", "shared": False}}}, "subwords"),
        ({"sections": {"subwords": {"kind": "words"}, "fusion": {}}}, "encoder"),
    ],
)
@pytest.mark.usefixtures("fake_encoder")
def test_a_folder_made_from_something_else_is_kept_unless_forced(
    make: Make, tmp_path: Path, change: dict[str, Any], difference: str
) -> None:
    out = tmp_path / "data"
    prepare(make(), out)
    before = {path: sha256_file(path) for path in out.iterdir()}
    if "data_test" in change:
        recipe = make()
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"test": ()})})
    else:
        recipe = make(**change)
    with pytest.raises(UserError, match=f"made from something else: {difference} differs"):
        prepare(recipe, out)
    assert {path: sha256_file(path) for path in out.iterdir()} == before
    (out / "features").mkdir()
    prepare(recipe, out, force=True)
    prepare(recipe, tmp_path / "fresh")
    assert names(out) == names(tmp_path / "fresh")


def test_data_of_others_is_never_overwritten(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "data"
    prepare(make(), out)
    (out / "data.toml").unlink()
    (out / "features").mkdir()
    before = names(out)
    for force in (False, True):
        with pytest.raises(UserError, match=r"data of another program \(dict\.de\.txt\)"):
            prepare(make(), out, force=force)
    assert names(out) == before


def test_a_run_is_no_place_for_data(make: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    with pytest.raises(UserError, match=f"{run} holds a run; give another folder"):
        prepare(make(), run, force=True)
    assert names(run) == {"config.toml"}


def test_files_of_the_user_in_the_folder_stay(make: Make, tmp_path: Path) -> None:
    """The folder of the corpora themselves may become the DATA folder."""
    (tmp_path / "features").mkdir()
    (tmp_path / "train.notes.en").touch()
    prepare(make(), tmp_path)
    prepare(make(max_tokens=9), tmp_path, force=True)
    assert {"train.en", "val.de", "news.en", "train.notes.en", "data.toml"} <= names(tmp_path)


KILLED = """
import os, sys
from pathlib import Path
import bertfused.prepare, bertfused.text
from bertfused.config import Recipe, load_recipe
from bertfused.prepare import prepare
replace, left = os.replace, int(sys.argv[2])
def dying(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    replace(*args)
os.replace = dying
prepare(load_recipe(Path(sys.argv[1]), Recipe), Path(sys.argv[3]), force=True)
"""

RECIPE = """
[data]
source = "en"
target = "de"
train = [{source = "train.en", target = "train.de"}]
dev = {source = "val.en", target = "val.de"}
test = [{name = "news", source = "news.en", target = "news.de"}]
[subwords]
kind = "words"
[train]
max_steps = 1
"""


@pytest.mark.parametrize("renames", [0, 1, 3, 9, 20])
@pytest.mark.parametrize("had_data", [False, True])
def test_killed_at_any_moment_the_folder_is_incomplete_and_can_be_made_again(
    make: Make, tmp_path: Path, renames: int, had_data: bool
) -> None:
    recipe, out = make(), tmp_path / "data"
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    if had_data:
        prepare(recipe, out)
    arguments = [sys.executable, "-c", KILLED, str(path), str(renames), str(out)]
    assert subprocess.run(arguments, check=False, timeout=100).returncode == -9
    assert (out / UNFINISHED).exists()
    with pytest.raises(UserError, match="is not complete"):
        DataFolder.open(out)
    prepare(recipe, out)
    prepare(recipe, tmp_path / "fresh")
    assert names(out) == names(tmp_path / "fresh")
    assert texts(DataFolder.open(out), "train") == TRAIN


def in_documents(corpus: Corpus) -> Iterator[ParallelLine]:
    """Read two-sentence documents, each sentence with the one before it."""
    before: tuple[str, ...] = ()
    for i, line in enumerate(read_corpus(corpus)):
        if i % 2 == 0:
            before = ()
        yield line._replace(context=before, document=f"doc {i // 2}")
        before = (line.source,)


@pytest.mark.usefixtures("fake_encoder")
def test_the_encoder_reads_the_context_the_reader_gives(make: Make, tmp_path: Path) -> None:
    recipe = make(
        train=[("ab", "x"), ("", "y"), ("cde", "x"), ("wxyz", "x")],
        max_unknown=1,
        sections={"subwords": {"kind": "words"}, "fusion": {"encoder": "any", "drop_net": 0.5}},
    )
    documents = {"previous": 1, "columns": None, "format": ("blank", 2)}
    report = prepare(recipe, tmp_path / "data", reader=in_documents, documents=documents)
    train = DataFolder.open(tmp_path / "data").split("train")
    assert train.bert is not None
    expected = [[1, *b"ab", 2], [1, *b"cde", 2], [1, *b"cde", 2, *b"wxyz", 2]]
    assert [ids.tolist() for ids in train.bert] == expected
    assert train.docids == ["doc 0", "doc 1", "doc 1"]
    assert (report.splits["train"].wordpieces, report.splits["train"].cut_wordpieces) == (19, 0)
    assert report.splits["dev"].documents == 2
    assert report.encoder is not None
    assert (report.encoder.name, report.encoder.fingerprint) == ("any", "f" * 64)
    assert report.documents == {"previous": 1, "format": ["blank", 2]}
    again = prepare(recipe, tmp_path / "data", reader=in_documents, documents=documents)
    assert again == report
    with pytest.raises(UserError, match="documents differs"):
        prepare(recipe, tmp_path / "data", reader=in_documents, documents={"previous": 2})


@pytest.mark.usefixtures("fake_encoder")
def test_context_that_is_cut_off_is_counted(make: Make, tmp_path: Path) -> None:
    recipe = make(
        train=[("abcdef", "x"), ("wxyz", "x")],
        max_unknown=1,
        sections={"subwords": {"kind": "words"}, "fusion": {}},
    )
    report = prepare(recipe, tmp_path / "data", reader=in_documents, documents={"previous": 1})
    train = DataFolder.open(tmp_path / "data").split("train")
    assert train.bert is not None
    assert train.bert[1].tolist() == [1, *b"def", 2, *b"wxyz", 2]
    assert report.splits["train"].cut_wordpieces == 3
    assert "3 of context cut off" in str(report)


def test_documents_of_two_corpora_are_told_apart(make: Make, tmp_path: Path) -> None:
    recipe = make()
    train = recipe.data.train[0]
    docids = tmp_path / "docids"
    docids.write_text("1\n1\n2\n")
    corpora = (train.model_copy(update={"docids": docids}),) * 2 + (train,)
    data = recipe.data.model_copy(update={"train": corpora})
    report = prepare(recipe.model_copy(update={"data": data}), tmp_path / "data")
    ids = DataFolder.open(tmp_path / "data").split("train").docids
    assert ids == ["0/1", "0/1", "0/2", "1/1", "1/1", "1/2", "", "", ""]
    assert report.splits["train"].documents == 6
    docids.write_text("1\n1\n")
    with pytest.raises(UserError, match=r"train\.en has 3 lines but .*docids has 2"):
        list(read_corpus(corpora[0]))


def test_progress_adds_up(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 2)
    seen: list[tuple[str, int]] = []
    report = prepare(make(), tmp_path / "data", progress=lambda *done: seen.append(done))
    assert seen == [("news", 1), ("dev", 2), ("train", 2), ("train", 1)]
    assert report.splits["train"].kept == 3
    assert texts(DataFolder.open(tmp_path / "data"), "train") == TRAIN


ODD = ["", " ", "\t", "\x0b", "\x85", "\u2028x\u2029", "a\rb", "c\r", "\ufeff", "\0", "a  b ", " c"]
ODD += ["👩\u200d💻", "</s>", "<unk> @@ \u2581", "e\u0301", "\u3000", "0" * 300, "\U0010ffff"]
LINE = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=30),
)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with sentencepiece models."""
    from bertfused.subwords import train_subwords

    folder = tmp_path_factory.mktemp("pieces")
    text = folder / "text"
    text.write_text("".join(f"the cat number {i} sat on a mat\n" for i in range(99)))
    train_subwords("sentencepiece", {"en": [text], "de": [text]}, 288, folder)
    return folder


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pairs=st.lists(st.tuples(LINE, LINE), max_size=40))
def test_every_record_is_kept_in_order_or_counted(
    make: Make, pieces: Path, tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair]
) -> None:
    pairs = [("cat", "mat"), *pairs]  # one that is kept, and takes no byte order mark
    read = [(s.removesuffix("\r"), t.removesuffix("\r")) for s, t in pairs]
    recipe = make(
        train=pairs, dev=pairs, test=pairs, max_tokens=99, sections={"subwords": {"reuse": pieces}}
    )
    out = tmp_path_factory.mktemp("data") / "data"
    report = prepare(recipe, out)
    folder = DataFolder.open(out)
    source, target = folder.tokenizers()
    fits = [
        bool(s.strip() and t.strip()) and max(len(source.encode(s)), len(target.encode(t))) <= 99
        for s, t in read
    ]
    train = report.splits["train"]
    assert train.records == len(pairs) == train.kept + train.empty + train.long
    assert texts(folder, "train") == [
        pair for pair, is_kept in zip(read, fits, strict=True) if is_kept
    ]
    everything = [(s if s.strip() else "", t if t.strip() else "") for s, t in read]
    assert texts(folder, "dev") == texts(folder, "news") == everything


MEASURED = """
import resource, sys
from pathlib import Path
from bertfused.config import Recipe, load_recipe
from bertfused.prepare import ParallelLine, prepare
def reader(corpus):
    number = lines if corpus.source.name == "train.en" else 100
    for i in range(number):
        yield ParallelLine(f"a b {'a ' * (i % 9)}", f"x y {'y ' * (i % 7)}", (), f"doc {i // 9}")
recipe = load_recipe(Path(sys.argv[1]), Recipe)
for lines in (20_000, 200_000):
    report = prepare(recipe, Path(sys.argv[2]), reader=reader, force=True)
    assert report.splits["train"].kept == lines
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_corpus(make: Make, tmp_path: Path) -> None:
    make()
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    arguments = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / "data")]
    output = subprocess.run(arguments, check=True, capture_output=True, timeout=300).stdout
    small, large = map(int, output.split())
    # In KiB: the additional 180,000 pairs have 3 million tokens.
    assert large - small < 4_000


def test_each_corpus_has_its_tag_and_its_count(make: Make, tmp_path: Path) -> None:
    """The synthetic corpus stands first here; the text's own "<BT>" stays what it was."""
    for name, lines in (("more.en", ["b", "", "a"]), ("more.de", ["y", "x", "x y"])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    recipe = make(sections={"subwords": {"kind": "words", "tags": ["<BT>"]}})
    more = Corpus(source=tmp_path / "more.en", target=tmp_path / "more.de", tag="<BT>")
    data = recipe.data.model_copy(update={"train": (more, *recipe.data.train)})
    tagged = recipe.model_copy(update={"data": data})
    report = prepare(tagged, tmp_path / "data")
    folder = DataFolder.open(tmp_path / "data")
    source, _ = folder.tokenizers()
    tag = source.vocabulary.tags["<BT>"]
    starts = [int(ids[0]) == tag for ids in folder.split("train").source]
    assert starts == [True, True, False, False, False]
    assert all(tag not in ids for ids in folder.split("train").target)
    assert texts(folder, "train") == [("b", "y"), ("a", "x y"), *TRAIN]
    assert report.splits["train"].corpora == (2, 3)
    assert report.tags == {"0": "<BT>"}
    with pytest.raises(UserError, match="made from something else: tags"):
        prepare(
            recipe.model_copy(
                update={
                    "data": data.model_copy(
                        update={
                            "train": (more.model_copy(update={"tag": None}), *recipe.data.train)
                        }
                    )
                }
            ),
            tmp_path / "data",
        )


def test_a_tag_that_the_dictionary_has_not_is_named(make: Make, tmp_path: Path) -> None:
    recipe = make()
    train = (recipe.data.train[0].model_copy(update={"tag": "<BT>"}),)
    tagged = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": train})})
    with pytest.raises(UserError, match=r"data\.train\.0: '<BT>' is no tag of the dictionary"):
        prepare(tagged, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    # Nor has one that is reused.
    prepare(recipe, tmp_path / "plain")
    subwords = recipe.subwords.model_copy(update={"reuse": tmp_path / "plain"})
    with pytest.raises(UserError, match="no tag of the dictionary"):
        prepare(tagged.model_copy(update={"subwords": subwords}), tmp_path / "data")
