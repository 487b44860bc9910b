"""What a call costs before a kernel does anything: kv_cache_update of one token, seven tensors."""

from __future__ import annotations

import torch
from common import Row, print_rows, time_in_turns

import polyop

# Small enough that the work itself takes well under a microsecond; outputs are given, so nothing is allocated.
k_cache, v_cache = torch.zeros(2, 1, 1, 1, 8).unbind()
k, v = torch.zeros(2, 1, 1, 8).unbind()
offsets = torch.tensor([0, 1], dtype=torch.int32)
positions = torch.zeros(1, dtype=torch.int32)
page_table = torch.zeros(1, 1, dtype=torch.int32)


def direct():
    polyop.ops.kv_cache_update(
        k_cache, v_cache, k, v, update_offsets=offsets, write_positions=positions, page_table=page_table
    )


def through_torch():
    torch.ops.polyop.kv_cache_update(
        k_cache, v_cache, k, v, update_offsets=offsets, write_positions=positions, page_table=page_table
    )


seconds = time_in_turns({"direct": direct, "torch.ops": through_torch})
rows = [Row("kv_cache_update, 7 tensors", seconds["direct"], seconds["torch.ops"])]
print_rows("call overhead", "torch.ops.polyop", rows)
