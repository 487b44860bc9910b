"""The CUDA kernels beside torch, cuDNN and FlashInfer in one process; gpu/README.md says what is where.

Usage: gpu_kernels.py [--output results.json] [--only operator] [--match text] [--no-peers] [--profile]

--only may be repeated; --match takes the cases whose line holds the text; --profile times nothing and runs each case
ten times between cudaProfilerStart and Stop, for ncu --profile-from-start off.
"""

from __future__ import annotations

import argparse
import importlib
import json
from types import ModuleType
from typing import Any

import torch
from gpu import OPERATORS
from gpu.flashinfer_peers import compile_modules
from gpu.timing import METHOD, Timer, clocks, environment, plain_copy
from shapes_file import describe, read_shapes

from polyop import cuda


def prepare(module: ModuleType, case: dict[str, Any], with_peers: bool) -> dict[str, Any]:
    """Functions by name of one call with tensors of its own, checked."""
    call = module.make(case, "cuda")
    module.check(case, call)
    if with_peers:
        module.add_peers(case, call)
    return call.functions()


def measure(timer: Timer, operator: str, case: dict[str, Any], with_peers: bool) -> dict[str, Any]:
    module = importlib.import_module(f"gpu.{operator}")
    moved = module.bytes_moved(case)
    sets = [prepare(module, case, with_peers) for _ in range(timer.calls_per_replay(moved))]
    names = [name for name in sets[0] if all(name in functions for functions in sets)]
    sets = [{name: functions[name] for name in names} | {"copy": plain_copy(moved)} for functions in sets]
    times = timer.time(sets, moved)
    return {
        "operator": operator,
        "case": describe(case),
        "bytes_moved": moved,
        "calls_per_replay": len(sets),
        "copy_microseconds": times.pop("copy"),
        "microseconds": times,
    }


def show(m: dict[str, Any]) -> None:
    times = m["microseconds"] | {"copy": m["copy_microseconds"]}
    rates = "  ".join(f"{name} {t:.2f} us {m['bytes_moved'] / t / 1e6:.2f} TB/s" for name, t in times.items())
    print(f"{m['operator']} {m['case']} x{m['calls_per_replay']}: {rates}", flush=True)


def profile(operator: str, case: dict[str, Any]) -> None:
    module = importlib.import_module(f"gpu.{operator}")
    call = module.make(case, "cuda")
    call.run()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        for _ in range(10):
            call.run()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--only", action="append", choices=OPERATORS)
    parser.add_argument("--match", default="")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    cases = [
        (operator, case)
        for operator in arguments.only or OPERATORS
        for case in read_shapes(f"gpu_{operator}")
        if arguments.match in describe(case)
    ]
    if not cases:
        parser.error(f"no case holds {arguments.match!r}")
    if arguments.profile:
        for operator, case in cases:
            profile(operator, case)
        return
    if not arguments.no_peers:
        compile_modules([case for operator, case in cases if operator == "attention"])
    report: dict[str, Any] = {"environment": environment(), "method": METHOD, "clocks": {"before": clocks()}}
    timer = Timer()
    report |= {"copy_bandwidth": timer.copy_bytes_per_second, "measurements": []}
    print(f"copy of 1 GiB {timer.copy_bytes_per_second / 1e12:.2f} TB/s", flush=True)
    for index, (operator, case) in enumerate(cases):
        report["measurements"].append(measure(timer, operator, case, not arguments.no_peers))
        show(report["measurements"][-1])
        torch.cuda.empty_cache()
        if all(later != operator for later, _ in cases[index + 1 :]):
            report["clocks"][f"after {operator}"] = clocks()  # on a device that is still warm
        if arguments.output:  # written after every case: a run that is cut off keeps what it has
            with open(arguments.output, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)
    cuda.check_errors()


if __name__ == "__main__":
    main()
