"""What a plan was made for is told from anything else, with torch's guards and without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from replica import facts, torch_private
from replica.facts import Facts
from replica.leaves import LeafList
from replica.torch_private import likeness


def leaves_of(values):
    """Return the leaves of a walk over these tensors."""
    leaves = LeafList()
    for value in values:
        leaves.tensor(value)
    return leaves


def many(count=700):
    """Return more tensors than are compared at a time."""
    return [torch.zeros(index % 5 + 1, 3) for index in range(count)]


CHANGES = {
    "size": lambda one: torch.zeros(one.shape[0], 4),
    "strides": lambda one: torch.zeros(3, one.shape[0]).t(),
    "dtype": lambda one: one.to(torch.int32),
    "negative": torch._neg_view,
    "rank": lambda one: one.reshape(-1),
}


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 256, 699])
def test_one_of_many_is_another(change, at, guarded, monkeypatch):
    """A difference in one place is seen, whatever block it lies in."""
    if not guarded:
        monkeypatch.setattr(facts, "likeness", lambda _: None)
    values = many()
    known = Facts(leaves_of(values))
    assert known.hold(leaves_of(values)) == [value.data_ptr() for value in values]
    values[at] = CHANGES[change](torch.zeros(4, 3) if change == "strides" else values[at])
    assert known.hold(leaves_of(values)) is None


def test_what_guards_refuse_is_looked_at(monkeypatch):
    """Frozen parameters, and a save in inference mode, are alike although the guards say no."""
    values = [nn.Parameter(value) for value in many(10)]
    known = Facts(leaves_of(values))
    values[3].requires_grad_(False)
    assert known.hold(leaves_of(values)) is not None
    with torch.inference_mode():
        assert known.hold(leaves_of(values)) is not None
    monkeypatch.setattr(facts, "_same", lambda *_: False)
    assert known.hold(leaves_of(values)) is None


def test_guards_are_there():
    """With the torch that is installed the short way is taken."""
    check = likeness(many(3))
    assert check is not None
    assert check(*many(3))
    assert not check(*many(3)[::-1])


class Careless:
    """Guards that have forgotten a question."""

    def __init__(self, *values, dynamic_dims_sizes, dynamic_dims_strides):
        strides = [[None] * len(one) for one in dynamic_dims_strides]
        self.check = torch._C._dynamo.guards.TensorGuards(
            *values, dynamic_dims_sizes=dynamic_dims_sizes, dynamic_dims_strides=strides
        ).check


class Other:
    """Guards that want to be made in another way."""

    def __init__(self, *_):
        self.check = None


@pytest.mark.parametrize("guards", [Careless, Other, None])
def test_guards_that_cannot_be_trusted_are_not_used(guards, monkeypatch):
    """Another version of torch may have them otherwise, or not at all."""
    modules = torch_private.torch._C._dynamo
    monkeypatch.setattr(modules.guards, "TensorGuards", guards)
    assert likeness(many(3)) is None
