"""A layer under test and attention in double precision: what the tests of the backends share.

Bound (README of python/polyop/attention, "Numerics"): with u = unit roundoff of f32, e = that of the tensor dtype,
A = the largest sum |scale q_d k_d| of a row, Vm = max |v|, L = kv length,
    |error| <= Vm * (exp(2 * ((D + 4) u + r) * A) - 1 + (L + 8) u + e),
r = 2 e when the backend rotates, (D + 12) u more when it norms, else 0.
"""

import math
from dataclasses import dataclass, field

import torch

from polyop.attention import (
    KVCacheParams,
    PositionalEmbeddingParams,
    PredefinedAttentionMask,
    QkNormParams,
    RopeParams,
    get_attention_backend,
    rope_cos_sin_table,
)
from polyop.kv_cache import KVCacheManager

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rotate_double(x, positions, rope, is_neox):
    cos, sin = rope_cos_sin_table(rope)[positions].double().unsqueeze(1).chunk(2, dim=-1)
    out, half = x.double().clone(), rope.dim // 2
    first = slice(0, half) if is_neox else slice(0, rope.dim, 2)
    second = slice(half, rope.dim) if is_neox else slice(1, rope.dim, 2)
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def attend_double(q, k, v, scale, causal):
    """q [S, Hq, D], k and v [L, Hkv, D] -> output [S, Hq, D] and A, the largest sum of |products|."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("shd,lhd->hsl", q, k) * scale
    largest = (torch.einsum("shd,lhd->hsl", q.abs(), k.abs()) * scale).max().item() if scores.numel() else 0.0
    if causal:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("hsl,lhd->shd", torch.softmax(scores, -1), v), largest


def norm_double(x, weight, epsilon):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def error_bound(dtype, head_dim, kv_len, largest_score, largest_v, rotates, norms=False):
    unit, own = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
    rounding = (2 * own if rotates else 0) + ((head_dim + 12) * unit if norms else 0)
    score_error = ((head_dim + 4) * unit + rounding) * largest_score
    return largest_v * (math.expm1(2 * score_error) + (kv_len + 8) * unit + own)


@dataclass
class Model:
    """A layer under test with its cache and the history of every request in double precision."""

    backend_name: str
    dtype: torch.dtype = torch.float32
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    num_pages: int = 64
    rope: RopeParams | None = None
    is_neox: bool = True
    qk_norm: QkNormParams | None = None
    max_seq_len: int = 512
    history: dict = field(default_factory=dict)

    def __post_init__(self):
        backend = get_attention_backend(self.backend_name)
        embedding = PositionalEmbeddingParams(rope=self.rope, is_neox=self.is_neox) if self.rope else None
        self.layer = backend(
            0, self.num_heads, self.head_dim, self.num_kv_heads, pos_embd_params=embedding, qk_norm=self.qk_norm
        )
        self.cache = KVCacheManager(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tokens_per_block=self.page_size,
            max_seq_len=self.max_seq_len,
            max_batch_size=8,
            num_pages=self.num_pages,
            dtype=self.dtype,
        )
        for pool in self.cache.get_buffers(0):
            pool.fill_(math.nan)  # a read past a length would spoil the result
        self.metadata = backend.Metadata(max_num_requests=16, max_num_tokens=1024, kv_cache_manager=self.cache)

    def inputs(self, seed, num_tokens):
        generator = torch.Generator().manual_seed(seed)
        widths = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return [torch.randn(num_tokens, n * self.head_dim, generator=generator).to(self.dtype) for n in widths]

    def prepare(self, request_ids, lens, num_contexts):
        cached = [self.cache.get_num_tokens(r) if r in self.cache.request_ids else 0 for r in request_ids]
        self.cache.prepare_resources(request_ids, lens)
        metadata = self.metadata
        metadata.seq_lens, metadata.num_contexts, metadata.request_ids = lens, num_contexts, request_ids
        metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=cached)
        metadata.prepare()
        return cached

    def step(self, request_ids, lens, qkv, num_contexts=0, mask=PredefinedAttentionMask.CAUSAL, **options):
        """One batch; returns the output [T, Hq * D] and, per request, (double output [S, Hq, D], bound)."""
        cached = self.prepare(request_ids, lens, num_contexts)
        wanted, start = [], 0
        for request_id, past, length in zip(request_ids, cached, lens, strict=True):
            q, k, v = (x[start : start + length].unflatten(-1, (-1, self.head_dim)).double() for x in qkv)
            if self.qk_norm:
                q = norm_double(q, self.qk_norm.q_weight, self.qk_norm.epsilon)
                k = norm_double(k, self.qk_norm.k_weight, self.qk_norm.epsilon)
            if self.rope:
                positions = torch.arange(past, past + length)
                q, k = (rotate_double(x, positions, self.rope, self.is_neox) for x in (q, k))
            old = self.history.get(request_id, (k[:0], v[:0]))
            k, v = torch.cat([old[0], k]), torch.cat([old[1], v])
            self.history[request_id] = (k, v)
            causal = mask is not PredefinedAttentionMask.FULL
            output, largest = attend_double(q, k, v, self.layer.scale, causal)
            largest_v = v.abs().max().item() if v.numel() else 0.0
            changes = (self.rope is not None, self.qk_norm is not None)
            bound = error_bound(self.dtype, self.head_dim, past + length, largest, largest_v, *changes)
            wanted.append((output, bound))
            start += length
        # The backend may rotate its inputs in place.
        output = self.layer.forward(*(x.clone() for x in qkv), self.metadata, attention_mask=mask, **options)
        return output, wanted

    def check(self, output, wanted):
        start = 0
        for i, (expected, bound) in enumerate(wanted):
            got = output[start : start + len(expected)].unflatten(-1, (-1, self.head_dim)).double()
            start += len(expected)
            worst = (got - expected).abs().max().item() if expected.numel() else 0.0
            assert worst <= bound, f"sequence {i}: error {worst:.3e}, bound {bound:.3e}"
        assert start == len(output)

    def run(self, request_ids, lens, seed=0, **options):
        qkv = self.inputs(seed, sum(lens))
        output, wanted = self.step(request_ids, lens, qkv, **options)
        self.check(output, wanted)
        return output

    def cached_rows(self, request_id):
        """K and V rows of a request as they stand in the pool, [L, Hkv, D] each."""
        pages = self.cache.get_batch_cache_indices([request_id])[0]
        length = self.cache.get_num_tokens(request_id)
        return [pool[pages].flatten(0, 1)[:length] for pool in self.cache.get_buffers(0)]


ROPE = RopeParams(dim=16, max_positions=512)


def make_norm(head_dim=16):
    generator = torch.Generator().manual_seed(77)
    q_weight, k_weight = torch.rand(2, head_dim, generator=generator) + 0.5
    return QkNormParams(q_weight=q_weight, k_weight=k_weight, epsilon=1e-5)
