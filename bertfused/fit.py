"""Train a model from a recipe: what is built, what happens at intervals, what is left behind."""

import hashlib
import json
import logging
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bertfused import __version__
from bertfused.batch import Corpora, Example, drawn_batches
from bertfused.checkpoint import (
    FINETUNED,
    WEIGHTS,
    ModelCard,
    WarmStart,
    encoder_card,
    hash_text_files,
    load_card,
    model_folder,
    open_encoder,
    warm_start,
)
from bertfused.config import AnyRecipe, FusionConfig, Recipe, RunRecipe
from bertfused.data import DataFolder, Split
from bertfused.errors import UserError
from bertfused.features import FeatureCache, open_cache
from bertfused.metrics import bleu
from bertfused.model import FusedTransformer
from bertfused.pretrained import PretrainedEncoder
from bertfused.run import Card, RunFolder, log_to, processes, save_evaluated
from bertfused.subwords import load_tokenizer
from bertfused.text import make_folder, only_writer, read_lines, replace_file, sha256_file
from bertfused.training import (
    Dataset,
    LossModule,
    Steps,
    Trainer,
    TrainState,
    TranslationLoss,
    Update,
    choose_precision,
    steps,
    train,
)
from bertfused.translate import (
    LineTranslator,
    Member,
    SourceLine,
    Translator,
    choose_device,
)

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class Examples:
    """A split as the training loop reads it, with cached encoder states where they exist.

    Args:
        corpora: What it consists of, if some of it is passed through more often than the rest.
    """

    def __init__(
        self, split: Split, cache: FeatureCache | None, corpora: Corpora | None = None
    ) -> None:
        self._split = split
        self._cache = cache
        self.corpora = corpora
        self.lengths: Sequence[NDArray[np.integer[Any]]] = split.lengths

    def __len__(self) -> int:
        return len(self._split)

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[NDArray[np.int64]]:
        return drawn_batches(self.lengths, batch_tokens, generator, self.corpora)

    def __getitem__(self, i: int) -> Example:
        split = self._split
        return Example(
            split.source[i],
            split.target[i],
            None if split.bert is None else split.bert[i],
            None if self._cache is None else self._cache[i],
        )


@dataclass(frozen=True)
class Validation:
    """What a model is worth.

    Attributes:
        value: What the best model is best in; higher is better.
        text: What was found, for people.
        values: The same to be logged; texts among them are signatures of scores.
        problem: Why training has no use any more, if so.
    """

    value: float
    text: str
    values: dict[str, float | str]
    problem: str | None = None


@runtime_checkable
class Validator(Protocol):
    """Evaluates a model while it is trained."""

    @property
    def translates(self) -> bool:
        """Whether it needs the dev set's lines."""
        ...

    @property
    def criterion(self) -> str:
        """What the best model is best in, for people."""
        ...

    def validate(self, step: int, lines: Sequence[SourceLine]) -> Validation:
        """Evaluate the weights as they are, and the translations of the dev set's lines."""
        ...


@dataclass(frozen=True)
class DevSet:
    """Validation by the loss on a dev set and the BLEU of its translations."""

    recipe: Recipe
    trainer: Trainer
    split: Split
    examples: Dataset
    translator: LineTranslator

    @property
    def translates(self) -> bool:
        return self.recipe.train.validate_bleu

    @property
    def criterion(self) -> str:
        return f"dev {self.recipe.train.select}"

    def validate(self, step: int, lines: Sequence[SourceLine]) -> Validation:
        """Find what ``evaluate`` would."""
        total = self.trainer.mean_loss(self.examples)
        loss, nll = float(total.total) / total.tokens, float(total.nll) / total.tokens
        perplexity = math.exp(min(nll, 50))
        values: dict[str, float | str] = {
            "valid_loss": loss,
            "valid_nll": nll,
            "valid_perplexity": perplexity,
        }
        value, text = -loss, f"dev loss {loss:.4f}, perplexity {perplexity:.2f}"
        if lines:
            translations = self.translator.translate(lines, self.recipe.search)
            references = list(read_lines(self.split.target_text))
            score = bleu([translation.text for translation in translations], references)
            values |= {"valid_bleu": score.value, "valid_signature": score.signature}
            text += f", BLEU {score.value:.2f}"
            value = score.value if self.recipe.train.select == "bleu" else value
        return Validation(value, text, values)


@runtime_checkable
class PreparedData(Protocol):
    """A DATA folder, whatever lies in it besides its report, ``data.toml``."""

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class Setup:
    """What a training consists of.

    Attributes:
        recipe: The recipe with all that the RUN to start from decides.
        card: Describes the model, and saves it.
        steps: Says which examples an update is made of.
        hashes: Of what is read besides DATA's own files, such as "words_sha256".
    """

    recipe: RunRecipe
    trainer: Trainer
    card: Card
    start: WarmStart | None
    train: Dataset
    validator: Validator
    steps: Steps = steps
    hashes: Mapping[str, str] = field(default_factory=dict)


# Takes a recipe and a DATA folder of the mode, the RUN to start from, and a device.
SetUp = Callable[[Any, Any, Path | None, torch.device], Setup]


def set_up(recipe: AnyRecipe, data: DataFolder, init: Path | None, device: torch.device) -> Setup:
    """Set up the training of a sentence-level model, plain or fused.

    Raises:
        UserError: If recipe, data and the RUN to start from do not fit together.
    """
    assert isinstance(recipe, Recipe)
    if init is not None and load_card(model_folder(init)).context is not None:
        raise UserError(
            f"cannot start from {init}, which is a context-aware model; name a sentence-level RUN"
        )
    trainer, card, start = build_trainer(recipe, data, init, device)
    module = trainer.module
    assert isinstance(module, TranslationLoss)
    member = Member(card, module.model, *data.tokenizers(), module.encoder)
    dev = DevSet(
        recipe,
        trainer,
        data.split("dev"),
        examples(data, "dev", module.encoder),
        Translator([member], device),
    )
    training = examples(data, "train", module.encoder, recipe.weights)
    return Setup(recipe, trainer, card, start, training, dev)


def train_run(
    recipe: RunRecipe,
    data: PreparedData,
    out: Path,
    dev_lines: Callable[[], Iterable[SourceLine]],
    *,
    init: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    set_up: SetUp = set_up,
    on_update: Callable[[TrainState, Update], None] = lambda state, update: None,
) -> TrainState:
    """Train a model: the whole of ``bertfused train``.

    Args:
        dev_lines: Gives the dev set's source lines, with their contexts if there are any.
        init: RUN whose weights to start from.
        resume: Go on from the newest checkpoint in ``out``.
        set_up: Builds what is trained.
        on_update: Called after every update, for a progress bar.

    Raises:
        UserError: If data, recipe and warm start do not fit together.
    """
    with processes() as (is_first, place):
        run = RunFolder(out, is_first=is_first)
        facts = _facts(data, init)
        is_resumed = resume and (out / "config.toml").exists()
        if is_first and not is_resumed:
            run.check_new()
        # Built before anything is written: a recipe that does not fit leaves no folder behind.
        setup = set_up(recipe, data, init, place or choose_device(device))
        recipe, facts = setup.recipe, {**facts, **setup.hashes}
        if is_resumed and is_first:
            run.check_config(recipe, facts)
        session = Session(recipe, data, run, dev_lines, init, setup)
        del setup  # the session's own is the last: see below
        if is_first:
            make_folder(out)
        with only_writer(out) if is_first else nullcontext():
            if is_resumed and is_first:
                run.write_config(recipe)
            elif is_first:
                run.create(recipe, facts)
            if is_first:
                run.remove_leftovers()
            if dist.is_initialized():
                dist.barrier()  # the others look into the folder only once it is as it should be
            with log_to(out / "log.txt" if is_first else None):
                state = run.resume(session.trainer) if resume else TrainState()
                session.go(state, on_update)
        del session  # while the processes are still joined: see run.processes
        return state


def build_trainer(
    recipe: AnyRecipe, data: DataFolder, init: Path | None = None, device: torch.device = _CPU
) -> tuple[Trainer, ModelCard, WarmStart | None]:
    """Build model, pretrained encoder and optimiser as a recipe asks, for a DATA folder."""
    model, encoder, card = build_network(recipe, data)
    start = None if init is None else start_from_run(model, init, recipe, data)
    module = translation_loss(recipe, model, encoder)
    return make_trainer(module, recipe, start, device), card, start


def translation_loss(
    recipe: AnyRecipe, model: FusedTransformer, encoder: PretrainedEncoder | None
) -> TranslationLoss:
    """Put the loss on pairs around a model, as a recipe asks."""
    return TranslationLoss(
        model,
        encoder,
        label_smoothing=recipe.optim.label_smoothing,
        mask_special=recipe.fusion is not None and recipe.fusion.mask_special,
    )


def build_network(
    recipe: AnyRecipe, data: DataFolder, languages: tuple[str, ...] = ()
) -> tuple[FusedTransformer, PretrainedEncoder | None, ModelCard]:
    """Build a model with fresh weights, and open the pretrained encoder.

    Args:
        languages: Those of a model that translates between them in any direction.
    """
    check_subwords(recipe, data)
    torch.manual_seed(recipe.train.seed)
    encoder = None
    if recipe.fusion is not None:
        encoder = open_encoder(recipe.fusion, languages=languages or data.languages[:1])
    card = _card(recipe, data, encoder).model_copy(update={"languages": languages})
    return card.build(), encoder, card


def start_from_run(
    model: FusedTransformer, init: Path, recipe: AnyRecipe, data: DataFolder
) -> WarmStart:
    """Take over the weights of a trained model; raises as ``warm_start`` does."""
    _check_finetuned(init, recipe.fusion)
    check_dictionaries(init, data)
    return warm_start(model, init, recipe.fusion)


def make_trainer(
    module: LossModule, recipe: AnyRecipe, start: WarmStart | None, device: torch.device
) -> Trainer:
    """Put an optimiser around a loss, as a recipe asks."""
    fusion = recipe.fusion
    return Trainer(
        module.to(device),
        recipe.optim,
        recipe.train,
        drop_net=(fusion.drop_net, fusion.drop_net_warmup_steps) if fusion else (0.0, 0),
        fresh=start.fresh if start is not None else (),
        device=device,
        precision=choose_precision(recipe.train.precision, device),
    )


def _check_finetuned(init: Path, fusion: FusionConfig | None) -> None:
    """Refuse to go on from a fused model with another encoder than the one trained with it."""
    finetuned = (model_folder(init) / FINETUNED).resolve()
    if fusion is not None and finetuned.is_dir() and Path(fusion.encoder).resolve() != finetuned:
        raise UserError(
            f"cannot start from {init}: its encoder was fine-tuned; "
            f"set fusion.encoder = '{finetuned}'"
        )


def check_subwords(recipe: AnyRecipe, data: DataFolder) -> None:
    """Refuse a recipe that asks for other subwords than the data were made with."""
    made = {} if data.report is None else data.report.subwords
    asked = recipe.subwords.model_dump(mode="json", exclude_unset=True)
    if made.get("kind") == "words":
        asked.pop("size", None)  # unused there
    for key in made.keys() & asked.keys():
        if asked[key] != made[key]:
            raise UserError(
                f"{data.path} was prepared with subwords.{key} = {made[key]!r}, but the recipe "
                f"says {asked[key]!r}"
            )


def check_dictionaries(init: Path, data: DataFolder) -> None:
    """Refuse to go on from a model to which the numbers in the data mean other symbols."""
    folder = model_folder(init)
    card = load_card(folder)
    for language, tokenizer in zip((card.source, card.target), data.tokenizers(), strict=True):
        if load_tokenizer(folder, language).vocabulary.symbols != tokenizer.vocabulary.symbols:
            raise UserError(
                f"cannot start from {init}: its dict.{language}.txt is not that of {data.path}; "
                f"prepare the data with subwords.reuse = '{folder}'"
            )


class Session:
    """One call of ``train_run``: what is built from the recipe, and what happens at intervals."""

    def __init__(
        self,
        recipe: RunRecipe,
        data: PreparedData,
        run: RunFolder,
        dev_lines: Callable[[], Iterable[SourceLine]],
        init: Path | None,
        setup: Setup,
    ) -> None:
        self.recipe, self.data, self.run, self.init = recipe, data, run, init
        self.trainer, self.card, self.start = setup.trainer, setup.card, setup.start
        self.train_examples, self.steps, self.validator = setup.train, setup.steps, setup.validator
        self.dev_lines = list(dev_lines()) if setup.validator.translates else []
        self.values: dict[int, float] = {}
        self.window: list[tuple[Update, float]] = []

    def go(self, state: TrainState, on_update: Callable[[TrainState, Update], None]) -> None:
        """Train, validating before the first update of a warm start too."""
        if self.run.is_first:
            trained, frozen = _sizes(self.trainer)
            _logger.info(
                "training %s parameters%s on %s in %s, %s examples",
                f"{trained:,}",
                f" ({frozen:,} more are frozen)" if frozen else "",
                self.trainer.device,
                self.trainer.precision,
                f"{len(self.train_examples):,}",
            )
        if self.start is not None and state.step == 0:
            _logger.info("warm start from %s: %s", self.init, self.start)
            self._report(state, self.validate(state.step))

        def log(state: TrainState, update: Update, seconds: float) -> None:
            self._log(state, update, seconds)
            on_update(state, update)

        train(
            self.trainer,
            self.train_examples,
            state,
            log=log,
            checkpoint=self.checkpoint,
            steps=self.steps,
        )
        self._finish(state)

    def _log(self, state: TrainState, update: Update, seconds: float) -> None:
        if not update.is_finite:
            _logger.warning("step %d left out: its loss or gradient is not finite", state.step)
        self.window.append((update, seconds))
        if state.step % self.recipe.train.log_every:
            return
        tokens = sum(past.tokens for past, _ in self.window)
        nll = sum(past.nll * past.tokens for past, _ in self.window) / tokens
        values = {
            "epoch": state.place.epoch,
            "nll": nll,
            "perplexity": math.exp(min(nll, 50)),
            "lr": update.lr,
            "gradient_norm": update.norm,
            "padding": sum(past.padding for past, _ in self.window) / len(self.window),
            "tokens_per_second": tokens / sum(seconds for _, seconds in self.window),
            "seconds": state.seconds,
            **self.trainer.module.take_values(),
        }
        self.window.clear()
        self.run.log(state.step, values)
        _logger.debug(
            "step %d: perplexity %.2f, learning rate %.2g, %.0f target tokens/s",
            *(state.step, values["perplexity"], values["lr"], values["tokens_per_second"]),
        )

    @torch.no_grad()
    def validate(self, step: int) -> Validation:
        """Evaluate the weights that would be kept."""
        with self.trainer.evaluation():
            return self.validator.validate(step, self.dev_lines)

    def checkpoint(self, state: TrainState) -> None:
        """Validate, keep the best model, save; the first process decides for all."""
        if self.run.is_first:
            validation = self.validate(state.step)
            if validation.value > state.best:
                state.best, state.best_step, state.stale = validation.value, state.step, 0
            else:
                state.stale += 1
            self._report(state, validation)
            if state.best_step == state.step:
                save_evaluated(self.run.path / "model", self.trainer, self.card, self.data.path)
            self.values = self._known_values()
            self.run.save(self.trainer, state, self.card, self.data.path, self._kept())
            if validation.problem is not None:
                self._write_report(state)
                raise UserError(f"step {state.step}: {validation.problem}")
        self.window.clear()  # a resumed run begins here, and must log the same means
        self.trainer.module.take_values()
        if dist.is_initialized():
            decided: list[Any] = [state.best, state.best_step, state.stale]
            dist.broadcast_object_list(decided)
            state.best, state.best_step, state.stale = decided

    def _known_values(self) -> dict[int, float]:
        """Return the selection metric of every checkpoint on disk, those of a resumed run too."""
        logged = {}
        if self.run.metrics.exists():
            for line in read_lines(self.run.metrics):
                record = json.loads(line)
                if "valid_value" in record:
                    logged[record["step"]] = record["valid_value"]
        return logged

    def _kept(self) -> set[int]:
        steps = sorted({*self.run.checkpoints(), *list(self.values)[-1:]})
        train = self.recipe.train
        best = sorted(steps, key=lambda step: -self.values.get(step, -math.inf))[: train.keep_best]
        return {*steps[-train.keep_last :], *best}

    def _report(self, state: TrainState, validation: Validation) -> None:
        best = ", the best so far" if state.step and state.best_step == state.step else ""
        _logger.info("step %d: %s%s", state.step, validation.text, best)
        self.run.log(state.step, validation.values | {"valid_value": validation.value})

    def _finish(self, state: TrainState) -> None:
        if not self.run.is_first:
            return
        self._write_report(state)
        model = self.run.path / "model"
        if not state.step:
            _logger.warning("no update was made: there is no model")
        elif not (model / WEIGHTS).is_file():
            raise UserError(
                f"{model} is not there: it was taken away, or no validation gave a number"
            )
        else:
            _logger.info("the best model, of step %d, is %s", state.best_step, model)

    def _write_report(self, state: TrainState) -> None:
        with replace_file(self.run.path / "report.md") as handle:
            handle.write(_report(self, state).encode())


def _sizes(trainer: Trainer) -> tuple[int, int]:
    """Count the parameters that are trained, and the others of the model."""
    trained = sum(parameter.numel() for parameter in trainer.parameters.values())
    whole = sum(parameter.numel() for parameter in trainer.module.model.parameters())
    return trained, max(whole - trained, 0)  # a fine-tuned encoder is trained beside the model


def _report(session: Session, state: TrainState) -> str:
    """Write the end of a run as one page of Markdown."""
    lines = [f"# {session.run.path.name}", ""]
    trained, frozen = _sizes(session.trainer)
    lines += [
        f"{session.card.directions}, {trained:,} parameters trained, {frozen:,} frozen, "
        f"{session.card.kind}",
        "",
        f"- {state.step:,} updates, {state.place.epoch} whole epochs, {state.seconds:,.0f} s in "
        f"updates, {state.skipped} left out",
        f"- best: step {state.best_step}, chosen by {session.validator.criterion}",
    ]
    if session.start is not None:
        lines += [f"- warm start: {line}" for line in str(session.start).splitlines()[:1]]
    records = []
    if session.run.metrics.exists():
        records = [json.loads(line) for line in read_lines(session.run.metrics)]
    validations = [record for record in records if "valid_value" in record]
    return "\n".join([*lines, "", *_validation_table(validations), ""])


def _validation_table(validations: Sequence[dict[str, Any]]) -> list[str]:
    """Lay out what was logged of validations; the signatures of scores stand below."""
    logged = {key: value for record in validations for key, value in record.items()}
    keys = [key for key in logged if key.startswith("valid_") and key != "valid_value"]
    numbers = [key for key in keys if not isinstance(logged[key], str)]
    names = [key.removeprefix("valid_").replace("_", " ") for key in numbers]
    lines = [f"| step | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for record in validations:
        cells = [f"{record[key]:.4g}" if key in record else "" for key in numbers]
        lines.append(f"| {record['step']} | {' | '.join(cells)} |")
    texts = {logged[key]: None for key in keys if key not in numbers}
    return [*lines, *(["", *texts] if texts else [])]


def examples(
    data: DataFolder,
    name: str,
    encoder: PretrainedEncoder | None,
    weights: Sequence[float] = (),
) -> Examples:
    """Open a split for training or validation, with its feature cache if there is one.

    Args:
        weights: How often an epoch passes through each corpus of the split; once if not given.

    Raises:
        UserError: If the encoder's ids are missing or were made by another tokenizer, or there are
            weights of other corpora than the split has.
    """
    split = data.split(name)
    corpora = None
    if any(weight != 1 for weight in weights):
        sizes = data.report.splits[name].corpora if data.report is not None else ()
        if len(sizes) != len(weights):
            raise UserError(
                f"the recipe gives weights to {len(weights)} corpora, but {data.path} says how "
                f"large each is of {len(sizes)}; prepare it anew"
            )
        corpora = Corpora(sizes, weights)
    if encoder is None:
        return Examples(replace(split, bert=None), None, corpora)
    if split.bert is None:
        raise UserError(
            f"{data.path} holds no ids for a pretrained encoder; prepare it with a [fusion] section"
        )
    made_with = data.report.encoder if data.report is not None else None
    if made_with is not None and made_with.fingerprint != encoder.wordpieces.fingerprint:
        raise UserError(
            f"{data.path} was prepared for the encoder {made_with.name}, whose tokenizer is not "
            f"that of {encoder.name}"
        )
    cache = None if encoder.finetune else open_cache(data.path, encoder, split.prefix.name)
    if cache is not None and len(cache) != len(split):
        raise UserError(
            f"the feature cache of {split.prefix} has {len(cache):,} examples, not {len(split):,}"
        )
    return Examples(split, cache, corpora)


def _card(recipe: AnyRecipe, data: DataFolder, encoder: PretrainedEncoder | None) -> ModelCard:
    source, target = data.languages
    source_size, target_size = (len(tokenizer.vocabulary) for tokenizer in data.tokenizers())
    return ModelCard(
        source=source,
        target=target,
        source_size=source_size,
        target_size=target_size,
        model=recipe.model,
        fusion=recipe.fusion,
        encoder=None if encoder is None else encoder_card(encoder),
        search=recipe.search,
        documents=None if data.report is None else data.report.documents,
        text_files=hash_text_files(data.path),
    )


def _facts(data: PreparedData, init: Path | None) -> dict[str, Any]:
    """Collect what a run's numbers depend on besides its recipe."""
    report = data.path / "data.toml"
    return {
        "data": str(data.path.resolve()),
        "data_sha256": sha256_file(report) if report.exists() else None,
        "init": None if init is None else str(init.resolve() if init.exists() else init),
        "init_sha256": None if init is None else _weights_sha256(init),
        "code": {"version": __version__, "commit": _commit()},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": sys.argv[1:],
    }


def _weights_sha256(init: Path) -> str:
    """Return the hash of a model's weights; of one that is on a hub, that of its name."""
    folders = (init / "model", init)
    found = next((own / WEIGHTS for own in folders if (own / WEIGHTS).is_file()), None)
    if found is not None:
        return sha256_file(found)
    return hashlib.sha256(str(init).encode()).hexdigest()


def _commit() -> str | None:
    """Return the commit of the code, with a "+" if it was changed since; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
