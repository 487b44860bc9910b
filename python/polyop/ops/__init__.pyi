# Written by `python -m polyop.ops.stubs` from the C++ schemas; do not edit.
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from .schema import Schema

SCHEMAS: dict[str, Schema]

def kernel_names(name: str) -> list[str]: ...
def num_threads() -> int: ...
def output_function(name: str) -> Callable[..., Any]: ...
def set_num_threads(count: int) -> None: ...
def with_kernel(name: str, kernel: str) -> Callable[..., Any]: ...

def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_offsets: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    mask: Tensor | None = None,
    tree_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    *,
    query_form: Literal["packed", "padded"] = "packed",
    kv_form: Literal["paged", "packed", "padded"] = "paged",
    causal: Literal["lower_right", "upper_left", "none"] = "lower_right",
    window: int = -1,
    scale: float | None = None,
    normalization: Literal["softmax", "none"] = "softmax",
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v for each sequence, query head h reading kv head h / (Hq / Hkv). A row with no visible
    key gives 0 and log-sum-exp -inf, and so do packed rows past query_offsets[B].

    Operands:
      q: [T, Hq, D] (query_form = packed) or [B, S, Hq, D] (query_form = padded); f32, f16, bf16
          queries
      k: [P, R, Hkv, D] (kv_form = paged) or [Tkv, Hkv, D] (kv_form = packed) or [B, Lmax, Hkv, D] (kv_form =
          padded); f8e4m3, i8, as q
          keys, of q's dtype or quantized
      v: [P, R, Hkv, Dv] (kv_form = paged) or [Tkv, Hkv, Dv] (kv_form = packed) or [B, Lmax, Hkv, Dv] (kv_form =
          padded); as k
          values; their head size may differ from that of the keys
      query_offsets: [B + 1]; i32 (optional)
          rows of sequence b are query_offsets[b] to query_offsets[b + 1] of q
      kv_lengths: [B]; i32 (optional)
          cached keys of each sequence, those of its query rows included; absent with padded k: all Lmax
      kv_offsets: [B + 1]; i32 (optional)
          keys of sequence b are kv_offsets[b] to kv_offsets[b + 1] of k and v
      page_table: [B, W]; i32 (optional)
          page of each run of R keys of each sequence; entries past its length are not read
      mask: [B, Hq, S, Lmax] (query_form = padded); bool, as q (optional)
          bool: true = visible; float: added to the scores, -inf hides. Only with padded q, k and v
      tree_mask: [T, tree_words] (query_form = packed) or [B * S, tree_words] (query_form = padded); i32
          (optional)
          bit c (least significant first) of a query row's words: it may see key kv_length - N + c, N being its
              sequence's rows; earlier keys are always visible
      sinks: [Hq]; f32 (optional)
          logit of each query head that joins the softmax denominator only
      k_scale: [Hkv]; f32 (optional)
          keys are k * k_scale, for each kv head or all; absent: 1
      v_scale: [Hkv]; f32 (optional)
          values are v * v_scale, for each kv head or all; absent: 1
      output_scale: [1]; f32 (optional)
          an f8e4m3 output stores out / output_scale; absent: 1
      out: [T, Hq, Dv] (query_form = packed) or [B, S, Hq, Dv] (query_form = padded); f8e4m3, as q (output)
          result, of q's dtype, or f8e4m3 where the caller gives it so
      lse: [T, Hq] (query_form = packed) or [B, S, Hq] (query_form = padded); f32 (output, optional)
          natural logarithm of the softmax denominator, sinks included

    Attributes:
      query_form (packed | padded, default packed): packed: q [T, Hq, D] and query_offsets; padded: q [B, S, Hq,
          D]
      kv_form (paged | packed | padded, default paged): paged: k [P, R, Hkv, D], page_table and kv_lengths;
          packed: k [Tkv, Hkv, D] and kv_offsets; padded: k [B, Lmax, Hkv, D]
      causal (lower_right | upper_left | none, default lower_right): lower_right: row i of s_q sees keys up to i
          + s_kv - s_q; upper_left: up to i
      window (int, default -1): keys that a row sees, its own position included; -1: all
      scale (float, default None): factor of the scores
      normalization (softmax | none, default softmax): none: the scaled scores are the weights
      return_lse (bool, default False): whether lse is wanted

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def circular_pad(
    x: Tensor,
    padding: Sequence[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Pads a tensor by repeating it: out[i] = x[(i - before) mod extent] on every axis. The padding may exceed the
    extent; a negative one crops.

    Operands:
      x: [X[axis]...]; f32, f16, bf16, f8e4m3, i64, i32, i8, u8, bool
          tensor of any rank
      out: [X[axis] + padding[(rank(X) - 1 - axis) * 2] + padding[(rank(X) - 1 - axis) * 2 + 1]...]; as x
          (output)
          padded tensor

    Attributes:
      padding (int_list): pairs (before, after) in elements from the last axis backwards, as torch orders them

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def int4_groupwise_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    group_size: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies activations with 4-bit weights that share a scale along groups of the depth: out[m, n] = sum over
    k of x[m, k] * (q[n, k] - 8) * scales[k / group_size, n], accumulated in f32.

    Operands:
      x: [M[axis]..., K]; f32, f16, bf16
          activations; the leading axes are the rows m
      qweight: [ceil(N / 128) * ceil(K / 64) * 8, 512]; i8, u8
          weights q in 0..15 of [N, K] as 512-byte fragment rows (pack_int4_fragments)
      scales: [ceil(K / group_size), N]; f16, f32, bf16
          one scale a group of depths and column
      out: [M[axis]..., N]; as x (output)
          products

    Attributes:
      group_size (int): Kg: consecutive depths that share a scale

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def kv_cache_update(
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor,
    v: Tensor | None = None,
    update_offsets: Tensor | None = None,
    write_positions: Tensor | None = None,
    page_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    cache_form: Literal["paged", "linear"] = "paged",
    update_form: Literal["packed", "padded"] = "packed",
) -> None:
    """Writes the keys and values of each sequence's tokens into its cache from a given position on. Every other
    element of the cache keeps its bits.

    Operands:
      k_cache: [P, R, Hkv, D] (cache_form = paged) or [B, Hkv, Lmax, D] (cache_form = linear); f32, f16, bf16,
          f8e4m3, i8 (written in place)
          key cache: pages, or one row of positions a sequence
      v_cache: [P, R, Hkv, D] (cache_form = paged) or [B, Hkv, Lmax, D] (cache_form = linear); as k_cache
          (written in place, optional)
          value cache; absent: keys only
      k: [T, Hkv, D] (update_form = packed) or [B, S, Hkv, D] (update_form = padded); f32, f16, bf16
          keys to store: of k_cache's dtype, or any float for an f8e4m3 or i8 cache
      v: [T, Hkv, D] (update_form = packed) or [B, S, Hkv, D] (update_form = padded); as k (optional)
          values to store
      update_offsets: [B + 1]; i32 (optional)
          tokens of sequence b are rows update_offsets[b] to update_offsets[b + 1] of k and v
      write_positions: [B]; i32 (optional)
          cache position of each sequence's first token; absent: 0
      page_table: [B, W]; i32 (optional)
          page of each run of R positions of each sequence; only the pages written to are read from it
      k_scale: [Hkv]; f32 (optional)
          an f8e4m3 or i8 cache stores k / k_scale; absent: 1
      v_scale: [Hkv]; f32 (optional)
          an f8e4m3 or i8 cache stores v / v_scale; absent: 1

    Attributes:
      cache_form (paged | linear, default paged): paged: k_cache [P, R, Hkv, D] and a page_table; linear:
          k_cache [B, Hkv, Lmax, D]
      update_form (packed | padded, default packed): packed: k [T, Hkv, D] and update_offsets; padded: k [B, S,
          Hkv, D]

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def qk_norm_rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    update_offsets: Tensor,
    write_positions: Tensor | None = None,
    page_table: Tensor | None = None,
    position_ids: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    epsilon: float = 1e-06,
    interleaved: bool = False,
    cache_form: Literal["paged", "linear"] = "paged",
    q_out: Tensor | None = None,
) -> Tensor:
    """RMS norm of each query and key head (optional), rotary embedding of both, and the append of keys and values
    to a paged or linear cache, in one call. Every other element of the cache keeps its bits. A token without a
    slot (position_ids -1, or a row from update_offsets[B] on) is left out: nothing that it points to is read.

    Operands:
      q: [T, Hq, D]; f32, f16, bf16
          queries
      k: [T, Hkv, D]; as q
          keys before norm and rotation; left as they are
      v: [T, Hkv, D]; as q
          values
      k_cache: [P, R, Hkv, D] (cache_form = paged) or [B, Hkv, Lmax, D] (cache_form = linear); f8e4m3, i8, as q
          (written in place)
          key cache: pages, or one row of positions a sequence
      v_cache: [P, R, Hkv, D] (cache_form = paged) or [B, Hkv, Lmax, D] (cache_form = linear); as k_cache
          (written in place)
          value cache
      cos_sin: [Lrot, Drot]; f32
          row p: Drot/2 cosines, then Drot/2 sines of the angles of position p
      update_offsets: [B + 1]; i32
          tokens of sequence b are rows update_offsets[b] to update_offsets[b + 1] of q, k and v
      write_positions: [B]; i32 (optional)
          cache position of each sequence's first token; absent: 0
      page_table: [B, W]; i32 (optional)
          page of each run of R positions of each sequence; only the pages written to are read from it
      position_ids: [T]; i32, i64 (optional)
          position of each token in cos_sin, -1: no slot; absent: its position in the cache
      q_norm_weight: [D]; f32, as q (optional)
          weight of the RMS norm of each query head; absent: no norm
      k_norm_weight: [D]; f32, as q (optional)
          weight of the RMS norm of each key head
      k_scale: [Hkv]; f32 (optional)
          an f8e4m3 or i8 cache stores k / k_scale; absent: 1
      v_scale: [Hkv]; f32 (optional)
          an f8e4m3 or i8 cache stores v / v_scale; absent: 1
      q_out: [T, Hq, D]; as q (output)
          normed and rotated queries; may be q itself; rows of tokens without a slot keep their bits

    Attributes:
      epsilon (float, default 1e-06): added to the mean square of a head; at least 0
      interleaved (bool, default False): true: pairs are channels (2j, 2j + 1); false: they are (j, j + Drot/2),
          the half-split form
      cache_form (paged | linear, default paged): paged: k_cache [P, R, Hkv, D] and a page_table; linear:
          k_cache [B, Hkv, Lmax, D]

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def rotary_embedding(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotates pairs of channels of each query and key head by the angles of the token's position. Channels from
    Drot on pass through. The outputs may be the inputs themselves.

    Operands:
      q: [T, Hq, D]; f32, f16, bf16
          queries
      k: [T, Hkv, D]; as q (optional)
          keys
      cos_sin: [Lmax, Drot]; f32
          row p: Drot/2 cosines, then Drot/2 sines of the angles of position p
      position_ids: [T]; i32, i64 (optional)
          position of each token; absent: token t has position t
      q_out: [T, Hq, D]; as q (output)
          rotated queries; may be q itself
      k_out: [T, Hkv, D]; as q (output, optional)
          rotated keys; may be k itself

    Attributes:
      interleaved (bool, default False): true: pairs are channels (2j, 2j + 1); false: they are (j, j + Drot/2),
          the half-split form

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def pack_int4_fragments(
    q: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Packs INT4 weights into the fragment layout that int4_groupwise_gemm reads; padding has weight zero.

    Operands:
      q: [N, K]; u8
          values 0 to 15, each the weight plus 8
      out: [ceil(N / 128) * ceil(K / 64) * 8, 512]; i8 (output)
          packed weights

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def unpack_int4_fragments(
    packed: Tensor,
    n: int,
    k: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The inverse of pack_int4_fragments; padding is dropped.

    Operands:
      packed: [ceil(n / 128) * ceil(k / 64) * 8, 512]; i8
          packed weights
      out: [n, k]; u8 (output)
          values 0 to 15, each the weight plus 8

    Attributes:
      n (int): N, columns of the weight matrix
      k (int): K, depth of the weight matrix

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def trt_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    *,
    query_form: Literal["padded_bhnd", "packed_nhd"] = "padded_bhnd",
    kv_form: Literal["padded_bhnd", "packed_nhd"] = "padded_bhnd",
    causal_kind: Literal["none", "upper_left", "lower_right"] = "none",
    TRT_decomposable: bool = False,
    TRT_normalization_op: Literal["softmax", "none"] = "softmax",
    nb_rank: int = 1,
    Y: Tensor | None = None,
) -> Tensor:
    """softmax(Q K^T + attn_mask) V without any scale: TensorRT's TRT_Attention. A row with no visible key gives 0,
    and so do packed rows past the last offset.

    Operands:
      Q: [B, Hq, S, D] (query_form = padded_bhnd) or [T, Hq, D] (query_form = packed_nhd); f32, f16, bf16
          queries
      K: [B, Hkv, Lmax, D] (kv_form = padded_bhnd) or [Tkv, Hkv, D] (kv_form = packed_nhd); as Q
          keys
      V: [B, Hkv, Lmax, D] (kv_form = padded_bhnd) or [Tkv, Hkv, D] (kv_form = packed_nhd); as Q
          values
      attn_mask: [B, Hq, S, Lmax] (query_form = padded_bhnd) or [B, Hq, mask_rows, Lmax] (kv_form = padded_bhnd)
          or [B, Hq, mask_rows, mask_keys]; bool, as Q (optional)
          bool: true = may attend; otherwise added to the scores, -inf hides. Of packed sequences: rows and keys
              inside each sequence, at least as many as the longest has
      query_lengths: [B + 1]; i32 (optional)
          packed: rows of sequence b are query_lengths[b] to query_lengths[b + 1] of Q; padded: not used
      kv_lengths: [B + 1] (kv_form = packed_nhd) or [B] (kv_form = padded_bhnd); i32 (optional)
          packed: keys of sequence b are kv_lengths[b] to kv_lengths[b + 1] of K and V; padded: number of keys
              of each sequence, absent: all
      Y: [B, Hq, S, D] (query_form = padded_bhnd) or [T, Hq, D] (query_form = packed_nhd); as Q (output)
          result, in Q's form

    Attributes:
      query_form (padded_bhnd | packed_nhd, default padded_bhnd): padded_bhnd: Q and Y [B, Hq, S, D];
          packed_nhd: [T, Hq, D]
      kv_form (padded_bhnd | packed_nhd, default padded_bhnd): padded_bhnd: K and V [B, Hkv, Lmax, D];
          packed_nhd: [Tkv, Hkv, D]
      causal_kind (none | upper_left | lower_right, default none): upper_left: row i sees keys up to i;
          lower_right: up to i + s_kv - s_q
      TRT_decomposable (bool, default False): whether TensorRT may use several kernels; the result does not
          depend on it
      TRT_normalization_op (softmax | none, default softmax): none: the scores are the weights, those of hidden
          keys 0
      nb_rank (int, default 1): devices that share the keys of a sequence

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def trt_quantized_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    normalization_quantize_scale: Tensor | None = None,
    query_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    *,
    query_form: Literal["padded_bhnd", "packed_nhd"] = "padded_bhnd",
    kv_form: Literal["padded_bhnd", "packed_nhd"] = "padded_bhnd",
    is_causal: bool = False,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    scale: float | None = None,
    normalization_quantize_to_type: Literal["fp8", "int8"] = "fp8",
    TRT_decomposable: bool = False,
    TRT_normalization_op: Literal["softmax", "none"] = "softmax",
    Y: Tensor | None = None,
) -> Tensor:
    """Attention with Q and K each multiplied by sqrt(scale) and quantized weights: TensorRT's
    TRT_QuantizedAttention. w' = s * clamp(round(w / s)) of the final weight w; without
    normalization_quantize_scale w' = w.

    Operands:
      Q: [B, Hq, S, D] (query_form = padded_bhnd) or [T, Hq, D] (query_form = packed_nhd); f32, f16, bf16
          queries
      K: [B, Hkv, Lmax, D] (kv_form = padded_bhnd) or [Tkv, Hkv, D] (kv_form = packed_nhd); as Q
          keys
      V: [B, Hkv, Lmax, D] (kv_form = padded_bhnd) or [Tkv, Hkv, D] (kv_form = packed_nhd); as Q
          values
      attn_mask: [B, Hq, S, Lmax] (query_form = padded_bhnd) or [B, Hq, mask_rows, Lmax] (kv_form = padded_bhnd)
          or [B, Hq, mask_rows, mask_keys]; bool, as Q (optional)
          bool: true = may attend; otherwise added to the scores, -inf hides. Of packed sequences: rows and keys
              inside each sequence, at least as many as the longest has
      normalization_quantize_scale: [1]; f32, f16, bf16 (optional)
          s, one positive number; absent: weights are not quantized
      query_lengths: [B + 1]; i32 (optional)
          packed: rows of sequence b are query_lengths[b] to query_lengths[b + 1] of Q; padded: not used
      kv_lengths: [B + 1] (kv_form = packed_nhd) or [B] (kv_form = padded_bhnd); i32 (optional)
          packed: keys of sequence b are kv_lengths[b] to kv_lengths[b + 1] of K and V; padded: number of keys
              of each sequence, absent: all
      Y: [B, Hq, S, D] (query_form = padded_bhnd) or [T, Hq, D] (query_form = packed_nhd); as Q (output)
          result, in Q's form

    Attributes:
      query_form (padded_bhnd | packed_nhd, default padded_bhnd): padded_bhnd: Q and Y [B, Hq, S, D];
          packed_nhd: [T, Hq, D]
      kv_form (padded_bhnd | packed_nhd, default padded_bhnd): padded_bhnd: K and V [B, Hkv, Lmax, D];
          packed_nhd: [Tkv, Hkv, D]
      is_causal (bool, default False): row i sees keys up to i (upper left)
      q_num_heads (int, default 0): Hq, checked where given
      kv_num_heads (int, default 0): Hkv, checked where given
      scale (float, default None): factor of the scores: its square root multiplies Q and K
      normalization_quantize_to_type (fp8 | int8, default fp8): fp8: E4M3, saturated to +-448; int8: saturated
          to -128 .. 127
      TRT_decomposable (bool, default False): whether TensorRT may use several kernels; the result does not
          depend on it
      TRT_normalization_op (softmax | none, default softmax): none: the scores are the weights, those of hidden
          keys 0

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """

def trt_kv_cache_update(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    update_lengths: Tensor | None = None,
    *,
    update_form: Literal["padded_bhnd", "packed_nhd"] = "padded_bhnd",
    mode: Literal["linear"] = "linear",
    axis: int = -2,
    Y: Tensor | None = None,
) -> Tensor:
    """past_cache with each sequence's new rows written from its write index on: TensorRT's TRT_KVCacheUpdate. Rows
    past the end of the cache are left out; everything else keeps its bits.

    Operands:
      past_cache: [B, Hkv, Lmax, D]; f32, f16, bf16
          the cache so far
      update: [Bu, Hkv, S, D] (update_form = padded_bhnd) or [T, Hkv, D] (update_form = packed_nhd); as
          past_cache
          rows to write; of fewer sequences than the cache has: the others stay
      write_indices: [Bu]; i32 (optional)
          position of each sequence's first new row; absent: 0
      update_lengths: [Bu + 1]; i32 (optional)
          rows of sequence b are update_lengths[b] to update_lengths[b + 1] of update
      Y: [B, Hkv, Lmax, D]; as past_cache (output)
          the cache afterwards; may be past_cache itself

    Attributes:
      update_form (padded_bhnd | packed_nhd, default padded_bhnd): padded_bhnd: update [Bu, Hkv, S, D], every
          row is written; packed_nhd: [T, Hkv, D]
      mode (linear, default linear): linear: no wrap at the end of the cache
      axis (int, default -2): axis of the cache that rows are written along

    Raises ValueError when an argument breaks the schema, NotImplementedError when no kernel takes the call;
    nothing is written then.
    """
