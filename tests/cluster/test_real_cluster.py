"""Nodes with a memory and a network of their own: one is lost whole, one is slow."""

from __future__ import annotations

import pytest

from replica.runner import MOVING_BYTES_PER_S_MIN

pytestmark = pytest.mark.real

DEADLINE_S = 4.0
ELEMENTS = 3 << 19
"""Of the toys: 6 MiB."""


def test_a_killed_node_is_rebuilt_on_a_fresh_one(cluster, job):
    """Process 1 of one of 4 nodes is killed after a commit: all states come back bit for bit."""
    options = {"redundancy": "stripe:2+1", "job": job}
    world = cluster.open(4, **options)
    assert world.each("commit", step=1) == ["committed"] * 4
    world[2].kill()
    survivors = [world[rank] for rank in (0, 1, 3)]
    world.each("give_up", ranks=(0, 1, 3))
    again = cluster.open([*survivors, cluster.fresh(world[2])], **options)
    assert again.each("restore") == [1] * 4
    assert all(again.each("state_is", step=1))
    events = again.each("events", kind="restore")
    assert [event["source"] for (event,) in events] == ["own", "own", "peers", "peers"]
    assert again.each("commit", step=2) == ["committed"] * 4


@pytest.mark.parametrize(("given", "used", "spared"), [("eth1", 1, 0), (None, 0, 1)])
def test_bulk_bytes_take_the_network_that_is_named(cluster, job, given, used, spared):
    """network_interface= moves a save's bytes there, else GLOO_SOCKET_IFNAME (eth0): counted."""
    options = {"network_interface": given, "elements": ELEMENTS, "job": job}
    world = cluster.open(2, **options)
    world.each("start")
    before = world.each("sent_bytes")
    assert world.each("commit", step=1) == ["committed"] * 2
    for earlier, later in zip(before, world.each("sent_bytes"), strict=True):
        moved = [later[f"eth{index}"] - earlier[f"eth{index}"] for index in (0, 1)]
        assert moved[used] > 4 * ELEMENTS, moved
        assert moved[spared] < ELEMENTS, moved


def test_a_slow_link_is_waited_for(cluster, job):
    """A link has just the lowest rate that is trusted: bytes take longer than the deadline alone.

    The save is committed all the same, and nobody is called dead. The rate is taken to be half of
    what it is, so that half as many bytes will do.
    """
    slow_s, slowest = 1.1 * DEADLINE_S, MOVING_BYTES_PER_S_MIN / 2
    options = {"redundancy": "stripe:2+1", "timeout_s": DEADLINE_S, "network_interface": "eth1"}
    world = cluster.open(4, elements=int(slow_s * slowest / 1.5) // 4, job=job, **options)
    for module in ("job", "runner"):
        world.each("pretend", module=module, name="MOVING_BYTES_PER_S_MIN", value=slowest)
    assert world.each("commit", step=1) == ["committed"] * 4
    cluster.switch.slow_down(world[3], slowest)
    assert world.each("commit", step=2) == ["committed"] * 4
    (_, event) = world[3].call("events", kind="save")
    assert event["seconds"]["total"] > DEADLINE_S
