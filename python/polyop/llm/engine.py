"""Engine: in-flight batching. Requests queue, join the running batch when there is room, and leave it when they end.

One step is one forward pass over a packed batch: prompt chunks first, then one token for each generating request. A
prompt is cut at fixed positions (every ``prefill_chunk`` tokens from its start) and a chunk runs whole or not at all:
which of its rows are computed together never depends on other requests, so its tokens are the same in any batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .errors import LlmError
from .model import DecoderModel
from .paged_model import PagedModel, Piece
from .sampling import Sampler, SamplingParams
from .statistics import Statistics
from .tokenizer import TextStream, Tokenizer

PREFILL_CHUNK = 512  # rows that keep a GEMM busy, while activations stay in the cache of a desktop processor

TextCallback = Callable[[str], None]


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt and its continuation.

    Attributes:
        request_id: number within the engine, from 0 in order of submission.
        prompt_ids: at least one id.
        params: how to continue.
        max_new_tokens: params.max_new_tokens, or less where the context ends before.
        output_ids: generated so far, an end-of-sequence token included.
        text: decoded output so far.
        finish_reason: "eos", "stop", "length", or None while it runs.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    _sampler: Sampler = field(repr=False)
    _stream: TextStream = field(repr=False)
    _on_text: TextCallback | None = field(default=None, repr=False)
    _num_cached: int = 0

    @property
    def max_tokens(self) -> int:
        """Longest the sequence can become in the cache; the last generated token is never cached."""
        return len(self.prompt_ids) + self.max_new_tokens - 1


class Engine:
    """Continues many requests with one model."""

    def __init__(
        self,
        model: DecoderModel,
        tokenizer: Tokenizer,
        *,
        max_batch: int = 8,
        page_size: int = 16,
        max_seq_len: int | None = None,
        num_pages: int | None = None,
        max_num_tokens: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        """
        Args:
            model: from load_model.
            tokenizer: from load_tokenizer.
            max_batch: most sequences in a step.
            page_size: rows R of a KV page.
            max_seq_len: longest sequence, prompt and output; None takes the model's.
            num_pages: pages of the KV cache; None has room for max_batch sequences of max_seq_len.
            max_num_tokens: most tokens in a step; None takes two chunks and a token for each sequence.
            prefill_chunk: tokens of a prompt that run in one step.

        Raises:
            LlmError: limits that do not fit together, or no memory for the cache.
        """
        self.model, self.tokenizer = model, tokenizer
        self.max_seq_len = model.max_seq_len if max_seq_len is None else min(max_seq_len, model.max_seq_len)
        for name, value in (("max_batch", max_batch), ("page_size", page_size), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise LlmError(f"{name} is {value}; wanted at least 1")
        if num_pages is not None and num_pages < 1:
            raise LlmError(f"num_pages is {num_pages}; wanted at least 1")
        self.max_batch = max_batch
        self.prefill_chunk = min(prefill_chunk, self.max_seq_len)
        least_tokens = max_batch - 1 + self.prefill_chunk
        self.max_num_tokens = 2 * self.prefill_chunk + max_batch if max_num_tokens is None else max_num_tokens
        if self.max_num_tokens < least_tokens:
            raise LlmError(
                f"max_num_tokens is {max_num_tokens}; wanted at least {least_tokens}, a chunk of {self.prefill_chunk} "
                f"tokens beside {max_batch - 1} generating sequences"
            )
        self._paged = PagedModel(
            model,
            max_batch=max_batch,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
            page_size=page_size,
            num_pages=num_pages,
        )
        self.cache = self._paged.cache
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._promised_pages = 0  # pages the running requests may still grow into, those they hold included
        self._num_submitted = 0
        self.statistics = Statistics(weight_bytes=model.weight_bytes, kv_bytes=self.cache.total_bytes)

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, on_text: TextCallback | None = None) -> Request:
        """Queues a request.

        Args:
            prompt_ids: token ids, at least one.
            params: how to continue.
            on_text: called with each piece of text as it becomes final.

        Raises:
            LlmError: the prompt is empty, longer than max_seq_len allows, or needs more pages than there are.
        """
        prompt_ids, name = list(prompt_ids), f"prompt {self._num_submitted}"
        vocab_size = self.model.config.vocab_size
        if not prompt_ids:
            raise LlmError(f"{name} is empty; wanted at least one token")
        if len(prompt_ids) > self.max_seq_len:
            raise LlmError(f"{name} has {len(prompt_ids)} tokens; the context holds {self.max_seq_len}")
        for token_id in prompt_ids:
            if not 0 <= token_id < vocab_size:
                raise LlmError(f"{name} holds token {token_id}; the vocabulary of the model has {vocab_size}")
        request = Request(
            request_id=self._num_submitted,
            prompt_ids=prompt_ids,
            params=params,
            max_new_tokens=min(params.max_new_tokens, self.max_seq_len - len(prompt_ids) + 1),
            _sampler=Sampler(params),
            _stream=TextStream(self.tokenizer.decode, params.stop),
            _on_text=on_text,
        )
        wanted_pages = self.cache.blocks_for(request.max_tokens)
        if wanted_pages > self.cache.num_pages:
            raise LlmError(
                f"no free page: {name} needs {wanted_pages} pages of {self.cache.tokens_per_block} tokens; "
                f"the KV cache has {self.cache.num_pages}"
            )
        self._num_submitted += 1
        self._waiting.append(request)
        return request

    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    def run(self) -> None:
        """Steps until every request has finished."""
        while self.has_work():
            self.step()

    # ---- one step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Runs one batch.

        Returns:
            The requests that finished in this step.
        """
        started = time.perf_counter()
        self._admit()
        contexts, generations = self._pick()
        pieces = [
            self._piece(request, request.prompt_ids[request._num_cached : request._num_cached + length])
            for request, length in contexts
        ] + [self._piece(request, request.output_ids[-1:]) for request in generations]
        if not pieces:
            return []
        hidden, row_ranges = self._paged.forward(pieces)
        batch = [request for request, _ in contexts] + generations
        for request, piece in zip(batch, pieces, strict=True):
            request._num_cached += len(piece.token_ids)
        # A sequence whose prompt is now complete gets a token from the logits of its last row.
        sampling = [i for i, request in enumerate(batch) if request._num_cached >= len(request.prompt_ids)]
        logits = self.model.logits(hidden[[row_ranges[i][1] - 1 for i in sampling]]) if sampling else None
        for row, i in enumerate(sampling):
            self._accept(batch[i], batch[i]._sampler.sample(logits[row]))
        self._count(contexts, generations, len(sampling), time.perf_counter() - started)
        return self._release_finished()

    def _admit(self) -> None:
        """Moves waiting requests into the batch, in order, while each can grow to its full length."""
        while self._waiting and len(self._running) < self.max_batch:
            pages = self.cache.blocks_for(self._waiting[0].max_tokens)
            if self._promised_pages + pages > self.cache.num_pages:
                return
            self._promised_pages += pages
            self._running.append(self._waiting.popleft())

    def _pick(self) -> tuple[list[tuple[Request, int]], list[Request]]:
        """Every generating request, and as many whole prompt chunks as the token budget takes, oldest first."""
        generations = [request for request in self._running if request.output_ids]
        budget = self.max_num_tokens - len(generations)
        contexts = []
        for request in self._running:
            if request.output_ids:
                continue
            length = min(self.prefill_chunk, len(request.prompt_ids) - request._num_cached)
            if length > budget:
                break
            budget -= length
            contexts.append((request, length))
        return contexts, generations

    @staticmethod
    def _piece(request: Request, token_ids: list[int]) -> Piece:
        return Piece(
            request_id=request.request_id,
            token_ids=token_ids,
            num_cached=request._num_cached,
            prompt_length=len(request.prompt_ids),
        )

    def _accept(self, request: Request, token_id: int) -> None:
        """Appends a token to a request, streams its text, and decides whether the request has ended."""
        request.output_ids.append(token_id)
        params, stream = request.params, request._stream
        is_eos = token_id in self.model.config.eos_token_ids and not params.ignore_eos
        text = "" if is_eos else stream.push(token_id)
        if is_eos:
            request.finish_reason = "eos"
        elif stream.has_stopped:
            request.finish_reason = "stop"
        elif len(request.output_ids) == request.max_new_tokens:
            request.finish_reason = "length"
        if request.finish_reason is not None:
            text += stream.finish()
        request.text = stream.text
        if text and request._on_text is not None:
            request._on_text(text)

    def _release_finished(self) -> list[Request]:
        finished = [request for request in self._running if request.finish_reason is not None]
        for request in finished:
            self.cache.free_resources(request.request_id)
            self._promised_pages -= self.cache.blocks_for(request.max_tokens)
            self._running.remove(request)
        return finished

    def _count(
        self, contexts: list[tuple[Request, int]], generations: list[Request], num_sampled: int, seconds: float
    ) -> None:
        statistics = self.statistics
        if contexts:
            statistics.prefill_tokens += sum(length for _, length in contexts)
            statistics.prefill_seconds += seconds
        else:
            statistics.decode_tokens += len(generations)
            statistics.decode_seconds += seconds
        statistics.generated_tokens += num_sampled
