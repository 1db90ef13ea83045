"""Python values come back equal and of the same type, and what cannot come back is refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import json
import math
import struct
import threading
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import StateError
from replica.image import ImageError
from replica.tree import MAX_DEPTH, MAX_NODES, Encoder, tree_text
from replica.tree_reader import _DECODERS, Decoder
from tests.replica.snapshot_tools import image_of, load, returned

ZONE = dt.timezone(dt.timedelta(hours=5, minutes=30))

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    1 << 5000,
    0.1,
    -0.0,
    5e-324,
    float("inf"),
    float("-inf"),
    complex(-0.0, float("inf")),
    "",
    "a\0b\n\"'\\ \ud800 \U0001f9a0",
    b"",
    b"\x00\xff",
    bytes(range(256)) * 20,
    bytearray(b"abc"),
    bytearray(5000),
    [],
    [1, 2.0, "3", [None]],
    [1, True, 2],
    list(range(1000)),
    (),
    (1, (2, [3])),
    {},
    {"a": {"b": []}},
    {"b": 1, "a": 2},
    {0: "x", "0": "y"},
    {1.5: 0, None: 1, (1, "a"): 2, b"k": 3, "": 4, "\n\0\"'": 5, "k" * 10_000: 6, False: 7},
    {frozenset({1}): torch.float32},
    {"a.b": 1, "a": {"b": 2}},
    {"__metadata__": 1, "planaria.tree": 2, "planaria.pad": 3},
    collections.OrderedDict(b=1, a=2),
    collections.Counter({3: 1, 5: 2}),
    collections.defaultdict(list, a=[1]),
    collections.defaultdict(None, a=1),
    set(),
    {1, "a", (2, 3)},
    frozenset({1, 2}),
    collections.deque([1, 2], maxlen=3),
    collections.deque(),
    slice(1, None, 2),
    range(0, 10, 3),
    Decimal("1.10"),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=ZONE, fold=1),
    dt.datetime(2026, 1, 2),  # noqa: DTZ001 - a naive one is what is tried
    dt.date(2026, 1, 2),
    dt.time(3, 4, 5, 6, fold=1),
    dt.timedelta(days=-1, seconds=2, microseconds=3),
    ZONE,
    Path("some/where"),
    PurePosixPath("../x"),
    PureWindowsPath("c:/x"),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda", 1),
    np.float32(0.1),
    np.int64(-5),
    np.bool_(True),
    np.complex128(1 - 2j),
    np.datetime64("2026-01-02T03", "h"),
    np.str_("text"),
    np.str_(""),
    np.bytes_(b"ab"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_value_comes_back_equal_and_of_its_type(value):
    """Every supported value survives save and restore: type, value and repr are compared."""
    found = returned(value)
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


def test_key_types_and_order_are_kept():
    """Keys 0 and "0", True and "True" stay apart and in order: compared with their types."""
    value = {"z": 0, 0: 1, "0": 2, "True": 3, True: 4, None: 5, 2.0: 6, "a": {"b": 1}, "a.b": 2}
    found = returned(value)
    assert [(type(key), key) for key in found] == [(type(key), key) for key in value]
    assert list(found.values()) == list(value.values())


def test_containers_keep_their_own_settings():
    """Default factory and maximal length come back: read from the restored containers."""
    assert returned(collections.defaultdict(int)).default_factory is int
    assert returned(collections.deque([1], maxlen=4)).maxlen == 4


@pytest.mark.parametrize("payload", [0x7FF8000000000000, 0x7FF800000000BEEF, 0xFFF0000000000001])
def test_nan_keeps_its_payload(payload):
    """A NaN comes back bit by bit: three payloads, one of them signalling."""
    (value,) = struct.unpack(">d", payload.to_bytes(8, "big"))
    assert math.isnan(value)
    assert struct.pack(">d", returned(value)) == struct.pack(">d", value)


ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(20)[::3],
    np.array(3.5),
    np.zeros((0, 3)),
    np.zeros((2,), "<U0"),
    np.array([np.nan, -0.0, np.inf], np.float16),
    np.array(["a", "bcd"]),
    np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8", (2,))]),
    np.array(["2026-01-01"], "datetime64[ns]"),
    np.broadcast_to(np.arange(3), (2, 3)),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}{value.shape}")
def test_array_comes_back(value):
    """Arrays keep dtype, shape, order and bytes, structured and empty ones too."""
    found = returned(value)
    assert type(found) is np.ndarray
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert found.tobytes() == value.tobytes()
    assert found.flags.writeable
    if value.flags.forc:
        assert found.flags.f_contiguous == value.flags.f_contiguous


def nested(depth):
    """Build lists inside lists."""
    value = "core"
    for _ in range(depth):
        value = [value]
    return value


class Keeper:
    """A state object that gives one value and notes what it gets."""

    def __init__(self, value):
        self.value, self.loaded = value, None

    def state_dict(self):
        """Give the value."""
        return self.value

    def load_state_dict(self, state):
        """Note the value."""
        self.loaded = state


def test_depth_is_supported_up_to_a_limit():
    """As many levels as allowed come back, and one too many is refused when saved."""
    assert returned(nested(MAX_DEPTH - 2)) == nested(MAX_DEPTH - 2)
    kept = Keeper(nested(MAX_DEPTH - 2))
    load(image_of({"x": kept}), {"x": kept})
    assert kept.loaded == nested(MAX_DEPTH - 2)
    with pytest.raises(StateError, match="deeper than"):
        returned(nested(MAX_DEPTH + 1))


class Color(enum.Enum):
    """An enum of the user's."""

    RED = 1


class IntColor(enum.IntEnum):
    """An enum whose members are ints."""

    RED = 1


@dataclasses.dataclass
class Point:
    """A dataclass of the user's."""

    x: int = 1


Named = collections.namedtuple("Named", "a b")  # noqa: PYI024 - this kind is what is tried


class OwnDict(dict):
    """A subclass could not come back as itself."""


def generator():
    """Yield once."""
    yield 1


def itself():
    """Return a list that contains itself."""
    value = []
    value.append(value)
    return value


UNSUPPORTED = {
    "lock": threading.Lock,
    "lambda": lambda: lambda: 0,
    "generator": generator,
    "list in itself": itself,
    "enum": lambda: Color.RED,
    "int enum": lambda: IntColor.RED,
    "dataclass": Point,
    "named tuple": lambda: Named(1, 2),
    "own dict": OwnDict,
    "object": object,
    "class": lambda: Point,
    "module": lambda: math,
    "object array": lambda: np.array([None], object),
    "array of a subclass": lambda: np.ma.masked_array([1]),
    "defaultdict": lambda: collections.defaultdict(lambda: 0),
    "state_dict alone": lambda: SimpleNamespace(state_dict=dict),
    "memoryview": lambda: memoryview(b"x"),
    "time zone": lambda: dt.datetime(2026, 1, 1, tzinfo=OwnZone()),
    "loader's loader": lambda: {"inner": torch.nn.Linear(1, 1).state_dict},
}


class OwnZone(dt.tzinfo):
    """A time zone of the user's."""

    def utcoffset(self, _moment):
        """Be at Greenwich."""
        return dt.timedelta(0)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_value_is_named(name):
    """The error has rank, key path and type: each value put deep into a nested state."""
    value = UNSUPPORTED[name]()
    with pytest.raises(StateError, match=r"rank 1: state\['a'\]\['b'\]\[3\]") as caught:
        image_of({"a": {"b": [0, 1, 2, value]}})
    named = value["inner"] if isinstance(value, dict) and value else value
    assert type(named).__qualname__ in str(caught.value)


def test_open_file_is_named(tmp_path):
    """An open file is refused with its key: opened for the test."""
    with (tmp_path / "f").open("wb") as file, pytest.raises(StateError, match=r"\['f'\] is a _io"):
        image_of({"f": file})


@pytest.mark.parametrize("key", [torch.ones(1), (torch.ones(1),), np.float64(1)])
def test_unsupported_keys_are_named(key):
    """A tensor cannot be a key, a numpy scalar can: each tried as one."""
    if isinstance(key, np.float64):
        assert list(returned({key: 1})) == [key]
        return
    with pytest.raises(StateError, match="cannot be a key"):
        image_of({"d": {key: 1}})


def test_too_many_values_are_refused_when_saved(monkeypatch):
    """What the reader would refuse the writer refuses: the limit lowered for the test."""
    monkeypatch.setattr("replica.tree.MAX_NODES", 100)
    with pytest.raises(StateError, match="too large"):
        image_of({"a": list(range(101))})
    assert MAX_NODES > 1_000_000


json_text = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 62), 1 << 62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple).map(list)
        | st.tuples(
            st.sampled_from([*_DECODERS, "object", "nonsense"]),
            st.lists(inner, max_size=4),
        ).map(lambda pair: [pair[0], *pair[1]])
    ),
    max_leaves=20,
)


class NoLeaves:
    """Holds no leaf."""

    def value(self, index):
        """Refuse like the reader does."""
        raise ImageError(f"leaf {index!r}")


@given(json_text)
def test_any_tree_is_decoded_or_refused(node):
    """No JSON makes the decoder do anything but give a value or raise ImageError."""
    try:
        value = Decoder(NoLeaves()).decode(node)
    except ImageError:
        return
    Encoder(None, lambda _: None).encode(value)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.timedeltas(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(plain_values)
def test_any_supported_value_survives(value):
    """Values drawn from the supported types survive the text: encoded, decoded, compared."""
    node = Encoder(None, lambda _: None).encode(value)
    found = Decoder(NoLeaves()).decode(json.loads(tree_text(node, '"x":0'))["root"])
    assert repr(found) == repr(value)


def test_python_values_are_copied_when_capture_returns():
    """A list changed right after the capture comes back as it was: changed, loaded, compared."""
    inner = [1, {"k": [2]}]
    array = np.arange(3)
    state = {"inner": inner, "array": array}
    image = image_of(state)
    inner.append(3)
    inner[1]["k"][0] = 9
    array[:] = 7
    load(image, state)
    assert inner == [1, {"k": [2]}]
    assert array.tolist() == [0, 1, 2]
