"""Reading shapes/<name>.txt; needs nothing but Python."""

from __future__ import annotations

from pathlib import Path

SHAPES = Path(__file__).resolve().parent / "shapes"

Case = dict[str, "int | str"]


def read_shapes(name: str) -> list[Case]:
    """The cases of shapes/<name>.txt: one a line, as key=value pairs; numbers become int; # starts a comment."""
    cases = []
    for line in (SHAPES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        pairs = [pair.split("=") for pair in line.split("#")[0].split()]
        if pairs:
            cases.append({key: int(value) if value.lstrip("-").isdigit() else value for key, value in pairs})
    return cases


def describe(case: Case) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def cut_down(case: Case) -> Case:
    """The same case, small enough for the double reference.

    B at most 3 (1 where sequences have many rows), `length` at most 515, tokens of a sequence at most 23, extents of
    an image at most 37 and of its outer axes at most 3. Heads, head sizes, pages, dtypes and padding stay.
    """
    small = dict(case)
    if "B" in case:
        small["B"] = min(case["B"], 1 if case.get("rows", 1) > 1 else 3)
    if "length" in case:
        small["length"] = min(case["length"], 515)
    if "T" in case:
        small["T"] = min(case["T"] // case.get("B", 1), 23) * small.get("B", 1)
    if "shape" in case:
        extents = [int(extent) for extent in case["shape"].split("x")]
        padded = len(case["pad"].split(",")) // 2
        outer = len(extents) - padded
        small["shape"] = "x".join(str(min(n, 3 if i < outer else 37)) for i, n in enumerate(extents))
    return small
