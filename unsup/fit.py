"""Set up the training of an unsupervised model."""

import copy
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bertfused.checkpoint import WarmStart, load_card, model_folder, preserve_function
from bertfused.config import AnyRecipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import (
    Setup,
    build_network,
    make_trainer,
    start_from_run,
    translation_loss,
)
from bertfused.model import FusedTransformer
from bertfused.pretrained import PretrainedEncoder
from bertfused.store import IdStore
from bertfused.subwords import Tokenizer
from bertfused.text import read_pairs
from bertfused.training import Trainer
from bertfused.translate import Member, Translator
from bertfused.wordpieces import own_model_folder
from unsup.config import Objective, ObjectivesConfig, UnsupervisedRecipe, points
from unsup.embeddings import start_embeddings
from unsup.noise import WordNoise
from unsup.objectives import BackTranslator, Sentences, UnsupervisedLoss, steps
from unsup.prepare import check_shared, word_translations, words_sha256
from unsup.pretrain import HeldOutText, check_held_out
from unsup.validation import LanguageIdentity, RoundTrip
from unsup.xlm import start_from_xlm

_logger = logging.getLogger(__name__)

_FEW_TOKENS = 1000


def set_up(recipe: AnyRecipe, data: DataFolder, init: Path | None, device: torch.device) -> Setup:
    """Set up what a recipe of ``unsup`` trains.

    Raises:
        UserError: If recipe, data and the RUN to start from do not fit together.
    """
    assert isinstance(recipe, UnsupervisedRecipe)
    if recipe.validation.select == "bleu" and "dev" not in data.splits:
        raise UserError(f"validation.select is 'bleu', but {data.path} has no data.dev")
    member, module, trainer, start = _build(recipe, data, init, device)
    teacher = member
    if recipe.objectives.teacher == "average":
        teacher = replace(member, model=averaged(member.model, trainer))
    module.translator = BackTranslator(
        Translator([teacher], device), recipe.generate, trainer.precision
    )
    stores, words, files = _stores(data), None, {}
    if _uses(recipe, "words"):
        words = word_translations(data, recipe.words)
        files = {"words_sha256": words_sha256(data)}
    examples = Sentences(stores, words, recipe.objectives, recipe.noise.mass)
    _warn_of_small_batches(recipe, examples)
    lines = recipe.validation.lines
    validator = RoundTrip(
        recipe.validation,
        recipe.data.languages,
        both_ways(member, device),
        LanguageIdentity(stores, member.source),
        (_sample(stores[0], member.source, lines), _sample(stores[1], member.source, lines)),
        _dev_lines(data),
        recipe.generate.model_copy(update={"sampling": None}),
    )
    together = partial(steps, together=recipe.generate.updates)
    return Setup(recipe, trainer, member.card, start, examples, validator, together, files)


def set_up_mass(
    recipe: AnyRecipe, data: DataFolder, init: Path | None, device: torch.device
) -> Setup:
    """Set up the pretraining of a model by MASS, which ``train`` starts from as from any RUN."""
    assert isinstance(recipe, UnsupervisedRecipe)
    check_held_out(recipe, data)
    objectives = ObjectivesConfig(denoising="0", backtranslation="0", mass="1")
    recipe = recipe.model_copy(update={"objectives": objectives, "fusion": None})
    member, _, trainer, start = _build(recipe, data, init, device)
    stores, held_out = _stores(data), recipe.pretrain.valid_lines
    training, valid = (
        Sentences((stores[0].part(rows), stores[1].part(rows)), None, objectives, recipe.noise.mass)
        for rows in (slice(-held_out), slice(-held_out, None))
    )
    _warn_of_small_batches(recipe, training)
    validator = HeldOutText(trainer, {"both": valid})
    return Setup(recipe, trainer, member.card, start, training, validator, steps)


def _build(
    recipe: UnsupervisedRecipe, data: DataFolder, init: Path | None, device: torch.device
) -> tuple[Member, UnsupervisedLoss, Trainer, WarmStart | None]:
    """Build the model, its loss and its optimiser."""
    languages = recipe.data.languages
    tokenizer = check_shared(*data.tokenizers(), data.path)
    if languages != data.languages:
        raise UserError(
            f"{data.path} is of {' and '.join(data.languages)}, in this order, but the recipe of "
            f"{' and '.join(languages)}"
        )
    model, encoder, card = build_network(recipe, data, languages)
    start = None if init is None else _start(model, init, recipe, data, tokenizer)
    if recipe.embeddings is not None:
        _start_embeddings(model, recipe.embeddings.encoder, tokenizer, init)
    noise = WordNoise(tokenizer, recipe.noise)
    pairs = translation_loss(recipe, model, encoder)
    module = UnsupervisedLoss(pairs, noise, recipe.objectives, tokenizer)
    member = Member(card, model, tokenizer, tokenizer, encoder)
    return member, module, make_trainer(module, recipe, start, device), start


def _start_embeddings(
    model: FusedTransformer, name: str, tokenizer: Tokenizer, init: Path | None
) -> None:
    """Begin with the embeddings that an encoder gives the subwords."""
    if init is not None:
        raise UserError(
            f"[embeddings] says how a fresh model begins, but this one begins from {init}; leave "
            "one of the two out"
        )
    texts = [""] * len(tokenizer.vocabulary)
    for id in tokenizer.vocabulary.ordinary:
        texts[id] = tokenizer.decode([id]).removesuffix("@@").strip()
    count = start_embeddings(model, texts, PretrainedEncoder(name))
    _logger.info("%s of %s embeddings begin as %s has them", f"{count:,}", f"{len(texts):,}", name)


def _stores(data: DataFolder) -> tuple[IdStore, IdStore]:
    first, second = data.languages
    return data.mono(first), data.mono(second)


def _start(
    model: FusedTransformer,
    init: Path,
    recipe: UnsupervisedRecipe,
    data: DataFolder,
    tokenizer: Tokenizer,
) -> WarmStart:
    """Start from a RUN, or from an XLM if ``init`` names none."""
    languages = recipe.data.languages
    if own_model_folder(str(init)) is not None:
        card = load_card(model_folder(init))
        if card.languages != languages:
            raise UserError(
                f"cannot start from {init}, which translates {card.directions}; this model "
                f"translates between {' and '.join(languages)}, in this order"
            )
        return start_from_run(model, init, recipe, data)
    if not init.exists() and init.is_absolute():
        raise UserError(f"cannot start from {init}: there is no such folder")
    symbols = tokenizer.vocabulary.symbols
    start = start_from_xlm(model, str(init), symbols, languages)
    if recipe.fusion is not None and recipe.fusion.start == "function-preserving":
        preserve_function(model, start.fresh)
    return start


def averaged(model: FusedTransformer, trainer: Trainer) -> FusedTransformer:
    """Return a model whose weights are the averages that a trainer keeps, at any time."""
    teacher = copy.deepcopy(model)  # autocast keeps the casts of weights that require gradients
    assert trainer.average is not None
    for name, parameter in teacher.named_parameters():
        parameter.data = trainer.average[name]
    return teacher


def both_ways(member: Member, device: torch.device) -> tuple[Translator, Translator]:
    """Return translators from language 0 into 1, and from 1 into 0."""
    first, second = member.card.languages
    return Translator([member.towards(second)], device), Translator([member.towards(first)], device)


def _uses(recipe: UnsupervisedRecipe, objective: Objective) -> bool:
    return any(weight for _, weight in points(getattr(recipe.objectives, objective)))


def _warn_of_small_batches(recipe: UnsupervisedRecipe, examples: Sentences) -> None:
    """Warn of updates over few tokens, which collapse more often than they learn."""
    objectives = examples.objectives_at(1)
    batches = examples.batches_of(objectives[0], recipe.train.batch_tokens, None)
    in_all = sum(map(examples.target_tokens, batches))
    tokens = in_all / len(batches) * len(objectives) * recipe.train.accumulate
    if tokens < _FEW_TOKENS:
        _logger.warning(
            "an update has about %.0f target tokens; unsupervised training needs %s or more "
            "(train.batch_tokens, train.accumulate)",
            tokens,
            f"{_FEW_TOKENS:,}",
        )


def _sample(store: IdStore, tokenizer: Tokenizer, count: int) -> list[str]:
    """Return some lines of monolingual text, evenly spread."""
    rows = np.unique(np.linspace(0, len(store) - 1, count).astype(np.int64))
    return [tokenizer.decode(store[row].tolist()) for row in rows.tolist()]


def _dev_lines(data: DataFolder) -> tuple[list[str], list[str]] | None:
    if "dev" not in data.splits:
        return None
    split = data.split("dev")
    pairs = list(read_pairs(split.source_text, split.target_text))
    return [pair.source for pair in pairs], [pair.target for pair in pairs]
