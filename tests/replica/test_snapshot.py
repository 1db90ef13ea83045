"""What the driver relies on: the moment of the copy, capacity, two phases of a restore."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

from erasure.errors import PlanariaError
from replica.errors import StateError
from replica.image import read_image
from replica.snapshot import NeedCapacity, Snapshot
from tests.replica.snapshot_tools import HEADER, header_at, image_of, load


def buffer_for(snapshot):
    """Return a writable buffer of the planned capacity."""
    return np.zeros(snapshot.plan(1).capacity_bytes, np.uint8)


def test_values_of_the_moment_of_the_call():
    """Everything changed right after capture_into returns comes back as it was at the call."""
    array = np.ones(3)
    state = {
        "w": torch.ones(1000),
        "shared": torch.from_numpy(array),
        "array": array,
        "list": [1, {"k": [2]}],
    }
    snapshot = Snapshot(state, random_states=False)
    buffer = buffer_for(snapshot)
    for _ in range(20):
        snapshot.capture_into(buffer, HEADER)
        state["w"].fill_(2)
        array[:] = 5
        state["list"].append(3)
        state["list"][1]["k"][0] = 9
        snapshot.prepare(buffer).commit()
        assert state["w"].eq(1).all()
        assert array.tolist() == [1, 1, 1]
        assert state["shared"].tolist() == [1, 1, 1]
        assert state["list"] == [1, {"k": [2]}]


def test_two_buffers_hold_two_steps():
    """Captures alternate between two slots and each keeps its own step's values."""
    state = {"w": torch.zeros(100), "step": 0}
    snapshot = Snapshot(state, random_states=False)
    slots = [buffer_for(snapshot), buffer_for(snapshot)]
    for step in range(6):
        state["w"].fill_(step)
        state["step"] = step
        snapshot.capture_into(slots[step % 2], header_at(step))
    for slot, step in zip(slots, (4, 5), strict=True):
        plan = snapshot.prepare(slot)
        assert plan.header == header_at(step)
        plan.commit()
        assert state["w"].eq(step).all()
        assert state["step"] == step


def test_the_same_state_gives_the_same_bytes():
    """Nothing but the state decides the image: two captures into unlike buffers are compared."""
    state = {"w": torch.arange(5.0), "odd": torch.ones(3, dtype=torch.int8), "a": [1]}
    snapshot = Snapshot(state, random_states=False)
    one, two = buffer_for(snapshot), np.full(snapshot.plan(1).capacity_bytes, 0xAA, np.uint8)
    size = snapshot.capture_into(one, HEADER)
    assert snapshot.capture_into(two, HEADER) == size
    assert (one[:size] == two[:size]).all()


def test_plan_says_what_capture_does():
    """Planned and captured sizes agree; the fingerprint follows geometry and not values."""
    state = {"w": torch.zeros(5), "n": 1}
    snapshot = Snapshot(state, random_states=True)
    plan = snapshot.plan(1)
    assert snapshot.capture_into(buffer_for(snapshot), HEADER) == plan.shard_bytes
    assert plan.shard_bytes < plan.capacity_bytes
    assert plan.fingerprint[:8] in plan.describe()
    state["w"].add_(1)
    state["n"] = 2
    assert snapshot.plan(1).fingerprint == plan.fingerprint
    state["w"] = torch.zeros(6)
    assert snapshot.plan(1).fingerprint != plan.fingerprint


def test_a_replaced_tensor_is_noticed():
    """New tensors of the same form, a new form and a new sharing each reach the next image."""
    state = {"a": torch.zeros(4), "b": torch.ones(4)}
    snapshot = Snapshot(state, random_states=False)
    buffer = np.zeros(1 << 17, np.uint8)
    for name, change in (
        ("a", lambda: torch.full((4,), 7.0)),
        ("a", lambda: torch.full((2, 3), 8.0).t()),
        ("a", lambda: torch.full((4,), 3.0)),
        ("b", lambda: state["a"]),
        ("b", lambda: state["a"].clone() + 1),
        ("a", lambda: torch.full((2,), 3, dtype=torch.int64)),
        ("c", lambda: torch.ones(3)),
    ):
        state[name] = change()
        snapshot.capture_into(buffer, HEADER)
        wanted = copy.deepcopy(state)
        for value in state.values():
            value.zero_()
        snapshot.prepare(buffer).commit()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def test_in_place_resize_is_noticed():
    """A tensor resized in place, its address unchanged, is planned anew: compared after a load."""
    state = {"a": torch.arange(6.0)}
    snapshot = Snapshot(state, random_states=False)
    buffer = np.zeros(1 << 17, np.uint8)
    snapshot.capture_into(buffer, HEADER)
    state["a"].resize_(2, 2)
    snapshot.capture_into(buffer, HEADER)
    state["a"].zero_()
    snapshot.prepare(buffer).commit()
    assert state["a"].tolist() == [[0, 1], [2, 3]]


def test_too_small_a_buffer_is_left_alone():
    """Growth asks for room before it writes: the old image in the buffer stays readable."""
    state = {"w": torch.ones(3), "more": {}}
    snapshot = Snapshot(state, random_states=False)
    buffer = buffer_for(snapshot)
    snapshot.capture_into(buffer, HEADER)
    before = buffer.copy()
    state["more"]["big"] = torch.zeros(1 << 20)
    with pytest.raises(NeedCapacity) as caught:
        snapshot.capture_into(buffer, HEADER)
    assert isinstance(caught.value, PlanariaError)
    assert (buffer == before).all()
    assert caught.value.capacity_bytes > 4 << 20
    larger = np.zeros(caught.value.capacity_bytes, np.uint8)
    snapshot.capture_into(larger, HEADER)
    assert read_image(larger).shard_bytes <= larger.nbytes


def test_python_values_may_grow_within_the_slack():
    """A history that grows by a hundred numbers still fits the planned buffer."""
    state = {"history": []}
    snapshot = Snapshot(state, random_states=False)
    buffer = buffer_for(snapshot)
    for step in range(100):
        state["history"].append(step / 7)
        snapshot.capture_into(buffer, HEADER)
    state["history"].clear()
    snapshot.prepare(buffer).commit()
    assert state["history"] == [step / 7 for step in range(100)]


ESTIMATED = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), ESTIMATED, ids=lambda value: str(value)[-40:])
def test_estimate_covers_the_state_after_the_first_step(optimizer, options):
    """A buffer reserved before any step takes the state after three, and is not twice too large."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    optim = optimizer(model.parameters(), lr=0.1, **options)
    snapshot = Snapshot({"model": model, "optim": optim}, random_states=True)
    capacity = snapshot.estimate_bytes()
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        optim.step()
    used = snapshot.capture_into(np.zeros(capacity, np.uint8), HEADER)
    assert used <= capacity < 2 * used + (1 << 17)


def test_no_tensor_handed_out_is_a_view_of_the_buffer():
    """Scribbling over the buffer between prepare and commit, and after, changes nothing."""

    class Keeper:
        state = None

        def state_dict(self):
            return {"t": torch.arange(3.0), "raw": bytes(5000), "array": np.arange(3)}

        def load_state_dict(self, state):
            self.state = state

    model = nn.Linear(3, 3)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    state = {"keeper": Keeper(), "model": model, "optim": optim, "box": {"t": torch.ones(2)}}
    wanted = copy.deepcopy((model.state_dict(), optim.state_dict(), state["box"]))
    snapshot = Snapshot(state, random_states=True)
    buffer = buffer_for(snapshot)
    snapshot.capture_into(buffer, HEADER)
    plan = snapshot.prepare(buffer)
    buffer[:] = 0xFF
    plan.commit()
    buffer[:] = 0xEE
    found = model.state_dict(), optim.state_dict(), state["box"]
    assert repr(found) == repr(wanted)
    assert state["keeper"].state["t"].tolist() == [0, 1, 2]
    assert state["keeper"].state["raw"] == bytes(5000)
    assert state["keeper"].state["array"].tolist() == [0, 1, 2]


def test_buffers_can_be_let_go():
    """After forget_buffers the snapshot holds no view of a buffer: its last reference goes."""

    class Owner(np.ndarray):
        """An array that can be watched."""

    snapshot = Snapshot({"w": torch.ones(3)}, random_states=False)
    buffer = np.zeros(1 << 17, np.uint8).view(Owner)
    seen = weakref.ref(buffer)
    snapshot.capture_into(buffer, HEADER)
    snapshot.forget_buffers()
    del buffer
    assert seen() is None


def test_commit_runs_once():
    """A second commit of one plan is refused."""
    plan = Snapshot({}, random_states=False).prepare(image_of({}))
    plan.commit()
    with pytest.raises(StateError, match="committed before"):
        plan.commit()


@pytest.mark.parametrize("state", [{}, {"n": 1}, {"t": torch.zeros(0, 3)}, {"t": torch.zeros(0)}])
def test_states_with_few_or_no_bytes(state):
    """Ranks with nothing, only Python values or only empty tensors save and load."""
    image = image_of(state)
    load(image, copy.deepcopy(state))
    assert read_image(image).shard_bytes == image.nbytes


def test_registered_names_must_match_both_ways():
    """An object saved and not registered, or the reverse, is an error that lists both."""
    image = image_of({"a": torch.ones(1), "b": 1, 0: 2})
    state = {"a": torch.zeros(1), "c": 1, "0": 2}
    with pytest.raises(StateError) as caught:
        load(image, state)
    assert "rank 1" in str(caught.value)
    assert "saved but not in the live state: state['b'], state[0]" in str(caught.value)
    assert "in the live state but not saved: state['c'], state['0']" in str(caught.value)
    assert state == {"a": torch.zeros(1), "c": 1, "0": 2}


def test_top_level_values_are_replaced_in_the_users_dict():
    """Plain values under a registered name are put back into the dict that was given."""
    state = {"epoch": 3, "best": (1, 2.5), "t": torch.ones(2)}
    tensor, image = state["t"], image_of(state)
    state.update(epoch=9, best=None)
    load(image, state)
    assert state["epoch"] == 3
    assert state["best"] == (1, 2.5)
    assert state["t"] is tensor


def test_containers_and_tensors_are_filled_in_place():
    """Whoever holds a container or a tensor of the state sees the restored values in it."""
    saved = {
        "d": {"t": torch.ones(2), "n": 1},
        "o": OrderedDict(b=1, a=2),
        "l": [torch.ones(1), 2, 3],
        "s": {1, 2},
        "q": deque([1, 2]),
        "c": Counter(a=2),
        "f": defaultdict(list, k=[1]),
        "p": (torch.ones(1), 5),
        "y": np.arange(3),
        "b": bytearray(b"ab"),
    }
    live = {
        "d": {"n": 7, "t": torch.zeros(2), "old": 1},
        "o": OrderedDict(a=0),
        "l": [torch.zeros(1)],
        "s": {7},
        "q": deque([7, 8, 9]),
        "c": Counter(a=5, z=1),
        "f": defaultdict(list, z=[7]),
        "p": (torch.zeros(1), 6),
        "y": np.zeros(3, np.int64),
        "b": bytearray(),
    }
    held = dict(live)
    tensors = live["d"]["t"], live["l"][0], live["p"][0]
    load(image_of(saved), live)
    assert repr(live) == repr(saved)
    assert all(live[key] is held[key] for key in live if key != "p")
    now = live["d"]["t"], live["l"][0], live["p"][0]
    assert all(found is kept for found, kept in zip(now, tensors, strict=True))
    live["f"]["new"].append(1)


def test_what_was_saved_later_is_put_in():
    """Entries that appeared during training are there after a restore into a fresh state."""
    saved = {"ema": {"w": torch.ones(2), "deep": [{"t": torch.ones(1)}]}, "best": torch.ones(1)}
    live = {"ema": {}, "best": None}
    load(image_of(saved), live)
    assert repr(live) == repr(saved)


@pytest.mark.parametrize(
    ("saved", "live", "text"),
    [
        ({"a": 1}, {"a": 1, "t": torch.ones(1)}, r"not saved: state\['x'\]\['t'\]"),
        ([1], [1, torch.ones(1)], r"not saved: state\['x'\]\[1\]"),
        ([1], {"t": torch.ones(1)}, r"not saved: state\['x'\]"),
        ({"m": None}, {"m": nn.Linear(1, 1)}, r"not saved: state\['x'\]\['m'\] \(module\)"),
        ({"m": nn.Linear(1, 1)}, {}, r"not in the live state: state\['x'\]\['m'\] \(module\)"),
        ({"m": nn.Linear(1, 1)}, {"m": torch.Generator()}, "saved as module, is torch.Generator"),
        ({"t": torch.ones(2)}, {"t": torch.ones(3)}, r"saved with shape \[2\], has \[3\]"),
        ({"t": torch.ones(2)}, {"t": torch.ones(2).half()}, "saved as float32, is float16"),
        ({"t": None}, {"t": torch.ones(2)}, "is a tensor and was not saved as one"),
        ({"t": np.ones(2)}, {"t": torch.ones(2)}, "is a tensor and was not saved as one"),
    ],
)
def test_mismatches_inside_containers_are_named(saved, live, text):
    """Tensors and objects without a counterpart are refused by path, and nothing is changed."""
    state = {"w": torch.zeros(1), "x": live}
    before = repr(state)
    with pytest.raises(StateError, match=text):
        load(image_of({"w": torch.ones(1), "x": saved}), state)
    assert repr(state) == before


def test_a_failed_capture_leaves_the_snapshot_usable():
    """After an unsupported value was refused, the next capture of a good state works."""
    state = {"w": torch.ones(2), "v": 1}
    snapshot = Snapshot(state, random_states=False)
    buffer = buffer_for(snapshot)
    snapshot.capture_into(buffer, HEADER)
    state["v"] = threading.Lock()
    with pytest.raises(StateError, match=r"rank 1: state\['v'\] is a _thread.lock"):
        snapshot.capture_into(buffer, HEADER)
    state["v"] = 2
    snapshot.capture_into(buffer, HEADER)
    state["v"] = 3
    snapshot.prepare(buffer).commit()
    assert state["v"] == 2


def test_callers_mistakes_are_named():
    """A state that is no dict and buffers of a wrong kind are refused at once."""
    with pytest.raises(StateError, match="must be a dict"):
        Snapshot([1], random_states=False)
    snapshot = Snapshot({}, random_states=False)
    frozen = np.zeros(1 << 17, np.uint8)
    frozen.flags.writeable = False
    for buffer in (np.zeros(1 << 17, np.int8), np.zeros((1 << 17, 2), np.uint8)[:, 0], frozen):
        with pytest.raises(ValueError, match=r"contiguous|read-only"):
            snapshot.capture_into(buffer, HEADER)


def test_global_settings_do_not_matter_and_stay():
    """A default device, a default dtype and inference mode change neither image nor restore."""
    state = {"w": torch.arange(4.0), "g": torch.ones(2, requires_grad=True)}
    wanted = image_of(state)
    with torch.device("meta"), torch.inference_mode():
        assert (image_of(state) == wanted).all()
    live = {"w": torch.zeros(4), "g": torch.zeros(2, requires_grad=True)}
    with torch.device("meta"):
        load(wanted, live)
    assert live["w"].tolist() == [0, 1, 2, 3]
    assert live["g"].requires_grad
    assert live["g"].grad_fn is None
