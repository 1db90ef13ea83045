"""From journals to figures: what was lost, what came back, how long it took, whether it is equal.

Pure: lines in, values out. All instants are the journals' (``time.monotonic``), so differences
between processes of one host are exact. Every duration is measured like this:

    detect            kill -> the first survivor notes that its training was interrupted; if none
                      could, the first worker of the next round has joined
    relaunch          detect -> every worker of the next round has joined its process group
    inventory, transfer, decode, load, restore_total
                      as replica.Checkpointer reports them, each the largest of all ranks
    kill_to_training  kill -> every rank of the next round has done its first new step

A round is one incarnation of the job: the workers that joined one process group. "The next round"
is the first one begun after the kill in which every rank trained a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from replica.demo.compare import Comparison
from replica.demo.journal import Line

SOURCES = ("own", "peers", "disk", "none")
PHASES = ("inventory", "transfer", "decode", "load")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What was killed."""

    at_s: float
    """Instant just before the first signal."""
    nodes: tuple[str, ...]
    """Names of the victims."""
    ranks: tuple[int, ...]
    """Their ranks at that instant."""
    processes: int
    """How many processes got SIGKILL."""
    arena_bytes: int
    """Bytes deleted with the victims' arenas; 0 if these were kept."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One incarnation of the job, by rank."""

    started_at: Mapping[int, float]
    nodes: Mapping[int, str]
    first_step_at: Mapping[int, float]
    restores: Mapping[int, Mapping[str, Any]]
    """The checkpointer's restore event of each rank; empty in a run without a checkpointer."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Durations as the module's docstring defines them; None where nothing was measured."""

    detect: float
    relaunch: float
    inventory: float | None
    transfer: float | None
    decode: float | None
    load: float | None
    restore_total: float | None
    kill_to_training: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of one demo; ``to_json`` gives them by the names that ``--json`` promises."""

    nodes: int
    redundancy: str
    killed: int
    committed_step_at_kill: int
    """Newest step that any worker had noted as committed before the kill, 0 if none."""
    resumed_step: int
    """The step that every rank restored; 0: training began anew."""
    steps_lost: int
    """Last step that any worker noted before the kill, minus ``resumed_step``."""
    source: str
    """The farthest tier that any rank used."""
    bytes_received: int
    bytes_received_by_rank: tuple[int, ...]
    bytes_expected: int
    """Sum of S over the owners whose process is not on the node that holds their own copy."""
    bytes_read_locally: int
    """What of that lay on the process's own node already, as a fragment that the others' could not
    make up for; ``bytes_received`` is the rest."""
    seconds: Seconds
    bitwise_equal: bool
    reason: str
    """What rank 0 said about the choice, empty if it said nothing."""
    saves: Mapping[str, int]
    """Outcome -> how many saves of the whole run had it, as rank 0 saw them."""
    seed: int
    killed_nodes: tuple[str, ...]
    killed_ranks: tuple[int, ...]
    steps: int
    differences: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for ``json.dumps``."""
        return asdict(self)


def make_report(
    lines: Sequence[Line],
    kill: Kill,
    comparison: Comparison,
    *,
    nodes: int,
    redundancy: str,
    steps: int,
    seed: int,
) -> Report:
    """Work out the figures from the journals of the run that lost nodes.

    Raises:
        ValueError: the journals do not tell what happened, say because no round followed the kill
            or its ranks restored different steps.
    """
    resumed = round_after(lines, kill.at_s, world=nodes)
    resumed_step = common_step(resumed)
    moved = moved_ranks(lines, kill.at_s, resumed)
    received = tuple(int(_detail(resumed, rank).get("bytes_received", 0)) for rank in range(nodes))
    return Report(
        nodes=nodes,
        redundancy=redundancy,
        killed=len(kill.nodes),
        committed_step_at_kill=committed_before(lines, kill.at_s),
        resumed_step=resumed_step,
        steps_lost=last_step_before(lines, kill.at_s) - resumed_step,
        source=farthest_source(resumed),
        bytes_received=sum(received),
        bytes_received_by_rank=received,
        bytes_expected=sum(int(_detail(resumed, r)["shard_bytes"]) for r in moved),
        bytes_read_locally=sum(int(_detail(resumed, r)["bytes_local"]) for r in moved),
        seconds=measure(lines, kill.at_s, resumed),
        bitwise_equal=comparison.equal,
        reason=str(_detail(resumed, 0).get("reason", "")),
        saves=save_outcomes(lines),
        seed=seed,
        killed_nodes=kill.nodes,
        killed_ranks=kill.ranks,
        steps=steps,
        differences=comparison.differences,
    )


def round_after(lines: Iterable[Line], kill_at_s: float, *, world: int) -> Round:
    """Return the first round begun after the kill in which every rank trained a step."""
    by_round: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line.at_s):
        if line.round_id is not None:
            by_round.setdefault(line.round_id, []).append(line)
    for members in by_round.values():
        found = _round(members)
        begun = min(found.started_at.values(), default=0.0)
        if begun > kill_at_s and len(found.first_step_at) == world:
            return found
    raise ValueError(f"no round of {world} ranks trained after the kill")


def common_step(resumed: Round) -> int:
    """Return the step that all ranks restored, 0 if there was nothing to restore."""
    steps = {rank: detail.get("step") or 0 for rank, detail in resumed.restores.items()}
    if len(set(steps.values())) > 1:
        raise ValueError(f"ranks restored different steps: {steps}")
    return max(steps.values(), default=0)


def farthest_source(resumed: Round) -> str:
    """Return the farthest tier that any rank restored from, ``none`` without a checkpointer."""
    used = [SOURCES.index(detail["source"]) for detail in resumed.restores.values()]
    return SOURCES[max(used, default=len(SOURCES) - 1)]


def moved_ranks(lines: Iterable[Line], kill_at_s: float, resumed: Round) -> tuple[int, ...]:
    """Return the ranks whose process is not on the node of their owner's own copy.

    The own copy of an owner lies on the node that its process saved the restored step on.
    """
    step = common_step(resumed)
    saved_on = {
        line.rank: line.node
        for line in lines
        if line.event == "step" and line.facts["step"] == step and line.at_s < kill_at_s
    }
    return tuple(
        rank
        for rank in sorted(resumed.restores)
        if step and saved_on.get(rank) != resumed.nodes[rank]
    )


def committed_before(lines: Iterable[Line], at_s: float) -> int:
    """Return the newest step that a worker had noted as committed before an instant, 0 if none."""
    return max(
        (
            line.facts["detail"]["step"]
            for line in lines
            if line.at_s < at_s
            and line.event == "checkpoint"
            and line.facts["detail"].get("outcome") == "committed"
        ),
        default=0,
    )


def save_outcomes(lines: Iterable[Line]) -> dict[str, int]:
    """Count the outcomes of rank 0's saves, over all rounds."""
    events = (
        line.facts["detail"] for line in lines if line.event == "checkpoint" and not line.rank
    )
    return dict(Counter(event["outcome"] for event in events if event["event"] == "save"))


def last_step_before(lines: Iterable[Line], at_s: float) -> int:
    """Return the last step that a worker had noted before an instant, 0 if none."""
    return max(
        (line.facts["step"] for line in lines if line.event == "step" and line.at_s < at_s),
        default=0,
    )


def measure(lines: Iterable[Line], kill_at_s: float, resumed: Round) -> Seconds:
    """Measure every duration as the module's docstring defines it."""
    noticed = [
        line.at_s for line in lines if line.event == "interrupted" and line.at_s >= kill_at_s
    ]
    running_at_s = max(resumed.started_at.values())
    noticed_at_s = min([*noticed, min(resumed.started_at.values())])
    return Seconds(
        detect=round(noticed_at_s - kill_at_s, 3),
        relaunch=round(running_at_s - noticed_at_s, 3),
        **{phase: _largest(resumed, phase) for phase in PHASES},
        restore_total=_largest(resumed, "total"),
        kill_to_training=round(max(resumed.first_step_at.values()) - kill_at_s, 3),
    )


def _largest(resumed: Round, phase: str) -> float | None:
    found = [detail["seconds"].get(phase) for detail in resumed.restores.values()]
    return max((round(value, 4) for value in found if value is not None), default=None)


def _detail(resumed: Round, rank: int) -> Mapping[str, Any]:
    return resumed.restores.get(rank, {})


def _round(members: Iterable[Line]) -> Round:
    started: dict[int, float] = {}
    nodes: dict[int, str] = {}
    first_step: dict[int, float] = {}
    restores: dict[int, Mapping[str, Any]] = {}
    for line in members:
        rank = line.rank or 0
        if line.event == "start":
            started[rank] = line.at_s
            nodes[rank] = line.node
        elif line.event == "step":
            first_step.setdefault(rank, line.at_s)
        elif line.event == "checkpoint" and line.facts["detail"]["event"] == "restore":
            restores[rank] = line.facts["detail"]
    return Round(started_at=started, nodes=nodes, first_step_at=first_step, restores=restores)
