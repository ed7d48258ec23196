import io
import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from bertfused.errors import UserError
from bertfused.subwords import (
    UNKNOWN,
    BytePairs,
    Kind,
    SentencePieces,
    Tokenizer,
    Words,
    _cut_at_spaces,
    build_vocabulary,
    load_subwords,
    load_tokenizer,
    train_subwords,
)
from bertfused.text import read_lines
from bertfused.vocab import Vocabulary

ENGLISH = [
    f"{who} {does} {what} ."
    for who in ("a man", "the woman", "two children", "a brown dog")
    for does in ("sees", "paints", "is looking at", "carries")
    for what in ("a ball", "the red house", "an old bicycle", "some flowers", "the camera")
]
GERMAN = [
    f"{who} {does} {what} ."
    for who in ("ein Mann", "die Frau", "zwei Kinder", "ein brauner Hund")
    for does in ("sieht", "malt", "betrachtet", "trägt")
    for what in ("einen Ball", "das rote Haus", "ein altes Fahrrad", "einige Blumen")
]
ODD = [
    "",
    " ",
    "   ",
    "  a  man ",
    "a\u2581b",
    "\u2581",
    "\u2581\u2581 \u2581a\U000f0000",
    "</s> <unk> <pad> <s> <0x41> ▁</s>",
    "😀 👩‍👩‍👧 🇩🇪",
    "\x00\x01\t\v\f\r\x1c\x7f\x85\xa0\u2028\u3000\ufeff",
    "\u2585 \u2047 \ufffd \uffff \U0010ffff",
    "ﬁ ½ é e\u0301 Ａ",
    "中文 русский עברית",
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[Path]]:
    return {
        "en": [write(tmp_path / "train.en", ENGLISH)],
        "de": [write(tmp_path / "train.de", GERMAN)],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("pieces")
    path = write(folder / "train.en", ENGLISH)
    return train_subwords("sentencepiece", {"en": [path]}, 296, folder)["en"]


@pytest.mark.parametrize("line", ODD)
def test_sentencepiece_returns_any_text(pieces: Tokenizer, line: str) -> None:
    ids = pieces.encode(line)
    assert pieces.decode(ids) == line
    assert all(id > pieces.vocabulary.unk for id in ids)


def test_sentencepiece_agrees_with_the_library(pieces: Tokenizer) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=pieces.subwords.serialise())
    for line in [*ENGLISH, "</s> <unk> é", " two  spaces "]:
        expected = library.encode(line, out_type=str)
        assert [pieces.vocabulary.symbols[id] for id in pieces.encode(line)] == expected
        assert pieces.subwords.split(line) == expected
        assert pieces.decode(pieces.encode(line)) == library.decode(library.encode(line))


def test_a_batch_is_its_lines(pieces: Tokenizer) -> None:
    lines = ODD + ENGLISH
    assert pieces.encode_batch(lines) == [pieces.encode(line) for line in lines]
    assert pieces.encode_batch([]) == []


def test_every_piece_and_every_byte_has_a_number(pieces: Tokenizer) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=pieces.subwords.serialise())
    all_pieces = {library.id_to_piece(i) for i in range(296)}
    assert set(pieces.vocabulary.symbols) == all_pieces
    assert len(pieces.vocabulary) == 296
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces.vocabulary.symbols)


def test_counts_are_those_of_the_training_text(pieces: Tokenizer) -> None:
    counts = Counter(piece for line in ENGLISH for piece in pieces.subwords.split(line))
    v = pieces.vocabulary
    assert {s: c for s, c in zip(v.symbols[4:], v.counts[4:], strict=True) if c} == counts
    assert v.counts[v.id_of("<0xFF>")] == 0
    assert list(v.counts[4:]) == sorted(v.counts[4:], reverse=True)


def test_bytes_that_are_no_text_and_line_feeds_do_not_leave_the_line(pieces: Tokenizer) -> None:
    ids = [pieces.vocabulary.id_of(s) for s in ("a", "<0x0A>", "<0xC3>", "a")]
    assert pieces.decode(ids) == "a \ufffda"


def test_special_symbols_print_nothing_and_unknown_ones_a_sign(pieces: Tokenizer) -> None:
    for tokenizer in (pieces, Tokenizer(Words(), Vocabulary(["a"], [1]))):
        v = tokenizer.vocabulary
        a = v.id_of("a")
        text = tokenizer.decode([v.bos, a, v.pad, v.unk, v.eos, v.pad])
        assert text.replace(" ", "") == f"a{UNKNOWN}"


def test_one_line_of_odd_text_costs_no_other_line_and_teaches_no_piece(
    tmp_path: Path, folder: Path
) -> None:
    odd = ["x\ty\u2581z\u2585\u2028\x00\u00a0\ufeffw </s> <0x41> <unk>"] * 500
    path = write(tmp_path / "odd", odd)
    v = train_subwords("sentencepiece", {"en": [path]}, 266, folder)["en"].vocabulary
    learned = [s for s in v.symbols[4:] if not s.startswith("<0x")]
    assert {"w", "x", "y", "z"} <= set("".join(learned))
    assert len("".join(learned).split()) == 1
    assert not {"\x00", "\u2585"} & set("".join(learned))
    assert not {"</s>", "<unk>"} & set(learned)
    assert len(set(v.symbols)) == len(v.symbols)


@pytest.mark.parametrize(("kind", "size"), [("sentencepiece", 296), ("bpe", 40), ("words", None)])
@pytest.mark.parametrize("shared", [True, False])
def test_equal_texts_give_equal_files_and_a_folder_is_all_that_is_needed(
    files: dict[str, list[Path]], tmp_path: Path, kind: Kind, size: int | None, shared: bool
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    trained = []
    for folder in folders:
        folder.mkdir()
        trained.append(train_subwords(kind, files, size, folder, shared=shared))
    assert content(folders[0]) == content(folders[1])
    for language, lines in (("en", ENGLISH), ("de", GERMAN)):
        loaded = load_tokenizer(folders[0], language)
        assert loaded.sha256 == trained[0][language].sha256
        for line in lines:
            assert loaded.encode(line) == trained[0][language].encode(line)
            assert loaded.decode(loaded.encode(line)) == line
    names = content(folders[0])
    assert (names["dict.en.txt"] == names["dict.de.txt"]) is shared
    assert (trained[0]["en"].sha256 == trained[0]["de"].sha256) is shared


def test_shared_counts_are_of_both_languages(files: dict[str, list[Path]], folder: Path) -> None:
    v = train_subwords("words", files, None, folder)["en"].vocabulary
    expected = Counter(word for line in ENGLISH + GERMAN for word in line.split())
    assert v.counts[v.id_of(".")] == expected["."] == len(ENGLISH) + len(GERMAN)


def test_sizes_that_do_not_suit_the_text_name_the_one_that_does(
    files: dict[str, list[Path]], folder: Path
) -> None:
    english = {"en": files["en"]}

    def allowed(kind: Kind, size: int) -> int:
        with pytest.raises(UserError, match=rf"^subwords.size is {size}, but .*train\.en") as error:
            train_subwords(kind, english, size, folder)
        return int("".join(c for c in str(error.value).split("train.en")[1] if c.isdigit()))

    largest = allowed("sentencepiece", 100_000)
    smallest = allowed("sentencepiece", 100)
    most_merges = allowed("bpe", 100_000)
    assert content(folder) == {}
    for size in (largest, smallest):
        vocabulary = train_subwords("sentencepiece", english, size, folder)["en"].vocabulary
        assert len([s for s in vocabulary.symbols if not s.startswith("madeupword")]) == size
    train_subwords("bpe", english, most_merges, folder)
    allowed("sentencepiece", largest + 1)
    allowed("sentencepiece", smallest - 1)
    allowed("bpe", most_merges + 1)


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
@pytest.mark.parametrize("size", [None, 0, -1, 2**31])
def test_impossible_sizes(
    files: dict[str, list[Path]], folder: Path, kind: Kind, size: int | None
) -> None:
    with pytest.raises(UserError, match=f"need a size from 1 to 2,147,483,647, not {size}"):
        train_subwords(kind, files, size, folder)


def test_a_size_below_that_of_the_bytes(files: dict[str, list[Path]], folder: Path) -> None:
    with pytest.raises(UserError, match=r"size is 2, but 261 is the least for any text"):
        train_subwords("sentencepiece", files, 2, folder)


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_no_text(tmp_path: Path, folder: Path, lines: list[str]) -> None:
    path = write(tmp_path / "empty", lines)
    with pytest.raises(UserError, match=r"nothing to learn subwords from in the text in .*empty"):
        train_subwords("sentencepiece", {"en": [path]}, 300, folder)
    with pytest.raises(UserError, match="empty allows 0 merges at most"):
        train_subwords("bpe", {"en": [path]}, 10, folder)


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe", "words"])
def test_training_text_that_is_not_utf8(tmp_path: Path, folder: Path, kind: Kind) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a b\nc \xff\n")
    with pytest.raises(UserError, match="line 2, byte offset 6: 0xff"):
        train_subwords(kind, {"en": [path]}, 300, folder)


@pytest.mark.parametrize(("kind", "size"), [("sentencepiece", 296), ("bpe", 20)])
def test_training_prints_nothing(
    files: dict[str, list[Path]],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    kind: Kind,
    size: int,
) -> None:
    train_subwords(kind, files, size, folder)
    assert capfd.readouterr() == ("", "")


def test_long_lines_are_learned_from(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "long", [" ".join(["zebra quagga okapi"] * 500)])
    tokenizer = train_subwords("sentencepiece", {"en": [path]}, 274, folder)["en"]
    symbols = tokenizer.subwords.split("zebra quagga okapi")
    assert not any(symbol.startswith("<0x") for symbol in symbols)


def test_very_long_lines_are_learned_from_in_parts() -> None:
    """100,000 times one word took the trainer minutes."""
    for line in ("", "word", "word " * 30_000, " " * 30_000, "x" * 30_000, f"a {'x' * 30_000} b"):
        parts = list(_cut_at_spaces(line))
        assert " ".join(parts) == line
        assert all(" " not in part[10_000:] for part in parts)
    assert len(list(_cut_at_spaces("word " * 30_000))) == 15


def test_byte_pairs_are_those_of_subword_nmt(files: dict[str, list[Path]], folder: Path) -> None:
    from subword_nmt import apply_bpe, learn_bpe

    codes = io.StringIO()
    learn_bpe.learn_bpe([f"{line}\n" for line in ENGLISH], codes, 30)
    tokenizer = train_subwords("bpe", {"en": files["en"]}, 30, folder)["en"]
    assert (folder / "bpe.en.codes").read_text() == codes.getvalue()
    reference = apply_bpe.BPE(codes)
    for line in [*ENGLISH, "unseen  words . "]:
        assert " ".join(tokenizer.subwords.split(line)) == reference.segment(line)


def test_byte_pairs_are_joined() -> None:
    subwords = BytePairs(["#version: 0.2", "l o", "lo w</w>"])
    assert subwords.split("low lower") == ["low", "lo@@", "w@@", "e@@", "r"]
    assert subwords.join(["low", "lo@@", "w@@", "e@@", "r"]) == "low lower"
    assert subwords.join(["lo@@", "w@@"]) == "low"  # cut off in the middle of a word
    assert subwords.join([]) == ""


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (["#version: 0.2", "a b", "a b c"], "line 3: 'a b c' is not a pair of symbols"),
        (["a b", ""], "line 2: '' is not a pair of symbols"),
        (["#version: 0.2"], "has no pairs of symbols"),
        ([], "has no pairs of symbols"),
    ],
)
def test_malformed_codes(tmp_path: Path, codes: list[str], message: str) -> None:
    path = write(tmp_path / "codes", codes)
    with pytest.raises(UserError, match=f"^{path}.*{message}"):
        load_subwords("bpe", path)


def test_subword_nmt_is_named_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "subword_nmt", None)
    with pytest.raises(UserError, match="need the package subword-nmt"):
        BytePairs(["a b"])


def test_words_are_split_as_fairseq_splits_them(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "text", ["b  a\u00a0b\u2028a ", "a </s>"])
    tokenizer = train_subwords("words", {"en": [path]}, None, folder)["en"]
    v = tokenizer.vocabulary
    assert v.symbols[4:8] == ("a", "b", "</s>", "madeupword0000")
    assert tokenizer.encode(" a\tb  c </s> <unk>") == [4, 5, v.unk, 6, v.unk]
    assert tokenizer.decode([4, 5, v.unk, 6, v.eos]) == f"a b {UNKNOWN} </s>"
    assert load_tokenizer(folder, "en").encode("</s>") == [6]


def test_words_beyond_the_size_are_unknown(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "text", ["a a a b b c d e f"])
    v = train_subwords("words", {"en": [path]}, 8, folder)["en"].vocabulary
    assert v.symbols[4:] == ("a", "b", "c", "d")
    assert v.id_of("e") == v.unk


def test_a_model_of_others_keeps_its_rules(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH),
        model_writer=model,
        vocab_size=40,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    path = tmp_path / "other.model"
    path.write_bytes(model.getvalue())
    subwords = load_subwords("sentencepiece", path)
    tokenizer = Tokenizer(subwords, build_vocabulary(subwords, [write(tmp_path / "t", ENGLISH)]))
    assert tokenizer.decode(tokenizer.encode("a  man ")) == "a man"
    assert tokenizer.subwords.join(["\u2581", "a"]) == " a"  # no space is added to the first word
    assert tokenizer.vocabulary.unk in tokenizer.encode("Ω\u2581")
    assert "<unk>" not in tokenizer.decode(tokenizer.encode("Ω"))


@pytest.mark.parametrize("model", [b"", b"no model"])
def test_what_is_no_sentencepiece_model(folder: Path, model: bytes) -> None:
    path = folder / "sentencepiece.en.model"
    path.write_bytes(model)
    with pytest.raises(UserError, match=f"^{path} is not a sentencepiece model"):
        load_subwords("sentencepiece", path)


def test_a_folder_with_two_models_or_no_dictionary(pieces: Tokenizer, folder: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*dict\.en\.txt"):
        load_tokenizer(folder, "en")
    pieces.save(folder, "en")
    write(folder / "bpe.en.codes", ["a b"])
    with pytest.raises(UserError, match=r"has sentencepiece\.en\.model and bpe\.en\.codes"):
        load_tokenizer(folder, "en")


def test_saving_another_kind_leaves_nothing_of_the_first(pieces: Tokenizer, folder: Path) -> None:
    pieces.save(folder, "en")
    other = Tokenizer(BytePairs(["a b</w>"]), Vocabulary(["ab"], [1]))
    other.save(folder, "en")
    assert load_tokenizer(folder, "en").sha256 == other.sha256
    assert len({pieces.sha256, other.sha256, Tokenizer(Words(), other.vocabulary).sha256}) == 3


def test_tokenizers_travel_between_processes(pieces: Tokenizer) -> None:
    for tokenizer in (pieces, Tokenizer(BytePairs(["a b"]), Vocabulary(["a@@", "b"], [1, 1]))):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.encode("a man ab") == tokenizer.encode("a man ab")
        assert copy.sha256 == tokenizer.sha256


def test_only_every_nth_line_of_a_huge_text_is_learned_from(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertfused import subwords

    monkeypatch.setattr(subwords, "_MAX_TRAINING_LINES", len(ENGLISH))
    alternating = [line for english in ENGLISH for line in (english, "never read")]
    path = write(tmp_path / "text", alternating)
    other = write(tmp_path / "other", ENGLISH)
    thinned = train_subwords("sentencepiece", {"en": [path]}, 296, folder)["en"]
    whole = train_subwords("sentencepiece", {"en": [other]}, 296, folder)["en"]
    assert thinned.subwords.serialise() == whole.subwords.serialise()


def test_importing_brings_no_torch() -> None:
    script = (
        "import sys, bertfused.text, bertfused.vocab, bertfused.subwords, bertfused.store;"
        "sys.exit('torch' in sys.modules or 'subword_nmt' in sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script]) == 0


def test_numbers_equal_those_of_the_official_code(shared_data: Callable[[str], Path]) -> None:
    folder = shared_data("oracles/bertnmt_tiny48")
    words = load_tokenizer(folder, "en")
    codes = load_subwords("bpe", folder / "code.bpe")
    pairs = Tokenizer(codes, words.vocabulary)
    sentences = json.loads((folder / "oracle.json").read_text())["sentences"]
    assert len(sentences) == 16
    for sentence in sentences:
        ids = sentence["src_ids"]
        assert [*words.encode(sentence["src_bpe"]), words.vocabulary.eos] == ids
        text = pairs.decode(ids)
        assert "@@" not in text
        assert [*pairs.encode(text), words.vocabulary.eos] == ids


def test_real_text_survives(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    files = {
        language: [shared_data(f"data/multi30k/val.{language}.gz")]
        for language in ("en", "de", "fr", "cs")
    }
    for language, tokenizer in train_subwords("sentencepiece", files, 2000, tmp_path).items():
        assert isinstance(tokenizer.subwords, SentencePieces)
        lines = list(read_lines(files[language][0]))
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(lines)] == lines


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe", "words"])
def test_text_never_gives_a_tag(files: dict[str, list[Path]], folder: Path, kind: Kind) -> None:
    size = {"sentencepiece": 300, "bpe": 100, "words": None}[kind]
    tokenizer = train_subwords(kind, files, size, folder, tags=["<BT>"])["en"]
    tag = tokenizer.vocabulary.tags["<BT>"]
    plain = train_subwords(kind, files, size, folder)["en"].vocabulary
    assert plain.symbols[4 : 4 + 9] == tokenizer.vocabulary.symbols[4 : 4 + 9]
    assert all(tag not in tokenizer.encode(line) for line in ("<BT>", "a <BT> b", "<BT>\u00a0"))
    assert tokenizer.decode([tag, *tokenizer.encode("a")]) == tokenizer.decode(
        tokenizer.encode("a")
    )
