"""One function per operator, generated from the C++ schemas.

>>> import torch
>>> from polyop import ops
>>> ops.circular_pad(torch.arange(3.0), [1, 1])
tensor([2., 0., 1., 2., 0.])

Calls go straight to the compiled module (a few microseconds); ``torch.ops.polyop.<operator>`` is the same operator behind
torch's dispatcher, for torch.compile and torch.export. ``help(polyop.ops.attention)`` shows operands, shapes and dtypes.
"""

from __future__ import annotations

import torch

from .generate import compile_operator
from .module import check_function, kernel_names, load_schemas, num_threads, operator_function, set_num_threads
from .schema import Schema, parse_schema
from .torch_library import register

#: Schemas by operator name.
SCHEMAS: dict[str, Schema] = {json["name"]: parse_schema(json) for json in load_schemas()}

_library = torch.library.Library("polyop", "DEF")

for _schema in SCHEMAS.values():
    _function, _outputs = compile_operator(
        _schema, operator_function(_schema.name), check_function(_schema.name)
    )
    globals()[_schema.name] = _function
    register(_library, _schema, _function, _outputs)

__all__ = [*SCHEMAS, "SCHEMAS", "kernel_names", "num_threads", "set_num_threads"]
