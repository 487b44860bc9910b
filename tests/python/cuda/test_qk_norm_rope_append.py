"""qk_norm_rope_append on a GPU: widths, few and many tokens, page borders, graphs, tokens without a slot."""

from __future__ import annotations

import math

import pytest
import torch
from device_memory import DEVICE, captured, kernels_of, on_device, same_bits

from polyop import cuda, ops
from polyop.testing import UNIT_ROUNDOFF, assert_within_bound, output_bound

I32 = {"dtype": torch.int32}
PAGE_SIZE = 16
EPSILON = 1e-5


def arguments(lengths, starts, heads=(5, 2), head_dim=64, rotary_dim=64, dtype=torch.bfloat16, cache=None, norm=True,
              padding=0, seed=0):  # fmt: skip
    """Arguments on the CPU, q, k and v views of one fused projection; `padding` rows more than the offsets cover."""
    generator = torch.Generator().manual_seed(seed)
    query_heads, kv_heads = heads
    tokens = sum(lengths) + padding
    qkv = torch.randn(tokens, query_heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = qkv.split_with_sizes((query_heads, kv_heads, kv_heads), 1)
    columns = max(-(-(start + n) // PAGE_SIZE) for start, n in zip(starts, lengths, strict=True))
    table = torch.randperm(len(lengths) * columns, generator=generator).to(torch.int32).view(len(lengths), columns)
    pages = torch.zeros(2, len(lengths) * columns, PAGE_SIZE, kv_heads, head_dim).to(cache or dtype)
    angles = torch.rand(columns * PAGE_SIZE, rotary_dim // 2, generator=generator) * 6
    made = {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": pages[0],
        "v_cache": pages[1],
        "cos_sin": torch.cat((angles.cos(), angles.sin()), -1),
        "update_offsets": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "write_positions": torch.tensor(starts, **I32),
        "page_table": table,
        "epsilon": EPSILON,
    }
    if norm:
        for name in ("q_norm_weight", "k_norm_weight"):
            made[name] = torch.randn(head_dim, generator=generator).to(dtype)
    if cache is not None:
        made["k_scale"] = torch.rand(kv_heads, generator=generator) * 0.05 + 0.01
        made["v_scale"] = torch.tensor([0.03])
    return made


def bound_of(made, wanted):
    """The README's bound, with sqrt(D) max|w| as the largest normed channel; a code beside the middle of two steps."""
    if wanted.dtype == torch.int8:
        return 1.0
    if wanted.dtype == torch.float8_e4m3fn:
        return (wanted.double().abs() / 8).clamp_min(2.0**-9)
    width = made["q"].shape[-1]
    terms, largest = 3.0, made["q"].double().abs().max().item() + made["k"].double().abs().max().item()
    if "q_norm_weight" in made:
        terms += width / 2 + 6
        largest = math.sqrt(width) * max(
            made[n].double().abs().max().item() for n in ("q_norm_weight", "k_norm_weight")
        )
    return output_bound(wanted, wanted.dtype, 2 * terms * UNIT_ROUNDOFF[torch.float32] * largest)


def check(made, **options):
    """Every kernel that takes the call, beside the reference."""
    expected = made | {name: made[name].clone() for name in ("k_cache", "v_cache")}
    wanted = ops.with_kernel("qk_norm_rope_append", "reference")(**expected, **options)
    rows = int(made["update_offsets"][-1])
    taken = 0
    for kernel in kernels_of("qk_norm_rope_append"):
        moved = on_device(made)
        try:
            got = ops.with_kernel("qk_norm_rope_append", kernel)(**moved, **options)
        except NotImplementedError:
            continue
        cuda.check_errors()
        taken += 1
        assert_within_bound(got[:rows].cpu(), wanted[:rows], bound_of(made, wanted[:rows]), f"{kernel}: q_out")
        bound = bound_of(made, expected["k_cache"])
        assert_within_bound(moved["k_cache"].cpu(), expected["k_cache"], bound, f"{kernel}: k_cache")
        assert same_bits(moved["v_cache"].cpu(), expected["v_cache"]), f"{kernel}: v_cache"
    assert taken > 0


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.int8], ids=["plain", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_widths_match_the_reference(dtype, cache, norm):
    for head_dim, rotary_dim in [(64, 64), (64, 32), (80, 80), (96, 32), (128, 128), (256, 64), (512, 512), (40, 24)]:
        for interleaved in (False, True):
            made = arguments(
                [3, 0, 1], [14, 2, 31], head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, cache=cache, norm=norm
            )
            check(made, interleaved=interleaved)


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=["plain", "fp8"])
def test_many_tokens_have_the_bits_of_few(cache):
    lengths, starts = [1500, 1, 700], [3, 40, 0]
    made = arguments(lengths, starts, heads=(32, 8), head_dim=128, rotary_dim=128, cache=cache)
    many = on_device(made)
    got = ops.qk_norm_rope_append(**many)
    few = on_device(made)
    for b, token in ((0, 0), (0, 1499), (1, 1500), (2, 2200)):
        one = dict(few)
        for name in ("q", "k", "v"):
            one[name] = few[name][token : token + 1]
        one["update_offsets"] = torch.tensor([0, 1], device=DEVICE, **I32)
        position = starts[b] + token - int(made["update_offsets"][b])
        one["write_positions"] = torch.tensor([position], device=DEVICE, **I32)
        one["page_table"] = few["page_table"][b : b + 1]
        assert torch.equal(ops.qk_norm_rope_append(**one)[0], got[token])
        page, row = int(made["page_table"][b, position // PAGE_SIZE]), position % PAGE_SIZE
        for name in ("k_cache", "v_cache"):
            mine, theirs = few[name][page, row], many[name][page, row]
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    check(made)


@pytest.mark.parametrize("head_dim", [64, 40], ids=["vectors", "elements"])
def test_a_graph_replays_with_padding_of_any_content(head_dim):
    made = arguments([1, 1, 1], [5, 30, 0], head_dim=head_dim, rotary_dim=8 if head_dim == 40 else 32, padding=2)
    made["position_ids"] = torch.tensor([5, 30, 0, 1 << 30, -7], **I32)  # past the last offset: never read
    for name in ("q", "k", "v"):
        made[name][3:] = float("nan")
    fixed = on_device(made)
    held = torch.full_like(fixed["q"], 7.0)
    replay = captured(lambda: ops.qk_norm_rope_append(**fixed, q_out=held))
    expected, caches = held.clone(), [fixed[name].clone() for name in ("k_cache", "v_cache")]
    assert bool((held[3:] == 7.0).all()) and bool(torch.isfinite(held.float()).all())
    held[:3] = 0.0
    for name in ("k_cache", "v_cache"):
        fixed[name].zero_()
    replay()
    assert torch.equal(held, expected)
    assert all(torch.equal(fixed[name], old) for name, old in zip(("k_cache", "v_cache"), caches, strict=True))
    fixed["update_offsets"].copy_(torch.tensor([0, 1, 1, 1]))  # the second and third row are padding now
    held[:] = 7.0
    replay()
    assert torch.equal(held[0], expected[0]) and bool((held[1:] == 7.0).all())
    cuda.check_errors()


@pytest.mark.parametrize("kernel", kernels_of("qk_norm_rope_append"))
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=["plain", "fp8"])
def test_a_graph_replays_with_other_tables_and_positions(kernel, cache):
    append = ops.with_kernel("qk_norm_rope_append", kernel)
    calls = [arguments([4, 1, 3], starts, cache=cache, seed=s) for s, starts in enumerate([[0, 40, 7], [30, 2, 45]])]
    fixed = on_device(calls[0])
    held = torch.zeros_like(fixed["q"])
    replay = captured(lambda: append(**fixed, q_out=held))
    for made in (*calls, calls[0]):
        for name in ("write_positions", "page_table", "q", "k", "v", "k_cache", "v_cache"):
            fixed[name].copy_(made[name])
        held.fill_(float("nan"))
        replay()
        replayed = [held.clone(), fixed["k_cache"].clone(), fixed["v_cache"].clone()]
        for name in ("k_cache", "v_cache"):
            fixed[name].copy_(made[name])
        append(**fixed, q_out=held)
        assert all(same_bits(a, b) for a, b in zip(replayed, (held, fixed["k_cache"], fixed["v_cache"]), strict=True))
    cuda.check_errors()


def test_ragged_tokens_around_page_borders():
    around = [0, 1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE]
    tokens = [n for n in around for _ in around]
    starts = [n for _ in around for n in around]
    for head_dim, rotary_dim in ((64, 64), (128, 128), (40, 24)):
        check(arguments(tokens, starts, head_dim=head_dim, rotary_dim=rotary_dim))
        full = [PAGE_SIZE] * 3  # each ends with the last slot of its last page
        check(arguments(full, full, head_dim=head_dim, rotary_dim=rotary_dim, cache=torch.float8_e4m3fn))


@pytest.mark.parametrize("head_dim", [64, 40], ids=["vectors", "elements"])
def test_tokens_without_a_slot_or_outside_are_left_out(head_dim):
    made = arguments([2, 1, 1, 1], [0, 3, 0, 20], head_dim=head_dim, rotary_dim=8 if head_dim == 40 else 32)
    fixed = on_device(made)
    positions = len(made["cos_sin"])
    fixed["position_ids"] = torch.tensor([0, -1, positions, 1, 2], device=DEVICE, **I32)
    fixed["page_table"][2, 0] = -1
    fixed["write_positions"][3] = 1 << 20
    fixed["k_cache"].fill_(7.0)
    fixed["v_cache"].fill_(7.0)
    held = torch.full_like(fixed["q"], 7.0)
    ops.qk_norm_rope_append(**fixed, q_out=held)
    with pytest.raises(ValueError, match=r"qk_norm_rope_append: position_ids") as raised:
        cuda.check_errors()
    for name in ("write_positions", "page_table"):
        assert f"qk_norm_rope_append: {name}" in str(raised.value)
    # Token 0 is whole, 1 has no slot, 2 no angles; 3 and 4 have no row in the cache, and are rotated all the same.
    assert [bool((row == 7.0).all()) for row in held] == [False, True, True, False, False]
    page = int(made["page_table"][0, 0])
    for cache in (fixed["k_cache"], fixed["v_cache"]):
        assert not bool((cache[page, 0] == 7.0).any())
        cache[page, 0] = 7.0
        assert bool((cache == 7.0).all())
    fixed["position_ids"][2] = 0
    fixed["page_table"][2, 0] = 0
    fixed["write_positions"][3] = 0
    ops.qk_norm_rope_append(**fixed)
    cuda.check_errors()  # a slot of -1 alone is no error


def test_cache_positions_outside_the_table_are_left_out():
    made = arguments([1, 1], [0, 20])
    made["cos_sin"] = made["cos_sin"][:20]
    held = torch.full_like(made["q"], 7.0, device=DEVICE)
    ops.qk_norm_rope_append(**on_device(made), q_out=held)
    with pytest.raises(ValueError, match="qk_norm_rope_append: write_positions"):
        cuda.check_errors()
    assert not bool((held[0] == 7.0).any()) and bool((held[1] == 7.0).all())
