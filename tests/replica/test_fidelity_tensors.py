"""Tensors of every dtype, layout and class: carried bit by bit, or refused by key path and name."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from replica.dtypes import DTYPES
from replica.errors import StateError
from replica.leaves import memory_of
from replica.tensor_kinds import QUANTIZED, REFUSALS, refusal
from tests.replica.snapshot_tools import bits, header_of, image_of, load, returned

CARRIED = {name: dtype for name, dtype in DTYPES.items() if dtype not in QUANTIZED}


def raw(count, dtype, rng):
    """Return a flat tensor of any dtype with random bytes in it (0 and 1 for bool)."""
    data = rng.integers(0, 2 if dtype is torch.bool else 256, count * dtype.itemsize, np.uint8)
    flat = torch.zeros(len(data), dtype=torch.uint8)
    flat.numpy()[:] = data
    return flat.view(dtype)


def forms(dtype, rng):
    """Tensors of one dtype that do not lie in one piece, or share a larger memory."""
    base = raw(60, dtype, rng)
    return {
        "transposed": base.view(6, 10).t(),
        "strided": base.view(6, 10)[::2, 1:],
        "every other": base[1::2],
        "expanded": base[:3].view(3, 1).expand(3, 4),
        "one of many": raw(100_000, dtype, rng)[77_777],
        "some of many": raw(100_000, dtype, rng)[5:15],
        "channels last": base[:48].as_strided((2, 3, 2, 4), (24, 1, 12, 3)),
        "overlapping itself": base.as_strided((4, 3), (1, 1)),
        "size one": base.as_strided((1, 4), (9, 1)),
    }


def test_the_list_of_dtypes_is_torchs():
    """Every dtype that is an attribute of torch is either carried or known to be quantized."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert set(DTYPES.values()) == found
    assert {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32, torch.int4} <= {
        *CARRIED.values()
    }
    assert {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2} <= QUANTIZED


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", CARRIED)
def test_every_dtype_in_every_form(name, rng):
    """Nine views of each dtype come back with bits, shape and strides, new and into live ones."""
    state = forms(CARRIED[name], rng)
    wanted = {key: bits_of(value) for key, value in state.items()}
    image = image_of({"t": state})
    assert image.nbytes < 40_000
    found = {"t": {}}
    load(image, found)
    assert {key: bits_of(value) for key, value in found["t"].items()} == wanted
    assert {key: value.stride() for key, value in found["t"].items()} == {
        key: value.stride() for key, value in state.items()
    }
    live = forms(CARRIED[name], rng)
    load(image, {"t": live})
    assert {key: bits_of(value) for key, value in live.items()} == wanted


def bits_of(value):
    """Compare by this where torch has no kernel for the dtype: bytes through integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if value.itemsize in kinds:
        value = value.view(kinds[value.itemsize])
    return bits(value)[1:]


SPECIAL = {
    torch.float64: [0x7FF8000000000001, 0x7FF0DEADBEEF0001, 1 << 63, 0x7FF0000000000000, 1],
    torch.float32: [0x7FC00001, 0x7F800001, 1 << 31, 0xFF800000, 1],
    torch.float16: [0x7E01, 0x7C01, 1 << 15, 0x7C00, 1],
    torch.bfloat16: [0x7FC1, 0x7F81, 1 << 15, 0x7F80, 1],
}


@pytest.mark.parametrize("dtype", SPECIAL, ids=str)
def test_special_floats_keep_their_bits(dtype):
    """NaN with payload (quiet and signalling), -0.0, infinity and the least subnormal."""
    integers = getattr(np, f"uint{dtype.itemsize * 8}")
    value = torch.from_numpy(np.array(SPECIAL[dtype], integers)).view(dtype)
    assert bits(returned(value)) == bits(value)
    assert bits(returned(value[2])) == bits(value[2])
    live = {"v": torch.zeros_like(value)}
    load(image_of({"v": value}), live)
    assert bits(live["v"]) == bits(value)


def test_sharing_is_kept_wherever_the_names_stand():
    """Ties across dicts, a model and its average, and overlapping views: stored once, tied again.

    Disjoint views of one buffer keep their values and stay apart.
    """
    weight, base = torch.randn(4, 4), torch.arange(10.0)
    model = nn.Linear(4, 4, bias=False)
    state = {
        "tied": {"embed": weight, "head": weight},
        "apart": {"a": {"w": base[0:6]}, "b": {"c": {"w": base[4:10]}}},
        "model": model,
        "ema": {"weight": model.weight, "own": torch.zeros(1)},
        "disjoint": {"a": torch.arange(4.0)[:2], "b": torch.arange(4.0)[2:]},
    }
    image = image_of(state)
    names = set(header_of(image)) - {"__metadata__", "planaria.tree", "planaria.pad"}
    assert names == {
        *("tied.embed", "apart.a.w", "model.weight", "ema.own"),
        *("disjoint.a", "disjoint.b"),
    }
    fresh = nn.Linear(4, 4, bias=False)
    live = {"tied": {}, "apart": {}, "model": fresh, "ema": {"weight": fresh.weight}}
    load(image, live | {"disjoint": (kept := {})})
    assert torch.equal(live["tied"]["embed"], weight)
    live["tied"]["head"].zero_()
    assert not live["tied"]["embed"].any()
    live["apart"]["a"]["w"][4] = -1
    assert live["apart"]["b"]["c"]["w"].tolist() == [-1, 5, 6, 7, 8, 9]
    assert torch.equal(fresh.weight, model.weight)
    assert live["ema"]["weight"] is fresh.weight
    assert (kept["a"].tolist(), kept["b"].tolist()) == ([0, 1], [2, 3])


def test_a_view_of_a_hundred_million_elements_costs_the_view():
    """Ten elements of a memory of 400 MB that is never touched: the image has a few thousand."""
    large = torch.empty(100_000_000)
    large[50_000_000:50_000_010] = torch.arange(10.0)
    image = image_of({"view": large[50_000_000:50_000_010]})
    assert image.nbytes < 10_000
    assert returned(large[50_000_000:50_000_010]).tolist() == list(range(10))


def test_what_comes_back_where_no_live_tensor_is():
    """Parameters, tensors with a gradient and results of autograd: plain tensors without one."""
    made = torch.ones(2, requires_grad=True) * 2
    for value in (nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), made):
        found = returned(value)
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert torch.equal(found, value)


def test_live_tensors_keep_their_class_and_flags():
    """A live parameter, a frozen one and a tensor of inference mode are filled in place."""
    with torch.inference_mode():
        frozen = torch.zeros(2)
    saved = {"p": nn.Parameter(torch.ones(2)), "f": torch.ones(2), "i": torch.ones(2)}
    live = {
        "p": nn.Parameter(torch.zeros(2)),
        "f": nn.Parameter(torch.zeros(2), requires_grad=False),
        "i": frozen,
    }
    held = dict(live)
    load(image_of(saved), live)
    assert all(live[key] is held[key] for key in held)
    assert [type(value).__name__ for value in live.values()] == ["Parameter", "Parameter", "Tensor"]
    assert [value.requires_grad for value in live.values()] == [True, False, False]
    assert all(value.eq(1).all() for value in live.values())


class OwnTensor(torch.Tensor):
    """A tensor class of the user's without a protocol."""


def freed():
    """Make a tensor whose memory was given back, as FSDP leaves its gathered parameters."""
    value = torch.ones(4)
    value.untyped_storage().resize_(0)
    return value


def of_channels():
    """Quantize by channel."""
    scales, zeros = torch.ones(2), torch.zeros(2)
    return torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)


REFUSED = {
    "COO": (lambda: torch.eye(2).to_sparse(), "layout is not dense"),
    "CSR": (lambda: torch.eye(2).to_sparse_csr(), "layout is not dense"),
    "CSC": (lambda: torch.eye(2).to_sparse_csc(), "layout is not dense"),
    "BSR": (lambda: torch.eye(2).to_sparse_bsr((1, 1)), "layout is not dense"),
    "BSC": (lambda: torch.eye(2).to_sparse_bsc((1, 1)), "layout is not dense"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "layout is not dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        "NestedTensor, a nested tensor",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "on the meta device"),
    "lazy parameter": (lambda: nn.LazyLinear(2).weight, "UninitializedParameter, which has no"),
    "lazy buffer": (nn.parameter.UninitializedBuffer, "UninitializedBuffer, which has no values"),
    "per tensor": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "quantized: its scales",
    ),
    "per channel": (of_channels, "quantized: its scales"),
    "quantized dtype": (lambda: torch.ones(2, dtype=torch.int8).view(torch.qint8), "quantized"),
    "subclass": (lambda: torch.ones(2).as_subclass(OwnTensor), r"OwnTensor, .*as_subclass\("),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "MaskedTensor, a tensor subclass",
    ),
    "wrapper": (
        lambda: TwoTensor(torch.ones(2), torch.ones(2)),
        "TwoTensor, .*only as a param",
    ),
    "zero": (lambda: torch._efficientzerotensor((2,)), "no memory of its own"),
    "freed": (freed, "no memory of its own"),
    "traced": (lambda: torch._to_functional_tensor(torch.ones(2)), "no memory of its own"),
    "batched": (
        lambda: torch._C._functorch._add_batch_dim(torch.ones(2, 2), 0, 1),
        "no memory of its own",
    ),
    "dimensions": (lambda: torch.zeros((1,) * 65), "more than 64 dimensions"),
    "stride": (lambda: torch.empty_strided((1,), (1 << 50,)), "beyond what an image describes"),
    "elements": (lambda: torch.ones(1).expand(1 << 31, 1 << 31), "beyond what an image describes"),
    "storage": (lambda: torch.ones(2).untyped_storage(), "UntypedStorage, which is not one of"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_kinds_that_are_not_carried_are_named(name):
    """Rank, key path, class and what to do, in a container and in an object: never a crash."""
    make, text = REFUSED[name]
    with pytest.raises(StateError, match=rf"rank 1: state\['a'\]\[0\] is a .*{text}"):
        image_of({"a": [make()]})
    with pytest.raises(StateError, match=rf"rank 1: state\['m'\]\['_extra.*'\]\['x'\] .*{text}"):
        image_of({"m": Extra([make()])})


class Extra(nn.Module):
    """A module with a value beside its tensors."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        """Give the value."""
        return {"x": self.value[0]}

    def set_extra_state(self, state):
        """Take it back."""
        self.value = [state["x"]]


@pytest.mark.filterwarnings("ignore")
def test_every_rule_of_the_table_refuses_something():
    """Each row of the table, but that on devices, is the reason for one of the tensors above."""
    tensors = [value for make, _ in REFUSED.values() if isinstance(value := make(), torch.Tensor)]
    rules = {rule.why for rule in REFUSALS if "device" not in rule.kind or "meta" in rule.kind}
    assert {refusal(value) for value in tensors} == rules


class Scaled(torch.Tensor):
    """A wrapper like those of quantized training: integers, scales and a context."""

    @staticmethod
    def __new__(cls, data, scale, context):
        """Make the outer tensor, which has no memory."""
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale, context):
        self.data_part, self.scale, self.context = data, scale, context

    def __tensor_flatten__(self):
        """Name the inner tensors."""
        return ["data_part", "scale"], self.context

    @staticmethod
    def __tensor_unflatten__(inner, context, _size, _stride):
        """Put them together again."""
        return Scaled(inner["data_part"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Only what a parameter needs: no copy_, so loading must not ask for one."""
        if func is torch.ops.aten.detach.default:
            (value,) = args
            return Scaled(value.data_part, value.scale, value.context)
        raise NotImplementedError(func)

    def __repr__(self):
        """Say little: the outer tensor has nothing to print."""
        return "Scaled()"


def scaled(seed, context=("int8", {"block": 32, "axis": 0}), rows=3):
    """Build a module with a wrapped parameter, a wrapped buffer and a plain bias."""
    rng = torch.Generator().manual_seed(seed)
    module = nn.Module()
    data = torch.randint(-9, 9, (rows, 2), dtype=torch.int8, generator=rng)
    scale = torch.rand(rows, generator=rng)
    module.weight = nn.Parameter(Scaled(data, scale, context), requires_grad=False)
    pair = TwoTensor(torch.rand(2, generator=rng), torch.rand(2, generator=rng))
    module.register_buffer("pair", pair)
    module.bias = nn.Parameter(torch.rand(2, generator=rng))
    return module


def inner(module):
    """List the bits of all that a module of `scaled` is made of."""
    parts = module.weight.data_part, module.weight.scale, module.pair.a, module.pair.b, module.bias
    return [bits(part) for part in parts]


def test_wrapper_subclasses_in_a_module_come_back():
    """Inner tensors are filled in place, live objects stay, and no copy_ of theirs is needed."""
    first, second = scaled(1), scaled(2)
    wanted = inner(first)
    assert inner(second) != wanted
    held = second.weight, second.weight.data_part, second.pair
    image = image_of({"deep": [nn.ModuleDict({"m": first})]})
    load(image, {"deep": [nn.ModuleDict({"m": second})]})
    assert inner(second) == wanted
    now = second.weight, second.weight.data_part, second.pair
    assert [id(value) for value in now] == [id(value) for value in held]
    assert "deep.0.m.weight.data_part" in header_of(image)


def test_tied_wrappers_are_stored_once():
    """One wrapped parameter under two names: its inner tensors have one entry each."""
    module = scaled(1)
    module.twin = module.weight
    names = [name for name in header_of(image_of({"m": module})) if "data_part" in name]
    assert names == ["m.weight.data_part"]


@pytest.mark.parametrize(
    ("live", "text"),
    [
        (lambda: scaled(2, context=("int4", {})), r"\['weight'\] saved with the context tuple"),
        (lambda: scaled(2, rows=4), r"\['weight'\] saved with shape \(3, 2\), now \(4, 2\)"),
        (
            lambda: swapped(scaled(2), "weight", torch.zeros(3, 2)),
            "saved as .*Scaled, is a .*Param",
        ),
        (
            lambda: swapped(scaled(2), "bias", TwoTensor(torch.ones(2), torch.ones(2))),
            "is a .*TwoTensor",
        ),
    ],
)
def test_another_wrapper_is_refused_by_key(live, text):
    """Context, shape and class must be those that were saved; nothing is changed otherwise."""
    module = live()
    before = copy.deepcopy(module.weight.detach().__dict__)
    with pytest.raises(StateError, match=text):
        load(image_of({"m": scaled(1)}), {"m": module})
    assert repr(module.weight.detach().__dict__) == repr(before)


def swapped(module, name, value):
    """Put another parameter under a name."""
    setattr(module, name, nn.Parameter(value, requires_grad=False))
    return module


def test_a_context_without_a_text_of_its_own_is_refused():
    """A context whose repr is an address would differ in every process: named at the save."""
    with pytest.raises(StateError, match=r"state\['m'\]\S* is a .*Scaled, .* context cannot be"):
        image_of({"m": scaled(1, context=object())})
    unordered = {"b", "a", "c"}, {"y": 1, "x": frozenset({"p", "q"})}
    assert image_of({"m": scaled(1, context=unordered)}).nbytes


def test_shared_stretches_are_filled_once(rng):
    """Live views that overlap as the saved ones did take the bytes of one stretch of memory."""
    base = raw(20, torch.int16, rng)
    image = image_of({"a": base[:12], "b": base[6:]})
    other = torch.zeros(20, dtype=torch.int16)
    load(image, {"a": other[:12], "b": other[6:]})
    assert torch.equal(other, base)
    assert memory_of(other).numel() == 40
