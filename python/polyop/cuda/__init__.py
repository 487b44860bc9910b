"""What kernels on a GPU had to skip.

Page ids, positions, offsets and lengths that lie in device memory are never read by the host. A kernel that meets one
outside its range skips the access and raises a sticky flag; ``check_errors()`` reports it by operand.

>>> polyop.cuda.check_errors()      # once per step or per request, outside stream captures
"""

from __future__ import annotations

import tvm_ffi

from polyop import ops as _ops  # loads the compiled module

__all__ = ["check_errors", "has_kernels"]


def check_errors() -> None:
    """Waits for the current device and raises when a kernel skipped an access since the last check.

    Raises ValueError that names every operand with an entry outside its range (``"attention: page_table ..."``); the
    flags are cleared. NotImplementedError when the library was built without CUDA kernels; RuntimeError when the device
    reports an error.
    """
    tvm_ffi.get_global_func("polyop.check_cuda_errors")()


def has_kernels() -> bool:
    """Whether the compiled module holds CUDA kernels (CMake preset ``cuda``)."""
    return any(kernel.startswith("cuda:") for name in _ops.SCHEMAS for kernel in _ops.kernel_names(name))
