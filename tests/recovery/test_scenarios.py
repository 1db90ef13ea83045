"""Golden scenarios in text: ``tests/scenarios/*.txt``, a command, ``----``, what it prints.

``PLANARIA_REWRITE=1`` writes what is printed now; commit that only if you understand the diff.
Commands, with options of the form name=value:

    save REDUNDANCY RANKS_PER_NODE   silent=RANK@ACTION early=RANK@ACTION down=RANK@ACTION
                                     refuse=HOLDER:OWNER misread=HOLDER:OWNER seed=N
    restore REDUNDANCY RANKS_PER_NODE  lose=NODE,NODE damaged=STEP:OWNER:FRAGMENT,FRAGMENT
                                     foreign=STEP:OWNER:FRAGMENT silent=RANK@ACTION seed=N
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

from recovery.manifest import WHOLE
from recovery.tree import name_ranks
from tests.recovery.rigs import DAMAGED, FOREIGN, RestoreRig, SaveRig, layout_of
from tests.recovery.world import Early, Raised, Silent, StoreDown, World
from tests.sources import ROOT

FILES = sorted((ROOT / "tests" / "scenarios").glob("*.txt"))
FAULTS = {"silent": Silent, "early": Early, "down": StoreDown}
STATES = {"damaged": DAMAGED, "foreign": FOREIGN}


def parse(command):
    """Split a command into its name, its layout and its options, each a list of values."""
    name, redundancy, nodes, *rest = command.split()
    options = defaultdict(list)
    for option in rest:
        key, value = option.split("=")
        options[key].append(value)
    return name, layout_of(redundancy, *map(int, nodes.split(","))), options


def faults_of(options):
    """Return the faults that a command asks for."""
    return [
        kind(*map(int, value.split("@"))) for key, kind in FAULTS.items() for value in options[key]
    ]


def play(sessions, options):
    """Run the sessions with the faults of a command; what happened must have happened."""
    seed = int(options["seed"][0]) if options["seed"] else 0
    world = World(seed, sessions, faults=faults_of(options))
    results = world.run()
    assert all(world.fired[fault] for fault in faults_of(options))
    return world, results


def told(results, ranks, words):
    """Return one line for each thing that ranks said, with the ranks that said it."""
    said = defaultdict(list)
    for rank in ranks:
        said[words(results[rank]) if rank in results else "silent"].append(rank)
    return [f"{name_ranks(some)}: {text}" for text, some in said.items()]


def save(layout, options):
    """Play one save."""
    pairs = {
        key: [tuple(map(int, v.split(":"))) for v in options[key]] for key in ("refuse", "misread")
    }
    rig = SaveRig(
        layout, refused=dict.fromkeys(pairs["refuse"], "no room"), misread=pairs["misread"]
    )
    world, results = play(rig.sessions(), options)
    decision = rig.decision(world.store)
    lines = [f"decision: {': '.join(filter(None, decision))}" if decision else "decision: none"]
    return [*lines, *told(results, rig.sessions(), lambda r: r.value.state)]


def restore(layout, options):
    """Play one restore."""
    rig = RestoreRig(layout)
    rig.lose(*(node for value in options["lose"] for node in value.split(",")))
    for key, state in STATES.items():
        for value in options[key]:
            step, owner, fragments = value.split(":")
            parts = [WHOLE if f == "all" else int(f) for f in fragments.split(",")]
            rig.mark(state, int(step), int(owner), *parts)
    _, results = play(rig.sessions(), options)
    return [*told(results, rig.slots, outcome), f"{rig.moved_bytes} bytes moved"]


def outcome(result):
    """Return how one rank's restore ended, with the reads that are not from its own arena."""
    if isinstance(result, Raised):
        return f"{type(result.error).__name__}: {result.error}"
    found = result.value
    lines = [found.reason]
    if found.generation:
        lines.append(f"from {found.source}, {found.protection} more nodes may die")
        plan = found.plan.describe().splitlines()[1:]
        lines += [line for line in plan if not line.endswith("(here)") or "all" not in line]
    return "\n    ".join(lines)


def blocks(text):
    """Yield (comments and command, expected) for each block of a file."""
    for block in text.strip().split("\n\n"):
        head, _, expected = block.partition("\n----")
        yield head, expected.strip()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_prints_what_it_printed(path):
    """Every command of the file prints, word for word, what stands below it."""
    printed = []
    for head, _ in blocks(path.read_text(encoding="utf-8")):
        name, layout, options = parse(head.splitlines()[-1])
        lines = {"save": save, "restore": restore}[name](layout, options)
        printed.append((head, "\n".join(lines)))
    if os.environ.get("PLANARIA_REWRITE"):
        text = "\n\n".join(f"{head}\n----\n{lines}" for head, lines in printed)
        path.write_text(text + "\n", encoding="utf-8")
    assert printed == list(blocks(path.read_text(encoding="utf-8")))


def test_there_are_scenarios():
    """The folder was found: without files the test above would pass without looking."""
    assert {path.stem for path in FILES} >= {"save", "restore"}
