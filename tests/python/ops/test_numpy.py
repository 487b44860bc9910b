"""CPU arrays of NumPy through DLPack, without a torch tensor in sight."""

import numpy
import pytest
import torch

from polyop import ops


def test_outputs_beside_arrays_are_arrays():
    x = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    out = ops.circular_pad(x, [1, 0])
    assert isinstance(out, numpy.ndarray) and out.dtype == numpy.float32
    assert numpy.array_equal(out, numpy.pad(x, ((0, 0), (1, 0)), mode="wrap"))


def test_in_place_operands_may_be_arrays():
    cache = numpy.zeros((1, 2, 4, 8), dtype=numpy.float32)
    update = numpy.ones((1, 2, 2, 8), dtype=numpy.float32)
    ops.kv_cache_update(cache, None, update, cache_form="linear", update_form="padded")
    assert cache[0, :, :2].min() == 1 and cache[0, :, 2:].max() == 0


def test_attention_of_arrays_equals_that_of_tensors():
    generator = numpy.random.default_rng(0)
    q, k, v = (generator.standard_normal((5, heads, 16)).astype(numpy.float32) for heads in (4, 2, 2))
    offsets = numpy.array([0, 2, 5], dtype=numpy.int32)
    arguments = {"query_offsets": offsets, "kv_offsets": offsets, "kv_form": "packed"}
    got = ops.attention(q, k, v, **arguments)
    tensors = {name: torch.from_numpy(value) if name != "kv_form" else value for name, value in arguments.items()}
    expected = ops.attention(*map(torch.from_numpy, (q, k, v)), **tensors)
    assert numpy.array_equal(got, expected.numpy())


def test_arrays_are_checked_as_tensors_are():
    with pytest.raises(ValueError, match="x has a dtype that polyop does not know"):
        ops.circular_pad(numpy.zeros((2, 2)), [1, 1])
