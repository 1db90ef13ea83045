"""``planaria status``: the arenas of this host, and what they keep of every generation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from recovery.manifest import WHOLE, ArenaHead, SlotRecord
from recovery.survey import Place, Survey, newest_committed, survey
from recovery.tree import name_ranks
from replica.arena_views import ArenaView, SlotView, read_arenas


def status(options: argparse.Namespace) -> int:
    """Print the status; the exit code."""
    report = status_report(read_arenas(options.arena_dir, options.job))
    if options.json:
        print(json.dumps(report))
    else:
        _print_status(report, options.arena_dir, options.job)
    return 0


def status_report(views: Sequence[ArenaView]) -> dict[str, Any]:
    """Return what ``status --json`` prints; the newest step committed is so by (epoch, step)."""
    heads = [view.head for view in views if view.head is not None]
    newest = newest_committed(heads)
    over_all = max((one for one in newest.values() if one is not None), default=None)
    places = [
        (view.path, view.head, [s.record for s in view.slots.values() if s.record is not None])
        for view in views
    ]
    return {
        "arenas": [_describe(view) for view in views],
        "committed_step": over_all.step if over_all else None,
        "jobs": {job: {"committed_step": one.step if one else None} for job, one in newest.items()},
        "generations": describe_generations(places),
    }


def describe_generations(
    arenas: Sequence[tuple[str, ArenaHead | None, Sequence[SlotRecord]]],
) -> list[dict[str, Any]]:
    """Say who holds what of every generation, by job, the newest first.

    Each arena is given as its path, its head and its records. Of several arenas of one position
    only the newest counts: the next start uses no other.
    """
    used = _newest_of_each_position(path for path, _, _ in arenas)
    chosen = [(path, head, records) for path, head, records in arenas if path in used]
    names = {_node_of(path): head.node_id for path, head, _ in chosen if head is not None}
    places = [
        Place(node=_node_of(path), head=head, records=tuple(records))
        for path, head, records in chosen
    ]
    return [_describe_generation(one, places, names) for one in survey(places)]


def _newest_of_each_position(paths: Iterable[str]) -> set[str]:
    newest: dict[str, tuple[int, str]] = {}
    for path in paths:
        position, _, number = PurePath(path).name.partition(".")
        place = f"{_node_of(path)}/{position}"
        newest[place] = max(newest.get(place, (-1, "")), (int(number or 0), path))
    return {path for _, path in newest.values()}


def _node_of(path: str) -> str:
    """Return the directory of the node, which names it even where a head cannot be read."""
    return str(PurePath(path).parent)


def _describe_generation(
    one: Survey, places: Sequence[Place], names: dict[str, str]
) -> dict[str, Any]:
    return {
        "job": one.job,
        "epoch": one.generation.epoch,
        "step": one.generation.step,
        "generation": one.generation.id,
        "world": one.world,
        "committed": one.committed,
        "holders": [
            {
                "owner": holding.owner,
                "fragment": holding.fragment,
                "rank": head.rank if (head := places[holding.rank].head) else None,
                "node_id": names.get(places[holding.rank].node),
            }
            for holding in sorted(one.holdings, key=lambda h: (h.owner, h.fragment, h.rank))
        ],
        "recoverable_owners": one.recoverable_owners,
        "missing_owners": {str(owner): cause for owner, cause in one.missing.items()},
        "protection": one.protection,
        "exact": one.exact,
    }


def _describe(view: ArenaView) -> dict[str, Any]:
    head = view.head
    known = ("job", "node_id", "position", "rank", "world", "epoch")
    return {
        **{name: getattr(head, name, None) for name in known},
        "committed_step": head.committed.step if head and head.committed else None,
        "restored_step": head.restored.step if head and head.restored else None,
        "alive": view.alive,
        "pid": head.pid if head and head.pid else None,
        "bytes": view.bytes_allocated,
        "path": view.path,
        "slots": [_describe_slot(slot) for slot in view.slots.values()],
    }


def _describe_slot(slot: SlotView) -> dict[str, Any]:
    return {
        "slot": slot.number,
        "kind": slot.kind,
        **record_facts(slot.record),
        "bytes": slot.capacity,
    }


def record_facts(record: SlotRecord | None) -> dict[str, Any]:
    """Say what a slot holds, None for each fact if it holds nothing."""
    return {
        "owner": record.owner if record else None,
        "step": record.generation.step if record else None,
        "epoch": record.generation.epoch if record else None,
        "generation": record.generation.id if record else None,
        "fragment": record.fragment if record else None,
    }


def no_arenas(arena_dir: str, job: str | None) -> str:
    """Say that nothing was found."""
    return f"no arenas of {f'job {job!r} of ' if job else ''}this user in {arena_dir}"


def _print_status(report: dict[str, Any], arena_dir: str, job: str | None) -> None:
    if not report["arenas"]:
        print(no_arenas(arena_dir, job))
        return
    for arena in report["arenas"]:
        state = f"pid {arena['pid']}" if arena["alive"] else "not running"
        print(
            f"{arena_line(arena)}  {state}  {arena['bytes']} bytes\n"
            f"  committed step {arena['committed_step']}, restored step {arena['restored_step']}, "
            f"epoch {arena['epoch']}\n  {arena['path']}"
        )
        for slot in arena["slots"]:
            print(f"    {_slot_line(slot)}")
    for name, facts in report["jobs"].items():
        print(f"job {name}: newest committed step {facts['committed_step']}")
    print_generations(report["generations"], "these arenas")


def arena_line(arena: dict[str, Any]) -> str:
    """Say whose arena it is; a start that was refused may have had other ranks than its slots."""
    when = "" if arena["alive"] else " when last opened"
    return (
        f"job {arena['job']}  node {arena['node_id']}  position {arena['position']}  "
        f"rank {arena['rank']} of {arena['world']}{when}"
    )


def part_of(owner: int, fragment: int) -> str:
    """Say what part of whose shard a fragment is."""
    part = "whole shard" if fragment == WHOLE else f"fragment {fragment}"
    return f"{part} of owner {owner}"


def _slot_line(slot: dict[str, Any]) -> str:
    start = f"slot {slot['slot']} ({slot['kind']}, {slot['bytes']} bytes): "
    if slot["generation"] is None:
        return f"{start}nothing valid"
    part = part_of(slot["owner"], slot["fragment"])
    return f"{start}{part}, step {slot['step']}, epoch {slot['epoch']}"


def print_generations(generations: Sequence[dict[str, Any]], seen: str) -> None:
    """Print each generation, its holders and how many nodes may be lost, by what was ``seen``."""
    for one in generations:
        committed = "committed" if one["committed"] else f"not committed as far as {seen} show"
        print(
            f"job {one['job']}, step {one['step']} (epoch {one['epoch']}, "
            f"{one['generation'][:8]}), {committed}: {_protection_line(one, seen)}"
        )
        for owner in range(one["world"]):
            parts = [_holder(holder) for holder in one["holders"] if holder["owner"] == owner]
            if parts:
                print(f"    owner {owner}: {', '.join(parts)}")


def _holder(holder: dict[str, Any]) -> str:
    part = "whole" if holder["fragment"] == WHOLE else f"fragment {holder['fragment']}"
    return f"{part} on rank {holder['rank']} ({holder['node_id']})"


def _protection_line(one: dict[str, Any], seen: str) -> str:
    if one["protection"] is None:
        here = one["recoverable_owners"]
        owners = name_ranks(here).replace("rank", "owner", 1) if here else "no owner"
        return f"{seen} alone give back {owners} of {one['world']}"
    count = one["protection"]
    nodes = "1 more node" if count == 1 else f"{count} more nodes"
    if one["exact"]:
        return f"{nodes} may be lost"
    return f"at least {nodes} may be lost, as seen from {seen}"
