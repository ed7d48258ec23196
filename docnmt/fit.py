"""Set up the training of a context-aware model from a sentence-level RUN."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertfused.checkpoint import (
    ModelCard,
    WarmStart,
    hash_text_files,
    load_card,
    load_model,
    model_folder,
    model_tensors,
)
from bertfused.config import AnyRecipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import (
    DevSet,
    Setup,
    build_trainer,
    check_dictionaries,
    check_subwords,
    examples,
)
from bertfused.fit import set_up as set_up_sentences
from bertfused.loss import Loss, cross_entropy
from bertfused.pretrained import PretrainedEncoder
from bertfused.training import LossModule, Trainer, TranslationLoss, choose_precision
from bertfused.translate import Member
from docnmt.batches import ContextBatch, DocumentExamples, collate_in_context, predict
from docnmt.cadec import training_drafts
from docnmt.concatenation import ConcatenatedExamples, ConcatenatedSystem
from docnmt.config import ConcatenationConfig, DocumentRecipe, FrozenBaseConfig
from docnmt.context import ContextModel
from docnmt.models import build_context_model
from docnmt.on_base import ContextSystem
from docnmt.sequential import DocumentLineTranslator


class ContextLoss(LossModule):
    """The loss of context layers on sentences in their documents."""

    model: ContextModel

    def __init__(
        self,
        model: ContextModel,
        encoder: PretrainedEncoder | None,
        *,
        label_smoothing: float,
        mask_special: bool,
    ) -> None:
        super().__init__(model, encoder)
        self.label_smoothing = label_smoothing
        self.mask_special = mask_special

    def loss(self, batch: ContextBatch) -> Loss:
        by_output: dict[torch.nn.Linear, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        draft = None
        if self.model.wants_draft:
            draft = training_drafts(self.model.base, self.model.noise)
        for prediction in predict(
            self.model, self.encoder, batch, mask_special=self.mask_special, draft=draft
        ):
            mask = prediction.mask
            part = prediction.hidden[mask], prediction.target[mask]
            by_output.setdefault(prediction.output, []).append(part)
        losses = []
        for output, parts in by_output.items():
            hidden, target = (torch.cat(column) for column in zip(*parts, strict=True))
            losses.append(cross_entropy(hidden, output.weight, target, self.label_smoothing))
        return Loss(
            torch.stack([loss.total for loss in losses]).sum(),
            torch.stack([loss.nll for loss in losses]).sum(),
            sum(loss.tokens for loss in losses),
        )

    def collate(self, dataset: DocumentExamples, numbers: NDArray[np.int64]) -> ContextBatch:
        wanted = numbers.tolist()
        needed = sorted({*wanted, *(j for i in wanted for j in dataset.previous(i))})
        place = {i: number for number, i in enumerate(needed)}
        return collate_in_context(
            [dataset[i] for i in needed],
            [[place[j] for j in dataset.previous(i)] for i in wanted],
            [place[i] for i in wanted],
            None if self.encoder is None else self.encoder.bert_ids,
        )

    def begin_step(self, *key: int, drop_net: float) -> None:
        self.model.noise.reseed(*key)


def set_up(recipe: AnyRecipe, data: DataFolder, init: Path | None, device: torch.device) -> Setup:
    """Set up what a recipe of ``docnmt`` trains.

    Raises:
        UserError: If recipe, data and the RUN to start from do not fit together.
    """
    assert isinstance(recipe, DocumentRecipe)
    _check_documents(recipe, data)
    config = recipe.context
    if init is not None:
        _check_start(init, config)
    if config is None:
        return set_up_sentences(recipe, data, init, device)
    if isinstance(config, ConcatenationConfig):
        return _set_up_concatenation(recipe, config, data, init, device)
    if init is None:
        raise UserError(
            f"context.model = {config.model!r} is trained on top of a sentence-level RUN; "
            "name it with --init"
        )
    return _set_up_on_base(recipe, config, data, init, device)


def _set_up_on_base(
    recipe: DocumentRecipe,
    config: FrozenBaseConfig,
    data: DataFolder,
    init: Path,
    device: torch.device,
) -> Setup:
    check_subwords(recipe, data)
    check_dictionaries(init, data)
    trained = load_model(init)
    base_card = trained.card
    _check_base(recipe, base_card)
    torch.manual_seed(recipe.train.seed)
    encoder = trained.load_encoder(None if recipe.fusion is None else recipe.fusion.encoder)
    if encoder is not None:
        encoder.requires_grad_(False)  # one that was fine-tuned is part of the frozen base
    model = build_context_model(trained.model, base_card, config)
    card = base_card.model_copy(
        update={
            "context": config.model_dump(mode="json"),
            "documents": _documents_section(data, _checked_bert_previous(data, base_card)),
            "search": recipe.search,
            "text_files": hash_text_files(data.path),
        }
    )
    module = ContextLoss(
        model,
        encoder,
        label_smoothing=recipe.optim.label_smoothing,
        mask_special=card.fusion is not None and card.fusion.mask_special,
    ).to(device)
    start = _start_of(model)
    trainer = Trainer(
        module,
        recipe.optim,
        recipe.train,
        fresh=start.fresh,
        device=device,
        precision=choose_precision(recipe.train.precision, device),
    )
    training, dev = (
        _document_examples(
            recipe, data, name, encoder, config.sentences, only_in_context=name == "train"
        )
        for name in ("train", "dev")
    )
    member = Member(card, model.base, *data.tokenizers(), encoder)
    translator = DocumentLineTranslator(ContextSystem(model, member, device))
    resolved = recipe.model_copy(
        update={"model": card.model, "fusion": recipe.fusion or card.fusion}
    )
    validator = DevSet(resolved, trainer, data.split("dev"), dev, translator)
    return Setup(resolved, trainer, card, start, training, validator)


def _start_of(model: ContextModel) -> WarmStart:
    """Say which tensors are the base's and which are new."""
    names = list(model_tensors(model))
    loaded = tuple(name for name in names if name.startswith("base."))
    return WarmStart(loaded, tuple(name for name in names if name not in set(loaded)), ())


def _set_up_concatenation(
    recipe: DocumentRecipe,
    config: ConcatenationConfig,
    data: DataFolder,
    init: Path | None,
    device: torch.device,
) -> Setup:
    if recipe.fusion is not None:
        raise UserError("context.model = 'concatenation' is a plain model; leave [fusion] out")
    if init is not None:
        base = load_card(model_folder(init))
        if base.fusion is not None:
            raise UserError(
                f"cannot start from {init}, which is BERT-fused; context.model = 'concatenation' "
                "is a plain model"
            )
        _check_base(recipe, base)
        recipe = recipe.model_copy(update={"model": base.model})
    trainer, card, start = build_trainer(recipe, data, init, device)
    module = trainer.module
    assert isinstance(module, TranslationLoss)
    card = card.model_copy(
        update={
            "context": config.model_dump(mode="json"),
            "documents": _documents_section(data, 0),
        }
    )
    training, dev = (
        ConcatenatedExamples(
            _document_examples(recipe, data, name, None, config.sentences),
            config,
            card.model.max_positions,
        )
        for name in ("train", "dev")
    )
    member = Member(card, module.model, *data.tokenizers(), None)
    translator = DocumentLineTranslator(ConcatenatedSystem(member, config, device))
    validator = DevSet(recipe, trainer, data.split("dev"), dev, translator)
    return Setup(recipe, trainer, card, start, training, validator)


def _check_start(init: Path, config: FrozenBaseConfig | ConcatenationConfig | None) -> None:
    """Refuse to start from a context-aware model, but to go on with joined sentences."""
    context = load_card(model_folder(init)).context
    if context is None:
        return
    if not isinstance(config, ConcatenationConfig) or context["model"] != config.model:
        raise UserError(
            f"cannot start from {init}, which is context-aware itself; name a sentence-level RUN "
            "with --init"
        )


def _check_base(recipe: DocumentRecipe, base: ModelCard) -> None:
    """Refuse a recipe that describes another base than the RUN to start from.

    The pretrained encoder may have moved; that it is the same one is checked when it is opened.
    """
    fusion = base.fusion
    if fusion is not None and recipe.fusion is not None:
        fusion = fusion.model_copy(update={"encoder": recipe.fusion.encoder})
    for key, wanted in (("model", base.model), ("fusion", fusion)):
        given = getattr(recipe, key)
        if key not in recipe.model_fields_set or given == wanted:
            continue
        names = []
        if given is not None and wanted is not None:
            pairs = zip(given, wanted, strict=True)
            names = [f"{key}.{name}" for (name, ours), (_, theirs) in pairs if ours != theirs]
        raise UserError(
            f"{', '.join(names) or key}: not as in the RUN to start from, whose [{key}] is taken "
            f"over; leave [{key}] out of the recipe"
        )


def _check_documents(recipe: DocumentRecipe, data: DataFolder) -> None:
    """Refuse a recipe that says other things of the documents than DATA were made with."""
    made = None if data.report is None else data.report.documents
    if made is None:
        return
    wanted = recipe.documents.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for key in wanted.keys() & made.keys():
        if wanted[key] != made[key]:
            raise UserError(
                f"documents.{key} is {wanted[key]!r}, but {data.path} was prepared with "
                f"{made[key]!r}"
            )


def _documents_section(data: DataFolder, bert_previous: int) -> dict[str, Any]:
    """Return how text to translate is read: as the data were, with the base's own BERT input."""
    documents = None if data.report is None else data.report.documents
    if documents is None:
        raise UserError(f"{data.path} was prepared sentence by sentence; prepare it with docnmt")
    return {**documents, "previous": bert_previous}


def _checked_bert_previous(data: DataFolder, base: ModelCard) -> int:
    """Return how many sentences the base's pretrained encoder reads before the current one."""
    if base.fusion is None:
        return 0
    wanted = 0 if base.documents is None else int(base.documents["previous"])
    documents = None if data.report is None else data.report.documents
    made = 0 if documents is None else documents["previous"]
    if wanted != made:
        raise UserError(
            f"{data.path} was prepared with documents.previous = {made}, but the RUN to start "
            f"from was trained with {wanted}"
        )
    return wanted


def _document_examples(
    recipe: DocumentRecipe,
    data: DataFolder,
    name: str,
    encoder: PretrainedEncoder | None,
    sentences: int,
    *,
    only_in_context: bool = False,
) -> DocumentExamples:
    docids = data.split(name).docids
    if docids is None:
        raise UserError(f"the {name} set of {data.path} has no documents; prepare it with docnmt")
    weights = recipe.weights if name == "train" else ()
    split = examples(data, name, encoder, weights)
    found = DocumentExamples(split, docids, sentences, only_in_context=only_in_context)
    if name == "train" and not found.have_context:
        raise UserError(f"no sentence of {data.path} has a previous one in its document")
    return found
