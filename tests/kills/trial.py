"""One case of the kill matrix, from a healthy world to a healthy one again.

Two steps are committed; one rank fails at a point of a third save, a restore or a close; the others
must name it in time; then all start anew under other ranks, on the memory that is left.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from replica.arena import clean, read_arenas
from tests.kills.cases import Case, layout_of, ranks_in_role
from tests.replica.pool import JobFailed, Worker
from tests.replica.worlds import TIMEOUT_S, UNSAVED_STEP, Host, World, names

DEADLINE_S = 3.0
"""``timeout_s`` of the world that a rank is lost from, unless a trial is given another."""
SLACK_S = 5.0
BLOCKED_S = 1.0
"""A busy machine's share in how long the training thread stood, beyond what is stated."""
REACHED_S = 20.0
"""For a point to be reached, far more than it takes."""
PROTECTED_S = 20.0
"""For a restored step to be fully protected again."""
SMALL = 4000
TWO_CHUNKS = 1_100_000
"""So many numbers are more than a chunk and fewer than two."""
CHUNKED = ("save.first_chunk", "save.last_chunk")
SEALED = ("save.ack", "save.held", "save.commit", "save.release")
"""Here the victim's own copy is verified, so the step may be restored though it is undecided."""
NEWEST = 2


class Trial:
    """Runs one case. ``check`` raises AssertionError with every log in its notes."""

    def __init__(self, real: Host, case: Case, rng, deadline_s: float = DEADLINE_S) -> None:
        self.real, self.case, self.rng, self.deadline_s = real, case, rng, deadline_s
        self.nodes = case.nodes
        self.layout = layout_of(case.redundancy, case.nodes)
        self.victim = int(rng.choice(ranks_in_role(case.role, case.redundancy, case.nodes)))
        self.world: World | None = None
        self.logs: dict[int, str] = {}
        self.lost: set[int] = set()
        self.committed = NEWEST
        self.port: int | None = None
        self.others = processes() - real.pool.pids

    def check(self) -> None:
        """Carry the case out."""
        try:
            if self.case.phase.startswith("restore."):
                self.fail_in_a_restore()
            elif self.case.phase.startswith("mend."):
                self.fail_in_a_mend()
            elif self.case.phase == "close":
                self.fail_in_a_close()
            else:
                self.fail_in_a_save()
            self.end_the_world()
            self.begin_again()
        except AssertionError as error:
            error.add_note(f"victim: rank {self.victim} of {self.nodes}")
            workers = enumerate(self.world.workers if self.world else ())
            logs = {rank: worker.log() for rank, worker in workers if rank not in self.lost}
            for rank, log in sorted((self.logs | logs).items()):
                error.add_note(f"--- log of the worker that was last rank {rank}\n{log}")
            raise

    # ---- the fault

    def fail_in_a_save(self) -> None:
        """The victim fails in the third save; the tickets of the others name it."""
        self.open_and_commit()
        if self.case.phase == "save.plan":
            # Ranks plan together once in each process, at its first save.
            self.world.leave()
            self.open(self.nodes, self.world.workers)
        self.arm()
        self.world.begin("save", step=3)
        fell = self.fall()
        if self.case.phase == "save.plan":
            for rank in self.survivors:
                self.check_named(*self.raised(rank), "PeerError")
            # The one save() that waits for others.
            assert time.monotonic() - fell < self.deadline_s + BLOCKED_S
        else:
            for rank in self.survivors:
                self.check_begun(self.world[rank].result())
            self.check_words(3)
        self.check_in_time(fell)

    def check_words(self, step: int) -> None:
        """All tickets failed and name the lost, or all are committed and those of the next do."""
        words = self.world.each("settle", ranks=self.survivors, step=step)
        if "committed" not in words:
            for text in words:
                assert self.names_the_lost(text), text
            return
        assert set(words) == {"committed"}, words
        assert step == 3, "a save was committed without a rank that is lost"
        self.committed = step
        for said in self.world.each("save", ranks=self.survivors, step=4):
            self.check_not_blocked(said)
        self.check_words(4)

    def fail_in_a_close(self) -> None:
        """The victim fails at its close while its save is held back: the others' closes end."""
        self.open_and_commit()
        self.world[self.victim].call("hold_saves")
        self.world.each("save", step=3)
        self.world[self.victim].hear("save held")
        self.arm()
        self.world.begin("close")
        fell = self.fall()
        for rank in self.survivors:
            self.world[rank].result()
        self.check_in_time(fell)
        for text in self.world.each("settle", ranks=self.survivors, step=3):
            assert self.names_the_lost(text), text

    def fail_in_a_restore(self) -> None:
        """A node is lost before; the victim fails as all restore, and the others name it."""
        self.lose_a_node()
        self.world.begin("restore")
        fell = self.fall()
        kind = "RestoreHalfDone" if self.case.phase == "restore.load" else "RestoreAborted"
        for rank in self.survivors:
            self.check_named(*self.raised(rank), kind)
        self.check_in_time(fell)
        if kind == "RestoreAborted":
            ranks = self.survivors
            assert all(self.world.each("state_is", ranks=ranks, step=UNSAVED_STEP))

    def fail_in_a_mend(self) -> None:
        """A node is lost before; all restore, and the victim fails as they mend what it held."""
        self.lose_a_node()
        assert self.world.each("restore") == [NEWEST] * len(self.world)
        fell = self.fall()
        waited = {"kind": "mend", "timeout_s": self.deadline_s + SLACK_S}
        for event in self.world.each("await_event", ranks=self.survivors, **waited):
            assert event is not None, "no word of the mend"
            assert self.names_the_lost(event["reason"]), event
        self.check_in_time(fell)

    def lose_a_node(self) -> None:
        """Two steps are committed, a node is lost, and all stand ready, under other ranks."""
        self.open_and_commit()
        self.world.leave()
        order = self.new_order(self.nodes)
        nodes = "".join(self.nodes[rank] for rank in order)
        victims = ranks_in_role(self.case.role, self.case.redundancy, nodes)
        self.victim = int(self.rng.choice(victims))
        empty = self.node_lost_before(nodes)
        self.real.lose(empty)
        self.open(nodes.replace(empty, "y"), [self.world[rank] for rank in order])
        self.world.each("start")
        self.arm()

    def node_lost_before(self, nodes: str) -> str:
        """Choose the node that is lost before the victim is: all in all no more than may be."""
        its_own = nodes[self.victim]
        others = sorted(set(nodes) - {its_own})
        one_only = self.layout.redundancy.survivable_nodes == 1
        if one_only and self.case.arena == "deleted":
            return its_own
        return str(self.rng.choice(others))

    # ---- its parts

    def open(self, nodes: str, workers: list[Worker], **options: object) -> None:
        """Make a world, by default the one that will lose a rank."""
        self.nodes = nodes
        chunked = self.case.phase in CHUNKED
        self.elements = self.layout.redundancy.k * TWO_CHUNKS if chunked else SMALL
        same = {"redundancy": self.case.redundancy, "elements": self.elements}
        limit = {"timeout_s": self.deadline_s}
        self.world = self.real.open(nodes, workers, self.port, **same | limit | options)

    def open_and_commit(self) -> None:
        """Commit two steps, in two incarnations: the first time is slow in a fresh process."""
        workers = self.real.pool.take(len(self.nodes))
        self.open(self.nodes, workers, timeout_s=TIMEOUT_S)
        self.commit(1)
        self.world.leave()
        self.open(self.nodes, workers)
        self.commit(NEWEST)

    def commit(self, step: int) -> None:
        """Save a step on all ranks, to the end."""
        assert self.world.each("commit", step=step) == ["committed"] * len(self.world)

    def arm(self) -> None:
        self.world[self.victim].call("arm", point=self.case.phase, action=self.case.fault)

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(len(self.world)) if rank not in self.lost]

    @property
    def doomed(self) -> list[int]:
        """The ranks that end with the victim: with the arenas a whole node is lost."""
        if self.case.arena == "kept":
            return [self.victim]
        node = self.nodes[self.victim]
        return [rank for rank in range(len(self.world)) if self.nodes[rank] == node]

    def fall(self) -> float:
        """Wait until the victim has failed at its point; when it did."""
        victim = self.world[self.victim]
        if self.case.fault == "stop":
            victim.stopped(REACHED_S)
            self.lost.add(self.victim)
        else:
            victim.died(REACHED_S)
            self.bury()
        return time.monotonic()

    def bury(self) -> None:
        """End whoever is lost with the victim; their successors start meanwhile."""
        for rank in self.doomed:
            self.end(rank)

    def end(self, rank: int) -> None:
        worker = self.world[rank]
        worker.process.kill()
        worker.died()
        self.logs[rank] = worker.log()
        self.real.pool.remove(worker)
        self.lost.add(rank)

    def raised(self, rank: int) -> tuple[str, str]:
        """Kind and text of what the job under way at a rank raised."""
        try:
            value = self.world[rank].result()
        except JobFailed as failed:
            return failed.kind, failed.text
        raise AssertionError(f"rank {rank} answered {value!r}, expected an error")

    def names_the_lost(self, text: str) -> bool:
        return any(names(text, rank) for rank in self.lost)

    def check_named(self, kind: str, text: str, expected: str) -> None:
        assert (kind, self.names_the_lost(text)) == (expected, True), f"{kind}: {text}"

    def check_in_time(self, since: float) -> None:
        """Nobody was waited for beyond the deadline, the time for the bytes, and a slack."""
        sent_bytes = self.layout.redundancy.n * 4 * self.elements
        limit_s = self.deadline_s + sent_bytes / 20e6 + SLACK_S
        took_s = time.monotonic() - since
        assert took_s < limit_s, f"{took_s:.1f} s, at most {limit_s:.1f} are stated"

    def check_begun(self, said: dict) -> None:
        self.check_not_blocked(said)

    def check_not_blocked(self, said: dict) -> None:
        """A save() took the step, and the training thread stood no longer than a copy takes."""
        assert said["skipped"] is False, said
        assert said["seconds"] < BLOCKED_S, said

    # ---- and afterwards

    def end_the_world(self) -> None:
        """The survivors leave as after a failed collective; the memory that was lost is removed."""
        if self.case.fault == "stop":
            self.bury()
        self.world.each("leave" if self.case.phase == "close" else "give_up", ranks=self.survivors)
        views = read_arenas(self.real.arena_dir)
        known = max(view.head.committed.step for view in views if view.head.committed)
        assert known <= 3, known
        self.committed = max(self.committed, known)
        # A receive that has not returned keeps its arena until the process ends, as a launcher
        # would see to.
        held = {view.head.pid for view in views if view.alive}
        self.lost.update(rank for rank in self.survivors if self.world[rank].pid in held)
        for rank in self.lost - set(self.logs):
            self.end(rank)
        if self.case.arena == "deleted":
            self.real.lose(self.nodes[self.victim])

    def begin_again(self) -> None:
        """Restore under other ranks, compare every bit, save, and leave nothing behind."""
        order = self.new_order(self.nodes)
        fresh = self.real.pool.take(len(self.lost))
        workers = [fresh.pop() if rank in self.lost else self.world[rank] for rank in order]
        nodes = "".join(self.nodes[rank] for rank in order)
        if self.case.arena == "deleted":
            nodes = nodes.replace(self.nodes[self.victim], "z")
        options = {"redundancy": self.case.redundancy, "elements": self.elements}
        self.lost.clear()
        self.world = world = self.real.open(nodes, workers, **options)
        steps = set(world.each("restore"))
        assert len(steps) == 1, steps
        (step,) = steps
        possible = {self.committed, 3} if self.case.phase in SEALED else {self.committed}
        assert step in possible, f"restored step {step}, expected one of {possible}"
        assert all(world.each("state_is", step=step))
        protected = world.each("await_protection", timeout_s=PROTECTED_S)
        assert protected == ["full"] * len(world)
        self.commit(step + 2)
        self.check_nothing_left()

    def new_order(self, nodes: str) -> list[int]:
        """Renumber: the former rank of each new one. Nodes change places, their ranks as well."""
        names_of_nodes = sorted(set(nodes))
        turn = int(self.rng.integers(1, len(names_of_nodes)))
        turned = names_of_nodes[turn:] + names_of_nodes[:turn]
        return [r for node in turned for r in reversed(range(len(nodes))) if nodes[r] == node]

    def check_nothing_left(self) -> None:
        """Living arenas alone stay after a clean, then nothing; no process but the workers."""
        arena_dir = self.real.arena_dir
        clean(arena_dir)
        views = read_arenas(arena_dir)
        assert [view.alive for view in views] == [True] * len(self.world)
        self.world.leave()
        assert self.world.each("reset") == ["clean"] * len(self.world)
        clean(arena_dir)
        assert files_under(arena_dir) == []
        assert processes() <= self.real.pool.pids | self.others


class StoreTrial(Trial):
    """A case in which the store is in the process of rank 0, the victim."""

    def open(self, nodes: str, workers: list[Worker], **options: object) -> None:
        """Serve the store of this world from its rank 0."""
        self.port = workers[0].call("host_store")
        super().open(nodes, workers, **options)

    def check_begun(self, said: dict) -> None:
        """Rank 0 may be ahead of a survivor, which then finds no store to ask about the step."""
        if said["skipped"]:
            self.check_skipped(said)
        else:
            self.check_not_blocked(said)

    def check_skipped(self, said: dict) -> None:
        """A save() said that the store is gone, in time."""
        assert said["skipped"] is True, said
        assert "store" in said["reason"], said
        assert said["seconds"] < self.deadline_s + BLOCKED_S, said

    def check_words(self, step: int) -> None:
        """Nobody can say who is lost: the store is. The next save is skipped, in time."""
        for said in self.world.each("save", ranks=self.survivors, step=step + 1):
            self.check_skipped(said)
        for status in self.world.each("status", ranks=self.survivors):
            assert status["committed_step"] in (NEWEST, step)


def processes() -> set[int]:
    """All that runs under this process."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def files_under(directory: Path) -> list[str]:
    """List everything in a directory that is not one of the user's own folders."""
    return [str(path) for path in directory.rglob("*") if not path.is_dir()]
