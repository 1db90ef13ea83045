"""Objects asked for their state: each once in a save, and whether any was."""

from __future__ import annotations

from replica.state import Live


class Asked:
    """Asks objects for their state, each once in a save: two walks of one save hear the same."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._said: dict[int, tuple[object, tuple[str, object] | None]] = {}

    def __call__(self, value: object) -> tuple[str, object] | None:
        found = self._said.get(id(value))
        if found is None:
            # The object too, for its number must not be given to another one.
            found = self._said[id(value)] = value, self._live(value)
        return found[1]


class Noted:
    """Asks objects, and knows whether one had an answer. No part of a reading: that were a cycle.

    Tensors in a cycle live until the garbage collector comes.
    """

    def __init__(self, live: Live) -> None:
        self._live, self.asked = live, False

    def __call__(self, value: object) -> tuple[str, object] | None:
        found = self._live(value)
        self.asked = self.asked or found is not None
        return found
