"""Saves and restores between real processes over gloo: what is lost comes back, bit for bit."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.real

LAYOUTS = [
    # redundancy, nodes by rank, nodes lost, nodes by rank afterwards
    pytest.param("copies:1", "ab", "b", "ca", id="copies of two nodes, one lost"),
    pytest.param("copies:1", "aabb", "a", "bbcc", id="two ranks per node, a node lost"),
    pytest.param("auto", "abc", "ab", "dce", id="three nodes, two lost"),
    pytest.param("stripe:2+1", "abcd", "c", "dabe", id="stripe:2+1, one lost"),
    pytest.param("stripe:3+1", "abcde", "ad", "fbgec", id="stripe:3+1, two of five lost"),
]


@pytest.mark.parametrize(("redundancy", "before", "lost", "after"), LAYOUTS)
def test_what_was_lost_comes_back_under_other_ranks(real, redundancy, before, lost, after):
    """Two steps are committed, nodes lost, ranks renumbered: every owner's state is right."""
    world = real.open(before, redundancy=redundancy)
    assert world.each("restore") == [None] * len(before)
    for step in (1, 2):
        assert world.each("commit", step=step) == ["committed"] * len(before)
    world.leave()
    real.lose(*lost)
    workers = world.workers
    again = real.open(after, workers[1:] + workers[:1], redundancy=redundancy)
    assert again.each("restore") == [2] * len(before)
    assert all(again.each("state_is", step=2))
    check_bytes(again, before, after, k=int(redundancy[7]) if "stripe" in redundancy else 1)
    assert again.each("commit", step=3) == ["committed"] * len(before)


def check_bytes(world, before, after, k):
    """Each shard was read once; from peers only where the process is not beside its own copy."""
    for rank, (event,) in enumerate(world.each("events", kind="restore")):
        # k parity fragments in place of data round up once each.
        moved = event["bytes_received"] + event["bytes_local"] - event["shard_bytes"]
        assert 0 <= moved <= k
        if before[rank] == after[rank]:
            assert (event["bytes_received"], event["source"]) == (0, "own")
        elif after[rank] not in before:
            assert event["bytes_local"] == 0


def test_ranks_decide_together_which_steps_are_saved(real):
    """Four ranks all-reduce and save at every step without waiting: all take the same steps."""
    world = real.open("abcd")
    for first in (1, 21, 41):
        world.begin("train", first=first, steps=20)
        taken = [worker.result()["taken"] for worker in world.workers]
        assert taken == [taken[0]] * 4
        assert taken[0][0] == first
    newest = taken[0][-1]
    assert world.each("restore") == [newest] * 4
    assert all(world.each("state_is", step=newest))


def test_a_bad_fragment_is_replaced_by_parity(real):
    """A node is lost and a surviving fragment of its shard has a flipped byte: parity mends it."""
    world = real.open("abcd", redundancy="stripe:2+1")
    assert world.each("commit", step=1) == ["committed"] * 4
    world.leave()
    real.lose("a")
    flip_a_byte(next(real.fragments(owner=0, index=0)))
    again = real.open("ebcd", world.workers, redundancy="stripe:2+1")
    assert again.each("restore") == [1] * 4
    assert all(again.each("state_is", step=1))


def flip_a_byte(path):
    """Damage a file in its middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
