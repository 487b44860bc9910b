"""SafetensorsWriter: a .safetensors file written tensor by tensor, so that a model never stands in memory whole.

The library ``safetensors`` reads these files; its writer wants all tensors at once and leaves the first byte of data at
any multiple of 8. Here data begins at a multiple of 64, where vector loads from the mapped file like it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_ALIGNMENT_BYTES = 64
_LENGTH_BYTES = 8  # the file begins with the header's length, u64 little endian


class SafetensorsWriter:
    """Writes the tensors of a plan, in any order; use it as a context manager."""

    def __init__(self, file: Path, plan: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Creates the file at its full size.

        Args:
            file: path of the new file.
            plan: dtype and shape of every tensor. Larger tensors are placed first, so that sizes that are multiples
                of 64 keep what follows them aligned.

        Raises:
            OSError: the file cannot be made, or the disk is full.
        """
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in plan.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets, offset = {}, 0
        for name in sorted(plan, key=lambda name: (-sizes[name], name)):
            dtype, shape = plan[name]
            end = offset + sizes[name]
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._offsets[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT_BYTES)  # the format allows spaces at the end
        self._plan, self._missing = dict(plan), set(plan)
        self._data_start = _LENGTH_BYTES + len(text)
        self._file = open(file, "wb")  # noqa: SIM115 (closed in __exit__)
        self._file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"safetensors: not written: {', '.join(sorted(self._missing))}")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor of the plan.

        Raises:
            ValueError: the dtype or shape is not the planned one.
            OSError: the disk is full.
        """
        dtype, shape = self._plan[name]
        if tensor.dtype is not dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"safetensors: {name} is {tensor.dtype} {list(tensor.shape)}; planned {dtype} {shape}")
        self._file.seek(self._data_start + self._offsets[name])
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)
