"""ONNX's own relatives as calls of the same operators: Attention (23, 24), RotaryEmbedding (23), TensorScatter (24).

``RUNNERS`` computes a node, ``CHECKERS`` looks at one before it runs. What the operators cannot express is refused by
name: soft capping, the intermediate product as an output, windows, keys of another type than the queries, circular
scatters, scatters along another axis than the last but one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from .. import ops
from .nodes import check_call, narrowed_array
from .values import ELEMENT_TYPES, Extent, NodeError, TensorInfo, element_type_name, to_torch

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _pad(items: Sequence[Any], count: int) -> list[Any]:
    return [*items, *[None] * (count - len(items))]


def _check_float(name: str, info: TensorInfo, like: TensorInfo | None = None) -> None:
    if info.element_type and info.element_type not in _FLOATS:
        raise NodeError(f"{name} is {element_type_name(info.element_type)}, wanted f32, f16 or bf16")
    if like and info.element_type and like.element_type and info.element_type != like.element_type:
        raise NodeError(
            f"{name} is {element_type_name(info.element_type)}, wanted {element_type_name(like.element_type)}"
        )


# ---- Attention -------------------------------------------------------------------------------------------------------


def _check_attention_attributes(attributes: dict[str, Any], wanted: list[bool]) -> None:
    if attributes.get("softcap", 0.0):
        raise NotImplementedError(f"attribute softcap is {attributes['softcap']}, wanted 0: no operator caps scores")
    if attributes.get("softmax_precision", 1) not in _FLOATS:
        raise NotImplementedError(f"attribute softmax_precision is {attributes['softmax_precision']}, wanted 1, 10, 16")
    for side in ("left_window_size", "right_window_size"):
        if attributes.get(side, -1) != -1:
            raise NotImplementedError(f"attribute {side} is {attributes[side]}, wanted -1")
    if len(wanted) > 3 and wanted[3]:
        raise NotImplementedError("output qk_matmul_output is wanted: scores never reach memory")


def _split_heads(x: torch.Tensor, heads: int, name: str) -> torch.Tensor:
    """[B, S, H, D] of a node's [B, H, S, D] or [B, S, H * D]."""
    if x.dim() == 4:
        return x.permute(0, 2, 1, 3)
    if x.dim() != 3:
        raise NodeError(f"{name} has rank {x.dim()}, wanted 3 or 4")
    if heads < 1 or x.shape[2] % heads:
        raise NodeError(f"{name} axis 2 is {x.shape[2]}, no multiple of {heads} heads")
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


def _dense_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _full_mask(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask whose key axis is shorter than the keys hides the others."""
    missing = keys - mask.shape[-1] if mask.dim() else 0
    if missing <= 0 or mask.shape[-1] == 1:
        return mask
    hidden = False if mask.dtype == torch.bool else -math.inf
    return torch.nn.functional.pad(mask, (0, missing), value=hidden)


def _and_causal(mask: torch.Tensor | None, rows: int, keys: int, offset: int) -> torch.Tensor:
    """The mask with row i seeing keys up to i + offset."""
    causal = torch.arange(keys)[None, :] <= torch.arange(rows)[:, None] + offset
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else torch.where(causal, mask, -math.inf)


def run_attention(inputs: list[np.ndarray | None], attributes: dict[str, Any], wanted: list[bool]) -> list[Any]:
    """Attention-23 and -24: Y, present_key, present_value; causal and mask compose, nonpad_kv_seqlen gives lengths."""
    _check_attention_attributes(attributes, wanted)
    arrays = _pad(inputs, 7)
    q, k, v, mask, past_k, past_v = [None if array is None else to_torch(array) for array in arrays[:6]]
    lengths = None if arrays[6] is None else to_torch(narrowed_array("nonpad_kv_seqlen", arrays[6]))
    if q is None or k is None or v is None:
        raise NodeError("Q, K or V is missing")
    q_heads, kv_heads = attributes.get("q_num_heads", 0), attributes.get("kv_num_heads", 0)
    queries = _dense_last(_split_heads(q, q_heads, "Q"))
    new_k, new_v = _split_heads(k, kv_heads, "K"), _split_heads(v, kv_heads, "V")
    past = 0
    if past_k is not None and past_v is not None:
        past = past_k.shape[2]
        new_k = torch.cat([past_k.permute(0, 2, 1, 3), new_k], dim=1)
        new_v = torch.cat([past_v.permute(0, 2, 1, 3), new_v], dim=1)
    keys, rows = new_k.shape[1], queries.shape[1]
    if mask is not None:
        mask = _full_mask(mask, keys)
        if mask.dim() == 3:  # (heads, rows, keys)
            mask = mask[None]
    causal = "none"
    if attributes.get("is_causal", 0):
        if lengths is not None:
            causal = "lower_right"
        elif past:
            mask = _and_causal(mask, rows, keys, past)
        else:
            causal = "upper_left"
    out = ops.attention(
        queries,
        _dense_last(new_k),
        _dense_last(new_v),
        mask=mask,
        kv_lengths=lengths,
        query_form="padded",
        kv_form="padded",
        causal=causal,
        scale=attributes.get("scale"),
    )
    y = out.permute(0, 2, 1, 3) if q.dim() == 4 else out.flatten(2)
    presents = [x.permute(0, 2, 1, 3) for x in (new_k, new_v)]
    return [y, *presents][: max(1, len(wanted))]


def _heads_info(info: TensorInfo, heads: int, name: str) -> TensorInfo:
    """The [B, S, H, D] form of a node's operand."""
    if info.shape is None:
        return TensorInfo(info.element_type)
    if len(info.shape) == 4:
        b, h, s, d = info.shape
        return TensorInfo(info.element_type, [b, s, h, d])
    if len(info.shape) != 3:
        raise NodeError(f"{name} has rank {len(info.shape)}, wanted 3 or 4")
    if heads < 1:
        raise NodeError(f"{name} has rank 3: the number of heads is missing")
    width = info.known(2)
    if width is not None and width % heads:
        raise NodeError(f"{name} axis 2 is {width}, no multiple of {heads} heads")
    width_of_head = Extent(None) if width is None else width // heads
    return TensorInfo(info.element_type, [info.shape[0], info.shape[1], heads, width_of_head])


def check_attention(infos: list[TensorInfo | None], attributes: dict[str, Any], wanted: list[bool], device: str) -> str:
    """The kernel that would run an Attention node. Raises as check_call does."""
    _check_attention_attributes(attributes, wanted)
    q, k, v, mask, past_k, past_v, lengths = _pad(infos, 7)
    if q is None or k is None or v is None:
        raise NodeError("Q, K or V is missing")
    q_heads, kv_heads = attributes.get("q_num_heads", 0), attributes.get("kv_num_heads", 0)
    operands = {
        "q": _heads_info(q, q_heads, "Q"),
        "k": _heads_info(k, kv_heads, "K"),
        "v": _heads_info(v, kv_heads, "V"),
    }
    _check_float("K", k, q)
    if past_k is not None and past_v is not None:
        for name in ("k", "v"):
            if operands[name].shape is not None:
                operands[name].shape[1] = Extent(None)
    if mask is not None:
        # A shorter key axis is filled up when the node runs.
        shape = None if mask.shape is None else [*mask.shape[:-1], *([Extent(None)] if mask.shape else [])]
        operands["mask"] = TensorInfo(mask.element_type, shape)
    if lengths is not None:
        operands["kv_lengths"] = TensorInfo(ELEMENT_TYPES["i32"], lengths.shape, lengths.data)
    causal = ("lower_right" if lengths is not None else "upper_left") if attributes.get("is_causal", 0) else "none"
    values = {"query_form": "padded", "kv_form": "padded", "causal": causal, "scale": attributes.get("scale")}
    return check_call("attention", operands, values, device)


# ---- RotaryEmbedding -------------------------------------------------------------------------------------------------


def _rotary_width(attributes: dict[str, Any], head_dim: int | None) -> int | None:
    """R. Raises NodeError when it is odd, negative or more than the head size."""
    width = attributes.get("rotary_embedding_dim", 0)
    if width < 0 or width % 2 or (head_dim is not None and width > head_dim):
        raise NodeError(f"attribute rotary_embedding_dim is {width}, wanted an even number from 0 to the head size")
    if head_dim is not None and head_dim % 2:
        raise NodeError(f"the head size is {head_dim}, wanted an even number")
    return width or head_dim


def check_rotary(infos: list[TensorInfo | None], attributes: dict[str, Any], wanted: list[bool], device: str) -> str:
    """The kernel that would run a RotaryEmbedding node. Raises as check_call does."""
    x, cos, sin, ids = _pad(infos, 4)
    if x is None or cos is None or sin is None:
        raise NodeError("X, cos_cache or sin_cache is missing")
    for name, info in (("X", x), ("cos_cache", cos), ("sin_cache", sin)):
        _check_float(name, info, x)
    heads = _heads_info(x, attributes.get("num_heads", 0), "X")
    head_dim = None if heads.shape is None else heads.known(3)
    width = _rotary_width(attributes, head_dim)
    rank = 3 if ids is None else 2
    for name, info in (("cos_cache", cos), ("sin_cache", sin)):
        if info.shape is None:
            continue
        if len(info.shape) != rank:
            raise NodeError(f"{name} has rank {len(info.shape)}, wanted {rank}")
        last = info.known(rank - 1)
        if last is not None and width is not None and 2 * last != width:
            raise NodeError(f"{name} axis {rank - 1} is {last}, wanted {width // 2}: half the rotated width")
        for axis in range(rank - 1):
            expected = None if ids is not None or heads.shape is None else heads.known(axis)
            got = info.known(axis)
            if None not in (expected, got) and expected != got:
                raise NodeError(f"{name} axis {axis} is {got}, wanted {expected}")
    if ids is not None and ids.shape is not None:
        if len(ids.shape) != 2:
            raise NodeError(f"position_ids has rank {len(ids.shape)}, wanted 2")
        for axis in range(2):
            expected = None if heads.shape is None else heads.known(axis)
            if None not in (expected, ids.known(axis)) and expected != ids.known(axis):
                raise NodeError(f"position_ids axis {axis} is {ids.known(axis)}, wanted {expected}")
    if ids is not None and ids.element_type not in (0, TensorProto.INT64, TensorProto.INT32):
        raise NodeError(f"position_ids is {element_type_name(ids.element_type)}, wanted i64 or i32")
    tokens = [Extent(None), *heads.shape[2:]] if heads.shape is not None else None
    table = [Extent(None), Extent(None) if width is None else width]
    operands = {
        "q": TensorInfo(x.element_type, tokens),
        "cos_sin": TensorInfo(TensorProto.FLOAT, table),
        "position_ids": TensorInfo(TensorProto.INT64, [Extent(None)]),
    }
    return check_call("rotary_embedding", operands, {"interleaved": bool(attributes.get("interleaved", 0))}, device)


def run_rotary(inputs: list[np.ndarray | None], attributes: dict[str, Any], wanted: list[bool]) -> list[Any]:
    """RotaryEmbedding-23: sines and cosines of the tokens, or a table with position_ids."""
    infos = [None if a is None else TensorInfo(ELEMENT_TYPES[_dtype_name(a)], list(a.shape)) for a in _pad(inputs, 4)]
    check_rotary(infos, attributes, wanted, "cpu")
    x, cos, sin, ids = [None if array is None else to_torch(array) for array in _pad(inputs, 4)]
    heads = _split_heads(x, attributes.get("num_heads", 0), "X")
    batch, rows = heads.shape[:2]
    table = torch.cat([cos, sin], dim=-1).float().reshape(-1, 2 * cos.shape[-1])
    positions = torch.arange(batch * rows) if ids is None else ids.reshape(-1)
    tokens = _dense_last(heads.reshape(batch * rows, *heads.shape[2:]))
    rotated = ops.rotary_embedding(tokens, None, table, positions, interleaved=bool(attributes.get("interleaved", 0)))
    rotated = rotated[0] if isinstance(rotated, tuple) else rotated
    rotated = rotated.view(heads.shape)
    return [rotated.permute(0, 2, 1, 3) if x.dim() == 4 else rotated.flatten(2)]


def _dtype_name(array: np.ndarray) -> str:
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "bool": "bool"}
    if array.dtype.name not in names:
        raise NodeError(f"an input is {array.dtype.name}, wanted f32, f16 or bf16")
    return names[array.dtype.name]


# ---- TensorScatter ---------------------------------------------------------------------------------------------------


def _check_scatter_attributes(attributes: dict[str, Any], rank: int | None) -> None:
    mode = attributes.get("mode", "linear")
    mode = mode.decode() if isinstance(mode, bytes) else mode
    if mode != "linear":
        raise NotImplementedError(f"attribute mode is {mode}, wanted linear")
    axis = attributes.get("axis", -2)
    if axis != -2 and (rank is None or axis != rank - 2):
        raise NotImplementedError(f"attribute axis is {axis}, wanted -2")
    if rank not in (None, 3, 4):
        raise NotImplementedError(f"past_cache has rank {rank}, wanted 3 or 4")


def check_scatter(infos: list[TensorInfo | None], attributes: dict[str, Any], wanted: list[bool], device: str) -> str:
    """The kernel that would run a TensorScatter node. Raises as check_call does."""
    cache, update, indices = _pad(infos, 3)
    if cache is None or update is None:
        raise NodeError("past_cache or update is missing")
    _check_scatter_attributes(attributes, cache.rank)

    def with_heads(info: TensorInfo) -> TensorInfo:
        shape = info.shape
        if shape is not None and len(shape) == 3:
            shape = [shape[0], 1, *shape[1:]]
        return TensorInfo(info.element_type, shape)

    operands = {"past_cache": with_heads(cache), "update": with_heads(update)}
    if indices is not None:
        operands["write_indices"] = indices
    return check_call("trt_kv_cache_update", operands, {}, device)


def run_scatter(inputs: list[np.ndarray | None], attributes: dict[str, Any], wanted: list[bool]) -> list[Any]:
    """TensorScatter-24 along the last axis but one; rows past the end are left out."""
    arrays = _pad(inputs, 3)
    cache, update = [None if array is None else to_torch(array) for array in arrays[:2]]
    if cache is None or update is None:
        raise NodeError("past_cache or update is missing")
    _check_scatter_attributes(attributes, cache.dim())
    flat = cache.dim() == 3
    result = ops.trt_kv_cache_update(
        cache[:, None] if flat else cache,
        update[:, None] if flat else update,
        None if arrays[2] is None else to_torch(narrowed_array("write_indices", arrays[2])),
    )
    return [result[:, 0] if flat else result]


RUNNERS: dict[str, Callable[..., list[Any]]] = {
    "Attention": run_attention,
    "RotaryEmbedding": run_rotary,
    "TensorScatter": run_scatter,
}
CHECKERS: dict[str, Callable[..., str]] = {
    "Attention": check_attention,
    "RotaryEmbedding": check_rotary,
    "TensorScatter": check_scatter,
}
