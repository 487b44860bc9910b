"""circular_pad: beside torch's padding where torch has it."""

from __future__ import annotations

import math
from typing import Any

import torch

from polyop import ops

from .calls import DTYPES, OperatorCall, require_equal

Case = dict[str, Any]


def extents(case: Case) -> list[int]:
    return [int(extent) for extent in case["shape"].split("x")]


def padding(case: Case) -> list[int]:
    return [int(pad) for pad in case["pad"].split(",")]


def padded_extents(case: Case) -> list[int]:
    shape, pads = extents(case), padding(case)
    for i in range(len(pads) // 2):
        shape[-1 - i] += pads[2 * i] + pads[2 * i + 1]
    return shape


def bytes_moved(case: Case) -> int:
    elements = math.prod(extents(case)) + math.prod(padded_extents(case))
    return elements * DTYPES[case["dtype"]].itemsize


def make(case: Case, device: str) -> OperatorCall:
    x = (torch.randn(extents(case), device=device) * 50).to(DTYPES[case["dtype"]])
    out = torch.empty(padded_extents(case), dtype=x.dtype, device=device)
    return OperatorCall("circular_pad", {"x": x, "padding": padding(case), "out": out})


def check(case: Case, call: OperatorCall) -> None:
    call.run()
    wanted, pads = call.arguments["x"], padding(case)
    for i in range(len(pads) // 2):
        extent = wanted.shape[-1 - i]
        index = torch.arange(-pads[2 * i], extent + pads[2 * i + 1], device=wanted.device) % extent
        wanted = wanted.index_select(wanted.dim() - 1 - i, index)
    require_equal("circular_pad", call.arguments["out"], wanted)


def add_peers(case: Case, call: OperatorCall) -> None:
    x, pads = call.arguments["x"], padding(case)
    if not x.is_floating_point():
        return
    call.add_peer(
        "torch",
        lambda: lambda: torch.nn.functional.pad(x, pads, mode="circular"),
        lambda result: [(result, ops.circular_pad(x, pads))],
        0.0,
    )
