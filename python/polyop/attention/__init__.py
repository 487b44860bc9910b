"""Attention backends by name, over a paged KV cache; packed batches mix contexts and generations.

>>> backend_class = get_attention_backend("fused")
>>> layer = backend_class(layer_idx=0, num_heads=9, head_dim=64, num_kv_heads=3, pos_embd_params=rope)
>>> metadata = backend_class.Metadata(max_num_requests=8, max_num_tokens=512, kv_cache_manager=cache)
>>> metadata.seq_lens, metadata.num_contexts, metadata.request_ids = [5, 1], 1, [7, 3]
>>> metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[0, 40])
>>> metadata.prepare()                          # once per step
>>> out = layer.forward(q, k, v, metadata)      # once per layer; q [6, 9 * 64]
"""

from .fused import FusedAttention, FusedAttentionMetadata
from .interface import (
    AttentionBackend,
    AttentionMask,
    CustomAttentionMask,
    PredefinedAttentionMask,
    QuantConfig,
)
from .metadata import AttentionMetadata, KVCacheParams
from .qk_norm import QkNormParams
from .registry import available_attention_backends, get_attention_backend, register_attention_backend
from .rope import (
    PositionalEmbeddingParams,
    PositionEmbeddingType,
    RopeParams,
    RotaryScalingType,
    inverse_frequencies,
    rope_cos_sin_table,
)
from .vanilla import VanillaAttention, VanillaAttentionMetadata

__all__ = [
    "AttentionBackend",
    "AttentionMask",
    "AttentionMetadata",
    "CustomAttentionMask",
    "FusedAttention",
    "FusedAttentionMetadata",
    "KVCacheParams",
    "PositionEmbeddingType",
    "PositionalEmbeddingParams",
    "PredefinedAttentionMask",
    "QkNormParams",
    "QuantConfig",
    "RopeParams",
    "RotaryScalingType",
    "VanillaAttention",
    "VanillaAttentionMetadata",
    "available_attention_backends",
    "get_attention_backend",
    "inverse_frequencies",
    "register_attention_backend",
    "rope_cos_sin_table",
]
