"""Laws of the network: cached decoding equals uncached, and company changes nothing."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bertfused.batch import Example
from bertfused.model import DecoderState, FusedTransformer, Memory
from tests.tiny_model import TARGET_SIZE, tiny_batch, tiny_examples, tiny_model

LAWS = settings(max_examples=20, deadline=None, derandomize=True)

models = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["post", "pre"]),
        "positions": st.sampled_from(["sinusoidal", "learned"]),
        "activation": st.sampled_from(["relu", "gelu"]),
        "embedding_norm": st.booleans(),
        "decoder_heads": st.sampled_from([None, 1, 4]),
        "share_embeddings": st.sampled_from(["all", "decoder", "none"]),
    }
)
fusions = st.none() | st.fixed_dictionaries(
    {
        "order": st.sampled_from(["parallel", "bert-first", "encoder-first"]),
        "gates": st.sampled_from([None, [True, False], [False, True]]),
        "encoder_attention": st.booleans(),
        "decoder_attention": st.booleans(),
        "branch_weights": st.sampled_from([[0.5, 0.5], [1.0, 1.0], [1.0, 0.0], [0.3, 0.9]]),
    }
)
# (source, target, BERT) lengths of each sentence
batches = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(2, 9)), min_size=1, max_size=5
)
seeds = st.integers(0, 10**6)


def repeated(memory: Memory, sentence: int, times: int) -> Memory:
    """Cut one sentence out of a batch's memory, several times."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[[sentence] * times]

    bert = memory.bert_states is not None and memory.bert_mask is not None
    return Memory(
        cut(memory.states),
        cut(memory.mask),
        cut(memory.bert_states) if bert else None,
        cut(memory.bert_mask) if bert else None,
    )


def next_logits(
    model: FusedTransformer, memory: Memory, sentence: int, prefixes: list[list[int]]
) -> Tensor:
    """Logits after each prefix of one sentence, without a cache."""
    own = repeated(memory, sentence, len(prefixes))
    return model.output(model.decoder(torch.tensor(prefixes), own)[:, -1])


@LAWS
@given(models, fusions, batches, seeds, st.integers(5, 20))
@torch.inference_mode()
def test_cached_decoding_equals_uncached_for_any_history_of_beams(
    options: dict[str, object],
    fusion: dict[str, object] | None,
    lengths: list[tuple[int, int, int]],
    seed: int,
    steps: int,
) -> None:
    """Beams are extended, re-ordered, multiplied, dropped; sentences leave and change places."""
    model = tiny_model(fusion, max_positions=30, **options)
    memory = model.encoder(tiny_batch(tiny_examples(lengths, fused=fusion is not None)))
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    state, order = DecoderState(model, memory), list(range(len(lengths)))
    histories: list[list[list[int]]] = [[[]] for _ in order]  # sentences, beams, tokens
    for step in range(steps):
        beams = len(histories[0])
        tokens = draw(TARGET_SIZE, len(order), beams)
        histories = [
            [[*history, token] for history, token in zip(own, row, strict=True)]
            for own, row in zip(histories, tokens.tolist(), strict=True)
        ]
        logits = state.step(tokens)
        # A wrong cache stays wrong: not every step needs looking at.
        for row, sentence in enumerate(order if step % 3 == 0 or step == steps - 1 else []):
            expected = next_logits(model, memory, sentence, histories[row])
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-4)
        if len(order) > 1 and draw(4, 1).item() == 0:
            size = int(draw(len(order), 1)) + 1
            kept = torch.randperm(len(order), generator=generator)[:size]
            state.keep(kept)
            order = [order[row] for row in kept.tolist()]
            histories = [histories[row] for row in kept.tolist()]
        if step == 0 or draw(2, 1).item() == 0:
            parents = draw(beams, len(order), int(draw(4, 1)) + 1)
            state.reorder(parents)
            histories = [
                [own[parent] for parent in row]
                for own, row in zip(histories, parents.tolist(), strict=True)
            ]


@LAWS
@given(models, fusions, batches, st.randoms(use_true_random=False))
def test_batch_mates_and_padding_change_nothing(
    options: dict[str, object],
    fusion: dict[str, object] | None,
    lengths: list[tuple[int, int, int]],
    random: Random,
) -> None:
    """Log-probabilities and gradients of a sentence are its own, whoever stands beside it."""
    model = tiny_model(fusion, **options)
    examples = tiny_examples(lengths, fused=fusion is not None)

    def log_probs(chosen: list[Example]) -> list[Tensor]:
        batch = tiny_batch(chosen)
        assert batch.target_mask is not None
        found = model(batch).log_softmax(-1)
        return [row[mask] for row, mask in zip(found, batch.target_mask, strict=True)]

    together = log_probs(examples)
    alone = [log_probs([example])[0] for example in examples]
    order = list(range(len(examples)))
    random.shuffle(order)
    shuffled = log_probs([examples[i] for i in order])
    for own, single in zip(together, alone, strict=True):
        torch.testing.assert_close(own, single, rtol=0, atol=1e-5)
    for own, i in zip(shuffled, order, strict=True):
        torch.testing.assert_close(own, together[i], rtol=0, atol=1e-5)

    parameters = list(model.parameters())
    sums = [sum(part[:, 4].sum() for part in found) for found in (together, alone)]
    found, expected = (torch.autograd.grad(s, parameters, allow_unused=True) for s in sums)
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@LAWS
@given(models, fusions, batches, seeds)
@torch.inference_mode()
def test_the_first_tokens_never_see_the_later_ones(
    options: dict[str, object],
    fusion: dict[str, object] | None,
    lengths: list[tuple[int, int, int]],
    seed: int,
) -> None:
    """A prefix has the states it would have alone: no future leaks into it."""
    model = tiny_model(fusion, **options)
    memory = model.encoder(tiny_batch(tiny_examples(lengths, fused=fusion is not None)))
    ids = torch.randint(
        0, TARGET_SIZE, (len(lengths), 6), generator=torch.Generator().manual_seed(seed)
    )
    whole = model.decoder(ids, memory)
    for end in range(1, 6):
        cut = model.decoder(ids[:, :end], memory)
        torch.testing.assert_close(whole[:, :end], cut, rtol=0, atol=1e-5)
