"""Worlds of warm workers: a process group over a store of its own, a Checkpointer in each rank."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from replica.arena import read_arenas
from replica.folder import folder_name
from tests.replica.control import background
from tests.replica.pool import Pool, Worker, failures, results, serve_store

TIMEOUT_S = 20.0
"""Deadline of the Checkpointers, unless a test is about deadlines."""
UNSAVED_STEP = 1000
"""Where a toy stands before anything is restored."""


def names(text: str, rank: int) -> bool:
    """Whether a sentence names a rank, alone or in a list."""
    lists = re.findall(r"\branks? (\d+(?:, \d+)*)", text)
    return str(rank) in ", ".join(lists).split(", ")


class World:
    """Some workers as ranks 0, 1, ... of one group, and the node that each is on."""

    def __init__(self, workers: Sequence[Worker], nodes: Sequence[str]) -> None:
        self.workers, self.nodes = list(workers), list(nodes)

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def __len__(self) -> int:
        return len(self.workers)

    def each(self, job: str, /, ranks: Sequence[int] | None = None, **args: object) -> list:
        """Run a job on all ranks, or some, at the same time; their answers."""
        return results(self.begin(job, ranks, **args))

    def fail(self, job: str, /, ranks: Sequence[int] | None = None, **args: object) -> list:
        """Run a job that must raise on each; (kind, text) of each."""
        return failures(self.begin(job, ranks, **args))

    def begin(
        self, job: str, /, ranks: Sequence[int] | None = None, **args: object
    ) -> list[Worker]:
        """Start a job on all ranks, or some; jobs of the toy get their rank as ``owner``."""
        chosen = list(range(len(self))) if ranks is None else list(ranks)
        for rank in chosen:
            owner = {"owner": rank} if job in _OF_AN_OWNER else {}
            self.workers[rank].start(job, **owner, **args)
        return [self.workers[rank] for rank in chosen]

    def make(self, **options: object) -> None:
        """Make a Checkpointer on every rank, each on its node."""
        for rank, worker in enumerate(self.workers):
            worker.start("make", owner=rank, node_id=self.nodes[rank], step=UNSAVED_STEP, **options)
        results(self.workers)

    def leave(self) -> None:
        """Close the Checkpointers and the group; the workers stay, for another world."""
        self.each("close")
        self.each("leave")


_OF_AN_OWNER = {"save", "commit", "state_is", "train", "resize"}


class Host:
    """One machine of a test: workers, arenas, stores. The ``real`` fixture."""

    def __init__(self, pool: Pool, arena_dir: Path) -> None:
        self.pool, self.arena_dir = pool, arena_dir
        self._store = None
        self._prefixes = count()

    @property
    def port(self) -> int:
        """The port of a store in the test's own process, which no rank's death ends."""
        if self._store is None:
            self._store = serve_store()
        return self._store.port

    def world(
        self, nodes: Sequence[str], workers: Sequence[Worker] | None = None, port: int | None = None
    ) -> World:
        """Join workers, fresh from the pool or given, in one group: rank r is on ``nodes[r]``."""
        workers = self.pool.take(len(nodes)) if workers is None else workers
        prefix, place = f"world-{next(self._prefixes)}", self.port if port is None else port
        for rank, worker in enumerate(workers):
            worker.start("join", rank=rank, world=len(nodes), port=place, prefix=prefix)
        results(workers)
        return World(workers, nodes)

    def open(
        self,
        nodes: Sequence[str],
        workers: Sequence[Worker] | None = None,
        port: int | None = None,
        **options: object,
    ) -> World:
        """Join a world and make its Checkpointers; nothing is opened yet."""
        world = self.world(nodes, workers, port)
        world.make(**self.options(**options))
        return world

    def reopen(self, world: World, **options: object) -> World:
        """Start the same workers on the same nodes anew, as after a crash of them all."""
        world.each("give_up")
        return self.open(world.nodes, world.workers, **options)

    def options(self, **changes: object) -> dict[str, object]:
        """Return the options that every Checkpointer of a test has, with changes."""
        same = {"job": "job", "arena_dir": str(self.arena_dir), "timeout_s": TIMEOUT_S}
        same["background"] = background()
        return same | changes

    def lose(self, *nodes: str) -> None:
        """Remove the arenas of whole nodes, as the loss of their memory would."""
        for node in nodes:
            (path,) = self.arena_dir.glob(f"planaria-*/*/{folder_name(node)}")
            shutil.rmtree(path)

    def fragments(self, *, owner: int, index: int) -> Iterator[Path]:
        """Yield the data files of the slots that hold a fragment of an owner's shard."""
        for view in read_arenas(self.arena_dir):
            for number, slot in view.slots.items():
                record = slot.record
                if record is not None and (record.owner, record.fragment) == (owner, index):
                    yield Path(view.path) / f"slot-{number}.fragment"

    def close(self) -> None:
        """Take the workers back, then end the store."""
        self.pool.give_back()
        self._store = None
