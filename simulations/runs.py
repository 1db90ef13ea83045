"""One run from its start to a verdict: faults, then calm, in which protection has to come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulations.checkers import Violation
from simulations.config import Config
from simulations.world import World

PASS, BEYOND, UNKNOWN, VIOLATED = "pass", "beyond", "unknown", "violated"
"""Verdicts. ``beyond``: all is well, and losses were more than the redundancy carries."""
CALM_S = 240.0
"""Within so long without faults, by the virtual clock, all must be protected again."""
FAULTY_S = 6_000.0


@dataclass
class Result:
    """What came of a run."""

    verdict: str
    violation: Violation | None
    fired: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    events: int = 0
    time_s: float = 0.0
    last_fault: int = 0
    """How many faults of the list had come when the run ended."""


def run(config: Config, story: list[str] | None = None) -> Result:
    """Play a run; what happens goes into ``story`` too."""
    world = World(config)
    world.story = story
    checker, faults = world.checker, world.faults
    world.launcher.begin()
    faults.begin()

    def bad() -> bool:
        return bool(checker.violations)

    ended = world.run(lambda: bad() or faults.over or world.now_s > FAULTY_S)
    if ended and not bad() and faults.over:
        calm(world)
        if config.paused:
            pause(world)
        checker.full_commits = 0
        limit_s = world.now_s + CALM_S
        wanted = config.checked_commits
        ended = world.run(lambda: bad() or checker.full_commits >= wanted or world.now_s > limit_s)
        if ended and not bad() and checker.full_commits < wanted:
            checker.violation("liveness", f"no {wanted} full commits within {CALM_S} s of calm")
        ended = ended and faults.over
    return _result(world, unknown=not ended or not faults.over)


def calm(world: World) -> None:
    """End every fault: from now on all must become well by itself."""
    world.network.heal()
    world.store.down = False
    for node in world.everywhere():
        node.partitioned = node.store_cut = node.full = False
        node.slow, node.load_errors = 1.0, 0
    world.network.healed()


def pause(world: World) -> None:
    """Save nothing until what is owed is fully protected: only mending can do that (P10)."""
    checker, limit_s = world.checker, world.now_s + CALM_S
    world.paused = True
    world.run(
        lambda: (
            bool(checker.violations) or checker.promises.fully_protected() or world.now_s > limit_s
        )
    )
    if not checker.violations and not checker.promises.fully_protected():
        checker.violation("P10", f"not protected again within {CALM_S} s without faults and saves")
    world.paused = False


def _result(world: World, *, unknown: bool) -> Result:
    checker = world.checker
    violation = checker.violations[0] if checker.violations else None
    if violation is not None:
        verdict = VIOLATED
    elif unknown:
        verdict = UNKNOWN
    else:
        verdict = BEYOND if checker.beyond else PASS
    fired = [one for one in world.faults.fired if not one.spared]
    return Result(
        verdict=verdict,
        violation=violation,
        fired=Counter(one.fault.kind for one in fired),
        failures=Counter(one.fault.kind for one in fired if one.counted),
        counts=checker.counts,
        events=world.events,
        time_s=world.now_s,
        last_fault=len(world.faults.fired) + world.faults.expired,
    )
