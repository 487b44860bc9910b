"""Tensors on the GPU with the strides they have on the CPU, guarded outputs, captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyop import ops
from polyop.testing.sweep import Call, Guarded

DEVICE = "cuda"


def kernels_of(operator: str) -> list[str]:
    """Names of the operator's CUDA kernels in the order they are tried, as the library lists them."""
    prefix = f"{DEVICE}:"
    return [name.removeprefix(prefix) for name in ops.kernel_names(operator) if name.startswith(prefix)]


#: (operator, kernel) of every CUDA kernel there is.
ALL_KERNELS = [(operator, kernel) for operator in ops.SCHEMAS for kernel in kernels_of(operator)]


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of the whole storage."""
    if tensor.numel() == 0:
        return tensor.to(DEVICE, copy=True)
    item = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).to(DEVICE, copy=True)
    usable = storage[: storage.numel() // item * item].view(tensor.dtype)
    return usable.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: to_device(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """A graph of one call, which has run once before; the function that replays it."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class DeviceGuarded:
    """A copy of a Guarded's buffer on the GPU; ``fetch`` brings it back."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded
        self.buffer = guarded.buffer.to(DEVICE, copy=True)
        host = guarded.tensor
        whole = self.buffer[: self.buffer.numel() // host.element_size() * host.element_size()].view(host.dtype)
        self.tensor = whole.as_strided(host.shape, host.stride(), host.storage_offset())

    def fetch(self) -> Guarded:
        self.guarded.buffer.copy_(self.buffer)
        return self.guarded


def run_on_device(function: Any, call: Call, shapes: list[Any]) -> dict[str, Guarded]:
    """Calls ``function`` on the GPU with guarded copies of everything that it may write, which come back."""
    arguments, written = call.fresh()
    for output, shape in zip(call.schema.outputs, shapes, strict=True):
        if shape is not None:
            written[output.name] = Guarded.empty(tuple(shape[0]), shape[1], gap=2 if len(shape[0]) > 1 else 0)
    on_gpu = {name: DeviceGuarded(guarded) for name, guarded in written.items()}
    moved = on_device({name: value for name, value in arguments.items() if name not in on_gpu})
    function(**moved, **{name: guarded.tensor for name, guarded in on_gpu.items()})
    return {name: guarded.fetch() for name, guarded in on_gpu.items()}
