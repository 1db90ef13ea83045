"""A rank that forks children, and runs data loaders, while a save is in flight; for the fork tests.

Its one argument is JSON: ``parent``, ``rank``, ``world``, ``port``, ``prefix``, ``arena_dir``. It
says JSON lines on standard output: how each child ended, and what is left of itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from multiprocessing import get_context

import torch
from torch.utils.data import DataLoader, Dataset

import replica
from tests.replica import jobs
from tests.replica.joining import join
from tests.replica.tether import die_with_parent


class Squares(Dataset):
    """Items for workers to fetch."""

    def __len__(self) -> int:
        """Eight."""
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        """The square."""
        return torch.tensor(index * index)


def fall_off(checkpointer: replica.Checkpointer) -> None:
    """Leave through the interpreter's end, which runs what is registered for it."""
    sys.exit(5)


def close(checkpointer: replica.Checkpointer) -> None:
    """Close what the parent has open."""
    checkpointer.close()
    os._exit(5)


def leave_a_block(checkpointer: replica.Checkpointer) -> None:
    """Leave a with block by an exception."""
    with contextlib.suppress(RuntimeError), checkpointer:
        raise RuntimeError
    os._exit(5)


def save(checkpointer: replica.Checkpointer) -> None:
    """Try to take part in the parent's job."""
    for call in (lambda: checkpointer.save(100), checkpointer.restore, checkpointer.start):
        try:
            call()
        except replica.ConfigError as error:
            if "forked child" not in str(error):
                raise
        else:
            os._exit(9)
    assert checkpointer.status() == {"open": False}
    os._exit(5)


CHILDREN = (fall_off, close, leave_a_block, save)


def end_of(body: object, checkpointer: replica.Checkpointer) -> int:
    """Fork a child that runs ``body``; its exit code."""
    pid = os.fork()
    if pid == 0:
        die_with_parent(os.getppid())
        try:
            body(checkpointer)
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            os._exit(8)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(asked: dict) -> None:
    """Commit steps, each with children that come and go while its save is in flight."""
    die_with_parent(asked["parent"])
    join(asked)
    state = {"weights": torch.zeros(2_000_000)}
    checkpointer = replica.Checkpointer(
        state,
        job="job",
        node_id=f"node-{asked['rank']}",
        arena_dir=asked["arena_dir"],
        timeout_s=30.0,
        background=asked["background"],
    )
    jobs.set_mode(asked["background"])
    checkpointer.save(1).wait("committed", 60)
    jobs.announce = lambda _: None
    jobs.hold_saves()
    step = 1
    for body in CHILDREN:
        step += 1
        jobs.hold_again()
        state["weights"].fill_(step)
        ticket = checkpointer.save(step)
        say(child=body.__name__, code=end_of(body, checkpointer), done=ticket.done)
        jobs.let_saves_go()
        ticket.wait("committed", 60)
    for method, workers in (("fork", 2), ("spawn", 1)):
        step += 1
        jobs.hold_again()
        state["weights"].fill_(step)
        ticket = checkpointer.save(step)
        loader = DataLoader(
            Squares(),
            batch_size=2,
            num_workers=workers,
            multiprocessing_context=get_context(method),
        )
        values = sorted(int(value) for batch in loader for value in batch)
        say(loader=method, right=values == [n * n for n in range(8)], done=ticket.done)
        jobs.let_saves_go()
        ticket.wait("committed", 60)
    kept = [t.name for t in threading.enumerate() if not t.daemon]
    say(step=step, threads=kept, status=checkpointer.status()["committed_step"])
    with contextlib.suppress(replica.SaveFailed):
        checkpointer.save(step + 1, when_busy="wait").wait("committed", 60)
    # No close: the interpreter's end has to do.


def say(**facts: object) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
