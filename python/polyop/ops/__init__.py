"""One function per operator, generated from the C++ schemas.

>>> import torch
>>> from polyop import ops
>>> ops.circular_pad(torch.arange(3.0), [1, 1])
tensor([2., 0., 1., 2., 0.])

Calls go straight to the compiled module (a few microseconds); ``torch.ops.polyop.<operator>`` is the same operator
behind torch's dispatcher, for torch.compile and torch.export. ``help(polyop.ops.attention)`` shows operands, shapes and
dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .generate import compile_operator
from .module import (
    check_function,
    kernel_function,
    kernel_names,
    load_schemas,
    num_threads,
    operator_function,
    set_num_threads,
)
from .schema import Schema, parse_schema
from .torch_library import register

#: Schemas by operator name.
SCHEMAS: dict[str, Schema] = {json["name"]: parse_schema(json) for json in load_schemas()}

_library = torch.library.Library("polyop", "DEF")
_output_functions: dict[str, Callable[..., Any]] = {}

for _schema in SCHEMAS.values():
    _function, _outputs = compile_operator(_schema, operator_function(_schema.name), check_function(_schema.name))
    globals()[_schema.name] = _function
    _output_functions[_schema.name] = _outputs
    register(_library, _schema, _function, _outputs)


def output_function(name: str) -> Callable[..., Any]:
    """The shape function of an operator: inputs and attributes to ``(shape, dtype)`` or None for each output.

    Works on symbolic sizes too; checks nothing. Raises KeyError for an unknown operator.
    """
    return _output_functions[name]


def with_kernel(name: str, kernel: str) -> Callable[..., Any]:
    """The function of an operator that runs only the kernel of that name (``"reference"``: the double oracle).

    Raises ValueError for an unknown operator or, when called, an unknown kernel; NotImplementedError when the kernel
    refuses a call.
    """
    if name not in SCHEMAS:
        raise ValueError(f"there is no operator {name}")
    return compile_operator(SCHEMAS[name], kernel_function(name, kernel), check_function(name))[0]


__all__ = ["SCHEMAS", "kernel_names", "num_threads", "output_function", "set_num_threads", "with_kernel"]
__all__.extend(SCHEMAS)
