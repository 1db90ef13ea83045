"""The command ``planaria``: what is in this host's memory, what may go, and a demonstration.

Exit codes: 0 done, 1 it could not be done, 2 the command line was wrong; ``demo`` has more of its
own. Other distributions add commands through the entry-point group ``planaria.commands``: a
function that takes the rest of the command line and returns the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from erasure.errors import PlanariaError
from replica.arena_views import ArenaView, SlotView, clean, read_arenas
from replica.config import DEFAULT_ARENA_DIR

COMMANDS_GROUP = "planaria.commands"

Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a usage error is SystemExit(2), as in argparse."""
    args = list(sys.argv[1:] if argv is None else argv)
    added = {point.name: point for point in entry_points(group=COMMANDS_GROUP)}
    command = _COMMANDS.get(args[0]) if args else None
    if command is None and args and args[0] in added:
        command = _load(added[args[0]])
    if command is None:
        _parser(sorted(added.keys() - _COMMANDS.keys())).parse_args(args)
        raise AssertionError("the parser above ends the process: no command is known to it")
    try:
        return command(args[1:])
    except PlanariaError as error:
        print(f"planaria: {error}", file=sys.stderr)
        return 1


def _parser(added: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser that only explains: a known command never reaches it."""
    parser = argparse.ArgumentParser(
        prog="planaria", description="In-memory, erasure-coded checkpoints for PyTorch training."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in _SUMMARIES.items():
        commands.add_parser(name, help=text)
    for name in added:
        commands.add_parser(name, help="added by another distribution")
    return parser


def _load(point: EntryPoint) -> Command:
    command: Command = point.load()
    return command


def _demo(argv: Sequence[str]) -> int:
    """Run the demonstration; its modules load torch, so they are imported only here."""
    from replica.demo.cluster import main as demo_main  # noqa: PLC0415 - see above

    return demo_main(list(argv))


def _arena_parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"planaria {name}", description=_SUMMARIES[name])
    parser.add_argument(
        "--arena-dir",
        default=os.environ.get("PLANARIA_ARENA_DIR") or DEFAULT_ARENA_DIR,
        help="directory that holds the arenas (default: PLANARIA_ARENA_DIR, else /dev/shm)",
    )
    parser.add_argument("--job", help="only arenas of the job of this name")
    return parser


def _status(argv: Sequence[str]) -> int:
    parser = _arena_parser("status")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    options = parser.parse_args(argv)
    views = read_arenas(options.arena_dir, options.job)
    report = status_report(views)
    if options.json:
        print(json.dumps(report))
    else:
        _print_status(report, options.arena_dir)
    return 0


def _clean(argv: Sequence[str]) -> int:
    parser = _arena_parser("clean")
    parser.add_argument("--all", action="store_true", help="remove arenas of every job, not of one")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    options = parser.parse_args(argv)
    asked = options.all or options.job is not None
    paths = clean(options.arena_dir, options.job, dry_run=options.dry_run or not asked)
    for path in paths:
        print(path)
    if not asked and paths and not options.dry_run:
        print("nothing was removed: name the job (--job), or say --all", file=sys.stderr)
        return 1
    return 0


def status_report(views: Sequence[ArenaView]) -> dict[str, Any]:
    """Return what ``status --json`` prints; the newest step committed is so by (epoch, step)."""
    committed = [view.head.committed for view in views if view.head and view.head.committed]
    newest = max(committed, default=None)
    return {
        "arenas": [_describe(view) for view in views],
        "committed_step": newest.step if newest else None,
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
    record = slot.record
    return {
        "slot": slot.number,
        "kind": slot.kind,
        "owner": record.owner if record else None,
        "step": record.generation.step if record else None,
        "epoch": record.generation.epoch if record else None,
        "generation": record.generation.id if record else None,
        "fragment": record.fragment if record else None,
        "bytes": slot.capacity,
    }


def _print_status(report: dict[str, Any], arena_dir: str) -> None:
    if not report["arenas"]:
        print(f"no arenas of this user in {arena_dir}")
        return
    for arena in report["arenas"]:
        state = f"pid {arena['pid']}" if arena["alive"] else "not running"
        print(
            f"job {arena['job']}  node {arena['node_id']}  position {arena['position']}  "
            f"rank {arena['rank']} of {arena['world']}  {state}  {arena['bytes']} bytes\n"
            f"  committed step {arena['committed_step']}, restored step {arena['restored_step']}, "
            f"epoch {arena['epoch']}\n  {arena['path']}"
        )
        for slot in arena["slots"]:
            print(f"    {_slot_line(slot)}")
    print(f"newest committed step: {report['committed_step']}")


def _slot_line(slot: dict[str, Any]) -> str:
    start = f"slot {slot['slot']} ({slot['kind']}, {slot['bytes']} bytes): "
    if slot["generation"] is None:
        return f"{start}nothing valid"
    part = "whole shard" if slot["fragment"] < 0 else f"fragment {slot['fragment']}"
    return f"{start}{part} of owner {slot['owner']}, step {slot['step']}, epoch {slot['epoch']}"


_SUMMARIES = {
    "status": "show the arenas of running and dead jobs of this user on this host",
    "clean": "remove a job's arenas (--job, or --all) that no living process uses; else list them",
    "demo": "train on several nodes, kill some, and compare with an undisturbed run",
}
_COMMANDS: dict[str, Command] = {"status": _status, "clean": _clean, "demo": _demo}
