"""AttentionMetadata: totals when set, checks in prepare, fixed buffers."""

import pytest
import torch

from polyop.attention import KVCacheParams, get_attention_backend
from polyop.kv_cache import KVCacheManager


@pytest.fixture(params=["vanilla", "fused"])
def metadata_class(request):
    return get_attention_backend(request.param).Metadata


@pytest.fixture
def cache():
    return KVCacheManager(
        num_layers=1, num_kv_heads=1, head_dim=4, tokens_per_block=4, max_seq_len=40, max_batch_size=4
    )


def step(metadata, cache, requests, num_contexts=0):
    """requests: {request id: (cached, new)}."""
    metadata.seq_lens = [new for _, new in requests.values()]
    metadata.num_contexts = num_contexts
    metadata.request_ids = list(requests)
    metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[cached for cached, _ in requests.values()])
    for request_id, (cached, new) in requests.items():
        if request_id not in cache.request_ids:
            cache.add_sequence(request_id, 0)
        missing = cached + new - cache.get_num_tokens(request_id)
        if missing > 0:
            cache.append(request_id, missing)
    metadata.prepare()


def pointers(metadata):
    buffers = {name: t.data_ptr() for name, t in vars(metadata.step_buffers).items() if isinstance(t, torch.Tensor)}
    views = ("query_offsets", "write_positions", "kv_lengths", "logits_rows", "token_positions", "page_table")
    return buffers | {name: getattr(metadata, name).data_ptr() for name in (*views, "seq_lens_cuda")}


def test_totals_are_computed_when_fields_are_set(metadata_class):
    metadata = metadata_class(max_num_requests=4, max_num_tokens=16)
    assert (metadata.num_seqs, metadata.num_tokens, metadata.seq_lens) == (0, 0, None)
    metadata.seq_lens = torch.tensor([3, 2, 1, 1])
    assert (metadata.num_tokens, metadata.num_ctx_tokens, metadata.num_generations) == (7, 0, 4)
    metadata.num_contexts = 2
    assert (metadata.num_tokens, metadata.num_ctx_tokens, metadata.num_generations) == (7, 5, 2)
    assert metadata.context_lens.tolist() == [3, 2]
    assert metadata.seq_lens.dtype == torch.int32 and metadata.seq_lens.device.type == "cpu"
    assert metadata.seq_lens_cuda.tolist() == [3, 2, 1, 1]


def test_setters_refuse_batches_past_the_limits(metadata_class):
    metadata = metadata_class(max_num_requests=2, max_num_tokens=4)
    for lens, text in (
        ([1, 1, 1], "3 sequences; max_num_requests is 2"),
        ([3, 2], "sums to 5 tokens; max_num_tokens is 4"),
        ([-1, 1], r"seq_lens\[0\] is -1"),
    ):
        with pytest.raises(ValueError, match=text):
            metadata.seq_lens = lens
    with pytest.raises(ValueError, match="num_contexts is -1"):
        metadata.num_contexts = -1
    with pytest.raises(ValueError, match="max_num_tokens is 0"):
        metadata_class(max_num_requests=1, max_num_tokens=0)


def test_prepare_describes_the_step(metadata_class, cache):
    metadata = metadata_class(max_num_requests=4, max_num_tokens=16, kv_cache_manager=cache)
    step(metadata, cache, {5: (0, 3), 6: (9, 0), 7: (30, 2)}, num_contexts=1)
    assert metadata.query_offsets.tolist() == [0, 3, 3, 5]
    assert metadata.write_positions.tolist() == [0, 9, 30]
    assert metadata.kv_lengths.tolist() == metadata.kv_lens == [3, 9, 32]
    assert metadata.logits_rows.tolist() == [2, -1, 4]
    assert metadata.token_positions.tolist() == [0, 1, 2, 30, 31]
    assert (metadata.max_kv_len, metadata.max_position) == (32, 31)
    assert metadata.page_table[0].tolist() == [0] + [-1] * 9


def test_position_ids_of_the_runtime_win(metadata_class, cache):
    metadata = metadata_class(max_num_requests=4, max_num_tokens=16, kv_cache_manager=cache)
    metadata.position_ids = torch.tensor([[8, 9]])
    step(metadata, cache, {1: (0, 2)})
    assert metadata.token_positions.tolist() == [8, 9]
    assert metadata.write_positions.tolist() == [0]
    assert metadata.max_position == 9
    metadata.position_ids = torch.tensor([1])
    with pytest.raises(ValueError, match="position_ids has 1 entries; the batch has 2 tokens"):
        metadata.prepare()
    metadata.position_ids = torch.tensor([-1, 0])
    with pytest.raises(ValueError, match="position_ids holds -1"):
        metadata.prepare()


def test_prepare_refuses_missing_and_wrong_fields(metadata_class, cache):
    cache.add_sequence(1, 5)
    metadata = metadata_class(max_num_requests=4, max_num_tokens=16, kv_cache_manager=cache)

    def refused(text):
        with pytest.raises(ValueError, match=text):
            metadata.prepare()
        assert not metadata.is_prepared

    refused("seq_lens is not set")
    metadata.seq_lens = [2]
    refused("request_ids has None")
    metadata.request_ids = [1]
    refused("kv_cache_params is None")
    metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[0, 0])
    refused("num_cached_tokens_per_seq has 2 entries; seq_lens has 1")
    metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[4])
    refused("request 1 has 4 cached and 2 new tokens; room is reserved for 5")
    metadata.kv_cache_params = KVCacheParams(num_cached_tokens_per_seq=[3])
    metadata.prompt_lens = [5, 5]
    refused("prompt_lens has 2 entries")
    metadata.prompt_lens = [5]
    metadata.num_contexts = 2
    refused("num_contexts is 2; seq_lens has 1 sequences")
    metadata.num_contexts = 1
    metadata.request_ids = [2]
    refused("request 2 is unknown")
    metadata.request_ids = [1]
    metadata.prepare()
    assert metadata.is_prepared


def test_setting_a_field_asks_for_a_new_prepare(metadata_class):
    metadata = metadata_class(max_num_requests=4, max_num_tokens=16, seq_lens=[2])
    metadata.prepare()
    metadata.seq_lens = [3]
    assert not metadata.is_prepared


def test_buffers_never_move(metadata_class, cache):
    metadata = metadata_class(max_num_requests=4, max_num_tokens=16, kv_cache_manager=cache)
    step(metadata, cache, {1: (0, 3), 2: (0, 5)}, num_contexts=2)
    before = pointers(metadata)
    for requests in ({1: (3, 1), 2: (5, 1), 3: (0, 14)}, {3: (14, 1)}, {1: (4, 0), 2: (6, 2)}):
        step(metadata, cache, requests)
        assert pointers(metadata) == before


def test_graph_metadata_is_preallocated_and_never_moves(metadata_class, cache):
    eager = metadata_class(max_num_requests=4, max_num_tokens=16, kv_cache_manager=cache)
    step(eager, cache, {1: (0, 3), 2: (0, 5)}, num_contexts=2)
    graph = eager.create_cuda_graph_metadata(2, max_draft_tokens=1)
    assert type(graph) is metadata_class
    assert graph.is_cuda_graph and not eager.is_cuda_graph
    assert graph.create_cuda_graph_metadata(7) is graph
    assert (graph.max_num_requests, graph.max_num_tokens) == (2, 4)
    assert graph.seq_lens.tolist() == [2, 2] and graph.num_contexts == 0 and graph.num_generations == 2
    assert eager.seq_lens.tolist() == [3, 5] and eager.num_contexts == 2
    with pytest.raises(ValueError, match="num_contexts is 1; a CUDA graph takes generation sequences only"):
        graph.num_contexts = 1

    step(graph, cache, {1: (3, 2), 2: (5, 2)})
    before = pointers(graph)
    assert not set(before.values()) & set(pointers(eager).values())
    table = graph.page_table.clone()
    step(graph, cache, {3: (0, 2), 1: (5, 2)})
    assert pointers(graph) == before
    assert not torch.equal(graph.page_table, table), "the same memory now describes other pages"


def test_graph_metadata_shares_buffers_when_asked(metadata_class, cache):
    eager = metadata_class(max_num_requests=4, max_num_tokens=16, kv_cache_manager=cache)
    large = eager.create_cuda_graph_metadata(4)
    small = eager.create_cuda_graph_metadata(2, buffers=large.step_buffers)
    assert small.step_buffers is large.step_buffers
    step(small, cache, {1: (0, 1), 2: (0, 1)})
    assert small.query_offsets.shape == (3,)
    with pytest.raises(ValueError, match="room for 4 sequences, 4 tokens"):
        eager.create_cuda_graph_metadata(5, buffers=large.step_buffers)
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        eager.create_cuda_graph_metadata(0)
