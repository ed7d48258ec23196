"""Set up the training of BERTGEN: what it begins from, and what it is given."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from bertfused.checkpoint import WEIGHTS, WarmStart, model_tensors, read_tensors
from bertfused.errors import UserError
from bertfused.fit import Setup
from bertfused.pretrained import load_masked_lm, load_pretrained, resolve_encoder
from bertfused.training import Trainer, choose_precision
from bertgen.card import GenCard, Sizes, load_card, load_weights
from bertgen.config import GenRecipe
from bertgen.data import GenData
from bertgen.model import BertGen
from bertgen.official import from_bert, visual_parts
from bertgen.training import Items, MaskLoss, TaskLosses, steps

_logger = logging.getLogger(__name__)


def set_up(recipe: GenRecipe, data: GenData, init: Path | None, device: torch.device) -> Setup:
    """Set up a training.

    Raises:
        UserError: If recipe, data and what it begins from do not fit together.
    """
    _check_data(recipe, data)
    card = _card(recipe, data)
    torch.manual_seed(recipe.train.seed)
    model = card.build()
    start: WarmStart | None = None
    fresh: tuple[str, ...] = ()
    if init is None:
        fresh = start_from_bert(model, recipe.model.encoder, recipe.model.visual).fresh
    else:
        start = _start_from_run(model, init, card)
    symbols = data.report.symbols.symbols
    attention = recipe.model.attention
    module = MaskLoss(model, symbols, attention, recipe.optim.label_smoothing).to(device)
    trainer = Trainer(
        module,
        recipe.optim,
        recipe.train,
        fresh=fresh,
        device=device,
        precision=choose_precision(recipe.train.precision, device),
    )
    into = data.report.symbols.into
    trained = [task for task in recipe.data.tasks if task.train]
    training = Items(
        [(data.split(task.name, "train"), into[task.target]) for task in trained],
        data.images,
        attention,
        recipe.train.copies,
    )
    dev = {
        task.name: Items(
            [(data.split(task.name, "dev"), into[task.target])],
            data.images,
            attention,
            rows=recipe.train.valid_lines,
            longest=data.report.max_wordpieces,
        )
        for task in trained
        if task.dev is not None
    }
    dev = {task: items for task, items in dev.items() if len(items)}
    if not dev:
        raise UserError("no task that is trained has a dev set with lines that are not too long")
    return Setup(recipe, trainer, card, start, training, TaskLosses(trainer, dev), steps)


def start_from_bert(model: BertGen, name: str, visual: Path | None = None) -> WarmStart:
    """Begin with the weights of a BERT, and of a VL-BERT; what they have not stays fresh.

    Args:
        visual: State dict of the VL-BERT.

    Raises:
        UserError: If its widths are others.
    """
    ours = model_tensors(model)
    theirs = from_bert(load_masked_lm(resolve_encoder(name)))
    if visual is not None:
        theirs |= visual_parts(visual)
    loaded = []
    for tensor_name, tensor in theirs.items():
        if tensor_name not in ours:
            continue  # upper layers that the recipe leaves out
        own = ours[tensor_name]
        rows = tensor[: len(own)]  # of words, types and positions there may be more on either side
        if rows.shape[1:] != own.shape[1:]:
            raise UserError(
                f"{tensor_name} is {tuple(tensor.shape)} in {visual or name} and "
                f"{tuple(own.shape)} here"
            )
        own[: len(rows)].copy_(rows)
        loaded.append(tensor_name)
    fresh = tuple(own for own in ours if own not in loaded)
    start = WarmStart(tuple(loaded), fresh, ())
    _logger.info("from %s: %s", name, start)
    return start


def _start_from_run(model: BertGen, init: Path, card: GenCard) -> WarmStart:
    folder, other = load_card(init)
    if other.symbols != card.symbols or other.tokenizer != card.tokenizer:
        raise UserError(f"cannot start from {init}: its tokenizer or its languages are others")
    if other.attention != card.attention:
        raise UserError(
            f"cannot start from {init}: it was trained with {other.attention} attention; weights "
            "of one mode do not work in the other"
        )
    tensors: dict[str, Tensor] = read_tensors(folder / WEIGHTS)
    load_weights(model, tensors, f"cannot start from {init}")
    return WarmStart(tuple(tensors), (), ())


def _card(recipe: GenRecipe, data: GenData) -> GenCard:
    config = load_pretrained("config", resolve_encoder(recipe.model.encoder))
    depth = config.num_hidden_layers
    layers = depth if recipe.model.layers is None else recipe.model.layers
    if layers > depth:
        raise UserError(f"model.layers is {layers}, but {recipe.model.encoder} has {depth}")
    if config.hidden_act != "gelu":
        raise UserError(
            f"{recipe.model.encoder} has the activation {config.hidden_act!r}, not gelu"
        )
    sizes = Sizes(
        vocab_size=data.report.symbols.vocab_size,
        model_dim=config.hidden_size,
        layers=layers,
        heads=config.num_attention_heads,
        ffn_dim=config.intermediate_size,
        feature_dim=data.report.feature_dim,
        max_positions=config.max_position_embeddings,
        dropout=recipe.model.dropout,
        attention_dropout=recipe.model.attention_dropout,
    )
    return GenCard(
        sizes=sizes,
        attention=recipe.model.attention,
        symbols=data.report.symbols,
        tokenizer=data.report.tokenizer,
        tasks=tuple(task.name for task in recipe.data.tasks if task.train),
        search=recipe.search,
    )


def _check_data(recipe: GenRecipe, data: GenData) -> None:
    """Refuse a recipe that trains on what the folder has not."""
    from bertgen.prepare import describe_tasks

    for name, about in describe_tasks(recipe.data).items():
        if data.report.tasks.get(name) != about:
            raise UserError(f"{data.path} was prepared without task {name!r}, or with another one")
    # The longest text, its mask and symbols, regions and [END] need a position each at most.
    longest = 2 * data.report.max_wordpieces + 7
    config = load_pretrained("config", resolve_encoder(recipe.model.encoder))
    if longest > config.max_position_embeddings:
        raise UserError(
            f"lines of {data.report.max_wordpieces} wordpieces (data.max_wordpieces) take up to "
            f"{longest} positions, but {recipe.model.encoder} has {config.max_position_embeddings}"
        )
