"""What one rank of a mend asks, in what words, for how long, and what its words are taken for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recovery import mend
from recovery.actions import Await, CompareSet, Got, Missing, Publish, StoreLost
from recovery.commit import Exchange, ExchangeResult
from recovery.errors import RecoveryError
from recovery.layout import Fragment
from recovery.manifest import WHOLE
from recovery.mend import (
    DONE,
    FAILED,
    GIVEN_UP,
    WAITS_OF_OTHERS,
    MendOutcome,
    decided_keys,
    frozen_key,
    give_way,
    mend_session,
    over_key,
    parse_name,
    parse_result,
    result_key,
)
from recovery.repair import make_repair
from recovery.tree import dump
from tests.recovery.mending import GENERATION, NAME, SIZE, MendRig, inventory_of, stock_of
from tests.recovery.rigs import layout_of
from tests.recovery.world import Silent, World

RESULT, FROZEN, OVER = result_key(NAME, 0), frozen_key(NAME, 0), over_key(NAME)


def mended(layout, *faults, one_deadline=True, **facts):
    """Run a mend; return the world and how each rank ended."""
    world = World(0, MendRig(layout, **facts).sessions(), faults=faults, one_deadline=one_deadline)
    results = world.run()
    return world, {rank: result.value for rank, result in results.items()}


def waits_of(world, rank):
    """Return (what, watch, moving bytes, look) of each wait of a rank's session."""
    return [
        (a.what, a.watch, a.moving_bytes, a.look)
        for r, a, _ in world.trace
        if r == rank and isinstance(a, Await) and not a.keys[0].startswith("wire/")
    ]


def test_every_wait_is_named_bounded_by_bytes_and_ended_by_the_result():
    """Rank 0 of two groups sends one fragment: four waits and a look, each with what ends it.

    While others may move bytes the deadline is longer by them.
    """
    world, outcomes = mended(layout_of("copies:1", 1, 1, 1, 1), lost=[(1, (0, 0))])
    assert {outcome.state for outcome in outcomes.values()} == {DONE}
    assert waits_of(world, 0) == [
        ("reports for mending", FROZEN, 0, False),
        ("an end of it before it began", None, 0, True),
        ("READY", RESULT, SIZE, False),
        ("word of it", RESULT, SIZE, False),
        ("results of all groups", OVER, 2 * SIZE, False),
    ]


def test_who_sends_nothing_does_not_wait_for_ready():
    """Rank 1 receives only: its waits are those for the reports, for all words and all groups."""
    world, _ = mended(layout_of("copies:1", 1, 1, 1, 1), lost=[(1, (0, 0))])
    words = [what for what, *_ in waits_of(world, 1)]
    assert words == [
        "reports for mending",
        "an end of it before it began",
        "word of it",
        "results of all groups",
    ]


def test_what_a_rank_publishes_in_a_mend():
    """Its report, READY for what it receives, and what of its own was refused: nothing else."""
    layout = layout_of("copies:1", 1, 1)
    world, _ = mended(layout, lost=[(1, (0, 0))], refused={(1, 0): "no room"})
    told = {
        a.key: a.value
        for _, a, _ in world.trace
        if isinstance(a, Publish) and not a.key.startswith("wire/")
    }
    reports = {key for key in told if "/report/" in key}
    assert reports == {f"mend/{NAME}/0/report/{rank}" for rank in (0, 1)}
    assert {key: value for key, value in told.items() if key not in reports} == {
        f"mend/{NAME}/ready/0/0": b"no room",
        f"mend/{NAME}/sent/0": dump([[0, 0, 1, "no room"]]),
        f"mend/{NAME}/sent/1": dump([]),
    }


def test_several_refusals_stand_beside_each_other():
    """Two holders refuse: both are in the reason, in the order of owners and fragments."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    lost = [(1, (0, 0)), (2, (0, 1))]
    _, outcomes = mended(layout, lost=lost, refused={(1, 0): "full", (2, 0): "busy"})
    assert {outcome.reason for outcome in outcomes.values()} == {
        "rank 1 refused fragment 0 of owner 0: full; rank 2 refused fragment 1 of owner 0: busy"
    }
    assert {outcome.state for outcome in outcomes.values()} == {"part"}
    assert all(outcome.placed == frozenset() for outcome in outcomes.values())


def test_a_rank_that_falls_silent_is_named_by_those_who_wait():
    """Before READY, and before its last word: the reason says what did not come, and from whom."""
    layout = layout_of("copies:1", 1, 1)
    said = set()
    world, _ = mended(layout, lost=[(1, (0, 0))])
    for rank, at in world.places():
        if rank == 1:
            _, outcomes = mended(layout, Silent(1, at), lost=[(1, (0, 0))])
            said.add(outcomes[0].reason)
    assert "rank 0: no READY from rank 1" in said
    assert "rank 0: no word of having mended from rank 1" in said
    assert any("no bytes" in words or "no connection to rank 1" in words for words in said)


def test_to_give_way_ends_group_reports_and_all():
    """Three compare-and-sets: the group's result, no reports, and the end, with the reason."""
    steps = give_way("1.2.3", 4, "step 9 is saved")
    words = b"given up:-1:step 9 is saved"
    assert next(steps) == CompareSet("mend/1.2.3/4/result", words)
    assert steps.send(words) == CompareSet("mend/1.2.3/4/frozen", b"[]")
    assert steps.send(b"[]") == CompareSet("mend/1.2.3/over", words)
    with pytest.raises(StopIteration):
        steps.send(words)


def test_each_decided_key_is_removed_by_one_rank():
    """The first rank of a group removes what its group decided, rank 0 the end besides."""
    layout = layout_of("copies:1", 1, 1, 1, 1)
    first = {result_key(NAME, 0), frozen_key(NAME, 0)}
    second = {result_key(NAME, 1), frozen_key(NAME, 1)}
    assert [decided_keys(NAME, layout, rank) for rank in range(4)] == [
        first | {over_key(NAME)},
        set(),
        second,
        set(),
    ]


@pytest.mark.parametrize("raw", [b"", b"x" * 100, b"1.2", b"1.2.3.4", b"1.2.-3", b"\xff.1.1"])
def test_what_is_no_name_is_refused_and_shown(raw):
    """At most 64 bytes of it."""
    with pytest.raises(RecoveryError) as caught:
        parse_name(raw)
    assert str(caught.value) == f"name of a mend is {raw[:64]!r}"


@pytest.mark.parametrize(
    "rows",
    [
        7,
        {"a": 1},
        [7],
        ["abcd"],
        [[0, 0, 1]],
        [[0, 0, 1, 7]],
        [[0, 0, "1", "x"]],
        [[0, True, 1, "x"]],
        [[-1, 0, 1, "x"]],
        [[0, -1, 1, "x"]],
        [[0, 0, -1, "x"]],
        [[0, 0, 1, "x"], [0, 0, 1, "x", 1]],
        "x" * 300,
    ],
    ids=repr,
)
def test_a_word_of_refusals_that_makes_no_sense_is_refused(rows):
    """Other types, a part more or less, negative numbers: an error that names the rank."""
    with pytest.raises(RecoveryError) as caught:
        mend._refusals(dump(rows), 5)
    shown = repr(str(rows)[:200])
    assert str(caught.value) == f"word of rank 5 of having mended is {shown}"


def test_words_of_refusals_read_back():
    """Nothing, or fragments with their reasons; what is no JSON names the rank."""
    assert mend._refusals(b"[]", 5) == []
    assert mend._refusals(dump([[0, 1, 2, "full"]]), 5) == [(Fragment(0, 1, 2), "full")]
    with pytest.raises(RecoveryError, match="word of rank 5 is not JSON"):
        mend._refusals(b"{", 5)


class Alone:
    """Answers one rank's session by hand, from the store of a mend that went well.

    ``changes``: other answers by the words of a wait or the kind of an action.
    """

    def __init__(self, layout, rank, changes, **facts):
        self.world, _ = mended(layout, **facts)
        self.rig = MendRig(layout, **facts)
        self.rank, self.changes = rank, changes
        self.waits, self.actions = [], []

    def run(self):
        """Play to the end; return the outcome."""
        session, answer = mend_session(self.rig.context(self.rank)), None
        while True:
            lost = isinstance(answer, StoreLost)
            try:
                action = session.throw(answer) if lost else session.send(answer)
            except StopIteration as stop:
                return stop.value
            self.actions.append(action)
            answer = self.answer(action)

    def answer(self, action):
        """Return the answer to one action."""
        name = action.what if isinstance(action, Await) else type(action).__name__
        if isinstance(action, Await):
            self.waits.append(action.what)
        if name in self.changes:
            change = self.changes[name]
            return change(action) if callable(change) else change
        if isinstance(action, Await):
            if action.look:
                return Missing(action.keys)
            return Got({key: self.world.store[key] for key in action.keys})
        if isinstance(action, Exchange):
            return ExchangeResult(b"")
        return action.value if isinstance(action, CompareSet) else {}


def test_a_rank_whose_report_came_too_late_waits_for_the_others_as_long_as_they_may_take():
    """Reports without its own are frozen: so many deadlines for the result, and then it gives up.

    With the result there it takes that for its own word.
    """
    layout = layout_of("copies:1", 1, 1)
    reports = dump([[1, [], None, []]])
    late = {"CompareSet": lambda a: reports if a.key == FROZEN else a.value}
    what = "the others' result of mending"
    play = Alone(layout, 0, {**late, what: lambda a: Missing(a.keys)})
    outcome = play.run()
    assert play.waits.count(what) == WAITS_OF_OTHERS
    waits = [a for a in play.actions if isinstance(a, Await) and a.what == what]
    assert {(a.keys, a.watch, a.moving_bytes, a.look) for a in waits} == {
        ((RESULT,), None, 0, False)
    }
    assert (outcome.state, outcome.protection) == (FAILED, -1)
    assert outcome.reason == ("rank 0: its report came too late, and no result of the others came")
    play = Alone(layout, 0, {**late, what: Got({RESULT: b"done:0:by others"})})
    outcome = play.run()
    assert (outcome.state, outcome.protection, outcome.reason) == (DONE, 0, "by others")
    assert outcome.agreed


def test_a_group_that_never_ends_is_named():
    """The other group's result does not come in all those deadlines: failed, naming it."""
    layout = layout_of("copies:1", 1, 1, 1, 1)
    play = Alone(layout, 0, {"results of all groups": lambda a: Missing(a.keys[1:])})
    outcome = play.run()
    assert play.waits.count("results of all groups") == WAITS_OF_OTHERS
    assert (outcome.state, outcome.reason) == (FAILED, "no result of coding groups [1]")


def test_an_end_that_stands_before_it_began_is_obeyed():
    """Somebody gave way before the reports were in: nothing is planned and nothing moved."""
    layout = layout_of("copies:1", 1, 1)
    words = b"given up:-1:a save"
    play = Alone(layout, 0, {"an end of it before it began": Got({RESULT: words})})
    assert play.run() == MendOutcome(GIVEN_UP, -1, "a save", agreed=True)


def test_a_report_that_vanishes_ends_it_with_that_word():
    """At the deadline one report lacks, and at the look after it another: given up by this rank."""
    layout = layout_of("copies:1", 1, 1)
    play = Alone(layout, 0, {"reports for mending": lambda a: Missing(a.keys[-1:])})
    assert play.run().reason == "rank 0: a report for mending has vanished"


def test_a_driver_that_answers_something_else_is_told():
    """An answer that is no answer to a wait is our own mistake: it raises, and shows it."""
    layout = layout_of("copies:1", 1, 1)
    play = Alone(layout, 0, {"word of it": "no answer"})
    with pytest.raises(TypeError, match="the driver answered an Await with 'no answer'"):
        play.run()


def repair_of(layout, lost):
    """Return the repair of group 0 when these places are empty."""
    stock = stock_of(layout)
    for rank, place in lost:
        stock[rank].discard(place)
    alive = layout.ranks_of_group(0)
    return make_repair(inventory_of(layout, stock), GENERATION, layout, 0, alive)


def test_a_repair_prints_what_is_read_and_sent_and_what_lacks():
    """One owner that reads and sends, one that reads, one that sends: a line each, in full."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    lost = [(0, (0, WHOLE)), (1, (0, 0)), (1, (1, WHOLE)), (1, (2, 1)), (0, (2, 0))]
    made = repair_of(layout, lost)
    assert made.describe() == (
        f"mend {GENERATION.describe()}\n"
        "owner 0: reads 1<-2; sends 0->1\n"
        "owner 1: reads 0<-2\n"
        "owner 2: sends 0->0, 1->1"
    )
    assert repair_of(layout, []).describe() == f"mend {GENERATION.describe()}"


def test_a_repair_of_an_owner_that_is_gone_says_so():
    """No copy and no fragment of owner 0 is left: one line more."""
    layout = layout_of("copies:1", 1, 1)
    made = repair_of(layout, [(0, (0, WHOLE)), (1, (0, 0))])
    lacking = "owner 0: 0 of 1 distinct fragments and no whole copy"
    assert made.describe() == f"mend {GENERATION.describe()}\n{lacking}"


def test_the_most_that_a_group_could_move_is_a_shard_and_all_of_its_fragments():
    """Whatever is lost: every owner's shard once, and n fragments of it."""
    for redundancy, nodes in (("copies:1", 2), ("stripe:1+1", 3), ("stripe:2+1", 4)):
        layout = layout_of(redundancy, *[1] * nodes)
        made = repair_of(layout, [])
        assert made.moving_bytes_max() == SIZE * (layout.redundancy.n + 1)


def test_the_look_after_the_deadline_asks_for_those_that_came_and_does_not_wait():
    """Rank 1's report lacks at the deadline: the two others are read at once and frozen."""
    layout = layout_of("copies:2", 1, 1, 1)
    asked = []

    def reports(action):
        asked.append((action.keys, action.look))
        here = [key for key in action.keys if not key.endswith("/1")]
        if len(here) < len(action.keys):
            return Missing(tuple(set(action.keys) - set(here)))
        return Got({key: play.world.store[key] for key in here})

    play = Alone(layout, 0, {"reports for mending": reports})
    play.run()
    keys = tuple(f"mend/{NAME}/0/report/{rank}" for rank in range(3))
    assert asked == [(keys, False), ((keys[0], keys[2]), True)]


@pytest.mark.parametrize(
    ("reports", "ranks"),
    [
        ([[0, [], None, []], [0, [], None, []]], "(0, 0)"),
        ([[0, [], None, []], [2, [], None, []]], "(0, 2)"),
        ([[7, [], None, []]], "(7,)"),
    ],
)
def test_frozen_reports_of_ranks_that_are_not_of_the_group_are_refused(reports, ranks):
    """One rank twice, or one of another group: failed, and the ranks are told."""
    layout = layout_of("copies:1", 1, 1, 1, 1)
    frozen = {"CompareSet": lambda a: dump(reports) if a.key == FROZEN else a.value}
    play = Alone(layout, 0, frozen)
    play.run()
    tried = [a.value for a in play.actions if isinstance(a, CompareSet) and a.key == RESULT]
    words = f"reports of ranks {ranks} were frozen for group 0"
    assert tried == [f"failed:-1:rank 0: {words}".encode()]


def test_a_report_that_is_no_json_is_called_a_report():
    """What another rank has published cannot be read: failed, and the words say what it was."""
    layout = layout_of("copies:1", 1, 1)
    play = Alone(layout, 0, {"reports for mending": lambda a: Got(dict.fromkeys(a.keys, b"{"))})
    outcome = play.run()
    assert outcome.state == FAILED
    assert outcome.reason.startswith("rank 0: a report is not JSON")


def test_words_of_another_rank_that_cannot_be_read_name_it():
    """The list of what was refused is garbage: failed, naming whose it is."""
    layout = layout_of("copies:1", 1, 1)

    def words(action):
        return Got({key: b"{" if key.endswith("/1") else b"[]" for key in action.keys})

    outcome = Alone(layout, 0, {"word of it": words}).run()
    assert outcome.reason.startswith("rank 0: word of rank 1 is not JSON")


@pytest.mark.parametrize("raw", [b"", b"done", b"done:", b"done:x:", b"over:1:", b"x" * 100])
def test_an_end_that_cannot_be_read_is_a_failure_that_nobody_agreed_on(raw):
    """Garbage where the end stands: failed, nothing known, what was made is told all the same."""
    layout = layout_of("copies:1", 1, 1)
    end = {"CompareSet": lambda a: raw if a.key == OVER else a.value}
    outcome = Alone(layout, 0, end, lost=[(1, (0, 0))]).run()
    assert (outcome.state, outcome.protection, outcome.agreed) == (FAILED, -1, False)
    assert outcome.reason == f"result of a mend is {raw[:64]!r}"
    assert outcome.repair is not None
    assert outcome.placed == {Fragment(0, 0, 1)}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"done:2:", ("done", 2, "")),
        (b"part:-1:a: b", ("part", -1, "a: b")),
        (b"ranks lost:999999999:x", ("ranks lost", 999_999_999, "x")),
        (b"failed:-1:\xff", ("failed", -1, "\ufffd")),
    ],
)
def test_results_are_read_whatever_their_words(raw, expected):
    """State and number are checked, up to nine digits; the words are shown as they can be."""
    assert parse_result(raw) == expected


def test_the_store_lost_at_the_end_leaves_what_was_made():
    """The fragments lie there, whatever became of the result: repair and placed are told."""
    layout = layout_of("copies:1", 1, 1)

    def lost(action):
        if action.key == OVER:
            return StoreLost("no answer")
        return action.value

    outcome = Alone(layout, 0, {"CompareSet": lost}, lost=[(1, (0, 0))]).run()
    assert (outcome.state, outcome.protection) == (FAILED, -1)
    assert outcome.reason == "the store was lost: no answer"
    assert outcome.repair is not None
    assert outcome.placed == {Fragment(0, 0, 1)}
    assert not outcome.agreed


def test_every_failure_of_a_rank_is_told_each_once():
    """Connections, streams and groups: the reasons stand beside each other."""
    layout = layout_of("copies:2", 1, 1, 1)
    cut_off = {1: "no way to rank 1", 2: "no way to rank 2"}
    outcome = Alone(layout, 0, {"Connect": cut_off}).run()
    assert outcome.reason == "rank 0: no way to rank 1; no way to rank 2"
    failed = ExchangeResult(b"", {}, ("a stream", "another stream"))
    assert Alone(layout, 0, {"Exchange": failed}).run().reason == "rank 0: a stream; another stream"
    layout = layout_of("copies:1", 1, 1, 1, 1)
    results = {RESULT: b"part:0:one", result_key(NAME, 1): b"failed:-1:two"}
    outcome = Alone(layout, 0, {"results of all groups": Got(results)}).run()
    assert (outcome.state, outcome.protection, outcome.reason) == (FAILED, -1, "one; two")


def test_a_refusal_that_is_no_text_is_told_with_a_mark():
    """READY of another process is no UTF-8: the fragment is not sent, and the word is passed on."""
    layout = layout_of("copies:1", 1, 1)
    play = Alone(
        layout,
        0,
        {"READY": lambda a: Got(dict.fromkeys(a.keys, b"\xff"))},
        lost=[(1, (0, 0))],
    )
    play.run()
    told = [a.value for a in play.actions if isinstance(a, Publish) and a.key.endswith("/sent/0")]
    assert told == [dump([[0, 0, 1, "\ufffd"]])]


def test_a_group_that_gave_up_does_not_wait_for_the_others():
    """Given up means that something waits for this rank: it sets the end and goes."""
    layout = layout_of("copies:1", 1, 1, 1, 1)
    words = b"given up:-1:a save"
    play = Alone(layout, 0, {"CompareSet": lambda a: words if a.key == RESULT else a.value})
    assert play.run().state == GIVEN_UP
    assert "results of all groups" not in play.waits


def test_a_silent_group_is_no_word_of_protection():
    """Of what the silent group holds nothing is known, however well this one is protected."""
    layout = layout_of("copies:1", 1, 1, 1, 1)
    play = Alone(layout, 0, {"results of all groups": lambda a: Missing(a.keys[1:])})
    play.run()
    tried = [a.value for a in play.actions if isinstance(a, CompareSet) and a.key == OVER]
    assert tried == [b"failed:-1:no result of coding groups [1]"]


def test_bytes_are_summed_over_all_that_a_rank_sends_serves_and_takes():
    """Rank 0 lost its shard and others' fragments: it reads, sends and takes; counted by hand."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    # Owner 0 reads fragment 0 from rank 1 and sends fragment 1 to rank 2; owner 1 and 2 send to 0.
    lost = [(0, (0, WHOLE)), (2, (0, 1)), (0, (1, 1)), (0, (2, 0))]
    made = repair_of(layout, lost)
    assert made.describe().splitlines()[1:] == [
        "owner 0: reads 0<-1; sends 1->2",
        "owner 1: sends 1->0",
        "owner 2: sends 0->0",
    ]
    assert made.moving_bytes() == 4 * SIZE  # rank 0: one read, one sent, two taken
    # Rank 2 serves one read and sends two fragments: three in all, more than anybody else.
    made = repair_of(layout, [(0, (0, WHOLE)), (1, (0, 0)), (0, (2, 0)), (1, (2, 1))])
    assert made.describe().splitlines()[1:] == [
        "owner 0: reads 1<-2; sends 0->1",
        "owner 2: sends 0->0, 1->1",
    ]
    assert made.moving_bytes() == 3 * SIZE


def test_the_moves_of_a_repair_are_a_plan_of_that_generation_for_every_rank():
    """Each rank has its place in it, with nothing to read where it needs nothing."""
    layout = layout_of("stripe:1+1", 1, 1, 1, 1, 1, 1)
    made = repair_of(layout, [(0, (0, WHOLE))])
    moves = made.moves()
    assert moves.generation == GENERATION
    assert [rebuild.owner for rebuild in moves.rebuilds] == list(range(6))
    assert [len(rebuild.reads) for rebuild in moves.rebuilds] == [1, 0, 0, 0, 0, 0]
    kinds = [rebuild.kind.shard_bytes for rebuild in moves.rebuilds]
    assert kinds == [SIZE, SIZE, SIZE, 0, 0, 0]
    assert moves.describe().startswith(f"restore {GENERATION.describe()}\nowner 0: {SIZE} bytes, ")
    assert repair_of(layout, []).moves() is None


def test_a_fragment_in_the_own_arena_is_no_own_copy():
    """Rank 0 holds a fragment of its own shard and not the whole: it has to read the shard."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    stock = stock_of(layout)
    stock[0].discard((0, WHOLE))
    stock[0].add((0, 0))
    made = make_repair(inventory_of(layout, stock), GENERATION, layout, 0, (0, 1, 2))
    assert made.stripes[0].rebuild.reads
    assert made.moves() is not None


def test_a_copy_at_another_rank_is_no_own_copy():
    """A whole copy of owner 0 lies at rank 1 only: it is read from there."""
    layout = layout_of("stripe:1+1", 1, 1, 1)
    stock = stock_of(layout)
    stock[0].discard((0, WHOLE))
    stock[1].add((0, WHOLE))
    made = make_repair(inventory_of(layout, stock), GENERATION, layout, 0, (0, 1, 2))
    (read,) = made.stripes[0].rebuild.reads
    assert (read.fragment, read.source) == (WHOLE, 1)


def test_a_repair_of_nobody_protects_nothing():
    """No rank of the group was there: no loss can be borne, and that is a number."""
    layout = layout_of("copies:1", 1, 1)
    made = make_repair(inventory_of(layout, {}), GENERATION, layout, 0, ())
    assert made.moving_bytes_max() == 0
    assert made.protection(()) == -1
    assert replace(made, protections={}).protection(()) == 0


def test_a_rank_that_has_no_repair_waits_for_other_groups_without_bytes_to_count():
    """Its group failed before anything was planned: the plain deadline for the others."""
    layout = layout_of("copies:1", 1, 1, 1, 1)
    play = Alone(layout, 0, {"reports for mending": lambda a: Missing(a.keys[-1:])})
    play.run()
    (wait,) = [a for a in play.actions if isinstance(a, Await) and a.what.startswith("results")]
    assert (wait.watch, wait.moving_bytes) == (OVER, 0)
