"""Kinds of fault that users of other libraries reported, as tests of every CUDA kernel.

Each docstring names the report (project, number); tests/python/ops/test_reported_faults.py has them for the CPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import KERNELS, AttentionCase, check_every_kernel
from device_memory import ALL_KERNELS, DEVICE, kernels_of, on_device, same_bits, to_device
from example_calls import EXAMPLES

from polyop import cuda, ops

F8 = torch.float8_e4m3fn


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def on_every_kernel(arguments):
    """(kernel, out, lse) of each kernel that takes the call."""
    taken = 0
    for kernel in KERNELS:
        try:
            out, lse = ops.with_kernel("attention", kernel)(**arguments, return_lse=True)
        except NotImplementedError:
            continue
        taken += 1
        yield kernel, out.float(), lse
    assert taken > 0


def test_02_fp8_cache_whose_values_are_narrower_than_its_keys():
    """flashinfer #4976: d_qk 192, d_v 128, 99 tokens, 16 heads: errors of 1.2 to 2.5 everywhere."""
    for dtype in (torch.float16, torch.bfloat16):
        case = AttentionCase([99, 99], [1, 99], 192, 128, num_kv_heads=16, group=1, dtype=dtype, kv_dtype=F8)
        case.scale_per_head = True
        check_every_kernel(case)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 20])
def test_03_merge_of_empty_states(head_dim, rows):
    """flashinfer #4051, vLLM PR 39148: merging two states without a key (0, -inf) gave NaN. Chunks of a long row meet
    as such states when all their scores are -inf."""
    length = 6000
    q = torch.zeros(1, rows, 4, head_dim, device=DEVICE, dtype=torch.bfloat16)
    q[..., 0] = 1.0  # times -inf in one channel and 0 in the others
    k = torch.zeros(1, length, 2, head_dim, device=DEVICE, dtype=torch.bfloat16)
    v = torch.randn(k.shape, device=DEVICE).to(k.dtype)
    arguments = {"q": q, "k": k, "v": v, "query_form": "padded", "kv_form": "padded", "causal": "none"}
    k[..., 0] = -math.inf
    for kernel, out, lse in on_every_kernel(arguments):
        assert not out.any() and bool((lse == -math.inf).all()), kernel
    for first, last in ((0, 300), (3000, 3100), (5900, 6000)):
        k[..., 0] = -math.inf
        k[0, first:last, :, 0] = 0.0
        wanted = v[0, first:last].double().mean(0).repeat_interleave(2, 0)
        for kernel, out, lse in on_every_kernel(arguments):
            assert (out[0] - wanted).abs().max() < 2**-7, f"{kernel}: keys {first} to {last}"
            assert (lse - math.log(last - first)).abs().max() < 1e-5, kernel


@pytest.mark.parametrize("group", [3, 5, 7, 16, 32])
@pytest.mark.parametrize("kv", [None, F8, torch.int8], ids=["16bit", "fp8", "int8"])
def test_05_ratios_of_heads(group, kv):
    """flashinfer #258, #996, #2849; TensorRT-LLM PR 6573: 3, 5, 7 unsupported, illegal accesses from 16 on."""
    for rows in (1, 5):
        check_every_kernel(AttentionCase([530, 9], [rows, rows], group=group, kv_dtype=kv, spare=False))


@pytest.mark.parametrize("kv", [None, F8, torch.int8], ids=["16bit", "fp8", "int8"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [-1, 9])
def test_06_mask_of_drafts_over_a_cache_of_one_byte(kv, group, window):
    """flashinfer PR 4199, PR 4229: with q_len x group <= 32 the mask was replaced by a causal one, the window's begin
    ignored. With q = 0 a row is the mean of the values that it sees."""
    rows, length, width = 8, 340, 128
    case = AttentionCase([length], [rows], width, kv_dtype=kv, group=group, tree=True, dtype=torch.bfloat16)
    case.attributes = {"causal": "none", "window": window}
    arguments = case.make()
    arguments["q"][:rows] = 0.0
    check_every_kernel(case, arguments)
    moved = on_device(arguments)
    pages = moved["page_table"][0, : -(-length // case.page_size)].long()
    values = moved["v"][pages].flatten(0, 1)[:length].double()
    values *= moved["v_scale"].double() if "v_scale" in moved else 1.0
    keys = torch.arange(length, device=DEVICE)
    draft = (keys - (length - rows)).clamp_min(0)
    seen = (keys < length - rows) | ((moved["tree_mask"][:rows, :1].long() >> draft) & 1).bool()
    if window >= 0:
        position = length - rows + torch.arange(rows, device=DEVICE)[:, None]
        seen &= keys > position - window
    later = torch.triu(seen[:, length - rows :], 1)
    assert bool(later.any()), "the tree must show more than a causal mask"
    del moved["return_lse"]
    for kernel, out, _ in on_every_kernel(moved):
        for row in range(rows):
            mean = values[seen[row]].mean(0) if bool(seen[row].any()) else torch.zeros_like(values[0])
            error = (out[row].double() - mean.repeat_interleave(group, 0)).abs().max()
            assert error <= 2**-7 * values.abs().max(), f"{kernel}: row {row} errs by {float(error)}"


@pytest.mark.parametrize("kv", [torch.bfloat16, F8, torch.int8], ids=["16bit", "fp8", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_08_long_sums_of_one_sign(kv, head_dim):
    """vLLM flash-attention PR 104: sums of FP8 products over 128k keys lost the needle (91.2 % to 13.0 %)."""
    length = 1 << 17
    value = 100.0 if kv == torch.int8 else 1.5
    v = torch.full((1, length, 1, head_dim), value, device=DEVICE).to(kv)
    k = torch.zeros_like(v)
    q = torch.zeros(1, 1, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    q[..., :8] = 1.0
    arguments = {"q": q, "k": k, "v": v, "query_form": "padded", "kv_form": "padded", "scale": 1.0}
    needle = length - 12345
    for kernel, out, lse in on_every_kernel(arguments):
        assert (out - value).abs().max() <= value * 2**-8, kernel
        assert (lse - math.log(length)).abs().max() <= 2**-14, kernel
    k[0, needle, :, :8] = torch.tensor(4.0).to(kv)  # a score of 32: e^32 against 131071 others
    v[0, needle] = torch.tensor(-value).to(kv)
    for kernel, out, _ in on_every_kernel(arguments):
        assert (out + value).abs().max() <= value * 2**-7, kernel


@pytest.mark.parametrize("group", [2, 4, 7, 8])
def test_10_log_sum_exp_of_every_head_of_a_group(group):
    """cudnn-frontend #1083: one query row, GQA, ragged: only the first head of each group was written."""
    for head_dim in (64, 128):
        check_every_kernel(AttentionCase([5, 0, 33, 8], [1] * 4, head_dim, num_kv_heads=3, group=group))


def results_of(function, operator, arguments):
    """Everything that the call writes; in-place operands are copies."""
    changed = [
        o.name for o in ops.SCHEMAS[operator].operands if o.role != "input" and arguments.get(o.name) is not None
    ]
    arguments = arguments | {name: arguments[name].clone() for name in changed}
    results = function(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    return [*(arguments[name] for name in changed), *(r for r in results if r is not None)]


@pytest.mark.parametrize(("operator", "kernel"), ALL_KERNELS, ids=[f"{o}-{k}" for o, k in ALL_KERNELS])
def test_11_calls_that_differ_in_strides_or_dtype_only(operator, kernel):
    """flashinfer PR 4270: the second call of the same shapes used the first one's plan. Examples differ in dtype only;
    each runs again with every operand a view of wider rows."""
    function = ops.with_kernel(operator, kernel)
    taken = 0
    for name, example in EXAMPLES[operator]().items():
        arguments = on_device(example)
        try:
            wanted = results_of(function, operator, arguments)
        except NotImplementedError:
            continue
        taken += 1
        for operand in ops.SCHEMAS[operator].inputs:
            tensor = arguments.get(operand.name)
            if operand.role != "input" or tensor is None or tensor.dim() < 2:
                continue
            for extra in (64, 5):  # rows that stay aligned, and rows that do not
                wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + extra, dtype=tensor.dtype, device=DEVICE)
                view = wide[..., : tensor.shape[-1]].copy_(tensor)
                # A norm is added up in another order where rows are not aligned.
                call = arguments if extra == 64 else {n: v for n, v in arguments.items() if "norm_weight" not in n}
                expected = wanted if extra == 64 else results_of(function, operator, call)
                try:
                    got = results_of(function, operator, call | {operand.name: view})
                except (ValueError, NotImplementedError):
                    continue  # "is not contiguous", or rows that this kernel leaves to the next one
                same = all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
                assert same, f"{name}: {operand.name} in rows of {extra} more"
        again = results_of(function, operator, arguments)
        assert all(same_bits(a, b) for a, b in zip(again, wanted, strict=True)), name
    cuda.check_errors()
    if taken == 0:
        pytest.skip("takes no example")


PAGES, PAGE_WIDTH = (1 << 23) + 1000, 256  # more than 8,388,608 pages and 2^31 elements
FAR_PAGES = [PAGES - 1, 3, (1 << 23) + 1, 8_388_607]


@pytest.mark.parametrize("dtype", [torch.int8, F8], ids=["int8", "fp8"])
def test_14_pool_of_more_than_eight_million_pages(dtype):
    """ROCm/aiter #2517: zeros from a pool of more than 8,388,608 pages or 2^31 elements (offsets of 32 bits)."""
    pools = [torch.zeros(PAGES, 1, 1, PAGE_WIDTH, dtype=dtype, device=DEVICE) for _ in "kv"]
    update = [torch.randn(4, 1, PAGE_WIDTH, device=DEVICE) * 3 for _ in "kv"]
    near = [torch.zeros(4, 1, 1, PAGE_WIDTH, dtype=dtype, device=DEVICE) for _ in "kv"]
    far_table, near_table = i32(*FAR_PAGES).view(1, 4), i32(0, 1, 2, 3).view(1, 4)
    for kernel in kernels_of("kv_cache_update"):
        append = ops.with_kernel("kv_cache_update", kernel)
        for pool in pools:
            pool[FAR_PAGES] = torch.zeros(1, dtype=dtype, device=DEVICE)
        append(*pools, *update, update_offsets=i32(0, 4), page_table=far_table)
        append(*near, *update, update_offsets=i32(0, 4), page_table=near_table)
        for pool, wanted in zip(pools, near, strict=True):
            assert same_bits(torch.stack([pool[page] for page in FAR_PAGES]), wanted), kernel
            assert wanted.float().abs().max() > 1
    q = torch.randn(1, 2, PAGE_WIDTH, device=DEVICE).half()
    forms = {"q": q, "query_offsets": i32(0, 1), "kv_lengths": i32(4)}
    wanted = {k: o for k, o, _ in on_every_kernel({**forms, "k": near[0], "v": near[1], "page_table": near_table})}
    for kernel, out, _ in on_every_kernel({**forms, "k": pools[0], "v": pools[1], "page_table": far_table}):
        assert torch.equal(out, wanted[kernel]), kernel
        assert out.abs().max() > 0.1
    cuda.check_errors()


def test_14_strides_past_two_to_the_31():
    """The same, where two rows of a view lie 2^31 elements apart."""
    far = (1 << 31) + 64
    memory = torch.zeros(far + 4096, dtype=torch.int8, device=DEVICE)
    x = memory.as_strided((2, 40), (far, 1)).copy_(torch.arange(80).view(2, 40))
    wanted = ops.circular_pad(x.clone(), [3, 1])
    assert torch.equal(ops.circular_pad(x, [3, 1]), wanted)
    out = memory.as_strided((2, 44), (far, 1), 1024)
    assert torch.equal(ops.circular_pad(x, [3, 1], out=out), wanted)
    heads = torch.zeros(far + 4096, dtype=torch.float16, device=DEVICE).as_strided((2, 2, 64), (far, 64, 1))
    heads.copy_(torch.randn(2, 2, 64))
    table = torch.randn(8, 64, device=DEVICE)
    got, wanted = (ops.rotary_embedding(q, None, table) for q in (heads, heads.clone()))
    assert torch.equal(*(r[0] if isinstance(r, tuple) else r for r in (got, wanted)))


@pytest.mark.parametrize("kernel", kernels_of("qk_norm_rope_append"))
def test_15_padding_rows_are_skipped_before_anything_is_read(kernel):
    """aiter PR 3235, pegainfer #253: slot -1 in the padding rows of a captured graph led to a read past the table."""
    append = ops.with_kernel("qk_norm_rope_append", kernel)
    for width in (64, 10):
        heads = {n: torch.randn(5, h, width, device=DEVICE) for n, h in (("q", 4), ("k", 2), ("v", 2))}
        heads["q"][3:], heads["k"][3:] = math.nan, math.inf  # what a graph's spare rows hold
        cache = {name: torch.full((4, 4, 2, width), 7.0, device=DEVICE) for name in ("k_cache", "v_cache")}
        q_out = torch.full((5, 4, width), 9.0, device=DEVICE)
        call = {
            "cos_sin": torch.randn(8, width, device=DEVICE),
            "update_offsets": i32(0, 2, 3),
            "write_positions": i32(3, 0),
            "page_table": i32(2, 3, 1, -5).view(2, 2),
            "position_ids": i32(0, -1, 7, 1 << 30, -(1 << 31)),  # garbage where nobody's rows begin
        }
        try:
            append(**heads, **cache, **call, q_out=q_out)
        except NotImplementedError:
            continue  # this width belongs to another kernel
        cuda.check_errors()
        assert bool((q_out[1] == 9).all() and (q_out[3:] == 9).all()), "a padding row was written"
        assert bool(torch.isfinite(q_out).all())
        for pool in cache.values():
            touched = {(page, slot) for page in range(4) for slot in range(4) if bool((pool[page, slot] != 7).any())}
            assert touched == {(2, 3), (1, 0)}
        for bad in (8, -2, 2**31 - 1):
            append(**heads, **cache, **call | {"position_ids": i32(0, -1, bad, -1, -1)}, q_out=q_out)
            with pytest.raises(ValueError, match="qk_norm_rope_append: position_ids"):
                cuda.check_errors()


def test_15_rows_and_entries_of_nobody_are_not_read_by_an_update():
    """The same for kv_cache_update: rows behind the last offset, table entries that no token needs."""
    for kernel in kernels_of("kv_cache_update"):
        cache = torch.full((4, 4, 2, 64), 7.0, device=DEVICE, dtype=torch.float16)
        k = torch.full((6, 2, 64), math.nan, device=DEVICE, dtype=torch.float16)
        k[:3] = 1.0
        table = to_device(torch.tensor([[2, 1 << 30], [-9, 1]], dtype=torch.int32))
        ops.with_kernel("kv_cache_update", kernel)(
            cache, cache.clone(), k, k, update_offsets=i32(0, 2, 3), page_table=table, write_positions=i32(1, 4)
        )
        cuda.check_errors()
        expected = torch.full_like(cache, 7.0)
        expected[2, 1:3] = expected[1, 0] = 1.0
        assert torch.equal(cache, expected), kernel
