"""Sampling: greedy, temperature, top-k, top-p, seeds."""

import pytest
import torch

from polyop.llm import LlmError, SamplingParams
from polyop.llm.sampling import Sampler, candidates

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.0])


def draw(count: int, **params) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.sample(LOGITS) for _ in range(count)]


def test_zero_temperature_takes_the_likeliest():
    assert draw(5) == [1] * 5


def test_top_k_keeps_the_k_likeliest():
    values, ids = candidates(LOGITS, SamplingParams(temperature=0.5, top_k=2))
    assert ids.tolist() == [1, 3]
    torch.testing.assert_close(values, torch.tensor([4.0, 3.0]))
    assert draw(20, temperature=5.0, top_k=1, seed=1) == [1] * 20


def test_top_k_larger_than_the_vocabulary_keeps_all():
    assert len(candidates(LOGITS, SamplingParams(temperature=1.0, top_k=100))[1]) == 5


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.99, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    logits = torch.tensor([0.05, 0.3, 0.5, 0.15]).log()
    values, ids = candidates(logits, SamplingParams(temperature=1.0, top_p=top_p))
    assert ids.tolist() == [2, 1, 3, 0][:kept]
    assert len(values) == kept


def test_all_tokens_take_part_when_nothing_limits_them():
    values, ids = candidates(LOGITS, SamplingParams(temperature=0.5))
    assert ids.tolist() == [0, 1, 2, 3, 4] and torch.equal(values, LOGITS / 0.5)


def test_same_seed_same_draws_and_other_seed_others():
    first = draw(50, temperature=1.0, seed=3)
    assert draw(50, temperature=1.0, seed=3) == first
    assert draw(50, temperature=1.0, seed=4) != first


def test_draws_follow_the_probabilities():
    counts = torch.bincount(torch.tensor(draw(4000, temperature=1.0, seed=0)), minlength=5) / 4000
    # 4 standard deviations of a share of at most 1/2.
    assert torch.allclose(counts, LOGITS.softmax(0), atol=4 * (0.25 / 4000) ** 0.5)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; wanted at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0; wanted at least 0"),
        ({"temperature": float("nan")}, "temperature is nan; wanted at least 0"),
        ({"top_k": -1}, "top_k is -1; wanted at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0; wanted more than 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5; wanted more than 0 and at most 1"),
    ],
)
def test_values_out_of_range_are_refused(params, text):
    with pytest.raises(LlmError, match=f"^{text}$"):
        SamplingParams(**params)
