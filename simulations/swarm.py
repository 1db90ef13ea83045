"""Draws a run from a seed: another job and another mixture of faults each time."""

from __future__ import annotations

import random

from simulations.config import Config, Fault

JOBS = (
    ("copies:1", 2, 1),
    ("copies:1", 2, 2),
    ("copies:1", 3, 1),
    ("copies:1", 4, 1),
    ("copies:2", 3, 1),
    ("copies:2", 4, 2),
    ("stripe:1+1", 3, 1),
    ("stripe:1+1", 3, 2),
    ("stripe:2+1", 4, 1),
    ("stripe:2+1", 4, 2),
    ("stripe:2+1", 5, 1),
    ("stripe:2+1", 8, 1),
    ("stripe:1+1", 6, 1),
    ("stripe:3+1", 5, 1),
    ("stripe:3+1", 6, 1),
    ("stripe:2+2", 5, 1),
    ("stripe:2+2", 6, 1),
)
"""Redundancy, nodes, ranks per node."""

WEIGHTS = {
    "kill-process": 10,
    "kill-node": 12,
    "leave": 4,
    "freeze": 5,
    "slow": 2,
    "cut": 4,
    "delay": 3,
    "partition": 3,
    "store-cut": 3,
    "store-loss": 2,
    "corrupt": 8,
    "truncate": 4,
    "corrupt-wire": 5,
    "full": 3,
    "clock-jump": 3,
    "orphan": 4,
    "renumber": 3,
    "load-error": 1,
}

TRIGGERS = (
    *("open.introduce", "open.claim", "open.facts", "open.reserve", "open.fence"),
    *("restore.inventory", "restore.await-frozen", "restore.join", "restore.until"),
    *("restore.moved", "restore.await-vote", "restore.done", "restore.await-loaded"),
    *("stage.set-admit", "stage.sleep", "save.offer", "save.await-offer", "save.ready"),
    *("save.await-ready", "save.until", "save.ack", "save.await-ack", "save.held"),
    *("save.await-decision", "save.set-decision", "save.sleep", "save.delete", "train.sleep"),
    *("mend.report", "mend.set-frozen", "mend.ready", "mend.until", "mend.sent", "mend.set-over"),
    *("restore.*", "save.*", "save.*", "mend.*", "open.*"),
)

FAULTS = (95, 150)
ALWAYS = ("kill-process", "kill-node", "corrupt")


def draw(seed: int) -> Config:
    """The run that belongs to ``seed``."""
    rng = random.Random(seed)
    redundancy, nodes, ranks_per_node = rng.choice(JOBS)
    kinds = [kind for kind in WEIGHTS if kind in ALWAYS or rng.random() < 0.6]
    weights = [WEIGHTS[kind] for kind in kinds]
    count = rng.randint(*FAULTS)
    hurry = rng.choice((0.15, 0.5, 1.5))
    faults = tuple(
        _fault(rng, rng.choices(kinds, weights)[0], nodes, nodes * ranks_per_node, hurry)
        for _ in range(count)
    )
    return Config(
        seed=seed,
        redundancy=redundancy,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        grow_at=rng.choice((0, 0, 2, 5)),
        interval=rng.choice((1, 1, 2)),
        skewed=rng.random() < 0.25,
        store_on_rank0=rng.random() < 0.3,
        sparing=rng.random() < 0.9,
        faults=faults,
    )


def _fault(rng: random.Random, kind: str, nodes: int, world: int, hurry: float) -> Fault:
    """One fault, aimed at a moment of a session or coming after a while."""
    aimed = rng.random() < 0.8
    near = rng.random() < 0.5
    return Fault(
        kind=kind,
        rank=None if near and aimed else rng.randrange(world),
        node=None if near and aimed else rng.randrange(nodes),
        other=rng.randrange(nodes),
        for_s=round(rng.choice((0.3, 1.5, 3.0, 7.0)) * rng.uniform(0.7, 1.3), 2),
        amount=_amount(rng, kind),
        on=rng.choice(TRIGGERS) if aimed else "",
        nth=rng.randint(1, 2 * world) if aimed else 1,
        after_s=round(rng.random() ** 3 * hurry, 4),
        by_s=round(rng.uniform(0.5, 3.0), 2) if aimed else 0.0,
    )


def _amount(rng: random.Random, kind: str) -> int:
    if kind in ("orphan", "store-loss"):
        return int(rng.random() < 0.3)
    if kind == "load-error":
        return rng.choice((1, 1, 2))
    if kind == "slow":
        return rng.choice((3, 10, 40))
    if kind == "delay":
        return rng.choice((20, 200, 1500, 6000))
    return rng.randrange(64)
