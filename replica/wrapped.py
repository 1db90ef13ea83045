"""Tensor subclasses that are made of other tensors, inside the state of a module.

torch's flattening protocol tells their inner tensors and a context. Both are carried, and loaded
into the live parameter or buffer of the same class, inner tensor by inner tensor: no class is
looked up by name, none is built anew, and the context is only compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from replica.image import ImageError
from replica.tensor_kinds import PLAIN_TENSORS, is_wrapper
from replica.torch_private import DTensor
from replica.unsupported import Unsupported, path_text, type_text

if TYPE_CHECKING:
    from replica.loading import Loader

_MAX_CONTEXT_CHARS = 1 << 16


@dataclass(frozen=True)
class Wrapped:
    """What is carried of one wrapper subclass."""

    kind: str
    """Qualified name of its class."""
    context: str
    """Its context as text."""
    shape: tuple[int, ...]
    """Its own, which need not be that of any part."""
    parts: dict[str, object]
    """Inner tensors by attribute; a `Wrapped` for one that is a wrapper itself."""


def with_wrappers(state: dict[str, object]) -> dict[str, object]:
    """The state of a module, its wrapper subclasses opened; the same dict where there are none."""
    found = {key: opened(value) for key, value in state.items() if _opens(value)}
    return {key: found.get(key, value) for key, value in state.items()} if found else state


def opened(value: Any) -> Wrapped:
    """Flatten a wrapper by its protocol; `Unsupported` for a context that cannot be compared."""
    names, context = value.__tensor_flatten__()
    text = _context_text(context)
    # The address in the text of an object that has no text of its own would never compare equal.
    if " at 0x" in text or len(text) > _MAX_CONTEXT_CHARS:
        raise Unsupported(
            value,
            f"a tensor subclass whose context cannot be compared by its text: {text[:200]}",
        )
    parts = {str(name): getattr(value, name) for name in names}
    return Wrapped(
        kind=type_text(value),
        context=text,
        shape=tuple(value.shape),
        parts={name: opened(part) if _opens(part) else part for name, part in parts.items()},
    )


def plan_wrapped(loader: Loader, live: Any, node: Any, keys: tuple[object, ...]) -> bool:
    """Plan the copies into a live value where it or what was saved for it is a wrapper.

    False where neither is. What does not fit is added to the findings.
    """
    saved = type(node) is list and bool(node) and node[0] == "wrapped"
    if not saved and not _opens(live):
        return False
    findings = loader.findings.different
    if not saved or not _opens(live):
        kind = node[1] if saved and len(node) > 1 else "another kind of tensor"
        findings.append(f"{path_text(keys)} saved as {kind}, is a {type_text(live)}")
        return True
    now = opened(live)
    parts = _checked_parts(node)
    then = Wrapped(node[1], node[2], tuple(node[3]), parts)
    for name, was, is_now in (
        ("as a", then.kind, now.kind),
        ("with shape", then.shape, now.shape),
        ("with the context", then.context, now.context),
        ("with the inner tensors", [*then.parts], [*now.parts]),
    ):
        if was != is_now:
            findings.append(f"{path_text(keys)} saved {name} {was}, now {is_now}")
            return True
    for name, part in parts.items():
        inner = getattr(live, name)
        if not plan_wrapped(loader, inner, part, (*keys, name)):
            loader.tensor(inner, part, (*keys, name))
    return True


def _opens(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in PLAIN_TENSORS
        and not isinstance(value, DTensor)
        and is_wrapper(value)
    )


def _context_text(context: object) -> str:
    """`repr`, with dicts and sets in an order that does not change from run to run."""
    if isinstance(context, Mapping):
        rows = sorted(f"{key!r}: {_context_text(value)}" for key, value in context.items())
        return f"{type(context).__name__}({', '.join(rows)})"
    if isinstance(context, list | tuple | set | frozenset):
        rows = [_context_text(value) for value in context]
        rows = sorted(rows) if isinstance(context, set | frozenset) else rows
        return f"{type(context).__name__}({', '.join(rows)})"
    return repr(context)


def _checked_parts(node: list[Any]) -> dict[str, Any]:
    if len(node) < 4 or len(node) % 2 or type(node[3]) is not list:
        raise ImageError("shard image: a damaged node of a tensor subclass")
    names = node[4::2]
    if any(type(name) is not str for name in names) or len({*names}) != len(names):
        raise ImageError("shard image: a tensor subclass with damaged names")
    return dict(zip(names, node[5::2], strict=True))
