"""``planaria verify``: every byte of this host's arenas against its digest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from replica.cli_status import (
    arena_line,
    describe_generations,
    no_arenas,
    part_of,
    print_generations,
    record_facts,
)
from replica.verify import BUSY, EMPTY, ArenaVerdict, SlotVerdict, verify_arenas

CHUNKS_NAMED_MAX = 8


def verify(options: argparse.Namespace) -> int:
    """Verify, print what was found, and return 1 if anything is damaged, else 0."""
    report = verify_report(verify_arenas(options.arena_dir, options.job))
    if options.json:
        print(json.dumps(report))
    else:
        _print_report(report, options.arena_dir, options.job)
    return 1 if report["damaged"] else 0


def verify_report(verdicts: Sequence[ArenaVerdict]) -> dict[str, Any]:
    """Return what ``verify --json`` prints. Only what verified counts for the generations."""
    intact = [
        (one.path, one.head, [s.record for s in one.slots if s.record is not None and s.intact])
        for one in verdicts
    ]
    return {
        "arenas": [_describe(one) for one in verdicts],
        "verified_bytes": sum(
            slot.record.length for one in verdicts for slot in one.slots if slot.record
        ),
        "damaged": sum(one.damaged for one in verdicts),
        "generations": describe_generations(intact),
    }


def _describe(one: ArenaVerdict) -> dict[str, Any]:
    known = ("job", "node_id", "position", "rank", "world")
    return {
        **{name: getattr(one.head, name, None) for name in known},
        "alive": one.alive,
        "path": one.path,
        "problem": one.problem,
        "slots": [_describe_slot(slot) for slot in one.slots],
    }


def _describe_slot(slot: SlotVerdict) -> dict[str, Any]:
    return {
        "slot": slot.number,
        "kind": slot.kind,
        "verdict": slot.verdict,
        "reason": slot.reason,
        "chunks": slot.chunks,
        "bad_chunks": list(slot.bad_chunks),
        **record_facts(slot.record),
        "bytes": slot.capacity,
    }


def _print_report(report: dict[str, Any], arena_dir: str, job: str | None) -> None:
    if not report["arenas"]:
        print(no_arenas(arena_dir, job))
        return
    for arena in report["arenas"]:
        print(f"{arena_line(arena)}\n  {arena['path']}")
        if arena["problem"]:
            print(f"    head: damaged: {arena['problem']}")
        for slot in arena["slots"]:
            print(f"    {_slot_line(slot)}")
    print_generations(report["generations"], "the slots that verified")
    slots = [slot for arena in report["arenas"] for slot in arena["slots"]]
    counts = [f"{sum(s['verdict'] == word for s in slots)} {word}" for word in (EMPTY, BUSY)]
    print(
        f"{len(slots)} slots, {', '.join(counts)}; {report['verified_bytes']} bytes read; "
        f"damaged: {report['damaged'] or 'nothing'}"
    )


def _slot_line(slot: dict[str, Any]) -> str:
    text = f"slot {slot['slot']} ({slot['kind']}): {slot['verdict']}"
    if slot["generation"] is not None:
        part = part_of(slot["owner"], slot["fragment"])
        text += f", {part}, step {slot['step']}, epoch {slot['epoch']}"
    if slot["bad_chunks"]:
        named = ", ".join(map(str, slot["bad_chunks"][:CHUNKS_NAMED_MAX]))
        more = " and more" if len(slot["bad_chunks"]) > CHUNKS_NAMED_MAX else ""
        return f"{text}: chunks {named}{more} of {slot['chunks']} differ from their digests"
    return f"{text}: {slot['reason']}" if slot["reason"] else text
