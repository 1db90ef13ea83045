"""Gathers up a tree: every value once and in order, few keys for anybody, and who was silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.actions import Await
from recovery.agree import agree_session
from recovery.errors import RecoveryError
from recovery.tree import (
    FANOUT,
    GatherFailed,
    dump,
    gather,
    load,
    name_ranks,
    nodes_worked_by,
    silent_ranks,
)
from tests.recovery.world import Raised, Silent, World

SEPARATED = b",".join


def values_of(world):
    """Return one value per rank."""
    return [str(rank).encode() for rank in range(world)]


def gathers(world, fanout, watch=None):
    """Return the gather of every rank."""
    return {
        rank: gather("g", rank, world, value, SEPARATED, watch=watch, fanout=fanout)
        for rank, value in enumerate(values_of(world))
    }


@given(world=st.integers(1, 90), fanout=st.integers(2, 9), seed=st.integers(0, 99))
def test_rank_0_gets_every_value_once_in_order(world, fanout, seed):
    """Any world and fan-out: all values by rank, None elsewhere, at most ``fanout`` keys a wait."""
    run = World(seed, gathers(world, fanout))
    results = run.run()
    assert results[0].value == SEPARATED(values_of(world))
    assert {results[rank].value for rank in range(1, world)} <= {None}
    waits = [action for _, action, _ in run.trace if isinstance(action, Await)]
    assert all(len(action.keys) <= fanout for action in waits)


def test_worlds_up_to_the_fanout_have_one_level():
    """64 ranks are read by rank 0 alone; the 65th adds a level, worked by ranks 0 and 64."""
    assert [len(nodes_worked_by(0, world)) for world in (1, 2, FANOUT, FANOUT + 1)] == [0, 1, 1, 2]
    assert [node.level for node in nodes_worked_by(FANOUT, FANOUT + 1)] == [1]
    assert nodes_worked_by(1, FANOUT + 1) == ()


@given(data=st.data(), world=st.integers(2, 60), fanout=st.integers(2, 5))
def test_a_failed_gather_names_silent_ranks_and_no_other(data, world, fanout):
    """Some ranks stop before they speak: who waits on them names some, a look afterwards all."""
    silent = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=4))
    run = World(0, gathers(world, fanout), faults=[Silent(rank, 0) for rank in silent])
    results = run.run()
    failed = [r.error for r in results.values() if isinstance(r, Raised)]
    named = set().union(*(error.missing for error in failed)) if failed else set()
    assert named <= silent
    if 0 not in silent:
        assert results[0].error.missing
        look = World(0, {0: silent_ranks("g", world, fanout)}, store=run.store)
        assert set(look.run()[0].value) == silent


def test_a_silent_worker_is_named_when_all_below_it_spoke():
    """Rank 3 of nine publishes its own value and no more: it, not those under it, is to blame."""
    run = World(0, gathers(9, 3), faults=[Silent(3, 1)])
    assert run.run()[0].error.missing == (3,)


def test_when_nothing_is_missing_rank_0_is_to_blame():
    """All spoke and still no result came: only the root can be late."""
    run = World(0, gathers(9, 3))
    run.run()
    look = World(0, {5: silent_ranks("g", 9, 3)}, store=run.store)
    assert look.run()[5].value == (0,)
    assert World(0, {0: silent_ranks("g", 1)}).run()[0].value == (0,)


def test_a_gather_ends_when_what_it_watches_appears():
    """The decision is there before all spoke: the wait ends with its value and names nobody."""
    run = World(0, gathers(4, 4, watch="decision"), faults=[Silent(2, 0)])
    run.store["decision"] = b"aborted"
    error = run.run()[0].error
    assert isinstance(error, GatherFailed)
    assert (error.missing, error.decided) == ((), b"aborted")


@given(world=st.integers(1, 80), seed=st.integers(0, 99))
def test_an_agreement_gives_all_ranks_the_same(world, seed):
    """Every rank says its number; every rank reads all of them."""
    sessions = {
        rank: agree_session("a", rank, world, value, SEPARATED)
        for rank, value in enumerate(values_of(world))
    }
    results = World(seed, sessions).run()
    assert {result.value for result in results.values()} == {SEPARATED(values_of(world))}


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("silent", range(3))
@pytest.mark.parametrize("one_deadline", [True, False])
def test_a_rank_silent_in_an_agreement_is_named_by_all_who_fail(silent, at, one_deadline):
    """One of three stops at each of its actions: no other rank is named, and nobody hangs."""
    sessions = {
        rank: agree_session("a", rank, 3, value, SEPARATED)
        for rank, value in enumerate(values_of(3))
    }
    fault = Silent(silent, at)
    run = World(at, sessions, faults=[fault], one_deadline=one_deadline)
    results = run.run()
    failed = [r.error for r in results.values() if isinstance(r, Raised)]
    assert {error.missing for error in failed} <= {(silent,)}
    assert len(failed) in {0, 2}
    assert failed or "a/result" in run.store


def test_ranks_in_words():
    """One, some and many ranks, as logs name them."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 3]) == "ranks 1, 3"
    assert name_ranks(range(20)).endswith("14, 15 and 4 more")
    assert name_ranks(range(16)).endswith("14, 15")
    assert name_ranks(range(17)).endswith("14, 15 and 1 more")


def test_json_from_others_is_checked():
    """What is no JSON, or nests too deep, raises with the name of what it should have been."""
    assert load(dump({"b": 1, "a": [None]}), "x") == {"a": [None], "b": 1}
    for raw in (b"", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(RecoveryError, match="the vote is not JSON"):
            load(raw, "the vote")


def looks_of(run):
    """Return (words, keys) of every look that was taken."""
    return [(a.what, a.keys) for _, a, _ in run.trace if isinstance(a, Await) and a.look]


def test_a_look_asks_only_below_the_nodes_that_are_late():
    """27 ranks in threes, rank 13 silent: its level-1 node's children are asked for, no others."""
    run = World(0, gathers(27, 3), faults=[Silent(13, 0)])
    results = run.run()
    assert results[0].error.missing == (13,)
    assert ("g of level 1", ("g/1/3", "g/1/4", "g/1/5")) in looks_of(run)
    assert ("g of level 0", ("g/0/12", "g/0/13", "g/0/14")) in looks_of(run)
    asked = {key for _, keys in looks_of(run) for key in keys}
    assert asked == {*(f"g/1/{i}" for i in (3, 4, 5)), *(f"g/0/{i}" for i in (12, 13, 14))}


def test_silent_workers_of_any_level_and_silent_ranks_are_named_together():
    """Of 81 ranks in threes, a worker of level 3, one of level 1 and a rank: each by its number."""
    spoken = {f"g/0/{rank}" for rank in range(81)} - {"g/0/5"}
    spoken |= {f"g/1/{node}" for node in range(27)} - {"g/1/1", "g/1/3"}
    spoken |= {f"g/2/{node}" for node in range(9)} - {"g/2/0", "g/2/1"}
    # Node 1 of level 1 waits for rank 5; node 3 of it has all and has not spoken: rank 9 works it.
    # Node 2 of level 3 has all below it and has not spoken: rank 54 works it.
    store = dict.fromkeys(spoken | {"g/3/1"}, b"")
    look = World(0, {7: silent_ranks("g", 81, 3)}, store=store)
    assert look.run()[7].value == (5, 9, 54)


def test_a_failed_gather_says_whom_it_waited_for():
    """The words of the error, with ranks and without."""
    assert str(GatherFailed((1, 2), None)) == "no word from ranks 1, 2"
    assert str(GatherFailed((), b"x")) == "decided elsewhere"
