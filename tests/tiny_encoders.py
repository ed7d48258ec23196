"""Very small pretrained encoders of several families, with tokenizers that spell in characters."""

import string
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bertfused.checkpoint import encoder_card, load_card, open_encoder, write_card
from bertfused.config import FusionConfig
from tests.tiny_run import make_run

DIM, DEPTH, LIMIT = 8, 3, 24  # width (that of tiny_run), layers, wordpieces at once

_CHARACTERS = string.ascii_lowercase + string.digits + ".,"
_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", *_CHARACTERS]
_ROBERTA = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "unk": "<unk>"}


def make_encoder(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write an encoder as transformers reads it.

    Args:
        kind: "bert", "distilbert", "albert", "roberta" or "xlmr".
        seed: Of its weights.
    """
    make_model, tokenizer, special = _KINDS[kind]()
    torch.manual_seed(seed)
    model = make_model(tokenizer.get_vocab_size())
    with torch.no_grad():  # norms and biases start at values that would hide a mistake
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    transformers.logging.disable_progress_bar()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": text for name, text in special.items()}
    )
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def make_fused_run(folder: Path, encoder: Path, **options: object) -> FusionConfig:
    """Write a tiny run that is fused with an encoder; ``options`` are those of [fusion]."""
    fusion = FusionConfig.model_validate({"encoder": str(encoder), **options})
    make_run(folder, fusion=fusion)
    card = load_card(folder / "model")
    found = encoder_card(open_encoder(fusion))
    write_card(folder / "model", card.model_copy(update={"encoder": found}))
    return fusion


_Parts = tuple[Callable[[int], transformers.PreTrainedModel], tokenizers.Tokenizer, dict[str, str]]


def _wordpiece() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    pieces = [*_BERT, *(f"##{c}" for c in _CHARACTERS)]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return tokenizer, special


def _bert() -> _Parts:
    def model(vocabulary: int) -> transformers.PreTrainedModel:
        return transformers.BertModel(
            transformers.BertConfig(
                vocab_size=vocabulary,
                hidden_size=DIM,
                num_hidden_layers=DEPTH,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=LIMIT,
            )
        )

    return model, *_wordpiece()


def _distilbert() -> _Parts:
    def model(vocabulary: int) -> transformers.PreTrainedModel:
        return transformers.DistilBertModel(
            transformers.DistilBertConfig(
                vocab_size=vocabulary,
                dim=DIM,
                n_layers=DEPTH,
                n_heads=2,
                hidden_dim=12,
                max_position_embeddings=LIMIT,
            )
        )

    return model, *_wordpiece()


def _albert() -> _Parts:
    def model(vocabulary: int) -> transformers.PreTrainedModel:
        return transformers.AlbertModel(
            transformers.AlbertConfig(
                vocab_size=vocabulary,
                embedding_size=4,
                hidden_size=DIM,
                num_hidden_layers=DEPTH,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=LIMIT,
            )
        )

    return model, *_wordpiece()


def _roberta_options(vocabulary: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": DIM,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": LIMIT + 2,  # counted from the padding id + 1
        "type_vocab_size": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }


def _roberta() -> _Parts:
    def model(vocabulary: int) -> transformers.PreTrainedModel:
        return transformers.RobertaModel(transformers.RobertaConfig(**_roberta_options(vocabulary)))

    special = {**_ROBERTA, "pad": "<pad>", "mask": "<mask>"}
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: id for id, piece in enumerate([*pieces, "<mask>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    return model, tokenizer, special


def _xlmr() -> _Parts:
    def model(vocabulary: int) -> transformers.PreTrainedModel:
        return transformers.XLMRobertaModel(
            transformers.XLMRobertaConfig(**_roberta_options(vocabulary + 1))
        )

    # As in the real one, the special tokens are pieces of the model too: text could match them.
    special = {**_ROBERTA, "pad": "<pad>", "mask": "<mask>"}
    pieces = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces += [("\u2581", -2.0), *((character, -3.0) for character in _CHARACTERS)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return model, tokenizer, special


_KINDS: dict[str, Callable[[], _Parts]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "albert": _albert,
    "roberta": _roberta,
    "xlmr": _xlmr,
}
