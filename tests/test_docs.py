"""What the README shows works, and what it promises in numbers is what the code computes."""

from __future__ import annotations

import ast
import dataclasses
import os
import queue
import re
import subprocess
import sys
import textwrap
from fractions import Fraction

import pytest

import replica
from recovery.layout import make_layout, parse_redundancy
from recovery.topology import Topology
from tests.replica.inprocess import COMMIT_S
from tests.sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.findall(
    r"^\| `([a-z]+:[0-9+]+)` \| (\d+) \| any (\d+) nodes? \|.*\| ([\d.]+) S \| ([\d.]+) S \|$",
    README,
    flags=re.MULTILINE,
)
PRELUDE = """
import sys
import time
import torch

model = torch.nn.Linear(4, 2)
optim = torch.optim.AdamW(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.StepLR(optim, step_size=1, gamma=0.5)
loader = {"position": 0}
total = int(sys.argv[1])
losses = []


def train_one_step():
    while ckpt.status()["busy"]:
        time.sleep(0.001)  # a real step takes longer than a save of so little
    optim.zero_grad()
    loss = model(torch.rand(3, 4)).square().sum()
    loss.backward()
    optim.step()
    sched.step()
    loader["position"] += 3
    losses.append(loss.item().hex())
"""
POSTLUDE = """
print(loader["position"], *losses)
"""


def the_example():
    """Return the README's first Python block."""
    return re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]


def run_example(folder, arena_dir, total):
    """Run the example as a script until step ``total``; return (loader position, losses)."""
    script = folder / "train.py"
    script.write_text(PRELUDE + the_example() + POSTLUDE, encoding="utf-8")
    environment = {**os.environ, "PLANARIA_ARENA_DIR": str(arena_dir), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(total)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    position, *losses = ran.stdout.split()
    return int(position), losses


@pytest.mark.real
def test_the_example_goes_on_where_it_stopped(arena_dir, tmp_path):
    """The README's lines, run to step 2 and again to step 5, train 2 steps and then only 3 more.

    The loader's position, which is restored, counts all five.
    """
    first, losses = run_example(tmp_path, arena_dir, 2)
    assert (first, len(losses)) == (6, 2)
    second, losses = run_example(tmp_path, arena_dir, 5)
    assert (second, len(losses)) == (15, 3)


def test_the_example_is_ten_lines():
    """The example stays within ten lines: the block's lines that hold code are counted."""
    assert len([line for line in textwrap.dedent(the_example()).splitlines() if line.strip()]) <= 10


def test_the_table_has_its_four_layouts():
    """The pattern that reads the README's table finds all of its rows."""
    assert [row[0] for row in TABLE] == ["copies:1", "copies:2", "stripe:2+1", "stripe:6+1"]


@pytest.mark.parametrize(("name", "nodes", "lost", "ram", "sent"), TABLE)
def test_the_table_is_what_the_layouts_compute(name, nodes, lost, ram, sent):
    """Nodes, losses, RAM and bytes sent are compared with those of the layout on equal ranks."""
    world, shard_bytes = int(nodes), 6000
    redundancy = parse_redundancy(name, world)
    topology = Topology(tuple(f"node{rank}" for rank in range(world)))
    layout = make_layout(redundancy, topology, [shard_bytes] * world)
    arena = layout.arena_bytes(0, [shard_bytes] * world)
    sent_bytes = sum(
        redundancy.code.length(fragment.index, shard_bytes) for fragment in layout.sent_by(0)
    )
    assert redundancy.nodes_needed == world
    assert redundancy.survivable_nodes == int(lost)
    assert [round(float(Fraction(n, shard_bytes)), 2) for n in (arena, sent_bytes)] == [
        float(ram),
        float(sent),
    ]


def rows_after(page, line):
    """List the rows of the first table after a line of a page, as lists of cells."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"\n{line}\n")[1]
    table = re.search(r"^\|.*\n\|---.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)[1]
    return [[cell.strip() for cell in row.split(" | ")] for row in table.splitlines()]


def test_every_option_is_listed_with_its_default():
    """The README's table of options has all fields of Options and ``group``, and their defaults."""
    listed = {
        name: ast.literal_eval(default.strip("`"))
        for names, default, *_ in rows_after("README.md", "## Options")
        for name in re.findall(r"`(\w+)`", names)
    }
    fields = dataclasses.fields(replica.Options)
    assert listed == {one.name: one.default for one in fields} | {"group": None}


def test_every_error_that_a_user_may_see_is_listed():
    """The table of errors has all that ``replica`` exports, and what ``Ticket.wait`` may raise."""
    listed = [row[0].strip("| `") for row in rows_after("docs/reliability.md", "## Errors")]
    exported = [name for name in replica.__all__ if isinstance(getattr(replica, name), type)]
    errors = [name for name in exported if issubclass(getattr(replica, name), Exception)]
    assert sorted(listed) == sorted([*errors, "TimeoutError"])


def test_events_have_the_keys_that_the_readme_lists(arena_dir):
    """A save and a restore are made: the keys of their events are those of the table."""
    line = "`with`, call `ckpt.close()` at the end."
    listed = {
        row[0].strip('| `"'): set(re.findall(r"`([a-z_]+)`", row[1]))
        for row in rows_after("README.md", line)
    }
    assert sorted(listed) == ["mend", "restore", "save", "scrub"]
    events = queue.SimpleQueue()
    options = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a", "redundancy": "none"}
    with replica.Checkpointer({"x": 1}, on_event=events.put, **options) as one:
        one.save(1).wait("committed", COMMIT_S)
        one.restore()
        found = [events.get(timeout=COMMIT_S) for _ in range(2)]
    assert [event["event"] for event in found] == ["save", "restore"]
    for event in found:
        assert set(event) == {"event", "step", *listed[event["event"]]} - {"skipped"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_point_at_files_that_exist(page):
    """Every path with a folder that a page quotes is there: looked up from the root."""
    quoted = re.findall(
        r"`((?:docs|tests|examples|replica|erasure|recovery)/[\w./-]*)`",
        page.read_text(encoding="utf-8"),
    )
    assert [path for path in quoted if not (ROOT / path).exists()] == []
