"""A survey of arenas says what a brute-force search over losses of nodes says."""

from __future__ import annotations

from itertools import combinations

import pytest

from erasure.code import Code
from erasure.digest import CHUNK_BYTES
from recovery.manifest import WHOLE, ArenaHead, Generation, SlotRecord, chunk_count, shard_digest
from recovery.survey import Place, newest_committed, survey

SHARD_BYTES = 100


def generation(step: int, epoch: int = 1) -> Generation:
    """Make a generation whose id follows from its step."""
    return Generation(epoch, step, f"{step:032x}")


def record(owner, fragment, *, world, k=2, m=1, step=1, job="job") -> SlotRecord:
    """Describe a part of an owner's shard."""
    code = Code(k, m)
    whole = b"\x01" * 16 * chunk_count(code, WHOLE, SHARD_BYTES, CHUNK_BYTES)
    return SlotRecord(
        job=job,
        generation=generation(step),
        owner=owner,
        world=world,
        k=k,
        m=m,
        fragment=fragment,
        shard_bytes=SHARD_BYTES,
        length=SHARD_BYTES if fragment == WHOLE else code.length(fragment, SHARD_BYTES),
        chunk_bytes=CHUNK_BYTES,
        chunk_digests=whole if fragment == WHOLE else b"\x01" * 16,
        shard_digest=shard_digest(whole, SHARD_BYTES),
    )


def head(rank, world, *, job="job", committed=None, node="n") -> ArenaHead:
    """Describe an arena."""
    return ArenaHead(
        job=job,
        node_id=node,
        position=0,
        incarnation="0" * 32,
        rank=rank,
        world=world,
        committed=committed,
    )


def survives(places, lost, world, k) -> bool:
    """Whether all owners can be rebuilt from the records outside the lost nodes: the dumb way."""
    left = [record for place in places if place.node not in lost for record in place.records]
    for owner in range(world):
        fragments = {record.fragment for record in left if record.owner == owner}
        if WHOLE not in fragments and len(fragments) < k:
            return False
    return True


def brute_force(places, world, k) -> int | None:
    """How many nodes may be lost, whichever they are: the dumb way."""
    nodes = sorted({place.node for place in places})
    if not survives(places, (), world, k):
        return None
    for count in range(1, len(nodes) + 1):
        if not all(survives(places, lost, world, k) for lost in combinations(nodes, count)):
            return count - 1
    raise AssertionError("something survives the loss of everything")


def test_protection_agrees_with_trying_every_loss(rng):
    """Random placements on few nodes: missing owners and the number are those of brute force.

    No fragment lies on two nodes here, where the number may be lower than what is true.
    """
    told = set()
    for _ in range(300):
        world, k, m = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
        arenas = int(rng.integers(1, 6))
        nodes = [f"node-{rng.integers(4)}" for _ in range(arenas)]
        held = [[] for _ in range(arenas)]
        for owner in range(world):
            if rng.random() < 0.7:
                held[rng.integers(arenas)].append(record(owner, WHOLE, world=world, k=k, m=m))
            for fragment in range(k + m):
                if rng.random() < 0.85:
                    part = record(owner, fragment, world=world, k=k, m=m)
                    held[rng.integers(arenas)].append(part)
        places = [
            Place(node=node, head=head(rank, arenas), records=tuple(records))
            for rank, (node, records) in enumerate(zip(nodes, held, strict=True))
        ]
        found = survey(places)
        if not found:
            assert not any(held)
            continue
        expected = brute_force(places, world, k)
        assert found[0].protection == expected
        assert (found[0].missing == {}) == (expected is not None)
        told.add(expected)
    assert {None, 0, 1, 2} <= told


@pytest.mark.parametrize(("heads", "exact"), [((0, 1), True), ((0,), False), ((0, 5), False)])
def test_exact_only_when_every_rank_is_there(heads, exact):
    """A world of two: the number is exact when the heads of ranks 0 and 1 are among those given."""
    places = [Place(node="n", head=head(rank, 9), records=()) for rank in heads]
    records = (record(0, WHOLE, world=2), record(1, WHOLE, world=2))
    places.append(Place(node="m", head=None, records=records))
    (found,) = survey(places)
    assert (found.exact, found.protection, found.recoverable_owners) == (exact, 0, [0, 1])


def test_jobs_and_generations_are_kept_apart():
    """Two jobs and two steps in two arenas: each is surveyed alone, by job, newest first."""
    places = [
        Place(
            node="n",
            head=head(0, 1, committed=generation(1)),
            records=(record(0, WHOLE, world=1), record(0, WHOLE, world=1, step=2)),
        ),
        Place(
            node="n",
            head=head(0, 1, job="a", committed=generation(2)),
            records=(record(0, WHOLE, world=1, step=2, job="a"),),
        ),
    ]
    shown = [(one.job, one.generation.step, one.committed) for one in survey(places)]
    assert shown == [("a", 2, True), ("job", 2, False), ("job", 1, True)]


def test_two_shards_of_one_generation_are_not_chosen_between():
    """Two complete shards of one owner in one generation: it counts as missing, and why."""
    other = record(0, WHOLE, world=1, k=1, m=1)
    place = Place(node="n", head=head(0, 1), records=(record(0, WHOLE, world=1), other))
    (found,) = survey([place])
    assert found.missing == {0: "two different shards, each complete"}
    assert found.protection is None


def test_the_newest_committed_of_each_job():
    """By (epoch, step); a job whose heads know of none has None."""
    heads = [
        head(0, 2, committed=generation(200, epoch=1)),
        head(1, 2, committed=generation(100, epoch=2)),
        head(0, 1, job="a"),
    ]
    assert newest_committed(heads) == {"a": None, "job": generation(100, epoch=2)}


def test_what_is_missing_is_counted_against_the_code():
    """Of owner 1 there is one fragment, of owner 2 nothing: what lacks, of how many."""
    records = (record(0, WHOLE, world=3, k=3), record(1, 0, world=3, k=3))
    (found,) = survey([Place(node="n", head=head(0, 3), records=records)])
    assert found.code == Code(3, 1)
    assert found.missing == {
        1: "1 of 3 distinct fragments and no whole copy",
        2: "0 of 3 distinct fragments and no whole copy",
    }
    assert found.recoverable_owners == [0]
    assert [(h.owner, h.fragment, h.rank) for h in found.holdings] == [(0, WHOLE, 0), (1, 0, 0)]


def test_steps_of_several_jobs_are_each_in_their_order():
    """The newest first within a job, though another job has newer ones and a later name."""
    places = [
        Place(
            node="n",
            head=None,
            records=tuple(record(0, WHOLE, world=1, step=step, job=job) for step in steps),
        )
        for job, steps in (("b", (1, 5, 3)), ("a", (2, 4)))
    ]
    shown = [(one.job, one.generation.step) for one in survey(places)]
    assert shown == [("a", 4), ("a", 2), ("b", 5), ("b", 3), ("b", 1)]


def test_an_older_committed_one_of_a_later_head_does_not_count():
    """The newest of all heads of a job, whatever their order, and never that of another job."""
    newer, older = generation(200), generation(100)
    for order in ((newer, older, None), (older, newer, None), (None, newer, older)):
        heads = [head(rank, 3, committed=one) for rank, one in enumerate(order)]
        found = newest_committed([*heads, head(0, 1, job="a"), head(0, 1, job="z")])
        assert found == {"a": None, "job": newer, "z": None}
