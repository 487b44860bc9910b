"""circular_pad, kv_cache_update and rotary_embedding on a GPU where their kernels cut the work otherwise than for the
small calls of the sweep: long rows, many sequences, many tokens."""

from __future__ import annotations

import pytest
import torch
from device_memory import on_device, same_bits

from polyop import cuda, ops

DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("padding", [[1, 2], [8, 8], [5000, 9000], [-3, 1], [-4000, 7]])
def test_long_rows_are_padded_in_pieces(dtype, padding):
    for width in (4095, 4096, 6151):
        x = torch.randint(0, 200, (3, 2, width)).to(dtype)
        wanted = ops.with_kernel("circular_pad", "reference")(x, [*padding, 1, 0])
        assert same_bits(ops.circular_pad(x.to(DEVICE), [*padding, 1, 0]).cpu(), wanted)
        # Neither x nor out begins or continues at a multiple of 16 bytes.
        apart = torch.zeros(3, 2, width + 3, dtype=dtype, device=DEVICE)[..., 1 : width + 1]
        apart.copy_(x)
        surrounded = torch.full((*wanted.shape[:-1], wanted.shape[-1] + 5), 77, dtype=dtype, device=DEVICE)
        ops.circular_pad(apart, [*padding, 1, 0], out=surrounded[..., 3:-2])
        assert same_bits(surrounded[..., 3:-2].cpu(), wanted)
        assert bool((surrounded[..., :3] == 77).all()) and bool((surrounded[..., -2:] == 77).all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rows_that_are_not_dense_are_padded(dtype):
    x = torch.randint(0, 200, (70, 3, 90)).to(dtype)
    wanted = ops.with_kernel("circular_pad", "reference")(x.transpose(0, 2), [2, 75, 1, 1])
    assert same_bits(ops.circular_pad(x.to(DEVICE).transpose(0, 2), [2, 75, 1, 1]).cpu(), wanted)


def cache_arguments(lengths, cache, head_scales, layout, heads=8, head_dim=64, page=16):
    """On the CPU: a packed update of sequences with `lengths` tokens into a paged cache or a linear one."""
    generator = torch.Generator().manual_seed(len(lengths))
    batch, tokens = len(lengths), sum(lengths)
    columns = max(lengths) // page + 2
    k, v = torch.randn(2, tokens, heads, head_dim, generator=generator).bfloat16().unbind()
    shape = (batch * columns, page, heads, head_dim) if layout == "paged" else (batch, heads, columns * page, head_dim)
    made = {
        "k": k,
        "v": v,
        "k_cache": torch.zeros(shape).to(cache),
        "v_cache": torch.zeros(shape).to(cache),
        "update_offsets": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "write_positions": torch.randint(0, page, (batch,), generator=generator, dtype=torch.int32),
        "cache_form": layout,
    }
    if layout == "paged":
        order = torch.randperm(batch * columns, generator=generator)
        made["page_table"] = order.to(torch.int32).view(batch, columns)
    if cache != torch.bfloat16:
        for name in ("k_scale", "v_scale"):
            made[name] = torch.rand(heads if head_scales else 1, generator=generator) * 0.05 + 0.01
    return made


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=["plain", "fp8", "int8"])
@pytest.mark.parametrize("layout", ["paged", "linear"])
@pytest.mark.parametrize(
    "lengths", [[1] * 200, [1] * 40 + [0, 3, 0, 1] * 300, [70, 1]], ids=["decode", "ragged", "few"]
)
def test_cache_updates_find_their_rows(lengths, layout, cache):
    for head_scales in (False, True):
        made = cache_arguments(lengths, cache, head_scales, layout)
        moved = on_device(made)
        ops.kv_cache_update(**moved)
        ops.with_kernel("kv_cache_update", "reference")(**made)
        for name in ("k_cache", "v_cache"):
            assert same_bits(moved[name].cpu(), made[name]), name
    cuda.check_errors()


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_scales_far_from_one_divide_as_the_reference_does(cache):
    scales = [1e-42, 1e-30, 1e-18, 1e20, 3e30, -0.02, 0.0, float("inf")]
    made = cache_arguments([40, 7], cache, True, "paged", heads=len(scales))
    for name in ("k_scale", "v_scale"):
        made[name] = torch.tensor(scales)
    for h, scale in enumerate(scales[:5]):  # values that neither vanish nor saturate
        made["k"][:, h] = (made["k"][:, h].float() * scale * 3).bfloat16()
    moved = on_device(made)
    ops.kv_cache_update(**moved)
    ops.with_kernel("kv_cache_update", "reference")(**made)
    for name in ("k_cache", "v_cache"):
        assert same_bits(moved[name].cpu(), made[name]), name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [128, 80, 40])
def test_rotation_of_many_tokens_has_the_bits_of_one(head_dim, interleaved):
    rotary_dim = head_dim // 16 * 16
    qkv = torch.randn(3000, 40, head_dim, device=DEVICE, dtype=torch.bfloat16)
    q, k = qkv[:, :32], qkv[:, 32:]
    table = torch.randn(100, rotary_dim, device=DEVICE)
    positions = torch.randint(0, 100, (3000,), device=DEVICE)
    q_out, k_out = ops.rotary_embedding(q, k, table, positions, interleaved=interleaved)
    for token in (0, 1, 1777, 2999):
        one = slice(token, token + 1)
        q_one, k_one = ops.rotary_embedding(q[one], k[one], table, positions[one], interleaved=interleaved)
        assert same_bits(q_out[one], q_one) and same_bits(k_out[one], k_one)
