"""Ranks as threads of one process: all of ``replica`` but the network and other processes.

``Cluster.run(body)`` gives every rank a Checkpointer over a state whose value at (rank, step) is
known, runs ``body(member)`` on all of them and ends by a deadline. ``hook`` looks at every request
to the store and every posted buffer, and may block it, drop it or make it fail.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import replica
from replica.group import MemoryGroup

JOB = "job"
DEADLINE_S = 60.0
COMMIT_S = 30.0
"""No test comes near these two; they turn a hang into a failure."""
DROP = "drop"
"""What a hook returns for a request that is to vanish without a word."""

Hook = Callable[[int, str, str, Any], object]
"""(rank, verb, key or peer, value or buffer) -> None to let it pass, or DROP; may raise or wait."""


def outcomes(world: int, body: Callable[[int], Any], deadline_s: float = DEADLINE_S) -> list[Any]:
    """Run ``body(rank)`` on a thread per rank; by rank what it returned, or what it raised."""
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        faulthandler.dump_traceback(sys.__stderr__)
    assert not late, f"ranks {late} did not end within {deadline_s} s"
    return found


def all_of(found: list[Any]) -> list[Any]:
    """Return what all ranks returned; raise the first error among it."""
    for rank, one in enumerate(found):
        if isinstance(one, BaseException):
            one.add_note(f"on rank {rank}")
            raise one
    return found


def truth(rank: int, step: int, count: int) -> torch.Tensor:
    """Return the one right value of a rank's tensor after a step: float64[count]."""
    return torch.arange(count, dtype=torch.float64) * (rank + 1) + 1000.0 * step


@dataclass
class Member:
    """One rank in a test: its Checkpointer, its live state and the events that it was told."""

    rank: int
    count: int
    state: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    ckpt: Any = None

    def __post_init__(self) -> None:
        """Make the state of step 0."""
        if self.count:
            self.state = {
                "w": truth(self.rank, 0, self.count),
                "n": {"step": 0, "rank": self.rank, "seen": [0]},
            }

    @property
    def job(self):
        """The open job: arena, links and stores of this rank."""
        return self.ckpt._engine.job

    def train(self, step: int) -> None:
        """Give the state its value after ``step``, in place."""
        if self.count:
            self.state["w"].copy_(truth(self.rank, step, self.count))
            self.state["n"].update(step=step, seen=[0, step])

    def is_at(self, step: int, owner: int | None = None) -> bool:
        """Whether every value is the right one of ``step``, bit for bit."""
        owner = self.rank if owner is None else owner
        if not self.count:
            return self.state == {}
        plain = {"step": step, "rank": owner, "seen": [0, step] if step else [0]}
        same = torch.equal(self.state["w"], truth(owner, step, self.count))
        return same and self.state["n"] == plain

    def commit(self, *steps: int) -> None:
        """Train and save the steps, each committed before the next."""
        for step in steps:
            self.train(step)
            self.ckpt.save(step, when_busy="wait").wait("committed", COMMIT_S)

    def restore(self) -> dict[str, Any]:
        """Restore, see that the live state is what the step says, and return the event."""
        step = self.ckpt.restore()
        assert self.is_at(step or 0), f"rank {self.rank} holds something else than step {step}"
        event = [event for event in self.events if event["event"] == "restore"][-1]
        assert event["step"] == step
        return event

    def outcome_of(self, step: int) -> str:
        """How the save of a step ended, as told to on_event."""
        (event,) = [e for e in self.events if e["event"] == "save" and e["step"] == step]
        return event["outcome"]


class Cluster:
    """A job whose ranks are threads. ``nodes`` has the node of every rank; ``counts`` its size."""

    def __init__(
        self,
        arena_dir,
        nodes: Sequence[str],
        redundancy: str = "auto",
        *,
        counts: Sequence[int] | None = None,
        hook: Hook | None = None,
        **options: Any,
    ) -> None:
        self.arena_dir, self.nodes = arena_dir, list(nodes)
        self.counts = list(counts or [100] * len(self.nodes))
        self.groups: list[Any] = list(MemoryGroup.make(len(self.nodes)))
        if hook is not None:
            self.groups = [HookedGroup(group, hook) for group in self.groups]
        self.options = {
            "job": JOB,
            "redundancy": redundancy,
            "arena_dir": str(arena_dir),
            "random_states": False,
            "timeout_s": 20.0,
        } | options

    def member(self, rank: int) -> Member:
        """Make one rank's Checkpointer; nothing is opened yet."""
        me = Member(rank, self.counts[rank])
        options = {"node_id": self.nodes[rank], "on_event": me.events.append} | self.options
        me.ckpt = replica.Checkpointer(me.state, group=self.groups[rank], **options)
        return me

    def outcomes(self, body: Callable[[Member], Any], deadline_s: float = DEADLINE_S) -> list[Any]:
        """Run ``body`` on every rank and close; by rank what it returned or raised."""

        def run(rank: int) -> Any:
            me = self.member(rank)
            with me.ckpt:
                return body(me)

        return outcomes(len(self.nodes), run, deadline_s)

    def run(self, body: Callable[[Member], Any], deadline_s: float = DEADLINE_S) -> list[Any]:
        """Run ``body`` on every rank and close; what they returned. Raises a rank's error."""
        return all_of(self.outcomes(body, deadline_s))


class HookedGroup:
    """A group of one rank whose store and transport ask ``hook`` before everything they do."""

    def __init__(self, inner: Any, hook: Hook) -> None:
        self.inner, self.rank, self.world, self._hook = inner, inner.rank, inner.world, hook
        self.exchange = inner.exchange

    def store(self, address, timeout_s):
        """Return the group's store, watched."""
        return HookedStore(self.inner.store(address, timeout_s), self.rank, self._hook)

    def transport(self, network_interface):
        """Return the group's transport, watched."""
        return HookedTransport(self.inner.transport(network_interface), self._hook)


class HookedStore:
    """A store that asks the hook first, with the key below its prefix."""

    def __init__(self, inner: Any, rank: int, hook: Hook) -> None:
        self._inner, self._rank, self._hook = inner, rank, hook

    def set(self, key, value):
        """Ask, then set."""
        if self._hook(self._rank, "set", key, value) is not DROP:
            self._inner.set(key, value)

    def check(self, keys):
        """Ask about each key, then check."""
        for key in keys:
            self._hook(self._rank, "check", key, None)
        return self._inner.check(keys)

    def get(self, keys):
        """Ask about each key, then get."""
        for key in keys:
            self._hook(self._rank, "get", key, None)
        return self._inner.get(keys)

    def compare_set(self, key, value):
        """Ask, then compare and set."""
        self._hook(self._rank, "compare_set", key, value)
        return self._inner.compare_set(key, value)

    def delete(self, key):
        """Ask, then delete."""
        if self._hook(self._rank, "delete", key, None) is not DROP:
            self._inner.delete(key)

    def clone(self, prefix):
        """Return a clone that asks the same hook."""
        return HookedStore(self._inner.clone(prefix), self._rank, self._hook)


class HookedTransport:
    """A transport whose channels ask the hook before each buffer is posted."""

    def __init__(self, inner: Any, hook: Hook) -> None:
        self._inner, self._hook = inner, hook

    def connect(self, name, rank, peer, store, timeout_s):
        """Ask, then connect."""
        self._hook(rank, "connect", str(peer), name)
        inner = self._inner.connect(name, rank, peer, store, timeout_s)
        return HookedChannel(inner, rank, peer, self._hook)


class HookedChannel:
    """A channel that asks the hook first; the hook may also change the bytes in place."""

    def __init__(self, inner: Any, rank: int, peer: int, hook: Hook) -> None:
        self._inner, self._rank, self._peer, self._hook = inner, rank, peer, hook
        self.close = inner.close

    def send(self, buffer):
        """Ask, then send a copy of what is there now."""
        copy = buffer.copy()
        self._hook(self._rank, "send", str(self._peer), copy)
        return self._inner.send(copy)

    def receive(self, buffer):
        """Ask, then receive; ask again when it has returned, well or not."""
        self._hook(self._rank, "receive", str(self._peer), buffer)
        return HookedPending(self._inner.receive(buffer), self)

    def returned(self):
        """Tell the hook that a receive has returned."""
        self._hook(self._rank, "returned", str(self._peer), None)


class HookedPending:
    """A posted receive that tells its channel when it has returned."""

    def __init__(self, inner: Any, channel: HookedChannel) -> None:
        self._inner, self._channel = inner, channel

    def wait(self):
        """Wait, then tell."""
        try:
            self._inner.wait()
        finally:
            self._channel.returned()
