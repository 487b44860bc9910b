"""int4_groupwise_gemm: which kernel runs, as the environment of the process says."""

import os
import subprocess
import sys

import pytest
import torch

from polyop import ops

CALL = """
import torch
from polyop import ops
packed = ops.pack_int4_fragments(torch.randint(16, (40, 64), dtype=torch.uint8))
ops.int4_groupwise_gemm(torch.rand(3, 64), packed, torch.rand(2, 40, dtype=torch.float16), group_size=32)
"""


def test_polyop_amx_0_runs_the_simd_kernel():
    environment = {**os.environ, "POLYOP_AMX": "0", "POLYOP_LOG": "dispatch"}
    run = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    log = run.stdout + run.stderr
    assert "int4_groupwise_gemm runs cpu_simd" in log, log
    assert "or POLYOP_AMX is 0" in log, log


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_infinities_stay_in_their_rows(dtype):
    torch.manual_seed(0)
    packed = ops.pack_int4_fragments(torch.randint(16, (40, 64), dtype=torch.uint8))
    scales = torch.rand(2, 40, dtype=torch.float16)
    x = torch.randn(5, 64).to(dtype)
    clean = ops.int4_groupwise_gemm(x, packed, scales, group_size=32)
    x[1, 3] = float("inf")
    x[4, 63] = float("nan")
    dirty = ops.int4_groupwise_gemm(x, packed, scales, group_size=32)
    for row in (0, 2, 3):
        assert torch.equal(dirty[row], clean[row])
    assert not dirty[1].isfinite().any()
    assert dirty[4].isnan().all()
