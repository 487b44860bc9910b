"""The GPU benchmark's modules on the CPU: every case of its shape files, cut down, passes the check that comes before
timing. On a GPU, tests/python/cuda/test_benchmark_shapes.py adds the double reference."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu import OPERATORS  # noqa: E402
from gpu.timing import METHOD  # noqa: E402
from shapes_file import cut_down, describe, read_shapes  # noqa: E402

CASES = [(operator, case) for operator in OPERATORS for case in read_shapes(f"gpu_{operator}")]


@pytest.mark.parametrize(("operator", "case"), CASES, ids=[f"{o} {describe(c)}" for o, c in CASES])
def test_case_passes_its_check(operator, case):
    torch.manual_seed(0)
    module = importlib.import_module(f"gpu.{operator}")
    small = cut_down(case)
    call = module.make(small, "cpu")
    module.check(small, call)
    module.add_peers(small, call)
    assert module.bytes_moved(case) >= module.bytes_moved(small) > 0


def test_a_wrong_result_is_not_timed():
    module = importlib.import_module("gpu.circular_pad")
    case = cut_down(read_shapes("gpu_circular_pad")[0])
    call = module.make(case, "cpu")
    run = call.run
    call.run = lambda: (run(), call.arguments["out"].view(-1)[7].add_(1))
    with pytest.raises(SystemExit, match="circular_pad"):
        module.check(case, call)


def test_page_is_that_of_the_newest_results_and_notes():
    from write_performance_page import NOTES, PAGE, newest_results, page

    source = newest_results()
    report = json.loads(source.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(report, source.name, NOTES.read_text(encoding="utf-8")), (
        "docs/performance.md: run benchmarks/write_performance_page.py"
    )


def test_page_says_how_it_was_measured_and_every_time():
    from write_performance_page import page

    measurement = {
        "operator": "attention",
        "case": "B=1",
        "bytes_moved": 8_000_000,
        "calls_per_replay": 10,
        "copy_microseconds": 2.5,
        "microseconds": {"polyop": 4.0, "cuDNN": 5.0, "FlashInfer": 6.0},
    }
    environment = dict.fromkeys(("date", "device", "driver", "torch", "cuda", "cudnn", "flashinfer"), "7")
    report = {
        "environment": environment,
        "method": METHOD,
        "clocks": {"before": "1980 MHz", "after attention": "1975 MHz"},
        "copy_bandwidth": 4e12,
        "measurements": [measurement],
    }
    text = page(report, "x.json", "## Notes\n")
    assert METHOD in text and "1975 MHz" in text and "## Notes" in text
    assert "| B=1 | 10 | 4.0 | 2.00 | 50 | 2.5 | cuDNN | 5.0 | 1.25 |" in text
