"""The CUDA build in a process that sees no GPU: each complaint is one clear line, and CPU kernels work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = '''
import ctypes
import torch, tvm_ffi
from polyop import cuda, ops

class ClaimsToBeOnCuda:
    """A CPU tensor whose DLPack capsule names device cuda:0: torch makes no such tensor without a GPU."""
    def __init__(self, tensor):
        self.tensor = tensor
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **_):
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + 8).value = 2  # DLTensor: data, then device type
        return capsule

assert torch.equal(ops.circular_pad(torch.arange(3.0), [1, 1]), torch.tensor([2.0, 0.0, 1.0, 2.0, 0.0]))
x, out = (tvm_ffi.from_dlpack(ClaimsToBeOnCuda(torch.zeros(n))) for n in (3, 5))
try:
    tvm_ffi.get_global_func("polyop.call.circular_pad")(x, out, [1, 1])
except NotImplementedError as error:
    print(error)
try:
    cuda.check_errors()
except RuntimeError as error:
    print(error)
'''


@pytest.mark.without_gpu
def test_a_missing_gpu_is_one_line():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    call, check = done.stdout.splitlines()
    assert call.startswith("cuda:0: "), call
    assert check.startswith("check_errors: "), check
