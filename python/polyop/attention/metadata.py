"""AttentionMetadata: what a batch looks like, once per step, for all layers.

Source: the PyTorch-backend attention chapter of TensorRT-LLM. The runtime fills the fields before each step and calls
``prepare()`` once; every layer's ``forward`` reads the result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from polyop.kv_cache import KVCacheManager, StepBuffers


@dataclass(kw_only=True)
class KVCacheParams:
    """What the runtime knows about the cache in this step.

    Attributes:
        use_cache: False ignores the manager: keys and values of this step are all there is.
        num_cached_tokens_per_seq: for each sequence, tokens already in the cache BEFORE this step.
    """

    use_cache: bool = True
    num_cached_tokens_per_seq: Sequence[int] = field(default_factory=list)


class AttentionMetadata:
    """Describes one batch: contexts first, then generations, packed without padding.

    Fields, set by the runtime before ``prepare()`` unless stated:
        max_num_requests, max_num_tokens: int, given at construction; they size every buffer.
        kv_cache_manager: KVCacheManager or None (no-cache mode), given at construction.
        seq_lens: i32 [B] on the CPU, NEW tokens of each sequence (0 is allowed). A list of int is accepted.
        num_contexts: int, the first num_contexts sequences are in the context phase.
        request_ids: list of int [B], needed when a cache is used.
        prompt_lens: list of int [B] or None; checked for its length only.
        kv_cache_params: KVCacheParams, needed when there is a manager.
        position_ids: i32 or i64 [T] or None; None counts on from the cached tokens of each sequence.
        is_cuda_graph: bool, set by create_cuda_graph_metadata.
    Derived when seq_lens or num_contexts is SET (never when read, so that a compiled forward sees plain ints):
        num_seqs, num_generations, num_tokens, num_ctx_tokens: int.
        seq_lens_cuda: i32 [B], copy on the device; always the same memory.
        context_lens: i32 [num_contexts], a view of seq_lens.
    Derived by prepare():
        cached_lens, kv_lens: lists of int [B], cache length before and after this step.
        max_kv_len: int, the longest kv_lens entry (0 for an empty batch).
        max_position: int, the largest position of a token in this step (-1 for a batch without tokens).
        query_offsets i32 [B + 1], write_positions i32 [B], kv_lengths i32 [B], page_table i32 [B, W] (None without a
        cache), token_positions i32 [T], logits_rows i32 [B] (packed row of each sequence's last new token, -1 for a
        sequence without one): views of step_buffers on the metadata's device.

    No tensor held here is re-allocated after construction, in graph mode or not.
    """

    def __init__(
        self,
        *,
        max_num_requests: int,
        max_num_tokens: int,
        kv_cache_manager: KVCacheManager | None = None,
        seq_lens: torch.Tensor | Sequence[int] | None = None,
        num_contexts: int = 0,
        request_ids: Sequence[int] | None = None,
        prompt_lens: Sequence[int] | None = None,
        position_ids: torch.Tensor | None = None,
        kv_cache_params: KVCacheParams | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocates the fixed buffers; subclasses add theirs in ``allocate_buffers``.

        Args:
            device: device of seq_lens_cuda and of backend buffers; None takes the manager's, otherwise the CPU.

        Raises:
            ValueError: a limit that is not positive, or the checks of the seq_lens and num_contexts setters.
        """
        for name, value in (("max_num_requests", max_num_requests), ("max_num_tokens", max_num_tokens)):
            if value <= 0:
                raise ValueError(f"{type(self).__name__}: {name} is {value}; wanted a positive number")
        self.max_num_requests = int(max_num_requests)
        self.max_num_tokens = int(max_num_tokens)
        self.kv_cache_manager = kv_cache_manager
        if device is None:
            device = kv_cache_manager.device if kv_cache_manager is not None else "cpu"
        self.device = torch.device(device)
        self.is_cuda_graph = False
        self.request_ids = request_ids
        self.prompt_lens = prompt_lens
        self.position_ids = position_ids
        self.kv_cache_params = kv_cache_params
        self.cached_lens: list[int] = []
        self.kv_lens: list[int] = []
        self.max_kv_len = 0
        self.is_prepared = False
        self._query_lens: list[int] = []
        self._seq_lens: torch.Tensor | None = None
        self._num_contexts = int(num_contexts)
        self.max_position = -1
        self.allocate_buffers()
        if seq_lens is not None:
            self.seq_lens = seq_lens
        else:
            self._compute_totals()

    def allocate_buffers(self, buffers: StepBuffers | None = None) -> None:
        """Allocates every tensor of this metadata, sized by max_num_requests, max_num_tokens and the manager.

        Called once by the constructor and once by create_cuda_graph_metadata. Subclasses extend it.

        Args:
            buffers: step buffers of another metadata object to share (see create_cuda_graph_metadata).

        Raises:
            ValueError: shared buffers that are too small or live on another device.
        """
        manager = self.kv_cache_manager
        wanted = (self.max_num_requests, self.max_num_tokens, manager.max_blocks_per_seq if manager else 0)
        if buffers is None:
            sizes = dict(zip(("max_sequences", "max_tokens", "max_blocks_per_seq"), wanted, strict=True))
            buffers = StepBuffers(**sizes, device=self.device)
        elif buffers.device != self.device or not buffers.has_room_for(*wanted):
            raise ValueError(
                f"{type(self).__name__}: shared buffers have room for {buffers.max_sequences} sequences, "
                f"{buffers.max_tokens} tokens, {buffers.max_blocks_per_seq} pages a sequence on {buffers.device}; "
                f"wanted {wanted[0]}, {wanted[1]}, {wanted[2]} on {self.device}"
            )
        self.step_buffers = buffers
        self._seq_lens_device = torch.zeros(self.max_num_requests, dtype=torch.int32, device=self.device)

    # -- fields with totals

    @property
    def seq_lens(self) -> torch.Tensor | None:
        """i32 [B] on the CPU: new tokens of each sequence."""
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, value: torch.Tensor | Sequence[int]) -> None:
        lens = value.tolist() if isinstance(value, torch.Tensor) else [int(n) for n in value]
        who = type(self).__name__
        if len(lens) > self.max_num_requests:
            raise ValueError(f"{who}: seq_lens has {len(lens)} sequences; max_num_requests is {self.max_num_requests}")
        for i, n in enumerate(lens):
            if n < 0:
                raise ValueError(f"{who}: seq_lens[{i}] is {n}; wanted at least 0")
        if sum(lens) > self.max_num_tokens:
            raise ValueError(f"{who}: seq_lens sums to {sum(lens)} tokens; max_num_tokens is {self.max_num_tokens}")
        tensor = torch.as_tensor(value, dtype=torch.int32, device="cpu")
        if tensor.dim() != 1:
            raise ValueError(f"{who}: seq_lens has rank {tensor.dim()}; wanted 1")
        self._query_lens, self._seq_lens = lens, tensor
        self._seq_lens_device[: len(lens)].copy_(tensor)
        self._compute_totals()

    @property
    def seq_lens_cuda(self) -> torch.Tensor | None:
        """i32 [B] on the metadata's device: a copy of seq_lens in memory that never moves."""
        return None if self._seq_lens is None else self._seq_lens_device[: len(self._query_lens)]

    @property
    def num_contexts(self) -> int:
        """Sequences in the context phase; they come first in the batch."""
        return self._num_contexts

    @num_contexts.setter
    def num_contexts(self, value: int) -> None:
        who = type(self).__name__
        if value < 0:
            raise ValueError(f"{who}: num_contexts is {value}; wanted at least 0")
        if self.is_cuda_graph and value != 0:
            raise ValueError(f"{who}: num_contexts is {value}; a CUDA graph takes generation sequences only")
        self._num_contexts = int(value)
        self._compute_totals()

    def _compute_totals(self) -> None:
        # The runtime sets num_contexts and seq_lens one after the other, in any order: the pair is checked in prepare.
        self.num_seqs = len(self._query_lens)
        self.num_generations = max(self.num_seqs - self._num_contexts, 0)
        self.num_tokens = sum(self._query_lens)
        self.num_ctx_tokens = sum(self._query_lens[: self._num_contexts])
        self.is_prepared = False

    @property
    def context_lens(self) -> torch.Tensor | None:
        """i32 [num_contexts] on the CPU: lengths of the context-phase sequences."""
        return None if self._seq_lens is None else self._seq_lens[: self._num_contexts]

    @property
    def query_lens(self) -> list[int]:
        """seq_lens as a list of int."""
        return self._query_lens

    @property
    def uses_cache(self) -> bool:
        """True when this step reads and writes the KV cache manager's pages."""
        has_params = self.kv_cache_params is not None
        return self.kv_cache_manager is not None and (not has_params or self.kv_cache_params.use_cache)

    # -- one step

    def prepare(self) -> None:
        """Turns the fields into kernel parameters; call once per step, after the fields are set and pages reserved.

        Raises:
            ValueError: a field is missing or has the wrong length, a request is unknown to the manager, or a sequence
                is longer than the room reserved for it; the metadata is then unusable until a prepare() succeeds.
        """
        self.is_prepared = False
        who, num_seqs = type(self).__name__, self.num_seqs
        if self._seq_lens is None:
            raise ValueError(f"{who}: seq_lens is not set")
        if self._num_contexts > num_seqs:
            raise ValueError(f"{who}: num_contexts is {self._num_contexts}; seq_lens has {num_seqs} sequences")
        if self.prompt_lens is not None and len(self.prompt_lens) != num_seqs:
            raise ValueError(f"{who}: prompt_lens has {len(self.prompt_lens)} entries; seq_lens has {num_seqs}")
        if self.position_ids is not None and self.position_ids.numel() != self.num_tokens:
            raise ValueError(
                f"{who}: position_ids has {self.position_ids.numel()} entries; the batch has {self.num_tokens} tokens"
            )
        if self.position_ids is not None and self.num_tokens and int(self.position_ids.min()) < 0:
            raise ValueError(f"{who}: position_ids holds {int(self.position_ids.min())}; wanted at least 0")
        if self.uses_cache:
            if self.request_ids is None or len(self.request_ids) != num_seqs:
                got = "None" if self.request_ids is None else f"{len(self.request_ids)} entries"
                raise ValueError(f"{who}: request_ids has {got}; seq_lens has {num_seqs}")
            if self.kv_cache_params is None:
                raise ValueError(f"{who}: kv_cache_params is None; wanted num_cached_tokens_per_seq with a cache")
            cached = [int(n) for n in self.kv_cache_params.num_cached_tokens_per_seq]
            if len(cached) != num_seqs:
                raise ValueError(
                    f"{who}: kv_cache_params.num_cached_tokens_per_seq has {len(cached)} entries; "
                    f"seq_lens has {num_seqs}"
                )
        else:
            cached = [0] * num_seqs
        self.step_buffers.fill(
            self.kv_cache_manager if self.uses_cache else None,
            self.request_ids if self.uses_cache else [],
            self._query_lens,
            cached,
            self.position_ids,
        )
        self.cached_lens = cached
        self.kv_lens = [c + n for c, n in zip(cached, self._query_lens, strict=True)]
        self.max_kv_len = max(self.kv_lens, default=0)
        if self.position_ids is not None:
            self.max_position = int(self.position_ids.max()) if self.num_tokens else -1
        else:
            lengths = zip(self.kv_lens, self._query_lens, strict=True)
            self.max_position = max((kv_len - 1 for kv_len, query_len in lengths if query_len), default=-1)
        self._take_views()
        self.prepare_backend()
        self.is_prepared = True

    def _take_views(self) -> None:
        buffers, num_seqs = self.step_buffers, self.num_seqs
        self.query_offsets = buffers.query_offsets[: num_seqs + 1]
        self.write_positions = buffers.write_positions[:num_seqs]
        self.kv_lengths = buffers.kv_lengths[:num_seqs]
        self.logits_rows = buffers.logits_rows[:num_seqs]
        self.token_positions = buffers.position_ids[: self.num_tokens]
        self.page_table = buffers.page_table[:num_seqs] if self.uses_cache else None

    def prepare_backend(self) -> None:
        """Hook at the end of prepare(): a backend fills its own fields from the predefined ones. Default: nothing."""

    def create_cuda_graph_metadata(
        self, max_batch_size: int, *, max_draft_tokens: int = 0, buffers: StepBuffers | None = None
    ) -> AttentionMetadata:
        """Metadata for capturing a graph of ``max_batch_size`` generation sequences, with all tensors pre-allocated.

        The result keeps the manager and parameters of this object, has num_contexts = 0 and seq_lens of
        1 + max_draft_tokens for each sequence. A metadata object that is a graph metadata already is returned as it is.

        Args:
            max_batch_size: sequences of the graph; becomes max_num_requests.
            max_draft_tokens: further query tokens per sequence.
            buffers: ``step_buffers`` of another metadata object to share: sizes captured one after another need one
                allocation only. It must be large enough. Objects that share must be prepared before each use.

        Raises:
            ValueError: sizes that are not positive, or shared buffers that are too small.
        """
        if self.is_cuda_graph:
            return self
        who = type(self).__name__
        if max_batch_size <= 0 or max_draft_tokens < 0:
            raise ValueError(
                f"{who}: max_batch_size is {max_batch_size} and max_draft_tokens is {max_draft_tokens}; "
                "wanted a positive number and at least 0"
            )
        graph = copy.copy(self)
        graph.is_cuda_graph = True
        graph.max_num_requests = max_batch_size
        graph.max_num_tokens = max_batch_size * (1 + max_draft_tokens)
        graph._num_contexts = 0
        graph.allocate_buffers(buffers)
        graph.seq_lens = [1 + max_draft_tokens] * max_batch_size
        return graph
