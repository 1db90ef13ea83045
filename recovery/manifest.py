"""Records: what an arena says of itself and of each slot, as bounded, checksummed bytes.

One frame serves both kinds::

    8 bytes   magic "PLANARIA"
    2 bytes   format version, little endian
    2 bytes   kind (1 head, 2 slot record)
    4 bytes   length of the JSON text
    4 bytes   length of the raw tail (chunk digests)
    16 bytes  xxh3-128 over everything else in the frame
    ...       JSON text (ASCII, sorted keys), then the raw tail

The version stands outside the JSON so that a reader can name a format that it does not know.
Lengths are checked against a cap before anything is sliced, and every field against its type and
range: a record comes from memory that any process of this user may have written.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

from erasure.code import Code
from erasure.digest import ALGORITHM, DIGEST_BYTES, digest, root_digest
from erasure.errors import CodeError
from recovery.errors import FormatVersionError, ManifestError

FORMAT_VERSION = 1
READABLE_VERSIONS = (1,)
WHOLE = -1
"""``fragment`` of a slot that holds an owner's whole shard image (its own copy)."""

_MAGIC = b"PLANARIA"
_PRELUDE = struct.Struct("<8sHHII16s")
_KIND_HEAD, _KIND_SLOT = 1, 2
MAX_JSON_BYTES = 8 * 1024
MAX_TAIL_BYTES = 1 << 28
MAX_HEAD_BYTES = _PRELUDE.size + MAX_JSON_BYTES
MAX_WORLD = 1 << 20


@dataclass(frozen=True, order=True)
class Generation:
    """One attempt to save, ordered by (epoch, step); the id tells attempts at one step apart."""

    epoch: int
    step: int
    id: str

    def __post_init__(self) -> None:
        _check_int("epoch", self.epoch, 0, 1 << 62)
        _check_int("step", self.step, 0, 1 << 62)
        _check_hex("generation id", self.id, 32)

    def describe(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, {self.id[:8]})"


def generation_id(job: str, nonce: str, step: int, sequence: int) -> str:
    """Id that every rank derives alone: the hash of (job, nonce, step, admit sequence)."""
    text = json.dumps([job, nonce, step, sequence])
    return digest(text.encode()).hex()


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """What a slot holds: one fragment, or the whole shard, of one owner in one generation.

    ``chunk_digests`` has 16 bytes per ``chunk_bytes`` of the slot's payload. A whole shard carries
    the digests of its k data fragments one after another (each fragment starts a new chunk), so the
    same list proves the shard whether it was copied or rebuilt. ``shard_digest`` is the digest over
    that list and stands in every fragment's record.
    """

    job: str
    generation: Generation
    owner: int
    world: int
    k: int
    m: int
    fragment: int
    shard_bytes: int
    length: int
    chunk_bytes: int
    chunk_digests: bytes
    shard_digest: bytes
    algorithm: str = ALGORITHM
    fence_epoch: int = 0

    def __post_init__(self) -> None:
        _check_name("job", self.job)
        _check_int("world", self.world, 1, MAX_WORLD)
        _check_int("owner", self.owner, 0, self.world - 1)
        try:
            code = Code(self.k, self.m)
        except CodeError as error:
            raise ManifestError(f"slot record: {error}") from error
        _check_int("fragment", self.fragment, WHOLE, code.n - 1)
        _check_int("shard_bytes", self.shard_bytes, 0, 1 << 50)
        _check_int("chunk_bytes", self.chunk_bytes, 1 << 12, 1 << 30)
        _check_int("fence_epoch", self.fence_epoch, 0, 1 << 62)
        expected = payload_bytes(code, self.fragment, self.shard_bytes)
        if self.length != expected:
            raise ManifestError(f"slot record: length is {self.length}, expected {expected}")
        count = chunk_count(code, self.fragment, self.shard_bytes, self.chunk_bytes)
        if len(self.chunk_digests) != count * DIGEST_BYTES:
            got = len(self.chunk_digests)
            raise ManifestError(
                f"slot record: {got} bytes of digests, expected {count * DIGEST_BYTES}"
            )
        if len(self.shard_digest) != DIGEST_BYTES:
            raise ManifestError(f"slot record: shard digest of {len(self.shard_digest)} bytes")
        if self.algorithm != ALGORITHM:
            raise ManifestError(
                f"slot record: digest algorithm {self.algorithm!r}, expected {ALGORITHM!r}"
            )
        if (
            self.fragment == WHOLE
            and shard_digest(self.chunk_digests, self.shard_bytes) != self.shard_digest
        ):
            raise ManifestError("slot record: the shard digest is not that of its chunk digests")

    @property
    def code(self) -> Code:
        return Code(self.k, self.m)

    def describe(self) -> str:
        part = (
            "shard" if self.fragment == WHOLE else f"fragment {self.fragment} of {self.k}+{self.m}"
        )
        return f"{part} of owner {self.owner}, {self.generation.describe()}, {self.length} bytes"


@dataclass(frozen=True, kw_only=True)
class ArenaHead:
    """What an arena says of itself: whose it is, which incarnation fences it, what was committed.

    ``agent_pid`` 0 means that no launcher's agent stood above the trainer. ``attempts`` counts
    failed loads: (generation id, digest of the error's text, count).
    """

    job: str
    node_id: str
    position: int
    incarnation: str
    epoch: int = 0
    nonce: str = ""
    rank: int = -1
    world: int = 0
    committed: Generation | None = None
    restored: Generation | None = None
    pid: int = 0
    pid_start: int = 0
    agent_pid: int = 0
    agent_start: int = 0
    attempts: tuple[tuple[str, str, int], ...] = ()
    format: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _check_name("job", self.job)
        _check_name("node_id", self.node_id)
        _check_hex("incarnation", self.incarnation, 32)
        if self.nonce:
            _check_hex("nonce", self.nonce, 32)
        _check_int("format", self.format, 1, 0xFFFF)
        for name in ("position", "epoch", "pid", "pid_start", "agent_pid", "agent_start"):
            _check_int(name, getattr(self, name), 0, 1 << 62)
        _check_int("world", self.world, 0, MAX_WORLD)
        _check_int("rank", self.rank, -1, max(self.world - 1, -1))
        for identity, error, count in self.attempts:
            _check_hex("attempt", identity, 32)
            _check_hex("attempt's error", error, 32)
            _check_int("attempt count", count, 0, 1 << 30)


def payload_bytes(code: Code, fragment: int, shard_bytes: int) -> int:
    """Bytes of one fragment's payload, or of the shard itself for ``WHOLE``."""
    return shard_bytes if fragment == WHOLE else code.length(fragment, shard_bytes)


def chunk_count(code: Code, fragment: int, shard_bytes: int, chunk_bytes: int) -> int:
    """Number of chunk digests in the record of a fragment, or of the whole shard."""
    parts = range(code.k) if fragment == WHOLE else (fragment,)
    return sum(-(-code.length(part, shard_bytes) // chunk_bytes) for part in parts)


def shard_digest(chunk_digests: bytes, shard_bytes: int) -> bytes:
    """Digest of a shard: the hash of the chunk digests of its data fragments and of its length."""
    return root_digest(chunk_digests, shard_bytes)


def record_capacity(length: int, chunk_bytes: int) -> int:
    """Bytes to reserve for the record of a slot whose payload is at most ``length`` bytes.

    A whole shard has up to one started chunk more per data fragment than its length alone tells; 64
    covers the largest code.
    """
    return _PRELUDE.size + MAX_JSON_BYTES + DIGEST_BYTES * (-(-length // chunk_bytes) + 64)


def encode_record(record: SlotRecord) -> bytes:
    """The record as bytes; ManifestError when it is over the format's limit."""
    body = asdict(record)
    tail = body.pop("chunk_digests")
    body["shard_digest"] = record.shard_digest.hex()
    return _frame(_KIND_SLOT, body, tail)


def decode_record(raw: bytes) -> SlotRecord:
    """The record in ``raw`` (bytes after it are ignored), or ManifestError."""
    body, tail = _unframe(_KIND_SLOT, raw)
    body = _exact_fields(SlotRecord, body, without={"chunk_digests"})
    body["generation"] = _generation(body["generation"])
    body["shard_digest"] = _unhex("shard_digest", body["shard_digest"])
    _check_str("algorithm", body["algorithm"])
    return SlotRecord(chunk_digests=tail, **body)


def encode_head(head: ArenaHead) -> bytes:
    """The head as at most ``MAX_HEAD_BYTES`` bytes; ManifestError when it does not fit."""
    return _frame(_KIND_HEAD, asdict(head), b"")


def decode_head(raw: bytes) -> ArenaHead:
    """The head in ``raw`` (bytes after it are ignored), or ManifestError."""
    body, tail = _unframe(_KIND_HEAD, raw)
    if tail:
        raise ManifestError(f"arena head: {len(tail)} bytes after the text, expected none")
    body = _exact_fields(ArenaHead, body, without=set())
    for name in ("committed", "restored"):
        body[name] = None if body[name] is None else _generation(body[name])
    triples = body["attempts"]
    if not isinstance(triples, list) or not all(
        isinstance(t, list) and len(t) == 3 for t in triples
    ):
        raise ManifestError(f"arena head: attempts are {triples!r}, expected triples")
    body["attempts"] = tuple(tuple(triple) for triple in triples)
    return ArenaHead(**body)


def _frame(kind: int, body: dict[str, Any], tail: bytes) -> bytes:
    text = json.dumps(body, sort_keys=True).encode("ascii")
    if len(text) > MAX_JSON_BYTES or len(tail) > MAX_TAIL_BYTES:
        raise ManifestError(f"record of {len(text)} + {len(tail)} bytes is over the format's limit")
    sizes = (FORMAT_VERSION, kind, len(text), len(tail))
    check = digest(struct.pack("<HHII", *sizes) + text + tail)
    return _PRELUDE.pack(_MAGIC, *sizes, check) + text + tail


def _unframe(kind: int, raw: bytes) -> tuple[dict[str, Any], bytes]:
    if len(raw) < _PRELUDE.size:
        raise ManifestError(f"record of {len(raw)} bytes is shorter than its prelude")
    magic, version, got_kind, text_bytes, tail_bytes, check = _PRELUDE.unpack_from(raw)
    if magic != _MAGIC:
        raise ManifestError("no record here: the magic bytes are missing")
    if text_bytes > MAX_JSON_BYTES or tail_bytes > MAX_TAIL_BYTES:
        raise ManifestError(
            f"record claims {text_bytes} + {tail_bytes} bytes, over the format's limit"
        )
    end = _PRELUDE.size + text_bytes + tail_bytes
    if end > len(raw):
        raise ManifestError(f"record claims {end} bytes, {len(raw)} are there")
    payload = raw[_PRELUDE.size : end]
    if digest(struct.pack("<HHII", version, got_kind, text_bytes, tail_bytes) + payload) != check:
        raise ManifestError("record's checksum is wrong: torn or damaged")
    if version not in READABLE_VERSIONS:
        raise FormatVersionError(
            f"record of format version {version}; this library reads {READABLE_VERSIONS}: "
            "use the library version that wrote it, or remove it with `planaria clean --job NAME`"
        )
    if got_kind != kind:
        raise ManifestError(f"record of kind {got_kind}, expected {kind}")
    try:
        body = json.loads(payload[:text_bytes])
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"record's text is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ManifestError(f"record's text is a {type(body).__name__}, expected an object")
    return body, bytes(payload[text_bytes:])


def _exact_fields(kind: type, body: dict[str, Any], without: set[str]) -> dict[str, Any]:
    wanted = {field.name for field in fields(kind)} - without
    if set(body) != wanted:
        odd = sorted(set(body) ^ wanted)
        raise ManifestError(f"{kind.__name__}: missing or unknown fields {odd}")
    return body


def _generation(value: object) -> Generation:
    if not isinstance(value, dict) or set(value) != {"epoch", "step", "id"}:
        raise ManifestError(f"generation is {value!r}, expected epoch, step and id")
    return Generation(**value)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ManifestError(f"{name} is {value!r}, expected a whole number from {low} to {high}")


def _check_str(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ManifestError(f"{name} is {value!r}, expected text")


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise ManifestError(f"{name} is {value!r}, expected text of 1 to 256 characters")


def _check_hex(name: str, value: object, length: int) -> None:
    if not isinstance(value, str) or len(value) != length or set(value) - set("0123456789abcdef"):
        raise ManifestError(f"{name} is {value!r}, expected {length} hexadecimal digits")


def _unhex(name: str, value: object) -> bytes:
    _check_hex(name, value, 2 * DIGEST_BYTES)
    return bytes.fromhex(str(value))
