"""How a BertGen writes: a step of the core's search is one mask in each sequence.

A bidirectional model reads everything anew at each step, as every state depends on the mask. One
that was trained in the prefix mode keeps what it has read.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bertgen.layout import Images, Source, Symbols, last_with_prefix, prefixes, unrolled
from bertgen.model import BertGen, Seen


class UnrolledDecoder:
    """A ``search.Decoder`` that reads everything anew at each step.

    Args:
        has_prefix: The model was trained in the prefix mode.
    """

    def __init__(
        self,
        model: BertGen,
        sources: Sequence[Source],
        images: Images,
        symbols: Symbols,
        *,
        has_prefix: bool = False,
    ) -> None:
        self.model, self.symbols = model, symbols
        self._lay_out = last_with_prefix if has_prefix else unrolled
        self._sources, self._images = list(sources), images
        self._device = model.end.device
        self._seen: Seen = model.objects(images.to(self._device))
        self._written: list[list[tuple[int, ...]]] | None = None

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        """Logits of the token after ``tokens``, of which the first are not written."""
        if self._written is None:
            self._written = [[()] * tokens.size(1) for _ in self._sources]
        else:
            self._written = [
                [(*beam, token) for beam, token in zip(beams, row, strict=True)]
                for beams, row in zip(self._written, tokens.tolist(), strict=True)
            ]
        beams = tokens.size(1)
        sources = [source for source in self._sources for _ in range(beams)]
        targets = [np.array(own, dtype=np.int64) for row in self._written for own in row]
        sequences = self._lay_out(sources, targets, self._images, self.symbols).to(self._device)
        logits = self.model(sequences, self._seen)
        shaped: Tensor = logits.unflatten(0, (-1, beams))
        return shaped

    def reorder(self, parents: Int[Tensor, "batch new_beams"]) -> None:
        """Let beam j of each sentence continue what was its beam ``parents[:, j]``."""
        assert self._written is not None
        self._written = [
            [beams[parent] for parent in row]
            for beams, row in zip(self._written, parents.tolist(), strict=True)
        ]

    def keep(self, sentences: Int[Tensor, " kept"]) -> None:
        """Drop all other sentences."""
        assert self._written is not None
        rows = sentences.tolist()
        self._sources = [self._sources[row] for row in rows]
        self._written = [self._written[row] for row in rows]


class PrefixDecoder:
    """A ``search.Decoder`` of a model trained in the prefix mode, with keys and values kept."""

    def __init__(
        self, model: BertGen, sources: Sequence[Source], images: Images, symbols: Symbols
    ) -> None:
        self.model, self.symbols = model, symbols
        device = model.end.device
        seen: Seen = model.objects(images.to(device))
        sequences = prefixes(sources, images, symbols).to(device)
        x = model.embed(sequences, seen)
        self._prefix: list[Tensor] = []  # keys and values, by layer
        for layer in model.stack():
            self._prefix.append(layer.query_key_value(x)[sequences.places][..., x.size(1) :])
            x = layer(x, sequences)
        self._mask = sequences.mask[:, 0]
        self._beside = seen.beside[
            torch.tensor([source.image for source in sources], device=device)
        ]
        self._next = torch.tensor([len(source.ids) + 3 for source in sources], device=device)
        self._written: list[Tensor] = []  # keys and values of what is written, by layer
        self._steps = 0

    def step(self, tokens: Int[Tensor, "batch beams"]) -> Float[Tensor, "batch beams vocab"]:
        """Logits of the token after ``tokens``, of which the first are not written."""
        beams, mask = tokens.size(1), torch.full_like(tokens, self.symbols.mask)
        new = mask[..., None] if not self._steps else torch.stack([tokens, mask], dim=2)
        place = self._next[:, None] + torch.arange(-new.size(2) + 1, 1, device=new.device)
        embedded = self.model.words(new) + self.model.types.weight[0] + self._beside[:, None, None]
        x = self.model.normed(embedded + self.model.positions(place)[:, None]).flatten(0, 1)
        seen = self._sees(len(x), new.size(2), beams)
        for number, layer in enumerate(self.model.stack()):
            queries, own = layer.query_key_value(x).split([x.size(2), 2 * x.size(2)], dim=2)
            before = self._prefix[number].repeat_interleave(beams, dim=0)
            if self._steps:
                written = torch.cat([self._written[number], own[:, :1]], dim=1)
                self._written[number] = written
                kept = torch.cat([before, written, own[:, 1:]], dim=1)
            else:
                self._written.append(own[:, :0])
                kept = torch.cat([before, own], dim=1)
            keys, values = kept.chunk(2, dim=2)
            attended = layer.attend(queries, keys, values, seen)
            x = layer.feed_forward(x.flatten(0, 1), attended.flatten(0, 1)).view_as(x)
        self._steps += 1
        self._next = self._next + 1
        logits = self.model.logits(x[:, -1])
        shaped: Tensor = logits.unflatten(0, (-1, beams))
        return shaped

    def reorder(self, parents: Int[Tensor, "batch new_beams"]) -> None:
        """Let beam j of each sentence continue what was its beam ``parents[:, j]``."""
        before = len(self._written[0]) // len(parents)
        rows = torch.arange(len(parents), device=parents.device)[:, None] * before + parents
        self._written = [own[rows.flatten()] for own in self._written]

    def keep(self, sentences: Int[Tensor, " kept"]) -> None:
        """Drop all other sentences."""
        beams = len(self._written[0]) // len(self._next)
        rows = (sentences[:, None] * beams + torch.arange(beams, device=sentences.device)).flatten()
        self._written = [own[rows] for own in self._written]
        self._prefix = [own[sentences] for own in self._prefix]
        self._mask, self._beside = self._mask[sentences], self._beside[sentences]
        self._next = self._next[sentences]

    def _sees(self, rows: int, new: int, beams: int) -> Bool[Tensor, "rows new length"]:
        """Say what the new positions see: all before them; a token does not see the mask."""
        before = self._mask.repeat_interleave(beams, dim=0)[:, None].expand(-1, new, -1)
        written = before.new_ones(rows, new, max(self._steps - 1, 0))
        own = before.new_ones(new, new).tril().expand(rows, -1, -1)
        return torch.cat([before, written, own], dim=2)
