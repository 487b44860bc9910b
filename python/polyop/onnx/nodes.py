"""A node as a call of its operator: operands by position, attributes by name, strict or compatible.

Strict refuses what the schema does not name. Compatible does what TensorRT's importer does with it: unknown attributes,
values of the wrong kind and surplus inputs are ignored, with a warning for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnx import AttributeProto, NodeProto, helper

from .. import ops
from ..ops.module import check_node_function
from ..ops.schema import Attribute, Condition, Operand, Schema
from .names import OutsideName
from .values import DTYPE_NAMES, ELEMENT_TYPES, Extent, NodeError, TensorInfo, element_type_name, to_torch, torch_dtype

_ATTRIBUTE_TYPES = {
    "int": AttributeProto.INT,
    "bool": AttributeProto.INT,
    "float": AttributeProto.FLOAT,
    "int_list": AttributeProto.INTS,
    "float_list": AttributeProto.FLOATS,
    "bytes": AttributeProto.STRING,
}

#: Longest constant operand whose values are looked at.
_MOST_VALUES = 1 << 20

Warn = Callable[[str], None]


# ---- attributes ------------------------------------------------------------------------------------------------------


def is_numbered(attribute: Attribute) -> bool:
    """Whether ONNX writes this choice as a number."""
    return attribute.kind == "choice" and None not in attribute.numbers


def attribute_type(attribute: Attribute) -> int:
    """The type that ONNX stores the attribute as (AttributeProto.AttributeType)."""
    if attribute.kind == "choice":
        return AttributeProto.INT if is_numbered(attribute) else AttributeProto.STRING
    return _ATTRIBUTE_TYPES[attribute.kind]


def _wanted(attribute: Attribute) -> str:
    if is_numbered(attribute):
        pairs = zip(attribute.numbers, attribute.choices, strict=True)
        return " or ".join(f"{number} ({choice})" for number, choice in pairs)
    return AttributeProto.AttributeType.Name(attribute_type(attribute))


def _value(attribute: Attribute, given: AttributeProto) -> Any:
    if given.type == AttributeProto.STRING:
        try:
            return given.s.decode("utf-8")
        except UnicodeDecodeError:
            raise NodeError(f"attribute {attribute.name} is no UTF-8 text") from None
    return helper.get_attribute_value(given)


def _tolerated(attribute: Attribute, given: AttributeProto, value: Any, warn: Warn) -> Any:
    """What compatibility mode makes of a value that strict mode leaves to the schema to judge."""
    out_of_range = attribute.kind == "int" and attribute.min is not None and value < attribute.min
    unset = is_numbered(attribute) and given.type == AttributeProto.INT and value == 0 and 0 not in attribute.numbers
    if out_of_range or unset:
        warn(f"attribute {attribute.name} is {value}: ignored, {attribute.default} is used")
        return None
    if attribute.kind == "bool" and value not in (0, 1):
        warn(f"attribute {attribute.name} is {value}: taken as 1")
        return 1
    return value


def read_attributes(node: NodeProto, schema: Schema, strict: bool, warn: Warn) -> dict[str, Any]:
    """The node's values of the schema's attributes; those that are absent or ignored are missing.

    Raises NodeError for an attribute that the mode does not tolerate.
    """
    known = {attribute.name: attribute for attribute in schema.attributes}
    values: dict[str, Any] = {}
    for given in node.attribute:
        attribute = known.get(given.name)
        if attribute is None:
            if strict:
                raise NodeError(f"attribute {given.name} is unknown, wanted one of {', '.join(known)}")
            warn(f"attribute {given.name} is unknown: ignored")
            continue
        if given.name in values:
            raise NodeError(f"attribute {given.name} is given twice")
        if given.ref_attr_name:
            continue  # known when the function around the node is called
        wrong_type = given.type != attribute_type(attribute)
        by_name = wrong_type and is_numbered(attribute) and given.type == AttributeProto.STRING
        if wrong_type and (strict or not by_name):
            got = f'the text "{_value(attribute, given)}"' if given.type == AttributeProto.STRING else "of another type"
            if strict:
                raise NodeError(f"attribute {given.name} is {got}, wanted {_wanted(attribute)}")
            warn(f"attribute {given.name} is {got}: ignored, {attribute.default} is used")
            continue
        value = _value(attribute, given)
        if by_name:
            warn(f'attribute {given.name} is the text "{value}": read as its name; TensorRT ignores a text here')
        if not strict:
            value = _tolerated(attribute, given, value, warn)
        if value is not None:
            values[given.name] = value
    return values


# ---- operands --------------------------------------------------------------------------------------------------------


def check_counts(node: NodeProto, name: OutsideName, schema: Schema, strict: bool, warn: Warn) -> list[str]:
    """The node's inputs in the order of the schema, "" where absent.

    Raises NodeError when the node has too few or too many inputs or outputs, or an unexpected domain.
    """
    if node.domain not in name.domains:
        wanted = " or ".join(repr(domain) for domain in name.domains)
        if strict:
            raise NodeError(f"the domain is {node.domain!r}, wanted {wanted}")
        warn(f"the domain is {node.domain!r}, wanted {wanted}: not looked at")
    inputs = list(node.input)
    most = len(schema.inputs)
    if len(inputs) < name.least_inputs:
        raise NodeError(f"the node has {len(inputs)} inputs, wanted {name.least_inputs} to {most}")
    if len(inputs) > most:
        if strict:
            raise NodeError(f"the node has {len(inputs)} inputs, wanted at most {most}")
        warn(f"the node has {len(inputs)} inputs, wanted at most {most}: the others are not used")
    if len(node.output) != len(schema.outputs) or not all(node.output):
        raise NodeError(f"the node has {len([o for o in node.output if o])} outputs, wanted {len(schema.outputs)}")
    return [*inputs[:most], *[""] * (most - len(inputs))]


def narrows(operand: Operand) -> bool:
    """Whether ONNX's usual i64 is brought to the operand's i32 (TensorRT's importer inserts the same cast)."""
    allowed = {name for rule in operand.dtypes for name in rule["allowed"]}
    return "i32" in allowed and "i64" not in allowed


def narrowed_array(name: str, array: np.ndarray) -> np.ndarray:
    """An integer array as i32. Raises NodeError, with the operand's name, when a value does not fit."""
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        worst = int(array.min()) if array.min() < limits.min else int(array.max())
        raise NodeError(f"{name} holds {worst}, wanted a number that fits 32 bits")
    return array.astype(np.int32)


def _assumed_dtype(operand: Operand, dtypes: dict[str, str]) -> str:
    """A dtype that the schema allows, for a value whose type the graph does not tell."""
    for rule in operand.dtypes:
        if rule["same_as"] in dtypes:
            return dtypes[rule["same_as"]]
        if rule["allowed"]:
            return rule["allowed"][0]
    return "f32"


def node_arguments(schema: Schema, infos: dict[str, TensorInfo]) -> list[Any]:
    """The inputs as the compiled check takes them. Raises NodeError for an element type that polyop does not have."""
    arguments: list[Any] = []
    dtypes: dict[str, str] = {}
    for operand in schema.inputs:
        info = infos.get(operand.name)
        if info is None:
            arguments.append(None)
            continue
        if info.element_type and info.element_type not in DTYPE_NAMES:
            got = element_type_name(info.element_type)
            raise NodeError(f"{operand.name} is {got}, wanted {operand.dtype_text()}")
        dtype = DTYPE_NAMES.get(info.element_type) or _assumed_dtype(operand, dtypes)
        data = info.data
        if dtype == "i64" and narrows(operand):
            dtype = "i32"
            data = None if data is None else narrowed_array(operand.name, data)
        dtypes[operand.name] = dtype
        if data is not None and 0 < data.size <= _MOST_VALUES:
            arguments.append(to_torch(data))
        else:
            arguments.append([dtype, info.numbers()])
    return arguments


def check_call(
    operator: str, infos: dict[str, TensorInfo], attributes: dict[str, Any], device: str = "cpu", values: bool = True
) -> str:
    """The kernel that would run this call of an operator on the device ("cpu" or "cuda").

    Raises ValueError when the call breaks the schema, NotImplementedError when no kernel takes it.
    """
    schema = ops.SCHEMAS[operator]
    if not values:
        infos = {name: TensorInfo(info.element_type, info.shape) for name, info in infos.items()}
    arguments = node_arguments(schema, infos)
    return str(
        check_node_function(operator)(
            device, *arguments, *[attributes.get(attribute.name) for attribute in schema.attributes]
        )
    )


# ---- outputs ---------------------------------------------------------------------------------------------------------


class _Shaped:
    """Stands in for a tensor in a shape function."""

    def __init__(self, info: TensorInfo) -> None:
        self.shape = tuple(info.shape or ())
        self.dtype = torch_dtype(info.element_type)

    def dim(self) -> int:
        return len(self.shape)


def _named_choices(schema: Schema, attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes with defaults filled in and numbers of choices turned into their names."""
    values = {attribute.name: attribute.default for attribute in schema.attributes}
    for attribute in schema.attributes:
        if attribute.name not in attributes:
            continue
        value = attributes[attribute.name]
        if is_numbered(attribute) and value in attribute.numbers:
            value = attribute.choices[attribute.numbers.index(value)]
        values[attribute.name] = value
    return values


def infer_outputs(schema: Schema, infos: dict[str, TensorInfo], attributes: dict[str, Any]) -> list[TensorInfo]:
    """Types of the outputs; symbolic extents keep their names. Unknown ranks of inputs give unknown ranks."""
    choices = _named_choices(schema, attributes)
    inputs = {operand.name: infos.get(operand.name) for operand in schema.inputs}
    unranked = any(info is not None and info.shape is None for info in inputs.values())
    outputs: list[TensorInfo] = []
    if not unranked:
        shaped = {name: None if info is None else _Shaped(info) for name, info in inputs.items()}
        for result in ops.output_function(schema.name)(**shaped, **choices):
            shape = list(result[0])
            element_type = next((e for e in DTYPE_NAMES if torch_dtype(e) == result[1]), 0) if result[1] else 0
            outputs.append(TensorInfo(element_type, [e if isinstance(e, (int, Extent)) else int(e) for e in shape]))
        return outputs
    for output in schema.outputs:
        rule = next(r for r in output.dtypes if _holds(r["condition"], choices))
        like = inputs.get(rule["same_as"])
        outputs.append(TensorInfo(like.element_type if like else ELEMENT_TYPES[rule["allowed"][0]]))
    return outputs


def _holds(json: dict[str, Any] | None, choices: dict[str, Any]) -> bool:
    condition = Condition.of(json)
    return condition is None or choices[condition.attribute] == condition.equals


def torch_operands(schema: Schema, arrays: list[np.ndarray | None]) -> dict[str, torch.Tensor | None]:
    """A node's arrays as tensors by operand name, i64 brought to i32 where the operand has no other."""
    tensors: dict[str, torch.Tensor | None] = {}
    for operand, array in zip(schema.inputs, arrays, strict=True):
        if array is None:
            tensors[operand.name] = None
            continue
        array = np.asarray(array)
        if array.dtype == np.int64 and narrows(operand):
            array = narrowed_array(operand.name, array)
        try:
            tensors[operand.name] = to_torch(array)
        except NodeError as error:
            raise NodeError(f"{operand.name} {error}") from None
    return tensors
