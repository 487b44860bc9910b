"""``polyop check``: the command line of check_model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def check_command(
    model: Annotated[Path, typer.Argument(help="ONNX file; external data is not read")],
    strict: Annotated[bool, typer.Option(help="refuse what a schema does not name")] = False,
    device: Annotated[str, typer.Option(help="cpu, or sm_90 and the like")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of lines")] = False,
) -> None:
    """Says of each attention, cache or rotary node of an ONNX file whether it is valid and which kernel would run it.

    Exit code 0: all of them run. Exit code 1: a node does not, or the file is no ONNX model.
    """
    try:
        from .check import ModelError, check_model
    except ImportError as error:
        typer.echo(f"polyop check needs the package onnx: pip install 'polyop[onnx]' ({error})", err=True)
        raise typer.Exit(1) from None
    try:
        report = check_model(model, strict=strict, device=device)
    except ModelError as error:
        typer.echo(json.dumps({"ok": False, "error": str(error)}) if as_json else f"error: {error}", err=not as_json)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"ok": report.is_ok, **asdict(report)}, indent=2))
    else:
        for node in report.nodes:
            typer.echo(f"{node.verdict:9}  {node.op_type} {node.name}: {node.kernel or node.reason}")
            for warning in node.warnings:
                typer.echo(f"{'':9}  warning: {warning}")
        for problem in report.problems:
            typer.echo(f"graph: {problem}")
        typer.echo(f"{len(report.nodes)} nodes checked, {report.other_nodes} others not looked at")
    raise typer.Exit(0 if report.is_ok else 1)
