"""Checkpoints: every architecture against transformers on the same random weights; GGUF; what is refused."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from polyop.llm import DecoderModel, LlmError, load_model
from polyop.llm.paged_model import PagedModel, Piece

IDS = [5, 9, 200, 17, 33, 4, 4, 251, 90, 12, 66]
TOLERANCE = 2e-5  # logits are below 10; sums of at most 80 f32 products, 2 layers


@torch.inference_mode()
def all_logits(model: DecoderModel, ids: list[int]) -> torch.Tensor:
    paged = PagedModel(model, max_batch=1, max_num_tokens=len(ids), max_seq_len=len(ids), page_size=4)
    hidden, _ = paged.forward([Piece(request_id=0, token_ids=ids, prompt_length=len(ids))])
    return model.logits(hidden)


def transformers_model(kind: str, **changes: object):
    import transformers

    shape = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 260,
        "max_position_embeddings": 256,
    }
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(1)
    if kind == "qwen2":  # its config has no head_dim
        shape |= {"hidden_size": 96}
        del shape["head_dim"]
    model = model_class(config_class(**(shape | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases start at 1 and 0, which would hide faults
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(std=0.15)
    return model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": False}),
    ],
)
@pytest.mark.parametrize("backend", ["vanilla", "fused"])
def test_logits_equal_those_of_transformers(kind, changes, backend, tmp_path):
    golden = transformers_model(kind, **changes)
    golden.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.inference_mode():
        expected = golden(torch.tensor([IDS])).logits[0]
    actual = all_logits(load_model(tmp_path, attn_backend=backend), IDS)
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_rope_settings_of_transformers_4_are_read(make_tiny_model):
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = make_tiny_model(rope_theta=500.0, rope_scaling=scaling | {"original_max_position_embeddings": 64})
    rope = load_model(folder).layers[0].attention.pos_embd_params.rope
    assert (rope.theta, rope.scale, rope.original_max_positions) == (500.0, 4.0, 64)


# ---- GGUF ----------------------------------------------------------------------------------------------------------


def write_gguf(path, golden, *, rope_divisors: torch.Tensor | None = None, architecture: str = "llama") -> None:
    """A transformers model as a GGUF file; a llama's q and k rows stand in llama.cpp's interleaved order."""
    import gguf

    config = golden.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    renamed = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
               "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
                "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
               "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
               "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
               "model.layers": "blk"}  # fmt: skip
    for name, value in golden.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None and architecture == "llama":
            value = value.view(heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(value.shape)
        for old, new in renamed.items():
            name = name.replace(old, new)
        writer.add_tensor(name, value.contiguous().numpy())
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_logits_of_transformers(kind, tmp_path):
    golden = transformers_model(kind, tie_word_embeddings=False)
    write_gguf(tmp_path / "model.gguf", golden, architecture=kind)
    with torch.inference_mode():
        expected = golden(torch.tensor([IDS])).logits[0]
    actual = all_logits(load_model(tmp_path / "model.gguf"), IDS)
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_gguf_with_frequency_divisors_gets_llama3_scaling(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    golden = transformers_model("llama", tie_word_embeddings=False, rope_parameters=rope)
    scaled = golden.model.rotary_emb.inv_freq
    divisors = 1.0 / (5e5 ** (torch.arange(0, 16, 2) / 16)) / scaled
    write_gguf(tmp_path / "model.gguf", golden, rope_divisors=divisors)
    with torch.inference_mode():
        expected = golden(torch.tensor([IDS])).logits[0]
    actual = all_logits(load_model(tmp_path / "model.gguf"), IDS)
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()

    write_gguf(tmp_path / "other.gguf", golden, rope_divisors=divisors.flip(0).contiguous())
    with pytest.raises(LlmError, match=r"rope_freqs\.weight is not the Llama 3 rotary scaling"):
        load_model(tmp_path / "other.gguf")


def test_gguf_of_another_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", transformers_model("llama"), architecture="bloom")
    with pytest.raises(LlmError, match="unknown architecture 'bloom'; supported: llama, qwen2, qwen3"):
        load_model(tmp_path / "model.gguf")


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "unknown architecture 'gpt2'; supported: llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is true; supported: false"),
        ({"use_sliding_window": True}, "use_sliding_window is true; supported: false"),
        ({"num_key_value_heads": 4}, "num_attention_heads is 6; wanted a multiple of num_key_value_heads = 4"),
        ({"hidden_size": "wide"}, "invalid literal"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization method is 'gptq'; supported: 'polyop_int4'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope scaling type is 'spiral'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "DYNAMIC"),
    ],
)
def test_config_that_the_decoder_does_not_compute_is_refused(changes, text, tiny_folder, tmp_path):
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny_folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlmError, match=text):
        load_model(tmp_path)


def test_missing_config_key_is_named(tiny_folder, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text())
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlmError, match="key 'vocab_size' is missing"):
        load_model(tmp_path)


def test_tensor_of_another_shape_is_named(make_tiny_model):
    folder = make_tiny_model()
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlmError, match=r"'model\.embed_tokens\.weight' has shape \[260, 48\]; wanted \[300, 48\]"):
        load_model(folder)


def test_missing_tensor_is_named(make_tiny_model):
    folder = make_tiny_model()
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LlmError, match=r"tensor 'model\.layers\.2\.\S+' is missing"):
        load_model(folder)


def test_unknown_backend_and_context_are_refused(tiny_folder):
    with pytest.raises(LlmError, match="attention backend 'flashy' is unknown"):
        load_model(tiny_folder, attn_backend="flashy")
    with pytest.raises(LlmError, match="max_seq_len is 257; wanted 1 to 256, the context of the model"):
        load_model(tiny_folder, max_seq_len=257)


def test_safetensors_header_with_absurd_length_is_refused(make_tiny_model):
    folder = make_tiny_model()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(LlmError, match=r"model\.safetensors: not a readable safetensors file"):
        load_model(folder)
