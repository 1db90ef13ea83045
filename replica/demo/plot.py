"""The picture of both loss curves, where matplotlib is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path

from replica.demo.compare import Outcome
from replica.demo.report import Report


def mean_losses(outcome: Outcome) -> dict[int, float]:
    """Return step -> mean loss over the ranks; of a step that was done twice, one of its values."""
    by_step: dict[int, list[float]] = {}
    for (_, step), losses in outcome.losses.items():
        by_step.setdefault(step, []).append(float.fromhex(min(losses)))
    return {step: sum(values) / len(values) for step, values in sorted(by_step.items())}


def draw(path: Path, run: Outcome, reference: Outcome, report: Report) -> bool:
    """Write both curves as a PNG; return False, having done nothing, without matplotlib."""
    try:
        # pyplot keeps global state and may look for a display; the figure alone needs neither.
        figure_module = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        return False
    figure = figure_module.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _curve(axes, mean_losses(reference), "uninterrupted", color="#f2b134", linewidth=7)
    _curve(axes, mean_losses(run), "lost nodes and went on", color="#1f3b57", linewidth=1.6)
    lost_at = report.resumed_step + report.steps_lost
    axes.axvline(lost_at, color="#b3372f", linestyle=":", label=f"killed after step {lost_at}")
    axes.axvline(
        report.resumed_step,
        color="#4a8a3d",
        linestyle="--",
        label=f"resumed at step {report.resumed_step}",
    )
    axes.set(xlabel="step", ylabel="mean loss of all ranks", title=_title(report))
    axes.legend()
    # Two demos may draw at once: each replaces the picture whole.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.png")
    figure.savefig(unfinished, dpi=120)
    unfinished.replace(path)
    return True


def _curve(axes: object, losses: Mapping[int, float], label: str, **style: object) -> None:
    axes.plot(list(losses), list(losses.values()), label=label, **style)  # type: ignore[attr-defined]


def _title(report: Report) -> str:
    verdict = "equal bit for bit" if report.bitwise_equal else "DIFFERENT"
    return f"{report.killed} of {report.nodes} nodes killed, {report.redundancy}: {verdict}"
