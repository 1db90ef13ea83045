"""What a state may hold, as tables for `docs/state.md`, made from the tables that the code uses.

`python -m replica.supported FILE` writes them between the two marks of a page, and without FILE
prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replica.device_pieces import CARRIED
from replica.dtypes import CODES, DTYPES, code_of
from replica.image import (
    MAX_DIMS,
    MAX_HEADER_BYTES,
    MAX_HEADER_NODES,
    MAX_NODES,
    MAX_TREE_BYTES,
)
from replica.state import GENERATORS
from replica.tensor_kinds import MAX_TENSORS, MISALIGNED, QUANTIZED, REFUSALS, REORDERED
from replica.tree import FACTORIES, MAPPING_TAGS, MAX_DEPTH, PLAIN_TYPES, SEQUENCE_START
from replica.unsupported import ADVICE

BEGIN = "<!-- begin: python -m replica.supported docs/state.md -->"
END = "<!-- end -->"


def supported_text() -> str:
    """Markdown of what is carried and what is refused, with this installation's torch."""
    parts = (_dtypes, _values, _objects, _refused, _limits)
    return "\n\n".join(part() for part in parts)


def with_tables(page: str) -> str:
    """A page with the text between its two marks made anew; `ValueError` where they are not."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"need a page with {BEGIN} and, after it, {END}")
    return f"{before}{BEGIN}\n\n{supported_text()}\n\n{END}{after}"


def _dtypes() -> str:
    carried = {name: dtype for name, dtype in DTYPES.items() if dtype not in QUANTIZED}
    typed = [name for name, dtype in carried.items() if code_of(dtype) is not None]
    raw = [name for name, dtype in carried.items() if code_of(dtype) is None]
    refused = [name for name in DTYPES if name not in carried]
    return _table(
        "Dtypes of tensors",
        ("", "dtypes"),
        [
            (f"carried under their own name in the file ({len(CODES)})", _names(typed)),
            ("carried as bytes, with their name beside them", _names(raw)),
            ("refused", _names(refused)),
        ],
    )


def _values() -> str:
    containers = {*MAPPING_TAGS} | {
        kind for kind in PLAIN_TYPES if kind.__name__ in SEQUENCE_START or kind is slice
    }
    plain = [kind for kind in PLAIN_TYPES if kind not in containers]
    return _table(
        "Python values",
        ("", "types, each itself and no subclass of it"),
        [
            ("values", _names([*map(_type_name, plain), "numpy scalars"])),
            ("containers", _names(map(_type_name, containers))),
            ("default factories of a `defaultdict`", _names([*FACTORIES, "None"])),
        ],
    )


def _objects() -> str:
    return _table(
        "Objects",
        ("object", "what is carried"),
        [
            ("`torch.nn.Module`", "what its `state_dict()` would hold"),
            ("`torch.optim.Optimizer`", "its `state_dict()`"),
            *((f"`{name}`", "its state") for name in GENERATORS.values()),
            ("whatever else has `state_dict` and `load_state_dict`", "its `state_dict()`"),
        ],
    )


def _refused() -> str:
    tensors = [(rule.kind, rule.why) for rule in REFUSALS]
    others = [(kind, text) for kind, _, text in ADVICE]
    return _table(
        "Refused, with the words of the error",
        ("kind", "after the key path and the type"),
        [
            *tensors,
            ("DTensors with an order of sharding of their own", REORDERED),
            ("tensors that share memory at parts of elements", MISALIGNED),
            *others,
            ("dataclasses and named tuples", "carry `dataclasses.asdict(it)`, `tuple(it)`"),
            ("subclasses of the types above", "carry the value as the type itself"),
            ("arrays and numpy scalars with objects or texts of no fixed size", "named by dtype"),
        ],
    )


def _limits() -> str:
    return _table(
        "Limits, met or named at the first save",
        ("of one rank's state", "at most"),
        [
            ("tensors", f"{MAX_TENSORS:,}"),
            ("levels of containers", str(MAX_DEPTH)),
            ("dimensions of a tensor", str(MAX_DIMS)),
            (
                "bytes of the file's header (about 100 for a tensor, and its name)",
                f"{MAX_HEADER_BYTES:,}",
            ),
            ("values of JSON in the header (12 for a tensor)", f"{MAX_HEADER_NODES:,}"),
            ("bytes of the structure (keys, plain values, 50 for a tensor)", f"{MAX_TREE_BYTES:,}"),
            ("values of JSON in the structure (15 or more for a tensor)", f"{MAX_NODES:,}"),
            ("device types", _names(sorted(CARRIED))),
        ],
    )


def _table(title: str, heads: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"**{title}**", "", f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right} |" for left, right in rows)])


def _names(names: Iterable[str]) -> str:
    return ", ".join(
        f"`{name}`" for name in sorted({*names}, key=lambda name: (name.lower(), name))
    )


def _type_name(kind: type[Any]) -> str:
    if kind is type(None):
        return "None"
    module = kind.__module__.split(".", 1)[0]
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def main(arguments: list[str]) -> None:
    """Write the tables into the page that is named, or to standard output."""
    if not arguments:
        sys.stdout.write(supported_text() + "\n")
        return
    (path,) = map(Path, arguments)
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
