"""The decode kernel against the double reference: shapes of real models, ragged lengths, masks, 8-bit caches."""

from __future__ import annotations

import pytest
import torch
from attention_cases import AttentionCase, bounds, outputs_of
from device_memory import to_device

from polyop import cuda, ops
from polyop.testing import assert_within_bound

REFERENCE = ops.with_kernel("attention", "reference")
SPLIT_KV = ops.with_kernel("attention", "cuda_split_kv")


def check(case: AttentionCase) -> None:
    arguments = case.make()
    expected = outputs_of(arguments, case.fp8_out, "cpu")
    REFERENCE(**arguments, **expected)
    got = outputs_of(arguments, case.fp8_out, "cuda")
    moved = {name: to_device(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    SPLIT_KV(**moved, **got)
    cuda.check_errors()
    out_bound, lse_bound = bounds(arguments, expected["out"], expected["lse"])
    assert_within_bound(got["out"].cpu(), expected["out"], out_bound, f"{case}: out")
    assert_within_bound(got["lse"].cpu(), expected["lse"], lse_bound, f"{case}: lse")


@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn, torch.int8], ids=["16bit", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim, dtype, kv):
    check(AttentionCase([300, 0, 1, 129], [1, 1, 1, 1], head_dim=head_dim, dtype=dtype, kv_dtype=kv, num_kv_heads=1))
    check(AttentionCase([200, 70], [9, 20], head_dim=head_dim, dtype=dtype, kv_dtype=kv, num_kv_heads=1, seed=1))


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256, 3, 48])
def test_page_sizes_and_ragged_lengths(page_size):
    lengths = sorted({0, 1, max(page_size - 1, 0), page_size, page_size + 1, 2 * page_size, 63, 64, 65, 513})
    check(AttentionCase(lengths, [1] * len(lengths), page_size=page_size, num_kv_heads=1, group=2))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 17, 32, 64])
def test_ratios(group):
    check(AttentionCase([130, 700], [1, 1], head_dim=64, num_kv_heads=1, group=group))
    check(AttentionCase([70, 33], [3, 2], head_dim=64, num_kv_heads=2, group=group, seed=3))


@pytest.mark.parametrize("kv_form", ["paged", "packed", "padded"])
@pytest.mark.parametrize("query_form", ["packed", "padded"])
@pytest.mark.parametrize("causal", ["lower_right", "upper_left", "none"])
@pytest.mark.parametrize("window", [-1, 1, 37])
def test_forms_masks_and_windows(kv_form, query_form, causal, window):
    queries = [5, 5, 5] if query_form == "padded" else [5, 1, 0]
    case = AttentionCase([260, 5, 64], queries, head_dim=64, kv_form=kv_form, query_form=query_form, sinks=True)
    case.attributes = {"causal": causal, "window": window}
    check(case)


@pytest.mark.parametrize("rows", [1, 4, 16, 33, 64])
@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn], ids=["16bit", "fp8"])
def test_trees(rows, kv):
    case = AttentionCase([rows + 200, rows], [rows, rows], head_dim=64, tree=True, kv_dtype=kv, num_kv_heads=1, group=3)
    case.attributes = {"causal": "none"}
    check(case)


def test_output_in_fp8_and_scales_per_head():
    check(AttentionCase([90, 1000], [1, 2], fp8_out=True, head_dim=64))
    check(AttentionCase([90, 1000], [1, 2], kv_dtype=torch.float8_e4m3fn, scale_per_head=True, fp8_out=True))


def test_many_chunks_and_many_sequences():
    check(AttentionCase([6000], [1], num_kv_heads=1, group=2, page_size=64))
    check(AttentionCase([(37 * i) % 150 for i in range(90)], [1] * 90, head_dim=64, num_kv_heads=1, group=2))


def test_blocks_that_walk_many_items():
    """Enough rows for several items a block: each sequence alone has the bits that it has in the batch."""
    batch, length, heads, width = 96, 2048, 8, 128
    pool = torch.randn(2, batch * length // 64, 64, heads, width, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch, 32, width, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pool.shape[1], device="cuda").to(torch.int32).view(batch, -1)
    lengths = torch.randint(1, length + 1, (batch,), device="cuda").to(torch.int32)
    offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    out = SPLIT_KV(q, pool[0], pool[1], query_offsets=offsets, kv_lengths=lengths, page_table=table)
    for b in range(0, batch, 5):
        alone = SPLIT_KV(
            q[b : b + 1],
            pool[0],
            pool[1],
            query_offsets=offsets[:2],
            kv_lengths=lengths[b : b + 1],
            page_table=table[b : b + 1],
        )
        assert torch.equal(alone[0], out[b])
        keys, values = (plane[table[b].long()].flatten(0, 1)[: int(lengths[b])].float() for plane in pool)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[b].float()[:, None], keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
        )
        assert torch.allclose(out[b].float(), expected[:, 0], atol=2e-2)


def test_long_sums_of_one_sign_keep_their_precision():
    case = AttentionCase([16384], [1], num_kv_heads=1, group=1, kv_dtype=torch.float8_e4m3fn, page_size=64)
    arguments = case.make()
    arguments["v"].copy_((arguments["v"].float().abs() + 1).to(torch.float8_e4m3fn))
    arguments["q"].zero_()
    moved = {name: to_device(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    got = outputs_of(arguments, False, "cuda")
    SPLIT_KV(**moved, **got)
    pages = arguments["page_table"][0, : 16384 // 64].long()
    mean = arguments["v"][pages].double().mean((0, 1, 2)) * arguments["v_scale"].double()
    assert_within_bound(got["out"][0, 0].cpu(), mean, mean.abs() * 2.0**-9, "mean of the values")
