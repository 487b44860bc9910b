"""What the benchmark programs share: timing in turns, the machine's read bandwidth, the table."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

NUM_THREADS = len(os.sched_getaffinity(0))


def time_in_turns(
    functions: dict[str, Callable[[], object]], *, seconds: float = 0.6, min_rounds: int = 5
) -> dict[str, float]:
    """Median seconds a call of each function.

    The functions take turns, so that a change in the machine's speed meets all of them. Each is called often enough in
    a turn that reading the clock does not count.
    """
    calls = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        calls[name] = max(1, int(2e-3 / max(time.perf_counter() - start, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    deadline = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < deadline or len(next(iter(samples.values()))) < min_rounds:
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                function()
            samples[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(values) for name, values in samples.items()}


@cache
def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory: the best of several sums over 512 MiB."""
    data = torch.ones(128 * 2**20, dtype=torch.float32)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.numel() * 4 / best


@cache
def copy_bandwidth() -> float:
    """Bytes a second, read and written, of torch's copy of 256 MiB: the best of several."""
    source = torch.ones(64 * 2**20, dtype=torch.float32)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


@dataclass
class Row:
    """One measured case. ``bytes_moved`` and ``flops`` are what the mathematics needs, not what a kernel does."""

    case: str
    seconds: float
    peer_seconds: float
    bytes_moved: int = 0
    flops: int = 0


def print_rows(title: str, peer: str, rows: list[Row]) -> None:
    """The table of one program; ratio is peer time / our time, above 1 means ours is faster."""
    bandwidth = read_bandwidth()
    table = Table(
        title=f"{title} · {processor_name()}, {NUM_THREADS} threads · read bandwidth {bandwidth / 1e9:.1f} GB/s, "
        f"copy {copy_bandwidth() / 1e9:.1f} GB/s"
    )
    for heading in ("case", "us", "GB/s", "% of read bandwidth", "GFLOP/s", f"{peer} us", "ratio"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        rate = row.bytes_moved / row.seconds
        table.add_row(
            row.case,
            f"{row.seconds * 1e6:.1f}",
            f"{rate / 1e9:.2f}" if row.bytes_moved else "",
            f"{100 * rate / bandwidth:.0f}" if row.bytes_moved else "",
            f"{row.flops / row.seconds / 1e9:.1f}" if row.flops else "",
            f"{row.peer_seconds * 1e6:.1f}",
            f"{row.peer_seconds / row.seconds:.2f}",
        )
    Console(width=140).print(table)


def processor_name() -> str:
    """The processor as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def require_close(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Unverified kernels are not timed: raises when ours and the peer's result differ too much."""
    difference = (got.double() - wanted.double()).abs().max().item()
    scale = max(1.0, wanted.double().abs().max().item())
    if not difference <= tolerance * scale:
        raise SystemExit(f"{name}: differs from the peer by {difference:g}, allowed {tolerance * scale:g}")
