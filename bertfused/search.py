"""Find translations: beam search, diverse beam search and sampling over any step-wise model.

The search knows no model, only a ``Decoder``. Which hypotheses are found, in which order and with
which scores is what fairseq 0.12's ``SequenceGenerator`` gives for a batch of one sentence;
departures are named where they happen.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bertfused.config import SAMPLING, SearchConfig
from bertfused.errors import UserError

FREE = -1  # in a table of forced tokens: nothing is forced here
CHUNK = 128  # columns per maximum in `top_candidates`; amax is several times slower off 64s
SMALL = 2**16  # up to so many log-probs one plain top-k is faster than the chunked one
KEEP_SHARE = 0.75  # finished sentences leave the batch when fewer than this share are still open
HEAD = 32  # most nuclei lie within so many tokens


@runtime_checkable
class Decoder(Protocol):
    """One step of a left-to-right model over a batch of sentences with equally many beams each.

    The first call of ``step`` has one beam. What ``step`` returns is handed over: the search
    overwrites it.
    """

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        """Logits, or log-probabilities, of the token after ``tokens``."""

    def reorder(self, parents: Int[Tensor, "batch new_beams"]) -> None:
        """Let beam j of each sentence continue what was its beam ``parents[:, j]``."""

    def keep(self, sentences: Int[Tensor, " kept"]) -> None:
        """Drop all other sentences; the kept ones stand in this order."""


@runtime_checkable
class StatefulDecoder(Decoder, Protocol):
    """A decoder that can give the states from which the tokens of a translation were predicted."""

    def keep_states(self) -> None:
        """Keep the states of every step from now on, the first."""

    def states(self, places: Int[Tensor, "beams 2"]) -> list[Float[Tensor, "_ width"]]:
        """Give the kept states of all steps so far of some beams, named by (row, beam)."""
        ...


@dataclass(frozen=True)
class SpecialIds:
    """Token numbers with a meaning.

    Attributes:
        start: What the decoder is fed first (fairseq: EOS).
        never: Others that no translation has.
    """

    bos: int = 0
    pad: int = 1
    eos: int = 2
    unk: int = 3
    start: int = 2
    never: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hypothesis:
    """One translation.

    Attributes:
        ids: EOS last.
        score: Length-normalised.
        token_log_probs: One per id.
        states: Of the decoder, where they were asked for: those that predicted each id.
    """

    ids: list[int]
    score: float
    token_log_probs: list[float]
    states: Float[Tensor, "length width"] | None = field(default=None, compare=False, repr=False)


class Candidates(NamedTuple):
    """Continuations of each sentence, best first: total log-prob, token, beam they continue."""

    scores: Float[Tensor, "batch width"]
    tokens: Int[Tensor, "batch width"]
    parents: Int[Tensor, "batch width"]


# Picks continuations, given log-probs, total log-probs of the beams, sentence of each row, step.
Choose = Callable[[Tensor, Tensor, Tensor, int], Candidates]
# Gives the states of all steps so far of some beams, named by (row, beam).
StatesOf = Callable[[Tensor], list[Tensor]]


def beam_search(
    decoder: Decoder,
    max_lengths: Int[Tensor, " batch"],
    config: SearchConfig,
    *,
    nbest: int | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    begun: Sequence[int] | None = None,
    special: SpecialIds = SpecialIds(),
    states_of: StatesOf | None = None,
) -> list[list[Hypothesis]]:
    """Find the best hypotheses of each sentence, best first.

    A step ranks the 2 * beam_size best continuations of a sentence. Those among the first beam_size
    that end in EOS are hypotheses; the first beam_size others go on. A sentence is finished with
    beam_size hypotheses or after its longest length, where only EOS is allowed; scores are
    log-probability / length ** length_penalty, EOS counted in both.

    Diverse beam search (Vijayakumar et al., 2016, Hamming diversity) ranks group by group, beam j
    being in group j % groups, and takes ``diverse_strength`` from a token for each candidate of an
    earlier group that has it.

    Args:
        max_lengths: Tokens before EOS at most.
        nbest: How many to return; all of the beam when absent.
        prefixes: Ids each translation has to begin with; they may end in EOS. A forced token is
            exempt from all other rules but ``unk_penalty``. (fairseq repeats a hypothesis whose
            EOS was forced beam_size times; here it comes once.)
        begun: How many ids of each prefix ``min_length`` and ``no_repeat_ngram`` do not count.
        states_of: Asked of the decoder for each hypothesis, at the step that ends it.

    Raises:
        UserError: If ``nbest`` exceeds the beam, or a sentence is left without any hypothesis.
    """
    if nbest is not None and nbest > config.beam_size:
        raise UserError(f"nbest is {nbest}; beam_size {config.beam_size} allows no more than that")
    width, groups = config.beam_size, config.diverse_groups or 1

    def choose(log_probs: Tensor, scores: Tensor, sentences: Tensor, step: int) -> Candidates:
        if groups == 1:
            return top_candidates(log_probs, scores, 2 * width)
        return diverse_candidates(log_probs, scores, 2 * width, groups, config.diverse_strength)

    rules = _Rules.build(max_lengths, prefixes, begun, config, special)
    found = _search(decoder, rules, config, width, choose, states_of)
    return [hypotheses[:nbest] for hypotheses in found]


def sample(
    decoder: Decoder,
    max_lengths: Int[Tensor, " batch"],
    config: SearchConfig,
    *,
    seeds: Sequence[int],
    num_samples: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    begun: Sequence[int] | None = None,
    special: SpecialIds = SpecialIds(),
    states_of: StatesOf | None = None,
) -> list[list[Hypothesis]]:
    """Draw ``num_samples`` translations of each sentence, most probable first.

    Sentence i draws from a generator seeded with ``seeds[i]`` only, so batch-mates change nothing.
    Scores are those of the whole (tempered) distribution; top-k and nucleus sampling choose among
    the tokens the other rules allow.
    """
    match = re.fullmatch(SAMPLING, config.sampling or "full")
    assert match is not None
    top_k = int(match["k"]) if match["k"] else None
    top_p = float(match["p"]) if match["p"] else None
    limits = max_lengths.tolist()
    table = np.zeros((len(limits), max(limits, default=0) + 1, num_samples))
    for row, seed, limit in zip(table, seeds, limits, strict=True):
        row[: limit + 1] = np.random.default_rng(seed).random((limit + 1, num_samples))
    uniforms = torch.from_numpy(table).to(max_lengths.device)

    def choose(log_probs: Tensor, scores: Tensor, sentences: Tensor, step: int) -> Candidates:
        return sampled_candidates(log_probs, scores, uniforms[sentences, step], top_k, top_p)

    rules = _Rules.build(max_lengths, prefixes, begun, config, special)
    return _search(decoder, rules, config, num_samples, choose, states_of)


def longest(
    config: SearchConfig, source_lengths: Int[Tensor, " batch"], positions: int
) -> Int[Tensor, " batch"]:
    """Bound each output by a * source + b and by the target positions of the model.

    The source's own length counts, EOS included (fairseq: the longest of the batch); one position
    is left for EOS.
    """
    bound = (config.max_length_a * source_lengths.double() + config.max_length_b).long()
    return bound.clamp(max=positions - 1)


def line_seeds(seed: int, lines: Sequence[int]) -> list[int]:
    """Give one seed per line number, another one for each (seed, line)."""
    return [(seed << 64) + line for line in lines]


@torch.inference_mode()
def _search(
    decoder: Decoder,
    rules: "_Rules",
    config: SearchConfig,
    width: int,
    choose: Choose,
    states_of: StatesOf | None,
) -> list[list[Hypothesis]]:
    """Run the loop that beam search and sampling share; they differ in ``choose``."""
    device, eos = rules.limits.device, rules.special.eos
    found: list[list[Hypothesis]] = [[] for _ in range(len(rules.limits))]
    order = list(range(len(found)))  # the sentence in each row
    unfinished = set(order)
    sentences = torch.arange(len(found), device=device)
    tokens = torch.full((len(found), 1), rules.special.start, device=device)
    scores = torch.zeros(len(found), 1, device=device)
    history = tokens[:, :, None][:, :, :0]  # tokens of each beam, and its score after each of them
    totals = scores[:, :, None][:, :, :0]
    same = torch.arange(width, device=device)
    for step in range(max(rules.limits.tolist(), default=-1) + 1):
        log_probs = log_softmax(decoder.step(tokens), config.temperature)
        rules.apply(log_probs, history, sentences)
        best = choose(log_probs, scores, sentences, step)
        is_eos = best.tokens == eos
        ended = (is_eos & (best.scores > -math.inf))[:, :width].nonzero()
        going = _going_on(best, is_eos, width)
        if len(ended):
            stuck = (going.scores.amax(1) == -math.inf).tolist()
            finished = _hypotheses(ended, best, history, totals, config, eos, states_of)
            for row, hypothesis in zip(ended[:, 0].tolist(), finished, strict=True):
                hypotheses = found[order[row]]
                if len(hypotheses) < width:
                    hypotheses.append(hypothesis)
                if len(hypotheses) == width or stuck[row]:
                    unfinished.discard(order[row])
            rows = [row for row, sentence in enumerate(order) if sentence in unfinished]
            if not rows:
                break
            if len(rows) < KEEP_SHARE * len(order):  # until then finished ones do no harm
                kept = torch.tensor(rows, device=device)
                decoder.keep(kept)
                order = [order[row] for row in rows]
                going = Candidates(*(field[kept] for field in going))
                sentences, history, totals = sentences[kept], history[kept], totals[kept]
        scores, tokens, parents = going
        if history.size(1) != width or not torch.equal(parents, same.expand_as(parents)):
            decoder.reorder(parents)
            rows_of = torch.arange(len(order), device=device)[:, None]
            history, totals = history[rows_of, parents], totals[rows_of, parents]
        history = torch.cat([history, tokens[:, :, None]], dim=2)
        totals = torch.cat([totals, scores[:, :, None]], dim=2)
    for sentence, hypotheses in enumerate(found):
        if not hypotheses:
            raise UserError(
                f"sentence {sentence} of the batch has no translation: the model's scores are not "
                "finite, or min_length and no_repeat_ngram leave no token to choose"
            )
        hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
    return found


def _going_on(best: Candidates, is_eos: Tensor, width: int) -> Candidates:
    """Take the first ``width`` candidates that did not end.

    A sampler has no spare ones: there an ended one stays in its place, impossible to continue.
    """
    if best.tokens.size(1) == width:
        return best._replace(scores=best.scores.masked_fill(is_eos, -math.inf))
    if not is_eos.any():
        return Candidates(*(field[:, :width] for field in best))
    ranks = is_eos.byte().argsort(dim=1, stable=True)[:, :width]
    return Candidates(*(field.gather(1, ranks) for field in best))


def _hypotheses(
    ended: Int[Tensor, "ended 2"],
    best: Candidates,
    history: Int[Tensor, "batch beams step"],
    totals: Float[Tensor, "batch beams step"],
    config: SearchConfig,
    eos: int,
    states_of: StatesOf | None,
) -> list[Hypothesis]:
    """Make a hypothesis of each (row, rank) of the candidates."""
    rows, ranks = ended.unbind(1)
    parents = best.parents[rows, ranks]
    sums = torch.cat([totals[rows, parents], best.scores[rows, ranks, None]], dim=1)
    log_probs = sums.diff(dim=1, prepend=torch.zeros_like(sums[:, :1]))
    length = sums.size(1)
    found = zip(
        history[rows, parents].tolist(),
        sums[:, -1].tolist(),
        log_probs.tolist(),
        states_of(torch.stack([rows, parents], dim=1)) if states_of else [None] * len(rows),
        strict=True,
    )
    return [
        Hypothesis([*ids, eos], normalised(total, length, config), token_log_probs, states)
        for ids, total, token_log_probs, states in found
    ]


def normalised(log_prob: float, length: int, config: SearchConfig) -> float:
    """Score a translation of ``length`` tokens, EOS counted, by the total of their log-probs."""
    return log_prob / length**config.length_penalty if config.normalize else log_prob


@dataclass(frozen=True)
class _Rules:
    """What may come next, whatever the model says."""

    limits: Int[Tensor, " sentences"]
    forced: Int[Tensor, "sentences steps"]
    begun: Int[Tensor, " sentences"]
    config: SearchConfig
    special: SpecialIds
    first_limit: int
    last_begun: int

    @staticmethod
    def build(
        max_lengths: Int[Tensor, " sentences"],
        prefixes: Sequence[Sequence[int]] | None,
        begun: Sequence[int] | None,
        config: SearchConfig,
        special: SpecialIds,
    ) -> "_Rules":
        prefixes = [()] * len(max_lengths) if prefixes is None else prefixes
        steps = max(map(len, prefixes), default=0)
        table = np.full((len(max_lengths), steps), FREE)
        for row, prefix in zip(table, prefixes, strict=True):
            row[: len(prefix)] = prefix
        forced = torch.from_numpy(table).to(max_lengths.device)
        first_limit = min(max_lengths.tolist(), default=0)
        begun = [0] * len(max_lengths) if begun is None else begun
        last_begun = max(begun, default=0)
        first = max_lengths.new_tensor(begun)
        return _Rules(max_lengths, forced, first, config, special, first_limit, last_begun)

    def apply(
        self,
        log_probs: Float[Tensor, "batch beams vocab"],
        history: Int[Tensor, "batch beams step"],
        sentences: Int[Tensor, " batch"],
    ) -> None:
        """Overwrite what is ruled out with -inf. Log-probs are not normalised again (fairseq).

        BOS is never generated, like PAD (fairseq allows it). A longest length below ``min_length``
        wins (fairseq stops with an error).
        """
        special, step = self.special, history.size(2)
        if self.config.unk_penalty:
            log_probs[:, :, special.unk] -= self.config.unk_penalty
        rows, only = self._forced(step, sentences)
        allowed = log_probs[rows, :, only] if len(rows) else None
        log_probs[:, :, special.pad] = -math.inf
        log_probs[:, :, special.bos] = -math.inf
        if special.never:
            log_probs[:, :, special.never] = -math.inf
        begun = self.begun[sentences]
        if step < self.last_begun + self.config.min_length:
            is_short = step - begun < self.config.min_length
            log_probs[..., special.eos].masked_fill_(is_short[:, None], -math.inf)
        size = self.config.no_repeat_ngram
        if size and step >= size:
            seen = history.unfold(2, size, 1)
            recent = history[:, :, None, step - size + 1 :]
            is_counted = torch.arange(seen.size(2), device=begun.device) >= begun[:, None]
            repeats = (seen[..., :-1] == recent).all(-1) & is_counted[:, None]
            banned = torch.where(repeats, seen[..., -1], special.pad)
            log_probs.scatter_(2, banned, -math.inf)
        if allowed is not None:
            log_probs[rows] = -math.inf
            log_probs[rows, :, only] = allowed

    def _forced(self, step: int, sentences: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Find the rows of which only one token is allowed now, and that token."""
        if self.forced.size(1) <= step < self.first_limit:
            return sentences[:0], sentences[:0]
        only = torch.full_like(sentences, FREE)
        if step < self.forced.size(1):
            only = self.forced[sentences, step]
        only = torch.where(self.limits[sentences] <= step, self.special.eos, only)
        rows = (only != FREE).nonzero()[:, 0]
        return rows, only[rows]


def log_softmax(
    logits: Float[Tensor, "*rows vocab"], temperature: float = 1.0
) -> Float[Tensor, "*rows vocab"]:
    """Normalise in float32, overwriting ``logits``.

    On CPUs this kernel in place is faster than any way to compute the normaliser alone.
    """
    logits = logits.float().contiguous()
    if temperature != 1:
        logits = logits.div_(temperature)
    if logits.device.type == "cpu":
        return torch.log_softmax(logits, dim=-1, out=logits)
    return logits.log_softmax(-1)


def top_candidates(
    log_probs: Float[Tensor, "batch beams vocab"],
    scores: Float[Tensor, "batch beams"],
    count: int,
) -> Candidates:
    """Rank the ``count`` best continuations of all beams of a sentence, exactly.

    A top-k over beams * vocab is slow on CPUs. The k best lie in the k chunks of columns with the
    highest maxima, and maxima are cheap: rank the chunks, copy k of them, rank their columns.
    Where there are fewer than ``count``, impossible ones fill up.
    """
    batch, beams, vocab = log_probs.shape
    if log_probs.device.type != "cpu" or log_probs.numel() <= SMALL or count > vocab // CHUNK:
        sums = (log_probs + scores[:, :, None]).view(batch, -1)
        best, places = sums.topk(min(count, sums.size(1)))
        missing = (0, count - best.size(1))
        best = functional.pad(best, missing, value=-math.inf)
        places = functional.pad(places, missing)
        return Candidates(best, places % vocab, places // vocab)
    rows = log_probs.view(-1, vocab)
    maxima = _per_chunk(rows, torch.amax).view(batch, beams, -1) + scores[:, :, None]
    highest = maxima.view(batch, -1).topk(count).indices
    parents, chunks = highest // maxima.size(2), highest % maxima.size(2)
    row_numbers = torch.arange(0, len(rows), beams)[:, None] + parents
    pool, first = _windows(rows, row_numbers, chunks, -math.inf)
    pool = pool.view(batch, count, CHUNK) + scores.gather(1, parents)[:, :, None]
    best, places = pool.view(batch, -1).topk(count)
    winners = places // CHUNK
    return Candidates(best, first.gather(1, winners) + places % CHUNK, parents.gather(1, winners))


def diverse_candidates(
    log_probs: Float[Tensor, "batch beams vocab"],
    scores: Float[Tensor, "batch beams"],
    count: int,
    groups: int,
    strength: float,
) -> Candidates:
    """Rank ``count`` / ``groups`` continuations per group; give all firsts, all seconds, ...

    The penalties stay in the scores, as in fairseq.
    """
    first_step = scores.size(1) == 1
    used = torch.zeros_like(log_probs[:, 0])
    ranked = []
    for group in range(groups):
        beams_of_group = slice(None) if first_step else slice(group, None, groups)
        penalised = log_probs[:, beams_of_group] - strength * used[:, None]
        best = top_candidates(penalised, scores[:, beams_of_group], count // groups)
        used.scatter_add_(1, best.tokens, torch.ones_like(best.scores))
        parents = best.parents if first_step else best.parents * groups + group
        ranked.append(best._replace(parents=parents))
    fields = zip(*ranked, strict=True)
    return Candidates(*(torch.stack(field, dim=2).flatten(1) for field in fields))


def sampled_candidates(
    log_probs: Float[Tensor, "batch beams vocab"],
    scores: Float[Tensor, "batch beams"],
    uniforms: Float[Tensor, "batch samples"],
    top_k: int | None,
    top_p: float | None,
) -> Candidates:
    """Draw one continuation per sample by inverting the distribution function at ``uniforms``."""
    batch, beams, vocab = log_probs.shape
    weights = log_probs.flatten(0, 1).softmax(-1)
    uniforms = uniforms.view(batch * beams, -1)
    if top_k is None and top_p is None:
        tokens = _draw(weights, uniforms)
    else:
        heaviest, ids = _heaviest(weights, min(top_k or HEAD, vocab))
        tokens = _draw_of(ids, _nucleus(heaviest, top_p), uniforms)
        if top_p is not None and heaviest.size(1) < vocab:
            wide = (heaviest.sum(1) < top_p).nonzero()[:, 0]
            if len(wide):
                heaviest, ids = weights[wide].sort(descending=True)
                tokens[wide] = _draw_of(ids, _nucleus(heaviest, top_p), uniforms[wide])
    tokens = tokens.view(batch, beams, -1)
    sums = log_probs.gather(2, tokens).flatten(1) + scores
    beam = torch.arange(beams, device=scores.device)
    return Candidates(sums, tokens.flatten(1), beam.expand_as(sums))


def _heaviest(
    weights: Float[Tensor, "rows vocab"], count: int
) -> tuple[Float[Tensor, "rows count"], Int[Tensor, "rows count"]]:
    best = top_candidates(weights[:, None], weights.new_zeros(len(weights), 1), count)
    return best.scores, best.tokens


def _nucleus(
    weights: Float[Tensor, "rows width"], top_p: float | None
) -> Float[Tensor, "rows width"]:
    """Leave of descending weights the fewest that reach ``top_p`` together."""
    if top_p is None:
        return weights
    before = weights.cumsum(1) - weights
    return weights.masked_fill(before >= top_p, 0)


def _draw_of(
    ids: Int[Tensor, "rows width"],
    weights: Float[Tensor, "rows width"],
    uniforms: Float[Tensor, "rows samples"],
) -> Int[Tensor, "rows samples"]:
    """Draw tokens, laid out in the order of the vocabulary.

    In that of the weights two of almost equal weight would change places by rounding, and so what
    is drawn for a sentence would depend on its batch.
    """
    ids, order = ids.sort(dim=1)
    return ids.gather(1, _draw(weights.gather(1, order), uniforms))


def _draw(
    weights: Float[Tensor, "rows width"], uniforms: Float[Tensor, "rows samples"]
) -> Int[Tensor, "rows samples"]:
    """Pick columns with probabilities proportional to the weights: a chunk first, then in it."""
    if weights.size(1) < 2 * CHUNK:
        return _invert(weights, uniforms)[0]
    chunks, within = _invert(_per_chunk(weights, torch.sum), uniforms)
    row_numbers = torch.arange(len(weights), device=weights.device)[:, None].expand_as(chunks)
    windows, first = _windows(weights, row_numbers, chunks, 0.0)
    return first + _invert(windows, within.view(-1, 1))[0].view_as(first)


def _invert(
    weights: Float[Tensor, "rows width"], uniforms: Float[Tensor, "rows samples"]
) -> tuple[Int[Tensor, "rows samples"], Float[Tensor, "rows samples"]]:
    """Find where the running sum passes ``uniforms`` of the total, and how far inside, 0 to 1.

    In double precision, so that rounding favours no impossible column.
    """
    sums = weights.cumsum(1, dtype=torch.float64)
    targets = uniforms * sums[:, -1:]
    places = torch.searchsorted(sums, targets, right=True).clamp(max=weights.size(1) - 1)
    left = 1 - (sums.gather(1, places) - targets) / weights.gather(1, places)
    return places, left.clamp(0, 1 - 2**-53)


def _per_chunk(
    rows: Float[Tensor, "rows vocab"], reduce: Callable[..., Tensor]
) -> Float[Tensor, "rows chunks"]:
    """Reduce each CHUNK columns to one; the last chunk may be narrower."""
    whole = rows.size(1) // CHUNK * CHUNK
    reduced = reduce(rows[:, :whole].unflatten(1, (-1, CHUNK)), 2)
    if whole == rows.size(1):
        return reduced
    return torch.cat([reduced, reduce(rows[:, whole:], 1, True)], dim=1)


def _windows(
    rows: Float[Tensor, "rows vocab"],
    row_numbers: Int[Tensor, "sets count"],
    chunks: Int[Tensor, "sets count"],
    empty: float,
) -> tuple[Float[Tensor, "picked chunk"], Int[Tensor, "sets count"]]:
    """Copy chunks, and give the column each copy begins with."""
    vocab = rows.size(1)
    first = (chunks * CHUNK).clamp(max=vocab - CHUNK)
    starts = row_numbers * vocab + first
    windows = rows.view(-1).unfold(0, CHUNK, 1).index_select(0, starts.view(-1))
    if vocab % CHUNK:  # the window of the last chunk begins inside the one before it
        is_last = (chunks == vocab // CHUNK).view(-1)
        windows[is_last, : CHUNK - vocab % CHUNK] = empty
    return windows, first


class Ensemble:
    """Decode with the average of several models' probabilities.

    Args:
        members: Decoders of the same batch and vocabulary.
        temperature: Each member's logits are divided by it (give the search temperature 1).
    """

    def __init__(self, members: Sequence[Decoder], temperature: float = 1.0) -> None:
        self.members = members
        self.temperature = temperature

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        """Give the log of the members' average probability."""
        first, *others = (log_softmax(m.step(tokens), self.temperature) for m in self.members)
        for other in others:
            first = torch.logaddexp(first, other, out=first)
        return first - math.log(len(self.members))

    def reorder(self, parents: Int[Tensor, "batch new_beams"]) -> None:
        """Re-order all members."""
        for member in self.members:
            member.reorder(parents)

    def keep(self, sentences: Int[Tensor, " kept"]) -> None:
        """Keep the same sentences in all members."""
        for member in self.members:
            member.keep(sentences)
