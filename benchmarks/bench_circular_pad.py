"""circular_pad against torch.nn.functional.pad(mode="circular")."""

from __future__ import annotations

import torch
from common import Row, print_rows, require_close, time_in_turns
from shapes_file import describe, read_shapes

import polyop

rows = []
for case in read_shapes("circular_pad"):
    shape = [int(extent) for extent in case["shape"].split("x")]
    padding = [case["pad"]] * 4
    x = torch.randn(shape)
    wanted = torch.nn.functional.pad(x, padding, mode="circular")
    require_close("circular_pad", polyop.ops.circular_pad(x, padding), wanted, 0.0)
    seconds = time_in_turns(
        {
            "ours": lambda x=x, p=padding: polyop.ops.circular_pad(x, p),
            "torch": lambda x=x, p=padding: torch.nn.functional.pad(x, p, mode="circular"),
        }
    )
    moved = (x.numel() + wanted.numel()) * x.element_size()
    rows.append(Row(describe(case), seconds["ours"], seconds["torch"], bytes_moved=moved))
print_rows("circular_pad f32", "torch", rows)
