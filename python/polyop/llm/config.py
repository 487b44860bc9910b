"""ModelConfig: what the decoder needs to know about a checkpoint, read from a Hugging Face style dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import LlmError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
QUANT_METHOD = "polyop_int4"
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder. Field names follow transformers, so that RopeParams.from_config reads it directly.

    Attributes:
        model_type: "llama", "qwen2" or "qwen3".
        hidden_size, intermediate_size, num_hidden_layers, vocab_size, max_position_embeddings: extents.
        num_attention_heads, num_key_value_heads, head_dim: Hq, Hkv, D.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_parameters: rope_theta, rope_type and the factors of the scaling type.
        has_qkv_bias, has_output_bias: biases on q, k, v and on the attention output projection.
        has_qk_norm: RMSNorm over each head of q and k before rotation (Qwen3).
        tie_word_embeddings: lm_head is the embedding table.
        eos_token_ids: generation stops at any of these.
        group_size: depth of an INT4 group when the folder is quantized by polyop, otherwise None.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    group_size: int | None = None

    @property
    def num_qkv_features(self) -> int:
        """Output features of the joined q, k, v projection: (Hq + 2 Hkv) * D."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str) -> ModelConfig:
        """Reads config.json of transformers 4.x or 5.x.

        Args:
            values: the dictionary.
            source: file name for error texts.

        Raises:
            LlmError: an architecture, activation, bias or quantization this decoder does not compute; a missing key.
        """
        model_type = check_architecture(values.get("model_type"), source)
        _refuse_variants(values, source)
        has_bias = bool(values.get("attention_bias", False))
        try:
            num_heads = int(values["num_attention_heads"])
            rope = dict(values.get("rope_scaling") or {})
            rope.update(values.get("rope_parameters") or {})
            rope.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
            config = ModelConfig(
                model_type=model_type,
                hidden_size=int(values["hidden_size"]),
                intermediate_size=int(values["intermediate_size"]),
                num_hidden_layers=int(values["num_hidden_layers"]),
                num_attention_heads=num_heads,
                num_key_value_heads=int(values.get("num_key_value_heads") or num_heads),
                head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // num_heads),
                vocab_size=int(values["vocab_size"]),
                max_position_embeddings=int(values["max_position_embeddings"]),
                rms_norm_eps=float(values["rms_norm_eps"]),
                rope_parameters=rope,
                has_qkv_bias=model_type == "qwen2" or has_bias,
                has_output_bias=model_type != "qwen2" and has_bias,
                has_qk_norm=model_type == "qwen3",
                tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
                eos_token_ids=token_ids(values.get("eos_token_id")),
                group_size=_read_group_size(values, source),
            )
        except KeyError as error:
            raise LlmError(f"{source}: key {error.args[0]!r} is missing") from None
        except (TypeError, ValueError) as error:
            raise LlmError(f"{source}: {error}") from None
        config._check(source)
        return config

    def _check(self, source: str) -> None:
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise LlmError(f"{source}: {name} is {getattr(self, name)}; wanted a positive number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise LlmError(
                f"{source}: num_attention_heads is {self.num_attention_heads}; "
                f"wanted a multiple of num_key_value_heads = {self.num_key_value_heads}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        LlmError: the file is missing, unreadable or not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LlmError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise LlmError(f"{path}: not a JSON file") from None
    if not isinstance(values, dict):
        raise LlmError(f"{path}: wanted a JSON object")
    return values


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, a list of ids or None, as transformers writes eos_token_id, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def check_architecture(name: str | None, source: str) -> str:
    """Returns the name when the decoder computes this architecture.

    Raises:
        LlmError: it does not; the text lists what is supported.
    """
    if name not in ARCHITECTURES:
        raise LlmError(f"{source}: unknown architecture {name!r}; supported: {', '.join(ARCHITECTURES)}")
    return name


def _refuse_variants(values: Mapping[str, Any], source: str) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise LlmError(f"{source}: hidden_act is {activation!r}; supported: 'silu'")
    if values.get("mlp_bias"):
        raise LlmError(f"{source}: mlp_bias is true; supported: false")
    if values.get("use_sliding_window"):
        raise LlmError(f"{source}: use_sliding_window is true; supported: false")


def _read_group_size(values: Mapping[str, Any], source: str) -> int | None:
    quantization = values.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method != QUANT_METHOD:
        raise LlmError(f"{source}: quantization method is {method!r}; supported: {QUANT_METHOD!r} or none")
    group_size = quantization.get("group_size")
    if group_size not in GROUP_SIZES:
        raise LlmError(f"{source}: group_size is {group_size!r}; supported: {', '.join(map(str, GROUP_SIZES))}")
    return group_size
