"""Errors of operands that never reach the compiled module, by the operand's name.

The border to C++ is DLPack. What it cannot carry (tensors without memory, sparse ones, read-only arrays) fails in
torch, NumPy or tvm-ffi with a text that knows neither operator nor operand.
"""

from __future__ import annotations

from typing import Any

import torch
import tvm_ffi

from .schema import Schema


def _complaint(value: Any) -> str | None:
    """Why the border cannot take `value`; None when it can."""
    if isinstance(value, torch.Tensor):
        if value.device.type not in ("cpu", "cuda"):
            return f"is on {value.device}, wanted cpu or cuda"
        if value.layout != torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            return f"has layout {kind}, wanted strided"
    try:
        tvm_ffi.from_dlpack(value)
    except Exception as error:
        return f"cannot be shared through DLPack: {str(error).splitlines()[0]}"
    return None


def named_error(schema: Schema, operands: list[Any], attributes: list[Any], error: Exception) -> Exception:
    """ValueError that names what a failed call got wrong; `error` itself where nothing of it can be named.

    Args:
        operands: the call's tensors in schema order, None where absent or not made yet.
        attributes: its attribute values in schema order.
        error: what torch, NumPy or tvm-ffi raised.
    """
    for operand, value in zip(schema.operands, operands, strict=True):
        complaint = None if value is None else _complaint(value)
        if complaint is not None:
            return ValueError(f"{schema.name}: {operand.name} {complaint}")
    if not isinstance(error, TypeError):
        return error
    # Sizes of outputs that torch does not understand.
    for attribute, value in zip(schema.attributes, attributes, strict=True):
        if value is None and attribute.default is not None:
            return ValueError(f"{schema.name}: attribute {attribute.name} is None; leave it out for its default")
    return ValueError(f"{schema.name}: the attributes give outputs of no possible shape: {str(error).splitlines()[0]}")
