"""A state on a device is captured as one in host memory is, with a fake device that works late."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replica import copies, late_leaves
from replica.errors import StateError
from replica.overlap import Overlap
from replica.pinned import mapping_of
from replica.slot import map_file
from replica.snapshot import Snapshot
from tests.replica.overlap_tools import train, training
from tests.replica.snapshot_tools import HEADER, bits, image_of, load


def state_of(rng):
    """Make a small state: tied weights, overlapping views, layouts, optimizer-like scalars."""
    base = torch.from_numpy(rng.normal(size=300).astype(np.float32))
    square = torch.from_numpy(rng.normal(size=(12, 12)).astype(np.float32))
    half = torch.from_numpy(rng.integers(0, 256, 80, np.uint8)).view(torch.bfloat16)
    return {
        "tied": [square, square],
        "views": [base[:200], base[100:], base[::3]],
        "odd": [square.T, half, half[1::2], torch.ones(3, 1).expand(3, 9), torch.zeros(0)],
        "complex": torch.complex(base[:6], base[6:12]).conj(),
        "steps": [torch.tensor(float(n)) for n in range(5)],
        "exotic": half.view(torch.uint8).view(torch.float8_e8m0fnu),
        "text": "value",
    }


def test_the_image_is_the_same_wherever_the_tensors_lie(device, rng, monkeypatch):
    """With all tensors on the fake device the image has the bytes that it has from host memory."""
    state = state_of(rng)
    monkeypatch.setattr(copies, "on_host", lambda _: True)
    expected = image_of(state)
    assert not device.lanes
    monkeypatch.setattr(copies, "on_host", lambda _: False)
    assert (image_of(state) == expected).all()
    assert device.lane.done


def test_what_lies_here_and_there_comes_back(device, rng):
    """Scalars in host memory, the rest on the device: loaded, every tensor has its bits."""
    state, found = {"box": state_of(rng)}, {"box": {}}
    load(image_of(state), found)
    before, after = ([*tensors_of(one)] for one in (state, found))
    assert [bits(value) for value in before] == [bits(value) for value in after]
    assert len(before) == 17


def tensors_of(value):
    """Walk nested containers for tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(one)


def test_a_capture_has_waited_when_it_returns(device, rng):
    """Whatever is done to the tensors afterwards, the buffer has what they held at the call."""
    state = {"weights": torch.from_numpy(rng.normal(size=500).astype(np.float32))}
    snapshot = Snapshot(state, random_states=False)
    buffer = np.zeros(snapshot.plan(0).capacity_bytes, np.uint8)
    held = state["weights"].numpy().tobytes()
    nbytes = snapshot.capture_into(buffer, HEADER)
    state["weights"].zero_()
    assert device.lane.done == len(device.lane.work) > 0
    assert held in buffer[:nbytes].tobytes()


def test_the_wait_comes_even_when_the_rest_fails(device, rng, monkeypatch):
    """An error among the host's copies: no copy of the device is under way when it is raised."""

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "copy_pieces", fail)
    snapshot = Snapshot({"w": torch.ones(500), "n": torch.ones(1)}, random_states=False)
    buffer = np.zeros(snapshot.plan(0).capacity_bytes, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        snapshot.capture_into(buffer, HEADER)
    assert device.lane.done == len(device.lane.work) > 0


def test_scalars_in_host_memory_do_not_cut_the_device_into_pieces(device):
    """Adam's steps lie among its moments, on the host: the moments are fetched in one piece."""
    state = {f"p{n}": [torch.tensor(float(n)), torch.ones(6), torch.ones(6)] for n in range(40)}
    image_of(state)
    assert device.lane.log == ["follow", "empty 1920", "gather", "fetch", "mark"]


@pytest.mark.parametrize("host", [True, False])
def test_a_save_in_inference_mode_does_not_spoil_the_next(device, rng, monkeypatch, host):
    """What is kept between saves can be written to outside of the mode that it was made in."""
    monkeypatch.setattr(copies, "on_host", lambda _: host)
    state = state_of(rng)
    snapshot = Snapshot(state, random_states=False)
    buffers = np.zeros((3, snapshot.plan(0).capacity_bytes), np.uint8)
    with torch.inference_mode():
        snapshot.capture_into(buffers[0], HEADER)
    snapshot.capture_into(buffers[0], HEADER)
    snapshot.capture_into(buffers[1], HEADER)
    with torch.inference_mode():
        snapshot.capture_into(buffers[1], HEADER)
        snapshot.capture_into(buffers[2], HEADER)
    assert (buffers[1:] == buffers[0]).all()


def test_overlap_copies_what_lies_on_a_device_at_once(device, monkeypatch, caplog):
    """The device's copies are waited for in ``save``: nothing is late, and one line says so."""
    monkeypatch.setattr(late_leaves, "on_host", lambda value: value.numel() < 2)
    state = training()
    train(state)
    overlap = Overlap(rank=0, timeout_s=20.0, check=False)
    try:
        snapshot = Snapshot(state, random_states=False)
        snapshot.overlap = overlap
        buffer = np.zeros(snapshot.estimate_bytes(), np.uint8)
        for _ in range(2):
            train(state)
            captured = snapshot.begin_capture(buffer, HEADER)
            assert captured.late_bytes == 0
    finally:
        overlap.close(0.0)
    assert device.lane.done == len(device.lane.work) > 0
    (told,) = [text for text in caplog.messages if "overlap=True" in text]
    assert "it lies on a GPU" in told


def test_a_slot_is_page_locked_and_unlocked_when_it_is_forgotten(device, tmp_path):
    """The first capture into a slot locks it; dropped after ``forget_buffers`` it is unlocked."""
    snapshot = Snapshot({"w": torch.ones(500)}, random_states=False)
    with (tmp_path / "slot").open("w+b") as file:
        file.truncate(snapshot.plan(0).capacity_bytes)
        slot = map_file(file.fileno(), snapshot.plan(0).capacity_bytes, write=True)
    snapshot.capture_into(slot, HEADER)
    snapshot.capture_into(slot, HEADER)
    assert list(device.runtime.locked.values()) == [slot.size]
    assert mapping_of(slot) is not None
    del slot
    assert device.runtime.locked
    snapshot.forget_buffers()
    assert not device.runtime.locked


def test_a_capture_of_a_graph_is_an_error_of_the_save(device):
    """The error goes the way of all errors of a save and says what to do."""
    snapshot = Snapshot({"w": torch.ones(500)}, random_states=False)
    buffer = np.zeros(snapshot.plan(0).capacity_bytes, np.uint8)
    snapshot.capture_into(buffer, HEADER)
    device.lane.captured = True
    with pytest.raises(StateError, match="call it after the capture"):
        snapshot.capture_into(buffer, HEADER)
