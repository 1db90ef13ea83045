"""Random states of every kind go on; stand-ins play CUDA devices and their DTensor tracker."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.distributed.tensor import _random as dtensor_random

from replica.errors import StateError
from replica.image import ImageError
from replica.random_states import capture_random_states, prepare_random_states
from replica.torch_private import rng_region, set_rng_region
from tests.replica.inprocess import Cluster


class Devices:
    """CUDA with some devices, each a generator; what torch.cuda is asked is answered from here."""

    def __init__(self, monkeypatch, count, current=0):
        self.generators = [torch.Generator().manual_seed(device) for device in range(count)]
        self.current = current
        for name, answer in {
            "is_initialized": lambda: True,
            "device_count": lambda: len(self.generators),
            "current_device": lambda: self.current,
            "get_rng_state": lambda device: self.generators[device].get_state(),
            "set_rng_state": lambda state, device: self.generators[device].set_state(state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def draw(self):
        """Draw from each device."""
        return [torch.rand(2, generator=one).tolist() for one in self.generators]


def test_every_cuda_device_goes_on(monkeypatch):
    """Three devices with streams of their own: each draws again what it drew after the save."""
    devices = Devices(monkeypatch, 3)
    devices.draw()
    saved = capture_random_states()
    wanted = devices.draw()
    devices.draw()
    prepare_random_states(saved)()
    assert devices.draw() == wanted


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_takes_its_stream_to_another_device(monkeypatch, count):
    """Saved on device 1, restored by a process that uses device 0 or 3: it draws the same."""
    devices = Devices(monkeypatch, 2, current=1)
    saved = capture_random_states()
    wanted = devices.draw()
    devices = Devices(monkeypatch, count, current=0 if count == 2 else 3)
    devices.draw()
    prepare_random_states(saved)()
    found = devices.draw()
    assert found[devices.current] == wanted[1]
    if count == 2:
        assert found[1] == wanted[0]


def test_states_of_devices_that_are_not_there_are_refused(monkeypatch):
    """Two devices when saved, one now: an error that says both, before anything is set."""
    Devices(monkeypatch, 2)
    saved = capture_random_states()
    Devices(monkeypatch, 1)
    before = random.getstate()
    with pytest.raises(StateError, match=r"of 2 CUDA devices were saved, and this process sees 1"):
        prepare_random_states(saved)
    assert random.getstate() == before


@pytest.mark.parametrize(
    "change", [{"cuda_device": 5}, {"cuda_device": True}, {"dtensor": 1}, {"more": 1}], ids=str
)
def test_random_states_of_another_form_are_refused(change):
    """What an image says of devices and trackers is checked, not trusted."""
    with pytest.raises(ImageError, match=r"random (states|tracker)"):
        prepare_random_states(capture_random_states() | change)


def test_images_without_the_newer_parts_are_read():
    """An older image says nothing of the device in use or of a tracker: the rest is restored."""
    saved = capture_random_states()
    wanted = torch.rand(2)
    del saved["cuda_device"], saved["dtensor"]
    prepare_random_states(saved)()
    assert torch.equal(torch.rand(2), wanted)


class Mesh:
    """As much of a device mesh on CUDA as DTensor's tracker asks for."""

    device_type = "cuda"

    def get_rank(self):
        """Say that this is the first rank."""
        return 0

    def get_coordinate(self):
        """Say that this rank is part of it."""
        return (0,)


@pytest.fixture
def cuda(monkeypatch):
    """Pretend that there is a CUDA device, and that no tracker was made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dtensor_random, "_rng_tracker", None)
    return Devices(monkeypatch, 1)


def test_dtensors_tracker_is_there_before_the_first_draw(cuda, monkeypatch):
    """Made by the first draw it would begin with a broadcast of rank 0's state over this rank's."""
    broadcasts = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: broadcasts.append(1))
    assert set_rng_region(Mesh(), enabled=False)
    assert rng_region() is False
    saved = capture_random_states()
    wanted = (cuda.draw(), torch.rand(2).tolist(), random.random())
    monkeypatch.setattr(dtensor_random, "_rng_tracker", None)
    assert capture_random_states()["dtensor"] is None
    cuda.draw()
    prepare_random_states(saved, [Mesh()])()
    assert (cuda.draw(), torch.rand(2).tolist(), random.random()) == wanted
    assert rng_region() is False
    assert broadcasts == []


def test_a_tracker_without_a_mesh_to_make_it_on_is_told(cuda, monkeypatch, caplog):
    """No live DTensor lies on a device mesh: said as a warning; all streams are restored."""
    assert set_rng_region(Mesh(), enabled=True)
    saved = capture_random_states()
    wanted = cuda.draw()
    monkeypatch.setattr(dtensor_random, "_rng_tracker", None)
    prepare_random_states(saved)()
    assert cuda.draw() == wanted
    assert rng_region() is None
    assert "random tracker" in caplog.text


def test_no_tracker_is_made_where_there_was_none(cuda):
    """A run without one is restored without one."""
    saved = capture_random_states()
    prepare_random_states(saved, [Mesh()])()
    assert rng_region() is None


def test_each_rank_goes_on_with_its_own_streams(arena_dir):
    """Four ranks drew unlike numbers of values, from all kinds: each goes on with its own.

    The global generators are one per process, so here each rank's stand-in for them is registered.
    """

    def streams(me, seed):
        me.state.update(
            torch=torch.Generator().manual_seed(seed),
            numpy=np.random.default_rng(seed),
            philox=np.random.Generator(np.random.Philox(seed)),
            legacy=np.random.RandomState(seed),
            python=random.Random(seed),
        )

    def draw(state, count):
        for _ in range(count):
            state["legacy"].normal()
        return (
            torch.rand(count, generator=state["torch"]).tolist(),
            state["numpy"].random(count).tolist(),
            state["philox"].integers(0, 9, count).tolist(),
            state["legacy"].normal(size=count).tolist(),
            [state["python"].gauss(0, 1) for _ in range(count)],
        )

    def save(me):
        streams(me, me.rank)
        draw(me.state, 3 + 2 * me.rank)
        me.ckpt.save(1).wait("committed", 30)
        return draw(me.state, 5)

    def restore(me):
        streams(me, 99)
        assert me.ckpt.restore() == 1
        return draw(me.state, 5)

    options = {"redundancy": "copies:1", "counts": [0] * 4}
    wanted = Cluster(arena_dir, list("abcd"), **options).run(save)
    assert Cluster(arena_dir, list("abcd"), **options).run(restore) == wanted
    assert len({repr(one) for one in wanted}) == 4
