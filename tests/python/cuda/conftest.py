"""Skips this folder, with the reason, where no CUDA kernel can run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from polyop import cuda

HERE = Path(__file__).resolve().parent
# attention_cases, device_memory; example_calls; the benchmark's modules
sys.path[:0] = [str(HERE), str(HERE.parent / "ops"), str(HERE.parents[2] / "benchmarks")]


def missing(item: pytest.Item) -> str | None:
    if not cuda.has_kernels():
        return "polyop was built without CUDA kernels (preset 'cuda')"
    if not torch.cuda.is_available() and item.get_closest_marker("without_gpu") is None:
        return "no GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and (reason := missing(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"CUDA kernels: {reason}"))
