"""Input that no caller should pass, for every operator: the right result, or a refusal that names the operand."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from small_calls import example
from test_sweep import BOUNDS, HINTS, exact, run

from polyop import ops
from polyop.ops.generate import TORCH_DTYPES, split_parameters
from polyop.testing import assert_within_bound
from polyop.testing.sweep import calls

REFUSALS = (ValueError, NotImplementedError)


def keywords(name: str) -> dict[str, Any]:
    """The small call of an operator, by keyword."""
    args, kwargs = example(name)
    leading, trailing, _ = split_parameters(ops.SCHEMAS[name])
    parameters = [parameter.name for parameter in [*leading, *trailing]]
    return dict(zip(parameters, args, strict=False)) | kwargs


def with_outputs(name: str) -> dict[str, Any]:
    """The small call with outputs of the caller's."""
    arguments = keywords(name)
    shapes = ops.output_function(name)(**arguments)
    outputs = zip(ops.SCHEMAS[name].outputs, shapes, strict=True)
    return arguments | {output.name: torch.empty(shape[0], dtype=shape[1]) for output, shape in outputs if shape}


def written(name: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Calls the operator on copies of what it changes in place; everything that it wrote, by operand."""
    schema = ops.SCHEMAS[name]
    changed = [o.name for o in schema.inputs if o.role == "in_out" and isinstance(arguments.get(o.name), torch.Tensor)]
    for operand in changed:
        copy = torch.empty_strided(
            arguments[operand].shape, arguments[operand].stride(), dtype=arguments[operand].dtype
        )
        arguments = arguments | {operand: copy.copy_(arguments[operand])}
    results = getattr(ops, name)(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    outputs = {o.name: r for o, r in zip(schema.outputs, results, strict=False) if r is not None}
    return {operand: arguments[operand] for operand in changed} | outputs


def same(got: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    tensors = {name: torch.from_numpy(t) if isinstance(t, np.ndarray) else t for name, t in got.items()}
    bits = lambda t: t.contiguous().reshape(-1).view(torch.uint8)  # noqa: E731
    return tensors.keys() == wanted.keys() and all(torch.equal(bits(t), bits(wanted[n])) for n, t in tensors.items())


def right_or_refused(name: str, operand: str, arguments: dict[str, Any], wanted: Any = None) -> None:
    """The call equals `wanted`, or its refusal names the operator and the operand."""
    try:
        got = written(name, arguments)
    except REFUSALS as error:
        assert str(error).startswith(f"{name}: ") and re.search(rf"\b{operand}\b", str(error)), str(error)
        return
    assert wanted is None or same(got, wanted), f"{name}: another result with another {operand}"


def refused(name: str, operand: str, text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(REFUSALS, match=text) as error:
        getattr(ops, name)(**arguments)
    assert str(error.value).startswith(f"{name}: ") and re.search(rf"\b{operand}\b", str(error.value)), str(error.value)


OPERANDS = [(name, o.name) for name, schema in ops.SCHEMAS.items() for o in schema.operands]
INPUTS = [(name, o.name) for name, schema in ops.SCHEMAS.items() for o in schema.inputs if o.role == "input"]
WRITTEN = [(name, o.name) for name, schema in ops.SCHEMAS.items() for o in schema.operands if o.role != "input"]


def tensor_of(arguments: dict[str, Any], operand: str) -> torch.Tensor:
    tensor = arguments.get(operand)
    if tensor is None:
        pytest.skip("the small call has no such operand")
    return tensor


# ---- strides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_last_axis_that_is_not_dense(name, operand):
    arguments = with_outputs(name)
    tensor = tensor_of(arguments, operand)
    if tensor.dim() == 0:
        pytest.skip("it has no axis")
    wanted = written(name, arguments)
    wanted = {n: t.clone() for n, t in wanted.items()}
    wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    right_or_refused(name, operand, arguments | {operand: wide.copy_(tensor)}, wanted)


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_negative_strides_of_numpy(name, operand):
    arguments = with_outputs(name)
    tensor = tensor_of(arguments, operand)
    arrays = {n: t.numpy() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    for axis in range(tensor.dim()):
        if tensor.shape[axis] > 1:
            backwards = np.flip(np.flip(tensor.numpy(), axis).copy(), axis)
            refused(name, operand, "has stride -|is not contiguous", arrays | {operand: backwards})


@pytest.mark.parametrize(("name", "operand"), INPUTS)
def test_repeated_inputs_of_stride_zero(name, operand):
    arguments = keywords(name)
    tensor = tensor_of(arguments, operand)
    for axis in range(tensor.dim()):
        repeated = tensor.narrow(axis, 0, 1).expand(tensor.shape)
        wanted = None
        try:
            wanted = written(name, arguments | {operand: repeated.contiguous()})
        except REFUSALS:
            continue  # values that do not fit each other
        right_or_refused(name, operand, arguments | {operand: repeated}, wanted)


@pytest.mark.parametrize(("name", "operand"), WRITTEN)
def test_outputs_that_overlap_themselves(name, operand):
    arguments = with_outputs(name)
    tensor = tensor_of(arguments, operand)
    for axis in range(tensor.dim()):
        if tensor.shape[axis] < 2:
            continue
        one = tensor.narrow(axis, 0, 1).contiguous()
        refused(
            name,
            operand,
            "overlaps itself|has stride 0, wanted 1|contiguous",
            arguments | {operand: one.expand(tensor.shape)},
        )
    if tensor.dim() > 1 and tensor.shape[0] > 1:
        strides = (tensor.stride(0) - 1, *tensor.stride()[1:])
        refused(
            name, operand, "overlaps itself|contiguous", arguments | {operand: tensor.as_strided(tensor.shape, strides)}
        )


@pytest.mark.parametrize(("name", "operand"), WRITTEN)
def test_outputs_that_share_memory_with_another_operand(name, operand):
    arguments = with_outputs(name)
    out = tensor_of(arguments, operand)
    schema = ops.SCHEMAS[name]
    alias = next(o.alias_of for o in schema.operands if o.name == operand)
    for other in schema.operands:
        tensor = arguments.get(other.name)
        if other.name == operand or tensor is None or tensor.numel() == 0 or out.numel() == 0:
            continue
        out_bytes, bytes_ = out.numel() * out.element_size(), tensor.numel() * tensor.element_size()
        step = max(out.element_size(), tensor.element_size())
        begin = -(-bytes_ // 16) * 16
        last = (out_bytes - 1) // step * step
        for shift in {
            0,
            step,
            last,
            -((bytes_ - 1) // step) * step,
        }:  # where the other one begins, seen from the output
            memory = torch.zeros(begin + out_bytes + bytes_ + 64, dtype=torch.uint8)
            mine = memory[begin : begin + out_bytes].view(out.dtype).view(out.shape)
            theirs = memory[begin + shift : begin + shift + bytes_].view(tensor.dtype).view(tensor.shape)
            theirs.copy_(tensor)
            if operand in keywords(name):
                mine.copy_(out)
            if other.name == alias and shift == 0 and out.shape == tensor.shape:
                wanted = {n: t.clone() for n, t in written(name, arguments).items()}
                assert same(written(name, arguments | {operand: mine, other.name: theirs}), wanted)
                continue
            with pytest.raises(REFUSALS) as error:
                getattr(ops, name)(**arguments | {operand: mine, other.name: theirs})
            text = str(error.value)
            assert text.startswith(f"{name}: "), text
            assert operand in text or other.name in text, text


# ---- extents of zero -------------------------------------------------------------------------------------------------


SYMBOLS = [(name, symbol) for name, hints in HINTS.items() for symbol in hints.extents]


@pytest.mark.parametrize(("name", "symbol"), SYMBOLS)
def test_zero_of_every_symbol(name, symbol):
    """Equal to the reference, or refused by the operator's name."""
    hints = dataclasses.replace(HINTS[name], extents=HINTS[name].extents | {symbol: (0, 0)})
    schema, function, reference = ops.SCHEMAS[name], getattr(ops, name), ops.with_kernel(name, "reference")

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(calls(schema, hints))
    def check(call):
        wanted = None
        try:
            wanted = run(reference, schema, call, list(ops.output_function(name)(**call.arguments)))
            got = run(function, schema, call, list(ops.output_function(name)(**call.arguments)))
        except REFUSALS as error:
            assert wanted is None and str(error).startswith(f"{name}: "), str(error)
            return
        for operand, guarded in got.items():
            guarded.assert_surroundings_intact(operand)
            bound = BOUNDS.get(name, exact)(call, wanted[operand].tensor)
            assert_within_bound(guarded.tensor, wanted[operand].tensor, bound, operand)

    check()


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_zero_on_one_axis_of_one_operand(name, operand):
    arguments = keywords(name)
    tensor = arguments.get(operand)
    for axis in range(0 if tensor is None else tensor.dim()):
        empty = tensor.narrow(axis, 0, 0)
        try:
            getattr(ops, name)(**arguments | {operand: empty})
        except REFUSALS as error:
            assert str(error).startswith(f"{name}: "), str(error)


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_wrong_dtypes(name, operand):
    arguments = with_outputs(name)
    tensor = tensor_of(arguments, operand)
    for dtype in (*TORCH_DTYPES.values(), torch.float64, torch.int16, torch.complex64, torch.float8_e5m2):
        if dtype != tensor.dtype:
            other = arguments | {operand: torch.zeros(tensor.shape, dtype=dtype)}
            try:
                getattr(ops, name)(**other)
            except REFUSALS as error:
                assert str(error).startswith(f"{name}: "), str(error)


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
@pytest.mark.parametrize("change", ["one more", "one less", "none", "nine"])
def test_wrong_ranks(name, operand, change):
    is_input = any(o.name == operand for o in ops.SCHEMAS[name].inputs)
    arguments = keywords(name) if is_input else with_outputs(name)
    tensor = tensor_of(arguments, operand)
    shapes = {"one more": (1, *tensor.shape), "one less": tuple(tensor.shape[1:]), "none": (), "nine": (1,) * 9}
    if shapes[change] == tuple(tensor.shape):
        pytest.skip("it has that rank")
    other = torch.zeros(shapes[change], dtype=tensor.dtype)
    right_or_refused(name, operand, arguments | {operand: other})


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_what_is_no_tensor(name, operand):
    arguments = with_outputs(name)
    for value in (3, 0.5, "tensor", [1, 2], object(), (), {}, np.float32(1), torch.float32, b"bytes"):
        with pytest.raises((*REFUSALS, TypeError)) as error:
            getattr(ops, name)(**arguments | {operand: value})
        assert operand in str(error.value), f"{value!r}: {error.value}"


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_tensors_that_dlpack_cannot_carry(name, operand):
    arguments = with_outputs(name)
    tensor = tensor_of(arguments, operand)
    refused(name, operand, "is on meta, wanted cpu or cuda", arguments | {operand: tensor.to("meta")})
    if tensor.dim() > 0:
        sparse = torch.zeros(tensor.shape, dtype=tensor.dtype, layout=torch.sparse_coo)
        refused(name, operand, "has layout sparse_coo, wanted strided", arguments | {operand: sparse})
    fixed = np.zeros(tensor.shape, np.float32)
    fixed.flags.writeable = False
    refused(name, operand, "cannot be shared through DLPack: .*readonly", arguments | {operand: fixed})


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_memory_that_is_not_aligned_to_its_elements(name, operand):
    arguments = with_outputs(name)
    tensor = tensor_of(arguments, operand)
    if tensor.element_size() == 1 or tensor.dtype == torch.bfloat16:
        pytest.skip("any address will do, or NumPy does not know the dtype")
    array = np.ndarray(
        tuple(tensor.shape), tensor.numpy().dtype, bytearray(tensor.numel() * tensor.element_size() + 1), 1
    )
    array[...] = tensor.numpy()
    refused(name, operand, "lies 1 bytes past a multiple of its .-byte elements", arguments | {operand: array})


def test_a_view_with_the_negative_bit_is_resolved_by_torch_ops():
    x = torch._neg_view(torch.arange(6.0).reshape(2, 3))
    assert torch.equal(torch.ops.polyop.circular_pad(x, [1, 0])[:, 1:], x)


@pytest.mark.parametrize(("name", "operand"), INPUTS)
def test_missing_operands(name, operand):
    arguments = keywords(name)
    if arguments.get(operand) is not None:
        right_or_refused(name, operand, arguments | {operand: None})


# ---- attributes ------------------------------------------------------------------------------------------------------


ATTRIBUTES = [(name, a.name) for name, schema in ops.SCHEMAS.items() for a in schema.attributes]


@pytest.mark.parametrize(("name", "attribute"), ATTRIBUTES)
def test_attributes_out_of_their_mind(name, attribute):
    numbers: tuple[Any, ...] = (
        float("nan"),
        float("inf"),
        -float("inf"),
        1e300,
        0.5,
        -1,
        0,
        7,
        2**31,
        2**62,
        2**63 - 1,
        -(2**63),
    )
    lists = (
        [],
        [1],
        [2**62, 2**62],
        [-(2**63), 2**63 - 1],
        [-(2**62)] * 2,
        [2**63 - 1] * 4,
        [1] * 40,
        [0.5, 0.5],
        ["a"],
    )
    texts = ("", "none", "x" * 10000, "\0", "ä")
    for value in (*numbers, *lists, *texts, None, True, object(), torch.zeros(2), 2**63, -(2**200)):
        try:
            getattr(ops, name)(**keywords(name) | {attribute: value})
        except REFUSALS as error:
            assert str(error).startswith(f"{name}: "), f"{value!r}: {error}"
        except RuntimeError as error:  # the output would not fit into memory
            assert "allocate" in str(error), error


# ---- values ----------------------------------------------------------------------------------------------------------


VALUES = [(name, o.name) for name, schema in ops.SCHEMAS.items() for o in schema.inputs if o.values]


@pytest.mark.parametrize(("name", "operand"), VALUES)
def test_indices_lengths_and_offsets_out_of_range(name, operand):
    """Every entry with every absurd value: refused by name, or an entry that nothing reads."""
    arguments = keywords(name)
    tensor = tensor_of(arguments, operand)
    wanted = written(name, arguments)
    kinds = 0
    for entry in range(tensor.numel()):
        for value in (-1, -(2**31), 2**31 - 1, 1000):
            spoiled = tensor.clone()
            spoiled.view(-1)[entry] = value
            try:
                got = written(name, arguments | {operand: spoiled})
            except REFUSALS as error:
                kinds += 1
                assert str(error).startswith(f"{name}: "), str(error)
                assert operand in str(error) or "offsets" in str(error), str(error)
                continue
            # TensorRT leaves out the rows past the end, and so does its front.
            is_front = (name, operand) == ("trt_kv_cache_update", "write_indices")
            assert is_front or same(got, wanted), f"{operand}[{entry}] = {value} changed the result"
    assert kinds
