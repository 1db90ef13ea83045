"""Every reader, on bytes that nobody should send: a value or an error of ours, in bounded time.

The same targets run for longer, guided by coverage, in ``make fuzz``. What was found to be worth
keeping lies in ``tests/hostile``: a folder for each target, a file for each attack.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import edges
from tests.fuzz.target import BYTES_MAX, dumped, is_refusal
from tests.fuzz.targets import BY_NAME, TARGETS
from tests.sources import ROOT

LIMIT_S = 20
"""No input takes a hundredth of it; it turns a loop without end into a failure."""
HOSTILE = ROOT / "tests" / "hostile"
ATTACKS = sorted(path for path in HOSTILE.glob("*/*") if path.parent.name in BY_NAME)
JUNK = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        1.5,
        1e308,
        1 << 31,
        1 << 62,
        1 << 64,
        -(1 << 70),
        "",
        "x",
        "\0",
    ),
    *("../../x", "\ud800", "0" * 32, "f" * 33, [], {}, [[]], [None], {"a": 1}, [0] * 50),
]
TOKENS = [
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"null",
        b"1e999",
        b'"',
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
    ),
    *(
        b"\0",
        b"\xff",
        b"\xff\xfe\xfd",
        b"\\ud800",
        b"[" * 500,
        b"9" * 5000,
        b"PLANARIA",
        b"PLNFRAME",
    ),
    *(b"abort:", b"again:", b"go:", b"spoiled:", b"\xff" * 8, b"\x01\0\0\0", b"-1", b"../"),
]


@contextlib.contextmanager
def limited():
    """Fail what takes longer than the limit, wherever it is."""

    def late(*_):
        raise AssertionError(f"a reader takes longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def places(value, found=None):
    """List every place in a JSON value as (container, key)."""
    found = [] if found is None else found
    if isinstance(value, list | dict):
        for key in range(len(value)) if isinstance(value, list) else list(value):
            found.append((value, key))
            places(value[key], found)
    return found


def json_parts(raw):
    """Return (before, JSON value, after) of bytes that end in JSON, or None."""
    for start in {0, 1, raw.find(b"{"), raw.find(b"[")} - {-1}:
        for stop in (len(raw), raw.find(b"\0", start)):
            with contextlib.suppress(ValueError):
                return raw[:start], json.loads(raw[start:stop]), raw[stop:]
    return None


@st.composite
def changed_json(draw, raw):
    """Replace, drop or double some part of the JSON in ``raw``."""
    before, value, after = json_parts(raw)
    for _ in range(draw(st.integers(1, 3))):
        found = places(value)
        if not found:
            break
        container, key = found[draw(st.integers(0, len(found) - 1))]
        what = draw(st.sampled_from(["junk", "drop", "double", "swap"]))
        if what == "junk":
            container[key] = json.loads(json.dumps(draw(st.sampled_from(JUNK))))
        elif what == "drop":
            del container[key]
        elif what == "double" and isinstance(container, list):
            container.insert(key, container[key])
        else:
            other, place = found[draw(st.integers(0, len(found) - 1))]
            container[key] = json.loads(json.dumps(other[place]))
    return before + json.dumps(value).encode() + after


@st.composite
def changed_bytes(draw, raw):
    """Cut, overwrite or insert somewhere in ``raw``."""
    some = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(some)))
        new = draw(st.sampled_from(TOKENS) | st.binary(max_size=20))
        stop = at + draw(st.sampled_from([0, 0, 1, len(new), len(some)]))
        some[at:stop] = new
    return bytes(some)


@st.composite
def inputs(draw, target):
    """Draw bytes for a target: as a rule almost good ones."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    seed = draw(st.sampled_from(list(target.seeds)))
    with_json = json_parts(seed) is not None and draw(st.booleans())
    return draw(changed_json(seed) if with_json else changed_bytes(seed))[:BYTES_MAX]


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Keep the log short: what readers say of hostile bytes is for other tests."""
    caplog.set_level(logging.CRITICAL, "planaria")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_good_bytes_are_taken(target):
    """Some seed of each target is good: what is changed below was right before."""
    assert not all(is_refusal(target.run(seed)) for seed in target.seeds)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@given(data=st.data())
def test_any_bytes_are_taken_or_refused(target, data):
    """Bytes drawn around good ones: a value or one of our errors, nothing else and soon."""
    raw = data.draw(inputs(target))
    with limited():
        target.run(raw)


@pytest.mark.parametrize("path", ATTACKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_attack_is_refused(path, tmp_path, monkeypatch):
    """Each kept file is refused by its target, in 64 MiB, and makes no file where it runs."""
    monkeypatch.chdir(tmp_path)
    target, raw = BY_NAME[path.parent.name], path.read_bytes()
    tracemalloc.start()
    try:
        with limited():
            found = target.run(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert is_refusal(found), found
    assert peak < (64 << 20) + 8 * len(raw)
    assert list(tmp_path.iterdir()) == []


def test_every_attack_has_a_target():
    """No file of ``tests/hostile`` is forgotten, and there are attacks on what matters most."""
    assert {path.parent.name for path in ATTACKS} <= BY_NAME.keys()
    assert {"record", "head", "image", "tree", "reports", "frozen"} <= {
        path.parent.name for path in ATTACKS
    }


def test_names_of_entries_are_only_names(tmp_path, monkeypatch):
    """An entry called ``../../x`` is loaded by its number like any other, and makes no file."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    members = json.loads(edges.HEADER)
    first = next(name for name in members if not name.startswith(("__", "planaria")))
    renamed = {"../../x" if name == first else name: facts for name, facts in members.items()}
    assert BY_NAME["image-header"].run(dumped(renamed)) == "loaded"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]
