"""The CUDA build on a machine, or in a process, that sees no GPU: one clear line, and CPU kernels work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from polyop import cuda, ops
assert torch.equal(ops.circular_pad(torch.arange(3.0), [1, 1]), torch.tensor([2.0, 0.0, 1.0, 2.0, 0.0]))
try:
    cuda.check_errors()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.without_gpu
def test_a_missing_gpu_is_one_line():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and "check_errors: " in lines[0] and "device" in lines[0], done.stdout
