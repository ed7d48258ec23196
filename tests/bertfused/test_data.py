import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bertfused.data import UNFINISHED, DataFolder, PrepareReport, SplitReport
from bertfused.errors import UserError
from bertfused.store import IdStoreWriter
from bertfused.vocab import Vocabulary


def write_store(prefix: Path, sentences: Sequence[Sequence[int]]) -> None:
    with IdStoreWriter(prefix, 100) as writer:
        for ids in sentences:
            writer.append(ids)


def make_foreign(folder: Path, splits: Sequence[str] = ("train", "valid", "test", "test1")) -> Path:
    """Make what fairseq's preprocess command makes, its log included."""
    folder.mkdir()
    for language in ("en", "de"):
        Vocabulary(["yes@@", "no"], [3, 2]).save(folder / f"dict.{language}.txt")
    for split in splits:
        write_store(folder / f"{split}.en-de.en", [[4, 5, 2], [5, 2]])
        write_store(folder / f"{split}.en-de.de", [[5, 2], [4, 4, 4, 2]])
    (folder / "preprocess.log").write_text("Namespace()")
    return folder


def test_folder_of_fairseq_opens_without_being_told_anything(tmp_path: Path) -> None:
    folder = DataFolder.open(make_foreign(tmp_path / "bin"))
    assert folder.languages == ("en", "de")
    assert folder.report is None
    assert sorted(folder.splits) == ["dev", "test", "test1", "train"]
    dev = folder.split("dev")
    assert dev.prefix.name == "valid"
    assert len(dev) == 2
    assert dev.source[0].tolist() == [4, 5, 2]
    assert dev.target[1].tolist() == [4, 4, 4, 2]
    assert [lengths.tolist() for lengths in dev.lengths] == [[2, 4], [3, 2]]
    assert dev.bert is None
    assert dev.docids is None
    source, target = folder.tokenizers()
    assert source.encode("no yes@@ no") == [5, 4, 5]
    assert target.decode([4, 5]) == "yes@@ no"


def test_folder_of_the_official_code_opens(shared_data: Callable[[str], Path]) -> None:
    oracle = shared_data("oracles/bertnmt_tiny48")
    folder = DataFolder.open(oracle / "databin")
    assert folder.languages == ("en", "de")
    assert len(folder.split("train")) == 3000
    test = folder.split("test")
    assert test.bert is not None
    for i, sentence in enumerate(json.loads((oracle / "oracle.json").read_text())["sentences"]):
        assert test.source[i].tolist() == sentence["src_ids"]
        assert test.target[i].tolist() == sentence["tgt_ids"]
        assert test.bert[i].tolist() == sentence["bert_ids"]


def test_the_encoders_ids_are_found_beside_the_source(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path / "bin")
    write_store(folder / "valid.bert.en-de.en", [[7, 8, 9], [7, 9]])
    opened = DataFolder.open(folder)
    assert opened.languages == ("en", "de")
    dev = opened.split("dev")
    assert dev.bert is not None
    assert dev.bert[1].tolist() == [7, 9]
    assert dev.lengths[2].tolist() == [3, 2]
    assert opened.split("train").bert is None


def test_documents_and_text_are_read_where_they_are(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path / "bin")
    (folder / "valid.docids").write_text("a\n\n")
    (folder / "valid.en-de.raw.de").write_text("ja\nnein\n")
    dev = DataFolder.open(folder).split("dev")
    assert dev.docids == ["a", ""]
    assert dev.target_text.read_text() == "ja\nnein\n"
    with pytest.raises(UserError, match=r"valid\.en-de\.raw\.en does not exist"):
        _ = dev.source_text


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    folder = DataFolder.open(make_foreign(tmp_path / "bin", ["train", "valid"]))
    with pytest.raises(UserError, match="no split 'test', only train, dev"):
        folder.split("test")


@pytest.mark.parametrize("name", ["train.en-de.de", "train.bert.en-de.en"])
def test_stores_of_different_length_are_refused(tmp_path: Path, name: str) -> None:
    folder = make_foreign(tmp_path / "bin")
    write_store(folder / name, [[5, 2]])
    with pytest.raises(UserError, match=rf"train\.en-de\.en has 2 sentences but .*{name} has 1"):
        DataFolder.open(folder).split("train")


def test_a_missing_side_is_named(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path / "bin")
    (folder / "train.en-de.de.idx").unlink()
    with pytest.raises(UserError, match=r"train\.en-de\.de\.idx"):
        DataFolder.open(folder).split("train")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data folder"):
        DataFolder.open(tmp_path)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        DataFolder.open(tmp_path / "nowhere")


def test_several_pairs_of_languages_are_refused(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path / "bin")
    write_store(folder / "train.de-fr.fr", [[2]])
    with pytest.raises(UserError, match="several pairs of languages: de-fr, en-de"):
        DataFolder.open(folder)


def test_an_unfinished_folder_is_not_taken_for_one_of_fairseq(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path / "bin")
    (folder / UNFINISHED).touch()
    with pytest.raises(UserError, match="is not complete; run prepare again"):
        DataFolder.open(folder)


def test_a_damaged_report_is_one_sentence(tmp_path: Path) -> None:
    folder = make_foreign(tmp_path / "bin")
    (folder / "data.toml").write_text('source = "en"\ntarget = "de"\ncolour = 3\n')
    with pytest.raises(UserError, match=r"data\.toml: "):
        DataFolder.open(folder)


def test_a_report_says_what_became_of_every_record() -> None:
    train = SplitReport(
        file="train",
        records=10,
        kept=6,
        empty=1,
        long=2,
        unbalanced=1,
        source_tokens=200,
        source_unknown=3,
        target_tokens=100,
    )
    dev = SplitReport(file="valid", records=3, kept=3, empty=1, source_tokens=4, target_tokens=4)
    report = PrepareReport(
        source="en",
        target="de",
        max_tokens=50,
        subwords={},
        splits={"train": train, "dev": dev},
        files=(),
    )
    text = str(report)
    assert "10 pairs = 6 kept + 1 empty + 2 over 50 tokens + 1 unbalanced" in text
    assert "en 200 tokens, 1.50% unknown; de 100 tokens, 0.00% unknown" in text
    assert "3 pairs, all kept (1 empty, 0 over 50 tokens, 0 unbalanced)" in text
