"""One rank's save session, answered by hand: what it asks, in what words, and how it ends."""

from __future__ import annotations

import pytest

from recovery.actions import Await, CompareSet, Decided, Got, Missing, Publish, StoreLost
from recovery.agree import agree_session
from recovery.blame import not_come
from recovery.commit import (
    Connect,
    Exchange,
    ExchangeResult,
    KeyLog,
    Prepared,
    SaveOutcome,
    Settle,
    decision_key,
    resolve,
    save_session,
)
from recovery.errors import RecoveryError
from recovery.offer import encode_offer
from recovery.tree import gather
from tests.recovery.rigs import SaveRig, layout_of

MINE = b"d" * 16


class Play:
    """Answers the actions of rank 1 of stripe:1+1 on three nodes as if nothing had failed.

    ``changes`` has other answers by key or by kind of action; a callable is called with the
    action, and an exception is thrown into the session.
    """

    def __init__(self, **changes):
        self.rig = SaveRig(layout_of("stripe:1+1", 1, 1, 1))
        self.context = self.rig.context(1)
        self.layout, self.generation = self.rig.layout, self.rig.generation
        gen = self.generation.id
        self.key = decision_key(self.generation)
        self.held, self.sent = self.layout.held_by(1), self.layout.sent_by(1)
        self.answers = {
            **{f"offer/{gen}/{rank}": self.offer(rank) for rank in range(3)},
            **{f"ack/{gen}/1/{f.index}": MINE.hex().encode() for f in self.sent},
            "Connect": {},
            "Settle": dict.fromkeys(self.held, ""),
            "Exchange": ExchangeResult(MINE, dict.fromkeys(self.held, b"x")),
            self.key: b"committed",
        }
        self.changes = changes
        self.actions = []

    def offer(self, rank):
        """Return what ``rank`` offers."""
        return encode_offer(self.layout.redundancy.code, self.rig.sizes[rank], self.rig.base)

    def run(self, session=None):
        """Play to the end; return what the session returns."""
        session = session or save_session(self.context)
        step, value = session.send, None
        while True:
            try:
                action = step(value)
            except StopIteration as stop:
                return stop.value
            self.actions.append(action)
            value = self.answer(action)
            step = session.throw if isinstance(value, Exception) else session.send

    def answer(self, action):
        """Return the answer to one action."""
        name = type(action).__name__
        if isinstance(action, Await):
            change = self.changes.get("look" if action.look else action.what.split()[-1])
            if change is not None:
                return change(action) if callable(change) else change
            return Got({key: self.answers.get(key, b"") for key in action.keys})
        if name in self.changes:
            change = self.changes[name]
            return change(action) if callable(change) else change
        if isinstance(action, CompareSet):
            return action.value
        return self.answers.get(name)

    def tried(self):
        """Return what was tried as the decision."""
        return [a.value.decode() for a in self.actions if isinstance(a, CompareSet)]


def missing(action):
    """Answer a wait: nothing came."""
    return Missing(action.keys)


def test_a_save_asks_in_one_order():
    """Offer, connections, slots, READY, bytes, acknowledgements, HELD, decision; then the outcome.

    Every wait is named in words and ends with the decision; the last one is for the decision.
    """
    play = Play()
    assert play.run() == SaveOutcome("committed", "", held=True)
    kinds = [type(action) for action in play.actions if not isinstance(action, Publish)]
    assert kinds == [Await, Connect, Settle, Await, Exchange, Await, Prepared, Await]
    waits = [action for action in play.actions if isinstance(action, Await)]
    assert [wait.what for wait in waits] == ["offer", "READY", "acknowledgement", "the decision"]
    assert [wait.watch for wait in waits] == [play.key, play.key, play.key, None]
    assert not any(wait.look for wait in waits)


def test_what_a_rank_publishes_in_a_save():
    """Its offer with the base, READY and digest for each fragment held, HELD with its arena."""
    play = Play()
    play.run()
    gen = play.generation.id
    told = {a.key: a.value for a in play.actions if isinstance(a, Publish)}
    assert told == {
        f"offer/{gen}/1": play.offer(1),
        **{f"ready/{gen}/{f.owner}/{f.index}": b"" for f in play.held},
        **{f"ack/{gen}/{f.owner}/{f.index}": b"x".hex().encode() for f in play.held},
        f"held/{gen}/0/1": play.context.incarnation.encode(),
    }


@pytest.mark.parametrize("what", ["offer", "READY", "acknowledgement"])
def test_a_wait_that_nobody_explains_names_whom_it_waited_for(what):
    """The keys came just after the deadline, so nobody is late: the direct cause is told."""
    play = Play(**{what: missing})
    outcome = play.run()
    said = f"rank 1: {not_come(what, [0, 2], ' by the deadline')}"
    assert play.tried() == [f"aborted:{said}"]
    assert outcome == SaveOutcome("aborted", said)
    looks = [action for action in play.actions if isinstance(action, Await) and action.look]
    gen = play.generation.id
    assert all(f"/{gen}/" in key for look in looks for key in look.keys)
    assert len(looks) == 3


def test_a_decision_elsewhere_ends_every_wait_with_that_word():
    """The watched decision stands: the rank tries an abort that says so, and obeys what stands."""
    for what in ("offer", "READY", "acknowledgement"):
        play = Play(**{what: Decided(b"aborted:why"), "CompareSet": b"aborted:why"})
        assert play.run() == SaveOutcome("aborted", "why")
        assert play.tried() == ["aborted:rank 1: decided elsewhere"]


@pytest.mark.parametrize(
    ("at", "held"),
    [("offer", False), ("READY", False), ("Exchange", False), ("Prepared", False)],
)
def test_the_store_lost_before_held_is_undecided_and_says_so(at, held):
    """State HELD keeps every slot; ``held`` tells that this rank never reported it (P1)."""
    play = Play(**{at: StoreLost("no answer")})
    outcome = play.run()
    assert outcome == SaveOutcome("held", "the store was lost: no answer", held)
    assert outcome.held is held


def test_the_store_lost_after_held_is_undecided_and_was_held():
    """The last wait fails: this rank has reported HELD and may have been counted."""
    play = Play(decision=StoreLost("no answer"))
    outcome = play.run()
    assert (outcome.state, outcome.held) == ("held", True)
    assert outcome.reason == "the store was lost: no answer"


def test_a_commit_without_this_rank_is_an_error_and_never_an_outcome():
    """It tries to abort and reads "committed" although it never reported HELD: it raises."""
    play = Play(offer=missing, CompareSet=b"committed")
    with pytest.raises(RecoveryError, match=r"step 2 .* was committed without rank 1"):
        play.run()


def test_every_connection_that_failed_and_every_refusal_is_told():
    """Reasons of several peers stand beside each other, each once."""
    play = Play(Connect={0: "no way to rank 0", 2: "no way to rank 2"})
    play.run()
    assert play.tried() == ["aborted:rank 1: no way to rank 0; no way to rank 2"]
    play = Play()
    play.answers["Settle"] = dict.fromkeys(play.held, "no room")
    play.run()
    owners = "; ".join(f"owner {f.owner}: no room" for f in play.held)
    assert play.tried() == [f"aborted:rank 1: cannot hold what was offered: {owners}"]
    gen = play.generation.id
    said = {a.key: a.value for a in play.actions if isinstance(a, Publish)}
    assert {said[f"ready/{gen}/{f.owner}/{f.index}"] for f in play.held} == {b"no room"}


def test_a_refusal_that_is_no_text_is_told_all_the_same():
    """Bytes that are no UTF-8 from another process: shown with a mark, and the holder named."""
    play = Play(READY=lambda action: Got(dict.fromkeys(action.keys, b"\xff!")))
    play.run()
    assert play.tried() == ["aborted:rank 1: rank 2 refused fragment 0: \ufffd!"]


def test_bytes_that_failed_are_told_with_who_is_late_only_if_somebody_is():
    """What the exchange says comes first; nobody late adds nothing, a late one is named."""
    failed = ExchangeResult(MINE, {}, ("no bytes from rank 0", "rank 2 cut off"))
    play = Play(Exchange=failed)
    play.run()
    assert play.tried() == ["aborted:rank 1: no bytes from rank 0; rank 2 cut off"]
    play = Play(Exchange=failed, look=lambda action: Missing(action.keys[:1]))
    play.run()
    said = f"no bytes from rank 0; rank 2 cut off; {not_come('offer', [0])}"
    assert play.tried() == [f"aborted:rank 1: {said}"]


def test_to_resolve_is_to_try_an_abort_and_to_obey():
    """After an outage: the abort with its reason is tried; a commit that stands is obeyed."""
    play = Play()
    assert play.run(resolve(play.context, "lost")) == SaveOutcome("aborted", "rank 1: lost")
    assert play.actions == [CompareSet(play.key, b"aborted:rank 1: lost")]
    play = Play(CompareSet=b"committed")
    assert play.run(resolve(play.context, "lost")) == SaveOutcome("committed", "")


def test_the_root_watches_the_decision_while_it_gathers_held():
    """Rank 0 waits for HELD of all: an abort by another ends that wait, and is obeyed as it is."""
    play = Play()
    play.context = play.rig.context(0)
    play.held, play.sent = play.layout.held_by(0), play.layout.sent_by(0)
    play.answers["Settle"] = dict.fromkeys(play.held, "")
    play.answers["Exchange"] = ExchangeResult(MINE, dict.fromkeys(play.held, b"x"))
    gen = play.generation.id
    play.answers |= {f"ack/{gen}/0/{f.index}": MINE.hex().encode() for f in play.sent}
    play.changes = {"0": Decided(b"aborted:why")}
    assert play.run() == SaveOutcome("aborted", "why", held=True)
    (wait,) = [a for a in play.actions if isinstance(a, Await) and a.what.endswith("level 0")]
    assert wait.watch == play.key
    assert wait.keys == tuple(f"held/{gen}/0/{rank}" for rank in range(3))


def test_waits_of_a_gather_and_of_an_agreement_say_what_they_wait_for():
    """The level of the tree, and the result: the words that a log shows while a rank waits."""
    first = gather("g", 0, 2, b"", b"".join, watch="w", moving_bytes=7)
    next(first)
    wait = first.send(None)
    assert (wait.what, wait.watch, wait.moving_bytes, wait.look) == ("g of level 0", "w", 7, False)
    second = agree_session("a", 1, 2, b"", b"".join)
    next(second)
    assert second.send(None) == Await(("a/result",), "the result of a")


def test_keys_of_one_generation_are_one_entry():
    """Opened twice for one sequence and once for the next: two sets of keys."""
    log = KeyLog()
    first = log.open(4)
    assert log.open(4) is first
    assert log.open(5) is not first
    assert [sequence for sequence, _ in log.entries] == [4, 5]


def as_root(play):
    """Make ``play`` that of rank 0, which gathers HELD."""
    play.context = play.rig.context(0)
    play.held, play.sent = play.layout.held_by(0), play.layout.sent_by(0)
    play.answers["Settle"] = dict.fromkeys(play.held, "")
    play.answers["Exchange"] = ExchangeResult(MINE, dict.fromkeys(play.held, b"x"))
    gen = play.generation.id
    play.answers |= {f"ack/{gen}/0/{f.index}": MINE.hex().encode() for f in play.sent}
    return play


def test_the_root_says_why_it_does_not_commit():
    """HELD of another arena than the agreed one, and HELD that is no word: an abort with that."""
    play = as_root(Play())
    play.run()
    words = "HELD was reported by an arena that is not the one agreed at start-up"
    assert play.tried() == [f"aborted:rank 0: {words}"]
    play = as_root(Play())
    play.answers |= {f"held/{play.generation.id}/0/1": b"spoiled:nonsense"}
    play.run()
    assert play.tried() == ["aborted:rank 0: HELD cannot be read: nonsense"]
