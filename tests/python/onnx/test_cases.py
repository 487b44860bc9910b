"""Verdicts over the collected cases: one small file each, with TensorRT's verdict and the one that polyop shall give.

``expect`` is what TensorRT-RTX 1.7.1 says (accept, no_kernel, reject_parse, reject_build), ``polyop`` the strict
verdict of this library. docs/trt_deviations.md explains every case where they differ.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from polyop.onnx.check import check_model

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "data" / "trt_ops"
CASES = json.loads((FOLDER / "cases.json").read_text())

#: TensorRT's verdicts in the words of `polyop`: a valid node that has no kernel there is a valid node.
VALID = {"accept": "accept", "no_kernel": "accept", "reject_parse": "reject", "reject_build": "reject"}


def verdict(name: str, strict: bool) -> str:
    report = check_model(FOLDER / f"{name}.onnx", strict=strict)
    assert not report.problems, report.problems
    for node in report.nodes:
        assert bool(node.kernel) == (node.verdict == "ok") and bool(node.reason) == (node.verdict != "ok")
    return "reject" if any(node.verdict == "reject" for node in report.nodes) else "accept"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["polyop"] != "n/a"])
def test_strict_verdict(name):
    assert verdict(name, strict=True) == CASES[name]["polyop"], CASES[name]["why"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["polyop"] == VALID[case["expect"]]])
def test_verdict_is_that_of_tensorrt_where_both_shall_agree(name):
    assert verdict(name, strict=True) == VALID[CASES[name]["expect"]]


def deviations() -> dict[str, dict[str, str]]:
    return {name: case for name, case in CASES.items() if case["polyop"] not in ("n/a", VALID[case["expect"]])}


@pytest.mark.parametrize("name", deviations())
def test_deviation_is_explained(name):
    text = (ROOT / "docs" / "trt_deviations.md").read_text()
    patterns = re.findall(r"`([a-z]_[\w*-]+)`", text)
    assert any(re.fullmatch(pattern.replace("*", ".*"), name) for pattern in patterns)


#: Bad values and shapes stay refused in compatibility mode: TensorRT accepts them because it looks at none of them.
REFUSED_IN_BOTH_MODES = {
    "a_len_q_f16", "a_len_q_i8", "a_len_const_first_nonzero", "a_len_const_decreasing", "a_len_const_kv_beyond_padded",
    "a_mask_packed_3d", "a_mask_packed_2d", "a_dtype_f64", "a_nbrank_2_packed", "q_scale_1d_4", "q_scale_zero",
    "q_scale_attr_neg", "k_dtype_f64", "k_wi_const_negative", "k_ul_const_bad",
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n, c in deviations().items() if c["polyop"] == "reject"])
def test_compatibility_mode_tolerates_what_tensorrt_ignores(name):
    wanted = "reject" if name in REFUSED_IN_BOTH_MODES else "accept"
    assert verdict(name, strict=False) == wanted
    if wanted == "accept":
        assert all(node.warnings for node in check_model(FOLDER / f"{name}.onnx").nodes)


def test_several_devices_are_valid_but_have_no_kernel():
    node = check_model(FOLDER / "a_nbrank_2.onnx", strict=True).nodes[0]
    assert (node.verdict, node.reason) == (
        "no_kernel",
        "trt_attention: attribute nb_rank is 2, wanted 1: one device computes a call",
    )
