"""What must hold, watched from outside: written from the protocol's rules, not from the code.

The checker is told what happens at the edges (memory, store, restores, faults) and compares it with
truths of its own. It never asks a session, a ledger or a plan. Every verdict names a rule.

The promise that it holds the library to: the newest committed generation, or one restored and as
well protected, is *owed*. A fault's damage counts against what the code can lose; within that,
every restore must bring the owed generation or a newer one, and at no moment may anybody destroy
more of it than faults did.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recovery.manifest import Generation
from recovery.session import RestoreOutcome
from simulations.debt import Debt
from simulations.mends import Mends
from simulations.promises import Promises
from simulations.truth import Truth, holdings, tolerance
from simulations.workload import SHARD_MAX

if TYPE_CHECKING:
    from simulations.memory import Arena, Slot
    from simulations.process import Group, Process
    from simulations.world import World


@dataclass(frozen=True)
class Violation:
    """A rule that did not hold."""

    rule: str
    text: str
    time_s: float


class Checker:
    """Collects violations and counts; ``owed`` is what the next restore must at least bring."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.promises = Promises(world)
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self.debt = Debt(world)
        self.mends = Mends(world)
        self.beyond = 0
        """Restores that went back behind what was owed after losses beyond the redundancy."""
        self.full_commits = 0
        """Commits in a row that found all of their bytes in place and no fault since."""
        self._decisions: dict[str, str] = {}
        self._writers: dict[tuple[str, str], Process] = {}
        self._admitted: dict[tuple[int, int], bool] = {}
        self._epochs: dict[int, tuple[int, str]] = {}
        self._known: dict[int, int] = {}
        """By incarnation, the largest epoch that its arenas or the store know."""
        self._nonces: set[str] = set()
        self._outcomes: dict[int, Generation | None] = {}
        self._loaded: dict[tuple[int, int], bytes] = {}

    @property
    def owed(self) -> Truth | None:
        """What the next restore must at least bring."""
        return self.debt.owed

    @property
    def truths(self) -> dict[str, Truth]:
        """Every generation as its owners staged it, by its id."""
        return self.debt.truths

    def violation(self, rule: str, text: str) -> None:
        """Note that a rule did not hold."""
        self._world.tell(f"VIOLATION of {rule}: {text}")
        self.violations.append(Violation(rule, text, self._world.now_s))

    # Memory.

    def touched(self, process: Process, arena: Arena) -> None:
        """Somebody changes an arena: only who has claimed it may (P13)."""
        if arena.owner is not process:
            owner = arena.owner.name if arena.owner else "nobody"
            self.violation("P13", f"{process.name} changes an arena that {owner} has")

    def wrote(self, process: Process, arena: Arena, slot: Slot) -> None:
        """Bytes change: never under a record that declares them valid (P6, P7, P22)."""
        self.touched(process, arena)
        if slot.record is not None:
            self.violation(
                "P22" if slot.holds else "P6",
                f"{process.name} overwrites slot {slot.number}, which holds "
                f"{slot.record.describe()}",
            )

    def overwrites(self, process: Process, arena: Arena, slot: Slot) -> None:
        """A slot is declared empty or given back: what is owed must not lose by it (P1, P10)."""
        self.touched(process, arena)
        if slot.holds:
            self.violation("P22", f"{process.name} reuses slot {slot.number} under a receive")
        owed, record = self.owed, slot.record
        if owed is None or record is None or record.generation.id != owed.generation.id:
            return
        if not owed.is_true(slot):
            return
        before = tolerance(owed, holdings(owed, self._world.everywhere())[record.owner])
        slot.record = None
        after = tolerance(owed, holdings(owed, self._world.everywhere())[record.owner])
        slot.record = record
        promised = owed.survives - len(owed.nodes_hit(record.owner))
        if after < min(before, promised):
            self.violation(
                "P1",
                f"{process.name} gives up {record.describe()}: {after} more nodes may be lost "
                f"after that, {promised} were promised",
            )

    def trimmed(self, process: Process, expected: int) -> None:
        """After a commit the arena is two own slots and two for each fragment (Memory)."""
        slots = process.arena.slots.values()
        own = sum(1 for slot in slots if slot.kind == "own" and not slot.holds)
        held = sum(1 for slot in slots if slot.kind == "held" and not slot.holds)
        most = 2 * SHARD_MAX + 2 * expected * SHARD_MAX
        if own > 2 or held > 2 * expected or process.arena.bytes_allocated > most:
            self.violation("memory", f"{process.name} keeps {own} own and {held} held slots")

    def claimed(self, process: Process, arena: Arena) -> None:
        """A process takes an arena over; nobody else may be alive that writes there (P13)."""
        epochs = [arena.head.epoch, int(self._world.store.job_keys.get("epoch", b"0"))]
        for slot in arena.slots.values():
            if slot.record is not None:
                epochs += [slot.record.generation.epoch, slot.record.fence_epoch]
        number = process.group.number
        self._known[number] = max(self._known.get(number, 0), *epochs)
        for other in self._world.launcher.living():
            if other is not process and getattr(other, "arena", None) is arena:
                self.violation("P13", f"{process.name} claims what living {other.name} uses")

    def arena_lost(self, arena: Arena) -> None:
        """An orphan that cannot be ended keeps its arena, which counts as lost."""
        for slot in arena.slots.values():
            self.debt.slot_hit(arena.node, slot)

    # Faults.

    def is_live(self, generation: Generation) -> bool:
        """Whether a generation still matters to anybody: owed, or not decided."""
        truth = self.truths.get(generation.id)
        return truth is not None and (truth is self.owed or generation.id not in self._decisions)

    # Sessions.

    def opened(self, process: Process) -> None:
        """Epochs rise and nonces are new (P12)."""
        mine, number = (process.epoch, process.nonce), process.group.number
        first = self._epochs.setdefault(number, mine)
        if first != mine:
            self.violation("P12", f"{process.name} is in {mine}, others in {first}")
        if first is mine:
            known = self._known.get(number, 0)
            if process.epoch <= known or process.nonce in self._nonces:
                self.violation("P12", f"{process.name}: epoch {process.epoch}, known was {known}")
            self._nonces.add(process.nonce)
            if process.epoch <= max(
                (e for n, (e, _) in self._epochs.items() if n != number), default=0
            ):
                # Every arena was lost and the store too: nobody can know what there was.
                self.beyond += 1
                self.debt.owed = None
                self._world.launcher.spares.clear()

    def admitted(self, process: Process, step: int, take: bool) -> None:  # noqa: FBT001 - the fact
        """All ranks save a step or none does (P2)."""
        if self._admitted.setdefault((process.group.number, step), take) != take:
            self.violation("P2", f"{process.name}: step {step} is taken by some and not by others")

    def staged(self, process: Process, generation: Generation, data: bytes) -> None:
        """The truth of a generation, from its owner's mouth."""
        truth = self.truths.get(generation.id)
        if truth is None:
            layout = process.layout
            truth = self.truths[generation.id] = Truth(
                generation, layout.redundancy.code, layout.redundancy.n, process.group.size
            )
        if truth.generation != generation or process.rank in truth.shards:
            self.violation("P3", f"{generation.describe()} is staged twice")
        truth.shards[process.rank] = data

    def first_set(self, process: Process, key: str, value: bytes) -> None:
        """A key is decided; decisions of generations are of interest."""
        word, _, identity = key.partition("/")
        if word != "decision":
            return
        state = value.partition(b":")[0].decode()
        truth = self.truths.get(identity)
        self.counts[state] += 1
        self._world.tell(f"{process.name} decides {identity[:8]} {value.decode()}")
        before = self._decisions.setdefault(identity, state)
        if before != state:
            self.violation("P5", f"{identity[:8]} is {state} after it was {before}")
        if state != "committed":
            return
        if any(number > process.group.number for number in self._outcomes):
            # An orphan's late word: the job has gone on from what it restored.
            self.counts["commits of a former incarnation"] += 1
        elif truth is None:
            self.violation("P1", f"{identity} is committed and nobody staged it")
        else:
            self._committed(truth)

    def froze(self, process: Process, key: str) -> None:
        """The inventory that is planned from is frozen by one writer (P18)."""
        writer = self._writers.setdefault((process.prefix, key), process)
        if writer is not process:
            self.violation("P18", f"{process.name} writes {key} after {writer.name}")

    def obeyed(self, process: Process, generation: Generation, state: str) -> None:
        """A rank has acted on a decision: on the one there is (P1)."""
        self._world.tell(f"{process.name} reads {generation.describe()} {state}")
        decision = self._decisions.get(generation.id, "not decided")
        if decision != state:
            self.violation(
                "P1", f"{process.name} takes {generation.describe()} for {state}, it is {decision}"
            )

    def _committed(self, truth: Truth) -> None:
        """Committed means: everybody's bytes are in place, whole and true (P4, P6, P16)."""
        if self.owed is not None and truth.generation < self.owed.generation:
            self.violation("P12", f"{truth.generation.describe()} is committed after a newer one")
        there = holdings(truth, self._world.everywhere())
        for owner in range(truth.world):
            if owner not in truth.shards:
                self.violation("P4", f"{truth.generation.describe()} lacks owner {owner}")
                continue
            items = there[owner] | truth.damage.get(owner, set())
            if tolerance(truth, items) < truth.survives:
                self.violation(
                    "P4",
                    f"{truth.generation.describe()} is committed and of owner {owner} there is "
                    f"only {sorted(items)}",
                )
        self.debt.owed = truth
        self.full_commits += 1
        for identity in list(self.truths)[:-40]:
            del self.truths[identity]

    # Restores.

    def loaded(self, process: Process, data: bytes) -> None:
        """A rank has changed its live state."""
        self._loaded[process.group.number, process.rank] = data
        self.promises.loaded(process)

    def restored(self, process: Process, outcome: RestoreOutcome) -> None:
        """A rank's restore has ended well: right bytes, one generation, new enough."""
        number, generation = process.group.number, outcome.generation
        self._world.tell(f"{process.name}: {outcome.reason}, kept {outcome.kept}")
        data = self._loaded.get((number, process.rank))
        self._check_bytes(process, generation, data)
        if number not in self._outcomes:
            self._outcomes[number] = generation
            self.promises.protection(process, generation, outcome.protection)
            self._check_newest(process, generation)
            self._count(outcome)
        elif self._outcomes[number] != generation:
            self.violation("P19", f"{process.name} restored another generation than the others")

    def training(self, process: Process) -> None:
        """A rank goes on: all have loaded what it has (P19)."""
        number, size = process.group.number, process.group.size
        if self._outcomes.get(number) is None:
            return
        missing = [rank for rank in range(size) if (number, rank) not in self._loaded]
        if missing:
            self.violation("P19", f"{process.name} trains while ranks {missing} have not loaded")

    def _check_bytes(
        self, process: Process, generation: Generation | None, data: bytes | None
    ) -> None:
        if generation is None:
            if data is not None:
                self.violation("P19", f"{process.name} loaded something and says that it did not")
            return
        truth = self.truths.get(generation.id)
        true = truth.shards.get(process.rank) if truth else None
        if truth is None or true is None or data is None:
            self.violation("P18", f"{process.name} restored {generation.describe()}: unheard of")
        elif data != true:
            others = [
                other.generation.describe()
                for other in self.truths.values()
                if other.shards.get(process.rank) == data
            ]
            what = f"those of {others[0]}" if others else "wrong bytes"
            rule = "mix" if others else "bytes"
            self.violation(rule, f"{process.name} restored {what} as {generation.describe()}")

    def _check_newest(self, process: Process, generation: Generation | None) -> None:
        owed = self.owed
        truth = self.truths.get(generation.id) if generation else None
        if owed is not None and (generation is None or generation < owed.generation):
            name = owed.generation.describe()
            if self.debt.failed_to_load(owed.generation):
                self.counts["restores that stepped back after failed loads"] += 1
            elif self.debt.excused(owed):
                self.beyond += 1
                self.counts["restores beyond the redundancy"] += 1
            else:
                self.violation(
                    "P18",
                    f"{process.name} restored {generation.describe() if generation else 'nothing'} "
                    f"and {name} was committed; damage {owed.damage}, "
                    f"away {[node.name for node in self.debt.away()]}",
                )
            self.debt.adopt(truth)
        elif truth is not None and truth is not owed and self.debt.as_good(truth, owed):
            self.debt.adopt(truth)

    def _count(self, outcome: RestoreOutcome) -> None:
        self.counts["restores"] += 1
        if outcome.plan is not None:
            reads = [(r, b.kind.k) for b in outcome.plan.rebuilds for r in b.reads]
            if any(read.fragment >= k > 1 for read, k in reads):
                self.counts["restores that needed parity"] += 1
            if any(not read.local for read, _ in reads):
                self.counts["restores that moved bytes"] += 1
        if "passed over" in outcome.reason:
            self.counts["restores of an older generation"] += 1

    def moved(self, process: Process, attempt: int) -> None:
        """A restore has tried; the second time it asks other sources."""
        if attempt == 1 and process.rank == 0:
            self.counts["restores that needed a second source"] += 1

    # Time.

    def started(self, group: Group) -> None:
        """A new incarnation begins."""
        names = [process.name for process in group.by_rank.values()]
        self._world.tell(f"incarnation {group.number}: {' '.join(names)}")
        self.counts["incarnations"] += 1
        self.debt.started_s = self._world.now_s

    def took(self, process: Process, what: str, began_s: float, *, calm: bool) -> None:
        """A session has ended: within the sum of its deadlines, unless it was kept from it."""
        config = self._world.config
        pairs = len(process.layout.peers_of(process.rank))
        most_s = config.timeout_s * (8 + 2 * pairs) * (6 if what == "restore" else 1)
        seconds = self._world.now_s - began_s
        if calm and not process.was_kept and seconds > most_s:
            self.violation("hang", f"{process.name}: a {what} took {seconds:.1f} s")
