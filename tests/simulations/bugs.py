"""Deliberate bugs: what a programmer might have got wrong, each switched on for a run.

A bug replaces one function of ``recovery``, or one piece of the simulated driver that stands for
its twin in ``replica``, and nothing of the checkers or of the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from recovery import commit, frozen, inventory, layout, mend, plan, repair, session
from recovery.actions import Await, CompareSet, Got
from recovery.admission import propose
from recovery.commit import COMMITTED, SaveOutcome, decision_key
from recovery.inventory import Choice
from recovery.ledger import ABORTED, HELD, Ledger
from recovery.manifest import WHOLE
from recovery.session import MoveResult
from simulations import background, fetcher, opening, saver, trainer
from simulations.background import Background
from simulations.config import Config, Fault
from simulations.fetcher import Fetched, Fetcher
from simulations.launcher import Launcher
from simulations.memory import Slot
from simulations.mender import Mender
from simulations.process import Process
from simulations.saver import Exchanging
from simulations.swarm import draw
from simulations.tasks import Delete, StoreDown

FAULTS = 30
BUGS = []


@dataclass(frozen=True)
class Bug:
    """``words``: the mistake. ``rules``: those that it may be found by. ``runs``: seed to run."""

    name: str
    words: str
    switch: Callable
    rules: tuple[str, ...]
    seeds: int
    runs: Callable[[int], Config]


def small(seed):
    """Return the run of the swarm that belongs to ``seed``, with its first faults only."""
    config = draw(seed)
    return replace(config, faults=config.faults[:FAULTS])


def only(*kinds):
    """Return runs of the swarm with faults of these kinds only."""

    def runs(seed):
        config = draw(seed)
        faults = [
            replace(fault, kind=kinds[n % len(kinds)]) for n, fault in enumerate(config.faults)
        ]
        return replace(config, faults=tuple(faults[:FAULTS]))

    return runs


def bug(words, *rules, seeds=40, runs=small):
    """Register a function with one yield as a bug."""

    def register(function):
        name = function.__name__.replace("_", " ")
        BUGS.append(Bug(name, words, contextmanager(function), rules, seeds, runs))
        return function

    return register


def swap(*places):
    """Replace (where, name, value) for the length of a with statement."""
    stack = ExitStack()
    for where, name, value in places:
        stack.enter_context(patch.object(where, name, value, create=name == "sorted"))
    return stack


# Slots.


@bug("my bytes are HELD, so what they replace can go: one phase before the decision", "P1")
def release_at_held():
    """The base's slots are given up when this rank reports HELD, and not when it reads a commit."""
    inner = Process.change

    def change(self, ledger):
        inner(self, ledger)
        if ledger.state == HELD:
            for slot in self.arena.slots.values():
                if slot.record is not None and slot.record.generation == ledger.base:
                    self.arena.invalidate(self, slot)

    with swap((Process, "change", change)):
        yield


@bug("the newest attempt is what must be kept, the base may go", "P1")
def reuse_of_the_base():
    """``reusable`` looks at the newest attempt only."""

    def reusable(self, generation):
        return generation is None or self.decided or generation != self.current

    with swap((Ledger, "reusable", reusable)):
        yield


@bug("after a restore there is one generation to keep, the restored one", "P1", "P10", "P18")
def kept_generation_released_early():
    """``rebase`` forgets the older, better protected generation (P10)."""

    def rebase(self, base, kept=None, kept_protection=-1):
        return replace(self, base=base)

    with swap((Ledger, "rebase", rebase)):
        yield


def slow_link_and_aborts(seed):
    """Return a run in which a save is aborted again and again while some bytes are on their way."""
    slow = Fault(kind="delay", node=0, other=1, amount=2500, for_s=60.0, at_s=4.0)
    flips = [Fault(kind="corrupt-wire", node=n % 2, after_s=0.7) for n in range(12)]
    return Config(seed=seed, redundancy="stripe:1+1", nodes=3, faults=(slow, *flips))


@bug(
    "a receive that was given up here is over, so its slot may be taken again",
    "P22",
    seeds=5,
    runs=slow_link_and_aborts,
)
def reuse_under_a_receive():
    """The quarantine is forgotten: nobody waits for the receive, and its slot counts as free."""
    facts = Slot.facts.fget

    def await_receives(self):
        return
        yield

    with swap(
        (Slot, "facts", property(lambda self: replace(facts(self), busy=False))),
        (Exchanging, "_await_receives", await_receives),
    ):
        yield


# Decisions.


@bug("the root has all bytes of its own in place, so it commits", "P4")
def commit_without_all_held():
    """HELD of the others is not waited for."""

    def decide(context):
        key = decision_key(context.generation)
        if context.rank == 0:
            return bytes((yield CompareSet(key, COMMITTED.encode())))
        answer = yield Await((key,), "the decision")
        if isinstance(answer, Got):
            return answer.values[key]
        raise commit._Abort("no decision at the deadline")

    with swap((commit, "_decide", decide)):
        yield


@bug("a rank knows best whether it can take a save", "P2")
def admission_by_each_rank_alone():
    """The proposal is the answer."""

    def admit_session(step, restores, sequence, ledger):
        return propose(sequence, ledger)
        yield

    with swap((trainer, "admit_session", admit_session)):
        yield


@bug("what times out is aborted: why ask?", "P1")
def abort_by_an_own_timeout():
    """An abort is not tried in the store, so nobody else's decision is read."""

    def resolve(context, reason):
        return SaveOutcome(ABORTED, reason)
        yield

    with swap((background, "resolve", resolve)):
        yield


@bug("without the store nothing was committed", "P1")
def lost_store_means_aborted():
    """The outcome of a save that lost the store is not HELD."""
    inner = commit.save_session

    def save_session(context):
        outcome = yield from inner(context)
        return replace(outcome, state=ABORTED) if outcome.state == HELD else outcome

    with swap((background, "save_session", save_session)):
        yield


def cut_off_after_held(seed):
    """Return a run in which a rank loses the store when it waits for a decision, for long."""
    lost = Fault(kind="store-cut", node=1, for_s=30.0, on="save.await-decision", by_rank=1)
    last = Fault(kind="kill-process", rank=0, after_s=60.0)
    return Config(seed=seed, redundancy="stripe:1+1", nodes=3, faults=(lost, last))


@bug(
    "an abort ends a generation like a commit, so its keys may go",
    *("P5", "P1"),
    seeds=5,
    runs=cut_off_after_held,
)
def keys_deleted_after_aborts_alone():
    """Keys expire by the sequence, whatever became of it."""
    inner = Background._finish

    def finish(self, request, outcome):
        yield from inner(self, request, outcome)
        keys = self.process.keys.expired(request.sequence)
        if keys:
            try:
                yield Delete(tuple(keys))
            except StoreDown:
                return

    with swap((Background, "_finish", finish)):
        yield


@bug("HELD is what this rank has sent and received", "P4")
def acknowledgements_not_waited_for():
    """A holder's failure does not keep the owner from HELD."""

    def acknowledge(context, result):
        return
        yield

    def protect(context):
        yield from commit._settle(context)
        yield commit.Exchange(context.layout.sent_by(context.rank))

    with swap((commit, "_acknowledge", acknowledge), (commit, "_protect", protect)):
        yield


# Choosing and restoring.


def lost_and_found(seed):
    """Return a run that loses all, starts anew, and gets a node back that has a larger step."""
    faults = (
        Fault(kind="leave", node=1, at_s=12.0),
        Fault(kind="kill-node", node=0, after_s=0.05),
        Fault(kind="kill-node", node=0, after_s=9.0),
    )
    return Config(seed=seed, redundancy="copies:1", nodes=2, sparing=False, faults=faults)


@bug(
    "the newest generation is the one with the largest step",
    *("P18", "P12", "P1"),
    seeds=5,
    runs=lost_and_found,
)
def newest_by_step_alone():
    """(step, epoch) and not (epoch, step)."""

    def by_step(values, **options):
        values = list(values)
        if values and isinstance(values[0], inventory.Generation):
            return sorted(values, key=lambda g: (g.step, g.epoch), **options)
        return sorted(values, **options)

    with swap((inventory, "sorted", by_step)):
        yield


def away_and_back(seed):
    """Return a run in which a node comes back with what was mended without it meanwhile."""
    away = Fault(kind="leave", node=2, after_s=4.0)
    lost = Fault(kind="kill-node", node=1, on="mend.set-over", after_s=0.2)
    faults = (away, lost) * 4
    job = {"redundancy": "stripe:2+1", "nodes": 4, "interval": 12, "sparing": False}
    return Config(seed=seed, faults=faults, **job)


@bug(
    "k fragments are k fragments, the same one twice too",
    *("protection", "P18", "P10", "P1"),
    seeds=5,
    runs=away_and_back,
)
def duplicates_counted_as_distinct():
    """Whether an owner can be rebuilt, and how many losses it survives, by counting holdings."""

    def recoverable(kind, holdings):
        return any(h.fragment == WHOLE for h in holdings) or len(holdings) >= kind.k

    def owner_protection(kinds, node_of_rank):
        good = [(kind, some) for kind, some in kinds.items() if recoverable(kind, some)]
        if len(good) != 1:
            return -1
        kind, some = good[0]
        wholes = frozenset(node_of_rank[h.rank] for h in some if h.fragment == WHOLE)
        counts = plan.Counter(node_of_rank[h.rank] for h in some if h.fragment != WHOLE)
        return plan.tolerated_losses(counts, wholes, kind.k)

    with swap(
        *((module, "recoverable", recoverable) for module in (inventory, plan, repair)),
        *((module, "owner_protection", owner_protection) for module in (plan, repair)),
    ):
        yield


@bug("when the newest generation is not whole there is nothing to restore", "P18")
def no_step_back():
    """Older generations are not looked at."""
    inner = inventory.choose

    def choose(found):
        newest = max((h.generation for h in found.holdings), default=None)
        choice = inner(found)
        if choice.generation is None or choice.generation == newest:
            return choice
        return Choice(None, 0, choice.reason, choice.lost)

    with swap((frozen, "choose", choose)):
        yield


@bug("my own memory needs no check, and what is newest there is what I want", "mix", "bytes")
def newest_of_each_owner():
    """An own copy is taken whatever its generation, and is not compared with the plan."""
    copy, decode = Fetcher._copy, Fetcher._decode

    def newest_own(self, read):
        own = [
            s
            for s in self.process.arena.slots.values()
            if s.record and (s.record.owner, s.record.fragment) == (read.owner, WHOLE)
        ]
        if read.fragment != WHOLE or not own:
            return copy(self, read)
        best = max(own, key=lambda slot: slot.record.generation)
        self._shard = bytearray(best.payload)
        return []

    def trusting(self, mine):
        if mine.reads[0].local and not self._digests:
            return Fetched(bytes(self._shard), MoveResult(), b"")
        return decode(self, mine)

    with swap((Fetcher, "_copy", newest_own), (Fetcher, "_decode", trusting)):
        yield


@bug("fragment i of owner o is fragment i of owner o", "bytes", "mix", "P4", "P10", "P18")
def fragment_of_another_generation():
    """Neither who serves nor who decodes looks at the generation or the shard's digest."""

    def matching(slots, generation, read):
        found = [
            slot
            for slot in slots
            if slot.record is not None
            and (slot.record.owner, slot.record.fragment) == (read.owner, read.fragment)
            and slot.record.length == read.length
        ]
        return (found[0], found[0].record) if found else None

    def fill(self, index, kind):
        def fill(parcel):
            self._put(index, parcel.payload, kind)
            self._digests[index] = parcel.chunk_digests
            return "" if saver.digest_of(parcel.payload) == parcel.chunk_digests else "digest"

        return fill

    with swap(
        (fetcher, "matching", matching),
        (Fetcher, "_fill", fill),
        (fetcher, "root_digest", lambda *_: _Any()),
    ):
        yield


class _Any:
    """A digest that equals every other."""

    def hex(self):
        """Return what equals everything."""
        return self

    def __eq__(self, other):
        """Equal whatever it is."""
        return True

    __hash__ = None


@bug("the network has checksums of its own", "bytes")
def chunk_digests_not_checked_in_a_restore():
    """What comes in is believed to be what its digests say."""
    inner = Fetcher._fill

    def unchecked(self, index, kind):
        def fill(parcel):
            self._put(index, parcel.payload, kind)
            if parcel.shard_digest.hex() != kind.shard_digest:
                return "the sender names another shard digest than the inventory"
            self._digests[index] = parcel.chunk_digests
            return ""

        return fill if inner else None

    with swap((Fetcher, "_fill", unchecked)):
        yield


def foreign_fragments(seed):
    """Return a run in which a node is lost and what is left of it elsewhere is of other shards.

    As much of it as the redundancy bears.
    """
    faults = []
    for n in range(4):
        faults += [Fault(kind="kill-node", node=n, after_s=8.0)]
        faults += [Fault(kind="foreign", node=i % 5, amount=i, after_s=0.01) for i in range(40)]
    return Config(seed=seed, redundancy="stripe:2+2", nodes=5, faults=tuple(faults))


@bug(
    "k fragments with the right digests are the shard",
    "bytes",
    seeds=5,
    runs=foreign_fragments,
)
def shard_digest_not_checked():
    """What was decoded is not compared with the digest of the shard."""
    with swap((fetcher, "root_digest", lambda *_: _Any())):
        yield


@bug("memory does not change by itself", "bytes", seeds=5, runs=only("corrupt", "kill-process"))
def own_copy_not_checked():
    """A shard in this node's memory is believed to be what its record says."""
    inner = Fetcher._copy

    def copy(self, read):
        with patch.object(fetcher, "digest_of", lambda _: _Any()):
            return inner(self, read)

    with swap((Fetcher, "_copy", copy)):
        yield


@bug("what arrives in a save has been digested by its sender", "P4")
def chunk_digests_not_checked_in_a_save():
    """A holder seals what it received with the digests that came along."""
    inner = Exchanging.receive

    def receive(self, offer, slot):
        with patch.object(saver, "digest_of", lambda _: _Any()):
            pass
        channel = self.process.links.channel(offer.fragment.owner)
        post = channel.receive

        def unchecked(process, fill, then):
            def believing(parcel):
                with patch.object(saver, "digest_of", lambda _: _Any()):
                    return fill(parcel)

            return post(process, believing, then)

        with patch.object(channel, "receive", unchecked):
            inner(self, offer, slot)

    with swap((Exchanging, "receive", receive)):
        yield


@bug("my part came well, so I can load", "P19")
def vote_ignored():
    """A rank that has its shard loads it; what the others found is not waited for."""

    def vote(context, key, plan, result):
        if result == MoveResult():
            return None
        raise session.RestoreAborted("own reads failed")
        yield

    with swap((session, "_vote", vote)):
        yield


@bug("loaded is loaded: nobody else has to be waited for", "P19")
def loaded_decision_ignored():
    """After its own load a rank goes on."""

    def load(context, prefix, generation):
        yield session.Load()

    with swap((session, "_load", load)):
        yield


# Identity.


@bug("the epoch is one more than that of the newest generation found", "P12")
def epoch_of_generations_only():
    """An incarnation that committed nothing leaves no trace, so its epoch is used again."""
    inner = opening._facts

    def facts(process):
        found = yield from inner(process)
        records = [slot.record for slot in process.arena.slots.values() if slot.record]
        return {**found, "epoch": max((r.generation.epoch for r in records), default=0)}

    with swap((opening, "_facts", facts)):
        yield


@bug("the agent is gone, so its workers are", "P13")
def orphan_not_ended():
    """Who has the arena is not ended before it is claimed."""
    with swap((Launcher, "end_orphan", lambda *_: True)):
        yield


# Layout and bytes.


@bug("the next n ranks hold the fragments", "P4")
def two_fragments_on_one_node():
    """Holders are counted by rank and not by node, the owner's own node among them."""

    def make_layout(redundancy, topology, sizes):
        made = layout.make_layout(redundancy, topology, sizes)
        stripes = tuple(
            replace(
                stripe,
                fragments=tuple(
                    replace(f, holder=(stripe.owner + 1 + f.index) % topology.world)
                    for f in stripe.fragments
                ),
            )
            for stripe in made.stripes
        )
        return replace(made, stripes=stripes)

    opening.layout_of.cache_clear()
    with swap((opening, "make_layout", make_layout)):
        yield
    opening.layout_of.cache_clear()


@bug("the shards of all owners have one length", "P4", "bytes")
def tail_of_an_uneven_shard_lost():
    """Fragments are cut at floor(S / k), so what is over is in none of them."""
    inner = saver.encode

    def encode(code, shard):
        even = len(shard) // code.k * code.k
        found = inner(code, shard[:even] + bytes(len(shard) - even))
        return replace(found, digests=found.digests)

    with swap((saver, "encode", encode)):
        yield


# Mending.


def paused(seed):
    """Return a short run that saves nothing at its end until mending has done its work.

    A file that was cut short under a living job is noticed by its next save or restore only.
    """
    config = small(seed)
    faults = tuple(fault for fault in config.faults if fault.kind != "truncate")
    return replace(config, faults=faults, paused=True)


@bug("a restored generation is as good as it was", "P10", seeds=5, runs=paused)
def forgotten_reprotection():
    """Nobody calls for a mend."""

    def wanted(self):
        return ""
        yield

    with swap((Mender, "wanted", wanted)):
        yield


@bug("what was planned was done", "P10", "protection", "P1")
def mend_done_without_sending():
    """The missing fragments are reported as placed, and nothing was sent."""
    inner = mend._exchange

    def exchange(context, found):
        idle = replace(found, stripes=tuple(replace(s, sends=()) for s in found.stripes))
        return (yield from inner(context, idle))

    with swap((mend, "_exchange", exchange)):
        yield


@bug("whoever has not reported has nothing to say", "P10", "protection", "P1")
def mend_done_for_the_living_only():
    """What the living cannot hold is not told, so a part is called done."""
    inner = repair.make_repair

    def make_repair(*args):
        return replace(inner(*args), lacking=(), lost=())

    with swap((mend, "make_repair", make_repair)):
        yield
