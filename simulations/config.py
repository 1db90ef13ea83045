"""What a run is made of: the job, its sizes, its times and the faults, all of it explicit."""

from __future__ import annotations

from dataclasses import dataclass, field

MORE_THAN_ANY_SHARD = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and when it comes: never before the fault that stands before it in the list.

    ``on``: "phase.word" of an action that a thread is about to take; ``nth`` such action since the
    fault before, by ``by_rank`` if given, and ``after_s`` later. Without ``on``: ``after_s`` after
    the fault before, or at ``at_s``.
    """

    kind: str
    rank: int | None = None
    node: int | None = None
    other: int | None = None
    for_s: float = 0.0
    amount: int = 0
    on: str = ""
    nth: int = 1
    by_rank: int | None = None
    after_s: float = 0.0
    at_s: float | None = None
    by_s: float = 0.0
    """After so long without its trigger the fault comes all the same (0: never)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. From equal values follow equal runs."""

    seed: int
    redundancy: str = "stripe:2+1"
    nodes: int = 4
    ranks_per_node: int = 1
    sizes: tuple[int, ...] = ()
    """Shard bytes by owner; () draws them from the seed."""
    grow_at: int = 0
    """From this step on every shard is larger (0: never)."""
    interval: int = 1
    """Every so many steps are saved."""
    skewed: bool = False
    """Ranks train without waiting for each other, so that they come to a save at other times."""
    store_on_rank0: bool = False
    """The store is a thread of rank 0's process, and not a process of its own."""
    timeout_s: float = 5.0
    sparing: bool = True
    """Faults that would take more than the redundancy allows are left out."""
    checked_commits: int = 2
    """So many commits with full protection must follow the last fault."""
    paused: bool = False
    """After the last fault nothing is saved until mending alone has brought protection back."""
    faults: tuple[Fault, ...] = field(default=())
