"""One BERT that reads a sentence, an image or both, and writes by filling one mask after another.

Mitzalis, Caglayan, Madhyastha & Specia (2021), "BERTGEN: Multi-task Generation through BERT"; the
network is that of VL-BERT (Su et al., 2020). What it is given lies in ``bertgen.layout``.

All positions of a sequence see each other, the mask included, so nothing of one step can be used
in the next. What can be saved without changing a number is saved: there is no padding outside of
attention, regions are projected once an image, and in the last layer and the head only the masks
go on.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from bertfused.noise import Dropout, Noise
from bertgen.layout import Images, Sequences

GEOMETRY_DIM = 2048
_TEXT, _OBJECT = 0, 2  # token types; VL-BERT's 1 is that of a second sentence
_TYPES = 3
_EPS = 1e-12
_INIT = 0.02


def geometry(boxes: Float[Tensor, "regions 4"]) -> Float[Tensor, "regions geometry"]:
    """Embed where a region lies (VL-BERT, section 3.2, as in the official code).

    Of its centre and its size, as shares of the image times 100, sines and cosines of
    ``share / 1000 ** (i / 256)``, i = 0 .. 255.

    Args:
        boxes: x1, y1, x2, y2 as shares of width and height.
    """
    x1, y1, x2, y2 = boxes.unbind(1)
    shares = 100 * torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], dim=1)
    numbers = torch.arange(256, device=boxes.device, dtype=boxes.dtype)
    angles = shares[:, :, None] / 1000 ** (numbers / 256)
    return torch.cat([angles.sin(), angles.cos()], dim=2).flatten(1)


class Layer(nn.Module):
    """A layer of BERT over packed positions; only its attention knows of sequences."""

    def __init__(
        self,
        model_dim: int,
        heads: int,
        ffn_dim: int,
        dropout: float,
        attention_dropout: float,
        noise: Noise,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(model_dim, 3 * model_dim)
        self.output = nn.Linear(model_dim, model_dim)
        self.attention_norm = nn.LayerNorm(model_dim, eps=_EPS)
        self.up = nn.Linear(model_dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, model_dim)
        self.ffn_norm = nn.LayerNorm(model_dim, eps=_EPS)
        self.dropout = Dropout(dropout, noise)
        self.attention_dropout = Dropout(attention_dropout, noise)

    def forward(
        self, x: Float[Tensor, "positions model_dim"], sequences: Sequences
    ) -> Float[Tensor, "positions model_dim"]:
        """Return the states of all positions."""
        queries, keys, values = self.query_key_value(x)[sequences.places].chunk(3, dim=2)
        attended = self.attend(queries, keys, values, sequences.mask)
        return self.feed_forward(x, attended.flatten(0, 1)[sequences.flat])

    def predicted(
        self, x: Float[Tensor, "positions model_dim"], sequences: Sequences
    ) -> Float[Tensor, "predictions model_dim"]:
        """Return the states of the predicted positions only, sequence by sequence."""
        keys, values = self._project(x, slice(x.size(1), None))[sequences.places].chunk(2, dim=2)
        queries = self._project(x[sequences.queries], slice(x.size(1)))
        attended = self.attend(queries, keys, values, sequences.query_mask)
        own = x[sequences.queries]
        return self.feed_forward(own[sequences.is_query], attended[sequences.is_query])

    def attend(
        self,
        queries: Float[Tensor, "sequences rows model_dim"],
        keys: Float[Tensor, "sequences length model_dim"],
        values: Float[Tensor, "sequences length model_dim"],
        mask: Bool[Tensor, "sequences #rows length"],
    ) -> Float[Tensor, "sequences rows model_dim"]:
        """Attend with all heads; the output map is left to ``feed_forward``."""
        queries, keys, values = (
            own.unflatten(2, (self.heads, -1)).transpose(1, 2) for own in (queries, keys, values)
        )
        if self.attention_dropout.is_active:
            scores = queries @ keys.transpose(2, 3) * queries.size(3) ** -0.5
            weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(3)
            attended = self.attention_dropout(weights) @ values
        else:
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, mask[:, None].expand(-1, -1, queries.size(2), -1)
            )
        joined: Tensor = attended.transpose(1, 2).flatten(2)
        return joined

    def feed_forward(
        self,
        x: Float[Tensor, "rows model_dim"],
        attended: Float[Tensor, "rows model_dim"],
    ) -> Float[Tensor, "rows model_dim"]:
        """Finish the attention of some positions, and apply the feed-forward sub-layer."""
        x = self.attention_norm(self.dropout.add(x, self.output(attended)))
        inner = functional.gelu(self.up(x))
        output: Tensor = self.ffn_norm(self.dropout.add(x, self.down(inner)))
        return output

    def _project(self, x: Float[Tensor, "*rows model_dim"], part: slice) -> Tensor:
        """Apply some rows of the common map to queries, keys and values."""
        maps = self.query_key_value
        return functional.linear(x, maps.weight[part], maps.bias[part])


@dataclass(frozen=True)
class Seen:
    """What the model sees of some images.

    Attributes:
        regions: Embeddings of all regions, but for position and type.
        beside: What is added to text beside each image; last, to text alone.
    """

    regions: Float[Tensor, "regions model_dim"]
    beside: Float[Tensor, "one_more model_dim"]


class Objects(nn.Module):
    """What stands for regions and images: their geometry and features, in the model's width."""

    def __init__(self, feature_dim: int, model_dim: int, dropout: float, noise: Noise) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.projection = nn.Linear(GEOMETRY_DIM + feature_dim, model_dim)
        self.word = nn.Parameter(torch.zeros(model_dim))
        self.norm = nn.LayerNorm(model_dim, eps=_EPS)
        self.text_norm = nn.LayerNorm(model_dim, eps=_EPS)
        self.dropout = Dropout(dropout, noise)

    def forward(self, images: Images) -> Seen:
        """Project each region once, however many sequences read it."""
        features = torch.cat([geometry(images.boxes), images.features], dim=1)
        objects = functional.relu(self.projection(self.dropout(features)))
        whole = torch.cat([objects[images.first], objects.new_zeros(1, objects.size(1))])
        return Seen(self.norm(objects) + self.word, self.text_norm(whole))


class Head(nn.Module):
    """BERT's head of masked language modelling; its output map is the word embeddings."""

    def __init__(self, model_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.transform = nn.Linear(model_dim, model_dim)
        self.norm = nn.LayerNorm(model_dim, eps=_EPS)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(
        self,
        states: Float[Tensor, "rows model_dim"],
        words: Float[Tensor, "vocab model_dim"],
    ) -> Float[Tensor, "rows vocab"]:
        """Return logits."""
        hidden = self.norm(functional.gelu(self.transform(states)))
        return functional.linear(hidden, words, self.bias)


class BertGen(nn.Module):
    """The network: embeddings, layers, head.

    Args:
        feature_dim: Width of the regions' features.
        max_positions: Longest sequence, regions counted as one position and [END] as another.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        model_dim: int,
        layers: int,
        heads: int,
        ffn_dim: int,
        feature_dim: int,
        max_positions: int = 512,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.noise = Noise()
        self.words = nn.Embedding(vocab_size, model_dim)
        self.positions = nn.Embedding(max_positions, model_dim)
        self.types = nn.Embedding(_TYPES, model_dim)
        self.end = nn.Parameter(torch.zeros(model_dim))
        self.objects = Objects(feature_dim, model_dim, dropout, self.noise)
        self.norm = nn.LayerNorm(model_dim, eps=_EPS)
        self.dropout = Dropout(dropout, self.noise)
        self.layers = nn.ModuleList(
            Layer(model_dim, heads, ffn_dim, dropout, attention_dropout, self.noise)
            for _ in range(layers)
        )
        self.head = Head(model_dim, vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for vector in (self.end, self.objects.word):
            nn.init.normal_(vector, std=_INIT)
        for norm in (self.objects.norm, self.objects.text_norm):  # as in the official code: what is
            nn.init.zeros_(norm.weight)  # seen adds nothing to what a BERT computes at first

    def embed(self, sequences: Sequences, seen: Seen) -> Float[Tensor, "positions model_dim"]:
        """Return the input of the first layer."""
        text = self.words(sequences.ids) + seen.beside[sequences.image]
        ends = self.end.expand(sequences.num_ends, -1)
        others = torch.cat([seen.regions[sequences.regions], ends])
        types = self.types.weight
        embedded = torch.cat([text + types[_TEXT], others + types[_OBJECT]])
        return self.normed(embedded + self.positions(sequences.positions))

    def normed(
        self, embedded: Float[Tensor, "*rows model_dim"]
    ) -> Float[Tensor, "*rows model_dim"]:
        """Finish embeddings."""
        output: Tensor = self.dropout(self.norm(embedded))
        return output

    def forward(self, sequences: Sequences, seen: Seen) -> Float[Tensor, "predictions vocab"]:
        """Return the logits of the predicted positions, sequence by sequence.

        Args:
            seen: What ``objects`` makes of the images.
        """
        x = self.embed(sequences, seen)
        *lower, last = self.stack()
        for layer in lower:
            x = layer(x, sequences)
        return self.logits(last.predicted(x, sequences))

    def stack(self) -> list[Layer]:
        """Return the layers, the lowest first."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def logits(self, states: Float[Tensor, "rows model_dim"]) -> Float[Tensor, "rows vocab"]:
        """Return logits of last states."""
        output: Tensor = self.head(states, self.words.weight)
        return output
