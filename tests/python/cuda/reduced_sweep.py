"""A few small calls of every CUDA kernel, for compute-sanitizer (tools/device.sh sanitize)."""

from __future__ import annotations

import torch
from attention_cases import AttentionCase, outputs_of

from polyop import cuda, ops


def attention(case: AttentionCase, kernel: str) -> None:
    arguments = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in case.make().items()}
    ops.with_kernel("attention", kernel)(**arguments, **outputs_of(arguments, case.fp8_out, "cuda"))


def main() -> None:
    for kv in (None, torch.float8_e4m3fn, torch.int8):
        attention(AttentionCase([700, 0, 65], [1, 1, 1], kv_dtype=kv), "cuda_split_kv")
        attention(AttentionCase([300, 80], [40, 7], kv_dtype=kv, head_dim=80, page_size=1, tree=True), "cuda_split_kv")
        attention(AttentionCase([33, 9], [2, 1], kv_dtype=kv, head_dim=24, page_size=3, sinks=True), "cuda_rows")
    attention(AttentionCase([200, 130], [3, 3], head_dim=256, kv_form="padded", query_form="padded"), "cuda_split_kv")
    attention(AttentionCase([200, 130], [3, 3], head_dim=192, kv_form="packed", fp8_out=True), "cuda_split_kv")
    for dtype in (torch.float16, torch.float32):
        q = torch.randn(5, 4, 64, device="cuda").to(dtype)
        for interleaved in (False, True):
            ops.rotary_embedding(q, q[:, :2].clone(), torch.randn(9, 32, device="cuda"), interleaved=interleaved)
        cache = torch.zeros(2, 7, 4, 2, 64, device="cuda").to(torch.float8_e4m3fn)
        ops.kv_cache_update(
            cache[0],
            cache[1],
            q[:, :2],
            q[:, 2:],
            update_offsets=torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda"),
            page_table=torch.tensor([[1, 5], [0, 6]], dtype=torch.int32, device="cuda"),
            write_positions=torch.tensor([3, 0], dtype=torch.int32, device="cuda"),
        )
        for rotary_dim in (64, 6):  # vectors, single elements
            ops.qk_norm_rope_append(
                q,
                q[:, :2],
                q[:, 2:],
                cache[0],
                cache[1],
                torch.randn(9, rotary_dim, device="cuda"),
                update_offsets=torch.tensor([0, 2, 4], dtype=torch.int32, device="cuda"),
                page_table=torch.tensor([[1, 5], [0, 6]], dtype=torch.int32, device="cuda"),
                write_positions=torch.tensor([3, 0], dtype=torch.int32, device="cuda"),
                q_norm_weight=torch.ones(64, device="cuda"),
                k_norm_weight=torch.ones(64, device="cuda"),
            )
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64):
        ops.circular_pad(torch.ones(2, 3, 37, device="cuda").to(dtype), [3, 40, 1, 2])
    cuda.check_errors()
    print("reduced sweep done")


if __name__ == "__main__":
    main()
