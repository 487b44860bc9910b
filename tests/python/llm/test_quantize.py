"""INT4: the clip search, the file writer, the quantized folder."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from polyop.llm import LlmError, load_model, load_tokenizer, quantize_groups, quantize_model
from polyop.llm.linear import Int4Linear
from polyop.llm.quantize import CLIP_RATIOS
from polyop.llm.safetensors_writer import SafetensorsWriter
from polyop.ops import pack_int4_fragments

# ---- scales --------------------------------------------------------------------------------------------------------


def dequantized(q: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    return (q.float() - 8) * scales.float().repeat_interleave(group_size, dim=0)[: q.shape[1]].T


def squared_error(weight: torch.Tensor, group_size: int, clip_ratios: tuple[float, ...]) -> float:
    q, scales = quantize_groups(weight, group_size, clip_ratios)
    return float((dequantized(q, scales, group_size) - weight).square().sum())


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_clip_search_beats_max_abs(group_size):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(group_size)) * 0.02
    plain, searched = (squared_error(weight, group_size, ratios) for ratios in ((1.0,), CLIP_RATIOS))
    assert searched < 0.85 * plain


def test_no_group_gets_worse_by_the_search():
    weight = torch.randn(40, 160, generator=torch.Generator().manual_seed(0))
    errors = []
    for ratios in ((1.0,), CLIP_RATIOS):
        q, scales = quantize_groups(weight, 32, ratios)
        errors.append((dequantized(q, scales, 32) - weight).square().view(40, 5, 32).sum(-1))
    assert bool((errors[1] <= errors[0] * (1 + 1e-5)).all())


def test_every_weight_is_the_nearest_step_of_its_stored_scale():
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(5))
    q, scales = quantize_groups(weight, 64)
    steps = scales.float().repeat_interleave(64, dim=0).T
    assert torch.equal(q.float(), (weight / steps).round().clamp(-8, 7) + 8)


@pytest.mark.parametrize(("num_outputs", "num_inputs", "group_size"), [(5, 48, 32), (3, 576, 128), (1, 7, 64)])
def test_short_last_group(num_outputs, num_inputs, group_size):
    weight = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))
    q, scales = quantize_groups(weight, group_size)
    assert q.shape == (num_outputs, num_inputs) and q.dtype is torch.uint8 and int(q.max()) <= 15
    assert scales.shape == (-(-num_inputs // group_size), num_outputs) and scales.dtype is torch.float16
    assert (dequantized(q, scales, group_size) - weight).abs().max() < 0.6 * weight.abs().max()


def test_zeros_and_values_below_f16_become_zero():
    q, scales = quantize_groups(torch.tensor([[0.0] * 32, [1e-9] * 32]), 32)
    assert torch.equal(q, torch.full((2, 32), 8, dtype=torch.uint8)) and torch.equal(scales, torch.zeros(1, 2).half())


# ---- packed against dense ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_outputs", "num_inputs", "group_size"), [(160, 48, 32), (96, 576, 128), (130, 128, 64)])
def test_packed_linear_equals_its_dense_form(num_outputs, num_inputs, group_size):
    generator = torch.Generator().manual_seed(2)
    q, scales = quantize_groups(torch.randn(num_outputs, num_inputs, generator=generator), group_size)
    bias = torch.randn(num_outputs, generator=generator)
    packed = Int4Linear(pack_int4_fragments(q), scales, group_size, bias)
    x = torch.randn(3, num_inputs, generator=generator)
    dense = packed.to_dense(num_inputs, torch.float32)
    assert torch.equal(dense.weight, dequantized(q, scales, group_size))
    bound = 4 * num_inputs * torch.finfo(torch.float32).eps * (x.abs() @ dense.weight.abs().T + 1)
    assert bool(((packed(x, [(0, 3)]) - dense(x, [(0, 3)])).abs() <= bound).all())


# ---- file ----------------------------------------------------------------------------------------------------------


def test_written_file_is_read_by_safetensors(tmp_path):
    from safetensors import safe_open

    tensors = {
        "small": torch.arange(3, dtype=torch.float32),
        "wide": torch.arange(640, dtype=torch.int32).to(torch.int8).view(5, 128),
        "half": torch.randn(7, 9).half(),
        "empty": torch.zeros(0, 4),
    }
    plan = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(tmp_path / "x.safetensors", plan) as writer:
        for name in ("half", "small", "empty", "wide"):
            writer.write(name, tensors[name])
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
        assert file.get_tensor("wide").data_ptr() % 64 == 0


def test_writer_refuses_what_was_not_planned(tmp_path):
    plan = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with pytest.raises(ValueError, match="a is"), SafetensorsWriter(tmp_path / "x", plan) as writer:
        writer.write("a", torch.zeros(3))
    with pytest.raises(ValueError, match="not written: b"), SafetensorsWriter(tmp_path / "x", plan) as writer:
        writer.write("a", torch.zeros(2))


# ---- folder --------------------------------------------------------------------------------------------------------


def test_quantized_folder_holds_the_model(tiny_folder, tiny_int4_folder):
    names = {file.name for file in tiny_int4_folder.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    config = json.loads((tiny_int4_folder / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 32 and config["model_type"] == "llama"
    dense, packed = load_model(tiny_folder), load_model(tiny_int4_folder)
    assert packed.embedding.dtype is torch.float16
    assert torch.equal(packed.embedding, dense.embedding.half())
    written_out = load_model(tiny_int4_folder, dequantize=True)
    for layer, reference in zip(written_out.layers, dense.layers, strict=True):
        difference = layer.gate_up.weight - reference.gate_up.weight
        assert 0 < difference.square().mean() < 0.01 * reference.gate_up.weight.square().mean()
    old, new = load_tokenizer(tiny_folder), load_tokenizer(tiny_int4_folder)
    assert new.chat_template == old.chat_template and new.encode("abc<|end|>") == old.encode("abc<|end|>")


def test_biases_and_head_survive_quantization(tiny_folder, tmp_path):
    import transformers

    config = transformers.Qwen2Config(hidden_size=96, intermediate_size=80, num_hidden_layers=1, vocab_size=260,
                                      num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
                                      tie_word_embeddings=False)  # fmt: skip
    golden = transformers.Qwen2ForCausalLM(config)
    torch.nn.init.uniform_(golden.model.layers[0].self_attn.q_proj.bias)
    golden.save_pretrained(tmp_path / "dense")
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path / "dense")
    model = load_model(quantize_model(tmp_path / "dense", tmp_path / "int4", 64))
    assert torch.equal(model.layers[0].qkv.bias[:96], golden.model.layers[0].self_attn.q_proj.bias)
    assert torch.equal(model.lm_head, golden.lm_head.weight.half())
    assert model.lm_head is not model.embedding


def test_progress_ends_at_the_number_of_weights(tiny_folder, tmp_path):
    seen = []
    quantize_model(tiny_folder, tmp_path / "out", 32, lambda done, total: seen.append((done, total)))
    per_layer = 160 * 48 + 48 * 96 + 160 * 48 + 48 * 80
    assert seen[-1] == (2 * per_layer, 2 * per_layer)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_output_that_exists_is_left_alone(tiny_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(LlmError, match="exists already; wanted a folder that is new or empty"):
        quantize_model(tiny_folder, tmp_path / "out", 32)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["mine.txt"]


def test_quantized_model_is_not_quantized_again(tiny_int4_folder, tmp_path):
    with pytest.raises(LlmError, match="is quantized already, with group size 32"):
        quantize_model(tiny_int4_folder, tmp_path / "out", 64)
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_behind_by_an_error_half_way(make_tiny_model, tmp_path):
    folder = make_tiny_model("bad")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlmError, match="is missing"):
        quantize_model(folder, tmp_path / "out", 32)
    assert os.listdir(tmp_path) == ["bad"]
