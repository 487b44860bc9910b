"""Timing of captured calls with a cold second-level cache, in turns; clocks and versions."""

from __future__ import annotations

import datetime
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from .flashinfer_peers import flashinfer

ROUNDS = 3
REPEATS = 15
CALLS_OF_SHORT_CASES = 10
SHORT_SECONDS = 50e-6
COLD_BELOW_BYTES = 100 * 2**20  # sets of calls that touch less would stay in the cache from one replay to the next
FLUSH_BYTES = 256 * 2**20

METHOD = (
    f"A time is the median of {REPEATS} replays of a captured graph, best of {ROUNDS} rounds in which the "
    f"implementations take turns. A case whose bytes a copy would move in {SHORT_SECONDS * 1e6:.0f} us is captured "
    f"{CALLS_OF_SHORT_CASES} calls deep, each call on tensors of its own, and the replay's time is divided by "
    f"{CALLS_OF_SHORT_CASES}; others are one call a replay. Before each replay {FLUSH_BYTES >> 20} MB are written when "
    f"all its calls together touch less than {COLD_BELOW_BYTES >> 20} MB, so that the second-level cache is cold. "
    "Every result, of the library and of its peers, is checked before it is timed."
)

Functions = dict[str, Callable[[], object]]


class Timer:
    """Times sets of functions by CUDA events around graph replays."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self.copy_bytes_per_second = self.copy_bandwidth()

    def calls_per_replay(self, bytes_moved: int) -> int:
        return CALLS_OF_SHORT_CASES if bytes_moved / self.copy_bytes_per_second < SHORT_SECONDS else 1

    def capture(self, functions: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                for function in functions:
                    function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for function in functions:
                function()
        return graph

    def time(self, sets: list[Functions], bytes_moved: int) -> dict[str, float]:
        """Microseconds a call by name; each set works on tensors of its own and has the same names."""
        graphs = {name: self.capture([functions[name] for functions in sets]) for name in sets[0]}
        cold = bytes_moved * len(sets) < COLD_BELOW_BYTES
        best = dict.fromkeys(graphs, float("inf"))
        for round_number in range(ROUNDS):
            order = list(graphs) if round_number % 2 == 0 else list(graphs)[::-1]
            for name in order:
                pairs = []
                for _ in range(REPEATS):
                    if cold:
                        self.flush.zero_()
                    pairs.append(timed(graphs[name].replay))
                best[name] = min(best[name], median_microseconds(pairs) / len(sets))
        return best

    @staticmethod
    def copy_bandwidth() -> float:
        """Bytes a second, read and written, of a copy of 1 GiB."""
        source = torch.empty(2**30, dtype=torch.int8, device="cuda").random_()
        target = torch.empty_like(source)
        # Not captured: a graph turns the copy into a node that runs at another rate.
        pairs = [timed(lambda: target.copy_(source)) for _ in range(20)]
        return 2 * source.numel() / median_microseconds(pairs[5:]) * 1e6


def timed(function: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    return start, end


def median_microseconds(pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def plain_copy(bytes_moved: int) -> Callable[[], object]:
    """A kernel of torch that reads and writes as many bytes: what the device does with them at best."""
    words = max(1, bytes_moved // 8)
    source = torch.zeros(words, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target)


def query(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def clocks() -> str:
    """SM and memory clock and temperature, as nvidia-smi writes them."""
    return query("clocks.sm,clocks.mem,temperature.gpu")


def environment() -> dict[str, Any]:
    """Device, driver and library versions, for the head of a results file."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "driver": query("driver_version"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flashinfer": None if flashinfer is None else flashinfer.__version__,
    }
