"""A state read by its recipe gives the image of a whole walk, byte for byte, whatever happened."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from replica import snapshot as snapshot_module
from replica.errors import StateError
from replica.snapshot import Snapshot
from tests.replica.changing_states import MUTATIONS, random_state
from tests.replica.snapshot_tools import HEADER

CAPACITY = 1 << 18


def captured(snapshot):
    """Return the image, or the text of the refusal."""
    buffer = np.zeros(CAPACITY, np.uint8)
    try:
        return buffer[: snapshot.capture_into(buffer, HEADER)].tobytes()
    except StateError as fault:
        return str(fault)


def walked(state):
    """Return the image of a snapshot that has never seen the state: its first is a whole walk."""
    return captured(Snapshot(state, random_states=True))


@pytest.mark.parametrize("world", range(8))
def test_steady_image_is_that_of_a_whole_walk(world, rng):
    """Random states, random changes between saves: both images, or both refusals, are equal."""
    state = random_state(rng)
    snapshot = Snapshot(state, random_states=True)
    for _ in range(30):
        names, lasting = [], None
        while lasting is None and len(names) < 1 + rng.integers(2):
            change = MUTATIONS[rng.integers(len(MUTATIONS))]
            names.append(change.__name__)
            lasting = change(state, rng)
        assert captured(snapshot) == walked(state), names
        if lasting is not None:
            lasting.remove()


@pytest.mark.parametrize("change", MUTATIONS, ids=lambda change: change.__name__)
def test_each_change_is_seen(change, rng):
    """Every kind of change by itself, twice, after the recipe has been used."""
    state = random_state(rng)
    snapshot = Snapshot(state, random_states=True)
    for _ in range(2):
        for _ in range(2):
            captured(snapshot)
        lasting = change(state, rng)
        assert captured(snapshot) == walked(state)
        if lasting is not None:
            lasting.remove()
            assert captured(snapshot) == walked(state)


def trained(steps=2):
    """Return a model, its optimizer, a schedule and plain values, after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, bias=False))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {
        "model": model,
        "optim": optim,
        "sched": torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (1 + step)),
        "ema": {"weights": [torch.zeros(4), torch.zeros(4)], "decay": 0.9},
        "generator": torch.Generator(),
        "step": 0,
    }
    for _ in range(steps):
        step(state)
    return state


def step(state):
    """Train one step."""
    state["model"](torch.randn(3, 4)).sum().backward()
    state["optim"].step()
    state["sched"].step()
    state["optim"].zero_grad()
    state["step"] += 1


def test_training_is_read_without_a_walk(monkeypatch):
    """Steps of training never lead to a whole walk again, and every image has their values."""
    state = trained()
    snapshot = Snapshot(state, random_states=True)
    captured(snapshot)

    def refuse(*_args, **_options):
        raise AssertionError("walked")

    for _ in range(5):
        step(state)
        with monkeypatch.context() as patched:
            patched.setattr(snapshot_module, "capture_state", refuse)
            image = captured(snapshot)
        assert image == walked(state)


def test_objects_are_asked_once_in_a_save():
    """Who was asked before a recipe failed half way is not asked again by the walk."""
    asked = []

    class Loader:
        def state_dict(self):
            asked.append(1)
            return {"position": len(asked)}

        def load_state_dict(self, state):
            pass

    state = {"loader": Loader(), "box": {"t": torch.ones(2)}}
    snapshot = Snapshot(state, random_states=False)
    for count in range(1, 5):
        captured(snapshot)
        assert len(asked) == count
        state["box"][f"new{count}"] = torch.ones(2)


def test_nothing_of_the_state_is_held():
    """After saves by recipe the snapshot holds no tensor and no object that the state let go."""
    state = trained()
    snapshot = Snapshot(state, random_states=True)
    for _ in range(3):
        captured(snapshot)
    seen = [weakref.ref(value) for value in state["model"].modules()]
    seen += [
        weakref.ref(value) for value in (*state["model"].parameters(), *state["ema"]["weights"])
    ]
    seen += [weakref.ref(state["optim"]), weakref.ref(state["sched"])]
    state.clear()
    gc.collect()
    assert [found() for found in seen] == [None] * len(seen)


def test_a_tensor_that_the_state_lets_go_is_gone_at_once():
    """No save leaves a cycle behind, in which it would stay until the garbage collector comes."""
    state = {"w": [torch.zeros(10)], "ema": {"n": 1}}
    snapshot = Snapshot(state, random_states=True)
    for _ in range(3):
        captured(snapshot)
    seen = weakref.ref(state["w"][0])
    gc.collect()
    gc.disable()
    try:
        captured(snapshot)
        state["w"].clear()
        assert seen() is None
    finally:
        gc.enable()


def test_small_and_large_tensors_of_all_dtypes(rng):
    """Runs of small tensors, broken by large, odd and empty ones, arrive with all their bytes."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16)
    state = {}
    for index in range(150):
        dtype = dtypes[rng.integers(len(dtypes))]
        shape = ((), (3,), (0,), (5, 7), (300,), (9000,), (40_000,))[rng.integers(7)]
        values = rng.integers(0, 2, shape, np.uint8)
        value = torch.from_numpy(np.asarray(values)).to(dtype)
        state[f"t{index}"] = value.t() if value.dim() == 2 and rng.integers(2) else value
    snapshot = Snapshot({"box": state}, random_states=False)
    buffer = np.full(snapshot.plan(1).capacity_bytes, 0xEE, np.uint8)
    for _ in range(2):
        for value in state.values():
            value.copy_(torch.randint(0, 2, value.shape))
        snapshot.capture_into(buffer, HEADER)
        found = {"box": {}}
        Snapshot(found, random_states=False).prepare(buffer).commit()
        assert found["box"].keys() == state.keys()
        assert all(value.dtype is state[key].dtype for key, value in found["box"].items())
        assert all(torch.equal(found["box"][key], value) for key, value in state.items())
