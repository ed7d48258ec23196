"""Every verb of ``docnmt`` through its command line, on documents of generated sentences."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from bertfused.data import DataFolder
from bertfused.text import read_lines
from docnmt import DocumentTranslator
from tests.end_to_end.children import train
from tests.end_to_end.conftest import Small
from tests.end_to_end.corpus import fail, sentences, succeed, write_lines, write_recipe

WEIGHTS = Path("model", "model.safetensors")
PLAIN = {"model": {"dropout": 0.0}}
Document = list[tuple[str, str]]  # sentence and translation


def documents(count: int, seed: int) -> list[Document]:
    """Make documents of 1, 2, 3, 4, 1, ... sentences."""
    pairs = zip(*sentences(4 * count, seed=seed), strict=True)
    return [[next(pairs) for _ in range(1 + i % 4)] for i in range(count)]


SPLITS = {"train": documents(90, 1), "dev": documents(8, 2), "test": documents(5, 3)}


def lines_of(found: list[Document], side: int, format: str) -> Iterator[str]:
    """Write documents as docs/documents.md says."""
    for number, document in enumerate(found):
        if format == "d":
            yield "<d>"
        elif format == "blank" and number:
            yield ""
        for i, pair in enumerate(document):
            yield {
                "tsv": f"doc {number}\t{i}\t{pair[0]}\t{pair[1]}",
                "jsonl": json.dumps({"document": number, "source": pair[0], "target": pair[1]}),
            }.get(format, pair[side])


def write_documents(folder: Path, format: str) -> dict[str, Any]:
    """Write the corpus; return the recipe's sections that name it."""
    data: dict[str, Any] = {"train": [{}], "dev": {}, "test": [{"name": "late"}]}
    for split, found in SPLITS.items():
        corpus = data[split] if split == "dev" else data[split][0]
        for number, side in enumerate(("source", "target")):
            suffix = format if format in ("tsv", "jsonl") else ("en", "de")[number]
            corpus[side] = f"{split}.{suffix}"
            write_lines(folder / corpus[side], lines_of(found, number, format))
        if format == "docids":
            ids = [f"doc {number}" for number, own in enumerate(found) for _ in own]
            corpus["docids"] = f"{split}.en.docids"
            write_lines(folder / corpus["docids"], ids)
    return {"data": data, "documents": {"previous": 1, "format": format}}


def make(folder: Path, small: Small, format: str, *changes: dict[str, Any], steps: int = 2) -> Path:
    """Prepare and train; return the run."""
    folder.mkdir()
    fusion = {"fusion": {"encoder": str(small.bert), "drop_net": 0.0}}
    recipe = write_recipe(
        folder / "recipe.toml", fusion, PLAIN, write_documents(folder, format), *changes
    )
    succeed("docnmt prepare", recipe, "--out", folder / "data")
    limits = ["--set", f"train.max_steps={steps}", "--set", f"train.validate_every={steps // 2}"]
    train("docnmt train", recipe, "--data", folder / "data", "--out", folder / "run", *limits)
    return folder / "run"


@pytest.fixture(scope="module")
def run(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on the format "blank"."""
    return make(tmp_path_factory.mktemp("documents") / "blank", small, "blank", steps=160)


@pytest.fixture(scope="module")
def brief(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two updates on the format "blank"."""
    return make(tmp_path_factory.mktemp("documents") / "blank", small, "blank")


def translate(run: Path, lines: list[str], *options: object) -> list[str]:
    stdin = "".join(f"{line}\n" for line in lines).encode()
    return succeed("docnmt translate", run, *options, stdin=stdin).lines


def scores(run: Path, lines: list[str]) -> list[float | None]:
    """Return the log-probability of each translation, None for a separator."""
    found = [json.loads(line) for line in translate(run, lines, "--format", "jsonl")]
    return [own["hypotheses"][0]["log_prob"] if "source" in own else None for own in found]


TEST = [pair for document in SPLITS["test"] for pair in document]


# ---- prepare


def test_the_encoder_reads_the_sentence_before(run: Path, small: Small) -> None:
    pieces = list(read_lines(small.bert / "vocab.txt"))
    split = DataFolder.open(run.parent / "data").split("dev")
    assert split.bert is not None
    expected, docids = [], []
    for number, document in enumerate(SPLITS["dev"], start=1):
        before = ""
        for sentence, _ in document:
            expected.append(f"[CLS] {before} [SEP] {sentence} [SEP]".replace("  ", " "))
            docids.append(str(number))
            before = sentence
    found = [" ".join(pieces[i] for i in split.bert[n]) for n in range(len(split))]
    assert found == expected
    assert split.docids == docids


def test_info_says_how_contexts_were_formed(run: Path, small: Small) -> None:
    said = succeed("docnmt prepare", run.parent / "recipe.toml", "--out", run.parent / "data").err
    assert "is complete; nothing to do" in said
    out = succeed("bertfused info", run.parent / "data").out.decode()
    assert f"encoder: {small.bert}, with context" in out
    card = json.loads((run / "model" / "model.json").read_text())
    assert card["documents"] == {"previous": 1, "format": "blank"}
    assert card["fusion"]["segments"] is True


@pytest.mark.parametrize("format", ["d", "docids", "tsv", "jsonl"])
def test_all_formats_give_the_same_model(
    brief: Path, small: Small, tmp_path: Path, format: str
) -> None:
    other = make(tmp_path / format, small, format)
    assert (other / WEIGHTS).read_bytes() == (brief / WEIGHTS).read_bytes()
    source, output = tmp_path / format / "test.en", tmp_path / "out"
    if format in ("tsv", "jsonl"):
        source = source.with_suffix(f".{format}")
    succeed("docnmt translate", other, "--input", source, "--output", output)
    expected = [line for line in translate(brief, list(read_lines(text_of(brief)))) if line]
    found = list(read_lines(output))
    assert len(found) == len(list(read_lines(source)))
    assert [line for line in found if line != "<d>"] == expected
    assert found.count("<d>") == (5 if format == "d" else 0)
    reference = source if format in ("tsv", "jsonl") else source.with_suffix(".de")
    pairs = ["--source", source, "--reference", reference]
    ours = succeed("docnmt evaluate", other, *pairs).lines
    pairs = ["--source", text_of(brief), "--reference", text_of(brief).with_suffix(".de")]
    assert ours == succeed("docnmt evaluate", brief, *pairs).lines


def text_of(run: Path) -> Path:
    return run.parent / "test.en"


def test_no_previous_sentence_is_sentence_level(small: Small, tmp_path: Path) -> None:
    """The same model as ``bertfused`` makes of the same sentences without blank lines."""
    changes = {"documents": {"previous": 0}}
    ours = make(tmp_path / "documents", small, "blank", changes, steps=20)
    folder = tmp_path / "sentences"
    folder.mkdir()
    for split, found in SPLITS.items():
        for number, side in enumerate(("en", "de")):
            lines = (pair[number] for document in found for pair in document)
            write_lines(folder / f"{split}.{side}", lines)
    recipe = write_recipe(
        folder / "recipe.toml",
        {"fusion": {"encoder": str(small.bert), "drop_net": 0.0}},
        {"train": {"max_steps": 20, "validate_every": 10}, **PLAIN},
    )
    succeed("bertfused prepare", recipe, "--out", folder / "data")
    theirs = folder / "run"
    train("bertfused train", recipe, "--data", folder / "data", "--out", theirs)
    assert (ours / WEIGHTS).read_bytes() == (theirs / WEIGHTS).read_bytes()
    sources = [source for source, _ in TEST]
    stdin = "".join(f"{line}\n" for line in sources).encode()
    expected = succeed("bertfused translate", theirs, stdin=stdin).lines
    assert translate(ours, sources) == expected


# ---- translate and score


def test_a_document_has_one_translation_in_any_company(run: Path) -> None:
    found = [[source for source, _ in document] for document in SPLITS["test"]]
    alone = [scores(run, document) for document in found]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
        lines: list[str] = []
        expected: list[float | None] = []
        for number in order:
            lines += ["", *found[number]]
            expected += [None, *alone[number]]
        for ours, theirs in zip(scores(run, lines), expected, strict=True):
            assert ours == (theirs if theirs is None else pytest.approx(theirs, abs=1e-4))


def test_the_sentence_before_matters_within_a_document_only(run: Path) -> None:
    one, two = (scores(run, [before, "red cat"])[1] for before in ("old dog", "fish"))
    assert one is not None
    assert one != pytest.approx(two, abs=1e-4)
    one, two = (scores(run, [before, "", "red cat"])[2] for before in ("old dog", "fish"))
    assert one == pytest.approx(two, abs=1e-6)
    assert one == pytest.approx(scores(run, ["red cat"])[0], abs=1e-6)


@pytest.mark.parametrize(
    "lines",
    [
        ["cat", "", "", "dog", "  ", "fish", ""],
        ["", "\u2028", "cat\u2028dog", "a\x00b", "\u00a0"],
        ["", ""],
        [],
    ],
)
def test_one_line_out_for_each_line_in(run: Path, lines: list[str]) -> None:
    found = translate(run, lines)
    assert [bool(line) for line in found] == [bool(line.strip()) for line in lines]
    jsonl = [json.loads(line) for line in translate(run, lines, "--format", "jsonl")]
    assert [own.get("source") for own in jsonl] == [
        line if line.strip() else None for line in lines
    ]


def test_documents_in_python_are_those_of_the_command(run: Path) -> None:
    documents = [[source for source, _ in document] for document in SPLITS["test"]]
    documents = [*documents[:2], [], ["cat", "", "dog"], documents[2]]
    found = DocumentTranslator.load(run).translate(documents)
    ours = [[translation.text for translation in document] for document in found]
    assert [len(document) for document in ours] == [len(document) for document in documents]
    assert ours[0] == translate(run, documents[0])
    assert ours[1] == translate(run, documents[1])
    assert ours[3][1] == ""
    assert ours[4] == translate(run, documents[4])
    with pytest.raises(TypeError, match="a list of sentences, not a string: 'cat'"):
        list(DocumentTranslator.load(run).translate(["cat"]))


def test_nbest_and_blank_lines(run: Path) -> None:
    found = translate(run, ["cat", "", "dog"], "--nbest", 2)
    assert [bool(line) for line in found] == [True, True, False, True, True]


def test_what_does_not_fit_the_encoder_is_cut_from_the_context(
    run: Path, small: Small, tmp_path: Path
) -> None:
    """The encoder takes 32: [CLS], [SEP] twice, 2 of the sentence, so 27 of the context."""
    stdin = ("cat " * 29 + "dog\nred fish\n").encode()
    ran = succeed("docnmt translate", run, stdin=stdin)
    assert "context wordpieces cut: 3" in ran.err
    same = ("bird " * 3 + "cat " * 26 + "dog\nred fish\n").encode()
    jsonl = [
        succeed("docnmt translate", run, "--format", "jsonl", stdin=own).lines[1]
        for own in (stdin, same)
    ]
    assert jsonl[0] == jsonl[1]
    folder = tmp_path / "text"
    shutil.copytree(run.parent, folder, ignore=shutil.ignore_patterns("data", "run"))
    write_lines(folder / "dev.en", ["cat " * 29 + "dog", "red fish"])
    write_lines(folder / "dev.de", ["Katze", "rot Fisch"])
    data = tmp_path / "data"
    said = succeed("docnmt prepare", folder / "recipe.toml", "--out", data).err
    assert "wordpieces, 3 of context cut off" in said
    bert = DataFolder.open(data).split("dev").bert
    assert bert is not None
    pieces = list(read_lines(small.bert / "vocab.txt"))
    assert [pieces[i] for i in bert[1]][-5:] == ["dog", "[SEP]", "red", "fish", "[SEP]"]
    assert len(bert[1]) == 32


def test_a_score_is_that_of_the_search(run: Path, tmp_path: Path) -> None:
    source = text_of(run)
    lines = list(read_lines(source))
    output = write_lines(tmp_path / "out.de", translate(run, lines))
    found = succeed("docnmt score", run, "--source", source, "--target", output).lines
    assert len(found) == len(lines)
    for line, expected in zip(found, scores(run, lines), strict=True):
        if expected is None:
            assert line == "0.000000\t0"
        else:
            assert float(line.split("\t")[0]) == pytest.approx(expected, abs=1e-4)


# ---- evaluate


def test_evaluate_gives_bleu_of_sentences_and_of_documents(run: Path, tmp_path: Path) -> None:
    source, reference = text_of(run), text_of(run).with_suffix(".de")
    pairs = ["--source", source, "--reference", reference]
    out = tmp_path / "out.de"
    found = json.loads(succeed("docnmt evaluate", run, *pairs, "--json", "--output", out).out)
    translated = list(read_lines(out))
    assert translated == translate(run, list(read_lines(source)))
    ours = [line for line in translated if line]
    theirs = [target for _, target in TEST]
    assert found["bleu"]["value"] == sacrebleu.corpus_bleu(ours, [theirs]).score
    by_document = "\n".join(translated).split("\n\n")
    joined = [document.replace("\n", " ") for document in by_document]
    references = [" ".join(target for _, target in document) for document in SPLITS["test"]]
    assert found["d-bleu"]["value"] == sacrebleu.corpus_bleu(joined, [references]).score
    assert found["d-bleu"]["value"] != found["bleu"]["value"]
    lines = succeed("docnmt evaluate", run, *pairs).lines
    assert [line.partition("|")[0] for line in lines] == ["BLEU", "chrF2", "d-BLEU"]
    assert all("|version:" in line for line in lines)


def test_validation_in_training_equals_evaluate(run: Path) -> None:
    logged = {}
    for line in read_lines(run / "metrics.jsonl"):
        record = json.loads(line)
        if "valid_bleu" in record:
            logged[record["step"]] = record["valid_bleu"]
    assert logged.keys() == {80, 160}
    assert logged[160] > 0
    dev = run.parent / "dev.en"
    pairs = ["--source", dev, "--reference", dev.with_suffix(".de"), "--json"]
    for step, expected in logged.items():
        checkpoint = run / "checkpoints" / f"step-{step}"
        found = json.loads(succeed("docnmt evaluate", checkpoint, *pairs).out)
        assert found["bleu"]["value"] == expected


def test_references_must_have_the_same_documents(run: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.en", ["cat", "", "dog", "fish"])
    reference = write_lines(tmp_path / "ref.de", ["Katze", "Hund", "", "Fisch"])
    said = fail("docnmt evaluate", run, "--source", source, "--reference", reference)
    assert said == f"{reference}, line 2: 'Hund' stands where {source} separates documents"
    write_lines(reference, ["Katze", "", "Hund"])
    said = fail("docnmt evaluate", run, "--source", source, "--reference", reference)
    assert said == f"{reference} has 3 lines but {source} has 4"


# ---- the two commands and one another's data


def test_data_of_sentences_is_refused(run: Path, small: Small, tmp_path: Path) -> None:
    options = ["--data", small.data, "--out", tmp_path / "run"]
    said = fail("docnmt train", run.parent / "recipe.toml", *options)
    assert said == f"{small.data} was prepared sentence by sentence; prepare it with docnmt"
    said = fail(
        *("docnmt train", run.parent / "recipe.toml", *options),
        *("--set", "train.validate_bleu=false"),
    )
    assert said == f"{small.data} was prepared sentence by sentence; prepare it with docnmt"
    assert not (tmp_path / "run").exists()


def test_documents_are_refused_by_bertfused(run: Path, small: Small, tmp_path: Path) -> None:
    data = run.parent / "data"
    for option in ("train.validate_bleu=true", "train.validate_bleu=false"):
        said = fail(
            *("bertfused train", small.recipe, "--data", data, "--out", tmp_path / "run"),
            *("--set", option),
        )
        assert said == f"{data} was prepared from documents; use the docnmt command"
    said = fail("bertfused translate", run, stdin=b"cat\n")
    assert said == "this model reads documents; use the docnmt command"
    assert not (tmp_path / "run").exists()


def test_another_context_than_that_of_the_data_is_refused(run: Path, tmp_path: Path) -> None:
    data = run.parent / "data"
    said = fail(
        *("docnmt train", run.parent / "recipe.toml", "--data", data, "--out", tmp_path / "run"),
        *("--set", "documents.previous=2"),
    )
    assert said == f"{data} was prepared with documents.previous = 1, but the recipe has 2"


def test_segments_can_be_switched_off(run: Path, tmp_path: Path) -> None:
    command = ["docnmt train", run.parent / "recipe.toml", "--data", run.parent / "data"]
    command += ["--set", "train.max_steps=2", "--out"]
    succeed(*command, tmp_path / "off", "--set", "documents.segments=false")
    succeed(*command, tmp_path / "on")
    card = json.loads((tmp_path / "off" / "model" / "model.json").read_text())
    assert card["fusion"]["segments"] is False
    assert (tmp_path / "off" / WEIGHTS).read_bytes() != (tmp_path / "on" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["cat", "", "", "dog"], "line 3"),
        (["", "cat"], "line 1"),
    ],
)
def test_a_corpus_with_an_empty_document_is_refused(
    run: Path, tmp_path: Path, lines: list[str], message: str
) -> None:
    folder = tmp_path / "text"
    shutil.copytree(run.parent, folder, ignore=shutil.ignore_patterns("data", "run"))
    write_lines(folder / "dev.en", lines)
    write_lines(folder / "dev.de", lines)
    said = fail("docnmt prepare", folder / "recipe.toml", "--out", tmp_path / "data")
    assert f"{folder / 'dev.en'}, {message}" in said
    assert not (tmp_path / "data" / "data.toml").exists()
