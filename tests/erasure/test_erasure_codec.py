"""Encode and decode over both kernels: every pattern, every awkward length, against the twin."""

from __future__ import annotations

import itertools
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erasure import Code, Codec
from tests.erasure import naive


def random_data(rng, lengths):
    """Draw data fragments of these lengths."""
    return [rng.integers(0, 256, n, np.uint8) for n in lengths]


def expected_fragments(code, data):
    """Return all n fragments by the twin: the data as given, then the parity."""
    longest = max(len(block) for block in data)
    blocks = [bytes(block) for block in data]
    return blocks + [naive.combine(list(row), blocks, longest) for row in code.parity_rows.tolist()]


def arrays(blocks):
    """Turn bytes into read-only arrays, as sources may be."""
    return [np.frombuffer(block, np.uint8) for block in blocks]


def encoded(codec, data):
    """Encode into fresh buffers filled with rubbish."""
    longest = max(len(block) for block in data)
    parity = [np.full(longest, 0xEE, np.uint8) for _ in range(codec.code.m)]
    codec.encode(data, parity)
    return [bytes(block) for block in parity]


def decoded(codec, fragments, have, want):
    """Decode into fresh buffers filled with rubbish, each as long as its fragment."""
    sources = arrays(fragments)
    outputs = {i: np.full(len(fragments[i]), 0xEE, np.uint8) for i in want}
    codec.decode({i: sources[i] for i in have}, outputs)
    return {i: bytes(block) for i, block in outputs.items()}


def check(codec, data, have, want):
    """Encode equals the twin, and `want` made from `have` equals what was there."""
    fragments = expected_fragments(codec.code, data)
    assert encoded(codec, data) == fragments[codec.code.k :]
    assert decoded(codec, fragments, have, want) == {i: fragments[i] for i in want}


@pytest.mark.parametrize(("k", "m"), list(itertools.product((1, 2, 3, 4, 5), (1, 2, 3))))
def test_every_pattern_of_loss(kernel, rng, k, m):
    """Any k fragments give all others: every choice of k, for fragments with an odd tail."""
    code = Code(k, m)
    codec = Codec(code, kernel)
    data = random_data(rng, [45] * (k - 1) + [38])
    fragments = expected_fragments(code, data)
    assert encoded(codec, data) == fragments[k:]
    for have in itertools.combinations(range(code.n), k):
        lost = [i for i in range(code.n) if i not in have]
        assert decoded(codec, fragments, have, lost) == {i: fragments[i] for i in lost}


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 32])
@pytest.mark.parametrize("extra", [None, -1, 0, 1, 5, 1000, 4097])
def test_every_length_of_shard(kernel, rng, k, extra):
    """Shards of 0, 1, k-1, k, k+1 or more bytes come back: cut by span, as many lost as may be."""
    code = Code(k, 3)
    for shard_bytes in {0, 1} if extra is None else {k + extra}:
        shard = rng.integers(0, 256, shard_bytes, np.uint8)
        data = [shard[slice(*code.span(i, shard_bytes))] for i in range(k)]
        lost = range(min(3, k))
        check(Codec(code, kernel), data, [i for i in range(code.n) if i not in lost], lost)


@pytest.mark.parametrize("lengths", list(itertools.permutations((0, 31, 64, 200))))
def test_uneven_data(kernel, rng, lengths):
    """Data of any lengths counts as padded with zeros: a data and a parity fragment are lost."""
    code = Code(4, 2)
    data = random_data(rng, lengths)
    for lost in range(4):
        check(Codec(code, kernel), data, [i for i in range(5) if i != lost], [lost, 5])


def test_parity_longer_than_all_data(kernel, rng):
    """Parity may be longer than every data fragment of a slice: past their end it is zeros."""
    codec = Codec(Code(2, 1), kernel)
    data = random_data(rng, (10, 20))
    parity = np.full(50, 0xEE, np.uint8)
    codec.encode(data, [parity])
    padded = naive.combine(codec.code.parity_rows[0].tolist(), [bytes(d) for d in data], 50)
    assert bytes(parity) == padded
    back = np.full(50, 0xEE, np.uint8)
    codec.decode({1: data[1], 2: parity}, {0: back})
    assert bytes(back) == bytes(data[0]).ljust(50, b"\0")


def test_a_short_wanted_buffer_gets_the_first_bytes(kernel, rng):
    """Data is wanted up to its own length only: a prefix of it is decoded."""
    codec = Codec(Code(3, 1), kernel)
    fragments = expected_fragments(codec.code, random_data(rng, (90, 90, 90)))
    out = np.zeros(17, np.uint8)
    codec.decode(dict(enumerate(arrays(fragments)[1:], 1)), {0: out})
    assert bytes(out) == fragments[0][:17]


def test_a_present_fragment_can_be_wanted(kernel, rng):
    """A fragment that is there may be asked for: it is copied, and zeros follow its end."""
    codec = Codec(Code(2, 1), kernel)
    data = random_data(rng, (20, 30))
    out = np.full(25, 0xEE, np.uint8)
    codec.decode(dict(enumerate(data)), {0: out})
    assert bytes(out) == bytes(data[0]).ljust(25, b"\0")


def test_more_than_k_fragments(kernel, rng):
    """More fragments than needed are no harm: all but one are given."""
    check(Codec(Code(4, 3), kernel), random_data(rng, [50] * 4), [0, 2, 3, 4, 5, 6], [1])


@given(draw=st.data())
def test_any_code_any_lengths_any_loss(kernel, draw):
    """Drawn codes up to 32+32, lengths and losses: encode and decode equal the twin."""
    k = draw.draw(st.integers(1, 32), "k")
    code = Code(k, draw.draw(st.integers(0, 64 - k), "m"))
    lengths = draw.draw(st.lists(st.integers(0, 130), min_size=k, max_size=k), "lengths")
    order = draw.draw(st.permutations(range(code.n)), "order")
    spare = draw.draw(st.integers(0, code.m), "spare")
    seed = draw.draw(st.integers(0, 2**32), "seed")
    data = random_data(np.random.default_rng(seed), lengths)
    check(Codec(code, kernel), data, order[: k + spare], order[k + spare :])


def test_a_block_of_megabytes(isal, zfec_kernel, rng):
    """Both kernels give the same bytes for usual block sizes, at unaligned addresses."""
    slab = rng.integers(0, 256, 6 * 1_100_017, np.uint8)
    data = [slab[i * 1_100_017 :][:1_100_017] for i in range(6)]
    made = [encoded(Codec(Code(6, 2), kernel), data) for kernel in (isal, zfec_kernel)]
    assert made[0] == made[1]
    for kernel in (isal, zfec_kernel):
        codec = Codec(Code(6, 2), kernel)
        fragments = [bytes(block) for block in data] + made[0]
        back = decoded(codec, fragments, (1, 2, 3, 5, 6, 7), (0, 4))
        assert back == {0: fragments[0], 4: fragments[4]}


def test_blocks_at_equal_offsets(kernel, rng):
    """Callers may work block by block: parity made of slices equals the parity of the whole."""
    codec = Codec(Code(3, 2), kernel)
    data = random_data(rng, (1000, 1000, 890))
    parity = [np.zeros(1000, np.uint8) for _ in range(2)]
    for at in range(0, 1000, 130):
        codec.encode([d[at : at + 130] for d in data], [p[at : at + 130] for p in parity])
    assert [bytes(p) for p in parity] == encoded(codec, data)


def test_no_bulk_memory_is_allocated(kernel):
    """Uneven sources are not copied into padded ones: traced memory stays far below one buffer."""
    size = 4 * 1024 * 1024
    data = [np.ones(size - i * 70_000, np.uint8) for i in range(3)]
    codec = Codec(Code(3, 1), kernel)
    parity, back = np.zeros(size, np.uint8), np.zeros(size - 70_000, np.uint8)
    tracemalloc.start()
    try:
        codec.encode(data, [parity])
        codec.decode({0: data[0], 2: data[2], 3: parity}, {1: back})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size // 8
    assert back.all()


class NoKernel:
    """A kernel that must not be asked."""

    name = "none"

    def combine(self, recipe):
        """Fail the test."""
        raise AssertionError(recipe)


def test_copies_need_no_arithmetic(rng):
    """With k = 1 all is plain copies: the kernel is never asked, to encode or to decode."""
    codec = Codec(Code(1, 3), NoKernel())
    data = random_data(rng, (1000,))
    assert encoded(codec, data) == [bytes(data[0])] * 3
    assert decoded(codec, [bytes(data[0])] * 4, [2], [0, 3]) == dict.fromkeys(
        (0, 3), bytes(data[0])
    )


def test_no_parity_no_work(rng):
    """No parity is legal: encode writes nothing, and decode copies."""
    codec = Codec(Code(2, 0), NoKernel())
    data = random_data(rng, (10, 9))
    codec.encode(data, [])
    assert decoded(codec, [bytes(d) for d in data], (0, 1), (1,)) == {1: bytes(data[1])}


def test_nothing_wanted_nothing_written(kernel, rng):
    """An empty want is no error: the sources are as they were."""
    data = random_data(rng, (10, 10))
    before = [bytes(d) for d in data]
    Codec(Code(2, 1), kernel).decode(dict(enumerate(data)), {})
    assert [bytes(d) for d in data] == before


def test_one_codec_in_many_threads(kernel, rng):
    """A codec is shared by threads: four encode their own data at once, and each gets its own."""
    codec = Codec(Code(3, 2), kernel)
    stripes = [random_data(rng, [50_000 + i] * 3) for i in range(4)]
    alone = [encoded(codec, data) for data in stripes]
    results = [[] for _ in stripes]

    def work(data, result):
        result.extend(encoded(codec, data) for _ in range(5))

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(stripes, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[parity] * 5 for parity in alone]
