"""Damaged, cut, swapped and forged arenas: never a wrong byte, and all ranks step back together."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from erasure.digest import chunk_digests, root_digest
from recovery.manifest import WHOLE
from replica import RestoreAborted
from tests.replica.damage import flip, lose, node_dir, own_slot, renumbered, slots
from tests.replica.inprocess import Cluster, Member

FOUR = ["a", "b", "c", "d"]
LAYOUT = "stripe:2+1"


@pytest.fixture
def trained(arena_dir):
    """Return arenas of four nodes that hold steps 1 and 2, both committed."""
    Cluster(arena_dir, FOUR, LAYOUT).run(lambda me: me.commit(1, 2))
    return arena_dir


def restored(arena_dir, nodes=FOUR):
    """Restore on all ranks; the events, after every value was compared with the truth."""
    return Cluster(arena_dir, nodes, LAYOUT).run(Member.restore)


def steps(events):
    """Return the step of every rank: one of them if they went together."""
    return {event["step"] for event in events}


def without_a(arena_dir):
    """Lose the node of rank 0; the nodes of the ranks afterwards."""
    lose(arena_dir, ["a"])
    return renumbered(FOUR, ["a"])


@pytest.mark.parametrize("place", ["head", "middle", "last"])
def test_a_flipped_bit_in_the_own_slot_is_made_good_by_peers(trained, place):
    """One bit of the own image is wrong: that rank takes the step from fragments, others do not."""
    slot = own_slot(trained, 2, 1)
    slot.flip({"head": 0, "middle": slot.record.length // 2, "last": slot.record.length - 1}[place])
    events = restored(trained)
    assert steps(events) == {2}
    assert [event["source"] for event in events] == ["own", "peers", "own", "own"]
    assert events[1]["bytes_received"] >= slot.record.length


def test_a_flipped_bit_in_the_pad_concerns_nobody(trained):
    """Bytes after the shard are neither sent nor digested: the own slot is used as before."""
    slot = own_slot(trained, 2, 1)
    slot.flip(slot.record.length + 1)
    assert [event["source"] for event in restored(trained)] == ["own"] * 4


@pytest.mark.parametrize("fragment", [0, 1, 2])
def test_one_flipped_fragment_counts_as_lost(trained, fragment):
    """A node is lost and one of its owner's three fragments is wrong: the other two give step 2."""
    nodes = without_a(trained)
    slots(trained, 2, 0, fragment)[0].flip(7)
    assert steps(restored(trained, nodes)) == {2}


def test_two_flipped_fragments_send_all_ranks_to_the_older_generation(trained):
    """One good fragment of two is left of owner 0: every rank holds step 1, none step 2."""
    nodes = without_a(trained)
    for fragment in (0, 2):
        slots(trained, 2, 0, fragment)[0].flip()
    events = restored(trained, nodes)
    assert steps(events) == {1}
    (reason,) = {event["reason"] for event in events}
    assert "step 2" in reason
    assert "1 of 2 distinct fragments" in reason
    assert "the committed step 2 is lost" in reason


def test_a_world_of_one_falls_back_to_its_older_slot(arena_dir, caplog):
    """Nobody else has a copy: the newest image is damaged, so step 1; then both, so nothing.

    The log says in words what was damaged, and what is tried instead.
    """
    Cluster(arena_dir, ["a"]).run(lambda me: me.commit(1, 2))
    for step, expected in ((2, 1), (1, None)):
        own_slot(arena_dir, step, 0).flip(100)
        (event,) = Cluster(arena_dir, ["a"]).run(Member.restore)
        assert event["step"] == expected
    assert "nothing to restore" in event["reason"]
    said = [line for line in caplog.messages if "try again" in line or "is tried" in line]
    why = "the whole copy of rank 0's state in the memory of rank 0 is damaged or missing"
    assert re.sub(r" \(epoch[^)]*\)", "", "\n".join(said)).splitlines() == [
        f"rank 0: step 2: {why}; all ranks try again without it",
        "rank 0: what is left does not give step 2 back, so step 1 is tried",
        f"rank 0: step 1: {why}; all ranks try again without it",
    ]


def test_damage_everywhere_ends_with_nothing_and_never_with_garbage(trained):
    """Both generations are beyond repair for owner 0: None on all ranks, states untouched."""
    nodes = without_a(trained)
    for step in (1, 2):
        for slot in slots(trained, step, 0):
            slot.flip(3)
    events = restored(trained, nodes)
    assert steps(events) == {None}
    assert "nothing to restore" in events[0]["reason"]


@pytest.mark.parametrize("owner", [0, 3])
def test_a_damaged_record_makes_its_slot_worth_nothing(trained, owner):
    """The record files of an own slot are scrambled: as if it were not there, and no error."""
    slot = own_slot(trained, 2, owner)
    for offset in range(0, slot.records.stat().st_size, 97):
        flip(slot.records, offset)
    events = restored(trained)
    assert steps(events) == {2}
    assert events[owner]["source"] == "peers"


@pytest.mark.parametrize("which", ["data", "records"])
@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_truncated_file_makes_its_slot_worth_nothing(trained, which, size):
    """The own data or record file of one rank is cut: its peers give it step 2."""
    slot = own_slot(trained, 2, 2)
    with getattr(slot, which).open("r+b") as file:
        file.truncate(size)
    events = restored(trained)
    assert steps(events) == {2}
    assert events[2]["source"] == "peers"


@pytest.mark.parametrize("which", ["data", "records"])
def test_a_deleted_file_makes_its_slot_worth_nothing(trained, which):
    """The own data or record file of one rank is gone: its peers give it step 2."""
    getattr(own_slot(trained, 2, 2), which).unlink()
    events = restored(trained)
    assert steps(events) == {2}
    assert events[2]["source"] == "peers"


def test_bytes_of_another_generation_under_a_new_record_are_found_out(trained):
    """The bytes of step 1 lie in the slots that say step 2, own and held: digests refuse them."""
    nodes = without_a(trained)
    old = own_slot(trained, 1, 1).payload()
    own = own_slot(trained, 2, 1)
    own.rewrite(own.record, old[: own.record.length])
    fragment = slots(trained, 2, 0, 1)[0]
    fragment.rewrite(fragment.record, slots(trained, 1, 0, 1)[0].payload())
    assert steps(restored(trained, nodes)) == {2}


def test_a_fragment_of_another_generation_is_never_combined(trained):
    """A slot of step 2 is replaced, record and all, by one of step 1: step 2 from the others."""
    nodes = without_a(trained)
    new, old = slots(trained, 2, 0, 1)[0], slots(trained, 1, 0, 1)[0]
    new.rewrite(old.record, old.payload())
    assert slots(trained, 2, 0, 1) == []
    assert steps(restored(trained, nodes)) == {2}


def test_another_owners_whole_shard_is_not_taken_for_ones_own(trained):
    """Rank 1's shard lies, record and all, in rank 0's own slot: each rank gets its own (P15)."""
    mine, other = own_slot(trained, 2, 0), own_slot(trained, 2, 1)
    mine.rewrite(other.record, other.payload())
    events = restored(trained)
    assert steps(events) == {2}
    assert events[0]["source"] == "peers"


def test_a_forged_record_of_another_owners_shard_is_refused_by_all(trained):
    """A record names rank 0 over rank 1's bytes and digests: two truths, so all take step 1."""
    mine, other = own_slot(trained, 2, 0), own_slot(trained, 2, 1)
    mine.rewrite(replace(other.record, owner=0), other.payload())
    events = restored(trained)
    assert steps(events) == {1}
    assert "cannot tell which is true" in events[3]["reason"]


def test_a_shard_that_names_another_owner_inside_is_refused_by_all(trained):
    """Every copy of owner 0's step 2 is rank 1's image, consistently: its header gives it away."""
    for slot in slots(trained, 2, 0):
        twin = slots(trained, 2, 1, slot.record.fragment)[0]
        slot.rewrite(replace(twin.record, owner=0), twin.payload())
    for error in Cluster(trained, FOUR, LAYOUT).outcomes(Member.restore):
        assert isinstance(error, RestoreAborted)
        assert "rank 0" in str(error)
        assert "owner=1" in str(error)


def test_a_fragment_that_verifies_but_decodes_wrong_is_left_out(trained):
    """A fragment's bytes and digests are another's, its shard digest is right: others are tried."""
    nodes = without_a(trained)
    slot = slots(trained, 2, 0, 0)[0]
    garbage = np.frombuffer(slot.payload(), np.uint8).copy()
    garbage[5:50] ^= 0xFF
    record = replace(slot.record, chunk_digests=chunk_digests(garbage))
    slot.rewrite(record, garbage.tobytes())
    assert steps(restored(trained, nodes)) == {2}


def test_a_forged_whole_shard_loses_against_the_digest_of_all_others(trained):
    """Own bytes are changed and their record is made to fit: two truths, so all take step 1."""
    slot = own_slot(trained, 2, 3)
    changed = np.frombuffer(slot.payload(), np.uint8).copy()
    changed[-1] ^= 1
    code = slot.record.code
    parts = [changed[slice(*code.span(i, changed.size))] for i in range(code.k)]
    digests = b"".join(chunk_digests(part) for part in parts)
    root = root_digest(digests, changed.size)
    slot.rewrite(replace(slot.record, chunk_digests=digests, shard_digest=root), changed.tobytes())
    assert steps(restored(trained)) == {1}


def test_a_source_that_vanishes_before_it_serves_is_replaced(trained):
    """The holder of a planned fragment has it in its report and not when asked: others serve."""
    nodes = without_a(trained)

    def restore(me):
        me.ckpt.start()
        if me.rank == 0:  # node b keeps fragment 0 of owner 0
            report = me.ckpt._engine.job.arena.slots
            (slot,) = [s for s in report.values() if s.record and wanted(s.record)]
            slot.data[3] ^= 1
        return me.restore()

    def wanted(record):
        return (record.generation.step, record.owner, record.fragment) == (2, 0, 0)

    assert steps(Cluster(trained, nodes, LAYOUT).run(restore)) == {2}


def test_foreign_files_in_an_arena_are_left_alone(trained):
    """A stranger's file beside the slots: restored as ever, and the file is still there."""
    stranger = node_dir(trained, "b") / "0" / "slot-notes.txt"
    stranger.write_text("mine", encoding="utf-8")
    assert steps(restored(trained)) == {2}
    assert stranger.read_text(encoding="utf-8") == "mine"


def test_after_damage_the_next_save_protects_everybody_again(trained):
    """Restored from what was left, one more step is committed: then any two nodes may go."""
    nodes = without_a(trained)
    slots(trained, 2, 0, 1)[0].flip()

    def go_on(me):
        event = me.restore()
        assert event["step"] == 2
        me.commit(3)
        return event["protection"], me.ckpt.status()["protection"]

    befores = Cluster(trained, nodes, LAYOUT).run(go_on)
    assert {after for _, after in befores} == {2}
    assert {before for before, _ in befores} == {0}
    lose(trained, [nodes[0], nodes[2]])
    assert all(slot.record.fragment != WHOLE for slot in slots(trained, 3, 0))
    assert steps(restored(trained, renumbered(nodes, [nodes[0], nodes[2]]))) == {3}
