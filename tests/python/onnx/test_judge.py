"""The collected cases, and models that polyop's own tests write, through a real TensorRT parser and builder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_nodes import model_of

import polyop.onnx
from polyop.onnx.check import check_model

pytest.importorskip(
    "tensorrt_rtx_bindings",
    reason="the wheels tensorrt-rtx-cu13-libs and -bindings are missing: pip install 'polyop[tensorrt]'",
    exc_type=ImportError,
)

FOLDER = Path(__file__).parents[2] / "data" / "trt_ops"
CASES = json.loads((FOLDER / "cases.json").read_text())


@pytest.fixture(scope="module")
def judge():
    from rtx_judge import Judge

    return Judge()


@pytest.mark.parametrize("name", CASES)
def test_case_has_its_recorded_verdict(judge, name):
    wanted = CASES[name]["expect"]
    got = judge.verdict((FOLDER / f"{name}.onnx").read_bytes())
    assert got == {"no_kernel": "fail_build", "reject_build": "fail_build"}.get(wanted, wanted), judge.log.lines


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


OWN_MODELS = {
    "attention": ("TRT_Attention", [half(2, 6, 16, 64), half(2, 2, 16, 64), half(2, 2, 16, 64)], {}),
    "attention_lengths": (
        "TRT_Attention",
        [half(2, 4, 1, 64), half(2, 2, 128, 64), half(2, 2, 128, 64), None, None, np.zeros(2, np.int32)],
        {"causal_kind": "lower_right"},
    ),
    "quantized": (
        "TRT_QuantizedAttention",
        [half(2, 4, 16, 64), half(2, 2, 16, 64), half(2, 2, 16, 64), None, np.ones((), np.float16)],
        {"normalization_quantize_to_type": 17, "TRT_decomposable": 1},
    ),
    "cache": (
        "TRT_KVCacheUpdate",
        [half(2, 4, 128, 64), half(12, 4, 64), np.zeros(2, np.int32), np.zeros(3, np.int32)],
        {"update_form": "packed_nhd"},
    ),
}


@pytest.mark.parametrize("name", OWN_MODELS)
def test_what_the_strict_check_accepts_is_accepted_there(judge, name):
    op_type, inputs, attributes = OWN_MODELS[name]
    model = model_of(op_type, inputs, **attributes)
    assert check_model(model, strict=True).is_ok
    polyop.onnx.register()
    model = onnx.shape_inference.infer_shapes(model)  # TensorRT wants the type of the output
    assert judge.verdict(model.SerializeToString()) == "accept", judge.log.lines
