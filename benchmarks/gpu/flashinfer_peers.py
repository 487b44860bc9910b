"""FlashInfer on the same tensors. Every function plans and returns the call that is timed.

Plans are made for the lengths at hand, which is its fastest way; a plan that is to be replayed with other lengths
(``use_cuda_graph=True``) launches more blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .calls import DTYPES

try:
    import flashinfer
except Exception:  # not installed, or installed for another machine
    flashinfer = None

BACKEND = "fa2"  # of its prefill kernel, which also is its decode kernel with matrix instructions
WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends


def is_peer(case: dict[str, Any]) -> bool:
    """Whether it takes an attention case. Of 16-bit caches only bf16: each kind costs a long compilation."""
    return flashinfer is not None and case["page"] > 0 and case["kv"] in ("bf16", "f8e4m3")


def without_matrix_instructions(case: dict[str, Any]) -> bool:
    """Whether its other decode kernel may be the faster one: a query head for each key head."""
    return case["rows"] == 1 and case["Hq"] == case["Hkv"]


def compile_modules(attention_cases: list[dict[str, Any]]) -> None:
    """Builds what the cases need in one parallel build, instead of one module after the other at their first use."""
    if flashinfer is None:
        return
    try:
        from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
        from flashinfer.jit.core import build_jit_specs
        from flashinfer.jit.page import gen_page_module
        from flashinfer.jit.quantization import gen_quantization_module
        from flashinfer.jit.rope import gen_rope_module

        specs = [gen_page_module(), gen_rope_module(), gen_quantization_module()]
        for case in filter(is_peer, attention_cases):
            bf16, width = torch.bfloat16, case["D"]
            kinds = (bf16, DTYPES[case["kv"]], bf16, torch.int32, width, width, 0, False, False)
            specs.append(gen_batch_prefill_module(BACKEND, *kinds, False))
            if without_matrix_instructions(case):
                specs.append(gen_batch_decode_module(*kinds))
        build_jit_specs(list({spec.name: spec for spec in specs}.values()))
    except Exception as error:  # another version: its modules are built at their first use
        print(f"FlashInfer's modules are not built ahead: {type(error).__name__} {str(error)[:200]}", flush=True)


def paged_plan(case: dict[str, Any], a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, indices, last page length."""
    batch, columns = a["page_table"].shape
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=a["q"].device) * columns
    last = torch.full_like(a["kv_lengths"], case["length"] - (columns - 1) * case["page"])
    return indptr, a["page_table"].flatten(), last


def decode_attention(
    case: dict[str, Any], a: dict[str, Any], target: torch.Tensor, *, tensor_cores: bool
) -> Callable[[], object]:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a["q"].device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    indptr, indices, last = paged_plan(case, a)
    kinds = {"q_data_type": a["q"].dtype, "kv_data_type": a["k"].dtype}
    wrapper.plan(indptr, indices, last, case["Hq"], case["Hkv"], case["D"], case["page"], **kinds)
    return lambda: wrapper.run(a["q"], (a["k"], a["v"]), out=target)


def append_attention(
    case: dict[str, Any], a: dict[str, Any], target: torch.Tensor, mask: torch.Tensor | None
) -> Callable[[], object]:
    """Several rows a sequence: causal, or with a mask bool [B, rows, L]."""
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a["q"].device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=BACKEND)
    indptr, indices, last = paged_plan(case, a)
    kinds = {"q_data_type": a["q"].dtype, "kv_data_type": a["k"].dtype}
    masks = {"causal": True} if mask is None else {"custom_mask": mask.flatten()}
    wrapper.plan(
        a["query_offsets"], indptr, indices, last, case["Hq"], case["Hkv"], case["D"], case["page"], **masks, **kinds
    )
    return lambda: wrapper.run(a["q"], (a["k"], a["v"]), out=target)


def rotate(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> Callable[[], object]:
    """Turns q and k in place; after an odd number of runs by more than once, so compare after the first."""
    width = q.shape[-1]
    flat_q, flat_k = q.flatten(1), k.flatten(1)
    return lambda: flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, flat_q, flat_k, width, cos_sin)


def append(pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: dict[str, Any]) -> Callable[[], object]:
    """Appends k and v to pool [2, P, R, Hkv, D] where the operands of ``a`` say."""
    batch, columns = a["page_table"].shape
    each = k.shape[0] // batch
    device = k.device
    steps = torch.arange(each, dtype=torch.int32, device=device)
    positions = (a["write_positions"][:, None] + steps).flatten()
    sequences = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(each)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * columns
    last = a["write_positions"] + each - (columns - 1) * pool.shape[2]
    indices = a["page_table"].flatten()
    return lambda: flashinfer.append_paged_kv_cache(
        k, v, sequences, positions, (pool[0], pool[1]), indices, indptr, last, "NHD"
    )
