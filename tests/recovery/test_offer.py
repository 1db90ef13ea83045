"""Offers: everything that must agree is in them, and any size that makes no sense is refused."""

from __future__ import annotations

import json

import pytest

from erasure.code import Code
from erasure.digest import ALGORITHM, CHUNK_BYTES
from recovery.errors import RecoveryError
from recovery.manifest import FORMAT_VERSION, Generation
from recovery.offer import check_offer, encode_offer

BASE = Generation(1, 2, "b" * 32)


def test_an_offer_says_all_that_must_agree():
    """Format, digests, code, length and base, in canonical bytes; no base is said too."""
    assert json.loads(encode_offer(Code(6, 2), 123, BASE)) == {
        "format": FORMAT_VERSION,
        "algorithm": ALGORITHM,
        "chunk_bytes": CHUNK_BYTES,
        "k": 6,
        "m": 2,
        "shard_bytes": 123,
        "base": BASE.id,
    }
    assert json.loads(encode_offer(Code(1, 0), 0, None))["base"] == ""


@pytest.mark.parametrize("size", [0, 1, (1 << 50) - 1])
def test_any_size_of_the_other_shard_is_taken(size):
    """Shards differ in length, and an empty one is a shard: the size is what comes back."""
    code = Code(2, 1)
    assert check_offer(encode_offer(code, size, BASE), encode_offer(code, 7, BASE), 3) == size


@pytest.mark.parametrize("size", [-1, 1 << 50, True, None, "7", 1.0])
def test_a_size_out_of_range_is_refused(size):
    """What no shard can have is refused, with the owner's rank."""
    code = Code(2, 1)
    raw = json.dumps({**json.loads(encode_offer(code, 7, BASE)), "shard_bytes": size}).encode()
    with pytest.raises(RecoveryError, match="rank 3 offers a shard of"):
        check_offer(raw, encode_offer(code, 7, BASE), 3)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (encode_offer(Code(3, 1), 7, BASE), "k"),
        (encode_offer(Code(2, 2), 7, BASE), "m"),
        (encode_offer(Code(2, 1), 7, None), "base"),
        (encode_offer(Code(2, 1), 7, Generation(1, 1, "a" * 32)), "base"),
    ],
)
def test_every_difference_but_the_size_is_refused_and_named(other, name):
    """Another code or another base on one rank: what it offers and what was expected are told."""
    mine = encode_offer(Code(2, 1), 7, BASE)
    expected = json.loads(mine)[name]
    with pytest.raises(RecoveryError) as caught:
        check_offer(other, mine, 3)
    got = json.loads(other)[name]
    assert str(caught.value) == f"rank 3 offers {[(name, got)]}, expected {[expected]}"


@pytest.mark.parametrize("raw", [b"", b"{", b"7", b"[]", b"null"])
def test_what_is_no_offer_is_refused(raw):
    """Garbage where an offer should be names the rank that wrote it."""
    with pytest.raises(RecoveryError, match="rank 3"):
        check_offer(raw, encode_offer(Code(2, 1), 7, BASE), 3)
