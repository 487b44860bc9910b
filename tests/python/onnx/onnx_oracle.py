"""TensorRT's attention in float64 NumPy, written from the operators' mathematics and from nothing else of polyop.

Every function takes the node's arrays in the node's own layout. Where the sources are silent the rules are those that
polyop/ops/attention/README.md states.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

E4M3_MAX = 448.0


@dataclass
class Result:
    """y in float64, and how far an implementation that keeps weights in float32 may be off it: a weight that lies next
    to the middle of two quantized values may take either."""

    y: np.ndarray
    slack: np.ndarray


def quantized(weights: np.ndarray, scale: float, kind: str) -> np.ndarray:
    """dequantize(quantize(w)): nearest even, saturated."""
    steps = weights / scale
    if kind == "int8":
        return np.clip(np.round(steps), -128, 127) * scale
    return np.clip(steps, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def operand_factor(scale: float | None, head_dim: int, dtype: np.dtype) -> np.ndarray:
    """sqrt(scale) in the input type; of the default step by step."""
    if scale is not None:
        return np.sqrt(np.float32(scale)).astype(dtype)
    root = np.sqrt(np.float32(head_dim)).astype(dtype)
    inverse = (np.float32(1) / root.astype(np.float32)).astype(dtype)
    return np.sqrt(inverse.astype(np.float32)).astype(dtype)


def _rows(x: np.ndarray, sequence: int, offsets: np.ndarray | None) -> np.ndarray:
    """[H, N, D] of one sequence."""
    if offsets is None:
        return x[sequence]
    return x[offsets[sequence] : offsets[sequence + 1]].transpose(1, 0, 2)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    query_lengths: np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    *,
    causal: str = "none",
    normalization: str = "softmax",
    factor: np.ndarray | None = None,
    quantize: tuple[float, str] | None = None,
) -> Result:
    """Y of TRT_Attention, or with `factor` (operand_factor) and `quantize` (scale, "fp8" or "int8") of
    TRT_QuantizedAttention. Rank 3 is packed, rank 4 padded."""
    q_packed, kv_packed = q.ndim == 3, k.ndim == 3
    if factor is not None:
        q, k = ((x.astype(np.float64) * float(factor)).astype(x.dtype) for x in (q, k))
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    y, slack = np.zeros_like(q), np.zeros_like(q)
    batch = len(query_lengths) - 1 if q_packed else q.shape[0]
    for b in range(batch):
        queries = _rows(q, b, query_lengths if q_packed else None)
        keys, values = (_rows(x, b, kv_lengths if kv_packed else None) for x in (k, v))
        length = keys.shape[1] if kv_packed or kv_lengths is None else int(kv_lengths[b])
        keys, values = keys[:, :length], values[:, :length]
        group = queries.shape[0] // keys.shape[0]
        out, loose = _one_sequence(
            queries, keys.repeat(group, 0), values.repeat(group, 0), _mask_of(mask, b), causal, normalization, quantize
        )
        if q_packed:
            y[query_lengths[b] : query_lengths[b + 1]] = out.transpose(1, 0, 2)
            slack[query_lengths[b] : query_lengths[b + 1]] = loose.transpose(1, 0, 2)
        else:
            y[b], slack[b] = out, loose
    return Result(y, slack)


def _mask_of(mask: np.ndarray | None, sequence: int) -> np.ndarray | None:
    """[H|1, N|1, L|1] of one sequence."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return mask[sequence if mask.shape[0] > 1 else 0]


def _one_sequence(q, k, v, mask, causal, normalization, quantize):
    heads, rows, _ = q.shape
    length = k.shape[1]
    scores = np.einsum("hid,hjd->hij", q, k)
    visible = np.ones((heads, rows, length), bool)
    i, j = np.arange(rows)[:, None], np.arange(length)[None, :]
    if causal == "upper_left":
        visible &= j <= i
    elif causal == "lower_right":
        visible &= j <= i + length - rows
    if mask is not None:
        used = np.broadcast_to(
            mask[:, : max(rows, 1), : max(length, 1)] if mask.size else np.zeros((1, 1, 1), mask.dtype),
            (heads, rows, length),
        )
        if mask.dtype == bool:
            visible &= used
        else:
            used = used.astype(np.float64)
            visible &= used != -np.inf
            scores = scores + np.where(visible, used, 0.0)
    scores = np.where(visible, scores, -np.inf)
    if normalization == "none":
        weights = np.where(visible, scores, 0.0)
    else:
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        shifted = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        total = shifted.sum(-1, keepdims=True)
        weights = shifted / np.where(total == 0, 1.0, total)
    loose = np.zeros((heads, rows, v.shape[2]))
    if quantize is not None:
        nudge = 1e-5 * (1 + np.abs(np.where(visible, scores, 0.0)))
        jump = np.abs(quantized(weights * (1 + nudge), *quantize) - quantized(weights * (1 - nudge), *quantize))
        weights = quantized(weights, *quantize)
        loose = np.einsum("hij,hjd->hid", jump, np.abs(v))
    return np.einsum("hij,hjd->hid", weights, v), loose
