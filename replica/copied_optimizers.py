"""One warning for each dict in a state that is what an optimizer's `state_dict()` gave.

It is carried as any dict is, and comes back: into itself. Nothing hands it to the optimizer, whose
moments and step are then those of a new one, and one that was taken before the first step is empty
at every save. Only the containers of a user are looked through: what a state object says of itself
may well hold such dicts, and takes them back.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from replica.unsupported import path_text

log = logging.getLogger("planaria")

_LEVELS_MAX = 4
_ITEMS_MAX = 1000
_CONTAINERS_MAX = 64
"""So many items of one container, and containers of a state, are looked at."""


class CopiedOptimizers:
    """Warns of one state, once for each key path."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def check(self, state: Mapping[str, object], rank: int) -> None:
        """Warn of what was not told before."""
        for path in _copied(state):
            if path in self._said:
                continue
            self._said.add(path)
            log.warning(
                "rank %d: %s is what an optimizer's state_dict() gives: what is saved is this "
                "dict, and restore() fills it and no optimizer. Put the optimizer itself into the "
                "state, or hand the dict to its load_state_dict() after restore() and fill it anew "
                "before each save. Said once",
                rank,
                path,
            )


def _copied(state: Mapping[str, object]) -> Iterator[str]:
    """Key paths of such dicts, those of fewer levels first."""
    left: deque[tuple[tuple[object, ...], Any]] = deque([((), {**state})])
    for _ in range(_CONTAINERS_MAX):
        if not left:
            return
        keys, value = left.popleft()
        if _is_copied(value):
            yield path_text(keys)
        elif len(keys) < _LEVELS_MAX:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            left.extend(
                ((*keys, key), item)
                for key, item in islice(items, _ITEMS_MAX)
                if isinstance(item, dict | list | tuple)
            )


def _is_copied(value: object) -> bool:
    if not isinstance(value, dict) or "state" not in value:
        return False
    groups = value.get("param_groups")
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, dict) and "params" in group for group in groups)
    )
