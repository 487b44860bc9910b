"""Operators for onnx.reference.ReferenceEvaluator: any file with these nodes runs on the CPU.

>>> from onnx.reference import ReferenceEvaluator
>>> import polyop.onnx
>>> outputs = ReferenceEvaluator("model.onnx", new_ops=polyop.onnx.OPERATORS).run(None, feeds)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun

from .. import ops
from . import standard
from .names import OUTSIDE_NAMES, OutsideName
from .nodes import check_counts, read_attributes, torch_operands
from .op_schemas import make_op_schema
from .values import to_numpy


def _ignore(text: str) -> None:
    """Warnings belong to the check of a file, not to every run of it."""


def _outside_operator(name: OutsideName, domain: str) -> type[OpRun]:
    schema = ops.SCHEMAS[name.operator]
    function = getattr(ops, name.operator)

    class Operator(OpRun):
        op_domain = domain
        op_schema = make_op_schema(name, domain)

        def _run(self, *inputs: np.ndarray | None, **overridden: Any) -> tuple[np.ndarray, ...]:
            check_counts(self.onnx_node, name, schema, strict=False, warn=_ignore)
            attributes = read_attributes(self.onnx_node, schema, strict=False, warn=_ignore)
            linked = [given.name for given in self.onnx_node.attribute if given.ref_attr_name]
            attributes |= {key: overridden[key] for key in linked if key in overridden}
            arrays = [*inputs[: len(schema.inputs)], *[None] * (len(schema.inputs) - len(inputs))]
            results = function(**torch_operands(schema, arrays), **attributes)
            return tuple(to_numpy(r) for r in (results if isinstance(results, tuple) else (results,)))

    Operator.__name__ = Operator.__qualname__ = name.op_type
    Operator.__doc__ = schema.doc
    return Operator


def _standard_operator(op_type: str, run: Any) -> type[OpRun]:
    class Operator(OpRun):
        def _run(self, *inputs: np.ndarray | None, **attributes: Any) -> tuple[np.ndarray, ...]:
            given = {key: value for key, value in attributes.items() if value is not None}
            results = run(list(inputs), given, [bool(output) for output in self.onnx_node.output])
            return tuple(
                np.zeros(0, dtype=np.float32) if r is None else to_numpy(r) if isinstance(r, torch.Tensor) else r
                for r in results
            )

    Operator.__name__ = Operator.__qualname__ = op_type
    Operator.__doc__ = run.__doc__
    return Operator


#: For ``ReferenceEvaluator(..., new_ops=OPERATORS)``.
OPERATORS: list[type[OpRun]] = [_outside_operator(name, domain) for name in OUTSIDE_NAMES for domain in name.domains]
OPERATORS += [_standard_operator(op_type, run) for op_type, run in standard.RUNNERS.items()]
