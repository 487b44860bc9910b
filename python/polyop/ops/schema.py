"""Operator schemas in Python: what C++ declared, read from its JSON, and the source text of its expressions.

An expression arrives as nested lists (``["add", ["symbol", "B"], 1]``) and leaves as Python source (``(B + 1)``) that
works on plain integers and on torch's symbolic ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Condition:
    """Holds while ``attribute`` equals ``equals`` (a choice's text, or 0/1 for a bool)."""

    attribute: str
    equals: Any

    def source(self) -> str:
        if isinstance(self.equals, str):
            return f"{self.attribute} == {self.equals!r}"
        return self.attribute if self.equals else f"not {self.attribute}"

    @staticmethod
    def of(json: dict[str, Any] | None) -> Condition | None:
        return None if json is None else Condition(json["attribute"], json["equals"])


@dataclass(frozen=True)
class Operand:
    name: str
    doc: str
    role: str  # input, in_out, output
    alias_of: str
    presence: list[dict[str, Any]]
    shapes: list[dict[str, Any]]
    dtypes: list[dict[str, Any]]
    values: list[dict[str, Any]]

    @property
    def is_output(self) -> bool:
        return self.role == "output"

    @property
    def always_required(self) -> bool:
        return not self.presence

    def shape_text(self) -> str:
        """``[T, Hq, D] (query_form = packed) or ...`` for documentation."""
        texts = []
        for rule in self.shapes:
            condition = Condition.of(rule["condition"])
            texts.append(rule["text"] + (f" ({condition.attribute} = {condition.equals})" if condition else ""))
        return " or ".join(texts)

    def dtype_text(self) -> str:
        """``f32, f16 or as q`` for documentation."""
        names: list[str] = []
        for rule in self.dtypes:
            names += [name for name in rule["allowed"] if name not in names]
            if rule["same_as"]:
                names.append(f"as {rule['same_as']}")
        return ", ".join(names)


@dataclass(frozen=True)
class Attribute:
    name: str
    doc: str
    kind: str  # int, float, bool, choice, int_list, float_list, bytes
    required: bool
    default: Any  # None where required or computed (rsqrt)
    choices: list[str]
    numbers: list[int | None]  # the number that some outside formats write for each choice
    min: int | None
    max: int | None


@dataclass(frozen=True)
class Schema:
    name: str
    doc: str
    operands: list[Operand]
    attributes: list[Attribute]
    constraints: list[dict[str, Any]]

    @property
    def inputs(self) -> list[Operand]:
        """Operands that the caller gives: inputs and in-place ones."""
        return [operand for operand in self.operands if not operand.is_output]

    @property
    def outputs(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.is_output]


def parse_schema(json: dict[str, Any]) -> Schema:
    """A Schema from the object that OpSchema::to_json writes."""
    operand_fields = ("name", "doc", "role", "alias_of", "presence", "shapes", "dtypes", "values")
    attribute_fields = ("name", "doc", "kind", "required", "default", "min", "max")
    return Schema(
        name=json["name"],
        doc=json["doc"],
        operands=[Operand(**{field: entry[field] for field in operand_fields}) for entry in json["operands"]],
        attributes=[
            Attribute(
                **{field: entry[field] for field in attribute_fields},
                choices=[choice["name"] for choice in entry["choices"]],
                numbers=[choice["number"] for choice in entry["choices"]],
            )
            for entry in json["attributes"]
        ],
        constraints=json["constraints"],
    )


_BINARY_SOURCE = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "floor_div": "({} // {})",
    "ceil_div": "(-(-{} // {}))",
    "mod": "({} % {})",
    "min": "torch.sym_min({}, {})",
    "max": "torch.sym_max({}, {})",
}


def expression_source(expression: Any) -> str:
    """Python source of an extent. Symbols and attributes become variables of their names; inside a pack ``axis`` is the
    current axis and ``pack`` the extents."""
    if isinstance(expression, int):
        return str(expression)
    op, *rest = expression
    if op in ("symbol", "attribute"):
        return rest[0]
    if op == "list_entry":
        return f"_list_entry({rest[0]}, {expression_source(rest[1])})"
    if op == "pack_extent":
        return "pack[axis]"
    if op == "axis":
        return "axis"
    if op == "rank":
        return "len(pack)"
    if op in _BINARY_SOURCE:
        return _BINARY_SOURCE[op].format(expression_source(rest[0]), expression_source(rest[1]))
    raise ValueError(f"an extent cannot contain {op!r}")


def expression_symbols(expression: Any) -> set[str]:
    """Names of the symbols in an expression."""
    if isinstance(expression, int):
        return set()
    if expression[0] == "symbol":
        return {expression[1]}
    return set().union(*[expression_symbols(part) for part in expression[1:] if isinstance(part, (list, int))], set())
