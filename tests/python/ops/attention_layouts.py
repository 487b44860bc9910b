"""Sequences of attention put into memory: padded, packed or paged, poison in all that must not be read."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from attention_oracle import Exact, Visibility, attend

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
}
NO_PAGE = 1 << 30  # in page-table entries that must not be read


@dataclass
class AttentionCall:
    """A call in words. ``lengths``: (query rows, keys) of each sequence; padded queries all have the most rows."""

    lengths: list[tuple[int, int]]
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_head_dim: int | None = None
    dtype: str = "f32"
    kv_dtype: str | None = None
    query_form: str = "packed"
    kv_form: str = "paged"
    page_size: int = 4
    spare_columns: int = 1  # of the page table; rows of padded keys
    causal: str = "lower_right"
    window: int = -1
    scale: float | None = None
    normalization: str = "softmax"
    mask: np.ndarray | None = None  # broadcastable to [B, Hq, S, Lmax]
    tree: bool = False
    sinks: np.ndarray | None = None
    kv_scales: int | None = None  # None, 1 or kv_heads
    fp8_out: float | None = None  # the output scale; 0: an f8e4m3 out without one
    seed: int = 0
    page_seed: int = 0
    size: float = 1.0
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)  # of polyop.ops.attention
    sequences: list[tuple[np.ndarray, ...]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.query_form == "padded":
            most = max((rows for rows, _ in self.lengths), default=0)
            self.lengths = [(most, keys) for _, keys in self.lengths]
        kv_dtype = self.kv_dtype or self.dtype
        self.sequences = [
            (
                self._values((rows, self.query_heads, self.head_dim), self.dtype),
                self._values((keys, self.kv_heads, self.head_dim), kv_dtype),
                self._values((keys, self.kv_heads, self.value_head_dim), kv_dtype),
            )
            for rows, keys in self.lengths
        ]
        self.trees = [self.rng.random((rows, rows)) < 0.5 if self.tree else None for rows, _ in self.lengths]
        self.scales = [
            None
            if self.kv_scales is None
            else (self.rng.random(self.kv_scales) + 0.5).astype(np.float32)
            * np.float32(1 / 40 if kv_dtype == "i8" else 1)
            for _ in "kv"
        ]
        self._lay_out(kv_dtype)

    def again(self, sequences: list[int], **changes: Any) -> AttentionCall:
        """The same numbers in another call: some of the sequences, fields of the layout changed."""
        other = copy.copy(self)
        for name, value in changes.items():
            setattr(other, name, value)
        other.lengths = [self.lengths[b] for b in sequences]
        other.sequences = [self.sequences[b] for b in sequences]
        other.trees = [self.trees[b] for b in sequences]
        if other.mask is not None:
            full = np.broadcast_to(self.mask, (len(self.lengths), self.query_heads, self.lengths[0][0], self.capacity))
            other.mask = full[sequences][..., : other.capacity]
        other.arguments = {}
        other._lay_out(self.kv_dtype or self.dtype)
        return other

    @property
    def capacity(self) -> int:
        """Rows of padded keys."""
        return max((keys for _, keys in self.lengths), default=0) + self.spare_columns

    def _values(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        data = torch.from_numpy(self.rng.standard_normal(shape)) * self.size
        return (data * 40).round().clamp(-128, 127).to(torch.int8) if dtype == "i8" else data.to(DTYPES[dtype])

    def _poison(self, *shape: int, dtype: str) -> torch.Tensor:
        if dtype == "i8":
            return torch.full(shape, -128, dtype=torch.int8)
        return torch.full(shape, float("nan")).to(DTYPES[dtype])

    def _lay_out(self, kv_dtype: str) -> None:
        a = self.arguments
        a.update(query_form=self.query_form, kv_form=self.kv_form, causal=self.causal, window=self.window)
        a.update(scale=self.scale, normalization=self.normalization, return_lse=self.normalization == "softmax")
        batch = len(self.lengths)
        offsets = lambda counts: torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)  # noqa: E731
        rows = [rows for rows, _ in self.lengths]
        if self.query_form == "packed":
            spare = self._poison(2, self.query_heads, self.head_dim, dtype=self.dtype)  # rows of no sequence
            a["q"] = torch.cat([*(q for q, _, _ in self.sequences), spare])
            a["query_offsets"] = offsets(rows)
        elif batch:
            a["q"] = torch.stack([q for q, _, _ in self.sequences])
        else:
            a["q"] = torch.empty(0, 1, self.query_heads, self.head_dim, dtype=DTYPES[self.dtype])
        for name, which, width in (("k", 1, self.head_dim), ("v", 2, self.value_head_dim)):
            a[name] = self._lay_out_keys([s[which] for s in self.sequences], width, kv_dtype)
        keys = [keys for _, keys in self.lengths]
        if self.kv_form == "packed":
            a["kv_offsets"] = offsets(keys)
        else:
            a["kv_lengths"] = torch.tensor(keys, dtype=torch.int32)
        if self.kv_form == "paged":
            a["page_table"] = self.page_table
        if self.mask is not None:
            mask = torch.from_numpy(np.ascontiguousarray(self.mask)).reshape(self.mask.shape)
            a["mask"] = mask if mask.dtype == torch.bool else mask.to(DTYPES[self.dtype])
        if self.tree:
            words = max(1, -(-max(rows, default=0) // 32)) + 1
            bits = np.zeros((sum(rows) + (2 if self.query_form == "packed" else 0), words * 32), bool)
            bits[:, -32:] = True  # a word that no row needs
            at = 0
            for tree in self.trees:
                bits[at : at + len(tree), : len(tree)] = tree
                at += len(tree)
            a["tree_mask"] = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
        if self.sinks is not None:
            a["sinks"] = torch.from_numpy(self.sinks.astype(np.float32))
        for name, values in zip(("k_scale", "v_scale"), self.scales, strict=True):
            if values is not None:
                a[name] = torch.from_numpy(values)
        if self.fp8_out:
            a["output_scale"] = torch.tensor([self.fp8_out])

    def _lay_out_keys(self, values: list[torch.Tensor], width: int, dtype: str) -> torch.Tensor:
        heads = self.kv_heads
        if self.kv_form == "packed":
            return torch.cat([*values, self._poison(3, heads, width, dtype=dtype)])
        if self.kv_form == "padded":
            memory = self._poison(len(values), self.capacity, heads, width, dtype=dtype)
            for b, rows in enumerate(values):
                memory[b, : len(rows)] = rows
            return memory
        pages_of = [-(-len(rows) // self.page_size) for rows in values]
        num_pages = sum(pages_of) + 2
        order = np.random.default_rng(self.page_seed).permutation(num_pages)
        table = torch.full((len(values), max([*pages_of, 0]) + self.spare_columns), NO_PAGE, dtype=torch.int32)
        memory = self._poison(num_pages, self.page_size, heads, width, dtype=dtype)
        next_page = 0
        for b, rows in enumerate(values):
            for column in range(pages_of[b]):
                page = int(order[next_page])
                next_page += 1
                table[b, column] = page
                part = rows[column * self.page_size : (column + 1) * self.page_size]
                memory[page, : len(part)] = part
        self.page_table = table
        return memory

    def outputs(self) -> dict[str, torch.Tensor]:
        """Poisoned out and lse."""
        shape = (*self.arguments["q"].shape[:-1], self.value_head_dim)
        outputs = {"out": self._poison(*shape, dtype=self.out_dtype)}
        if self.normalization == "softmax":
            outputs["lse"] = self._poison(*shape[:-1], dtype="f32")
        return outputs

    @property
    def out_dtype(self) -> str:
        return self.dtype if self.fp8_out is None else "f8e4m3"

    def exact(self) -> list[Exact]:
        """The NumPy results, one a sequence."""
        scale = float(np.float32(1 / np.sqrt(self.head_dim) if self.scale is None else self.scale))
        results = []
        for b, (q, k, v) in enumerate(self.sequences):
            mask = self.mask
            if mask is not None:
                full = np.broadcast_to(mask, (len(self.lengths), self.query_heads, self.lengths[b][0], self.capacity))
                mask = full[b][..., : self.lengths[b][1]]
                if mask.dtype != bool:  # as the operator sees it
                    mask = torch.from_numpy(mask.copy()).to(DTYPES[self.dtype]).double().numpy()
            k_scale, v_scale = (1.0 if s is None else s.astype(np.float64) for s in self.scales)
            results.append(
                attend(
                    *(t.double().numpy() for t in (q, k, v)),
                    Visibility(self.causal, self.window, mask, self.trees[b]),
                    scale,
                    k_scale,
                    v_scale,
                    None if self.sinks is None else self.sinks.astype(np.float32),
                    self.normalization,
                )
            )
        return results
