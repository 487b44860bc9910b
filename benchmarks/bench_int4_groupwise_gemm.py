"""int4_groupwise_gemm, x in f32 and bf16, against torch's 4-bit product for CPUs (bf16) and its f32 and bf16 matmul."""

from __future__ import annotations

import torch
from common import Row, print_rows, require_close, time_in_turns
from shapes_file import describe, read_shapes

import polyop

tables: dict[str, list[Row]] = {}
for case in read_shapes("int4_groupwise_gemm"):
    m, n, k, group = case["M"], case["N"], case["K"], case["group"]
    values = torch.randint(16, (n, k), dtype=torch.uint8)
    scales = (torch.rand(k // group, n) * 0.02 + 0.01).to(torch.float16)
    packed = polyop.ops.pack_int4_fragments(values)
    x = torch.randn(m, k)
    weight = (values.float() - 8) * scales.float().repeat_interleave(group, dim=0).T

    bits16 = x.to(torch.bfloat16)
    peer_packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
    scale_and_zero = (
        torch.stack((scales.float(), torch.zeros_like(scales.float())), dim=-1).to(torch.bfloat16).contiguous()
    )

    dense16 = weight.to(torch.bfloat16)

    def ours(x=x, packed=packed, scales=scales, group=group):
        return polyop.ops.int4_groupwise_gemm(x, packed, scales, group_size=group)

    def peer(x=bits16, packed=peer_packed, scales=scale_and_zero, group=group):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)

    def ours_bf16(x=bits16, packed=packed, scales=scales, group=group):
        return polyop.ops.int4_groupwise_gemm(x, packed, scales, group_size=group)

    def matmul(x=x, weight=weight):
        return x @ weight.T

    def matmul_bf16(x=bits16, weight=dense16):
        return x @ weight.T

    require_close("int4_groupwise_gemm", ours(), matmul(), 1e-5)
    functions = {"x f32": ours, "x bf16": ours_bf16, "torch int4 bf16": peer}
    functions |= {"torch f32 matmul": matmul, "torch bf16 matmul": matmul_bf16}
    seconds = time_in_turns(functions)
    for mine, size in (("x f32", 4), ("x bf16", 2)):
        moved = packed.numel() + scales.numel() * 2 + (m * k + m * n) * size
        for theirs in list(functions)[2:]:
            row = Row(describe(case), seconds[mine], seconds[theirs], bytes_moved=moved, flops=2 * m * n * k)
            tables.setdefault(f"{mine} · {theirs}", []).append(row)
for title, rows in tables.items():
    mine, theirs = title.split(" · ")
    print_rows(f"int4_groupwise_gemm, {mine}", theirs, rows)
