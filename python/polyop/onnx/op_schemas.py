"""ONNX OpSchemas generated from the operators' schemas, with type and shape inference, registered with ``onnx``."""

from __future__ import annotations

import contextlib

import onnx
from onnx import defs
from onnx.shape_inference import InferenceError

from .. import ops
from ..ops.schema import Attribute, Operand, Schema
from .names import OUTSIDE_NAMES, OutsideName
from .nodes import attribute_type, check_call, infer_outputs, is_numbered, narrows, read_attributes
from .values import ELEMENT_TYPES, TensorInfo, info_of_type, type_of

_OpSchema = defs.OpSchema
_Option = _OpSchema.FormalParameterOption

#: Longest constant that shape inference looks into.
_MOST_VALUES = 1 << 16


def _tensor_type(dtype: str) -> str:
    name = onnx.TensorProto.DataType.Name(ELEMENT_TYPES[dtype]).lower()
    return f"tensor({name})"


def _allowed_types(schema: Schema, operand: Operand) -> list[str]:
    """Every type that the operand may have, those of the operand it follows included."""
    types: list[str] = []
    for rule in operand.dtypes:
        types += [_tensor_type(name) for name in rule["allowed"]]
        if rule["same_as"]:
            types += _allowed_types(schema, next(o for o in schema.operands if o.name == rule["same_as"]))
    if narrows(operand):
        types.append(_tensor_type("i64"))
    return list(dict.fromkeys(types))


def _type_parameter(operand: Operand) -> str:
    """T_<operand>; operands that have exactly another one's type share its parameter."""
    rule = operand.dtypes[0]
    follows = len(operand.dtypes) == 1 and rule["same_as"] and not rule["allowed"]
    return f"T_{rule['same_as'] if follows else operand.name}"


def _formal_parameter(operand: Operand, is_optional: bool) -> defs.OpSchema.FormalParameter:
    return _OpSchema.FormalParameter(
        operand.name,
        _type_parameter(operand),
        f"{operand.doc}. Shape {operand.shape_text()}.",
        param_option=_Option.Optional if is_optional else _Option.Single,
    )


def _attribute(attribute: Attribute) -> defs.OpSchema.Attribute:
    kind = _OpSchema.AttrType(attribute_type(attribute))
    text = attribute.doc
    if attribute.choices:
        numbers = attribute.numbers if is_numbered(attribute) else [""] * len(attribute.choices)
        pairs = zip(attribute.choices, numbers, strict=True)
        text += "; one of " + ", ".join(f"{choice} {number}".strip() for choice, number in pairs)
    if attribute.required or attribute.default is None:
        return _OpSchema.Attribute(attribute.name, kind, text, required=attribute.required)
    default = attribute.default
    if is_numbered(attribute):
        default = attribute.numbers[attribute.choices.index(default)]
    elif attribute.kind == "bool":
        default = int(default)
    return _OpSchema.Attribute(
        attribute.name, onnx.helper.make_attribute(attribute.name, default, attr_type=attribute_type(attribute)), text
    )


def node_infos(context: onnx.shape_inference.InferenceContext, schema: Schema) -> dict[str, TensorInfo]:
    """What an inference context knows about the inputs, by operand name."""
    infos: dict[str, TensorInfo] = {}
    for index, operand in enumerate(schema.inputs[: context.get_num_inputs()]):
        if not context.has_input(index):
            continue
        value_type = context.get_input_type(index)
        info = info_of_type(value_type) if value_type is not None else TensorInfo()
        data = context.get_input_data(index)
        if data is not None and data.data_location != onnx.TensorProto.EXTERNAL:
            array = onnx.numpy_helper.to_array(data)
            info.data = array if array.size <= _MOST_VALUES else None
        infos[operand.name] = info
    return infos


def _inference(name: OutsideName, strict: bool):
    schema = ops.SCHEMAS[name.operator]

    def infer(context: onnx.shape_inference.InferenceContext) -> None:
        node = onnx.NodeProto(op_type=name.op_type)
        for attribute in schema.attributes:
            given = context.get_attribute(attribute.name)
            if given is not None:
                node.attribute.append(given)
        try:
            attributes = read_attributes(node, schema, strict, warn=lambda text: None)
            infos = node_infos(context, schema)
            # The shapes are right then; whether a kernel exists is not asked here.
            with contextlib.suppress(NotImplementedError):
                check_call(name.operator, infos, attributes)
            outputs = infer_outputs(schema, infos, attributes)
        except ValueError as error:
            if strict:
                raise InferenceError(f"{name.op_type}: {error}") from None
            return
        for index, output in enumerate(outputs):
            context.set_output_type(index, type_of(output))

    return infer


def make_op_schema(name: OutsideName, domain: str, strict: bool = False) -> defs.OpSchema:
    """The OpSchema of an outside name in one of its domains.

    Shape inference of a node that breaks the schema gives nothing, or, when `strict`, raises InferenceError with the
    operand and the axis.
    """
    schema = ops.SCHEMAS[name.operator]
    operands = [*schema.inputs, *schema.outputs]
    inputs = [_formal_parameter(operand, not operand.always_required) for operand in schema.inputs]
    constraints = {_type_parameter(operand): _allowed_types(schema, operand) for operand in operands}
    op_schema = _OpSchema(
        name.op_type,
        domain,
        1,
        schema.doc,
        inputs=inputs,
        outputs=[_formal_parameter(operand, False) for operand in schema.outputs],
        type_constraints=[(key, types, "") for key, types in constraints.items()],
        attributes=[_attribute(attribute) for attribute in schema.attributes],
    )
    op_schema.set_type_and_shape_inference_function(_inference(name, strict))
    return op_schema


def register(strict: bool = False) -> None:
    """Registers the OpSchemas of all outside names with the ``onnx`` package, so that its checker and shape inference
    know them. A second call replaces the first: the last mode holds."""
    for name in OUTSIDE_NAMES:
        for domain in name.domains:
            if defs.has(name.op_type, domain):
                defs.deregister_schema(name.op_type, 1, domain)
            defs.register_schema(make_op_schema(name, domain, strict))
