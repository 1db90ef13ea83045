"""Tensors of every dtype and layout come back bit by bit, sharing what they shared."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import safetensors.torch
import torch

from replica.copies import CopyPlan
from replica.dtypes import CODES, DTYPES, code_of
from replica.errors import StateError
from replica.leaves import LeafList, find_homes, memory_of
from replica.snapshot import Snapshot
from tests.replica.snapshot_tools import HEADER, bits, header_of, image_of, load, returned

CARRIED = sorted(name for name in DTYPES if not name.startswith("q"))
SHAPES = [(), (1,), (7,), (0,), (3, 0, 5)]


def filled(shape, dtype, rng):
    """Return a tensor of any dtype with random bytes in it (0 and 1 for bool)."""
    count = int(np.prod(shape, dtype=int))
    data = rng.integers(0, 2 if dtype is torch.bool else 256, count * dtype.itemsize, np.uint8)
    flat = torch.zeros(len(data), dtype=torch.uint8)
    flat.numpy()[:] = data
    return flat.view(dtype).view(shape)


@pytest.mark.parametrize("name", CARRIED)
def test_every_dtype_of_torch_is_carried(name, rng):
    """Random bytes of every dtype that torch has come back, new and in place, in five shapes."""
    state = {str(shape): filled(shape, DTYPES[name], rng) for shape in SHAPES}
    wanted = {key: bits(value) for key, value in state.items()}
    image = image_of({"t": state})
    found = {"t": {}}
    load(image, found)
    assert {key: bits(value) for key, value in found["t"].items()} == wanted
    zeros = {key: filled(value.shape, value.dtype, rng) for key, value in state.items()}
    load(image, {"t": zeros})
    assert {key: bits(value) for key, value in zeros.items()} == wanted


def test_plain_readers_get_every_value(tmp_path, rng):
    """Safetensors itself reads each dtype that it knows with its values, others as bytes."""
    state = {name: filled((3, 2), DTYPES[name], rng) for name in CARRIED}
    snapshot = Snapshot(state, random_states=False)
    buffer = np.zeros(snapshot.plan(1).capacity_bytes, np.uint8)
    snapshot.capture_into(buffer, HEADER)
    path = tmp_path / "slot.safetensors"
    path.write_bytes(buffer.tobytes())
    with safetensors.safe_open(path, "pt") as opened:
        for name, value in state.items():
            found = opened.get_tensor(name)
            if name in CODES.values():
                assert bits(found) == bits(value)
            else:
                assert found.numpy().tobytes() == bits(value)[2]


def test_the_table_of_codes_is_the_formats():
    """Our table says what the safetensors library says: compared with the one it uses itself."""
    theirs = {str(dtype): code for code, dtype in safetensors.torch._TYPES.items()}
    assert {f"torch.{name}": code for code, name in CODES.items()} == theirs
    assert all(code_of(DTYPES[name]) == code for code, name in CODES.items())


def layouts():
    """Name tensors of all the layouts that users have."""
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    matrix = torch.arange(60.0).reshape(6, 10)
    numbers = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
    return {
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": matrix.t(),
        "strided": matrix[::2, 1:],
        "column of four": matrix[:4].reshape(10, 4)[:, 3],
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
        "expanded scalar": torch.tensor(2.5).expand(4, 5),
        "offset": matrix[2:],
        "scalar of a matrix": matrix[2, 3],
        "conjugate": numbers.conj(),
        "conjugate transposed": numbers.mH,
        "negative": numbers.conj().imag,
        "sliding": torch.arange(6.0).unfold(0, 3, 1),
        "complex128": numbers.to(torch.complex128).conj(),
        "negative float16": numbers.to(torch.complex64).conj().imag.to(torch.float64),
        "permuted": base.permute(3, 1, 0, 2),
        "size one": torch.empty_strided((1, 4), (9, 1)).fill_(3),
    }


@pytest.mark.parametrize("name", layouts())
def test_layout_comes_back(name):
    """Values, shape, dtype and strides are the same, alone and loaded in place."""
    value = layouts()[name]
    found = returned(value)
    assert bits(found) == bits(value)
    assert found.stride() == value.stride()
    assert found.is_contiguous() == value.is_contiguous()
    image = image_of({"t": value})
    live = {"t": layouts()[name]}
    wanted = bits(value)
    with torch.no_grad():
        memory_of(live["t"]).zero_()
    load(image, live)
    assert bits(live["t"]) == wanted


def test_a_small_view_of_a_large_storage_costs_the_view():
    """Ten elements of ten million make a small image, and come back without the gaps."""
    large = torch.zeros(10_000_000)
    large[::1_000_000] = torch.arange(10.0)
    narrow, spread = large[5:15], large[::1_000_000]
    image = image_of({"narrow": narrow, "spread": spread, "expanded": large[1:2].expand(1 << 40)})
    assert image.nbytes < 20_000
    found = returned(spread)
    assert found.tolist() == spread.tolist()
    assert found.stride() == (1,)
    assert found.untyped_storage().nbytes() < 1000
    assert narrow.numel() == 10


def test_two_sparse_views_of_one_storage_cost_the_views():
    """Columns of a matrix that share no element are stored apart: image size and values."""
    matrix = torch.arange(400_000.0).reshape(1000, 400)
    state = {"a": matrix[:, 0], "b": matrix[:, 399]}
    image = image_of(state)
    assert image.nbytes < 20_000
    live = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    load(image, live)
    assert torch.equal(live["a"], matrix[:, 0])
    assert torch.equal(live["b"], matrix[:, 399])


def entries(image):
    """List the names that hold a state's bytes."""
    return set(header_of(image)) - {"__metadata__", "planaria.tree", "planaria.pad"}


def test_tied_tensors_are_stored_once_and_tied_again():
    """One entry holds a tensor that two names have; the restored ones change together."""
    weight = torch.randn(40, 40)
    image = image_of({"box": {"embed": weight, "head": weight, "detached": weight.detach()}})
    assert len(entries(image)) == 1
    found = {"box": {}}
    load(image, found)
    box = found["box"]
    assert torch.equal(box["embed"], weight)
    box["head"].zero_()
    assert not box["embed"].any()
    assert not box["detached"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e8m0fnu])
def test_overlapping_views_overlap_again(dtype, rng):
    """Two views with elements in common come back with offsets and strides, stored once."""
    base = filled((10,), dtype, rng)
    views = {"a": base[0:6], "b": base[4:10], "c": base[1:9:2], "apart": filled((1,), dtype, rng)}
    wanted = {name: bits(value) for name, value in views.items()}
    image = image_of({"box": views})
    assert len(entries(image)) == 2
    found = {"box": {}}
    load(image, found)
    box = found["box"]
    assert {name: bits(value) for name, value in box.items()} == wanted
    assert box["b"].data_ptr() - box["a"].data_ptr() == 4 * dtype.itemsize
    assert box["c"].stride() == (2,)
    assert box["a"].untyped_storage().data_ptr() == box["c"].untyped_storage().data_ptr()


def test_conjugate_and_real_views_share_again():
    """A tensor, its conjugate and its imaginary part stay one memory: change one, read all."""
    base = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    image = image_of({"box": {"z": base, "conj": base.conj(), "neg": base.conj().imag}})
    assert len(entries(image)) == 1
    found = {"box": {}}
    load(image, found)
    box = found["box"]
    for name, value in (("z", base), ("conj", base.conj()), ("neg", base.conj().imag)):
        assert bits(box[name]) == bits(value)
    box["z"][0] = 5 + 7j
    assert box["conj"][0].item() == 5 - 7j
    assert box["neg"][0].item() == -7


def test_memory_shared_through_numpy_is_seen():
    """Tensors over one numpy array have storages of their own, and overlap all the same."""
    array = np.arange(10, dtype=np.float32)
    views = {"a": torch.from_numpy(array[0:6]), "b": torch.from_numpy(array[4:10])}
    image = image_of({"box": views})
    found = {"box": {}}
    load(image, found)
    found["box"]["a"][5] = -1
    assert found["box"]["b"].tolist() == [4, -1, 6, 7, 8, 9]


def test_disjoint_views_stay_apart():
    """Slices of one flat buffer without a common element are entries of their own."""
    flat = torch.arange(10.0)
    image = image_of({"a": flat[:5], "b": flat[5:]})
    assert len(entries(image)) == 2


def brute_force(tensors):
    """Tell which tensors have a byte in common, from the addresses of all their elements."""
    touched = []
    for value in tensors:
        places = torch.zeros(value.shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
            places += (torch.arange(size) * stride).view(
                [-1 if d == dim else 1 for d in range(value.dim())]
            )
        touched.append({value.data_ptr() + 4 * place for place in places.flatten().tolist()})
    return [[bool(one & other) for other in touched] for one in touched]


def test_sharing_is_found_as_a_dumb_search_finds_it(rng):
    """Random views of one storage: whoever overlaps by brute force shares a block, 200 times."""
    base = torch.zeros(64)
    for _ in range(200):
        tensors = []
        for _ in range(rng.integers(2, 6)):
            shape = rng.integers(1, 4, rng.integers(0, 3)).tolist()
            strides = rng.integers(0, 9, len(shape)).tolist()
            tensors.append(base.as_strided(shape, strides, int(rng.integers(0, 24))))
        homes = find_homes(tensors).homes
        for i, row in enumerate(brute_force(tensors)):
            for j, common in enumerate(row):
                assert not common or homes[i].block == homes[j].block
        for value, found in zip(tensors, returned(tensors), strict=True):
            assert bits(found) == bits(value)


def test_in_place_restore_keeps_what_shares_memory():
    """Tied live tensors are filled together; tied for untied, or the reverse, is refused."""
    weight = torch.randn(3)
    tied = image_of({"a": weight, "b": weight})
    live = {"a": torch.zeros(3)}
    live["b"] = live["a"]
    load(tied, live)
    assert live["b"] is live["a"]
    assert torch.equal(live["a"], weight)
    with pytest.raises(StateError, match=r"shared memory with state\['a'\] when saved"):
        load(tied, {"a": torch.zeros(3), "b": torch.zeros(3)})
    untied = image_of({"a": weight, "b": weight.clone()})
    with pytest.raises(StateError, match="did not when saved"):
        load(untied, live)


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "subclass": lambda: torch.ones(2).as_subclass(OwnTensor),
    "lazy": lambda: torch.nn.LazyLinear(2).weight,
}


class OwnTensor(torch.Tensor):
    """A tensor class of the user's."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(name):
    """Each kind that has no dense bytes is refused with rank, key path and type."""
    with pytest.raises(StateError, match=r"rank 1: state\['a'\]\[0\] is a .*(Tensor|Parameter)"):
        image_of({"a": [REFUSED[name]()]})


def test_a_plan_holds_no_tensor_alive():
    """The plan keeps geometry and addresses only: a tensor's last reference goes with the state."""
    leaves = LeafList()
    value = torch.ones(3)
    leaves.tensor(value)
    seen = weakref.ref(value)
    plan = CopyPlan(leaves, [(0, "a")])
    del value, leaves
    assert seen() is None
    assert plan.layout.entries[0].name == "a"
