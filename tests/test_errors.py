"""Every error of the tree is raised by shipped code, and some test expects it by name."""

from __future__ import annotations

import ast
import importlib
import pickle
from collections import Counter

import pytest

from erasure.errors import PlanariaError
from tests.sources import ROOT, SHIPPED, called_name, dotted_name, parse, python_files

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in python_files(*SHIPPED)
    if path.name != "__main__.py"
]


def family():
    """List every class of the tree that the three packages define, the root first."""
    for name in MODULES:
        importlib.import_module(name)
    found, left = [], [PlanariaError]
    while left:
        kind = left.pop()
        if kind.__module__.split(".")[0] in SHIPPED and kind not in found:
            found.append(kind)
        left += kind.__subclasses__()
    return found


FAMILY = family()
NAMES = {kind.__name__ for kind in FAMILY}
BASES = {kind.__name__ for kind in FAMILY if kind.__subclasses__()}


def last_name(node):
    """Return the last part of a plain name or attribute chain."""
    return dotted_name(node).rsplit(".", 1)[-1]


def made(tree):
    """Yield the name of each error that is made, with or without arguments, to be raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield called_name(node)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield last_name(node.exc)


def expected(tree):
    """Yield the name of each error that a test holds something against.

    That is: given to ``raises``, ``isinstance`` or a helper, or compared, itself or as text; what a
    test raises itself does not count.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) not in NAMES:
            wanted = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Compare):
            wanted = [node.left, *node.comparators]
        else:
            continue
        for argument in wanted:
            for part in parts(argument):
                yield last_name(part) if isinstance(part, ast.Name | ast.Attribute) else part.value


def parts(node):
    """Yield names and texts in an argument, through tuples, sets and ``|``."""
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        for item in node.elts:
            yield from parts(item)
    elif isinstance(node, ast.BinOp):
        yield from parts(node.left)
        yield from parts(node.right)
    elif isinstance(node, ast.Attribute) and node.attr == "__name__":
        if isinstance(node.value, ast.Name | ast.Attribute):
            yield node.value
    elif isinstance(node, ast.Name | ast.Attribute | ast.Constant):
        yield node


def counted(folders, names_in):
    """Count the errors of the tree that ``names_in`` finds in all files below the folders."""
    return Counter(
        name for path in python_files(*folders) for name in names_in(parse(path)) if name in NAMES
    )


RAISED, EXPECTED = counted(SHIPPED, made), counted(["tests"], expected)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_error_is_raised_and_expected(name):
    """A class that nothing raises has children that are; all that is raised is met in a test."""
    assert RAISED[name] or name in BASES, f"{name} is never raised: remove it"
    assert EXPECTED[name] or not RAISED[name], f"no test expects {name}"


@pytest.mark.parametrize("package", SHIPPED)
def test_the_drawn_tree_has_every_branch(package):
    """The drawing on top of each errors.py names every class that is defined below it."""
    module = importlib.import_module(f"{package}.errors")
    defined = {kind.__name__ for kind in FAMILY if kind.__module__ == module.__name__}
    assert {name for name in defined if name not in module.__doc__} == set()


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_every_error_says_what_it_is_for(kind):
    """Each class has a sentence of its own, and a name under which it can be found again."""
    assert kind.__doc__
    assert getattr(importlib.import_module(kind.__module__), kind.__name__) is kind
    if not kind.__dict__.get("__init__"):
        assert str(pickle.loads(pickle.dumps(kind("word")))) == "word"  # noqa: S301 - made here


def test_the_search_tells_raised_from_expected():
    """What a test raises is no expectation; raises, isinstance, a compared text or name are."""
    code = """
with pytest.raises((ArenaFull, errors.ArenaBusy)): raise StoreError("x")
assert isinstance(error, PeerError | StateError)
assert kind == "ConfigError" and other != SaveFailed.__name__
"""
    assert set(expected(ast.parse(code))) & NAMES == {
        *("ArenaFull", "ArenaBusy", "PeerError", "StateError", "ConfigError", "SaveFailed")
    }
    assert {"StoreError"} == set(made(ast.parse(code))) & NAMES
