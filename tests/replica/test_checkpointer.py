"""The face: what a caller sees of ``Checkpointer``, mostly in a world of one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import replica
from replica import opening
from replica.config import Config, Options
from replica.group import MemoryGroup
from replica.ticket import Ticket
from tests.replica.damage import slots
from tests.replica.inprocess import COMMIT_S, Cluster, HookedGroup, outcomes

JOB_VARIABLES = ("PLANARIA_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
OTHER_VARIABLES = ("PLANARIA_NODE_ID", "PLANARIA_ARENA_DIR", "PLANARIA_STORE")


@pytest.fixture
def clean_env(monkeypatch):
    """Take away every variable that the library reads."""
    for name in JOB_VARIABLES + OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def make(arena_dir, clean_env):
    """Return a maker of Checkpointers of a world of one, closed with the test."""
    made = []

    def maker(state, **options):
        given = {"job": "job", "arena_dir": str(arena_dir), "node_id": "a", "timeout_s": 20.0}
        made.append(replica.Checkpointer(state, **given | options))
        return made[-1]

    yield maker
    for one in made:
        try:
            one.close()
        except replica.SaveFailed as error:
            logging.getLogger("test").info("closed after %s", error)


def files(path):
    """List everything below a directory."""
    return sorted(path.rglob("*"))


def events_of(events, kind):
    """Pick the events of one kind."""
    return [event for event in events if event["event"] == kind]


def test_the_constructor_touches_nothing(arena_dir, make):
    """Making one, asking its status and closing it leaves no file, no thread and no error."""
    before = threading.active_count()
    one = make({"w": torch.zeros(3)})
    assert one.status() == {"open": False}
    one.close()
    one.close()
    assert files(arena_dir) == []
    assert threading.active_count() <= before


def test_one_node_is_warned_that_nothing_survives_its_loss(make, caplog):
    """redundancy="auto" on one node keeps own copies only and says so; "none" was asked for."""
    with make({"x": 1}, redundancy="none") as one:
        one.start()
    assert "nothing survives" not in caplog.text
    with make({"x": 1}) as one:
        one.start()
    assert "nothing survives its loss" in caplog.text


def test_two_jobs_live_side_by_side(make):
    """Two Checkpointers of unlike job names in one process save and restore their own."""
    first, second = {"x": 1}, {"x": 2}
    with make(first) as one, make(second, job="other") as two:
        for step in (1, 2):
            one.save(step).wait("committed", COMMIT_S)
            two.save(10 * step).wait("committed", COMMIT_S)
    first["x"] = second["x"] = 0
    with make(first) as one, make(second, job="other") as two:
        assert (one.restore(), two.restore()) == (2, 20)
    assert (first["x"], second["x"]) == (1, 2)


def test_too_little_memory_is_said_before_training(make, small_tmpfs):
    """A state of 1 MiB needs twice that on a tmpfs of 2: ArenaFull with bytes needed and free."""
    state = {"w": torch.zeros(1 << 17, dtype=torch.float64)}
    with pytest.raises(replica.ArenaFull, match=r"node a: \d+ bytes needed.*\d+ bytes available"):
        make(state, arena_dir=str(small_tmpfs)).start()
    assert files(small_tmpfs) == []


def test_another_nodes_memory_is_told_with_its_own_directory(arena_dir, small_tmpfs, clean_env):
    """Node b has another arena_dir, with too little room: both ranks name that one."""
    groups, dirs = MemoryGroup.make(2), [arena_dir, small_tmpfs]

    def start(rank):
        options = {"job": "job", "node_id": "ab"[rank], "arena_dir": str(dirs[rank])}
        state = {"w": torch.zeros(1 << 17, dtype=torch.float64)}
        replica.Checkpointer(state, group=groups[rank], **options).start()

    for error in outcomes(2, start):
        assert isinstance(error, replica.ArenaFull)
        assert "node b: " in str(error)
        assert f"the file system of {small_tmpfs} has too little" in str(error)
    assert files(arena_dir) == [small_tmpfs]


def test_a_refused_start_leaves_nothing_that_it_made(arena_dir, make, monkeypatch):
    """On disk: a new job leaves no file; what a job has saved before stays as it was."""
    with make({"x": 1}) as one:
        one.save(1).wait("committed", COMMIT_S)
    kept, real = files(arena_dir), opening.memory_facts
    with monkeypatch.context() as patched:
        patched.setattr(
            opening, "memory_facts", lambda path: replace(real(path), filesystem="ext4")
        )
        for job in ("job", "other"):
            with pytest.raises(replica.ArenaFull, match="is on ext4"):
                make({"x": 1}, job=job).start()
            assert files(arena_dir) == kept
    with make({"x": 0}) as one:
        assert one.restore() == 1


def test_start_opens_once(arena_dir, make):
    """The first start makes the arena, a second changes nothing; status tells what is open."""
    one = make({"w": torch.zeros(3)})
    one.start()
    made = files(arena_dir)
    assert len([path for path in made if path.suffix == ".safetensors"]) == 2
    one.start()
    assert files(arena_dir) == made
    status = one.status()
    assert status["open"]
    assert (status["job"], status["rank"], status["world"], status["epoch"]) == ("job", 0, 1, 1)
    assert status["redundancy"] == "none"
    assert status["committed_step"] is None
    assert status["protection"] is None
    assert status["may_lose_steps"] is None


def test_what_was_saved_is_restored(make):
    """Tensors in place, nested values, arrays and random streams come back as they were saved."""
    state = {
        "w": torch.arange(5.0),
        "nested": {"list": [1, "two", None], 3: (4.5, True)},
        "array": np.arange(4),
    }
    weight, array = state["w"], state["array"]
    torch.manual_seed(11)
    with make(state) as one:
        assert one.restore() is None
        one.save(7).wait("committed", COMMIT_S)
    drawn = torch.rand(3)
    weight.fill_(-1)
    array[:] = -1
    state["nested"]["list"].append("more")
    with make(state) as one:
        assert one.restore() == 7
        assert one.status()["restored_step"] == 7
    assert state["w"] is weight
    assert torch.equal(weight, torch.arange(5.0))
    assert state["array"] is array
    assert list(array) == [0, 1, 2, 3]
    assert state["nested"] == {"list": [1, "two", None], 3: (4.5, True)}
    assert torch.equal(torch.rand(3), drawn)


def test_random_states_can_be_left_alone(make):
    """With random_states=False a restore does not touch the streams."""
    with make({"x": 1}, random_states=False) as one:
        one.save(1).wait("committed", COMMIT_S)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with make({"x": 1}, random_states=False) as one:
        assert one.restore() == 1
    assert torch.equal(torch.rand(3), expected)


def test_the_caller_may_change_everything_when_save_returns(make):
    """Tensors, an array's view and nested lists are overwritten right after each of 50 returns."""
    array = np.zeros(1000)
    state = {"w": torch.zeros(1000), "v": torch.from_numpy(array), "l": [0]}
    with make(state) as one:
        for step in range(1, 51):
            state["w"].fill_(step)
            array.fill(step)
            state["l"][0] = step
            ticket = one.save(step)
            state["w"].fill_(-1)
            array.fill(-1)
            state["l"].append("junk")
            del state["l"][1:]
            state["l"][0] = -1
            ticket.wait("committed", COMMIT_S)
    with make(state) as one:
        assert one.restore() == 50
    assert state["w"].unique().tolist() == [50]
    assert np.unique(array).tolist() == [50]
    assert state["l"] == [50]


def test_a_ticket_goes_through_its_stages(make):
    """Stages are reached in order, waiting for one returns, a wrong stage is refused."""
    with make({"w": torch.zeros(3)}) as one:
        ticket = one.save(1)
        for stage in ("staged", "held", "committed"):
            ticket.wait(stage, COMMIT_S)
        assert ticket.done
        assert not ticket.failed
        assert not ticket.skipped
        with pytest.raises(replica.ConfigError, match="stage is 'finished'"):
            ticket.wait("finished")


def test_a_wait_that_runs_out_names_the_stage_reached():
    """TimeoutError says how far the save has come; SaveFailed says why it was given up."""
    ticket = Ticket(3)
    with pytest.raises(TimeoutError, match="step 3 is admitted after 0 s, not staged"):
        ticket.wait("staged", 0)
    ticket.advance("staged")
    with pytest.raises(TimeoutError, match="step 3 is staged"):
        ticket.wait("committed", 0)
    ticket.fail("rank 1 is gone")
    with pytest.raises(replica.SaveFailed, match="step 3 was not committed: rank 1 is gone"):
        ticket.wait()
    ticket.wait("staged", 0)
    assert ticket.done


def test_a_skipped_ticket_waits_for_nothing():
    """A step that is not saved is no error: every wait returns at once, the reason is there."""
    ticket = Ticket(3, skipped=True, reason="busy")
    ticket.wait("committed")
    assert (ticket.done, ticket.failed, ticket.reason) == (True, False, "busy")


def test_interval_steps_saves_multiples_only(make):
    """With interval_steps=3 steps 3 and 6 of 1..7 are saved, the others skipped with a reason."""
    with make({"x": 1}, interval_steps=3) as one:
        tickets = []
        for step in range(1, 8):
            tickets.append(one.save(step))
            tickets[-1].wait("committed", COMMIT_S)
        assert [t.step for t in tickets if not t.skipped] == [3, 6]
        assert "interval_steps" in tickets[0].reason
        assert one.status()["saves_committed"] == 2


def test_the_same_step_again_is_the_same_save(make):
    """A second save of the newest step returns its ticket and saves nothing."""
    with make({"x": 1}) as one:
        ticket = one.save(4)
        ticket.wait("committed", COMMIT_S)
        assert one.save(4) is ticket
        assert one.status()["saves_committed"] == 1


def test_falling_steps_are_refused(make):
    """A step below the newest saved one is a mistake, and so is no number at all."""
    with make({"x": 1}) as one:
        one.save(4).wait("committed", COMMIT_S)
        with pytest.raises(replica.ConfigError, match="step 3 comes after step 4"):
            one.save(3)
        for bad in (-1, 1.5, "7", True, None):
            with pytest.raises(replica.ConfigError, match="whole number"):
                one.save(bad)
        one.save(5).wait("committed", COMMIT_S)


def test_after_a_restore_steps_are_saved_anew(make):
    """Rolled back to 5 from an aborted 6 in one process: 6 is another save and is committed."""

    class Moody:
        value, fails = 0, False

        def state_dict(self):
            if self.fails:
                raise RuntimeError("not now")
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    moody = Moody()
    with make({"moody": moody}) as one:
        moody.value = 5
        one.save(5).wait("committed", COMMIT_S)
        moody.value, moody.fails = 6, True
        failed = one.save(6)
        with pytest.raises(replica.SaveFailed, match="not now"):
            failed.wait("committed", COMMIT_S)
        moody.fails = False
        assert one.restore() == 5
        assert moody.value == 5
        for moody.value in (6, 7):
            one.save(moody.value).wait("committed", COMMIT_S)
        assert one.status()["committed_step"] == 7


def test_status_counts_and_says_what_may_be_lost(make):
    """Committed, aborted and skipped saves, bytes held and the steps at risk are all there."""
    with make({"w": torch.zeros(100)}, interval_steps=1) as one:
        one.save(3).wait("committed", COMMIT_S)
        status = one.status()
        assert (status["committed_step"], status["may_lose_steps"], status["busy"]) == (3, 0, False)
        assert status["saves_committed"] == 1
        assert (status["saves_aborted"], status["saves_skipped"]) == (0, 0)
        assert status["bytes_held"] == one._engine.job.arena.bytes_allocated > 800
        assert status["protection"] == 0
        assert status["restored_step"] is None


def test_events_tell_of_saves_and_restores(make):
    """One event per save and restore, with step, outcome, bytes and seconds."""
    events = []
    with make({"w": torch.zeros(100)}, on_event=events.append) as one:
        one.restore()
        one.save(2).wait("committed", COMMIT_S)
    with make({"w": torch.zeros(100)}, on_event=events.append) as one:
        one.restore()
    nothing, something = events_of(events, "restore")
    (save,) = events_of(events, "save")
    assert (nothing["step"], nothing["source"]) == (None, "none")
    assert "nothing to restore" in nothing["reason"]
    assert (save["step"], save["outcome"], save["sent_bytes"]) == (2, "committed", 0)
    assert len(save["generation"]) == 32
    assert {"copy", "protect", "total"} <= set(save["seconds"])
    assert (something["step"], something["source"]) == (2, "own")
    assert something["shard_bytes"] == save["bytes"] == something["bytes_local"]
    assert set(something["seconds"]) == {"inventory", "transfer", "decode", "load", "total"}


def test_a_listener_may_be_the_method_of_any_object(make):
    """on_event is a queue's put, and a queue has locks, which cannot be copied: events arrive."""
    events = queue.Queue()
    with make({"x": 1}, on_event=events.put) as one:
        one.save(1).wait("committed", COMMIT_S)
    assert events.get(timeout=COMMIT_S)["outcome"] == "committed"


def test_a_listener_that_raises_harms_no_save(make, caplog):
    """on_event raises each time: saves are committed, restore works, the log has the error."""

    def listener(event):
        raise ZeroDivisionError(event["event"])

    with make({"x": 1}, on_event=listener) as one:
        assert one.restore() is None
        for step in (1, 2):
            one.save(step).wait("committed", COMMIT_S)
    assert "on_event raised" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"redundency": "auto"},
            r"unknown options \['redundency'\], expected some of \['arena_dir'",
        ),
        ({"redundancy": "raid"}, "redundancy is 'raid'"),
        ({"redundancy": None}, "redundancy is None"),
        ({"job": ""}, "job is ''"),
        ({"job": 7}, "job is 7"),
        ({"job": "a\0b"}, "job is"),
        ({"job": "a\nb"}, r"job is 'a\\nb', expected .* none of them a control character"),
        ({"node_id": "a\x9bb"}, "node_id is"),
        ({"node_id": ""}, "node_id is ''"),
        ({"interval_steps": 0}, "interval_steps is 0"),
        ({"interval_steps": 1.5}, "interval_steps is 1.5"),
        ({"interval_steps": True}, "interval_steps is True"),
        ({"on_error": "ignore"}, "on_error is 'ignore', expected one of"),
        ({"when_busy": "queue"}, "when_busy is 'queue', expected one of"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": "60"}, "timeout_s is '60'"),
        ({"on_event": "print"}, "on_event is 'print'"),
    ],
)
def test_a_bad_option_is_refused_by_the_constructor(options, words):
    """Each wrong option is one ConfigError that names it, what was given and what is allowed."""
    with pytest.raises(replica.ConfigError, match=words):
        replica.Checkpointer({"x": 1}, **options)


def test_a_state_that_is_no_dict_is_refused_by_the_constructor():
    """A bare tensor has no name to be saved under."""
    with pytest.raises(replica.StateError, match="must be a dict"):
        replica.Checkpointer(torch.zeros(3))


def test_a_group_of_the_wrong_kind_is_refused(make):
    """Something that is no process group is named at the first call."""
    with pytest.raises(replica.ConfigError, match="group is a str"):
        make({"x": 1}, group="everybody").start()


def test_too_few_nodes_for_the_redundancy_is_said_with_what_fits(make):
    """One node cannot carry stripe:2+1: the error says what it needs and what to use."""
    with pytest.raises(replica.LayoutError, match="needs 4 nodes, but this job has 1; use 'none'"):
        make({"x": 1}, redundancy="stripe:2+1").start()


def test_the_jobs_name_comes_from_the_first_place_that_has_one(clean_env):
    """job=, PLANARIA_JOB, TORCHELASTIC_RUN_ID unless empty or none, SLURM_JOB_ID, in that order."""

    def name(**options):
        return Config.from_env(Options(**options), env, 4).job

    env = {
        "PLANARIA_JOB": "p",
        "TORCHELASTIC_RUN_ID": "t",
        "SLURM_JOB_ID": "s",
        "PLANARIA_NODE_ID": "n",
    }
    assert name(job="given") == "given"
    assert name() == "p"
    env["PLANARIA_JOB"] = ""
    assert name() == "t"
    for useless in ("", "none"):
        env["TORCHELASTIC_RUN_ID"] = useless
        assert name() == "s"
    del env["SLURM_JOB_ID"]
    with pytest.raises(replica.ConfigError, match=r"job of 4 ranks needs a name.*PLANARIA_JOB"):
        name()


def test_a_world_of_one_is_named_after_its_script(clean_env, monkeypatch):
    """The same script by any relative path has one name, another script another."""
    names = []
    for script in ("/a/train.py", "/a/other.py"):
        monkeypatch.setattr("sys.argv", [script])
        names.append(Config.from_env(Options(), {}, 1).job)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(Path, "absolute", lambda self: Path("/a") / self)
    names.append(Config.from_env(Options(), {}, 1).job)
    assert names[0] == names[2] != names[1]


def test_a_nameless_job_of_two_is_refused_on_both_ranks(arena_dir, clean_env):
    """No name anywhere: both ranks raise the ConfigError that says how to give one."""
    for error in Cluster(arena_dir, ["a", "b"], job=None).outcomes(lambda me: me.ckpt.start()):
        assert isinstance(error, replica.ConfigError)
        assert "needs a name" in str(error)


def test_node_and_arena_directory_come_from_the_environment(arena_dir, clean_env):
    """PLANARIA_NODE_ID and PLANARIA_ARENA_DIR are used where no option is given."""
    clean_env.setenv("PLANARIA_NODE_ID", "from-env")
    clean_env.setenv("PLANARIA_ARENA_DIR", str(arena_dir))
    with replica.Checkpointer({"x": 1}, job="job") as one:
        one.start()
        assert one._engine.job.arena.head.node_id == "from-env"
        assert Path(one._engine.job.arena.path).is_relative_to(arena_dir)


def test_ranks_with_unlike_options_are_refused_by_name(arena_dir):
    """Two ranks disagree on interval_steps: both say which, who and what."""
    groups = MemoryGroup.make(2)

    def start(me):
        other = replica.Checkpointer(
            me.state,
            group=groups[me.rank],
            job="job",
            node_id="ab"[me.rank],
            arena_dir=str(arena_dir),
            interval_steps=me.rank + 1,
        )
        other.start()

    for error in Cluster(arena_dir, ["a", "b"]).outcomes(start):
        assert isinstance(error, replica.ConfigError)
        assert "interval_steps differs: rank 0 on node a has 1, rank 1 on node b has 2" in str(
            error
        )


class Broken:
    """A state object whose state_dict raises when told to."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self):
        """Give nothing, or raise."""
        if self.fails:
            raise RuntimeError("the loader is gone")
        return {}

    def load_state_dict(self, state):
        """Take nothing."""


def test_a_failed_save_is_a_warning_by_default(make, caplog):
    """state_dict raises at step 2: warned, counted, the ticket raises; steps 1 and 3 are safe."""
    broken, events = Broken(), []
    with make({"b": broken}, on_event=events.append) as one:
        one.save(1).wait("committed", COMMIT_S)
        broken.fails = True
        ticket = one.save(2)
        with pytest.raises(replica.SaveFailed, match="the loader is gone"):
            ticket.wait("committed", COMMIT_S)
        assert one.status()["committed_step"] == 1
        assert one.status()["saves_aborted"] == 1
        assert "the loader is gone" in one.status()["last_error"]
        broken.fails = False
        one.save(3).wait("committed", COMMIT_S)
    assert [(e["step"], e["outcome"]) for e in events_of(events, "save")] == [
        (1, "committed"),
        (2, "aborted"),
        (3, "committed"),
    ]
    assert "step 2 was not committed" in caplog.text


def test_with_on_error_raise_the_next_call_raises_once(make):
    """Step 2 fails: save(3) raises SaveFailed naming step 2, and again asked it saves."""
    broken = Broken()
    with make({"b": broken}, on_error="raise") as one:
        one.save(1).wait("committed", COMMIT_S)
        broken.fails = True
        with pytest.raises(replica.SaveFailed):
            one.save(2).wait("committed", COMMIT_S)
        broken.fails = False
        with pytest.raises(replica.SaveFailed, match="step 2 was not committed"):
            one.save(3)
        one.save(3).wait("committed", COMMIT_S)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failed_last_save_is_seen_at_close(make, caplog, on_error):
    """The very last save fails: close logs it and, with on_error="raise", raises."""
    broken = Broken()
    one = make({"b": broken}, on_error=on_error)
    one.save(1).wait("committed", COMMIT_S)
    broken.fails = True
    one.save(2)
    if on_error == "raise":
        with pytest.raises(replica.SaveFailed, match="step 2"):
            one.close()
    else:
        one.close()
    assert "the last save, step 2, was not committed" in caplog.text
    one.close()


def test_the_blocks_own_exception_is_never_hidden(make, caplog):
    """The body raises after a failing save, with on_error="raise": its own error comes out."""
    broken = Broken()
    one = make({"b": broken}, on_error="raise")

    def script():
        with one:
            one.save(1).wait("committed", COMMIT_S)
            broken.fails = True
            one.save(2)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        script()
    assert "while closing after KeyError" in caplog.text


def test_a_closed_one_cannot_be_used(make):
    """After close every call says so; status says that nothing is open."""
    one = make({"x": 1})
    one.start()
    one.close()
    for call in (one.start, one.restore, lambda: one.save(1)):
        with pytest.raises(replica.ConfigError, match="closed"):
            call()
    assert one.status() == {"open": False}


def test_close_waits_for_the_save_under_way(make):
    """Save, and close right after it, ten times: each last step is there at the next start."""
    for step in range(1, 11):
        with make({"w": torch.full((1000,), float(step))}) as one:
            one.save(step)
        state = {"w": torch.zeros(1000)}
        with make(state) as one:
            assert one.restore() == step
        assert state["w"].unique().tolist() == [step]


def test_close_waits_no_longer_than_the_deadline(make, caplog):
    """The last save cannot be decided: close returns by its deadline, and says what was lost."""
    gate = Gate()
    one = gated(make, gate, timeout_s=0.5)
    one.save(1).wait("committed", COMMIT_S)
    gate.shut.set()
    ticket = one.save(2)
    assert gate.reached.wait(COMMIT_S)
    started_s = time.monotonic()
    one.close()
    assert time.monotonic() - started_s < 10
    assert "the last save, step 2, was not committed: not decided within the 0.5 s" in caplog.text
    assert ticket.failed
    gate.open.set()


def test_a_second_one_for_the_same_arena_in_this_process_is_refused(make):
    """Two open Checkpointers of one job, node and position: the second says who has the arena."""
    with make({"x": 1}) as one:
        one.start()
        with pytest.raises(replica.ArenaBusy):
            make({"x": 1}).start()
        one.save(1).wait("committed", COMMIT_S)


class Gate:
    """A hook that holds the reports of HELD back until it is opened."""

    def __init__(self) -> None:
        self.shut, self.reached = threading.Event(), threading.Event()
        self.open = threading.Event()

    def __call__(self, _rank, verb, key, _value):
        """Wait at the gate while it is shut."""
        if self.shut.is_set() and verb == "set" and key.startswith("held/"):
            self.reached.set()
            assert self.open.wait(COMMIT_S)


def gated(make, gate, **options):
    """Make a Checkpointer whose saves stop at the gate before they are held."""
    group = HookedGroup(MemoryGroup.make(1)[0], gate)
    return make({"x": 1}, group=group, **options)


def test_a_busy_step_is_skipped(make):
    """While step 2 is not decided, steps 3 and 4 are skipped at once; 5 is saved after it."""
    gate, events = Gate(), []
    with gated(make, gate, on_event=events.append) as one:
        one.save(1).wait("committed", COMMIT_S)
        gate.shut.set()
        second = one.save(2)
        assert gate.reached.wait(COMMIT_S)
        skipped = [one.save(step) for step in (3, 4)]
        assert [ticket.skipped for ticket in skipped] == [True, True]
        assert {ticket.reason for ticket in skipped} == {"a save is under way"}
        told = [event for event in events if event["outcome"] == "skipped"]
        assert [set(event) for event in told] == [{"event", "step", "outcome", "reason"}] * 2
        status = one.status()
        assert (status["busy"], status["saves_skipped"]) == (True, 2)
        assert (status["committed_step"], status["may_lose_steps"]) == (1, 1)
        with pytest.raises(TimeoutError, match="step 2 is held after 0 s"):
            second.wait("committed", 0)
        gate.shut.clear()
        gate.open.set()
        second.wait("committed", COMMIT_S)
        one.save(5).wait("committed", COMMIT_S)
        assert one.status()["saves_committed"] == 3


def test_a_skipped_step_may_be_given_again(arena_dir):
    """The last step of a run, skipped in the loop, is saved by the call behind it, on all ranks."""

    def body(me):
        me.train(1)
        me.ckpt.save(1).wait("committed", COMMIT_S)
        me.train(2)
        gates[me.rank].shut.set()
        second = me.ckpt.save(2)
        me.train(3)
        seen = [me.ckpt.save(3).skipped, me.ckpt.save(3).skipped]
        gates[me.rank].shut.clear()
        gates[me.rank].open.set()
        last = me.ckpt.save(3, when_busy="wait")
        last.wait("committed", COMMIT_S)
        return seen, second.failed, last.skipped, me.ckpt.save(3) is last, me.ckpt.status()

    gates = [Gate(), Gate()]
    cluster = Cluster(arena_dir, ["a", "b"], "copies:1")
    cluster.groups = [HookedGroup(*both) for both in zip(cluster.groups, gates, strict=True)]
    for seen, failed, skipped, same, status in cluster.run(body):
        assert (seen, failed, skipped, same) == ([True, True], False, False, True)
        assert (status["committed_step"], status["saves_committed"]) == (3, 3)


def test_a_busy_step_waits_when_told_to(make):
    """With when_busy="wait" step 3 returns only after step 2 was decided, and is saved."""
    gate = Gate()
    with gated(make, gate, when_busy="wait") as one:
        one.save(1).wait("committed", COMMIT_S)
        gate.shut.set()
        second = one.save(2)
        assert gate.reached.wait(COMMIT_S)
        third = []
        thread = threading.Thread(target=lambda: third.append(one.save(3)), daemon=True)
        thread.start()
        thread.join(0.05)
        assert third == []
        assert not second.done
        gate.shut.clear()
        gate.open.set()
        thread.join(COMMIT_S)
        assert second.done
        third[0].wait("committed", COMMIT_S)
        assert one.status()["saves_skipped"] == 0


def test_restore_waits_for_the_save_under_way(make):
    """restore() while step 2 is undecided returns step 2 once it is decided."""
    gate = Gate()
    with gated(make, gate) as one:
        gate.shut.set()
        one.save(2)
        assert gate.reached.wait(COMMIT_S)
        found = []
        thread = threading.Thread(target=lambda: found.append(one.restore()), daemon=True)
        thread.start()
        thread.join(0.05)
        assert found == []
        gate.open.set()
        thread.join(COMMIT_S)
        assert found == [2]


def test_a_save_without_a_restore_keeps_what_was_there(arena_dir, make):
    """A new run that never restores stages its step 1 beside step 9, the newest of the old run."""
    with make({"x": 9}) as one:
        for step in (8, 9):
            one.save(step).wait("committed", COMMIT_S)
    gate = Gate()
    gate.shut.set()
    one = gated(make, gate)
    one.save(1)
    assert gate.reached.wait(COMMIT_S)
    assert [len(slots(arena_dir, step, 0)) for step in (8, 9, 1)] == [0, 1, 1]
    assert one.status()["committed_step"] == 9
    assert one.status()["restored_step"] is None
    gate.open.set()
    one.close()
    with make({"x": 0}) as one:
        assert one.restore() == 1


def test_a_save_without_a_restore_is_told(arena_dir, caplog):
    """A new life that saves first is warned by rank 0 that step 3 goes; one that restores: not."""

    def life(body):
        caplog.clear()
        Cluster(arena_dir, ["a", "b"], "copies:1").run(body)
        return [r.getMessage() for r in caplog.records if "its saves will take" in r.getMessage()]

    assert life(lambda me: me.commit(1, 2)) == []
    assert life(lambda me: (me.restore(), me.commit(3))) == []
    (said,) = life(lambda me: me.commit(1, 2))
    for part in (
        "step 3 of job 'job' is in memory",
        "restore() was not called",
        "Call restore() f",
    ):
        assert part in said


@pytest.mark.parametrize("restoring", [0, 1])
def test_ranks_that_disagree_whether_to_restore_are_told_so(arena_dir, restoring):
    """One calls restore() and the other save(): each one's error says what all must do."""

    def body(me):
        if me.rank == restoring:
            me.ckpt.restore()
        me.ckpt.save(1)

    found = Cluster(arena_dir, ["a", "b"], "copies:1", timeout_s=1.0).outcomes(body)
    kinds = {restoring: replica.RestoreAborted, 1 - restoring: replica.PeerError}
    for rank, error in enumerate(found):
        assert isinstance(error, kinds[rank])
        assert f"rank {1 - rank}" in str(error)
        assert "all ranks must call restore() before the first save(), or none" in str(error)


def test_an_unsupported_value_is_named_and_can_be_mended(make):
    """A lambda in the state: StateError with rank, key path and type; without it saving works."""
    state = {"x": 1}
    with make(state) as one:
        state["deep"] = {"here": [0, lambda: None]}
        with pytest.raises(replica.StateError, match=r"rank 0.*deep.*function"):
            one.save(1)
        del state["deep"]
        one.save(1).wait("committed", COMMIT_S)


def test_a_name_that_is_drawn_at_each_launch_is_warned_of(arena_dir, monkeypatch, caplog):
    """``torchrun --standalone`` names a job by a fresh UUID: warned of; a chosen name: not."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0c4b8d7e-7f0e-4c57-9d3b-0f2f8f6f0a11")
    with replica.Checkpointer({"step": 0}, arena_dir=str(arena_dir)) as ckpt:
        ckpt.start()
    assert "draws this name anew" in caplog.text
    caplog.clear()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my-run")
    with replica.Checkpointer({"step": 0}, arena_dir=str(arena_dir)) as ckpt:
        ckpt.start()
    assert "draws this name anew" not in caplog.text
