"""vanilla: attention in plain torch, one sequence at a time. The oracle for the other backends; slow and obvious.

Every sequence is computed from fresh contiguous f32 copies of its own rows, so its result is bit-identical whatever
else is in the batch and whatever the page size.
"""

from __future__ import annotations

import torch

from .interface import AttentionBackend, AttentionMask, PredefinedAttentionMask
from .metadata import AttentionMetadata
from .registry import register_attention_backend
from .rope import rope_cos_sin_table


class VanillaAttentionMetadata(AttentionMetadata):
    """Metadata of vanilla; ``block_ids`` holds the page numbers of each sequence as lists (None without a cache)."""

    block_ids: list[list[int]] | None = None

    def prepare_backend(self) -> None:
        """Fetches the page numbers from the manager."""
        self.block_ids = self.kv_cache_manager.get_batch_cache_indices(self.request_ids) if self.uses_cache else None


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotary embedding in f32, rounded once to x's dtype.

    Args:
        x: [T, H, D] with H heads of either kind.
        positions: integer [T].
        cos_sin: [max_positions, R] f32, R <= D; entries of a head past R stay as they are.
        is_neox: True rotates halves, False neighbours.

    Returns:
        [T, H, D], x's dtype, a new tensor.
    """
    width = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # (T, 1, R/2)
    rotated, kept = x[..., :width].float(), x[..., width:]
    if is_neox:
        a, b = rotated.chunk(2, dim=-1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([out.to(x.dtype), kept], dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """softmax(scale q k^T + mask) v of one sequence in f32; the mask is lower-right aligned.

    Args:
        q: [S, Hq, D]; k, v: [L, Hkv, D] with L >= S when causal.

    Returns:
        [S, Hq, D] f32; zeros for rows with nothing to attend.
    """
    (num_queries, num_heads, head_dim), (num_keys, num_kv_heads) = q.shape, k.shape[:2]
    group = num_heads // num_kv_heads
    if num_keys == 0:
        return torch.zeros(num_queries, num_heads, head_dim, dtype=torch.float32, device=q.device)
    # Fresh contiguous copies: the bits must not depend on where in a batch or page the rows came from.
    fresh = {"dtype": torch.float32, "copy": True, "memory_format": torch.contiguous_format}
    q = q.transpose(0, 1).to(**fresh).view(num_kv_heads, group * num_queries, head_dim)
    k, v = k.transpose(0, 1).to(**fresh), v.transpose(0, 1).to(**fresh)  # (Hkv, L, D)
    scores = torch.matmul(q, k.transpose(1, 2)).view(num_kv_heads, group, num_queries, num_keys) * scale
    if causal:
        last_visible = torch.arange(num_queries, device=q.device).unsqueeze(1) + (num_keys - num_queries)
        scores.masked_fill_(torch.arange(num_keys, device=q.device) > last_visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(num_kv_heads, group * num_queries, num_keys)
    return torch.matmul(weights, v).view(num_heads, num_queries, head_dim).transpose(0, 1)


@register_attention_backend("vanilla")
class VanillaAttention(AttentionBackend):
    """Plain torch attention over the paged cache, or over this step's tokens only when there is no cache."""

    Metadata = VanillaAttentionMetadata

    @classmethod
    def support_fused_rope(cls) -> bool:
        """True: rotary embedding is applied when pos_embd_params is given."""
        return True

    @classmethod
    def support_fused_qk_norm(cls) -> bool:
        """True: the heads of q and k are normed when qk_norm is given."""
        return True

    @classmethod
    def support_fused_qkv(cls) -> bool:
        """True: one packed tensor is accepted as q."""
        return True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: VanillaAttentionMetadata,
        *,
        attention_mask: AttentionMask | None = PredefinedAttentionMask.CAUSAL,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.forward. q and k are left as they are."""
        q, k, v = self.check_inputs(q, k, v, metadata, attention_mask, output)
        causal = attention_mask is not PredefinedAttentionMask.FULL
        dtype = v.dtype
        if self.qk_norm is not None:
            q, k = self.qk_norm.apply(q, k)
        if self.pos_embd_params is not None:
            cos_sin = rope_cos_sin_table(self.pos_embd_params.rope, q.device)
            positions, is_neox = metadata.token_positions, self.pos_embd_params.is_neox
            q, k = (rotate(x, positions, cos_sin, is_neox).to(dtype) for x in (q, k))
        if output is None:
            output = torch.empty(metadata.num_tokens, self.q_size, dtype=dtype, device=q.device)
        output_heads = output.view(metadata.num_tokens, self.num_heads, self.head_dim)
        start = 0
        for i, num_queries in enumerate(metadata.query_lens):
            rows = slice(start, start + num_queries)
            keys, values = k[rows], v[rows]
            if metadata.block_ids is not None:
                keys, values = self._append_and_gather(keys, values, metadata, i)
            if num_queries:
                output_heads[rows] = attend(q[rows], keys, values, self.scale, causal)
            start += num_queries
        return output

    def _append_and_gather(
        self, k: torch.Tensor, v: torch.Tensor, metadata: VanillaAttentionMetadata, i: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes k, v [S, Hkv, D] of sequence i behind its cached tokens; returns all its [L, Hkv, D]."""
        manager = metadata.kv_cache_manager
        page_size, past, total = manager.tokens_per_block, metadata.cached_lens[i], metadata.kv_lens[i]
        pages = torch.tensor(metadata.block_ids[i], dtype=torch.long, device=k.device)
        positions = torch.arange(past, total, device=k.device)
        held = pages[: manager.blocks_for(total)]
        gathered = []
        for pool, fresh in zip(manager.get_buffers(self.layer_idx), (k, v), strict=True):
            pool[pages[positions // page_size], positions % page_size] = fresh
            gathered.append(pool[held].flatten(0, 1)[:total])
        return gathered[0], gathered[1]
