"""Every operator against its double-precision reference, over calls drawn from its schema.

Each kernel and the one named "reference" run on the same call; the difference must stay
within the bound of the operator's README. Everything around what a call writes must keep its bytes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from polyop import ops
from polyop.ops.schema import Schema
from polyop.testing import UNIT_ROUNDOFF, assert_within_bound, output_bound
from polyop.testing.sweep import Call, CallMaker, Guarded, Hints, calls

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


TRT_EXTENTS = {"B": (0, 3), "T": (0, 9), "S": (0, 4), "Tkv": (0, 12), "Lmax": (1, 12), "Hkv": (1, 3), "D": (1, 70)}

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
    "qk_norm_rope_append": Hints(
        extents={
            "B": (0, 3),
            "T": (3, 12),
            "P": (12, 15),
            "R": (1, 4),
            "W": (1, 4),
            "Lmax": (3, 9),
            "Lrot": (16, 18),
            "Hq": (0, 4),
            "Hkv": (1, 3),
            "D": (8, 70),
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
    "trt_attention": Hints(extents=TRT_EXTENTS),
    "trt_quantized_attention": Hints(
        extents=TRT_EXTENTS,
        attributes={"q_num_heads": [0], "kv_num_heads": [0], "normalization_quantize_to_type": ["fp8", "int8"]},
    ),
    "trt_kv_cache_update": Hints(
        extents={"B": (0, 3), "Bu": (0, 3), "T": (0, 9), "S": (0, 3), "Lmax": (3, 9), "Hkv": (1, 3), "D": (1, 40)}
    ),
    "int4_groupwise_gemm": Hints(
        extents={"M": (0, 20), "N": (1, 140), "K": (1, 200)}, attributes={"group_size": [32, 64, 128]}
    ),
    "pack_int4_fragments": Hints(extents={"N": (0, 140), "K": (0, 140)}),
    "unpack_int4_fragments": Hints(attributes={"n": [1, 5, 128, 130], "k": [1, 64, 100]}),
}


# Dtypes of which a kernel takes only some: enough of the drawn calls must be for it.
KERNEL_DTYPES: dict[str, dict[str, list[str]]] = {
    "cpu_amx_attention": {"k": ["bf16", "f8e4m3", "i8"], "Q": ["bf16"]},
}


def exact(call: Call, expected: torch.Tensor) -> torch.Tensor | float:
    return 0.0


def rotary_bound(call: Call, expected: torch.Tensor) -> torch.Tensor:
    """Two products and one sum: 3 u_32 (|x1 c| + |x2 s|), each at most max|x| max|cos, sin|."""
    a = call.arguments
    largest = max(t.double().abs().max().item() if t is not None and t.numel() else 0.0 for t in (a["q"], a["k"]))
    table = a["cos_sin"].double().abs().max().item() if a["cos_sin"].numel() else 0.0
    return output_bound(expected, expected.dtype, 6 * U32 * largest * max(table, 1.0))


def append_bound(call: Call, expected: torch.Tensor) -> torch.Tensor | float:
    """As rotary_bound, with D / 2 + 6 more roundings and at most sqrt(D) max|w| as the largest x after a norm. In a
    quantized cache a value beside the middle of two codes may take either."""
    if expected.dtype == torch.int8:
        return 1.0
    if expected.dtype == torch.float8_e4m3fn:
        return (expected.double().abs().nan_to_num() / 8).clamp_min(2.0**-9)
    a = call.arguments
    rounds, largest = 3.0, max(t.double().abs().max().item() if t.numel() else 0.0 for t in (a["q"], a["k"]))
    if a["q_norm_weight"] is not None:
        width = a["q"].shape[-1]
        rounds += width / 2 + 6
        largest = math.sqrt(width) * max(
            a[name].double().abs().max().item() for name in ("q_norm_weight", "k_norm_weight")
        )
    table = a["cos_sin"].double().abs().max().item() if a["cos_sin"].numel() else 0.0
    return output_bound(expected, expected.dtype, 2 * rounds * U32 * largest * max(table, 1.0))


def gemm_bound(call: Call, expected: torch.Tensor) -> torch.Tensor:
    """n = K products, K / Kg scalings: (K + K / Kg + 8) u_32 sum |x| |q - 8| s; and integers of 26 or 20 bits beside
    the largest of each group."""
    a = call.arguments
    k, group = a["x"].shape[-1], a["group_size"]
    n = a["scales"].shape[1]
    groups = a["scales"].shape[0]
    weight = (ops.unpack_int4_fragments(a["qweight"].view(torch.int8), n, k).double() - 8).abs()
    weight *= a["scales"].double().abs().repeat_interleave(group, 0)[:k].T
    x = a["x"].double().abs()
    terms = x @ weight.T
    padded = torch.nn.functional.pad(x, (0, groups * group - k))
    largest = padded.unflatten(-1, (groups, group)).amax(-1).repeat_interleave(group, -1)[..., :k]
    cut = (2.0**-26 if a["x"].dtype == torch.float32 else 2.0**-20) * (largest @ weight.T)
    return output_bound(expected, expected.dtype, cut + (k + math.ceil(k / group) + 8) * U32 * (terms + cut))


def attention_bound(call: Call, expected: torch.Tensor) -> torch.Tensor:
    """Scores, at most m = scale sum |q k| + |mask|, err by (D + 8) u_32 m; that error once more in the exponent and
    (L + 32) u_32 of the sums make the relative error of a softmax row. Without softmax the weights are the scores."""
    a = call.arguments

    def largest(name: str) -> float:
        tensor = a[name]
        if tensor is None or tensor.dtype == torch.bool or tensor.numel() == 0:
            return 0.0
        return tensor.double().abs().nan_to_num(nan=0.0, posinf=0.0).max().item()

    def factor(name: str) -> float:
        return 1.0 if a[name] is None else largest(name)

    width = a["q"].shape[-1]
    length = math.prod(a["k"].shape[:-2])
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(width)
    score = scale * width * largest("q") * largest("k") * factor("k_scale") + largest("mask")
    value = largest("v") * factor("v_scale") / (factor("output_scale") or 1.0)
    score_error = (width + 8) * U32 * score
    if a["normalization"] == "softmax":
        arithmetic = (2 * score_error + (length + 32) * U32) * max(value, 1.0)
        if expected.dtype in (torch.float16, torch.bfloat16):
            arithmetic += 2.0**-17 * value  # cpu_amx_attention: weights of 16 significant bits
    else:
        arithmetic = length * value * (score_error + (length + 8) * U32 * score)
    return output_bound(expected, expected.dtype, arithmetic)


def trt_attention_bound(call: Call, expected: torch.Tensor) -> torch.Tensor:
    """As attention_bound, without a scale or with the product of the rounded factors of Q and K (at most 1.01 scale).
    A quantized weight beside the middle of two steps may take either: a step of at most max(s, w / 8) for every key."""
    a = call.arguments
    q, k, v, mask = (a[name] for name in ("Q", "K", "V", "attn_mask"))

    def largest(tensor: torch.Tensor | None) -> float:
        if tensor is None or tensor.dtype == torch.bool or tensor.numel() == 0:
            return 0.0
        return tensor.double().abs().max().item()

    width, length = q.shape[-1], math.prod(k.shape[:-1]) // max(k.shape[1], 1)
    scale = 1.0 if "causal_kind" in a else 1.01 * (a["scale"] if a["scale"] is not None else 1 / math.sqrt(width))
    score = scale * width * largest(q) * largest(k) + largest(mask)
    score_error = (width + 8) * U32 * score
    weight = 1.0 if a["TRT_normalization_op"] == "softmax" else score
    error = 2 * score_error + (length + 32) * U32 * max(weight, 1.0)
    step = a.get("normalization_quantize_scale")
    if step is not None and length:
        error = length * max(step.double().item(), weight / 8) + error
    return output_bound(expected, expected.dtype, error * max(largest(v), 1.0) * (1 if weight == 1.0 else length))


BOUNDS = {
    "trt_attention": trt_attention_bound,
    "trt_quantized_attention": trt_attention_bound,
    "qk_norm_rope_append": append_bound,
    "rotary_embedding": rotary_bound,
    "int4_groupwise_gemm": gemm_bound,
    "attention": attention_bound,
}


def run(function: Any, schema: Schema, call: Call, shapes: list[Any]) -> dict[str, Guarded]:
    """Calls `function` on guarded copies; returns everything it may write, by operand name."""
    arguments, written = call.fresh()
    for output, shape in zip(schema.outputs, shapes, strict=True):
        if shape is not None:
            written[output.name] = Guarded.empty(tuple(shape[0]), shape[1], gap=2 if len(shape[0]) > 1 else 0)
    outputs = {output.name: written[output.name].tensor for output in schema.outputs if output.name in written}
    function(**arguments, **outputs)
    return written


KERNELS = [
    (name, kernel.removeprefix("cpu:"))
    for name in ops.SCHEMAS
    for kernel in ops.kernel_names(name)
    if kernel.startswith("cpu:")
]


@pytest.mark.parametrize(("name", "kernel"), KERNELS, ids=[f"{name}-{kernel}" for name, kernel in KERNELS])
def test_kernel_matches_reference(name, kernel):
    schema = ops.SCHEMAS[name]
    function, reference = ops.with_kernel(name, kernel), ops.with_kernel(name, "reference")
    outputs_of = ops.output_function(name)
    hints = dataclasses.replace(HINTS.get(name, Hints()), dtypes=KERNEL_DTYPES.get(kernel, {}))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(calls(schema, hints))
    def check(call: Call) -> None:
        shapes = list(outputs_of(**call.arguments))
        try:
            got = run(function, schema, call, shapes)
        except (ValueError, NotImplementedError):
            # A rule between operands that no hint steers around, or what this kernel leaves to the next one: each
            # operator's own tests have the texts.
            reject()
        expected = run(reference, schema, call, shapes)
        for operand, guarded in got.items():
            wanted = expected[operand].tensor
            bound = BOUNDS.get(name, exact)(call, wanted)
            assert_within_bound(guarded.tensor, wanted, bound, f"{name}: {operand}")
            guarded.assert_surroundings_intact(operand)

    check()
