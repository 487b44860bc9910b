"""Both backends against attention in double precision over dense histories, and against each other."""

import pytest
import torch
from backend_model import DTYPES, ROPE, Model, make_norm

from polyop.attention import (
    CustomAttentionMask,
    KVCacheParams,
    PositionalEmbeddingParams,
    PredefinedAttentionMask,
    RopeParams,
    get_attention_backend,
)
from polyop.kv_cache import KVCacheManager


@pytest.fixture(params=["vanilla", "fused"])
def name(request):
    return request.param


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_matches_double_precision(name, dtype):
    for is_neox, rope in ((True, ROPE), (False, RopeParams(dim=8, max_positions=512))):
        model = Model(name, dtype, rope=rope, is_neox=is_neox, qk_norm=make_norm())
        model.run([1, 2, 3], [30, 1, 17], num_contexts=3, seed=1)
        model.run([3, 1, 2], [1, 4, 1], seed=2)
        # Without a cache the same queries and keys give the same attention.
        qkv = model.inputs(3, 9)
        fresh = Model(name, dtype, rope=rope, is_neox=is_neox, qk_norm=make_norm())
        _, wanted = fresh.step([1, 2], [5, 4], qkv)
        metadata = type(model.metadata)(max_num_requests=4, max_num_tokens=64, seq_lens=[5, 4])
        metadata.prepare()
        fresh.check(fresh.layer.forward(*(x.clone() for x in qkv), metadata), wanted)


def test_norm_of_heads_is_checked(name):
    backend, norm = get_attention_backend(name), make_norm(8)
    embedding = PositionalEmbeddingParams(rope=ROPE)
    with pytest.raises(ValueError, match=rf"{name}: qk_norm.q_weight is \[8\] torch.float32; wanted \[16\]"):
        backend(0, 4, 16, pos_embd_params=embedding, qk_norm=norm)
    with pytest.raises(ValueError, match=f"{name}: qk_norm is given without pos_embd_params"):
        backend(0, 4, 8, qk_norm=norm)


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
@pytest.mark.parametrize("qk_norm", [None, make_norm()], ids=["", "norm"])
def test_batch_of_four_equals_two_batches_of_two_bit_for_bit(name, dtype, qk_norm):
    def start():
        model = Model(name, dtype, rope=ROPE, qk_norm=qk_norm)
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
