"""Score given translations: the log-probability a model gives to each."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bertfused.batch import Example, token_batches
from bertfused.translate import SourceLine, Translator

_WINDOW = 4096


@dataclass(frozen=True)
class PairScore:
    """The natural-log probability of a target, EOS included, and its number of tokens."""

    log_prob: float
    tokens: int


def score_pairs(
    translator: Translator,
    pairs: Iterable[tuple[SourceLine, str]],
    *,
    batch_tokens: int = 4096,
    shuffle_encoder: bool = False,
    label_smoothing: float = 0.0,
) -> Iterator[PairScore]:
    """Score targets given their sources, in order.

    The sum is the one the search finds for the same tokens. An ensemble averages probabilities.

    Args:
        shuffle_encoder: Give every sentence the pretrained encoder's input of another one: a
            model that uses it must lose by that.
        label_smoothing: Score with the negative of the label-smoothed loss of training instead.
    """
    iterator = iter(pairs)
    while window := list(islice(iterator, _WINDOW)):
        yield from _window(translator, window, batch_tokens, shuffle_encoder, label_smoothing)


def _window(
    translator: Translator,
    pairs: Sequence[tuple[SourceLine, str]],
    batch_tokens: int,
    shuffle_encoder: bool,
    label_smoothing: float,
) -> list[PairScore]:
    sources = [source for source, _ in pairs]
    targets = [target for _, target in pairs]
    examples = []
    for member in translator.members:
        member_examples = member.examples_with_targets(sources, targets, translator.counts)
        if shuffle_encoder:
            others = member_examples[1:] + member_examples[:1]
            member_examples = [
                replace(e, bert=o.bert) for e, o in zip(member_examples, others, strict=True)
            ]
        examples.append(member_examples)
    lengths = [
        np.array([len(e.target or ()) for e in examples[0]], dtype=np.int64),
        np.array([len(e.source) for e in examples[0]], dtype=np.int64),
    ]
    scores = [PairScore(0.0, 0)] * len(pairs)
    for batch in token_batches(lengths, batch_tokens):
        own_examples = [[e[i] for i in batch] for e in examples]
        for i, score in zip(batch, _score(translator, own_examples, label_smoothing), strict=True):
            scores[i] = score
    return scores


@torch.inference_mode()
def _score(
    translator: Translator, examples: list[list[Example]], label_smoothing: float
) -> list[PairScore]:
    batches = [
        member.batch(member_examples, translator.device)
        for member, member_examples in zip(translator.members, examples, strict=True)
    ]
    target, mask = batches[0].target, batches[0].target_mask  # they share the target vocabulary
    assert target is not None and mask is not None
    log_probs = [
        member.model(batch).float().log_softmax(-1)
        for member, batch in zip(translator.members, batches, strict=True)
    ]
    average = log_probs[0]
    if len(log_probs) > 1:
        average = torch.stack(log_probs).logsumexp(0) - math.log(len(log_probs))
    picked = target_log_probs(average, target, label_smoothing)
    sums, tokens = picked.double().mul(mask).sum(1).tolist(), mask.sum(1).tolist()
    return [PairScore(total, count) for total, count in zip(sums, tokens, strict=True)]


def target_log_probs(
    log_probs: Float[Tensor, "batch target vocab"],
    target: Int[Tensor, "batch target"],
    label_smoothing: float = 0.0,
) -> Float[Tensor, "batch target"]:
    """Pick each target token's log-probability, smoothed as in ``loss.cross_entropy``."""
    picked = log_probs.gather(2, target[:, :, None]).squeeze(2)
    if not label_smoothing:
        return picked
    other = label_smoothing / (log_probs.shape[-1] - 1)
    return (1 - label_smoothing - other) * picked + other * log_probs.sum(-1)
