"""A few small calls of every CUDA kernel, for compute-sanitizer (tools/device.sh sanitize).

Kernels are those that the library lists. Each case runs on every kernel that takes it; a kernel that took none is an
error, so that no kernel stays unchecked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attention_cases import AttentionCase, outputs_of
from device_memory import ALL_KERNELS, on_device

from polyop import cuda, ops
from polyop.testing.inputs import offsets_of

F8 = torch.float8_e4m3fn
Arguments = dict[str, Any]


def attention() -> Iterator[Arguments]:
    none = {"causal": "none"}
    for kv in (None, F8, torch.int8):
        yield case(AttentionCase([700, 0, 65], [1, 1, 1], kv_dtype=kv))
        yield case(
            AttentionCase([80, 33], [40, 7], 80, kv_dtype=kv, page_size=1, tree=True, num_kv_heads=1, attributes=none)
        )
        yield case(AttentionCase([33, 9], [2, 1], 24, kv_dtype=kv, page_size=3, sinks=True))
        yield case(AttentionCase([90, 150], [64, 5], kv_dtype=kv, page_size=64, num_kv_heads=1, dtype=torch.bfloat16))
    yield case(AttentionCase([600, 513, 0], [1, 1, 1], 64, page_size=64, group=8, attributes={"window": 200}))
    yield case(AttentionCase([200, 130], [3, 3], 256, kv_form="padded", query_form="padded", num_kv_heads=1))
    yield case(AttentionCase([200, 130], [3, 3], 192, kv_form="packed", fp8_out=True, num_kv_heads=1))
    yield case(AttentionCase([70], [70], 64, kv_form="packed", num_kv_heads=1, group=2))
    yield case(AttentionCase([9, 20], [1, 4], 96, 40, num_kv_heads=1))


def case(attention_case: AttentionCase) -> Arguments:
    arguments = attention_case.make()
    return arguments | outputs_of(arguments, attention_case.fp8_out, "cpu")


def cache_of(batch: int, page: int, width: int, dtype: torch.dtype) -> Arguments:
    """Two pages a sequence; appends of 0 to 3 tokens across their border."""
    pages = torch.zeros(2, 2 * batch + 1, page, 2, width).to(dtype)
    return {
        "k_cache": pages[0],
        "v_cache": pages[1],
        "page_table": torch.randperm(2 * batch).to(torch.int32).view(batch, 2),
        "write_positions": torch.full((batch,), page - 1, dtype=torch.int32),
    }


def kv_cache_update() -> Iterator[Arguments]:
    for dtype, cache_dtype in ((torch.float16, torch.float16), (torch.bfloat16, F8), (torch.float32, torch.int8)):
        for width in (64, 10):
            k = torch.randn(6, 2, width).to(dtype)
            cache = cache_of(3, 4, width, cache_dtype)
            yield {"k": k, "v": k, "update_offsets": offsets_of([2, 0, 3]), **cache}
            linear = torch.zeros(2, 2, 2, 9, width).to(cache_dtype)
            update = k.view(2, 3, 2, width)
            yield {"k": update, "v": update, "k_cache": linear[0], "v_cache": linear[1],
                   "cache_form": "linear", "update_form": "padded"}  # fmt: skip


def rotary_embedding() -> Iterator[Arguments]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for interleaved in (False, True):
            for width in (64, 10):
                q = torch.randn(5, 4, width).to(dtype)
                yield {"q": q, "k": q[:, :2], "cos_sin": torch.randn(9, width), "interleaved": interleaved}


def qk_norm_rope_append() -> Iterator[Arguments]:
    for dtype, cache_dtype in ((torch.float16, torch.float16), (torch.bfloat16, F8), (torch.float32, torch.int8)):
        for tokens, width, rotary_dim in (([2, 0, 2], 64, 64), ([2, 0, 2], 64, 6), ([3] * 60, 128, 128)):
            count, page = sum(tokens) + 1, 4
            qkv = torch.randn(count, 8, width).to(dtype)
            yield {
                "q": qkv[:, :4],
                "k": qkv[:, 4:6],
                "v": qkv[:, 6:],
                "cos_sin": torch.randn(9, rotary_dim),
                "update_offsets": offsets_of(tokens),
                "q_norm_weight": torch.ones(width),
                "k_norm_weight": torch.ones(width),
                **cache_of(len(tokens), page, width, cache_dtype),
            }


def circular_pad() -> Iterator[Arguments]:
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64):
        yield {"x": torch.ones(2, 3, 37).to(dtype), "padding": [3, 40, 1, 2]}
        yield {"x": torch.ones(3, 5, 64).to(dtype), "padding": [8, 8, 1, 0]}


def trt_attention() -> Iterator[Arguments]:
    for width, rows in ((64, 5), (24, 5), (64, 20)):
        q, k = torch.randn(2, 4, rows, width).half(), torch.randn(2, 2, 70, width).half()
        yield {"Q": q, "K": k, "V": k, "kv_lengths": torch.tensor([70, 3], dtype=torch.int32)}


def trt_quantized_attention() -> Iterator[Arguments]:
    for arguments in trt_attention():
        yield arguments | {"scale": 1.0}


def trt_kv_cache_update() -> Iterator[Arguments]:
    for width in (64, 10):
        update = torch.randn(2, 2, 3, width).half()
        rows = {"write_indices": torch.tensor([0, 7], dtype=torch.int32)}
        yield {"past_cache": torch.randn(2, 2, 9, width).half(), "update": update, **rows}
        packed = {"update": update[0].transpose(0, 1), "update_lengths": offsets_of([2, 1])}
        rows_first = torch.randn(2, 9, 2, width).half().transpose(1, 2)
        yield {"past_cache": rows_first, "update_form": "packed_nhd", **packed, **rows}


CASES = {
    function.__name__: function
    for function in (
        attention,
        kv_cache_update,
        rotary_embedding,
        qk_norm_rope_append,
        circular_pad,
        trt_attention,
        trt_quantized_attention,
        trt_kv_cache_update,
    )
}


def main() -> None:
    torch.manual_seed(0)
    unused = set(ALL_KERNELS)
    for operator, kernel in ALL_KERNELS:
        function = ops.with_kernel(operator, kernel)
        for arguments in CASES[operator]() if operator in CASES else ():
            try:
                function(**on_device(arguments))
            except NotImplementedError:
                continue
            unused.discard((operator, kernel))
    cuda.check_errors()
    if unused:
        raise SystemExit(f"reduced sweep: no case for {sorted(unused)}")
    print(f"reduced sweep done: {len(ALL_KERNELS)} kernels")


if __name__ == "__main__":
    main()
