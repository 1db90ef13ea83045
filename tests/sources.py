"""Where the sources are, and how the house-rule tests read them: as syntax, never by importing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("erasure", "recovery", "replica")
BESIDE = ("simulations", "benchmarks", "examples")


def python_files(*folders: str) -> list[Path]:
    """List the Python files under these top-level folders, those that exist, in a fixed order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    """Name a file as a reader of the repository would."""
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    """Read one file as syntax."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (dotted module, line) for every import, lazy ones inside functions included.

    ``from a import b`` yields both ``a`` and ``a.b``, since b may be a module. A module named by a
    literal to ``import_module`` or ``__import__`` counts as well; one that is computed yields "?",
    which no floor allows.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"}:
            name = node.args[0] if node.args else None
            literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
            yield (name.value if literal else "?"), node.lineno


def called_name(call: ast.Call) -> str:
    """Return the last part of what is called: ``load`` for ``torch.load(...)``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def dotted_name(node: ast.expr) -> str:
    """Return ``torch.load`` for that attribute chain, "" for anything that is not a plain chain."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
