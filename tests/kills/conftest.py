"""The workers of the kill matrix are those of ``tests/replica``; counts are printed at the end."""

from __future__ import annotations

from collections import Counter

# Both folders' tests run in the same warm workers.
from tests.replica.conftest import (
    pool,
    pytest_collection_finish,
    pytest_unconfigure,
    real,
)

__all__ = ["pool", "pytest_collection_finish", "pytest_unconfigure", "real"]


def pytest_terminal_summary(terminalreporter):
    """Count the cases by phase and by layout: how many passed of how many."""
    counts = {"phase": Counter(), "layout": Counter()}
    passed = {"phase": Counter(), "layout": Counter()}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name in counts and report.when == "call":
                    counts[name][value] += 1
                    passed[name][value] += outcome == "passed"
    for name, found in counts.items():
        if found:
            terminalreporter.section(f"kills by {name}")
            for value, count in found.items():
                terminalreporter.write_line(f"{value:24} {passed[name][value]:4} of {count:4}")
    if counts["phase"]:
        total, good = counts["phase"].total(), passed["phase"].total()
        terminalreporter.write_line(f"kills: {good} of {total} cases passed")
