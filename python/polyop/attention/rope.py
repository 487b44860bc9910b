"""Parameters of positional embedding and the cos/sin table that every backend shares.

Source: the PyTorch-backend attention chapter of TensorRT-LLM (argument ``pos_embd_params``); the frequency formulas are
those of ``transformers.modeling_rope_utils``, evaluated in the same order and precision.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

# --------------------------------------------------------------------------------------------------------------------


class RotaryScalingType(enum.Enum):
    """How rotary frequencies are changed for contexts longer than the trained one. Names as in TensorRT-LLM."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DYNAMIC = "dynamic"
    LONGROPE = "longrope"
    MROPE = "mrope"

    @classmethod
    def from_string(cls, text: str) -> RotaryScalingType:
        """Reads the name a model config uses ("default" is NONE, "su" is LONGROPE).

        Raises:
            ValueError: the name is unknown; the text lists the known ones.
        """
        aliases = {"default": cls.NONE, "su": cls.LONGROPE}
        if text in aliases:
            return aliases[text]
        try:
            return cls(text)
        except ValueError:
            known = ", ".join(sorted([m.value for m in cls] + list(aliases)))
            raise ValueError(f"rope scaling type is {text!r}; known types: {known}") from None


@dataclass(frozen=True, kw_only=True)
class RopeParams:
    """Everything that decides the cos/sin table. Hashable, so that layers with equal parameters share one table.

    Attributes:
        dim: rotary width R, even; the first R entries of each head are rotated.
        theta: base wavelength.
        scale_type: which scaling formula; DYNAMIC, LONGROPE and MROPE are refused when the table is made.
        scale: the config's ``factor``.
        low_freq_factor, high_freq_factor: llama3 only.
        max_positions: rows of the table; positions must stay below it. Give the longest sequence you will serve.
        original_max_positions: trained context length; llama3 and yarn.
        beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, truncate: yarn only.
    """

    dim: int
    theta: float = 10000.0
    scale_type: RotaryScalingType = RotaryScalingType.NONE
    scale: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    max_positions: int = 1024
    original_max_positions: int = 1024
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"RopeParams: dim is {self.dim}; wanted a positive even number")
        if self.max_positions <= 0:
            raise ValueError(f"RopeParams: max_positions is {self.max_positions}; wanted a positive number")

    @staticmethod
    def from_config(config: Any, *, max_positions: int | None = None) -> RopeParams:
        """Reads a transformers config, with ``rope_parameters`` (5.x) or ``rope_theta`` and ``rope_scaling`` (4.x).

        Args:
            config: a config object with hidden_size, num_attention_heads, max_position_embeddings, optional head_dim.
            max_positions: rows of the table; None takes max_position_embeddings.

        Raises:
            ValueError: unknown scaling type.
        """
        rope: dict[str, Any] = dict(getattr(config, "rope_scaling", None) or {})
        rope.update(getattr(config, "rope_parameters", None) or {})
        theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
        trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        scale_type = RotaryScalingType.from_string(rope.get("rope_type") or rope.get("type") or "default")
        return RopeParams(
            dim=int(head_dim * partial),
            theta=float(theta),
            scale_type=scale_type,
            scale=float(rope.get("factor") or config.max_position_embeddings / trained),
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            max_positions=int(max_positions or config.max_position_embeddings),
            original_max_positions=int(trained),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            mscale=float(rope.get("mscale") or 0.0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
            attention_factor=rope.get("attention_factor"),
            truncate=bool(rope.get("truncate", True)),
        )


class PositionEmbeddingType(enum.Enum):
    """Kinds of positional embedding a model may ask a backend to apply."""

    LEARNED_ABSOLUTE = "learned_absolute"
    ROPE = "rope"
    ALIBI = "alibi"
    RELATIVE = "relative"


@dataclass(frozen=True, kw_only=True)
class PositionalEmbeddingParams:
    """How the backend applies positional embedding (``pos_embd_params``); construction checks the combination.

    Attributes:
        type: the kind; backends here apply ROPE and refuse the others by name.
        rope: rotary parameters; required for ROPE, forbidden otherwise.
        is_neox: True rotates halves (x[i], x[i + R/2]); False rotates neighbours (x[2i], x[2i + 1]).
    """

    type: PositionEmbeddingType = PositionEmbeddingType.ROPE
    rope: RopeParams | None = None
    is_neox: bool = True

    def __post_init__(self) -> None:
        is_rope = self.type is PositionEmbeddingType.ROPE
        if is_rope and self.rope is None:
            raise ValueError("PositionalEmbeddingParams: type is ROPE; rope is None, wanted RopeParams")
        if not is_rope and self.rope is not None:
            raise ValueError(f"PositionalEmbeddingParams: type is {self.type.name}; rope must be None")


# --------------------------------------------------------------------------------------------------------------------


def _yarn(params: RopeParams) -> tuple[torch.Tensor, float]:
    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    def correction_dim(num_rotations: float) -> float:
        ratio = params.original_max_positions / (num_rotations * 2 * math.pi)
        return (params.dim * math.log(ratio)) / (2 * math.log(params.theta))

    attention_factor = params.attention_factor
    if attention_factor is None:
        if params.mscale and params.mscale_all_dim:
            attention_factor = mscale(params.scale, params.mscale) / mscale(params.scale, params.mscale_all_dim)
        else:
            attention_factor = mscale(params.scale)
    low, high = correction_dim(params.beta_fast), correction_dim(params.beta_slow)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, params.dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite where both corrections meet

    wavelengths = params.theta ** (torch.arange(0, params.dim, 2).to(torch.float32) / params.dim)
    ramp = torch.clamp((torch.arange(params.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    extrapolated_share = 1 - ramp
    interpolated = 1.0 / (params.scale * wavelengths)
    inv_freq = interpolated * (1 - extrapolated_share) + (1.0 / wavelengths) * extrapolated_share
    return inv_freq, float(attention_factor)


def _llama3(params: RopeParams, inv_freq: torch.Tensor) -> torch.Tensor:
    trained = params.original_max_positions
    low_wavelen, high_wavelen = trained / params.low_freq_factor, trained / params.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / params.scale, inv_freq)
    smooth = (trained / wavelen - params.low_freq_factor) / (params.high_freq_factor - params.low_freq_factor)
    smoothed = (1 - smooth) * scaled / params.scale + smooth * scaled
    is_medium = ~(wavelen < high_wavelen) * ~(wavelen > low_wavelen)
    return torch.where(is_medium, smoothed, scaled)


def inverse_frequencies(params: RopeParams) -> tuple[torch.Tensor, float]:
    """Rotary frequencies and the factor that cosines and sines are multiplied by.

    Returns:
        inv_freq [R/2] f32, attention factor (1.0 except for yarn).

    Raises:
        NotImplementedError: scaling types DYNAMIC, LONGROPE, MROPE.
    """
    if params.scale_type is RotaryScalingType.YARN:
        return _yarn(params)
    inv_freq = 1.0 / (params.theta ** (torch.arange(0, params.dim, 2).to(torch.float32) / params.dim))
    if params.scale_type is RotaryScalingType.NONE:
        return inv_freq, 1.0
    if params.scale_type is RotaryScalingType.LINEAR:
        return inv_freq / params.scale, 1.0
    if params.scale_type is RotaryScalingType.LLAMA3:
        return _llama3(params, inv_freq), 1.0
    raise NotImplementedError(
        f"RopeParams: scale_type {params.scale_type.name} is not supported; supported: NONE, LINEAR, LLAMA3, YARN"
    )


def rope_cos_sin_table(params: RopeParams, device: torch.device | str = "cpu") -> torch.Tensor:
    """The table rotary_embedding reads, made once per (params, device) and shared by all layers.

    Returns:
        cos_sin [max_positions, R] f32: R/2 cosines, then R/2 sines.

    Raises:
        NotImplementedError: scaling types DYNAMIC, LONGROPE, MROPE.
    """
    return _shared_table(params, torch.device(device))


@functools.cache
def _shared_table(params: RopeParams, device: torch.device) -> torch.Tensor:
    inv_freq, attention_factor = inverse_frequencies(params)
    angles = torch.outer(torch.arange(params.max_positions, dtype=torch.float32), inv_freq)  # (max_positions, R/2)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    if attention_factor != 1.0:
        table *= attention_factor
    return table.to(device)
