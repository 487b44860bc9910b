"""Linear layers of the decoder: dense torch weights, or packed INT4 weights through polyop.ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from polyop.ops import int4_groupwise_gemm, unpack_int4_fragments

RowRanges = Sequence[tuple[int, int]]  # [start, stop) rows of each sequence in a packed batch

_CACHE_LINE_BYTES = 64


class DenseLinear:
    """y = x W^T + b, evaluated for each sequence on its own.

    A matrix product of torch picks its blocking, and with it the order of its sums, from the number of rows: the same
    row gives other bits in another batch. One product per sequence sees the same rows whoever else is in the batch.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """
        Args:
            weight: [N, K] f32, f16 or bf16.
            bias: [N] of the same dtype, or None.
        """
        self.weight = weight
        self.bias = bias
        # The BLAS behind torch may also choose its path by the address of its operands.
        self._rows_are_aligned = weight.shape[1] * weight.element_size() % _CACHE_LINE_BYTES == 0

    def __call__(self, x: torch.Tensor, row_ranges: RowRanges) -> torch.Tensor:
        """x [T, K] -> [T, N]; row_ranges cover all T rows."""
        if len(row_ranges) == 1:
            return F.linear(x, self.weight, self.bias)
        rows = [x[start:stop] for start, stop in row_ranges]
        if not self._rows_are_aligned:
            rows = [part.clone() for part in rows]
        return torch.cat([F.linear(part, self.weight, self.bias) for part in rows])

    @property
    def weight_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Int4Linear:
    """y = x W^T + b with W in packed INT4 groups; the operator's result for a row does not depend on other rows."""

    def __init__(
        self,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        group_size: int,
        bias: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            qweight: i8 [ceil(N/128) * ceil(K/64) * 8, 512], as polyop.ops.pack_int4_fragments makes it.
            scales: f16 [ceil(K/group_size), N].
            group_size: 32, 64 or 128.
            bias: [N] of the activations' dtype, or None.
        """
        self.qweight = qweight
        self.scales = scales
        self.group_size = group_size
        self.bias = bias

    def __call__(self, x: torch.Tensor, row_ranges: RowRanges) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        # Memory from here: finding the output's shape from the schema costs a decode step three times as much.
        y = torch.empty(x.shape[0], self.scales.shape[1], dtype=x.dtype)
        int4_groupwise_gemm(x, self.qweight, self.scales, group_size=self.group_size, out=y)
        return y if self.bias is None else y.add_(self.bias)

    def to_dense(self, num_inputs: int, dtype: torch.dtype) -> DenseLinear:
        """The same layer with weights (q - 8) * scale written out.

        Args:
            num_inputs: K.
            dtype: of the dense weight.
        """
        q = unpack_int4_fragments(self.qweight, self.scales.shape[1], num_inputs)  # (N, K)
        scale_of_column = self.scales.float().repeat_interleave(self.group_size, dim=0)[:num_inputs]  # (K, N)
        weight = (q.float() - 8.0) * scale_of_column.T
        return DenseLinear(weight.to(dtype), self.bias)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights, scales and bias."""
        return self.qweight.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)
