"""A model of BERTGEN on disk: ``bertgen.json``, the weights, and the tokenizer.

::

    model/bertgen.json         what the weights are
    model/model.safetensors    the weights, word embeddings included
    model/tokenizer/           of the BERT that training began from
"""

import json
import shutil
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from bertfused import __version__
from bertfused.checkpoint import (
    WEIGHTS,
    copy_tensors,
    model_tensors,
    new_folder,
    read_tensors,
    write_tensors,
)
from bertfused.config import Section, check_recipe
from bertfused.errors import UserError
from bertfused.pretrained import PretrainedEncoder, TransformersWordpieces, load_tokenizer
from bertfused.text import make_folder, replace_file
from bertgen.config import GenSearchConfig
from bertgen.data import TOKENIZER, SymbolsReport
from bertgen.model import BertGen

CARD = "bertgen.json"


class Sizes(Section):
    """The sizes of the network."""

    vocab_size: int
    model_dim: int
    layers: int
    heads: int
    ffn_dim: int
    feature_dim: int
    max_positions: int
    dropout: float = 0.1
    attention_dropout: float = 0.1


class GenCard(Section):
    """What a model folder holds; a ``bertfused.run.Card``."""

    format: Literal[1] = 1
    version: str = __version__
    sizes: Sizes
    attention: Literal["bidirectional", "prefix"]
    symbols: SymbolsReport
    tokenizer: str = Field(description="sha256 of the tokenizer.")
    tasks: tuple[str, ...] = Field((), description="That it was trained on.")
    search: GenSearchConfig = GenSearchConfig()

    @property
    def kind(self) -> str:
        """What sort of model it is, for the report."""
        return f"BERTGEN with {self.attention} attention"

    @property
    def directions(self) -> str:
        """What it was trained on, for the report."""
        return ", ".join(self.tasks)

    def build(self) -> BertGen:
        """Build the network, with fresh weights."""
        return BertGen(**self.sizes.model_dump())

    def save(
        self, folder: Path, model: nn.Module, encoder: PretrainedEncoder | None, text_folder: Path
    ) -> None:
        """Write the model folder; only the weights are replaced where one stands already."""
        make_folder(folder)
        if not (folder / TOKENIZER).is_dir():
            with new_folder(folder / TOKENIZER) as made:
                for file in (text_folder / TOKENIZER).iterdir():
                    shutil.copy(file, made)
        with replace_file(folder / CARD) as handle:
            handle.write((self.model_dump_json(indent=1) + "\n").encode())
        write_tensors(folder / WEIGHTS, model_tensors(model))


def model_folder(run: Path) -> Path:
    """Return the model folder of a RUN: ``RUN/model``, or RUN itself if it is one.

    Raises:
        UserError: If it is no RUN of BERTGEN.
    """
    for folder in (run / "model", run):
        if (folder / CARD).is_file():
            return folder
    what = "is not a folder" if not run.is_dir() else "holds no model of bertgen"
    raise UserError(f"{run} {what}; bertgen train and bertgen import make one")


def load_card(run: Path) -> tuple[Path, GenCard]:
    """Return the model folder of a RUN, and what it says of itself."""
    folder = model_folder(run)
    path = folder / CARD
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return folder, check_recipe(values, GenCard, str(path))


def load_model(run: Path) -> tuple[GenCard, BertGen, TransformersWordpieces]:
    """Load a model and its tokenizer.

    Raises:
        UserError: If something is missing or damaged.
    """
    folder, card = load_card(run)
    model = card.build()
    load_weights(model, read_tensors(folder / WEIGHTS), str(folder / WEIGHTS))
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    if tokenizer.fingerprint != card.tokenizer:
        raise UserError(f"{folder / TOKENIZER} is not what the model was trained with")
    return card, model.eval(), tokenizer


def load_weights(model: BertGen, tensors: dict[str, Tensor], where: str) -> None:
    """Fill a network with weights that have to fit exactly.

    Raises:
        UserError: Naming what does not fit.
    """
    ours = model_tensors(model)
    for name in [*ours, *tensors]:
        if name not in tensors or name not in ours:
            raise UserError(f"{where}: {name} is {'missing' if name in ours else 'unknown'}")
        if tensors[name].shape != ours[name].shape:
            raise UserError(
                f"{where}: {name} is {tuple(tensors[name].shape)} there and "
                f"{tuple(ours[name].shape)} here"
            )
    copy_tensors(tensors, ours)
