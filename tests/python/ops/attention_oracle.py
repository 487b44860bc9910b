"""Attention in float64 NumPy, transcribed from the formulas of the operator's README and from nothing else.

Everything here is dense and per sequence: q [Sq, Hq, D], k [Skv, Hkv, D], v [Skv, Hkv, Dv]. What lies where in memory
is `attention_layouts`' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

U32 = 2.0**-24
#: Unit roundoff, and half the step between subnormals, of a dtype by its name.
ROUNDOFF = {"f32": (2.0**-24, 2.0**-150), "f16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}
ROUNDOFF["f8e4m3"] = (2.0**-4, 2.0**-10)
#: Keys that a kernel sums before it rescales; None: the whole row.
CHUNK = {"cpu_flash_attention": 512, "cpu_amx_attention": 256, "cpu_row_attention": None}


@dataclass
class Visibility:
    """What hides keys. ``mask``: bool or additive, broadcastable to [Hq, Sq, Skv]; ``tree``: bool [Sq, Sq]."""

    causal: str = "lower_right"
    window: int = -1
    mask: np.ndarray | None = None
    tree: np.ndarray | None = None

    def of(self, heads: int, rows: int, keys: int) -> np.ndarray:
        """bool [Hq, Sq, Skv]: key j is visible to row i of head h."""
        i = np.arange(rows)[:, None]
        j = np.arange(keys)[None, :]
        seen = np.ones((rows, keys), bool)
        if self.causal == "lower_right":
            seen &= j <= i + keys - rows
        if self.causal == "upper_left":
            seen &= j <= i
        if self.window >= 0:
            position = i if self.causal == "upper_left" else i + keys - rows
            seen &= j > position - self.window
        if self.tree is not None:
            column = j - (keys - rows)  # a row's draft column of key j; negative: prefix
            allowed = np.take_along_axis(self.tree, np.clip(column, 0, max(rows - 1, 0)).repeat(rows, 0), 1)
            seen &= (column < 0) | allowed
        everywhere = np.broadcast_to(seen, (heads, rows, keys)).copy()
        if self.mask is not None:
            hides = ~self.mask if self.mask.dtype == bool else np.isneginf(self.mask)
            everywhere &= ~np.broadcast_to(hides, everywhere.shape)
        return everywhere

    def bias(self) -> np.ndarray | float:
        """What is added to the scores of visible keys."""
        if self.mask is None or self.mask.dtype == bool:
            return 0.0
        return np.where(np.isneginf(self.mask), 0.0, self.mask).astype(np.float64)


@dataclass
class Exact:
    """Exact results of one sequence, and what its error bound is made of (one number a row and head)."""

    out: np.ndarray  # [Sq, Hq, Dv], before the division by an output scale
    lse: np.ndarray  # [Sq, Hq]
    score_size: np.ndarray  # [Sq, Hq]: A = scale * max_j sum_d |q_d k_jd|, and the largest |bias|
    value_size: np.ndarray  # [Sq, Hq]: max_j |v_j|
    term_size: np.ndarray  # [Sq, Hq, Dv]: sum_j |w_j v_j|, for normalization none with |w_j| = sum_d |q_d k_jd| ...
    weight_sum: np.ndarray  # [Sq, Hq, Dv]: sum_j w_j |v_j|


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visibility: Visibility,
    scale: float,
    k_scale: np.ndarray | float = 1.0,
    v_scale: np.ndarray | float = 1.0,
    sinks: np.ndarray | None = None,
    normalization: str = "softmax",
) -> Exact:
    """One sequence. ``k_scale`` and ``v_scale`` are numbers or [Hkv]; k and v hold the stored values."""
    rows, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    kv_head = np.arange(heads) // (heads // kv_heads)  # g = floor(h / G)
    q = q.astype(np.float64)
    k = k.astype(np.float64) * np.broadcast_to(k_scale, kv_heads)[None, :, None]
    v = v.astype(np.float64) * np.broadcast_to(v_scale, kv_heads)[None, :, None]
    k_of_head, v_of_head = k[:, kv_head], v[:, kv_head]  # [Skv, Hq, D], [Skv, Hq, Dv]

    seen = visibility.of(heads, rows, keys)
    bias = visibility.bias()
    scores = scale * np.einsum("ihd,jhd->hij", q, k_of_head) + bias
    sizes = abs(scale) * np.einsum("ihd,jhd->hij", abs(q), abs(k_of_head)) + abs(bias)
    scores = np.where(seen, scores, 0.0)
    if normalization == "softmax":
        top = np.max(np.where(seen, scores, -np.inf), axis=2, initial=-np.inf, keepdims=True)  # [Hq, Sq, 1]
        has_key = np.isfinite(top)
        sink = np.full((heads, 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None, None]
        top = np.where(has_key, np.maximum(top, sink), 0.0)
        weights = np.where(seen, np.exp(scores - top), 0.0)
        denominator = weights.sum(axis=2, keepdims=True) + np.where(has_key, np.exp(sink - top), 0.0)
        lse = np.where(has_key, top + np.log(np.where(has_key, denominator, 1.0)), -np.inf)[:, :, 0].T
        weights = weights / np.where(has_key, denominator, 1.0)
        weight_sizes = weights
    else:
        weights = scores
        weight_sizes = np.where(seen, sizes, 0.0)
        lse = np.full((rows, heads), -np.inf)
    value_size = np.max(np.where(seen[..., None], abs(v_of_head).transpose(1, 0, 2)[:, None], 0.0), (2, 3), initial=0.0)
    return Exact(
        out=np.einsum("hij,jhd->ihd", weights, v_of_head),
        lse=lse,
        score_size=np.max(np.where(seen, sizes, 0.0), axis=2, initial=0.0).T,
        value_size=value_size.T,
        term_size=np.einsum("hij,jhd->ihd", weight_sizes, abs(v_of_head)),
        weight_sum=np.einsum("hij,jhd->ihd", weights, abs(v_of_head)),
    )


def bounds(exact: Exact, kernel: str, dtype: str, head_dim: int, keys: int, normalization: str) -> tuple:
    """The README's bounds of out (before an output scale; without its last rounding) and of lse, for one kernel."""
    if kernel == "reference":  # sums in double; out passes through f32
        return 2.0**-40 * (exact.term_size + abs(exact.out)) + U32 * abs(exact.out), 2.0**-22 * abs(
            exact.lse
        ) + 2.0**-40
    chunk = CHUNK[kernel] or max(keys, 1)
    terms = np.sqrt(min(keys, chunk))
    merges = 16 * np.ceil(keys / chunk) + 16
    depth = np.sqrt(head_dim + 4)
    if normalization == "none":
        return (4 * depth + 4 * terms + 16) * U32 * exact.term_size, np.zeros_like(exact.lse)
    size = exact.score_size
    out = ((8 * depth * size + 8 * terms + merges) * U32 * exact.value_size)[..., None]
    if kernel == "cpu_amx_attention" and dtype in ("f16", "bf16"):
        out = out + 2.0**-17 * exact.weight_sum
    finite_lse = np.where(np.isfinite(exact.lse), abs(exact.lse), 0.0)
    return np.broadcast_to(out, exact.out.shape), (4 * depth * size + 4 * terms + merges) * U32 + 2.0**-22 * finite_lse
