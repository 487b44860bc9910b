"""Small models of one node, and their execution by the reference evaluator with polyop's operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

import polyop.onnx


def model_of(
    op_type: str,
    inputs: list[np.ndarray | None],
    *,
    domain: str = "",
    opset: int = 23,
    outputs: int = 1,
    constants: tuple[int, ...] = (),
    shapes: dict[int, list[Any]] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model with one node. `constants` are the inputs that become initializers, `shapes` replaces declared shapes."""
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(outputs)], domain=domain, **attributes)
    values, initializers = [], []
    for i, array in enumerate(inputs):
        if array is None:
            continue
        if i in constants:
            initializers.append(onnx.numpy_helper.from_array(np.asarray(array), names[i]))
            continue
        element_type = helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
        shape = (shapes or {}).get(i, list(np.shape(array)))
        values.append(helper.make_tensor_value_info(names[i], element_type, shape))
    results = [onnx.ValueInfoProto(name=f"y{i}") for i in range(outputs)]
    graph = helper.make_graph([node], "g", values, results, initializers)
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=imports)


def run(op_type: str, inputs: list[np.ndarray | None], **options: Any) -> np.ndarray:
    """Y of one node."""
    model = model_of(op_type, inputs, **options)
    feeds = {value.name: inputs[int(value.name[1:])] for value in model.graph.input}
    return ReferenceEvaluator(model, new_ops=polyop.onnx.OPERATORS).run(None, feeds)[0]
