"""Put sentences, images or both into words with a trained model."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from bertfused.batch import token_batches
from bertfused.errors import UserError
from bertfused.pretrained import TransformersWordpieces
from bertfused.search import SpecialIds, beam_search, line_seeds, longest, sample
from bertfused.translate import CUT, choose_device
from bertgen.card import GenCard, load_model
from bertgen.config import GenSearchConfig
from bertgen.decode import PrefixDecoder, UnrolledDecoder
from bertgen.images import ImageFeatures, pack_images
from bertgen.layout import Source
from bertgen.model import BertGen

_WINDOW = 2000  # inputs read ahead, to group them by length
_FIXED = 7  # positions besides source and output: [TO_XX] [CLS] [SEP] [MASK] [SEP] regions [END]
_LEAST = 16  # wordpieces for which there is room in any case
TRUNCATED = "sentences longer than the model has positions for: their end was not read"


@dataclass(frozen=True)
class Input:
    """What is to be put into words.

    Attributes:
        ids: Wordpieces of a sentence; none of a caption.
    """

    ids: Sequence[int] = ()
    image: ImageFeatures | None = None


class Generator:
    """A trained model, ready to write.

    Args:
        cache: Keep keys and values of past steps; by default where the model was trained for it.

    Example::

        generator = Generator.load("runs/flickr")
        list(generator.translate(["A man sleeps."], "de"))
    """

    def __init__(
        self,
        card: GenCard,
        model: BertGen,
        tokenizer: TransformersWordpieces,
        device: torch.device,
        *,
        cache: bool | None = None,
    ) -> None:
        has_prefix = card.attention == "prefix"
        if cache and not has_prefix:
            raise UserError(
                "keys and values cannot be kept for a model with bidirectional attention: each "
                "state depends on where the mask is; train one with model.attention = 'prefix'"
            )
        self.caches = has_prefix if cache is None else cache
        self.card, self.tokenizer, self.device = card, tokenizer, device
        self.model = model.eval().to(device)
        #: What was cut, by reason.
        self.counts: Counter[str] = Counter()

    @staticmethod
    def load(run: str | Path, *, device: str = "auto", cache: bool | None = None) -> "Generator":
        """Load a RUN.

        Raises:
            UserError: If it cannot be loaded, or keeps nothing that could be cached.
        """
        return Generator(*load_model(Path(run)), choose_device(device), cache=cache)

    def translate(
        self, lines: Iterable[str], to: str, search: GenSearchConfig | None = None
    ) -> Iterator[str]:
        """Translate lines of text; a blank line gives a blank one."""
        inputs = (Input(ids) for line in lines for ids in self.tokenizer.split([line]))
        return self.write(inputs, to, search)

    def write(
        self,
        inputs: Iterable[Input],
        to: str,
        search: GenSearchConfig | None = None,
        *,
        batch_tokens: int = 4096,
    ) -> Iterator[str]:
        """Write a line for each input, in order, reading only a window of them ahead.

        An input without text and image gives an empty line.

        Args:
            to: Language to write.
            batch_tokens: Positions of the inputs of a batch; it changes the speed only.

        Raises:
            UserError: If the model does not write the language.
        """
        search = search or self.card.search
        into = self.card.symbols.into.get(to)
        if into is None:
            known = ", ".join(self.card.symbols.into)
            raise UserError(f"the model writes {known}, not {to!r}")
        iterator, first = iter(inputs), 0
        while window := list(islice(iterator, _WINDOW)):
            yield from self._window(window, into, search, first, batch_tokens)
            first += len(window)

    def _window(
        self,
        inputs: list[Input],
        into: int,
        search: GenSearchConfig,
        first: int,
        batch_tokens: int,
    ) -> list[str]:
        rows = [row for row, own in enumerate(inputs) if len(own.ids) or own.image is not None]
        cut = {row: self._cut(inputs[row]) for row in rows}
        sizes = [
            len(own.ids) + 5 + (0 if own.image is None else len(own.image.features))
            for own in cut.values()
        ]
        written = [""] * len(inputs)
        for batch in token_batches([np.array(sizes, dtype=np.int64)], batch_tokens)[::-1]:
            own = [rows[number] for number in batch.tolist()]
            seeds = line_seeds(search.seed, [first + row for row in own])
            texts = self._batch([cut[row] for row in own], into, search, seeds)
            for row, text in zip(own, texts, strict=True):
                written[row] = text
        return written

    @torch.inference_mode()
    def _batch(
        self,
        inputs: Sequence[Input],
        into: int,
        search: GenSearchConfig,
        seeds: Sequence[int],
    ) -> list[str]:
        images = [own.image for own in inputs if own.image is not None]
        numbers = np.cumsum([own.image is not None for own in inputs]) - 1
        sources = [
            Source(np.array(own.ids, dtype=np.int64), into, -1 if own.image is None else number)
            for own, number in zip(inputs, numbers.tolist(), strict=True)
        ]
        packed = pack_images(images, self.model.objects.feature_dim)
        what = (self.model, sources, packed, self.card.symbols.symbols)
        has_prefix = self.card.attention == "prefix"
        decoder: PrefixDecoder | UnrolledDecoder = (
            PrefixDecoder(*what) if self.caches else UnrolledDecoder(*what, has_prefix=has_prefix)
        )
        limits = self._limits(inputs, search)
        special = self._special()
        if search.sampling:
            found = sample(decoder, limits, search, seeds=seeds, special=special)
        else:
            found = beam_search(decoder, limits, search, nbest=1, special=special)
        for hypotheses, limit in zip(found, limits.tolist(), strict=True):
            self.counts[CUT] += len(hypotheses[0].ids) > limit
        return [self.tokenizer.join(hypotheses[0].ids[:-1]) for hypotheses in found]

    def _limits(self, inputs: Sequence[Input], search: GenSearchConfig) -> torch.Tensor:
        """Bound each output, also by the positions that are left."""
        lengths = torch.tensor([len(own.ids) for own in inputs], device=self.device)
        has_image = torch.tensor([own.image is not None for own in inputs], device=self.device)
        bound = longest(search, lengths, self.card.sizes.max_positions)
        bound = torch.where(has_image, bound.clamp(max=search.max_length_images), bound)
        room = self.card.sizes.max_positions - _FIXED - lengths
        return torch.minimum(bound, room)

    def _cut(self, own: Input) -> Input:
        """Leave a sentence so long that something can be written."""
        room = self.card.sizes.max_positions - _FIXED - _LEAST
        if len(own.ids) <= room:
            return own
        self.counts[TRUNCATED] += 1
        return Input(own.ids[:room], own.image)

    def _special(self) -> SpecialIds:
        """Say which symbol ends an output; the others are never written."""
        own = self.card.symbols
        never = {own.sep, own.mask, *own.into.values(), *self.tokenizer.special}
        return SpecialIds(
            bos=own.cls,
            pad=own.pad,
            eos=own.stop,
            unk=own.unk,
            start=own.stop,
            never=tuple(sorted(never - {own.stop})),
        )
