"""Python functions for operators, generated from their schemas at import.

For each operator two pieces of source are made and compiled:

- ``<name>_outputs(...)``: extents and dtypes of the outputs, on numbers or symbolic sizes;
- ``<name>(...)``: allocates the outputs that the caller did not give and makes one call into the compiled module.

Source instead of interpretation keeps a call near the cost of the packed function itself.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy
import torch

from .refusals import named_error
from .schema import Attribute, Condition, Operand, Schema, expression_source, expression_symbols

TORCH_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def _allocate(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """An uninitialised tensor on the device of `like`; a NumPy array when `like` is one."""
    if isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=dtype, device=like.device)
    if isinstance(like, numpy.ndarray):
        return numpy.empty(
            shape, torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else dtype
        )
    raise TypeError(f"cannot allocate an output beside a {type(like).__name__}")


def _list_entry(values: Any, index: int) -> int:
    return values[index] if 0 <= index < len(values) else 0


# ---- signatures ------------------------------------------------------------------------------------------------------


def split_parameters(schema: Schema) -> tuple[list[Operand | Attribute], list[Operand], list[Attribute]]:
    """Parameters in call order: those without a default (operands up to the last required one, then required
    attributes), trailing optional operands, optional attributes (keyword only)."""
    inputs = schema.inputs
    last_required = max(i for i, operand in enumerate(inputs) if operand.always_required)
    leading: list[Operand | Attribute] = [*inputs[: last_required + 1]]
    leading += [attribute for attribute in schema.attributes if attribute.required]
    optional = [attribute for attribute in schema.attributes if not attribute.required]
    return leading, inputs[last_required + 1 :], optional


def parameter_source(schema: Schema, with_outputs: bool) -> str:
    leading, trailing, optional = split_parameters(schema)
    parts = [parameter.name for parameter in leading]
    parts += [f"{operand.name}=None" for operand in trailing]
    keywords = [f"{attribute.name}={attribute.default!r}" for attribute in optional]
    if with_outputs:
        keywords += [f"{output.name}=None" for output in schema.outputs]
    return ", ".join(parts + (["*", *keywords] if keywords else []))


def argument_source(schema: Schema) -> str:
    """The same parameters handed on by name."""
    leading, trailing, optional = split_parameters(schema)
    return ", ".join(f"{parameter.name}={parameter.name}" for parameter in [*leading, *trailing, *optional])


# ---- shape functions -------------------------------------------------------------------------------------------------


def _axis_source(rule: dict[str, Any], index: int) -> str:
    """Index expression of dim `index` of a rule: from the front before a pack, from the back behind it."""
    pack_at = next((i for i, dim in enumerate(rule["dims"]) if dim["pack"]), len(rule["dims"]))
    return str(index) if index < pack_at else str(index - len(rule["dims"]))


def _symbol_source(schema: Schema, symbol: str) -> str:
    """Where a symbol's number comes from: the first operand that has it as a plain extent and is there."""
    candidates: list[tuple[str, str]] = []
    for operand in schema.inputs:
        ranks = [len(rule["dims"]) for rule in operand.shapes]
        for rule in operand.shapes:
            if rule["broadcast"]:
                continue
            for index, dim in enumerate(rule["dims"]):
                if dim["pack"] or dim["extent"] != ["symbol", symbol]:
                    continue
                conditions = [] if operand.always_required else [f"{operand.name} is not None"]
                condition = Condition.of(rule["condition"])
                if condition:
                    conditions.append(condition.source())
                elif len(ranks) > 1:
                    conditions.append(f"len({operand.name}.shape) == {len(rule['dims'])}")
                candidates.append((f"{operand.name}.shape[{_axis_source(rule, index)}]", " and ".join(conditions)))
    source = "None"
    for value, condition in reversed(candidates):
        source = f"({value} if {condition} else {source})" if condition else value
    return source


def _pack_source(schema: Schema) -> str | None:
    for operand in schema.inputs:
        for rule in operand.shapes:
            for index, dim in enumerate(rule["dims"]):
                if dim["pack"]:
                    behind = len(rule["dims"]) - index - 1
                    return f"{operand.name}.shape[{index}:{-behind if behind else ''}]"
    return None


def _shape_source(rule: dict[str, Any]) -> str:
    parts = []
    for dim in rule["dims"]:
        source = expression_source(dim["extent"])
        parts.append(f"*[{source} for axis in range(len(pack))]" if dim["pack"] else source)
    return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def _chain(rules: list[tuple[Condition | None, str]], otherwise: str) -> str:
    source = otherwise
    for condition, value in reversed(rules):
        source = f"({value} if {condition.source()} else {source})" if condition else value
    return source


def _dtype_source(output: Operand) -> str:
    rules = []
    for rule in output.dtypes:
        value = f"{rule['same_as']}.dtype" if rule["same_as"] else f"_dtypes[{rule['allowed'][0]!r}]"
        rules.append((Condition.of(rule["condition"]), value))
    return _chain(rules, "None")


def _presence_source(output: Operand) -> str:
    if output.always_required:
        return "True"
    rules = []
    for rule in output.presence:
        value = f"{rule['with']} is not None" if rule["with"] else str(rule["required"])
        rules.append((Condition.of(rule["condition"]), value))
    return _chain(rules, "False")


def outputs_source(schema: Schema) -> str:
    """Source of ``<name>_outputs``: a tuple with ``(shape, dtype)`` or None for each output."""
    lines = [f"def {schema.name}_outputs({parameter_source(schema, with_outputs=False)}):"]
    symbols: set[str] = set()
    for output in schema.outputs:
        for rule in output.shapes:
            for dim in rule["dims"]:
                symbols |= expression_symbols(dim["extent"])
    lines += [f"    {symbol} = {_symbol_source(schema, symbol)}" for symbol in sorted(symbols)]
    uses_pack = any(dim["pack"] for output in schema.outputs for rule in output.shapes for dim in rule["dims"])
    if uses_pack:
        lines.append(f"    pack = {_pack_source(schema)}")
    results = []
    for output in schema.outputs:
        shape = _chain([(Condition.of(rule["condition"]), _shape_source(rule)) for rule in output.shapes], "()")
        results.append(f"(({shape}, {_dtype_source(output)}) if {_presence_source(output)} else None)")
    lines.append("    return (" + ", ".join(results) + ("," if len(results) == 1 else "") + ")")
    return "\n".join(lines)


# ---- calls -----------------------------------------------------------------------------------------------------------


def call_source(schema: Schema) -> str:
    """Source of the public function."""
    lines = [f"def {schema.name}({parameter_source(schema, with_outputs=True)}):", "    try:"]
    outputs = schema.outputs
    device_of = schema.inputs[0].name
    operands = [operand.name for operand in schema.operands]
    attributes = [attribute.name for attribute in schema.attributes]
    if outputs:
        missing = " or ".join(
            f"{output.name} is None" + ("" if output.always_required else f" and {_presence_source(output)}")
            for output in outputs
        )
        inputs = [operand.name for operand in schema.inputs]
        lines += [
            f"        if {missing}:",
            "            try:",
            f"                _inferred = {schema.name}_outputs({argument_source(schema)})",
        ]
        for index, output in enumerate(outputs):
            lines += [
                f"                if {output.name} is None and _inferred[{index}] is not None:",
                f"                    {output.name} = _allocate(*_inferred[{index}], {device_of})",
            ]
        # Arguments that break the schema break the shape function too: the schema's own text says how.
        lines += [
            "            except Exception:",
            f"                _check_{schema.name}({', '.join(inputs + attributes)})",
            "                raise",
        ]
    lines += [
        f"        _call_{schema.name}({', '.join(operands + attributes)})",
        "    except (ValueError, NotImplementedError):",
        "        raise",
        "    except Exception as error:",
        f"        raise _named_error(_schema, [{', '.join(operands)}], [{', '.join(attributes)}], error) from error",
    ]
    if len(outputs) == 1:
        lines.append(f"    return {outputs[0].name}")
    elif outputs:
        first, *others = outputs
        only_first = " and ".join(f"{output.name} is None" for output in others)
        names = ", ".join(output.name for output in outputs)
        lines.append(f"    return {first.name} if {only_first} else ({names})")
    return "\n".join(lines)


def docstring(schema: Schema) -> str:
    """The function's documentation: operands with shapes and dtypes, attributes with defaults, errors."""
    lines: list[str] = []

    def add(text: str, indent: int = 0) -> None:
        lines.extend(textwrap.wrap(text, 108, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4)))

    lines += [*textwrap.wrap(schema.doc, 108), "", "Operands:"]
    for operand in schema.operands:
        notes = {"in_out": "written in place", "output": "output"}.get(operand.role, "")
        if not operand.always_required:
            notes = (notes + ", " if notes else "") + "optional"
        suffix = f" ({notes})" if notes else ""
        add(f"{operand.name}: {operand.shape_text()}; {operand.dtype_text()}{suffix}", 2)
        if operand.doc:
            add(operand.doc, 6)
    if schema.attributes:
        lines += ["", "Attributes:"]
    for attribute in schema.attributes:
        kind = " | ".join(attribute.choices) or attribute.kind
        default = "" if attribute.required else f", default {attribute.default}"
        add(f"{attribute.name} ({kind}{default}): {attribute.doc}", 2)
    lines += [
        "",
        "Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;",
        "nothing is written then.",
    ]
    return "\n".join(lines)


def compile_operator(
    schema: Schema, packed_call: Callable[..., Any], packed_check: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``(function, outputs_function)`` of an operator over its packed functions."""
    namespace: dict[str, Any] = {
        "torch": torch,
        "_allocate": _allocate,
        "_named_error": named_error,
        "_schema": schema,
        "_dtypes": TORCH_DTYPES,
        "_list_entry": _list_entry,
        f"_call_{schema.name}": packed_call,
        f"_check_{schema.name}": packed_check,
    }
    source = outputs_source(schema) + "\n\n" + call_source(schema) + "\n"
    exec(compile(source, f"<polyop.ops.{schema.name}>", "exec"), namespace)
    function = namespace[schema.name]
    function.__module__ = "polyop.ops"
    function.__doc__ = docstring(schema)
    return function, namespace[f"{schema.name}_outputs"]
