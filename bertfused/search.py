"""Find translations: beam search, diverse beam search and sampling over any step-wise model.

The search knows no model, only a ``Decoder``. Which hypotheses are found, in which order and with
which scores is what fairseq 0.12's ``SequenceGenerator`` gives for a batch of one sentence;
departures are named where they happen.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional

from bertfused.errors import UserError

FREE = -1  # in a table of forced tokens: nothing is forced here
CHUNK = 128  # columns per maximum in `top_candidates`; amax is several times slower off 64s
SMALL = 2**16  # up to so many log-probs one plain top-k is faster than the chunked one
KEEP_SHARE = 0.75  # finished sentences leave the batch when fewer than this share are still open
SAMPLING = r"full|topk:(?P<k>[1-9]\d*)|nucleus:(?P<p>0?\.\d*[1-9]\d*|1(\.0*)?)"


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


@dataclass(frozen=True)
class SpecialIds:
    """Token numbers with a meaning; ``start`` is what the decoder is fed first (fairseq: EOS)."""

    bos: int = 0
    pad: int = 1
    eos: int = 2
    unk: int = 3
    start: int = 2


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its ids, EOS last, its length-normalised score, one log-prob per id."""

    ids: list[int]
    score: float
    token_log_probs: list[float]


class SearchConfig(BaseModel):
    """How translations are searched for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    beam_size: int = Field(5, ge=1, description="hypotheses kept at each step, >= 1")
    length_penalty: float = Field(1.0, description="score = log-probability / length ** this")
    normalize: bool = Field(True, description="false: score = log-probability")
    max_length_a: float = Field(0.0, ge=0, description="at most a * source tokens + b tokens + EOS")
    max_length_b: int = Field(200, ge=0, description="the b of max_length_a, tokens")
    min_length: int = Field(1, ge=0, description="at least this many tokens before EOS")
    no_repeat_ngram: int | None = Field(None, ge=1, description="no n-gram of this size twice")
    unk_penalty: float = Field(0.0, description="nats taken from <unk>; below 0 favours it")
    diverse_groups: int | None = Field(None, ge=1, description="groups of diverse beam search")
    diverse_strength: float = Field(0.5, ge=0, description="nats lost per use in earlier groups")
    sampling: str | None = Field(None, description="full, topk:K, nucleus:P; absent: beam search")
    temperature: float = Field(1.0, gt=0, description="logits are divided by this, > 0")
    seed: int = Field(1, ge=0, description="of sampling; each line has a stream of its own")

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        if self.diverse_groups and self.beam_size % self.diverse_groups:
            raise ValueError(
                f"beam_size {self.beam_size} is not a multiple of "
                f"diverse_groups {self.diverse_groups}"
            )
        if self.sampling and self.diverse_groups:
            raise ValueError("sampling and diverse_groups exclude each other")
        if self.sampling and not re.fullmatch(SAMPLING, self.sampling):
            raise ValueError(
                f"sampling is {self.sampling!r}; allowed are full, topk:K with K >= 1 and "
                "nucleus:P with 0 < P <= 1"
            )
        return self

    def max_lengths(
        self, source_lengths: Int[Tensor, " batch"], positions: int
    ) -> Int[Tensor, " batch"]:
        """Bound each output by its own source's length, EOS included (fairseq: the batch's longest)
        and by the target positions a model has, one of which EOS needs."""
        bound = (self.max_length_a * source_lengths.double() + self.max_length_b).long()
        return bound.clamp(max=positions - 1)

    def seeds(self, lines: Sequence[int]) -> list[int]:
        """Give one seed per line number, another one for each (seed, line)."""
        return [(self.seed << 64) + line for line in lines]


class Candidates(NamedTuple):
    """Continuations of each sentence, best first: total log-prob, token, beam they continue."""

    scores: Float[Tensor, "batch width"]
    tokens: Int[Tensor, "batch width"]
    parents: Int[Tensor, "batch width"]


# Picks continuations, given log-probs, total log-probs of the beams, sentence of each row, step.
Choose = Callable[[Tensor, Tensor, Tensor, int], Candidates]


def beam_search(
    decoder: Decoder,
    max_lengths: Int[Tensor, " batch"],
    config: SearchConfig,
    *,
    nbest: int | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    special: SpecialIds = SpecialIds(),
) -> list[list[Hypothesis]]:
    """Find the best hypotheses of each sentence, best first.

    A step ranks the 2 * beam_size best continuations of a sentence. Those among the first beam_size
    that end in EOS are hypotheses; the first beam_size others go on. A sentence is finished with
    beam_size hypotheses or after its longest length, where only EOS is allowed; the scores are
    log-probability / length ** length_penalty, EOS counted in both. Diverse beam search (Vijayakumar
    et al., 2016, Hamming diversity) ranks group by group, beam j being in group j % groups, and
    takes ``diverse_strength`` from a token for each candidate of an earlier group that has it.

    Args:
        max_lengths: Tokens before EOS at most.
        nbest: How many to return; all of the beam when absent.
        prefixes: Ids each translation has to begin with; they may end in EOS. A forced token is
            exempt from all other rules. (fairseq repeats a hypothesis whose EOS was forced
            beam_size times; here it comes once.)

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

    rules = _Rules.build(max_lengths, prefixes, config, special)
    found = _search(decoder, rules, config, width, choose)
    return [hypotheses[:nbest] for hypotheses in found]


def sample(
    decoder: Decoder,
    max_lengths: Int[Tensor, " batch"],
    config: SearchConfig,
    *,
    seeds: Sequence[int],
    num_samples: int = 1,
    prefixes: Sequence[Sequence[int]] | None = None,
    special: SpecialIds = SpecialIds(),
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
    longest = max(max_lengths.tolist(), default=0)
    uniforms = torch.zeros(len(max_lengths), longest + 1, num_samples)
    for row, seed, limit in zip(uniforms, seeds, max_lengths.tolist(), strict=True):
        drawn = np.random.default_rng(seed).random((limit + 1, num_samples), dtype=np.float32)
        row[: limit + 1] = torch.from_numpy(drawn)
    uniforms = uniforms.to(max_lengths.device)

    def choose(log_probs: Tensor, scores: Tensor, sentences: Tensor, step: int) -> Candidates:
        return sampled_candidates(log_probs, scores, uniforms[sentences, step], top_k, top_p)

    rules = _Rules.build(max_lengths, prefixes, config, special)
    return _search(decoder, rules, config, num_samples, choose)


@torch.inference_mode()
def _search(
    decoder: Decoder, rules: "_Rules", config: SearchConfig, width: int, choose: Choose
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
            finished = _hypotheses(ended, best, history, totals, config, eos)
            for row, hypothesis in zip(ended[:, 0].tolist(), finished, strict=True):
                hypotheses = found[order[row]]
                if len(hypotheses) < width:
                    hypotheses.append(hypothesis)
                if len(hypotheses) == width or stuck[row]:
                    unfinished.discard(order[row])
            rows = [row for row, sentence in enumerate(order) if sentence in unfinished]
            if not rows:
                break
            kept = torch.tensor(rows, device=device)
            if len(rows) < KEEP_SHARE * len(order):
                decoder.keep(kept)
                order = [order[row] for row in rows]
                going = Candidates(*(field[kept] for field in going))
                sentences, history, totals = sentences[kept], history[kept], totals[kept]
            elif len(rows) < len(order):  # finished ones stay for a while, impossible to continue
                lost = torch.full_like(going.scores, -math.inf)
                going = going._replace(scores=lost.index_copy(0, kept, going.scores[kept]))
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
    """Take the first ``width`` candidates that did not end. A sampler has no spare ones: there an
    ended one stays in its place, impossible to continue."""
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
) -> list[Hypothesis]:
    """Make a hypothesis of each (row, rank) of the candidates."""
    rows, ranks = ended.unbind(1)
    parents = best.parents[rows, ranks]
    sums = torch.cat([totals[rows, parents], best.scores[rows, ranks, None]], dim=1)
    log_probs = sums.diff(dim=1, prepend=torch.zeros_like(sums[:, :1]))
    length = sums.size(1)
    divisor = length**config.length_penalty if config.normalize else 1.0
    return [
        Hypothesis([*ids, eos], score / divisor, token_log_probs)
        for ids, score, token_log_probs in zip(
            history[rows, parents].tolist(), sums[:, -1].tolist(), log_probs.tolist(), strict=True
        )
    ]


@dataclass(frozen=True)
class _Rules:
    """What may come next, whatever the model says."""

    limits: Int[Tensor, " sentences"]
    forced: Int[Tensor, "sentences longest"]
    config: SearchConfig
    special: SpecialIds
    first_limit: int

    @staticmethod
    def build(
        max_lengths: Int[Tensor, " sentences"],
        prefixes: Sequence[Sequence[int]] | None,
        config: SearchConfig,
        special: SpecialIds,
    ) -> "_Rules":
        prefixes = [()] * len(max_lengths) if prefixes is None else prefixes
        longest = max(map(len, prefixes), default=0)
        table = [
            [*prefix] + [FREE] * (longest - len(prefix))
            for prefix, _ in zip(prefixes, max_lengths, strict=True)
        ]
        forced = torch.tensor(table, dtype=torch.long, device=max_lengths.device)
        forced = forced.view(len(max_lengths), longest)
        limits = max_lengths.tolist()
        return _Rules(max_lengths, forced, config, special, min(limits, default=0))

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
        if step < self.config.min_length:
            log_probs[:, :, special.eos] = -math.inf
        size = self.config.no_repeat_ngram
        if size and step >= size:
            seen = history.unfold(2, size, 1)
            recent = history[:, :, None, step - size + 1 :]
            repeats = (seen[..., :-1] == recent).all(-1)
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
    """Normalise in float32. On CPUs in place: measured faster than any logsumexp, and than a fresh
    vocabulary-sized result."""
    logits = logits.float().contiguous()
    if temperature != 1:
        logits = logits / temperature
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
    highest maxima, and maxima are cheap: rank chunks, gather k of them, rank their columns.
    Where there are fewer than ``count``, impossible ones fill up.
    """
    batch, beams, vocab = log_probs.shape
    whole, rest = divmod(vocab, CHUNK)
    chunks = whole + (rest > 0)
    if log_probs.device.type != "cpu" or log_probs.numel() <= SMALL or count > whole:
        sums = (log_probs + scores[:, :, None]).view(batch, -1)
        best, places = sums.topk(min(count, sums.size(1)))
        missing = (0, count - best.size(1))
        best, places = (
            functional.pad(best, missing, value=-math.inf),
            functional.pad(places, missing),
        )
        return Candidates(best, places % vocab, places // vocab)
    maxima = log_probs[:, :, : whole * CHUNK].unflatten(2, (whole, CHUNK)).amax(3)
    if rest:
        last = log_probs[:, :, whole * CHUNK :].amax(2, keepdim=True)
        maxima = torch.cat([maxima, last], dim=2)
    highest = (maxima + scores[:, :, None]).view(batch, -1).topk(count).indices
    parents, chunk = highest // chunks, highest % chunks
    columns = (chunk * CHUNK).clamp(max=vocab - CHUNK)  # of each chunk's first token
    row = torch.arange(0, batch * beams, beams, device=parents.device)[:, None] + parents
    windows = log_probs.view(-1).unfold(0, CHUNK, 1)  # index_select copies these whole
    pool = windows.index_select(0, (row * vocab + columns).view(-1))
    if rest:  # the last window begins inside the chunk before
        pool[(chunk == whole).view(-1), : CHUNK - rest] = -math.inf
    pool = pool.view(batch, count, CHUNK) + scores.gather(1, parents)[:, :, None]
    best, places = pool.view(batch, -1).topk(count)
    winners = places // CHUNK
    return Candidates(best, columns.gather(1, winners) + places % CHUNK, parents.gather(1, winners))


def diverse_candidates(
    log_probs: Float[Tensor, "batch beams vocab"],
    scores: Float[Tensor, "batch beams"],
    count: int,
    groups: int,
    strength: float,
) -> Candidates:
    """Rank ``count`` / ``groups`` continuations per group, then interleave: all firsts, all
    seconds, ... The penalties stay in the scores, as in fairseq."""
    first_step = scores.size(1) == 1
    used = torch.zeros_like(log_probs[:, 0])
    ranked = []
    for group in range(groups):
        own = slice(None) if first_step else slice(group, None, groups)
        penalised = log_probs[:, own] - strength * used[:, None]
        best = top_candidates(penalised, scores[:, own], count // groups)
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
    weights, ids = log_probs.softmax(-1), None
    if top_k is not None:
        weights, ids = _largest(weights, min(top_k, vocab))
    elif top_p is not None:
        size = min(64, vocab)
        best = _largest(weights, size)
        while size < vocab and bool((best[0].sum(-1) < top_p).any()):
            size = min(8 * size, vocab)
            best = _largest(weights, size)
        weights, ids = best
        before = weights.cumsum(-1) - weights  # the nucleus: all before are less than p together
        weights = weights.masked_fill(before >= top_p, 0)
    # Added up in order on CPUs; GPUs add in another one, so that rounding could favour a zero.
    exact = None if weights.device.type == "cpu" else torch.float64
    cumulative = weights.cumsum(-1, dtype=exact)
    targets = uniforms.view(batch, beams, -1) * cumulative[:, :, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True).clamp(max=weights.size(2) - 1)
    tokens = drawn if ids is None else ids.gather(2, drawn)
    sums = log_probs.gather(2, tokens).flatten(1) + scores
    beam = torch.arange(beams, device=scores.device)
    return Candidates(sums, tokens.flatten(1), beam.expand_as(sums).contiguous())


def _largest(
    weights: Float[Tensor, "batch beams vocab"], count: int
) -> tuple[Float[Tensor, "batch beams count"], Int[Tensor, "batch beams count"]]:
    """Rank the largest weights of each row."""
    rows = weights.flatten(0, 1)[:, None]
    best = top_candidates(rows, rows.new_zeros(len(rows), 1), count)
    shape = (*weights.shape[:2], count)
    return best.scores.view(shape), best.tokens.view(shape)


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
