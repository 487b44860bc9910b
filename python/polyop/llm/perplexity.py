"""Perplexity of a model on a text, in windows that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from polyop.attention import KVCacheParams
from polyop.kv_cache import KVCacheManager

from .errors import LlmError
from .model import DecoderModel

WINDOW_TOKENS = 512
_LOGIT_ROWS_AT_ONCE = 128  # bounds the f32 logits to 128 * V
_PAGE_SIZE = 16


@torch.inference_mode()
def compute_perplexity(
    model: DecoderModel,
    token_ids: Sequence[int],
    *,
    window: int = WINDOW_TOKENS,
    on_progress: Callable[[int, int], None] | None = None,
) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window.

    Args:
        model: from load_model.
        token_ids: the text; at least two ids.
        window: tokens that are read together; the first of each window is not scored.
        on_progress: called with (tokens read, tokens in all).

    Raises:
        LlmError: the text is too short, or a window is longer than the context.
    """
    if len(token_ids) < 2:
        raise LlmError(f"the text has {len(token_ids)} tokens; wanted at least 2")
    if not 2 <= window <= model.max_seq_len:
        raise LlmError(f"window is {window}; wanted 2 to {model.max_seq_len}, the context")
    config = model.config
    cache = KVCacheManager(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        tokens_per_block=_PAGE_SIZE,
        max_seq_len=window,
        max_batch_size=1,
        dtype=model.dtype,
    )
    metadata = model.backend.Metadata(max_num_requests=1, max_num_tokens=window, kv_cache_manager=cache)
    total, num_scored = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        ids = torch.tensor(token_ids[start : start + window])
        if len(ids) < 2:
            break
        cache.add_sequence(0, len(ids))
        metadata.num_contexts, metadata.seq_lens, metadata.request_ids = 1, [len(ids)], [0]
        metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[0])
        metadata.prepare()
        hidden = model.forward(ids, metadata, [(0, len(ids))])
        cache.free_resources(0)
        for first in range(0, len(ids) - 1, _LOGIT_ROWS_AT_ONCE):
            last = min(first + _LOGIT_ROWS_AT_ONCE, len(ids) - 1)
            logits = model.logits_of_block(hidden[first:last])
            losses = torch.nn.functional.cross_entropy(logits, ids[first + 1 : last + 1], reduction="sum")
            total += float(losses)
        num_scored += len(ids) - 1
        if on_progress is not None:
            on_progress(min(start + window, len(token_ids)), len(token_ids))
    return math.exp(total / num_scored)
