"""A save is the state at the moment of the call: what changes right after it is not in it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import replica
from replica import copies
from tests.replica.overlap_tools import WAIT_S, checkpointer, training

MODES = pytest.mark.parametrize("overlap", [False, True])


def reopened(arena_dir, state):
    """Restore into a state; the step."""
    with checkpointer(arena_dir, state, overlap=False) as ckpt:
        return ckpt.restore()


@MODES
def test_a_tensor_filled_anew_right_after_the_call(arena_dir, overlap):
    """Ones are saved, twos are written at once, ones come back."""
    state = {"w": torch.ones(1 << 18)}
    with checkpointer(arena_dir, state, overlap=overlap) as ckpt:
        ticket = ckpt.save(1)
        state["w"].fill_(2.0)
        ticket.wait("committed", WAIT_S)
    assert reopened(arena_dir, state) == 1
    assert torch.equal(state["w"], torch.ones(1 << 18))


@MODES
def test_fifty_tensors_changed_for_the_whole_save(arena_dir, overlap):
    """In a loop, all through the background work of thirty saves: each is of one moment."""
    state = {f"t{i}": torch.zeros(1 + 400 * i) for i in range(50)}
    with checkpointer(arena_dir, state, overlap=overlap, when_busy="wait") as ckpt:
        value = 0.0
        for step in range(1, 31):
            saved = value
            ticket = ckpt.save(step)
            while not ticket.done:
                value += 1.0
                for tensor in state.values():
                    tensor.fill_(value)
            ticket.wait("committed", WAIT_S)
            if step % 10 == 0:
                ckpt.restore()
                assert {float(one) for tensor in state.values() for one in tensor.unique()} == {
                    saved
                }


@MODES
def test_python_values_changed_after_the_call(arena_dir, overlap):
    """A list grows, a dict loses a key, bytes and sets change, deep down: as at the call."""
    state = {
        "log": [1, [2, {"deep": [3]}]],
        "seen": {1, 2},
        "raw": bytearray(b"x" * 5000),
        "box": {"lr": 0.1, "gone": None, "name": "a"},
    }
    with checkpointer(arena_dir, state, overlap=overlap) as ckpt:
        ticket = ckpt.save(1)
        state["log"][1][1]["deep"].append(4)
        state["log"].append(5)
        state["seen"].add(3)
        state["raw"][:] = b"y" * 5000
        del state["box"]["gone"]
        state["box"]["lr"] = 9.0
        ticket.wait("committed", WAIT_S)
    assert reopened(arena_dir, state) == 1
    assert state == {
        "log": [1, [2, {"deep": [3]}]],
        "seen": {1, 2},
        "raw": bytearray(b"x" * 5000),
        "box": {"lr": 0.1, "gone": None, "name": "a"},
    }


@MODES
def test_arrays_and_the_tensors_made_of_them(arena_dir, overlap):
    """A numpy array, a column of it and a tensor on the same memory, all changed at once."""
    array = np.arange(60000, dtype=np.float32).reshape(300, 200)
    state = {"array": array, "column": array[:, 3], "tensor": torch.from_numpy(array)}
    wanted = array.copy()
    with checkpointer(arena_dir, state, overlap=overlap) as ckpt:
        ticket = ckpt.save(1)
        array[:] = -1.0
        ticket.wait("committed", WAIT_S)
    assert reopened(arena_dir, state) == 1
    assert np.array_equal(state["array"], wanted)
    assert np.array_equal(state["column"], wanted[:, 3])
    assert np.array_equal(state["tensor"].numpy(), wanted)


@MODES
def test_objects_replaced_between_saves(arena_dir, overlap):
    """A tensor, a parameter's memory, an optimizer's moment: what is there now counts."""
    state = training() | {"extra": torch.zeros(1 << 17)}
    with checkpointer(arena_dir, state, overlap=overlap, when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            for param in state["model"].parameters():
                param.grad = torch.full_like(param, float(step))
            state["optim"].step()
            ckpt.save(step)
            state["extra"] = torch.full((1 << 17,), float(step))
            weight = state["model"].one.weight
            state["optim"].state[weight]["exp_avg"] = torch.full_like(weight, -step)
            weight.data = torch.full_like(weight, 10.0 * step)
        ckpt.save(4).wait("committed", WAIT_S)
    again = training() | {"extra": torch.zeros(1 << 17)}
    assert reopened(arena_dir, again) == 4
    weight = again["model"].one.weight
    assert set(again["extra"].tolist()) == {3.0}
    assert set(weight.view(-1).tolist()) == {30.0}
    assert set(again["optim"].state[weight]["exp_avg"].view(-1).tolist()) == {-3.0}


class Breaks:
    """State that cannot be had once."""

    def __init__(self):
        self.broken = False

    def state_dict(self):
        """Fail if told to."""
        if self.broken:
            raise RuntimeError("half way")
        return {"x": torch.full((1000,), 1.0)}

    def load_state_dict(self, state):
        """Take it."""
        self.loaded = state


@MODES
@pytest.mark.parametrize("where", ["state", "copy"])
def test_a_capture_that_fails_half_way(arena_dir, monkeypatch, overlap, where):
    """The state's method or the copy raises: that save fails, its slot is free, the next works."""
    state = training() | {"breaks": Breaks()}
    real = copies.copy_pieces

    def copy_pieces(pieces, keep):
        real(pieces[: len(pieces) // 2], keep)
        raise MemoryError("half way")

    with checkpointer(arena_dir, state, overlap=overlap, when_busy="wait") as ckpt:
        ckpt.save(1).wait("committed", WAIT_S)
        state["step"] = 2
        state["breaks"].broken = where == "state"
        if where == "copy":
            monkeypatch.setattr(copies, "copy_pieces", copy_pieces)
        ticket = ckpt.save(2)
        with pytest.raises(replica.SaveFailed, match="half way"):
            ticket.wait("committed", WAIT_S)
        monkeypatch.setattr(copies, "copy_pieces", real)
        state["breaks"].broken = False
        slots = ckpt._engine.job.arena.slots.values()
        assert not any(slot.busy or slot.taken for slot in slots)
        assert ckpt.restore() == 1
        assert state["step"] == 0
        state["step"] = 3
        ckpt.save(3).wait("committed", WAIT_S)
        assert len(ckpt._engine.job.arena.slots) == 2
    again = training() | {"breaks": Breaks()}
    assert reopened(arena_dir, again) == 3
    assert again["step"] == 3


@MODES
def test_saves_from_two_states_never_mix(arena_dir, overlap):
    """Two jobs of one process save at every step, each while the other's is under way."""
    states = [{"w": torch.zeros(1 << 17), "n": 0} for _ in range(2)]
    made = [
        checkpointer(arena_dir, state, overlap=overlap, job=f"job{i}", when_busy="wait")
        for i, state in enumerate(states)
    ]
    for step in range(1, 9):
        for number, (state, ckpt) in enumerate(zip(states, made, strict=True)):
            state["w"].fill_(10.0 * step + number)
            state["n"] = 10 * step + number
            ckpt.save(step)
            state["w"].fill_(-1.0)
    for number, (state, ckpt) in enumerate(zip(states, made, strict=True)):
        assert ckpt.restore() == 8
        assert set(state["w"].tolist()) == {80.0 + number}
        assert state["n"] == 80 + number
        ckpt.close()


@MODES
def test_another_thread_that_trains_on_meanwhile(arena_dir, overlap):
    """Steps of an optimizer in a thread of its own, between saves that know nothing of it."""
    state = training(torch.optim.SGD)
    stop, turn = threading.Event(), threading.Lock()

    def on():
        while not stop.is_set():
            for param in state["model"].parameters():
                param.grad = torch.ones_like(param)
            with turn:
                state["optim"].step()
                state["step"] += 1

    start = state["model"].one.weight.detach().clone()
    trainer = threading.Thread(target=on)
    with checkpointer(arena_dir, state, overlap=overlap, when_busy="wait") as ckpt:
        trainer.start()
        try:
            for step in range(1, 8):
                with turn:
                    ticket = ckpt.save(step)
                ticket.wait("committed", WAIT_S)
        finally:
            stop.set()
            trainer.join(WAIT_S)
    again = training(torch.optim.SGD)
    assert reopened(arena_dir, again) == 7
    for _ in range(again["step"]):
        start.sub_(torch.full_like(start, 0.01))
    assert torch.equal(again["model"].one.weight, start)
