"""TRT_Attention and TRT_QuantizedAttention, executed as ONNX files, against float64 NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx_nodes import run
from onnx_oracle import Result, attention, operand_factor

from polyop import ops

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def assert_matches(got: np.ndarray, want: Result, dtype: str, head_dim: int, note: str = "") -> None:
    """Within one rounding of the output, f32 sums over D and L, and what quantization may flip."""
    sums = 2.0**-22 * (head_dim + 64)
    bound = 2 * ROUNDOFF[dtype] * np.abs(want.y) + sums * (1 + np.abs(want.y)) + want.slack * 1.01
    error = np.abs(got.astype(np.float64) - want.y)
    assert got.shape == want.y.shape
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert error.size == 0 or error[worst] <= bound[worst], (
        f"{note}: at {worst} got {got[worst]}, want {want.y[worst]}, bound {bound[worst]:.3g}"
    )


class Case:
    """Random operands; scores stay small enough that float32 and float64 softmax agree well."""

    def __init__(self, seed: int, dtype: str = "f32") -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype

    def tensor(self, *shape: int, size: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * size).astype(DTYPES[self.dtype])

    def offsets(self, lengths: list[int]) -> np.ndarray:
        return np.cumsum([0, *lengths]).astype(np.int32)

    def padded(self, b: int, hq: int, hkv: int, s: int, length: int, d: int) -> list[np.ndarray]:
        size = d**-0.25
        return [
            self.tensor(b, hq, s, d, size=size),
            self.tensor(b, hkv, length, d, size=size),
            self.tensor(b, hkv, length, d),
        ]


@pytest.mark.parametrize("head_dim", [1, 2, 3, 8, 16, 63, 64, 80, 96, 128, 256, 511, 512])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_head_sizes_match_numpy(head_dim, dtype):
    case = Case(head_dim, dtype)
    inputs = case.padded(2, 3, 1, 5, 9, head_dim)
    assert_matches(run("TRT_Attention", inputs), attention(*inputs), dtype, head_dim)
    quantized = [*inputs, None, np.array(1 / 448, DTYPES[dtype])]
    want = attention(
        *inputs,
        factor=operand_factor(None, head_dim, DTYPES[dtype]),
        quantize=(float(quantized[4]), "fp8"),
    )
    assert_matches(run("TRT_QuantizedAttention", quantized), want, dtype, head_dim)


@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (3, 3), (4, 2), (6, 2), (5, 1), (12, 4), (7, 1), (24, 3), (9, 3)])
def test_grouped_heads_repeat_interleaved(hq, hkv):
    inputs = Case(hq).padded(2, hq, hkv, 4, 7, 16)
    assert_matches(run("TRT_Attention", inputs), attention(*inputs), "f32", 16)


@pytest.mark.parametrize("causal", ["none", "upper_left", "lower_right"])
@pytest.mark.parametrize(("rows", "keys"), [(4, 16), (16, 4), (1, 128), (7, 7), (1, 1), (70, 130)])
def test_causal_kinds_of_unequal_lengths(causal, rows, keys):
    inputs = Case(rows).padded(2, 4, 2, rows, keys, 8)
    got = run("TRT_Attention", inputs, causal_kind=causal)
    assert_matches(got, attention(*inputs, causal=causal), "f32", 8)
    lengths = np.array([keys, keys // 2], np.int32)
    got = run("TRT_Attention", [*inputs, None, None, lengths], causal_kind=causal)
    assert_matches(got, attention(*inputs, kv_lengths=lengths, causal=causal), "f32", 8)


MASK_SHAPES = [
    (), (1,), (9,), (5, 9), (1, 9), (5, 1), (4, 5, 9), (1, 5, 9), (4, 1, 1),
    (2, 4, 5, 9), (1, 4, 5, 9), (2, 1, 5, 9), (2, 4, 1, 9), (2, 4, 5, 1), (1, 1, 1, 1), (2, 1, 1, 9),
]  # fmt: skip


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "add"])
@pytest.mark.parametrize("normalization", ["softmax", "none"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_masks_of_every_rank(shape, kind, normalization, dtype):
    case = Case(len(shape), dtype)
    inputs = case.padded(2, 4, 2, 5, 9, 16)
    if kind == "bool":
        mask = np.asarray(case.rng.random(shape) < 0.6)
    else:
        values = np.asarray(case.rng.standard_normal(shape))
        mask = np.where(case.rng.random(shape) < 0.3, -np.inf, values).astype(DTYPES[dtype])
    got = run("TRT_Attention", [*inputs, mask], TRT_normalization_op=normalization)
    assert_matches(got, attention(*inputs, mask, normalization=normalization), dtype, 16 * 9)
    lengths = np.array([9, 4], np.int32)
    got = run("TRT_Attention", [*inputs, mask, None, lengths], TRT_normalization_op=normalization)
    want = attention(*inputs, mask, kv_lengths=lengths, normalization=normalization)
    assert_matches(got, want, dtype, 16 * 9)


LENGTHS = [([3, 0, 5, 1], [4, 2, 0, 9]), ([0, 0], [0, 0]), ([1, 1, 1], [7, 1, 80]), ([64, 2], [64, 600]), ([5], [5])]


@pytest.mark.parametrize(("rows", "keys"), LENGTHS, ids=str)
@pytest.mark.parametrize("kv_form", ["packed_nhd", "padded_bhnd"])
@pytest.mark.parametrize(
    ("causal", "quantized"),
    [("none", False), ("upper_left", False), ("lower_right", False), ("none", True), ("upper_left", True)],
)
def test_ragged_sequences(rows, keys, causal, kv_form, quantized):
    case = Case(len(rows))
    hq, hkv, d, tail = 6, 2, 16, 2
    query_lengths = case.offsets(rows)
    q = case.tensor(query_lengths[-1] + tail, hq, d, size=0.5)
    if kv_form == "packed_nhd":
        kv_lengths = case.offsets(keys)
        k, v = (case.tensor(kv_lengths[-1] + tail, hkv, d, size=size) for size in (0.5, 1.0))
        k[kv_lengths[-1] :] = v[kv_lengths[-1] :] = np.nan  # belongs to no sequence: never read
    else:
        kv_lengths = np.array(keys, np.int32)
        k, v = (case.tensor(len(keys), hkv, max(keys) + 1, d, size=size) for size in (0.5, 1.0))
        for b, length in enumerate(keys):
            k[b, :, length:] = v[b, :, length:] = np.nan
    forms = {"query_form": "packed_nhd", "kv_form": kv_form}
    if quantized:
        scale = np.array([1 / 127], np.float32)
        got = run(
            "TRT_QuantizedAttention",
            [q, k, v, None, scale, query_lengths, kv_lengths],
            is_causal=int(causal == "upper_left"),
            normalization_quantize_to_type=3,
            **forms,
        )
        factor = operand_factor(None, d, np.dtype(np.float32))
        quantize = (float(scale[0]), "int8")
    else:
        got = run("TRT_Attention", [q, k, v, None, query_lengths, kv_lengths], causal_kind=causal, **forms)
        factor, quantize = None, None
    want = attention(q, k, v, None, query_lengths, kv_lengths, causal=causal, factor=factor, quantize=quantize)
    assert_matches(got, want, "f32", d)
    assert not got[query_lengths[-1] :].any(), "rows of no sequence are 0"


@pytest.mark.parametrize("kv_form", ["packed_nhd", "padded_bhnd"])
def test_mask_of_packed_sequences_counts_inside_each(kv_form):
    case = Case(3)
    rows, keys = [3, 5, 0], [4, 6, 2]
    query_lengths = case.offsets(rows)
    q = case.tensor(8, 4, 16, size=0.5)
    packed = kv_form == "packed_nhd"
    kv_lengths = case.offsets(keys) if packed else np.array(keys, np.int32)
    shape = (12, 2, 16) if packed else (3, 2, 7, 16)
    k, v = case.tensor(*shape, size=0.5), case.tensor(*shape)
    mask = case.rng.random((3, 4, 5, 7)) < 0.6
    got = run("TRT_Attention", [q, k, v, mask, query_lengths, kv_lengths], query_form="packed_nhd", kv_form=kv_form)
    assert_matches(got, attention(q, k, v, mask, query_lengths, kv_lengths), "f32", 16)


@pytest.mark.parametrize("to", ["fp8", "int8"])
@pytest.mark.parametrize("scale", [1 / 448, 1 / 127, 0.003, 1e-4, 0.5, 3.0])
@pytest.mark.parametrize("normalization", ["softmax", "none"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_weights_are_quantized_after_normalization(to, scale, normalization, dtype):
    """Saturation, flushing to zero, negative weights without softmax; default and given scale of the scores."""
    case = Case(7, dtype)
    inputs = case.padded(2, 4, 2, 6, 40, 32)
    quantize_scale = np.array(scale, np.float32)
    for score_scale in (None, 0.31):
        attributes = {} if score_scale is None else {"scale": score_scale}
        got = run(
            "TRT_QuantizedAttention",
            [*inputs, None, quantize_scale],
            normalization_quantize_to_type=17 if to == "fp8" else 3,
            TRT_normalization_op=normalization,
            **attributes,
        )
        factor = operand_factor(score_scale, 32, np.dtype(DTYPES[dtype]))
        want = attention(*inputs, normalization=normalization, factor=factor, quantize=(float(quantize_scale), to))
        assert_matches(got, want, dtype, 32 * 8, f"{to} {scale} {score_scale}")


def test_quantize_scale_of_every_float_type_and_absent():
    case = Case(1, "f16")
    inputs = case.padded(1, 2, 1, 3, 20, 96)
    factor = operand_factor(None, 96, np.dtype(np.float16))
    for dtype in DTYPES.values():
        scale = np.array([0.01], dtype)
        want = attention(*inputs, factor=factor, quantize=(float(scale[0]), "fp8"))
        assert_matches(run("TRT_QuantizedAttention", [*inputs, None, scale]), want, "f16", 96)
    got = run("TRT_QuantizedAttention", [*inputs, None, None])
    assert_matches(got, attention(*inputs, factor=factor), "f16", 96)


@pytest.mark.parametrize("kernel", ["cpu_row_attention", "reference"])
@pytest.mark.parametrize("normalization", ["softmax", "none"])
def test_hidden_keys_never_reach_the_result(kernel, normalization):
    """NaN and infinities in masked keys and values; rows without a visible key are exactly 0; NaN masks stay in their
    row."""
    case = Case(11)
    q, k, v = case.padded(2, 4, 2, 5, 70, 8)
    mask = case.rng.random((2, 1, 1, 70)) < 0.5
    mask[:, :, :, 0] = True
    hidden = ~np.broadcast_to(mask[:, 0, 0, :, None].swapaxes(1, 1), (2, 70, 1))[:, None]
    bad_k = np.where(hidden, np.nan, k).astype(np.float32)
    bad_v = np.where(hidden, np.inf, v).astype(np.float32)
    import torch

    function = ops.with_kernel("trt_attention", kernel)
    tensors = [torch.from_numpy(x) for x in (q, bad_k, bad_v, mask)]
    got = function(*tensors, TRT_normalization_op=normalization).numpy()
    assert_matches(got, attention(q, k, v, mask, normalization=normalization), "f32", 8 * 70)
    rows = np.zeros((5, 70), bool)
    rows[2] = True
    got = function(*tensors[:1], torch.from_numpy(k), torch.from_numpy(v), torch.from_numpy(rows)).numpy()
    assert not got[:, :, [0, 1, 3, 4]].any() and got[:, :, 2].any()
    poisoned = np.zeros((5, 70), np.float32)
    poisoned[3, 5] = np.nan
    got = function(*[torch.from_numpy(x) for x in (q, k, v, poisoned)]).numpy()
    assert np.isnan(got[:, :, 3]).all() and not np.isnan(got[:, :, [0, 1, 2, 4]]).any()


@pytest.mark.parametrize(
    "shape", [(0, 4, 2, 5, 6, 8), (2, 4, 2, 0, 6, 8), (2, 4, 2, 5, 0, 8)], ids=["no_batch", "no_rows", "no_keys"]
)
@pytest.mark.parametrize("op_type", ["TRT_Attention", "TRT_QuantizedAttention"])
def test_empty_axes(shape, op_type):
    inputs = Case(1).padded(*shape)
    if op_type == "TRT_QuantizedAttention":
        inputs += [None, np.array(0.01, np.float32)]
    got = run(op_type, inputs)
    assert got.shape == inputs[0].shape and not got.any()


def test_a_row_has_the_same_bits_in_any_batch():
    """Quantized and masked rows do not depend on neighbours, row count or threads."""
    case = Case(5, "f16")
    q, k, v = case.padded(3, 6, 2, 33, 150, 64)
    scale = np.array(1 / 448, np.float16)
    lengths = np.array([150, 77, 3], np.int32)
    whole = run("TRT_QuantizedAttention", [q, k, v, None, scale, None, lengths])
    threads = ops.num_threads()
    try:
        for count in (1, 3):
            ops.set_num_threads(count)
            for b in range(3):
                for rows in (slice(0, 1), slice(5, 33)):
                    part = [q[b : b + 1, :, rows], k[b : b + 1], v[b : b + 1], None, scale, None, lengths[b : b + 1]]
                    np.testing.assert_array_equal(run("TRT_QuantizedAttention", part)[0], whole[b][:, rows])
    finally:
        ops.set_num_threads(threads)
