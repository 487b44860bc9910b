"""One call of an operator with all its tensors, and the peers that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from polyop import ops

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
    "u8": torch.uint8,
}


@dataclass
class OperatorCall:
    """``arguments`` are those of ``polyop.ops.<operator>``, with everything that it writes; ``peers`` by name."""

    operator: str
    arguments: dict[str, Any]
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)

    def run(self) -> None:
        getattr(ops, self.operator)(**self.arguments)

    def add_peer(
        self,
        name: str,
        prepare: Callable[[], Callable[[], object]],
        pairs: Callable[[Any], list[tuple[torch.Tensor, torch.Tensor]]],
        tolerance: float = 1e-2,
    ) -> None:
        """Adds what ``prepare`` returns, unless the peer refuses the case, which is printed.

        ``pairs`` gets the result of one run and returns the peer's tensors, each with ours, to be compared.
        """
        try:
            function = prepare()
            result = function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:  # a peer that refuses a case is not a failure of ours
            print(f"{name} refuses {self.operator}: {type(error).__name__} {str(error).splitlines()[:1]}", flush=True)
            return
        for theirs, ours in pairs(result):
            require_close(f"{self.operator} against {name}", ours, theirs, tolerance)
        self.peers[name] = function

    def functions(self) -> dict[str, Callable[[], object]]:
        return {"polyop": self.run, **self.peers}


def require_close(what: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Unverified kernels are not timed: raises SystemExit when the norm of the difference is too large, or NaN."""
    scale = wanted.double().norm().clamp_min(1e-30)
    difference = float((got.double() - wanted.double()).norm() / scale)
    if not difference <= tolerance:
        raise SystemExit(f"{what}: relative difference {difference:g}, allowed {tolerance:g}")


def require_equal(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises SystemExit unless all bytes are equal."""
    if not torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)):
        raise SystemExit(f"{what}: differs from what it should be exactly")


def rotary_table(positions: int, width: int, device: str) -> torch.Tensor:
    """cos_sin f32 [positions, width] of base 10000."""
    inverse = 10000.0 ** (-torch.arange(width // 2, device=device) / (width // 2))
    angles = torch.arange(positions, device=device)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], 1)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """f32 x [T, H, D] turned by cos_sin [T, D], halves paired."""
    cosine, sine = (part[:, None] for part in cos_sin.chunk(2, 1))
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


@dataclass
class PagedTokens:
    """Where new tokens go: a shuffled page table and slots. The first position is 3, off every alignment."""

    table: torch.Tensor  # i32 [B, W]
    offsets: torch.Tensor  # i32 [B + 1]
    starts: torch.Tensor  # i32 [B]
    pages: torch.Tensor  # i64 [T]
    slots: torch.Tensor  # i64 [T]
    positions: torch.Tensor  # i32 [T]
    page_size: int

    START = 3

    @staticmethod
    def make(case: dict[str, Any], device: str) -> PagedTokens:
        batch, page = case["B"], case["page"]
        each = case["T"] // batch
        columns = -(-(each + PagedTokens.START) // page)
        table = torch.randperm(batch * columns, device=device).to(torch.int32).view(batch, columns)
        at = PagedTokens.START + torch.arange(each, device=device)
        return PagedTokens(
            table,
            torch.arange(batch + 1, dtype=torch.int32, device=device) * each,
            torch.full((batch,), PagedTokens.START, dtype=torch.int32, device=device),
            table.long()[:, at // page].flatten(),
            (at % page).repeat(batch),
            at.to(torch.int32).repeat(batch),
            page,
        )

    def pool(self, case: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
        """Zeros [2, P, R, Hkv, D]: keys and values."""
        shape = (2, self.table.numel(), self.page_size, case["Hkv"], case["D"])
        return torch.zeros(shape, device=self.table.device).to(dtype)


def quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of one byte an element stores: x / scale, nearest even, saturated."""
    if dtype == torch.int8:
        return (x.float() / scale).round().clamp(-128, 127).to(dtype)
    return (x.float() / scale).clamp(-448, 448).to(dtype)
