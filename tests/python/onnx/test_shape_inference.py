"""The OpSchemas that ``onnx`` gets: generated from the C++ schemas, with inference that keeps symbolic extents."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs
from onnx_nodes import model_of

import polyop.onnx
from polyop import ops
from polyop.onnx.names import OUTSIDE_NAMES


def inferred(model: onnx.ModelProto) -> tuple[int, list[int | str]]:
    result = onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type
    return result.elem_type, [dim.dim_param or dim.dim_value for dim in result.shape.dim]


@pytest.fixture(autouse=True)
def compatible_schemas():
    polyop.onnx.register()
    yield
    polyop.onnx.register()


def test_schemas_say_what_the_operators_say():
    for name in OUTSIDE_NAMES:
        for domain in name.domains:
            op_schema, schema = defs.get_schema(name.op_type, domain), ops.SCHEMAS[name.operator]
            assert [value.name for value in op_schema.inputs] == [operand.name for operand in schema.inputs]
            assert [value.name for value in op_schema.outputs] == [operand.name for operand in schema.outputs]
            assert set(op_schema.attributes) == {attribute.name for attribute in schema.attributes}
            assert op_schema.has_type_and_shape_inference_function
    quantized = defs.get_schema("TRT_QuantizedAttention").attributes["normalization_quantize_to_type"]
    assert quantized.default_value.i == 17
    assert defs.get_schema("TRT_KVCacheUpdate").attributes["axis"].default_value.i == -2


def test_symbolic_extents_keep_their_names():
    x = np.zeros((1, 1, 1, 1), np.float16)
    shapes = {0: ["batch", 9, "new", 64], 1: ["batch", 3, "total", 64], 2: ["batch", 3, "total", 64]}
    model = model_of("TRT_Attention", [x, x, x], shapes=shapes)
    assert inferred(model) == (TensorProto.FLOAT16, ["batch", 9, "new", 64])
    shapes[0], packed = ["tokens", 9, 64], np.zeros((1, 1, 1), np.float32)
    model = model_of(
        "TRT_Attention",
        [packed, x.astype(np.float32), x.astype(np.float32), None, np.zeros(2, np.int64)],
        shapes={**shapes, 4: ["offsets"]},
        query_form="packed_nhd",
    )
    assert inferred(model) == (TensorProto.FLOAT, ["tokens", 9, 64])
    model = model_of("TRT_KVCacheUpdate", [x, x], shapes={0: ["b", 3, 128, 64], 1: ["u", 3, "s", 64]}, domain="trt")
    assert inferred(model) == (TensorProto.FLOAT16, ["b", 3, 128, 64])


def test_the_checker_of_onnx_knows_the_nodes():
    x = np.zeros((2, 4, 8, 16), np.float32)
    model = model_of("TRT_Attention", [x, x, x])
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y0", TensorProto.FLOAT, [2, 4, 8, 16]))
    onnx.checker.check_model(model, full_check=True)


def test_strict_inference_raises_with_operand_and_axis():
    q, kv = np.zeros((2, 4, 8, 16), np.float32), np.zeros((2, 3, 8, 16), np.float32)
    model = model_of("TRT_Attention", [q, kv, kv])
    assert inferred(model) == (0, [])
    polyop.onnx.register(strict=True)
    with pytest.raises(onnx.shape_inference.InferenceError, match="K axis 1 is 3; Hq = 4 is no multiple of Hkv = 3"):
        onnx.shape_inference.infer_shapes(model)


def test_constant_lengths_are_looked_at():
    x = np.zeros((2, 4, 8, 16), np.float32)
    model = model_of("TRT_Attention", [x, x, x, None, None, np.array([3, 9], np.int32)], constants=(5,))
    polyop.onnx.register(strict=True)
    with pytest.raises(onnx.shape_inference.InferenceError, match=r"kv_lengths\[1\] is 9, wanted 0 to 8"):
        onnx.shape_inference.infer_shapes(model)
