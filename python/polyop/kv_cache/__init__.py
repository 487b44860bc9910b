"""A paged key/value cache: one manager per model, over the page tables of polyop/runtime.

>>> cache = KVCacheManager(num_layers=2, num_kv_heads=3, head_dim=64, tokens_per_block=16, max_seq_len=128,
...                        max_batch_size=4)
>>> cache.add_sequence(request_id=7, num_tokens=20)
>>> k_pages, v_pages = cache.get_buffers(0)     # each [P, R, Hkv, D]
"""

from .manager import CacheFullError, KVCacheManager
from .step_buffers import StepBuffers

__all__ = ["CacheFullError", "KVCacheManager", "StepBuffers"]
