"""Files stay under 400 lines and functions under 60, docstrings not counted."""

from __future__ import annotations

import ast

import pytest

from tests.sources import BESIDE, SHIPPED, parse, python_files, relative

FILE_LINES_MAX = 399
FUNCTION_LINES_MAX = 59
FILES = python_files(*SHIPPED, *BESIDE)


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines from def to the last statement, the docstring's left out."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """List all functions and methods, nested ones too."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_and_functions_are_short(path):
    """One file and each function in it stay within the limits: lines counted from its syntax."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES_MAX
    too_long = {
        f.name: function_lines(f)
        for f in functions(parse(path))
        if function_lines(f) > FUNCTION_LINES_MAX
    }
    assert too_long == {}


def test_a_docstring_does_not_count():
    """The counting leaves out the docstring alone: two functions of known length are counted."""
    tree = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n')
    bare = ast.parse("def f(\n    a,\n):\n    return a\n")
    assert [function_lines(f) for f in (*functions(tree), *functions(bare))] == [3, 4]
