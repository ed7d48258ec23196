"""Translate lines: the same text for a line in any batch, in any order, one output per input."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from bertfused.batch import Batch, BertIds, Example, collate, token_batches
from bertfused.checkpoint import ModelCard, TrainedModel, load_model
from bertfused.config import InferencePrecision, SearchConfig
from bertfused.errors import UserError
from bertfused.model import DecoderState, FusedTransformer
from bertfused.packed import pack_linears
from bertfused.pretrained import PretrainedEncoder
from bertfused.search import (
    Decoder,
    Ensemble,
    Hypothesis,
    SpecialIds,
    StatesOf,
    beam_search,
    line_seeds,
    longest,
    normalised,
    sample,
)
from bertfused.subwords import Tokenizer

Long = Literal["truncate", "split", "error"]

#: Counts the translations that have no end of their own.
CUT = "translations ended by the maximum length"
# Lines looked at together to be sorted by length; the bound on memory.
_WINDOW = 4096
# Sampling streams kept apart within a line that is split.
_PARTS = 1 << 16


@dataclass(frozen=True)
class SourceLine:
    """A line to translate.

    Attributes:
        context: Previous source sentences of its document, nearest last.
        target_context: Their translations, where these are given and not found.
        document: Name of the document.
        prefix: What the translation must begin with.
        number: Where it stands in its file, counted from 1, for messages.
    """

    text: str
    context: tuple[str, ...] = ()
    document: str | None = None
    prefix: str | None = None
    target_context: tuple[str, ...] = ()
    number: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Translated:
    """One translation of a line.

    Attributes:
        score: Length-normalised log-probability, in nats.
        log_prob: Sum over its tokens, EOS included.
        tokens: The subwords, EOS excluded.
        token_log_probs: One for each token and for EOS.
    """

    text: str
    score: float
    log_prob: float
    tokens: tuple[str, ...]
    token_log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Translation:
    """A line and its translations, best first."""

    source: str
    hypotheses: tuple[Translated, ...]

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text


@dataclass
class Member:
    """One model of an ensemble with what it needs to read text."""

    card: ModelCard
    model: FusedTransformer
    source: Tokenizer
    target: Tokenizer
    encoder: PretrainedEncoder | None

    @staticmethod
    def of(
        trained: TrainedModel, encoder: str | None = None, precision: InferencePrecision = "fp32"
    ) -> "Member":
        """Open the pretrained encoder too; options as of ``Translator.load``."""
        opened = trained.load_encoder(encoder)
        if opened is not None and precision == "bf16":
            opened.to(torch.bfloat16)
        return Member(
            trained.card,
            trained.model,
            trained.source_tokenizer,
            trained.target_tokenizer,
            opened,
        )

    def towards(self, target: str) -> "Member":
        """Return the same model for the direction into a language.

        Raises:
            UserError: If the model does not translate into it.
        """
        card = self.card
        if target == card.target:
            return self
        if target not in card.languages:
            raise UserError(f"the model translates {card.directions}, not into {target!r}")
        card = card.model_copy(update={"source": card.target, "target": card.source})
        return replace(self, card=card, source=self.target, target=self.source)

    def examples(self, lines: Sequence[SourceLine], counts: Counter[str]) -> list[Example]:
        """Make the ids of lines, without targets."""
        eos, languages = self.source.vocabulary.eos, self.card.language_ids
        texts = [line.text for line in lines]
        examples = [
            Example(source=[*ids, eos], languages=languages)
            for ids in self.source.encode_batch(texts)
        ]
        if self.encoder is None:
            return examples
        contexts = [line.context for line in lines]
        reader = self.encoder.reader(0 if languages is None else languages[0])
        inputs = reader.encode_batch(texts, contexts)
        counts["context wordpieces cut"] += sum(pieces.truncated for pieces in inputs)
        return [
            replace(example, bert=pieces.ids)
            for example, pieces in zip(examples, inputs, strict=True)
        ]

    def examples_with_targets(
        self, lines: Sequence[SourceLine], targets: Sequence[str], counts: Counter[str]
    ) -> list[Example]:
        """Make the ids of lines and of given translations."""
        eos = self.target.vocabulary.eos
        encoded = self.target.encode_batch(targets)
        examples = self.examples(lines, counts)
        return [replace(e, target=[*ids, eos]) for e, ids in zip(examples, encoded, strict=True)]

    def batch(self, examples: Sequence[Example], device: torch.device) -> Batch:
        """Collate examples and attach the pretrained encoder's states."""
        ids: BertIds | None = None if self.encoder is None else self.encoder.bert_ids
        batch = collate(examples, ids).to(device)
        if self.encoder is not None and self.card.fusion is not None:
            batch = self.encoder.attach(batch, mask_special=self.card.fusion.mask_special)
        return batch

    def start(self, examples: Sequence[Example], device: torch.device) -> DecoderState:
        """Encode a batch and return its decoder, ready for the first step."""
        return DecoderState(self.model, self.model.encoder(self.batch(examples, device)))


@runtime_checkable
class LineTranslator(Protocol):
    """What the commands and a validation need of a translator."""

    counts: Counter[str]

    @property
    def documents(self) -> dict[str, Any] | None: ...
    @property
    def search(self) -> SearchConfig: ...
    def translate(
        self,
        lines: Iterable[str | SourceLine],
        search: SearchConfig | None = None,
        *,
        nbest: int = 1,
        batch_tokens: int = 4096,
        long: Long = "split",
        first_line: int = 0,
    ) -> Iterator[Translation]:
        """Translate lines, in order; see ``Translator.translate``."""
        ...


class Translator:
    """Translates lines of text with one model, or with the average of several.

    Example::

        translator = Translator.load("runs/demo/fused")
        for translation in translator.translate(["A man sleeps."]):
            print(translation.text)
    """

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self.members = list(members)
        self.device = device
        for member in self.members:
            member.model.eval().to(device)
            if member.encoder is not None:
                member.encoder.to(device)
            if member.encoder is not None and member.card.documents != self.documents:
                raise UserError("the fused models of an ensemble must read the same context")
            if member.target.vocabulary.sha256 != self.members[0].target.vocabulary.sha256:
                raise UserError("the models of an ensemble must have one target vocabulary")
        #: What had to be changed or cut, by reason.
        self.counts: Counter[str] = Counter()

    @staticmethod
    def load(
        run: str | Path,
        *,
        ensemble: Sequence[str | Path] = (),
        to: str | None = None,
        device: str = "auto",
        encoder: str | None = None,
        encoder_precision: InferencePrecision = "fp32",
    ) -> "Translator":
        """Load a RUN, or several.

        Args:
            run: Run, checkpoint or model folder.
            ensemble: More of them.
            to: Target language, for models of both directions.
            device: "auto", "cpu", "cuda", "cuda:1", ...
            encoder: Another place of the pretrained encoder, if it has moved.
            encoder_precision: "bf16" runs the pretrained encoder in bfloat16: faster, and a few
                translations differ.

        Raises:
            UserError: If a model cannot be loaded, or ``encoder`` is given and none reads one.
        """
        trained = [load_model(Path(path)) for path in (run, *ensemble)]
        if encoder is not None and all(model.card.fusion is None for model in trained):
            raise UserError(f"{run} is a plain model: it reads no encoder {encoder!r}")
        members = [Member.of(model, encoder, encoder_precision) for model in trained]
        if to is not None:
            members = [member.towards(to) for member in members]
        place = choose_device(device)
        for member in members:
            pack_linears(member.model, place)
        return Translator(members, place)

    @property
    def documents(self) -> dict[str, Any] | None:
        """What a fused model among them expects of its context."""
        fused = [member for member in self.members if member.encoder is not None]
        return (fused or self.members)[0].card.documents

    @property
    def search(self) -> SearchConfig:
        """The search settings the model was trained to be used with."""
        return self.members[0].card.search

    def translate(
        self,
        lines: Iterable[str | SourceLine],
        search: SearchConfig | None = None,
        *,
        nbest: int = 1,
        batch_tokens: int = 4096,
        long: Long = "split",
        first_line: int = 0,
    ) -> Iterator[Translation]:
        """Translate lines, in order, reading only a window of them ahead.

        An empty or blank line gives an empty translation without asking the model.

        Args:
            search: How to search; default: the model's own settings.
            nbest: Translations of each line.
            batch_tokens: Padded source tokens of a batch; it changes the speed only.
            long: What happens to a line with more tokens than the model has positions for:
                "split" translates pieces of it, "truncate" its beginning, "error" stops.
            first_line: Number of the first line, from which its sampling stream is seeded.

        Raises:
            UserError: For a long line with ``long="error"``.
        """
        search = search or self.search
        iterator, number = iter(lines), first_line
        while window := list(islice(iterator, _WINDOW)):
            given = [line if isinstance(line, SourceLine) else SourceLine(line) for line in window]
            yield from self._window(given, number, search, nbest, batch_tokens, long)
            number += len(window)

    def _window(
        self,
        lines: list[SourceLine],
        number: int,
        search: SearchConfig,
        nbest: int,
        batch_tokens: int,
        long: Long,
    ) -> list[Translation]:
        """Cut a window into pieces, translate them by length, and put the lines together again."""
        pieces: list[_Piece] = []
        for i, line in enumerate(lines):
            if line.text.strip():
                texts = self.cut_to_fit(line.text, long, f"line {line.number or number + i + 1}")
                for part, text in enumerate(texts):
                    prefix = None if part else line.prefix  # it begins the line, not every piece
                    pieces.append(_Piece(i, part, replace(line, text=text, prefix=prefix)))
        sources = [piece.source for piece in pieces]
        examples = [member.examples(sources, self.counts) for member in self.members]
        lengths = np.array([len(example.source) for example in examples[0]], dtype=np.int64)
        by_line: list[list[tuple[Translated, ...]]] = [[] for _ in lines]
        found: list[tuple[Translated, ...]] = [()] * len(pieces)
        for batch in token_batches([lengths], batch_tokens)[::-1]:
            hypotheses = self._batch(
                [[member_examples[i] for i in batch] for member_examples in examples],
                [pieces[i].source.prefix for i in batch],
                search,
                nbest,
                line_seeds(
                    search.seed,
                    [(number + pieces[i].line) * _PARTS + pieces[i].part for i in batch],
                ),
            )
            for i, nbest_list in zip(batch, hypotheses, strict=True):
                found[i] = tuple(map(self.translated, nbest_list))
        for piece, translated in zip(pieces, found, strict=True):
            by_line[piece.line].append(translated)
        return [
            Translation(line.text, join_parts(parts, nbest, search))
            for line, parts in zip(lines, by_line, strict=True)
        ]

    def cut_to_fit(self, text: str, long: Long, where: str) -> list[str]:
        """Return the text, or the pieces of it, that the model has positions for."""
        limit = min(member.card.model.max_positions for member in self.members) - 1

        def fits(part: str) -> bool:
            # A character is four tokens at most (its bytes), so a short text need not be encoded.
            if 4 * len(part) < limit:
                return True
            return all(len(member.source.encode(part)) <= limit for member in self.members)

        if fits(text):
            return [text]
        self.counts["long lines"] += 1
        if long == "error":
            raise UserError(f"{where} has more than the {limit} tokens the model can read")
        parts = split_text(text, fits)
        return parts if long == "split" else parts[:1]

    @torch.inference_mode()
    def _batch(
        self,
        examples: list[list[Example]],
        prefixes: Sequence[str | None],
        search: SearchConfig,
        nbest: int,
        seeds: list[int],
    ) -> list[list[Hypothesis]]:
        starts = [
            member.start(member_examples, self.device)
            for member, member_examples in zip(self.members, examples, strict=True)
        ]
        decoder: Decoder = starts[0]
        if len(starts) > 1:
            decoder = Ensemble(starts, search.temperature)
            search = search.model_copy(update={"temperature": 1.0})
        lengths = [len(example.source) for example in examples[0]]
        return self.run_search(decoder, lengths, self.prefix_ids(prefixes), search, nbest, seeds)

    def prefix_ids(self, prefixes: Sequence[str | None]) -> list[list[int]] | None:
        """Return the ids that translations have to begin with, if any has to."""
        if all(prefix is None for prefix in prefixes):
            return None
        return [self.members[0].target.encode(prefix or "") for prefix in prefixes]

    @property
    def special_ids(self) -> SpecialIds:
        """What the search must know of the target vocabulary."""
        return SpecialIds(never=tuple(self.members[0].target.vocabulary.tags.values()))

    def max_lengths(
        self, source_lengths: Sequence[int], search: SearchConfig
    ) -> Int[Tensor, " batch"]:
        """Bound each output, as ``bertfused.search.longest`` says."""
        positions = min(member.card.model.max_positions for member in self.members)
        lengths = torch.tensor(source_lengths, device=self.device)
        return longest(search, lengths, positions)

    def run_search(
        self,
        decoder: Decoder,
        source_lengths: Sequence[int],
        prefixes: Sequence[Sequence[int]] | None,
        search: SearchConfig,
        nbest: int,
        seeds: Sequence[int],
        begun: Sequence[int] | None = None,
        states_of: StatesOf | None = None,
    ) -> list[list[Hypothesis]]:
        """Search with a decoder that stands before the first token of some sentences.

        Args:
            prefixes: Ids that each translation has to begin with.
            seeds: One a sentence, for sampling.
            begun: How many ids of each prefix the lengths and ``no_repeat_ngram`` do not count.
            states_of: As of ``beam_search``.
        """
        positions = min(member.card.model.max_positions for member in self.members)
        max_lengths = self.max_lengths(source_lengths, search)
        if begun is not None:
            max_lengths += torch.tensor(begun, device=self.device)
            max_lengths.clamp_(max=positions - 1)
        if search.sampling:
            found = sample(
                decoder,
                max_lengths,
                search,
                seeds=seeds,
                num_samples=nbest,
                prefixes=prefixes,
                begun=begun,
                special=self.special_ids,
                states_of=states_of,
            )
        else:
            found = beam_search(
                decoder,
                max_lengths,
                search,
                nbest=nbest,
                prefixes=prefixes,
                begun=begun,
                special=self.special_ids,
                states_of=states_of,
            )
        cut = sum(
            len(hypotheses[0].ids) > limit
            for hypotheses, limit in zip(found, max_lengths.tolist(), strict=True)
        )
        if cut:
            self.counts[CUT] += cut
        return found

    def translated(self, hypothesis: Hypothesis) -> Translated:
        """Turn what the search found into text."""
        target = self.members[0].target
        return Translated(
            target.decode(hypothesis.ids),
            hypothesis.score,
            math.fsum(hypothesis.token_log_probs),
            tuple(target.vocabulary.symbols[id] for id in hypothesis.ids[:-1]),
            tuple(hypothesis.token_log_probs),
        )


class _Piece(NamedTuple):
    line: int
    part: int
    source: SourceLine


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Cut a text in two, again and again, until every part fits.

    The cut is at the white space nearest to the middle, of those after a full stop if one is in
    the middle half; text without white space is cut anywhere. Parts have no outer white space.

    >>> split_text("One two. Three four five.", lambda part: len(part) <= 16)
    ['One two.', 'Three four five.']
    """
    text = text.strip()
    if len(text) < 2 or fits(text):
        return [text]
    middle = len(text) / 2
    spaces = [match.start() for match in re.finditer(r"\s+", text)]
    ends = [i for i in spaces if text[i - 1] in ".!?;:" and abs(i - middle) < middle / 2]
    cut = min(ends or spaces or [round(middle)], key=lambda i: abs(i - middle))
    return split_text(text[:cut], fits) + split_text(text[cut:], fits)


def join_parts(
    parts: list[tuple[Translated, ...]], nbest: int, search: SearchConfig
) -> tuple[Translated, ...]:
    """Join the i-th best translations of a line's parts; a blank line has ``nbest`` empty ones."""
    if len(parts) == 1:
        return parts[0]
    joined = []
    for rank in range(min(map(len, parts), default=nbest)):
        ranked = [part[rank] for part in parts]
        log_probs = [log_prob for part in ranked for log_prob in part.token_log_probs]
        total = math.fsum(log_probs)
        joined.append(
            Translated(
                " ".join(part.text for part in ranked),
                normalised(total, len(log_probs), search) if log_probs else 0.0,
                total,
                tuple(token for part in ranked for token in part.tokens),
                tuple(log_probs),
            )
        )
    return tuple(joined)


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the first accelerator there is, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {name!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return device
