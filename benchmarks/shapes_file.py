"""Reading shapes/<name>.txt; needs nothing but Python."""

from __future__ import annotations

from pathlib import Path

SHAPES = Path(__file__).resolve().parent / "shapes"


def read_shapes(name: str) -> list[dict[str, int | str]]:
    """The cases of shapes/<name>.txt: one a line, as key=value pairs; numbers become int; # starts a comment."""
    cases = []
    for line in (SHAPES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        pairs = [pair.split("=") for pair in line.split("#")[0].split()]
        if pairs:
            cases.append({key: int(value) if value.lstrip("-").isdigit() else value for key, value in pairs})
    return cases


def describe(case: dict[str, int | str]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())
