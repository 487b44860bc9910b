"""Makers of inputs: sequences in packed, padded or paged memory, with poison in all that must not be read.

A kernel that reads past a length, or a page that it was not given, turns its result into NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: In page-table entries that must not be read: no page.
NO_PAGE = 1 << 30


def poison(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """NaN everywhere; the least number where the dtype has no NaN."""
    if dtype.is_floating_point:
        return torch.full(tuple(shape), float("nan")).to(dtype)
    return torch.full(tuple(shape), torch.iinfo(dtype).min, dtype=dtype)


def offsets_of(lengths: Sequence[int]) -> torch.Tensor:
    """i32 [B + 1]: cumulative lengths from 0, as packed operands want them."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed_rows(sequences: Sequence[torch.Tensor], spare_rows: int = 2) -> torch.Tensor:
    """[T + spare, ...] of B sequences [L, ...]; poison in the spare rows. Raises ValueError without a sequence."""
    if not sequences:
        raise ValueError("packed_rows: sequences is empty; at least one gives shape and dtype")
    first = sequences[0]
    return torch.cat([*sequences, poison((spare_rows, *first.shape[1:]), first.dtype)])


def padded_rows(sequences: Sequence[torch.Tensor], spare_rows: int = 2) -> torch.Tensor:
    """[B, longest + spare, ...] of B sequences [L, ...]; poison behind each. Raises ValueError without a sequence."""
    if not sequences:
        raise ValueError("padded_rows: sequences is empty; at least one gives shape and dtype")
    first = sequences[0]
    longest = max(len(sequence) for sequence in sequences)
    rows = poison((len(sequences), longest + spare_rows, *first.shape[1:]), first.dtype)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


def paged_rows(
    sequences: Sequence[torch.Tensor], page_size: int, *, spare_pages: int = 2, spare_columns: int = 1, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool [P, R, ...] of B sequences [L, ...] on pages in random order, and the page table i32 [B, W].

    Unused slots and pages hold poison, unused entries of the table NO_PAGE. The same lengths and seed give the same
    pages, so that keys and values can share one table. Raises ValueError without a sequence or with pages below 1.
    """
    if not sequences or page_size < 1:
        raise ValueError(
            f"paged_rows: got {len(sequences)} sequences and pages of {page_size}, wanted 1 or more of each"
        )
    first = sequences[0]
    pages = [-(-len(sequence) // page_size) for sequence in sequences]
    num_pages = sum(pages) + spare_pages
    free = iter(torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist())
    pool = poison((num_pages, page_size, *first.shape[1:]), first.dtype)
    table = torch.full((len(sequences), max(pages) + spare_columns), NO_PAGE, dtype=torch.int32)
    for b, sequence in enumerate(sequences):
        for column, part in enumerate(sequence.split(page_size) if len(sequence) else ()):
            page = next(free)
            table[b, column] = page
            pool[page, : len(part)] = part
    return pool, table
