"""Models on disk: a folder with weights, architecture, subwords and dictionaries.

``model.json`` says what the weights are, ``model.safetensors`` holds them, and beside them lie
the subword model and ``dict.<language>.txt``, whose hashes stand in ``model.json``. That is
enough to translate, except for a frozen pretrained encoder, which is found by folder or hub name
and checked by its fingerprint.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bertfused import __version__
from bertfused.attention import CrossAttention, SelfAttention
from bertfused.config import FusionConfig, ModelConfig, SearchConfig, Section
from bertfused.errors import UserError
from bertfused.layers import DecoderLayer, EncoderLayer
from bertfused.model import EncoderAsPretrained, FusedTransformer, build_model
from bertfused.pretrained import PretrainedEncoder
from bertfused.subwords import Tokenizer, load_tokenizer
from bertfused.text import make_folder, replace_file, sha256_file
from bertfused.wordpieces import CARD, OwnWordpieces, Wordpieces, own_model_folder

WEIGHTS = "model.safetensors"
FINETUNED = "encoder"


class EncoderCard(Section):
    """Which pretrained encoder a fused model was trained with."""

    name: str
    bert_dim: int
    weights: str
    wordpieces: str


class ModelCard(Section):
    """What a model folder holds; ``model.json``."""

    format: int = 1
    version: str = __version__
    source: str
    target: str
    source_size: int
    target_size: int
    #: Those of a model that translates between them in any direction.
    languages: tuple[str, ...] = ()
    model: ModelConfig
    fusion: FusionConfig | None = None
    encoder: EncoderCard | None = None
    search: SearchConfig = SearchConfig()
    documents: dict[str, Any] | None = None
    #: What a context-aware model of docnmt has on top of this one.
    context: dict[str, Any] | None = None
    text_files: dict[str, str]

    @property
    def language_ids(self) -> tuple[int, int] | None:
        """Numbers of source and target language, of a model of several directions."""
        if not self.languages:
            return None
        return self.languages.index(self.source), self.languages.index(self.target)

    @property
    def source_languages(self) -> tuple[str, ...]:
        """What it may be given to translate, in the order of the languages' numbers."""
        return self.languages or (self.source,)

    @property
    def kind(self) -> str:
        """Say what sort of model it is, for a report."""
        kinds = ["plain" if self.fusion is None else f"fused with {self.fusion.encoder}"]
        if self.context is not None:
            kinds.append(f"context.model = {self.context['model']!r}")
        return ", ".join(kinds)

    def save(
        self, folder: Path, model: nn.Module, encoder: PretrainedEncoder | None, text_folder: Path
    ) -> None:
        """Write the model folder of a network that this card describes (see ``save_model``)."""
        save_model(folder, self, model_tensors(model), text_folder, encoder)

    @property
    def directions(self) -> str:
        """Say what it translates, for a message."""
        if not self.languages:
            return f"{self.source}-{self.target}"
        return f"between {' and '.join(self.languages)}"

    def build(self) -> FusedTransformer:
        """Build the sentence-level network this card describes, with fresh weights.

        Raises:
            UserError: If the parts of the description do not fit together.
        """
        try:
            return build_model(
                self.model,
                self.fusion,
                source_size=self.source_size,
                target_size=self.target_size,
                bert_dim=None if self.encoder is None else self.encoder.bert_dim,
                languages=len(self.languages),
            )
        except ValueError as error:
            raise UserError(str(error)) from error


@dataclass(frozen=True)
class TrainedModel:
    """A model folder, opened."""

    folder: Path
    card: ModelCard
    model: FusedTransformer
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer

    def load_encoder(self, override: str | None = None) -> PretrainedEncoder | None:
        """Load the pretrained encoder this model was trained with; ``None`` for a plain one.

        Args:
            override: Another place to find the same encoder; one that was fine-tuned is part of
                the model and found nowhere else.

        Raises:
            UserError: If there it is not the same one.
        """
        fusion, expected = self.card.fusion, self.card.encoder
        languages = self.card.source_languages
        if fusion is None or expected is None:
            return None
        if not fusion.finetune:
            return open_encoder(fusion, override or expected.name, expected, languages)
        finetuned = self.folder / FINETUNED
        if not finetuned.is_dir():
            raise UserError(f"{self.folder} lacks {FINETUNED}, the encoder trained with the model")
        if isinstance(fusion.layer, int):  # it was saved without the layers above this one
            fusion = fusion.model_copy(update={"layer": -1})
        return open_encoder(fusion, str(finetuned), languages=languages)


def open_encoder(
    fusion: FusionConfig,
    name: str | None = None,
    expected: EncoderCard | None = None,
    languages: Sequence[str] = (),
) -> PretrainedEncoder:
    """Load a pretrained encoder as [fusion] asks, and check that it is the expected one.

    Args:
        languages: Those of its input, in the order of the NMT's numbers for them.
    """
    name = name or fusion.encoder
    nmt_encoder = _own_encoder(name, fusion.max_wordpieces)
    if nmt_encoder is not None and fusion.finetune:
        raise UserError(f"encoder {name} is a RUN of ours, which fusion.finetune cannot train")
    encoder = PretrainedEncoder(
        name,
        fusion.layer,
        last_layers=fusion.last_layers,
        max_wordpieces=fusion.max_wordpieces,
        segments=fusion.segments,
        finetune=fusion.finetune,
        languages=languages,
        own=nmt_encoder,
    )
    if expected is not None:
        for what, ours, theirs in (
            ("weights", encoder.fingerprint, expected.weights),
            ("tokenizer", encoder.wordpieces.fingerprint, expected.wordpieces),
        ):
            if ours != theirs:
                raise UserError(
                    f"encoder {name} is not the one this model was trained with "
                    f"({expected.name}): the {what} have sha256 {ours[:12]}, not {theirs[:12]}"
                )
    return encoder


def _own_encoder(
    name: str, max_length: int | None
) -> tuple[EncoderAsPretrained, Wordpieces] | None:
    """Take the encoder of a RUN, if ``name`` is one."""
    folder = own_model_folder(name)
    if folder is None:
        return None
    wordpieces = OwnWordpieces(folder, max_length)
    return EncoderAsPretrained(load_model(folder).model.encoder), wordpieces


def encoder_card(encoder: PretrainedEncoder) -> EncoderCard:
    """Describe a pretrained encoder so that another one is noticed."""
    return EncoderCard(
        name=encoder.name,
        bert_dim=encoder.bert_dim,
        weights=encoder.fingerprint,
        wordpieces=encoder.wordpieces.fingerprint,
    )


def text_files(folder: Path) -> list[Path]:
    """Return the dictionaries and subword files of a DATA or model folder."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(("dict.", "sentencepiece.", "bpe.")) and path.is_file()
    )


def copy_text_files(text_folder: Path, folder: Path) -> None:
    """Copy the dictionaries and subword files of a folder to another one."""
    for path in text_files(text_folder):
        if path.parent != folder:
            with replace_file(folder / path.name) as handle:
                handle.write(path.read_bytes())


def hash_text_files(folder: Path) -> dict[str, str]:
    """Return sha256 by name of a folder's dictionaries and subword files."""
    return {path.name: sha256_file(path) for path in text_files(folder)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return each distinct parameter once, under the first of its names."""
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def write_card(folder: Path, card: ModelCard) -> None:
    """Write ``model.json``."""
    with replace_file(folder / CARD) as handle:
        handle.write((card.model_dump_json(indent=1) + "\n").encode())


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file beside its final name, sync it and rename it."""
    partial = path.with_name(path.name + ".partial")
    contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, partial, dict(metadata) if metadata else None)
        _sync(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error}") from error


def save_model(
    folder: Path,
    card: ModelCard,
    tensors: Mapping[str, Tensor],
    text_folder: Path,
    encoder: PretrainedEncoder | None = None,
) -> None:
    """Write a model folder; only the weights are replaced where one stands already.

    Args:
        tensors: As ``model_tensors`` gives them.
        text_folder: Folder whose subword files and dictionaries belong to the model.
        encoder: The pretrained encoder, saved along if it was fine-tuned.
    """
    make_folder(folder)
    copy_text_files(text_folder, folder)
    write_card(folder, card)
    if encoder is not None and encoder.finetune:
        with new_folder(folder / FINETUNED) as finetuned:
            encoder.save(finetuned)
    write_tensors(folder / WEIGHTS, tensors)


def load_card(folder: Path) -> ModelCard:
    """Read ``model.json`` and check the hashes of the text files beside it."""
    path = folder / CARD
    try:
        card = ModelCard.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{folder} is not a model folder: cannot read {path.name}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise UserError(f"{path} is damaged: {where}{first['msg']}") from error
    if card.format != 1:
        raise UserError(f"{path} has format {card.format}; this version reads format 1")
    for name, expected in card.text_files.items():
        if not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, which belongs to the model")
        if sha256_file(folder / name) != expected:
            raise UserError(f"{folder / name} is not the file the model was trained with")
    return card


def load_model(run: Path) -> TrainedModel:
    """Load a model from a run folder, a checkpoint folder or a model folder."""
    folder = model_folder(run)
    card = load_card(folder)
    if card.context is not None:
        raise UserError(f"{run} is a context-aware model, which only the docnmt command reads")
    model = card.build()
    load_weights(folder, model)
    return TrainedModel(
        folder,
        card,
        model.eval(),
        load_tokenizer(folder, card.source),
        load_tokenizer(folder, card.target),
    )


def load_weights(folder: Path, model: nn.Module) -> None:
    """Fill a network with the weights of a model folder, which have to fit exactly."""
    tensors, ours = read_tensors(folder / WEIGHTS), model_tensors(model)
    if problem := _difference(ours, tensors):
        raise UserError(f"{folder / WEIGHTS} does not fit {CARD}: {problem}")
    copy_tensors(tensors, ours)


def model_folder(run: Path) -> Path:
    """Return the model folder of a RUN: ``RUN/model``, or RUN itself if it is one."""
    for folder in (run / "model", run):
        if (folder / CARD).is_file():
            return folder
    what = "is not a folder" if not run.is_dir() else f"holds no {CARD} and no model/{CARD}"
    raise UserError(f"{run} {what}; a run folder is made by train, import or average")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return tensors


def copy_tensors(source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
    """Copy into every tensor of ``destination`` the one of that name."""
    with torch.no_grad():
        for name, tensor in destination.items():
            tensor.copy_(source[name])


def _difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    missing, unexpected = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if missing or unexpected:
        return f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            return f"{name} is {tuple(theirs[name].shape)}, not {tuple(tensor.shape)}"
    return None


@dataclass(frozen=True)
class WarmStart:
    """What a warm start took from another model."""

    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.fresh)
        lines = [f"loaded {len(self.loaded)} of {total} tensors", *self.notes]
        if self.fresh:
            lines.append(f"started fresh: {', '.join(self.fresh)}")
        if self.unexpected:
            lines.append(f"in the file but not in the model: {', '.join(self.unexpected)}")
        return "\n".join(lines)


def warm_start(model: FusedTransformer, run: Path, fusion: FusionConfig | None) -> WarmStart:
    """Take over the weights of a trained model; tensors of BERT attention may start fresh.

    With ``fusion.start = "function-preserving"`` the model then computes exactly what the other
    one does: BERT attention's output projection starts at 0, and the attention beside it is
    scaled by the inverse of its weight (by 2 for the paper's average).

    Raises:
        UserError: If any other tensor is missing, or a shape differs.
    """
    folder = model_folder(run)
    theirs, ours = read_tensors(folder / WEIGHTS), model_tensors(model)
    missing = [name for name in ours if name not in theirs]
    unknown = [name for name in missing if ".bert_attention" not in name]
    if unknown:
        raise UserError(
            f"cannot start from {run}: it lacks {', '.join(unknown)} (is it a model of the same "
            "depth, norm and sharing of embeddings?)"
        )
    for name, tensor in ours.items():
        if name in theirs and theirs[name].shape != tensor.shape:
            raise UserError(
                f"cannot start from {run}: {name} is {tuple(theirs[name].shape)} there and "
                f"{tuple(tensor.shape)} here"
            )
    loaded = tuple(name for name in ours if name in theirs)
    copy_tensors(theirs, {name: ours[name] for name in loaded})
    if fusion is not None and fusion.start == "function-preserving":
        preserve_function(model, missing)
    unexpected = tuple(name for name in theirs if name not in ours)
    return WarmStart(loaded, tuple(missing), unexpected)


def preserve_function(model: FusedTransformer, fresh: Sequence[str]) -> None:
    """Make a model compute what it would without its fresh BERT attention (see ``warm_start``).

    In a stacked layer after the norm its own fresh norm takes over the weights of the one before
    it, which then only normalises: to do that twice is to do it once, up to epsilon.
    """
    with torch.no_grad():
        for name, layer in model.named_modules():
            if f"{name}.bert_attention.out_proj.weight" not in fresh:
                continue
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            assert layer.bert_attention is not None
            layer.bert_attention.out_proj.weight.zero_()
            layer.bert_attention.out_proj.bias.zero_()
            attention: SelfAttention | CrossAttention = layer.self_attention
            if isinstance(layer, DecoderLayer):
                attention = layer.cross_attention
                if layer.order != "parallel":
                    _hand_over_norm(layer)
                    continue
            scale = 1 / layer.mixer.weights[0]
            attention.out_proj.weight.mul_(scale)
            attention.out_proj.bias.mul_(scale)


def _hand_over_norm(layer: DecoderLayer) -> None:
    if layer.pre_norm:
        return
    is_first = layer.order == "bert-first"
    before = layer.self_attention_norm if is_first else layer.cross_attention_norm
    layer.bert_attention_norm.load_state_dict(before.state_dict())
    before.weight.fill_(1)
    before.bias.zero_()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill that appears under ``path`` only when it is complete and on disk."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            _sync(file)
        remove_folder(path)
        partial.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder, if there is one, so that no half of it is ever seen under its name."""
    if path.exists():
        doomed = path.with_name(path.name + ".old")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file beside its final name and rename it."""
    with replace_file(path) as handle:
        handle.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON file that this program wrote.

    Args:
        keys: What it must hold at least.

    Raises:
        UserError: If it cannot be read or is damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict) or not value.keys() >= set(keys):
        raise UserError(f"{path} is damaged: it holds no {' and '.join(keys)}")
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
