"""Every attention kernel against the double reference: shapes of real models, ragged lengths, masks, 8-bit caches.

Each check runs all kernels of the library that take the case, whatever they are called.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import KERNELS, AttentionCase, check_every_kernel
from device_memory import DEVICE, on_device

from polyop import ops
from polyop.testing import assert_within_bound

F8 = torch.float8_e4m3fn


@pytest.mark.parametrize("kv", [None, F8, torch.int8], ids=["16bit", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
def test_head_dims(head_dim, dtype, kv):
    common = {"head_dim": head_dim, "dtype": dtype, "kv_dtype": kv, "num_kv_heads": 1}
    check_every_kernel(AttentionCase([300, 0, 1, 129], [1, 1, 1, 1], **common))
    check_every_kernel(AttentionCase([200, 70], [9, 20], seed=1, **common))


@pytest.mark.parametrize("kv", [None, F8], ids=["plain", "fp8"])
@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(192, 128), (128, 64), (64, 512), (576, 512), (40, 24)])
def test_values_of_another_width(head_dim, value_head_dim, kv):
    for dtype in (torch.float16, torch.float32):
        case = AttentionCase([99, 0, 17], [1, 1, 5], head_dim, value_head_dim, dtype=dtype, kv_dtype=kv)
        check_every_kernel(case)


def ragged(page_size: int) -> list[int]:
    return sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, 63, 64, 65, 513})


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256, 3, 48])
@pytest.mark.parametrize("kv", [None, F8], ids=["16bit", "fp8"])
def test_page_sizes_and_ragged_lengths(page_size, kv):
    lengths = ragged(page_size)
    common = {"page_size": page_size, "num_kv_heads": 1, "group": 2, "kv_dtype": kv}
    check_every_kernel(AttentionCase(lengths, [1] * len(lengths), **common))
    rows = [min(length, 3) for length in lengths]
    check_every_kernel(AttentionCase(lengths, rows, head_dim=64, seed=1, **common))


@pytest.mark.parametrize("head_dim", [64, 128, 40])
@pytest.mark.parametrize("kv_form", ["packed", "padded"])
def test_ragged_lengths_without_pages(kv_form, head_dim):
    for rows in (1, 4):
        lengths = ragged(16)
        case = AttentionCase(lengths, [rows] * len(lengths), head_dim, num_kv_heads=1, group=2, kv_form=kv_form)
        check_every_kernel(case)


@pytest.mark.parametrize("kv_form", ["paged", "packed", "padded"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40])
def test_a_completely_full_cache(kv_form, head_dim):
    """Every page, row and table entry is in use: nothing lies behind the last key but foreign memory."""
    for page_size, pages in ((16, 9), (64, 3), (1, 70), (256, 1)):
        length = page_size * pages
        for rows in (1, 7):
            case = AttentionCase([length] * 3, [rows] * 3, head_dim, kv_form=kv_form, page_size=page_size, spare=False)
            check_every_kernel(case)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 17, 32, 64])
def test_ratios(group):
    check_every_kernel(AttentionCase([130, 700], [1, 1], head_dim=64, num_kv_heads=1, group=group))
    check_every_kernel(AttentionCase([130, 700], [1, 1], num_kv_heads=2, group=group, dtype=torch.bfloat16))
    check_every_kernel(AttentionCase([70, 33], [3, 2], head_dim=64, num_kv_heads=2, group=group, seed=3))


@pytest.mark.parametrize("kv_form", ["paged", "packed", "padded"])
@pytest.mark.parametrize("query_form", ["packed", "padded"])
@pytest.mark.parametrize("causal", ["lower_right", "upper_left", "none"])
@pytest.mark.parametrize("window", [-1, 1, 37])
def test_forms_masks_and_windows(kv_form, query_form, causal, window):
    queries = [5, 5, 5] if query_form == "padded" else [5, 1, 0]
    case = AttentionCase([260, 5, 64], queries, head_dim=64, kv_form=kv_form, query_form=query_form, sinks=True)
    case.attributes = {"causal": causal, "window": window}
    check_every_kernel(case)


@pytest.mark.parametrize("window", [0, 1, 64, 300])
def test_windows_of_single_rows(window):
    for head_dim in (64, 128):
        case = AttentionCase([1000, 63, 1, 0], [1] * 4, head_dim, attributes={"window": window})
        check_every_kernel(case)


@pytest.mark.parametrize("rows", [1, 4, 16, 33, 64])
@pytest.mark.parametrize("kv", [None, F8], ids=["16bit", "fp8"])
def test_trees(rows, kv):
    for head_dim, group in ((64, 3), (128, 4)):
        case = AttentionCase([rows + 200, rows], [rows, rows], head_dim, tree=True, kv_dtype=kv, num_kv_heads=1)
        case.group = group
        case.attributes = {"causal": "none"}
        check_every_kernel(case)


def test_output_in_fp8_and_scales_per_head():
    check_every_kernel(AttentionCase([90, 1000], [1, 2], fp8_out=True, head_dim=64))
    check_every_kernel(AttentionCase([90, 1000], [1, 2], kv_dtype=F8, scale_per_head=True, fp8_out=True))


def test_dense_masks():
    for head_dim in (64, 40):
        case = AttentionCase([200, 70], [6, 6], head_dim, kv_form="padded", query_form="padded")
        case.attributes = {"causal": "none"}
        arguments = case.make()
        visible = torch.rand(2, 8, 6, 205, generator=torch.Generator().manual_seed(0)) < 0.6
        check_every_kernel(case, arguments | {"mask": visible})
        check_every_kernel(case, arguments | {"mask": torch.where(visible, 0.5, float("-inf")).half()})


@pytest.mark.parametrize("rows", [0, 3])
def test_no_sequences(rows):
    """Rows of nobody give 0 and -inf."""
    empty = AttentionCase([5], [1]).make()
    empty["q"] = torch.full((rows, *empty["q"].shape[1:]), float("nan"), dtype=torch.float16)
    empty["query_offsets"] = torch.zeros(1, dtype=torch.int32)
    empty["kv_lengths"], empty["page_table"] = empty["kv_lengths"][:0], empty["page_table"][:0]
    for kernel in (None, *KERNELS):
        try:
            out, lse = (ops.with_kernel("attention", kernel) if kernel else ops.attention)(**on_device(empty))
        except NotImplementedError:
            continue
        assert out.shape == (rows, 8, 128) and lse.shape == (rows, 8)
        assert bool((out == 0).all()) and bool((lse == float("-inf")).all())


def test_many_chunks_and_many_sequences():
    check_every_kernel(AttentionCase([6000], [1], num_kv_heads=1, group=2, page_size=64))
    lengths = [(37 * i) % 150 for i in range(90)]
    check_every_kernel(AttentionCase(lengths, [1] * 90, head_dim=64, num_kv_heads=1, group=2))


def assert_same_alone(attend, q, pool, table, lengths, out, b, what):
    """Sequence b of a decode batch over pool [2, P, R, Hkv, D]: alone it has the bits of out[b], and they are right."""
    one = torch.tensor([0, 1], device=DEVICE, dtype=torch.int32)
    own = slice(b, b + 1)
    alone = attend(q[own], pool[0], pool[1], query_offsets=one, kv_lengths=lengths[own], page_table=table[own])
    assert torch.equal(alone[0], out[b]), what
    length = int(lengths[b])
    if length == 0:
        assert bool((out[b] == 0).all()), what
        return
    pages = table[b, : -(-length // pool.shape[2])].long()
    keys, values = (plane[pages].flatten(0, 1)[:length].float() for plane in pool)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[b].float()[:, None], keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
    )
    assert_within_bound(out[b].float().cpu(), expected[:, 0].cpu(), 2e-2, what)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv", [torch.bfloat16, F8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("batch", "long_ones"), [(40, {7: 20000}), (300, {0: 9000, 299: 30000}), (4500, {2500: 50000})], ids=str
)
def test_long_sequences_among_short_ones(kernel, kv, batch, long_ones):
    """Shares of equal cost cut the long ones anywhere; more sequences than threads, and than costs a block keeps. Each
    sequence alone has the bits that it has in the batch."""
    attend = ops.with_kernel("attention", kernel)
    heads, width, page = 2, 64, 64
    random = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 300, (batch,), generator=random).to(torch.int32)
    for sequence, length in long_ones.items():
        lengths[sequence] = length
    pages = (lengths + page - 1) // page
    table = torch.zeros(batch, int(pages.max()), dtype=torch.int32)
    order = torch.randperm(int(pages.sum()), generator=random).to(torch.int32)
    ends = pages.cumsum(0)
    for b in range(batch):
        table[b, : pages[b]] = order[ends[b] - pages[b] : ends[b]]
    table, lengths = table.to(DEVICE), lengths.to(DEVICE)
    pool = torch.randn(2, len(order), page, heads, width, device=DEVICE, dtype=torch.bfloat16).to(kv)
    q = torch.randn(batch, 8, width, device=DEVICE, dtype=torch.bfloat16)
    offsets = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    try:
        out = attend(q, pool[0], pool[1], query_offsets=offsets, kv_lengths=lengths, page_table=table)
    except NotImplementedError as error:
        pytest.skip(str(error))
    for b in sorted({*long_ones, 0, 1, 31, 39, batch // 2, batch - 2, batch - 1}):
        assert_same_alone(attend, q, pool, table, lengths, out, b, f"{kernel}: sequence {b}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_millions_of_row_tiles_under_a_large_capacity(kernel):
    """Rows x chunks of the capacity exceed 2^29: the host plans without them."""
    rows, heads, width, page = 131072, 128, 64, 64
    q = torch.ones(rows, heads, width, device=DEVICE, dtype=torch.bfloat16)
    pool = torch.randn(2, 1, page, 1, width, device=DEVICE).to(F8)
    arguments = {
        "query_offsets": torch.tensor([0, rows], device=DEVICE, dtype=torch.int32),
        "kv_lengths": torch.tensor([1], device=DEVICE, dtype=torch.int32),
        "page_table": torch.zeros(1, 1100, device=DEVICE, dtype=torch.int32),
        "causal": "none",
    }
    try:
        out = ops.with_kernel("attention", kernel)(q, pool[0], pool[1], **arguments)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert torch.equal(out, pool[1, 0, 0, 0].to(torch.bfloat16).expand_as(out))


@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_that_walk_many_items(kernel):
    """Enough rows for several items a block: each sequence alone has the bits that it has in the batch."""
    attend = ops.with_kernel("attention", kernel)
    batch, length, heads, width = 96, 2048, 8, 128
    pool = torch.randn(2, batch * length // 64, 64, heads, width, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(batch, 32, width, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randperm(pool.shape[1], device=DEVICE).to(torch.int32).view(batch, -1)
    lengths = torch.randint(1, length + 1, (batch,), device=DEVICE).to(torch.int32)
    offsets = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    try:
        out = attend(q, pool[0], pool[1], query_offsets=offsets, kv_lengths=lengths, page_table=table)
    except NotImplementedError as error:
        pytest.skip(str(error))
    for b in range(0, batch, 5):
        assert_same_alone(attend, q, pool, table, lengths, out, b, f"{kernel}: sequence {b}")
