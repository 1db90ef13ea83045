"""From where a restore gets its bytes: every rung, every loss that a layout allows, one beyond."""

from __future__ import annotations

import shutil
from itertools import combinations

import pytest
import torch

import replica
from erasure.digest import digest
from recovery.layout import parse_redundancy
from replica.errors import ConfigError, StoreError
from tests.replica.damage import copy_of, lose, node_dir, own_slot, renumbered, slots
from tests.replica.inprocess import Cluster, Member

FOUR = ["a", "b", "c", "d"]


def paired(*nodes):
    """Two ranks on each node."""
    return [node for node in nodes for _ in range(2)]


def trained(arena_dir, nodes, redundancy, *steps, **options):
    """Run a job that commits these steps, then close it."""
    Cluster(arena_dir, nodes, redundancy, **options).run(lambda me: me.commit(*steps))


def restored(arena_dir, nodes, redundancy, **options):
    """Run a job that only restores; the events by rank, after every value was compared."""
    return Cluster(arena_dir, nodes, redundancy, **options).run(Member.restore)


def sources(events):
    """Where each rank's bytes came from."""
    return [event["source"] for event in events]


def test_every_rank_of_an_unchanged_job_restores_from_its_own_memory(arena_dir):
    """Same nodes, same ranks: no payload byte crosses the transport and all read S locally."""
    trained(arena_dir, FOUR, "stripe:2+1", 1, 2)
    for event in restored(arena_dir, FOUR, "stripe:2+1"):
        assert (event["step"], event["source"], event["bytes_received"]) == (2, "own", 0)
        assert event["bytes_local"] == event["shard_bytes"] > 800
        assert event["protection"] == 2


def test_ranks_that_swap_arenas_on_one_node_send_nothing(arena_dir):
    """Two ranks of a node come back in the other order: each reads the other's arena, locally."""
    trained(arena_dir, paired("a", "b"), "copies:1", 3)
    swapped = {node: node_dir(arena_dir, node) for node in "ab"}
    for folder in swapped.values():
        # The launcher numbers the ranks of a node as it likes; arenas go by position on the node.
        (folder / "0").rename(folder / "aside")
        (folder / "1").rename(folder / "0")
        (folder / "aside").rename(folder / "1")
    outcome = Cluster(arena_dir, paired("a", "b"), "copies:1").outcomes(Member.restore)
    assert all("is of position" in str(error) for error in outcome)
    # Ranks that interleave are what a launcher really does: 0 and 2 on node a, 1 and 3 on node b.
    for folder in swapped.values():
        (folder / "0").rename(folder / "aside")
        (folder / "1").rename(folder / "0")
        (folder / "aside").rename(folder / "1")
    events = restored(arena_dir, ["a", "b", "a", "b"], "copies:1")
    assert sources(events) == ["own", "peers", "peers", "own"]
    assert [event["bytes_received"] > 0 for event in events] == [False, True, True, False]


def test_a_rank_finds_its_shard_in_a_sibling_arena(arena_dir):
    """Ranks 0 and 1 share a node and a third joins before them: their arenas are one place off."""
    trained(arena_dir, ["a", "a", "b"], "copies:1", 4)
    # The positions on node a stay, the owners move: rank 0 goes to b, ranks 1 and 2 to a.
    events = restored(arena_dir, ["b", "a", "a"], "copies:1")
    assert sources(events) == ["peers", "own", "peers"]
    assert events[1]["bytes_local"] == events[1]["shard_bytes"]
    assert events[1]["bytes_received"] == 0


def test_whole_copies_move_to_other_nodes_after_renumbering(arena_dir):
    """Nothing is lost, but every rank runs elsewhere: each receives exactly its S bytes."""
    trained(arena_dir, FOUR, "stripe:2+1", 1, 2)
    for event in restored(arena_dir, ["d", "a", "b", "c"], "stripe:2+1"):
        assert (event["source"], event["bytes_received"]) == ("peers", event["shard_bytes"])


LAYOUTS = [
    ("copies:1", ["a", "b"], 1),
    ("copies:1", paired("a", "b"), 1),
    ("copies:1", ["a", "b", "c"], 1),
    ("copies:2", ["a", "b", "c"], 2),
    ("copies:2", paired("a", "b", "c"), 2),
    ("stripe:1+1", paired("a", "b", "c"), 2),
    ("stripe:2+1", FOUR, 2),
    ("stripe:3+1", ["a", "b", "c", "d", "e"], 2),
]


@pytest.mark.parametrize(("redundancy", "nodes", "most"), LAYOUTS)
def test_every_loss_that_the_layout_allows_is_survived(arena_dir, redundancy, nodes, most):
    """Each set of nodes up to the layout's number is deleted and replaced; all bytes come back.

    Bytes received are those of the owners whose process is not where their own copy is.
    """
    names = list(dict.fromkeys(nodes))
    counts = [100 + 7 * rank for rank in range(len(nodes))]
    trained(arena_dir, nodes, redundancy, 1, 2, counts=counts)
    losses = [lost for size in range(1, most + 1) for lost in combinations(names, size)]
    for lost in losses:
        with copy_of(arena_dir) as copy:
            lose(copy, lost)
            now = renumbered(nodes, lost)
            events = restored(copy, now, redundancy, counts=counts)
        assert {event["step"] for event in events} == {2}
        for rank, event in enumerate(events):
            here = now[rank] == nodes[rank]
            check_bytes(event, here=here, k=parse_redundancy(redundancy, len(names)).k)
        assert {event["source_farthest"] for event in events} == {"peers"}
        assert {event["protection"] for event in events} <= set(range(most + 1 - len(lost)))


def check_bytes(event, *, here, k):
    """Compare one rank's bytes with the formula; a parity fragment may be k - 1 bytes longer."""
    size, received, local = (
        event[name] for name in ("shard_bytes", "bytes_received", "bytes_local")
    )
    if here:
        assert (event["source"], received, local) == ("own", 0, size)
    else:
        # A fragment on the own node is read only where those of other nodes do not suffice.
        assert event["source"] == ("peers" if received else "own")
        assert size <= received + local < size + k
        assert received >= (k - 1) * (size // k)


@pytest.mark.parametrize(
    ("redundancy", "nodes", "lost", "said"),
    [
        ("copies:1", ["a", "b", "c"], "ab", "owner 0 (0 of 1 distinct fragments and"),
        ("copies:1", paired("a", "b", "c"), "ab", "owners 0, 1 (0 of 1 distinct fragments and"),
        ("stripe:2+1", FOUR, "abc", "owners 0, 1, 2 (1 of 2 distinct fragments and"),
        ("stripe:3+1", ["a", "b", "c", "d", "e"], "abc", "owners 0, 1, 2 (2 of 3 distinct"),
    ],
)
def test_a_loss_beyond_the_layout_is_said_on_every_rank(arena_dir, redundancy, nodes, lost, said):
    """One node too many is lost: None everywhere, live state untouched, one sentence says why."""
    trained(arena_dir, nodes, redundancy, 1, 2)
    lose(arena_dir, lost)
    events = restored(arena_dir, renumbered(nodes, lost), redundancy)
    assert {event["step"] for event in events} == {None}
    assert {event["source"] for event in events} == {"none"}
    (reason,) = {event["reason"] for event in events}
    assert "nothing to restore" in reason
    assert "the committed step 2 is lost" in reason
    assert f"cannot rebuild {said}" in reason


def test_after_a_total_loss_the_job_starts_anew_and_saves_again(arena_dir):
    """Beyond the layout is no dead end: the next steps are committed and can be restored."""
    trained(arena_dir, FOUR, "stripe:2+1", 5)
    lose(arena_dir, ["a", "b", "c"])
    now = renumbered(FOUR, ["a", "b", "c"])

    def again(me):
        assert me.restore()["step"] is None
        me.commit(1, 2)

    Cluster(arena_dir, now, "stripe:2+1").run(again)
    assert {event["step"] for event in restored(arena_dir, now, "stripe:2+1")} == {2}


def test_losses_one_after_another_are_survived_when_a_save_lies_between(arena_dir):
    """Four nodes are lost one by one, each time with two steps saved anew: no step is lost."""
    nodes, step = FOUR, 1
    trained(arena_dir, nodes, "stripe:2+1", step)
    for turn in range(4):
        lose(arena_dir, [nodes[turn % 2]])
        nodes = renumbered(nodes, [nodes[turn % 2]])

        def go_on(me, step=step):
            assert me.restore()["step"] == step
            me.commit(step + 1, step + 2)
            return me.ckpt.status()

        for status in Cluster(arena_dir, nodes, "stripe:2+1").run(go_on):
            assert (status["committed_step"], status["protection"]) == (step + 2, 2)
        step += 2


def test_a_shard_of_many_chunks_is_rebuilt_from_parity(arena_dir):
    """A shard of five chunks a fragment, one node of the data lost too: every byte is compared."""
    counts = [5 << 20, 100, 3, 1 << 19]
    trained(arena_dir, FOUR, "stripe:2+1", 1, counts=counts)
    lose(arena_dir, ["a", "b"])
    events = restored(arena_dir, ["c", "d", "x", "y"], "stripe:2+1", counts=counts)
    assert {event["step"] for event in events} == {1}
    assert events[0]["bytes_received"] + events[0]["bytes_local"] > 40e6


def test_unequal_and_empty_shards_come_back(arena_dir):
    """Ranks with nothing, one value, a few and many: any node lost, each gets its own again."""
    counts = [0, 1, 100, 20_000]
    trained(arena_dir, FOUR, "stripe:2+1", 1, 2, counts=counts)
    for lost in FOUR:
        with copy_of(arena_dir) as copy:
            lose(copy, [lost])
            events = restored(copy, renumbered(FOUR, [lost]), "stripe:2+1", counts=counts)
        assert {event["step"] for event in events} == {2}


def test_a_job_that_changes_its_layout_restores_what_the_old_one_kept(arena_dir):
    """The code is in every record: saved with stripe:2+1, restored under copies:1, a node lost."""
    trained(arena_dir, FOUR, "stripe:2+1", 1, 2)
    lose(arena_dir, ["b"])

    def go_on(me):
        event = me.restore()
        me.commit(3, 4)
        return event

    now = renumbered(FOUR, ["b"])
    assert {e["step"] for e in Cluster(arena_dir, now, "copies:1").run(go_on)} == {2}
    lose(arena_dir, ["d"])
    events = restored(arena_dir, renumbered(now, ["d"]), "auto")
    assert {event["step"] for event in events} == {4}


@pytest.mark.parametrize("world", [3, 5])
def test_another_world_size_is_refused_on_all_ranks_with_what_to_do(arena_dir, world):
    """Four ranks saved: three or five get one sentence from restore, and from save as well."""
    trained(arena_dir, FOUR, "stripe:2+1", 1)
    nodes = [*FOUR, "e"][:world]
    for call in (lambda me: me.ckpt.restore(), lambda me: me.ckpt.save(2)):
        for error in Cluster(arena_dir, nodes).outcomes(call):
            assert isinstance(error, ConfigError)
            words = str(error)
            assert "saved by 4 ranks" in words
            assert f"this run has {world}" in words
            assert "planaria clean" in words
    assert {e["step"] for e in restored(arena_dir, FOUR, "stripe:2+1")} == {1}


def test_the_rank_decides_whose_state_is_loaded_and_not_the_place(arena_dir):
    """All nodes change their numbers by a cycle of three: rank r holds owner r's values (P15)."""
    trained(arena_dir, FOUR, "copies:1", 1, 2, 3)

    def who(me):
        me.ckpt.restore()
        return me.state["n"]["rank"], me.is_at(3)

    assert Cluster(arena_dir, ["c", "a", "b", "d"], "copies:1").run(who) == [
        (rank, True) for rank in range(4)
    ]


def test_an_undecided_generation_that_all_can_rebuild_is_taken(arena_dir):
    """Rank 0 ends before it writes the decision of step 2: aborted, yet whole, so taken (P18)."""

    def lose_the_decision(rank, verb, key, value):
        if verb == "compare_set" and key.startswith("decision/") and value == b"committed":
            raise StoreError("the root is gone")

    def train(me):
        me.train(2)
        ticket = me.ckpt.save(2)
        with pytest.raises(replica.SaveFailed):
            ticket.wait("committed", 30)
        return me.ckpt.status()["committed_step"]

    trained(arena_dir, FOUR, "stripe:2+1", 1)
    cluster = Cluster(arena_dir, FOUR, "stripe:2+1", hook=lose_the_decision)
    assert cluster.run(train) == [1] * 4
    lose(arena_dir, ["c"])
    events = restored(arena_dir, renumbered(FOUR, ["c"]), "stripe:2+1")
    assert {event["step"] for event in events} == {2}


def test_parts_of_a_failed_attempt_are_never_mixed_with_a_later_one(arena_dir):
    """Step 3 fails half held, the next run saves step 3 anew: what is restored is all of that."""

    class Odd:
        """Holds which run it was; one rank's raises once."""

        run, fails = 1, False

        def state_dict(self):
            if self.fails:
                raise RuntimeError("no")
            return {"run": self.run}

        def load_state_dict(self, state):
            self.run = state["run"]

    def first(me):
        me.state["odd"] = odd = Odd()
        me.commit(1, 2)
        me.train(3)
        if me.rank == 1:
            # Its slots of step 3 are complete when it falls silent: only rank 0 cannot stage it.
            me.ckpt.save(3)
        else:
            odd.fails = me.rank == 0
            me.ckpt.save(3)

    def second(me):
        me.state["odd"] = odd = Odd()
        assert me.ckpt.restore() == 2
        odd.run = 2
        me.commit(3)

    def third(me):
        me.state["odd"] = odd = Odd()
        odd.run = 0
        return me.ckpt.restore(), odd.run

    Cluster(arena_dir, FOUR, "stripe:2+1").run(first)
    Cluster(arena_dir, FOUR, "stripe:2+1").run(second)
    lose(arena_dir, ["a", "b"])
    nodes = renumbered(FOUR, ["a", "b"])
    assert Cluster(arena_dir, nodes, "stripe:2+1").run(third) == [(3, 2)] * 4


def test_an_arena_of_an_older_epoch_never_wins(arena_dir, tmp_path):
    """Step 5 of a former life comes back on two nodes beside step 2 of this one: 2 is newer."""
    trained(arena_dir, FOUR, "stripe:2+1", 4, 5)
    with copy_of(arena_dir) as stale:
        lose(arena_dir, ["b", "c", "d"])

        def anew(me):
            assert me.restore()["step"] is None
            me.commit(1, 2)

        Cluster(arena_dir, FOUR, "stripe:2+1").run(anew)
        lose(arena_dir, ["b", "c"])
        for node in "bc":
            shutil.copytree(node_dir(stale, node), node_dir(arena_dir, node))
    assert len(slots(arena_dir, 5, 1)) >= 2
    events = restored(arena_dir, FOUR, "stripe:2+1")
    assert {event["step"] for event in events} == {2}
    assert sources(events) == ["own", "peers", "peers", "own"]


def test_nothing_that_was_loaded_is_a_view_of_the_arena(arena_dir):
    """After a restore three AdamW steps change every live tensor and no byte of a slot (P11)."""

    def make():
        torch.manual_seed(3)
        model = torch.nn.Linear(7, 5)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optim):
        optim.zero_grad()
        model(torch.ones(2, 7)).square().sum().backward()
        optim.step()

    options = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a", "random_states": False}
    model, optim = make()
    with replica.Checkpointer({"model": model, "optim": optim}, **options) as ckpt:
        for number in (1, 2):
            step(model, optim)
            ckpt.save(number).wait("committed", 30)
    model, optim = make()
    with replica.Checkpointer({"model": model, "optim": optim}, **options) as ckpt:
        assert ckpt.restore() == 2
        held = ckpt._engine.job.arena.slots.values()
        before = [digest(slot.data) for slot in held]
        for _ in range(3):
            step(model, optim)
        assert [digest(slot.data) for slot in held] == before
        assert own_slot(arena_dir, 2, 0).record.generation == ckpt._engine._restored


def test_a_state_of_other_keys_aborts_on_all_ranks_and_changes_nothing(arena_dir):
    """One rank's live state has lost a key: RestoreAborted names rank and key, everywhere."""
    trained(arena_dir, ["a", "b"], "copies:1", 1)

    def restore(me):
        if me.rank == 1:
            del me.state["n"]
        try:
            me.ckpt.restore()
        finally:
            assert torch.equal(me.state["w"], me.state["w"].new_tensor(range(100)) * (me.rank + 1))

    for error in Cluster(arena_dir, ["a", "b"], "copies:1").outcomes(restore):
        assert isinstance(error, replica.RestoreAborted)
        assert "rank 1" in str(error)
        assert "saved but not in the live state: state['n']" in str(error)
    assert {e["step"] for e in restored(arena_dir, ["a", "b"], "copies:1")} == {1}


def test_what_a_node_of_more_ranks_left_is_restored_by_its_own_owner(arena_dir):
    """The one rank that stays on a node was its second: it reads that arena, and saves go on."""
    trained(arena_dir, ["a", "a", "b"], "copies:1", 1)

    def restore_and_save(me):
        event = me.restore()
        me.commit(2)
        return event

    after = ["b", "a", "b"]
    events = Cluster(arena_dir, after, "copies:1").run(restore_and_save)
    assert [event["step"] for event in events] == [1, 1, 1]
    assert events[1]["bytes_received"] == 0
    assert [event["step"] for event in restored(arena_dir, after, "copies:1")] == [2, 2, 2]


class Stubborn:
    """A state object that, when broken, will not load what step 2 left."""

    def __init__(self, *, broken):
        self.broken, self.value = broken, 0

    def state_dict(self):
        """Give the value."""
        return {"value": self.value}

    def load_state_dict(self, state):
        """Take the value, or not."""
        if self.broken and state["value"] == 2:
            raise RuntimeError("no room for a two")
        self.value = state["value"]


def test_a_failure_while_loading_ends_all_ranks_and_steps_back_after_two(arena_dir):
    """One rank's load_state_dict raises after the vote: all must end; the third try goes to r-1."""

    def train(me):
        me.state["thing"] = thing = Stubborn(broken=False)
        for thing.value in (1, 2):
            me.ckpt.save(thing.value).wait("committed", 30)

    def restore(me):
        me.state["thing"] = thing = Stubborn(broken=me.rank == 1)
        try:
            return me.ckpt.restore(), thing.value
        except replica.RestoreHalfDone:
            with pytest.raises(replica.ConfigError, match="must end"):
                me.ckpt.save(9)
            raise

    def run(body):
        return Cluster(arena_dir, ["a", "b"], "copies:1", counts=[0, 0]).outcomes(body)

    assert run(train) == [None, None]
    for _ in range(2):
        for error in run(restore):
            assert isinstance(error, replica.RestoreHalfDone)
            assert "no room for a two" in str(error)
            assert "must end" in str(error)
    assert run(restore) == [(1, 1), (1, 1)]
