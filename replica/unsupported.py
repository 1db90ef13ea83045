"""A value that cannot be carried, said so that its user finds it: key path, type, what to do."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Iterable
from types import FunctionType

from erasure.errors import PlanariaError
from replica.errors import ArenaError

_KEY_CHARS = 80


class Unsupported(Exception):
    """A value that cannot be carried. `keys` grows outward while the error passes containers."""

    def __init__(self, value: object, why: str) -> None:
        super().__init__(why)
        self.value = value
        self.why = why
        self.keys: list[object] = []

    def describe(self) -> str:
        """Key path, type and reason in one clause."""
        return f"{path_text(reversed(self.keys))} is a {type_text(self.value)}, {self.why}"


def explains_itself(error: BaseException) -> bool:
    """Whether an error's text says all: no exception of a user's own method lies beneath it."""
    beneath: BaseException | None = error
    while isinstance(beneath, PlanariaError | Unsupported):
        beneath = beneath.__cause__
    # Beneath an ArenaError lies what the system said, which its text has. One from another process
    # has no cause, and what lay beneath as a note.
    noted = hasattr(error, "__notes__")
    return (beneath is None and not noted) or isinstance(error, ArenaError)


def type_text(value: object) -> str:
    """Qualified name of a value's type."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def path_text(keys: Iterable[object]) -> str:
    """Key path as the user would write it: `state['a']['b'][3]`."""
    return "state" + "".join(f"[{shown(key)}]" for key in keys)


def shown(key: object) -> str:
    """A value's `repr`, cut where it is long; it never raises."""
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 - a user's own repr, or an int too long for Python's
        text = f"<{type_text(key)}>"
    return text if len(text) <= _KEY_CHARS else text[: _KEY_CHARS - 3] + "..."


ADVICE: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("enum members", enum.Enum, "carry its name or value"),
    ("functions and lambdas", FunctionType, "a function cannot be carried"),
    ("classes", type, "a class cannot be carried"),
    ("memoryviews", memoryview, "carry bytes(it)"),
)
"""Kinds that users often have in a state, and what to carry in their place."""


def advice(value: object, supported: Container[type]) -> str:
    """Why a value of no supported type is refused, with what to carry in its place."""
    for _, kind, text in ADVICE:
        if isinstance(value, kind):
            return f"which is not supported: {text}"
    if dataclasses.is_dataclass(value):
        return "a dataclass, which could not come back as itself: carry dataclasses.asdict(it)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "a named tuple, which could not come back as itself: carry tuple(it) or it._asdict()"
    for kind in type(value).__mro__:
        if kind in supported:
            return f"a subclass, which could not come back as itself: carry {kind.__name__}(it)"
    return (
        "which is not one of the supported types: tensors, arrays, plain values, "
        "containers of them, and objects with state_dict and load_state_dict"
    )
