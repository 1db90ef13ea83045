"""The wheel holds the three packages, whole, and nothing else."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.sources import ROOT, SHIPPED, python_files, relative

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DIST_INFO = f"{PROJECT['name']}-{PROJECT['version']}.dist-info"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel once, from a copy: a build writes beside the sources and runs overlap."""
    source = tmp_path_factory.mktemp("build") / "source"
    shutil.copytree(ROOT, source, ignore=NOT_COPIED)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "out").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    """Unpack the wheel as an installer would lay it out."""
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def files_of(directory: Path) -> set[str]:
    """List all files below a directory by their relative names."""
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def test_top_levels_are_exactly_three_packages(unpacked):
    """Tests, simulations and benchmarks stay at home: the wheel's top-level names are compared."""
    assert {p.name for p in unpacked.iterdir()} == {*SHIPPED, DIST_INFO}


def test_every_source_file_is_shipped(unpacked):
    """No module was forgotten in the package list: the wheel's files equal the sources' ones."""
    sources = {relative(path) for path in python_files(*SHIPPED)}
    markers = {f"{name}/py.typed" for name in SHIPPED}
    shipped = {f for f in files_of(unpacked) if not f.startswith(DIST_INFO)}
    assert shipped == sources | markers


def test_the_licence_travels(unpacked):
    """The wheel carries the full licence text: compared with the one at the root."""
    shipped = unpacked / DIST_INFO / "licenses" / "LICENSE"
    assert shipped.read_text(encoding="utf-8") == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_console_script_is_planaria(unpacked):
    """One command is installed: the entry points are read from the wheel's metadata."""
    (distribution,) = importlib.metadata.distributions(path=[str(unpacked)])
    scripts = distribution.entry_points.select(group="console_scripts")
    assert [(s.name, s.value) for s in scripts] == [("planaria", "replica.cli:main")]


def test_the_wheel_works_without_the_sources(unpacked, tmp_path):
    """The packages import and the command answers from the wheel alone, run in an empty folder."""
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import erasure, recovery, replica;"
        "from replica.cli import main;"
        "print(erasure.__file__, recovery.__file__, replica.__file__, sep='\\n', file=sys.stderr);"
        "sys.exit(main())"
    )
    command = [sys.executable, "-P", "-c", program, str(unpacked), "--help"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "usage: " in ran.stdout
    homes = [line for line in ran.stderr.splitlines() if line.endswith("__init__.py")]
    assert homes == [str(unpacked / name / "__init__.py") for name in SHIPPED]
