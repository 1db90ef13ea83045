"""Before the first save what was captured is read back: any difference is an error by its key."""

from __future__ import annotations

import collections
import copy
import datetime as dt
import math
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn

import replica
from replica import scalars, self_check, tables, tree
from replica.errors import StateError
from replica.group import MemoryGroup
from replica.snapshot import Snapshot
from tests.replica.inprocess import outcomes


def state():
    """Build a state with a value of each kind that the tests break."""
    model = nn.Linear(2, 3)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    base = torch.arange(8.0)
    return {
        "model": model,
        "optim": optim,
        "views": [base[:5], base[3:]],
        "zone": dt.timezone(dt.timedelta(hours=1), "here"),
        "nan": math.nan,
        "minus nought": [-0.0],
        "text": "\ud800\udc00",
        "set": {"a"},
        "keys": {1: "a", (2, "b"): [True]},
        "deque": collections.deque([1], maxlen=3),
        "factory": collections.defaultdict(list, a=1),
        "decimal": Decimal("1.0"),
        "array": np.arange(4.0),
        "scalar": np.float32(1),
        "raw": bytes(5000),
        "slice": slice(1),
    }


def test_a_good_state_passes_and_is_left_alone():
    """Nothing of the state changes by the check, and no object is asked more than once."""
    asked = []

    class Loader:
        def state_dict(self):
            asked.append(1)
            return {"position": 3}

        def load_state_dict(self, state):
            raise AssertionError(state)

    live = state() | {"loader": Loader()}
    before = copy.deepcopy(live["optim"].state_dict()), repr({**live, "loader": None})
    drawn = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with_check = Snapshot(live, random_states=True).plan(0, self_check=True)
    assert len(asked) == 1
    assert (repr(live["optim"].state_dict()), repr({**live, "loader": None})) == (
        repr(before[0]),
        before[1],
    )
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (np.random.get_state()[1] == drawn[1]).all()  # noqa: NPY002
    assert with_check == Snapshot(live, random_states=True).plan(0)


SCALARS = {
    "zone": (dt.timezone, lambda v: ["timezone", scalars._timedelta(v.utcoffset(None))]),
    "nan": (float, lambda _: ["float", "7ff8000000000001"]),
    "minus nought": (float, lambda v: v + 0.0 if math.isfinite(v) else scalars.float_node(v)),
    "decimal": (Decimal, lambda _: ["decimal", "1.00"]),
    "keys": (bool, int),
}
ENCODERS = {
    "text": (str, lambda _, v: v),
    "set": (set, lambda _, v: ["frozenset", *v]),
    "deque": (collections.deque, lambda _, v: ["deque", None, *v]),
    "factory": (collections.defaultdict, lambda _, __: ["defaultdict", "set", "a", 1]),
    "array": (np.ndarray, lambda e, v: ["leaf", e.leaves.array(v + 1)]),
    "raw": (bytes, lambda _, v: ["bytes", "A" * 4] if len(v) > 100 else tree._encode_bytes(_, v)),
    "slice": (slice, lambda *_: ["slice", 1, None, None]),
    "keys": (dict, lambda e, v: _swapped(tree._encode_pairs(e, v))),
}


def _swapped(node):
    """Give a mapping its entries in another order."""
    return [node[0], *node[3:], *node[1:3]] if 1 in node else node


@pytest.mark.parametrize("name", SCALARS)
def test_a_broken_writer_of_values_is_found(name, monkeypatch):
    """The node of one type made wrong, as a mistake here would: the error names that key."""
    kind, broken = SCALARS[name]
    monkeypatch.setitem(scalars.SCALARS, kind, broken)
    check_found(name)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_broken_writer_of_containers_is_found(name, monkeypatch):
    """The same for containers, texts and leaves."""
    kind, broken = ENCODERS[name]
    monkeypatch.setitem(tree._ENCODERS, kind, broken)
    check_found(name)


def check_found(name):
    """The self-check of a state that holds only one of the values fails, and names it and why."""
    live = {name: state()[name]}
    Snapshot(live, random_states=False).plan(1)
    with pytest.raises(StateError) as caught:
        Snapshot(live, random_states=False).plan(1, self_check=True)
    assert re.search(
        rf"rank 1: the self-check before .*state\['{name}'\].* is a ", str(caught.value)
    )


@pytest.mark.parametrize(
    ("place", "value"),
    [(2, "float64"), (3, [6]), (3, [2, 3]), (4, [1, 3]), (5, 4), (7, "cuda")],
)
def test_a_broken_row_of_a_tensor_is_found(place, value, monkeypatch):
    """Dtype, shape, strides, offset or device of one row made wrong: named, or refused whole."""
    made = tables._tensor_row

    def broken(tensor, *facts):
        row = made(tensor, *facts)
        return [*row[:place], value, *row[place + 1 :]] if tensor.shape == (3, 2) else row

    monkeypatch.setattr(tables, "_tensor_row", broken)
    with pytest.raises(StateError, match="rank 1: the self-check"):
        Snapshot({"t": torch.rand(3, 2)}, random_states=False).plan(1, self_check=True)


def test_views_at_another_place_are_found(monkeypatch):
    """Two views of one memory whose distance is written wrong: the second one is named."""
    made = tables._tensor_row

    def broken(*facts):
        row = made(*facts)
        return [*row[:5], row[5] - 4, *row[6:]] if row[5] > 0 else row

    monkeypatch.setattr(tables, "_tensor_row", broken)
    live = {"views": state()["views"]}
    with pytest.raises(StateError, match=r"\['views'\]\[1\] is a torch.Tensor of place in memory"):
        Snapshot(live, random_states=False).plan(1, self_check=True)


def test_two_tensors_that_change_places_are_found(monkeypatch):
    """The leaves of two alike tensors swapped in the tree: nothing but their identity differs."""
    made = tree.node_text
    monkeypatch.setattr(tree, "node_text", lambda node: made(node).translate({48: 49, 49: 48}))
    live = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(StateError, match=r"state\['a'\] is a torch.Tensor and came back as anoth"):
        Snapshot(live, random_states=False).plan(1, self_check=True)


@pytest.mark.parametrize(
    "limit", ["tree_reader.MAX_DEPTH", "fresh.MAX_NODES", "fresh.MAX_TREE_BYTES", "image.MAX_DIMS"]
)
def test_what_the_reader_would_refuse_is_found(limit, monkeypatch):
    """A reader that takes less than the writer gives: its limit lowered for the test."""
    monkeypatch.setattr(f"replica.{limit}", -20 if "DEPTH" in limit else 1)
    live = state() | {"deep": [[[[1.5]]]], "cube": torch.ones(1, 1, 1)}
    with pytest.raises(StateError, match=r"rank 2: "):
        Snapshot(live, random_states=False).plan(2, self_check=True)


def test_what_could_not_be_loaded_is_found(monkeypatch):
    """The second pass plans a restore: an optimizer state that its own restore refuses is named."""
    model = nn.Linear(2, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model.weight] = {"momentum_buffer": torch.ones(7)}
    with pytest.raises(StateError, match=r"could not read the state back: .*\['optim'\]"):
        Snapshot({"optim": optim}, random_states=False).plan(0, self_check=True)


def test_a_difference_on_one_rank_is_told_on_all(arena_dir, monkeypatch):
    """Only rank 1 has a value whose writer is broken: both ranks raise, and the next save works."""
    monkeypatch.setitem(scalars.SCALARS, Decimal, lambda _: ["decimal", "2"])
    found = saves(arena_dir, {})
    for error in found:
        assert type(error) is StateError
        assert re.search(r"rank 1: .*state\['d'\] is a decimal.Decimal", str(error))


def test_the_check_can_be_left_out(arena_dir, monkeypatch):
    """With self_check=False the same save is committed: the writer's word is taken."""
    monkeypatch.setitem(scalars.SCALARS, Decimal, lambda _: ["decimal", "2"])
    monkeypatch.setattr(self_check, "check_readable", None)
    assert saves(arena_dir, {"self_check": False}) == ["committed", "committed"]


def saves(arena_dir, options):
    """Save once on two ranks as threads; only rank 1's state has a Decimal."""
    groups = list(MemoryGroup.make(2))

    def run(rank):
        live = {"w": torch.ones(3), **({"d": Decimal(1)} if rank else {})}
        made = {"job": "job", "arena_dir": str(arena_dir), "node_id": "ab"[rank], **options}
        with replica.Checkpointer(live, group=groups[rank], redundancy="copies:1", **made) as ckpt:
            try:
                ckpt.save(1).wait("committed", 30.0)
            except StateError as error:
                live.pop("d", None)
                ckpt.save(2).wait("committed", 30.0)
                return error
            return "committed"

    return outcomes(2, run)
