"""int4_groupwise_gemm against torch's own 4-bit product for CPUs (bf16) and, in the last column, its f32 matmul."""

from __future__ import annotations

import torch
from common import Row, print_rows, require_close, time_in_turns
from shapes_file import describe, read_shapes

import polyop

rows, f32_rows = [], []
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

    def ours(x=x, packed=packed, scales=scales, group=group):
        return polyop.ops.int4_groupwise_gemm(x, packed, scales, group_size=group)

    def peer(x=bits16, packed=peer_packed, scales=scale_and_zero, group=group):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)

    def matmul(x=x, weight=weight):
        return x @ weight.T

    require_close("int4_groupwise_gemm", ours(), matmul(), 1e-5)
    seconds = time_in_turns({"ours": ours, "torch int4": peer, "torch f32": matmul})
    moved = packed.numel() + scales.numel() * 2 + (m * k + m * n) * 4
    rows.append(Row(describe(case), seconds["ours"], seconds["torch int4"], bytes_moved=moved, flops=2 * m * n * k))
    f32_rows.append(Row(describe(case), seconds["ours"], seconds["torch f32"], flops=2 * m * n * k))
print_rows("int4_groupwise_gemm, x f32", "torch int4 bf16", rows)
print_rows("int4_groupwise_gemm, x f32", "torch f32 matmul", f32_rows)
