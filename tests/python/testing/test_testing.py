"""polyop.testing as a user calls it: inputs in every layout, and the report of a comparison that fails."""

import math

import pytest
import torch

from polyop import ops
from polyop.testing import (
    NO_PAGE,
    assert_within_bound,
    offsets_of,
    output_bound,
    packed_rows,
    padded_rows,
    paged_rows,
    poison,
)

LENGTHS = [5, 0, 3, 8]
SEQUENCES = [torch.randn(length, 2, 8, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_poison_is_nan_or_the_least_number(dtype):
    assert bool(poison((2, 3), dtype).float().isnan().all())
    assert bool((poison((2,), torch.int8) == -128).all())


def test_pages_hold_the_sequences_and_nothing_else_but_poison():
    pool, table = paged_rows(SEQUENCES, 3)
    assert pool.shape == (2 + 1 + 3 + 2, 3, 2, 8) and table.shape == (4, 4)
    for sequence, row in zip(SEQUENCES, table.tolist(), strict=True):
        used = -(-len(sequence) // 3)
        assert row[used:] == [NO_PAGE] * (4 - used)
        rows = torch.cat([pool[page] for page in row[:used]]) if used else pool[0, :0]
        assert torch.equal(rows[: len(sequence)], sequence) and bool(rows[len(sequence) :].isnan().all())
    assert int((~pool.isnan()).sum()) == sum(sequence.numel() for sequence in SEQUENCES)
    assert torch.equal(paged_rows(SEQUENCES, 3)[1], table)


def test_every_layout_gives_the_same_attention():
    queries = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    rows = {"query_offsets": offsets_of([1] * 4)}
    q = packed_rows(list(queries.split(1)), spare_rows=0)
    pool, table = paged_rows(SEQUENCES, 3)
    wanted = ops.attention(q, pool, pool, page_table=table, kv_lengths=lengths, **rows)
    keys = packed_rows(SEQUENCES)
    assert torch.equal(ops.attention(q, keys, keys, kv_form="packed", kv_offsets=offsets_of(LENGTHS), **rows), wanted)
    keys = padded_rows(SEQUENCES)
    assert torch.equal(ops.attention(q, keys, keys, kv_form="padded", kv_lengths=lengths, **rows), wanted)
    assert bool(wanted.isfinite().all()) and not wanted[1].any()


def test_makers_refuse_nothing_at_all():
    for maker in (packed_rows, padded_rows):
        with pytest.raises(ValueError, match="sequences is empty"):
            maker([])
    with pytest.raises(ValueError, match="pages of 0"):
        paged_rows(SEQUENCES, 0)


def test_comparison_reports_the_worst_element():
    expected = torch.zeros(3, 4)
    got = expected.clone()
    got[0, 1], got[2, 3] = 0.25, -1.0
    with pytest.raises(
        AssertionError, match=r"out: 2 of 12 .* worst at \[2, 3\]: got -1, expected 0, error 1, bound 0.125"
    ):
        assert_within_bound(got, expected, 0.125, "out")
    assert_within_bound(got, expected, 1.0)
    assert_within_bound(got[:0], expected[:0], 0.0)
    with pytest.raises(AssertionError, match=r"shape \(4,\), expected \(3, 4\)"):
        assert_within_bound(got[0], expected, 1.0)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_comparison_wants_specials_in_their_place(special):
    expected = torch.tensor([1.0, special])
    assert_within_bound(expected, expected, 0.0)
    for other in (2.0, math.nan, math.inf, -math.inf):
        if other != special and not (math.isnan(other) and math.isnan(special)):
            with pytest.raises(AssertionError, match=r"worst at \[1\]"):
                assert_within_bound(torch.tensor([1.0, other]), expected, 100.0)
            with pytest.raises(AssertionError, match=r"worst at \[1\]"):
                assert_within_bound(expected, torch.tensor([1.0, other]), 100.0)


def test_bound_of_an_output_is_a_rounding_of_either_side():
    exact = torch.tensor([3.3, 1e-9, 0.0])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_within_bound(exact.to(dtype), exact, output_bound(exact, dtype))
