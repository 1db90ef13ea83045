"""Makes mutants of ``recovery/`` with mutmut, runs the tests on them, tells how many were killed.

    python tests/mutants/run.py                        every mutant
    python tests/mutants/run.py 'recovery.plan.*'      those of one module, again
    python tests/mutants/run.py --again                those that survived, after tests were added
    python tests/mutants/run.py --seconds 3            fast tests only; then --again for the rest
    python tests/mutants/run.py --report               only the table, of what has run so far

Everything happens on a copy of the tree in ``build/mutants`` (or ``PLANARIA_MUTANTS_DIR``); mutmut
itself is installed there too and nowhere else. A run that was stopped goes on where it stood.
The survivors that are known are listed in ``survivors.md`` with a word each; any other is printed.
Ends with status 1 when a survivor is not listed or fewer than ``KILLED_MIN`` were killed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("PLANARIA_MUTANTS_DIR") or ROOT / "build" / "mutants")
TREE, TOOL = WORK / "tree", WORK / "tool"
MUTMUT = "mutmut==3.8.1"
KILLED_MIN = 0.90
COPIED = ("erasure", "recovery", "simulations", "tests", "pyproject.toml")
SEED = "1"
KILLED, SURVIVED, UNTESTED, TIMEOUT = "killed", "survived", "no test", "timeout"
BY_EXIT_CODE = {
    0: SURVIVED,
    1: KILLED,
    3: KILLED,
    33: UNTESTED,
    24: TIMEOUT,
    36: TIMEOUT,
    152: TIMEOUT,
    -24: TIMEOUT,
    -9: TIMEOUT,
}
CONFIG = """[mutmut]
source_paths=
    recovery/
also_copy=
    erasure/
    simulations/
    mutation_profile.py
pytest_add_cli_args_test_selection=
{tests}
pytest_add_cli_args=
    -p
    no:cacheprovider
    -p
    mutation_profile
    --hypothesis-profile=mutants
use_git_change_detection=false
timeout_multiplier=3
timeout_constant=15
"""
TESTS = ("tests/recovery/",)


def say(text=""):
    """Print a line at once: the run is long and usually watched through a file."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def prepare():
    """Copy what has changed since the last run, and install mutmut."""
    TREE.mkdir(parents=True, exist_ok=True)
    changed = False
    for name in COPIED:
        source, target = ROOT / name, TREE / name
        files = [p for p in source.rglob("*") if p.is_file()] if source.is_dir() else [source]
        files = [p for p in files if "__pycache__" not in p.parts]
        wanted = {target / p.relative_to(source) if source.is_dir() else target for p in files}
        if target.is_dir():
            for old in [p for p in target.rglob("*") if p.is_file() and p not in wanted]:
                old.unlink()
        for path in files:
            changed |= copy(path, target / path.relative_to(source) if source.is_dir() else target)
    if changed:
        # Which test reaches what: of old tests mutmut would not ask what they reach now.
        (TREE / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    shutil.copy2(HERE / "mutation_profile.py", TREE / "mutation_profile.py")
    tests = "\n".join(f"    {path}" for path in TESTS)
    (TREE / "setup.cfg").write_text(CONFIG.format(tests=tests), encoding="utf-8")
    if not (TOOL / "mutmut").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(TOOL)]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), MUTMUT], check=True)


def copy(source, target):
    """Copy one file unless the copy is the same already; say if it was not.

    A source of ``recovery`` is opened up.
    """
    data = source.read_bytes()
    if source.parent == ROOT / "recovery" and source.suffix == ".py":
        data = open_properties(data.decode()).encode()
    if target.is_file() and target.read_bytes() == data:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return True


def open_properties(text):
    """Rewrite ``@property def x`` as ``def _get_x`` and ``x = property(_get_x)``.

    mutmut leaves decorated functions alone; properties are decisions like any other.
    """
    lines = text.splitlines()
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    for node in sorted(nodes, key=lambda n: -n.lineno):
        names = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
        if len(node.decorator_list) == 1 and names in (["property"], ["cached_property"]):
            indent = " " * node.col_offset
            lines.insert(node.end_lineno, f"{indent}{node.name} = {names[0]}(_get_{node.name})")
            at = node.lineno - 1
            lines[at] = lines[at].replace(f"def {node.name}(", f"def _get_{node.name}(", 1)
            del lines[node.decorator_list[0].lineno - 1]
    return "\n".join(lines) + "\n"


CODE = """
import os
from types import SimpleNamespace
import mutmut.workers.timeout as timeout

def kill(pid, number):
    # mutmut forgets to look: by now the number may be that of a stranger.
    with open(f"/proc/{pid}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    if parent == os.getpid():
        os.kill(pid, number)

def kill_child(pid, number):
    try:
        kill(pid, number)
    except OSError:
        raise ProcessLookupError from None

timeout.os = SimpleNamespace(kill=kill_child, getpid=os.getpid)
from mutmut.__main__ import cli
from mutmut.runners.harness import PytestRunner
from mutmut.state import state

run_all = PytestRunner.run_tests

limit_s = float(os.environ["MUTANTS_SECONDS"])

def within(tests):
    left_s = limit_s
    for test in tests:
        left_s -= state().duration_by_test.get(test, 0.0)
        if left_s < 0:
            return
        yield test

def run_fastest_first(self, *, mutant_name, tests):
    # Most mutants die at once, and pytest takes long to collect a thousand tests.
    tests = list(within(tests))
    code = run_all(self, mutant_name=mutant_name, tests=tests[:40])
    if code or not tests[40:]:
        return code
    return run_all(self, mutant_name=mutant_name, tests=tests[40:])

PytestRunner.run_tests = run_fastest_first
cli()
"""


def mutmut(*args, seconds=float("inf")):
    """Return the command line of mutmut, and the environment for it."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{TOOL}{os.pathsep}{TREE}",
        "PLANARIA_TEST_SEED": SEED,
        "PYTHONDONTWRITEBYTECODE": "1",
        "MUTANTS_SECONDS": str(seconds),
    }
    return [sys.executable, "-c", CODE, *args], env


def results():
    """Return {mutant: killed | survived | no test | timeout} of what has run."""
    found = {}
    for path in sorted((TREE / "mutants" / "recovery").glob("*.py.meta")):
        codes = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
        for name, code in codes.items():
            if code is not None:
                found[name] = BY_EXIT_CODE.get(code, f"exit {code}")
    return found


def forget_survivors():
    """Have mutmut run again what survived: there are new tests."""
    for path in sorted((TREE / "mutants" / "recovery").glob("*.py.meta")):
        meta = json.loads(path.read_text(encoding="utf-8"))
        codes = meta["exit_code_by_key"]
        alive = {n for n, code in codes.items() if BY_EXIT_CODE.get(code) not in (KILLED, TIMEOUT)}
        meta["exit_code_by_key"] = {n: None if n in alive else code for n, code in codes.items()}
        path.write_text(json.dumps(meta, indent=4), encoding="utf-8")


def differences(names):
    """Return {mutant: (function, lines that went, lines that came)}."""
    code = (
        "import sys, json\n"
        "from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant\n"
        "names = json.load(sys.stdin)\n"
        "print(json.dumps({n: get_diff_for_mutant(n, path=find_mutant(n).path) for n in names}))"
    )
    _, env = mutmut()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TREE,
        env=env,
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for name, text in json.loads(done.stdout).items():
        lines = [line for line in text.splitlines() if not line.startswith(("---", "+++", "@@"))]
        gone = tuple(line[1:].strip() for line in lines if line.startswith("-"))
        come = tuple(line[1:].strip() for line in lines if line.startswith("+"))
        found[name] = (place(name), gone, come)
    return found


def place(name):
    """Return ``module.Class.function`` of a mutant's name."""
    module, _, rest = name.removeprefix("recovery.").partition(".")
    function = rest.rpartition("__mutmut_")[0].removeprefix("x_").removeprefix("xǁ")
    return f"{module}.{function.replace('ǁ', '.')}"


def listed():
    """Return the survivors of ``survivors.md`` as {(function, gone, came): count}."""
    found = Counter()
    where, gone, come = "", [], []
    for raw in (HERE / "survivors.md").read_text(encoding="utf-8").splitlines():
        line = raw.strip()
        if raw.startswith("    - "):
            gone.append(raw[6:].strip())
        elif raw.startswith("    + "):
            come.append(raw[6:].strip())
        elif line.startswith("= "):
            found[where, tuple(gone), tuple(come)] += 1
            gone, come = [], []
        elif raw.startswith("recovery."):
            where, gone, come = line.removeprefix("recovery."), [], []
    return found


def report(*, complete):
    """Print the table and the survivors that are not listed; return the exit status."""
    status = results()
    modules = sorted({name.split(".")[1] for name in status})
    say("| module | mutants | killed | timeout | survived | no test | killed of all |")
    say("|---|---|---|---|---|---|---|")
    for module in [*modules, ""]:
        count = Counter(s for n, s in status.items() if not module or n.split(".")[1] == module)
        total = sum(count.values())
        dead = count[KILLED] + count[TIMEOUT]
        odd = total - dead - count[SURVIVED] - count[UNTESTED]
        row = [f"recovery/{module}.py" if module else "together", total, count[KILLED]]
        row += [count[TIMEOUT], count[SURVIVED], count[UNTESTED], f"{100 * dead / total:.1f} %"]
        say("| " + " | ".join(map(str, row)) + " |" + (f" {odd} ended oddly" if odd else ""))
    alive = sorted(n for n, s in status.items() if s in (SURVIVED, UNTESTED))
    known, fresh = listed(), []
    for name, key in differences(alive).items():
        if known[key]:
            known[key] -= 1
        else:
            fresh.append((name, key))
    if fresh:
        say(f"\n{len(fresh)} survivors are not listed in survivors.md:\n")
    for name, (where, gone, come) in fresh:
        say(f"recovery.{where}    ({name})")
        for mark, some in (("-", gone), ("+", come)):
            for line in some:
                say(f"    {mark} {line}")
        say("    =")
    stale = +known
    if stale and complete:
        say(f"\n{sum(stale.values())} entries of survivors.md are no longer survivors:")
        for where, gone, come in stale:
            say(f"    {where}: {' / '.join(gone)} -> {' / '.join(come)}")
    dead = sum(s in (KILLED, TIMEOUT) for s in status.values())
    return int(bool(fresh) or dead < KILLED_MIN * len(status))


def main():
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("mutants", nargs="*", help="patterns such as 'recovery.plan.*'")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--again", action="store_true", help="run those once more that survived")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="run so much of the tests, fast ones first",
    )
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    if not options.report:
        prepare()
        if options.again:
            forget_survivors()
        arguments = ("run", "--max-children", str(options.cores), *options.mutants)
        command, env = mutmut(*arguments, seconds=options.seconds)
        with (WORK / "log.txt").open("w", encoding="utf-8") as log:
            say(f"running mutmut; its output goes to {WORK / 'log.txt'}")
            subprocess.run(command, cwd=TREE, env=env, stdout=log, stderr=log, check=True)
    return report(complete=not options.mutants)


if __name__ == "__main__":
    raise SystemExit(main())
