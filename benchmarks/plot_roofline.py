"""Draws bandwidth against bytes moved for every case of a results file of gpu_kernels.py, below the copy's rate.

Usage: plot_roofline.py [benchmarks/results/<file>.json]     (default the newest; writes <file>.png beside it)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from write_performance_page import newest_results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path, nargs="?", default=newest_results())
    source = parser.parse_args().results
    report = json.loads(source.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(9, 5.5))
    measurements = report["measurements"]
    for operator in dict.fromkeys(m["operator"] for m in measurements):
        cases = [m for m in measurements if m["operator"] == operator]
        rates = [m["bytes_moved"] / m["microseconds"]["polyop"] / 1e6 for m in cases]
        axes.scatter([m["bytes_moved"] / 1e6 for m in cases], rates, label=operator, zorder=3)
    peers = [(m["bytes_moved"], t) for m in measurements for name, t in m["microseconds"].items() if name != "polyop"]
    rates = [moved / t / 1e6 for moved, t in peers]
    axes.scatter([moved / 1e6 for moved, _ in peers], rates, marker="x", color="gray", label="peers")
    copies = [(m["bytes_moved"], m["copy_microseconds"]) for m in measurements if "copy_microseconds" in m]
    if copies:
        line = sorted((moved / 1e6, moved / t / 1e6) for moved, t in copies)
        axes.plot(*zip(*line, strict=True), color="gray", linewidth=1, label="copy of as many bytes")
    axes.axhline(report["copy_bandwidth"] / 1e12, color="black", linewidth=1, label="copy of 1 GiB")
    axes.set(xscale="log", xlabel="bytes moved, MB", ylabel="TB/s", ylim=(0, 5))
    axes.set_title(f"{report['environment']['device']}, {report['environment']['date']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(source.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
