"""attention: decode, short queries and trees over dense and paged caches, beside cuDNN, torch flash and FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import flashinfer_peers
from .calls import DTYPES, OperatorCall, require_close

Case = dict[str, Any]
FACTORS = {torch.int8: 32.0}  # what fills an 8-bit range


def bytes_moved(case: Case) -> int:
    """Keys, values and queries once, results once."""
    keys = 2 * case["B"] * case["length"] * case["Hkv"] * case["D"]
    rows = case["B"] * case["rows"] * case["Hq"] * case["D"]
    return keys * DTYPES[case["kv"]].itemsize + 2 * rows * 2


def make(case: Case, device: str) -> OperatorCall:
    batch, length, rows, page = case["B"], case["length"], case["rows"], case["page"] or case["length"]
    kv_dtype = DTYPES[case["kv"]]
    dtype = torch.float16 if kv_dtype == torch.float16 else torch.bfloat16
    columns = -(-length // page)
    q = torch.randn(batch * rows, case["Hq"], case["D"], device=device, dtype=dtype)
    pool = torch.randn(2, batch * columns, page, case["Hkv"], case["D"], device=device, dtype=dtype)
    a: dict[str, Any] = {"q": q, "query_offsets": torch.arange(batch + 1, dtype=torch.int32, device=device) * rows}
    if kv_dtype.itemsize == 1:
        factor = FACTORS.get(kv_dtype, 1.0)
        pool = (pool * factor).clamp(-127, 127).to(kv_dtype)
        a["k_scale"] = a["v_scale"] = torch.tensor([1 / factor], device=device)
    a["k"], a["v"] = pool[0], pool[1]
    a["kv_lengths"] = torch.full((batch,), length, dtype=torch.int32, device=device)
    if case["page"]:
        a["page_table"] = torch.randperm(batch * columns, device=device).to(torch.int32).view(batch, columns)
    else:
        a["kv_form"] = "padded"
    if case["tree"]:
        a["causal"] = "none"
        words = torch.randint(-(2**31), 2**31, (batch * rows, -(-rows // 32)), device=device)
        a["tree_mask"] = words.to(torch.int32) | 1  # every draft sees the first one
    a["out"] = torch.empty_like(q)
    return OperatorCall("attention", a)


def dense(case: Case, a: dict[str, Any], name: str, sequence: int) -> torch.Tensor:
    """f32 [L, Hkv, D] of one sequence."""
    if "page_table" not in a:
        return a[name][sequence].float()
    rows = a[name][a["page_table"][sequence].long()].flatten(0, 1)[: case["length"]].float()
    return rows * a[f"{name}_scale"] if f"{name}_scale" in a else rows


def visible(case: Case, a: dict[str, Any], sequence: int) -> torch.Tensor:
    """bool [rows, L]."""
    rows, length = case["rows"], case["length"]
    keys = torch.arange(length, device=a["q"].device)
    if not case["tree"]:
        return keys <= torch.arange(rows, device=keys.device)[:, None] + length - rows
    words = a["tree_mask"][sequence * rows : (sequence + 1) * rows]
    draft = (keys - (length - rows)).clamp_min(0)
    return (keys < length - rows) | ((words[:, draft // 32] >> (draft % 32)) & 1).bool()


def expected(case: Case, a: dict[str, Any], sequence: int) -> torch.Tensor:
    """f32 [rows, Hq, D] of one sequence."""
    rows, heads = case["rows"], case["Hkv"]
    q = a["q"][sequence * rows : (sequence + 1) * rows].float().unflatten(1, (heads, -1))
    k, v = (dense(case, a, name, sequence) for name in ("k", "v"))
    scores = torch.einsum("rhgd,lhd->hgrl", q, k) * case["D"] ** -0.5
    weights = scores.masked_fill(~visible(case, a, sequence), float("-inf")).softmax(-1)
    return torch.einsum("hgrl,lhd->rhgd", weights, v).flatten(1, 2)


def check(case: Case, call: OperatorCall) -> None:
    """The first and the last sequence; f32 copies of all would not fit."""
    call.run()
    a = call.arguments
    for sequence in {0, case["B"] - 1}:
        got = a["out"][sequence * case["rows"] : (sequence + 1) * case["rows"]]
        require_close("attention", got, expected(case, a, sequence), 1e-2)


def add_peers(case: Case, call: OperatorCall) -> None:
    a = call.arguments
    if not case["page"] and case["rows"] == 1 and a["k"].dtype == a["q"].dtype:
        q = a["q"][:, :, None]
        k, v = a["k"].transpose(1, 2), a["v"].transpose(1, 2)

        def sdpa(backend: SDPBackend) -> Callable[[], object]:
            def run() -> torch.Tensor:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

            return run

        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("torch flash", SDPBackend.FLASH_ATTENTION)):
            call.add_peer(name, lambda b=backend: sdpa(b), lambda result: [(result[:, :, 0], a["out"])])
    if not flashinfer_peers.is_peer(case):
        return
    target = torch.empty_like(a["q"])
    if case["rows"] > 1:
        mask = torch.stack([visible(case, a, b) for b in range(case["B"])]) if case["tree"] else None
        paths = {"FlashInfer": lambda: flashinfer_peers.append_attention(case, a, target, mask)}
    else:
        paths = {"FlashInfer": lambda: flashinfer_peers.decode_attention(case, a, target, tensor_cores=True)}
        if flashinfer_peers.without_matrix_instructions(case):
            paths["FlashInfer, no matrix instructions"] = lambda: flashinfer_peers.decode_attention(
                case, a, target, tensor_cores=False
            )
    for name, prepare in paths.items():
        call.add_peer(name, prepare, lambda _: [(target, a["out"])], 2e-2)
