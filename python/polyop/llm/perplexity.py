"""Perplexity of a model on a text, in windows that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .errors import LlmError
from .model import DecoderModel
from .paged_model import PagedModel, Piece

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
    paged = PagedModel(model, max_batch=1, max_num_tokens=window, max_seq_len=window, page_size=_PAGE_SIZE)
    total, num_scored = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        read = list(token_ids[start : start + window])
        hidden, _ = paged.forward([Piece(request_id=0, token_ids=read, prompt_length=len(read))])
        paged.cache.free_resources(0)
        ids = torch.tensor(read)
        for first in range(0, len(ids) - 1, _LOGIT_ROWS_AT_ONCE):
            last = min(first + _LOGIT_ROWS_AT_ONCE, len(ids) - 1)
            logits = model.logits_of_block(hidden[first:last])
            losses = torch.nn.functional.cross_entropy(logits, ids[first + 1 : last + 1], reduction="sum")
            total += float(losses)
        num_scored += len(ids) - 1
        if on_progress is not None:
            on_progress(min(start + window, len(token_ids)), len(token_ids))
    return math.exp(total / num_scored)
