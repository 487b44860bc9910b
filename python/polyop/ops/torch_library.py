"""``torch.ops.polyop.<operator>``: registration with torch.library, generated from the schemas.

For torch.compile, torch.export and hosts that walk torch graphs. A direct call of ``polyop.ops.<operator>`` is cheaper:
it does not pass through torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .generate import split_parameters
from .schema import Attribute, Operand, Schema

_ATTRIBUTE_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "choice": "str",
    "int_list": "int[]",
    "float_list": "float[]",
    "bytes": "str",
}


def _operand_text(operand: Operand, mark: str, has_default: bool) -> str:
    kind = f"Tensor({mark}!)" if operand.role == "in_out" else "Tensor"
    optional = "" if operand.always_required else "?"
    return f"{kind}{optional} {operand.name}" + ("=None" if has_default else "")


def _attribute_text(attribute: Attribute) -> str:
    kind = _ATTRIBUTE_TYPES[attribute.kind]
    if attribute.required:
        return f"{kind} {attribute.name}"
    if attribute.default is None:
        return f"{kind}? {attribute.name}=None"
    default = f'"{attribute.default}"' if attribute.kind == "choice" else str(attribute.default)
    return f"{kind} {attribute.name}={default}"


def torch_schema(schema: Schema) -> str:
    """The operator's signature in torch's language: in-place operands are marked ``Tensor(a!)``; an output that a call
    does not have comes back as a tensor of no elements."""
    leading, trailing, optional = split_parameters(schema)
    marks = iter("abcdefgh")

    def text(operand: Operand, has_default: bool) -> str:
        return _operand_text(operand, next(marks) if operand.role == "in_out" else "", has_default)

    parts = [text(p, False) if isinstance(p, Operand) else _attribute_text(p) for p in leading]
    parts += [text(operand, True) for operand in trailing]
    if optional:
        parts += ["*", *[_attribute_text(attribute) for attribute in optional]]
    results = ["Tensor"] * len(schema.outputs)
    returns = results[0] if len(results) == 1 else "(" + ", ".join(results) + ")"
    return f"{schema.name}({', '.join(parts)}) -> {returns}"


def register(
    library: torch.library.Library, schema: Schema, function: Callable[..., Any], outputs: Callable[..., Any]
) -> None:
    """Defines ``torch.ops.<library>.<schema.name>`` with its implementation and its fake (shape-only) function."""
    library.define(torch_schema(schema))
    first_input = schema.inputs[0].name
    output_names = [output.name for output in schema.outputs]
    parameters = [parameter.name for group in split_parameters(schema) for parameter in group]

    def allocate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor | None]:
        device = (args[0] if args else kwargs[first_input]).device
        return [
            None if result is None else torch.empty(result[0], dtype=result[1], device=device)
            for result in outputs(**dict(zip(parameters, args, strict=False)), **kwargs)
        ]

    def present(tensors: list[torch.Tensor | None], device: torch.device) -> Any:
        filled = [torch.empty(0, device=device) if tensor is None else tensor for tensor in tensors]
        return filled[0] if len(filled) == 1 else tuple(filled) if filled else None

    def implementation(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(parameters, args, strict=False)), **kwargs}
        results = allocate(args, kwargs)
        function(**named, **dict(zip(output_names, results, strict=True)))
        return present(results, named[first_input].device)

    def fake(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(parameters, args, strict=False)), **kwargs}
        return present(allocate(args, kwargs), named[first_input].device)

    for key in ("CPU", "CUDA"):
        library.impl(schema.name, implementation, key)
    torch.library.register_fake(f"{library.ns}::{schema.name}", fake, lib=library)
