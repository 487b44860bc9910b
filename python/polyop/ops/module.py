"""The compiled module: found, loaded once, and asked for its schemas.

Loading it registers ``polyop.call.<operator>``, ``polyop.check.<operator>``,
``polyop.schemas``, ``polyop.kernel_names``, ``polyop.num_threads`` and ``polyop.runtime.*`` with tvm-ffi.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tvm_ffi

_FILE_NAME = "libpolyop_ffi.so"


def _library_path() -> Path:
    """The module's file: ``POLYOP_LIBRARY`` when set, else the one beside this package (wheel and source tree)."""
    override = os.environ.get("POLYOP_LIBRARY")
    path = Path(override) if override else Path(__file__).resolve().parent.parent / "lib" / _FILE_NAME
    if not path.is_file():
        raise ImportError(f"polyop: the compiled module {path} is missing; build it with 'make build'")
    return path


tvm_ffi.register_error("NotImplementedError", NotImplementedError)  # a kind that tvm-ffi does not know by itself
_module = tvm_ffi.load_module(str(_library_path()))  # kept: unloading would take the functions away


def load_schemas() -> list[dict[str, Any]]:
    """Every operator's schema as the C++ side wrote it (OpSchema::to_json)."""
    return json.loads(tvm_ffi.get_global_func("polyop.schemas")())


def operator_function(name: str) -> tvm_ffi.Function:
    """The packed function of an operator: operands, then attributes, in schema order, None where absent."""
    return tvm_ffi.get_global_func(f"polyop.call.{name}")


def check_function(name: str) -> tvm_ffi.Function:
    """The packed check of an operator: inputs, then attributes; raises what a call would raise, runs nothing."""
    return tvm_ffi.get_global_func(f"polyop.check.{name}")


def check_node_function(name: str) -> tvm_ffi.Function:
    """The packed check of a node in a graph that has not run: device, inputs, attributes; gives the kernel's name.

    The device is "cpu" or "cuda". An input is None, a tensor whose values are known, or ``[dtype, shape]`` with -1 for
    an unknown extent and None for an unknown shape. Raises ValueError when the node breaks the schema,
    NotImplementedError when no kernel takes it.
    """
    return tvm_ffi.get_global_func(f"polyop.check_node.{name}")


def kernel_function(name: str, kernel: str) -> tvm_ffi.Function:
    """The packed function of one kernel: as operator_function, but a call that this kernel does not take is refused."""
    return tvm_ffi.get_global_func("polyop.kernel_function")(name, kernel)


def kernel_names(name: str) -> list[str]:
    """Names of an operator's kernels in the order they are tried, e.g. ``["cpu:row_pieces", "cpu:reference"]``.

    Raises ValueError for an unknown operator.
    """
    return [str(kernel) for kernel in tvm_ffi.get_global_func("polyop.kernel_names")(name)]


def num_threads() -> int:
    """Threads that CPU kernels use: POLYOP_NUM_THREADS, else the processors this process may run on."""
    return int(tvm_ffi.get_global_func("polyop.num_threads")())


def set_num_threads(count: int) -> None:
    """Sets the number of threads that CPU kernels use, from 1 to 4096. Results do not depend on it."""
    tvm_ffi.get_global_func("polyop.set_num_threads")(count)
