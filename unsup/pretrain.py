"""Masked language modelling over the monolingual text of several languages (XLM).

Lample & Conneau (2019), section 3.3, as BERT (Devlin et al., 2019): of 15% of the tokens the model
is to say what they were; of these 80% are replaced by a mask symbol, 10% by a random symbol and
10% stay. Departures: a unit is a sentence between two </s>, where they cut the text into streams
of 256 tokens, so that the encoder learns what it will be given; exactly this share of a batch is
predicted, never a </s>; frequent tokens are not predicted less often; languages are mixed in a
batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from bertfused.batch import Corpora, Example, drawn_batches, pad_ids
from bertfused.config import AnyRecipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import Setup, Validation, check_subwords
from bertfused.loss import Loss
from bertfused.store import IdStore
from bertfused.training import (
    Dataset,
    LossModule,
    Numbers,
    Place,
    Step,
    Trainer,
    choose_precision,
    steps,
)
from bertfused.translate import SourceLine
from bertfused.vocab import MASK, Vocabulary
from unsup.config import PretrainRecipe
from unsup.xlm import XlmCard, build_xlm

_MASKED, _RANDOM = 0.8, 0.1  # shares of the predicted tokens; the rest stays


class MonolingualText:
    """Sentences of some languages, one language after the other, as "</s> sentence </s>".

    Args:
        parts: Number of the language, its text, and which of its lines.
        mask_rate: Share of the tokens that is predicted.
        weights: How often an epoch passes through each part; once if not given.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, IdStore, range]],
        mask_rate: float,
        weights: Sequence[float] = (),
    ) -> None:
        self._parts = parts
        self._mask_rate = mask_rate
        sizes = [len(lines) for _, _, lines in parts]
        self._ends = np.cumsum(sizes)
        self._corpora = Corpora(sizes, weights) if weights else None
        #: Of the sentences with both </s>.
        self.lengths: Sequence[NDArray[np.integer[Any]]] = [
            np.concatenate([store.sizes[lines.start : lines.stop] + 1 for _, store, lines in parts])
        ]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Example:
        part = int(np.searchsorted(self._ends, i, side="right"))
        language, store, lines = self._parts[part]
        ids = store[lines[i - int(self._ends[part])]]  # counted from the end of its part
        return Example(np.insert(ids, 0, Vocabulary.eos), languages=(language, language))

    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[Numbers]:
        return drawn_batches(self.lengths, batch_tokens, generator, self._corpora)

    def num_predicted(self, numbers: Numbers) -> int:
        """Say how many tokens of some sentences are predicted together: one at least."""
        tokens = int((self.lengths[0][numbers] - 2).sum())
        return max(round(self._mask_rate * tokens), 1)


@dataclass(frozen=True)
class MaskedBatch:
    """Sentences of which some tokens are hidden.

    Attributes:
        language: Number of each sentence's language.
        places: Where the predicted tokens stand, in the flattened input.
        target: What stood there.
    """

    input: Int[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length"]
    language: Int[Tensor, " batch"]
    places: Int[Tensor, " predicted"]
    target: Int[Tensor, " predicted"]

    def to(self, device: torch.device) -> "MaskedBatch":
        parts = (self.input, self.mask, self.language, self.places, self.target)
        return MaskedBatch(*(part.to(device, non_blocking=True) for part in parts))

    @property
    def tokens(self) -> int:
        """Real tokens, the </s> included."""
        return int(self.mask.sum())

    @property
    def positions(self) -> int:
        """Positions, padding included."""
        return self.mask.numel()


def hide_tokens(
    ids: NDArray[np.int64],
    number: int,
    *,
    mask: int,
    symbols: NDArray[np.int64],
    generator: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose tokens to predict and hide most of them; return the input and their flat places.

    Args:
        ids: Padded sentences; their special symbols are never chosen.
        number: How many.
        mask: What 80% of them are replaced by.
        symbols: One of these, drawn at random, is what another 10% are replaced by.
    """
    is_token = ids >= Vocabulary.unk
    places = np.sort(generator.choice(np.flatnonzero(is_token), number, replace=False))
    draws = generator.random(number)
    hidden = ids.copy()
    hidden.flat[places[draws < _MASKED]] = mask
    is_random = (draws >= _MASKED) & (draws < _MASKED + _RANDOM)
    hidden.flat[places[is_random]] = generator.choice(symbols, int(is_random.sum()))
    return hidden, places


class MaskedLoss(LossModule):
    """The loss of masked language modelling, of transformers' XLMWithLMHeadModel.

    Args:
        vocabulary: With a tag for masked tokens.
    """

    model: Any

    def __init__(self, model: Any, vocabulary: Vocabulary) -> None:
        super().__init__(model, None)
        self.mask = vocabulary.tags[MASK]
        self.symbols = np.array(vocabulary.ordinary)

    def begin_step(self, *key: int, drop_net: float) -> None:
        """Set the randomness of a batch: its masks, and the dropout of XLM, which is torch's own.

        (Of no generator but the global one, for all of transformers' models.)
        """
        sequence = np.random.SeedSequence(key)
        self._generator = np.random.default_rng(sequence)
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def collate(self, dataset: MonolingualText, numbers: Numbers) -> MaskedBatch:
        examples = [dataset[int(i)] for i in numbers]
        ids, mask = pad_ids([example.source for example in examples], Vocabulary.pad)
        hidden, places = hide_tokens(
            ids.numpy(),
            dataset.num_predicted(numbers),
            mask=self.mask,
            symbols=self.symbols,
            generator=self._generator,
        )
        chosen = torch.from_numpy(places)
        language = torch.tensor([example.languages[0] for example in examples if example.languages])
        return MaskedBatch(torch.from_numpy(hidden), mask, language, chosen, ids.flatten()[chosen])

    def loss(self, batch: MaskedBatch) -> Loss:
        output = self.model.transformer(
            batch.input,
            attention_mask=batch.mask.long(),
            langs=batch.language[:, None].expand_as(batch.input),
        )
        predicted = output.last_hidden_state.flatten(0, 1)[batch.places]
        logits = self.model.pred_layer.proj(predicted).float()
        total = functional.cross_entropy(logits, batch.target, reduction="sum")
        return Loss(total, total.detach(), len(batch.target))


def masked_steps(
    dataset: MonolingualText, *, batch_tokens: int, accumulate: int, seed: int, start: Place
) -> Iterator[Step]:
    """Yield updates as ``training.steps`` does; their target tokens are the predicted ones."""
    for step in steps(
        dataset, batch_tokens=batch_tokens, accumulate=accumulate, seed=seed, start=start
    ):
        yield replace(step, target_tokens=sum(map(dataset.num_predicted, step.examples)))


@dataclass(frozen=True)
class HeldOutText:
    """Validation by the perplexity of masked tokens, the same ones every time."""

    trainer: Trainer
    by_language: Mapping[str, Dataset]

    @property
    def translates(self) -> bool:
        return False

    @property
    def criterion(self) -> str:
        return "the mean log-perplexity of masked tokens over the languages"

    def validate(self, step: int, lines: Sequence[SourceLine]) -> Validation:
        nlls = {}
        for language, text in self.by_language.items():
            loss = self.trainer.mean_loss(text)
            nlls[language] = float(loss.nll) / loss.tokens
        mean = sum(nlls.values()) / len(nlls)
        perplexities = {language: math.exp(min(nll, 50)) for language, nll in nlls.items()}
        perplexity = math.exp(min(mean, 50))
        values: dict[str, float | str] = {"valid_nll": mean, "valid_perplexity": perplexity}
        values |= {f"valid_perplexity_{name}": value for name, value in perplexities.items()}
        each = ", ".join(f"{name} {value:.2f}" for name, value in perplexities.items())
        return Validation(-mean, f"masked perplexity {perplexity:.2f} ({each})", values)


def set_up(recipe: AnyRecipe, data: DataFolder, init: Path | None, device: torch.device) -> Setup:
    """Set up masked language modelling over both languages of a DATA folder.

    Raises:
        UserError: If recipe and data do not fit together.
    """
    assert isinstance(recipe, PretrainRecipe)
    assert init is None
    check_subwords(recipe, data)
    vocabulary = _shared_vocabulary(data)
    stores = {language: data.mono(language) for language in data.languages}
    check_held_out(recipe, data)
    _check_positions(data, stores, recipe)
    config, held_out = recipe.pretrain, recipe.pretrain.valid_lines
    parts = [
        (number, store, range(len(store) - held_out))
        for number, store in enumerate(stores.values())
    ]
    weights = language_weights([len(lines) for _, _, lines in parts], config.language_smoothing)
    valid = {
        language: MonolingualText(
            [(number, store, range(len(store) - held_out, len(store)))], config.mask_rate
        )
        for number, (language, store) in enumerate(stores.items())
    }
    torch.manual_seed(recipe.train.seed)
    module = MaskedLoss(build_xlm(recipe.model, vocabulary, data.languages), vocabulary).to(device)
    trainer = Trainer(
        module,
        recipe.optim,
        recipe.train,
        device=device,
        precision=choose_precision(recipe.train.precision, device),
    )
    return Setup(
        recipe,
        trainer,
        XlmCard(data.languages),
        None,
        MonolingualText(parts, config.mask_rate, weights),
        HeldOutText(trainer, valid),
        masked_steps,
    )


def language_weights(sizes: Sequence[int], smoothing: float) -> list[float]:
    """Say how often an epoch passes through each language's sentences.

    With the share p of a language and smoothing a, its sentences are drawn with probability
    (Lample & Conneau, 2019, section 3.1; a = 0.7 in section 5.1)::

        q_i = p_i ** a / sum_j p_j ** a

    and an epoch draws as many sentences as there are.

    >>> language_weights([300, 100], 0.0)
    [0.6666666666666666, 2.0]
    """
    smoothed = [(size / sum(sizes)) ** smoothing for size in sizes]
    return [
        own / sum(smoothed) * sum(sizes) / size for own, size in zip(smoothed, sizes, strict=True)
    ]


def _shared_vocabulary(data: DataFolder) -> Vocabulary:
    source, target = (tokenizer.vocabulary for tokenizer in data.tokenizers())
    if source.symbols != target.symbols:
        raise UserError(
            f"{data.path} has a dictionary for each language, but an XLM has one; prepare it with "
            "subwords.shared = true"
        )
    if MASK not in source.tags:
        raise UserError(
            f"{data.path} has no symbol for masked tokens; prepare it with subwords.tags = "
            f"['{MASK}']"
        )
    return source


def check_held_out(recipe: PretrainRecipe, data: DataFolder) -> None:
    """Refuse texts of which nothing would be left to train on."""
    held_out = recipe.pretrain.valid_lines
    for language in data.languages:
        if len(data.mono(language)) <= held_out:
            raise UserError(
                f"{data.path} has {len(data.mono(language)):,} lines of {language!r}, of which "
                f"the last {held_out:,} (pretrain.valid_lines) are held out"
            )


def _check_positions(
    data: DataFolder, stores: Mapping[str, IdStore], recipe: PretrainRecipe
) -> None:
    positions = recipe.model.max_positions
    for language, store in stores.items():
        longest = int(store.sizes.max()) + 1
        if longest > positions:
            raise UserError(
                f"a sentence of {language!r} in {data.path} takes {longest} positions, but "
                f"model.max_positions is {positions}"
            )
