"""Paged causal attention against torch's scaled_dot_product_attention on keys and values that are already dense.

The peer gets dense tensors for free; gathering them from pages, which its caller would have to do, is not timed.
"""

from __future__ import annotations

import torch
from common import Row, print_rows, require_close, time_in_turns
from shapes_file import describe, read_shapes

import polyop

PAGE_SIZE = 16
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

rows = []
for case in read_shapes("attention"):
    batch, queries, length, dtype = case["B"], case["queries"], case["length"], DTYPES[case["dtype"]]
    num_heads, num_kv_heads, head_dim = case["Hq"], case["Hkv"], case["D"]
    pages_each = (length + PAGE_SIZE - 1) // PAGE_SIZE
    page_table = torch.randperm(batch * pages_each).to(torch.int32).reshape(batch, pages_each)
    k_pages, v_pages = torch.randn(2, batch * pages_each, PAGE_SIZE, num_kv_heads, head_dim).to(dtype).unbind()
    q = torch.randn(batch * queries, num_heads, head_dim).to(dtype)
    offsets = torch.arange(batch + 1, dtype=torch.int32) * queries
    lengths = torch.full((batch,), length, dtype=torch.int32)

    def dense(pages, page_table=page_table, length=length):
        gathered = pages[page_table.long()].flatten(1, 2)[:, :length]
        return gathered.transpose(1, 2).contiguous()

    q_dense = q.unflatten(0, (batch, queries)).transpose(1, 2).contiguous()
    k_dense, v_dense = dense(k_pages), dense(v_pages)
    mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries) if queries > 1 else None
    square = queries == length

    def ours(q=q, k=k_pages, v=v_pages, offsets=offsets, lengths=lengths, page_table=page_table):
        return polyop.ops.attention(q, k, v, query_offsets=offsets, kv_lengths=lengths, page_table=page_table)

    def peer(q=q_dense, k=k_dense, v=v_dense, mask=mask, square=square):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if square else mask, is_causal=square, enable_gqa=True
        )

    wanted = peer().transpose(1, 2).flatten(0, 1)
    require_close("attention", ours(), wanted, 1e-5 if dtype == torch.float32 else 2e-2)
    seconds = time_in_turns({"ours": ours, "torch": peer})
    visible = queries * length - queries * (queries - 1) // 2
    flops = 4 * batch * num_heads * head_dim * visible
    moved = (2 * batch * length * num_kv_heads * head_dim + 2 * q.numel()) * q.element_size()
    rows.append(Row(describe(case), seconds["ours"], seconds["torch"], bytes_moved=moved, flops=flops))
print_rows("attention, paged, causal", "torch", rows)
