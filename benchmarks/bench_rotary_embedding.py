"""rotary_embedding (half-split, position ids) against the same formula in torch, as model code writes it."""

from __future__ import annotations

import torch
from common import Row, print_rows, require_close, time_in_turns
from shapes_file import describe, read_shapes

import polyop

CAPACITY = 4096


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] f32, cos and sin [T, 1, D] f32 -> [T, H, D] f32."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


rows = []
for case in read_shapes("rotary_embedding"):
    tokens, head_dim = case["T"], case["D"]
    q, k = torch.randn(tokens, case["Hq"], head_dim), torch.randn(tokens, case["Hkv"], head_dim)
    angles = torch.arange(CAPACITY)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(CAPACITY, (tokens,), dtype=torch.int32)

    def ours(q=q, k=k, cos_sin=cos_sin, positions=positions):
        return polyop.ops.rotary_embedding(q, k, cos_sin, positions)

    def peer(q=q, k=k, cos_sin=cos_sin, positions=positions):
        cos, sin = cos_sin[positions].chunk(2, dim=-1)
        cos, sin = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((sin, sin), dim=-1)[:, None]
        return rotate(q, cos, sin), rotate(k, cos, sin)

    for got, wanted in zip(ours(), peer(), strict=True):
        require_close("rotary_embedding", got, wanted, 1e-6)
    seconds = time_in_turns({"ours": ours, "torch": peer})
    moved = 2 * (q.numel() + k.numel()) * 4 + tokens * head_dim * 4
    rows.append(Row(describe(case), seconds["ours"], seconds["torch"], bytes_moved=moved))
print_rows("rotary_embedding f32", "torch", rows)
