"""Comparison with a computed bound and a report of the worst element.

The shape of every bound (docs/numerics.md): ``|got - exact| <= u_out |exact| + c n u_32 sum|terms|``; the operator's
README gives c and n.
"""

from __future__ import annotations

import torch

#: Unit roundoff of each dtype: half a unit in the last place of a number near 1.
UNIT_ROUNDOFF = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
}

#: Half the distance between subnormals: what rounding near zero can cost.
_SUBNORMAL_STEP = {
    torch.float32: 2.0**-150,
    torch.float16: 2.0**-25,
    torch.bfloat16: 2.0**-134,
    torch.float8_e4m3fn: 2.0**-10,
}


def output_bound(expected: torch.Tensor, dtype: torch.dtype, arithmetic: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Bound of each element: the arithmetic's own error, and the rounding of the result to `dtype`.

    Args:
        expected: reference values, any float dtype; themselves rounded to `dtype` when they come from a reference
            kernel, hence one more rounding unit.
        dtype: dtype of the output that is compared.
        arithmetic: error of the f32 arithmetic before rounding, broadcastable to `expected`.
    """
    magnitude = expected.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return arithmetic + 2 * (UNIT_ROUNDOFF[dtype] * (magnitude + arithmetic) + _SUBNORMAL_STEP[dtype])


def assert_within_bound(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float, what: str = "") -> None:
    """Raises AssertionError unless ``|got - expected| <= bound`` everywhere; NaN and infinities must match in place.

    The message names the worst element, its values, its bound and how many elements fail.
    """
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.numel() == 0:
        return
    got64, expected64 = got.double(), expected.double()
    bound64 = torch.as_tensor(bound, dtype=torch.float64).expand(got.shape)
    special = ~torch.isfinite(expected64) | ~torch.isfinite(got64)
    same_special = (got64 == expected64) | (got64.isnan() & expected64.isnan())
    error = torch.where(special, torch.where(same_special, 0.0, float("inf")), (got64 - expected64).abs())
    failed = error > bound64
    if not bool(failed.any()):
        return
    excess = torch.where(failed, error / bound64.clamp_min(2.0**-1000), 0.0)
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), got.shape)) if got.dim() else ()
    raise AssertionError(
        f"{what}: {int(failed.sum())} of {got.numel()} elements are outside their bound; worst at {list(worst)}: "
        f"got {got64[worst].item():.9g}, expected {expected64[worst].item():.9g}, error {error[worst].item():.3g}, "
        f"bound {bound64[worst].item():.3g}"
    )
