"""The generated signatures as a stub file, for editors and type checkers.

``python -m polyop.ops.stubs`` rewrites ``__init__.pyi``; with ``--check`` it exits 1 when the file is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import SCHEMAS
from .generate import docstring, split_parameters
from .schema import Attribute, Operand, Schema

_ATTRIBUTE_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "int_list": "Sequence[int]",
    "float_list": "Sequence[float]",
    "bytes": "bytes",
}

_HEADER = """# Written by `python -m polyop.ops.stubs` from the C++ schemas; do not edit.
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from .schema import Schema

SCHEMAS: dict[str, Schema]

def kernel_names(name: str) -> list[str]: ...
def num_threads() -> int: ...
def output_function(name: str) -> Callable[..., Any]: ...
def set_num_threads(count: int) -> None: ...
def with_kernel(name: str, kernel: str) -> Callable[..., Any]: ...
"""


def _attribute_type(attribute: Attribute) -> str:
    if attribute.kind == "choice":
        return "Literal[" + ", ".join(f'"{choice}"' for choice in attribute.choices) + "]"
    return _ATTRIBUTE_TYPES[attribute.kind]


def _parameter(parameter: Operand | Attribute, has_default: bool) -> str:
    if isinstance(parameter, Operand):
        kind = "Tensor" if parameter.always_required else "Tensor | None"
        return f"{parameter.name}: {kind}" + (" = None" if has_default else "")
    kind = _attribute_type(parameter)
    if not has_default:
        return f"{parameter.name}: {kind}"
    if parameter.default is None:
        return f"{parameter.name}: {kind} | None = None"
    default = f'"{parameter.default}"' if parameter.kind == "choice" else str(parameter.default)
    return f"{parameter.name}: {kind} = {default}"


def function_stub(schema: Schema) -> str:
    """The ``def`` of one operator with its documentation."""
    leading, trailing, optional = split_parameters(schema)
    keywords = [_parameter(attribute, True) for attribute in optional]
    keywords += [f"{output.name}: Tensor | None = None" for output in schema.outputs]
    parts = [_parameter(p, False) for p in leading] + [_parameter(operand, True) for operand in trailing]
    parts += ["*", *keywords] if keywords else []
    always = [output for output in schema.outputs if output.always_required]
    if not schema.outputs:
        returns = "None"
    elif len(schema.outputs) == 1:
        returns = "Tensor"
    else:
        pair = "tuple[" + ", ".join(["Tensor"] * len(schema.outputs)) + "]"
        returns = pair if len(always) == len(schema.outputs) else f"Tensor | {pair}"
    body = "\n".join(f"    {line}".rstrip() for line in docstring(schema).splitlines())
    arguments = "".join(f"    {part},\n" for part in parts)
    return f'def {schema.name}(\n{arguments}) -> {returns}:\n    """{body.strip()}\n    """'


def stub_text() -> str:
    """The whole stub file."""
    return "\n\n".join([_HEADER.rstrip(), *[function_stub(schema) for schema in SCHEMAS.values()]]) + "\n"


def main() -> int:
    path = Path(__file__).with_name("__init__.pyi")
    if "--check" in sys.argv[1:]:
        if path.is_file() and path.read_text() == stub_text():
            return 0
        print(f"{path.name} is out of date: run 'python -m polyop.ops.stubs'", file=sys.stderr)
        return 1
    path.write_text(stub_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
