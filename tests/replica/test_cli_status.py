"""What ``planaria status`` says of generations: who holds what, and how much more may be lost."""

from __future__ import annotations

import json
import shutil

import pytest

from recovery.manifest import WHOLE, Generation
from replica import cli
from replica.arena import read_arenas
from replica.cli_status import describe_generations
from replica.folder import folder_name
from tests.replica.inprocess import DROP, Cluster
from tests.replica.test_verify import fill

NODES = ["a", "b", "c", "d"]


def status(capsys, arena_dir, *more) -> dict:
    """Return what ``status --json`` prints."""
    assert cli.main(["status", "--json", "--arena-dir", str(arena_dir), *more]) == 0
    return json.loads(capsys.readouterr().out)


def text(capsys, arena_dir) -> str:
    """Return what ``status`` prints for people."""
    assert cli.main(["status", "--arena-dir", str(arena_dir)]) == 0
    return capsys.readouterr().out


def lose(arena_dir, *nodes) -> None:
    """Remove the arenas of whole nodes."""
    for node in nodes:
        (path,) = arena_dir.glob(f"planaria-*/*/{folder_name(node)}")
        shutil.rmtree(path)


def test_holders_of_a_job_that_runs(arena_dir, capsys):
    """Four ranks, stripe:2+1: every owner's whole and fragments, where they lie, and two losses."""
    seen = []

    def body(me):
        me.commit(1)
        me.job.front.set(f"here-{me.rank}", b"1")
        while not me.job.front.check([f"here-{rank}" for rank in range(4)]):
            me.job.clock.pause(0.01)
        if me.rank == 0:
            seen.append(status(capsys, arena_dir))
            seen.append(text(capsys, arena_dir))
        me.job.front.set(f"there-{me.rank}", b"1")
        while not me.job.front.check([f"there-{rank}" for rank in range(4)]):
            me.job.clock.pause(0.01)

    Cluster(arena_dir, NODES, "stripe:2+1").run(body)
    report, shown = seen
    (generation,) = report["generations"]
    assert (generation["committed"], generation["exact"], generation["protection"]) == (
        True,
        True,
        2,
    )
    assert (generation["job"], generation["step"], generation["world"]) == ("job", 1, 4)
    for owner in range(4):
        found = {
            (holder["fragment"], holder["node_id"])
            for holder in generation["holders"]
            if holder["owner"] == owner
        }
        home = NODES[owner]
        assert (WHOLE, home) in found
        assert len(found) == 4
        assert {node for fragment, node in found if fragment >= 0} == set(NODES) - {home}
        assert all(NODES[h["rank"]] == h["node_id"] for h in generation["holders"])
    assert all(arena["alive"] for arena in report["arenas"])
    assert "committed: 2 more nodes may be lost" in shown
    assert "    owner 0: whole on rank 0 (a), fragment 0 on rank " in shown


@pytest.mark.parametrize(("lost", "protection"), [((), 2), (("a",), 1), (("a", "c"), 0)])
def test_protection_falls_with_every_node(arena_dir, capsys, lost, protection):
    """Nodes' arenas are removed one after another: the number falls, and is no longer exact."""
    Cluster(arena_dir, NODES, "stripe:2+1").run(lambda me: me.commit(1))
    lose(arena_dir, *lost)
    (generation,) = status(capsys, arena_dir)["generations"]
    assert (generation["protection"], generation["exact"]) == (protection, not lost)
    nodes = "1 more node" if protection == 1 else f"{protection} more nodes"
    phrase = f"at least {nodes} may be lost, as seen from these arenas" if lost else nodes
    assert phrase in text(capsys, arena_dir)


def test_too_much_lost_is_not_a_number(arena_dir, capsys):
    """Three of four nodes are gone: no protection is claimed, and the missing owners are named."""
    Cluster(arena_dir, NODES, "stripe:2+1").run(lambda me: me.commit(1))
    lose(arena_dir, "a", "b", "c")
    (generation,) = status(capsys, arena_dir)["generations"]
    assert (generation["protection"], generation["recoverable_owners"]) == (None, [3])
    assert set(generation["missing_owners"]) == {"0", "1", "2"}
    assert "these arenas alone give back owner 3 of 4" in text(capsys, arena_dir)


def test_a_save_that_was_not_committed_says_so(arena_dir, capsys):
    """Step 2 loses every word of who holds it and is aborted: its parts are shown as such."""

    def hook(rank, verb, key, _):
        return DROP if verb == "set" and "held/" in key and dropping else None

    dropping = []

    def body(me):
        me.commit(1)
        dropping.append(1)
        me.train(2)
        ticket = me.ckpt.save(2)
        with pytest.raises(Exception, match="not committed"):
            ticket.wait("committed", 30)

    Cluster(arena_dir, ["a", "b"], "copies:1", hook=hook, timeout_s=1.0).run(body)
    found = {one["step"]: one["committed"] for one in status(capsys, arena_dir)["generations"]}
    assert found == {1: True, 2: False}
    assert status(capsys, arena_dir)["jobs"] == {"job": {"committed_step": 1}}


def test_each_job_has_a_newest_step_of_its_own(open_arena, arena_dir, capsys):
    """Two jobs on one host: a step for each, beside the newest over all."""
    open_arena(job="a").update_head(committed=Generation(1, 5, "5" * 32))
    open_arena(job="a", position=1).update_head(committed=Generation(1, 4, "4" * 32))
    open_arena(job="b").update_head(committed=Generation(1, 9, "9" * 32))
    open_arena(job="c")
    report = status(capsys, arena_dir)
    expected = {"a": 5, "b": 9, "c": None}
    assert report["jobs"] == {job: {"committed_step": step} for job, step in expected.items()}
    assert report["committed_step"] == 9
    shown = text(capsys, arena_dir)
    for job, step in expected.items():
        assert f"job {job}: newest committed step {step}\n" in shown


def test_an_arena_that_was_given_up_holds_nothing(open_arena, arena_dir, rng, capsys):
    """Of siblings of one position only the newest counts: the next start uses no other."""
    fill(open_arena().allocate(5000, "held"), rng, k=1)
    (view,) = read_arenas(arena_dir)
    records = [slot.record for slot in view.slots.values()]
    newer = (f"{view.path}.1", view.head, [])
    assert len(describe_generations([(view.path, view.head, records)])) == 1
    assert describe_generations([(view.path, view.head, records), newer]) == []
    tenth = (f"{view.path}.10", view.head, records)
    assert len(describe_generations([newer, tenth])) == 1


def test_an_arena_without_a_head_counts_by_its_place(open_arena, arena_dir, rng, capsys):
    """A damaged head hides only the rank: the records count, and the node is the folder's."""
    arena = open_arena(position=0)
    fill(arena.allocate(5000, "held"), rng, k=1, fragment=0)
    open_arena(position=1, world=2, rank=1).close()
    arena.close()
    (view, other) = read_arenas(arena_dir)
    records = [slot.record for slot in view.slots.values()]
    (generation,) = describe_generations([(view.path, None, records), (other.path, other.head, [])])
    assert generation["holders"] == [{"owner": 0, "fragment": 0, "rank": None, "node_id": "node"}]
    assert (generation["protection"], generation["exact"]) == (0, False)
