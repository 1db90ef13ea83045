"""The simulation's command: runs of a seed, or scenario files; exit code 0 when all is well."""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path

from simulations.config import Config
from simulations.report import Failed, Report
from simulations.runs import BEYOND, PASS, Result, run
from simulations.scenario import Scenario, parse, write
from simulations.shrink import shrink
from simulations.swarm import draw

SCENARIOS = Path("tests/scenarios")
FAILED_MAX = 5
"""After so many runs that are not well there is no need for more."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    report = Report(seed)
    if not options.json:
        print(f"seed: {seed}", flush=True)
    if options.scenario:
        played = [_play(Path(name), report, options) for name in options.scenario]
        well = all(played)
    else:
        _runs(seed, report, options)
        well = report.well
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        print("\n".join(report.lines()))
        print(f"seed: {seed}")
    return 0 if well else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations", description=__doc__)
    parser.add_argument("--seed", type=int, help="first seed; each run has the next one")
    parser.add_argument("--runs", type=int, help="how many runs (100)")
    parser.add_argument("--seconds", type=float, help="go on for so long instead")
    parser.add_argument("--scenario", action="append", help="play a file; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--story", action="store_true", help="tell what happened in each run")
    parser.add_argument(
        "--keep", type=Path, default=SCENARIOS, help="where a failing run is written, shrunk"
    )
    return parser


def _runs(seed: int, report: Report, options: argparse.Namespace) -> None:
    ends_s = None if options.seconds is None else time.monotonic() + options.seconds
    count = options.runs if options.runs is not None else 100 if ends_s is None else 1 << 62
    if options.jobs > 1:
        _share(seed, count, report, options)
        return
    for number in range(seed, seed + count):
        if ends_s is not None and time.monotonic() > ends_s:
            break
        config = draw(number)
        result = _timed(config, report, options)
        if result.verdict not in (PASS, BEYOND):
            report.failed.append(_failed(config, result, options))
        if len(report.failed) >= FAILED_MAX:
            break


def _share(seed: int, count: int, report: Report, options: argparse.Namespace) -> None:
    """Let other processes do the runs: started by exec, each with seeds of its own."""
    jobs = options.jobs
    command = [sys.executable, "-m", "simulations", "--json", "--keep", str(options.keep)]
    started = []
    for job in range(jobs):
        if options.seconds is None:
            first, some = job * count // jobs, (job + 1) * count // jobs
            words = ["--seed", str(seed + first), "--runs", str(some - first)]
        else:
            # Far enough apart that no seed comes twice.
            words = ["--seed", str(seed + job * 1_000_000), "--seconds", str(options.seconds)]
        started.append(subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True))
    for process in started:
        said, _ = process.communicate()
        report.merge(json.loads(said))


def _timed(config: Config, report: Report, options: argparse.Namespace) -> Result:
    story: list[str] | None = [] if options.story else None
    began_s = time.process_time()
    result = run(config, story)
    report.add(result, time.process_time() - began_s)
    for line in story or ():
        print(line)
    return result


def _play(path: Path, report: Report, options: argparse.Namespace) -> bool:
    """Play one scenario; whether all came as it expects."""
    scenario = parse(path.read_text(encoding="utf-8"))
    result = _timed(scenario.config, report, options)
    failures = scenario.failures(result)
    if failures:
        rule = result.violation.rule if result.violation else ""
        text = "; ".join([*failures, *([result.violation.text] if result.violation else [])])
        failed = Failed(scenario.config.seed, result.verdict, rule, text, str(path))
        report.failed.append(failed)
    return not failures


def _failed(config: Config, result: Result, options: argparse.Namespace) -> Failed:
    """Shrink a run that is not well and keep it."""
    small, found = shrink(config, result)
    violation = found.violation
    rule, text = (violation.rule, violation.text) if violation else ("", "")
    story = (
        f"Found by the simulator with seed {config.seed}: {found.verdict} {rule}",
        *text.splitlines()[:6],
    )
    path = options.keep / f"found-{config.seed}.sim"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write(Scenario(small, (), story)), encoding="utf-8")
    return Failed(config.seed, found.verdict, rule, text, str(path))


if __name__ == "__main__":
    sys.exit(main())
