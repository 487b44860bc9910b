"""Round-to-nearest symmetric INT4 with a per-group clip search, and the folder that ``polyop quantize`` writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from polyop.ops import pack_int4_fragments

from .config import GROUP_SIZES, QUANT_METHOD, ModelConfig
from .errors import LlmError
from .loading import (
    JOINED_LINEARS,
    has_bias,
    linear_shapes,
    packed_int4_shape,
    read_joined,
    read_tensor,
)
from .safetensors_writer import SafetensorsWriter
from .tokenizer import load_tokenizer
from .weight_sources import WeightSource, open_source

# ---- one weight ----------------------------------------------------------------------------------------------------

_MIN_Q, _MAX_Q, _BIAS = -8, 7, 8
# Scales tried for a group, as a share of the one that reaches its largest magnitude. Below 0.6 clipping that magnitude
# costs more than the finer steps win. Halving the step of 0.025 lowers the squared error of normal weights by 0.5%.
CLIP_RATIOS = tuple(1.0 - 0.025 * i for i in range(17))
_BLOCK_ELEMS = 1 << 17  # a block and its rounded copy, 512 KiB each in f32, stay in the second-level cache


def quantize_groups(
    weight: torch.Tensor, group_size: int, clip_ratios: tuple[float, ...] = CLIP_RATIOS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each group of ``group_size`` inputs with the scale of least squared error among the clip ratios.

    Args:
        weight: [N, K], any float dtype; the last group may be short.
        group_size: Kg.
        clip_ratios: candidates; (1.0,) is plain max-abs rounding.

    Returns:
        q [N, K] u8 in 0..15 (biased by 8), scales [ceil(K/Kg), N] f16; weight is close to (q - 8) * scale.
    """
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // group_size)
    q = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    scales = torch.empty(num_outputs, num_groups, dtype=torch.float16)
    rows_at_once = max(1, _BLOCK_ELEMS // num_inputs)
    for start in range(0, num_outputs, rows_at_once):
        rows = slice(start, min(start + rows_at_once, num_outputs))
        padded = torch.zeros(rows.stop - rows.start, num_groups * group_size)
        padded[:, :num_inputs] = weight[rows]
        block = padded.view(-1, num_groups, group_size)
        scales[rows] = _best_scales(block, clip_ratios)
        q[rows] = (_round(block, scales[rows].float()) + _BIAS).flatten(1)[:, :num_inputs].to(torch.uint8)
    return q, scales.T.contiguous()


def _round(block: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """block [rows, groups, Kg], scales [rows, groups] -> integers -8..7 as f32. A group of zeros has scale 0."""
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    return torch.mul(block, inverse.unsqueeze(-1), out=out).round_().clamp_(_MIN_Q, _MAX_Q)


def _best_scales(block: torch.Tensor, clip_ratios: tuple[float, ...]) -> torch.Tensor:
    """Scales [rows, groups] f16 of least squared error. Errors are taken with the scale as f16 stores it."""
    full = block.abs().amax(dim=-1) / _MAX_Q
    rounded = torch.empty_like(block)
    best_scales = best_errors = None
    for ratio in clip_ratios:
        scales = (full * ratio).to(torch.float16)
        wide = scales.float()
        differences = _round(block, wide, out=rounded).mul_(wide.unsqueeze(-1)).sub_(block)
        errors = torch.linalg.vector_norm(differences, dim=-1)
        if best_errors is None:
            best_scales, best_errors = scales, errors
        else:
            is_better = errors < best_errors
            best_scales = torch.where(is_better, scales, best_scales)
            best_errors = torch.where(is_better, errors, best_errors)
    return best_scales


# ---- a folder ------------------------------------------------------------------------------------------------------

ProgressCallback = Callable[[int, int], None]


def quantize_model(
    path: str | Path, output: str | Path, group_size: int, on_progress: ProgressCallback | None = None
) -> Path:
    """Quantizes the linears of a model to INT4 and writes safetensors, config.json and the tokenizer's files.

    Embedding table and lm_head are stored in f16 (its 11 bits lose less than bf16's 8, and their values are far from
    f16's limits), norms and biases in f32. The folder appears only when it is complete.

    Args:
        path: GGUF file or Hugging Face folder.
        output: folder to make; it must not exist, or be empty.
        group_size: 32, 64 or 128.
        on_progress: called with (weights done, weights in all).

    Returns:
        The output folder.

    Raises:
        LlmError: the model cannot be read or is quantized already, the output exists, or the disk is full; nothing
            is left behind.
    """
    output = Path(output)
    if group_size not in GROUP_SIZES:
        raise LlmError(f"group size is {group_size}; supported: {', '.join(map(str, GROUP_SIZES))}")
    source = open_source(path)
    if source.config.group_size is not None:
        raise LlmError(f"{path}: is quantized already, with group size {source.config.group_size}")
    with _folder_that_appears_when_complete(output) as folder:
        _write_weights(source, folder / "model.safetensors", group_size, on_progress)
        load_tokenizer(path).save(folder)
        config_text = json.dumps(_config_values(source.config, group_size), indent=2)
        (folder / "config.json").write_text(config_text + "\n", encoding="utf-8")
    return output


def _write_weights(source: WeightSource, file: Path, group_size: int, on_progress: ProgressCallback | None) -> None:
    config = source.config
    table_shape, hidden_shape = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    layers = [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
    tables = ["model.embed_tokens.weight"]
    if not config.tie_word_embeddings and source.has("lm_head.weight"):
        tables.append("lm_head.weight")
    norms = {"input_layernorm": hidden_shape, "post_attention_layernorm": hidden_shape}
    if config.has_qk_norm:
        norms |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    linears = linear_shapes(config)

    # Sizes first, values one weight at a time: no more than one weight is in memory.
    plan: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for layer in layers:
        for linear, (num_outputs, num_inputs) in linears.items():
            plan[f"{layer}.{linear}.qweight"] = (torch.int8, packed_int4_shape(num_outputs, num_inputs))
            plan[f"{layer}.{linear}.scales"] = (torch.float16, (-(-num_inputs // group_size), num_outputs))
            if has_bias(config, linear):
                plan[f"{layer}.{linear}.bias"] = (torch.float32, (num_outputs,))
        plan |= {f"{layer}.{norm}.weight": (torch.float32, shape) for norm, shape in norms.items()}
    plan |= dict.fromkeys(tables, (torch.float16, table_shape))
    plan["model.norm.weight"] = (torch.float32, hidden_shape)

    num_weights = len(layers) * sum(n * k for n, k in linears.values())
    num_done = 0
    with SafetensorsWriter(file, plan) as writer:
        for layer in layers:
            for linear, (num_outputs, num_inputs) in linears.items():
                weight = read_joined(source, layer, linear, "weight", torch.float32)
                q, scales = quantize_groups(weight, group_size)
                writer.write(f"{layer}.{linear}.qweight", pack_int4_fragments(q))
                writer.write(f"{layer}.{linear}.scales", scales)
                if has_bias(config, linear):
                    bias = read_joined(source, layer, linear, "bias", torch.float32)
                    writer.write(f"{layer}.{linear}.bias", bias)
                num_done += num_outputs * num_inputs
                if on_progress is not None:
                    on_progress(num_done, num_weights)
            for norm, shape in norms.items():
                name = f"{layer}.{norm}.weight"
                writer.write(name, read_tensor(source, name, shape, torch.float32))
        for table in tables:
            writer.write(table, read_tensor(source, table, table_shape, torch.float16))
        writer.write("model.norm.weight", read_tensor(source, "model.norm.weight", hidden_shape, torch.float32))


def _config_values(config: ModelConfig, group_size: int) -> dict[str, object]:
    """config.json in the form transformers writes, with the quantization named."""
    same_names = (
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "vocab_size max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings"
    )
    architectures = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [architectures[config.model_type]],
        **{name: getattr(config, name) for name in same_names.split()},
        "attention_bias": config.has_qkv_bias,
        "eos_token_id": list(config.eos_token_ids),
        "hidden_act": "silu",
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "bits": 4,
            "group_size": group_size,
            "layout": "fragments_128x64",
            "joined": {linear: list(parts) for linear, parts in JOINED_LINEARS.items()},
        },
    }


@contextmanager
def _folder_that_appears_when_complete(output: Path) -> Iterator[Path]:
    """Yields a folder beside ``output`` that takes its name at the end, or vanishes when anything goes wrong."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise LlmError(f"{output}: exists already; wanted a folder that is new or empty")
    partial = output.parent / f".{output.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, output)
    except OSError as error:
        raise LlmError(f"{output}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
