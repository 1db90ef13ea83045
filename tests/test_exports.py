"""What a package exports is listed, importable and documented; ruff keeps the lists sorted."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools

import pytest

from tests.sources import ROOT, SHIPPED, parse

PACKAGES = [path.parent for name in SHIPPED for path in sorted((ROOT / name).rglob("__init__.py"))]
NAMES = [".".join(path.relative_to(ROOT).parts) for path in PACKAGES]


def public_names(package):
    """Return the public names that a package's __init__ imports from ours or defines itself.

    What is imported at its first use stands in a block for type checkers.
    """
    tree = parse(ROOT / package / "__init__.py")
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname or alias.name
        for node in itertools.chain(tree.body, *blocks)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in SHIPPED
        for alias in node.names
    }
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return {name for name in imported | defined if not name.startswith("_")}


def exported(name):
    """Return what a package exports, by name."""
    module = importlib.import_module(name)
    return {n: getattr(module, n) for n in getattr(module, "__all__", [])}


def undocumented(things):
    """List the names of those classes and functions that have no docstring."""
    return [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, property))
        and not thing.__doc__
    ]


@pytest.mark.parametrize("package", SHIPPED)
def test_a_front_door_lists_all_it_has(package):
    """__all__ is not empty and equals the public names of __init__, read from its syntax."""
    names = importlib.import_module(package).__all__
    assert names
    assert len(names) == len(set(names))
    assert set(names) == public_names(package)


def test_the_face_shows_what_it_exports_only():
    """What completion offers after ``replica.`` is what is exported."""
    replica = importlib.import_module("replica")
    assert dir(replica) == sorted(replica.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_exports_are_there_and_documented(name):
    """Every name in __all__ can be had, and every class and function in it has a docstring."""
    assert undocumented(exported(name)) == []


def test_every_method_at_the_front_door_is_documented():
    """What users call is documented, method by method: all classes of replica are walked."""
    classes = [thing for thing in exported("replica").values() if inspect.isclass(thing)]
    assert classes
    public = {
        f"{cls.__name__}.{name}": member
        for cls in classes
        for name, member in vars(cls).items()
        if not name.startswith("_")
    }
    assert undocumented(public) == []
