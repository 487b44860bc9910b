"""Element types and tensors between ONNX, numpy and torch, and what a graph knows about a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, TypeProto, helper

from ..ops.generate import TORCH_DTYPES

#: ONNX element type -> the short name of the dtype.
DTYPE_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "f32",
    TensorProto.FLOAT16: "f16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT8E4M3FN: "f8e4m3",
    TensorProto.INT64: "i64",
    TensorProto.INT32: "i32",
    TensorProto.INT8: "i8",
    TensorProto.UINT8: "u8",
    TensorProto.BOOL: "bool",
}
ELEMENT_TYPES = {name: element_type for element_type, name in DTYPE_NAMES.items()}

#: More elements than any tensor can have; products of extents below it stay inside 64 bits.
MOST_ELEMENTS = 1 << 62


class NodeError(ValueError):
    """A node that its schema does not allow. The text names operand or attribute, axis, got and wanted."""


@dataclass(frozen=True)
class Extent:
    """A symbolic extent; ``None`` has no name. Arithmetic gives an expression as text."""

    name: str | None

    def _with(self, operator: str, other: Any, swapped: bool = False) -> Extent:
        parts = [str(part.name if isinstance(part, Extent) else part) for part in (self, other)]
        if self.name is None or (isinstance(other, Extent) and other.name is None):
            return Extent(None)
        return Extent(f"({operator.join(reversed(parts) if swapped else parts)})")

    def __add__(self, other: Any) -> Extent:
        return self._with(" + ", other)

    def __sub__(self, other: Any) -> Extent:
        return self._with(" - ", other)

    def __mul__(self, other: Any) -> Extent:
        return self._with(" * ", other)

    def __floordiv__(self, other: Any) -> Extent:
        return self._with(" // ", other)

    def __mod__(self, other: Any) -> Extent:
        return self._with(" % ", other)

    def __neg__(self) -> Extent:
        return Extent(None if self.name is None else f"-{self.name}")

    def __radd__(self, other: Any) -> Extent:
        return self._with(" + ", other, swapped=True)

    def __rsub__(self, other: Any) -> Extent:
        return self._with(" - ", other, swapped=True)

    def __rmul__(self, other: Any) -> Extent:
        return self._with(" * ", other, swapped=True)


@dataclass
class TensorInfo:
    """What a graph knows about a value: element type (0: unknown), extents (None: rank unknown), data."""

    element_type: int = 0
    shape: list[int | Extent] | None = None
    data: np.ndarray | None = None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    def numbers(self) -> list[int] | None:
        """The shape with -1 for symbolic extents."""
        return None if self.shape is None else [-1 if isinstance(extent, Extent) else extent for extent in self.shape]

    def known(self, axis: int) -> int | None:
        """The extent of an axis when it is a number."""
        extent = None if self.shape is None else self.shape[axis]
        return None if isinstance(extent, Extent) else extent


def element_type_name(element_type: int) -> str:
    """``f32``, or ONNX's own name in lower case for a type that polyop does not have."""
    if element_type in DTYPE_NAMES:
        return DTYPE_NAMES[element_type]
    try:
        return TensorProto.DataType.Name(element_type).lower()
    except ValueError:
        return f"element type {element_type}"


def info_of_type(value: TypeProto) -> TensorInfo:
    """A TensorInfo from a type of a graph. Raises NodeError for a value that is no dense tensor."""
    kind = value.WhichOneof("value")
    if kind is None:
        return TensorInfo()
    if kind != "tensor_type":
        raise NodeError(f"is a {kind.removesuffix('_type')}, wanted a tensor")
    tensor = value.tensor_type
    if not tensor.HasField("shape"):
        return TensorInfo(tensor.elem_type)
    shape: list[int | Extent] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value"):
            if dim.dim_value < 0:
                raise NodeError(f"axis {axis} is {dim.dim_value}, wanted at least 0")
            shape.append(dim.dim_value)
        else:
            shape.append(Extent(dim.dim_param or None))
    return TensorInfo(tensor.elem_type, checked_shape(shape))


def checked_shape(shape: list[int | Extent]) -> list[int | Extent]:
    """The shape itself. Raises NodeError when it has more elements than an address has bytes."""
    count = math.prod(extent for extent in shape if not isinstance(extent, Extent) and extent > 0)
    if count > MOST_ELEMENTS:
        raise NodeError(f"has {count} elements, wanted at most 2^62")
    return shape


def type_of(info: TensorInfo) -> TypeProto:
    """The type of a graph's value."""
    if info.shape is None:
        return helper.make_tensor_type_proto(info.element_type, None)
    dims = [extent.name if isinstance(extent, Extent) else extent for extent in info.shape]
    return helper.make_tensor_type_proto(info.element_type, dims)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The same memory as a torch tensor where numpy allows it. bfloat16 and float8 arrays are those of ml_dtypes.

    Raises NodeError for an element type that polyop does not have.
    """
    array = np.asarray(array)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    name = array.dtype.name
    if name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if name == "float8_e4m3fn":
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    if array.dtype.kind not in "fiub" or name in ("uint16", "uint32", "uint64"):
        raise NodeError(f"is {name}, a type that polyop does not have")
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The inverse of to_torch."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        import ml_dtypes

        same_size = torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8
        numpy_type = ml_dtypes.bfloat16 if tensor.dtype == torch.bfloat16 else ml_dtypes.float8_e4m3fn
        return tensor.view(same_size).numpy().view(numpy_type)
    return tensor.numpy()


def torch_dtype(element_type: int) -> torch.dtype | None:
    """The torch dtype of an element type, None where polyop has none."""
    return TORCH_DTYPES.get(DTYPE_NAMES.get(element_type, ""))
