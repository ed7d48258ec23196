"""Laws of the context-aware networks: company, padding, steps and the future change nothing."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from bertfused.batch import Example
from docnmt.context import Context, ContextModel
from tests.tiny_context import (
    ON_A_BASE,
    Given,
    by_steps,
    given,
    logits,
    own_parameters,
    tiny_context_model,
)
from tests.tiny_model import TARGET_SIZE, tiny_examples

LAWS = settings(max_examples=20, deadline=None, derandomize=True)

models = st.tuples(
    st.sampled_from(list(ON_A_BASE)),
    st.sampled_from([None, {}, {"order": "bert-first", "gates": [True, False]}]),
    st.fixed_dictionaries(
        {"norm": st.sampled_from(["post", "pre"]), "decoder_heads": st.sampled_from([None, 4])}
    ),
)
# Lengths of source, target and BERT's input of each sentence of each document
documents = st.lists(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(2, 6)), min_size=2, max_size=4
    ),
    min_size=1,
    max_size=2,
)
seeds = st.integers(0, 10**6)
Model = tuple[str, dict[str, object] | None, dict[str, object]]


def build(chosen: Model) -> ContextModel:
    name, fusion, options = chosen
    return tiny_context_model(ON_A_BASE[name], fusion, **options)


class Corpus:
    """Sentences of documents, those before each of them, and a draft of each."""

    def __init__(
        self, model: ContextModel, found: list[list[tuple[int, int, int]]], *, fused: bool
    ) -> None:
        self.model = model
        lengths = [own for document in found for own in document]
        self.examples = tiny_examples(lengths, fused=fused)
        self.previous: list[list[int]] = []
        for document in found:
            first = len(self.previous)
            for place in range(len(document)):
                start = max(first, first + place - model.sentences)
                self.previous.append(list(range(start, first + place)))
        self.in_context = [i for i, before in enumerate(self.previous) if before]
        drafts = tiny_examples([(1, own[0] + 1, 2) for own in lengths], seed=4, fused=False)
        self.drafts = [[*map(int, own.target or ())] for own in drafts]

    def given(self, wanted: Sequence[int]) -> Given:
        """Collect some sentences with those before them."""
        needed = sorted({*wanted, *(j for i in wanted for j in self.previous[i])})
        place = {i: number for number, i in enumerate(needed)}
        return given(
            self.model,
            [self.examples[i] for i in needed],
            [[place[j] for j in self.previous[i]] for i in wanted],
            [place[i] for i in wanted],
            [self.drafts[i] for i in wanted],
        )

    def log_probs(self, wanted: Sequence[int]) -> list[Tensor]:
        """Compute those of some sentences in one batch with the sentences before them."""
        found = logits(self.model, self.given(wanted)).log_softmax(-1)
        return [
            row[: len(self.examples[i].target or ())] for i, row in zip(wanted, found, strict=True)
        ]


@LAWS
@for_all(models, documents, st.randoms(use_true_random=False))
def test_batch_mates_and_padding_change_nothing(
    chosen: Model, found: list[list[tuple[int, int, int]]], random: Random
) -> None:
    """Log-probabilities and gradients; contexts of 1 to 3 sentences are padded to the longest."""
    model = build(chosen)
    corpus = Corpus(model, found, fused=chosen[1] is not None)
    everything = corpus.in_context
    together = corpus.log_probs(everything)
    alone = [corpus.log_probs([i])[0] for i in everything]
    order = random.sample(everything, len(everything))
    shuffled = dict(zip(order, corpus.log_probs(order), strict=True))
    for i, own, single in zip(everything, together, alone, strict=True):
        assert bool(own.isfinite().all())
        torch.testing.assert_close(own, single, rtol=0, atol=5e-5)
        torch.testing.assert_close(shuffled[i], single, rtol=0, atol=5e-5)

    parameters = list(own_parameters(model).values())
    sums = [sum(part[:, 4].sum() for part in parts) for parts in (together, alone)]
    ours, theirs = (torch.autograd.grad(s, parameters, allow_unused=True) for s in sums)
    for own, other in zip(ours, theirs, strict=True):
        if own is not None and other is not None:
            assert bool(own.isfinite().all())
            torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-4)


@LAWS
@for_all(models, documents, seeds)
@torch.inference_mode()
def test_the_first_tokens_never_see_the_later_ones(
    chosen: Model, found: list[list[tuple[int, int, int]]], seed: int
) -> None:
    corpus = Corpus(build(chosen), found, fused=chosen[1] is not None)
    generator = torch.Generator().manual_seed(seed)
    wanted = corpus.in_context[int(torch.randint(len(corpus.in_context), (), generator=generator))]
    (expected,) = corpus.log_probs([wanted])
    target = corpus.examples[wanted].target
    assert target is not None
    for known in range(len(target)):
        other = [*target[:known], *((own + 3) % TARGET_SIZE for own in target[known:])]
        corpus.examples[wanted] = replace(corpus.examples[wanted], target=other)
        (own,) = corpus.log_probs([wanted])
        torch.testing.assert_close(own[: known + 1], expected[: known + 1], rtol=0, atol=1e-5)


@LAWS
@for_all(models, documents)
@torch.inference_mode()
def test_what_is_padded_is_not_attended_to_at_any_step(
    chosen: Model, found: list[list[tuple[int, int, int]]]
) -> None:
    """Step 1 too: whatever token of whatever sentence stands behind the mask of a context."""
    model = build(chosen)
    corpus = Corpus(model, found, fused=chosen[1] is not None)
    own = corpus.given(corpus.in_context)
    expected, steps = logits(model, own), by_steps(model, own)

    def other(context: Context) -> Context:
        last = len(context.states) - 1
        return replace(context, index=torch.where(context.mask, context.index, last))

    changed = replace(own, source=other(own.source), target=other(own.target))
    torch.testing.assert_close(logits(model, changed), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(by_steps(model, changed), steps, rtol=0, atol=1e-6)


def next_logits(corpus: Corpus, wanted: int, prefixes: list[list[int]]) -> Tensor:
    """Logits after each prefix of one sentence, without cache, padding or company."""
    before = [corpus.examples[i] for i in corpus.previous[wanted]]
    example = corpus.examples[wanted]
    # Predicted from what stands before it, the last token may be any.
    beams: list[Example] = [replace(example, target=[*prefix[1:], 2]) for prefix in prefixes]
    places = [len(before) + i for i in range(len(beams))]
    contexts = [list(range(len(before)))] * len(beams)
    drafts = [corpus.drafts[wanted]] * len(beams)
    own = given(corpus.model, [*before, *beams], contexts, places, drafts)
    return logits(corpus.model, own)[:, len(prefixes[0]) - 1]


@LAWS
@for_all(models, documents, seeds, st.integers(2, 12))
@torch.inference_mode()
def test_decoding_by_steps_equals_the_whole_for_any_history_of_beams(
    chosen: Model, found: list[list[tuple[int, int, int]]], seed: int, steps: int
) -> None:
    """Beams are extended, re-ordered, multiplied, dropped; sentences leave and change places."""
    model = build(chosen)
    corpus = Corpus(model, found, fused=chosen[1] is not None)
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    order = corpus.in_context
    own = corpus.given(order)
    decoder = model.start(own.current, own.source, own.target)
    tokens = torch.full((len(order), 1), 2)
    histories: list[list[list[int]]] = [[[]] for _ in order]  # sentences, beams, tokens
    for step in range(steps):
        histories = [
            [[*history, token] for history, token in zip(own_beams, row, strict=True)]
            for own_beams, row in zip(histories, tokens.tolist(), strict=True)
        ]
        result = decoder.step(tokens).clone()
        if step in (0, 1, steps - 1):  # a wrong cache stays wrong
            for row, wanted in enumerate(order):
                expected = next_logits(corpus, wanted, histories[row])
                torch.testing.assert_close(result[row], expected, rtol=0, atol=1e-4)
        if len(order) > 1 and draw(0, 4, 1).item() == 0:
            size = int(draw(0, len(order), 1)) + 1
            kept = torch.randperm(len(order), generator=generator)[:size]
            decoder.keep(kept)
            order = [order[row] for row in kept.tolist()]
            histories = [histories[row] for row in kept.tolist()]
        if step == 0 or draw(0, 2, 1).item() == 0:
            beams = len(histories[0])
            parents = draw(0, beams, len(order), int(draw(1, 4, 1)))
            decoder.reorder(parents)
            histories = [
                [beams[parent] for parent in row]
                for beams, row in zip(histories, parents.tolist(), strict=True)
            ]
        tokens = draw(3, TARGET_SIZE, len(order), len(histories[0]))
