"""A rank that comes to one moment of its life, says so, and stays there; for signals and forks.

Its one argument is JSON: ``parent``, ``rank``, ``world``, ``port``, ``prefix``, ``arena_dir``,
``timeout_s``, and what to do: ``moment`` ("idle", "saving", "restoring"), where the last rank
stays, ``handler`` (when to install a handler of its own for SIGTERM: "", "before" or "after" the
Checkpointer is made), and ``steps`` that are committed first. It says JSON lines on standard
output.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

import torch
import torch.distributed as dist

import replica
from erasure.errors import PlanariaError
from tests.replica import jobs
from tests.replica.joining import join
from tests.replica.tether import die_with_parent

ASKED = json.loads(sys.argv[1])
NEVER = threading.Event()
HANDLED: list[int] = []


def say(**facts: object) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def install_handler() -> None:
    """Note the signal, as schedulers' notices are taken, and go on."""
    signal.signal(signal.SIGTERM, lambda number, _: HANDLED.append(number))


def make() -> tuple[dict[str, torch.Tensor], replica.Checkpointer]:
    """Make a Checkpointer over a state of 8 MB."""
    state = {"weights": torch.zeros(2_000_000)}
    if ASKED["handler"] == "before":
        install_handler()
    checkpointer = replica.Checkpointer(
        state,
        job="job",
        node_id=f"node-{ASKED['rank']}",
        arena_dir=ASKED["arena_dir"],
        timeout_s=ASKED["timeout_s"],
        random_states=False,
        background=ASKED["background"],
    )
    jobs.set_mode(ASKED["background"])
    checkpointer.start()
    if ASKED["handler"] == "after":
        install_handler()
    return state, checkpointer


def stand_still(owner: str, name: str) -> None:
    """From now on this method says where the rank is, and never comes back."""
    jobs.announce = lambda word: say(at=word)
    jobs.stand_still(owner, name, ASKED["moment"])


def come_to_the_moment(checkpointer: replica.Checkpointer, state: dict[str, torch.Tensor]) -> None:
    """Be at the moment; the rank that waits there for ever is the one that the signal ends."""
    waits = ASKED["rank"] == ASKED["world"] - 1
    if ASKED["moment"] == "restoring":
        if waits:
            stand_still("Fetcher", "run")
        say(restored=checkpointer.restore())
    elif ASKED["moment"] == "saving":
        if waits:
            stand_still("GlooChannel", "send")
        state["weights"] += 1
        ticket = checkpointer.save(ASKED["steps"] + 1)
        ticket.wait("committed", 60)
        say(committed=ticket.step)
    elif waits:
        say(at="idle")
        NEVER.wait()


def run() -> None:
    """Commit some steps, come to the moment, and report how it ended."""
    if ASKED["world"] > 1:
        join(ASKED)
    state, checkpointer = make()
    for step in range(1, ASKED["steps"] + 1):
        state["weights"].fill_(step)
        checkpointer.save(step).wait("committed", 60)
    if ASKED["handler"]:
        end_as_asked_by_a_notice(checkpointer, state)
    try:
        come_to_the_moment(checkpointer, state)
    except PlanariaError as error:
        say(failed=type(error).__name__, text=str(error))
    checkpointer.close()
    say(ended=True, value=float(state["weights"][0]))


def end_as_asked_by_a_notice(
    checkpointer: replica.Checkpointer, state: dict[str, torch.Tensor]
) -> None:
    """Train until a handler has noted a signal, save that step too, and leave with code 3."""
    say(at="training")
    step, asked = ASKED["steps"], torch.zeros(1)
    while not asked:
        step += 1
        state["weights"].fill_(step)
        checkpointer.save(step)
        # A notice may come to one rank only, and never to all at the same step.
        asked.fill_(len(HANDLED))
        dist.all_reduce(asked)
    step += 1
    checkpointer.save(step, when_busy="wait").wait("committed", 60)
    checkpointer.close()
    say(last=step, signals=HANDLED)
    sys.exit(3)


die_with_parent(ASKED["parent"])
run()
