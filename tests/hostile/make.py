"""Write the attacks of this folder: ``python -m tests.hostile.make``.

A folder for each fuzz target, a file for each attack, named after what it tries. They are kept as
files, so that each is what it was on the day it was thought of, whatever becomes of this script.
Attacks that a fuzzer has found lie here too and are not written by it. Nothing is overwritten.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

from erasure.digest import digest
from recovery.manifest import FORMAT_VERSION
from replica.frames import encode_frame
from tests.data.job import frames_of
from tests.fuzz.decisions import FROZEN, RANK_1, VOTES, bodies, framed
from tests.fuzz.edges import FACTS, HEADER, IMAGE, OURS, TREE
from tests.fuzz.target import dumped
from tests.replica.snapshot_tools import with_header

HERE = Path(__file__).resolve().parent
RECORD, HEAD = frames_of("record")[0], frames_of("head")[0]
Attacks = dict[str, bytes]


class Payload:
    """Unpickled, it makes a file in the directory in which the process runs."""

    def __reduce__(self) -> Any:
        """Say what to call."""
        return open, ("marker", "w")


PICKLE = pickle.dumps(Payload())
NESTED = b"[" * 5000 + b"]" * 5000
EVERYWHERE = {
    "empty": b"",
    "pickle": PICKLE,
    "nested": NESTED,
    "no-text": b"\xff\xfe\x00",
    "infinity": b"Infinity",
    "null": b"null",
    "number-of-5000-digits": b"9" * 5000,
}


def with_part(raw: bytes, **changes: Any) -> bytes:
    """JSON with some members replaced."""
    return dumped(json.loads(raw) | changes)


def other_version(raw: bytes, version: int) -> bytes:
    """A whole record or head as another format version frames it."""
    _, _, *rest, _ = struct.unpack_from("<8sHHII16s", raw)
    sizes = struct.pack("<HHII", version, *rest)
    return b"PLANARIA" + sizes + digest(sizes + raw[36:]) + raw[36:]


def of_frames(raw: bytes, kind: int) -> Attacks:
    """Attacks on a record or a head, raw bytes."""
    text = bodies([raw])[0]
    return {
        "empty": b"",
        "zeros": bytes(4096),
        "pickle": PICKLE,
        "pickle-framed": framed(kind, PICKLE.replace(b"\0", b"")),
        "nested": framed(kind, NESTED),
        "another-kind": framed(3 - kind, text),
        "length-of-all-ones": raw[:12] + b"\xff" * 8 + raw[20:],
        "length-of-the-limit": raw[:12] + struct.pack("<II", 8192, 1 << 28) + raw[20:],
        "version-0": other_version(raw, 0),
        "version-next": other_version(raw, FORMAT_VERSION + 1),
        "version-65535": other_version(raw, 65535),
    }


def of_text(raw: bytes, **fields: list[Any]) -> Attacks:
    """Attacks on single fields of a text whose checksum is right."""
    text, _, tail = bodies([raw])[0].partition(b"\0")
    return EVERYWHERE | {
        f"{name}-{number}": with_part(text, **{name: value}) + b"\0" + tail
        for name, values in fields.items()
        for number, value in enumerate(values)
    }


def of_images() -> Attacks:
    """Attacks on a whole image."""
    raw = IMAGE.tobytes()
    tail = raw[8:]
    return {
        "empty": b"",
        "pickle": PICKLE,
        "header-length-minus-1": b"\xff" * 8 + tail,
        "header-length-2-to-63": (1 << 63).to_bytes(8, "little") + tail,
        "header-length-of-the-limit": (100_000_000).to_bytes(8, "little") + tail,
        "header-longer-than-the-file": len(raw).to_bytes(8, "little") + tail,
        "header-of-nothing": bytes(8) + tail,
        "header-a-pickle": with_header(IMAGE, PICKLE).tobytes(),
        "cut": raw[: len(raw) // 2],
    }


def of_headers() -> Attacks:
    """Attacks on the header's text: every length, offset, name and version."""
    members = json.loads(HEADER)
    first = next(name for name in members if name not in ("__metadata__", "planaria.tree"))
    meta = json.loads(members["__metadata__"]["planaria"])

    def entry(**changes: Any) -> bytes:
        return dumped(members | {first: members[first] | changes})

    def told(**changes: Any) -> bytes:
        return dumped(members | {"__metadata__": {"planaria": json.dumps(meta | changes)}})

    return EVERYWHERE | {
        "metadata-a-pickle": dumped(
            members | {"__metadata__": {"planaria": PICKLE.decode("latin-1")}}
        ),
        "no-metadata": dumped({k: v for k, v in members.items() if k != "__metadata__"}),
        "format-next": told(format=2),
        "format-0": told(format=0),
        "format-true": told(format=True),
        "owner-outside": told(owner=99),
        "epoch-negative": told(epoch=-1),
        "hole": entry(data_offsets=[64, 128]),
        "offsets-2-to-63": entry(data_offsets=[0, 1 << 63]),
        "offsets-falling": entry(data_offsets=[8, 0]),
        "shape-overflows": entry(shape=[1 << 32, 1 << 32]),
        "shape-negative": entry(shape=[-1, -24]),
        "dtype-unknown": entry(dtype="F31"),
        "doubled-key": HEADER[:-1] + b"," + dumped({first: members[first]})[1:],
    }


def of_trees() -> Attacks:
    """Attacks on the structure."""
    tree = json.loads(TREE)

    def root(node: Any) -> bytes:
        return dumped(tree | {"root": ["tuple", ["dict", "x", node], None]})

    return EVERYWHERE | {
        "format-next": dumped(tree | {"format": 2}),
        "leaves-none": dumped(tree | {"leaves": None}),
        "leaf-asked-for-often": root(["list", *[["leaf", 0]] * 500]),
        "leaf-not-there": root(["leaf", 1 << 40]),
        "path-of-a-module": root(["path", "os.system", "x"]),
        "dtype-of-objects": root(["scalar", "|O", ""]),
        "unknown-tag": root(["eval", "1"]),
        "a-million-values": b'{"root":[' + b"0," * 30_000 + b"0]}",
    }


def of_words() -> dict[str, Attacks]:
    """Attacks on what ranks say to each other."""
    report = json.loads(RANK_1)
    rank, rows, committed, failures = report[0]

    def row(at: int, value: Any) -> bytes:
        return dumped([[rank, [[*rows[0][:at], value, *rows[0][at + 1 :]]], committed, failures]])

    return {
        "reports": EVERYWHERE
        | {
            "world-without-end": row(5, 1 << 62),
            "world-over-the-limit": row(5, (1 << 20) + 1),
            "step-infinite": row(1, float("inf")),
            "shard-of-2-to-62": row(8, 1 << 62),
            "rank-not-there": dumped([[77, rows, committed, failures]]),
            "two-of-one-rank": dumped(report * 2),
            "failures-a-text": dumped([[rank, rows, committed, "abc"]]),
        },
        "frozen": EVERYWHERE
        | {
            "rank-not-there": with_part(FROZEN[0], reports=[[77, rows, committed, failures]]),
            "world-infinite": with_part(FROZEN[0], world=float("inf")),
            "owner-infinite": with_part(FROZEN[0], lost=[[float("inf"), "x"]]),
            "nested-to-the-brim": with_part(FROZEN[0], reports=json.loads("[" * 950 + "]" * 950)),
            "rejected-of-lists": with_part(FROZEN[0], rejected=[[[], [[]]]]),
            "generation-not-there": with_part(FROZEN[0], generation=[9, 9, "d" * 32]),
        },
        "vote": EVERYWHERE
        | {
            "bad-of-lists": with_part(VOTES[0], bad=[[[], [], []]]),
            "errors-of-numbers": with_part(VOTES[0], errors=[1]),
            "plan-of-lists": with_part(VOTES[0], plan=[[]]),
            "wrong-of-texts": with_part(VOTES[0], wrong=["ab"]),
        },
        "verdict": EVERYWHERE
        | {"again-nothing": b"again:", "again-a-list": b"again:[]", "go-and-more": b"go:now"},
        "texts": EVERYWHERE | {"numbers": b"[1]", "one-text": b'"abc"'},
        "offer": EVERYWHERE
        | {
            f"size-{number}": dumped({"shard_bytes": size})
            for number, size in enumerate([-1, 1 << 63, 1.5, True, None, float("nan")])
        },
        "admission": EVERYWHERE | {"no-number": b"take:", "long": b"take:" + b"9" * 30},
        "decision": EVERYWHERE | {"nearly": b"Committed", "padded": b" committed"},
        "mend-result": EVERYWHERE | {"no-number": b"done::", "huge": b"done:99999999999:"},
        "introduction": EVERYWHERE
        | {
            "nobody": dumped({"value": None}),
            "no-node": dumped({"value": {k: v for k, v in OURS.items() if k != "node"}}),
            "bytes-negative": dumped({"value": OURS | {"bytes": -1}}),
            "bytes-infinite": dumped({"value": OURS | {"bytes": float("inf")}}),
            "older-library": dumped({"value": OURS | {"same": {"library": "0", "format": 0}}}),
            "error-of-lists": dumped({"kind": [], "error": {}}),
        },
        "facts": EVERYWHERE
        | {
            "epoch-infinite": dumped({"value": FACTS | {"epoch": float("inf")}}),
            "memory-of-another": dumped({"value": FACTS | {"memory": {}}}),
        },
        "epoch": EVERYWHERE | {"negative": b"-1", "other-digits": "\u0661".encode()},
        "agreement": EVERYWHERE,
        "restore": {
            f"{place}-{name}": bytes([number]) + raw
            for number, place in enumerate(["report", "vote", "loaded", "frozen"])
            for name, raw in (EVERYWHERE | {"numbers": b"[1]"}).items()
        },
        "mend": {
            f"{place}-{name}": bytes([number]) + raw
            for number, place in enumerate(["report", "frozen", "sent", "result"])
            for name, raw in (EVERYWHERE | {"numbers": b"[1]", "rows": b"[[1,2,3,4]]"}).items()
        },
        "trailer": {"short": b"x" * 40, "wrong-digest": b"x" * 96, "nothing": b""},
        "bounded-json": EVERYWHERE,
    }


def all_attacks() -> dict[str, Attacks]:
    """Every attack by target and name."""
    numbers = [-1, 1 << 63, 1.5, True, None, "1", float("inf")]
    size = len(RECORD) + 44
    return {
        "record": of_frames(RECORD, 2),
        "record-text": of_text(
            RECORD,
            owner=numbers,
            world=[*numbers, 0, 1 << 40],
            k=[*numbers, 0, 33],
            fragment=[*numbers[1:], -2, 64],
            shard_bytes=[*numbers, 1 << 60],
            chunk_bytes=[*numbers, 0, 1],
            generation=[None, [], {"epoch": 1, "step": float("inf"), "id": "ab" * 16}],
            shard_digest=["", "zz" * 16, None],
            algorithm=["md5", None, ["xxh3-128"]],
        ),
        "head": of_frames(HEAD, 1),
        "head-text": of_text(
            HEAD,
            position=numbers,
            epoch=numbers,
            pid=numbers,
            job=["", None, "x" * 300],
            attempts=[None, [[]], [["ab" * 16, "cd" * 16, float("inf")]], "abc"],
            committed=[[], {}, {"epoch": 1, "step": 1, "id": None}],
        ),
        "frame": {
            "empty": b"",
            "length-of-all-ones": encode_frame(2, b"abc")[:16] + b"\xff" * 24,
            "pickle": PICKLE,
        },
        "frame-file": {
            "empty": b"",
            "one-byte": b"P",
            "frame-in-the-wrong-place": encode_frame(3, RECORD) + bytes(size),
            "no-second-half": encode_frame(2, RECORD),
            "pickle-in-both": encode_frame(2, PICKLE) + encode_frame(3, PICKLE),
        },
        "image": of_images(),
        "image-header": of_headers(),
        "tree": of_trees(),
        **of_words(),
    }


def main() -> None:
    """Write what is not there yet."""
    new = 0
    for target, attacks in all_attacks().items():
        (HERE / target).mkdir(exist_ok=True)
        for name, raw in attacks.items():
            path = HERE / target / name
            if not path.exists():
                path.write_bytes(raw)
                new += 1
    sys.stdout.write(f"{new} attacks written\n")


if __name__ == "__main__":
    main()
