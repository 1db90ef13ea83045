"""The repository reads the same on every machine: no file names a path of one of them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.sources import ROOT

# Built from parts, so that this file does not name them itself.
FOLDERS = ("work", "home", "root", "Users", "opt", "tmp/[a-z]+")
MACHINE_PATH = re.compile(r"(?<![\w.\-/])/(?:" + "|".join(FOLDERS) + r")/\w")


def repository_files():
    """List the files that are tracked or would be: skipped where there is no git to ask."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a git checkout: {error}")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_file_names_a_path_of_one_machine():
    """Home folders and the like are named nowhere: every line of every text file is searched."""
    faults = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        faults += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    assert faults == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("see /" + "home/someone/notes", True),
        ("'/" + "work/main'", True),
        ("mounted at /dev/shm/planaria", False),
        ("https://example.org/" + "home/page", False),
        ("at home/work", False),
    ],
)
def test_the_rule_tells_a_machine_path_from_others(line, found):
    """The search can fail and does not cry wolf: five lines of known kind."""
    assert bool(MACHINE_PATH.search(line)) == found
