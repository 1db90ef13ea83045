"""The demo told as a short story. Pure text; ``Story`` puts the time in front and prints."""

from __future__ import annotations

import re
import time
from typing import TextIO

from replica.demo.options import DemoOptions
from replica.demo.report import Kill, Report

EQUAL, DIFFERENT, USAGE, BEYOND, FAILED = 0, 1, 2, 3, 4
MIB = 1 << 20
SHOWN_DIFFERENCES = 3


class Story:
    """Prints sentences with the seconds since the start in front."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._begun_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print one sentence at once."""
        self._print(f"{time.monotonic() - self._begun_s:6.1f} s  {text}")

    def show(self, block: str) -> None:
        """Print a block of lines as it is, between empty lines."""
        self._print(f"\n{block}\n")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def opening(options: DemoOptions) -> str:
    """Say what is going to happen."""
    layout = options.layout
    victim, victims = ("worker", "workers") if options.kill_process else ("node", "nodes")
    will_die = f"1 {victim}" if options.kill == 1 else f"{options.kill} {victims} at once"
    return (
        f"{options.nodes} nodes, {layout}, which survives the loss of {layout.survivable_nodes}; "
        f"{options.steps} steps, each saved; {will_die} will be killed; seed {options.seed}"
    )


def kill_sentence(kill: Kill, *, step: int, kept_node: bool) -> str:
    """Say who died and what went with it."""
    names = ", ".join(
        f"{node} (rank {rank})" for node, rank in zip(kill.nodes, kill.ranks, strict=True)
    )
    if kept_node:
        return f"SIGKILL to the worker of {names} in step {step + 1}; node and arena stay"
    return (
        f"SIGKILL to {names} in step {step + 1}: {kill.processes} processes, "
        f"and {kill.arena_bytes / MIB:.1f} MiB of arena deleted"
    )


def noticed_sentence(node: str, error: str) -> str:
    """Say how a survivor learned of a death, without the source line that gloo puts in front."""
    plain = re.sub(r"\[[^]]*\.cc:[0-9]+\] ", "", error)
    return f"{node} notices: {plain[:120]}"


def resumed_sentence(report: Report) -> str:
    """Say where training went on, and from whose memory."""
    if report.source == "none":
        return f"nothing could be restored, training began anew at step 0. {report.reason}".strip()
    tiers = {"own": "their own arenas", "peers": "their own and their peers' arenas"}
    tier = tiers.get(report.source, report.source)
    return (
        f"all ranks restored step {report.resumed_step} from {tier}; "
        f"committed before the kill: step {report.committed_step_at_kill}; "
        f"steps to do again: {report.steps_lost}; bytes received: {report.bytes_received:,}"
    )


def table(report: Report) -> str:
    """Lay out the phases in seconds."""
    seconds = report.seconds
    rows = [
        ("kill noticed by a survivor", seconds.detect),
        ("all workers running again", seconds.relaunch),
        ("restore", seconds.restore_total),
        ("  who holds what", seconds.inventory),
        ("  moving bytes", seconds.transfer),
        ("  decoding", seconds.decode),
        ("  loading", seconds.load),
        ("kill to training, in all", seconds.kill_to_training),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {'phase':{width}}  seconds", f"  {'-' * width}  -------"]
    lines += [
        f"  {name:{width}}  {'-' if value is None else f'{value:.3f}':>7}" for name, value in rows
    ]
    return "\n".join(lines)


def exit_code(report: Report, options: DemoOptions) -> int:
    """Return 0 equal, 1 different or less than promised, 3 beyond the layout and said so."""
    if not report.bitwise_equal:
        return DIFFERENT
    if report.source == "none" or report.resumed_step < report.committed_step_at_kill:
        return DIFFERENT if options.survivable else BEYOND
    return EQUAL


def verdict(report: Report, options: DemoOptions) -> str:
    """Say how it ended, in one sentence."""
    code = exit_code(report, options)
    if not report.bitwise_equal:
        wanted = ", as it must be after --sabotage" if options.sabotage else ""
        shown = "; ".join(report.differences[:SHOWN_DIFFERENCES])
        return f"DIFFERENT from the uninterrupted run{wanted}: {shown}"
    if code == DIFFERENT:
        return (
            f"DIFFERENT from what was promised: {report.redundancy} survives this kill, and step "
            f"{report.committed_step_at_kill} was committed, but training resumed at step "
            f"{report.resumed_step}"
        )
    if code == BEYOND:
        return (
            f"BEYOND THE LAYOUT: {report.killed} nodes died and {report.redundancy} survives "
            f"{options.layout.survivable_nodes}; the run said so and began anew, and ended equal"
        )
    return (
        f"EQUAL, bit for bit, to the uninterrupted run: the losses of all {report.steps} steps and "
        f"the final state of all {report.nodes} ranks"
    )
