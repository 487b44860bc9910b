"""DecoderModel: the one decoder of this library, for Llama, Qwen2 and Qwen3 checkpoints, dense or INT4.

Linears are DenseLinear or Int4Linear; attention, rotary embedding, norms of q and k and the KV cache live behind an
AttentionBackend per layer; the other norms, activation and residuals are torch. Everything is packed: one batch is
[T, hidden], no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from polyop.attention import AttentionBackend, AttentionMetadata

from .config import ModelConfig
from .linear import DenseLinear, Int4Linear, RowRanges
from .norm import RmsNorm


@dataclass(kw_only=True, slots=True)
class DecoderLayer:
    """Weights of one layer. q, k and v stand in one linear along N, and so do gate and up: one product for all."""

    input_norm: RmsNorm  # over hidden
    qkv: DenseLinear | Int4Linear  # hidden -> (Hq + 2 Hkv) * D
    attention: AttentionBackend  # with the norms of q and k where the model has them
    output: DenseLinear | Int4Linear  # Hq * D -> hidden
    mlp_norm: RmsNorm  # over hidden
    gate_up: DenseLinear | Int4Linear  # hidden -> 2 * intermediate
    down: DenseLinear | Int4Linear  # intermediate -> hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of the layer."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        norms = (self.input_norm, self.mlp_norm, self.attention.qk_norm)
        return sum(part.weight_bytes for part in linears) + sum(norm.nbytes for norm in norms if norm is not None)


class DecoderModel:
    """A loaded decoder. Build it with ``polyop.llm.load_model``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: RmsNorm,
        lm_head: torch.Tensor | None,
        max_seq_len: int,
    ) -> None:
        """
        Args:
            config: extents and constants.
            dtype: of activations and KV cache.
            embedding: [V, hidden], f32, f16 or bf16.
            layers: one DecoderLayer per layer.
            final_norm: over hidden.
            lm_head: [V, hidden], or None when it is the embedding table.
            max_seq_len: positions the attention backends are prepared for.
        """
        self.config = config
        self.dtype = dtype
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = embedding if lm_head is None else lm_head
        self.max_seq_len = max_seq_len
        self.backend = type(layers[0].attention)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied embedding table counts once."""
        tables = self.embedding.nbytes + (0 if self.lm_head is self.embedding else self.lm_head.nbytes)
        return tables + self.final_norm.nbytes + sum(layer.weight_bytes for layer in self.layers)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding table and an untied lm_head."""
        return self.embedding.nbytes + (0 if self.lm_head is self.embedding else self.lm_head.nbytes)

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, row_ranges: RowRanges) -> torch.Tensor:
        """Runs all layers over a packed batch and appends its keys and values to the cache.

        Args:
            token_ids: i64 [T].
            metadata: prepared for this step.
            row_ranges: rows of each sequence; they cover all T rows.

        Returns:
            Hidden states [T, hidden] before the final norm; give the rows you want to ``logits``.
        """
        x = F.embedding(token_ids, self.embedding)  # (T, hidden)
        if x.dtype is not self.dtype:
            x = x.to(self.dtype)
        for layer in self.layers:
            h = layer.input_norm(x)
            qkv = layer.qkv(h, row_ranges)  # (T, (Hq + 2 Hkv) * D)
            q, k, v = (qkv, None, None) if self.backend.support_fused_qkv() else self._split_heads(qkv)
            attended = layer.attention.forward(q, k, v, metadata)  # (T, Hq * D)
            x.add_(layer.output(attended, row_ranges))
            h = layer.mlp_norm(x)
            x.add_(layer.down(_silu_and_multiply(layer.gate_up(h, row_ranges), row_ranges), row_ranges))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of a few rows, each computed alone, so that a row's bits never depend on the others.

        Args:
            hidden: [M, hidden], rows of what ``forward`` returned.

        Returns:
            f32 [M, V].
        """
        h = self.final_norm(hidden).to(self.lm_head.dtype)
        out = torch.empty(h.shape[0], self.lm_head.shape[0], dtype=torch.float32)  # (M, V)
        for i, row in enumerate(h):
            # A clone starts at an aligned address whichever row it is.
            out[i] = _matrix_vector(self.lm_head, row.clone())
        return out

    def logits_of_block(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of many rows in one product: faster than ``logits``, and a row's last bits depend on the block.

        Args:
            hidden: [M, hidden], rows of what ``forward`` returned.

        Returns:
            f32 [M, V].
        """
        return F.linear(self.final_norm(hidden).to(self.lm_head.dtype), self.lm_head).float()

    def _split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_features = self.config.num_attention_heads * self.config.head_dim
        kv_features = self.config.num_key_value_heads * self.config.head_dim
        return qkv.split([q_features, kv_features, kv_features], dim=1)


def _silu_and_multiply(gate_up: torch.Tensor, row_ranges: RowRanges) -> torch.Tensor:
    """gate_up [T, 2 * I] -> silu(gate) * up [T, I].

    The exponential has a vector and a scalar form in torch that round differently; which elements get which depends on
    how many there are. So silu, too, runs for each sequence on its own. The product rounds the same in every form.
    """
    gate, up = gate_up.chunk(2, dim=1)
    if len(row_ranges) == 1:
        return F.silu(gate).mul_(up)
    return torch.cat([F.silu(gate[start:stop]) for start, stop in row_ranges]).mul_(up)


def _matrix_vector(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight [V, K] times x [K]. torch's own matrix-vector path is the fast one except for bf16 (1.6 times slower)."""
    if weight.dtype is torch.bfloat16:
        return F.linear(x.unsqueeze(0), weight)[0]
    return torch.mv(weight, x)
