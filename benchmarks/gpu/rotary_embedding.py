"""rotary_embedding: beside FlashInfer's rotation in place."""

from __future__ import annotations

from typing import Any

import torch

from . import flashinfer_peers
from .calls import OperatorCall, require_close, rotary_table, rotated

Case = dict[str, Any]


def bytes_moved(case: Case) -> int:
    return 2 * 2 * case["T"] * (case["Hq"] + case["Hkv"]) * case["D"]


def make(case: Case, device: str) -> OperatorCall:
    tokens, width = case["T"], case["D"]
    q, k = (torch.randn(tokens, case[heads], width, device=device, dtype=torch.bfloat16) for heads in ("Hq", "Hkv"))
    arguments = {
        "q": q,
        "k": k,
        "cos_sin": rotary_table(tokens, width, device),
        "position_ids": torch.arange(tokens, device=device, dtype=torch.int32),
        "q_out": torch.empty_like(q),
        "k_out": torch.empty_like(k),
    }
    return OperatorCall("rotary_embedding", arguments)


def check(case: Case, call: OperatorCall) -> None:
    call.run()
    a = call.arguments
    angles = a["cos_sin"][a["position_ids"].long()]
    for name in ("q", "k"):
        require_close(f"rotary_embedding: {name}_out", a[f"{name}_out"], rotated(a[name], angles), 1e-2)


def add_peers(case: Case, call: OperatorCall) -> None:
    if flashinfer_peers.flashinfer is None:
        return
    a = call.arguments
    q, k = a["q"].clone(), a["k"].clone()
    call.add_peer(
        "FlashInfer",
        lambda: flashinfer_peers.rotate(q, k, a["cos_sin"], a["position_ids"]),
        lambda _: [(q, a["q_out"]), (k, a["k_out"])],
    )
