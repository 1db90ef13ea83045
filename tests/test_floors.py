"""The floors hold: erasure is arithmetic, recovery is decisions, only replica touches the world."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

import pytest

from tests.sources import (
    BESIDE,
    SHIPPED,
    called_name,
    dotted_name,
    imported_modules,
    parse,
    python_files,
    relative,
)

# What a floor may import beside the standard library, which each floor's ban then narrows.
ALLOWED = {
    "erasure": {"erasure", "numpy", "xxhash"},
    "recovery": {"recovery", "erasure", "numpy"},
    "replica": {
        "replica",
        "recovery",
        "erasure",
        "numpy",
        "psutil",
        "safetensors",
        "torch",
        "xxhash",
    },
}
# Third-party names that one place alone may import.
ONLY_IN = {
    "zfec": "erasure/kernels/zfec.py",
    "llvmlite": "replica/copy_loop.py",
    "matplotlib": "replica/demo/",
}

# Network, processes, clock, chance: never in arithmetic.
NOT_ARITHMETIC = {
    *("asyncio", "datetime", "fcntl", "mmap", "multiprocessing", "random", "secrets", "select"),
    *("selectors", "shutil", "signal", "socket", "sqlite3", "subprocess", "tempfile", "time"),
    *("urllib", "uuid"),
}
# A decision moreover knows no file, thread, environment, machine or log: it is handed facts and
# returns its reason.
NOT_DECISION = NOT_ARITHMETIC | {
    *("atexit", "concurrent", "ctypes", "getpass", "glob", "io", "locale", "logging", "os"),
    *("pathlib", "platform", "pwd", "queue", "resource", "sched", "ssl", "sys", "threading"),
    *("warnings", "weakref"),
}
BANNED = {"erasure": NOT_ARITHMETIC, "recovery": NOT_DECISION, "replica": set()}

# All of these run code found in the bytes that they read, or hand objects to something that does.
PICKLING_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"),
    *("copyreg", "multiprocessing", "joblib"),
}
PICKLING_NAMES = {"torch.load", "torch.save"}
PICKLING_CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def import_faults(floor: str, file: str, modules: Iterable[tuple[str, int]]) -> list[str]:
    """Name every import of a file that its floor forbids."""
    faults = []
    for module, line in modules:
        top = module.split(".")[0]
        home = ONLY_IN.get(top)
        if home is not None:
            allowed = file.startswith(home)
        elif top in sys.stdlib_module_names:
            allowed = top not in BANNED[floor]
        else:
            allowed = top in ALLOWED[floor]
        if not allowed:
            faults.append(f"{file}:{line} imports {module or 'relatively'}")
    return faults


def pickle_faults(file: str, tree: ast.Module) -> list[str]:
    """Name every import, call or attribute of a file that pickles or unpickles."""
    faults = [
        f"{file}:{line} imports {module}"
        for module, line in imported_modules(tree)
        if module.split(".")[0] in PICKLING_MODULES or module in PICKLING_NAMES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted_name(node) in PICKLING_NAMES:
            faults.append(f"{file}:{node.lineno} uses {dotted_name(node)}")
        if isinstance(node, ast.Call) and called_name(node) in PICKLING_CALLS:
            faults.append(f"{file}:{node.lineno} calls {called_name(node)}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            faults.append(f"{file}:{node.value.lineno} mentions allow_pickle")
    return faults


@pytest.mark.parametrize("floor", SHIPPED)
def test_each_floor_imports_only_what_it_may(floor):
    """Every import is one that the floor allows: read from the syntax, lazy ones too."""
    files = python_files(floor)
    assert files, f"{floor} has no files: this test would pass without looking"
    faults = [
        fault
        for path in files
        for fault in import_faults(floor, relative(path), imported_modules(parse(path)))
    ]
    assert faults == []


def test_zfec_is_imported_lazily():
    """Zfec is optional where ISA-L loads: no import of it runs at the top level of a module."""
    faults = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files(*SHIPPED)
        for node in parse(path).body
        for module, _ in imported_modules(node)
        if module.split(".")[0] == "zfec" and not isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    assert faults == []


def test_a_decision_reads_no_file_and_prints_nothing():
    """Recovery calls neither open, print nor input, and draws no numpy random numbers."""
    faults = [
        f"{relative(path)}:{node.lineno} {ast.unparse(node)}"
        for path in python_files("recovery")
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.Name) and node.id in {"open", "print", "input"})
        or (isinstance(node, ast.Attribute) and dotted_name(node) in {"np.random", "numpy.random"})
    ]
    assert faults == []


def test_nothing_is_pickled():
    """No code outside the tests pickles or unpickles anything: imports, calls and options read."""
    faults = [
        fault
        for path in python_files(*SHIPPED, *BESIDE)
        for fault in pickle_faults(relative(path), parse(path))
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("floor", "file", "source"),
    [
        ("erasure", "erasure/code.py", "import torch"),
        ("erasure", "erasure/code.py", "from recovery.plan import Plan"),
        ("erasure", "erasure/code.py", "def f():\n    import zfec"),
        ("erasure", "erasure/code.py", "from . import digest"),
        ("erasure", "erasure/code.py", "import importlib\nimportlib.import_module(name)"),
        ("recovery", "recovery/plan.py", "import time"),
        ("recovery", "recovery/plan.py", "def f():\n    from os import environ"),
        ("recovery", "recovery/plan.py", "import torch.distributed"),
        ("replica", "replica/arena.py", "from simulations import world"),
        ("replica", "replica/arena.py", "import tests.sources"),
        ("replica", "replica/arena.py", "import matplotlib.pyplot"),
    ],
)
def test_the_rules_see_a_breach(floor, file, source):
    """The checks above can fail: each forbidden import, given as source text, is found."""
    assert import_faults(floor, file, imported_modules(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "import torch\ntorch.load(path)",
        "reader = torch.load",
        "dist.all_gather_object(out, value)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_pickle_rule_sees_a_breach(source):
    """The pickle check can fail: each way to pickle, given as source text, is found."""
    assert pickle_faults("x.py", ast.parse(source))
