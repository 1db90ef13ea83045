"""A dict that an optimizer's ``state_dict()`` gave is told once, by its key path; no other is."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from replica import copied_optimizers
from replica.snapshot import Snapshot

WORDS = "is what an optimizer's state_dict() gives"


class Trainer:
    """A state object whose own state holds an optimizer's."""

    def __init__(self, optim):
        self.optim = optim

    def state_dict(self):
        """Return what the optimizer says of itself."""
        return {"optim": self.optim.state_dict()}

    def load_state_dict(self, state):
        """Give it back."""
        self.optim.load_state_dict(state["optim"])


@pytest.fixture
def optim():
    """Return an optimizer that has stepped once."""
    model = nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optim.step()
    optim.zero_grad()
    return optim


@pytest.fixture
def told(caplog):
    """Return a function that plans a state as a rank does; the warnings of that."""

    def plan(state, *, rank=0, times=1):
        caplog.clear()
        snapshot = Snapshot(state, random_states=False)
        for _ in range(times):
            snapshot.plan(rank)
        said = [record.getMessage() for record in caplog.records]
        return [message for message in said if WORDS in message]

    return plan


def test_it_is_told_once_with_place_and_advice(optim, told):
    """Of a state that is planned three times: rank, key path, what happens and what to do."""
    (message,) = told({"optim": optim.state_dict()}, rank=3, times=3)
    parts = ("rank 3: state['optim']", "restore() fills it and no optimizer", "load_state_dict()")
    for part in (
        *parts,
        "Put the optimizer itself into the state",
        "fill it anew before each save",
    ):
        assert part in message


def test_it_is_told_wherever_a_user_may_put_it(optim, told):
    """As the state itself, and in dicts, lists and tuples: one warning for each key path."""
    fresh = torch.optim.SGD([torch.zeros(1, requires_grad=True)]).state_dict()
    state = {"a": {"b": [1, (fresh, optim.state_dict())]}, "c": {"epoch": 1, "optim": fresh}}
    places = ["state['c']['optim']", "state['a']['b'][1][0]", "state['a']['b'][1][1]"]
    assert [message.split(" is ")[0] for message in told(state)] == [
        f"rank 0: {place}" for place in places
    ]
    assert told(optim.state_dict())[0].startswith("rank 0: state is what")


def test_what_is_no_such_dict_is_not_told(optim, told):
    """The optimizer, an object that keeps one, a module's dict, and dicts that are nearly one."""
    group = {"params": [0], "lr": 0.1}
    state = {
        "optim": optim,
        "trainer": Trainer(optim),
        "model": nn.Linear(2, 2).state_dict(),
        "near": [
            {"param_groups": [group]},
            {"state": {}},
            {"state": {}, "param_groups": []},
            {"state": {}, "param_groups": [{"lr": 0.1}]},
            {"state": {}, "param_groups": {"params": [0]}},
            {"state": {}, "param_groups": [group, 1]},
        ],
    }
    assert told(state) == []


def test_tensors_cost_nothing():
    """Of 2,000 and of 20,000 tensors as many are looked at: calls are counted, no clock."""

    def calls(count):
        seen = 0

        def look(frame, event, _argument):
            nonlocal seen
            seen += event == "call" and frame.f_code.co_filename == copied_optimizers.__file__

        tensors = list(torch.zeros(count).unbind())
        state = {"many": tensors, "named": {str(i): one for i, one in enumerate(tensors)}}
        sys.setprofile(look)
        try:
            copied_optimizers.CopiedOptimizers().check({**state, "deep": [[tensors]]}, 0)
        finally:
            sys.setprofile(None)
        return seen

    assert calls(2_000) == calls(20_000) < 100
