"""What an unsupervised model learns from: each objective makes pairs of monolingual sentences.

::

    denoising        noise(x)            -> x    of one language
    words            word-by-word(x)     -> x    made before training
    backtranslation  translation(x)      -> x    by the model itself, in this very step
    mass             x without a span    -> that span

An update takes micro-batches of every objective that has a weight at its step, of sentences of
both languages by their length. Searches over few sentences are slow: with ``generate.updates`` the
sentences of the next updates are translated along with those of the first.
Lample et al. (2018), "Unsupervised Machine Translation Using Monolingual Corpora Only", sections
2.3 and 2.4; Lample & Conneau (2019); Song et al. (2019), "MASS".
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from bertfused.batch import Batch, Example, collate, token_batches
from bertfused.config import SearchConfig
from bertfused.loss import Loss
from bertfused.model import FusedTransformer
from bertfused.search import line_seeds
from bertfused.store import IdStore
from bertfused.subwords import Tokenizer
from bertfused.training import LossModule, Place, Step, Stream, TranslationLoss, autocast
from bertfused.translate import CUT, Translator
from unsup.config import OBJECTIVES, Objective, ObjectivesConfig
from unsup.noise import Ids, WordNoise, span_size

Numbers = NDArray[np.int64]


class Sentences:
    """Monolingual sentences of two languages, numbered once for every objective, one after another.

    Args:
        stores: The sentences of each language.
        words: Of each, their word-by-word translations into the other language, if there are any.
        objectives: What is made of them when.
        mass: Share of a sentence that MASS masks.
    """

    def __init__(
        self,
        stores: tuple[IdStore, IdStore],
        words: tuple[IdStore, IdStore] | None,
        objectives: ObjectivesConfig,
        mass: float = 0.5,
    ) -> None:
        self._mass = mass
        self.stores, self._words, self.objectives = stores, words, objectives
        self._coming: dict[bytes, list[Numbers]] = {}
        self._sizes = np.concatenate([stores[0].sizes, stores[1].sizes])
        self.lengths: Sequence[NDArray[np.integer[Any]]] = [np.tile(self._sizes, len(OBJECTIVES))]

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, i: int) -> Example:
        _, rows = self.locate(np.array([i]))
        (ids,), (language,) = self.sentences(rows), self.languages(rows)
        return Example(ids, languages=(language, language))

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[Numbers]:
        """Group all sentences for the objectives of the first update, one objective a batch."""
        found = [self.batches_of(o, batch_tokens, generator) for o in self.objectives_at(1)]
        return [batch for batches in found for batch in batches]

    def batches_of(
        self, objective: Objective, batch_tokens: int, generator: np.random.Generator | None
    ) -> list[Numbers]:
        """Group the sentences for an objective; as many batches whatever the generator."""
        start = OBJECTIVES.index(objective) * len(self._sizes)
        batches = token_batches([self._sizes], batch_tokens, generator=generator)
        return [start + rows for rows in batches]

    def locate(self, numbers: Numbers) -> tuple[Objective, Numbers]:
        """Return the objective that numbers are of, and their rows among the sentences."""
        place, _ = divmod(int(numbers[0]), len(self._sizes))
        return OBJECTIVES[place], numbers - place * len(self._sizes)

    def target_tokens(self, numbers: Numbers) -> int:
        """Count the tokens that are to be predicted."""
        objective, _ = self.locate(numbers)
        lengths = self.lengths[0][numbers].tolist()
        if objective == "mass":
            return sum(span_size(length - 1, self._mass) for length in lengths)
        return sum(lengths)

    def languages(self, rows: Numbers) -> list[int]:
        """Return the language of each sentence."""
        return [int(row >= len(self.stores[0])) for row in rows.tolist()]

    def sentences(self, rows: Numbers) -> list[Ids]:
        """Return sentences, each ending in EOS."""
        return self._of(self.stores, rows)

    def word_translations(self, rows: Numbers) -> list[Ids]:
        """Return the word-by-word translations of sentences."""
        assert self._words is not None
        return self._of(self._words, rows)

    def announce(self, coming: Sequence[list[Numbers]]) -> None:
        """Say of batches which come after them; each list begins with the batch itself."""
        self._coming = {batches[0].tobytes(): batches for batches in coming}

    def coming(self, numbers: Numbers) -> list[Numbers]:
        """Return a batch of the next update and those that are to be translated along with it."""
        return self._coming.get(numbers.tobytes(), [numbers])

    def objectives_at(self, step: int) -> list[Objective]:
        """Return what counts in an update."""
        return [own for own in OBJECTIVES if self.objectives.weight(own, step) > 0]

    def _of(self, stores: tuple[IdStore, IdStore], rows: Numbers) -> list[Ids]:
        first, second = stores
        size = len(first)
        return [first[row] if row < size else second[row - size] for row in rows.tolist()]


def steps(
    dataset: Sentences,
    *,
    batch_tokens: int,
    accumulate: int,
    seed: int,
    start: Place,
    together: int = 1,
) -> Iterator[Step]:
    """Yield updates for ever: ``accumulate`` micro-batches of each objective that counts.

    Every objective goes through the sentences in an order of its own, a function of seed and
    epoch. The position of a place is the number of updates; its epoch is how often an objective
    that always counted has seen all sentences.

    Args:
        together: So many updates are translated back at once: from one whose number is a multiple
            of it on.
    """
    streams: dict[Objective, Stream] = {}
    step = start.position
    while True:
        objectives = dataset.objectives_at(step + 1)
        for objective in objectives:
            if objective not in streams:
                batches = partial(dataset.batches_of, objective, batch_tokens)
                streams[objective] = Stream(batches, (seed, OBJECTIVES.index(objective)))
        numbers = range(step * accumulate, (step + 1) * accumulate)
        if "backtranslation" in objectives and together > 1:
            stream, of_these = streams["backtranslation"], range(together - step % together)
            later = [
                i for i in of_these if "backtranslation" in dataset.objectives_at(step + 1 + i)
            ]
            dataset.announce([[stream[n + i * accumulate] for i in later] for n in numbers])
        micro = [streams[objective][number] for objective in objectives for number in numbers]
        step += 1
        tokens = sum(map(dataset.target_tokens, micro))
        epoch = step * accumulate // len(streams[objectives[0]])
        yield Step(micro, tokens, Place(epoch, step))


@dataclass(frozen=True)
class ObjectiveBatch:
    """A batch and what it is for."""

    objective: Objective
    batch: Batch
    weight: float

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    @property
    def positions(self) -> int:
        return self.batch.positions

    def to(self, device: torch.device) -> "ObjectiveBatch":
        return replace(self, batch=self.batch.to(device))


class BackTranslator:
    """Translates sentences of ids with a model that may be in training.

    Args:
        translator: Of the model; each sentence says its languages.
        precision: Of the matrix products.
    """

    def __init__(self, translator: Translator, search: SearchConfig, precision: str) -> None:
        self.translator, self.search, self.precision = translator, search, precision

    @torch.inference_mode()
    def translate(
        self, sentences: Sequence[Example], random: np.random.Generator
    ) -> list[list[int]]:
        """Return the translations of sentences, each ending in EOS."""
        (member,) = self.translator.members
        was_training = member.model.training
        member.model.eval()
        seeds = line_seeds(int(random.integers(2**63)), range(len(sentences)))
        with autocast(self.translator.device, self.precision):
            decoder = member.start(sentences, self.translator.device)
            lengths = [len(example.source) for example in sentences]
            found = self.translator.run_search(decoder, lengths, None, self.search, 1, seeds)
        member.model.train(was_training)
        return [list(hypotheses[0].ids) for hypotheses in found]

    def take_cut(self) -> int:
        """Return how many translations the maximum length has ended since the last call."""
        return self.translator.counts.pop(CUT, 0)


class UnsupervisedLoss(LossModule):
    """The weighted losses of the objectives, on pairs that it makes of sentences.

    Set ``translator`` before anything is translated back: what it translates with may be the
    average of the weights that are trained here.

    Args:
        pairs: Model, encoder, and their loss on pairs.
        tokenizer: Of both languages.
    """

    model: FusedTransformer
    translator: BackTranslator

    def __init__(
        self,
        pairs: TranslationLoss,
        noise: WordNoise,
        objectives: ObjectivesConfig,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(pairs.model, pairs.encoder)
        self.pairs, self.noise, self.objectives = pairs, noise, objectives
        self.tokenizer = tokenizer
        self._step, self._random = 0, np.random.default_rng()
        self._translations: dict[bytes, list[Ids]] = {}  # of the batches to come
        self._sums: defaultdict[str, float] = defaultdict(float)

    def begin_step(self, *key: int, drop_net: float) -> None:
        self.pairs.begin_step(*key, drop_net=drop_net)
        self._step, self._random = key[1], np.random.default_rng(key)

    def collate(self, dataset: Sentences, numbers: Numbers) -> ObjectiveBatch:
        """Make the pairs of an objective; numbers of one objective only."""
        objective, rows = dataset.locate(numbers)
        targets, own = dataset.sentences(rows), dataset.languages(rows)
        if objective == "mass":
            batch = self._masked_spans(targets, own)
        elif objective == "denoising":
            batch = self._pairs(self._noised(targets), targets, own, own)
        else:
            other = [1 - language for language in own]
            if objective == "words":
                sources = dataset.word_translations(rows)
                sources = self._noised(sources) if self.objectives.noise_words else sources
            else:
                sources = self._translated(dataset, numbers)
            batch = self._pairs(sources, targets, other, own)
        return ObjectiveBatch(objective, batch, self.objectives.weight(objective, self._step))

    def loss(self, batch: ObjectiveBatch) -> Loss:
        loss = self.pairs.loss(batch.batch)
        self._sums[f"{batch.objective} nll"] += float(loss.nll)
        self._sums[f"{batch.objective} tokens"] += loss.tokens
        return replace(loss, total=batch.weight * loss.total)

    def take_values(self) -> dict[str, float]:
        sums, self._sums = self._sums, defaultdict(float)
        values = {
            f"{name}_nll": sums[f"{name} nll"] / tokens
            for name in OBJECTIVES
            if (tokens := sums[f"{name} tokens"])
        }
        if translated := sums["translated"]:
            values["generation_seconds"] = sums["seconds"]
            values["generation_cut"] = self.translator.take_cut() / translated
        return values

    def _noised(self, sentences: Sequence[Ids]) -> list[Ids]:
        return [self.noise(ids, self._random) for ids in sentences]

    def _translated(self, dataset: Sentences, numbers: Numbers) -> list[Ids]:
        """Translate with the model as it is, without a gradient, unless that was done before."""
        if numbers.tobytes() not in self._translations:
            begin = time.perf_counter()
            batches = dataset.coming(numbers)
            rows = np.concatenate([dataset.locate(batch)[1] for batch in batches])
            languages = dataset.languages(rows)
            into = [1 - language for language in languages]
            examples = self._examples(dataset.sentences(rows), languages, into)
            found = map(np.array, self.translator.translate(examples, self._random))
            self._translations |= {
                batch.tobytes(): list(islice(found, len(batch))) for batch in batches
            }
            self._sums["seconds"] += time.perf_counter() - begin
            self._sums["translated"] += len(rows)
        return self._translations.pop(numbers.tobytes())

    def _examples(
        self, sources: Sequence[Ids], languages: Sequence[int], into: Sequence[int]
    ) -> list[Example]:
        """Make examples without targets, with the encoder's ids of what the sources are now."""
        directions = zip(languages, into, strict=True)
        examples = [
            Example(source, languages=direction)
            for source, direction in zip(sources, directions, strict=True)
        ]
        if self.encoder is None:
            return examples
        inputs: dict[int, list[int]] = {}
        for language in sorted({*languages}):
            rows = [i for i, own in enumerate(languages) if own == language]
            tokens = [sources[i][:-1].tolist() for i in rows]
            encoded = self.encoder.reader(language).encode_ids(tokens, self.tokenizer)
            inputs |= zip(rows, encoded, strict=True)
        return [replace(example, bert=inputs[i]) for i, example in enumerate(examples)]

    def _pairs(
        self,
        sources: Sequence[Ids],
        targets: Sequence[Ids],
        languages: Sequence[int],
        into: Sequence[int],
    ) -> Batch:
        examples = self._examples(sources, languages, into)
        examples = [replace(e, target=ids) for e, ids in zip(examples, targets, strict=True)]
        return collate(examples, None if self.encoder is None else self.encoder.bert_ids)

    def _masked_spans(self, sentences: Sequence[Ids], languages: Sequence[int]) -> Batch:
        """Mask a span of each; the decoder sees what came before in the span, and predicts it.

        As in BERT, a tenth of the masked tokens stays and a tenth is replaced by random ones.
        """
        mask, random, sources = self.noise.mask, self._random, []
        spans = [self.noise.span(len(ids) - 1, random) for ids in sentences]
        for ids, span in zip(sentences, spans, strict=True):
            source = ids.astype(np.int64)
            draw = random.random(span.stop - span.start)
            other = random.choice(self.noise.symbols, len(draw))
            source[span] = np.where(draw < 0.8, mask, np.where(draw < 0.9, other, source[span]))
            sources.append(source)
        batch = self._pairs(sources, sentences, languages, languages)
        assert batch.decoder_input is not None and batch.target_mask is not None
        wanted = torch.zeros_like(batch.target_mask)
        for row, span in zip(wanted, spans, strict=True):
            row[span] = True
        is_shown = wanted & functional.pad(wanted, (1, -1))  # the token before is in the span too
        decoder_input = torch.where(is_shown, batch.decoder_input, mask)
        return replace(batch, decoder_input=decoder_input, target_mask=wanted)
