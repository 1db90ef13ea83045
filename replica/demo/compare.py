"""Whether two training runs are the same, bit for bit, in every rank's losses and final state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from replica.demo.journal import Line


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run's journals say, by rank."""

    losses: Mapping[tuple[int, int], frozenset[str]]
    """(rank, step) -> every loss noted for it, as exact text: more than one if a step was done
    again after a roll-back and came out otherwise."""
    digests: Mapping[int, str]
    """rank -> digest of the final state."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict and, where the runs differ, each rank's first other loss and its final state."""

    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every loss and every state are the same."""
        return not self.differences


def outcome(lines: Iterable[Line]) -> Outcome:
    """Collect the losses and final states of one run, all its rounds together."""
    losses: dict[tuple[int, int], frozenset[str]] = {}
    digests: dict[int, str] = {}
    for line in lines:
        if line.rank is None:
            continue
        if line.event == "step":
            key = (line.rank, line.facts["step"])
            losses[key] = losses.get(key, frozenset()) | {line.facts["loss_bits"]}
        elif line.event == "final":
            digests[line.rank] = line.facts["digest"]
    return Outcome(losses=losses, digests=digests)


def compare(run: Outcome, reference: Outcome, *, world: int, steps: int) -> Comparison:
    """Hold a run against the uninterrupted one; what is missing on either side is a difference."""
    differences: list[str] = []
    for rank in range(world):
        differences.extend(_first_loss_difference(run, reference, rank, steps))
        ours, theirs = run.digests.get(rank), reference.digests.get(rank)
        if ours is None or theirs is None or ours != theirs:
            differences.append(f"rank {rank}: final state {ours}, uninterrupted {theirs}")
    return Comparison(differences=tuple(differences))


def _first_loss_difference(run: Outcome, reference: Outcome, rank: int, steps: int) -> list[str]:
    for step in range(1, steps + 1):
        ours = run.losses.get((rank, step), frozenset())
        theirs = reference.losses.get((rank, step), frozenset())
        if len(ours) != 1 or ours != theirs:
            return [f"rank {rank}, step {step}: loss {_text(ours)}, uninterrupted {_text(theirs)}"]
    return []


def _text(losses: frozenset[str]) -> str:
    return " and ".join(f"{float.fromhex(loss):.9g}" for loss in sorted(losses)) or "missing"
