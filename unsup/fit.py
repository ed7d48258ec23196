"""Set up the training of an unsupervised model."""

import copy
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bertfused.checkpoint import WarmStart, load_card, model_folder, preserve_function
from bertfused.config import AnyRecipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import Setup, build_network, make_trainer, start_from_run
from bertfused.model import FusedTransformer
from bertfused.store import IdStore
from bertfused.subwords import Tokenizer
from bertfused.text import read_lines
from bertfused.training import Place, Trainer, TranslationLoss
from bertfused.translate import Member, Translator
from bertfused.vocab import MASK
from bertfused.wordpieces import own_model_folder
from unsup.config import Objective, ObjectivesConfig, UnsupervisedRecipe, points
from unsup.noise import WordNoise
from unsup.objectives import BackTranslator, Sentences, UnsupervisedLoss, steps
from unsup.prepare import word_translations
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
    languages, tokenizer = recipe.data.languages, _shared_tokenizer(data)
    if languages != data.languages:
        raise UserError(
            f"{data.path} is of {' and '.join(data.languages)}, in this order, but the recipe of "
            f"{' and '.join(languages)}"
        )
    if recipe.validation.select == "bleu" and "dev" not in data.splits:
        raise UserError(f"validation.select is 'bleu', but {data.path} has no data.dev")
    model, encoder, card = build_network(recipe, data, languages)
    start = None if init is None else _start(model, init, recipe, data, tokenizer)
    fusion = recipe.fusion
    pairs = TranslationLoss(
        model,
        encoder,
        label_smoothing=recipe.optim.label_smoothing,
        mask_special=fusion is not None and fusion.mask_special,
    )
    noise = WordNoise(tokenizer, recipe.noise)
    module = UnsupervisedLoss(pairs, noise, recipe.objectives, tokenizer)
    trainer = make_trainer(module, recipe, start, device)
    member = Member(card, model, tokenizer, tokenizer, encoder)
    teacher = member
    if recipe.objectives.teacher == "average":
        teacher = replace(member, model=averaged(model, trainer))
    module.translator = BackTranslator(
        Translator([teacher], device), recipe.generate, trainer.precision
    )
    stores = data.mono(languages[0]), data.mono(languages[1])
    words = word_translations(data) if _uses(recipe, "words") else None
    examples = Sentences(stores, words, recipe.objectives, recipe.noise.mass)
    _warn_of_small_batches(recipe, examples)
    lines = recipe.validation.lines
    validator = RoundTrip(
        recipe.validation,
        languages,
        both_ways(member, device),
        LanguageIdentity(stores, tokenizer),
        (_sample(stores[0], tokenizer, lines), _sample(stores[1], tokenizer, lines)),
        _dev_lines(data),
        recipe.generate.model_copy(update={"sampling": None}),
    )
    return Setup(recipe, trainer, card, start, examples, validator, steps)


def set_up_mass(
    recipe: AnyRecipe, data: DataFolder, init: Path | None, device: torch.device
) -> Setup:
    """Set up the pretraining of a model by MASS, which ``train`` starts from as from any RUN."""
    assert isinstance(recipe, UnsupervisedRecipe)
    check_held_out(recipe, data)
    objectives = ObjectivesConfig(denoising="0", backtranslation="0", mass="1")
    recipe = recipe.model_copy(update={"objectives": objectives, "fusion": None})
    setup = set_up(recipe, data, init, device)
    first, second = recipe.data.languages
    stores, held_out = (data.mono(first), data.mono(second)), recipe.pretrain.valid_lines
    training, valid = (
        (stores[0].part(rows), stores[1].part(rows))
        for rows in (slice(-held_out), slice(-held_out, None))
    )
    return replace(
        setup,
        train=Sentences(training, None, objectives, recipe.noise.mass),
        validator=HeldOutText(
            setup.trainer, {"both": Sentences(valid, None, objectives, recipe.noise.mass)}
        ),
    )


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
    forward, backward = member.towards(first, second), member.towards(second, first)
    return Translator([forward], device), Translator([backward], device)


def _shared_tokenizer(data: DataFolder) -> Tokenizer:
    first, second = data.tokenizers()
    if first.sha256 != second.sha256:
        raise UserError(f"the languages of {data.path} have subwords of their own, not shared ones")
    if MASK not in first.vocabulary.tags:
        raise UserError(f"the dictionary of {data.path} has no {MASK!r}; prepare it with unsup")
    return first


def _uses(recipe: UnsupervisedRecipe, objective: Objective) -> bool:
    return any(weight for _, weight in points(getattr(recipe.objectives, objective)))


def _warn_of_small_batches(recipe: UnsupervisedRecipe, examples: Sentences) -> None:
    """Warn of updates over few tokens, which collapse more often than they learn."""
    step = next(
        steps(
            examples,
            batch_tokens=recipe.train.batch_tokens,
            accumulate=recipe.train.accumulate,
            seed=recipe.train.seed,
            start=Place(),
        )
    )
    if step.target_tokens < _FEW_TOKENS:
        _logger.warning(
            "an update has about %d target tokens; unsupervised training needs %s or more "
            "(train.batch_tokens, train.accumulate)",
            step.target_tokens,
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
    return list(read_lines(split.source_text)), list(read_lines(split.target_text))
