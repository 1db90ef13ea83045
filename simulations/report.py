"""Sums over many runs, as one JSON object or in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from simulations.runs import BEYOND, PASS, Result

RESTORES = (
    "restores",
    "restores that moved bytes",
    "restores that needed parity",
    "restores that needed a second source",
    "restores of an older generation",
    "restores that stepped back after failed loads",
    "restores beyond the redundancy",
)


@dataclass
class Failed:
    """One run that is not well."""

    seed: int
    verdict: str
    rule: str = ""
    text: str = ""
    scenario: str = ""


@dataclass
class Report:
    """What came of some runs. ``cpu_s``: the time of this process that they took."""

    seed: int
    runs: int = 0
    cpu_s: float = 0.0
    events: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Failed] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether every run was: what is unknown is not."""
        return self.runs > 0 and set(self.verdicts) <= {PASS, BEYOND}

    @property
    def failures_per_s(self) -> float:
        return sum(self.failures.values()) / self.cpu_s if self.cpu_s else 0.0

    def add(self, result: Result, cpu_s: float) -> None:
        """Add one run."""
        self.runs += 1
        self.cpu_s += cpu_s
        self.events += result.events
        self.verdicts[result.verdict] += 1
        self.fired += result.fired
        self.failures += result.failures
        self.counts += result.counts

    def merge(self, other: dict[str, Any]) -> None:
        """Add what another process has printed as JSON."""
        self.runs += other["runs"]
        self.cpu_s += other["cpu_s"]
        self.events += other["events"]
        for name in ("verdicts", "fired", "failures", "counts"):
            getattr(self, name).update(other[name])
        self.failed += [Failed(**one) for one in other["failed"]]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["failed"] = [asdict(one) for one in self.failed]
        return {**values, "failures_per_s": round(self.failures_per_s, 1), "well": self.well}

    def lines(self) -> list[str]:
        """The same for a reader."""
        verdicts = ", ".join(f"{n} {v}" for v, n in self.verdicts.most_common())
        failures, came = sum(self.failures.values()), sum(self.fired.values())
        found = [
            f"{self.runs} runs: {verdicts}",
            f"{failures} failures that mattered, of {came} faults; {self.failures_per_s:.0f} per s",
            "kind            came  mattered",
        ]
        found += [
            f"{kind:14} {self.fired[kind]:6} {self.failures[kind]:9}" for kind in sorted(self.fired)
        ]
        found += [f"{self.counts[name]:7} {name}" for name in RESTORES]
        found += [
            f"{self.counts[name]:7} {name}"
            for name in sorted(self.counts)
            if name not in RESTORES and not name.startswith("drawn ")
        ]
        for one in self.failed:
            found.append(f"seed {one.seed}: {one.verdict} {one.rule}: {one.text}")
            found.append(f"  replay: python -m simulations --scenario {one.scenario}")
        return found
