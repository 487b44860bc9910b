"""``polyop check``: the command, models that are too large to load, and files that are wrong in every way."""

from __future__ import annotations

import json
import time

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_nodes import model_of, run
from typer.testing import CliRunner

from polyop.llm.cli import app
from polyop.onnx.check import ModelError, check_model

HALF = np.float16


def padded(b=2, hq=4, hkv=2, s=8, length=16, d=64):
    return [np.zeros(shape, HALF) for shape in ((b, hq, s, d), (b, hkv, length, d), (b, hkv, length, d))]


def reject(model, **options) -> str:
    """The reason why the only node is rejected."""
    report = check_model(model, **options)
    assert not report.problems, report.problems
    assert [node.verdict for node in report.nodes] == ["reject"]
    assert len(report.nodes[0].reason.splitlines()) == 1
    return report.nodes[0].reason


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


def test_command_names_node_verdict_and_kernel(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model_of("TRT_Attention", padded(), causal_kind="lower_right"), path)
    result = command(str(path))
    assert result.exit_code == 0
    assert "ok         TRT_Attention TRT_Attention #0: cpu_flash_attention" in result.output
    report = json.loads(command(str(path), "--json", "--strict").output)
    assert report["ok"] and report["nodes"][0]["kernel"] == "cpu_flash_attention"


def test_command_ends_with_1_when_a_node_would_not_run(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(model_of("TRT_Attention", padded(), scale=0.5), path)
    tolerated = command(str(path))
    assert tolerated.exit_code == 0 and "warning: attribute scale is unknown: ignored" in tolerated.output
    refused = command(str(path), "--strict")
    assert refused.exit_code == 1 and "reject" in refused.output and "attribute scale is unknown" in refused.output
    on_gpu = json.loads(command(str(path), "--json", "--device", "sm_90").output)
    assert on_gpu["nodes"][0]["verdict"] in ("ok", "no_kernel")
    for bad in (["nothing.onnx"], [str(path), "--device", "tpu"]):
        result = command(*bad, "--json")
        assert result.exit_code == 1 and json.loads(result.output)["error"]


def test_two_gigabytes_of_external_data_stay_where_they_are(tmp_path):
    """The file of weights is sparse: reading it would take long and much memory."""
    rows = 1 << 18
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[rows, 4096])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", str(rows * 4096 * 2))):
        weight.external_data.add(key=key, value=value)
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(rows * 4096 * 2)
    model = model_of("TRT_Attention", padded())
    for layer in range(200):
        node = helper.make_node("TRT_Attention", ["x0", "x1", "x2"], [f"a{layer}"], name=f"layer{layer}")
        model.graph.node.extend([node, helper.make_node("Gather", ["w", "ids"], [f"g{layer}"])])
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, [4]))
    model.graph.initializer.append(weight)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    start = time.perf_counter()
    report = check_model(path, strict=True)
    seconds = time.perf_counter() - start
    assert report.is_ok and len(report.nodes) == 201 and report.other_nodes == 200
    assert seconds < 5, f"{seconds:.1f} s"


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_symbolic_extents_are_compared_where_they_are_known():
    model = model_of(
        "TRT_Attention", padded(), shapes={0: ["B", 4, "S", 64], 1: ["B", 2, "L", 64], 2: ["B", 2, "L", 64]}
    )
    assert check_model(model, strict=True).is_ok
    model = model_of(
        "TRT_Attention", padded(), shapes={0: ["B", 4, "S", 64], 1: ["B", 3, "L", "D"], 2: ["B", 3, "L", 64]}
    )
    assert reject(model) == "trt_attention: K axis 1 is 3; Hq = 4 is no multiple of Hkv = 3"


def test_values_without_a_shape_or_a_type_are_not_guessed():
    model = model_of("TRT_Attention", padded())
    model.graph.input[1].type.tensor_type.ClearField("shape")
    model.graph.input[2].ClearField("type")
    report = check_model(model, strict=True)
    assert report.nodes[0].verdict == "ok" and report.nodes[0].warnings == ["the type of V is not known: not checked"]


def test_nodes_inside_subgraphs_are_checked():
    inner = model_of("TRT_Attention", padded(), causal_kind="sideways").graph
    branch = helper.make_graph(list(inner.node), "branch", [], list(inner.output))
    outer = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        "g",
        [*inner.input, helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [onnx.ValueInfoProto(name="y")],
    )
    report = check_model(helper.make_model(outer))
    assert [node.verdict for node in report.nodes] == ["reject", "reject"]
    assert report.nodes[0].reason == (
        'trt_attention: attribute causal_kind is "sideways", wanted none, upper_left or lower_right'
    )


def test_a_cycle_is_named():
    model = model_of("TRT_Attention", padded())
    model.graph.node.append(helper.make_node("Identity", ["y0"], ["x9"]))
    model.graph.node[0].input[1] = "x9"
    assert any("'x9', which nothing before it writes" in problem for problem in check_model(model).problems)


def test_functions_that_call_themselves_are_refused():
    function = helper.make_function(
        "own", "F", ["a"], ["b"], [helper.make_node("F", ["a"], ["b"], domain="own")], [helper.make_opsetid("own", 1)]
    )
    model = model_of("TRT_Attention", padded())
    model.functions.append(function)
    with pytest.raises(ModelError, match="function F calls itself"):
        check_model(model)


@pytest.mark.parametrize("length", [0, 1, 10, 60, 150])
def test_truncated_files_give_one_message(length):
    data = model_of("TRT_Attention", padded()).SerializeToString()
    try:
        check_model(data[:length])
    except ModelError as error:
        assert len(str(error).splitlines()) == 1


def test_what_is_no_model():
    for data in (b"", b"\x00" * 64, b"not a model", b"\xff" * 1000):
        with pytest.raises(ModelError, match="no ONNX model"):
            check_model(data)
    with pytest.raises(ModelError, match="cannot read"):
        check_model("/nonexistent/model.onnx")


# ---- shapes and values -----------------------------------------------------------------------------------------------


def test_huge_shapes():
    big = {0: [1 << 20, 4, 1 << 20, 64], 1: [1 << 20, 2, 16, 64], 2: [1 << 20, 2, 16, 64]}
    assert check_model(model_of("TRT_Attention", padded(), shapes=big), strict=True).is_ok
    absurd = {0: [1 << 40, 1 << 40, 8, 64]}
    assert "elements, wanted at most 2^62" in reject(model_of("TRT_Attention", padded(), shapes=absurd))
    negative = {0: [2, 4, -8, 64]}
    assert reject(model_of("TRT_Attention", padded(), shapes=negative)) == "Q axis 2 is -8, wanted at least 0"


LENGTHS = [
    ([0, 5, 3], "query_lengths[2] is 3, wanted 0 to 8 (offsets must not decrease)"),
    ([1, 5, 8], "query_lengths[0] is 1, wanted 0 to 8 (the first offset must be 0)"),
    ([0, 5, 9], "query_lengths[2] is 9, wanted 0 to 8 (outside the range)"),
    ([0, -1, 8], "query_lengths[1] is -1, wanted 0 to 8 (offsets must not decrease)"),
    ([0, 1 << 40, 8], "query_lengths holds 1099511627776, wanted a number that fits 32 bits"),
]


@pytest.mark.parametrize(("lengths", "text"), LENGTHS, ids=str)
def test_wrong_lengths_are_refused_by_check_and_execution(lengths, text):
    q, kv = np.zeros((8, 4, 16), np.float32), np.zeros((2, 2, 6, 16), np.float32)
    inputs = [q, kv, kv, None, np.array(lengths, np.int64)]
    model = model_of("TRT_Attention", inputs, constants=(4,), query_form="packed_nhd")
    assert reject(model).endswith(text)
    with pytest.raises(ValueError, match="query_lengths"):
        run("TRT_Attention", inputs, query_form="packed_nhd")


def test_wrong_positions_and_scales():
    cache, update = np.zeros((2, 1, 8, 4), HALF), np.zeros((2, 1, 3, 4), HALF)
    inputs = [cache, update, np.array([0, -2], np.int64)]
    model = model_of("TRT_KVCacheUpdate", inputs, constants=(2,))
    assert reject(model) == "trt_kv_cache_update: write_indices[1] is -2, wanted 0 to 2147483647 (outside the range)"
    with pytest.raises(ValueError, match="write_indices"):
        run("TRT_KVCacheUpdate", inputs)
    for scale in (0.0, -1.0, np.nan, np.inf):
        inputs = [*padded(), None, np.array(scale, HALF)]
        reason = reject(model_of("TRT_QuantizedAttention", inputs, constants=(4,)))
        assert "normalization_quantize_scale is" in reason and "wanted a positive finite number" in reason
        with pytest.raises(ValueError, match="normalization_quantize_scale"):
            run("TRT_QuantizedAttention", inputs)


def test_cache_update_writes_what_fits_and_keeps_every_other_bit():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, HALF, ml_dtypes.bfloat16):
        words = rng.integers(0, 256, 3 * 2 * 8 * 4 * np.dtype(dtype).itemsize, dtype=np.uint8)  # NaN payloads too
        cache = words.view(dtype).reshape(3, 2, 8, 4)
        update = rng.standard_normal((2, 2, 3, 4)).astype(dtype)
        at = np.array([6, 1000], np.int32)
        want = cache.copy()
        want[0, :, 6:8] = update[0, :, :2]
        got = run("TRT_KVCacheUpdate", [cache, update, at])
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
        packed = np.concatenate([update[0].transpose(1, 0, 2), update[1, :, :1].transpose(1, 0, 2)])
        want = cache.copy()
        want[0, :, :3], want[1, :, :1] = update[0], update[1, :, :1]
        lengths = np.array([0, 3, 4], np.int32)
        got = run("TRT_KVCacheUpdate", [cache, packed, None, lengths], update_form="packed_nhd", axis=2)
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_constants_that_lie_about_their_size():
    model = model_of("TRT_Attention", [*padded(), None, None, np.array([4, 4], np.int32)], constants=(5,))
    model.graph.initializer[0].raw_data = b"\x01"
    assert "kv_lengths is a constant that cannot be read" in reject(model)
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="../../etc/passwd")
    assert check_model(model).nodes[0].verdict == "ok"  # of bytes: there is no folder, and nothing is read
