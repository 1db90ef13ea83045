"""Layouts by brute force: what each survives, how it spreads the load, and what it refuses."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import LayoutError
from recovery.layout import (
    NONE,
    Layout,
    Redundancy,
    make_groups,
    make_layout,
    parse_redundancy,
)
from recovery.topology import Topology

NODES = range(2, 17)
COPIES = [Redundancy("copies", 1, r - 1) for r in (1, 2, 3)]
STRIPES = [
    Redundancy("stripe", k, m)
    for k, m in [(1, 1), (2, 0), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (6, 1), (8, 2)]
]
cases = pytest.mark.parametrize("redundancy", [*COPIES, *STRIPES], ids=str)


def even_layouts(redundancy, ranks_per_node=1, size=10**6):
    """Yield layouts on every number of nodes from 2 to 16 that can carry it."""
    for nodes in NODES:
        if nodes >= redundancy.nodes_needed:
            yield even_layout(redundancy, nodes, ranks_per_node, size)


def spread(*ranks_per_node):
    """Return a topology of nodes with so many ranks each."""
    return Topology(
        tuple(f"n{node}" for node, count in enumerate(ranks_per_node) for _ in range(count))
    )


def even_layout(redundancy, nodes, ranks_per_node=1, size=10**6):
    """Return a layout over equal nodes and equal shards."""
    topology = spread(*[ranks_per_node] * nodes)
    return make_layout(redundancy, topology, [size] * topology.world)


def lost_owners(layout: Layout, count: int):
    """Return bool[subsets, world]: which owners are lost with each set of ``count`` nodes.

    A dumb count over the fragments as they are placed: an owner is there while its own node is, or
    while k distinct fragments of it are on nodes that are.
    """
    topology, k = layout.topology, layout.redundancy.k
    number = {node: i for i, node in enumerate(topology.nodes)}
    subsets = list(combinations(range(len(number)), count))
    dead = np.zeros((len(subsets), len(number)), bool)
    dead[np.arange(len(subsets))[:, None], np.array(subsets).reshape(len(subsets), count)] = True
    lost = np.zeros((len(subsets), topology.world), bool)
    for stripe in layout.stripes:
        own = number[topology.node_of_rank[stripe.owner]]
        places = {f.index: number[topology.node_of_rank[f.holder]] for f in stripe.fragments}
        assert len(places) == len(stripe.fragments)
        alive = sum((~dead[:, place]).astype(int) for place in places.values())
        lost[:, stripe.owner] = dead[:, own] & (alive < k)
    return lost


@cases
def test_every_loss_up_to_the_promise_leaves_every_owner(redundancy):
    """All sets of m + 1 nodes, remainder groups too: each owner has its copy or k fragments."""
    for layout in even_layouts(redundancy):
        lost = lost_owners(layout, redundancy.survivable_nodes)
        assert not lost.any(), layout.describe()


@cases
def test_some_loss_beyond_the_promise_is_fatal(redundancy):
    """Some set of m + 2 nodes loses an owner: the promise is not smaller than the truth."""
    for layout in even_layouts(redundancy):
        lost = lost_owners(layout, redundancy.survivable_nodes + 1)
        assert lost.any(), layout.describe()


@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=8),
    case=st.sampled_from([*COPIES, *STRIPES]),
    seed=st.integers(0, 100),
)
def test_uneven_nodes_and_shards_keep_the_promise(counts, case, seed):
    """Any ranks per node, any sizes, empty shards too: m + 1 losses leave every owner."""
    if len(counts) < case.nodes_needed:
        return
    topology = spread(*counts)
    sizes = np.random.default_rng(seed).integers(0, 3, topology.world) * 1000
    layout = make_layout(case, topology, [int(size) for size in sizes])
    assert not lost_owners(layout, case.survivable_nodes).any()


@given(st.permutations(range(9)))
def test_ranks_that_are_not_in_node_order_keep_the_promise(order):
    """Ranks numbered across nodes, as launchers may: two losses leave every owner of 2+1."""
    topology = Topology(tuple(f"n{place // 2}" for place in order))
    layout = make_layout(Redundancy("stripe", 2, 1), topology, [100] * 9)
    assert not lost_owners(layout, 2).any()


@given(nodes=st.integers(1, 60), least=st.integers(1, 10))
def test_groups_are_never_too_small_and_differ_by_one_node(nodes, least):
    """All nodes, in order, in as many groups as fit; the remainder is spread (P20)."""
    names = [f"n{i}" for i in range(nodes)]
    groups = make_groups(names, least)
    assert [node for group in groups for node in group] == names
    sizes = [len(group) for group in groups]
    assert len(groups) == max(1, nodes // least)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(least, nodes)


@cases
@pytest.mark.parametrize("ranks_per_node", [1, 3])
def test_loads_are_balanced(redundancy, ranks_per_node):
    """Every node keeps as many bytes as any other, and a node's ranks differ by one fragment."""
    code, size = redundancy.code, 999_983
    for layout in even_layouts(redundancy, ranks_per_node, size):
        held = [
            [sum(code.length(f.index, size) for f in layout.held_by(rank)) for rank in ranks]
            for ranks in layout.topology.ranks_by_node.values()
        ]
        assert len({sum(node) for node in held}) == 1
        assert all(max(node) - min(node) <= code.fragment_bytes(size) for node in held)


@cases
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_arena_bytes_equal_the_formula(redundancy, ranks_per_node):
    """Two generations: 2(2 + m/k)S for stripes, 2(1 + r)S for copies, within 5 % on each rank."""
    size = 1_000_003
    expected = 2 * (2 + redundancy.m / redundancy.k) * size
    if redundancy.kind == "copies":
        expected = 2 * (1 + redundancy.n) * size
    for layout in even_layouts(redundancy, ranks_per_node, size):
        sizes = [size] * layout.topology.world
        for rank in range(layout.topology.world):
            assert layout.arena_bytes(rank, sizes) == pytest.approx(expected, rel=0.05)


@cases
def test_what_is_sent_is_what_is_held(redundancy):
    """Each fragment has one sender and one holder, and no two of an owner share a node."""
    for layout in even_layouts(redundancy, 2):
        ranks = range(layout.topology.world)
        sent = sorted(f for rank in ranks for f in layout.sent_by(rank))
        assert sent == sorted(f for rank in ranks for f in layout.held_by(rank))
        for rank in ranks:
            mine = layout.sent_by(rank)
            assert [f.index for f in mine] == list(range(redundancy.n))
            homes = {layout.topology.node_of_rank[r] for r in (rank, *(f.holder for f in mine))}
            assert len(homes) == redundancy.n + 1
            peers = {f.holder for f in mine} | {f.owner for f in layout.held_by(rank)}
            assert layout.peers_of(rank) == tuple(sorted(peers))


def test_without_redundancy_nothing_is_sent():
    """``none`` on any number of nodes: own copies only, two generations of them."""
    layout = even_layout(NONE, 3, 2)
    assert all(layout.sent_by(r) == layout.held_by(r) == () for r in range(6))
    assert layout.arena_bytes(0, [5] * 6) == 10
    assert layout.redundancy.survivable_nodes == 0


@pytest.mark.parametrize("nodes", range(1, 20))
def test_auto_takes_the_widest_stripe_that_survives_two(nodes):
    """One node: nothing; two: a copy; more: stripe:k+1 with k = min(6, nodes - 2)."""
    expected = {1: "none", 2: "copies:1"}.get(nodes, f"stripe:{min(6, nodes - 2)}+1")
    found = parse_redundancy("auto", nodes)
    assert str(found) == expected
    make_layout(found, spread(*[1] * nodes), [1] * nodes)


@pytest.mark.parametrize("text", ["none", "copies:1", "copies:3", "stripe:1+1", "stripe:6+2"])
def test_names_read_back(text):
    """A redundancy prints as the text that made it, and is of the kind that begins it."""
    found = parse_redundancy(text, 16)
    assert str(found) == text
    assert found.kind == text.partition(":")[0]


def test_the_most_copies_that_the_code_can_count_are_taken():
    """64 copies are fragments 0 to 63 of one code: the last number that is not refused."""
    assert parse_redundancy("copies:64", 100) == Redundancy("copies", 1, 63)


def test_auto_is_a_redundancy_like_any_other():
    """What "auto" stands for equals what its name stands for: one kind, one code."""
    for nodes in range(1, 10):
        found = parse_redundancy("auto", nodes)
        assert found == parse_redundancy(str(found), nodes)


@pytest.mark.parametrize(
    ("text", "nodes", "needed", "instead"),
    [
        ("copies:1", 1, 2, "none"),
        ("copies:2", 2, 3, "copies:1"),
        ("stripe:2+1", 3, 4, "stripe:1+1"),
        ("stripe:6+2", 8, 9, "stripe:6+1"),
    ],
)
def test_too_few_nodes_are_refused_with_the_number_needed(text, nodes, needed, instead):
    """The sentence names what is needed, what is there and what would fit."""
    with pytest.raises(LayoutError) as caught:
        parse_redundancy(text, nodes)
    message = str(caught.value)
    assert f"needs {needed} nodes" in message
    assert f"has {nodes}" in message
    assert repr(instead) in message
    with pytest.raises(LayoutError, match=f"needs {needed} nodes, got {nodes}"):
        make_layout(parse_redundancy(text, needed), spread(*[1] * nodes), [1] * nodes)


@pytest.mark.parametrize(
    "text",
    [
        *("", "copy:1", "copies:0", "copies:-1", "copies:65", "copies:1 ", "copies:1000"),
        *("Copies:1", "stripe:0+1", "stripe:2", "stripe:33+1", "stripe:2+-1", "stripe:32+33"),
        *("stripe:2+1+1", "stripe:2+1\n", "copies:\u0661"),
    ],
)
def test_other_texts_are_refused(text):
    """What is not one of the four forms, or is out of the code's range, is named and refused."""
    with pytest.raises(LayoutError) as caught:
        parse_redundancy(text, 100)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["copies:0", "copies:65"])
def test_a_number_of_copies_out_of_range_is_told_as_it_was_given(text):
    """Copies are counted in the sentence as in the option, not as a code that nobody asked for."""
    with pytest.raises(LayoutError, match="expected copies:r with r from 1 to 64") as caught:
        parse_redundancy(text, 100)
    assert "k+m" not in str(caught.value)


def test_one_fragment_is_told_as_one():
    """The sentence counts in the right number."""
    with pytest.raises(LayoutError, match="puts 1 fragment on 1 node other than the owner's"):
        parse_redundancy("copies:1", 1)
    with pytest.raises(LayoutError, match="puts 3 fragments on 3 nodes other than"):
        parse_redundancy("stripe:2+1", 1)


def test_sizes_must_be_one_for_each_rank():
    """A list of sizes of another length is refused, not cut or repeated."""
    with pytest.raises(LayoutError, match="2 sizes for 3 ranks"):
        make_layout(NONE, spread(1, 2), [1, 2])


def test_a_topology_knows_nodes_by_their_lowest_rank():
    """Nodes come in the order of their lowest rank whatever their ids; positions count within."""
    topology = Topology(("z", "a", "z", "b"))
    assert topology.nodes == ("z", "a", "b")
    assert topology.ranks_by_node == {"z": (0, 2), "a": (1,), "b": (3,)}
    assert [topology.position(rank) for rank in range(4)] == [0, 0, 1, 0]
    assert topology.same_node(0, 2)
    assert not topology.same_node(0, 1)
    assert topology.describe() == "4 ranks on 3 nodes (z: ranks [0, 2]; a: ranks [1]; b: ranks [3])"
    with pytest.raises(LayoutError, match=r"^a topology needs at least one rank$"):
        Topology(())


@cases
def test_a_stripe_names_its_code_and_its_encoder(redundancy):
    """Every owner encodes its own stripe, with the code of the layout; groups cover all nodes."""
    for layout in even_layouts(redundancy, 2):
        assert [(s.owner, s.encoder) for s in layout.stripes] == [
            (rank, rank) for rank in range(layout.topology.world)
        ]
        assert {stripe.code for stripe in layout.stripes} == {redundancy.code}
        assert tuple(node for group in layout.groups for node in group) == layout.topology.nodes


def test_a_layout_describes_itself():
    """The printed layout, in full, for a small one."""
    layout = even_layout(Redundancy("stripe", 1, 1), 3)
    assert layout.describe() == (
        "stripe:1+1 on 3 ranks on 3 nodes (n0: ranks [0]; n1: ranks [1]; n2: ranks [2])\n"
        "owner 0: 0->1, 1->2\n"
        "owner 1: 0->2, 1->0\n"
        "owner 2: 0->0, 1->1"
    )
    assert even_layout(NONE, 1).describe().endswith("owner 0: own copy only")
