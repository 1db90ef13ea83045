"""What tests of mending share: ranks whose events can be waited for, and arenas looked at whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import replica
from recovery.manifest import WHOLE
from replica.chunks import damaged_chunks
from replica.frames import FrameFile
from replica.verify import BAD, UNREADABLE, verify_arenas
from tests.replica.damage import SlotFiles, slots
from tests.replica.inprocess import JOB, Cluster, Member

MENDED_S = 20.0
"""No mend here comes near it; it turns a hang into a failure."""


class Events(list):
    """The events so far, and a wait for more."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Condition()

    def append(self, event: dict[str, Any]) -> None:
        """Take one more; called in whichever thread it happens."""
        with self._more:
            super().append(event)
            self._more.notify_all()

    def wait_for(self, there: Callable[[], bool]) -> bool:
        """Wait until ``there`` holds, which is asked at every event; whether it does."""
        with self._more:
            return self._more.wait_for(there, MENDED_S)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        return [event for event in self if event["event"] == kind]


class MendCluster(Cluster):
    """A cluster whose members' events can be waited for."""

    def member(self, rank: int) -> Member:
        """Make one rank's Checkpointer; nothing is opened yet."""
        me = Member(rank, self.counts[rank], events=Events())
        options = {"node_id": self.nodes[rank], "on_event": me.events.append} | self.options
        me.ckpt = replica.Checkpointer(me.state, group=self.groups[rank], **options)
        return me


def verifies(slot) -> bool:
    """Whether every byte that the slot's record vouches for is as its owner digested it."""
    return slot.record is not None and damaged_chunks(slot.record, slot.data) == ()


def protected(me: Member) -> bool:
    """Wait until all that is kept is fully protected; whether it is."""
    return me.events.wait_for(lambda: me.ckpt.status()["protected"] == "full")


def mends(me: Member, count: int = 1) -> list[dict[str, Any]]:
    """Wait for so many mends to end; what was told of all so far."""
    assert me.events.wait_for(lambda: len(me.events.of("mend")) >= count), me.events
    return me.events.of("mend")


def live_slot(me: Member, owner: int, fragment: int, step: int):
    """Return the open slot of this rank with a part of a step, or None."""
    for slot in me.job.arena.slots.values():
        record = slot.record
        if record and (record.owner, record.fragment, record.generation.step) == (
            owner,
            fragment,
            step,
        ):
            return slot
    return None


def rot(me: Member, owner: int, fragment: int, step: int, at: int = 0) -> None:
    """Flip a bit of what this rank holds, as memory does when it fails."""
    live_slot(me, owner, fragment, step).data[at] ^= 0x20


def places(me: Member, step: int) -> list[tuple[int, int]]:
    """Return (owner, fragment) of every slot of a step in this rank's arena that verifies."""
    found = []
    for slot in me.job.arena.slots.values():
        record = slot.record
        if record is not None and record.generation.step == step and verifies(slot):
            found.append((record.owner, record.fragment))
    return sorted(found)


def wanted(me: Member) -> list[tuple[int, int]]:
    """Return (owner, fragment) of all that this rank is to hold by the layout."""
    held = [(f.owner, f.index) for f in me.job.layout.held_by(me.rank)]
    return sorted([(me.rank, WHOLE), *held])


def no_damage(arena_dir) -> bool:
    """Whether every slot of the job verifies, read as the command line reads it."""
    verdicts = verify_arenas(arena_dir, JOB)
    assert verdicts
    problems = [f"{v.path}: {v.problem}" for v in verdicts if v.problem]
    bad = [f"{v.path}: {s}" for v in verdicts for s in v.slots if s.verdict in (BAD, UNREADABLE)]
    assert not problems + bad, "\n".join(problems + bad)
    return True


def withdraw(slot: SlotFiles) -> None:
    """Make a slot on disk one that holds nothing."""
    frames = FrameFile(os.open(slot.records, os.O_RDWR), str(slot.records))
    frames.write(b"")
    frames.close()


def strip(arena_dir, step: int, owners: int) -> None:
    """Leave of a step only the owners' own copies, as a save does that was broken off."""
    for owner in range(owners):
        for slot in slots(arena_dir, step, owner):
            if slot.record.fragment != WHOLE:
                withdraw(slot)
