"""A run that is saved behind its forward and backward is the run that is never saved."""

from __future__ import annotations

import pytest
import torch

from tests.replica.overlap_tools import WAIT_S, checkpointer, same, tensors, train, training
from tests.replica.pool import all_say_ok, serve_store

WORLD = 2
STEPS = 8


def end_of(state):
    """Everything that a run ends with."""
    grads = {
        f"grad.{name}": param.grad.clone() for name, param in state["model"].named_parameters()
    }
    return tensors(state) | grads | {"random": torch.get_rng_state()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_three_runs_are_the_same_bit_for_bit(arena_dir, kind):
    """Never saved, saved at every step, and that one ended in the middle and restored."""
    runs = []
    for name in ("never", "often", "killed"):
        state = training(kind)
        if name == "never":
            train(state, STEPS)
        else:
            with checkpointer(arena_dir, state, job=name, overlap_check=True) as ckpt:
                for step in range(1, STEPS + 1):
                    train(state)
                    ckpt.save(step, when_busy="wait")
                    if (name, step) == ("killed", 5):
                        break
            if name == "killed":
                state = training(kind)
                with checkpointer(arena_dir, state, job=name) as ckpt:
                    assert ckpt.restore() == 5
                    train(state, STEPS - 5)
        torch.manual_seed(state["step"])
        state["model"](torch.randn(4, 192)).square().mean().backward()
        runs.append(end_of(state))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def test_gradients_that_accumulate_over_saves(arena_dir):
    """Saves between the backwards of one step: they are right, and the sum of gradients is too."""
    runs = []
    for saved in (False, True):
        state = training(torch.optim.SGD)
        with checkpointer(arena_dir, state, overlap_check=True, when_busy="wait") as ckpt:
            for step in range(1, 9):
                torch.manual_seed(step)
                state["model"](torch.randn(4, 192)).square().mean().backward()
                if step % 3 == 0:
                    state["optim"].step()
                    state["optim"].zero_grad()
                if saved:
                    ckpt.save(step).wait("held", WAIT_S)
        runs.append(end_of(state))
    assert same(*runs)


@pytest.mark.real
def test_a_background_process_waits_for_the_late_copy(arena_dir):
    """The trainer copies, the process digests and commits: what is restored is the moment's."""
    state = training()
    options = {"background": "process", "overlap_check": True, "timeout_s": 60.0}
    with checkpointer(arena_dir, state, **options) as ckpt:
        train(state)
        for step in (1, 2, 3):
            wanted = tensors(state)
            ticket = ckpt.save(step, when_busy="wait")
            assert ckpt._snapshot.overlap._current.nbytes > 3 * 192 * 192 * 4
            train(state)
        ticket.wait("committed", 60.0)
        assert ckpt.restore() == 3
        assert same(tensors(state), wanted)


@pytest.mark.real
def test_fsdp2_and_a_compiled_step(tmp_path, arena_dir):
    """Two gloo processes: sharded parameters are late, a compiled step's are not."""
    store = serve_store()
    all_say_ok("tests.replica.overlap_worker", WORLD, store.port, arena_dir, cwd=tmp_path)
