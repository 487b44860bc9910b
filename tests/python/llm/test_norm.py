"""RmsNorm: against double precision, and the same bits of a row in any batch."""

import pytest
import torch

from polyop.llm.norm import RmsNorm

EPS = 1e-5


def make(num_rows: int, num_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * num_features)
    x = torch.randn(num_rows, num_features, generator=generator)
    return x * torch.logspace(-4, 2, num_rows).unsqueeze(1), torch.rand(num_features, generator=generator) + 0.5


@pytest.mark.parametrize("num_features", [1, 7, 48, 576, 8192])
def test_rows_equal_double_precision(num_features):
    x, weight = make(9, num_features)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    # Sum of squares in up to 16 running sums, halved by the root; then four rounded steps.
    bound = (num_features / 32 + 8) * torch.finfo(torch.float32).eps / 2
    assert ((RmsNorm(weight, EPS)(x) - expected).abs() <= bound * expected.abs()).all()


@pytest.mark.parametrize("num_features", [7, 48, 576])
@pytest.mark.parametrize("num_rows", [2, 16, 17, 300])
def test_row_has_the_same_bits_in_any_batch(num_rows, num_features):
    x, weight = make(num_rows, num_features)
    norm = RmsNorm(weight, EPS)
    alone = torch.cat([norm(row.unsqueeze(0)) for row in x])
    assert torch.equal(norm(x), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    x, weight = make(5, 96)
    x = x.to(dtype)
    norm = RmsNorm(weight, EPS)
    assert torch.equal(norm(x), norm(x.float()).to(dtype))


def test_zeros_stay_zero():
    assert torch.equal(RmsNorm(torch.ones(8), EPS)(torch.zeros(2, 8)), torch.zeros(2, 8))
