"""Calls of every operator that are large enough for several threads, and what they write as bytes.

Run as a program it prints the digest of each call: the same on any number of threads, whoever lends them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attention_layouts import AttentionCall

from polyop import ops

Arguments = dict[str, Any]


def _i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LENGTHS = [(33, 33), (1, 700), (0, 0), (40, 300), (1, 1), (7, 1300)]


def attention_calls() -> dict[str, AttentionCall]:
    """Chunks that several threads share, for each kernel."""
    heads = {"query_heads": 6, "kv_heads": 2, "head_dim": 20, "page_size": 16}
    mask = np.random.default_rng(0).random((1, 6, 1, 301)) < 0.7
    return {
        "f32": AttentionCall(LENGTHS, **heads),
        "bf16": AttentionCall(LENGTHS, dtype="bf16", **heads),
        "f16 over f8e4m3": AttentionCall(LENGTHS, dtype="f16", kv_dtype="f8e4m3", kv_scales=2, fp8_out=0.5, **heads),
        "i8 window": AttentionCall(LENGTHS, dtype="bf16", kv_dtype="i8", kv_scales=1, window=90, **heads),
        "tree": AttentionCall(LENGTHS, dtype="bf16", tree=True, sinks=np.arange(6.0), **heads),
        "no softmax": AttentionCall(LENGTHS, normalization="none", **heads),
        "mask": AttentionCall(
            [(40, 300), (40, 7), (40, 0)],
            query_form="padded",
            kv_form="padded",
            mask=mask,
            causal="upper_left",
            **heads,
        ),
    }


def _attention() -> dict[str, Arguments]:
    calls = attention_calls()
    fp8_out = {name: {"out": call.outputs()["out"]} for name, call in calls.items() if call.fp8_out}
    return {name: call.arguments | fp8_out.get(name, {}) for name, call in calls.items()}


def _circular_pad() -> dict[str, Arguments]:
    return {
        str(dtype): {"x": _rand(80, 700).to(dtype), "padding": [800, 100, 17, 30]}
        for dtype in (torch.float32, torch.bfloat16, torch.uint8)
    }


TOKENS, STARTS = [90, 0, 1, 110, 3], [10, 320, 319, 200, 0]


def append_arguments(paged: bool, cache_dtype: torch.dtype, page_seed: int = 0) -> Arguments:
    """The cache part of an append of TOKENS at STARTS."""
    batch, heads, width, page = len(TOKENS), 2, 64, 16
    arguments: Arguments = {
        "update_offsets": _i32(0, *np.cumsum(TOKENS)),
        "write_positions": _i32(*STARTS),
        "k": _rand(sum(TOKENS), heads, width, seed=1),
        "v": _rand(sum(TOKENS), heads, width, seed=2),
    }
    if cache_dtype in (torch.float8_e4m3fn, torch.int8):
        arguments |= {"k_scale": torch.tensor([0.02, 0.03]), "v_scale": torch.tensor([0.05])}
    if paged:
        pages = torch.randperm(batch * 20 + 3, generator=torch.Generator().manual_seed(page_seed))
        arguments["page_table"] = pages[: batch * 20].reshape(batch, 20).to(torch.int32)
        shape = (batch * 20 + 3, page, heads, width)
    else:
        arguments["cache_form"] = "linear"
        shape = (batch, heads, 320, width)
    return {"k_cache": torch.zeros(shape).to(cache_dtype), "v_cache": torch.zeros(shape).to(cache_dtype), **arguments}


CACHE_DTYPES = (torch.float32, torch.float8_e4m3fn, torch.int8)


def _kv_cache_update() -> dict[str, Arguments]:
    return {f"{form} {t}": append_arguments(form == "paged", t) for form in ("paged", "linear") for t in CACHE_DTYPES}


def _qk_norm_rope_append() -> dict[str, Arguments]:
    norms = {"q_norm_weight": _rand(64, seed=5), "k_norm_weight": _rand(64, seed=6)}
    return {
        f"{form} {t} {interleaved}": append_arguments(form == "paged", t)
        | {
            "q": _rand(sum(TOKENS), 6, 64, seed=3),
            "cos_sin": _rand(400, 48, seed=4),
            "interleaved": interleaved,
            **norms,
        }
        for form in ("paged", "linear")
        for t, interleaved in zip(CACHE_DTYPES, (False, True, False), strict=True)
    }


def _rotary_embedding() -> dict[str, Arguments]:
    ids = torch.randint(0, 400, (300,), generator=torch.Generator().manual_seed(7)).to(torch.int32)
    return {
        f"{dtype} {interleaved}": {
            **{"q": _rand(300, 6, 70, dtype=dtype), "k": _rand(300, 2, 70, dtype=dtype, seed=1)},
            **{"cos_sin": _rand(400, 48, seed=2), "position_ids": ids, "interleaved": interleaved},
        }
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for interleaved in (False, True)
    }


def _int4_groupwise_gemm() -> dict[str, Arguments]:
    calls = {}
    for m, group, dtype in ((1, 32, torch.bfloat16), (5, 128, torch.float32), (70, 64, torch.float16)):
        weights = torch.randint(0, 16, (700, 520), dtype=torch.uint8, generator=torch.Generator().manual_seed(m))
        calls[f"{m} rows"] = {
            **{"x": _rand(m, 520, dtype=dtype), "qweight": ops.pack_int4_fragments(weights), "group_size": group},
            "scales": _rand(-(-520 // group), 700, dtype=torch.float16).abs(),
        }
    return calls


def _trt_attention() -> dict[str, Arguments]:
    q, k, v = (_rand(3, heads, n, 16, seed=n) for heads, n in ((6, 40), (2, 300), (2, 301)))
    return {"padded": {"Q": q, "K": k, "V": v[:, :, :300], "kv_lengths": _i32(300, 7, 0), "causal_kind": "lower_right"}}


def _trt_quantized_attention() -> dict[str, Arguments]:
    arguments = _trt_attention()["padded"] | {"normalization_quantize_scale": torch.tensor([1 / 448])}
    del arguments["causal_kind"]
    plain = arguments | {"scale": 1.0, "normalization_quantize_scale": None}
    return {"plain": plain} | {
        kind: arguments | {"normalization_quantize_to_type": kind, "is_causal": True} for kind in ("fp8", "int8")
    }


def _trt_kv_cache_update() -> dict[str, Arguments]:
    caches = {"past_cache": _rand(5, 2, 320, 64), "update": _rand(5, 2, 100, 64, seed=1)}
    return {"padded": caches | {"write_indices": _i32(0, 1, 220, 300, 7)}}


#: name of a call -> keyword arguments, by operator.
EXAMPLES: dict[str, Callable[[], dict[str, Arguments]]] = {
    "attention": _attention,
    "circular_pad": _circular_pad,
    "kv_cache_update": _kv_cache_update,
    "qk_norm_rope_append": _qk_norm_rope_append,
    "rotary_embedding": _rotary_embedding,
    "int4_groupwise_gemm": _int4_groupwise_gemm,
    "pack_int4_fragments": lambda: {
        "weights": {
            "q": torch.randint(0, 16, (700, 520), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        }
    },
    "unpack_int4_fragments": lambda: {
        "weights": {
            "packed": (torch.arange(6 * 9 * 8 * 512) % 251 - 125).to(torch.int8).view(-1, 512),
            "n": 700,
            "k": 520,
        }
    },
    "trt_attention": _trt_attention,
    "trt_quantized_attention": _trt_quantized_attention,
    "trt_kv_cache_update": _trt_kv_cache_update,
}

KERNELS = [(name, kernel[4:]) for name in ops.SCHEMAS for kernel in ops.kernel_names(name) if kernel[:4] == "cpu:"]


def digest(tensors: list[torch.Tensor]) -> str:
    """Of the tensors' bytes. No torch operator runs: a forked child must not use torch's threads."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


class Prepared:
    """A call with copies of the operands that it writes."""

    def __init__(self, name: str, arguments: Arguments) -> None:
        changed = [operand.name for operand in ops.SCHEMAS[name].operands if operand.role != "input"]
        changed = [operand for operand in changed if arguments.get(operand) is not None]
        self.arguments = arguments | {operand: arguments[operand].clone() for operand in changed}
        self.in_place = [self.arguments[operand] for operand in changed]

    def run(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        """Everything that the call writes."""
        results = function(**self.arguments)
        results = results if isinstance(results, tuple) else (results,)
        return [*self.in_place, *(result for result in results if result is not None)]


def digests(name: str, kernel: str) -> dict[str, str]:
    """Of every example that the kernel takes."""
    function = ops.with_kernel(name, kernel)
    result = {}
    for call, arguments in EXAMPLES[name]().items():
        try:
            result[call] = digest(Prepared(name, arguments).run(function))
        except NotImplementedError:
            continue
    return result


if __name__ == "__main__":
    print(json.dumps({f"{name} {kernel}": digests(name, kernel) for name, kernel in KERNELS if kernel != "reference"}))
