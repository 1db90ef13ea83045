"""A save between backward and step is told once; no other save is taken for one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from replica import pending
from replica.pending import PendingGradients
from tests.replica.inprocess import Cluster


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Begin as a fresh process does; the hook of this one stays."""
    monkeypatch.setattr(pending, "_said", pending._said - {"pending"})


@pytest.fixture
def warned(caplog):
    """Return a function that says how often it was warned so far."""
    return lambda: sum("gradients wait" in record.getMessage() for record in caplog.records)


def build(**options):
    """Make a model, its optimizer, and what watches them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    return model, optim, PendingGradients({"model": model, "deep": [{"optim": optim}]})


def backward(model, times=1):
    """Add gradients."""
    for _ in range(times):
        model(torch.ones(2, 3)).sum().backward()


def test_a_save_in_the_middle_of_an_accumulation_is_told_once(warned, caplog):
    """After two of three backward passes: one warning for many saves, with place and advice."""
    model, optim, watched = build()
    backward(model, 3)
    optim.step()
    optim.zero_grad()
    watched.check(1, 0)
    assert warned() == 0
    backward(model)
    watched.check(2, 1)
    backward(model)
    watched.check(3, 1)
    assert warned() == 1
    for part in ("rank 1", "step 2", "state['deep']", "Gradients are not carried", "after optimiz"):
        assert part in caplog.text


@pytest.mark.parametrize("times", [1, 2])
def test_before_the_first_step(warned, times):
    """An optimizer that has not stepped yet may wait for more gradients as well."""
    model, _, watched = build()
    backward(model, times)
    watched.check(1, 0)
    assert warned() == 1


def test_gradients_that_a_step_has_used_are_not_meant(warned):
    """Whoever saves after the step and clears before the next backward is not told."""
    model, optim, watched = build()
    for step in range(4):
        optim.zero_grad()
        backward(model, 2)
        optim.step()
        watched.check(step, 0)
    assert warned() == 0
    backward(model)
    watched.check(9, 0)
    assert warned() == 1


def test_gradients_set_to_zero_are_not_meant(warned):
    """zero_grad(set_to_none=False) writes to them as backward does."""
    model, optim, watched = build(momentum=0.9)
    for step in range(3):
        backward(model)
        optim.step()
        optim.zero_grad(set_to_none=False)
        watched.check(step, 0)
    assert warned() == 0
    backward(model)
    watched.check(9, 0)
    assert warned() == 1


def test_a_step_that_a_scaler_left_out_is_not_meant(warned):
    """After an overflow GradScaler does not call the optimizer: those gradients are of no use."""
    model, optim, watched = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf")):
        optim.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
        scaler.step(optim)
        scaler.update()
        watched.check(1, 0)
    assert warned() == 0


def test_gradients_from_before_are_not_meant(warned):
    """What stood there when the Checkpointer was made may have been used long ago."""
    model, optim, _ = build(momentum=0.9)
    backward(model)
    watched = PendingGradients({"optim": torch.optim.SGD(model.parameters(), lr=0.1)})
    watched.check(1, 0)
    assert warned() == 0
    assert not optim.state


def test_a_compiled_step_is_not_meant(warned, monkeypatch):
    """The hook does nothing where a compiler reads it: such optimizers are left alone."""
    model, optim, watched = build(momentum=0.9)
    backward(model)
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        optim.step()
    watched.check(1, 0)
    backward(model)
    watched.check(2, 0)
    assert warned() == 0
    assert optim.state


def test_sparse_gradients_and_new_optimizers(warned):
    """A table's sparse gradient counts; an optimizer that came later is found when all plan."""
    table = nn.Embedding(5, 2, sparse=True)
    state = {}
    watched = PendingGradients(state)
    state["optim"] = torch.optim.SparseAdam(table.parameters())
    watched.watch()
    table(torch.tensor([1])).sum().backward()
    watched.check(1, 0)
    assert warned() == 1


def test_few_parameters_are_looked_at():
    """Of an optimizer with a thousand parameters no more than a handful is touched at a save."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(1000)]
    optim = torch.optim.SGD([{"params": params[:990]}, {"params": params[990:]}], lr=0.1)
    for param in params:
        param.grad = torch.ones(1)
    assert len(list(pending._gradients(optim))) <= 2 * pending._SAMPLES


def test_it_is_a_warning_of_the_save(arena_dir, warned, caplog):
    """Through a Checkpointer: the committed save is whole, and the log has the one line."""

    def body(me):
        model = nn.Linear(2, 2)
        me.state["model"], me.state["optim"] = model, torch.optim.SGD(model.parameters(), lr=1.0)
        for step in (1, 2, 3):
            me.ckpt.save(step, when_busy="wait").wait("committed", 30)
            assert warned() == int(step > 1)
            model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        return me.ckpt.restore()

    assert Cluster(arena_dir, ["a"], "none", counts=[0]).run(body) == [3]
    assert warned() == 1
    assert all(
        record.levelno == logging.WARNING
        for record in caplog.records
        if "gradients wait" in record.getMessage()
    )
