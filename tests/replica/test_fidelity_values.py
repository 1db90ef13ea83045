"""Keys and Python values: each comes back equal and of its type, or the first save names it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import random
import threading
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import StateError
from replica.self_check import _same, _same_key
from replica.snapshot import Snapshot
from replica.tree import _equals_itself
from tests.replica.snapshot_tools import bits, image_of, load, returned

LONG = "k" * 10_000
PAIR = "\ud800\udc00"  # two halves; together they would be one other character


class Keeper:
    """An object that gives one value and keeps what it is given."""

    def __init__(self, value=None):
        self.value, self.loaded = value, None

    def state_dict(self):
        """Give the value."""
        return {"value": self.value}

    def load_state_dict(self, state):
        """Keep what came back."""
        self.loaded = state["value"]


def everywhere(value):
    """Give what comes back of a value in a container, and in the state of an object."""
    keeper = Keeper(value)
    load(image_of({"k": keeper}), {"k": keeper})
    return [returned(value), keeper.loaded]


def alike(value, found):
    """Compare nested values by type, order and value, bit by bit for tensors and floats."""
    if isinstance(value, torch.Tensor):
        return type(found) is torch.Tensor and bits(value) == bits(found)
    if isinstance(value, dict):
        rows = zip(value.items(), found.items(), strict=True)
        return type(value) is type(found) and all(
            _same_key(key, other) and alike(item, made) for (key, item), (other, made) in rows
        )
    if isinstance(value, list | tuple | collections.deque):
        same = type(value) is type(found) and len(value) == len(found)
        return same and all(map(alike, value, found))
    if isinstance(value, set | frozenset):
        return type(value) is type(found) and _same_key(frozenset(value), frozenset(found))
    return _same(value, found)


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)
KEYED = {
    "dots": {"a.b": 1, "a": {"b": 2}},
    "slashes of tensors": {"a/b": ONE, "a": {"b": TWO}},
    "dots of tensors": {"a.b": ONE, "a": {"b": TWO}, "a.b#1": ONE + 2},
    "optimizer": {"state": {0: {"step": ONE}, 1: {"step": TWO}}, "param_groups": [{"params": [0]}]},
    "numbers and texts": {0: ONE, "0": TWO, 1.5: 3, "1.5": 4, None: 5, "None": 6},
    "true": {True: ONE, "True": TWO},
    "one": {1: ONE, "1": TWO},
    "one point nought": {1.0: ONE, "1.0": TWO},
    "tuples": {(1, "a"): ONE, (1, ("a", None)): TWO, (): 3, frozenset({1, (2,)}): 4},
    "odd texts": {"": ONE, "\u00e9\u4e2d\U0001f9a0": TWO, "\n": 1, "\0": 2, "\"'\\": 3, LONG: TWO},
    "surrogates": {PAIR: ONE, "\U00010000": TWO, "\ud800": 3, PAIR + "x": PAIR},
    "the format's own": {"__metadata__": ONE, "planaria.tree": TWO, "planaria.pad": 3, "leaf": 4},
    "tags": {"dict": ["dict", "leaf", 0], "tuple": ["tuple"], "object": ["object", "module", {}]},
    "empty": {"d": {}, "l": [], "t": (), "s": set(), "f": frozenset(), "b": b""},
    "list and tuple": {"l": [1, 2], "t": (1, 2), "n": [[], ()], "m": ([], [()])},
    "order": {name: at for at, name in enumerate("qwertyuiop")},
    "zeros": {-0.0: 1, "0": 2},
    "types as keys": {
        torch.float32: 1,
        torch.device("cpu"): 2,
        range(3): 3,
        dt.date(2026, 1, 2): 4,
    },
    "numpy": {np.int64(3): ONE, np.str_("a"): TWO, np.bytes_(b"b"): 3, np.datetime64("2026"): 4},
    "large": {1 << 5000: ONE, -(1 << 64): TWO, b"\xff": 3},
}


@pytest.mark.parametrize("name", KEYED)
def test_keys_never_collide_and_keep_type_and_order(name):
    """Mappings whose flattened names would collide come back as they were, in both places."""
    assert [alike(KEYED[name], found) for found in everywhere(KEYED[name])] == [True, True]


def test_dicts_of_depth_200_come_back():
    """200 dicts inside one another with a tensor in the innermost: walked down after a restore."""
    value = ONE
    for level in range(200):
        value = {"x": value, "level": level}
    for found in everywhere(value):
        inner = found
        for level in reversed(range(200)):
            assert inner["level"] == level
            inner = inner["x"]
        assert torch.equal(inner, ONE)


ZONE = dt.timezone(dt.timedelta(hours=-3, seconds=1), "here")
STRUCTURED = np.array([(1, 2.5, "x")], [("a", ">i4"), ("b", "<f8", (2,)), ("c", "U3")])
CARRIED = {
    "numpy scalars": [np.bool_(True), np.int8(-1), np.uint64(2**64 - 1), np.float16(0.1)],
    "wide numpy scalars": [np.longdouble(1) / 3, np.clongdouble(1j), np.complex64(1 - 1j)],
    "numpy moments": [
        *(np.datetime64("NaT"), np.datetime64(7, "as"), np.datetime64("2026-01", "M")),
        *(np.timedelta64(-3, "W"), np.timedelta64("NaT"), np.timedelta64(5)),
    ],
    "numpy texts": [np.str_(""), np.str_("a\0b"), np.bytes_(b"\0"), np.void(b"abc"), np.void(b"")],
    "structured scalars": [
        STRUCTURED[0],
        np.zeros(1, np.dtype([("x", "i1"), ("y", "g"), ("z", "f4", (2,))], align=True))[0],
    ],
    "long doubles": np.array([np.nan, -0.0, 1 / np.longdouble(3)]),
    "0-dim arrays": [np.array(3.5), np.array("x"), np.array(True)],
    "structured arrays": [
        STRUCTURED,
        np.zeros(2, np.dtype([("x", "i1"), ("y", "f8")], align=True)),
    ],
    "big-endian": np.arange(3, dtype=">i4"),
    "read-only": np.frombuffer(b"abcd", np.uint8),
    "empty": [np.zeros((3, 0, 2)), np.zeros((2, 0), "U0"), np.zeros(2, [])],
    "not contiguous": [np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2), np.arange(9)[::-2]],
    "many dimensions": np.zeros((1,) * 64, np.int8),
    "legacy numpy state": np.random.RandomState(1).get_state(),
    "numpy state": np.random.RandomState(1).get_state(legacy=False),
    "generator state": np.random.default_rng(1).bit_generator.state,
    "python state": random.Random(1).getstate(),
    "ints": [1 << 5000, -(1 << 5000), -7, True, 2**63, -(2**63)],
    "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308],
    "complex": [complex(math.nan, -0.0), 1j],
    "bytes": [b"", b"\0\xff", bytes(5000), bytearray(), bytearray(b"ab"), bytearray(5000)],
    "sets": [{1, "a", None, (1, 2)}, frozenset({1, frozenset({2})}), {math.nan}],
    "deques": [collections.deque([1, [2]], maxlen=3), collections.deque(maxlen=0)],
    "ordered": collections.OrderedDict(b=1, a=collections.OrderedDict()),
    "defaultdicts": [
        collections.defaultdict(kind, a=1)
        for kind in (int, list, dict, set, tuple, collections.deque, collections.Counter, None)
    ],
    "counter": collections.Counter("abca"),
    "torch": [torch.Size([]), torch.Size([2, 1 << 40]), torch.complex32, torch.device("cuda", 3)],
    "slices": [slice(1, None, -2), slice([1], {"a": 2}, "x")],
    "ranges": [range(0), range(1 << 70), range(9, 0, -2)],
    "moments": [
        *(
            dt.datetime(2026, 1, 2, tzinfo=ZONE),
            dt.datetime(2026, 1, 2, fold=1, tzinfo=dt.UTC),
            dt.time(1, 2, fold=1),
        ),
        *(dt.time(1, tzinfo=ZONE), dt.date.min, dt.timedelta.min, ZONE, dt.UTC),
    ],
    "paths": [pathlib.Path("a/b"), pathlib.Path(), pathlib.PureWindowsPath("//srv/share/x")],
    "odd path": pathlib.Path("\udcff"),
    "decimals": [Decimal("1.10"), Decimal("-0E+5"), Decimal("sNaN12"), Decimal("-Infinity")],
    "texts": ["", "\0", "\ud800", PAIR, PAIR[::-1], "\U0010ffff", "," * 10_000],
    "none": [None, (None,), {"a": None}],
    "long text": "a,\u00e9" + PAIR + "x" * 4000,
    "long lists": [list(range(3000)), tuple(map(float, range(3000)))],
    "long list of one int too wide": [1 << 63, *range(3000)],
    "long list with NaN": [math.nan, -0.0] * 1500,
    "long list of two types": [1, 1.0, True] * 1000,
}


@pytest.fixture
def short_limits(monkeypatch):
    """Texts and lists of numbers become leaves when they are above 1000 long."""
    monkeypatch.setattr("replica.tree.INLINE_CHARS", 1000)
    monkeypatch.setattr("replica.tree.INLINE_NUMBERS", 1000)


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("name", CARRIED)
def test_values_come_back_equal_and_of_their_type(name):
    """Values that a state may hold come back bit by bit, in a container and in an object."""
    assert [alike(CARRIED[name], found) for found in everywhere(CARRIED[name])] == [True, True]


@pytest.mark.usefixtures("short_limits")
def test_a_list_that_grows_keeps_its_plan():
    """Long numbers and texts take one more: the plan stays, so that a save only copies."""
    state = {"history": list(range(3000)), "text": "x" * 3000}
    snapshot = Snapshot(state, random_states=False)
    before = snapshot.plan(1).fingerprint
    state["history"].append(7)
    state["text"] += "y"
    assert snapshot.plan(1).fingerprint == before
    live = {"history": [1], "text": ""}
    history = live["history"]
    load(image_of(state), live)
    assert live == state
    assert live["history"] is history


def test_one_list_at_two_places_comes_back_as_two():
    """Which containers are the same object is not kept; which tensors share memory is."""
    inner = [ONE]
    found = returned({"a": inner, "b": inner})
    assert found["a"] is not found["b"]
    found["a"][0][0] = 7
    assert found["b"][0][0] == 7


class Color(enum.Enum):
    """A user's enum."""

    RED = 1


class Number(enum.IntEnum):
    """One whose members are ints."""

    ONE = 1


@dataclasses.dataclass
class Point:
    """A user's dataclass."""

    x: int = 1


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024 - this kind is what is tried


class Ordered(collections.OrderedDict):
    """A subclass of a container."""


class Real(float):
    """A subclass of a plain type."""


class Wide(np.float64):
    """A subclass of a numpy scalar."""


class Shy:
    """A user's class that cannot even be printed."""

    def __repr__(self):
        """Fail."""
        raise RuntimeError


class Failing(Keeper):
    """An object whose state cannot be read."""

    def state_dict(self):
        """Fail."""
        raise KeyError("moments")


def dtype_of_depth(depth):
    """Nest a structured dtype."""
    dtype = np.dtype("i4")
    for _ in range(depth):
        dtype = np.dtype([("f", dtype)])
    return dtype


def itself(kind):
    """Make a container that contains itself."""
    value = kind()
    value.append(value)
    return value


REFUSED = {
    "enum": (lambda: Color.RED, "Color, .*carry its name or value"),
    "int enum": (lambda: Number.ONE, "Number, .*carry its name or value"),
    "dataclass": (Point, r"Point, a dataclass.*carry dataclasses.asdict"),
    "named tuple": (lambda: Pair(1, 2), r"Pair, a named tuple.*carry tuple"),
    "torch's named tuple": (lambda: torch.ones(2).max(0), r"max, .*"),
    "own container": (Ordered, r"Ordered, a subclass.*carry OrderedDict\(it\)"),
    "own float": (lambda: Real(1), r"Real, a subclass.*carry float\(it\)"),
    "own numpy scalar": (lambda: Wide(1), "Wide, a subclass"),
    "list in itself": (lambda: itself(list), "list, which contains itself"),
    "deque in itself": (lambda: itself(collections.deque), "deque, which contains itself"),
    "lock": (threading.Lock, "lock, which is not one of the supported types"),
    "lambda": (lambda: lambda: 0, "function, .*cannot be carried"),
    "generator": (lambda: (i for i in ()), "generator, which is not"),
    "class": (lambda: Point, "type, .*cannot be carried"),
    "memoryview": (lambda: memoryview(b"x"), r"memoryview, .*carry bytes\(it\)"),
    "unprintable": (Shy, "Shy, which is not"),
    "unprintable key": (lambda: {Shy(): 1}, r"\[<.*Shy>\] is a .*Shy, which is not"),
    "key beyond printing": (lambda: {1 << 20_000: Point, 1: 2}, r"\[<int>\] is a type"),
    "tensor as key": (lambda: {(ONE,): 1}, "Tensor, which cannot be a key"),
    "NaN as key": (lambda: {math.nan: ONE}, "float, which cannot be a key: it does not equal"),
    "NaN in a key": (lambda: {(1, (math.nan,)): 1}, "tuple, which cannot be a key: it does not"),
    "NaT as key": (lambda: {np.datetime64("NaT"): 1}, "datetime64, which cannot be a key"),
    "module as key": (lambda: {torch.nn.Linear(1, 1): 1}, "Linear, which cannot be a key"),
    "tensor in a set": (lambda: {ONE}, "Tensor, which cannot be in a set"),
    "tensor in a frozenset": (lambda: frozenset({(ONE,)}), "Tensor, which cannot be in a set"),
    "module in a set": (lambda: {torch.nn.Linear(1, 1)}, "Linear, which cannot be in a set"),
    "tensor in a slice": (lambda: slice(ONE), "Tensor, which cannot be in a slice"),
    "module in a slice": (lambda: slice(torch.nn.Linear(1, 1)), "Linear, which cannot be in"),
    "object array": (lambda: np.array([None]), "dtype object does not lie in its own bytes"),
    "string array": (lambda: np.array(["a"], np.dtypes.StringDType()), "does not lie in its own"),
    "record array": (lambda: np.rec.array([(1,)], [("a", "i4")]), "recarray, "),
    "record": (lambda: np.rec.array([(1,)], [("a", "i4")])[0], "record, whose dtype .* as"),
    "masked array": (lambda: np.ma.masked_array([1]), "MaskedArray, a subclass"),
    "dtype with overlaps": (
        lambda: np.zeros(1, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]}),
        "ndarray, whose dtype .* could not be read back",
    ),
    "dtype too deep": (lambda: np.zeros(1, dtype_of_depth(9)), "could not be read back: .*deep"),
    "dtype with an odd name": (lambda: np.zeros(1, [("<weird", "i4")]), "could not be read back"),
    "dtype with metadata": (
        lambda: np.zeros(1, np.dtype("i4", metadata={"unit": "m"})),
        "has metadata, which would be lost",
    ),
    "huge empty array": (lambda: np.empty((1 << 62, 0), np.uint8), "a size beyond"),
    "factory": (lambda: collections.defaultdict(lambda: 0), "whose default factory is not one"),
    "zone": (lambda: dt.datetime(2026, 1, 1, tzinfo=OwnZone()), "whose time zone is not a"),
    "slices too deep": (lambda: nested_slices(260), "slice, nested deeper than 250"),
    "failing object": (Failing, r"Failing, whose state could not be read: KeyError: 'moments'"),
    "object in an object": (lambda: Keeper(Keeper()), "Keeper, which is not one of"),
}


class OwnZone(dt.tzinfo):
    """A time zone of the user's."""

    def utcoffset(self, _moment):
        """Be at Greenwich."""
        return dt.timedelta(0)


def nested_slices(depth):
    """Put slices into one another."""
    value = None
    for _ in range(depth):
        value = slice(value)
    return value


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_back_is_named_at_the_save(name):
    """Each refusal has rank, key path, type and what to do: tried deep in a nested state."""
    make, text = REFUSED[name]
    with pytest.raises(StateError, match=rf"rank 1: state\['a'\]\['b'\]\[3\].*{text}"):
        image_of({"a": {"b": [0, 1, 2, make()]}})


@pytest.mark.filterwarnings("ignore")
def test_handles_are_named(tmp_path):
    """A process group, a store, an open file and a generator at work are refused by their names."""
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1, dt.timedelta(seconds=5))
    with (tmp_path / "f").open("w") as file:
        for handle, name in ((group, "ProcessGroupGloo"), (store, "HashStore"), (file, "TextIO")):
            with pytest.raises(
                StateError, match=rf"rank 1: state\['a'\]\['b'\]\[3\] is a .*{name}"
            ):
                image_of({"a": {"b": [0, 1, 2, handle]}})
            with pytest.raises(StateError, match=rf"state\['k'\]\['value'\] is a .*{name}"):
                image_of({"k": Keeper(handle)})


def test_a_dtypes_gaps_are_copied_too():
    """Bytes between the fields of a dtype are those of the array: two captures are compared."""
    dtype = np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 16})
    value = np.arange(32, dtype=np.uint8).view(dtype)
    assert returned(value).tobytes() == value.tobytes()


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),
    st.sampled_from([PAIR, "\udfff\ud800", PAIR * 2, "planaria.tree"]),
    st.binary(),
    st.decimals(),
    st.dates(),
    st.times(timezones=st.none()),
    st.datetimes(timezones=st.sampled_from([None, dt.UTC, ZONE])),
    st.timedeltas(),
    st.sampled_from([np.float32("nan"), np.int64(1), np.True_, np.str_("x")]),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1]), range(2)]),
)
simple = plain.filter(lambda key: not (isinstance(key, Decimal) and key.is_snan()))
hashable = st.one_of(simple, st.tuples(simple, simple), st.frozensets(simple, max_size=3))
keys = hashable.filter(_equals_itself)
arrays = st.sampled_from(
    [np.arange(6).reshape(2, 3).T, np.zeros(0, "M8[ns]"), STRUCTURED, np.array(1.5), np.void(b"ab")]
)
tensors = st.sampled_from([ONE, TWO[:1], torch.zeros(0), torch.ones(2, 3).t(), torch.tensor(1j)])
values = st.recursive(
    plain | arrays | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: collections.deque(items, maxlen=5)),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(
            lambda items: collections.defaultdict(list, items)
        ),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
        st.sets(hashable, max_size=4),
    ),
    max_leaves=12,
)


@given(values)
def test_whatever_a_save_takes_a_restore_gives_back(value):
    """Values drawn from all supported types and put at both places: saved, restored, compared."""
    assert [alike(value, found) for found in everywhere(value)] == [True, True]


@given(st.one_of(st.builds(object), st.functions(), st.fractions(), st.uuids(), values), values)
def test_a_save_either_takes_a_value_or_names_it(odd, value):
    """A value of any kind beside one of a known kind: refused by its key path, or given back."""
    state = {"value": [value], "odd": odd}
    found = []
    with contextlib.suppress(StateError):
        found = everywhere(state)
    if found:
        assert [alike(state, one) for one in found] == [True, True]
        return
    with pytest.raises(StateError, match=r"state\['k'\]\['value'\]\['odd'\] is a "):
        everywhere(state)
