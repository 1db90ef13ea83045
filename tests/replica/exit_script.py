"""A script that ends while a save is in flight, in one of several ways; started by the exit tests.

Its one argument is JSON: the pid of its ``parent``, ``ending``, ``rank``, ``world``, ``port`` of a
store, ``arena_dir``, ``timeout_s``, and whether the save in flight is ``stuck``, never to end. It
says whether a save was in flight just before its end.
"""

from __future__ import annotations

import atexit
import json
import sys

import torch
import torch.distributed as dist

import replica
from tests.replica import jobs
from tests.replica.joining import join
from tests.replica.tether import die_with_parent

ASKED = json.loads(sys.argv[1])


def hold_saves() -> None:
    """Keep the next save in flight until the script has ended."""
    jobs.announce = lambda _: None
    jobs.hold_saves()
    # Runs first of all at exit.
    atexit.register(jobs.let_saves_go)


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
        background=ASKED["background"],
    )
    jobs.set_mode(ASKED["background"])
    checkpointer.save(1).wait("committed", 60)
    if not ASKED["stuck"]:
        hold_saves()
    elif ASKED["rank"] == 1:
        jobs.freeze_in_a_send()
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
        jobs.let_saves_go()
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
