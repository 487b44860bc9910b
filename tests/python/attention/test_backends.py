"""Both backends against attention in double precision over dense histories, and against each other.

Bound (README of python/polyop/attention, "Numerics"): with u = unit roundoff of f32, e = that of the tensor dtype,
A = the largest sum |scale q_d k_d| of a row, Vm = max |v|, L = kv length,
    |error| <= Vm * (exp(2 * ((D + 4) u + r) * A) - 1 + (L + 8) u + e),    r = 2 e when the backend rotates, else 0.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch

from polyop.attention import (
    CustomAttentionMask,
    KVCacheParams,
    PositionalEmbeddingParams,
    PredefinedAttentionMask,
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


def error_bound(dtype, head_dim, kv_len, largest_score, largest_v, rotates):
    unit, own = torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).eps / 2
    score_error = ((head_dim + 4) * unit + (2 * own if rotates else 0)) * largest_score
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
    max_seq_len: int = 512
    history: dict = field(default_factory=dict)

    def __post_init__(self):
        backend = get_attention_backend(self.backend_name)
        embedding = PositionalEmbeddingParams(rope=self.rope, is_neox=self.is_neox) if self.rope else None
        self.layer = backend(0, self.num_heads, self.head_dim, self.num_kv_heads, pos_embd_params=embedding)
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
            if self.rope:
                positions = torch.arange(past, past + length)
                q, k = (rotate_double(x, positions, self.rope, self.is_neox) for x in (q, k))
            old = self.history.get(request_id, (k[:0], v[:0]))
            k, v = torch.cat([old[0], k]), torch.cat([old[1], v])
            self.history[request_id] = (k, v)
            causal = mask is not PredefinedAttentionMask.FULL
            output, largest = attend_double(q, k, v, self.layer.scale, causal)
            largest_v = v.abs().max().item() if v.numel() else 0.0
            bound = error_bound(self.dtype, self.head_dim, past + length, largest, largest_v, self.rope is not None)
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


@pytest.fixture(params=["vanilla", "fused"])
def name(request):
    return request.param


ROPE = RopeParams(dim=16, max_positions=512)


# ---- correctness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", [None, ROPE, RopeParams(dim=8, max_positions=512)], ids=["none", "full", "partial"])
def test_mixed_batch_matches_double_precision(name, dtype, rope):
    model = Model(name, dtype, rope=rope)
    model.run([1, 2, 3, 4], [30, 40, 62, 75], num_contexts=4, seed=1)
    model.run([5, 6, 3, 4], [3, 2, 1, 1], num_contexts=2, seed=2)
    model.run([1, 2, 5, 6], [1, 5, 1, 1], seed=3)


def test_interleaved_rotation_matches_double_precision(name):
    model = Model(name, rope=ROPE, is_neox=False)
    model.run([1, 2], [7, 3], num_contexts=2)
    model.run([2, 1], [1, 1], seed=1)


def test_chunked_context_and_generation_match_double_precision(name):
    model = Model(name, rope=ROPE, page_size=7)
    model.run([1], [20], num_contexts=1)
    model.run([1, 2], [13, 1], num_contexts=2, seed=1)  # second chunk of a context beside a new one
    model.run([2, 1], [1, 1], seed=2)


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)])
def test_any_ratio_of_heads(name, heads):
    model = Model(name, num_heads=heads[0], num_kv_heads=heads[1])
    model.run([1, 2], [5, 17], num_contexts=2)
    model.run([1, 2], [1, 1], seed=1)


def test_full_mask_sees_every_key(name):
    model = Model(name)
    model.run([1, 2], [5, 9], num_contexts=2, mask=PredefinedAttentionMask.FULL)
    model.run([1, 2], [3, 1], mask=PredefinedAttentionMask.FULL, seed=1)


@pytest.mark.parametrize("mask", list(PredefinedAttentionMask))
@pytest.mark.parametrize("rope", [None, ROPE], ids=["plain", "rope"])
def test_without_cache_matches_double_precision(name, mask, rope):
    model = Model(name, rope=rope)
    lens = [5, 0, 9, 1]
    qkv = model.inputs(3, sum(lens))
    _, wanted = model.step([1, 2, 3, 4], lens, qkv, mask=mask)
    metadata = type(model.metadata)(max_num_requests=4, max_num_tokens=64, seq_lens=lens)
    metadata.prepare()
    output = model.layer.forward(*(x.clone() for x in qkv), metadata, attention_mask=mask)
    model.check(output, wanted)


def test_use_cache_false_leaves_the_cache_alone(name):
    model = Model(name)
    model.metadata.seq_lens = [4]
    model.metadata.kv_cache_params = KVCacheParams(use_cache=False)
    model.metadata.prepare()
    model.layer.forward(*model.inputs(0, 4), model.metadata)
    assert all(pool.isnan().all() for pool in model.cache.get_buffers(0))


# ---- cache contents ----------------------------------------------------------------------------------------------


def test_cache_holds_the_rows_at_the_right_places_and_nothing_else(name):
    model = Model(name, rope=ROPE, page_size=5, num_pages=20)
    model.run([1, 2], [12, 4], num_contexts=2)
    model.run([2, 1, 3], [1, 1, 6], seed=1)
    for request_id, (k, v) in model.history.items():
        k_rows, v_rows = model.cached_rows(request_id)
        torch.testing.assert_close(k_rows.double(), k, rtol=1e-5, atol=1e-5)
        assert torch.equal(v_rows.double(), v), "values are copied, not computed"
    live = sum(len(k) for k, _ in model.history.values())
    for pool in model.cache.get_buffers(0):
        assert (~pool.isnan().all(-1).all(-1)).sum().item() == live, "rows of other pages were written"


def test_layers_with_different_kv_heads_share_pages(name):
    heads = [8, None, 16]
    cache = KVCacheManager(
        num_layers=3, num_kv_heads=heads, head_dim=8, tokens_per_block=4, max_seq_len=32, max_batch_size=2
    )
    backend = get_attention_backend(name)
    metadata = backend.Metadata(max_num_requests=2, max_num_tokens=16, kv_cache_manager=cache)
    cache.prepare_resources([1, 2], [6, 3])
    metadata.seq_lens, metadata.num_contexts, metadata.request_ids = [6, 3], 2, [1, 2]
    metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[0, 0])
    metadata.prepare()
    for layer_idx in (0, 2):
        q, k, v = (torch.randn(9, n * 8) for n in (16, heads[layer_idx], heads[layer_idx]))
        backend(layer_idx, 16, 8, heads[layer_idx]).forward(q, k, v, metadata)
        k_pages, v_pages = cache.get_buffers(layer_idx)
        first = cache.get_batch_cache_indices([1])[0]
        assert torch.equal(k_pages[first].flatten(0, 1)[:6].flatten(1), k[:6])
        assert torch.equal(v_pages[first].flatten(0, 1)[:6].flatten(1), v[:6])
    with pytest.raises(ValueError, match="layer 1 has no cache"):
        backend(1, 16, 8, 8).forward(*(torch.randn(9, n * 8) for n in (16, 8, 8)), metadata)
    with pytest.raises(ValueError, match=r"layer 2 of the cache has \(Hkv, D\) = \(16, 8\); wanted \(8, 8\)"):
        backend(2, 16, 8, 8).forward(*(torch.randn(9, n * 8) for n in (16, 8, 8)), metadata)


# ---- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_of_four_equals_two_batches_of_two_bit_for_bit(name, dtype):
    def start():
        model = Model(name, dtype, rope=ROPE)
        model.run([1, 2, 3, 4], [30, 40, 62, 75], num_contexts=4, seed=1)
        return model

    together, apart = start(), start()
    q, k, v = together.inputs(2, 7)
    four = together.step([1, 2, 3, 4], [3, 2, 1, 1], [q, k, v], num_contexts=2)[0]
    contexts = apart.step([1, 2], [3, 2], [x[:5].clone() for x in (q, k, v)], num_contexts=2)[0]
    generations = apart.step([3, 4], [1, 1], [x[5:].clone() for x in (q, k, v)])[0]
    assert torch.equal(four, torch.cat([contexts, generations]))
    for request_id in (1, 2, 3, 4):
        for rows, other in zip(together.cached_rows(request_id), apart.cached_rows(request_id), strict=True):
            assert torch.equal(rows, other)


def test_result_does_not_depend_on_page_size_or_page_order(name):
    def output(page_size, dummy_tokens):
        model = Model(name, rope=ROPE, page_size=page_size, num_pages=-(-512 // page_size) + 8)
        if dummy_tokens:
            model.run([99], [dummy_tokens], seed=9)
        first = model.run([1, 2], [40, 17], num_contexts=2, seed=1)
        if dummy_tokens:
            model.cache.free_resources(99)
        return torch.cat([first, model.run([2, 1], [9, 1], seed=2)])

    wanted = output(16, 0)
    for page_size, dummy_tokens in ((1, 0), (3, 10), (16, 40), (128, 5), (512, 0)):
        assert torch.equal(output(page_size, dummy_tokens), wanted), page_size


# ---- edges -------------------------------------------------------------------------------------------------------


def test_empty_batch_and_sequences_without_tokens(name):
    model = Model(name, rope=ROPE)
    assert model.run([], []).shape == (0, 96)
    model.run([1, 2, 3], [0, 4, 0], num_contexts=3)
    assert model.run([1, 3], [0, 0]).shape == (0, 96)
    model.run([2, 1], [0, 1], seed=1)


def test_completely_full_cache_is_used_to_the_last_row(name):
    model = Model(name, rope=ROPE, page_size=4, num_pages=5)
    model.run([1, 2], [7, 12], num_contexts=2)
    model.run([1], [1], seed=1)
    assert model.cache.num_free_blocks == 0
    before = [pool.clone() for pool in model.cache.get_buffers(0)]
    with pytest.raises(RuntimeError, match="request 1 needs 1 more page"):
        model.prepare([2, 1], [0, 1], 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.cache.get_buffers(0), strict=True))
    model.cache.free_resources(2)
    model.run([1], [1], seed=2)


def test_fused_qkv_and_given_output_give_the_same_bits(name):
    results = []
    for is_packed in (False, True):
        model = Model(name, rope=ROPE)
        for seed, lens in ((1, [5, 3]), (2, [1, 1])):
            qkv = model.inputs(seed, sum(lens))
            model.prepare([1, 2], lens, 0)
            output = torch.full((sum(lens) + 2, 100), -7.0)
            target = output[1:-1, 2:98]
            packed = [torch.cat(qkv, dim=-1), None, None] if is_packed else [x.clone() for x in qkv]
            assert model.layer.forward(*packed, model.metadata, output=target) is target
            assert (output[0] == -7).all() and (output[-1] == -7).all()
            assert (output[:, :2] == -7).all() and (output[:, 98:] == -7).all()
            results.append(target.clone())
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a: a | {"q": a["q"][:-1]}, ValueError, r"q is \[3, 96\]; wanted \[4, 96\]"),
        (lambda a: a | {"k": a["k"][:, :-1]}, ValueError, r"k is \[4, 31\]; wanted \[4, 32\]"),
        (lambda a: a | {"v": a["v"].double()}, ValueError, "v is torch.float64"),
        (lambda a: a | {"v": None}, ValueError, "one of k and v is None"),
        (lambda a: a | {"k": None, "v": None}, ValueError, r"q \(fused qkv\) is \[4, 96\]; wanted \[4, 160\]"),
        (lambda a: a | {"k": a["k"].t().contiguous().t()}, ValueError, "k has last stride 4; wanted 1"),
        (
            lambda a: {key: x.half() for key, x in a.items()},
            ValueError,
            "q, k and v are torch.float16 on cpu; the cache is torch.float32",
        ),
        (lambda a: a | {"output": torch.zeros(4, 95)}, ValueError, r"output is \[4, 95\]"),
        (
            lambda a: a | {"attention_mask": CustomAttentionMask(mask=torch.ones(4, 4, dtype=torch.bool))},
            NotImplementedError,
            "attention_mask is CustomAttentionMask; takes CAUSAL, FULL",
        ),
        (lambda a: a | {"attention_mask": "upside down"}, ValueError, "'upside down'"),
    ],
)
def test_refusal_comes_before_any_write(name, change, error, text):
    model = Model(name, rope=ROPE)
    model.prepare([1], [4], 1)
    arguments = change(dict(zip("qkv", model.inputs(0, 4), strict=True)))
    copies = {key: x.clone() for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=f"{name}: .*{text}"):
        model.layer.forward(metadata=model.metadata, **arguments)
    assert all(torch.equal(arguments[key], x) for key, x in copies.items())
    assert all(pool.isnan().all() for pool in model.cache.get_buffers(0))


def test_refuses_metadata_that_is_not_prepared_and_positions_past_the_table(name):
    model = Model(name, rope=RopeParams(dim=16, max_positions=8))
    model.prepare([1], [9], 1)
    qkv = model.inputs(0, 9)
    with pytest.raises(ValueError, match=r"largest position is 8; RopeParams\.max_positions is 8"):
        model.layer.forward(*qkv, model.metadata)
    model.metadata.num_contexts = 0
    with pytest.raises(RuntimeError, match="not prepared"):
        model.layer.forward(*qkv, model.metadata)


# ---- fused against vanilla -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_fused_equals_vanilla_over_random_ragged_batches(seed):
    generator = torch.Generator().manual_seed(1000 + seed)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    dtype = DTYPES[seed % 3]
    num_kv_heads, head_dim = pick(1, 3), 8 * pick(1, 8)
    shape = {
        "dtype": dtype,
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * pick(1, 4),
        "head_dim": head_dim,
        "page_size": pick(1, 20),
        "num_pages": 600,
        "rope": RopeParams(dim=head_dim, max_positions=512) if pick(0, 1) else None,
    }
    fused, vanilla = Model("fused", **shape), Model("vanilla", **shape)
    for step in range(4):
        batch = pick(0, 5)
        request_ids = torch.randperm(6, generator=generator)[:batch].tolist()
        lens = [pick(0, 3) if pick(0, 1) else pick(0, 60) for _ in range(batch)]
        qkv = fused.inputs(seed * 100 + step, sum(lens))
        first, wanted = fused.step(request_ids, lens, qkv)
        second, _ = vanilla.step(request_ids, lens, qkv)
        start = 0
        for length, (_, bound) in zip(lens, wanted, strict=True):
            rows = slice(start, start + length)
            start += length
            if length:
                worst = (first[rows].double() - second[rows].double()).abs().max().item()
                assert worst <= 2 * bound, f"seed {seed} step {step} {shape}: {worst:.3e} > {2 * bound:.3e}"


@pytest.mark.parametrize("is_neox", [True, False])
def test_positions_of_the_runtime_turn_q_and_k_and_not_the_place_in_the_cache(is_neox):
    outputs, keys = [], []
    for name in ("fused", "vanilla"):
        model = Model(name, rope=ROPE, is_neox=is_neox)
        for lens, positions in (([3, 2], [90, 7, 7, 0, 511]), ([1, 1], [4, 300])):
            model.metadata.position_ids = torch.tensor(positions)
            model.prepare([1, 2], lens, 0)
            outputs.append(model.layer.forward(*model.inputs(len(outputs) % 2, sum(lens)), model.metadata))
        keys.append(model.cached_rows(1)[0])
    for fused, vanilla in zip(outputs[:2], outputs[2:], strict=True):
        torch.testing.assert_close(fused, vanilla, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys[0], keys[1], rtol=1e-5, atol=1e-5)


# ---- cost of a layer -----------------------------------------------------------------------------------------------


def test_fused_layer_makes_two_operator_calls_and_prepare_one_runtime_call(monkeypatch):
    import polyop.attention.fused as fused
    import polyop.kv_cache.runtime_functions as runtime

    calls = []

    def counted(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for module, names in (
        (fused, ("qk_norm_rope_append", "rotary_embedding", "kv_cache_update", "attention")),
        (runtime, ("fill_step", "fill_page_table", "pages", "num_tokens")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    model = Model("fused", rope=ROPE)
    model.cache.prepare_resources([1, 2], [5, 3])
    model.metadata.seq_lens, model.metadata.num_contexts, model.metadata.request_ids = [5, 3], 2, [1, 2]
    model.metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[0, 0])
    model.metadata.prepare()
    assert calls == ["fill_step"]
    calls.clear()
    model.layer.forward(*model.inputs(0, 8), model.metadata)
    assert calls == ["qk_norm_rope_append", "attention"]
