"""Comparing results within computed bounds, for polyop's own tests and for those of its users."""

from .comparison import UNIT_ROUNDOFF, assert_within_bound, output_bound

__all__ = ["UNIT_ROUNDOFF", "assert_within_bound", "output_bound"]
