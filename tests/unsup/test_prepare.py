import re
import shutil
from pathlib import Path

import pytest
import tomli_w
import torch

from bertfused.errors import UserError
from bertfused.prepare import prepare as prepare_text
from bertfused.text import sha256_file
from tests.tiny_texts import Texts
from unsup.config import WordsConfig
from unsup.fit import set_up
from unsup.prepare import prepare, word_translations

WORDS = {"words": {"induced": True}}


def words_toml(folder: Path, **changes: object) -> None:
    """Write what says how word-by-word translations were made; None leaves an entry out."""
    settings = WordsConfig(induced=True).model_dump(mode="json", exclude={"encoder"})
    values = {
        "words": settings,
        "files": {"data.toml": sha256_file(folder / "data.toml")},
        **changes,
    }
    (folder / "words.toml").write_text(tomli_w.dumps(values))


@pytest.fixture
def folder(texts: Texts, tmp_path: Path) -> Path:
    """A copy of the prepared texts."""
    shutil.copytree(texts.data.path, tmp_path / "data")
    return tmp_path / "data"


def test_words_of_other_settings_are_refused(texts: Texts, folder: Path) -> None:
    data = type(texts.data).open(folder)
    words_toml(folder)
    with pytest.raises(UserError, match=r"cannot read .*words\.ab-xy\.idx"):
        word_translations(data, WordsConfig(induced=True))
    other = WordsConfig(induced=True, lm_weight=0.5)
    with pytest.raises(UserError, match=r"were made with another words\.lm_weight"):
        word_translations(data, other)
    with pytest.raises(UserError, match=r"were made with another words\.lm_weight"):
        prepare(texts.with_(words={"induced": True, "lm_weight": 0.5}), folder)


def test_a_report_that_was_cut_short_is_no_report(texts: Texts, folder: Path) -> None:
    data = type(texts.data).open(folder)
    words_toml(folder, files={})
    with pytest.raises(UserError, match="are of other data than are there"):
        word_translations(data, None)
    words_toml(folder, words=1)
    with pytest.raises(UserError, match=r"words\.toml"):
        word_translations(data, None)


def test_what_cannot_be_used_is_refused_before_any_work(texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "words.tsv").write_text("one word\n\ntwo words\tdeux mots\n")
    file = {"path": tmp_path / "words.tsv", "language": "ab"}
    recipe = texts.with_(words={"dictionaries": [file]})
    message = f"{tmp_path / 'words.tsv'} has no pair of single words with a tab between them"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        prepare(recipe, tmp_path / "data")
    with pytest.raises(UserError, match="nowhere"):
        prepare(texts.with_(words={"encoder": str(tmp_path / "nowhere")}), tmp_path / "data")
    alone = texts.recipe.model_copy(
        update={
            "subwords": texts.recipe.subwords.model_copy(update={"shared": False, "kind": "words"})
        }
    )
    prepare_text(alone, tmp_path / "alone")
    reused = texts.with_(subwords={"reuse": tmp_path / "alone"})
    with pytest.raises(UserError, match="have subwords of their own, not shared ones"):
        prepare(reused, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_uneven_dev_set_is_refused_before_training(texts: Texts, folder: Path) -> None:
    (text,) = folder.glob("valid.*.raw.xy")
    text.write_text("".join(text.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"has 8 lines but .* has 7"):
        set_up(texts.recipe, type(texts.data).open(folder), None, torch.device("cpu"))
