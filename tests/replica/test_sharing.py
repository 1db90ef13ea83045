"""How live tensors share memory must be how the saved ones did: else nothing of them is loaded."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from replica.errors import StateError
from replica.leaves import overlaps_itself
from replica.snapshot import Snapshot
from replica.torch_private import shard_order
from tests.replica.snapshot_tools import HEADER, bits, image_of, load, returned
from tests.replica.test_resume_strict import load_leniently


class Coder(nn.Module):
    """Two layers with one weight, the second one's as it is or transposed."""

    def __init__(self, value, *, transposed):
        super().__init__()
        self.enc, self.dec = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.alone = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.enc.weight.copy_(torch.arange(9.0).view(3, 3) * value)
            self.alone.weight.fill_(value)
        weight = self.enc.weight
        self.dec.weight = nn.Parameter(weight.data.t()) if transposed else weight


def test_weights_tied_as_when_saved_come_back():
    """Tied as they are or transposed, on both sides alike: both get their values."""
    for transposed in (False, True):
        saved, live = (Coder(value, transposed=transposed) for value in (1.0, 0.0))
        load(image_of({"m": saved}), {"m": live})
        assert torch.equal(live.enc.weight, saved.enc.weight)
        assert torch.equal(live.dec.weight, saved.dec.weight)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_tied_to_a_transpose_is_no_plain_tie(transposed):
    """Both weights are named with both layouts; leniently both are left out."""
    saved, live = Coder(1.0, transposed=transposed), Coder(0.0, transposed=not transposed)
    image = image_of({"m": saved})
    strides = {False: r"\[3, 1\]", True: r"\[1, 3\]"}
    said = (
        r"state\['m'\]\['dec.weight'\] shares memory with state\['m'\]\['enc.weight'\], saved "
        rf"\+0 bytes from it with strides {strides[transposed]} to its \[3, 1\], "
        rf"is \+0 bytes from it with strides {strides[not transposed]} to its \[3, 1\]"
    )
    with pytest.raises(StateError, match=said + r".*restore\(strict=False\)"):
        load(image, {"m": live})
    assert not any(param.any() for param in live.parameters())
    left = load_leniently(image, {"m": live})
    enc, dec = left["unfit"]
    assert enc.startswith("state['m']['enc.weight'] shares memory with state['m']['dec.weight'], ")
    assert re.match(said, dec)
    assert not live.enc.weight.any()
    assert live.alone.weight.item() == 1


def test_moments_of_weights_tied_otherwise_are_left_too():
    """What a lenient restore leaves begins without moments."""
    saved, live = Coder(1.0, transposed=True), Coder(0.0, transposed=False)
    params = [[m.enc.weight, m.alone.weight] for m in (saved, live)]
    optim, fresh = (torch.optim.SGD(some, lr=1.0, momentum=0.9) for some in params)
    saved.enc(torch.ones(1, 3)).sum().add(saved.alone.weight.sum()).backward()
    optim.step()
    load_leniently(image_of({"o": optim, "m": saved}), {"o": fresh, "m": live})
    assert list(fresh.state) == [live.alone.weight]


def slices(at):
    """Give a buffer and two stretches of it, the second one from `at`."""
    flat = torch.arange(8.0)
    return {"flat": flat, "head": flat[:4], "tail": flat[at : at + 4]}


def overlapping(at):
    """Give two stretches of one buffer that overlap."""
    flat = torch.arange(12.0)
    return {"x": flat[:6], "y": flat[at : at + 6]}


def numbers(change):
    """Give complex numbers and another view of them."""
    base = torch.tensor([1 + 2j, 3 - 1j])
    return {"z": base, "other": change(base)}


def imaginary(change):
    """Give complex numbers and the imaginary part of a view of them."""
    base = torch.tensor([1 + 2j, 3 - 1j])
    return {"z": base, "part": change(base).imag}


OTHERWISE = {
    "moved on": (lambda: slices(4), lambda: slices(2)),
    "moved back": (lambda: slices(2), lambda: slices(4)),
    "overlap less": (lambda: overlapping(2), lambda: overlapping(4)),
    "overlap more": (lambda: overlapping(4), lambda: overlapping(2)),
    "conjugate": (lambda: numbers(torch.conj), lambda: numbers(torch.detach)),
    "no conjugate": (lambda: numbers(torch.detach), lambda: numbers(torch.conj)),
    "negative": (lambda: imaginary(torch.conj), lambda: imaginary(torch.detach)),
    "no negative": (lambda: imaginary(torch.detach), lambda: imaginary(torch.conj)),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_views_that_lie_otherwise_are_named_and_left(name):
    """Strictly an error that changes nothing, leniently all of the memory stays and is listed."""
    make, other = OTHERWISE[name]
    image = image_of({"box": make()})
    live = other()
    for value in live.values():
        value.zero_()
    base = next(iter(live.values()))
    assert not base.any()
    with pytest.raises(StateError, match=r"nothing was changed.* bytes from it with strides"):
        load(image, {"box": live})
    left = load_leniently(image, {"box": live})
    assert [line.split(" ")[0] for line in left["unfit"]] == [f"state['box']['{k}']" for k in live]
    assert not base.any()
    # And as they were saved they come back.
    same = make()
    wanted = {key: bits(value) for key, value in same.items()}
    next(iter(same.values())).zero_()
    load(image, {"box": same})
    assert {key: bits(value) for key, value in same.items()} == wanted


def test_one_view_under_two_names_may_have_other_strides():
    """Tied tensors in another memory format, or both conjugate, have the same elements."""
    for saved, live in (
        (torch.randn(2, 3, 4, 5), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        (torch.tensor([1 + 2j]).conj(), torch.zeros(1, dtype=torch.complex64)),
        (torch.tensor([1 + 2j]), torch.zeros(1, dtype=torch.complex64).conj()),
    ):
        state = {"a": live, "b": live}
        load(image_of({"a": saved, "b": saved}), state)
        assert state["b"] is live
        assert torch.equal(live, saved)


def random_views(rng, shapes, strides=None):
    """Give random views of these shapes of one small random memory, and their strides."""
    base = torch.from_numpy(rng.standard_normal(40))
    strides = strides or [rng.integers(0, 5, len(shape)).tolist() for shape in shapes]
    begins = rng.integers(0, 3, len(shapes)).tolist()
    rows = zip(shapes, strides, begins, strict=True)
    return {str(at): base.as_strided(*row) for at, row in enumerate(rows)}, strides


def test_what_is_loaded_is_exact_however_memory_is_shared(rng):
    """Random views into random views: refused with nothing changed, or each has its own values."""
    loaded = 0
    for turn in range(400):
        shapes = [rng.integers(1, 4, rng.integers(0, 3)).tolist() for _ in range(2)]
        saved, strides = random_views(rng, shapes)
        live, _ = random_views(rng, shapes, strides if turn % 2 else None)
        before, wanted = ({key: bits(value) for key, value in one.items()} for one in (live, saved))
        image = image_of({"box": saved})
        try:
            load(image, {"box": live})
        except StateError:
            wanted = before
        else:
            loaded += 1
        assert {key: bits(value) for key, value in live.items()} == wanted
    assert loaded > 20


# ---- tensors that overlap themselves

WINDOWS = {
    "sliding": lambda: torch.zeros(10).as_strided((3, 3), (1, 2)),
    "sliding otherwise": lambda: torch.zeros(10).as_strided((3, 3), (2, 1)),
    "with gaps": lambda: torch.zeros(20).as_strided((3, 3), (2, 2)),
    "rows repeat": lambda: torch.zeros(1, 3).expand(3, 3),
    "columns repeat": lambda: torch.zeros(3, 1).expand(3, 3),
    "one element": lambda: torch.zeros(1, 1).expand(3, 3),
    "raw": lambda: torch.zeros(1, 3, dtype=torch.bfloat16).expand(3, 3),
}


@pytest.mark.parametrize("in_module", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_elements_at_one_place_take_no_others(name, in_module):
    """Of other strides: named before anything is changed, and left out leniently."""

    def placed(value, beside):
        if not in_module:
            return {"beside": torch.tensor([beside]), "t": value}
        module = nn.Module()
        module.register_buffer("beside", torch.tensor([beside]))
        module.register_buffer("t", value)
        return module

    window = WINDOWS[name]()
    image = image_of({"x": placed(torch.arange(9).view(3, 3).to(window.dtype), 1.0)})
    live = placed(window, 0.0)
    with pytest.raises(StateError, match=r"'t'\] saved with strides \[3, 1\], has .*clone\(\)"):
        load(image, {"x": live})
    beside = live.beside if in_module else live["beside"]
    assert (beside.item(), window.any().item()) == (0, False)
    (line,) = load_leniently(image, {"x": live})["unfit"]
    assert line.startswith("state['x']['t'] saved with strides")
    assert (beside.item(), window.any().item()) == (1, False)


@pytest.mark.parametrize("in_module", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_elements_at_one_place_come_back_to_one_place(name, in_module):
    """Of the same strides: filled in place, in a container and a module; nothing between them."""

    def placed(value):
        module = nn.Module()
        module.register_buffer("t", value)
        return module if in_module else {"t": value}

    saved, live = WINDOWS[name](), WINDOWS[name]()
    flat = saved.as_strided((saved.untyped_storage().nbytes() // saved.itemsize,), (1,))
    flat.copy_(torch.arange(len(flat)) + 1)
    load(image_of({"x": placed(saved)}), {"x": placed(live)})
    assert bits(live) == bits(saved)
    # Memory that is no element of the view is somebody else's.
    rest = live.as_strided(flat.shape, (1,))
    assert {*rest.tolist()} - {0} == {*saved.flatten().tolist()}


def test_what_repeats_fills_what_does_not():
    """Expanded and sliding tensors load into dense ones: these can hold any values."""
    for saved in (torch.tensor([[1.0], [2.0]]).expand(2, 3), torch.arange(5.0).unfold(0, 3, 1)):
        live = torch.zeros(saved.shape)
        load(image_of({"t": saved}), {"t": live})
        assert torch.equal(live, saved)


def test_overlap_is_found_as_a_dumb_search_finds_it(rng):
    """Random views: whether two elements lie at one place, by their addresses, 300 times."""
    base = torch.zeros(64)
    found = set()
    for _ in range(300):
        shape = rng.integers(1, 4, rng.integers(0, 4)).tolist()
        strides = rng.integers(1, 7, len(shape)).tolist()
        places = torch.zeros(shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
            rows = torch.arange(size).mul(stride)
            places += rows.view([-1 if d == dim else 1 for d in range(len(shape))])
        wanted = len({*places.flatten().tolist()}) < places.numel()
        assert overlaps_itself(base.as_strided(shape, strides)) == wanted
        found.add(wanted)
    assert found == {True, False}
    assert not overlaps_itself(torch.zeros(3, 0))
    assert not overlaps_itself(torch.zeros(1, 3).expand(4, 3))


# ---- places that no storage has


def test_views_across_elements_are_refused_at_the_save():
    """Two integers that overlap by half of one: both key paths, at a first and at a later save."""
    memory = bytearray(range(64))

    def at(offset, dtype=torch.int32):
        return torch.frombuffer(memory, dtype=dtype, count=2, offset=offset)

    said = r"rank 1: state\['box'\]\[\(1, 'x'\)\] and state\['box'\]\['l'\]\[1\] share memory"
    with pytest.raises(StateError, match=said):
        image_of({"box": {(1, "x"): at(0), "l": [0, at(2)]}})
    state = {"box": {(1, "x"): at(0), "l": [0, at(16)]}}
    snapshot = Snapshot(state, random_states=False)
    capacity = snapshot.plan(1, self_check=True).capacity_bytes
    state["box"]["l"][1] = at(2)
    with pytest.raises(StateError, match=r"and state\['box'\]\['l'\]\[1\] share memory"):
        snapshot.plan(1)
    state["box"]["l"][1] = at(4)
    assert snapshot.plan(1, self_check=True).capacity_bytes == capacity
    # Parts of elements are no fault where all of them fit one grid of new memory.
    found = returned([at(3), at(3, torch.int16), at(6, torch.int8)])
    assert [value.tolist() for value in found] == [
        at(3).tolist(),
        at(3, torch.int16).tolist(),
        at(6, torch.int8).tolist(),
    ]
    with pytest.raises(StateError, match=r"state\['t'\]\[0\] and state\['t'\]\[1\] share memory"):
        image_of({"t": [at(3, torch.int16), at(4), at(8, torch.int8)]})


# ---- orders of sharding


@pytest.fixture
def mesh():
    """Return a mesh of two dimensions over this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


def dealt(mesh, *dims):
    """Give a DTensor whose rows are sharded over mesh dimensions in an order."""
    meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
    usual = DTensorSpec(mesh, (Shard(0), Shard(0)), meta)
    if not hasattr(usual, "shard_order"):
        pytest.skip("this torch knows one order only")
    (entry,) = usual.shard_order
    order = (type(entry)(tensor_dim=0, mesh_dims=dims),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
    return DTensor(torch.ones(4, 4), spec, requires_grad=False)


def test_another_order_of_sharding_is_named(mesh):
    """A save refuses it, a later one too, and a restore takes no live one for the usual one."""
    usual, other = dealt(mesh, 0, 1), dealt(mesh, 1, 0)
    assert shard_order(usual) is None
    said = r"rank 1: state\['t'\] is a .*DTensor, whose shards are dealt out in another order"
    with pytest.raises(StateError, match=said):
        image_of({"t": other})
    state = {"t": usual}
    snapshot = Snapshot(state, random_states=False)
    plan = snapshot.plan(1)
    image = image_of(state)
    with pytest.raises(StateError, match=r"placements .*, has .*'in the order dimension 0 over"):
        load(image, {"t": other})
    load(image, {"t": dealt(mesh, 0, 1)})
    usual._spec.shard_order = other._spec.shard_order
    with pytest.raises(StateError, match=said):
        snapshot.capture_into(np.zeros(plan.capacity_bytes, np.uint8), HEADER)


def test_moments_in_another_order_than_their_parameter_are_refused(mesh):
    """Moments of rows dealt out in the usual order, for a parameter of the other one."""
    params = [dealt(mesh, *dims).requires_grad_() for dims in ((0, 1), (1, 0))]
    saved, live = (torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in params)
    saved.state[params[0]] = {"momentum_buffer": dealt(mesh, 0, 1)}
    holder = {"p": dealt(mesh, 0, 1)}
    image = image_of({"o": saved, "holder": holder})
    with pytest.raises(StateError, match=r"'momentum_buffer' saved as .*, its parameter is .*ord"):
        load(image, {"o": live, "holder": holder})
