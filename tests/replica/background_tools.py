"""Faults in the background processes of a trainer that is the test's own process."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading

import psutil

import replica
from tests.replica.control import Control
from tests.replica.inprocess import COMMIT_S


class Faults:
    """What background processes of this one do, and are heard to say; jobs of ``stays``."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.do = Control(self.heard.put, "tests.replica.stays_in_background").do

    def hear(self, word: str) -> None:
        """Wait until one says ``word``."""
        assert self.heard.get(timeout=COMMIT_S) == word

    def interrupt_at(self, word: str) -> None:
        """Send SIGUSR1 to the main thread once ``word`` is said."""

        def body() -> None:
            self.hear(word)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

        threading.Thread(target=body, daemon=True).start()


@contextlib.contextmanager
def checkpointers(arena_dir, timeout_s: float):
    """Yield a maker of Checkpointers of a world of one with a process each; closed at the end."""
    made: list[replica.Checkpointer] = []

    def maker(state, **options):
        given = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a", "timeout_s": timeout_s}
        given |= {"redundancy": "none", "random_states": False, "background": "process"}
        made.append(replica.Checkpointer(state, **given | options))
        return made[-1]

    yield maker
    for one in made:
        one.close()


def commit(state, one, step: int) -> None:
    """Train and save a step."""
    state["w"].fill_(step)
    one.save(step, when_busy="wait").wait("committed", COMMIT_S)


def pid_of(checkpointer) -> int:
    """Return the pid of the background process."""
    return checkpointer._engine._line.pid


def background_processes() -> list[psutil.Process]:
    """List the background processes of this trainer that have not ended."""
    return [child for child in psutil.Process().children() if _is_ours(child)]


def _is_ours(child: psutil.Process) -> bool:
    try:
        return any("replica.background" in word for word in child.cmdline())
    except psutil.NoSuchProcess:
        return False
