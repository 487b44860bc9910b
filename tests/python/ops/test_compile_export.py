"""torch.compile(fullgraph=True) and torch.export of modules that call the operators, with dynamic batch and length."""

import pytest
import torch

from polyop import ops

P, R, HQ, HKV, D = 8, 4, 4, 2, 16
CALLS = torch.ops.polyop


class PagedLayer(torch.nn.Module):
    """One layer's worth of a decode step: rotate, append, attend, project."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        q = torch.randint(0, 16, (HQ * D, HQ * D), dtype=torch.uint8, generator=generator)
        self.register_buffer("qweight", ops.pack_int4_fragments(q))
        self.register_buffer("scales", torch.rand(2, HQ * D, generator=generator).half())
        self.register_buffer("cos_sin", torch.rand(64, D, generator=generator))

    def rotate_and_append(self, q, k, v, k_pages, v_pages, offsets, positions, table, ids):
        q, k = CALLS.rotary_embedding(q, k, self.cos_sin, ids)
        CALLS.kv_cache_update(
            k_pages, v_pages, k, v, update_offsets=offsets, write_positions=positions, page_table=table
        )
        return q

    def forward(self, q, k, v, k_pages, v_pages, offsets, positions, lengths, table, ids):
        q = self.rotate_and_append(q, k, v, k_pages, v_pages, offsets, positions, table, ids)
        out, _ = CALLS.attention(q, k_pages, v_pages, query_offsets=offsets, kv_lengths=lengths, page_table=table)
        return CALLS.int4_groupwise_gemm(out.flatten(1), self.qweight, self.scales, 32)


class JoinedLayer(PagedLayer):
    """The same step with rotation and append in one call."""

    def rotate_and_append(self, q, k, v, k_pages, v_pages, offsets, positions, table, ids):
        return CALLS.qk_norm_rope_append(
            q, k, v, k_pages, v_pages, self.cos_sin, offsets, positions, table, position_ids=ids
        )


LAYERS = [PagedLayer, JoinedLayer]


def arguments(lengths):
    """Inputs of a step with `lengths` new tokens a sequence, nothing cached before."""
    generator = torch.Generator().manual_seed(len(lengths))
    i32 = {"dtype": torch.int32}
    lengths = torch.tensor(lengths, **i32)
    tokens = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, **i32), lengths.cumsum(0)]).to(torch.int32)
    q, k, v = (torch.randn(tokens, heads, D, generator=generator) for heads in (HQ, HKV, HKV))
    ids = torch.cat([torch.arange(n, **i32) for n in lengths])
    table = torch.arange(P, **i32).reshape(-1, 2)[: len(lengths)].contiguous()
    pages = torch.zeros(P, R, HKV, D), torch.zeros(P, R, HKV, D)
    return (q, k, v, *pages, offsets, torch.zeros(len(lengths), **i32), lengths, table, ids)


def assert_same(function, lengths):
    expected_arguments, got_arguments = arguments(lengths), arguments(lengths)
    expected = PagedLayer()(*expected_arguments)
    got = function(*got_arguments)
    assert torch.equal(expected, got)
    for mine, theirs in zip(expected_arguments, got_arguments, strict=True):
        assert torch.equal(mine, theirs), "the caches must be written alike"


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_compiles_whole_with_dynamic_batch_and_length(layer):
    function = torch.compile(layer(), backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([3, 2], [5, 1, 4], [1, 1, 1, 1]):
        assert_same(function, lengths)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_exports_with_dynamic_batch_and_length(layer):
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=1, max=4096)
    per_token, per_sequence = {0: tokens}, {0: batch}
    shapes = (
        per_token,
        per_token,
        per_token,
        {},
        {},
        {0: batch + 1},
        per_sequence,
        per_sequence,
        per_sequence,
        per_token,
    )
    program = torch.export.export(layer(), arguments([3, 2, 4]), dynamic_shapes=shapes)
    for lengths in ([2, 2, 2], [5, 1], [1, 7, 2, 3]):
        assert_same(program.module(), lengths)


def test_circular_pad_keeps_symbols_in_its_shape():
    class Pad(torch.nn.Module):
        def forward(self, x):
            return CALLS.circular_pad(x, [1, 1, 2, 0])

    rows, columns = torch.export.Dim("rows", min=1, max=1000), torch.export.Dim("columns", min=1, max=1000)
    program = torch.export.export(Pad(), (torch.rand(2, 5, 7),), dynamic_shapes=({1: rows, 2: columns},))
    for shape in ((2, 3, 4), (2, 11, 1)):
        x = torch.rand(shape)
        assert torch.equal(program.module()(x), ops.circular_pad(x, [1, 1, 2, 0]))
