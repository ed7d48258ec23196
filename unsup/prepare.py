"""The DATA folder of unsupervised training: what the core makes, and word-by-word translations."""

from collections.abc import Callable
from pathlib import Path

from bertfused.data import DataFolder, PrepareReport
from bertfused.errors import UserError
from bertfused.prepare import prepare as prepare_text
from bertfused.store import IdStore
from unsup.config import UnsupervisedRecipe


def prepare(
    recipe: UnsupervisedRecipe,
    out: Path,
    *,
    force: bool = False,
    progress: Callable[[str, int], object] = lambda what, lines: None,
) -> PrepareReport:
    """Make the DATA folder ``out``; what it raises is as of the core's ``prepare``."""
    # The encoder reads what training makes of a sentence: there is nothing to prepare for it.
    plain = recipe.model_copy(update={"fusion": None})
    return prepare_text(plain, out, force=force, progress=progress)


def words_prefix(folder: Path, source: str, target: str) -> Path:
    """Return the path of the store of word-by-word translations: ``DATA/words.en-fr``."""
    return folder / f"words.{source}-{target}"


def word_translations(data: DataFolder) -> tuple[IdStore, IdStore]:
    """Open the word-by-word translations of each language's text into the other one.

    Raises:
        UserError: If there are none.
    """
    first, second = data.languages
    stores = []
    for source, target in ((first, second), (second, first)):
        prefix = words_prefix(data.path, source, target)
        if not prefix.with_name(f"{prefix.name}.idx").exists():
            raise UserError(
                f"objectives.words needs word-by-word translations, but {data.path} was prepared "
                "without a [words] section"
            )
        stores.append(IdStore.open(prefix))
        if len(stores[-1]) != len(data.mono(source)):
            raise UserError(f"{prefix} has not as many sentences as mono.{source}")
    return stores[0], stores[1]
