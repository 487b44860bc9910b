"""What every call on a GPU promises: graph replay, equal bits, skipped entries, 64-bit offsets, refusals."""

from __future__ import annotations

import pytest
import torch
from attention_cases import AttentionCase, outputs_of
from device_memory import to_device

import polyop
from polyop import cuda, ops


def on_device(arguments):
    return {name: to_device(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}


def run(arguments):
    got = outputs_of(arguments, False, "cuda")
    ops.attention(**arguments, **got)
    return got


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn], ids=["16bit", "fp8"])
def test_bits_are_equal_from_run_to_run_and_for_any_page_order_and_neighbours(kv):
    case = AttentionCase([3000, 5, 777, 1024], [1, 1, 1, 1], kv_dtype=kv, dtype=torch.bfloat16)
    arguments = on_device(case.make())
    first = run(arguments)
    for _ in range(20):
        again = run(arguments)
        assert same_bits(first["out"], again["out"]) and same_bits(first["lse"], again["lse"])
    order = torch.randperm(arguments["k"].shape[0], device="cuda")
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device="cuda")
    moved = dict(arguments)
    pool = torch.stack([arguments["k"].view(torch.uint8)[order], arguments["v"].view(torch.uint8)[order]])
    moved["k"], moved["v"] = pool[0].view(arguments["k"].dtype), pool[1].view(arguments["k"].dtype)
    table = arguments["page_table"].long()
    valid = table < len(order)
    moved["page_table"] = torch.where(valid, inverse[table.clamp(max=len(order) - 1)], table).to(torch.int32)
    assert same_bits(first["out"], run(moved)["out"])
    for b in range(4):
        alone = dict(arguments)
        alone["q"] = arguments["q"][b : b + 1]
        alone["query_offsets"] = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        alone["page_table"] = arguments["page_table"][b : b + 1]
        alone["kv_lengths"] = arguments["kv_lengths"][b : b + 1]
        assert same_bits(first["out"][b], run(alone)["out"][0])


def test_a_graph_replays_with_other_lengths_and_tables():
    cases = [
        AttentionCase(lengths, [1] * 3, head_dim=64, seed=seed)
        for seed, lengths in enumerate([[900, 40, 3], [16, 1000, 0], [1000, 1, 999]])
    ]
    made = [on_device(case.make()) for case in cases]
    width = max(a["page_table"].shape[1] for a in made)
    pages = max(a["k"].shape[0] for a in made)
    fixed = dict(made[0])
    pool = torch.zeros(2, pages, *made[0]["k"].shape[1:], dtype=torch.float16, device="cuda")
    fixed["k"], fixed["v"] = pool[0], pool[1]
    fixed["page_table"] = torch.zeros(3, width, dtype=torch.int32, device="cuda")
    fixed["q"] = torch.empty_like(made[0]["q"])
    fixed["kv_lengths"] = torch.zeros(3, dtype=torch.int32, device="cuda")

    def fill(a):
        pool[0, : a["k"].shape[0]].copy_(a["k"])
        pool[1, : a["k"].shape[0]].copy_(a["v"])
        fixed["page_table"][:, : a["page_table"].shape[1]].copy_(a["page_table"])
        fixed["q"].copy_(a["q"])
        fixed["kv_lengths"].copy_(a["kv_lengths"])

    fill(made[0])
    held = run(fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attention(**fixed, **held)
    for a in made + made[::-1]:
        fill(a)
        held["out"].fill_(float("nan"))
        graph.replay()
        replayed = held["out"].clone()
        assert same_bits(replayed, run(fixed)["out"])


def test_the_general_kernel_and_the_cache_update_replay_too():
    case = AttentionCase([40, 7], [2, 1], head_dim=40)
    a = on_device(case.make())
    got = run(a)
    expected = got["out"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attention(**a, **got)
    got["out"].zero_()
    graph.replay()
    assert same_bits(got["out"], expected)


# ---- entries out of range --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 40], ids=["split_kv", "general"])
@pytest.mark.parametrize("bad", [-1, 1 << 29])
def test_attention_skips_pages_outside_the_pool_and_names_the_table(head_dim, bad):
    arguments = on_device(AttentionCase([100, 50], [1, 1], head_dim=head_dim).make())
    good = run(arguments)
    cuda.check_errors()
    arguments["page_table"][0, 2] = bad
    got = run(arguments)
    with pytest.raises(ValueError, match="attention: page_table"):
        cuda.check_errors()
    cuda.check_errors()  # the flag was cleared
    assert bool(torch.isfinite(got["out"][:2].float()).all())
    assert same_bits(got["out"][1], good["out"][1])


@pytest.mark.parametrize("head_dim", [64, 40], ids=["split_kv", "general"])
def test_attention_clamps_lengths_and_names_them(head_dim):
    arguments = on_device(AttentionCase([100, 50], [1, 1], head_dim=head_dim).make())
    arguments["page_table"].clamp_(0, 3)
    arguments["k"].zero_()
    arguments["v"].zero_()
    arguments["kv_lengths"].copy_(torch.tensor([1 << 30, -5]))
    got = run(arguments)
    with pytest.raises(ValueError, match="attention: kv_lengths"):
        cuda.check_errors()
    assert float(got["out"].float().abs().max()) == 0.0


def test_kv_cache_update_skips_what_does_not_fit():
    cache = torch.full((4, 2, 1, 8), 7.0, device="cuda", dtype=torch.float16)
    v_cache = cache.clone()
    k = torch.ones(3, 1, 8, device="cuda", dtype=torch.float16)
    common = {"update_offsets": torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")}
    table = torch.tensor([[0, 1], [-1, 9], [2, 3]], dtype=torch.int32, device="cuda")
    positions = torch.tensor([1, 0, 4], dtype=torch.int32, device="cuda")
    ops.kv_cache_update(cache, v_cache, k, k, write_positions=positions, page_table=table, **common)
    with pytest.raises(ValueError, match=r"kv_cache_update: write_positions.*kv_cache_update: page_table"):
        cuda.check_errors()
    expected = torch.full_like(cache, 7.0)
    expected[0, 1] = 1.0
    assert torch.equal(cache, expected) and torch.equal(v_cache, expected)


def test_rotary_embedding_leaves_tokens_with_foreign_positions():
    q = torch.randn(3, 2, 16, device="cuda")
    table = torch.randn(4, 16, device="cuda")
    out = torch.full_like(q, 5.0)
    ops.rotary_embedding(q, None, table, torch.tensor([0, 4, -1], device="cuda"), q_out=out)
    with pytest.raises(ValueError, match="rotary_embedding: position_ids"):
        cuda.check_errors()
    assert bool((out[1:] == 5.0).all()) and not bool((out[0] == 5.0).any())


# ---- size ------------------------------------------------------------------------------------------------------------


def test_offsets_past_two_to_the_31_elements():
    pages, rows, heads, width = 2**31 // (64 * 64) + 8, 1, 64, 64
    pool = torch.zeros(2, pages, rows, heads, width, dtype=torch.int8, device="cuda")
    k = torch.randn(2, heads, width, device="cuda", dtype=torch.float16)
    table = torch.tensor([[pages - 1, pages - 2]], dtype=torch.int32, device="cuda")
    scale = torch.tensor([1 / 32], device="cuda")
    offsets = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    common = {"page_table": table, "k_scale": scale, "v_scale": scale}
    ops.kv_cache_update(pool[0], pool[1], k, k, update_offsets=offsets, **common)
    stored = (k.float() * 32).round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(pool[0, table[0].long()][:, 0], stored)
    assert int(pool[0, : pages - 2].count_nonzero()) == 0
    lengths = torch.tensor([2], dtype=torch.int32, device="cuda")
    out = ops.attention(k, pool[0], pool[1], query_offsets=offsets, kv_lengths=lengths, **common)
    assert torch.allclose(out[0].float(), stored[0].float() / 32, atol=2e-3)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_combination_that_no_kernel_takes_names_itself():
    with pytest.raises(NotImplementedError, match=r"int4_groupwise_gemm: .*CUDA"):
        ops.int4_groupwise_gemm(
            torch.zeros(1, 64, device="cuda"),
            torch.zeros(8, 512, dtype=torch.int8, device="cuda"),
            torch.zeros(2, 1, dtype=torch.float16, device="cuda"),
            group_size=32,
        )
    a = on_device(AttentionCase([9], [1], head_dim=40).make())
    with pytest.raises(NotImplementedError, match="D 40 is not among 64, 80, 96, 128, 192, 256"):
        ops.with_kernel("attention", "cuda_split_kv")(**a)
    with pytest.raises(ValueError, match="is on cpu, wanted cuda:0"):
        ops.circular_pad(torch.zeros(3, device="cuda"), [1, 1], out=torch.zeros(5))


def test_library_says_what_it_is():
    assert polyop.cuda.has_kernels()
