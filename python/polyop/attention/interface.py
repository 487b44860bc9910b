"""AttentionBackend: the interface of one attention layer, its masks and quantization parameters.

Source: the PyTorch-backend attention chapter of TensorRT-LLM. Three stages: a model constructs one AttentionBackend per
layer; before each step the runtime prepares an AttentionMetadata (metadata.py); each layer calls ``forward``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

import torch

from polyop.kv_cache import KVCacheManager

from .metadata import AttentionMetadata
from .qk_norm import QkNormParams
from .rope import PositionalEmbeddingParams, PositionEmbeddingType

# ---- parameter types -----------------------------------------------------------------------------------------------


class PredefinedAttentionMask(str, enum.Enum):
    """Masks that need no tensor. CAUSAL is lower-right aligned: the last query row sees every cached position."""

    CAUSAL = "causal"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, eq=False)
class CustomAttentionMask:
    """A mask given as a tensor, bool [T, L] (True = visible). Backends that do not take it refuse it by name."""

    mask: torch.Tensor


AttentionMask = PredefinedAttentionMask | CustomAttentionMask


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Quantization a backend is asked for; None in a field means 16 or 32 bit as given.

    Attributes:
        quant_algo: algorithm of weights and activations, for example "FP8", "W4A16".
        kv_cache_quant_algo: dtype of the KV cache, for example "FP8", "INT8".
    """

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None


# ---- backend -------------------------------------------------------------------------------------------------------


class AttentionBackend:
    """One attention layer. Subclasses implement ``forward`` and name their metadata class in ``Metadata``."""

    Metadata: ClassVar[type[AttentionMetadata]] = AttentionMetadata
    name: ClassVar[str] = "base"

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        quant_config: QuantConfig | None = None,
        pos_embd_params: PositionalEmbeddingParams | None = None,
        *,
        q_scaling: float = 1.0,
        qk_norm: QkNormParams | None = None,
    ) -> None:
        """
        Args:
            layer_idx: index of the layer in the model and in the KV cache manager.
            num_heads: query heads Hq.
            head_dim: head size D.
            num_kv_heads: K/V heads Hkv; None means num_heads. Hq must be a multiple.
            quant_config: None or a QuantConfig whose fields are None: backends here do not quantize.
            pos_embd_params: None when q and k are embedded already; otherwise the backend rotates them.
            q_scaling: scores are multiplied by 1 / (sqrt(D) * q_scaling).
            qk_norm: None when q and k come normed or need no norm; otherwise the backend norms their heads before
                rotation, where support_fused_qk_norm() is True. Needs pos_embd_params.

        Raises:
            ValueError: head counts, rotary width or norm weights that do not fit, a norm without pos_embd_params.
            NotImplementedError: quantization, positional embedding other than ROPE, or a norm this backend lacks.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads <= 0 or kv_heads <= 0 or head_dim <= 0 or num_heads % kv_heads:
            raise ValueError(
                f"{self.name}: num_heads is {num_heads}, num_kv_heads is {kv_heads}, head_dim is {head_dim}; "
                "wanted positive numbers and num_heads a multiple of num_kv_heads"
            )
        self.layer_idx, self.num_heads, self.head_dim, self.num_kv_heads = layer_idx, num_heads, head_dim, kv_heads
        self.scale = 1.0 / (head_dim**0.5 * q_scaling)
        self.q_size, self.kv_size = num_heads * head_dim, kv_heads * head_dim
        self.update_quant_config(quant_config)
        if pos_embd_params is not None:
            if pos_embd_params.type is not PositionEmbeddingType.ROPE:
                raise NotImplementedError(f"{self.name}: positional embedding {pos_embd_params.type.name}; takes ROPE")
            if pos_embd_params.rope.dim > head_dim:
                raise ValueError(f"{self.name}: rope dim is {pos_embd_params.rope.dim}; head_dim is {head_dim}")
        self.pos_embd_params = pos_embd_params
        if qk_norm is not None:
            if not self.support_fused_qk_norm():
                raise NotImplementedError(f"{self.name}: qk_norm is given; this backend takes q and k already normed")
            if pos_embd_params is None:
                raise ValueError(f"{self.name}: qk_norm is given without pos_embd_params")
            qk_norm.check(head_dim, self.name)
        self.qk_norm = qk_norm
        self.prepare_layer()

    def prepare_layer(self) -> None:
        """Hook at the end of construction: a backend makes what its forward needs. Default: nothing.

        Raises:
            NotImplementedError: a parameter that this backend has nothing for.
        """

    def update_quant_config(self, quant_config: QuantConfig | None) -> None:
        """Replaces the quantization parameters.

        Raises:
            NotImplementedError: a field asks for quantization; the text names it.
        """
        for key in ("quant_algo", "kv_cache_quant_algo"):
            if quant_config is not None and getattr(quant_config, key) is not None:
                raise NotImplementedError(
                    f"{self.name}: quant_config.{key} is {getattr(quant_config, key)!r}; takes None"
                )
        self.quant_config = quant_config

    @classmethod
    def support_fused_rope(cls) -> bool:
        """True when the backend applies rotary embedding itself (pos_embd_params)."""
        return False

    @classmethod
    def support_fused_qkv(cls) -> bool:
        """True when forward accepts one tensor [T, (Hq + 2 Hkv) * D] as q, with k and v None."""
        return False

    @classmethod
    def support_fused_qk_norm(cls) -> bool:
        """True when the backend norms the heads of q and k itself (qk_norm)."""
        return False

    @classmethod
    def support_mla(cls) -> bool:
        """True when the backend computes multi-head latent attention."""
        return False

    @classmethod
    def support_nvfp4_output(cls) -> bool:
        """True when the backend writes NVFP4 outputs."""
        return False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
        *,
        attention_mask: AttentionMask | None = PredefinedAttentionMask.CAUSAL,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norms heads and applies rotary embedding if asked, appends k and v to the cache, attends.

        Everything is checked before anything is written. The backend may overwrite q and k (rotation in place).

        Args:
            q: [T, Hq * D], or fused [T, (Hq + 2 Hkv) * D] with k = v = None where support_fused_qkv() is True.
                T must be metadata.num_tokens. Rows may be strided; the last stride is 1.
            k, v: [T, Hkv * D], q's dtype.
            metadata: prepared for this step.
            attention_mask: None or CAUSAL (lower-right aligned), or FULL.
            output: [T, Hq * D] of q's dtype to write into, or None to allocate.

        Returns:
            [T, Hq * D], q's dtype.

        Raises:
            ValueError: a shape, dtype, device or position that does not fit.
            NotImplementedError: a custom mask.
            RuntimeError: metadata not prepared.
        """
        raise NotImplementedError(f"{self.name}: forward is not implemented")

    def check_inputs(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask | None,
        output: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All checks that ``forward`` promises, for use by subclasses; writes nothing.

        Returns:
            q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]: views of the arguments.

        Raises:
            ValueError, NotImplementedError, RuntimeError: as documented for forward.
        """
        if attention_mask is not None and not isinstance(attention_mask, PredefinedAttentionMask):
            if isinstance(attention_mask, CustomAttentionMask):
                raise NotImplementedError(f"{self.name}: attention_mask is CustomAttentionMask; takes CAUSAL, FULL")
            raise ValueError(f"{self.name}: attention_mask is {attention_mask!r}; wanted CAUSAL or FULL")
        if not metadata.is_prepared:
            raise RuntimeError(f"{self.name}: metadata is not prepared for this step; call prepare() first")
        if (k is None) != (v is None):
            raise ValueError(f"{self.name}: one of k and v is None; wanted both or neither")
        num_tokens, head_dim = metadata.num_tokens, self.head_dim
        if k is None:
            if not self.support_fused_qkv():
                raise ValueError(f"{self.name}: k and v are None; this backend takes q, k and v")
            num_heads = self.num_heads + 2 * self.num_kv_heads
            self._check_operand("q (fused qkv)", q, num_tokens, num_heads * head_dim, q)
            heads = q.view(num_tokens, num_heads, head_dim)
            views = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        else:
            self._check_operand("q", q, num_tokens, self.q_size, q)
            self._check_operand("k", k, num_tokens, self.kv_size, q)
            self._check_operand("v", v, num_tokens, self.kv_size, q)
            kv_shape = (num_tokens, self.num_kv_heads, head_dim)
            views = (q.view(num_tokens, self.num_heads, head_dim), k.view(kv_shape), v.view(kv_shape))
        if output is not None:
            self._check_operand("output", output, num_tokens, self.q_size, q)
        rope = None if self.pos_embd_params is None else self.pos_embd_params.rope
        if rope is not None and metadata.max_position >= rope.max_positions:
            raise ValueError(
                f"{self.name}: the largest position is {metadata.max_position}; "
                f"RopeParams.max_positions is {rope.max_positions}"
            )
        if metadata.uses_cache:
            self._check_cache(metadata.kv_cache_manager, q)
        return views

    def _check_cache(self, manager: KVCacheManager, q: torch.Tensor) -> None:
        layer = self.layer_idx
        if not 0 <= layer < manager.num_layers or manager.num_kv_heads_per_layer[layer] is None:
            manager.get_buffers(layer)  # raises with the reason
        if manager.num_kv_heads_per_layer[layer] != self.num_kv_heads or manager.head_dim != self.head_dim:
            got = (manager.num_kv_heads_per_layer[layer], manager.head_dim)
            raise ValueError(
                f"{self.name}: layer {layer} of the cache has (Hkv, D) = {got}; "
                f"wanted {(self.num_kv_heads, self.head_dim)}"
            )
        if manager.dtype != q.dtype or manager.device != q.device:
            raise ValueError(
                f"{self.name}: q, k and v are {q.dtype} on {q.device}; the cache is {manager.dtype} on {manager.device}"
            )

    def _check_operand(self, what: str, tensor: torch.Tensor, rows: int, width: int, like: torch.Tensor) -> None:
        if tensor.shape != (rows, width):
            raise ValueError(f"{self.name}: {what} is {list(tensor.shape)}; wanted [{rows}, {width}]")
        if tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{self.name}: {what} is {tensor.dtype} on {tensor.device}; q is {like.dtype} on {like.device}"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(f"{self.name}: {what} has last stride {tensor.stride(-1)}; wanted 1")
