"""qk_norm_rope_append into a paged cache (bf16) against the calls it joins: RMSNorm of q and k, rotary_embedding and
kv_cache_update, the last two into memory that is there already."""

from __future__ import annotations

import torch
from common import Row, print_rows, require_close, time_in_turns
from shapes_file import describe, read_shapes

import polyop
from polyop.llm.norm import RmsNorm

EPSILON = 1e-6
I32 = {"dtype": torch.int32}

rows = []
for case in read_shapes("qk_norm_rope_append"):
    batch, tokens, length, page_size = case["B"], case["tokens"], case["length"], case["page_size"]
    query_heads, kv_heads, head_dim = case["Hq"], case["Hkv"], case["D"]
    total = batch * tokens
    qkv = torch.randn(total, query_heads + 2 * kv_heads, head_dim).bfloat16()
    q, k, v = qkv.split_with_sizes((query_heads, kv_heads, kv_heads), 1)
    angles = torch.arange(length + tokens)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    pages_each = (length + tokens + page_size - 1) // page_size
    page_table = torch.randperm(batch * pages_each).to(torch.int32).reshape(batch, pages_each)
    joined = torch.zeros(2, batch * pages_each, page_size, kv_heads, head_dim).bfloat16()
    apart = torch.zeros_like(joined)
    offsets = torch.arange(batch + 1, **I32) * tokens
    positions = torch.full((batch,), length, **I32)
    position_ids = (length + torch.arange(tokens, **I32)).repeat(batch)
    weight = torch.rand(head_dim) + 0.5
    norm = RmsNorm(weight, EPSILON)
    weights = {"q_norm_weight": weight, "k_norm_weight": weight, "epsilon": EPSILON} if case["norm"] else {}
    place = {"page_table": page_table, "write_positions": positions}
    q_out = torch.empty(total, query_heads, head_dim, dtype=torch.bfloat16)
    outs = {"q_out": torch.empty_like(q_out), "k_out": torch.empty(total, kv_heads, head_dim, dtype=torch.bfloat16)}

    def ours(q=q, k=k, v=v, cos_sin=cos_sin, cache=joined, offsets=offsets, place=place, weights=weights, q_out=q_out):
        return polyop.ops.qk_norm_rope_append(
            q, k, v, cache[0], cache[1], cos_sin, offsets, **place, **weights, q_out=q_out
        )

    def peer(
        q=q, k=k, v=v, cos_sin=cos_sin, cache=apart, offsets=offsets, place=place, ids=position_ids, weights=weights,
        norm=norm, outs=outs,
    ):  # fmt: skip
        if weights:
            q, k = norm(q), norm(k)
        q, k = polyop.ops.rotary_embedding(q, k, cos_sin, ids, **outs)
        polyop.ops.kv_cache_update(cache[0], cache[1], k, v, update_offsets=offsets, **place)
        return q

    require_close("qk_norm_rope_append", ours(), peer(), 2.0**-7)
    require_close("qk_norm_rope_append", joined, apart, 2.0**-7)
    seconds = time_in_turns({"ours": ours, "apart": peer})
    moved = 2 * qkv.numel() * 2 + total * head_dim * 4
    rows.append(Row(describe(case), seconds["ours"], seconds["apart"], bytes_moved=moved))
print_rows("qk_norm_rope_append bf16, paged", "calls apart", rows)
