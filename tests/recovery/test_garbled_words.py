"""A rank that says nonsense ends the restore on every rank alike, by name and before a deadline."""

from __future__ import annotations

import json

import pytest

from recovery.actions import Await, Publish
from recovery.agree import agree_session
from recovery.errors import RecoveryError
from recovery.manifest import WHOLE, Generation
from recovery.session import RestoreAborted, RestoreHalfDone
from recovery.tree import GatherSpoiled, dump, load, merge_texts
from recovery.vote import merge_votes
from tests.recovery.rigs import DAMAGED, RestoreRig, layout_of
from tests.recovery.world import Raised, World

NONSENSE = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"7", b'"text"', b"[[]]", b'{"a":1}']


def saying(session, key, change):
    """Run a session that publishes something else under ``key``."""
    answer = None
    while True:
        try:
            action = session.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(action, Publish) and action.key == key:
            action = Publish(key, change(action.value))
        answer = yield action


def restored(rig, key, change, rank=1):
    """Run a restore in which one rank publishes something else under ``key``."""
    sessions = rig.sessions()
    sessions[rank] = saying(sessions[rank], key, change)
    world = World(0, sessions)
    results = world.run()
    assert not world._over, "somebody waited for the deadline"
    return results


def errors_of(results, kind):
    """Return what each rank raised, in words; all must be of one kind."""
    assert all(isinstance(result, Raised) for result in results.values())
    for result in results.values():
        assert isinstance(result.error, kind), repr(result.error)
    return [str(result.error) for result in results.values()]


def report(rank=1, holdings=(), committed=None, failures=()):
    """Return the bytes of a rank's word of what it holds, each part as given."""
    return dump([[rank, list(holdings), committed, failures]])


ROW = [1, 2, "c" * 32, 0, WHOLE, 2, 1, 1, 1000, "0" * 32]
REPORTS = {
    "row of text": b'[[1,[["x"]],null,[]]]',
    "another rank's": report(rank=0),
    "a rank that is not there": report(rank=7),
    "a huge rank": report(rank=1 << 62),
    "two reports": dump([[1, [], None, []], [1, [], None, []]]),
    "none": b"[]",
    "a world without end": report(holdings=[[*ROW[:5], 1 << 62, *ROW[6:]]]),
    "an owner outside": report(holdings=[[*ROW[:3], 5, *ROW[4:]]]),
    "failures of text": report(failures="abc"),
    "infinite step": b'[[1,[],[1,Infinity,"' + b"c" * 32 + b'"],[]]]',
    **{f"nonsense {raw[:8]!r}": raw for raw in NONSENSE},
}


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize(("redundancy", "nodes"), [("copies:1", (1, 1)), ("stripe:2+1", (1,) * 4)])
def test_a_report_that_cannot_be_read_is_an_abort_everywhere(name, redundancy, nodes):
    """Whatever rank 1 says that it holds, all ranks abort at once, and rank 1 is named."""
    rig = RestoreRig(layout_of(redundancy, *nodes))
    results = restored(rig, "restore/0/inventory/0/1", lambda _: REPORTS[name])
    said = errors_of(results, RestoreAborted)
    assert len(set(said)) == 1
    assert "rank 1" in said[0]
    assert rig.live == {}


def vote(**changes):
    """Return a change of a rank's vote, part by part."""
    return lambda raw: dump(load(raw, "a vote") | changes)


VOTES = {
    "no plan": vote(plan=None),
    "plan of a number": vote(plan=[[7]]),
    "bad of text": vote(bad="abc"),
    "bad of a pair": vote(bad=[[1, 2]]),
    "bad of lists": vote(bad=[[[], 1, 2]]),
    "a read that nobody plans": vote(bad=[[1, 0, 63]]),
    "silent that nobody plans": vote(silent=[[63, 0, 1]]),
    "wrong of a number": vote(wrong=7),
    "wrong of lists": vote(wrong=[[1, [[]]]]),
    "errors of numbers": vote(errors=[7]),
    "errors of a text": vote(errors="abc"),
    "one part less": lambda raw: dump(
        {k: v for k, v in load(raw, "a vote").items() if k != "silent"}
    ),
    **{f"nonsense {raw[:8]!r}": lambda _, raw=raw: raw for raw in NONSENSE},
}


@pytest.mark.parametrize("name", VOTES)
def test_a_vote_that_cannot_be_read_is_an_abort_everywhere(name):
    """Whatever rank 1 votes, all ranks abort at once with the same words, and none loads."""
    rig = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
    results = restored(rig, "restore/0/0/moved/0/1", VOTES[name])
    said = errors_of(results, RestoreAborted)
    assert len(set(said)) == 1
    if "nobody" not in name:
        assert "rank 1" in said[0]
    assert rig.live == {}


@pytest.mark.parametrize("raw", [*NONSENSE, b"[7]", b"[null]"], ids=lambda raw: repr(raw[:8]))
def test_what_a_rank_says_of_its_load_is_read_or_ends_everybody(raw):
    """After the vote rank 1 says nonsense: every rank ends with RestoreHalfDone, naming it."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    said = errors_of(restored(rig, "restore/0/done/0/1", lambda _: raw), RestoreHalfDone)
    assert len(set(said)) == 1
    assert "rank 1" in said[0]


@pytest.mark.parametrize("rank", [1, 65, 69])
@pytest.mark.parametrize("raw", [b"{", b'{"a":1}', b"[7]"])
def test_the_rank_is_named_through_every_level_of_the_tree(rank, raw):
    """70 ranks have two levels: what an inner rank cannot read reaches all, with the rank's name.

    Garbage that an inner node itself publishes is laid at its worker's door.
    """
    rig = RestoreRig(layout_of("copies:1", *(1,) * 70), steps=(1,))
    said = errors_of(
        restored(rig, f"restore/0/inventory/0/{rank}", lambda _: raw, rank), RestoreAborted
    )
    assert len(set(said)) == 1
    assert f"rank {rank}:" in said[0]
    rig = RestoreRig(layout_of("copies:1", *(1,) * 70), steps=(1,))
    said = errors_of(restored(rig, "restore/0/inventory/1/1", lambda _: raw, 64), RestoreAborted)
    assert "rank 64:" in said[0]


FROZEN = {
    "a list": b"[]",
    "no parts": b"{}",
    **{f"nonsense {raw[:8]!r}": raw for raw in NONSENSE},
    **{
        name: lambda raw, part=part: dump(load(raw, "x") | part)
        for name, part in {
            "reports of text": {"reports": "abc"},
            "a rank that is not there": {"reports": [[9, [ROW], None, []]]},
            "an infinite world": {"world": float("inf")},
            "no number": {"world": float("nan")},
            "an infinite owner": {"lost": [[float("inf"), "x"]]},
            "lost of text": {"lost": "abc"},
            "generation of text": {"generation": "abc"},
            "generation of none there": {"generation": [9, 9, "d" * 32]},
            "rejected of lists": {"rejected": [[[], []]]},
            "rejected of a number": {"rejected": 1},
            "nested deep": {"reports": json.loads("[" * 900 + "]" * 900)},
        }.items()
    },
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_inventory_that_cannot_be_read_is_an_abort_everywhere(name):
    """Rank 0's one word for all is damaged: every rank aborts and nothing is loaded."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    made = FROZEN[name]
    change = made if callable(made) else lambda _: made
    errors_of(restored(rig, "restore/0/0/frozen", change, 0), RestoreAborted)
    assert rig.live == {}


@pytest.mark.parametrize("raw", [*NONSENSE, b"again:", b"again:{}", b"again:[]", b"again:7", b"go"])
def test_a_vote_key_that_holds_nonsense_is_an_abort_everywhere(raw):
    """The decision itself is damaged: it is read by all alike, and only "go:" is a go."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    world = World(0, rig.sessions(), store={"restore/0/0/vote": raw})
    errors_of(world.run(), RestoreAborted)
    assert rig.live == {}


@pytest.mark.parametrize("damaged", [False, True])
def test_words_that_no_text_can_carry_are_carried(damaged):
    """A lone surrogate in an error, as a file name may have, is told and raises nothing else."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    if damaged:
        rig.mark(DAMAGED, 2, 0, WHOLE, 0)
    rig.misfits = {1: "no key 'a\udc80'"}
    rig.load_errors = {}
    world = World(0, rig.sessions())
    for text in errors_of(world.run(), RestoreAborted):
        assert "rank 1: no key 'a" in text
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    rig.load_errors = {1: "bad name 'a\udc80'"}
    for text in errors_of(World(0, rig.sessions()).run(), RestoreHalfDone):
        assert "rank 1: bad name 'a" in text


@pytest.mark.parametrize("raw", [*NONSENSE[:-2], b"[7]"], ids=lambda raw: repr(raw[:8]))
def test_an_agreement_that_one_rank_spoils_ends_on_all(raw):
    """Rank 2 of 3 says nonsense: all raise, at once, and the rank is named."""
    sessions = {r: agree_session("a", r, 3, dump(["x"]), merge_texts) for r in range(3)}
    sessions[2] = saying(sessions[2], "a/value/0/2", lambda _: raw)
    world = World(0, sessions)
    said = errors_of(world.run(), GatherSpoiled)
    assert not world._over
    assert all("rank 2:" in text for text in said)


def test_an_agreement_keeps_the_texts_of_all():
    """Nothing is spoiled by texts that only look like the mark of a spoiled word."""
    sessions = {r: agree_session("a", r, 3, dump([f"spoiled:{r}"]), merge_texts) for r in range(3)}
    results = World(0, sessions).run()
    assert {result.value for result in results.values()} == {
        b'["spoiled:0","spoiled:1","spoiled:2"]'
    }


def test_a_generation_is_told_by_numbers_that_are_numbers():
    """Infinity and NaN, which JSON in Python takes, are no epoch and no step."""
    for value in (float("inf"), float("nan"), 1.0, "1", None, True, [1]):
        with pytest.raises(RecoveryError):
            Generation(value, 1, "a" * 32)
        with pytest.raises(RecoveryError):
            Generation(1, value, "a" * 32)


def test_waiting_is_what_the_others_would_do():
    """The world of these tests notices a wait: a rank that says nothing costs the deadline."""
    rig = RestoreRig(layout_of("copies:1", 1, 1))

    def mute():
        yield Await(("never",), "nothing")

    world = World(0, {**rig.sessions(), 1: mute()})
    world.run()
    assert world._over


@pytest.mark.parametrize("number", [-2, 1 << 20, True, 1.0, "1"])
def test_a_vote_names_ranks_that_can_be(number):
    """A source below -1, or as large as no job is, or no number: the vote is refused."""
    row = [[0, 0, number]]
    raw = dump({"plan": ["x"], "bad": row, "silent": [], "wrong": [], "errors": []})
    with pytest.raises(RecoveryError):
        merge_votes([raw])
    row = [[0, -1, (1 << 20) - 1]]
    raw = dump({"plan": ["x"], "bad": row, "silent": [], "wrong": [], "errors": []})
    assert load(merge_votes([raw]), "votes")["bad"] == row
