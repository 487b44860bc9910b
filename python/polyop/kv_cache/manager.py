"""KVCacheManager: page pools for all layers and the page tables of the requests that use them.

Names follow TensorRT-LLM's KVCacheManager. Bookkeeping is polyop/runtime's; this file owns the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import runtime_functions as runtime


class CacheFullError(RuntimeError):
    """No free page for a request; the cache is as it was before the call.

    Attributes:
        request_id: the request that did not fit.
        wanted_pages: further pages it needs.
        free_pages: pages that were left for it.
    """

    def __init__(self, message: str, *, request_id: int, wanted_pages: int, free_pages: int) -> None:
        super().__init__(message)
        self.request_id, self.wanted_pages, self.free_pages = request_id, wanted_pages, free_pages


class KVCacheManager:
    """Paged K and V of all layers; page p of every layer belongs to the same request.

    A request grows by ``add_sequence`` and ``append`` (or by ``prepare_resources`` for a whole batch), shrinks by
    ``rewind`` and ends with ``free_resources``. Reserving makes room; the attention backend writes the tokens.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int | Sequence[int | None],
        head_dim: int,
        tokens_per_block: int = 64,
        max_seq_len: int,
        max_batch_size: int,
        dtype: torch.dtype = torch.float32,
        max_tokens: int | None = None,
        num_pages: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates the pools, uninitialized: rows past a sequence's length are never read.

        Args:
            num_layers: layers of the model.
            num_kv_heads: Hkv of every layer, or a list with one entry per layer where None means no cache there.
            head_dim: head size D.
            tokens_per_block: rows R of a page, any positive number; at least max_seq_len gives a linear cache.
            max_seq_len: longest sequence in tokens.
            max_batch_size: sequences the default pool size has room for at full length.
            dtype: torch.float32, float16 or bfloat16.
            max_tokens: size of the pool in tokens, rounded up to whole pages.
            num_pages: size of the pool in pages P; give at most one of the two.
            device: where the pools live.

        Raises:
            ValueError: a number that is not positive, a list of the wrong length, both sizes given.
            NotImplementedError: another dtype.
        """
        positive = {
            "num_layers": num_layers,
            "head_dim": head_dim,
            "tokens_per_block": tokens_per_block,
            "max_seq_len": max_seq_len,
            "max_batch_size": max_batch_size,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"KVCacheManager: {name} is {value}; wanted a positive number")
        if max_tokens is not None and num_pages is not None:
            raise ValueError("KVCacheManager: max_tokens and num_pages are both given; wanted at most one")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(f"KVCacheManager: dtype is {dtype}; takes torch.float32, float16, bfloat16")
        heads = [num_kv_heads] * num_layers if isinstance(num_kv_heads, int) else list(num_kv_heads)
        if len(heads) != num_layers:
            raise ValueError(f"KVCacheManager: num_kv_heads has {len(heads)} entries; num_layers is {num_layers}")
        for layer, count in enumerate(heads):
            if count is not None and count <= 0:
                raise ValueError(f"KVCacheManager: num_kv_heads[{layer}] is {count}; wanted a positive number or None")

        pages_per_full_sequence = -(-max_seq_len // tokens_per_block)
        if num_pages is None:
            num_pages = (
                max_batch_size * pages_per_full_sequence if max_tokens is None else -(-max_tokens // tokens_per_block)
            )
        self.num_layers, self.num_kv_heads_per_layer, self.head_dim = num_layers, heads, head_dim
        self.tokens_per_block, self.max_seq_len, self.max_batch_size = tokens_per_block, max_seq_len, max_batch_size
        self.num_pages, self.dtype, self.device = num_pages, dtype, torch.device(device)
        self.tables = runtime.create_page_tables(num_pages, tokens_per_block, max_seq_len)
        self._request_ids: dict[int, None] = {}  # ordered set
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for count in heads:
            shape = (num_pages, tokens_per_block, count or 0, head_dim)
            pools = [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2)] if count else None
            self._buffers.append(tuple(pools) if pools else None)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_sequence(self, request_id: int, num_tokens: int) -> None:
        """Starts a request with room for num_tokens tokens (its whole prompt).

        Raises:
            CacheFullError: not enough free pages.
            ValueError: the request exists already, or num_tokens passes max_seq_len.
        """
        if request_id in self._request_ids:
            raise ValueError(f"KVCacheManager: request {request_id} exists already")
        self.prepare_resources([request_id], [num_tokens])

    def append(self, request_id: int, num_tokens: int = 1) -> None:
        """Makes room for num_tokens more tokens of a known request.

        Raises:
            CacheFullError: not enough free pages.
            ValueError: the request is unknown, or its length would pass max_seq_len.
        """
        if request_id not in self._request_ids:
            raise ValueError(f"KVCacheManager: request {request_id} is unknown")
        self.prepare_resources([request_id], [num_tokens])

    def prepare_resources(self, request_ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        """One step of a batch, all or nothing: adds unknown requests and appends to known ones, in order.

        Raises:
            CacheFullError: not enough free pages; no request of the batch has got any.
            ValueError: a repeated request, lists of different length, or a length past max_seq_len.
        """
        shortage = runtime.reserve(self.tables, list(request_ids), list(num_tokens))
        if shortage is not None:
            message, request_id, wanted_pages, free_pages = shortage
            raise CacheFullError(str(message), request_id=request_id, wanted_pages=wanted_pages, free_pages=free_pages)
        self._request_ids.update(dict.fromkeys(request_ids))

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Gives back the last num_tokens tokens of a request (rejected drafts) and the pages only they needed.

        Raises:
            ValueError: the request is unknown, or shorter than num_tokens.
        """
        runtime.rewind(self.tables, request_id, num_tokens)

    def update_resources(self, num_rejected_tokens: dict[int, int]) -> None:
        """After a step: rewinds the rejected draft tokens of each request.

        Raises:
            ValueError: as rewind; requests named before the failing one are rewound.
        """
        for request_id, count in num_rejected_tokens.items():
            self.rewind(request_id, count)

    def free_resources(self, request_id: int) -> None:
        """Ends a request and frees its pages.

        Raises:
            ValueError: the request is unknown (also: freed already).
        """
        runtime.release(self.tables, request_id)
        del self._request_ids[request_id]

    # ---- what backends read ----------------------------------------------------------------------------------------

    def get_buffers(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_pages, v_pages) of a layer, each [P, R, Hkv, D] contiguous, the pool itself.

        Raises:
            ValueError: the layer has no cache or does not exist.
        """
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"KVCacheManager: layer_idx is {layer_idx}; wanted 0 to {self.num_layers - 1}")
        buffers = self._buffers[layer_idx]
        if buffers is None:
            raise ValueError(f"KVCacheManager: layer {layer_idx} has no cache (its num_kv_heads is None)")
        return buffers

    def get_batch_cache_indices(self, request_ids: Sequence[int]) -> list[list[int]]:
        """Page numbers of each request in order of position.

        Raises:
            ValueError: a request is unknown.
        """
        return [list(runtime.pages(self.tables, request_id)) for request_id in request_ids]

    def get_block_ids_per_seq(self, request_ids: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """The same as a dense table [B, W] i32 on the CPU, padded with 0; W is max_blocks_per_seq unless out is given.

        Args:
            out: [B or more, W] i32 on the CPU, last stride 1, to fill; rows past B are left alone.

        Raises:
            ValueError: a request is unknown, or holds more pages than out has columns.
        """
        if out is None:
            out = torch.empty(len(request_ids), self.max_blocks_per_seq, dtype=torch.int32)
        runtime.fill_page_table(self.tables, list(request_ids), out)
        return out

    # ---- sizes -----------------------------------------------------------------------------------------------------

    @property
    def request_ids(self) -> list[int]:
        """Live requests, oldest first."""
        return list(self._request_ids)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width W of a page table that holds any request."""
        return runtime.max_pages_per_sequence(self.tables)

    @property
    def num_free_blocks(self) -> int:
        """Pages that no request holds."""
        return runtime.num_free_pages(self.tables)

    @property
    def num_used_blocks(self) -> int:
        """Pages held by requests."""
        return self.num_pages - self.num_free_blocks

    def get_num_tokens(self, request_id: int) -> int:
        """Tokens a request has room for.

        Raises:
            ValueError: the request is unknown.
        """
        return runtime.num_tokens(self.tables, request_id)

    def blocks_for(self, num_tokens: int) -> int:
        """Pages a request of num_tokens tokens holds."""
        return -(-num_tokens // self.tokens_per_block)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers, K and V."""
        heads = sum(count or 0 for count in self.num_kv_heads_per_layer)
        return 2 * heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes one page takes in all layers, K and V."""
        return self.bytes_per_token * self.tokens_per_block

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools."""
        return self.bytes_per_block * self.num_pages

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages held by requests."""
        return self.bytes_per_block * self.num_used_blocks
