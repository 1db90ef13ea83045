"""Overlap mode: ``save`` returns before the copy, and no step changes what is not copied yet."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import replica
from replica.late_copy import LateCopy
from tests.replica.damage import slots
from tests.replica.overlap_tools import (
    WAIT_S,
    WIDTH,
    Held,
    checkpointer,
    gradients,
    restored,
    same,
    tensors,
    train,
    training,
)

LARGE = 2 * WIDTH * WIDTH * 4
"""Bytes of the two weights."""


@pytest.fixture
def held(monkeypatch):
    """Hold late copies until the test lets them go."""
    one = Held(monkeypatch)
    yield one
    one.open()


def late_bytes(ckpt):
    """Bytes that the save under way has left for later."""
    return ckpt._snapshot.overlap._current.nbytes


def test_save_returns_while_parameters_are_still_to_be_copied(arena_dir, held):
    """With the copy held save returns, forward and backward run, and that moment is saved."""
    state = training()
    with checkpointer(arena_dir, state) as ckpt:
        train(state)
        wanted = tensors(state)
        ticket = ckpt.save(1)
        assert late_bytes(ckpt) == 3 * LARGE  # the weights and both moments of each
        gradients(state)
        assert "staged" not in repr(ticket)
        with pytest.raises(TimeoutError):
            ticket.wait("staged", 0.0)
        held.open()
        state["optim"].step()
        ticket.wait("committed", WAIT_S)
    step, again = restored(arena_dir)
    assert step == 1
    assert same(tensors(again), wanted)


def test_a_step_waits_for_the_copy_and_helps_with_it(arena_dir, held, monkeypatch):
    """Its thread copies all but the part that is held, waits for that, and only then changes."""
    waiting = threading.Event()
    real = LateCopy._wait

    def wait(self, timeout_s):
        if threading.current_thread().name == "stepper":
            waiting.set()
        real(self, timeout_s)

    monkeypatch.setattr(LateCopy, "_wait", wait)
    state = training()
    with checkpointer(arena_dir, state) as ckpt:
        train(state)
        wanted = tensors(state)
        ticket = ckpt.save(1)
        gradients(state)
        assert held.begun.wait(WAIT_S)
        stepper = threading.Thread(target=state["optim"].step, name="stepper", daemon=True)
        stepper.start()
        assert waiting.wait(WAIT_S)
        now = tensors(state)
        assert all(torch.equal(now[key], wanted[key]) for key in wanted if key != "mean")
        held.open()
        stepper.join(WAIT_S)
        assert not stepper.is_alive()
        assert not torch.equal(state["model"].one.weight, wanted["one.weight"])
        ticket.wait("committed", WAIT_S)
    assert same(tensors(restored(arena_dir)[1]), wanted)


def test_what_no_step_changes_is_copied_before_save_returns(arena_dir, held):
    """Buffers, an average, Python values, random states and small tensors may change at once."""
    state = training()
    state["average"] = {"weight": torch.zeros(WIDTH, WIDTH)}
    state["log"] = [1, {"loss": [0.5]}]
    with checkpointer(arena_dir, state) as ckpt:
        train(state)
        state["average"]["weight"].copy_(state["model"].one.weight.detach())
        wanted, random = tensors(state), torch.get_rng_state()
        average = state["average"]["weight"].clone()
        ckpt.save(1)
        gradients(state)  # draws numbers, changes the buffer
        state["average"]["weight"].zero_()
        state["log"][1]["loss"].append(7.0)
        state["optim"].param_groups[0]["lr"] = 5.0
        held.open()
    again = training()
    again |= {"average": {"weight": torch.ones(WIDTH, WIDTH)}, "log": []}
    with checkpointer(arena_dir, again) as ckpt:
        assert ckpt.restore() == 1
    assert same(tensors(again), wanted)
    assert torch.equal(again["average"]["weight"], average)
    assert again["log"] == [1, {"loss": [0.5]}]
    assert again["optim"].param_groups[0]["lr"] == 0.01
    assert torch.equal(torch.get_rng_state(), random)


def test_of_several_optimizers_each_one_waits(arena_dir, held, monkeypatch):
    """Two optimizers over a layer each: the first step of either comes after the whole copy."""
    torch.manual_seed(1)
    model = training()["model"]
    first = torch.optim.AdamW(model.one.parameters(), lr=0.1)
    second = torch.optim.SGD(model.two.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optim": {"first": first, "rest": [second]}}

    def steps():
        model(torch.randn(4, WIDTH)).sum().backward()
        second.step()
        first.step()

    with checkpointer(arena_dir, state) as ckpt:
        steps()
        weights = [model.one.weight.detach().clone(), model.two.weight.detach().clone()]
        ticket = ckpt.save(1)
        assert late_bytes(ckpt) == LARGE // 2 * 5  # two moments of one layer, one of the other
        copy, real = ckpt._snapshot.overlap._current, LateCopy.help

        def let_go(self, timeout_s):
            held.open()
            real(self, timeout_s)

        monkeypatch.setattr(LateCopy, "help", let_go)
        steps()
        assert copy._over
        ticket.wait("committed", WAIT_S)
        with torch.no_grad():
            model.one.weight.zero_()
        ckpt.restore()
    assert torch.equal(model.one.weight, weights[0])
    assert torch.equal(model.two.weight, weights[1])


def test_a_stranger_to_the_state_waits_too(arena_dir, held):
    """A step of an optimizer that is not in the state, over the same weights, is no breach."""
    state = training()
    stranger = torch.optim.SGD(state["model"].parameters(), lr=1.0)
    with checkpointer(arena_dir, state, overlap_check=True) as ckpt:
        train(state)
        wanted = tensors(state)
        ticket = ckpt.save(1)
        gradients(state)
        held.open()
        stranger.step()
        ticket.wait("committed", WAIT_S)
    assert same(tensors(restored(arena_dir)[1]), wanted)


def test_the_next_save_comes_after_the_late_copy(arena_dir, held):
    """A save that waits for the one before waits for its late copy, and each has its own bytes."""
    state = training()
    wanted = []
    with checkpointer(arena_dir, state, when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            train(state)
            wanted.append(tensors(state))
            ticket = ckpt.save(step)
            if step < 3:
                held.open()
        assert ticket.step == 3
        held.open()
        ticket.wait("committed", WAIT_S)
    step, again = restored(arena_dir)
    assert step == 3
    assert same(tensors(again), wanted[-1])


def test_restore_waits_for_the_late_copy(arena_dir, held):
    """Called with a copy under way it does not begin before that is done, and gives its values."""
    state = training()
    with checkpointer(arena_dir, state) as ckpt:
        train(state)
        wanted = tensors(state)
        ckpt.save(1)
        gradients(state)
        opener = threading.Thread(target=lambda: held.begun.wait(WAIT_S) and held.open())
        opener.start()
        assert ckpt.restore() == 1
        opener.join(WAIT_S)
        assert same(tensors(state), wanted)


def test_close_waits_for_the_late_copy_and_commits(arena_dir, held):
    """The last save of a run, closed at once, is committed."""
    state = training()
    ckpt = checkpointer(arena_dir, state)
    train(state)
    wanted = tensors(state)
    ticket = ckpt.save(1)
    opener = threading.Thread(target=lambda: held.begun.wait(WAIT_S) and held.open())
    opener.start()
    ckpt.close()
    opener.join(WAIT_S)
    ticket.wait("committed", 0.0)
    assert same(tensors(restored(arena_dir)[1]), wanted)


def test_an_exception_behind_save_leaves_nothing_torn(arena_dir, held, monkeypatch):
    """The block ends by an exception while the copy hangs: closed in time, and nothing is kept.

    The next step waits no more, and changes what the copy still reads; the arena stays ours.
    """
    monkeypatch.setattr("replica.checkpointer.CLOSE_AFTER_ERROR_S", 0.1)
    state = training()
    tickets = []

    def run():
        with checkpointer(arena_dir, state) as ckpt:
            train(state)
            tickets.append(ckpt.save(1))
            assert held.begun.wait(WAIT_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    (ticket,) = tickets
    assert ticket.failed
    assert "late copy" in ticket.reason
    train(state)
    assert not slots(arena_dir, 1, 0)
    with pytest.raises(replica.ArenaBusy):
        checkpointer(arena_dir, training(), timeout_s=0.1)


def test_without_the_option_everything_is_copied_at_once(arena_dir, held):
    """By default nothing is late, no hook is set, and the ticket is staged when save returns."""
    state = training()
    hooks = len(_global_optimizer_pre_hooks)
    with checkpointer(arena_dir, state, overlap=False) as ckpt:
        train(state, 2)
        ckpt.save(1).wait("staged", 0.0)
        assert len(_global_optimizer_pre_hooks) == hooks
    assert not held.begun.is_set()


def test_the_hook_goes_with_the_last_checkpointer(arena_dir):
    """Two in overlap mode set one hook; it is there until both are closed."""
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    one = checkpointer(arena_dir, training())
    two = checkpointer(arena_dir, training(), job="other")
    assert len(hooks) == before + 1
    one.close()
    assert len(hooks) == before + 1
    two.close()
    assert len(hooks) == before


def test_the_check_needs_the_mode():
    """overlap_check alone is refused."""
    with pytest.raises(replica.ConfigError, match="needs overlap=True"):
        replica.Options(overlap_check=True)


def test_the_first_save_before_any_step_says_nothing(arena_dir, caplog):
    """No step was seen yet, and that is no news; the second save without one is."""
    state = training()
    caplog.set_level(logging.INFO, "planaria")
    with checkpointer(arena_dir, state, when_busy="wait") as ckpt:
        ckpt.save(1)
        assert "overlap=True" not in caplog.text
        for step in (2, 3):
            ckpt.save(step)
    said = [record.message for record in caplog.records if "overlap=True" in record.message]
    assert len(said) == 1
    assert f"{LARGE} bytes" in said[0]
    assert "no step was seen of AdamW" in said[0]
