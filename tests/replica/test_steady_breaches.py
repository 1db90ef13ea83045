"""Changes between two saves that a kept recipe once took for none, or could not survive."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.fx.experimental.proxy_tensor import make_fx

from replica.errors import StateError
from replica.snapshot import Snapshot
from tests.replica.changing_states import nested
from tests.replica.snapshot_tools import HEADER
from tests.replica.test_steady import captured, walked


def used(state):
    """Return a snapshot that reads this state by its recipe."""
    snapshot = Snapshot(state, random_states=True)
    for _ in range(2):
        assert captured(snapshot) == walked(state)
    return snapshot


def test_a_nested_tensor_is_refused():
    """In the place of a tensor; torch's guards would end the process at its strides."""
    state = {"box": {"a": torch.ones(3), "b": torch.ones(2)}}
    snapshot = used(state)
    state["box"]["a"] = nested()
    assert "state['box']['a']" in captured(snapshot)


def test_a_tensor_of_a_transform_is_refused():
    """It has no memory of its own: the error names its place, as at the first save."""
    state = {"box": {"a": torch.ones(3), "b": torch.ones(2)}}
    snapshot = used(state)
    torch.func.vmap(lambda row: state["box"].__setitem__("a", row) or row)(torch.ones(2, 3))
    assert "state['box']['a']" in captured(snapshot)


@pytest.mark.parametrize(
    "inside",
    [
        lambda save: torch.func.functionalize(lambda x: (save(), x)[1])(torch.ones(3)),
        lambda save: make_fx(lambda x: (save(), x + 1)[1])(torch.ones(3)),
        lambda save: torch.func.vmap(lambda x: (save(), x)[1])(torch.ones(2, 3)),
    ],
)
def test_no_save_inside_of_a_transform(inside):
    """There a copy may be made later or never; the saves after it are whole."""
    state = {"box": {"a": torch.arange(16.0).view(4, 4).t(), "b": torch.ones(2)}}
    snapshot = used(state)
    found = []
    inside(lambda: found.append(captured(snapshot)))
    assert "save outside of it" in found[0]
    assert captured(snapshot) == walked(state)


@pytest.fixture
def sharded():
    """Return a state of two DTensors with a spec each."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def one():
        return DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()], run_check=False)

    yield {"box": {"a": one(), "b": one()}}
    dist.destroy_process_group()


@pytest.mark.parametrize("copied", ["a", "b"])
def test_a_spec_changed_in_place_beside_a_new_one(sharded, copied):
    """An equal copy of a spec does not hide that another, or its original, was changed."""
    snapshot = used(sharded)
    sharded["box"]["a"]._spec.placements = (Partial(),)
    sharded["box"][copied]._spec = copy.copy(sharded["box"][copied]._spec)
    assert captured(snapshot) == walked(sharded)
    assert captured(snapshot) == walked(sharded)


class Rebinds:
    """An object that puts another tensor beside itself when it is asked for its state."""

    def __init__(self, box):
        self._box = box

    def state_dict(self):
        """Say nothing much."""
        self._box["t"] = self._box["t"] + 1
        return {"n": 1}

    def load_state_dict(self, state):
        """Take it back."""


def test_an_object_changes_what_lies_beside_it():
    """The image has the tensor that stands there after the save, whoever read it."""
    box = {}
    box |= {"o": Rebinds(box), "t": torch.zeros(3)}
    snapshot = Snapshot({"box": box}, random_states=False)
    buffer = np.zeros(1 << 16, np.uint8)
    for _ in range(3):
        snapshot.capture_into(buffer, HEADER)
        live = {"box": {"o": Rebinds({"t": torch.zeros(1)}), "t": torch.full((3,), -1.0)}}
        Snapshot(live, random_states=False).prepare(buffer).commit()
        assert torch.equal(live["box"]["t"], box["t"])


def test_a_parameter_twice_in_a_group():
    """Torch counts it by its last place."""
    model = nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    state = {"model": model, "optim": optim}
    snapshot = used(state)
    optim.param_groups[0]["params"].append(model.weight)
    assert captured(snapshot) == walked(state)


class Hides(nn.Linear):
    """A layer whose class has something to say about its attributes."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_parameters", property(lambda self: {"other": vars(self)["_parameters"]["weight"]})),
        ("__getattribute__", lambda *both: object.__getattribute__(*both)),  # noqa: PLW0108
    ],
)
def test_a_class_comes_between_a_module_and_its_attributes(name, value, monkeypatch):
    """From then on the module is asked, and not looked at."""
    state = {"model": nn.Sequential(Hides(2, 2), nn.Linear(2, 2))}
    snapshot = used(state)
    monkeypatch.setattr(Hides, name, value, raising=False)
    assert captured(snapshot) == walked(state)


class Backwards(dict):
    """A dict that lists itself in another order than its values."""

    def items(self):
        """The last first."""
        return list(super().items())[::-1]


def test_a_modules_box_of_another_kind():
    """It is asked for its items, as torch does."""
    state = {"model": nn.Linear(2, 2)}
    snapshot = used(state)
    vars(state["model"])["_parameters"] = Backwards(state["model"]._parameters)
    assert captured(snapshot) == walked(state)


def test_errors_of_a_save_in_a_transform_name_it():
    """The sentence says inside of what, and what to do."""
    snapshot = Snapshot({"x": torch.ones(2)}, random_states=False)
    found = []

    def save(row):
        try:
            snapshot.plan(3)
        except StateError as error:
            found.append(str(error))
        return row

    torch.func.vmap(save)(torch.ones(2, 3))
    assert found[0].startswith("rank 3: the state cannot be read inside of a transform of torch")
