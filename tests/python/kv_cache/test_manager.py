"""KVCacheManager and StepBuffers: pages, sizes, capacity errors."""

import pytest
import torch

from polyop.kv_cache import CacheFullError, KVCacheManager, StepBuffers


def make(**changes):
    arguments = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 8,
        "tokens_per_block": 4,
        "max_seq_len": 20,
        "max_batch_size": 2,
        "dtype": torch.float32,
    }
    return KVCacheManager(**(arguments | changes))


def snapshot(cache):
    return (cache.num_free_blocks, cache.request_ids, cache.get_batch_cache_indices(cache.request_ids))


def test_pool_size_default_holds_the_full_batch():
    cache = make()
    assert cache.num_pages == 2 * 5
    assert cache.max_blocks_per_seq == 5
    for pool in cache.get_buffers(1):
        assert pool.shape == (10, 4, 3, 8)
        assert pool.is_contiguous()


@pytest.mark.parametrize(("size", "num_pages"), [({"max_tokens": 13}, 4), ({"num_pages": 7}, 7)])
def test_pool_size_follows_the_argument(size, num_pages):
    assert make(**size).num_pages == num_pages


def test_get_buffers_returns_the_same_memory():
    cache = make()
    assert cache.get_buffers(0)[0].data_ptr() == cache.get_buffers(0)[0].data_ptr()
    assert cache.get_buffers(0)[0].data_ptr() != cache.get_buffers(0)[1].data_ptr()


def test_bytes_count_layers_heads_and_dtype():
    cache = make(num_kv_heads=[8, None], dtype=torch.bfloat16)
    assert cache.bytes_per_token == 2 * 8 * 8 * 2
    assert cache.total_bytes == sum(pool.nbytes for pool in cache.get_buffers(0))
    cache.add_sequence(1, 5)
    assert cache.used_bytes == 2 * cache.bytes_per_block
    with pytest.raises(ValueError, match="layer 1 has no cache"):
        cache.get_buffers(1)
    with pytest.raises(ValueError, match="layer_idx is 2"):
        cache.get_buffers(2)


def test_request_life_takes_and_returns_pages():
    cache = make()
    cache.add_sequence(5, 4)
    cache.append(5)
    assert cache.get_num_tokens(5) == 5
    assert cache.get_batch_cache_indices([5]) == [[0, 1]]
    cache.rewind(5, 1)
    assert cache.get_batch_cache_indices([5]) == [[0]]
    cache.prepare_resources([5, 9], [3, 2])
    cache.update_resources({5: 2, 9: 1})
    assert (cache.get_num_tokens(5), cache.get_num_tokens(9)) == (5, 1)
    cache.free_resources(5)
    assert cache.request_ids == [9]
    assert cache.num_used_blocks == 1
    with pytest.raises(ValueError, match="request 5 is unknown"):
        cache.free_resources(5)


def test_block_table_is_padded_with_zero_and_checks_its_shape():
    cache = make()
    cache.prepare_resources([1, 2], [9, 1])
    assert cache.get_block_ids_per_seq([2, 1]).tolist() == [[3, 0, 0, 0, 0], [0, 1, 2, 0, 0]]
    out = torch.full((3, 4), -7, dtype=torch.int32)
    assert cache.get_block_ids_per_seq([2], out) is out
    assert out.tolist() == [[3, 0, 0, 0], [-7] * 4, [-7] * 4]
    with pytest.raises(ValueError, match="2 columns; request 1 holds 3 pages"):
        cache.get_block_ids_per_seq([1], torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="i32 host tensor"):
        cache.get_block_ids_per_seq([1], torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 rows; got 2 request ids"):
        cache.get_block_ids_per_seq([1, 2], torch.zeros(1, 8, dtype=torch.int32))


def test_capacity_error_names_numbers_and_leaves_the_state():
    cache = make(num_pages=4)
    cache.add_sequence(1, 9)
    before = snapshot(cache)
    for call in (
        lambda: cache.add_sequence(2, 8),
        lambda: cache.append(1, 8),
        lambda: cache.prepare_resources([1, 2], [1, 5]),
    ):
        with pytest.raises(CacheFullError, match="needs 2 more page") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.request_id in (1, 2)
        assert (caught.value.wanted_pages, caught.value.free_pages) == (2, 1)
        assert snapshot(cache) == before
    cache.append(1, 7)
    assert cache.num_free_blocks == 0


def test_wrong_calls_are_refused_and_leave_the_state():
    cache = make()
    cache.add_sequence(1, 9)
    before = snapshot(cache)
    for call, text in (
        (lambda: cache.add_sequence(1, 1), "request 1 exists already"),
        (lambda: cache.append(2), "request 2 is unknown"),
        (lambda: cache.append(1, 12), "at most 20"),
        (lambda: cache.add_sequence(3, 21), "at most 20"),
        (lambda: cache.add_sequence(3, -1), "wanted at least 0"),
        (lambda: cache.prepare_resources([3, 3], [1, 1]), "appears twice"),
        (lambda: cache.prepare_resources([3], [1, 1]), "1 request ids and 2 token counts"),
        (lambda: cache.rewind(1, 10), "wanted 0 to 9"),
        (lambda: cache.get_batch_cache_indices([4]), "request 4 is unknown"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
        assert snapshot(cache) == before


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"tokens_per_block": 0}, ValueError, "tokens_per_block is 0"),
        ({"num_kv_heads": [1]}, ValueError, "num_kv_heads has 1 entries"),
        ({"num_kv_heads": [1, 0]}, ValueError, r"num_kv_heads\[1\] is 0"),
        ({"max_tokens": 8, "num_pages": 2}, ValueError, "both given"),
        ({"num_pages": -1}, ValueError, "num_pages is -1"),
        ({"dtype": torch.int8}, NotImplementedError, "dtype is torch.int8"),
    ],
)
def test_constructor_refuses(changes, error, text):
    with pytest.raises(error, match=text):
        make(**changes)


def test_step_buffers_describe_a_batch_in_place():
    cache = make()
    cache.prepare_resources([1, 2, 3], [6, 0, 3])
    buffers = StepBuffers(max_sequences=4, max_tokens=8, max_blocks_per_seq=cache.max_blocks_per_seq)
    pointers = [t.data_ptr() for t in vars(buffers).values() if isinstance(t, torch.Tensor)]
    buffers.fill(cache, [3, 2, 1], [3, 0, 1], [0, 0, 5])
    assert buffers.query_offsets[:4].tolist() == [0, 3, 3, 4]
    assert buffers.write_positions[:3].tolist() == [0, 0, 5]
    assert buffers.kv_lengths[:3].tolist() == [3, 0, 6]
    assert buffers.logits_rows[:3].tolist() == [2, -1, 3]
    assert buffers.position_ids[:4].tolist() == [0, 1, 2, 5]
    assert buffers.page_table[:3].tolist() == [[2, -1, -1, -1, -1], [-1] * 5, [0, 1, -1, -1, -1]]
    buffers.fill(cache, [1], [2], [4], position_ids=torch.tensor([[7, 8]]))
    assert buffers.position_ids[:2].tolist() == [7, 8]
    assert buffers.write_positions[:1].tolist() == [4]
    assert pointers == [t.data_ptr() for t in vars(buffers).values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1, 2], [1, 1], [5, 0]), "request 2 has 0 cached and 1 new tokens; room is reserved for 0"),
        (([1], [2], [5]), "request 1 has 5 cached and 2 new tokens; room is reserved for 6"),
        (([1, 1], [1, 1], [0, 0]), "request 1 appears twice"),
        (([8], [1], [0]), "request 8 is unknown"),
        (([1, 2, 3], [0, 0, 0], [0, 0, 0]), "query_offsets has 3 entries"),
        (([1], [5], [0]), "position_ids has 4 entries"),
        (([1], [1], [-1]), "past tokens"),
        (([1], [1, 0], [0, 0]), "1 request ids and 2 lengths"),
    ],
)
def test_step_buffers_refuse_and_stay_untouched(arguments, text):
    cache = make()
    cache.prepare_resources([1, 2, 3], [6, 0, 3])
    buffers = StepBuffers(max_sequences=2, max_tokens=4, max_blocks_per_seq=cache.max_blocks_per_seq)
    buffers.fill(cache, [3, 1], [1, 2], [2, 4])
    names = ("query_offsets", "write_positions", "kv_lengths", "logits_rows", "position_ids", "page_table")
    before = {name: getattr(buffers, name).clone() for name in names}
    with pytest.raises(ValueError, match=text):
        buffers.fill(cache, *arguments)
    for name in names:
        assert torch.equal(getattr(buffers, name), before[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_step_buffers_on_a_device_hold_the_same_numbers_at_fixed_addresses():
    cache = make()
    cache.prepare_resources([1, 2], [6, 3])
    sizes = {"max_sequences": 4, "max_tokens": 8, "max_blocks_per_seq": cache.max_blocks_per_seq}
    host, device = StepBuffers(**sizes), StepBuffers(**sizes, device="cuda")
    names = ("query_offsets", "write_positions", "kv_lengths", "logits_rows", "position_ids")
    pointers = [getattr(device, name).data_ptr() for name in (*names, "page_table")]
    for arguments in (([1, 2], [6, 1], [0, 2]), ([2], [2], [1])):
        for buffers in (host, device):
            buffers.fill(cache, *arguments)
        for name in names:
            assert torch.equal(getattr(host, name), getattr(device, name).cpu()), name
        rows = len(arguments[0])
        assert torch.equal(host.page_table[:rows], device.page_table[:rows].cpu())
    assert pointers == [getattr(device, name).data_ptr() for name in (*names, "page_table")]
