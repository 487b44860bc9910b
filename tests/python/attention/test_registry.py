"""Backends by name."""

import pytest

from polyop.attention import (
    AttentionBackend,
    PositionalEmbeddingParams,
    PositionEmbeddingType,
    QuantConfig,
    RopeParams,
    available_attention_backends,
    get_attention_backend,
    register_attention_backend,
)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("vanilla", "vanilla"), ("VANILLA", "vanilla"), ("fused", "fused"), ("TRTLLM", "fused"), ("trtllm", "fused")],
)
def test_names_are_compared_without_case(name, wanted):
    assert get_attention_backend(name).name == wanted


@pytest.mark.parametrize("name", ["flashinfer", "FLASHINFER", "", "torch"])
def test_unknown_name_is_refused_with_the_list(name):
    with pytest.raises(ValueError, match="is unknown; known: fused, trtllm, vanilla"):
        get_attention_backend(name)


@pytest.mark.parametrize(("name", "aliases"), [("Fused", ()), ("trtllm", ()), ("mine", ("vanilla",)), ("a", ("a",))])
def test_taken_name_is_refused_and_nothing_is_registered(name, aliases):
    before = available_attention_backends()
    with pytest.raises(ValueError, match="is taken already"):
        register_attention_backend(name, aliases=aliases)(AttentionBackend)
    assert available_attention_backends() == before


@pytest.mark.parametrize("name", ["vanilla", "fused"])
def test_constructor_refuses_by_name(name):
    backend = get_attention_backend(name)
    with pytest.raises(ValueError, match="num_kv_heads is 2"):
        backend(0, 3, 8, 2)
    with pytest.raises(NotImplementedError, match="kv_cache_quant_algo is 'FP8'"):
        backend(0, 4, 8, 2, QuantConfig(kv_cache_quant_algo="FP8"))
    with pytest.raises(NotImplementedError, match="ALIBI"):
        backend(0, 4, 8, pos_embd_params=PositionalEmbeddingParams(type=PositionEmbeddingType.ALIBI))
    with pytest.raises(ValueError, match="rope dim is 16; head_dim is 8"):
        backend(0, 4, 8, pos_embd_params=PositionalEmbeddingParams(rope=RopeParams(dim=16)))
    layer = backend(0, 4, 8)
    assert layer.num_kv_heads == 4
    with pytest.raises(NotImplementedError, match="quant_algo is 'FP8'"):
        layer.update_quant_config(QuantConfig(quant_algo="FP8"))
    assert backend.support_fused_qkv() and backend.support_fused_rope()
    assert not backend.support_mla() and not backend.support_nvfp4_output()
