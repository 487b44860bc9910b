"""RmsNorm of rows, in torch."""

from __future__ import annotations

import math

import torch


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * w over the last axis, in f32, rounded once to x's dtype.

    Written as x / sqrt(|x|^2 + K eps) * (sqrt(K) w), six small operators: torch.rms_norm runs more of them inside and
    takes 1.5 times as long between two INT4 products, whose weights drive its code out of the cache. Every step after
    the norm is rounded correctly in vector and scalar code alike, so a row has the same bits in any batch.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """
        Args:
            weight: [K], any float dtype.
            eps: added to the mean square.
        """
        num_features = weight.shape[0]
        self._scaled_weight = weight.float() * math.sqrt(num_features)
        self._least_square = torch.tensor([num_features * eps])  # a tensor: adding a Python number takes longer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., K] of x's dtype, a new tensor."""
        wide = x if x.dtype is torch.float32 else x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, True)  # (..., 1)
        root = norm.mul_(norm).add_(self._least_square).sqrt_()
        y = torch.div(wide, root).mul_(self._scaled_weight)
        return y if wide is x else y.to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._scaled_weight.nbytes
