"""Random calls of any operator, drawn from its schema with hypothesis.

A drawn call fits the schema: extents satisfy the constraints, integer operands their value rules (offsets rise, page
ids exist), conditional operands are there when they must be. Integer entries that no rule calls used hold garbage; NaN
in floats that must not be read is up to each operator's own tests. Outputs and in-place operands lie inside larger
buffers whose surroundings are checked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from polyop.ops.generate import TORCH_DTYPES
from polyop.ops.schema import Condition, Operand, Schema

GARBAGE = 1 << 30  # in integer entries that must not be read
SENTINEL = 0xA5  # byte around everything that may be written
MARGIN = 64  # bytes of it on either side


@dataclass(frozen=True)
class Hints:
    """What a schema leaves open and a useful sweep must narrow.

    extents: symbol -> (least, most); attributes: name -> values to choose from; lists: name -> strategy of an int
    list; distinct: integer operands whose used entries must differ from each other (pages that are written); repairs:
    operand -> function that brings its drawn values in line with constraints between operands; dtypes: operand ->
    dtypes to choose from among those that the schema admits.
    """

    extents: dict[str, tuple[int, int]] = field(default_factory=dict)
    attributes: dict[str, list[Any]] = field(default_factory=dict)
    lists: dict[str, st.SearchStrategy] = field(default_factory=dict)
    distinct: frozenset[str] = frozenset()
    repairs: dict[str, Callable[[CallMaker, torch.Tensor], None]] = field(default_factory=dict)
    dtypes: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Guarded:
    """A tensor inside a buffer of sentinels."""

    tensor: torch.Tensor
    buffer: torch.Tensor  # u8, the whole allocation
    outside: torch.Tensor  # bool, bytes that do not belong to the tensor

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: torch.dtype, gap: int = 0) -> Guarded:
        """`gap` elements stand between the rows of the last axis."""
        item = torch.empty(0, dtype=dtype).element_size()
        row = (shape[-1] if shape else 1) + gap
        strides = [1] * len(shape)
        step = row
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = step
            step *= shape[axis]
        count = step if len(shape) > 1 else row
        buffer = torch.full((2 * MARGIN + max(count, 1) * item,), SENTINEL, dtype=torch.uint8)
        marks = torch.ones(buffer.numel() - 2 * MARGIN, dtype=torch.bool).view(-1, item)
        marks.as_strided((*shape, item), (*[s * item for s in strides], 1)).fill_(False)
        outside = torch.ones(buffer.numel(), dtype=torch.bool)
        outside[MARGIN : buffer.numel() - MARGIN] = marks.view(-1)
        inner = buffer[MARGIN : buffer.numel() - MARGIN].view(dtype)
        return Guarded(inner.as_strided(shape, strides), buffer, outside)

    def assert_surroundings_intact(self, name: str) -> None:
        changed = (self.buffer != SENTINEL) & self.outside
        assert not bool(changed.any()), f"{name}: {int(changed.sum())} bytes around it were written"


@dataclass
class Call:
    """Keyword arguments of one call: inputs and attributes, and guarded memory for what is written."""

    schema: Schema = field(repr=False)
    arguments: dict[str, Any]
    extents: dict[str, int]

    def fresh(self) -> tuple[dict[str, Any], dict[str, Guarded]]:
        """Arguments whose in-place operands are copies, and all written operands by name, outputs poisoned."""
        arguments = dict(self.arguments)
        written: dict[str, Guarded] = {}
        for operand in self.schema.inputs:
            if operand.role == "in_out" and arguments.get(operand.name) is not None:
                source = arguments[operand.name]
                guarded = Guarded.empty(tuple(source.shape), source.dtype)
                guarded.tensor.copy_(source)
                arguments[operand.name] = guarded.tensor
                written[operand.name] = guarded
        return arguments, written


class CallMaker:
    """Draws one call of `schema`."""

    def __init__(self, draw: Any, schema: Schema, hints: Hints) -> None:
        self.draw = draw
        self.schema = schema
        self.hints = hints
        self.attributes: dict[str, Any] = {}
        self.extents: dict[str, int] = {}
        self.pack: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def make(self) -> Call:
        self._draw_attributes()
        present = self._draw_presence()
        rules = {operand.name: self._shape_rule(operand) for operand in present}
        self._draw_extents(rules)
        self._draw_lists()
        dtypes: dict[str, str] = {}
        for operand in present:
            dtypes[operand.name] = self._draw_dtype(operand, dtypes)
        for operand in present:
            shape = self._shape(rules[operand.name])
            self.tensors[operand.name] = self._draw_tensor(operand, shape, dtypes[operand.name])
        for operand in present:
            if operand.values:
                self._fill_values(operand)
                if operand.name in self.hints.repairs:
                    self.hints.repairs[operand.name](self, self.tensors[operand.name])
        arguments = {operand.name: self.tensors.get(operand.name) for operand in self.schema.inputs}
        return Call(self.schema, {**arguments, **self.attributes}, dict(self.extents))

    # ---- choices --------------------------------------------------------------------------------------------------

    def _draw_attributes(self) -> None:
        for attribute in self.schema.attributes:
            if attribute.name in self.hints.attributes:
                self.attributes[attribute.name] = self.draw(st.sampled_from(self.hints.attributes[attribute.name]))
            elif attribute.kind == "choice":
                self.attributes[attribute.name] = self.draw(st.sampled_from(attribute.choices))
            elif attribute.kind == "bool":
                self.attributes[attribute.name] = self.draw(st.booleans())
            elif attribute.kind == "float":
                self.attributes[attribute.name] = self.draw(st.sampled_from([attribute.default, 0.5]))
            elif attribute.kind == "int":
                assert attribute.default is not None, f"{attribute.name} needs a hint"
                self.attributes[attribute.name] = attribute.default

    def _holds(self, json: dict[str, Any] | None) -> bool:
        condition = Condition.of(json)
        return condition is None or self.attributes[condition.attribute] == condition.equals

    def _draw_presence(self) -> list[Operand]:
        present: dict[str, Operand] = {}
        for operand in self.schema.inputs:
            rule = next((r for r in operand.presence if self._holds(r["condition"])), None)
            if operand.always_required:
                given = True
            elif rule is None:
                given = False
            elif rule["with"]:
                given = rule["with"] in present
            else:
                has_shape = any(self._holds(shape["condition"]) for shape in operand.shapes)
                given = rule["required"] or (has_shape and self.draw(st.booleans()))
            if given:
                present[operand.name] = operand
        return list(present.values())

    def _shape_rule(self, operand: Operand) -> dict[str, Any]:
        return self.draw(st.sampled_from([rule for rule in operand.shapes if self._holds(rule["condition"])]))

    def _draw_dtype(self, operand: Operand, drawn: dict[str, str]) -> str:
        for rule in operand.dtypes:
            if self._holds(rule["condition"]):
                allowed = list(rule["allowed"])
                if rule["same_as"] in drawn:
                    allowed.append(drawn[rule["same_as"]])
                wanted = self.hints.dtypes.get(operand.name, allowed)
                allowed = [dtype for dtype in allowed if dtype in wanted] or allowed
                return self.draw(st.sampled_from(allowed))
        raise AssertionError(f"{operand.name} has no dtype rule in force")

    # ---- extents --------------------------------------------------------------------------------------------------

    def _draw_extents(self, rules: dict[str, dict[str, Any]]) -> None:
        for rule in rules.values():
            for dim in rule["dims"]:
                if dim["pack"] and not self.pack:
                    self.pack = self.draw(st.lists(st.integers(0, 5), max_size=3))
                elif isinstance(dim["extent"], list) and dim["extent"][0] == "symbol":
                    name = dim["extent"][1]
                    if name not in self.extents and not rule["broadcast"]:
                        self.extents[name] = self.draw(st.integers(*self.hints.extents.get(name, (0, 5))))
        for constraint in self.schema.constraints:
            lhs, rhs = constraint["lhs"], constraint["rhs"]
            if constraint["relation"] == "multiple_of" and lhs[0] == "symbol" and lhs[1] in self.extents:
                self.extents[lhs[1]] = self.number(rhs) * self.draw(st.integers(1, 4))

    def _draw_lists(self) -> None:
        for name, strategy in self.hints.lists.items():
            values = self.draw(strategy)
            self.attributes[name] = values[: 2 * len(self.pack)]

    def number(self, expression: Any, axis: int = 0, row: int = 0) -> int:
        """The value of an expression under what has been drawn so far."""
        if isinstance(expression, int):
            return expression
        op, *rest = expression
        if op == "symbol":
            return self.extents.get(rest[0], 1)
        if op == "attribute":
            return int(self.attributes[rest[0]])
        if op == "list_entry":
            index, values = self.number(rest[1], axis, row), self.attributes[rest[0]]
            return values[index] if 0 <= index < len(values) else 0
        if op == "element":
            tensor = self.tensors.get(rest[0])
            return 0 if tensor is None or row + rest[1] >= tensor.shape[0] else int(tensor[row + rest[1]])
        if op in ("pack_extent", "axis", "rank"):
            return {"pack_extent": lambda: self.pack[axis], "axis": lambda: axis, "rank": lambda: len(self.pack)}[op]()
        a, b = (self.number(part, axis, row) for part in rest)
        return {
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: a * b,
            "floor_div": lambda: a // b if b else 0,
            "ceil_div": lambda: -(-a // b) if b else 0,
            "mod": lambda: a % b if b else 0,
            "min": lambda: min(a, b),
            "max": lambda: max(a, b),
        }[op]()

    def _shape(self, rule: dict[str, Any]) -> tuple[int, ...]:
        shape: list[int] = []
        for dim in rule["dims"]:
            if dim["pack"]:
                shape += [self.number(dim["extent"], axis) for axis in range(len(self.pack))]
            else:
                shape.append(self.number(dim["extent"]))
        if rule["broadcast"]:
            shape = [self.draw(st.sampled_from([1, extent])) for extent in shape]
            shape = shape[self.draw(st.integers(0, len(shape))) :]
        assume(all(extent >= 0 for extent in shape))
        return tuple(shape)

    # ---- contents -------------------------------------------------------------------------------------------------

    def _draw_tensor(self, operand: Operand, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        torch_dtype = TORCH_DTYPES[dtype]
        generator = torch.Generator().manual_seed(self.draw(st.integers(0, 2**31)))
        gap = self.draw(st.sampled_from([0, 0, 3])) if len(shape) > 1 and operand.role == "input" else 0
        wide = (*shape[:-1], shape[-1] + gap) if shape else ()
        if operand.values:
            data = torch.full(wide, GARBAGE, dtype=torch_dtype)
        elif dtype == "bool":
            data = torch.rand(wide, generator=generator) < 0.7
        elif torch_dtype.is_floating_point:
            data = torch.randn(wide, generator=generator).to(torch_dtype)
            if operand.name.endswith("scale") or operand.name == "scales":
                data = (data.float().abs() + 0.05).to(torch_dtype)
        else:
            info = torch.iinfo(torch_dtype)
            low, high = max(info.min, -(2**40)), min(info.max, 2**40)
            data = torch.randint(low, high + 1, wide, generator=generator, dtype=torch.int64).to(torch_dtype)
        return data[..., : shape[-1]] if shape else data

    def _fill_values(self, operand: Operand) -> None:
        tensor = self.tensors[operand.name]
        taken: set[int] = set()
        for rule in operand.values:
            if not self._holds(rule["condition"]):
                continue
            if rule["cumulative"]:
                most = self.number(rule["highest"])
                cuts = sorted(
                    self.draw(st.lists(st.integers(0, most), min_size=len(tensor) - 1, max_size=len(tensor) - 1))
                )
                tensor.copy_(torch.tensor([0, *cuts][: len(tensor)]))
                continue
            columns = tensor.shape[1] if tensor.dim() == 2 else 1
            for row in range(tensor.shape[0]):
                low, high = self.number(rule["lowest"], row=row), self.number(rule["highest"], row=row)
                used = columns if rule["used"] is None else min(columns, self.number(rule["used"], row=row))
                first = 0 if rule.get("first") is None else self.number(rule["first"], row=row)
                for column in range(first, used):
                    assume(low <= high)
                    value = self.draw(st.integers(low, high))
                    if operand.name in self.hints.distinct:
                        free = [number for number in range(low, high + 1) if number not in taken]
                        assume(free)
                        value = free[value % len(free)]
                        taken.add(value)
                    if tensor.dim() == 2:
                        tensor[row, column] = value
                    else:
                        tensor[row] = value


@st.composite
def calls(draw: Any, schema: Schema, hints: Hints) -> Call:
    """A call that fits `schema`."""
    return CallMaker(draw, schema, hints).make()
