"""Wrong calls: one error that names operator, operand, axis, got and wanted, and no tensor touched."""

import pytest
import torch

from polyop import ops

X = torch.arange(12.0).reshape(3, 4)


def cache_arguments():
    return {
        "k_cache": torch.zeros(4, 2, 1, 8),
        "v_cache": torch.zeros(4, 2, 1, 8),
        "k": torch.ones(3, 1, 8),
        "v": torch.ones(3, 1, 8),
        "update_offsets": torch.tensor([0, 1, 3], dtype=torch.int32),
        "write_positions": torch.tensor([0, 1], dtype=torch.int32),
        "page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
    }


PAD_CASES = {
    "odd list": (
        lambda: ops.circular_pad(X, [1]),
        "circular_pad: attribute padding has 1 entries, wanted an even",
    ),
    "long list": (lambda: ops.circular_pad(X, [1] * 6), "at most 4 for x of rank 2"),
    "no list": (lambda: ops.circular_pad(X, "a"), "circular_pad: attribute padding has the wrong kind of value"),
    "no tensor": (lambda: ops.circular_pad("x", [1, 1]), "circular_pad: x is no tensor"),
    "dtype": (lambda: ops.circular_pad(X.double(), [1, 1]), "circular_pad: x has a dtype that polyop does not know"),
    "out extent": (lambda: ops.circular_pad(X, [1, 1], out=torch.empty(3, 5)), r"out axis 1 \(.*\) is 5, wanted 6"),
    "out dtype": (
        lambda: ops.circular_pad(X, [1, 1], out=torch.empty(3, 6, dtype=torch.int32)),
        "circular_pad: out is i32, wanted f32 as x",
    ),
    "out aliases x": (
        lambda: ops.circular_pad(X, [0, 0], out=X),
        "circular_pad: out is written and shares memory with x",
    ),
    "crop past the end": (lambda: ops.circular_pad(X, [-3, -2]), "out axis 1 would be -1, wanted at least 0"),
    "nothing to repeat": (
        lambda: ops.circular_pad(torch.zeros(0, 2), [0, 0, 1, 0]),
        "x axis 0 is 0, wanted at least 1",
    ),
    "rank": (lambda: ops.circular_pad(torch.zeros([1] * 9), [1, 1]), "x has rank 9, wanted at most 8"),
}


@pytest.mark.parametrize("name", PAD_CASES)
def test_circular_pad_refuses(name):
    call, text = PAD_CASES[name]
    before = X.clone()
    with pytest.raises(ValueError, match=text):
        call()
    assert torch.equal(X, before)


def without(name):
    return lambda a: a.pop(name)


def replaced(name, tensor):
    return lambda a: a.__setitem__(name, tensor)


CACHE_CASES = {
    "missing table": (without("page_table"), "page_table is missing; it is required when cache_form = paged"),
    "missing v": (without("v"), "v is missing beside v_cache"),
    "v alone": (replaced("v_cache", None), "v is given without v_cache"),
    "rank": (replaced("k", torch.ones(3, 8)), r"k has rank 2 \[3, 8\], wanted \[T, Hkv, D\] \(update_form = packed\)"),
    "heads": (replaced("k", torch.ones(3, 2, 8)), r"k axis 1 \(Hkv\) is 2, wanted 1 as in k_cache axis 2"),
    "dtype": (replaced("v", torch.ones(3, 1, 8, dtype=torch.float16)), "v is f16, wanted f32 as k"),
    "offsets": (replaced("update_offsets", torch.tensor([0, 2, 1], dtype=torch.int32)), "offsets must not decrease"),
    "offsets past T": (replaced("update_offsets", torch.tensor([0, 1, 4], dtype=torch.int32)), "wanted 0 to 3"),
    "offsets dtype": (replaced("update_offsets", torch.tensor([0, 1, 3])), "update_offsets is i64, wanted i32"),
    "page id": (replaced("page_table", torch.tensor([[0, 1], [2, 4]], dtype=torch.int32)), r"page_table\[1, 1\] is 4"),
    "negative page": (
        replaced("page_table", torch.tensor([[-1, 1], [2, 3]], dtype=torch.int32)),
        r"is -1, wanted 0 to 3",
    ),
    "past capacity": (replaced("write_positions", torch.tensor([0, 3], dtype=torch.int32)), "kv_cache_update: "),
    "stride": (replaced("k", torch.ones(3, 1, 16)[..., ::2]), "k axis 2 has stride 2, wanted 1"),
    "choice": (replaced("cache_form", "ring"), 'attribute cache_form is "ring", wanted paged or linear'),
    "overlapping cache": (
        replaced("k_cache", torch.zeros(1, 2, 1, 8).expand(4, 2, 1, 8)),
        "k_cache is written and overlaps itself",
    ),
}


@pytest.mark.parametrize("name", CACHE_CASES)
def test_kv_cache_update_refuses(name):
    spoil, text = CACHE_CASES[name]
    arguments = cache_arguments()
    spoil(arguments)
    with pytest.raises(ValueError, match=text):
        ops.kv_cache_update(**{"v_cache": None, **arguments})
    for cache in (arguments["k_cache"], arguments.get("v_cache")):
        assert cache is None or not bool(cache.any()), "a refused call must not write"


def test_the_unspoiled_call_is_accepted():
    arguments = cache_arguments()
    ops.kv_cache_update(**arguments)
    assert arguments["k_cache"].sum() == 3 * 8


def test_overlapping_caches_are_refused():
    arguments = cache_arguments()
    arguments["v_cache"] = arguments["k_cache"]
    with pytest.raises(ValueError, match="shares memory with"):
        ops.kv_cache_update(**arguments)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="there is no kernel nothing"):
        ops.with_kernel("circular_pad", "nothing")(X, [1, 1])
    with pytest.raises(ValueError, match="there is no operator nothing"):
        ops.with_kernel("nothing", "reference")


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_thread_count_is_checked(count):
    with pytest.raises(ValueError, match="wanted 1 to 4096"):
        ops.set_num_threads(count)
