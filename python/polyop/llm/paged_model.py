"""PagedModel: a decoder with its KV cache and attention metadata; one call runs one packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polyop.attention import KVCacheParams
from polyop.kv_cache import KVCacheManager

from .errors import LlmError
from .linear import RowRanges
from .model import DecoderModel


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one sequence adds to the cache in a step.

    Attributes:
        request_id: the sequence; an id that the cache does not know starts a new one.
        token_ids: its next tokens, at least one.
        num_cached: its tokens that are in the cache already.
        prompt_length: tokens of its whole prompt.
    """

    request_id: int
    token_ids: Sequence[int]
    num_cached: int = 0
    prompt_length: int

    @property
    def is_context(self) -> bool:
        """True for a part of the prompt, False for a generated token."""
        return self.num_cached < self.prompt_length


class PagedModel:
    """Model, page pool and step buffers of one server of requests."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        max_batch: int,
        max_num_tokens: int,
        max_seq_len: int,
        page_size: int,
        num_pages: int | None = None,
    ) -> None:
        """
        Args:
            model: from load_model.
            max_batch: most sequences in a step.
            max_num_tokens: most tokens in a step.
            max_seq_len: longest sequence.
            page_size: rows R of a page.
            num_pages: None has room for max_batch sequences of max_seq_len.

        Raises:
            LlmError: no memory for the cache.
        """
        config = model.config
        self.model = model
        try:
            self.cache = KVCacheManager(
                num_layers=config.num_hidden_layers,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                tokens_per_block=page_size,
                max_seq_len=max_seq_len,
                max_batch_size=max_batch,
                dtype=model.dtype,
                num_pages=num_pages,
            )
        except RuntimeError:  # torch's allocator
            raise LlmError(f"no memory for a KV cache of {max_batch} sequences of {max_seq_len} tokens") from None
        self._metadata = model.backend.Metadata(
            max_num_requests=max_batch, max_num_tokens=max_num_tokens, kv_cache_manager=self.cache
        )

    def forward(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, RowRanges]:
        """Gives pages to the sequences that need one and runs the model; the tokens are in the cache afterwards.

        Args:
            pieces: one for each sequence, those of contexts first.

        Returns:
            Hidden states [T, hidden] for DecoderModel.logits, and the rows of each sequence.

        Raises:
            polyop.kv_cache.CacheFullError: no free page; nothing has changed.
        """
        token_ids: list[int] = []
        row_ranges = []
        for piece in pieces:
            row_ranges.append((len(token_ids), len(token_ids) + len(piece.token_ids)))
            token_ids += piece.token_ids
        lengths = [len(piece.token_ids) for piece in pieces]
        request_ids = [piece.request_id for piece in pieces]
        self.cache.prepare_resources(request_ids, lengths)
        metadata = self._metadata
        metadata.num_contexts = sum(piece.is_context for piece in pieces)
        metadata.seq_lens = lengths
        metadata.request_ids = request_ids
        metadata.prompt_lens = [piece.prompt_length for piece in pieces]
        metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[piece.num_cached for piece in pieces])
        metadata.prepare()
        return self.model.forward(torch.tensor(token_ids), metadata, row_ranges), row_ranges
