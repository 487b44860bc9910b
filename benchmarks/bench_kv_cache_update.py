"""kv_cache_update into a paged cache against torch's indexed assignment with slots that are already computed."""

from __future__ import annotations

import torch
from common import Row, print_rows, require_close, time_in_turns
from shapes_file import describe, read_shapes

import polyop

rows = []
for case in read_shapes("kv_cache_update"):
    batch, tokens, length, page_size = case["B"], case["tokens"], case["length"], case["page_size"]
    heads, head_dim = case["Hkv"], case["D"]
    pages_each = (length + tokens + page_size - 1) // page_size
    page_table = torch.randperm(batch * pages_each).to(torch.int32).reshape(batch, pages_each)
    ours = torch.zeros(2, batch * pages_each, page_size, heads, head_dim)
    peer = torch.zeros_like(ours)
    k, v = torch.randn(2, batch * tokens, heads, head_dim).unbind()
    offsets = torch.arange(batch + 1, dtype=torch.int32) * tokens
    positions = torch.full((batch,), length, dtype=torch.int32)

    at = length + torch.arange(tokens)
    pages = page_table[:, at // page_size].reshape(-1).long()
    slots = (at % page_size).repeat(batch)

    def update(ours=ours, k=k, v=v, offsets=offsets, positions=positions, page_table=page_table):
        polyop.ops.kv_cache_update(
            ours[0], ours[1], k, v, update_offsets=offsets, write_positions=positions, page_table=page_table
        )

    def assign(peer=peer, k=k, v=v, pages=pages, slots=slots):
        peer[0][pages, slots] = k
        peer[1][pages, slots] = v

    update()
    assign()
    require_close("kv_cache_update", ours, peer, 0.0)
    seconds = time_in_turns({"ours": update, "torch": assign})
    moved = 2 * (k.numel() + v.numel()) * k.element_size()
    rows.append(Row(describe(case), seconds["ours"], seconds["torch"], bytes_moved=moved))
print_rows("kv_cache_update f32, paged", "torch", rows)
