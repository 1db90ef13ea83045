"""One generation's states, admissions and keys: the table, and a thousand saves of four ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from recovery.admission import Admission, admission_key, parse_admission, propose
from recovery.commit import (
    KeyLog,
    abort_value,
    decision_key,
    held_root,
    merge_held,
    parse_decision,
)
from recovery.errors import RecoveryError
from recovery.ledger import (
    ABORTED,
    ADMITTED,
    COMMITTED,
    HELD,
    STAGED,
    TRANSITIONS,
    Ledger,
)
from recovery.manifest import Generation, generation_id
from recovery.tree import FANOUT

EVENTS = (ADMITTED, STAGED, HELD, COMMITTED, ABORTED, "restored", "")
ALLOWED = {
    (ADMITTED, STAGED),
    (ADMITTED, ABORTED),
    (STAGED, HELD),
    (STAGED, ABORTED),
    (HELD, COMMITTED),
    (HELD, ABORTED),
}
BASE, CURRENT, OLDER = (Generation(1, step, f"{step:032x}") for step in (2, 3, 1))


@pytest.mark.parametrize("state", list(TRANSITIONS))
@pytest.mark.parametrize("event", EVENTS)
def test_the_table_allows_six_events_and_no_other(state, event):
    """Every state with every event: the six of P1 go on, all others raise and change nothing."""
    ledger = Ledger(BASE, CURRENT, state)
    if (state, event) in ALLOWED:
        after = ledger.apply(event)
        assert after == Ledger(CURRENT if event == COMMITTED else BASE, CURRENT, event)
    else:
        with pytest.raises(RecoveryError, match=f"event {event!r} in state {state!r}"):
            ledger.apply(event)
    assert ledger == Ledger(BASE, CURRENT, state)


@pytest.mark.parametrize("state", list(TRANSITIONS))
def test_a_generation_is_admitted_only_when_the_last_one_is_decided(state):
    """Committed and aborted allow the next one (P2); in between an admission raises."""
    ledger, following = Ledger(BASE, CURRENT, state), Generation(1, 4, "4" * 32)
    if state in (COMMITTED, ABORTED):
        assert ledger.admit(following) == Ledger(BASE, following, ADMITTED)
    else:
        with pytest.raises(RecoveryError, match="admitted while"):
            ledger.admit(following)


@pytest.mark.parametrize(
    ("state", "base", "current"),
    [
        (ADMITTED, BASE, CURRENT),
        (STAGED, BASE, CURRENT),
        (HELD, BASE, CURRENT),
        (ABORTED, BASE, CURRENT),
        (COMMITTED, CURRENT, CURRENT),
        (ABORTED, None, None),
        (HELD, None, CURRENT),
    ],
)
def test_nothing_of_base_or_of_an_undecided_generation_is_reused(state, base, current):
    """Which slots may be overwritten in each state: never base, the newest once it is decided."""
    ledger = Ledger(base, current, state)
    assert ledger.reusable(None)
    assert ledger.reusable(OLDER)
    if base:
        assert not ledger.reusable(base)
    if current and current != base:
        assert ledger.reusable(current) == (state == ABORTED)
    assert ledger.reusable(BASE) == (base != BASE)


def test_a_rank_that_reported_held_keeps_both_slots_whatever_it_thinks():
    """P1's sequence: HELD, a timeout of its own; only the decision that it reads frees a slot."""
    ledger = Ledger(BASE).admit(CURRENT).apply(STAGED).apply(HELD)
    assert not ledger.reusable(BASE)
    assert not ledger.reusable(CURRENT)
    assert not ledger.decided
    committed, aborted = ledger.apply(COMMITTED), ledger.apply(ABORTED)
    assert (committed.reusable(BASE), committed.reusable(CURRENT)) == (True, False)
    assert (aborted.reusable(BASE), aborted.reusable(CURRENT)) == (False, True)


@pytest.mark.parametrize(
    "admission", [Admission(True, 1), Admission(False, 0), Admission(True, 10**17)]
)
def test_admissions_read_back(admission):
    """What the store holds is the admission that was proposed."""
    assert parse_admission(admission.encode()) == admission


@pytest.mark.parametrize(
    "raw",
    [b"", b"take", b"take:", b"take:-1", b"take:x", b"maybe:1", b"skip:" + b"9" * 30, b"\xff:1"],
)
def test_other_admissions_are_refused(raw):
    """Bytes of the store that are no admission raise, naming what was expected."""
    with pytest.raises(RecoveryError, match="expected take:N or skip:N"):
        parse_admission(raw)


def test_decisions_read_back_and_others_are_refused():
    """Committed, or aborted with its reason cut to a bound; anything else raises."""
    assert parse_decision(COMMITTED.encode()) == (COMMITTED, "")
    assert parse_decision(abort_value("a: b")) == (ABORTED, "a: b")
    assert parse_decision(abort_value("x" * 10**6)) == (ABORTED, "x" * 2000)
    for raw in (b"", b"held", b"commit", b"\xff\xff"):
        with pytest.raises(RecoveryError, match="expected committed or aborted"):
            parse_decision(raw)
    with pytest.raises(RecoveryError) as caught:
        parse_decision(b"x" * 100)
    assert str(caught.value) == f"decision is {b'x' * 64!r}, expected committed or aborted"


@pytest.mark.parametrize("world", [1, 2, FANOUT, FANOUT + 1, FANOUT * FANOUT + 1])
def test_the_agreed_root_changes_with_every_arena(world):
    """One incarnation less alike changes what the root expects; so does their order."""
    arenas = [f"{rank:032x}" for rank in range(world)]
    root = held_root(arenas)
    for rank in {0, world // 2, world - 1}:
        assert held_root([*arenas[:rank], "f" * 32, *arenas[rank + 1 :]]) != root
    if world > 1:
        assert held_root(arenas[::-1]) != root
        assert held_root(arenas[:2]) == merge_held([a.encode() for a in arenas[:2]])


def test_keys_go_when_a_generation_two_later_is_committed():
    """Keys of 1 and 2 stay while 2 and 3 commit, go with 3 and 4; each is told once (P5)."""
    log = KeyLog()
    for sequence in (1, 2, 3, 4, 7):
        log.open(sequence).update({f"b{sequence}", f"a{sequence}"})
        log.open(sequence).add(f"c{sequence}")
    assert log.expired(1) == log.expired(2) == []
    assert log.expired(3) == ["a1", "b1", "c1"]
    assert log.expired(3) == []
    assert log.expired(6) == ["a2", "a3", "a4", "b2", "b3", "b4", "c2", "c3", "c4"]
    assert log.expired(7) == log.expired(8) == []
    assert log.expired(9) == ["a7", "b7", "c7"]
    assert log.entries == []


class Store(dict):
    """A store that remembers what was deleted: nobody may ask for that again."""

    def __init__(self):
        super().__init__()
        self.gone = set()

    def compare_set(self, key, value):
        """Set if unset; a deleted key would be decided a second time, so that is an error."""
        assert key not in self.gone, f"{key} was deleted and is asked for again"
        return self.setdefault(key, value)

    def delete(self, key):
        """Delete, and remember."""
        self.gone.add(key)
        self.pop(key, None)


@dataclass
class Rank:
    """One rank: what it knows, and when it will have read the decision that is under way."""

    number: int
    ledger: Ledger = field(default_factory=Ledger)
    sequence: int = 0
    reads_at: float = 0.0
    log: KeyLog = field(default_factory=KeyLog)
    taken: list = field(default_factory=list)

    def read(self, store):
        """Read the decision of the newest attempt, and delete what that allows to delete."""
        state, _ = parse_decision(store[decision_key(self.ledger.current)])
        self.ledger = self.ledger.apply(state)
        if state == COMMITTED:
            for key in self.log.expired(self.sequence):
                store.delete(key)

    def save(self, step, now, store):
        """Ask for admission at the time ``now``; True when the step is taken."""
        if not self.ledger.decided and self.reads_at <= now:
            self.read(store)
        proposal = propose(self.sequence, self.ledger)
        admission = parse_admission(store.compare_set(admission_key(step), proposal.encode()))
        self.sequence = admission.sequence
        if self.number == 0:
            self.log.open(self.sequence).add(admission_key(step))
        if not admission.take:
            return False
        if not self.ledger.decided:
            self.read(store)
        identity = generation_id("job", "0" * 32, step, self.sequence)
        self.ledger = self.ledger.admit(Generation(1, step, identity)).apply(STAGED).apply(HELD)
        if self.number == 0:
            self.log.open(self.sequence).add(decision_key(self.ledger.current))
        self.taken.append(self.ledger.current)
        return True


STEP_S, SKEW_S = 1.2, 0.4


def train(seed, saves, abort_share=0.0):
    """Let four ranks train and save each step until so many are taken.

    A step takes about one second and ends together; each rank comes to its save at a time of its
    own, ``SKEW_S`` apart at most. A save takes two to six seconds after the last rank came, and
    each rank reads the decision up to half a second later. Returns the ranks, the store and
    (begun, ended, committed) of every save.
    """
    rng, store, ranks = random.Random(seed), Store(), [Rank(number) for number in range(4)]
    done, now, step = [], 0.0, 0
    while len(done) < saves:
        step, now = step + 1, now + rng.uniform(0.8, STEP_S)
        arrivals = sorted((now + rng.uniform(0, SKEW_S), rank.number) for rank in ranks)
        answers = {number: ranks[number].save(step, at, store) for at, number in arrivals}
        assert len(set(answers.values())) == 1
        now = arrivals[-1][0]
        if answers[0]:
            ends = now + rng.uniform(2, 6)
            word = abort_value("drawn") if rng.random() < abort_share else COMMITTED.encode()
            store.compare_set(decision_key(ranks[0].ledger.current), word)
            for rank in ranks:
                rank.reads_at = ends + rng.uniform(0, 0.5)
            last = max(rank.reads_at for rank in ranks)
            done.append((arrivals[0][0], last, word == COMMITTED.encode()))
    return ranks, store, done


@pytest.mark.parametrize("seed", range(3))
def test_four_ranks_take_the_same_steps_and_never_fall_behind(seed):
    """A thousand saves, each longer than a step: one set of steps, newest never two saves old (P2).

    The newest committed one is oldest when its follower commits: two saves, and the one step until
    the first rank to arrive had read the decision.
    """
    ranks, _, done = train(seed, 1000)
    assert all(rank.taken == ranks[0].taken for rank in ranks)
    assert len(ranks[0].taken) == 1000
    assert len({generation.id for generation in ranks[0].taken}) == 1000
    for (begun, ended, _), (next_begun, next_ended, _) in pairwise(done):
        two_saves_s = (ended - begun) + (next_ended - next_begun)
        assert next_ended - begun <= two_saves_s + STEP_S + 2 * SKEW_S


def test_aborts_stop_nobody_and_no_deleted_key_is_asked_for():
    """Every third save aborts: the ranks still take the same steps, and the store stays small."""
    ranks, store, done = train(7, 1000, abort_share=0.33)
    assert 500 < sum(committed for _, _, committed in done) < 800
    assert all(rank.taken == ranks[0].taken for rank in ranks)
    assert len(store.gone) > 1000
    assert len(store) < 200


def test_the_first_to_arrive_decides_by_what_it_has_read():
    """Decided: take with the next sequence; undecided: skip, and the sequence stays."""
    assert propose(4, Ledger(BASE, CURRENT, COMMITTED)) == Admission(True, 5)
    assert propose(4, Ledger(BASE, CURRENT, ABORTED)) == Admission(True, 5)
    assert propose(0, Ledger()) == Admission(True, 1)
    for state in (ADMITTED, STAGED, HELD):
        assert propose(4, Ledger(BASE, CURRENT, state)) == Admission(False, 4)
