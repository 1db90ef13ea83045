"""Records: they read back equal, and every byte that is not as it was written is refused."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erasure.code import Code
from erasure.digest import DIGEST_BYTES, digest
from recovery import manifest
from recovery.errors import FormatVersionError, ManifestError
from recovery.manifest import (
    WHOLE,
    ArenaHead,
    Generation,
    SlotRecord,
    chunk_count,
    decode_head,
    decode_record,
    encode_head,
    encode_record,
    generation_id,
    payload_bytes,
    record_capacity,
    shard_digest,
)

CHUNK = 1 << 12
PRELUDE_BYTES = struct.calcsize("<8sHHII16s")
HEX = st.text("0123456789abcdef", min_size=32, max_size=32)
NUMBER = st.integers(0, 1 << 62)
NAME = st.text(min_size=1, max_size=40)
generations = st.builds(Generation, NUMBER, NUMBER, HEX)


def record_of(fragment=WHOLE, shard_bytes=10_000, k=2, m=1, **changes):
    """Return a valid record, its digests made up."""
    code = Code(k, m)
    count = chunk_count(code, fragment, shard_bytes, CHUNK)
    digests = b"".join(digest(bytes([i % 256])) for i in range(count))
    whole = shard_digest(digests, shard_bytes) if fragment == WHOLE else b"s" * DIGEST_BYTES
    facts = {
        "job": "run 7",
        "generation": Generation(1, 40, "ab" * 16),
        "owner": 3,
        "world": 8,
        "k": k,
        "m": m,
        "fragment": fragment,
        "shard_bytes": shard_bytes,
        "length": payload_bytes(code, fragment, shard_bytes),
        "chunk_bytes": CHUNK,
        "chunk_digests": digests,
        "shard_digest": whole,
    }
    return SlotRecord(**{**facts, **changes})


def head_of(**changes):
    """Return a valid head."""
    facts = {
        "job": "run 7",
        "node_id": "node-a",
        "position": 1,
        "incarnation": "c" * 32,
        "epoch": 3,
        "nonce": "d" * 32,
        "rank": 5,
        "world": 8,
        "committed": Generation(3, 40, "ab" * 16),
        "attempts": (("ab" * 16, "cd" * 16, 2),),
    }
    return ArenaHead(**{**facts, **changes})


@st.composite
def records(draw):
    """Draw a valid record of any code, fragment and size."""
    k = draw(st.integers(1, 8))
    m = draw(st.integers(0, 4))
    world = draw(st.integers(1, 1 << 20))
    return record_of(
        draw(st.integers(WHOLE, k + m - 1)),
        draw(st.integers(0, 50_000)),
        k,
        m,
        job=draw(NAME),
        generation=draw(generations),
        world=world,
        owner=draw(st.integers(0, world - 1)),
        fence_epoch=draw(NUMBER),
    )


@st.composite
def heads(draw):
    """Draw a valid head."""
    world = draw(st.integers(0, 1 << 20))
    attempts = st.lists(st.tuples(HEX, HEX, st.integers(0, 1 << 30)), max_size=4).map(tuple)
    return ArenaHead(
        job=draw(NAME),
        node_id=draw(NAME),
        position=draw(NUMBER),
        incarnation=draw(HEX),
        epoch=draw(NUMBER),
        nonce=draw(st.one_of(st.just(""), HEX)),
        rank=draw(st.integers(-1, max(world - 1, -1))),
        world=world,
        committed=draw(st.none() | generations),
        restored=draw(st.none() | generations),
        pid=draw(NUMBER),
        pid_start=draw(NUMBER),
        agent_pid=draw(NUMBER),
        agent_start=draw(NUMBER),
        attempts=draw(attempts),
    )


@given(record=records(), after=st.binary(max_size=64))
def test_a_record_reads_back_equal(record, after):
    """Any record survives the round trip; what follows it in its file is not looked at."""
    assert decode_record(encode_record(record) + after) == record


@given(head=heads(), after=st.binary(max_size=64))
def test_a_head_reads_back_equal(head, after):
    """Any head survives the round trip; what follows it in its file is not looked at."""
    assert decode_head(encode_head(head) + after) == head


@given(record=records())
def test_a_record_fits_its_reserved_bytes(record):
    """No record is larger than what was reserved for its length before it was known."""
    assert len(encode_record(record)) <= record_capacity(record.length, record.chunk_bytes)


@pytest.mark.parametrize(("length", "chunks"), [(0, 0), (1, 1), (CHUNK, 1), (CHUNK + 1, 2)])
def test_what_a_record_may_need_is_counted_in_started_chunks(length, chunks):
    """A digest for each started chunk, one more for each of 64 fragments, and the longest text."""
    reserved = record_capacity(length, CHUNK)
    assert reserved == PRELUDE_BYTES + manifest.MAX_JSON_BYTES + DIGEST_BYTES * (chunks + 64)


@pytest.mark.parametrize(
    ("raw", "decode"),
    [
        (encode_record(record_of()), decode_record),
        (encode_record(record_of(2)), decode_record),
        (encode_head(head_of()), decode_head),
    ],
    ids=["shard", "fragment", "head"],
)
class TestDamage:
    """Bytes that are not what was written."""

    def test_every_flipped_byte_is_refused(self, raw, decode):
        """Each byte is changed in turn, by one bit, by all bits and to zero."""
        for at, byte in enumerate(raw):
            for other in {byte ^ 1, byte ^ 0x80, byte ^ 0xFF, 0} - {byte}:
                with pytest.raises(ManifestError):
                    decode(raw[:at] + bytes([other]) + raw[at + 1 :])

    def test_every_cut_is_refused(self, raw, decode):
        """The bytes end early, at each place, also when zeros follow as in a fresh file."""
        for length in range(len(raw)):
            with pytest.raises(ManifestError):
                decode(raw[:length])
        for length in range(len(raw) - 1):
            if raw[length:].strip(b"\0"):
                with pytest.raises(ManifestError):
                    decode(raw[:length].ljust(len(raw), b"\0"))

    def test_another_format_version_is_named(self, raw, decode):
        """A valid frame of version 7 raises the error of its own kind, with the number."""
        other = reframe(raw, version=7)
        with pytest.raises(FormatVersionError, match="format version 7") as caught:
            decode(other)
        assert "planaria clean" in str(caught.value)

    def test_the_other_kind_is_refused(self, raw, decode):
        """A head is not taken for a slot's record, nor the other way round."""
        other = decode_head if decode is decode_record else decode_record
        with pytest.raises(ManifestError, match="of kind"):
            other(raw)


def reframe(raw, *, version=1, kind=None, text=None, tail=None):
    """Return the frame with some parts replaced and a checksum that is right again."""
    _, _, old_kind, text_bytes, tail_bytes, _ = struct.unpack_from("<8sHHII16s", raw)
    body = raw[PRELUDE_BYTES:]
    text = body[:text_bytes] if text is None else text
    tail = body[text_bytes : text_bytes + tail_bytes] if tail is None else tail
    sizes = struct.pack("<HHII", version, kind or old_kind, len(text), len(tail))
    return b"PLANARIA" + sizes + digest(sizes + text + tail) + text + tail


def with_fields(raw, **changes):
    """Return the frame with JSON fields replaced (... removes one), validly framed."""
    _, _, _, text_bytes, _, _ = struct.unpack_from("<8sHHII16s", raw)
    body = json.loads(raw[PRELUDE_BYTES : PRELUDE_BYTES + text_bytes])
    body = {k: v for k, v in {**body, **changes}.items() if v is not ...}
    return reframe(raw, text=json.dumps(body).encode())


GENERATION = {"epoch": 1, "step": 2, "id": "ab" * 16}
HOSTILE = [
    {"job": ""},
    {"job": 7},
    {"job": "x" * 5000},
    {"owner": -1},
    {"owner": 8},
    {"owner": 1.0},
    {"owner": True},
    {"owner": None},
    {"world": 0},
    {"world": 1 << 40},
    {"k": 0},
    {"k": 99},
    {"k": "2"},
    {"m": -1},
    {"fragment": 3},
    {"fragment": -2},
    {"shard_bytes": -1},
    {"shard_bytes": 1 << 60},
    {"shard_bytes": 10_001},
    {"length": 9_999},
    {"length": float("nan")},
    {"chunk_bytes": 0},
    {"chunk_bytes": 1},
    {"chunk_bytes": 8192},
    {"shard_digest": "00" * 16},
    {"shard_digest": "zz" * 16},
    {"shard_digest": None},
    {"algorithm": "crc32"},
    {"algorithm": ["xxh3-128"]},
    {"fence_epoch": -5},
    {"generation": None},
    {"generation": [1, 2, "ab" * 16]},
    {"generation": {**GENERATION, "id": "AB" * 16}},
    {"generation": {**GENERATION, "step": -1}},
    {"generation": {**GENERATION, "epoch": 1.5}},
    {"generation": {**GENERATION, "more": 1}},
    {"generation": {"epoch": 1, "step": 2}},
    {"job": ...},
    {"chunk_digests": "00"},
    {"unknown": 1},
]


@pytest.mark.parametrize("change", HOSTILE, ids=repr)
def test_a_record_with_a_right_checksum_and_wrong_values_is_refused(change):
    """Every field of another type, range or name is refused: a checksum is no proof of sense."""
    with pytest.raises(ManifestError):
        decode_record(with_fields(encode_record(record_of()), **change))


HOSTILE_HEADS = [
    {"node_id": ""},
    {"position": -1},
    {"position": "0"},
    {"incarnation": ""},
    {"incarnation": "x" * 32},
    {"nonce": "d" * 31},
    {"rank": 8},
    {"rank": -2},
    {"world": -1},
    {"epoch": 1 << 63},
    {"pid": None},
    {"agent_start": 0.5},
    {"committed": 3},
    {"committed": {}},
    {"restored": []},
    {"attempts": None},
    {"attempts": [["ab" * 16, "cd" * 16]]},
    {"attempts": [["ab" * 16, "cd" * 16, -1]]},
    {"attempts": [["ab" * 16, "cd" * 16, 1 << 40]]},
    {"attempts": [["ab", "cd" * 16, 1]]},
    {"attempts": [[["ab"], "cd" * 16, 1]]},
    {"attempts": {"a": 1}},
    {"format": "1"},
    {"format": 0},
    {"format": True},
    {"job": ...},
    {"unknown": 1},
]


@pytest.mark.parametrize("change", HOSTILE_HEADS, ids=repr)
def test_a_head_with_a_right_checksum_and_wrong_values_is_refused(change):
    """Every field of another type, range or name is refused: a checksum is no proof of sense."""
    with pytest.raises(ManifestError):
        decode_head(with_fields(encode_head(head_of()), **change))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"null", b"[]", b"7", b'"x"', b"\xff", b"[" * 60_000, b'{"a":' * 9_000, b"NaN"],
    ids=lambda text: repr(text[:8]),
)
def test_text_that_is_no_object_is_refused(text):
    """Other JSON, broken JSON and deep nesting, validly framed, end in the one kind of error."""
    for raw, decode in [
        (encode_record(record_of()), decode_record),
        (encode_head(head_of()), decode_head),
    ]:
        with pytest.raises(ManifestError):
            decode(reframe(raw, text=text))


@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_refused(raw):
    """Garbage, with our magic before it or not, is refused and never taken apart."""
    for some in (raw, b"PLANARIA" + raw):
        with pytest.raises(ManifestError):
            decode_record(some)
        with pytest.raises(ManifestError):
            decode_head(some)


@given(
    st.dictionaries(
        st.sampled_from(sorted(asdict(record_of()))),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_any_json_is_a_record_or_a_manifest_error(changes):
    """Random values in random fields: a valid record or ManifestError, no other exception."""
    with suppress(ManifestError):
        decode_record(with_fields(encode_record(record_of()), **changes))


def test_lengths_that_lie_are_refused_before_anything_is_sliced():
    """A frame that claims more than the format allows, or than is there, is refused at once."""
    raw = bytearray(encode_record(record_of()))
    struct.pack_into("<I", raw, 12, manifest.MAX_JSON_BYTES + 1)
    with pytest.raises(ManifestError, match="over the format's limit"):
        decode_record(bytes(raw))
    struct.pack_into("<II", raw, 12, 100, manifest.MAX_TAIL_BYTES + 1)
    with pytest.raises(ManifestError, match="over the format's limit"):
        decode_record(bytes(raw))
    struct.pack_into("<II", raw, 12, 100, manifest.MAX_TAIL_BYTES)
    with pytest.raises(ManifestError, match="are there"):
        decode_record(bytes(raw))


def test_digests_of_another_number_are_refused():
    """One digest too few, too many, or none: the record vouches for nothing."""
    raw = encode_record(record_of(0))
    tail = record_of(0).chunk_digests
    for wrong in (b"", tail[:-1], tail[:-16], tail + b"\0" * 16):
        with pytest.raises(ManifestError, match="bytes of digests"):
            decode_record(reframe(raw, tail=wrong))


def test_a_head_carries_no_tail():
    """Bytes after the text of a head are refused."""
    with pytest.raises(ManifestError, match="expected none"):
        decode_head(reframe(encode_head(head_of()), tail=b"x"))


def test_a_record_over_the_limit_is_not_written():
    """What a reader would refuse, the writer refuses: a text over the limit."""
    head = head_of(attempts=(("ab" * 16, "cd" * 16, 1),) * 1000)
    with pytest.raises(ManifestError, match="over the format's limit"):
        encode_head(head)


def test_a_whole_shard_must_match_its_own_digests():
    """The shard digest of an own copy is that of its chunk digests, or the record is refused."""
    with pytest.raises(ManifestError, match="not that of its chunk digests"):
        record_of(shard_digest=b"x" * 16)
    with pytest.raises(ManifestError):
        replace(record_of(), shard_bytes=9_999, length=9_999)


@given(epoch=NUMBER, step=NUMBER, other=NUMBER)
def test_generations_are_ordered_by_epoch_then_step(epoch, step, other):
    """After a roll-back the abandoned later step of the older epoch never wins."""
    older, newer = Generation(epoch // 2, other, "f" * 32), Generation(epoch, step, "0" * 32)
    assert (older < newer) == (epoch // 2 < epoch or other < step)
    assert (Generation(epoch, step, "a" * 32) < Generation(epoch, other, "a" * 32)) == (
        step < other
    )


def test_generation_ids_differ_in_every_part():
    """Job, nonce, step and sequence each change the id; equal parts give equal ids."""
    parts = [
        *[("a", "b", 1, 2), ("x", "b", 1, 2), ("a", "y", 1, 2), ("a", "b", 3, 2)],
        *[("a", "b", 1, 4), ("a", "b", 2, 1), ("a", "b", 12, 0), ("ab", "", 1, 2)],
    ]
    ids = {generation_id(*some) for some in parts}
    assert len(ids) == len(parts)
    assert generation_id("a", "b", 1, 2) in ids
    assert Generation(1, 1, generation_id("a", "b", 1, 2)).describe().startswith("step 1 (epoch 1")


def test_records_describe_themselves():
    """The words that logs and errors use."""
    assert record_of().describe() == "shard of owner 3, step 40 (epoch 1, abababab), 10000 bytes"
    assert record_of(2).describe().startswith("fragment 2 of 2+1 of owner 3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": 7}, "algorithm is 7, expected text"),
        ({"shard_digest": "zz"}, "shard_digest is 'zz', expected 32 hexadecimal digits"),
        ({"generation": 3}, "generation is 3, expected epoch, step and id"),
        ({"unknown": 1}, "SlotRecord: missing or unknown fields ['unknown']"),
        ({"job": ...}, "SlotRecord: missing or unknown fields ['job']"),
    ],
)
def test_what_is_refused_is_named_with_what_was_expected(change, words):
    """The field, what it is and what it should have been: enough to look for the cause."""
    with pytest.raises(ManifestError) as caught:
        decode_record(with_fields(encode_record(record_of()), **change))
    assert str(caught.value) == words


def test_a_record_knows_its_code():
    """Its data fragments and those of parity."""
    assert record_of(0, k=3, m=2).code == Code(3, 2)
