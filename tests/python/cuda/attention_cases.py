"""Random attention calls for the decode kernel, with NaN in all that must not be read, and their error bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from polyop.testing import UNIT_ROUNDOFF, output_bound

U32 = UNIT_ROUNDOFF[torch.float32]
BYTE_DTYPES = (torch.float8_e4m3fn, torch.int8)


@dataclass
class AttentionCase:
    """What to draw. ``kv_form``: paged, packed or padded; lengths are those of the keys, queries of the rows."""

    lengths: list[int]
    queries: list[int]
    head_dim: int = 128
    num_kv_heads: int = 2
    group: int = 4
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    kv_form: str = "paged"
    query_form: str = "packed"
    tree: bool = False
    sinks: bool = False
    scale_per_head: bool = False
    fp8_out: bool = False
    seed: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)

    def make(self) -> dict[str, Any]:
        """Keyword arguments on the CPU; return_lse is on."""
        g = torch.Generator().manual_seed(self.seed)
        num_heads = self.num_kv_heads * self.group
        batch, total = len(self.lengths), sum(self.queries)
        kv_dtype = self.kv_dtype or self.dtype
        a: dict[str, Any] = {"query_form": self.query_form, "kv_form": self.kv_form, "return_lse": True}
        if self.query_form == "packed":
            a["q"] = torch.randn(total + 2, num_heads, self.head_dim, generator=g).to(self.dtype)
            a["query_offsets"] = torch.tensor([0, *self.queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        else:
            a["q"] = torch.randn(batch, max(self.queries), num_heads, self.head_dim, generator=g).to(self.dtype)

        def values(rows: int) -> torch.Tensor:
            data = torch.randn(rows, self.num_kv_heads, self.head_dim, generator=g)
            if kv_dtype == torch.int8:
                return (data * 40).round().clamp(-128, 127).to(torch.int8)
            return data.to(kv_dtype)

        def poison(*shape: int) -> torch.Tensor:
            if kv_dtype == torch.int8:
                return torch.full(shape, -128, dtype=torch.int8)
            return torch.full(shape, float("nan")).to(kv_dtype)

        sequences = [(values(n), values(n)) for n in self.lengths]
        if self.kv_form == "paged":
            pages_of = [-(-n // self.page_size) for n in self.lengths]
            width = max([*pages_of, 1]) + 1
            num_pages = sum(pages_of) + 3
            order = torch.randperm(num_pages, generator=g).to(torch.int32)
            # one pool of two planes: k and v have the same strides
            pool = poison(2, num_pages, self.page_size, self.num_kv_heads, self.head_dim)
            table = torch.full((batch, width), 1 << 30, dtype=torch.int32)
            next_page = 0
            for b, (n, planes) in enumerate(zip(self.lengths, sequences, strict=True)):
                for column in range(pages_of[b]):
                    page = int(order[next_page])
                    next_page += 1
                    table[b, column] = page
                    rows = slice(column * self.page_size, min(n, (column + 1) * self.page_size))
                    for plane in range(2):
                        pool[plane, page, : rows.stop - rows.start] = planes[plane][rows]
            a["k"], a["v"], a["page_table"] = pool[0], pool[1], table
        elif self.kv_form == "packed":
            pool = torch.stack(
                [
                    torch.cat([s[plane] for s in sequences] + [poison(3, *sequences[0][0].shape[1:])])
                    for plane in range(2)
                ]
            )
            a["k"], a["v"] = pool[0], pool[1]
            a["kv_offsets"] = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        else:
            pool = poison(2, batch, max(self.lengths) + 5, self.num_kv_heads, self.head_dim)
            for b, n in enumerate(self.lengths):
                for plane in range(2):
                    pool[plane, b, :n] = sequences[b][plane]
            a["k"], a["v"] = pool[0], pool[1]
        if self.kv_form != "packed":
            a["kv_lengths"] = torch.tensor(self.lengths, dtype=torch.int32)
        if self.tree:
            rows = a["q"].shape[0] if self.query_form == "packed" else batch * max(self.queries)
            words = -(-max(self.queries) // 32)
            a["tree_mask"] = torch.randint(-(2**31), 2**31, (rows, words), generator=g).to(torch.int32)
        if self.sinks:
            a["sinks"] = torch.randn(num_heads, generator=g)
        if kv_dtype in BYTE_DTYPES:
            heads = self.num_kv_heads if self.scale_per_head else 1
            factor = 1 / 40 if kv_dtype == torch.int8 else 1.0
            a["k_scale"] = (torch.rand(heads, generator=g) + 0.5) * factor
            a["v_scale"] = (torch.rand(heads, generator=g) + 0.5) * factor
        if self.fp8_out:
            a["output_scale"] = torch.tensor([0.25])
        return {**a, **self.attributes}


def outputs_of(arguments: dict[str, Any], fp8: bool, device: str) -> dict[str, torch.Tensor]:
    """Poisoned out and lse."""
    q = arguments["q"]
    out = torch.full(q.shape, float("nan")).to(torch.float8_e4m3fn if fp8 else q.dtype)
    return {"out": out.to(device), "lse": torch.full(q.shape[:-1], float("nan"), device=device)}


def bounds(arguments: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of out and lse: rounded weights err by u each; a score by (D + 8) u32 of its largest value."""

    def largest(name: str) -> float:
        tensor = arguments.get(name)
        return 1.0 if tensor is None else tensor.double().abs().nan_to_num(nan=0.0).max().item()

    q, k = arguments["q"], arguments["k"]
    width = q.shape[-1]
    weight_dtype = torch.float16 if k.dtype in BYTE_DTYPES else q.dtype
    if k.dtype == torch.int8:
        k_most = v_most = 128.0
    else:
        k_most, v_most = largest("k"), largest("v")
    score = width**-0.5 * width * largest("q") * k_most * largest("k_scale")
    value = v_most * largest("v_scale") / (largest("output_scale") if "output_scale" in arguments else 1.0)
    length = 1 + int(k.shape[0] * k.shape[1])
    relative = UNIT_ROUNDOFF[weight_dtype] + 4 * (width + 8) * U32 * score + (length + 64) * U32
    return output_bound(out, out.dtype, relative * value), output_bound(
        lse, torch.float32, 2 * (width + 8) * U32 * score + (length + 64) * U32
    )
