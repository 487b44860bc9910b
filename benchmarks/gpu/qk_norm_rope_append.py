"""qk_norm_rope_append: one launch, beside the calls that it joins and FlashInfer's rotation and append."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyop import ops

from . import flashinfer_peers
from .calls import DTYPES, OperatorCall, PagedTokens, quantized, require_close, require_equal, rotary_table, rotated
from .kv_cache_update import slots_of

Case = dict[str, Any]
EPSILON = 1e-6


def bytes_moved(case: Case) -> int:
    read = case["T"] * (case["Hq"] + 2 * case["Hkv"]) * case["D"] * 2
    stored = DTYPES[case["kv"]].itemsize
    return read + case["T"] * case["D"] * (2 * case["Hq"] + 2 * case["Hkv"] * stored)


def make(case: Case, device: str) -> OperatorCall:
    tokens, heads, kv_heads, width = (case[name] for name in ("T", "Hq", "Hkv", "D"))
    place = PagedTokens.make(case, device)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, width, device=device, dtype=torch.bfloat16)
    q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)  # views of one projection, as a model has them
    pool = place.pool(case, DTYPES[case["kv"]])
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": pool[0],
        "v_cache": pool[1],
        "cos_sin": rotary_table(tokens // case["B"] + PagedTokens.START, width, device),
        "update_offsets": place.offsets,
        "write_positions": place.starts,
        "page_table": place.table,
        "epsilon": EPSILON,
        "q_out": torch.empty(tokens, heads, width, device=device, dtype=torch.bfloat16),
    }
    if case["norm"]:
        for name in ("q_norm_weight", "k_norm_weight"):
            arguments[name] = torch.rand(width, device=device).to(torch.bfloat16) + 0.5
    if pool.element_size() == 1:
        arguments["k_scale"] = torch.tensor([0.03], device=device)
        arguments["v_scale"] = torch.tensor([0.05], device=device)
    return OperatorCall("qk_norm_rope_append", arguments)


def positions_of(call: OperatorCall) -> torch.Tensor:
    a = call.arguments
    each = a["q"].shape[0] // a["page_table"].shape[0]
    steps = torch.arange(each, device=a["q"].device, dtype=torch.int32)
    return (a["write_positions"][:, None] + steps).flatten()


def check(case: Case, call: OperatorCall) -> None:
    call.run()
    a = call.arguments
    angles = a["cos_sin"][positions_of(call).long()]
    turned = {}
    for name in ("q", "k"):
        x, weight = a[name].float(), a.get(f"{name}_norm_weight")
        if weight is not None:
            x = x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.float()
        turned[name] = rotated(x, angles)
    require_close("qk_norm_rope_append: q_out", a["q_out"], turned["q"], 1e-2)
    pages, slots = slots_of(call)
    stored = a["k_cache"][pages, slots]
    if "k_scale" in a:
        require_close("qk_norm_rope_append: k_cache", stored.float() * a["k_scale"], turned["k"], 5e-2)
        require_equal(
            "qk_norm_rope_append: v_cache",
            a["v_cache"].view(torch.uint8)[pages, slots],
            quantized(a["v"], a["v_scale"], stored.dtype).view(torch.uint8),
        )
    else:
        require_close("qk_norm_rope_append: k_cache", stored, turned["k"], 1e-2)
        require_equal("qk_norm_rope_append: v_cache", a["v_cache"][pages, slots], a["v"])


def add_peers(case: Case, call: OperatorCall) -> None:
    a = call.arguments
    positions = positions_of(call)
    apart = torch.zeros(2, *a["k_cache"].shape, device=a["q"].device).to(a["k_cache"].dtype)
    q_out, k_out = torch.empty_like(a["q_out"]), torch.empty_like(a["k"], memory_format=torch.contiguous_format)
    place = {name: a[name] for name in ("update_offsets", "write_positions", "page_table", "k_scale", "v_scale")
             if name in a}  # fmt: skip

    def normed(name: str) -> torch.Tensor:
        weight = a.get(f"{name}_norm_weight")
        return a[name] if weight is None else torch.nn.functional.rms_norm(a[name], weight.shape, weight, EPSILON)

    def separate() -> None:
        ops.rotary_embedding(normed("q"), normed("k"), a["cos_sin"], positions, q_out=q_out, k_out=k_out)
        ops.kv_cache_update(apart[0], apart[1], k_out, a["v"], **place)

    caches = [a["k_cache"], a["v_cache"]]
    call.add_peer(
        "torch norms and two calls" if case["norm"] else "two calls",
        lambda: separate,
        lambda _: [(q_out, a["q_out"]), *((t.float(), o.float()) for t, o in zip(apart, caches, strict=True))],
        1e-2 if "k_scale" not in a else 5e-2,
    )
    if flashinfer_peers.flashinfer is None or case["norm"] or "k_scale" in a:
        return
    theirs = torch.zeros_like(apart)
    q, k = (a[name].clone(memory_format=torch.contiguous_format) for name in ("q", "k"))

    def prepare() -> Callable[[], object]:
        rotate = flashinfer_peers.rotate(q, k, a["cos_sin"], positions)
        append = flashinfer_peers.append(theirs, k, a["v"], a)
        return lambda: (rotate(), append())

    call.add_peer("FlashInfer, two calls", prepare, lambda _: [(q, a["q_out"]), *zip(theirs, caches, strict=True)])
