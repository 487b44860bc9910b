"""Attention of trees of drafts, chunks of a prompt and whole prompts: several row tiles, several chunks of keys."""

from __future__ import annotations

import pytest
import torch
from attention_cases import KERNELS, AttentionCase, check_every_kernel, outputs_of
from device_memory import DEVICE, on_device, same_bits

from polyop import ops


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_rows_and_keys(head_dim, dtype):
    check_every_kernel(AttentionCase([300, 0, 1, 127, 128, 129], [9] * 6, head_dim, dtype=dtype, num_kv_heads=1))
    check_every_kernel(AttentionCase([1100, 70], [40, 70], head_dim, dtype=dtype, num_kv_heads=1, seed=1))


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 48, 64, 256])
def test_page_sizes(page_size):
    lengths = sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, 63, 65, 513})
    check_every_kernel(AttentionCase(lengths, [20] * len(lengths), 64, page_size=page_size, num_kv_heads=1, group=2))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 17])
def test_ratios(group):
    check_every_kernel(AttentionCase([130, 700], [33, 40], 64, num_kv_heads=1, group=group))
    check_every_kernel(AttentionCase([270, 33], [70, 20], 64, num_kv_heads=3, group=group, seed=3))


@pytest.mark.parametrize("kv_form", ["paged", "packed", "padded"])
@pytest.mark.parametrize("causal", ["lower_right", "upper_left", "none"])
@pytest.mark.parametrize("window", [-1, 1, 150])
def test_prompts(kv_form, causal, window):
    case = AttentionCase([330, 90, 64], [330, 90, 0], 64, kv_form=kv_form, sinks=True, num_kv_heads=1, group=2)
    case.attributes = {"causal": causal, "window": window}
    check_every_kernel(case)


@pytest.mark.parametrize("rows", [7, 33, 64, 100])
def test_trees_over_a_long_prefix(rows):
    case = AttentionCase([rows + 1500, rows], [rows, rows], tree=True, num_kv_heads=1, group=3)
    case.attributes = {"causal": "none"}
    check_every_kernel(case)


def test_many_sequences():
    check_every_kernel(AttentionCase([(37 * i) % 150 for i in range(90)], [9] * 90, 64, num_kv_heads=1, group=2))


@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_of_split_sequences_do_not_depend_on_neighbours(kernel):
    """Chunks of a tile meet in one block or in several, by what else is in the batch."""
    case = AttentionCase([4000, 2500, 777, 1024], [64, 17, 40, 64], dtype=torch.bfloat16)
    arguments = on_device(case.make())
    function = ops.with_kernel("attention", kernel)

    def run(given):
        got = outputs_of(given, False, DEVICE)
        try:
            function(**given, **got)
        except NotImplementedError as error:
            pytest.skip(str(error))
        return got

    first = run(arguments)
    begin = 0
    for b, rows in enumerate(case.queries):
        alone = dict(arguments)
        alone["q"] = arguments["q"][begin : begin + rows]
        alone["query_offsets"] = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
        alone["page_table"] = arguments["page_table"][b : b + 1]
        alone["kv_lengths"] = arguments["kv_lengths"][b : b + 1]
        got = run(alone)
        assert all(same_bits(first[name][begin : begin + rows], got[name]) for name in got), f"sequence {b}"
        begin += rows
