"""Looks at a model before it runs: every node that polyop knows, its verdict, the reason and the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, external_data_helper, numpy_helper

from .. import ops
from . import op_schemas, standard
from .names import outside_name
from .nodes import check_call, check_counts, read_attributes
from .values import NodeError, TensorInfo, checked_shape, info_of_type

#: Longest constant whose values are read, inline or from the file of external data.
_MOST_VALUES = 1 << 20


class ModelError(ValueError):
    """A file that is no ONNX model, or a graph that cannot be walked."""


@dataclass
class NodeReport:
    """One node. verdict: "ok", "no_kernel" (valid, but nothing on the device runs it) or "reject"."""

    name: str
    op_type: str
    verdict: str
    reason: str = ""
    kernel: str = ""
    warnings: list[str] = field(default_factory=list)


@dataclass
class ModelReport:
    nodes: list[NodeReport] = field(default_factory=list)
    other_nodes: int = 0
    problems: list[str] = field(default_factory=list)  # of the graph as a whole

    @property
    def is_ok(self) -> bool:
        """Whether every known node would run."""
        return not self.problems and all(node.verdict == "ok" for node in self.nodes)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(model: str | Path | bytes | ModelProto) -> tuple[ModelProto, str]:
    """The model without external data, and the folder of that data. Raises ModelError."""
    if isinstance(model, ModelProto):
        return model, ""
    try:
        data = model if isinstance(model, bytes) else Path(model).read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {model}: {error.strerror or error}") from None
    loaded = ModelProto()
    try:
        loaded.ParseFromString(data)
    except (DecodeError, RecursionError, ValueError) as error:
        raise ModelError(f"this is no ONNX model, or it is cut off: {error}") from None
    if not loaded.HasField("graph"):
        raise ModelError("this is no ONNX model: it has no graph")
    return loaded, "" if isinstance(model, bytes) else str(Path(model).resolve().parent)


def _subgraphs(nodes: Any) -> Iterator[GraphProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


def _check_functions(model: ModelProto) -> None:
    """Raises ModelError when functions call each other in a circle: whoever inlines them would never end."""
    bodies = {(function.domain, function.name): function for function in model.functions}
    state: dict[tuple[str, str], str] = {}

    def called(nodes: Any) -> Iterator[tuple[str, str]]:
        for node in nodes:
            yield node.domain, node.op_type
        for graph in _subgraphs(nodes):
            yield from called(graph.node)

    for start in bodies:
        stack = [(start, iter(sorted(set(called(bodies[start].node)))))] if start not in state else []
        state.setdefault(start, "open")
        while stack:
            current, callees = stack[-1]
            callee = next(callees, None)
            if callee is None:
                state[current] = "done"
                stack.pop()
            elif callee in bodies and state.get(callee) == "open":
                raise ModelError(f"function {callee[1]} calls itself, directly or through others")
            elif callee in bodies and callee not in state:
                state[callee] = "open"
                stack.append((callee, iter(sorted(set(called(bodies[callee].node))))))


def _with_shapes(model: ModelProto, report: ModelReport) -> ModelProto:
    op_schemas.register()
    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception as error:  # of many kinds, onnx's own and protobuf's: the shapes that the file declares remain
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        report.problems.append(f"shapes cannot be inferred: {first_line}")
        return model


# ---- one graph -------------------------------------------------------------------------------------------------------


class _Scope:
    """Names of one graph and of those around it."""

    def __init__(self, graph: GraphProto, outer: _Scope | None) -> None:
        self.outer = outer
        self.defined: set[str] = set()
        self.types = {value.name: value.type for value in [*graph.value_info, *graph.output, *graph.input]}
        self.constants: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.defined |= set(self.constants) | {value.name for value in graph.input}
        self.defined |= {tensor.values.name for tensor in graph.sparse_initializer}

    def holds(self, name: str) -> bool:
        return name in self.defined or (self.outer is not None and self.outer.holds(name))

    def constant(self, name: str) -> TensorProto | None:
        if name in self.constants:
            return self.constants[name]
        return self.outer.constant(name) if self.outer and name not in self.defined else None

    def type_of(self, name: str) -> onnx.TypeProto | None:
        if name in self.types:
            return self.types[name]
        return self.outer.type_of(name) if self.outer and name not in self.defined else None


class _Checker:
    def __init__(self, folder: str, strict: bool, device: str, report: ModelReport) -> None:
        self.folder = folder
        self.strict = strict
        self.device = device
        self.report = report

    def walk(self, graph: GraphProto, outer: _Scope | None = None) -> None:
        scope = _Scope(graph, outer)
        for index, node in enumerate(graph.node):
            title = node.name or f"{node.op_type or 'node'} #{index}"
            missing = next((name for name in node.input if name and not scope.holds(name)), None)
            if missing is not None:
                self.report.problems.append(
                    f"{title} reads {missing!r}, which nothing before it writes: "
                    "the nodes form a cycle or are out of order"
                )
            self._check(node, title, scope)
            for subgraph in _subgraphs([node]):
                self.walk(subgraph, scope)
            for output in node.output:
                if output and output in scope.defined:
                    self.report.problems.append(f"{title} writes {output!r}, which is written already")
                scope.defined.add(output)
            if node.op_type == "Constant" and node.output:
                for attribute in node.attribute:
                    if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
                        scope.constants[node.output[0]] = attribute.t

    def _check(self, node: NodeProto, title: str, scope: _Scope) -> None:
        known = outside_name(node.op_type)
        is_standard = node.op_type in standard.CHECKERS and node.domain in ("", "ai.onnx")
        if known is None and not is_standard:
            self.report.other_nodes += 1
            return
        result = NodeReport(title, node.op_type, "ok")
        self.report.nodes.append(result)
        try:
            result.kernel = (
                self._check_standard(node, scope, result) if known is None else self._check_outside(node, scope, result)
            )
        except NotImplementedError as error:
            result.verdict, result.reason = "no_kernel", str(error)
        except ValueError as error:
            result.verdict, result.reason = "reject", str(error)

    def _check_outside(self, node: NodeProto, scope: _Scope, result: NodeReport) -> str:
        name = outside_name(node.op_type)
        schema = ops.SCHEMAS[name.operator]
        warn = result.warnings.append
        inputs = check_counts(node, name, schema, self.strict, warn)
        attributes = read_attributes(node, schema, self.strict, warn)
        infos = {
            operand.name: self._info(value, operand.name, scope)
            for operand, value in zip(schema.inputs, inputs, strict=True)
            if value
        }
        for operand, info in infos.items():
            if not info.element_type:
                warn(f"the type of {operand} is not known: not checked")
        kernel = check_call(name.operator, infos, attributes)
        if self.device != "cpu":
            kernel = check_call(name.operator, infos, attributes, self.device, values=False)
        return kernel

    def _check_standard(self, node: NodeProto, scope: _Scope, result: NodeReport) -> str:
        infos = [self._info(name, f"input {i}", scope) if name else None for i, name in enumerate(node.input)]
        attributes = self._standard_attributes(node, result)
        wanted = [bool(output) for output in node.output]
        return standard.CHECKERS[node.op_type](infos, attributes, wanted, self.device)

    def _standard_attributes(self, node: NodeProto, result: NodeReport) -> dict[str, Any]:
        known = onnx.defs.get_schema(node.op_type).attributes
        values: dict[str, Any] = {}
        for attribute in node.attribute:
            if attribute.name not in known:
                if self.strict:
                    raise NodeError(f"attribute {attribute.name} is unknown, wanted one of {', '.join(known)}")
                result.warnings.append(f"attribute {attribute.name} is unknown: ignored")
                continue
            kind = known[attribute.name].type
            if int(kind.value) != attribute.type:
                raise NodeError(f"attribute {attribute.name} has the wrong type, wanted {kind.name}")
            values[attribute.name] = onnx.helper.get_attribute_value(attribute)
        return values

    # ---- values --------------------------------------------------------------------------------------------------

    def _info(self, name: str, operand: str, scope: _Scope) -> TensorInfo:
        constant = scope.constant(name)
        try:
            if constant is not None:
                shape = list(constant.dims)
                if any(extent < 0 for extent in shape):
                    raise NodeError(f"is a constant with a negative extent: {shape}")
                return TensorInfo(constant.data_type, checked_shape(shape), self._data(constant))
            known = scope.type_of(name)
            return TensorInfo() if known is None else info_of_type(known)
        except NodeError as error:
            raise NodeError(f"{operand} {error}") from None

    def _data(self, tensor: TensorProto) -> np.ndarray | None:
        """Values of a short constant; weights are never read."""
        if math.prod(tensor.dims) > _MOST_VALUES:
            return None
        try:
            if tensor.data_location == TensorProto.EXTERNAL:
                if not self.folder:
                    return None
                tensor = TensorProto.FromString(tensor.SerializeToString())
                external_data_helper.load_external_data_for_tensor(tensor, self.folder)
            return numpy_helper.to_array(tensor)
        except Exception as error:  # numpy, onnx and the file system each have their own kinds
            raise NodeError(f"is a constant that cannot be read: {error}") from None


def parse_device(device: str) -> str:
    """ "cpu" or "cuda" from "cpu", "cuda" or "sm_90". Raises ModelError for anything else."""
    if device in ("cpu", "cuda"):
        return device
    if device.startswith("sm_") and device[3:].isdigit():
        return "cuda"
    raise ModelError(f"the device is {device!r}, wanted cpu or sm_<number>, for example sm_90")


def check_model(model: str | Path | bytes | ModelProto, *, strict: bool = False, device: str = "cpu") -> ModelReport:
    """Checks every node that polyop knows, subgraphs included; weights stay where they are.

    Strict refuses what a schema does not name; otherwise TensorRT's tolerances hold and each is a warning. Raises
    ModelError when the file is no ONNX model or the device is unknown.
    """
    kind = parse_device(device)
    loaded, folder = load(model)
    _check_functions(loaded)
    report = ModelReport()
    checker = _Checker(folder, strict, kind, report)
    checker.walk(_with_shapes(loaded, report).graph)
    return report
