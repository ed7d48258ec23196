"""Encoder and decoder layers with an extra attention branch over a frozen encoder's states.

Zhu et al. (2020), "Incorporating BERT into Neural Machine Translation". The residual, the
dropout of each branch and the norm are those of the paper's figure 1 and the official code;
equations 1 and 2 leave them out.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bertfused.attention import (
    Bias,
    CrossAttention,
    KeysValues,
    SelfAttention,
    SelfAttentionCache,
)
from bertfused.config import Activation, Order
from bertfused.noise import Dropout, Noise


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, for each position alone."""

    def __init__(
        self, model_dim: int, ffn_dim: int, activation: Activation, dropout: float, noise: Noise
    ) -> None:
        super().__init__()
        self.up = nn.Linear(model_dim, ffn_dim)
        self.down = nn.Linear(ffn_dim, model_dim)
        self.activation = functional.relu if activation == "relu" else functional.gelu
        self.dropout = Dropout(dropout, noise)
        for projection in (self.up, self.down):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self, x: Float[Tensor, "batch length model_dim"]
    ) -> Float[Tensor, "batch length model_dim"]:
        output: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return output


class BranchMixer(nn.Module):
    """Choose the weights of the two attention branches of one layer.

    With drop-net (Zhu et al., 2020, eq. 3), ``u ~ U(0, 1)`` drawn once a call and rate ``p``,
    the weights of (own attention, BERT attention) are::

        (1, 0)            if u <  p / 2
        (0, 1)            if u >= 1 - p / 2
        ``weights``       otherwise, and always in evaluation

    where ``weights`` is (1/2, 1/2) as in the paper; the official code without drop-net uses
    (1, 1), and checkpoints trained that way exist. A single branch is drawn with the weight
    ``sum(weights)`` (1 in the paper), so that with equal weights the expectation over draws is
    that of evaluation.
    With ``mixup`` the weights in training are ``(u, 1 - u)`` of that sum instead.

    A branch of weight zero need not be computed. Its parameters then get a zero gradient, as
    they do from the official code's multiplication by zero.
    """

    def __init__(
        self, drop_net: float, mixup: bool, weights: tuple[float, float], noise: Noise
    ) -> None:
        super().__init__()
        self.drop_net = drop_net
        self.mixup = mixup
        self.weights = weights
        self.noise = noise

    def draw(self) -> tuple[float, float]:
        """Return the weights of (own attention, BERT attention) for one forward pass."""
        if not self.training or not (self.drop_net or self.mixup):
            return self.weights
        u, total = self.noise.uniform(), sum(self.weights)
        if self.mixup:
            return u * total, (1 - u) * total
        if u < self.drop_net / 2:
            return total, 0.0
        if u >= 1 - self.drop_net / 2:
            return 0.0, total
        return self.weights


class EncoderLayer(nn.Module):
    """Self-attention beside BERT attention, then a feed-forward sub-layer (eq. 1).

    With own attention a, BERT attention b and weights (w0, w1)::

        post-norm:  x = norm(x + w0 drop(a(x)) + w1 drop(b(x)));  x = norm(x + drop(ffn(x)))
        pre-norm:   h = norm(x);  x = x + w0 drop(a(h)) + w1 drop(b(h));  likewise the FFN

    Args:
        bert_attention: ``None`` makes it a plain Transformer layer.
    """

    def __init__(
        self,
        self_attention: SelfAttention,
        bert_attention: CrossAttention | None,
        mixer: BranchMixer,
        ffn: FeedForward,
        *,
        pre_norm: bool,
        dropout: Dropout,
    ) -> None:
        super().__init__()
        model_dim = ffn.up.in_features
        self.self_attention = self_attention
        self.bert_attention = bert_attention
        self.mixer = mixer
        self.ffn = ffn
        self.attention_norm = nn.LayerNorm(model_dim)
        self.ffn_norm = nn.LayerNorm(model_dim)
        self.pre_norm = pre_norm
        self.dropout = dropout

    def forward(
        self,
        x: Float[Tensor, "batch source model_dim"],
        bias: Bias,
        bert_states: Float[Tensor, "batch bert bert_dim"] | None,
        bert_bias: Bias,
    ) -> Float[Tensor, "batch source model_dim"]:
        x = self.attend(x, bias, bert_states, bert_bias)
        return self.feed_forward(x)

    def attend(
        self,
        x: Float[Tensor, "batch source model_dim"],
        bias: Bias,
        bert_states: Float[Tensor, "batch bert bert_dim"] | None,
        bert_bias: Bias,
    ) -> Float[Tensor, "batch source model_dim"]:
        """Compute the first sub-layer."""
        h = self.attention_norm(x) if self.pre_norm else x
        if self.bert_attention is None:
            x = self.dropout.add(x, self.self_attention(h, bias))
        else:
            assert bert_states is not None
            own_weight, bert_weight = self.mixer.draw()
            if own_weight:
                x = self.dropout.add(x, self.self_attention(h, bias), own_weight)
            if bert_weight:
                attended = self.bert_attention(h, bert_states, bert_bias)
                x = self.dropout.add(x, attended, bert_weight)
        normed: Tensor = x if self.pre_norm else self.attention_norm(x)
        return normed

    def feed_forward(
        self, x: Float[Tensor, "batch source model_dim"]
    ) -> Float[Tensor, "batch source model_dim"]:
        """Compute the last sub-layer."""
        return feed_forward_sublayer(x, self.ffn, self.ffn_norm, self.dropout, self.pre_norm)


class DecoderLayer(nn.Module):
    """Causal self-attention, encoder attention beside BERT attention, feed-forward (eq. 2).

    ``order="parallel"`` is the paper's method: one residual and one norm around the weighted sum
    of both attentions. The stacked orders of appendix B.2 give each attention its own residual
    and norm, one after the other, and have no weights.
    """

    def __init__(
        self,
        self_attention: SelfAttention,
        cross_attention: CrossAttention,
        bert_attention: CrossAttention | None,
        mixer: BranchMixer,
        ffn: FeedForward,
        *,
        pre_norm: bool,
        dropout: Dropout,
        order: Order = "parallel",
    ) -> None:
        super().__init__()
        model_dim = ffn.up.in_features
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.bert_attention = bert_attention
        self.mixer = mixer
        self.ffn = ffn
        self.self_attention_norm = nn.LayerNorm(model_dim)
        self.cross_attention_norm = nn.LayerNorm(model_dim)
        self.ffn_norm = nn.LayerNorm(model_dim)
        self.order: Order = "parallel" if bert_attention is None else order
        if self.order != "parallel":
            self.bert_attention_norm = nn.LayerNorm(model_dim)
        self.pre_norm = pre_norm
        self.dropout = dropout

    def forward(
        self,
        x: Float[Tensor, "batch target model_dim"],
        bias: Bias,
        memory: Float[Tensor, "batch source model_dim"] | KeysValues,
        memory_bias: Bias,
        bert: Float[Tensor, "batch bert bert_dim"] | KeysValues | None,
        bert_bias: Bias,
        cache: SelfAttentionCache | None = None,
    ) -> Float[Tensor, "batch target model_dim"]:
        """Compute one layer; with a cache, for one new token of each beam (see SelfAttention)."""
        x = self.attend_own(x, bias, cache)
        x = self.attend_memory(x, memory, memory_bias, bert, bert_bias)
        return self.feed_forward(x)

    def attend_own(
        self,
        x: Float[Tensor, "batch target model_dim"],
        bias: Bias,
        cache: SelfAttentionCache | None = None,
    ) -> Float[Tensor, "batch target model_dim"]:
        """Compute the first sub-layer: attention to the tokens before."""
        h = self.self_attention_norm(x) if self.pre_norm else x
        x = self.dropout.add(x, self.self_attention(h, bias, cache))
        normed: Tensor = x if self.pre_norm else self.self_attention_norm(x)
        return normed

    def attend_memory(
        self,
        x: Float[Tensor, "batch target model_dim"],
        memory: Float[Tensor, "batch source model_dim"] | KeysValues,
        memory_bias: Bias,
        bert: Float[Tensor, "batch bert bert_dim"] | KeysValues | None,
        bert_bias: Bias,
    ) -> Float[Tensor, "batch target model_dim"]:
        """Compute the middle of the layer: attention to the source, and to BERT's states."""
        if self.bert_attention is None or self.order == "parallel":
            return self._attend_side_by_side(x, memory, memory_bias, bert, bert_bias)
        assert bert is not None
        stack = [
            (self.bert_attention, self.bert_attention_norm, bert, bert_bias),
            (self.cross_attention, self.cross_attention_norm, memory, memory_bias),
        ]
        for attention, norm, states, states_bias in (
            stack if self.order == "bert-first" else reversed(stack)
        ):
            h = norm(x) if self.pre_norm else x
            x = self.dropout.add(x, attention(h, states, states_bias))
            x = x if self.pre_norm else norm(x)
        return x

    def feed_forward(
        self, x: Float[Tensor, "batch target model_dim"]
    ) -> Float[Tensor, "batch target model_dim"]:
        """Compute the last sub-layer."""
        return feed_forward_sublayer(x, self.ffn, self.ffn_norm, self.dropout, self.pre_norm)

    def _attend_side_by_side(
        self,
        x: Float[Tensor, "batch target model_dim"],
        memory: Float[Tensor, "batch source model_dim"] | KeysValues,
        memory_bias: Bias,
        bert: Float[Tensor, "batch bert bert_dim"] | KeysValues | None,
        bert_bias: Bias,
    ) -> Float[Tensor, "batch target model_dim"]:
        h = self.cross_attention_norm(x) if self.pre_norm else x
        if self.bert_attention is None:
            x = self.dropout.add(x, self.cross_attention(h, memory, memory_bias))
        else:
            own_weight, bert_weight = self.mixer.draw()
            if own_weight:
                x = self.dropout.add(x, self.cross_attention(h, memory, memory_bias), own_weight)
            if bert_weight:
                assert bert is not None
                x = self.dropout.add(x, self.bert_attention(h, bert, bert_bias), bert_weight)
        return x if self.pre_norm else self.cross_attention_norm(x)


def feed_forward_sublayer(
    x: Float[Tensor, "batch length model_dim"],
    ffn: FeedForward,
    norm: nn.LayerNorm,
    dropout: Dropout,
    pre_norm: bool,
) -> Float[Tensor, "batch length model_dim"]:
    """Compute the second half of every layer: FFN, residual and norm."""
    h = norm(x) if pre_norm else x
    x = dropout.add(x, ffn(h))
    normed: Tensor = x if pre_norm else norm(x)
    return normed


def sinusoids(positions: int, model_dim: int) -> Float[Tensor, "positions model_dim"]:
    """Return the fixed position table, fairseq's: [all sines | all cosines].

    Row i is position i + 2, as the first real token's is padding_id + 1 there; frequencies are
    exp(-ln(10000) j / (model_dim / 2 - 1)), j = 0..model_dim/2-1.
    """
    half = model_dim // 2
    exponents = torch.arange(half, dtype=torch.float32) * -(
        torch.log(torch.tensor(10000.0)) / max(half - 1, 1)
    )
    angles = (torch.arange(positions, dtype=torch.float32) + 2)[:, None] * exponents.exp()[None]
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return functional.pad(table, (0, model_dim % 2))
