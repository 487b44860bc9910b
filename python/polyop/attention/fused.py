"""fused: this library's own operators over the paged cache. Two operator calls a layer, called directly.

``prepare()`` writes lengths, positions and page tables once per step into buffers that never move; a layer rotates q in
place and k on its way into the cache, with v, in one call, and attends. Only views are made on the way.
"""

from __future__ import annotations

import torch

from polyop.ops import attention, kv_cache_update, qk_norm_rope_append, rotary_embedding

from .interface import (
    AttentionBackend,
    AttentionMask,
    PredefinedAttentionMask,
)
from .metadata import AttentionMetadata
from .registry import register_attention_backend
from .rope import rope_cos_sin_table


class FusedAttentionMetadata(AttentionMetadata):
    """Metadata of fused: the predefined fields and step buffers are all its operators read."""


@register_attention_backend("fused", aliases=("trtllm",))
class FusedAttention(AttentionBackend):
    """qk_norm_rope_append (without rotation kv_cache_update, without a cache rotary_embedding) and attention."""

    Metadata = FusedAttentionMetadata

    def prepare_layer(self) -> None:
        """Makes (or finds) the cos/sin table of pos_embd_params.

        Raises:
            NotImplementedError: a rope scaling type without a table.
        """
        rotary, norm = self.pos_embd_params, self.qk_norm
        self._interleaved = rotary is not None and not rotary.is_neox
        self._append_options = {"interleaved": self._interleaved}
        if norm is not None:
            weights = {"q_norm_weight": norm.q_weight, "k_norm_weight": norm.k_weight}
            self._append_options |= weights | {"epsilon": norm.epsilon}
        # Looked up here and not in forward: hashing the parameters would cost more than the rest of a call's checks.
        self._cos_sin = None if rotary is None else rope_cos_sin_table(rotary.rope)

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
        metadata: FusedAttentionMetadata,
        *,
        attention_mask: AttentionMask | None = PredefinedAttentionMask.CAUSAL,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.forward. With pos_embd_params, q and, without a cache, k may be changed in place."""
        q, k, v = self.check_inputs(q, k, v, metadata, attention_mask, output)
        num_tokens = metadata.num_tokens
        if output is None:
            output = torch.empty(num_tokens, self.q_size, dtype=q.dtype, device=q.device)
        if num_tokens == 0:
            return output
        if self._cos_sin is not None and self._cos_sin.device != q.device:
            self._cos_sin = rope_cos_sin_table(self.pos_embd_params.rope, q.device)
        options = {
            "query_offsets": metadata.query_offsets,
            "causal": "none" if attention_mask is PredefinedAttentionMask.FULL else "lower_right",
            "scale": self.scale,
            "out": output.view(num_tokens, self.num_heads, self.head_dim),
        }
        if metadata.uses_cache:
            k_pages, v_pages = metadata.kv_cache_manager.get_buffers(self.layer_idx)
            offsets, starts, table = metadata.query_offsets, metadata.write_positions, metadata.page_table
            if self._cos_sin is None:
                kv_cache_update(k_pages, v_pages, k, v, offsets, starts, table)
            else:
                # Positions that nobody has set are those in the cache, which the operator knows by itself.
                ids = None if metadata.position_ids is None else metadata.token_positions
                qk_norm_rope_append(
                    q,
                    k,
                    v,
                    k_pages,
                    v_pages,
                    self._cos_sin,
                    offsets,
                    starts,
                    table,
                    ids,
                    q_out=q,
                    **self._append_options,
                )
            attention(q, k_pages, v_pages, kv_lengths=metadata.kv_lengths, page_table=metadata.page_table, **options)
        else:
            if self.qk_norm is not None:
                q, k = self.qk_norm.apply(q, k)
            if self._cos_sin is not None:
                positions = metadata.token_positions
                rotary_embedding(q, k, self._cos_sin, positions, interleaved=self._interleaved, q_out=q, k_out=k)
            if self.qk_norm is not None:
                q, k = q.to(v.dtype), k.to(v.dtype)
            attention(q, k, v, kv_offsets=metadata.query_offsets, kv_form="packed", **options)
        return output
