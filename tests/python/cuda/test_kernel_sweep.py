"""Every CUDA kernel against the CPU's double reference, over calls drawn from the operator's schema."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from device_memory import ALL_KERNELS, kernels_of, run_on_device
from hypothesis import HealthCheck, given, reject, settings

from polyop import cuda, ops
from polyop.testing import assert_within_bound
from polyop.testing.sweep import Call, Hints, calls

_spec = importlib.util.spec_from_file_location("cpu_sweep", Path(__file__).parents[1] / "ops" / "test_sweep.py")
cpu_sweep = importlib.util.module_from_spec(_spec)  # its hints and bounds hold here too
_spec.loader.exec_module(cpu_sweep)

# The fastest attention kernels round their weights and take few head sizes: test_attention.py has their bound. The last
# one takes everything, in f32.
KERNELS = [(name, kernel) for name, kernel in ALL_KERNELS if "attention" not in name or kernel == kernels_of(name)[-1]]


@pytest.mark.parametrize(("name", "kernel"), KERNELS, ids=[f"{name}-{kernel}" for name, kernel in KERNELS])
def test_kernel_matches_reference(name, kernel):
    schema = ops.SCHEMAS[name]
    function, reference = ops.with_kernel(name, kernel), ops.with_kernel(name, "reference")
    outputs_of = ops.output_function(name)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(calls(schema, cpu_sweep.HINTS.get(name, Hints())))
    def check(call: Call) -> None:
        shapes = list(outputs_of(**call.arguments))
        try:
            expected = cpu_sweep.run(reference, schema, call, shapes)
        except (ValueError, NotImplementedError):
            reject()  # a rule between operands that no hint steers around
        try:
            got = run_on_device(function, call, shapes)
        except NotImplementedError:
            reject()  # what this kernel leaves to the next one
        for operand, guarded in got.items():
            wanted = expected[operand].tensor
            bound = cpu_sweep.BOUNDS.get(name, cpu_sweep.exact)(call, wanted)
            assert_within_bound(guarded.tensor, wanted, bound, f"{name}: {operand}")
            guarded.assert_surroundings_intact(operand)

    check()
    cuda.check_errors()
