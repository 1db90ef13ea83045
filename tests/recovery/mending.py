"""What tests of mending share: what lies where, what it truly survives, a group that mends."""

from __future__ import annotations

from itertools import combinations

from recovery.actions import Await, Got, Publish
from recovery.commit import Connect, Exchange, ExchangeResult, Settle
from recovery.inventory import Holding, Inventory, Report, ShardKind
from recovery.manifest import WHOLE
from recovery.mend import MendContext, Regrow, frozen_key, mend_session, over_key, parse_result
from tests.recovery.rigs import digest_of, generation_of
from tests.recovery.world import with_edges

GENERATION = generation_of(3)
SIZE = 1000
NAME = "0.1.0"


def stock_of(layout):
    """Return what lies where when all is well: {rank: {(owner, fragment or WHOLE)}}."""
    world = layout.topology.world
    return {
        rank: {(rank, WHOLE), *((f.owner, f.index) for f in layout.held_by(rank))}
        for rank in range(world)
    }


def holding(layout, rank, owner, fragment, kind=None):
    """Return one holding of the generation."""
    code = layout.redundancy.code
    kind = kind or ShardKind(code.k, code.m, SIZE, digest_of(GENERATION, owner).hex())
    return Holding(GENERATION, owner, fragment, rank, layout.topology.world, kind)


def inventory_of(layout, stock):
    """Return the inventory of a stock."""
    rows = [holding(layout, rank, *place) for rank, places in stock.items() for place in places]
    return Inventory(tuple(sorted(rows)))


def survives(stock, layout, owner, lost):
    """Whether the owner's shard can be had when these nodes are gone."""
    node_of = layout.topology.node_of_rank
    left = {
        fragment
        for rank, places in stock.items()
        if node_of[rank] not in lost
        for place_owner, fragment in places
        if place_owner == owner
    }
    return WHOLE in left or len(left) >= layout.redundancy.k


def true_protection(stock, layout, owners):
    """Return how many nodes of the stock may be lost, whichever they are; -1: one owner is lost.

    Every set of nodes is tried.
    """
    nodes = sorted({layout.topology.node_of_rank[rank] for rank in stock})
    for count in range(len(nodes) + 1):
        for lost in combinations(nodes, count):
            if not all(survives(stock, layout, owner, lost) for owner in owners):
                return count - 1
    return len(nodes)


class MendRig:
    """Every rank of a layout in one mend of what is left of a generation.

    ``lost``: places (rank, (owner, fragment)) that are empty, or ranks whose arenas are.
    ``refused``: {(holder, owner): reason}. ``rotten``: ranks whose own copy is not any more what
    its record says. ``damaged``: places whose bytes fail when they are read. ``late``: ranks that
    begin only when the others have frozen the reports. ``names``: what each calls the mend.
    """

    def __init__(
        self, layout, *, lost=(), refused=None, rotten=(), damaged=(), late=(), names=None
    ):
        self.layout, self.refused = layout, refused or {}
        self.rotten, self.damaged, self.late = set(rotten), set(damaged), set(late)
        self.names = names or {}
        self.arenas = stock_of(layout)
        for one in lost:
            if isinstance(one, int):
                self.arenas[one] = set()
            else:
                rank, place = one
                self.arenas[rank].remove(place)
        self.sent = []
        self._settled = {}

    def name(self, rank):
        """Return what the rank calls the mend."""
        return self.names.get(rank, NAME)

    def context(self, rank):
        """Return what the rank knows at the start."""
        rows = tuple(sorted(holding(self.layout, rank, *place) for place in self.arenas[rank]))
        return MendContext(
            rank=rank,
            layout=self.layout,
            name=self.name(rank),
            generation=GENERATION,
            report=Report(rank, rows),
        )

    def sessions(self):
        """Return the mend session of every rank, its edges attached."""
        return {rank: self._session(rank) for rank in range(self.layout.topology.world)}

    def _session(self, rank):
        if rank in self.late:
            group = self.layout.group_of(rank)
            frozen = Await((frozen_key(self.name(rank), group),), "what comes before us")
            while not isinstance((yield frozen), Got):
                pass
        return (yield from with_edges(mend_session(self.context(rank)), self._edges(rank)))

    def end(self, store, name=NAME):
        """Return (state, protection, reason) of the one end, or None."""
        raw = store.get(over_key(name))
        return None if raw is None else parse_result(raw)

    def _edges(self, rank):
        return {
            Regrow: lambda action: self._regrow(rank, action),
            Connect: lambda action: self._connect(rank, action),
            Settle: lambda action: self._settle(rank, action),
            Exchange: lambda action: self._exchange(rank, action),
        }

    def _regrow(self, rank, action):
        plan, prefix = action.plan, f"wire/{self.name(rank)}/grown"
        for read in plan.reads_from(rank):
            if not read.local:
                assert (read.owner, read.fragment) in self.arenas[rank]
                good = (rank, (read.owner, read.fragment)) not in self.damaged
                yield Publish(f"{prefix}/{read.owner}/{read.fragment}", b"good" if good else b"bad")
        wanted = plan.rebuilds[rank].reads
        for read in wanted:
            if read.local:
                assert (read.owner, read.fragment) in self.arenas[read.source]
                continue
            key = f"{prefix}/{read.owner}/{read.fragment}"
            answer = yield Await((key,), "bytes to grow from")
            if not isinstance(answer, Got):
                return f"nothing from rank {read.source}"
            if answer.values[key] != b"good":
                return f"bad bytes from rank {read.source}"
        if wanted:
            self.arenas[rank].add((rank, WHOLE))
        return ""

    def _connect(self, rank, action):
        prefix = f"wire/{self.name(rank)}/up"
        for peer in action.peers:
            yield Publish(f"{prefix}/{rank}/{peer}", b"")
        keys = tuple(f"{prefix}/{peer}/{rank}" for peer in action.peers)
        if not keys:
            return {}
        answer = yield Await(keys, "connections")
        late = [] if isinstance(answer, Got) else [int(key.split("/")[3]) for key in answer.keys]
        return {peer: f"no connection to rank {peer}" for peer in late}

    def _settle(self, rank, action):
        answers = {
            o.fragment: self.refused.get((rank, o.fragment.owner), "") for o in action.offers
        }
        self._settled[rank] = [o for o in action.offers if not answers[o.fragment]]
        for offer in action.offers:
            assert offer.fragment.holder == rank
            assert (offer.fragment.owner, offer.fragment.index) not in self.arenas[rank]
            assert offer.shard_bytes == SIZE
        return answers
        yield

    def _exchange(self, rank, action):
        prefix, failures = f"wire/{self.name(rank)}/sent", []
        mine = b"rotten" if rank in self.rotten else digest_of(GENERATION, rank)
        for fragment in action.send:
            assert (rank, WHOLE) in self.arenas[rank]
            assert fragment.owner == rank
            self.sent.append(fragment)
            yield Publish(f"{prefix}/{fragment.owner}/{fragment.index}", mine)
        received = {}
        for offer in self._settled[rank]:
            f = offer.fragment
            key = f"{prefix}/{f.owner}/{f.index}"
            answer = yield Await((key,), "bytes")
            if not isinstance(answer, Got):
                failures.append(f"no bytes from rank {f.owner}")
            elif answer.values[key].hex() != offer.shard_digest:
                failures.append(f"rank {f.owner} sent another shard")
            else:
                self.arenas[rank].add((f.owner, f.index))
                received[f] = answer.values[key]
        return ExchangeResult(mine, received, tuple(failures))
