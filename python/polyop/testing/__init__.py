"""Inputs with poison around them, bounds, and comparison with a report of the worst element, for polyop's own tests and
for those of its users."""

from .comparison import UNIT_ROUNDOFF, assert_within_bound, output_bound
from .inputs import NO_PAGE, offsets_of, packed_rows, padded_rows, paged_rows, poison

__all__ = [
    "NO_PAGE",
    "UNIT_ROUNDOFF",
    "assert_within_bound",
    "offsets_of",
    "output_bound",
    "packed_rows",
    "padded_rows",
    "paged_rows",
    "poison",
]
