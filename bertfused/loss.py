"""Label-smoothed cross-entropy over the vocabulary, fused with the output projection."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Rows of logits made at a time: enough for full matrix speed, few enough to stay in the cache.
_CPU_ROWS = 256
_ACCELERATOR_ROWS = 4096


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
    arguments = (hidden, weight, target, label_smoothing, wanted)
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
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        compute = hidden.dtype
        if torch.is_autocast_enabled(device):
            compute = torch.get_autocast_dtype(device)
        rows = _CPU_ROWS if device == "cpu" else _ACCELERATOR_ROWS
        matrix, low_hidden = weight.to(compute), hidden.to(compute)
        other = label_smoothing / (len(weight) - 1)
        confidence = 1 - label_smoothing - other
        total, nll = hidden.new_zeros(2, dtype=torch.float32).unbind()
        if wanted:
            hidden_gradient = torch.empty_like(hidden)
            weight_gradient = torch.zeros_like(weight)
        for start in range(0, len(target), rows):
            part = slice(start, start + rows)
            logits = torch.mm(low_hidden[part], matrix.T).float()
            correct = target[part, None]
            highest = logits.amax(1, keepdim=True)
            logits -= highest
            correct_logit, logit_sum = logits.gather(1, correct), logits.sum(1, keepdim=True)
            exponentials = logits.exp_()
            normaliser = exponentials.sum(1, keepdim=True)
            log_normaliser = normaliser.log()
            chunk_nll = log_normaliser - correct_logit
            smooth = len(weight) * log_normaliser - logit_sum
            nll += chunk_nll.sum()
            total += (confidence * chunk_nll + other * smooth).sum()
            if wanted:
                gradient = exponentials.div_(normaliser).sub_(other)
                gradient.scatter_add_(1, correct, gradient.new_full(correct.shape, -confidence))
                gradient = gradient.to(compute)
                hidden_gradient[part] = torch.mm(gradient, matrix)
                weight_gradient += torch.mm(gradient.T, low_hidden[part])
        if wanted:
            ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors  # type: ignore[attr-defined]
        return (
            hidden_gradient.mul_(gradient.to(hidden_gradient.dtype)),
            weight_gradient.mul_(gradient.to(weight_gradient.dtype)),
            None,
            None,
            None,
        )
