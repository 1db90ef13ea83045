"""The first words of a job: ranks of another version, or that say nonsense, are refused by all."""

from __future__ import annotations

import itertools

import pytest

from recovery.tree import dump
from replica import opening
from replica.errors import ConfigError, PeerError
from replica.words import check_facts, check_introductions, parse_word
from tests.fuzz.edges import FACTS, OURS
from tests.replica.inprocess import Cluster

NODES = ["left", "right", "third"]


def test_another_library_version_is_refused_by_all_naming_the_nodes(arena_dir, monkeypatch):
    """One of three ranks runs another version: ConfigError everywhere, with both nodes in it."""
    versions = itertools.count()
    monkeypatch.setattr(opening, "_library_version", lambda: f"0.{min(next(versions), 1)}")
    said = {
        (type(error), str(error))
        for error in Cluster(arena_dir, NODES, "copies:1").outcomes(lambda me: me.ckpt.start())
    }
    ((kind, words),) = said
    assert kind is ConfigError
    assert "library differs: rank 0 on node left" in words
    assert any(f"on node {node}" in words for node in NODES[1:])
    assert list(arena_dir.iterdir()) == []


class Garbled:
    """A group in which one rank's words reach everybody as something else."""

    def __init__(self, inner, rank, number, raw):
        self._inner, self._who, self._number, self._raw = inner, rank, number, raw
        self._round = 0
        self.rank, self.world = inner.rank, inner.world
        self.store, self.transport = inner.store, inner.transport

    def exchange(self, value, timeout_s):
        """Exchange; in round ``number`` one value is replaced."""
        said = self._inner.exchange(value, timeout_s)
        if self._round == self._number:
            said[self._who] = self._raw
        self._round += 1
        return said


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b"{}", b'{"value":7}', b'{"error":{}}'])
def test_a_word_that_cannot_be_read_ends_the_start_on_all_ranks(arena_dir, number, raw):
    """In each round of the opening rank 1 says nonsense: all ranks raise the same, naming it.

    Rounds whose value nobody needs take any value, so those words pass there.
    """
    cluster = Cluster(arena_dir, NODES, "copies:1", timeout_s=5.0)
    cluster.groups = [Garbled(group, 1, number, raw) for group in cluster.groups]
    said = {str(error) for error in cluster.outcomes(lambda me: me.ckpt.start()) if error}
    if raw == b'{"value":7}' and number in (1, 3, 4):
        assert said == set()
        return
    (words,) = said
    assert "rank 1" in words


def test_words_of_the_right_form_are_taken():
    """A value and an error are read back; introductions and facts as ranks say them pass."""
    assert parse_word(dump({"value": OURS}), 3) == {"value": OURS}
    assert parse_word(dump({"kind": "ArenaFull", "error": "x"}), 3)["error"] == "x"
    check_introductions([OURS, OURS], "1")
    check_facts([FACTS, FACTS | {"present": 1 << 40}])


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": True},
        {"epoch": 1 << 63},
        {"nonce": "x" * 32},
        {"incarnation": None},
        {"present": 1.5},
        {"memory": None},
        {"memory": {**FACTS["memory"], "device": None}},
        {"memory": {**FACTS["memory"], "more": 1}},
        {"memory": {**FACTS["memory"], "boot_id": 1}},
    ],
    ids=repr,
)
def test_facts_of_another_form_are_refused(change):
    """Each part of another type or range is refused, and the rank is named."""
    with pytest.raises(PeerError, match="rank 1 said"):
        check_facts([FACTS, FACTS | change])


@pytest.mark.parametrize(
    "change", [{"node": ""}, {"node": 3}, {"bytes": -1}, {"same": []}, {"arena_dir": None}]
)
def test_introductions_of_another_form_are_refused(change):
    """Another version may say less or other things: the rank, its node and our version are told."""
    with pytest.raises(ConfigError, match=r"rank 1 on node .* version 1\.2"):
        check_introductions([OURS, OURS | change], "1.2")
