"""ONNX's own node tests, as the ``onnx`` package ships them, through polyop's operators."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from onnx import helper
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

import polyop.onnx

OP_TYPES = ("Attention", "RotaryEmbedding", "TensorScatter")


def refusal(node) -> str | None:
    """What no operator expresses; the node is refused by that name."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if attributes.get("softcap", 0.0):
        return "attribute softcap"
    for side in ("left_window_size", "right_window_size"):
        if attributes.get(side, -1) != -1:
            return f"attribute {side}"
    if len(node.output) > 3 and node.output[3]:
        return "output qk_matmul_output"
    if attributes.get("mode") == b"circular":
        return "attribute mode is circular"
    return None


def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collected = [case for op in OP_TYPES for case in collect_testcases(op)]
    names: set[str] = set()
    for case in collected:
        known = case.name in names or case.model is None
        if not known and any(node.op_type in OP_TYPES for node in case.model.graph.node):
            names.add(case.name)
            yield case


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases()])
def test_node(case):
    evaluator = ReferenceEvaluator(case.model, new_ops=polyop.onnx.OPERATORS)
    names = [value.name for value in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        feeds = dict(zip(names, inputs, strict=False))
        expected = next((text for text in map(refusal, case.model.graph.node) if text), None)
        if expected is not None:
            with pytest.raises(NotImplementedError, match=expected):
                evaluator.run(None, feeds)
            continue
        for got, want in zip(evaluator.run(None, feeds), outputs, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            # Scores here are f32 whatever the type of the inputs; ONNX's reference rounds every step to that type.
            steps = {"float16": 4e-3, "bfloat16": 4e-2}.get(got.dtype.name, 1e-5)
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=max(case.rtol, steps), atol=max(case.atol, steps)
            )
