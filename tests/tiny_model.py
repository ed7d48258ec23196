"""Very small networks of random weights, and random batches for them."""

from dataclasses import replace

import torch

from bertfused.batch import Batch, BertIds, Example, collate
from bertfused.config import FusionConfig, ModelConfig
from bertfused.model import FusedTransformer, build_model

SOURCE_SIZE, TARGET_SIZE, BERT_DIM = 17, 13, 6
PLAIN = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "model_dim": 8,
    "ffn_dim": 12,
    "heads": 2,
    "share_embeddings": "decoder",
}


def tiny_model(
    fusion: FusionConfig | dict[str, object] | None = None,
    *,
    seed: int = 5,
    bert_dim: int = BERT_DIM,
    **options: object,
) -> FusedTransformer:
    """Build a network in which no parameter has its starting value; ``options`` of [model]."""
    config = ModelConfig.model_validate({**PLAIN, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(
            config,
            FusionConfig.model_validate(fusion) if fusion is not None else None,
            source_size=SOURCE_SIZE,
            target_size=SOURCE_SIZE if config.share_embeddings == "all" else TARGET_SIZE,
            bert_dim=bert_dim,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def tiny_examples(
    lengths: list[tuple[int, int, int]], *, seed: int = 1, fused: bool = True
) -> list[Example]:
    """Make examples of (source, target, BERT) lengths, EOS included, with BERT's states.

    Source and target are the same with and without BERT.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(number: int, high: int) -> list[int]:
        return torch.randint(4, high, (number,), generator=generator).tolist()

    examples = []
    for source, target, bert in lengths:
        example = Example(
            [*ids(source - 1, SOURCE_SIZE), 2],
            [*ids(target - 1, TARGET_SIZE), 2],
            ids(bert, 90),
            torch.randn(bert, BERT_DIM, generator=generator),
        )
        examples.append(example if fused else replace(example, bert=None, bert_states=None))
    return examples


def tiny_batch(examples: list[Example]) -> Batch:
    """Collate examples."""
    return collate(examples, BertIds(pad=0))
