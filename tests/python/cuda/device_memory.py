"""Tensors on the GPU with the strides they have on the CPU, and guarded outputs."""

from __future__ import annotations

from typing import Any

import torch

from polyop.testing.sweep import Call, Guarded


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of the whole storage."""
    if tensor.numel() == 0:
        return tensor.cuda()
    item = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).cuda()
    usable = storage[: storage.numel() // item * item].view(tensor.dtype)
    return usable.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class DeviceGuarded:
    """A copy of a Guarded's buffer on the GPU; ``fetch`` brings it back."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded
        self.buffer = guarded.buffer.cuda()
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
    on_device = {name: DeviceGuarded(guarded) for name, guarded in written.items()}
    moved = {
        name: to_device(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name not in on_device
    }
    function(**moved, **{name: guarded.tensor for name, guarded in on_device.items()})
    return {name: guarded.fetch() for name, guarded in on_device.items()}
