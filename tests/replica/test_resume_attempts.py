"""A generation that fails to load is stepped over, however its error is worded each time (P19)."""

from __future__ import annotations

import itertools

import pytest

from recovery.session import RestoreHalfDone
from replica.restorer import masked
from tests.replica.inprocess import Cluster


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ValueError: <Lock object at 0x7f3a5c>", "ValueError: <Lock object at 0x10>"),
        ("OSError: no file /scratch/abcdefgh/x", "OSError: no file /scratch/zyxwvuts"),
        ("KeyError: 'b7e1_9'", "KeyError: 'c2'"),
        ("StateError: id deadbeefcafe is gone", "StateError: id abadcafefeed is gone"),
        ("RuntimeError: pid 81 after 0.25 s", "RuntimeError: pid 4711 after 3.5 s"),
    ],
)
def test_what_varies_is_masked(one, other):
    """Addresses, numbers, paths and hexadecimal names are the same error from time to time."""
    assert one != other
    assert masked(one) == masked(other)


@pytest.mark.parametrize(
    "other",
    ["ValueError: no such key", "KeyError: no such layer", "KeyError: no such keys"],
)
def test_what_differs_is_not_masked(other):
    """Another type or another sentence is another error."""
    assert masked("KeyError: no such key") != masked(other)


class Stubborn:
    """Takes no state, and says why in words of the test's."""

    def __init__(self, words):
        self._words = words

    def state_dict(self):
        """Give nothing."""
        return {}

    def load_state_dict(self, _):
        """Fail, differently each time, until the words are used up."""
        word = next(self._words, None)
        if word is not None:
            raise ValueError(word)


@pytest.mark.parametrize(
    ("words", "fails"),
    [
        ((f"bad object at {id(object()) + n:#x}" for n in itertools.count()), 2),
        ((f"bad {word}" for word in ("cat", "dog", "hen", "fox", "owl", "bee")), 4),
    ],
    ids=["an address", "another word"],
)
def test_a_generation_that_never_loads_is_stepped_over(arena_dir, words, fails):
    """Restarts do not go on for ever: the older step is taken, though no two errors are equal."""

    def save(me):
        me.state["stubborn"] = Stubborn(iter(()))
        me.commit(1, 2)

    def fail(me):
        me.state["stubborn"] = Stubborn(words)
        with pytest.raises(RestoreHalfDone, match="bad"):
            me.ckpt.restore()

    def last(me):
        me.state["stubborn"] = Stubborn(iter(()))
        return me.ckpt.restore()

    for body in (save, *[fail] * fails):
        Cluster(arena_dir, ["a"], "none").run(body)
    assert Cluster(arena_dir, ["a"], "none").run(last) == [1]
