"""A script that ends while a save is in flight, in one of several ways; started by the exit tests.

Its one argument is JSON: the pid of its ``parent``, ``ending``, ``rank``, ``world``, ``port`` of a
store, ``arena_dir``, ``timeout_s``, and whether the save in flight is ``stuck``, never to end. It
says whether a save was in flight just before its end.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

import replica
from replica.encode import EncodePass
from replica.transports.gloo import GlooChannel
from tests.replica.joining import join
from tests.replica.tether import die_with_parent

ASKED = json.loads(sys.argv[1])
GO = threading.Event()


def hold_saves() -> None:
    """Keep the next save in flight until GO, which for a stuck one never comes."""
    inner = EncodePass.run

    def held(self: EncodePass) -> None:
        GO.wait()
        inner(self)

    EncodePass.run = held
    if not ASKED["stuck"]:
        # Runs first of all at exit: the save goes on only once the script has ended.
        atexit.register(GO.set)


def freeze_in_a_send() -> None:
    """Stand still with bulk bytes posted, as a peer that hangs."""
    inner = GlooChannel.send

    def send(self: GlooChannel, buffer: object) -> object:
        pending = inner(self, buffer)
        os.kill(os.getpid(), signal.SIGSTOP)
        return pending

    GlooChannel.send = send


def run() -> None:
    """Commit a step, begin the next, and end with it in flight."""
    if ASKED["world"] > 1:
        join(ASKED)
    state = {"weights": torch.zeros(2_000_000)}
    checkpointer = replica.Checkpointer(
        state,
        job="job",
        node_id=f"node-{ASKED['rank']}",
        arena_dir=ASKED["arena_dir"],
        timeout_s=ASKED["timeout_s"],
    )
    checkpointer.save(1).wait("committed", 60)
    if not ASKED["stuck"]:
        hold_saves()
    elif ASKED["rank"] == 1:
        freeze_in_a_send()
    state["weights"] += 2
    ticket = checkpointer.save(2)
    sys.stdout.write("done" if ticket.done else "in flight")
    sys.stdout.flush()
    end(checkpointer)


def end(checkpointer: replica.Checkpointer) -> None:
    """End as asked."""
    ending = ASKED["ending"]
    if ending == "error in a with block":
        with checkpointer:
            raise RuntimeError(ending)
    if ending == "close":
        GO.set()
        checkpointer.close()
    elif ending == "destroy the group":
        dist.destroy_process_group()
    elif ending == "sys.exit":
        sys.exit(7)
    elif ending == "interrupt":
        raise KeyboardInterrupt
    elif ending == "error":
        raise RuntimeError(ending)


die_with_parent(ASKED["parent"])
run()
