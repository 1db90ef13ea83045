"""Errors that pass between our own parts, met where they are made: each says who, what and why."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from erasure.digest import digest
from recovery.actions import Publish, StoreLost
from recovery.ledger import Ledger
from recovery.slots import HELD, NoSlot, SlotFacts, held_slot
from replica.clock import MonotonicClock
from replica.demo.watch import DemoError, Watch
from replica.errors import PeerError, StoreError
from replica.runner import Runner
from replica.store import MemoryStore
from replica.streams import BadBytes, receive_stream
from tests.fuzz.edges import Told
from tests.recovery.rigs import generation_of


def test_bytes_that_are_not_what_their_sender_says():
    """A chunk and a trailer of another digest: BadBytes names the chunk; fewer bytes: PeerError."""
    buffer, payload = np.empty(64, np.uint8), b"x" * 64
    with pytest.raises(BadBytes, match=r"digest of chunks \[0\] of 1 differs"):
        receive_stream(Told(payload + digest(b"y" * 64) + b"s" * 16), buffer, lambda: None)
    with pytest.raises(PeerError, match="sent no more") as short:
        receive_stream(Told(payload + digest(payload)), buffer, lambda: None)
    assert not isinstance(short.value, BadBytes)


def test_a_store_that_is_gone_is_told_to_the_session():
    """The driver turns the store's error into StoreLost, thrown into the session with its words."""

    class Gone(MemoryStore):
        def set(self, key, value):
            del value
            raise StoreError(f"no answer for {key}")

    def session():
        yield Publish("a", b"1")

    with pytest.raises(StoreLost, match="no answer for a"):
        Runner(Gone(), MonotonicClock()).run(session(), {}, timeout_s=1.0)


def test_a_holder_whose_slots_are_all_needed():
    """One slot is of the base and one under a receive: NoSlot says that these are the reasons."""
    base = generation_of(1)
    slots = [
        SlotFacts(number=number, kind=HELD, capacity=10, generation=generation, busy=busy)
        for number, (generation, busy) in enumerate([(base, False), (None, True)])
    ]
    with pytest.raises(NoSlot, match="base or under a receive"):
        held_slot(slots, Ledger(base=base), 5, taken=(), expected=1)


def test_a_demo_whose_process_fails_says_which(tmp_path):
    """A watched process that ends with an error is named, with its code."""
    watch = Watch(tmp_path, lambda _: None)
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as process:
        watch.expect("node-b", process)
        with pytest.raises(DemoError, match=r"node-b.*7"):
            watch.until(lambda: False, what="the first commit")
