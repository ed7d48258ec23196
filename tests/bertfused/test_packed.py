import pytest
import torch
from torch import nn
from torch.nn import functional

from bertfused.packed import NarrowLinear, PackedLinear, pack_linears, rounded

CPU = torch.device("cpu")


def linear(inputs: int = 20, outputs: int = 36, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs, bias=bias)


either = pytest.mark.parametrize("kind", [PackedLinear, NarrowLinear])


@either
@torch.inference_mode()
def test_the_product_is_the_plain_one_for_any_number_of_rows(
    kind: type[PackedLinear | NarrowLinear],
) -> None:
    for plain in (linear(), linear(bias=False), linear(512, 130)):
        packed = kind(plain)
        for places in ((0,), (1,), (5,), (3, 7), (2, 3, 11), (513,), (5, 300)):
            x = torch.randn(*places, plain.in_features)
            torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)
        strided = torch.randn(plain.in_features, 9).T
        torch.testing.assert_close(packed(strided), plain(strided), rtol=1e-5, atol=1e-5)


@either
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(
    kind: type[PackedLinear | NarrowLinear],
) -> None:
    packed = kind(linear(512, 130))
    x = torch.randn(1100, 512)
    whole = packed(x)
    for start, end in (
        (0, 1),
        (3, 4),
        (3, 5),
        (7, 10),
        (7, 11),
        (7, 20),
        (0, 511),
        (500, 1013),
        (1, 1100),
    ):
        assert torch.equal(packed(x[start:end]), whole[start:end])


def test_rows_are_rounded_up_by_little_to_few_numbers() -> None:
    found = [rounded(rows) for rows in range(1, 513)]
    assert all(rows <= own < rows + max(8, rows / 8) for rows, own in enumerate(found, 1))
    assert len(set(found)) == 32


def test_a_map_in_two_places_is_packed_once_and_parameters_stay() -> None:
    shared = linear(512, 512)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.ReLU(), shared), "c": linear()})
    before = {name: own.data_ptr() for name, own in model.state_dict().items()}
    pack_linears(model, CPU)
    assert isinstance(model["a"], PackedLinear)
    assert isinstance(model["c"], NarrowLinear)  # of few weights
    assert isinstance(model["b"], nn.Sequential)
    assert model["b"][1] is model["a"]
    assert {name: own.data_ptr() for name, own in model.state_dict().items()} == before


def test_what_is_not_for_the_cpu_in_float32_stays_plain() -> None:
    for model, device in (
        (nn.Sequential(linear()), torch.device("meta")),
        (nn.Sequential(linear().bfloat16()), CPU),
    ):
        pack_linears(model, device)
        assert type(model[0]) is nn.Linear


def test_gradients_and_other_types_take_the_plain_product() -> None:
    packed = PackedLinear(linear())
    x = torch.randn(3, 20, requires_grad=True)
    packed(x).sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        packed.double()
        y = packed(x.double())
        assert torch.equal(y, functional.linear(x.double(), packed.weight, packed.bias))
