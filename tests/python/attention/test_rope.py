"""The cos/sin table against the formulas of transformers."""

import pytest
import torch

from polyop.attention import (
    PositionalEmbeddingParams,
    PositionEmbeddingType,
    RopeParams,
    RotaryScalingType,
    inverse_frequencies,
    rope_cos_sin_table,
)

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "other_theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=4 * 64, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=SCALINGS[name]
    )
    module = LlamaRotaryEmbedding(config)
    positions = torch.arange(1024)
    cos, sin = module(torch.zeros(1), positions.unsqueeze(0))
    params = RopeParams.from_config(config)
    table = rope_cos_sin_table(params)
    assert table.shape == (1024, 64)
    assert table.dtype == torch.float32
    assert torch.equal(inverse_frequencies(params)[0], module.inv_freq)
    # The frequencies are equal bit for bit; the angles may differ by their last rounding, times a position of 1023.
    bound = 1023 * torch.finfo(torch.float32).eps * 2
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=bound)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=bound)


def test_from_config_reads_the_older_spelling():
    class Config:
        hidden_size, num_attention_heads, max_position_embeddings = 128, 2, 4096
        rope_theta = 20000.0
        rope_scaling = {"type": "linear", "factor": 2.0}  # noqa: RUF012
        partial_rotary_factor = 0.5

    params = RopeParams.from_config(Config, max_positions=77)
    assert params == RopeParams(
        dim=32,
        theta=20000.0,
        scale_type=RotaryScalingType.LINEAR,
        scale=2.0,
        max_positions=77,
        original_max_positions=4096,
        mscale=0.0,
    )


def test_table_is_shared_between_equal_parameters():
    assert rope_cos_sin_table(RopeParams(dim=8)) is rope_cos_sin_table(RopeParams(dim=8))
    assert rope_cos_sin_table(RopeParams(dim=8)) is not rope_cos_sin_table(RopeParams(dim=8, theta=5.0))


@pytest.mark.parametrize("kind", ["DYNAMIC", "LONGROPE", "MROPE"])
def test_scaling_without_a_table_is_refused_by_name(kind):
    with pytest.raises(NotImplementedError, match=f"scale_type {kind} is not supported"):
        rope_cos_sin_table(RopeParams(dim=8, scale_type=RotaryScalingType[kind]))


def test_parameters_check_their_combination():
    with pytest.raises(ValueError, match="dim is 7"):
        RopeParams(dim=7)
    with pytest.raises(ValueError, match="rope is None"):
        PositionalEmbeddingParams()
    with pytest.raises(ValueError, match="ALIBI; rope must be None"):
        PositionalEmbeddingParams(type=PositionEmbeddingType.ALIBI, rope=RopeParams(dim=8))
    with pytest.raises(ValueError, match="'fancy'; known types"):
        RotaryScalingType.from_string("fancy")
