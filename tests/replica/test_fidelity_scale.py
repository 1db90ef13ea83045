"""Many tensors, long names, many values: the work grows linearly, and limits are met or named.

Work is counted in calls of functions, Python's and C's, so that no clock decides.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

from replica.errors import StateError
from replica.jsontext import count_nodes
from replica.snapshot import Snapshot
from replica.tensor_kinds import NODES_PER_TENSOR
from tests.replica.snapshot_tools import HEADER, header_of, image_of, load


def calls_of(function):
    """Count the calls that a function makes, C's too."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def there_and_back(state, fresh):
    """Plan with self-check, capture, capture again, restore: what a job does in its life."""
    snapshot = Snapshot(state, random_states=False)
    buffer = np.empty(snapshot.plan(1, self_check=True).capacity_bytes, np.uint8)
    snapshot.capture_into(buffer, HEADER)
    snapshot.capture_into(buffer, HEADER)
    Snapshot(fresh, random_states=False).prepare(buffer).commit()
    return fresh


def tensors(count):
    """Many small tensors of three dtypes, one in ten a view of its neighbour's memory."""
    kinds = [torch.float32, torch.int16, torch.float8_e8m0fnu]
    made = [torch.ones(4).to(kinds[at % 3]) for at in range(count)]
    made = [made[at - 1][:2] if at % 10 == 1 else value for at, value in enumerate(made)]
    return {"box": {f"t{at}": value for at, value in enumerate(made)}}


def names(count):
    """Tensors whose names have 8000 characters and differ in the last ones only."""
    return {"box": {"n" * 7990 + f"{at:010d}": torch.ones(1) for at in range(count)}}


def dicts(count):
    """Many small dicts."""
    return {"box": {"rows": [{"a": at, "b": [at / 7, "x"]} for at in range(count)]}}


def mixed(count):
    """A long list of ints, floats and texts by turns, which no array could hold."""
    return {"box": {"rows": [at / 3 if at % 3 else str(at) for at in range(count)]}}


@pytest.mark.parametrize("make", [tensors, names, dicts, mixed])
def test_the_work_grows_linearly(make):
    """Twice as many take twice the calls, from the first plan to the restore: 100, 200, 400."""
    found = []
    for count in (100, 200, 400):
        state, fresh = make(count), {"box": {}}
        found.append(calls_of(lambda: there_and_back(state, fresh)))  # noqa: B023 - called at once
        assert len(fresh["box"]) == len(state["box"])
    first, second = found[1] - found[0], found[2] - found[1]
    assert second < 2.2 * first, found


def one_long(kind, size):
    """Make one value of a kind that takes about so many bytes."""
    return {
        "text": lambda: "x, \u00e9" * (size // 5),
        "bytes": lambda: bytes(size),
        "bytearray": lambda: bytearray(size),
        "ints": lambda: list(range(size // 8)),
        "floats": lambda: [0.1] * (size // 8),
        "array": lambda: np.zeros(size // 8),
    }[kind]()


@pytest.mark.parametrize("kind", ["text", "bytes", "bytearray", "ints", "floats", "array"])
def test_one_long_value_takes_no_call_per_item(kind, monkeypatch):
    """A value of 1 and of 3 MB, as one of 200 MB would: the calls stay, the image grows alike."""
    monkeypatch.setattr("replica.tree.INLINE_NUMBERS", 50_000)
    monkeypatch.setattr("replica.tree.INLINE_CHARS", 50_000)
    found, sizes = [], []
    for size in (1_000_000, 3_000_000):
        state = {"box": {"v": one_long(kind, size)}}
        found.append(calls_of(lambda: there_and_back(state, {"box": {}})))  # noqa: B023 - at once
        image = image_of(state)
        sizes.append(image.nbytes)
        fresh = {"box": {}}
        load(image, fresh)
        assert bytes(np.array(fresh["box"]["v"])) == bytes(np.array(state["box"]["v"]))
    # Leaves grow in steps, and digests are made in pieces.
    assert found[1] < found[0] + 2000, found
    assert 1.4e6 < sizes[1] - sizes[0] < 2.6e6


def test_names_are_cut_in_the_header_only():
    """Names of 8000 characters come back whole, and the header has 200 characters of each."""
    state = names(50)
    image = image_of(state)
    members = header_of(image)
    assert max(map(len, members)) < 220
    fresh = {"box": {}}
    load(image, fresh)
    assert list(fresh["box"]) == list(state["box"])


LIMITS = {
    "bytes of the header": ("image.MAX_HEADER_BYTES", r"state with \d+ tensors.*join small"),
    "values of the header": ("image.MAX_HEADER_NODES", r"state with \d+ tensors.*join small"),
    "bytes of the tree": ("MAX_TREE_BYTES", r"too large.*state\['rows'\] takes \d+"),
    "values of the tree": ("MAX_NODES", r"too large.*state\['rows'\] takes \d+"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_met_or_named_at_the_save(name, monkeypatch):
    """At every value of a limit a state is refused by the plan, or comes back: none in between.

    Without the self-check: it is the writer itself that keeps to what the reader takes.
    """
    limit, text = LIMITS[name]
    state = {"t": [torch.ones(2) for _ in range(20)], "rows": [["x", 1.5]] * 200}
    tried, taken, refused = 0, 0, 0
    for value in (*range(300, 1500, 150), *range(4000, 8000, 130)):
        with monkeypatch.context() as patch:
            for module in ("tree", "fresh", "image") if "." not in limit else ("",):
                patch.setattr(f"replica.{module}.{limit}".replace("..", "."), value, raising=False)
            try:
                image = captured(state)
            except StateError as error:
                refused += bool(re.search(f"rank 1: .*{text}", str(error)))
                continue
            finally:
                tried += 1
            load(image, {"t": [torch.zeros(2) for _ in range(20)], "rows": []})
            taken += 1
    assert 0 < taken < tried == taken + refused


def test_one_tensor_too_many_is_named_at_once(monkeypatch):
    """More tensors than an image describes: refused while walking, by the key of the first one.

    The bound is no lower than it must be: 15 values of JSON are the least that a tensor takes.
    """
    few = {"t": {str(at): torch.ones(()) for at in range(100)}}
    snapshot = Snapshot(few, random_states=False)
    _, text, _ = snapshot._capture(1)
    assert count_nodes(text) >= NODES_PER_TENSOR * 100
    monkeypatch.setattr("replica.leaves.MAX_TENSORS", 99)
    with pytest.raises(
        StateError, match=r"rank 1: state\['t'\]\['99'\] is a .*, the 100th of this"
    ):
        Snapshot(few, random_states=False).plan(1)


def captured(state):
    """Return an image that no self-check has looked at."""
    snapshot = Snapshot(state, random_states=False)
    buffer = np.zeros(snapshot.plan(1).capacity_bytes, np.uint8)
    return buffer[: snapshot.capture_into(buffer, HEADER)]
