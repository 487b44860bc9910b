"""Kinds of fault that users of other attention and INT4 libraries reported, as tests of every CPU kernel.

Each name says the fault; the report stands in the docstring (project, number).
"""

from __future__ import annotations

import math
import resource

import numpy as np
import pytest
import torch
from attention_layouts import DTYPES, AttentionCall
from example_calls import EXAMPLES, Prepared, digest
from test_attention_numpy import check

from polyop import ops

KERNELS = [name.removeprefix("cpu:") for name in ops.kernel_names("attention") if name.startswith("cpu:")]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_every_kernel(call: AttentionCall):
    """(kernel, out, lse) of each kernel that takes the call."""
    for kernel in KERNELS:
        outputs = call.outputs()
        try:
            ops.with_kernel("attention", kernel)(**call.arguments, **outputs)
        except NotImplementedError:
            continue
        yield kernel, outputs["out"].float(), outputs["lse"]


@pytest.fixture(params=[1, 3], ids=["one_thread", "three_threads"])
def threads(request):
    before = ops.num_threads()
    ops.set_num_threads(request.param)
    yield
    ops.set_num_threads(before)


# ---- attention -------------------------------------------------------------------------------------------------------


def test_fp8_cache_whose_values_are_narrower_than_its_keys():
    """flashinfer #4976: d_qk 192, d_v 128, 99 tokens, 16 heads: errors of 1.2 to 2.5 everywhere."""
    heads = {"query_heads": 16, "kv_heads": 16, "head_dim": 192, "value_head_dim": 128}
    for dtype in ("f16", "bf16"):
        check(AttentionCall([(1, 99), (99, 99)], dtype=dtype, kv_dtype="f8e4m3", kv_scales=16, **heads))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows", [1, 20])
def test_merge_of_empty_states(threads, dtype, rows):
    """flashinfer #4051, vLLM PR 39148: merging two states without a key (0, -inf) gave NaN. Chunks of a long row meet
    as such states when all their scores are -inf."""
    call = AttentionCall([(rows, 1300)], dtype=dtype, causal="none", head_dim=16, kv_form="padded")
    call.arguments["q"][:rows] = 1.0
    keys = call.arguments["k"]
    keys[0, :1300] = -math.inf
    for kernel, out, lse in on_every_kernel(call):
        assert not out.any() and bool((lse == -math.inf).all()), kernel
    for first, last in ((0, 300), (600, 700), (1200, 1300)):  # one chunk has keys, the others merge around it
        keys[0, :1300] = -math.inf
        keys[0, first:last] = 0.0
        wanted = call.arguments["v"][0, first:last].double().mean(0).repeat_interleave(2, 0)
        for kernel, out, lse in on_every_kernel(call):
            assert (out[:rows] - wanted).abs().max() < 2**-7, f"{kernel}: keys {first} to {last}"
            assert (lse[:rows] - math.log(last - first)).abs().max() < 1e-5, kernel


@pytest.mark.parametrize("kv_dtype", ["f8e4m3", "i8", "bf16"])
@pytest.mark.parametrize("query_heads", [2, 8])
def test_mask_of_drafts_over_a_cache_of_one_byte(threads, kv_dtype, query_heads):
    """flashinfer PR 4199, PR 4229: with q_len x group <= 32 the mask was replaced by a causal one, the window's begin
    ignored. With q = k = 0 a row is the mean of the values that it sees."""
    for window in (-1, 9):
        heads = {"query_heads": query_heads, "kv_heads": 2, "head_dim": 16}
        call = AttentionCall(
            [(8, 40), (4, 4), (1, 300)],
            dtype="bf16",
            kv_dtype=kv_dtype,
            tree=True,
            causal="none",
            window=window,
            **heads,
        )
        call.arguments["q"].zero_()
        call.sequences = [(q * 0, k, v) for q, k, v in call.sequences]
        check(call)
        exact = call.exact()[0]
        later = [i for i in range(8) if call.trees[0][i, i + 1 :].any() and window < 0]
        assert window >= 0 or later, "the tree must show more than a causal mask"
        assert np.isfinite(exact.lse).all()


@pytest.mark.parametrize("kv_dtype", ["f8e4m3", "i8", "bf16"])
def test_long_sums_of_one_sign(kv_dtype):
    """vLLM flash-attention PR 104: sums of FP8 products over 128k keys lost the needle (91.2 % to 13.0 %)."""
    length = 1 << 17
    value = 100.0 if kv_dtype == "i8" else 1.5
    v = torch.full((1, length, 1, 8), value).to(DTYPES[kv_dtype])
    k = torch.zeros(1, length, 1, 8).to(v.dtype)
    q = torch.ones(1, 1, 2, 8, dtype=torch.bfloat16)
    needle = length - 12345
    for kernel in KERNELS:
        if kernel == "reference":
            continue
        run = ops.with_kernel("attention", kernel)
        forms = {"query_form": "padded", "kv_form": "padded", "return_lse": True, "scale": 1.0}
        k.zero_()
        v[0, needle] = torch.tensor(value).to(v.dtype)
        out, lse = run(q, k, v, **forms)
        assert (out.float() - value).abs().max() <= value * 2**-8, kernel
        assert (lse - math.log(length)).abs().max() <= 2**-16, kernel
        k[0, needle] = 4  # a score of 32: e^32 against 131071 others
        v[0, needle] = torch.tensor(-value).to(v.dtype)
        out, _ = run(q, k, v, **forms)
        assert (out.float() + value).abs().max() <= value * 2**-7, kernel


def test_log_sum_exp_of_every_head_of_a_group():
    """cudnn-frontend #1083: one query row, GQA, ragged: only the first head of each group was written."""
    for group in (2, 4, 7, 8):
        check(AttentionCall([(1, 5), (1, 0), (1, 33), (1, 8)], query_heads=3 * group, kv_heads=3, dtype="f16"))


def test_calls_that_differ_in_strides_or_dtype_only():
    """flashinfer PR 4270: the second call of the same shapes used the first one's plan. Here for every operator."""
    for name, examples in EXAMPLES.items():
        function = getattr(ops, name)
        for arguments in examples().values():
            wanted = digest(Prepared(name, arguments).run(function))
            strided = dict(arguments)
            for operand in ops.SCHEMAS[name].inputs:
                tensor = arguments.get(operand.name)
                if operand.role != "input" or tensor is None or tensor.dim() < 2:
                    continue
                wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 5, dtype=tensor.dtype)[..., 2:-3]
                strided[operand.name] = wide.copy_(tensor)
                try:
                    assert digest(Prepared(name, strided).run(function)) == wanted, f"{name}: {operand.name} strided"
                except ValueError as error:
                    assert "is not contiguous" in str(error), str(error)
                    strided[operand.name] = tensor
            assert digest(Prepared(name, arguments).run(function)) == wanted, name


# ---- more than 2^31 elements: memory that is never touched costs nothing ---------------------------------------------


@pytest.fixture
def stays_small():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "more than 1 GiB was touched"


PAGES, PAGE_WIDTH = (1 << 23) + 1000, 256  # more than 8,388,608 pages and 2^31 elements
FAR_PAGES = [PAGES - 1, 3, (1 << 23) + 1, 8_388_607]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_pool_of_more_than_eight_million_pages(stays_small, dtype):
    """ROCm/aiter #2517: zeros from a pool of more than 8,388,608 pages or 2^31 elements (offsets of 32 bits)."""
    k, v = (torch.empty(PAGES, 1, 1, PAGE_WIDTH, dtype=dtype) for _ in "kv")
    update = (torch.randn(4, 1, PAGE_WIDTH) * 3, torch.randn(4, 1, PAGE_WIDTH) * 3)
    table = i32(*FAR_PAGES).view(1, 4)
    near = {"k": torch.zeros(4, 1, 1, PAGE_WIDTH, dtype=dtype), "v": torch.zeros(4, 1, 1, PAGE_WIDTH, dtype=dtype)}
    q = torch.randn(1, 2, PAGE_WIDTH)
    for kernel in (name[4:] for name in ops.kernel_names("kv_cache_update") if name.startswith("cpu:")):
        append = ops.with_kernel("kv_cache_update", kernel)
        append(k, v, *update, update_offsets=i32(0, 4), page_table=table)
        append(near["k"], near["v"], *update, update_offsets=i32(0, 4), page_table=i32(0, 1, 2, 3).view(1, 4))
        for pool, wanted in ((k, near["k"]), (v, near["v"])):
            got = torch.stack([pool[page] for page in FAR_PAGES])
            assert torch.equal(got.view(torch.int8), wanted.view(torch.int8)), kernel
            assert got.float().abs().max() > 1
    for kernel in KERNELS:
        attend = ops.with_kernel("attention", kernel)
        forms = {"query_offsets": i32(0, 1), "kv_lengths": i32(4)}
        try:
            got = attend(q, k, v, page_table=table, **forms)
        except NotImplementedError:
            continue
        assert torch.equal(got, attend(q, near["k"], near["v"], page_table=i32(0, 1, 2, 3).view(1, 4), **forms)), kernel


def test_strides_past_two_to_the_31(stays_small):
    """The same, where two rows of a view lie 2^31 elements apart."""
    far = (1 << 31) + 64
    memory = torch.empty(far + 4096, dtype=torch.int8)
    x = memory.as_strided((2, 40), (far, 1)).copy_(torch.arange(80).view(2, 40))
    assert torch.equal(ops.circular_pad(x, [3, 1]), ops.circular_pad(x.clone(), [3, 1]))
    out = memory.as_strided((2, 44), (far, 1), 1024)
    ops.circular_pad(x, [3, 1], out=out)
    assert torch.equal(out, ops.circular_pad(x.clone(), [3, 1]))

    halves = torch.empty(far + 4096, dtype=torch.float16)
    rows = halves.as_strided((2, 64), (far, 1)).copy_(torch.randn(2, 64))
    weights = ops.pack_int4_fragments(torch.randint(0, 16, (40, 64), dtype=torch.uint8))
    scales = torch.rand(2, 40, dtype=torch.float16)
    assert torch.equal(
        ops.int4_groupwise_gemm(rows, weights, scales, 32), ops.int4_groupwise_gemm(rows.clone(), weights, scales, 32)
    )
    heads = halves.as_strided((2, 2, 64), (far, 64, 1))
    table = torch.randn(8, 64)
    got = ops.rotary_embedding(heads, None, table)
    wanted = ops.rotary_embedding(heads.clone(), None, table)
    assert torch.equal(*(r[0] if isinstance(r, tuple) else r for r in (got, wanted)))

    caches = [memory.as_strided((2, 1, 8, 16), (far, 128, 16, 1), at) for at in (2048, 3000)]
    update = torch.randn(2, 3, 1, 16)
    forms = {"cache_form": "linear", "update_form": "padded", "write_positions": i32(1, 4)}
    near = [torch.zeros(2, 1, 8, 16, dtype=torch.int8) for _ in "kv"]
    for k, v in (caches, near):
        k.zero_(), v.zero_()
        ops.kv_cache_update(k, v, update, update, **forms)
    assert torch.equal(caches[0], near[0]) and torch.equal(caches[1], near[1]) and bool(near[0].any())
    q = torch.randn(2, 1, 4, 16)
    for kernel in KERNELS:
        attend = ops.with_kernel("attention", kernel)
        results = []
        for k, v in (caches, near):
            try:
                results.append(attend(q, k.transpose(1, 2), v.transpose(1, 2), query_form="padded", kv_form="padded"))
            except NotImplementedError:
                continue
        assert not results or torch.equal(*results), kernel


def test_more_than_two_to_the_31_elements_by_stride_zero(stays_small):
    x = torch.arange(5.0)[:, None].expand(5, (1 << 31) + 7)
    assert torch.equal(ops.circular_pad(x, [-(1 << 31), 0]), torch.arange(5.0)[:, None].expand(5, 7))
    table = torch.randn(1, 16).expand((1 << 31) + 9, 16)
    q = torch.randn(2, 1, 16)
    ids = torch.tensor([1, (1 << 31) + 8])
    got = ops.rotary_embedding(q, None, table, position_ids=ids)
    wanted = ops.rotary_embedding(q, None, table[:2].contiguous())
    assert torch.equal(*(r[0] if isinstance(r, tuple) else r for r in (got, wanted)))
    with pytest.raises(ValueError, match=r"position_ids\[1\] is 2147483657, wanted 0 to 2147483656"):
        ops.rotary_embedding(q, None, table, position_ids=ids + 1)


# ---- padding rows ----------------------------------------------------------------------------------------------------


def test_padding_rows_are_skipped_before_anything_is_read():
    """aiter PR 3235, pegainfer #253: slot -1 in the padding rows of a captured graph led to a read past the table."""
    for kernel in (name[4:] for name in ops.kernel_names("qk_norm_rope_append") if name.startswith("cpu:")):
        append = ops.with_kernel("qk_norm_rope_append", kernel)
        heads = {"q": torch.randn(5, 4, 16), "k": torch.randn(5, 2, 16), "v": torch.randn(5, 2, 16)}
        heads["q"][3:], heads["k"][3:] = math.nan, math.inf  # what a graph's spare rows hold
        cache = {name: torch.full((4, 4, 2, 16), 7.0) for name in ("k_cache", "v_cache")}
        q_out = torch.full((5, 4, 16), 9.0)
        call = {
            **{"cos_sin": torch.randn(8, 16), "update_offsets": i32(0, 2, 3), "write_positions": i32(3, 0)},
            **{"page_table": i32(2, 3, 1, -5).view(2, 2), "position_ids": i32(0, -1, 7, -1, -1)},
        }
        append(**heads, **cache, **call, q_out=q_out)
        assert bool((q_out[1] == 9).all() and (q_out[3:] == 9).all()), f"{kernel}: a padding row was written"
        for pool in cache.values():
            touched = {(page, slot) for page in range(4) for slot in range(4) if bool((pool[page, slot] != 7).any())}
            assert touched == {(2, 3), (1, 0)}, f"{kernel}: wrote {touched}"
        for bad in (8, -2, 2**31 - 1):
            with pytest.raises(ValueError, match=rf"qk_norm_rope_append: position_ids\[2\] is {bad}"):
                append(**heads, **cache, **call | {"position_ids": i32(0, -1, bad, -1, -1)}, q_out=q_out)


# ---- INT4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [k[4:] for k in ops.kernel_names("int4_groupwise_gemm") if k.startswith("cpu:")])
@pytest.mark.parametrize("group", [16, 32, 64, 100, 128, 256])
@pytest.mark.parametrize("depth", [8256, 13696, 27392 // 8, 1000, 104, 33, 15, 1])
def test_depths_and_groups_off_the_usual_ones(kernel, group, depth):
    """llm-awq #21, llm-compressor #1489, lmdeploy #1560, ik_llama.cpp #2141: another group than 128, K = 8256 or 27392
    in shards, K not divisible by 256: silent errors, NaN, or no kernel. llama.cpp #16479: no alignment is assumed."""
    rng = np.random.default_rng(depth)
    columns = 70
    weights = rng.integers(0, 16, (columns, depth), dtype=np.uint8)
    scales = rng.random((-(-depth // group), columns)).astype(np.float16)
    exact_weights = (weights.astype(np.float64) - 8) * scales.astype(np.float64).repeat(group, 0)[:depth].T
    packed = ops.pack_int4_fragments(torch.from_numpy(weights))
    for rows, dtype, roundoff in (
        (1, torch.bfloat16, 2.0**-8),
        (3, torch.float32, 2.0**-24),
        (20, torch.float16, 2.0**-11),
    ):
        memory = torch.from_numpy(rng.standard_normal(rows * depth + 1)).to(dtype)
        x = memory[1:].view(rows, depth)  # off by one element
        shifted_scales = torch.empty(scales.size + 1, dtype=torch.float16)[1:].view(scales.shape)
        try:
            out = ops.with_kernel("int4_groupwise_gemm", kernel)(
                x, packed, shifted_scales.copy_(torch.from_numpy(scales)), group
            )
        except NotImplementedError as error:
            assert "wanted" in str(error), str(error)
            continue
        exact = x.double().numpy() @ exact_weights.T
        sums = abs(x.double().numpy()) @ abs(exact_weights).T
        groups = -(-depth // group)
        bound = 2 * (group / 4 + groups + 2) * 2.0**-24 * sums  # README, targets without fused multiply-add too
        bound = bound + roundoff * (abs(exact) + bound) + 2.0**-25
        assert (abs(out.double().numpy() - exact) <= bound).all(), f"{rows} rows of {dtype}"
