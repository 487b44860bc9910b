"""Appends and rotations of sizes and layouts that are rare: nothing at all, narrow heads, pages of 1 and 256, full
caches, keys and values in one pool, rows gigabytes apart, positions that only fit 64 bits."""

from __future__ import annotations

import pytest
import torch
from device_memory import ALL_KERNELS, DEVICE, kernels_of, same_bits
from test_qk_norm_rope_append import bound_of

from polyop import cuda, ops
from polyop.testing import UNIT_ROUNDOFF, assert_within_bound, output_bound
from polyop.testing.inputs import offsets_of

F8 = torch.float8_e4m3fn
APPENDS = [(name, kernel) for name, kernel in ALL_KERNELS if name in ("kv_cache_update", "qk_norm_rope_append")]
every_append = pytest.mark.parametrize(("operator", "kernel"), APPENDS, ids=[f"{n}-{k}" for n, k in APPENDS])
FAR = (1 << 30) + 64  # elements; of two bytes each more than 2^31 bytes


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def append_call(operator, lengths, starts, *, heads=2, width=64, page=16, columns=None, dtype=torch.bfloat16,
                cache=None, spare=0, seed=0):  # fmt: skip
    """Keyword arguments on the CPU, pages in random order."""
    g = torch.Generator().manual_seed(seed)
    batch, tokens = len(lengths), sum(lengths) + spare
    if columns is None:
        columns = max((-(-(s + n) // page) for s, n in zip(starts, lengths, strict=True)), default=1)
    made = {name: torch.randn(tokens, heads, width, generator=g).to(dtype) for name in ("k", "v")}
    for name in ("k_cache", "v_cache"):
        made[name] = torch.full((batch * columns, page, heads, width), 3.0).to(cache or dtype)
    made |= {
        "update_offsets": offsets_of(lengths),
        "write_positions": i32(*starts),
        "page_table": torch.randperm(batch * columns, generator=g).to(torch.int32).view(batch, columns),
    }
    if cache is not None:
        made |= {"k_scale": torch.rand(heads, generator=g) * 0.05 + 0.01, "v_scale": torch.tensor([0.03])}
    if operator == "qk_norm_rope_append":
        made["q"] = torch.randn(tokens, 3, width, generator=g).to(dtype)
        made["q_out"] = torch.full((tokens, 3, width), 5.0).to(dtype)
        angles = torch.rand(columns * page, width // 2, generator=g) * 6
        made["cos_sin"] = torch.cat((angles.cos(), angles.sin()), -1)
    return made


WRITTEN = ("k_cache", "v_cache", "q_out")


def moved(made):
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in made.items()}


def check(operator, kernel, made, place=lambda name, tensor: tensor):
    """A kernel beside the reference; `place(name, tensor)` gives the memory a tensor on the GPU lies in."""
    wanted = made | {name: made[name].clone() for name in WRITTEN if name in made}
    ops.with_kernel(operator, "reference")(**wanted)
    call = {name: place(name, v) if isinstance(v, torch.Tensor) else v for name, v in moved(made).items()}
    ops.with_kernel(operator, kernel)(**call)
    cuda.check_errors()
    for name in WRITTEN:
        if name not in made:
            continue
        if name != "v_cache" and "q" in made and made["q"].numel():
            assert_within_bound(call[name].cpu(), wanted[name], bound_of(made, wanted[name]), name)
        else:
            assert same_bits(call[name].cpu(), wanted[name]), name


@every_append
def test_nothing_to_append(operator, kernel):
    check(operator, kernel, append_call(operator, [0, 0], [0, 16], columns=2))
    check(operator, kernel, append_call(operator, [], []))
    check(operator, kernel, append_call(operator, [], [], spare=3))  # rows of nobody
    check(operator, kernel, append_call(operator, [0, 0], [0, 5], spare=3))


@pytest.mark.parametrize("kernel", kernels_of("kv_cache_update"))
def test_offsets_of_no_tokens_are_checked(kernel):
    made = moved(append_call("kv_cache_update", [0, 0], [0, 16], columns=2))
    for bad in ([0, 3, 0], [0, 0, 1], [-1, 0, 0]):
        made["update_offsets"].copy_(torch.tensor(bad))
        ops.with_kernel("kv_cache_update", kernel)(**made)
        with pytest.raises(ValueError, match="kv_cache_update: update_offsets"):
            cuda.check_errors()


@every_append
@pytest.mark.parametrize("cache", [None, F8, torch.int8], ids=["plain", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_heads(operator, kernel, dtype, cache):
    for width in (2, 8, 16, 24):
        for heads in (1, 5, 40):
            made = append_call(operator, [5, 0, 2], [14, 3, 15], heads=heads, width=width, dtype=dtype, cache=cache)
            check(operator, kernel, made)


@every_append
@pytest.mark.parametrize("page", [1, 2, 256])
@pytest.mark.parametrize("cache", [None, F8], ids=["plain", "fp8"])
def test_small_and_large_pages_to_the_last_slot(operator, kernel, page, cache):
    around = (0, 1, page - 1, page, page + 1)
    lengths, starts = [n for n in around for _ in around], [n for _ in around for n in around]
    check(operator, kernel, append_call(operator, lengths, starts, page=page, cache=cache))
    check(operator, kernel, append_call(operator, [2 * page] * 3, [0] * 3, page=page, columns=2, cache=cache))
    check(operator, kernel, append_call(operator, [1] * 3, [2 * page - 1] * 3, page=page, columns=2, cache=cache))
    check(operator, kernel, append_call(operator, [0] * 3, [2 * page] * 3, page=page, columns=2, cache=cache))  # full


@every_append
@pytest.mark.parametrize("cache", [None, F8, torch.int8], ids=["plain", "fp8", "int8"])
@pytest.mark.parametrize("axis", [0, 1], ids=["pools", "pages"])
def test_keys_and_values_share_a_pool_and_a_projection(operator, kernel, axis, cache):
    for width in (64, 40):
        made = append_call(operator, [5, 1], [13, 31], width=width, cache=cache)
        pool = torch.stack([made[name].view(torch.uint8) for name in ("k_cache", "v_cache")], axis)
        pool = pool.to(DEVICE).view(made["k_cache"].dtype)
        heads = [name for name in ("q", "k", "v") if name in made]
        projection = torch.cat([made[name] for name in heads], 1).to(DEVICE)
        views = dict(zip(heads, projection.split([made[name].shape[1] for name in heads], 1), strict=True))
        views |= {"k_cache": pool.select(axis, 0), "v_cache": pool.select(axis, 1)}
        check(operator, kernel, made, lambda name, tensor: views.get(name, tensor))  # noqa: B023


@every_append
@pytest.mark.parametrize(
    ("names", "axis"),
    [(("k", "v", "q", "q_out"), 0), (("k", "v"), 1), *((("k_cache", "v_cache"), axis) for axis in (0, 1, 2))],
    ids=["tokens", "heads", "pages", "rows of pages", "heads of pages"],
)
def test_steps_of_gigabytes(operator, kernel, names, axis):
    memory = torch.zeros(FAR + (1 << 16), dtype=torch.bfloat16, device=DEVICE)
    made = append_call(operator, [2], [1], heads=2, page=2, columns=2)  # every axis but the last has two entries

    def at_a_distance(tensor):
        strides, step = [0] * tensor.dim(), 1
        for other in reversed(range(tensor.dim())):
            strides[other], step = (FAR, step) if other == axis else (step, step * tensor.shape[other])
        return memory.as_strided(tensor.shape, strides).copy_(tensor)

    for far in set(names) & set(made):
        check(operator, kernel, made, lambda name, tensor: at_a_distance(tensor) if name == far else tensor)  # noqa: B023


@pytest.mark.parametrize("operator", ["rotary_embedding", "qk_norm_rope_append"])
@pytest.mark.parametrize("width", [64, 10], ids=["vectors", "elements"])
def test_positions_of_64_bits_are_not_cut_to_32(operator, width):
    for bad in (1 << 32, (1 << 32) + 1, -(1 << 32), (1 << 63) - 1, -(1 << 63)):
        positions = torch.tensor([1, bad, 2], device=DEVICE)
        if operator == "rotary_embedding":
            q = torch.randn(3, 2, width, device=DEVICE)
            out = torch.full_like(q, 5.0)
            ops.rotary_embedding(q, None, torch.ones(8, width, device=DEVICE), positions, q_out=out)
        else:
            made = moved(append_call(operator, [3], [0], width=width, dtype=torch.float32))
            out = made["q_out"]
            ops.qk_norm_rope_append(**made, position_ids=positions)
        with pytest.raises(ValueError, match=f"{operator}: position_ids"):
            cuda.check_errors()
        assert [bool((row == 5.0).all()) for row in out] == [False, True, False]


@pytest.mark.parametrize("kernel", kernels_of("rotary_embedding"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotation_of_nothing_of_narrow_heads_and_of_many(kernel, dtype):
    rotate, reference = (ops.with_kernel("rotary_embedding", name) for name in (kernel, "reference"))
    table = torch.randn(8, 8)
    for tokens, query_heads, kv_heads in ((0, 2, 1), (3, 1, 1), (3, 70, 1), (8, 3, 0), (2, 0, 2)):
        for width in (8, 16, 24):
            q, k = (torch.randn(tokens, heads, width).to(dtype) for heads in (query_heads, kv_heads))
            for interleaved in (False, True):
                wanted = reference(q, k, table, interleaved=interleaved)
                held = [t.to(DEVICE) for t in (q, k)]
                got = rotate(*held, table.to(DEVICE), interleaved=interleaved)
                rotate(*held, table.to(DEVICE), interleaved=interleaved, q_out=held[0], k_out=held[1])
                arithmetic = 6 * UNIT_ROUNDOFF[torch.float32] * 6.0 * 6.0  # no |x|, |cos| or |sin| above 6
                for mine, in_place, theirs in zip(got, held, wanted, strict=True):
                    assert same_bits(mine, in_place)
                    assert_within_bound(mine.cpu(), theirs, output_bound(theirs, dtype, arithmetic), str(mine.shape))
    cuda.check_errors()


@every_append
def test_more_tokens_than_32_bits_count_are_refused(operator, kernel):
    made = moved(append_call(operator, [1], [0]))
    for name in ("k", "v", "q", "q_out"):
        if name in made:
            made[name] = made[name][:, : 0 if name.startswith("q") else None].expand((1 << 31) + 2, -1, -1)
    with pytest.raises(NotImplementedError, match=r"2147483650.* at most 2147483583"):
        ops.with_kernel(operator, kernel)(**made)
