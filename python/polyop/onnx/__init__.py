"""The operators in ONNX: schemas with shape inference, reference execution, and a check of files before they run.

``register(strict=False)``   OpSchemas of TRT_Attention, TRT_QuantizedAttention and TRT_KVCacheUpdate for ``onnx``
``OPERATORS``                classes for ``onnx.reference.ReferenceEvaluator(model, new_ops=OPERATORS)``
``check_model(path, ...)``   what ``polyop check`` reports, as objects

Needs the package ``onnx`` (extra ``[onnx]``); it is imported with the first of these names.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"register": "op_schemas", "OPERATORS": "reference", "check_model": "check"}

__all__ = ["OPERATORS", "check_model", "register"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
