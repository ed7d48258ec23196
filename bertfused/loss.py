"""Label-smoothed cross-entropy over the vocabulary, fused with the output projection."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Logits made at a time: enough for full matrix speed, and a bound on memory.
_CPU_LOGITS = 2**23
_ACCELERATOR_LOGITS = 2**27
# Logits that a CPU turns into gradients at a time, in float32: few enough for its cache.
_IN_CACHE = 2**19


@dataclass(frozen=True)
class Loss:
    """Sums over target tokens, in nats; the mean is taken once, where gradients are formed.

    Attributes:
        total: What is minimised (label-smoothed).
        nll: Plain negative log-likelihood, for perplexity.
        tokens: Number of target tokens.
    """

    total: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    tokens: int


def cross_entropy(
    hidden: Float[Tensor, "tokens model_dim"],
    weight: Float[Tensor, "vocab model_dim"],
    target: Int[Tensor, "tokens"],
    label_smoothing: float,
) -> Loss:
    """Compare ``hidden @ weight.T`` with ``target``.

    With smoothing e over V symbols, as in fairseq since 0.12::

        e' = e / (V - 1);  total = sum_t (1 - e - e') nll_t + e' sum_v -log p_t(v)

    so the correct token keeps the mass 1 - e. The logits of all tokens never exist at once, and
    their gradient is formed while they are there: it is the biggest matrix of a training step.
    """
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    weight_learns = wanted and weight.requires_grad  # the output of a frozen model does not
    arguments = (hidden, weight, target, label_smoothing, wanted, weight_learns)
    total, nll = _ProjectedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return Loss(total, nll.detach(), len(target))


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        label_smoothing: float,
        wanted: bool,
        weight_learns: bool,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        compute = hidden.dtype
        if torch.is_autocast_enabled(device):
            compute = torch.get_autocast_dtype(device)
        on_cpu, vocab = device == "cpu", len(weight)
        rows = max(min((_CPU_LOGITS if on_cpu else _ACCELERATOR_LOGITS) // vocab, len(target)), 1)
        piece_rows = max(_IN_CACHE // vocab, 1) if on_cpu else rows
        matrix, low_hidden = weight.to(compute), hidden.to(compute)
        wide_type = torch.promote_types(compute, torch.float32)
        total, nll = hidden.new_zeros(2, dtype=wide_type).unbind()
        # Written again and again: fresh memory of this size costs more than what is done in it.
        low_logits = matrix.new_empty(rows, vocab)
        logits = low_logits[:piece_rows]
        if compute != wide_type:
            logits = torch.empty_like(logits, dtype=wide_type)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient: Tensor | None = None
        for start in range(0, len(target), rows):
            part = slice(start, start + rows)
            low = torch.mm(low_hidden[part], matrix.T, out=low_logits[: len(target) - start])
            for piece, correct in zip(
                low.split(piece_rows), target[part].split(piece_rows), strict=True
            ):
                wide = piece if compute == wide_type else logits[: len(piece)].copy_(piece)
                piece_total, piece_nll = _replace_by_gradient(wide, correct, label_smoothing)
                total += piece_total
                nll += piece_nll
                if wanted and wide is not piece:
                    piece.copy_(wide)
            if wanted:
                hidden_gradient[part] = torch.mm(low, matrix)
            if weight_learns:
                part_of_gradient = torch.mm(low.T, low_hidden[part]).to(weight.dtype)
                if weight_gradient is None:
                    weight_gradient = part_of_gradient
                else:
                    weight_gradient += part_of_gradient
        if wanted:
            if weight_learns and weight_gradient is None:  # there were no tokens
                weight_gradient = torch.zeros_like(weight)
            ctx.save_for_backward(hidden_gradient, weight_gradient)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors  # type: ignore[attr-defined]
        return (
            hidden_gradient.mul_(gradient.to(hidden_gradient.dtype)),
            None
            if weight_gradient is None
            else weight_gradient.mul_(gradient.to(weight_gradient.dtype)),
            None,
            None,
            None,
            None,
        )


def _replace_by_gradient(
    logits: Float[Tensor, "tokens vocab"], target: Int[Tensor, "tokens"], label_smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return ``Loss.total`` and ``Loss.nll`` of some logits; leave their gradient in their place.

    The softmax kernel keeps its normaliser Z to itself, but log Z = highest - log p(highest), and
    the highest probability is never too small for that.
    """
    vocab, correct = logits.shape[1], target[:, None]
    other = label_smoothing / (vocab - 1)
    confidence = 1 - label_smoothing - other
    highest, logit_sum = logits.amax(1, keepdim=True), logits.sum(1, keepdim=True)
    correct_logit = logits.gather(1, correct)
    probabilities = torch.softmax(logits, 1, out=logits)
    log_normaliser = highest - probabilities.amax(1, keepdim=True).log()
    nll = log_normaliser - correct_logit
    total = confidence * nll + other * (vocab * log_normaliser - logit_sum)
    gradient = probabilities.sub_(other)
    gradient.scatter_add_(1, correct, gradient.new_full(correct.shape, -confidence))
    return total.sum(), nll.sum()
