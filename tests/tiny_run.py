"""A run folder with a very small model of random weights, for tests that need some model."""

from pathlib import Path

import torch

from bertfused.checkpoint import EncoderCard, ModelCard, hash_text_files, model_tensors, save_model
from bertfused.config import FusionConfig, ModelConfig
from bertfused.model import build_model
from bertfused.subwords import Tokenizer, Words
from bertfused.vocab import Vocabulary

TINY = {"encoder_layers": 2, "decoder_layers": 2, "model_dim": 16, "ffn_dim": 24, "heads": 4}


def make_run(
    folder: Path,
    *,
    fusion: FusionConfig | None = None,
    tokenizer: Tokenizer | None = None,
    **options: object,
) -> ModelConfig:
    """Write ``folder/model``, en to de.

    Args:
        tokenizer: Of both languages; else they are of words: w0, w1, ..., or e0, ... and d0, ...
            where they share no embeddings.
    """
    config = ModelConfig(**(TINY | options))
    sizes = {"en": 40, "de": 40 if config.share_embeddings == "all" else 30}
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for language, size in sizes.items():
        letter = "w" if config.share_embeddings == "all" else language[0]
        words = [f"{letter}{number}" for number in range(size - 4)]
        own = tokenizer or Tokenizer(Words(), Vocabulary(words, range(len(words), 0, -1)))
        own.save(texts, language)
        sizes[language] = len(own.vocabulary)
    torch.manual_seed(7)
    model = build_model(
        config, fusion, source_size=sizes["en"], target_size=sizes["de"], bert_dim=8
    )
    with torch.no_grad():  # biases and norms start at values that would hide a mistake
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    card = ModelCard(
        source="en",
        target="de",
        source_size=sizes["en"],
        target_size=sizes["de"],
        model=config,
        fusion=fusion,
        encoder=EncoderCard(name="bert", bert_dim=8, weights="", wordpieces="") if fusion else None,
        text_files=hash_text_files(texts),
    )
    save_model(folder / "model", card, model_tensors(model), texts)
    return config
