"""Real processes over gloo: what was lost is made again, and a death amid that costs nothing."""

from __future__ import annotations

import pytest

from tests.replica.damage import flip
from tests.replica.worlds import names

pytestmark = pytest.mark.real

OPTIONS = {"redundancy": "stripe:2+1"}
PROTECTED_S = 30.0


def protected(world):
    """Wait on every rank until it says that all is fully protected."""
    assert world.each("await_protection", timeout_s=PROTECTED_S) == ["full"] * len(world)


def test_a_lost_node_is_made_up_for_before_any_save_and_two_more_may_go(real):
    """One of 4 nodes is lost and restored; protected again without a save, two others are lost."""
    world = real.open("abcd", **OPTIONS)
    assert world.each("commit", step=1) == ["committed"] * 4
    world.leave()
    real.lose("b")
    again = real.open("aecd", world.workers, **OPTIONS)
    assert again.each("restore") == [1] * 4
    protected(again)
    for status in again.each("status"):
        assert (status["saves_committed"], status["protection"]) == (0, 2)
    assert sum(event["sent_bytes"] for (event,) in again.each("events", kind="mend")) > 0
    again.leave()
    real.lose("a", "c")
    last = real.open("fegd", again.workers, **OPTIONS)
    assert last.each("restore") == [1] * 4
    assert all(last.each("state_is", step=1))
    protected(last)


def test_a_worker_killed_in_a_mend_is_made_up_for_by_the_next(real):
    """Rank 2 dies as it sends in a mend: the others say so; started anew, all is whole again."""
    options = OPTIONS | {"timeout_s": 4.0}
    world = real.open("abcd", **options)
    assert world.each("commit", step=1) == ["committed"] * 4
    world.leave()
    real.lose("a")
    again = real.open("ebcd", world.workers, **options)
    again[2].call("arm", point="mend.transfer", action="kill")
    again.begin("restore")
    again[2].died()
    survivors = [0, 1, 3]
    for rank in survivors:
        assert again[rank].result() == 1
        event = again[rank].call("await_event", kind="mend", timeout_s=PROTECTED_S)
        assert event["outcome"] in ("failed", "ranks lost")
    assert any(
        names(event["reason"], 2)
        for events in again.each("events", ranks=survivors, kind="mend")
        for event in events
    )
    again.each("give_up", ranks=survivors)
    fresh = real.pool.replace(again[2])
    last = real.open("ebcd", [again[0], again[1], fresh, again[3]], **OPTIONS)
    assert last.each("restore") == [1] * 4
    assert all(last.each("state_is", step=1))
    protected(last)


def test_a_bit_that_flips_in_idle_memory_is_found_and_mended(real):
    """A fragment's file is changed under a running job: its holder says so, and all is whole."""
    world = real.open("abcd", **OPTIONS)
    assert world.each("commit", step=1) == ["committed"] * 4
    (path,) = real.fragments(owner=0, index=0)
    flip(path, 100)
    event = world[1].call("await_event", kind="scrub", timeout_s=PROTECTED_S)
    assert (event["owner"], event["fragment"], event["step"]) == (0, 0, 1)
    for mend in world.each("await_event", kind="mend", timeout_s=PROTECTED_S):
        assert (mend["outcome"], mend["protection"]) == ("done", 2)
    protected(world)
    world.leave()
    real.lose("a", "d")
    again = real.open("ebcf", world.workers, **OPTIONS)
    assert again.each("restore") == [1] * 4
    assert all(again.each("state_is", step=1))
