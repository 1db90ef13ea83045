"""Copies from a device: cut into pieces, right to the bit, and waited for exactly once.

The device is a fake whose stream works only when it is waited for (see ``fake_device.py``); what
needs a real one is at the end and in ``benchmarks/cuda_stall.py``.
"""

from __future__ import annotations

import contextlib
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.device_copy import CudaLane, DeviceCopies
from replica.device_pieces import DeviceCopy, plan_pieces, split
from replica.errors import StateError
from replica.tensor_kinds import REFUSALS
from tests.replica.fake_device import FakeDevice
from tests.replica.snapshot_tools import bits

CUDA = torch.device("cuda:0")
OTHER = torch.device("cuda:1")
LIMITS = {"staging_bytes": 256, "direct_bytes": 128}


def copies_of(tensors, *, device=CUDA, gap=0):
    """Lay tensors out in a buffer by falling item size; the copies, and the buffer's size."""
    found, start = [], 0
    for leaf in sorted(range(len(tensors)), key=lambda at: -tensors[at].itemsize):
        value = tensors[leaf]
        resolve = value.is_conj() or value.is_neg()
        found.append(
            DeviceCopy(
                device=device if isinstance(device, torch.device) else device[leaf],
                start=start,
                nbytes=value.numel() * value.itemsize,
                leaf=leaf,
                dtype=value.dtype,
                shape=tuple(value.shape),
                as_it_lies=value.is_contiguous() and not resolve,
                resolve=resolve,
            )
        )
        start += found[-1].nbytes + gap * value.itemsize
    return found, start


def odd_tensors(rng):
    """Tensors of many dtypes and layouts: small, large, empty, transposed, conjugate, NaNs."""

    def raw(shape, dtype):
        data = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        return torch.from_numpy(data.reshape(-1)).view(dtype).view(shape)

    plain = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.int16]
    odd = [torch.bfloat16, torch.float16, torch.uint16, torch.float8_e4m3fn, torch.complex64]
    found = [raw((n,), dtype) for dtype in (*plain, *odd) for n in (1, 3, 70)]
    found += [raw((), torch.float32), raw((0, 4), torch.float32), raw((1, 1), torch.bfloat16)]
    found += [raw((9, 30), torch.float32).T, raw((2, 3, 4, 5), torch.bfloat16).transpose(1, 3)]
    found += [raw((200,), torch.float32)[::3], raw((40,), torch.float8_e5m2)[1::2]]
    values = torch.complex(*(torch.from_numpy(rng.normal(size=(2, 21)).astype(np.float32))))
    found += [values.conj(), values.imag, values.conj().imag, values.to(torch.complex128).conj()]
    return [*found, raw((5,), torch.uint8) % 2 == 1]


def saved(tensors, buffer, copies):
    """What stands in the buffer for each tensor."""
    at = {copy.leaf: copy for copy in copies}
    return [
        buffer[at[leaf].start : at[leaf].start + at[leaf].nbytes].tobytes()
        for leaf in range(len(tensors))
    ]


@given(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([1, 2, 8]),
    st.integers(8, 200),
)
def test_blocks_of_a_tensor_are_its_bytes_in_order(shape, item_bytes, limit_bytes):
    """Cut by hypothesis' limits, the blocks follow each other, fit, and are views of the tensor."""
    value = torch.arange(prod(shape)).reshape(shape)
    parts, expected = [], 0
    for index, inner, begin in split(shape, item_bytes, limit_bytes):
        assert begin == expected
        block = value[index]
        assert tuple(block.shape) == inner
        assert block.numel() * item_bytes <= limit_bytes
        expected += block.numel() * item_bytes
        parts.append(block.reshape(-1))
    assert torch.equal(torch.cat(parts), value.reshape(-1))


def test_pieces_cover_every_byte_once(rng):
    """Pieces are in order, do not overlap, are bounded, and begin where their items may begin."""
    tensors = odd_tensors(rng)
    copies, total = copies_of(tensors)
    covered = np.zeros(total, np.uint8)
    for piece in plan_pieces(copies, **LIMITS):
        covered[piece.start : piece.start + piece.nbytes] += 1
        if piece.whole is None:
            assert piece.nbytes <= LIMITS["staging_bytes"]
            assert sum(part.nbytes for part in piece.parts) == piece.nbytes
            assert not any(part.start % part.dtype.itemsize for part in piece.parts)
            assert not any((part.start - piece.start) % part.dtype.itemsize for part in piece.parts)
        else:
            assert piece.nbytes >= LIMITS["direct_bytes"]
    assert (covered == 1).all()


def test_many_small_tensors_are_few_copies():
    """A thousand tensors of 16 bytes take as many copies as their bytes take staging buffers."""
    copies, total = copies_of([torch.zeros(4)] * 1000)
    assert len(plan_pieces(copies, **LIMITS)) == -(-total // LIMITS["staging_bytes"])


@pytest.mark.parametrize("gap", [0, 1], ids=["side by side", "apart"])
def test_every_bit_arrives(gap, rng):
    """Values of every layout are in the buffer as ``contiguous`` has them, and nothing else is."""
    device, tensors = FakeDevice(), odd_tensors(rng)
    copies, total = copies_of(tensors, gap=gap)
    plan = DeviceCopies(copies, make_lane=device.make_lane, locks=device.locks, **LIMITS)
    for _ in range(2):
        buffer = np.full(total, 0xEE, np.uint8)
        plan.issue(tensors, buffer).wait()
        assert saved(tensors, buffer, copies) == [bits(value)[2] for value in tensors]
        outside = np.ones(total, bool)
        for copy in copies:
            outside[copy.start : copy.start + copy.nbytes] = False
        assert (buffer[outside] == 0xEE).all()


def test_half_precision_is_never_gathered_as_numbers(rng):
    """The kernel that gathers takes half numbers through float, which changes NaNs: none are."""
    allowed = {torch.float32, torch.float64, torch.complex128}
    copies, _ = copies_of(odd_tensors(rng))
    kinds = {part.dtype for piece in plan_pieces(copies) for part in piece.parts}
    assert {kind for kind in kinds if kind.is_floating_point or kind.is_complex} <= allowed


def test_nothing_is_there_before_the_wait_and_all_after(rng):
    """``issue`` returns at once; ``wait`` returns when the copies were made, and again at once."""
    device, tensors = FakeDevice(), [torch.ones(8), torch.ones(100)]
    copies, total = copies_of(tensors)
    plan = DeviceCopies(copies, make_lane=device.make_lane, locks=device.locks, **LIMITS)
    buffer = np.zeros(total, np.uint8)
    pending = plan.issue(tensors, buffer)
    assert not buffer.any()
    pending.wait()
    tensors[0].zero_()
    pending.wait()
    assert saved(tensors, buffer, copies) == [np.ones(n, np.float32).tobytes() for n in (8, 100)]
    assert device.lane.log == ["follow", "empty 32", "gather", "fetch", "fetch", "mark"]


def test_each_device_has_its_own_stream():
    """Two devices: each lane follows its device, and one wait waits for both."""
    device, tensors = FakeDevice(), [torch.full((4,), float(n)) for n in range(4)]
    copies, total = copies_of(tensors, device=[CUDA, OTHER, CUDA, OTHER])
    plan = DeviceCopies(copies, make_lane=device.make_lane, locks=device.locks)
    buffer = np.zeros(total, np.uint8)
    plan.issue(tensors, buffer).wait()
    assert saved(tensors, buffer, copies) == [bits(value)[2] for value in tensors]
    assert set(device.lanes) == {CUDA, OTHER}
    assert all(lane.log.count("follow") == 1 for lane in device.lanes.values())


def test_a_capture_is_refused_before_anything_is_copied():
    """During the capture of a graph nothing has run yet: the error names the device."""
    device, tensors = FakeDevice(), [torch.ones(4)]
    copies, total = copies_of(tensors)
    plan = DeviceCopies(copies, make_lane=device.make_lane, locks=device.locks)
    plan.issue(tensors, np.zeros(total, np.uint8)).wait()
    device.lane.captured, device.lane.log = True, []
    with pytest.raises(StateError, match="graph is captured on cuda:0"):
        plan.issue(tensors, np.zeros(total, np.uint8))
    assert device.lane.log == []


def test_an_error_leaves_nothing_under_way():
    """When the device fails in the middle, what was begun before it has ended when it raises."""
    device, tensors = FakeDevice(), [torch.ones(64), torch.ones(64), torch.ones(64)]
    device.fail_at = 2
    copies, total = copies_of(tensors)
    plan = DeviceCopies(copies, make_lane=device.make_lane, locks=device.locks, **LIMITS)
    with pytest.raises(RuntimeError, match="out of order"):
        plan.issue(tensors, np.zeros(total, np.uint8))
    assert device.lane.done == len(device.lane.work) == 2


@pytest.mark.parametrize("then", ["issue", "forget_buffers"])
def test_copies_of_an_interrupted_save_end_before_the_next(then):
    """Nobody waited for the first save: it is over before its buffer is used or forgotten."""
    device, tensors = FakeDevice(), [torch.ones(4)]
    copies, total = copies_of(tensors)
    plan = DeviceCopies(copies, make_lane=device.make_lane, locks=device.locks)
    first = np.zeros(total, np.uint8)
    plan.issue(tensors, first)
    if then == "issue":
        plan.issue(tensors, np.zeros(total, np.uint8))
    else:
        plan.forget_buffers()
    assert first.any()


def test_the_staging_buffer_is_made_once():
    """The second save, into another buffer, allocates nothing on the device."""
    device, tensors = FakeDevice(), [torch.ones(4)]
    copies, total = copies_of(tensors)
    plan = DeviceCopies(copies, make_lane=device.make_lane, locks=device.locks)
    plan.issue(tensors, np.zeros(total, np.uint8)).wait()
    device.lane.log = []
    plan.issue(tensors, np.zeros(total, np.uint8)).wait()
    assert device.lane.log == ["follow", "gather", "fetch", "mark"]


def test_without_tensors_on_a_device_none_is_touched():
    """A plan without copies makes no lane, locks nothing and waits for nothing."""
    plan = DeviceCopies([], make_lane=None)
    plan.issue([torch.ones(4)], np.zeros(4, np.uint8)).wait()
    assert plan.pieces == 0


@pytest.mark.parametrize(("kind", "refused"), [("xpu", True), ("mps", True), ("cuda", False)])
def test_other_devices_are_refused_by_name(kind, refused):
    """The table of what is not carried has a row for devices whose copies nobody has ordered."""
    value = SimpleNamespace(device=torch.device(kind))
    (rule,) = (rule for rule in REFUSALS if rule.kind.startswith("devices other than"))
    assert rule.found(value) is refused
    assert "cpu()" in rule.why


class FakeCuda:
    """What ``CudaLane`` asks of ``torch.cuda``, written down."""

    def __init__(self):
        self.log = []

    def Stream(self, device):  # noqa: N802 - torch's own name
        self.log.append(f"stream on {device}")
        return self

    def current_stream(self, device):
        return f"current of {device}"

    def wait_stream(self, other):
        self.log.append(f"wait for {other}")

    @contextlib.contextmanager
    def stream(self, stream):
        assert stream is self
        self.log.append("into")
        yield
        self.log.append("out of")

    device = stream

    def Event(self, *, blocking):  # noqa: N802 - torch's own name
        return SimpleNamespace(blocking=blocking)

    def record_event(self, event):
        self.log.append(f"event, blocking {event.blocking}")


def test_the_lane_is_a_side_stream_that_waits_for_the_current_one(monkeypatch):
    """On torch.cuda: one stream, an event of the current stream before, one of its own after."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    lane = CudaLane(CUDA)
    lane.follow()
    with lane.active():
        target = torch.zeros(3)
        lane.gather([target], [torch.ones(3)])
        lane.fetch(target, target + 1)
    lane.mark()
    assert cuda.log == [
        "stream on cuda:0",
        "wait for current of cuda:0",
        "into",
        "out of",
        "event, blocking True",
    ]
    assert target.tolist() == [2, 2, 2]
