"""trt_kv_cache_update on a GPU: the copy and the update, forms and dtypes, what is left out, graphs, bad entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from device_memory import DEVICE, DeviceGuarded, captured, kernels_of, on_device, same_bits, to_device

from polyop import cuda, ops
from polyop.testing.inputs import offsets_of, poison
from polyop.testing.sweep import Guarded

KERNELS = kernels_of("trt_kv_cache_update")
REFERENCE = ops.with_kernel("trt_kv_cache_update", "reference")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS, CAPACITY = 3, 20
LAYOUTS = ("in place", "dense", "gaps", "rows first")


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache_of(batch, width, dtype, layout, seed=0):
    """[B, Hkv, Lmax, D] with a NaN somewhere; rows first: [B, Lmax, Hkv, D] in memory."""
    shape = (batch, CAPACITY, HEADS, width) if layout == "rows first" else (batch, HEADS, CAPACITY, width)
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if cache.numel():
        cache.view(-1)[cache.numel() // 2] = float("nan")
    return cache.transpose(1, 2) if layout == "rows first" else cache


def arguments(tokens, indices, packed, *, batch=None, width=64, dtype=torch.float16, layout="dense", seed=0):
    """On the CPU. Packed: rows behind the last offset hold poison."""
    made = {"past_cache": cache_of(len(tokens) if batch is None else batch, width, dtype, layout, seed)}
    generator = torch.Generator().manual_seed(seed + 1)
    if packed:
        update = torch.randn(sum(tokens), HEADS, width, generator=generator).to(dtype)
        made |= {"update": torch.cat([update, poison((2, HEADS, width), dtype)]), "update_form": "packed_nhd"}
        made["update_lengths"] = offsets_of(tokens)
    else:
        made["update"] = torch.randn(len(tokens), HEADS, max(tokens, default=1), width, generator=generator).to(dtype)
    return made if indices is None else made | {"write_indices": i32(*indices)}


def run(kernel, made, layout):
    """Y of a kernel inside sentinels, and past_cache afterwards, both on the CPU."""
    shape = tuple(made["past_cache"].shape)
    guarded = Guarded.empty(shape, made["past_cache"].dtype, gap=0 if layout in ("in place", "dense") else 8)
    if layout == "in place":
        guarded.tensor.copy_(made["past_cache"])
    y = DeviceGuarded(guarded)
    moved = on_device(made)
    if layout == "in place":
        moved["past_cache"] = y.tensor
    ops.with_kernel("trt_kv_cache_update", kernel)(**moved, Y=y.tensor)
    past = moved["past_cache"].cpu()
    y.fetch().assert_surroundings_intact("Y")
    return guarded.tensor, past


def check(made, layout):
    wanted = REFERENCE(**made)
    for kernel in KERNELS:
        y, past = run(kernel, made, layout)
        cuda.check_errors()
        assert same_bits(y, wanted), f"{kernel}: {layout}"
        assert layout == "in place" or same_bits(past, made["past_cache"]), f"{kernel}: past_cache was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forms_and_dtypes_match_the_reference(layout, packed, dtype):
    tokens = [5, 0, 1, CAPACITY] if packed else [5] * 4
    for width, indices in itertools.product((8, 64, 128, 10, 7, 1), ([0, 15, CAPACITY - 1, 0], None)):
        check(arguments(tokens, indices, packed, width=width, dtype=dtype, layout=layout), layout)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_past_the_end_are_left_out_and_are_no_error(layout, packed):
    largest = (1 << 31) - 1
    for indices in ([18, CAPACITY, 19], [largest, largest - 2, 0]):
        check(arguments([5, 5, 5], indices, packed, layout=layout), layout)
    if packed:  # more rows than the cache has
        check(arguments([CAPACITY + 9, 0, 3], [0, 4, 18], packed, layout=layout), layout)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_without_an_update_stay(layout, packed):
    for tokens in ([3], [3, 3], []):
        check(arguments(tokens, [7, 1][: len(tokens)], packed, batch=4, layout=layout), layout)
    check(arguments([], [], packed, batch=0, layout=layout), layout)
    check(arguments([0, 0], None, packed, layout=layout), layout)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_graph_replays_with_other_indices_and_lengths(kernel, packed, layout):
    function = ops.with_kernel("trt_kv_cache_update", kernel)
    tokens = [[5, 1, 6], [0, 12, 0], [4, 4, 4]] if packed else [[4] * 3] * 3
    indices = [[0, 3, 16], [19, 0, 7], [1 << 30, 2, 9]]
    calls = [
        arguments(t, i, packed, layout=layout, seed=s) for s, (t, i) in enumerate(zip(tokens, indices, strict=True))
    ]
    fixed = on_device(calls[0])
    y = fixed["past_cache"] if layout == "in place" else torch.empty_like(fixed["past_cache"])

    def fill(made):
        y.fill_(float("nan"))
        for name, value in made.items():
            if isinstance(value, torch.Tensor):
                fixed[name].copy_(value)

    replay = captured(lambda: function(**fixed, Y=y))
    for made in calls + calls[::-1]:
        fill(made)
        replay()
        assert same_bits(y.cpu(), REFERENCE(**made))
    cuda.check_errors()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [-1, -4, -(1 << 31)])
def test_a_sequence_with_a_negative_index_is_left_out_and_named(kernel, layout, bad):
    for packed in (False, True):
        made = arguments([4, 4, 4], [2, 3, 4], packed, layout=layout)
        wanted = REFERENCE(**made)
        wanted[1] = made["past_cache"][1]
        made["write_indices"][1] = bad
        y, _ = run(kernel, made, layout)
        with pytest.raises(ValueError, match=r"trt_kv_cache_update: write_indices holds"):
            cuda.check_errors()
        assert same_bits(y, wanted)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [[1, 4, 8], [-1, 4, 8], [0, 9, 8], [0, 4, 11], [0, 4, 1 << 30], [-(1 << 31), 4, 8]])
def test_lengths_that_are_no_cut_of_the_rows_are_named_and_touch_nothing_else(kernel, layout, bad):
    made = arguments([4, 4], [2, 3], True, batch=3, layout=layout)  # 8 rows, and 2 of nobody
    made["update_lengths"].copy_(torch.tensor(bad))
    y, past = run(kernel, made, layout)
    with pytest.raises(ValueError, match=r"trt_kv_cache_update: update_lengths holds"):
        cuda.check_errors()
    assert layout == "in place" or same_bits(past, made["past_cache"])
    assert same_bits(y[2], made["past_cache"][2]), "a sequence without an update"
    rows = torch.cat([made["update"], made["past_cache"].transpose(1, 2).flatten(0, 1)]).view(torch.int16)
    known = {tuple(row) for row in rows.flatten(1).tolist()}
    written = y.transpose(1, 2).flatten(0, 1).contiguous().view(torch.int16).flatten(1)
    assert all(tuple(row) in known for row in written.tolist()), "rows of neither the update nor the cache"


@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_of_no_rows_are_checked(kernel):
    made = arguments([0, 0], None, True) | {"update": torch.zeros(0, HEADS, 64).half(), "update_lengths": i32(0, 3, 0)}
    y, _ = run(kernel, made, "dense")
    with pytest.raises(ValueError, match=r"trt_kv_cache_update: update_lengths holds"):
        cuda.check_errors()
    assert same_bits(y, made["past_cache"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_past_two_to_the_31_bytes_and_more_heads_than_a_grid_has(kernel):
    function = ops.with_kernel("trt_kv_cache_update", kernel)
    made = arguments([4, 4], [2, 3], False, batch=2)
    wanted = REFERENCE(**made)
    far = (1 << 30) + 64  # elements of two bytes
    memory = torch.zeros(far + (1 << 16), dtype=torch.float16, device=DEVICE)
    strides = (far, CAPACITY * 64, 64, 1)
    past, y = (memory.as_strided(wanted.shape, strides, start) for start in (0, 1 << 14))
    update = memory.as_strided(made["update"].shape, (far, 4 * 64, 64, 1), 1 << 15)
    past.copy_(made["past_cache"])
    update.copy_(made["update"])
    function(past, update, to_device(made["write_indices"]), Y=y)
    assert same_bits(y.cpu(), wanted)
    many = torch.arange(70_000 * 8 * 3, device=DEVICE, dtype=torch.float32).view(70_000, 1, 3, 8)
    row = torch.ones(70_000, 1, 1, 8, device=DEVICE)
    got = function(many.transpose(0, 1).contiguous().transpose(0, 1)[:, :, :2], row)
    assert torch.equal(got[:, :, 1], many[:, :, 1]) and torch.equal(got[:, :, :1], row)
    cuda.check_errors()
