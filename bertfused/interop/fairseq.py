"""Checkpoints of fairseq (0.7 to 0.12) and of the official BERT-fused code, which is a fork of it.

Neither needs to be installed. Departure from the official code: it pads BERT's input on the left
without moving its positions, so what it computes for a sentence depends on the batch; here it is
what the official code computes for the sentence alone.
"""

import argparse
import logging
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bertfused import __version__
from bertfused.checkpoint import (
    EncoderCard,
    ModelCard,
    hash_text_files,
    load_model,
    new_folder,
    save_model,
    write_json,
)
from bertfused.errors import UserError
from bertfused.interop.fairseq_options import (
    Options,
    export_options,
    fusion_config,
    model_config,
    read_options,
)
from bertfused.interop.fairseq_tensors import (
    BERT,
    State,
    bert_attention_sides,
    drop_closed_gates,
    embedding_sizes,
    export_state,
    is_stacked,
    read_state,
    take_tensors,
)
from bertfused.interop.folders import refuse_existing
from bertfused.interop.pickles import load_pickle
from bertfused.pretrained import Layer, PretrainedEncoder
from bertfused.subwords import Tokenizer, Words, load_subwords
from bertfused.text import sha256_file
from bertfused.vocab import Vocabulary

_logger = logging.getLogger(__name__)


def import_fairseq(
    checkpoint: Path,
    source_dict: Path,
    target_dict: Path,
    out: Path,
    *,
    encoder: str | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    codes: Path | None = None,
) -> ModelCard:
    """Make a run folder from a checkpoint of fairseq or of the official BERT-fused code.

    Args:
        source_dict: fairseq's ``dict.<language>.txt``.
        target_dict: For a joined dictionary the same file, or its twin of the other language.
        out: The run folder, which must not exist; ``import.json`` in it says what was read.
        encoder: Folder or hub name of the BERT of a fused model; by default the name that the
            checkpoint has.
        source_language: By default as the checkpoint or the dictionary's name says.
        target_language: Likewise.
        codes: subword-nmt's codes, if lines are to be split by them; without, the model takes
            lines that are split already, as fairseq does.

    Raises:
        UserError: If the file is not such a checkpoint, has an option that is not supported here,
            or does not fit the dictionaries or the encoder.
    """
    refuse_existing(out)
    content = load_pickle(checkpoint)
    options = read_options(content, checkpoint)
    state = read_state(content, checkpoint)
    source = source_language or options.get("source_lang") or _language_of(source_dict)
    target = target_language or options.get("target_lang") or _language_of(target_dict)
    vocabularies = Vocabulary.load(source_dict), Vocabulary.load(target_dict)
    if source == target and vocabularies[0] != vocabularies[1]:
        raise UserError(f"{source_dict} and {target_dict} differ but are both of {source!r}")
    for vocabulary, size, path in zip(
        vocabularies, embedding_sizes(state), (source_dict, target_dict), strict=True
    ):
        if len(vocabulary) != size:
            raise UserError(
                f"{path} has {len(vocabulary)} symbols (four special ones included), but "
                f"{checkpoint} was trained with {size}"
            )
    config = model_config(options, checkpoint)
    fusion, bert, bert_card = None, None, None
    if any(sides := bert_attention_sides(state)):
        bert, bert_card = _open_bert(state, options, encoder, checkpoint)
        fusion = fusion_config(
            options, config, bert_card.name, checkpoint, sides=sides, is_stacked=is_stacked(state)
        )
        if fusion.finetune:
            bert = _reopened(bert, fusion.layer)
        drop_closed_gates(state, fusion.gates or (), options["encoder_ratio"])
    elif encoder is not None:
        raise UserError(
            f"{checkpoint} is a plain Transformer, in which encoder {encoder} has no place"
        )

    subwords = Words() if codes is None else load_subwords("bpe", codes)
    with TemporaryDirectory() as texts, new_folder(out) as folder:
        for language, vocabulary in zip((source, target), vocabularies, strict=True):
            Tokenizer(subwords, vocabulary).save(Path(texts), language)
        card = ModelCard(
            source=source,
            target=target,
            source_size=len(vocabularies[0]),
            target_size=len(vocabularies[1]),
            model=config,
            fusion=fusion,
            encoder=bert_card,
            text_files=hash_text_files(Path(texts)),
        )
        tensors = take_tensors(state, card.build(), config, checkpoint)
        save_model(folder / "model", card, tensors, Path(texts), bert)
        _logger.info("%d tensors make our %d", len(content["model"]), len(tensors))
        origin = {"checkpoint": str(checkpoint.resolve()), "sha256": sha256_file(checkpoint)}
        write_json(folder / "import.json", {**origin, "options": _for_json(options)})
    return card


def _language_of(dictionary: Path) -> str:
    if named := re.fullmatch(r"dict\.([^.]+)\.txt", dictionary.name):
        return named[1]
    raise UserError(f"neither the checkpoint nor the name of {dictionary} says its language")


def _for_json(options: Options) -> Options:
    kinds = (str, int, float, bool, list)
    return {key: value for key, value in sorted(options.items()) if isinstance(value, kinds)}


def _open_bert(
    state: State, options: Options, name: str | None, checkpoint: Path
) -> tuple[PretrainedEncoder, EncoderCard]:
    """Load the encoder of a fused checkpoint, with the checkpoint's weights if it was fine-tuned.

    Raises:
        UserError: If a frozen one is not the checkpoint's, or no such encoder.
    """
    trained_with = options.get("bert_model_name", "an encoder that it does not name")
    name = name or options.get("bert_model_name")
    if name is None:
        raise UserError(f"{checkpoint} does not name its encoder; give its folder or hub name")
    if Path(name).is_dir():
        name = str(Path(name).resolve())
    is_finetuned = bool(options["finetune_bert"])
    try:
        encoder = PretrainedEncoder(name, finetune=is_finetuned)
    except UserError as error:
        raise UserError(f"{error}; {checkpoint} was trained with {trained_with}") from error
    stored = {
        key.removeprefix(BERT): tensor for key, tensor in state.items() if key.startswith(BERT)
    }
    for key, tensor in encoder.model.state_dict().items():
        theirs = stored.get(key)
        is_same = theirs is not None and (
            theirs.shape == tensor.shape if is_finetuned else tensor.to(theirs.dtype).equal(theirs)
        )
        if not is_same and "pooler" not in key:
            raise UserError(
                f"{name} is not the encoder of {checkpoint}, which was trained with "
                f"{trained_with}: {key} differs"
            )
    if is_finetuned:
        encoder.model.load_state_dict(stored, strict=False)
        encoder = _reopened(encoder)
    card = EncoderCard(
        name=name,
        bert_dim=encoder.bert_dim,
        weights=encoder.fingerprint,
        wordpieces=encoder.wordpieces.fingerprint,
    )
    return encoder, card


def _reopened(encoder: PretrainedEncoder, layer: Layer = -1) -> PretrainedEncoder:
    """Load an encoder again: it has another fingerprint, or fewer layers, than it had."""
    with TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        return PretrainedEncoder(folder, layer, finetune=True)


def export_fairseq(run: Path, out: Path) -> None:
    """Write ``checkpoint.pt``, the dictionaries and subword models for ``fairseq-generate``.

    Raises:
        UserError: If the model is fused: fairseq knows no second encoder.
    """
    refuse_existing(out)
    trained = load_model(run)
    card = trained.card
    if card.fusion is not None:
        raise UserError(f"{run} is a fused model; only plain ones can be exported to fairseq")
    if card.languages:
        raise UserError(f"{run} has embeddings of languages, which fairseq's Transformer has not")
    languages = {"source_lang": card.source, "target_lang": card.target}
    history = {
        "criterion_name": "LabelSmoothedCrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    content = {
        "args": None,
        "cfg": {
            "model": argparse.Namespace(**export_options(card.model), **languages),
            "task": {"_name": "translation", **languages},
            "common": {},
        },
        "model": export_state(trained.model, card.model),
        "optimizer_history": [history],
        "extra_state": {
            "epoch": 1,
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 0},
            "val_loss": None,
            "made_by": f"bertfused {__version__}",
        },
    }
    with new_folder(out) as folder:
        trained.source_tokenizer.save(folder, card.source)
        trained.target_tokenizer.save(folder, card.target)
        torch.save(content, folder / "checkpoint.pt")
