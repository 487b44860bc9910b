"""kv_cache_update on a GPU: ragged appends around page borders, forms and dtypes, page order, graphs."""

from __future__ import annotations

import pytest
import torch
from device_memory import DeviceGuarded, captured, kernels_of, on_device, same_bits

from polyop import cuda, ops
from polyop.testing.inputs import NO_PAGE, offsets_of, poison
from polyop.testing.sweep import Guarded

KERNELS = kernels_of("kv_cache_update")
REFERENCE = ops.with_kernel("kv_cache_update", "reference")
CACHE_DTYPES = {"plain": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def arguments(page, tokens, starts, *, heads=2, width=64, dtype=torch.bfloat16, cache=None, form="paged",
              padded=False, full=False, seed=0):  # fmt: skip
    """On the CPU. Pages of nobody, rows behind the last offset and unused table entries hold poison."""
    g = torch.Generator().manual_seed(seed)
    batch, spare = len(tokens), 0 if full else 2
    ends = [start + n for start, n in zip(starts, tokens, strict=True)]
    made = {"write_positions": torch.tensor(starts, dtype=torch.int32)}
    if padded:
        shape = (batch, max(tokens))
        made["update_form"] = "padded"
    else:
        shape = (sum(tokens) + spare,)
        made["update_offsets"] = offsets_of(tokens)
    for name in ("k", "v"):
        made[name] = torch.randn(*shape, heads, width, generator=g).to(dtype)
        if not padded:
            made[name][sum(tokens) :] = float("nan")
    if form == "paged":
        columns = max(-(-end // page) for end in ends) + spare
        pages = torch.randperm(batch * columns + spare, generator=g)
        table = torch.full((batch, columns), NO_PAGE, dtype=torch.int32)
        for b, end in enumerate(ends):
            used = slice(starts[b] // page if tokens[b] else 0, -(-end // page) if tokens[b] else 0)
            table[b, used] = pages[b * columns : (b + 1) * columns][used].to(torch.int32)
        made["page_table"] = table
        cache_shape = (len(pages), page, heads, width)
    else:
        made["cache_form"] = "linear"
        cache_shape = (batch, heads, max(ends) + spare, width)
    for name in ("k_cache", "v_cache"):
        made[name] = poison(cache_shape, cache or dtype)
    if cache is not None:
        made |= {"k_scale": torch.rand(heads, generator=g) * 0.05 + 0.01, "v_scale": torch.tensor([0.03])}
    return made


def check(made):
    """Every kernel gives the reference's bytes and keeps all others, those around the caches too."""
    caches = ("k_cache", "v_cache")
    expected = made | {name: made[name].clone() for name in caches}
    REFERENCE(**expected)
    taken = 0
    for kernel in KERNELS:
        guarded = {name: Guarded.empty(tuple(made[name].shape), made[name].dtype) for name in caches}
        for name, cache in guarded.items():
            cache.tensor.copy_(made[name])
        on_gpu = {name: DeviceGuarded(cache) for name, cache in guarded.items()}
        moved = on_device({name: value for name, value in made.items() if name not in caches})
        try:
            ops.with_kernel("kv_cache_update", kernel)(**moved, **{name: c.tensor for name, c in on_gpu.items()})
        except NotImplementedError:
            continue
        cuda.check_errors()
        taken += 1
        for name, cache in on_gpu.items():
            cache.fetch().assert_surroundings_intact(name)
            assert same_bits(guarded[name].tensor, expected[name]), f"{kernel}: {name}"
    assert taken > 0


@pytest.mark.parametrize("cache", CACHE_DTYPES)
@pytest.mark.parametrize("page", [1, 2, 16, 64, 256, 3])
def test_ragged_appends_around_page_borders(page, cache):
    around = sorted({0, 1, page - 1, page, page + 1, 2 * page})
    for width in (64, 128, 40, 7):
        tokens = [n for n in around for _ in around]
        starts = [n for _ in around for n in around]
        check(arguments(page, tokens, starts, width=width, cache=CACHE_DTYPES[cache]))


@pytest.mark.parametrize("cache", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["paged", "linear"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_forms_and_dtypes_up_to_the_last_slot(form, padded, dtype, cache):
    tokens = [5, 5, 5] if padded else [5, 0, 1]
    common = {"dtype": dtype, "cache": CACHE_DTYPES[cache], "form": form, "padded": padded}
    check(arguments(16, tokens, [0, 15, 30], **common))
    check(arguments(4, [4, 4, 4], [4, 4, 4], full=True, **common))  # ends with the last slot of the last page


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cache", CACHE_DTYPES)
def test_a_graph_replays_with_other_tables_positions_and_offsets(kernel, cache):
    function = ops.with_kernel("kv_cache_update", kernel)
    calls = [
        arguments(8, tokens, starts, cache=CACHE_DTYPES[cache], seed=seed)
        for seed, (tokens, starts) in enumerate(
            [([9, 1, 2], [0, 7, 8]), ([1, 1, 10], [15, 3, 0]), ([0, 12, 0], [3, 0, 9])]
        )
    ]
    columns = max(made["page_table"].shape[1] for made in calls)
    fixed = on_device(calls[0])
    for name, value in (("page_table", NO_PAGE), ("k_cache", 0), ("v_cache", 0)):
        shape = (3, columns) if name == "page_table" else (3 * columns + 2, *calls[0][name].shape[1:])
        fixed[name] = torch.full(shape, value, device=fixed[name].device).to(fixed[name].dtype)
    rows = max(made["k"].shape[0] for made in calls)
    for name in ("k", "v"):
        fixed[name] = torch.zeros(rows, *calls[0][name].shape[1:], device=fixed[name].device, dtype=torch.bfloat16)

    def fill(made):
        for name in ("k_cache", "v_cache"):
            fixed[name].zero_()
        fixed["page_table"].fill_(NO_PAGE)
        fixed["page_table"][:, : made["page_table"].shape[1]].copy_(made["page_table"])
        for name in ("k", "v"):
            fixed[name][: made[name].shape[0]].copy_(made[name])
        for name in ("write_positions", "update_offsets", *(n for n in ("k_scale", "v_scale") if n in made)):
            fixed[name].copy_(made[name])

    fill(calls[0])
    replay = captured(lambda: function(**fixed))
    for made in calls + calls[::-1]:
        fill(made)
        replay()
        replayed = [fixed[name].clone() for name in ("k_cache", "v_cache")]
        fill(made)
        function(**fixed)
        for name, cache_after in zip(("k_cache", "v_cache"), replayed, strict=True):
            assert same_bits(cache_after, fixed[name]) and bool(cache_after.view(torch.uint8).any())
    cuda.check_errors()
