"""What is timed is what is tested: every benchmark case, cut down, against the double reference on every kernel."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_cases import bounds
from device_memory import DEVICE, kernels_of, on_device
from gpu import OPERATORS
from shapes_file import cut_down, describe, read_shapes
from test_kernel_sweep import cpu_sweep

from polyop import cuda, ops
from polyop.testing import assert_within_bound

CASES = [(operator, case) for operator in OPERATORS for case in read_shapes(f"gpu_{operator}")]


@dataclass
class NamedArguments:
    """What a bound of the CPU's sweep reads of a call."""

    arguments: dict[str, Any]


def bound_of(operator: str, arguments: dict[str, Any], expected: torch.Tensor) -> Any:
    if operator == "attention":
        lse = torch.zeros(expected.shape[:-1])
        return bounds(arguments, expected, lse)[0]
    absent = dict.fromkeys(operand.name for operand in ops.SCHEMAS[operator].operands)
    return cpu_sweep.BOUNDS.get(operator, cpu_sweep.exact)(NamedArguments(absent | arguments), expected)


@pytest.mark.parametrize(("operator", "case"), CASES, ids=[f"{o} {describe(c)}" for o, c in CASES])
def test_case_matches_reference(operator, case):
    torch.manual_seed(0)
    call = importlib.import_module(f"gpu.{operator}").make(cut_down(case), "cpu")
    expected = dict(call.arguments)
    written = [o.name for o in ops.SCHEMAS[operator].operands if o.role != "input" and o.name in call.arguments]
    for name in written:
        expected[name] = call.arguments[name].clone()
    ops.with_kernel(operator, "reference")(**expected)
    taken = 0
    for kernel in (None, *kernels_of(operator)):
        moved = on_device(call.arguments)
        try:
            (getattr(ops, operator) if kernel is None else ops.with_kernel(operator, kernel))(**moved)
        except NotImplementedError:
            assert kernel is not None, "the benchmark times a call that no kernel takes"
            continue
        taken += 1
        for name in written:
            bound = bound_of(operator, call.arguments, expected[name])
            assert_within_bound(moved[name].cpu(), expected[name], bound, f"{kernel or 'chosen'}: {name}")
    assert taken > 1 and DEVICE in str(moved[written[0]].device)
    cuda.check_errors()
