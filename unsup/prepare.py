"""The DATA folder of unsupervised training: what the core makes, and word-by-word translations."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from pydantic import Field

from bertfused.config import Section, load_recipe
from bertfused.data import REPORT, DataFolder, PrepareReport
from bertfused.errors import UserError
from bertfused.prepare import prepare as prepare_text
from bertfused.pretrained import PretrainedEncoder, load_wordpieces
from bertfused.store import IdStore, IdStoreWriter
from bertfused.subwords import Tokenizer, load_tokenizer
from bertfused.text import only_writer, remove_partials, replace_file, sha256_file
from bertfused.vocab import MASK, Vocabulary
from unsup.config import UnsupervisedRecipe, WordsConfig
from unsup.induction import describe_words, induced, match_words, spelling_similarities
from unsup.language_model import LanguageModel, train_language_model
from unsup.lexicon import (
    Dictionary,
    Lexicon,
    encode_words,
    from_dictionary,
    from_vectors,
    read_dictionary,
    with_omission,
)
from unsup.word_by_word import WordByWord, count_choices, refined, translate_lines

_logger = logging.getLogger(__name__)

_REPORT = "words.toml"
_CHUNK = 500  # sentences
_REFINED = 2500  # sentences of each language that a refinement looks at

Progress = Callable[[str, int], object]


class DirectionWords(Section):
    """What is known of the words of one language's text."""

    words: int = Field(description="Words of the text, each as often as it stands there.")
    copied: int = Field(description="Of these, without a translation: they stay as they are.")


class WordsReport(Section):
    """What word-by-word translations were made from; the content of ``words.toml``."""

    words: dict[str, Any] = Field(description="As in [words]; of dictionaries, their languages.")
    files: dict[str, str] = Field(
        description="sha256 of the dictionaries by number, and of the report on the text."
    )
    directions: dict[str, DirectionWords] = Field({}, description="By source language.")

    def __str__(self) -> str:
        """Return the report as lines of text."""
        return "\n".join(
            f"word by word from {language}: {own.words:,} words, "
            f"{own.copied / max(own.words, 1):.1%} copied for want of a translation"
            for language, own in self.directions.items()
        )


def prepare(
    recipe: UnsupervisedRecipe,
    out: Path,
    *,
    force: bool = False,
    progress: Progress = lambda what, lines: None,
) -> tuple[PrepareReport, WordsReport | None]:
    """Make the DATA folder ``out``, and with [words] the word-by-word translations in it.

    What it raises is as of the core's ``prepare``.
    """
    _check_sources(recipe)
    # The encoder reads what training makes of a sentence: there is nothing to prepare for it.
    plain = recipe.model_copy(update={"fusion": None})
    report = prepare_text(plain, out, force=force, progress=progress)
    if recipe.words is None:
        return report, None
    with only_writer(out):
        return report, _translate_words(recipe.words, out, force, progress)


def check_shared(first: Tokenizer, second: Tokenizer, folder: Path) -> Tokenizer:
    """Return the tokenizer of both languages.

    Raises:
        UserError: If each has its own, or there is no symbol that blanks words.
    """
    if first.sha256 != second.sha256:
        raise UserError(f"the languages of {folder} have subwords of their own, not shared ones")
    if MASK not in first.vocabulary.tags:
        raise UserError(f"the dictionary of {folder} has no {MASK!r}; prepare it with unsup")
    return first


def words_prefix(folder: Path, source: str, target: str) -> Path:
    """Return the path of the store of word-by-word translations: ``DATA/words.en-fr``."""
    return folder / f"words.{source}-{target}"


def word_translations(data: DataFolder, config: WordsConfig | None) -> tuple[IdStore, IdStore]:
    """Open the word-by-word translations of each language's text into the other one.

    Args:
        config: What they are to be made with; None if that does not matter.

    Raises:
        UserError: If there are none, or they were made with something else.
    """
    first, second = data.languages
    if not (data.path / _REPORT).exists():
        raise UserError(
            f"objectives.words needs word-by-word translations, but {data.path} has none; prepare "
            "it with a [words] section"
        )
    made = load_recipe(data.path / _REPORT, WordsReport)
    if config is not None:
        _check_same(made.words, _settings(config), data.path)
    if made.files.get(REPORT) != sha256_file(data.path / REPORT):
        raise UserError(
            f"the word-by-word translations of {data.path} are of other data than are there; "
            "prepare it with its [words] section again"
        )
    found = []
    for source, target in ((first, second), (second, first)):
        found.append(IdStore.open(words_prefix(data.path, source, target)))
        if len(found[-1]) != len(data.mono(source)):
            raise UserError(
                f"{words_prefix(data.path, source, target)} has not as many sentences as the text "
                f"of {source!r}; prepare the words again"
            )
    return found[0], found[1]


def words_sha256(data: DataFolder) -> str:
    """Return the hash of what the word-by-word translations were made from."""
    return sha256_file(data.path / _REPORT)


def _translate_words(
    config: WordsConfig, folder: Path, force: bool, progress: Progress
) -> WordsReport:
    """Make the translations of both texts, unless they are there already."""
    data = DataFolder.open(folder)
    planned = _plan(config, data)
    path = folder / _REPORT
    if path.exists() and not force:
        made = load_recipe(path, WordsReport)
        _check_same(made.words | _inputs(made), planned.words | _inputs(planned), folder)
        if made.files == planned.files:
            _logger.info("the word-by-word translations of %s are complete", folder)
            return made
    path.unlink(missing_ok=True)
    remove_partials(folder, r"words\..*")
    tokenizer, _ = data.tokenizers()
    first, second = data.languages
    texts = {language: _lines(data.mono(language), tokenizer) for language in data.languages}
    _logger.info("looking for the translations of words")
    models = {language: train_language_model(texts[language]) for language in data.languages}
    lexicons = make_lexicons(config, data.languages, texts, models)
    directions = {}
    for source, target in ((first, second), (second, first)):
        prefix = words_prefix(folder, source, target)
        lexicon, model = lexicons[source], models[target]
        with IdStoreWriter(prefix, len(tokenizer.vocabulary)) as writer:
            for line in _translated(config, texts[source], lexicon, model, source, progress):
                writer.append([*tokenizer.encode(line), Vocabulary.eos])
        counts = Counter(word for line in texts[source] for word in line.split())
        unknown = lexicon.copied(counts)
        copied = sum(counts[word] for word in unknown)
        directions[source] = DirectionWords(words=counts.total(), copied=copied)
    report = planned.model_copy(update={"directions": directions})
    with replace_file(path) as handle:
        handle.write(tomli_w.dumps(report.model_dump(mode="json", exclude_none=True)).encode())
    return report


def make_lexicons(
    config: WordsConfig,
    languages: tuple[str, str],
    texts: Mapping[str, list[str]],
    models: Mapping[str, LanguageModel],
) -> dict[str, Lexicon]:
    """Find the translations of the words of both texts; lexicons by source language.

    Args:
        models: The language models of both texts.
    """
    counts = {
        language: Counter(word for line in lines for word in line.split())
        for language, lines in texts.items()
    }
    lexicons = _induced(config, languages, texts) if config.induced else None
    if lexicons is None:
        lexicons = _known(config, languages, counts)
    lexicons = {
        language: with_omission(lexicon, counts[language], log_prob=-config.omit_cost)
        for language, lexicon in lexicons.items()
    }
    first, second = languages
    for _ in range(config.refinements):
        _logger.info("weighing the translations of words anew")
        chosen = {}
        for source, target in ((first, second), (second, first)):
            search = WordByWord(lexicons[source], models[target], **_weights(config), beam_size=5)
            rows = np.unique(np.linspace(0, len(texts[source]) - 1, _REFINED).astype(int))
            chosen[source] = count_choices([texts[source][row] for row in rows.tolist()], search)
        lexicons = {
            source: refined(lexicons[source], chosen[source], chosen[target])
            for source, target in ((first, second), (second, first))
        }
    return lexicons


def _induced(
    config: WordsConfig, languages: tuple[str, str], texts: Mapping[str, list[str]]
) -> dict[str, Lexicon]:
    first, second = (describe_words(texts[language]) for language in languages)
    other = None
    if config.spelling:
        other = config.spelling * spelling_similarities(first.words, second.words)
    match = match_words(first, second, seed=config.seed, other=other)
    _logger.info("matched the words of both texts: agreement %.3f", match.agreement)
    return {
        languages[0]: induced(first, second, match),
        languages[1]: induced(second, first, match.reversed()),
    }


def _known(
    config: WordsConfig, languages: tuple[str, str], counts: Mapping[str, Counter[str]]
) -> dict[str, Lexicon]:
    vectors = {}
    if config.encoder is not None:
        encoder = PretrainedEncoder(config.encoder, languages=languages)
        vectors = {
            language: encode_words(counts[language], encoder, number)
            for number, language in enumerate(languages)
        }
    lexicons = {}
    for source, target in (languages, languages[::-1]):
        lexicon = _from_dictionaries(config, source, counts[source], counts[target])
        if vectors:
            lexicon = from_vectors(vectors[source], vectors[target], counts[target], known=lexicon)
        lexicons[source] = lexicon
    return lexicons


def _from_dictionaries(
    config: WordsConfig, source: str, source_counts: Counter[str], target_counts: Counter[str]
) -> Lexicon:
    dictionary = Dictionary(frozenset(), {})
    for file in config.dictionaries:
        read = read_dictionary(file.path, is_reversed=file.language != source)
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in read.left_out.items())
        note = f", left out {left_out}" if left_out else ""
        if source == file.language:  # each is read for both directions
            _logger.info("%s: %s pairs%s", file.path, f"{len(read.pairs):,}", note)
        dictionary |= read
    return from_dictionary(dictionary, source_counts, target_counts)


def _translated(
    config: WordsConfig,
    lines: list[str],
    lexicon: Lexicon,
    model: LanguageModel,
    source: str,
    progress: Progress,
) -> Iterator[str]:
    translations = translate_lines(lines, WordByWord(lexicon, model, **_weights(config)))
    while chunk := list(islice(translations, _CHUNK)):
        yield from chunk
        progress(f"words of {source}", len(chunk))


def _weights(config: WordsConfig) -> dict[str, Any]:
    """Return the weights of the search."""
    return config.model_dump(include={"lm_weight", "swap_cost", "insert_cost", "reach"})


def _check_sources(recipe: UnsupervisedRecipe) -> None:
    """Refuse what could not be used, before the work that comes first."""
    if (folder := recipe.subwords.reuse) is not None:
        first, second = (load_tokenizer(folder, own) for own in recipe.data.languages)
        check_shared(first, second, folder)
    if recipe.words is None:
        return
    for file in recipe.words.dictionaries:
        if not read_dictionary(file.path).pairs:
            raise UserError(f"{file.path} has no pair of single words with a tab between them")
    if recipe.words.encoder is not None:
        load_wordpieces(recipe.words.encoder)


def _plan(config: WordsConfig, data: DataFolder) -> WordsReport:
    files = {
        f"dictionaries.{number}": sha256_file(file.path)
        for number, file in enumerate(config.dictionaries)
    }
    files[REPORT] = sha256_file(data.path / REPORT)
    return WordsReport(words=_settings(config), files=files)


def _settings(config: WordsConfig) -> dict[str, Any]:
    """Return what [words] says, without the places of files."""
    languages = [file.language for file in config.dictionaries]
    settings = config.model_dump(mode="json", exclude_none=True, exclude={"dictionaries"})
    return settings | {"dictionaries": languages}


def _inputs(report: WordsReport) -> dict[str, str]:
    """Return the hashes of what is no text of DATA."""
    return {name: sha256 for name, sha256 in report.files.items() if name != REPORT}


def _check_same(made: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse word-by-word translations that were made with something else."""
    for key in [*wanted, *made]:
        if made.get(key) != wanted.get(key):
            raise UserError(
                f"the word-by-word translations of {folder} were made with another "
                f"words.{key}; prepare with --force, or in another folder"
            )


def _lines(store: IdStore, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(store[row].tolist()) for row in range(len(store))]
