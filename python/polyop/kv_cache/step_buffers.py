"""StepBuffers: the fixed i32 arrays that describe one step of a batch to the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import runtime_functions as runtime
from .manager import KVCacheManager

# Every array starts on a 64-byte line (16 x i32), so that vector loads of lengths and tables are aligned.
_ALIGNMENT = 16


class StepBuffers:
    """Fixed-address arrays for up to max_sequences sequences, max_tokens tokens and W page columns.

    One allocation on the host holds all arrays; on another device a twin of it is filled by one copy per step.

    Attributes (all i32, on ``device``):
        query_offsets [Bmax + 1], write_positions [Bmax], kv_lengths [Bmax], logits_rows [Bmax], position_ids [Tmax],
        page_table [Bmax, W]. Entries of page_table past a request's pages are -1: a kernel that read them would be
        caught by its bounds check instead of reading another request's page.
    """

    def __init__(
        self, *, max_sequences: int, max_tokens: int, max_blocks_per_seq: int, device: torch.device | str = "cpu"
    ) -> None:
        self.max_sequences, self.max_tokens, self.max_blocks_per_seq = max_sequences, max_tokens, max_blocks_per_seq
        self.device = torch.device(device)
        rows, columns = max_sequences, max_blocks_per_seq
        self._sizes = [rows + 1, rows, rows, rows, max_tokens, rows * columns]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._host = torch.zeros(self._starts[-1], dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._twin = self._host if self.device.type == "cpu" else torch.zeros_like(self._host, device=self.device)
        self._host_views = self._cut(self._host)
        views = self._cut(self._twin)
        self.query_offsets, self.write_positions, self.kv_lengths = views[0], views[1], views[2]
        self.logits_rows, self.position_ids, self.page_table = views[3], views[4], views[5]

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views = [flat[start : start + size] for start, size in zip(self._starts, self._sizes, strict=False)]
        views[-1] = views[-1].view(self.max_sequences, self.max_blocks_per_seq)
        return views

    def has_room_for(self, max_sequences: int, max_tokens: int, max_blocks_per_seq: int) -> bool:
        """True when every array is at least as large as asked; the page table must have exactly the width asked."""
        return (
            self.max_sequences >= max_sequences
            and self.max_tokens >= max_tokens
            and self.max_blocks_per_seq == max_blocks_per_seq
        )

    def fill(
        self,
        manager: KVCacheManager | None,
        request_ids: Sequence[int],
        query_lens: Sequence[int],
        cached_lens: Sequence[int],
        position_ids: torch.Tensor | None = None,
    ) -> None:
        """Writes all arrays for one step with one call of the runtime.

        Args:
            manager: owner of the pages; None leaves page_table alone (no-cache mode).
            request_ids: [B]; empty without a manager.
            query_lens, cached_lens: [B] new tokens, and tokens in the cache before the step.
            position_ids: [T] integer positions to use instead of cached_lens[i] + 0, 1, 2, …

        Raises:
            ValueError: the batch passes a limit, a request is unknown or has fewer pages than its length needs;
                nothing has been written.
        """
        tables = None if manager is None else manager.tables
        runtime.fill_step(tables, list(request_ids), list(query_lens), list(cached_lens), *self._host_views)
        if position_ids is not None:
            self._host_views[4][: position_ids.numel()].copy_(position_ids.reshape(-1))
        if self._twin is not self._host:
            used = self._starts[5] + len(query_lens) * self.max_blocks_per_seq
            # Blocking: the next step may overwrite the host side as soon as this returns.
            self._twin[:used].copy_(self._host[:used])
