"""QkNormParams: the RMS norm that some models (Qwen3) apply to each head of q and k before rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class QkNormParams:
    """n = x * weight / sqrt(mean(x^2) + epsilon) over the D channels of each head.

    Attributes:
        q_weight, k_weight: [D], f32, on the device of q and k.
        epsilon: added to the mean square, at least 0.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    epsilon: float = 1e-6

    def check(self, head_dim: int, who: str) -> None:
        """
        Raises:
            ValueError: weights that are not [D] f32, or a negative epsilon.
        """
        for name in ("q_weight", "k_weight"):
            weight = getattr(self, name)
            if tuple(weight.shape) != (head_dim,) or weight.dtype is not torch.float32:
                got = f"{list(weight.shape)} {weight.dtype}"
                raise ValueError(f"{who}: qk_norm.{name} is {got}; wanted [{head_dim}] torch.float32")
        if not self.epsilon >= 0:
            raise ValueError(f"{who}: qk_norm.epsilon is {self.epsilon}; wanted at least 0")

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, Hq, D] and k [T, Hkv, D] after the norm, in f32: new tensors. A row has the same bits in any batch."""
        return self._norm(q, self.q_weight), self._norm(k, self.k_weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        # Every step behind the reduction is rounded correctly, in vector code and in its scalar tail alike.
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide / (length * length / x.shape[-1] + self.epsilon).sqrt() * weight

    @property
    def nbytes(self) -> int:
        """Bytes of both weights."""
        return self.q_weight.nbytes + self.k_weight.nbytes
