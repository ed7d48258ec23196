"""The one source of randomness inside a network: dropout masks and drop-net draws.

Every draw is a function of a key, normally (seed, step, micro-batch). So a resumed run needs no
saved generator, and two processes that share the micro-batches of a step draw what one would.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn


class Noise:
    """A keyed generator shared by all modules of one network."""

    def __init__(self) -> None:
        self.reseed(0)

    def reseed(self, *key: int) -> None:
        """Start the stream that belongs to ``key``."""
        sequence = np.random.SeedSequence(key)
        self._bits = np.random.SFC64(sequence)
        self._uniform = np.random.Generator(np.random.SFC64(sequence.spawn(1)[0]))
        self._device_seed = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
        self._device_generator: torch.Generator | None = None

    def uniform(self) -> float:
        """Draw from U[0, 1); the same on every device, and unmoved by the dropout masks."""
        return float(self._uniform.random())

    def integer(self, high: int) -> int:
        """Draw from {0, ..., high - 1}."""
        return int(self._uniform.integers(high))

    def keep_mask(self, like: Tensor, threshold: int) -> Tensor:
        """Draw a mask of ones and zeros, P(zero) = threshold / 256, in the shape of ``like``.

        On the CPU the bytes come from a counter of SFC64 words through NumPy: torch's own
        Bernoulli sampling costs ten times as much and is a tenth of a training step.
        """
        if like.device.type != "cpu":
            if self._device_generator is None:
                self._device_generator = torch.Generator(like.device)
                self._device_generator.manual_seed(self._device_seed)
            draw = torch.empty(like.shape, dtype=torch.uint8, device=like.device)
            return (draw.random_(generator=self._device_generator) >= threshold).to(like.dtype)
        words = self._bits.random_raw((like.numel() + 7) // 8)
        keep = words.view(np.uint8)[: like.numel()] >= threshold
        if like.dtype == torch.bfloat16:
            ones = keep.astype(np.uint16) * np.uint16(0x3F80)  # the bits of 1.0 in bfloat16
            return torch.from_numpy(ones).view(torch.bfloat16).view(like.shape)
        return torch.from_numpy(keep.astype(np.float32)).view(like.shape).to(like.dtype)


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        residual: Tensor,
        branch: Tensor,
        keep: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale  # type: ignore[attr-defined]
        return torch.addcmul(residual, branch, keep, value=scale)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        (keep,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient, (gradient.to(keep.dtype) * keep).mul_(ctx.scale), None, None  # type: ignore[attr-defined]


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, keep: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale  # type: ignore[attr-defined]
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (gradient * keep).mul_(ctx.scale), None, None  # type: ignore[attr-defined]


class Dropout(nn.Module):
    """Zero elements at random while training and scale the others to keep the expectation.

    The rate is rounded to a multiple of 1/256 (a mask element is one random byte); the scale
    is that of the rounded rate, so the expectation is exact.

    Args:
        rate: Probability of zeroing an element, in [0, 1).
        noise: Where the masks come from.
    """

    def __init__(self, rate: float, noise: Noise) -> None:
        super().__init__()
        self.threshold = min(round(rate * 256), 255)
        self.scale = 256 / (256 - self.threshold)
        self.noise = noise

    @property
    def is_active(self) -> bool:
        return self.training and self.threshold > 0

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if not self.is_active:
            return x
        keep = self.noise.keep_mask(x, self.threshold)
        dropped: Tensor = _Dropout.apply(x, keep, self.scale)  # type: ignore[no-untyped-call]
        return dropped

    def add(
        self,
        residual: Float[Tensor, "*shape"],
        branch: Float[Tensor, "*shape"],
        weight: float = 1.0,
    ) -> Float[Tensor, "*shape"]:
        """Return ``residual + weight * dropout(branch)`` in one pass over the memory."""
        if not self.is_active:
            return torch.add(residual, branch, alpha=weight)
        keep = self.noise.keep_mask(branch, self.threshold)
        scale = self.scale * weight
        added: Tensor = _DropoutAdd.apply(residual, branch, keep, scale)  # type: ignore[no-untyped-call]
        return added
