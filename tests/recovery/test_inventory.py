"""Inventories: which generation is chosen, checked against a dumb twin, and in what words."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import ManifestError, RecoveryError
from recovery.inventory import (
    Holding,
    Inventory,
    Report,
    ShardKind,
    choose,
    decode_reports,
    describe_lost,
    encode_report,
    failures_of,
    merge_reports,
    report_of,
    without,
)
from recovery.manifest import WHOLE, Generation
from recovery.tree import dump
from tests.recovery.test_manifest import record_of

OLD, MID, NEW = (
    Generation(epoch, step, name * 32)
    for epoch, step, name in [(1, 9, "a"), (2, 3, "b"), (2, 4, "c")]
)


def kind_of(k=1, m=0, name="0"):
    """Return a kind whose shard digest is made of one digit."""
    return ShardKind(k, m, 100, name * 32)


def hold(generation, owner, fragment, rank=0, world=1, *, kind=None):
    """Return one holding."""
    return Holding(generation, owner, fragment, rank, world, kind or kind_of())


@st.composite
def inventories(draw):
    """Draw what up to four ranks hold of up to three generations of a world of up to three."""
    world = draw(st.integers(1, 3))
    kinds = [kind_of(k, 1, name) for k in (1, 2) for name in "01"]
    odd = draw(st.integers(0, 20))
    some = st.builds(
        hold,
        st.sampled_from([OLD, MID, NEW]),
        st.integers(0, world - 1),
        st.integers(WHOLE, 1),
        st.integers(0, 3),
        st.just(world) if odd else st.sampled_from([world, world + 1]),
        kind=st.sampled_from(kinds[: draw(st.integers(1, 4))]),
    )
    return Inventory(
        tuple(sorted(draw(st.sets(some, max_size=16)))),
        draw(st.sampled_from([None, OLD, MID, NEW])),
        draw(st.frozensets(st.sampled_from([OLD.id, MID.id, NEW.id]), max_size=1)),
    )


def twin(inventory):
    """Choose by trying everything: each generation, owner, kind and set of k holdings."""
    for generation in (NEW, MID, OLD):
        mine = [h for h in inventory.holdings if h.generation == generation]
        worlds = {h.world for h in mine}
        if generation.id in inventory.failures or len(worlds) != 1:
            continue
        if all(len(complete(mine, owner)) == 1 for owner in range(worlds.pop())):
            return generation
    return None


def complete(holdings, owner):
    """Return the kinds of which a whole shard, or some k different fragments, are there."""
    found = set()
    for kind in {h.kind for h in holdings}:
        mine = [h.fragment for h in holdings if h.owner == owner and h.kind == kind]
        parts = [f for f in mine if f != WHOLE]
        if len(parts) < len(mine) or any(
            len(set(some)) == kind.k for some in combinations(parts, kind.k)
        ):
            found.add(kind)
    return found


@given(inventories())
def test_the_choice_is_that_of_a_dumb_twin(inventory):
    """Random inventories, mixed kinds and worlds: the newest that all owners are there in."""
    assert choose(inventory).generation == twin(inventory)


@given(inventories())
def test_the_reason_tells_of_everything_newer_and_of_what_was_committed(inventory):
    """Each generation that was passed over is named, and a committed one that is lost is too."""
    choice = choose(inventory)
    newer = {h.generation for h in inventory.holdings}
    if choice.generation:
        newer = {generation for generation in newer if generation > choice.generation}
        assert choice.reason.startswith(f"restoring {choice.generation.describe()}")
    else:
        assert choice.reason.startswith("nothing to restore: ")
    assert all(generation.describe() in choice.reason for generation in newer)
    lost = inventory.committed and (
        choice.generation is None or choice.generation < inventory.committed
    )
    text = f"; the committed step {inventory.committed.step} is lost" if lost else None
    assert choice.reason.endswith(text) if lost else "is lost" not in choice.reason


@given(inventories(), st.randoms(use_true_random=False))
def test_the_order_of_reports_does_not_matter(inventory, rng):
    """Reports in any order, their holdings too, merge to the same inventory and choice."""
    reports = [
        Report(rank, tuple(h for h in inventory.holdings if h.rank == rank), inventory.committed)
        for rank in range(4)
    ]
    merged = merge_reports(reports)
    mixed = [
        Report(r.rank, tuple(rng.sample(r.holdings, len(r.holdings))), r.committed) for r in reports
    ]
    rng.shuffle(mixed)
    assert merge_reports(mixed) == merged
    assert merged.holdings == inventory.holdings


def test_the_newest_that_every_owner_is_there_in_is_taken():
    """Owner 1 of the newest has one of two fragments: the older generation, in these words."""
    two = kind_of(2, 1)
    holdings = [hold(NEW, 0, WHOLE, 0, 2), hold(NEW, 1, 2, 0, 2, kind=two)]
    holdings += [
        hold(MID, 0, WHOLE, 0, 2),
        hold(MID, 1, 0, 0, 2, kind=two),
        hold(MID, 1, 2, 1, 2, kind=two),
    ]
    choice = choose(Inventory(tuple(holdings), committed=NEW))
    assert (choice.generation, choice.world) == (MID, 2)
    assert choice.lost == {1: "1 of 2 distinct fragments and no whole copy"}
    assert choice.reason == (
        "restoring step 3 (epoch 2, bbbbbbbb); passed over step 4 (epoch 2, cccccccc): cannot "
        "rebuild owner 1 (1 of 2 distinct fragments and no whole copy)"
        "; the committed step 4 is lost"
    )


def test_an_uncommitted_generation_that_is_whole_is_taken():
    """Decided or not, the newest that is recoverable wins, and nothing is called lost (P18)."""
    choice = choose(Inventory((hold(MID, 0, WHOLE), hold(NEW, 0, WHOLE)), committed=MID))
    assert choice.generation == NEW
    assert choice.reason == "restoring step 4 (epoch 2, cccccccc), the newest that is there"


def test_a_later_step_of_an_older_epoch_never_wins():
    """After a roll-back the abandoned step 9 is still there: step 3 of the newer epoch is taken."""
    choice = choose(Inventory((hold(OLD, 0, WHOLE), hold(MID, 0, WHOLE))))
    assert choice.generation == MID


def test_fragments_of_two_generations_are_never_counted_together():
    """One fragment of each of two generations: neither is whole, nothing is restored."""
    two = kind_of(2, 1)
    choice = choose(Inventory((hold(MID, 0, 0, kind=two), hold(NEW, 0, 1, kind=two))))
    assert choice.generation is None
    assert choice.lost == {0: "1 of 2 distinct fragments and no whole copy"}


@pytest.mark.parametrize(
    "other",
    [kind_of(2, 1, "1"), kind_of(2, 2), ShardKind(2, 1, 101, "0" * 32), kind_of(3, 1)],
)
def test_fragments_of_two_shards_are_never_counted_together(other):
    """Two fragments that differ in digest, code or length do not make one shard."""
    choice = choose(Inventory((hold(NEW, 0, 0, kind=kind_of(2, 1)), hold(NEW, 0, 1, kind=other))))
    assert choice.generation is None
    assert "1 of" in choice.reason


def test_the_same_fragment_twice_counts_once():
    """Two holders of fragment 0 are one distinct fragment."""
    two = kind_of(2, 1)
    choice = choose(Inventory((hold(NEW, 0, 0, 0, kind=two), hold(NEW, 0, 0, 1, kind=two))))
    assert "1 of 2 distinct fragments" in choice.reason


def test_two_complete_shards_of_one_owner_are_not_trusted():
    """Nobody can tell which of two whole shards is the true one: the generation is passed over."""
    holdings = (hold(NEW, 0, WHOLE, 0), hold(NEW, 0, WHOLE, 1, kind=kind_of(name="1")))
    choice = choose(Inventory(holdings))
    assert choice.generation is None
    assert "two different shards of one generation" in choice.reason


def test_records_that_disagree_on_the_world_are_passed_over():
    """One generation cannot have had two numbers of ranks."""
    choice = choose(Inventory((hold(NEW, 0, WHOLE, 0, 1), hold(NEW, 0, WHOLE, 1, 2))))
    assert "disagree on the number of ranks [1, 2]" in choice.reason


def test_nothing_there_and_a_committed_step_lost_are_said():
    """Empty arenas: nothing to restore; known to have been committed: that it is lost."""
    assert choose(Inventory(())).reason == (
        "nothing to restore: no arena of this job holds a generation"
    )
    assert choose(Inventory((), committed=NEW)).reason.endswith("; the committed step 4 is lost")


def test_owners_that_are_lost_alike_are_named_together():
    """One clause per cause, owners in order, long lists cut."""
    assert describe_lost({2: "x", 0: "y", 1: "x"}) == (
        "cannot rebuild owner 0 (y), owners 1, 2 (x)"
    )
    assert describe_lost(dict.fromkeys(range(20), "x")).endswith("15 and 4 more (x)")


def test_failures_count_when_identical_twice():
    """Two identical failed loads take a generation out; two different ones do not."""
    attempts = [("a" * 32, "e" * 32, 2), ("b" * 32, "e" * 32, 1), ("b" * 32, "f" * 32, 1)]
    assert failures_of(attempts) == ("a" * 32,)


def test_four_failures_of_any_kind_are_too_many():
    """Errors that say something else each time are counted together, per generation."""
    often = [("a" * 32, f"{n:032x}", 1) for n in range(3)]
    other = ("b" * 32, "1" * 32, 1)
    assert failures_of([*often, other]) == ()
    assert failures_of([*often, other, ("a" * 32, "f" * 32, 1)]) == ("a" * 32,)
    choice = choose(Inventory((hold(OLD, 0, WHOLE),), None, frozenset(["a" * 32])))
    assert choice.generation is None
    assert "failed to load identically 2 times" in choice.reason


def test_a_report_takes_the_records_of_its_own_job_only():
    """A record of another job in the arena is not reported; facts are passed on."""
    records = [record_of(0, job="a"), record_of(1, job="b"), record_of(job="a")]
    report = report_of(5, "a", records, committed=NEW, failures=("f",))
    assert [h.fragment for h in report.holdings] == [WHOLE, 0]
    assert {(h.rank, h.owner, h.world) for h in report.holdings} == {(5, 3, 8)}
    assert (report.rank, report.committed, report.failures) == (5, NEW, ("f",))
    assert [h.length for h in report.holdings] == [10_000, 5_000]
    for holding, record in zip(report.holdings, (records[2], records[0]), strict=True):
        assert holding.generation == record.generation
        assert holding.kind == ShardKind(2, 1, 10_000, record.shard_digest.hex())


def test_the_cause_is_told_of_the_kind_that_came_nearest():
    """Two shards of one owner, one fragment of the first and two of the second: two are counted."""
    few, more = kind_of(3, 1, "f"), kind_of(3, 1, "0")
    holdings = (
        hold(NEW, 0, 0, 0, kind=few),
        hold(NEW, 0, 0, 1, kind=more),
        hold(NEW, 0, 1, 2, kind=more),
    )
    choice = choose(Inventory(holdings))
    assert choice.lost == {0: "2 of 3 distinct fragments and no whole copy"}


def test_taking_a_holding_off():
    """What was bad is gone, the rest stays, and what was never there is refused."""
    one, two = hold(NEW, 0, WHOLE), hold(MID, 0, WHOLE)
    left = without(Inventory((two, one), NEW, frozenset("x")), [one])
    assert left == Inventory((two,), NEW, frozenset("x"))
    with pytest.raises(RecoveryError, match="1 holdings are not in the inventory"):
        without(left, [one])


@given(inventories())
def test_reports_read_back_equal(inventory):
    """What a rank reports is what is read from it."""
    failures = tuple(sorted(inventory.failures))
    report = Report(
        0, tuple(h for h in inventory.holdings if h.rank == 0), inventory.committed, failures
    )
    assert decode_reports(dump([encode_report(report)])) == (report,)


ROW = [2, 4, "c" * 32, 0, -1, 1, 1, 0, 100, "0" * 32]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"7",
        b"null",
        b'["x"]',
        b"[[]]",
        dump([[-1, [], None, []]]),
        dump([["0", [], None, []]]),
        dump([[True, [], None, []]]),
        dump([[0, None, None, []]]),
        dump([[0, [ROW[:-1]], None, []]]),
        dump([[0, [], [1, 2], []]]),
        dump([[0, [], [1, 2, "x"], []]]),
        dump([[0, [], None, [7]]]),
        dump([[0, [], None, None]]),
        *(
            dump([[0, [[*ROW[:at], value, *ROW[at + 1 :]]], None, []]])
            for at, values in enumerate(
                [
                    [-1, None, "1", 1.0],
                    [-1, True, 1 << 63],
                    ["c", 7, "C" * 32],
                    [-1, 1, True, "0"],
                    [-2, 1, 0.0],
                    [0, -1, None],
                    [0, 33, "1", True],
                    [-1, 64, None],
                    [-1, 1 << 60, 1.5],
                    ["0", "g" * 32, 7, "00 " * 16, "A" * 32],
                ]
            )
            for value in values
        ),
    ],
    ids=lambda raw: repr(raw[:60]),
)
def test_reports_that_are_not_valid_are_refused(raw):
    """Any field of another type or range, and JSON that is none, end in the one kind of error."""
    with pytest.raises(ManifestError):
        decode_reports(raw)


def test_a_valid_row_is_taken():
    """The row that the hostile ones are made from is itself valid."""
    (report,) = decode_reports(json.dumps([[0, [ROW], None, []]]).encode())
    assert report.holdings == (hold(NEW, 0, WHOLE),)


def test_what_is_refused_is_shown_and_cut():
    """A value that makes no sense is shown in the error, at most 200 characters of it."""
    with pytest.raises(ManifestError) as caught:
        decode_reports(dump([["x" * 1000, [], None, []]]))
    assert str(caught.value) == f"inventory: rank is '{'x' * 199}"
