"""What the GPU benchmarks share: timing of captured calls with a cold second-level cache, in turns."""

from __future__ import annotations

import datetime
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

ROUNDS = 3
COLD_BELOW_BYTES = 100 * 2**20  # working sets under this would stay in the cache between calls


@dataclass
class Measurement:
    """One case: median microseconds of each implementation, best of the rounds."""

    operator: str
    case: str
    bytes_moved: int
    microseconds: dict[str, float]
    notes: list[str] = field(default_factory=list)

    @property
    def best_peer(self) -> str | None:
        peers = {name: t for name, t in self.microseconds.items() if not name.startswith("polyop")}
        return min(peers, key=peers.get) if peers else None


class Timer:
    """Times functions by CUDA events around graph replays; every replay works on a cache emptied by a large write."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    def capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()
        return graph

    def time(self, functions: dict[str, Callable[[], object]], bytes_moved: int, repeats: int = 15) -> dict[str, float]:
        """Microseconds by name. The functions take turns in an order that alternates from round to round."""
        graphs = {name: self.capture(function) for name, function in functions.items()}
        cold = bytes_moved < COLD_BELOW_BYTES
        best = dict.fromkeys(graphs, float("inf"))
        for round_number in range(ROUNDS):
            order = list(graphs) if round_number % 2 == 0 else list(graphs)[::-1]
            for name in order:
                pairs = []
                for _ in range(repeats):
                    if cold:
                        self.flush.zero_()
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    graphs[name].replay()
                    end.record()
                    pairs.append((start, end))
                torch.cuda.synchronize()
                best[name] = min(best[name], statistics.median(s.elapsed_time(e) for s, e in pairs) * 1e3)
        return best

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of a copy of 1 GiB."""
        source = torch.empty(2**30, dtype=torch.int8, device="cuda").random_()
        target = torch.empty_like(source)
        pairs = []
        for _ in range(20):  # not captured: a graph turns the copy into a node that runs at another rate
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return 2 * source.numel() / statistics.median(s.elapsed_time(e) for s, e in pairs[5:]) * 1e3


def clocks() -> str:
    query = "clocks.sm,clocks.mem,temperature.gpu"
    return subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.strip()


def environment() -> dict[str, Any]:
    """Device, driver and library versions, for the head of a results file."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    try:
        import flashinfer

        flashinfer_version = flashinfer.__version__
    except Exception:  # not installed, or installed for another machine
        flashinfer_version = None
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flashinfer": flashinfer_version,
    }


def require_close(what: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Unverified kernels are not timed."""
    difference = float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
    if not difference <= tolerance:
        raise SystemExit(f"{what}: relative difference {difference:g}, allowed {tolerance:g}")


def to_json(measurements: list[Measurement]) -> list[dict[str, Any]]:
    return [asdict(measurement) for measurement in measurements]
