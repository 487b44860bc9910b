"""kv_cache_update into a paged cache: beside torch's indexed assignment and FlashInfer's append."""

from __future__ import annotations

from typing import Any

import torch

from . import flashinfer_peers
from .calls import DTYPES, OperatorCall, PagedTokens, quantized, require_equal

Case = dict[str, Any]


def bytes_moved(case: Case) -> int:
    elements = 2 * case["T"] * case["Hkv"] * case["D"]
    return elements * (2 + DTYPES[case["kv"]].itemsize)


def make(case: Case, device: str) -> OperatorCall:
    place = PagedTokens.make(case, device)
    k, v = torch.randn(2, case["T"], case["Hkv"], case["D"], device=device, dtype=torch.bfloat16).unbind()
    pool = place.pool(case, DTYPES[case["kv"]])
    arguments = {
        "k_cache": pool[0],
        "v_cache": pool[1],
        "k": k,
        "v": v,
        "update_offsets": place.offsets,
        "write_positions": place.starts,
        "page_table": place.table,
    }
    if pool.element_size() == 1:
        arguments["k_scale"] = torch.tensor([0.03], device=device)
        arguments["v_scale"] = torch.tensor([0.05], device=device)
    return OperatorCall("kv_cache_update", arguments)


def slots_of(call: OperatorCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and row of every token, from the call's own operands."""
    a = call.arguments
    each = a["k"].shape[0] // a["page_table"].shape[0]
    at = a["write_positions"].long()[:, None] + torch.arange(each, device=a["k"].device)
    page = a["k_cache"].shape[1]
    return a["page_table"].long().gather(1, at // page).flatten(), (at % page).flatten()


def check(case: Case, call: OperatorCall) -> None:
    call.run()
    a = call.arguments
    pages, slots = slots_of(call)
    for name in ("k", "v"):
        cache = a[f"{name}_cache"]
        stored = quantized(a[name], a[f"{name}_scale"], cache.dtype) if f"{name}_scale" in a else a[name]
        wanted = torch.zeros_like(cache).view(torch.uint8)
        wanted[pages, slots] = stored.view(torch.uint8)
        require_equal(f"kv_cache_update: {name}_cache", cache, wanted)


def add_peers(case: Case, call: OperatorCall) -> None:
    a = call.arguments
    if a["k_cache"].element_size() == 1:
        return
    pages, slots = slots_of(call)
    other = torch.zeros(2, *a["k_cache"].shape, dtype=a["k"].dtype, device=a["k"].device)
    ours = [a["k_cache"], a["v_cache"]]

    def assign() -> None:
        other[0].index_put_((pages, slots), a["k"])
        other[1].index_put_((pages, slots), a["v"])

    call.add_peer("torch index_put", lambda: assign, lambda _: list(zip(other, ours, strict=True)), 0.0)
    if flashinfer_peers.flashinfer is None:
        return
    theirs = torch.zeros_like(other)
    call.add_peer(
        "FlashInfer",
        lambda: flashinfer_peers.append(theirs, a["k"], a["v"], a),
        lambda _: list(zip(theirs, ours, strict=True)),
        0.0,
    )
