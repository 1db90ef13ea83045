"""Saves inside of an optimizer's step, which waits no more, and steps that look like torch's."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from replica.overlap import INSIDE, Overlap, _after_step, _before_step
from tests.replica.overlap_tools import (
    MOMENTS,
    WAIT_S,
    WEIGHTS,
    Held,
    checkpointer,
    gradients,
    late,
    restored,
    same,
    tensors,
    told,
    train,
    training,
)


@pytest.fixture
def overlap():
    """Watch optimizers."""
    one = Overlap(rank=0, timeout_s=WAIT_S, check=True)
    yield one
    one.close(0.0)


@pytest.fixture
def held(monkeypatch):
    """Hold late copies until the test lets them go."""
    one = Held(monkeypatch)
    yield one
    one.open()


class Fused(torch.optim.SGD):
    """Changes weights by a kernel that counts no version."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, fused=True)


class Outer(Fused):
    """Hooked twice in each step: its own, and the one of the class below inside of it."""

    def step(self, closure=None):
        """Descend, call the closure behind that, and change the weights once more."""
        super().step()
        closure()
        halve(self)


class Around(torch.optim.Optimizer):
    """Another optimizer over the same weights, which steps it and changes them itself."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        """Step the inner one, call the closure behind that, and change the weights once more."""
        self.inner.step()
        closure()
        halve(self)


def halve(optimizer):
    """Change weights as a step may: no version is counted."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.mul_(0.5)


def in_the_closure(optimizer, save):
    """As a closure that evaluates the model says when to save."""
    optimizer.step(save)


def in_a_hook(optimizer, save):
    """A hook of the optimizer's own, called after the one for all of them."""
    handle = optimizer.register_step_pre_hook(lambda *_: save())
    optimizer.step()
    handle.remove()


def in_a_closure_of_another(optimizer, save):
    """One that is not in the state is under way; the one that is has ended its step."""
    Around(optimizer).step(save)


def in_another_thread(optimizer, save):
    """The closure hands the save to a thread, and waits for it."""

    def hand_over():
        thread = threading.Thread(target=save)
        thread.start()
        thread.join(WAIT_S)

    optimizer.step(hand_over)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Fused, in_the_closure),
        (Fused, in_a_hook),
        (Fused, in_a_closure_of_another),
        (Fused, in_another_thread),
        (Outer, in_the_closure),
    ],
)
def test_a_save_inside_of_a_step_copies_at_once(arena_dir, held, caplog, kind, step):
    """That step changes the weights while late copies are held: saved is the moment of the call."""
    state, found = training(kind), []
    first = (lambda: state["optim"].step(int)) if kind is Outer else state["optim"].step
    with checkpointer(arena_dir, state, when_busy="wait") as ckpt:

        def save():
            found.extend([tensors(state), ckpt.save(1)])

        gradients(state)
        first()  # seen since the save before
        step(state["optim"], save)
        wanted, ticket = found
        assert not same(tensors(state), wanted)
        held.open()
        ticket.wait("committed", WAIT_S)
    assert INSIDE in told(caplog)[0]
    assert same(tensors(restored(arena_dir, lambda: training(kind))[1]), wanted)


@pytest.mark.parametrize("step", [in_the_closure, in_a_closure_of_another])
def test_opened_inside_of_a_step(arena_dir, held, step):
    """No hook was there to see that one begin, but for a whole step inside of it."""
    state, found = training(Fused), []

    def save():
        ckpt = checkpointer(arena_dir, state)
        state["optim"].step()
        found.extend([ckpt, tensors(state), ckpt.save(1)])

    gradients(state)
    step(state["optim"], save)
    ckpt, wanted, ticket = found
    assert not same(tensors(state), wanted)
    held.open()
    ticket.wait("committed", WAIT_S)
    ckpt.close()
    assert same(tensors(restored(arena_dir, lambda: training(Fused))[1]), wanted)


def failing(state):
    """Take a step that its closure breaks off."""

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        state["optim"].step(closure)


def test_a_step_that_an_error_ended_is_over(overlap, caplog):
    """Leaves are late again at the save after it, and nothing is said."""
    state = training()
    train(state)
    failing(state)
    assert late(overlap, state) == WEIGHTS | MOMENTS
    train(state)
    assert late(overlap, state) == WEIGHTS | MOMENTS
    assert told(caplog) == []


def test_a_failed_step_of_another_thread_is_over_with_it(overlap):
    """While that thread lives and has not stepped again it may still be in its step."""
    state, other = training(), training()
    go_on = threading.Event()
    failed, stepped = threading.Event(), threading.Event()

    def body():
        failing(other)
        failed.set()
        assert go_on.wait(WAIT_S)
        go_on.clear()
        train(other)
        failing(other)
        stepped.set()
        assert go_on.wait(WAIT_S)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert failed.wait(WAIT_S)
    train(state)
    assert late(overlap, state) == set()
    go_on.set()
    assert stepped.wait(WAIT_S)
    go_on.set()
    thread.join(WAIT_S)
    train(state)
    assert late(overlap, state) == WEIGHTS | MOMENTS


def test_a_step_under_way_in_another_thread(overlap):
    """Nothing is late until it has ended, though the thread goes on."""
    state, other = training(), training()
    inside, go_on, ended, leave = (threading.Event() for _ in range(4))

    def closure():
        inside.set()
        assert go_on.wait(WAIT_S)

    def body():
        other["optim"].step(closure)
        ended.set()
        assert leave.wait(WAIT_S)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert inside.wait(WAIT_S)
    train(state)
    assert late(overlap, state) == set()
    go_on.set()
    assert ended.wait(WAIT_S)
    train(state)
    assert late(overlap, state) == WEIGHTS | MOMENTS
    leave.set()
    thread.join(WAIT_S)


def test_a_step_whose_frame_is_not_torchs(overlap):
    """As when the compiler has made its own of it: under way from one hook to the other."""
    state = training()
    train(state)
    _before_step(state["optim"], (), {})
    assert late(overlap, state) == set()
    failing(state)
    train(state)
    assert late(overlap, state) == set()
    _after_step(state["optim"], (), {})
    train(state)
    assert late(overlap, state) == WEIGHTS | MOMENTS


def around(inner):
    """As one that decays weights before it calls the other; it has all marks of that."""

    @functools.wraps(inner)
    def step(*args, **kwargs):
        return inner(*args, **kwargs)

    return step


def schedule(state):
    """Have a scheduler put its own function around the step of the optimizer."""
    state["sched"] = torch.optim.lr_scheduler.StepLR(state["optim"], 1)


def of_the_class(kind, _state):
    """The step that torch has hooked."""
    kind.step = around(kind.step)


def of_the_class_below_a_scheduler(kind, state):
    """The same, and the scheduler comes after it."""
    kind.step = around(kind.step)
    schedule(state)


def of_the_object(_kind, state):
    """The step of one optimizer."""
    state["optim"].step = around(state["optim"].step)


def of_the_object_below_a_scheduler(kind, state):
    """The same, bound as schedulers want it, and the scheduler comes after it."""
    state["optim"].step = around(kind.step).__get__(state["optim"])
    schedule(state)


def of_the_object_above_a_scheduler(_kind, state):
    """What the scheduler has put there."""
    schedule(state)
    state["optim"].step = around(state["optim"].step)


@pytest.mark.parametrize(
    "patch",
    [
        of_the_class,
        of_the_class_below_a_scheduler,
        of_the_object,
        of_the_object_below_a_scheduler,
        of_the_object_above_a_scheduler,
    ],
)
def test_a_step_with_the_marks_of_torchs_is_not_trusted(overlap, caplog, patch):
    """What it changes first it changes before the hook waits."""
    kind = type("Patched", (torch.optim.SGD,), {"step": torch.optim.SGD.step})
    state = training(kind)
    patch(kind, state)
    for _ in range(2):
        train(state)
        assert late(overlap, state) == set()
    assert "the step of Patched is not torch's" in told(caplog)[0]


def test_a_step_that_torch_hooked_after_it_was_written_is_trusted(overlap):
    """Its own step, around that of the class below, and a scheduler around both: all hooked."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    state = training(Own)
    schedule(state)
    train(state)
    assert late(overlap, state) == WEIGHTS
