"""Which leaves may be late: each reason why one may not, and the one line that says so."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from replica.overlap import Overlap
from replica.snapshot import Snapshot
from tests.replica.overlap_tools import MOMENTS, WEIGHTS, WIDTH, Net, late, told, train, training
from tests.replica.snapshot_tools import HEADER


@pytest.fixture
def overlap():
    """Watch optimizers."""
    one = Overlap(rank=0, timeout_s=20.0, check=True)
    yield one
    one.close(0.0)


def test_weights_and_moments_are_late_and_small_ones_are_not(overlap, caplog):
    """Of a plain training run all large tensors but the buffer, without a word in the log."""
    state = training()
    train(state)
    assert late(overlap, state) == WEIGHTS | MOMENTS
    assert told(caplog) == []


def test_a_scheduler_changes_nothing(overlap):
    """It wraps the step of its optimizer, which is still hooked."""
    state = training()
    state["sched"] = torch.optim.lr_scheduler.StepLR(state["optim"], 1)
    train(state)
    state["sched"].step()
    assert late(overlap, state) == WEIGHTS | MOMENTS


def test_an_optimizer_in_a_container_is_found(overlap):
    """Lists and dicts of optimizers are looked through."""
    state = training()
    nested = {"model": state["model"], "optims": [{"first": state["optim"]}]}
    train(state)
    assert late(overlap, nested) == WEIGHTS | {
        name.replace("optim.", "optims.0.first.") for name in MOMENTS
    }


def test_tied_weights_are_late_together(overlap):
    """One parameter under two names, copied once."""
    state = training()
    state["model"].two.weight = state["model"].one.weight
    state["optim"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    train(state)
    assert late(overlap, state) == {"model.one.weight"}


class OutOfModule(Net):
    """A weight of this module is also kept as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("same", self.one.weight.detach())


def of_a_buffer():
    """A buffer that is a weight."""
    state = training()
    state["model"] = OutOfModule()
    state["optim"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    return state


def of_a_view():
    """An average that is a view of some rows of a weight."""
    state = training(torch.optim.SGD)
    state["average"] = state["model"].one.weight.detach()[3:50]
    return state


def of_an_array():
    """A numpy array in the state, of which a weight is made."""
    state = training(torch.optim.SGD)
    state["array"] = np.ones((WIDTH, WIDTH), np.float32)
    state["model"].one.weight.data = torch.from_numpy(state["array"])
    return state


def of_a_frozen_layer():
    """A weight that needs no gradient: a moving average by hand, say."""
    state = training(torch.optim.SGD)
    state["model"].one.weight.requires_grad_(False)
    return state


def of_another_optimizer():
    """A weight whose optimizer is not in the state."""
    state = training()
    state["optim"] = torch.optim.SGD(state["model"].two.parameters(), lr=0.1)
    return state


def of_no_module():
    """A weight that is in the state without its module."""
    state = training(torch.optim.SGD)
    model = state["model"]
    state["weights"] = [model.one.weight]
    state["model"] = model.two
    state["whole"] = {}
    return state


class Embedding(nn.Module):
    """An embedding whose forward brings rows back to norm 1, before a layer."""

    def __init__(self):
        super().__init__()
        self.one = nn.Embedding(WIDTH, WIDTH, max_norm=1.0)
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Look up as many rows as there are."""
        return self.two(self.one(torch.arange(len(x))))


def of_an_embedding_with_a_norm():
    """Forward changes it."""
    model = Embedding()
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1), "step": 0}


def of_a_hooked_gradient():
    """Something is called behind the gradient of a weight."""
    state = training(torch.optim.SGD)
    state["model"].one.weight.register_post_accumulate_grad_hook(lambda _: None)
    return state


def of_an_optimizer_in_backward():
    """Torch's own way to step in backward."""
    state = training(torch.optim.SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a module beside it
        from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: PLC0415
    _apply_optimizer_in_backward(torch.optim.SGD, [state["model"].one.weight], {"lr": 0.1})
    return state


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (of_a_buffer, ""),
        (of_a_view, ""),
        (of_an_array, "an array in the state shares its memory"),
        (of_a_frozen_layer, "it is frozen"),
        (of_another_optimizer, "it is of no optimizer in the state"),
        (of_an_embedding_with_a_norm, "its max_norm changes it in forward"),
        (of_a_hooked_gradient, "a hook on its gradient may step in backward"),
        (of_an_optimizer_in_backward, "a hook on its gradient may step in backward"),
    ],
)
def test_one_weight_is_copied_at_once(overlap, caplog, make, why):
    """The first weight is not late, the second is; the log says once how many bytes, and why."""
    state = make()
    for _ in range(3):
        train(state)
        assert late(overlap, state) == {"model.two.weight"}
    size = f"{WIDTH * WIDTH * 4} bytes"
    said = f"save() copies the parameter model.one.weight itself: {size}, because {why}"
    assert told(caplog) == ([f"overlap=True, but {said}"] if why else [])


def test_a_weight_without_its_module_is_copied_at_once(overlap, caplog):
    """Whether its forward changes it nobody here can know."""
    state = training(torch.optim.SGD)
    train(state)
    plain = {"weights": list(state["model"].parameters()), "optim": state["optim"]}
    assert late(overlap, plain) == set()
    assert "copies parameters itself" in told(caplog)[0]
    assert "it is of no module in the state" in told(caplog)[0]


class Foreign:
    """No torch optimizer, though it looks like one."""

    def __init__(self, params, lr):
        self.param_groups = [{"params": list(params), "lr": lr}]

    def zero_grad(self):
        """Forget gradients."""
        for param in self.param_groups[0]["params"]:
            param.grad = None

    def step(self):
        """Descend."""
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(0.1 * param.grad)

    def state_dict(self):
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state):
        """Nothing is loaded."""


class ScheduleFree(torch.optim.SGD):
    """Like the kind that swaps weights between training and evaluation."""

    def eval(self):
        """Swap."""


class Sharpness(torch.optim.SGD):
    """Like the kind that climbs before it descends."""

    def first_step(self):
        """Climb."""


class Bare(torch.optim.Optimizer):
    """A wrapper that never called its base, so that torch has not hooked its step."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr=lr)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = {}

    def __getattr__(self, name):
        """Whatever torch keeps in an optimizer."""
        return getattr(self.inner, name)

    def step(self):
        """Do as the inner one does."""
        self.inner.step()

    def zero_grad(self):
        """Do as the inner one does."""
        self.inner.zero_grad()

    def state_dict(self):
        """Do as the inner one does."""
        return self.inner.state_dict()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Foreign, "Foreign is no torch.optim.Optimizer"),
        (ScheduleFree, "ScheduleFree has eval(), which may change parameters"),
        (Sharpness, "Sharpness has first_step(), which may change parameters"),
        (Bare, "the step of Bare is not torch's"),
    ],
)
def test_an_optimizer_that_hooks_do_not_cover_is_copied_at_once(overlap, caplog, kind, why):
    """Nothing that it owns is late; one line says why, however often it is saved."""
    state = training(kind)
    for _ in range(3):
        train(state)
        assert late(overlap, state) == set()
    assert len(told(caplog)) == 1
    assert f"bytes, each because {why}" in told(caplog)[0]
    assert "2 parameters, model.one.weight the first of them, itself: " in told(caplog)[0]


def test_a_replaced_step_is_not_trusted(overlap, caplog):
    """Something of the user's is called instead, and may change what it likes first."""
    state = training(torch.optim.SGD)
    real = state["optim"].step
    state["optim"].step = real
    train(state)
    assert late(overlap, state) == set()
    assert "the step of SGD is not torch's" in told(caplog)[0]


def test_steps_that_the_hook_does_not_see_are_not_trusted(overlap, caplog):
    """As when a CUDA graph is replayed: from the save on that was made without a step before it."""
    state = training(torch.optim.SGD)
    train(state)
    assert late(overlap, state) == WEIGHTS
    with torch.no_grad():
        state["model"].one.weight.add_(1)  # what the graph does
    assert late(overlap, state) == set()
    assert "no step was seen of SGD since the save before" in told(caplog)[0]
    train(state)
    assert late(overlap, state) == WEIGHTS


def test_one_bad_owner_is_enough(overlap):
    """A weight that two optimizers share is late only if both are hooked."""
    state = training(torch.optim.SGD)
    state["other"] = Foreign([state["model"].one.weight], 0.1)
    train(state)
    assert late(overlap, state) == {"model.two.weight"}


def test_a_parameter_that_its_optimizer_gave_away(overlap):
    """Another takes its place in the group, which stays as large: nobody's step waits for it."""
    model = nn.Module()
    model.p, model.q = (nn.Parameter(torch.ones(100, 1000)) for _ in range(2))
    optim = torch.optim.SGD([model.p], lr=0.1)
    snapshot = Snapshot({"model": model, "optim": optim}, random_states=False)
    snapshot.overlap = overlap
    buffer = np.zeros(1 << 21, np.uint8)
    found = []
    for param in (model.p, model.p, model.q):
        optim.param_groups[0]["params"][0] = param
        param.grad = torch.ones_like(param)
        optim.step()
        captured = snapshot.begin_capture(buffer, HEADER)
        found += [tensor.name for tensor in captured._late._tensors]
        captured.start(lambda: None)
        captured.finish(20.0)
    assert found == ["model.p", "model.p", "model.q"]


def test_what_changes_between_saves_is_noticed(overlap):
    """Moments that appear, a parameter added, a hook, an optimizer replaced: judged anew."""
    state = training(torch.optim.SGD, momentum=0.9)
    model = state["model"]
    state["optim"] = torch.optim.SGD([model.one.weight], lr=0.1)
    train(state)
    assert late(overlap, state) == {"model.one.weight"}
    state["optim"].add_param_group({"params": [model.two.weight], "momentum": 0.9})
    train(state)
    kept = "optim.state.1.momentum_buffer"
    assert late(overlap, state) == WEIGHTS | {kept}
    handle = model.two.weight.register_post_accumulate_grad_hook(lambda _: None)
    train(state)
    assert late(overlap, state) == {"model.one.weight"}
    handle.remove()
    train(state)
    assert late(overlap, state) == WEIGHTS | {kept}
    state["optim"] = torch.optim.SGD([model.two.weight], lr=0.1)
    train(state)
    assert late(overlap, state) == {"model.two.weight"}


def test_a_large_state_is_judged_without_a_leak(overlap):
    """A moment that was replaced is not kept alive by what was decided about it."""
    state = training()
    train(state)
    late(overlap, state)
    old = torch.utils.weak.WeakTensorKeyDictionary()
    old[state["optim"].state[state["model"].one.weight]["exp_avg"]] = 1
    state["optim"].load_state_dict(state["optim"].state_dict())
    state["optim"].state.clear()
    assert len(old) == 0
