"""What an unsupervised model learns from: each objective makes pairs of monolingual sentences.

::

    denoising        noise(x)            -> x    of one language
    words            word-by-word(x)     -> x    made before training
    backtranslation  translation(x)      -> x    by the model itself, in this very step
    mass             x without a span    -> that span

An update takes micro-batches of every objective that has a weight at its step, in both languages.
Lample et al. (2018), "Unsupervised Machine Translation Using Monolingual Corpora Only", sections
2.3 and 2.4; Lample & Conneau (2019); Song et al. (2019), "MASS".
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from bertfused.training import LossModule, Place, Step, TranslationLoss, autocast
from bertfused.translate import Translator
from bertfused.vocab import Vocabulary
from unsup.config import OBJECTIVES, Objective, ObjectivesConfig
from unsup.noise import Ids, WordNoise

Numbers = NDArray[np.int64]


class Task(NamedTuple):
    """One objective for sentences of one language, by its number."""

    objective: Objective
    language: int


class Sentences:
    """Monolingual sentences, numbered once for every task, one task after the other.

    Args:
        stores: The sentences of each language.
        words: Of each, their word-by-word translations into the other language, if there are any.
        objectives: What is made of them when.
        languages: The numbers of those whose sentences are used.
    """

    def __init__(
        self,
        stores: tuple[IdStore, IdStore],
        words: tuple[IdStore, IdStore] | None,
        objectives: ObjectivesConfig,
        languages: Sequence[int] = (0, 1),
    ) -> None:
        self.stores, self._words, self.objectives = stores, words, objectives
        self.tasks = [
            Task(objective, language) for objective in OBJECTIVES for language in languages
        ]
        sizes = [len(stores[task.language]) for task in self.tasks]
        self._starts = np.cumsum([0, *sizes])
        sizes_of_all = np.concatenate([stores[task.language].sizes for task in self.tasks])
        self.lengths: Sequence[NDArray[np.integer[Any]]] = [sizes_of_all]

    def __len__(self) -> int:
        return len(self.lengths[0])

    def __getitem__(self, i: int) -> Example:
        task, rows = self.locate(np.array([i]))
        return Example(self.sentences(task.language, rows)[0])

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[Numbers]:
        """Group the sentences of the first update's tasks, a batch of one task only."""
        found = [self.task_batches(task, batch_tokens, generator) for task in self.tasks_at(1)]
        return [batch for batches in found for batch in batches]

    def task_batches(
        self, task: Task, batch_tokens: int, generator: np.random.Generator | None
    ) -> list[Numbers]:
        """Group the sentences of a task; as many batches whatever the generator."""
        sizes = self.stores[task.language].sizes
        start = self._starts[self.tasks.index(task)]
        return [start + rows for rows in token_batches([sizes], batch_tokens, generator=generator)]

    def locate(self, numbers: Numbers) -> tuple[Task, Numbers]:
        """Return the task that numbers are of, and their rows in the store of its language."""
        place = int(np.searchsorted(self._starts, numbers[0], side="right")) - 1
        return self.tasks[place], numbers - self._starts[place]

    def sentences(self, language: int, rows: Numbers) -> list[Ids]:
        """Return sentences of a language, each ending in EOS."""
        return [self.stores[language][row] for row in rows.tolist()]

    def word_translations(self, language: int, rows: Numbers) -> list[Ids]:
        """Return the word-by-word translations of the same sentences."""
        assert self._words is not None
        return [self._words[language][row] for row in rows.tolist()]

    def tasks_at(self, step: int) -> list[Task]:
        """Return the tasks of an update."""
        return [task for task in self.tasks if self.objectives.weight(task.objective, step) > 0]


def steps(
    dataset: Sentences, *, batch_tokens: int, accumulate: int, seed: int, start: Place
) -> Iterator[Step]:
    """Yield updates for ever: ``accumulate`` micro-batches of each task that counts.

    Every task goes through its sentences in an order of its own, a function of seed and epoch.
    The position of a place is the number of updates, its epoch that of the task furthest behind.
    """
    streams: dict[Task, _Stream] = {}
    step = start.position
    while True:
        tasks = dataset.tasks_at(step + 1)
        for task in tasks:
            if task not in streams:
                streams[task] = _Stream(dataset, task, batch_tokens, seed)
        first = step * accumulate
        micro = [streams[task][first + i] for task in tasks for i in range(accumulate)]
        step += 1
        tokens = sum(int(dataset.lengths[0][numbers].sum()) for numbers in micro)
        epoch = min(step * accumulate // len(streams[task]) for task in tasks)
        yield Step(micro, tokens, Place(epoch, step))


class _Stream:
    """The batches of a task, epoch after epoch, by their number."""

    def __init__(self, dataset: Sentences, task: Task, batch_tokens: int, seed: int) -> None:
        self._key = (seed, dataset.tasks.index(task))
        self._batches: Callable[[np.random.Generator | None], list[Numbers]] = lambda generator: (
            dataset.task_batches(task, batch_tokens, generator)
        )
        self._size = len(self._batches(None))
        self._epoch, self._order = -1, [np.empty(0, dtype=np.int64)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Numbers:
        epoch, place = divmod(number, self._size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._batches(np.random.default_rng([*self._key, epoch]))
        return self._order[place]


@dataclass(frozen=True)
class TaskBatch:
    """A batch and what it is for."""

    task: Task
    batch: Batch
    weight: float

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    @property
    def positions(self) -> int:
        return self.batch.positions

    def to(self, device: torch.device) -> "TaskBatch":
        return replace(self, batch=self.batch.to(device))


class BackTranslator:
    """Translates sentences of ids with a model that may be in training.

    Args:
        translators: From language 0 into 1, and from 1 into 0.
        precision: Of the matrix products.
    """

    def __init__(
        self, translators: tuple[Translator, Translator], search: SearchConfig, precision: str
    ) -> None:
        self.translators, self.search, self.precision = translators, search, precision

    @torch.inference_mode()
    def translate(
        self, sentences: Sequence[Example], language: int, random: np.random.Generator
    ) -> list[list[int]]:
        """Return the translations of sentences of one language, each ending in EOS."""
        translator = self.translators[language]
        (member,) = translator.members
        was_training = member.model.training
        member.model.eval()
        seeds = line_seeds(int(random.integers(2**63)), range(len(sentences)))
        with autocast(translator.device, self.precision):
            decoder = member.start(sentences, translator.device)
            lengths = [len(example.source) for example in sentences]
            found = translator.run_search(decoder, lengths, None, self.search, 1, seeds)
        member.model.train(was_training)
        return [list(hypotheses[0].ids) for hypotheses in found]


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
        self._sums: defaultdict[str, float] = defaultdict(float)

    def begin_step(self, *key: int, drop_net: float) -> None:
        self.pairs.begin_step(*key, drop_net=drop_net)
        self._step, self._random = key[1], np.random.default_rng(key)

    def collate(self, dataset: Sentences, numbers: Numbers) -> TaskBatch:
        """Make the pairs of a task; numbers of one task only."""
        task, rows = dataset.locate(numbers)
        objective, language = task
        targets = dataset.sentences(language, rows)
        if objective == "mass":
            batch = self._masked_spans(targets, language)
        elif objective == "denoising":
            batch = self._pairs(self._noised(targets), targets, (language, language))
        else:
            if objective == "words":
                sources = dataset.word_translations(language, rows)
                sources = self._noised(sources) if self.objectives.noise_words else sources
            else:
                sources = self._translated(targets, language)
            batch = self._pairs(sources, targets, (1 - language, language))
        return TaskBatch(task, batch, self.objectives.weight(objective, self._step))

    def loss(self, batch: TaskBatch) -> Loss:
        loss = self.pairs.loss(batch.batch)
        name = batch.task.objective
        self._sums[f"{name} nll"] += float(loss.nll)
        self._sums[f"{name} tokens"] += loss.tokens
        return replace(loss, total=batch.weight * loss.total)

    def take_values(self) -> dict[str, float]:
        sums, self._sums = self._sums, defaultdict(float)
        values = {
            f"{name}_nll": sums[f"{name} nll"] / tokens
            for name in OBJECTIVES
            if (tokens := sums[f"{name} tokens"])
        }
        return values | ({"generation_seconds": sums["seconds"]} if sums["seconds"] else {})

    def _noised(self, sentences: Sequence[Ids]) -> list[Ids]:
        return [self.noise(ids, self._random) for ids in sentences]

    def _translated(self, sentences: Sequence[Ids], language: int) -> list[Ids]:
        """Translate into the other language with the model as it is, without a gradient."""
        begin = time.perf_counter()
        examples = self._examples(sentences, (language, 1 - language))
        found = self.translator.translate(examples, language, self._random)
        self._sums["seconds"] += time.perf_counter() - begin
        return [np.array(ids) for ids in found]

    def _examples(self, sources: Sequence[Ids], languages: tuple[int, int]) -> list[Example]:
        """Make examples without targets, with the encoder's ids of what the sources are now."""
        examples = [Example(source, languages=languages) for source in sources]
        if self.encoder is None:
            return examples
        tokens = [source[:-1].tolist() for source in sources]
        inputs = self.encoder.wordpieces.encode_ids(tokens, self.tokenizer)
        return [replace(e, bert=ids) for e, ids in zip(examples, inputs, strict=True)]

    def _pairs(
        self, sources: Sequence[Ids], targets: Sequence[Ids], languages: tuple[int, int]
    ) -> Batch:
        examples = self._examples(sources, languages)
        examples = [replace(e, target=ids) for e, ids in zip(examples, targets, strict=True)]
        return collate(examples, None if self.encoder is None else self.encoder.bert_ids)

    def _masked_spans(self, sentences: Sequence[Ids], language: int) -> Batch:
        """Mask a span of each; the decoder sees what came before in the span, and predicts it.

        As in BERT, a tenth of the masked tokens stays and a tenth is replaced by random ones.
        """
        mask, random, sources = self.noise.mask, self._random, []
        spans = [self.noise.span(len(ids) - 1, random) for ids in sentences]
        for ids, span in zip(sentences, spans, strict=True):
            source = ids.astype(np.int64)
            draw = random.random(span.stop - span.start)
            other = random.integers(Vocabulary.unk + 1, mask, len(draw))
            source[span] = np.where(draw < 0.8, mask, np.where(draw < 0.9, other, source[span]))
            sources.append(source)
        batch = self._pairs(sources, sentences, (language, language))
        assert batch.decoder_input is not None and batch.target_mask is not None
        wanted = torch.zeros_like(batch.target_mask)
        for row, span in zip(wanted, spans, strict=True):
            row[span] = True
        is_shown = wanted & functional.pad(wanted, (1, -1))  # the token before is in the span too
        decoder_input = torch.where(is_shown, batch.decoder_input, mask)
        return replace(batch, decoder_input=decoder_input, target_mask=wanted)
