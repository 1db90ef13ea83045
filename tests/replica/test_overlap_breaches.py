"""What must not change before it is copied, and does; and late copies that hang, fail or end."""

from __future__ import annotations

import os
import threading
import warnings

import numpy as np
import pytest
import torch

import replica
from replica import late_copy, overlap
from replica.group import MemoryGroup
from replica.late_copy import LateCopy
from replica.overlap import Overlap
from replica.snapshot import Snapshot
from tests.replica.inprocess import outcomes
from tests.replica.overlap_tools import (
    WAIT_S,
    Held,
    checkpointer,
    restored,
    same,
    tensors,
    train,
    training,
)
from tests.replica.snapshot_tools import HEADER


@pytest.fixture
def held(monkeypatch):
    """Hold late copies until the test lets them go."""
    one = Held(monkeypatch)
    yield one
    one.open()


@pytest.fixture
def begin():
    """Return a function that captures a state after a step, with the late copy not begun yet."""
    made = []

    def capture(state, *, check=False):
        made.append(Overlap(rank=3, timeout_s=WAIT_S, check=check))
        snapshot = Snapshot(state, random_states=False)
        snapshot.overlap = made[-1]
        train(state)
        return snapshot.begin_capture(np.zeros(snapshot.estimate_bytes(), np.uint8), HEADER)

    yield capture
    for one in made:
        one.close(0.0)


def failure(captured):
    """How the capture fails once its late copy runs."""
    ended = threading.Event()
    captured.start(ended.set)
    with pytest.raises(replica.PlanariaError) as caught:
        captured.finish(WAIT_S)
    assert ended.wait(WAIT_S)
    return f"{type(caught.value).__name__}: {caught.value}"


def by_hand(state):
    """As an average of weights is put in for an evaluation."""
    with torch.no_grad():
        state["model"].one.weight.mul_(0.5)


def by_load_state_dict(state):
    """As another checkpoint is loaded."""
    state["model"].load_state_dict(training()["model"].state_dict())


def by_initialisation(state):
    """As a layer is begun anew."""
    torch.nn.init.zeros_(state["model"].one.weight)


@pytest.mark.parametrize("change", [by_hand, by_load_state_dict, by_initialisation])
def test_a_change_that_torch_counts_fails_the_save(begin, change):
    """Without any check: StateError with the rank and the key path, and what to do."""
    state = training()
    captured = begin(state)
    change(state)
    text = failure(captured)
    assert text.startswith("StateError: rank 3: model.one.weight was changed after save()")
    assert 'ticket.wait("staged")' in text


@pytest.mark.parametrize("name", ["one.weight", "two.weight"])
def test_the_check_finds_what_torch_does_not_count(begin, name):
    """Through .data, and one bit of it: only the digests see that, and name the tensor."""
    state = training()
    captured = begin(state, check=True)
    state["model"].get_parameter(name).data.view(-1)[-1] += 1
    assert f"StateError: rank 3: model.{name} was changed" in failure(captured)


def test_the_check_finds_a_changed_moment(begin):
    """The state of an optimizer counts as much as a parameter."""
    state = training()
    captured = begin(state, check=True)
    state["optim"].state[state["model"].one.weight]["exp_avg_sq"].data.view(-1)[7] += 1
    assert "exp_avg_sq was changed" in failure(captured)


def test_memory_that_moved_is_not_read(begin):
    """A parameter put into shared memory leaves its old memory free: not touched, and said."""
    state = training()
    captured = begin(state)
    state["model"].two.weight.share_memory_()
    assert "model.two.weight was moved to other memory" in failure(captured)


@pytest.mark.parametrize("change", ["half", "data", "reload", "grad"])
def test_what_leaves_the_old_memory_alone_is_allowed(begin, change):
    """Another dtype or memory for a parameter, new moments, gradients: the late bytes are right."""
    state = training()
    wanted_state = training()
    train(wanted_state)
    captured = begin(state, check=True)
    if change == "half":
        state["model"].half()
    elif change == "data":
        for param in state["model"].parameters():
            param.data = torch.zeros_like(param)
    elif change == "reload":
        state["optim"].load_state_dict(training()["optim"].state_dict())
    else:
        state["model"](torch.ones(1, 192)).sum().backward()
        torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
    image = captured._late._keep[0]
    captured.start(lambda: None)
    captured.finish(WAIT_S)
    again = training()
    Snapshot(again, random_states=False).prepare(image[: captured.nbytes]).commit()
    assert same(tensors(again), tensors(wanted_state))


def test_a_breach_on_one_rank_is_aborted_on_all(arena_dir):
    """Rank 1 changes a weight by hand: nobody commits the step, both say who and what."""
    groups = MemoryGroup.make(2)
    meet = threading.Barrier(2)

    def body(rank):
        weight = torch.nn.Linear(192, 192)
        optim = torch.optim.SGD(weight.parameters(), lr=0.1)
        ckpt = checkpointer(
            arena_dir,
            {"model": weight, "optim": optim},
            group=groups[rank],
            node_id=f"n{rank}",
            redundancy="copies:1",
            overlap_check=True,
        )
        with ckpt:
            tickets = []
            for step in (1, 2, 3):
                weight.weight.grad = torch.ones_like(weight.weight)
                optim.step()
                meet.wait(WAIT_S)
                if (rank, step) == (1, 2):
                    ckpt._snapshot.overlap.begin = breach(weight, ckpt._snapshot.overlap.begin)
                tickets.append(ckpt.save(step, when_busy="wait"))
                with_reason(tickets[-1])
            return [(ticket.failed, ticket.reason) for ticket in tickets]

    def breach(weight, real):
        def begin(*args):
            late = real(*args)
            if late._before:
                weight.weight.data.add_(1 if not tried else 0)
                tried.append(1)
            return late

        return begin

    tried = []
    found = outcomes(2, body)
    for rank, told in enumerate(found):
        assert [failed for failed, _ in told] == [False, True, False], (rank, told)
        assert "rank 1: model.weight was changed after save()" in told[1][1]


def with_reason(ticket):
    """Wait for the end, however it is."""
    try:
        ticket.wait("committed", WAIT_S)
    except replica.SaveFailed:
        assert ticket.failed


def test_a_late_copy_that_hangs_fails_its_save_and_keeps_its_slot(arena_dir, held, monkeypatch):
    """At the deadline the save is aborted; the next ones use other slots, and are right.

    Once the copy has let go, its slot is used again.
    """
    held.only_first = True
    state, real = training(), LateCopy.finish
    with checkpointer(arena_dir, state, when_busy="wait") as ckpt:
        train(state)
        monkeypatch.setattr(LateCopy, "finish", lambda self, _: real(self, 0.01))
        ticket = ckpt.save(1)
        assert held.begun.wait(WAIT_S)
        with pytest.raises(replica.SaveFailed, match=r"late copy of \d+ bytes did not end within"):
            ticket.wait("committed", WAIT_S)
        monkeypatch.setattr(LateCopy, "finish", real)
        slots = ckpt._engine.job.arena.slots
        (busy,) = [number for number, slot in slots.items() if slot.busy]
        for step in (2, 3, 4):
            train(state)  # a step does not wait for what was given up
            wanted = tensors(state)
            ckpt.save(step).wait("committed", WAIT_S)
            assert not any(slot is slots[busy] for slot in holding(ckpt, step))
        assert slots[busy].busy
        held.open()
        for step in (5, 6, 7):
            train(state)
            wanted = tensors(state)
            ckpt.save(step).wait("committed", WAIT_S)
        assert not any(slot.busy for slot in ckpt._engine.job.arena.slots.values())
    assert same(tensors(restored(arena_dir)[1]), wanted)


def holding(ckpt, step):
    """Slots that hold something of a step."""
    slots = ckpt._engine.job.arena.slots.values()
    return [slot for slot in slots if slot.generation and slot.generation.step == step]


def test_a_step_goes_on_at_the_deadline(arena_dir, held):
    """With the copy stuck, the hook gives it up after the option's time: no hang, no torn save."""
    state = training()
    with checkpointer(arena_dir, state) as ckpt:
        train(state)
        ticket = ckpt.save(1)
        assert held.begun.wait(WAIT_S)
        ckpt._snapshot.overlap._timeout_s = 0.01
        train(state)
        with pytest.raises(replica.SaveFailed, match="did not end within"):
            ticket.wait("committed", WAIT_S)
        held.open()
        # Until the piece under way has returned, the arena stays with this Checkpointer (P22).
        for thread in threading.enumerate():
            if thread.name.endswith("late copy"):
                thread.join(WAIT_S)
    assert restored(arena_dir)[0] is None


def test_an_error_in_the_copy_is_the_saves(arena_dir, held):
    """What the copying thread raises fails that save by name, and the next one works."""
    state = training()
    held.raising = MemoryError("no page")
    held.open()
    with checkpointer(arena_dir, state, when_busy="wait") as ckpt:
        train(state)
        with pytest.raises(replica.SaveFailed, match="MemoryError in the late copy: no page"):
            ckpt.save(1).wait("committed", WAIT_S)
        held.raising = None
        train(state)
        wanted = tensors(state)
        ckpt.save(2).wait("committed", WAIT_S)
    assert same(tensors(restored(arena_dir)[1]), wanted)


def test_ctrl_c_while_a_step_helps(arena_dir, held, monkeypatch):
    """The step is not taken, the save fails, nothing hangs, and the next save is right."""
    interrupting = late_copy.copy_pieces

    def copy_pieces(pieces, keep):
        if threading.current_thread() is threading.main_thread() and armed:
            armed.clear()
            raise KeyboardInterrupt
        interrupting(pieces, keep)

    armed = [1]
    monkeypatch.setattr(late_copy, "copy_pieces", copy_pieces)
    state = training()
    with checkpointer(arena_dir, state, when_busy="wait") as ckpt:
        train(state)
        before = tensors(state)
        ticket = ckpt.save(1)
        assert held.begun.wait(WAIT_S)
        with pytest.raises(KeyboardInterrupt):
            train(state)
        now = tensors(state)
        assert torch.equal(now["one.weight"], before["one.weight"])
        held.open()
        with pytest.raises(replica.SaveFailed, match="KeyboardInterrupt"):
            ticket.wait("committed", WAIT_S)
        train(state)
        wanted = tensors(state)
        ckpt.save(2).wait("committed", WAIT_S)
    assert same(tensors(restored(arena_dir)[1]), wanted)


def test_a_forked_child_waits_for_nobody(begin):
    """In a child the threads of the copy are missing: a step there goes on at once."""
    state = training()
    captured = begin(state)
    late = captured._late
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            overlap._before_step(state["optim"], (), {})
            late.help(0.0)
            code = 0 if not overlap._open and not late._over else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    captured.start(lambda: None)
    captured.finish(WAIT_S)


def test_a_copy_that_was_never_begun_is_not_made_up_for(begin):
    """Ctrl-C between capture and start: a step later nobody writes into a slot that is not held."""
    state = training()
    captured = begin(state)
    target = captured._late._keep[0]
    before = target.copy()
    train(state)
    assert np.array_equal(target, before)
    with pytest.raises(replica.SaveFailed, match="never begun"):
        captured.finish(0.0)


def test_who_waits_for_the_end_may_be_gone(begin, caplog):
    """What its end raises, a background process that was killed say, never reaches a step."""
    state = training()
    captured = begin(state)

    def on_ended():
        raise OSError("nobody there")

    captured.start(on_ended)
    train(state)
    captured.finish(WAIT_S)
    assert "nobody there" in caplog.text


def test_threads_that_cannot_be_started_are_not_needed(begin, monkeypatch):
    """At the end of the interpreter no thread starts: the caller copies."""
    state = training()
    captured = begin(state, check=True)

    def start(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    ended = []
    captured.start(lambda: ended.append(1))
    assert ended == [1]
    captured.finish(0.0)
