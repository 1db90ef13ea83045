"""What stands around a session in these tests: layouts, arenas and the edges of every rank.

Bytes are told by their nature only: a fragment in an arena or on the wire is ``good``, ``damaged``
(its digest fails), ``foreign`` (its digest is right, but it is of another shard) or ``unheard``
(it does not come, which says nothing of it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from erasure.digest import digest
from recovery.actions import Await, Got, Publish
from recovery.commit import (
    Connect,
    Exchange,
    ExchangeResult,
    Prepared,
    SaveContext,
    Settle,
    decision_key,
    held_root,
    parse_decision,
    resolve,
    save_session,
)
from recovery.inventory import Holding, Report, ShardKind
from recovery.layout import make_layout, parse_redundancy
from recovery.manifest import WHOLE, Generation, generation_id
from recovery.session import (
    Doubt,
    Load,
    Move,
    MoveResult,
    NoteFailure,
    RestoreContext,
    restore_session,
)
from recovery.topology import Topology
from recovery.tree import name_ranks
from tests.recovery.world import with_edges

# A fault at every action of every rank takes many runs: each layout with one kind of deadline.
sweep = pytest.mark.parametrize(
    ("redundancy", "nodes", "one_deadline"),
    [
        ("copies:1", (1, 1), True),
        ("copies:1", (2, 2), False),
        ("copies:2", (1, 1, 1), False),
        ("stripe:2+1", (1, 1, 1, 1), True),
        ("stripe:1+1", (2, 2, 2), False),
        ("stripe:3+1", (1, 1, 1, 1, 1), True),
    ],
)

GOOD, DAMAGED, FOREIGN, UNHEARD = "good", "damaged", "foreign", "unheard"
NONCE = "0" * 32


def topology_of(*ranks_per_node):
    """Return nodes a, b, c ... with so many ranks each."""
    return Topology(
        tuple(
            chr(ord("a") + node) for node, count in enumerate(ranks_per_node) for _ in range(count)
        )
    )


@cache
def layout_of(redundancy, *ranks_per_node, size=1000):
    """Return the layout of ``redundancy`` over nodes of so many ranks each."""
    topology = topology_of(*ranks_per_node)
    code = parse_redundancy(redundancy, len(topology.nodes))
    return make_layout(code, topology, [size] * topology.world)


def generation_of(step, epoch=1):
    """Return the generation of ``step``, with an id of its own."""
    return Generation(epoch, step, generation_id("job", NONCE, step, epoch))


def digest_of(generation, owner):
    """Return the digest of the shard of ``owner`` in ``generation``."""
    return digest(f"{generation.id}/{owner}".encode())


class SaveRig:
    """One generation being saved by every rank of a layout, with the edges' faults.

    ``refused``: {(holder, owner): reason}; ``misread``: (holder, owner) that verifies another
    digest than the owner's; ``incarnations``: what each arena is now, by rank.
    """

    def __init__(self, layout, *, step=2, refused=None, misread=(), incarnations=None, sizes=None):
        self.layout, self.generation, self.base = layout, generation_of(step), generation_of(1)
        self.refused, self.misread = refused or {}, set(misread)
        world = layout.topology.world
        self.agreed = [digest(f"arena {rank}".encode()).hex() for rank in range(world)]
        self.incarnations = incarnations or {}
        self.sizes = sizes or [1000] * world
        self.sealed = {rank: set() for rank in range(world)}
        self.prepared, self.sending = set(), set()

    def context(self, rank):
        """Return what the rank knows at the start."""
        return SaveContext(
            rank=rank,
            layout=self.layout,
            generation=self.generation,
            base=self.base,
            shard_bytes=self.sizes[rank],
            incarnation=self.incarnations.get(rank, self.agreed[rank]),
            held_root=held_root(self.agreed),
        )

    def sessions(self):
        """Return the save session of every rank, its edges attached."""
        return {
            rank: with_edges(save_session(self.context(rank)), self._edges(rank))
            for rank in range(self.layout.topology.world)
        }

    def resolves(self, ranks):
        """Return the sessions with which ranks read the decision after the store came back."""
        return {rank: resolve(self.context(rank), "lost the store") for rank in ranks}

    def decision(self, store):
        """Return (word, reason) of the one decision, or None."""
        raw = store.get(decision_key(self.generation))
        return None if raw is None else parse_decision(raw)

    def _edges(self, rank):
        return {
            Connect: lambda action: self._connect(rank, action),
            Settle: lambda action: self._settle(rank, action),
            Prepared: lambda _: self._prepare(rank),
            Exchange: lambda action: self._exchange(rank, action),
        }

    def _prepare(self, rank):
        self.prepared.add(rank)
        return
        yield

    def _connect(self, rank, action):
        for peer in action.peers:
            yield Publish(f"wire/up/{rank}/{peer}", b"")
        keys = tuple(f"wire/up/{peer}/{rank}" for peer in action.peers)
        answer = yield Await(keys, "connections")
        late = [] if isinstance(answer, Got) else [int(key.split("/")[2]) for key in answer.keys]
        return {peer: f"no connection to rank {peer}" for peer in late}

    def _settle(self, rank, action):
        assert [o.fragment for o in action.offers] == list(self.layout.held_by(rank))
        assert [o.shard_bytes for o in action.offers] == [
            self.sizes[f.owner] for f in self.layout.held_by(rank)
        ]
        return {f: self.refused.get((rank, f.owner), "") for f in self.layout.held_by(rank)}
        yield

    def _exchange(self, rank, action):
        mine = digest_of(self.generation, rank)
        self.sending.add(rank)
        for fragment in action.send:
            yield Publish(f"wire/{fragment.owner}/{fragment.index}", mine)
        held = self.layout.held_by(rank)
        keys = tuple(f"wire/{f.owner}/{f.index}" for f in held)
        answer = yield Await(keys, "bytes")
        if not isinstance(answer, Got):
            late = sorted({int(key.split("/")[1]) for key in answer.keys})
            return ExchangeResult(mine, {}, (f"no bytes from {name_ranks(late)}",))
        received = {
            f: digest(b"other") if (rank, f.owner) in self.misread else answer.values[key]
            for f, key in zip(held, keys, strict=True)
        }
        self.sealed[rank] = {(rank, WHOLE), *((f.owner, f.index) for f in held)}
        return ExchangeResult(mine, received)


@dataclass(frozen=True)
class Slot:
    """One slot of a model arena."""

    generation: Generation
    owner: int
    fragment: int
    state: str = GOOD


class RestoreRig:
    """The arenas of a job and what its ranks' live objects hold.

    ``saved`` is the layout that the generations of ``steps`` were saved with; every slot is there
    and good at first. ``topology`` is that of the restoring job, by default the same; ``home[p]``
    is the rank that now works the arena which rank p filled.
    """

    def __init__(self, saved, steps=(1, 2), *, topology=None, home=None, committed=None):
        self.saved, self.topology = saved, topology or saved.topology
        self.home = home or {rank: rank for rank in range(saved.topology.world)}
        self.generations = [generation_of(step) for step in steps]
        self.committed = self.generations[-1] if committed is None else committed
        self.slots = {rank: [] for rank in range(self.topology.world)}
        for generation in self.generations:
            for rank, place in self.home.items():
                self.slots[place].append(Slot(generation, rank, WHOLE))
                self.slots[place] += [
                    Slot(generation, f.owner, f.index) for f in saved.held_by(rank)
                ]
        self.failures, self.load_errors, self.misfits = (), {}, {}
        self.doubted = []
        self.live, self.noted, self.moved_bytes = {}, [], 0
        self._plans = {}

    def lose(self, *nodes):
        """Empty the arenas of these nodes: they died, and others took their place."""
        for node in nodes:
            for rank in self.topology.ranks_by_node[node]:
                self.slots[rank] = []

    def mark(self, state, step, owner, *fragments):
        """Give slots another state."""
        for rank, slots in self.slots.items():
            self.slots[rank] = [
                replace(s, state=state)
                if (s.generation.step, s.owner) == (step, owner) and s.fragment in fragments
                else s
                for s in slots
            ]

    def sessions(self, *, number=0, load_state=True):
        """Return the restore session of every rank, its edges attached."""
        return {
            rank: with_edges(
                restore_session(self.context(rank, number), load_state=load_state),
                self._edges(rank),
            )
            for rank in range(self.topology.world)
        }

    def context(self, rank, number=0):
        """Return what the rank knows at the start."""
        code = self.saved.redundancy.code
        holdings = tuple(
            Holding(
                slot.generation,
                slot.owner,
                slot.fragment,
                rank,
                self.saved.topology.world,
                ShardKind(code.k, code.m, 1000, digest_of(slot.generation, slot.owner).hex()),
            )
            for slot in self.slots[rank]
        )
        report = Report(rank, holdings, self.committed, self.failures)
        return RestoreContext(rank=rank, topology=self.topology, report=report, number=number)

    def _edges(self, rank):
        return {
            Move: lambda action: self._move(rank, action),
            Doubt: lambda action: self._doubt(rank, action),
            Load: lambda _: self._load(rank),
            NoteFailure: lambda action: self._note(rank, action),
        }

    def _doubt(self, rank, action):
        """Withdraw those that are damaged."""
        self.doubted.append((rank, action.places))
        self.slots[rank] = [
            s
            for s in self.slots[rank]
            if s.state != DAMAGED
            or s.generation != action.generation
            or (s.owner, s.fragment) not in action.places
        ]
        return
        yield

    def _state(self, generation, read):
        """Return the state of the bytes that ``read`` names; a read of what is not there fails."""
        wanted = (generation, read.owner, read.fragment)
        (found,) = (
            s.state
            for s in self.slots[read.source]
            if (s.generation, s.owner, s.fragment) == wanted
        )
        return found

    def _move(self, rank, action):
        plan, prefix = action.plan, f"wire/{action.attempt}"
        for read in plan.reads_from(rank):
            if not read.local:
                state = self._state(plan.generation, read).encode()
                yield Publish(f"{prefix}/{read.owner}/{read.fragment}", state)
        states = {}
        mine = plan.rebuilds[rank].reads
        for read in mine:
            if read.local:
                states[read] = self._state(plan.generation, read)
                continue
            key = f"{prefix}/{read.owner}/{read.fragment}"
            answer = yield Await((key,), "bytes")
            states[read] = answer.values[key].decode() if isinstance(answer, Got) else DAMAGED
            self.moved_bytes += read.length
        self._plans[rank] = plan
        bad = tuple(read for read in mine if states[read] == DAMAGED)
        foreign = not bad and FOREIGN in states.values() and UNHEARD not in states.values()
        wrong = plan.rebuilds[rank].fragments if foreign else ()
        silent = tuple(read for read in mine if states[read] == UNHEARD)
        return MoveResult(bad, wrong, self.misfits.get(rank, ""), silent)

    def _load(self, rank):
        if rank in self.load_errors:
            return self.load_errors[rank]
        self.live[rank] = self._plans[rank].generation
        return ""
        yield

    def _note(self, rank, action):
        self.noted.append((rank, action.generation, action.error))
        return
        yield
