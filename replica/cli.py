"""The command ``planaria``: what is in this host's memory, what may go, and a demonstration.

Exit codes: 0 done, 1 it could not be done or, for ``verify``, something is damaged, 2 the command
line was wrong, 130 interrupted, 141 whoever read the output has gone; ``demo`` has more of its own.
Other distributions add commands through the entry-point group ``planaria.commands``: a function
that takes the rest of the command line and returns the exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from erasure.errors import PlanariaError
from replica.arena_views import clean, read_arenas
from replica.cli_status import no_arenas, status
from replica.config import DEFAULT_ARENA_DIR

COMMANDS_GROUP = "planaria.commands"

READER_GONE, INTERRUPTED = 141, 130
"""As a shell reports the end by SIGPIPE and by SIGINT."""

Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a usage error is SystemExit(2), as in argparse."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(args)
        finally:
            # Here, where it can be caught, and not when the interpreter ends.
            sys.stdout.flush()
    except PlanariaError as error:
        print(f"planaria: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        if not _reader_gone():
            raise
        # The interpreter's own flush at its end must not fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: Sequence[str]) -> int:
    added = {point.name: point for point in entry_points(group=COMMANDS_GROUP)}
    command = _COMMANDS.get(args[0]) if args else None
    if command is None and args and args[0] in added:
        command = _load(added[args[0]])
    if command is None:
        _parser(sorted(added.keys() - _COMMANDS.keys())).parse_args(args)
        raise AssertionError("the parser above ends the process: no command is known to it")
    return command(args[1:])


def _reader_gone() -> bool:
    """Whether the broken pipe is standard output, and not one of the command's own."""
    waiter = select.poll()
    waiter.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in waiter.poll(0))


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
    return status(_report_parser("status").parse_args(argv))


def _verify(argv: Sequence[str]) -> int:
    # Imported here: safetensors is needed for nothing else.
    from replica.cli_verify import verify  # noqa: PLC0415 - see above

    return verify(_report_parser("verify").parse_args(argv))


def _report_parser(name: str) -> argparse.ArgumentParser:
    parser = _arena_parser(name)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    return parser


def _clean(argv: Sequence[str]) -> int:
    parser = _report_parser("clean")
    parser.add_argument("--all", action="store_true", help="remove arenas of every job, not of one")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    options = parser.parse_args(argv)
    asked = options.all or options.job is not None
    only_listed = options.dry_run or not asked
    paths = clean(options.arena_dir, options.job, dry_run=only_listed)
    looked = read_arenas(options.arena_dir, options.job) if asked or options.json else []
    in_use = [view.path for view in looked if view.path not in paths]
    if options.json:
        removed, removable = ([], paths) if only_listed else (paths, [])
        print(json.dumps({"removed": removed, "removable": removable, "in_use": in_use}))
    else:
        for path in paths:
            print(f"would remove {path}" if options.dry_run else path)
    if not asked and paths and not options.dry_run:
        print("nothing was removed: name the job (--job), or say --all", file=sys.stderr)
        return 1
    if not options.json:
        for path in in_use:
            print(f"in use, not removed: {path}", file=sys.stderr)
        if options.job is not None and not paths and not in_use:
            # Perhaps misspelt. Standard output names nothing but what goes.
            print(no_arenas(options.arena_dir, options.job), file=sys.stderr)
    return 0


_SUMMARIES = {
    "status": "show the arenas of running and dead jobs of this user on this host",
    "verify": "compare every byte of those arenas with its digest; exit 1 if any differs",
    "clean": "remove a job's arenas (--job, or --all) that no living process uses; else list them",
    "demo": "train on several nodes, kill some, and compare with an undisturbed run",
}
_COMMANDS: dict[str, Command] = {
    "status": _status,
    "verify": _verify,
    "clean": _clean,
    "demo": _demo,
}
