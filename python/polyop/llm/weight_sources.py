"""Where tensors come from: a folder of safetensors or a GGUF file. Tensors are read one at a time.

Both sources speak Hugging Face names ("model.layers.3.self_attn.q_proj.weight") and the half-split rotary order.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Protocol

import torch

from .config import ModelConfig, check_architecture, read_json, token_ids
from .errors import LlmError

# ---- interface -----------------------------------------------------------------------------------------------------


class WeightSource(Protocol):
    """A checkpoint that is open for reading."""

    path: Path
    config: ModelConfig

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored (dequantized to f32 when GGUF stores blocks). LlmError when it is missing."""


def open_source(path: str | Path) -> WeightSource:
    """Opens a GGUF file, a Hugging Face folder or a folder written by ``polyop quantize``.

    Raises:
        LlmError: nothing is there, or it is not a model.
    """
    path = Path(path)
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.is_file():
        return GgufFile(path)
    raise LlmError(f"{path}: no such file or folder; wanted a GGUF file or a model folder")


# ---- safetensors ---------------------------------------------------------------------------------------------------


class SafetensorsFolder:
    """config.json and one or more .safetensors files, mapped into memory and read lazily."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            LlmError: no config.json, no or damaged .safetensors files, an unknown architecture.
        """
        from safetensors import SafetensorError, safe_open

        self.path = folder
        values = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.is_file():
            stops = token_ids(values.get("eos_token_id")) + token_ids(read_json(generation).get("eos_token_id"))
            values["eos_token_id"] = list(dict.fromkeys(stops))
        self.config = ModelConfig.from_dict(values, str(folder / "config.json"))
        self._file_of_tensor = {}
        self._errors = (SafetensorError, OSError)
        for file in self._list_files(folder):
            try:
                handle = safe_open(str(file), framework="pt")
            except self._errors as error:
                raise LlmError(f"{file}: not a readable safetensors file: {error}") from None
            self._file_of_tensor.update(dict.fromkeys(handle.keys(), handle))

    @staticmethod
    def _list_files(folder: Path) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise LlmError(f"{index}: key 'weight_map' is missing")
            return [folder / name for name in sorted(set(weight_map.values()))]
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise LlmError(f"{folder}: no .safetensors file in this folder")
        return files

    def has(self, name: str) -> bool:
        return name in self._file_of_tensor

    def read(self, name: str) -> torch.Tensor:
        try:
            return self._file_of_tensor[name].get_tensor(name)
        except KeyError:
            raise LlmError(f"{self.path}: tensor {name!r} is missing") from None
        except self._errors as error:
            raise LlmError(f"{self.path}: tensor {name!r} cannot be read: {error}") from None


# ---- GGUF ----------------------------------------------------------------------------------------------------------

_GGUF_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LLAMA3_TRAINED_POSITIONS = 8192  # original_max_position_embeddings of Llama 3.1 and 3.2
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufFile:
    """A GGUF file of a Llama, Qwen2 or Qwen3 model, dequantized tensor by tensor."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            LlmError: the file is truncated or no GGUF file, or the architecture is unknown.
        """
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(str(path))
            architecture = reader.get_field("general.architecture").contents()
        except Exception as error:  # the reader reports damage by whatever numpy or its own parser raises
            raise LlmError(f"{path}: not a readable GGUF file: {error}") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        values = self._read_config(path, architecture)
        # transformers leaves this key out for some architectures and takes a default of the class instead.
        head_dim = reader.get_field(f"{architecture}.attention.key_length")
        values["head_dim"] = None if head_dim is None else head_dim.contents()  # None: hidden size / heads
        if "rope_freqs.weight" in self._tensors:
            values["rope_parameters"] = self._read_llama3_scaling(values)
        self.config = ModelConfig.from_dict(values, str(path))

    @staticmethod
    def _read_config(path: Path, architecture: str) -> dict:
        check_architecture(architecture, str(path))
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
        except Exception as error:
            raise LlmError(f"{path}: the model configuration cannot be read: {error}") from None

    def _read_llama3_scaling(self, values: dict) -> dict:
        """Llama 3 scaling, which a GGUF file stores as one divisor per frequency instead of the four parameters."""
        from polyop.attention import RopeParams, RotaryScalingType, inverse_frequencies

        divisors = self.read("rope_freqs.weight").float()
        rope = dict(values.get("rope_parameters") or {})
        rope.update(rope_type="llama3", factor=float(divisors.max()), low_freq_factor=1.0, high_freq_factor=4.0,
                    original_max_position_embeddings=_LLAMA3_TRAINED_POSITIONS)  # fmt: skip
        params = RopeParams(
            dim=2 * divisors.numel(),
            theta=float(rope["rope_theta"]),
            scale_type=RotaryScalingType.LLAMA3,
            scale=rope["factor"],
            original_max_positions=_LLAMA3_TRAINED_POSITIONS,
        )
        unscaled = dataclasses.replace(params, scale_type=RotaryScalingType.NONE)
        expected = inverse_frequencies(unscaled)[0] / inverse_frequencies(params)[0]
        if not torch.allclose(divisors, expected, rtol=1e-3):
            raise LlmError(f"{self.path}: rope_freqs.weight is not the Llama 3 rotary scaling; supported: Llama 3")
        return rope

    def _stored_name(self, name: str) -> str:
        if name in _GGUF_GLOBAL_NAMES:
            return _GGUF_GLOBAL_NAMES[name]
        match = _LAYER_NAME.fullmatch(name)
        if match is None or match[2] not in _GGUF_LAYER_NAMES:
            return name
        return f"blk.{match[1]}.{_GGUF_LAYER_NAMES[match[2]]}.{match[3]}"

    def has(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    def read(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        stored = self._tensors.get(self._stored_name(name))
        if stored is None:
            raise LlmError(f"{self.path}: tensor {self._stored_name(name)!r} is missing")
        try:
            values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        except NotImplementedError:
            raise LlmError(
                f"{self.path}: tensor type {stored.tensor_type.name} of {stored.name!r} is unknown"
            ) from None
        if ".self_attn." in name and self.config.model_type == "llama":
            heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
            num_heads = heads.get(name.split(".")[-2])
            if num_heads is not None:
                return _interleaved_to_half_split(values, num_heads)
        return values


def _interleaved_to_half_split(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's row order of q and k: (pair, half) per head becomes (half, pair). values [Hq * D, ...]."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
