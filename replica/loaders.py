"""torchdata's loaders after a restore: their iterators draw from no random state a second time.

A `StatefulDataLoader` draws when it makes its iterator. The run that saved had done so long before,
so the draw of a restored loader would come on top of the random states that are restored as well.
Nor can the iterator be made at the restore: what a program sets before each epoch, as the epoch of
its sampler, would come too late for it. So it is made when the program asks for it, and what it has
drawn then is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from replica.random_states import capture_random_states, prepare_random_states
from replica.state import generator_state, set_generator_state

_MAKE = "_get_iterator"
"""torchdata's method that makes an iterator from what was loaded."""


def load_into(live: Any, saved: object, generators: Sequence[object]) -> None:
    """Load the state of whatever has `load_state_dict`.

    ``generators``: those of the state, which are restored too; read when the iterator is made.
    """
    live.load_state_dict(saved)
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(live).__mro__}
    if ("torchdata", "StatefulDataLoader") not in names:
        return
    if not hasattr(live, _MAKE):
        live.state_dict()  # of another version: asked for its state, it makes one
        return

    live.__dict__[_MAKE] = _Once(live, generators)


@dataclass
class _Once:
    """Stands in for the loader's method until it has made one iterator."""

    loader: Any
    generators: Sequence[object]

    def __call__(self) -> object:
        del self.loader.__dict__[_MAKE]
        with _drawing_in_vain(self.generators):
            return getattr(self.loader, _MAKE)()


@contextmanager
def _drawing_in_vain(generators: Sequence[object]) -> Iterator[None]:
    """Put back at the end what is drawn inside: from this process's states and the generators."""
    put_back = prepare_random_states(capture_random_states())
    own = [(generator, generator_state(generator)) for generator in generators]
    try:
        yield
    finally:
        put_back()
        for generator, state in own:
            set_generator_state(generator, state)
