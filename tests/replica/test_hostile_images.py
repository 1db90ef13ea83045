"""Damaged and hostile images end in StateError: no crash, no code run, no unbounded memory."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from replica.errors import StateError
from replica.image import ImageError
from replica.snapshot import Snapshot
from tests.replica.snapshot_tools import image_of, load, tree_of, with_header, with_tree


def state():
    """Build a state with every kind of leaf and object."""
    model = nn.Linear(2, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optim.state[param] = {"momentum_buffer": torch.ones_like(param)}
    base = torch.arange(8.0)
    return {
        "model": model,
        "optim": optim,
        "views": [base[:5], base[3:]],
        "array": np.arange(4.0),
        "raw": bytes(5000),
        "generator": torch.Generator(),
        "plain": {"a": [1, 2.5, "x", None], 3: (True, {4})},
    }


IMAGE = image_of(state(), random_states=True)
TREE = tree_of(IMAGE)


def attempt(image):
    """Load into a fresh state; give the state if that worked, None if it was refused."""
    live = state()
    try:
        load(image, live, random_states=True)
    except StateError:
        return None
    return live


def changed(change):
    """Return the image with a tree that a function changed."""
    tree = copy.deepcopy(TREE)
    change(tree)
    return with_tree(IMAGE, tree)


def row(kind):
    """Find the first row of a kind in the table of leaves."""
    return next(index for index, leaf in enumerate(TREE["leaves"]) if leaf[0] == kind)


def shared():
    """Find a row that lies in a shared stretch of memory."""
    return next(i for i, leaf in enumerate(TREE["leaves"]) if leaf[0] == "t" and leaf[5] >= 0)


def put(index, place, value):
    """Return a change of one part of one row."""
    return lambda tree: tree["leaves"][index].__setitem__(place, value)


T, A, B, R = row("t"), row("a"), row("b"), shared()
M = T + 2  # the first momentum: made anew, where the module is loaded in place
DAMAGE = {
    "entry not there": put(T, 1, 10_000),
    "entry negative": put(T, 1, -1),
    "entry of text": put(B, 1, "0"),
    "entry of another": put(B, 1, TREE["leaves"][T][1]),
    "dtype unknown": put(T, 2, "float33"),
    "dtype of a list": put(T, 2, []),
    "dtype quantized": put(T, 2, "quint8"),
    "dtype an attribute": put(T, 2, "load"),
    "shape larger": put(T, 3, [1 << 40, 1 << 40]),
    "shape too long": put(T, 3, [1] * 65),
    "shape negative": put(T, 3, [-3, -2]),
    "shape of a float": put(T, 3, [3.0, 2.0]),
    "no shape": put(T, 3, None),
    "strides out of range": put(R, 4, [1 << 40]),
    "strides negative": put(R, 4, [-1]),
    "strides of another length": put(T, 4, [1]),
    "offset past the end": put(R, 5, 1 << 20),
    "offset within an element": put(R, 5, 1),
    "offset -2": put(R, 5, -2),
    "packed for shared": put(R, 5, -1),
    "flags unknown": put(R, 6, 4),
    "flags of a list": put(R, 6, [0]),
    "conjugate of floats": put(R, 6, 1),
    "device unknown": put(M, 7, "nowhere"),
    "device meta": put(T, 7, "meta"),
    "device of a number": put(T, 7, 0),
    "spec not there": put(T, 8, 3),
    "array of objects": put(A, 2, "|O"),
    "array of a module": put(A, 2, "os.system"),
    "array too large": put(A, 3, [1 << 50]),
    "array of negative size": put(A, 3, [-4]),
    "array deep dtype": put(A, 2, ["list", ["tuple", "a", ["list", ["tuple", "b", "|O"]]]]),
    "row too short": lambda tree: tree["leaves"].__setitem__(T, ["t"]),
    "row of a number": lambda tree: tree["leaves"].__setitem__(T, 7),
    "row of another kind": put(T, 0, "x"),
    "no leaves": lambda tree: tree.pop("leaves"),
    "leaves of a dict": lambda tree: tree.update(leaves={}),
    "another format": lambda tree: tree.update(format=2),
    "more members": lambda tree: tree.update(more=1),
    "specs of a number": lambda tree: tree.update(specs=7),
    "spec damaged": lambda tree: tree.update(specs=[[[1], [1], [5], 0]], meshes=[0]),
    "spec without mesh": lambda tree: tree.update(specs=[[[1], [1], ["Replicate()"], 4]]),
    "root of a number": lambda tree: tree.update(root=7),
    "root of a list": lambda tree: tree.update(root=["tuple", [], None]),
    "no random states": lambda tree: tree["root"].__setitem__(2, None),
    "random states damaged": lambda tree: tree["root"].__setitem__(2, ["dict", "python", 1]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_tree_is_refused(name):
    """Each way to damage the tables ends in StateError and leaves the live state alone."""
    live = state()
    before = repr([value for key, value in live.items() if key not in ("optim", "generator")])
    with pytest.raises(StateError):
        load(changed(DAMAGE[name]), live, random_states=True)
    after = repr([value for key, value in live.items() if key not in ("optim", "generator")])
    assert before == after


def nodes(node, found=None):
    """List all nodes of a tree with a way to replace each."""
    found = [] if found is None else found
    if isinstance(node, list | dict):
        for key in range(len(node)) if isinstance(node, list) else list(node):
            found.append((node, key))
            nodes(node[key], found)
    return found


COUNT = len(nodes(TREE))
JUNK = st.sampled_from(
    [
        *(None, True, -1, 0, 1, 7, 1 << 62, -(1 << 63), 1 << 70, 0.5, "", "x", "cpu", [], {}),
        *([[]], ["leaf", 0], ["leaf", -1], ["leaf"], ["dict", 1], ["dict", 1, 1, 1, 2]),
        *(["object", "module", 1], ["object", "stateful", ["dict"]], ["object"], ["list", ["x"]]),
        *(["bytes", "!"], ["int", "zz"], ["float", "00"], ["set", ["list"]], ["range", 1, 2, 0]),
        *(["scalar", "|O", ""], ["device", "nowhere"], ["size", 1 << 70], ["path", "os", "x"]),
    ]
)


@given(st.integers(0, COUNT - 1), JUNK)
def test_any_replaced_node_is_refused_or_loaded(place, junk):
    """Junk in place of any node of the tree is refused or loaded, and never crashes."""
    tree = copy.deepcopy(TREE)
    parent, key = nodes(tree)[place]
    parent[key] = junk
    attempt(with_tree(IMAGE, tree))


@given(st.integers(0, IMAGE.nbytes - 1), st.integers(0, 255))
def test_any_changed_byte_is_refused_or_loaded(place, byte):
    """One changed byte anywhere in the image is refused or loaded as a value, and never crashes."""
    image = IMAGE.copy()
    image[place] = byte
    attempt(image)


@given(st.integers(0, IMAGE.nbytes))
def test_any_truncation_is_refused(length):
    """An image cut short anywhere is refused."""
    if length < IMAGE.nbytes:
        with pytest.raises(ImageError):
            load(IMAGE[:length], state(), random_states=True)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 200_000,
        b'{"root":' + b'["list",' * 5_000 + b"0" + b"]" * 5_000 + b"}",
        b'{"root":[' + b"0," * 8_400_000 + b"0]}",
        b'{"a":1,"a":1}',
        b'{"root":NaN}',
    ],
    ids=["empty", "list", "no UTF-8", "deep", "deep nodes", "many", "doubled", "NaN"],
)
def test_tree_bombs_are_refused(text):
    """Text that is deep, huge or no JSON is refused before it takes memory."""
    with pytest.raises(ImageError):
        load(with_tree(IMAGE, text), state())


def test_deep_nodes_are_refused():
    """A tree as deep as the JSON parser takes is refused by the decoder: 700 lists in lists."""
    node = "core"
    for _ in range(700):
        node = ["list", node]
    for wrapped, live in ((node, 0), (["object", "stateful", node], nn.ReLU())):
        root = ["tuple", ["dict", "x", wrapped], None]
        image = changed(lambda tree, root=root: tree.update(root=root))
        with pytest.raises(StateError, match=r"deep|saved as stateful"):
            load(image, {"x": live})


@pytest.mark.parametrize(
    ("bits", "place"), [(np.random.MT19937, ("state", "pos")), (np.random.Philox, ("buffer_pos",))]
)
def test_a_generator_position_outside_its_words_is_refused(bits, place):
    """Numpy does not check where its generator stands and would read foreign memory."""
    live = {"g": np.random.Generator(bits(1))}
    state = live["g"].bit_generator.state
    inner = state
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = 1 << 20
    liar = SimpleNamespace(state_dict=lambda: state, load_state_dict=None)
    liar.load_state_dict = liar.state_dict
    image = image_of({"g": liar})
    tree = tree_of(image)
    tree["root"][1][2][1] = "numpy.random.Generator"
    with pytest.raises(StateError, match="stands at 1048576"):
        load(with_tree(image, tree), live)


def test_one_leaf_cannot_be_asked_for_twice():
    """A leaf that stands at many places would multiply memory: refused at the second."""
    node = ["list", *[["leaf", B]] * 3]
    image = changed(lambda tree: tree.update(root=["tuple", ["dict", "x", node], None]))
    with pytest.raises(ImageError, match="two places"):
        load(image, {"x": 0})


def test_a_pickle_anywhere_is_inert(tmp_path):
    """A pickle that would make a file stays bytes, in a value, an entry and the header."""
    marker = tmp_path / "marker"

    class Payload:
        def __reduce__(self):
            return open, (str(marker), "w")

    payload = pickle.dumps(Payload())
    live = {"raw": b"", "long": b""}
    load(image_of({"raw": payload, "long": payload * 200}), live)
    assert live == {"raw": payload, "long": payload * 200}
    for image in (with_header(IMAGE, payload), with_tree(IMAGE, payload)):
        with pytest.raises(ImageError):
            Snapshot(state(), random_states=True).prepare(image)
    assert not marker.exists()


def test_an_untouched_image_loads():
    """The attacks start from an image that is good."""
    assert attempt(IMAGE) is not None
    assert attempt(with_tree(IMAGE, TREE)) is not None
