"""Linear maps for translating on the CPU: weights laid out once, as the processor reads them.

A step of a search multiplies few rows, so that what a plain product spends on its weights counts:
with 40 rows (8 sentences, beam 5) packed ones take some two thirds of the time, with 400 nine
tenths. Where the weights are few, the call itself counts, and is the dearer one: they stay plain.
Each row's result has the same bits whatever rows stand beside it.
"""

import platform

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

_MOST_ROWS = 512  # of one product; more are cut
_FEWEST_ROWS = 4  # of a plain product; with fewer, other code adds up in another order
_FEWEST_WEIGHTS = 1 << 18  # that are packed; 5 rows by 128 x 384 take a third of the time plain
_LAYOUT_ROWS = 128  # for which the weights are laid out; it does for all numbers


class PackedLinear(nn.Linear):
    """A linear map for inference; it has the parameters of another one, which must not change."""

    def __init__(self, linear: nn.Linear) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)

    def forward(self, x: Float[Tensor, "*places inputs"]) -> Float[Tensor, "*places outputs"]:
        if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float32:
            return functional.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        if len(rows) <= _MOST_ROWS:
            return self._product(rows).view(*x.shape[:-1], self.out_features)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        parts = y.view(-1, self.out_features).split(_MOST_ROWS)
        for part, chunk in zip(parts, rows.split(_MOST_ROWS), strict=True):
            part.copy_(self._product(chunk))
        return y

    def _product(self, rows: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        count = len(rows)
        padding = rounded(count) - count
        if padding:
            rows = functional.pad(rows, (0, 0, 0, padding))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return product[:count]


class NarrowLinear(nn.Linear):
    """A linear map of few weights for inference; it has the parameters of another one."""

    def __init__(self, linear: nn.Linear) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Float[Tensor, "*places inputs"]) -> Float[Tensor, "*places outputs"]:
        count = x.numel() // self.in_features
        if count >= _FEWEST_ROWS:
            return functional.linear(x, self.weight, self.bias)
        rows = functional.pad(x.reshape(-1, self.in_features), (0, 0, 0, _FEWEST_ROWS - count))
        product = functional.linear(rows, self.weight, self.bias)
        return product[:count].view(*x.shape[:-1], self.out_features)


def rounded(rows: int) -> int:
    """Round up to one of the few numbers of rows that code is compiled for, once a process.

    >>> [rounded(rows) for rows in (1, 8, 41, 65, 200, 512)]
    [8, 8, 48, 72, 208, 512]
    """
    step = 1 << max(3, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def pack_linears(model: nn.Module, device: torch.device) -> None:
    """Replace the linear maps of a model that will only translate, where that makes it faster."""
    if device.type != "cpu" or not _is_supported():
        return
    packed: dict[nn.Module, PackedLinear | NarrowLinear] = {}  # one may stand in several places
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                if child not in packed:
                    is_narrow = child.weight.numel() < _FEWEST_WEIGHTS
                    packed[child] = NarrowLinear(child) if is_narrow else PackedLinear(child)
                setattr(module, name, packed[child])


def _is_supported() -> bool:
    """Say whether this is a kind of processor that packing was tried on (with torch 2.13)."""
    operations = ("_reorder_linear_weight", "_linear_pointwise")
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in operations)
    )
