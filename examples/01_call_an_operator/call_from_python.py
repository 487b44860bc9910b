"""The same call from Python, on torch tensors."""

from __future__ import annotations

import torch

import polyop

x = torch.arange(1.0, 7.0).reshape(2, 3)
print(polyop.ops.circular_pad(x, [1, 1, 1, 1]))

# The operator is registered with torch as well, so torch.compile and torch.export know its shapes without running it.
print(torch.ops.polyop.circular_pad(x.to("meta"), [1, 1, 1, 1]).shape)

try:
    polyop.ops.circular_pad(x, [1])
except ValueError as error:
    print(f"refused: {error}")
