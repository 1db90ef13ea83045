"""The code: sizes, spans and zfec's matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import zfec

from erasure import Code, CodeError, field
from tests.erasure import naive

SHAPES = [(k, m) for k in range(1, 9) for m in range(1, 6)] + [
    *((10, 4), (16, 4), (16, 16), (20, 9), (31, 33), (32, 1), (32, 32), (1, 63), (2, 62)),
]


def zfec_rows(k, m):
    """Read zfec's matrix off its public interface: encode the unit vectors."""
    units = [bytes(row) for row in np.eye(k, dtype=np.uint8)]
    made = zfec.Encoder(k, k + m).encode(units, list(range(k, k + m)))
    return np.array([list(block) for block in made], np.uint8)


@pytest.mark.parametrize(("k", "m"), SHAPES)
def test_the_matrix_is_zfecs(k, m):
    """Fragments can be exchanged with zfec: our parity rows equal the ones it encodes with."""
    assert np.array_equal(Code(k, m).parity_rows, zfec_rows(k, m))


def test_the_matrix_never_changes():
    """Stored fragments stay readable: the matrix of one code equals the numbers written here."""
    assert Code(4, 2).parity_rows.tolist() == [[119, 64, 56, 14], [199, 167, 13, 108]]


def test_more_parity_keeps_the_rows():
    """A code with more parity extends the smaller one: rows are compared."""
    assert np.array_equal(Code(5, 7).parity_rows[:3], Code(5, 3).parity_rows)


def test_no_parity_is_a_code():
    """Zero parity is legal: there are no rows, and the data fragments are all there are."""
    assert Code(3, 0).parity_rows.shape == (0, 3)
    assert Code(3, 0).n == 3


def test_rows_cannot_be_changed():
    """Cached matrices are shared: writing into one is refused."""
    with pytest.raises(ValueError, match="read-only"):
        Code(4, 2).parity_rows[0, 0] = 1


@pytest.mark.parametrize(("k", "m"), [(1, 2), (2, 2), (3, 2), (4, 3), (5, 2)])
def test_recover_rows_of_every_pattern(k, m):
    """Any k fragments give all n: the rows times the matrix of the k are the whole matrix."""
    code = Code(k, m)
    matrix = np.vstack([np.eye(k, dtype=np.uint8), code.parity_rows])
    for have in itertools.combinations(range(code.n), k):
        rows = code.recover_rows(have, range(code.n))
        assert np.array_equal(field.matmul(rows, matrix[list(have)]), matrix)


@pytest.mark.parametrize(
    "have", [(0, 1), (0, 1, 1), (1, 0, 2), (0, 1, 2, 3), (0, 1, 5), (-1, 0, 1)]
)
def test_recover_rows_refuses_other_indices(have):
    """Exactly k distinct indices of the code, in order: everything else is a CodeError."""
    with pytest.raises(CodeError, match="expected"):
        Code(3, 2).recover_rows(have, (0,))


def test_recover_rows_refuses_a_wanted_index():
    """What is wanted must be a fragment of the code."""
    with pytest.raises(CodeError, match="from 0 to 4, got 5"):
        Code(3, 2).recover_rows((0, 1, 2), (5,))


@pytest.mark.parametrize("shard_bytes", [0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 1001])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 32])
def test_spans_tile_the_shard(k, shard_bytes):
    """Every byte of a shard lies in one data fragment: spans are joined and lengths compared."""
    code = Code(k, 1)
    spans = [code.span(i, shard_bytes) for i in range(k)]
    assert [at for start, stop in spans for at in range(start, stop)] == list(range(shard_bytes))
    assert [code.length(i, shard_bytes) for i in range(k)] == [b - a for a, b in spans]
    assert code.length(0, shard_bytes) == code.length(k, shard_bytes)
    assert code.length(k, shard_bytes) == code.fragment_bytes(shard_bytes)
    assert code.fragment_bytes(shard_bytes) == (shard_bytes + k - 1) // k


@pytest.mark.parametrize(
    ("k", "m"), [(0, 1), (33, 0), (1, -1), (32, 33), (1, 64), (2.0, 1), (True, 1), ("2", 1)]
)
def test_a_code_out_of_bounds_is_refused(k, m):
    """k, m and their sum have limits: beyond them no Code exists."""
    with pytest.raises(CodeError, match="code: expected"):
        Code(k, m)


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_span_is_for_data(index):
    """Parity has no place in the shard: its span, or that of no fragment, is refused."""
    with pytest.raises(CodeError, match="data fragment"):
        Code(3, 1).span(index, 10)


@pytest.mark.parametrize("index", [-1, 4, True, None])
def test_length_is_for_fragments(index):
    """The length of something that is no fragment is refused."""
    with pytest.raises(CodeError, match="fragment index"):
        Code(3, 1).length(index, 10)


def test_a_negative_size_is_refused():
    """A shard has at least 0 bytes."""
    with pytest.raises(CodeError, match="at least 0"):
        Code(3, 1).fragment_bytes(-1)


def test_a_code_prints_as_users_write_it():
    """A code prints as k+m, as in the name of a layout."""
    assert str(Code(3, 1)) == "3+1"


def test_the_field_multiplies_like_the_twin():
    """All 65,536 products of the table arithmetic equal the schoolbook's."""
    values = np.arange(256, dtype=np.uint8)
    table = field.multiply(values[:, None], values[None, :])
    assert [bytes(row) for row in table] == naive.TABLES


def test_inverse_swaps_rows_where_it_must():
    """A matrix with a zero on the diagonal has its inverse: multiplied, they give the identity."""
    matrix = np.array([[0, 3, 1], [2, 0, 7], [5, 9, 0]], np.uint8)
    assert np.array_equal(field.matmul(matrix, field.inverse(matrix)), np.eye(3, dtype=np.uint8))
