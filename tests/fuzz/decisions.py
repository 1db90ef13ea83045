"""Targets for the readers of ``recovery``: records, inventories, votes, whole sessions."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

from erasure.code import Code
from erasure.digest import digest
from erasure.errors import PlanariaError
from recovery.actions import Publish
from recovery.admission import Admission, parse_admission
from recovery.agree import agree_session
from recovery.commit import Connect, Exchange, ExchangeResult, Settle, parse_decision
from recovery.frozen import decode_frozen, encode_frozen, freeze
from recovery.inventory import (
    check_all_report,
    choose,
    decode_reports,
    encode_report,
    merge_report_lists,
    merge_reports,
)
from recovery.ledger import ABORTED
from recovery.manifest import (
    WHOLE,
    Generation,
    SlotRecord,
    decode_head,
    decode_record,
    encode_head,
    encode_record,
)
from recovery.mend import FAILED, MendContext, Regrow, mend_session, parse_name, parse_result
from recovery.offer import check_offer, encode_offer
from recovery.plan import Read, protection
from recovery.topology import Topology
from recovery.tree import load, merge_texts, texts_from
from recovery.vote import count, encode_vote, merge_votes, read_verdict
from tests.data.job import FORMAT, frames_of
from tests.fuzz.target import Target, dumped, refused
from tests.recovery.rigs import RestoreRig, SaveRig, generation_of, layout_of
from tests.recovery.world import Raised, World, with_edges

TOPOLOGY = Topology(("a", "b", "c", "d"))
GENERATION = Generation(1, 2, "ab" * 16)
RIG = RestoreRig(layout_of("stripe:2+1", 1, 1, 1, 1))
RIG_OF_TWO = RestoreRig(layout_of("copies:1", 1, 1))
REPORTS = [RIG.context(rank).report for rank in range(4)]
HEADS = frames_of("head")
RECORDS = frames_of("record")


# --- records and heads


def framed(kind: int, raw: bytes) -> bytes:
    """Frame any bytes as text and tail, checksum and all: what a hostile writer would do."""
    text, _, tail = raw.partition(b"\0")
    sizes = struct.pack("<HHII", FORMAT, kind, len(text), len(tail))
    return b"PLANARIA" + sizes + digest(sizes + text + tail) + text + tail


def bodies(frames: list[bytes]) -> list[bytes]:
    """The text and the tail of frames, as ``framed`` takes them."""
    found = []
    for raw in frames:
        _, _, _, text, tail, _ = struct.unpack_from("<8sHHII16s", raw)
        found.append(raw[36 : 36 + text] + b"\0" + raw[36 + text : 36 + text + tail])
    return found


def read_record(raw: bytes) -> Any:
    """A record that is taken is written again as the same record."""
    record = refused(lambda: decode_record(raw))
    if isinstance(record, SlotRecord):
        assert decode_record(encode_record(record)) == record
        assert record.length <= record.shard_bytes
        assert record.describe()
    return record


def read_head(raw: bytes) -> Any:
    """A head that is taken is written again as the same head, unless it has no room for that."""
    head = refused(lambda: decode_head(raw))
    if not isinstance(head, PlanariaError):
        with suppress(PlanariaError):
            assert decode_head(encode_head(head)) == head
    return head


# --- what ranks say to each other


def read_reports(raw: bytes) -> Any:
    """From one rank's word to a plan: everything that rank 0 does with it."""

    def read() -> Any:
        merged = merge_report_lists([raw])
        reports = decode_reports(merged)
        assert reports == decode_reports(raw)
        choice = choose(merge_reports(reports))
        assert choice.reason
        frozen = freeze(merge_reports(r for r in reports if r.rank < TOPOLOGY.world), TOPOLOGY)
        assert decode_frozen(encode_frozen(frozen)).choice == frozen.choice
        check_all_report(reports, TOPOLOGY.world)
        return frozen.plan(TOPOLOGY)

    return refused(read)


def read_frozen(raw: bytes) -> Any:
    """From rank 0's word to a plan that reads what is there only."""

    def read() -> Any:
        frozen = decode_frozen(raw)
        plan = frozen.plan(TOPOLOGY)
        if plan is None:
            return frozen
        assert len(plan.fingerprint()) == 32
        for rebuild in plan.rebuilds:
            for read in rebuild.reads:
                assert 0 <= read.source < TOPOLOGY.world
        return protection(frozen.inventory, plan.generation, TOPOLOGY)

    return refused(read)


def read_offer(raw: bytes) -> Any:
    """The bytes of a shard, never negative and never without end."""
    size = refused(lambda: check_offer(raw, encode_offer(Code(2, 1), 1000, GENERATION), 3))
    assert isinstance(size, PlanariaError) or 0 <= size < 1 << 50
    return size


def read_admission(raw: bytes) -> Any:
    """Take or skip, with a number."""
    found = refused(lambda: parse_admission(raw))
    if isinstance(found, Admission):
        assert parse_admission(found.encode()) == found
    return found


def read_vote(raw: bytes) -> Any:
    """Merged with a good vote and counted: what rank 0 proposes is a verdict that all can read."""
    good = encode_vote("0" * 32, bad=[], silent=[], wrong=[], errors=[])

    def read() -> Any:
        proposal = count(merge_votes([good, merge_votes([raw])]))
        return refused(lambda: read_verdict(proposal))

    return refused(read)


def read_texts(raw: bytes) -> Any:
    """A list of texts that can be joined."""

    def read() -> str:
        return "; ".join(texts_from(merge_texts([raw, raw])))

    return refused(read)


# --- whole sessions, one rank of which says anything


def said_instead(session: Any, keys: set[str], raw: bytes) -> Any:
    """Run a session that publishes ``raw`` under some keys."""
    answer = None
    while True:
        try:
            action = session.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(action, Publish) and action.key in keys:
            action = Publish(action.key, raw)
        answer = yield action


def outcomes(sessions: dict[int, Any], store: dict[str, bytes] | None = None) -> list[Any]:
    """Run all to the end; what each returned, or the error of ours that it raised."""
    found = []
    for result in World(0, sessions, store=store).run().values():
        if isinstance(result, Raised):
            if not isinstance(result.error, PlanariaError):
                raise result.error
            found.append(result.error)
        else:
            found.append(result.value)
    return found


RESTORE_KEYS = [
    *("restore/0/inventory/0/1", "restore/0/0/moved/0/1", "restore/0/done/0/1"),
    *("restore/0/0/frozen", "restore/0/inventory/1/0", "restore/0/0/vote", "restore/0/loaded"),
]


def run_restore(raw: bytes) -> Any:
    """The first byte chooses where: all ranks end alike, and one generation or none is loaded."""
    if not raw:
        return None
    key, raw = RESTORE_KEYS[raw[0] % len(RESTORE_KEYS)], raw[1:]
    rig = RestoreRig(layout_of("copies:1", 1, 1))
    sessions = rig.sessions()
    published = key.startswith(("restore/0/inventory", "restore/0/0/moved", "restore/0/done"))
    if published or key.endswith("frozen"):
        rank = 1 if key.endswith("/0/1") else 0
        sessions[rank] = said_instead(sessions[rank], {key}, raw)
        found = outcomes(sessions)
    else:
        found = outcomes(sessions, {key: raw})
    assert len(set(rig.live.values())) <= 1
    assert len({isinstance(one, PlanariaError) for one in found}) == 1, found
    return found


SAVE_KEYS = ["offer", "ready", "ack", "held", "decision"]


def run_save(raw: bytes) -> Any:
    """The first byte chooses where rank 1 says it: no two ranks think otherwise of the decision."""
    if not raw:
        return None
    what, raw = SAVE_KEYS[raw[0] % len(SAVE_KEYS)], raw[1:]
    rig = SaveRig(layout_of("copies:1", 1, 1))
    gen = rig.generation.id
    sessions = rig.sessions()
    keys = {
        "offer": {f"offer/{gen}/1"},
        "ready": {f"ready/{gen}/0/{index}" for index in range(2)},
        "ack": {f"ack/{gen}/0/{index}" for index in range(2)},
        "held": {f"held/{gen}/0/1"},
    }
    if what == "decision":
        found = outcomes(sessions, {f"decision/{gen}": raw})
    else:
        sessions[1] = said_instead(sessions[1], keys[what], raw)
        found = outcomes(sessions)
    states = {one.state for one in found if not isinstance(one, PlanariaError)}
    assert len(states) <= 1, found
    return None if states <= {ABORTED} else found


def run_agreement(raw: bytes) -> Any:
    """Three ranks agree, one says anything: all have the same, or all have an error."""
    sessions = {r: agree_session("a", r, 3, dumped([f"{r}"]), merge_texts) for r in range(3)}
    sessions[2] = said_instead(sessions[2], {"a/value/0/2"}, raw)
    found = outcomes(sessions)
    assert len({type(one) for one in found}) == 1, found
    return found


MEND_KEYS = ["report/1", "frozen", "sent/1", "result", "over"]


def run_mend(raw: bytes) -> Any:
    """The first byte chooses where: a mend never raises, and all ranks end alike."""
    if not raw:
        return None
    where, raw = MEND_KEYS[raw[0] % len(MEND_KEYS)], raw[1:]
    layout = layout_of("copies:1", 1, 1)
    rig = RestoreRig(layout)
    edges = {
        Connect: lambda _: instantly({}),
        Settle: lambda action: instantly({offer.fragment: "" for offer in action.offers}),
        Exchange: lambda _: instantly(ExchangeResult(b"0" * 16)),
        Regrow: lambda _: instantly(""),
    }
    sessions = {
        rank: with_edges(
            mend_session(
                MendContext(
                    rank=rank,
                    layout=layout,
                    name="0.1.1",
                    generation=rig.generations[-1],
                    report=rig.context(rank).report,
                )
            ),
            edges,
        )
        for rank in range(2)
    }
    key = f"mend/0.1.1/{where}" if where in ("sent/1", "over") else f"mend/0.1.1/0/{where}"
    if where.endswith("/1"):
        sessions[1] = said_instead(sessions[1], {key}, raw)
        results = World(0, sessions).run()
    else:
        results = World(0, sessions, store={key: raw}).run()
    for result in results.values():
        if isinstance(result, Raised):
            raise result.error
    states = {result.value.state for result in results.values()}
    assert len(states) == 1, states
    return None if states == {FAILED} else states


def instantly(answer: Any) -> Any:
    """An edge that needs nothing of the store."""
    return answer
    yield


READS = [Read(0, 0, WHOLE, 1, 1000, local=False)]
VOTES = [
    encode_vote("0" * 32, bad=READS, silent=READS, wrong=[(1, (0, 2))], errors=[]),
    encode_vote("1" * 32, bad=[], silent=[], wrong=[], errors=["rank 1: no key 'a'"]),
]
FROZEN = [
    encode_frozen(freeze(merge_reports(REPORTS), TOPOLOGY)),
    encode_frozen(freeze(merge_reports(REPORTS[:1]), TOPOLOGY)),
]
RANK_1 = dumped([encode_report(REPORTS[1])])

TARGETS = [
    Target(name="record", run=read_record, seeds=RECORDS),
    Target(name="record-text", run=lambda raw: read_record(framed(2, raw)), seeds=bodies(RECORDS)),
    Target(name="head", run=read_head, seeds=HEADS),
    Target(name="head-text", run=lambda raw: read_head(framed(1, raw)), seeds=bodies(HEADS)),
    Target(
        name="reports",
        run=read_reports,
        seeds=[RANK_1, dumped([encode_report(report) for report in REPORTS])],
    ),
    Target(name="frozen", run=read_frozen, seeds=FROZEN),
    Target(
        name="offer",
        run=read_offer,
        seeds=[encode_offer(Code(2, 1), 1234, GENERATION), encode_offer(Code(2, 1), 0, None)],
    ),
    Target(name="admission", run=read_admission, seeds=[b"take:1", b"skip:17"]),
    Target(
        name="decision",
        run=lambda raw: refused(lambda: parse_decision(raw)),
        seeds=[b"committed", b"aborted:rank 1: no offer"],
    ),
    Target(name="vote", run=read_vote, seeds=VOTES),
    Target(
        name="verdict",
        run=lambda raw: refused(lambda: read_verdict(raw)),
        seeds=[b"go:", b"abort:rank 1: x", *(count(vote) for vote in VOTES)],
    ),
    Target(name="texts", run=read_texts, seeds=[b'["a","b"]', b"[]"]),
    Target(
        name="json", run=lambda raw: refused(lambda: load(raw, "a word")), seeds=[RANK_1, *FROZEN]
    ),
    Target(
        name="mend-result",
        run=lambda raw: refused(lambda: parse_result(raw)),
        seeds=[b"done:2:", b"failed:-1:rank 1: x", b"part:0:x"],
    ),
    Target(
        name="restore",
        run=run_restore,
        seeds=[
            *(b"\0" + raw for raw in (RANK_1, b"[]")),
            *(b"\1" + raw for raw in VOTES),
            *(b"\3" + raw for raw in FROZEN),
            *(b"\2[]", b"\4[]", b"\5go:", b"\5again:{}", b"\6loaded", b"\6failed:x"),
        ],
    ),
    Target(
        name="save",
        run=run_save,
        seeds=[
            b"\0" + encode_offer(Code(1, 1), 1000, generation_of(1)),
            *(b"\1", b"\1no room", b"\2" + b"0" * 32, b"\3" + b"0" * 32, b"\3spoiled:x"),
            *(b"\4committed", b"\4aborted:x"),
        ],
    ),
    Target(
        name="mend-name",
        run=lambda raw: refused(lambda: parse_name(raw)),
        seeds=[b"0.1.1", b"999999999.1.2"],
    ),
    Target(
        name="mend",
        run=run_mend,
        seeds=[
            b"\0" + dumped(encode_report(RIG_OF_TWO.context(1).report)),
            b"\1" + dumped([encode_report(RIG_OF_TWO.context(r).report) for r in range(2)]),
            *(b"\2[]", b"\3done:1:", b"\4part:1:x", b"\3failed:-1:x", b"\4given up:-1:"),
        ],
    ),
    Target(name="agreement", run=run_agreement, seeds=[b'["a"]', b"spoiled:x", b"[7]"]),
]
