"""Every operator against its double-precision reference, over calls drawn from its schema.

The kernel that the dispatcher chooses and the kernel named "reference" run on the same call; the difference must stay
within the bound of the operator's README. Everything around what a call writes must keep its bytes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweep import Call, CallMaker, Guarded, Hints, calls

from polyop import ops
from polyop.ops.schema import Schema
from polyop.testing import UNIT_ROUNDOFF, assert_within_bound, output_bound

U32 = UNIT_ROUNDOFF[torch.float32]


def keep_within_capacity(maker: CallMaker, offsets: torch.Tensor) -> None:
    """Cuts packed lengths to what a cache holds: W * R or Lmax positions."""
    lengths = offsets.diff().clamp(max=cache_capacity(maker))
    offsets.copy_(torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0)]))


def cache_capacity(maker: CallMaker) -> int:
    extents = maker.extents
    return extents["W"] * extents["R"] if maker.attributes["cache_form"] == "paged" else extents["Lmax"]


def keep_writes_within_capacity(maker: CallMaker, positions: torch.Tensor) -> None:
    offsets = maker.tensors.get("update_offsets")
    tokens = offsets.diff() if offsets is not None else torch.full_like(positions, maker.extents["S"])
    positions.copy_(torch.minimum(positions, (cache_capacity(maker) - tokens).clamp(min=0)))


HINTS: dict[str, Hints] = {
    "circular_pad": Hints(lists={"padding": st.lists(st.integers(0, 7), max_size=3).map(lambda pads: pads * 2)}),
    "kv_cache_update": Hints(
        extents={
            "B": (0, 3),
            "T": (0, 9),
            "S": (0, 3),
            "P": (12, 15),
            "R": (1, 4),
            "W": (1, 4),
            "Lmax": (3, 9),
            "Hkv": (1, 3),
            "D": (1, 40),
        },
        distinct=frozenset({"page_table"}),
        repairs={"update_offsets": keep_within_capacity, "write_positions": keep_writes_within_capacity},
    ),
    "rotary_embedding": Hints(extents={"T": (0, 5), "Hq": (1, 4), "Hkv": (1, 2), "D": (8, 70), "Lmax": (5, 9)}),
    "attention": Hints(
        extents={
            "B": (0, 3),
            "T": (0, 9),
            "S": (0, 4),
            "Tkv": (0, 12),
            "P": (1, 8),
            "R": (1, 5),
            "W": (1, 4),
            "Lmax": (1, 12),
            "Hkv": (1, 3),
            "D": (1, 70),
            "Dv": (1, 70),
        },
        attributes={"window": [-1, -1, 1, 3]},
    ),
    "int4_groupwise_gemm": Hints(
        extents={"M": (0, 20), "N": (1, 140), "K": (1, 200)}, attributes={"group_size": [32, 64, 128]}
    ),
    "pack_int4_fragments": Hints(extents={"N": (0, 140), "K": (0, 140)}),
    "unpack_int4_fragments": Hints(attributes={"n": [1, 5, 128, 130], "k": [1, 64, 100]}),
}


def exact(call: Call, expected: torch.Tensor, reference: Any) -> torch.Tensor | float:
    return 0.0


def rotary_bound(call: Call, expected: torch.Tensor, reference: Any) -> torch.Tensor:
    """Two products and one sum: 3 u_32 (|x1 c| + |x2 s|), each at most max|x| max|cos, sin|."""
    a = call.arguments
    largest = max(t.double().abs().max().item() if t is not None and t.numel() else 0.0 for t in (a["q"], a["k"]))
    table = a["cos_sin"].double().abs().max().item() if a["cos_sin"].numel() else 0.0
    return output_bound(expected, expected.dtype, 6 * U32 * largest * max(table, 1.0))


def gemm_bound(call: Call, expected: torch.Tensor, reference: Any) -> torch.Tensor:
    """n = K products, K / Kg scalings: (K + K / Kg + 8) u_32 sum |x| |q - 8| s."""
    a = call.arguments
    k, group = a["x"].shape[-1], a["group_size"]
    n = a["scales"].shape[1]
    weight = (ops.unpack_int4_fragments(a["qweight"], n, k).double() - 8).abs()
    weight *= a["scales"].double().abs().repeat_interleave(group, 0)[:k].T
    terms = a["x"].double().abs() @ weight.T
    return output_bound(expected, expected.dtype, (k + math.ceil(k / group) + 8) * U32 * terms)


def attention_bound(call: Call, expected: torch.Tensor, reference: Any) -> torch.Tensor:
    """Scores err by d = (D + 8) u_32 scale sum |q k|, weights by the factor exp(2 d), the sum by (L + 32) u_32."""
    a = call.arguments
    q, k, v = (a[name].double().abs() for name in ("q", "k", "v"))
    if not (q.numel() and k.numel() and v.numel()):
        return output_bound(expected, torch.float32)
    if k.dtype == torch.int8 or "k_scale" in a and a["k_scale"] is not None:
        return output_bound(expected, expected.dtype, 1.0)
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    k, v, q = (t.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for t in (k, v, q))
    score_error = (q.shape[-1] + 8) * U32 * scale * q.sum(-1).max().item() * k.max().item()
    length = k.shape[0] * k.shape[1]
    relative = 2 * score_error + (length + 32) * U32
    return output_bound(expected, expected.dtype, relative * max(v.max().item(), 1.0) * 4)


BOUNDS = {"rotary_embedding": rotary_bound, "int4_groupwise_gemm": gemm_bound, "attention": attention_bound}


def run(function: Any, schema: Schema, call: Call, shapes: list[Any]) -> dict[str, Guarded]:
    """Calls `function` on guarded copies; returns everything it may write, by operand name."""
    arguments, written = call.fresh()
    for output, shape in zip(schema.outputs, shapes, strict=True):
        if shape is not None:
            written[output.name] = Guarded.empty(tuple(shape[0]), shape[1], gap=2 if len(shape[0]) > 1 else 0)
    outputs = {output.name: written[output.name].tensor for output in schema.outputs if output.name in written}
    function(**arguments, **outputs)
    return written


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_kernel_matches_reference(name):
    schema = ops.SCHEMAS[name]
    function, reference = getattr(ops, name), ops.with_kernel(name, "reference")
    outputs_of = ops.output_function(name)

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(calls(schema, HINTS.get(name, Hints())))
    def check(call: Call) -> None:
        shapes = list(outputs_of(**call.arguments))
        got = run(function, schema, call, shapes)
        expected = run(reference, schema, call, shapes)
        for operand, guarded in got.items():
            wanted = expected[operand].tensor
            bound = BOUNDS.get(name, exact)(
                call, wanted.double() if wanted.dtype.is_floating_point else wanted, reference
            )
            assert_within_bound(guarded.tensor, wanted, bound, f"{name}: {operand}")
            guarded.assert_surroundings_intact(operand)

    check()
