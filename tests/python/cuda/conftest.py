"""Skips this folder, with the reason, where no CUDA kernel can run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from polyop import cuda

sys.path.insert(0, str(Path(__file__).resolve().parent))  # attention_cases, device_memory


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    if not cuda.has_kernels():
        return "polyop was built without CUDA kernels (preset 'cuda')"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    here = Path(__file__).resolve().parent
    for item in items:
        if reason is not None and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"CUDA kernels: {reason}"))
