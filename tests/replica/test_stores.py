"""One suite for every store: in memory, over TCP, and with a deadline; then what is their own."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from replica.errors import ConfigError, StoreError
from replica.group import TorchGroup
from replica.store import MemoryStore, TorchStore, connector
from replica.timed_store import TimedStore
from tests.replica.inprocess import all_of, outcomes


def serve():
    """Start a TCP store on a free port; the server and its address."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    return server, f"127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def clients():
    """Yield a maker of clients of one TCP store; it hands the same four out again and again.

    Torch asks the name server about every new connection, which takes seconds on some machines.
    """
    server, address = serve()
    connect = connector(address, 30.0)
    made = [connect() for _ in range(4)]
    yield cycle(made).__next__
    del server


@pytest.fixture(params=["memory", "tcp", "timed memory", "timed tcp"])
def store(request, clients):
    """Return a store of each kind, with keys of its own."""
    if "tcp" in request.param:
        inner = TorchStore(clients, f"test/{request.node.name}")
    else:
        inner = MemoryStore()
    if "timed" not in request.param:
        yield inner
        return
    timed = TimedStore(inner, 30.0)
    yield timed
    timed.close()


def test_what_is_set_is_there(store):
    """Values of any bytes come back, a key may be set again, none is seen before it is set."""
    values = {"a": b"", "b": b"x", "c/d e": bytes(range(256)), "long": b"y" * 100_000}
    assert not store.check(["a"])
    for key, value in values.items():
        store.set(key, value)
    assert store.check(list(values))
    assert store.get(list(values)) == list(values.values())
    store.set("b", b"again")
    assert store.get(["b"]) == [b"again"]


def test_check_wants_all_keys_and_never_waits(store):
    """One missing key of three is enough for False; no keys at all are all there."""
    store.set("a", b"1")
    store.set("b", b"2")
    assert store.check(["a", "b"])
    assert not store.check(["a", "missing", "b"])
    assert store.check([])
    assert store.get([]) == []


def test_the_first_compare_set_wins(store):
    """The value that was set first stays, and everybody is told it."""
    assert store.compare_set("decision", b"committed") == b"committed"
    assert store.compare_set("decision", b"aborted:late") == b"committed"
    assert store.get(["decision"]) == [b"committed"]
    store.set("plain", b"set")
    assert store.compare_set("plain", b"other") == b"set"


def test_a_deleted_key_is_gone(store):
    """Deleting removes, deleting again does nothing, and compare_set starts anew."""
    store.set("a", b"1")
    store.delete("a")
    assert not store.check(["a"])
    store.delete("a")
    assert store.compare_set("a", b"2") == b"2"


def test_clones_have_keys_of_their_own_under_their_prefix(store):
    """Equal keys under two prefixes differ; two clones of one prefix share theirs."""
    one, other, again = store.clone("one"), store.clone("other"), store.clone("one")
    one.set("k", b"1")
    other.set("k", b"2")
    assert not store.check(["k"])
    assert (one.get(["k"]), other.get(["k"]), again.get(["k"])) == ([b"1"], [b"2"], [b"1"])
    deep = one.clone("deep")
    deep.set("k", b"3")
    assert one.get(["k"]) == [b"1"]
    for clone in (one, other, again, deep):
        if isinstance(clone, TimedStore):
            clone.close()


def test_many_threads_agree_on_one_decision(store):
    """Four clones race for one key, 20 times: all read the same winner."""
    clones = [store.clone("race") for _ in range(4)]

    def race(rank):
        return [clones[rank].compare_set(f"{n}", f"{rank}".encode()) for n in range(20)]

    found = all_of(outcomes(4, race))
    assert all(one == found[0] for one in found)
    for clone in clones:
        if isinstance(clone, TimedStore):
            clone.close()


def test_a_memory_store_says_which_key_is_missing():
    """Reading a key that nobody set is a StoreError that names it."""
    with pytest.raises(StoreError, match="nothing"):
        MemoryStore().get(["nothing"])


def test_a_tcp_store_that_is_away_is_a_store_error_and_is_used_again_when_back():
    """The connection fails, then works: one StoreError, then the same store object serves."""
    server, address = serve()
    down = True

    def connect():
        if down:
            raise RuntimeError("connection refused")
        return connector(address, 5.0)()

    store = TorchStore(connect)
    with pytest.raises(StoreError, match="connection refused"):
        store.set("a", b"1")
    down = False
    store.set("a", b"1")
    assert store.get(["a"]) == [b"1"]
    del server


def test_a_client_that_fails_is_replaced():
    """A client whose requests raise is dropped; the next request makes a new one."""
    server, address = serve()
    made = []

    class Broken:
        """Stands for a client whose socket is dead."""

        def __getattr__(self, name):
            raise dist.DistNetworkError("broken pipe")

    def connect():
        made.append(connector(address, 5.0)())
        return made[-1]

    store = TorchStore(connect)
    store.set("a", b"1")
    store._client = Broken()
    with pytest.raises(StoreError, match="broken pipe"):
        store.check(["a"])
    assert store.get(["a"]) == [b"1"]
    assert len(made) == 2
    del server


def test_an_error_says_who_serves_the_store():
    """A store that is gone with rank 0's process is told so, by clones and under a deadline too."""

    def connect():
        raise RuntimeError("connection refused")

    store = TorchStore(connect, place="it is served at host:1 by the process of rank 0")
    timed = TimedStore(store.clone("below"), 10.0)
    try:
        for one in (store, timed, timed.clone("again")):
            with pytest.raises(
                StoreError, match=r"\(it is served at host:1 by .* rank 0\): connec"
            ):
                one.set("a", b"1")
    finally:
        timed.close()


@pytest.mark.parametrize(
    ("agent", "world", "words"),
    [
        ("False", True, "by the process of rank 0"),
        ("True", True, "by the launcher's agent"),
        ("", False, "by the process of global rank 0"),
    ],
)
def test_who_serves_a_groups_store(agent, world, words, monkeypatch):
    """Rank 0's process, or torchrun's agent where the store is its own; of no TCP store nothing."""
    server, address = serve()
    inner = SimpleNamespace(get_group_store=lambda: dist.PrefixStore("below", server))
    group = SimpleNamespace(get_group_store=dist.HashStore)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=inner if world else None))
    assert TorchGroup(inner).store_place() == f"it is served at {address} {words}"
    assert TorchGroup(group).store_place() == ""


@pytest.mark.parametrize("bad", ["", "host", "host:", ":1", "host:port", "host:1x"])
def test_a_bad_address_is_a_config_error(bad):
    """PLANARIA_STORE without host or port is refused with what is expected."""
    with pytest.raises(ConfigError, match="expected host:port"):
        connector(bad, 1.0)


class Frozen(MemoryStore):
    """A store whose requests do not return before it thaws."""

    def __init__(self):
        super().__init__()
        self.frozen, self.thaw = threading.Event(), threading.Event()

    def check(self, keys):
        """Answer after the thaw."""
        if self.frozen.is_set():
            assert self.thaw.wait(20)
        return super().check(keys)


def test_a_frozen_store_is_an_error_by_the_deadline_and_heals():
    """The first request ends by the deadline, later ones fail at once, after the thaw all serve."""
    frozen = Frozen()
    store = TimedStore(frozen, 0.2)
    frozen.frozen.set()
    with pytest.raises(StoreError, match="did not answer within"):
        store.check(["a"])
    with pytest.raises(StoreError, match="earlier request"):
        store.set("a", b"1")
    frozen.frozen.clear()
    overdue = store._overdue
    frozen.thaw.set()
    assert overdue.done.wait(20)
    store.set("a", b"1")
    assert store.check(["a"])
    store.close()


def test_an_error_of_any_kind_reaches_who_asked_and_harms_nobody_else():
    """A request that raises something unforeseen raises it in the caller; the next one serves."""

    class Odd(MemoryStore):
        def check(self, keys):
            raise ZeroDivisionError(keys[0])

    store = TimedStore(Odd(), 5.0)
    with pytest.raises(ZeroDivisionError, match="a"):
        store.check(["a"])
    store.set("b", b"1")
    assert store.get(["b"]) == [b"1"]
    store.close()
