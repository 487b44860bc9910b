"""load_model: a checkpoint on disk becomes a DecoderModel, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from polyop.attention import (
    AttentionBackend,
    PositionalEmbeddingParams,
    PositionEmbeddingType,
    QkNormParams,
    RopeParams,
    get_attention_backend,
    inverse_frequencies,
)

from .config import ModelConfig
from .errors import LlmError
from .linear import DenseLinear, Int4Linear
from .model import DecoderLayer, DecoderModel
from .norm import RmsNorm
from .weight_sources import WeightSource, open_source

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

_ALIGNMENT_BYTES = 64


# Sub-projections that stand in one linear, joined along N. The quantized folder stores them joined.
JOINED_LINEARS: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of each joined linear of a layer, in the order of JOINED_LINEARS."""
    attended = config.num_attention_heads * config.head_dim
    return {
        "self_attn.qkv_proj": (config.num_qkv_features, config.hidden_size),
        "self_attn.o_proj": (config.hidden_size, attended),
        "mlp.gate_up_proj": (2 * config.intermediate_size, config.hidden_size),
        "mlp.down_proj": (config.hidden_size, config.intermediate_size),
    }


def has_bias(config: ModelConfig, linear: str) -> bool:
    """Whether a joined linear carries a bias."""
    return {"self_attn.qkv_proj": config.has_qkv_bias, "self_attn.o_proj": config.has_output_bias}.get(linear, False)


def read_tensor(source: WeightSource, name: str, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """Reads one tensor and checks its shape.

    Args:
        source: an open checkpoint.
        name: Hugging Face name.
        shape: wanted shape.
        dtype: wanted dtype, or None for the stored one.

    Raises:
        LlmError: the tensor is missing or has another shape.
    """
    tensor = source.read(name)
    if tuple(tensor.shape) != tuple(shape):
        raise LlmError(f"{source.path}: tensor {name!r} has shape {list(tensor.shape)}; wanted {list(shape)}")
    return tensor if dtype is None else tensor.to(dtype)


def read_joined(source: WeightSource, prefix: str, linear: str, kind: str, dtype: torch.dtype | None) -> torch.Tensor:
    """Reads the parts of a joined linear ("weight" or "bias") and joins them along N.

    Args:
        prefix: "model.layers.3".
        linear: a key of JOINED_LINEARS.

    Returns:
        [N, K] or [N].

    Raises:
        LlmError: a part is missing, or the shapes do not add up.
    """
    parts = [source.read(f"{prefix}.{part}.{kind}") for part in JOINED_LINEARS[linear]]
    num_outputs, num_inputs = linear_shapes(source.config)[linear]
    wanted_tail = (num_inputs,) if kind == "weight" else ()
    if sum(part.shape[0] for part in parts) != num_outputs or any(part.shape[1:] != wanted_tail for part in parts):
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise LlmError(
            f"{source.path}: {kind} of {prefix}.{linear} has shapes {shapes}; "
            f"wanted {[num_outputs, *wanted_tail]} in all"
        )
    if dtype is not None:
        parts = [part.to(dtype) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# --------------------------------------------------------------------------------------------------------------------


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    attn_backend: str = "fused",
    max_seq_len: int | None = None,
    dequantize: bool = False,
) -> DecoderModel:
    """Loads a Llama, Qwen2 or Qwen3 model.

    Args:
        path: GGUF file, Hugging Face folder (also sharded), or a folder written by ``polyop quantize``.
        dtype: of activations, KV cache and dense weights: f32, f16 or bf16. INT4 weights and the 16-bit embedding
            table of a quantized folder stay as they are stored.
        attn_backend: name of a polyop.attention backend.
        max_seq_len: longest sequence to serve; None takes the model's context length.
        dequantize: write INT4 weights out as dense ones (to check the packed path against torch).

    Raises:
        LlmError: the file or folder cannot be used; one line says why.
    """
    source = open_source(path)
    config = source.config
    max_seq_len = check_max_seq_len(config, max_seq_len)
    try:
        backend_class = get_attention_backend(attn_backend)
        rope = RopeParams.from_config(config, max_positions=max_seq_len)
        inverse_frequencies(rope)  # refuses a scaling type without a formula, before any tensor is read
    except (ValueError, NotImplementedError) as error:
        raise LlmError(f"{source.path}: {error}") from None
    positions = PositionalEmbeddingParams(type=PositionEmbeddingType.ROPE, rope=rope)
    is_quantized = config.group_size is not None
    table_dtype = None if is_quantized else dtype
    table_shape = (config.vocab_size, config.hidden_size)

    def make_attention(layer_idx: int) -> AttentionBackend:
        try:
            return backend_class(
                layer_idx=layer_idx,
                num_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                num_kv_heads=config.num_key_value_heads,
                pos_embd_params=positions,
                qk_norm=_read_qk_norm(source, layer_idx) if config.has_qk_norm else None,
            )
        except (ValueError, NotImplementedError) as error:
            raise LlmError(f"{source.path}: {error}") from None

    has_own_head = not config.tie_word_embeddings and source.has("lm_head.weight")
    return DecoderModel(
        config,
        dtype=dtype,
        embedding=_aligned(read_tensor(source, "model.embed_tokens.weight", table_shape, table_dtype)),
        layers=[_load_layer(source, i, dtype, make_attention(i), dequantize) for i in range(config.num_hidden_layers)],
        final_norm=_load_norm(source, "model.norm", config.hidden_size),
        lm_head=_aligned(read_tensor(source, "lm_head.weight", table_shape, table_dtype)) if has_own_head else None,
        max_seq_len=max_seq_len,
    )


def check_max_seq_len(config: ModelConfig, max_seq_len: int | None) -> int:
    """The longest sequence to serve, by default the model's context.

    Raises:
        LlmError: not between 1 and the model's context.
    """
    if max_seq_len is None:
        return config.max_position_embeddings
    if not 1 <= max_seq_len <= config.max_position_embeddings:
        raise LlmError(
            f"max_seq_len is {max_seq_len}; wanted 1 to {config.max_position_embeddings}, the context of the model"
        )
    return max_seq_len


def _load_layer(
    source: WeightSource, index: int, dtype: torch.dtype, attention: AttentionBackend, dequantize: bool
) -> DecoderLayer:
    config, prefix = source.config, f"model.layers.{index}"
    linears = {}
    for linear, shape in linear_shapes(config).items():
        if config.group_size is None:
            bias = read_joined(source, prefix, linear, "bias", dtype) if has_bias(config, linear) else None
            linears[linear] = DenseLinear(read_joined(source, prefix, linear, "weight", dtype), bias)
        else:
            packed = _load_int4(source, f"{prefix}.{linear}", shape, dtype, has_bias(config, linear))
            linears[linear] = packed.to_dense(shape[1], dtype) if dequantize else packed

    return DecoderLayer(
        input_norm=_load_norm(source, f"{prefix}.input_layernorm", config.hidden_size),
        qkv=linears["self_attn.qkv_proj"],
        attention=attention,
        output=linears["self_attn.o_proj"],
        mlp_norm=_load_norm(source, f"{prefix}.post_attention_layernorm", config.hidden_size),
        gate_up=linears["mlp.gate_up_proj"],
        down=linears["mlp.down_proj"],
    )


def _load_norm(source: WeightSource, name: str, num_features: int) -> RmsNorm:
    return RmsNorm(read_tensor(source, f"{name}.weight", (num_features,), torch.float32), source.config.rms_norm_eps)


def _read_qk_norm(source: WeightSource, layer_idx: int) -> QkNormParams:
    def weight(name: str) -> torch.Tensor:
        full_name = f"model.layers.{layer_idx}.self_attn.{name}.weight"
        return read_tensor(source, full_name, (source.config.head_dim,), torch.float32)

    return QkNormParams(q_weight=weight("q_norm"), k_weight=weight("k_norm"), epsilon=source.config.rms_norm_eps)


def _load_int4(source: WeightSource, name: str, shape: tuple[int, int], dtype: torch.dtype, biased: bool) -> Int4Linear:
    num_outputs, num_inputs = shape
    group_size = source.config.group_size
    packed_shape = packed_int4_shape(num_outputs, num_inputs)
    scales_shape = (-(-num_inputs // group_size), num_outputs)
    return Int4Linear(
        _aligned(read_tensor(source, f"{name}.qweight", packed_shape, None)),
        _aligned(read_tensor(source, f"{name}.scales", scales_shape, torch.float16)),
        group_size,
        read_tensor(source, f"{name}.bias", (num_outputs,), dtype) if biased else None,
    )


def packed_int4_shape(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """Shape of the i8 tensor that pack_int4_fragments makes of q [N, K]: fragments of 128 x 64, 8 rows of 512 bytes."""
    return (-(-num_outputs // 128) * -(-num_inputs // 64) * 8, 512)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at an address that vector loads like; a mapped file may put it anywhere."""
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()
