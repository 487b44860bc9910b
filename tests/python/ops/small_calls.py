"""One small call of every operator."""

from __future__ import annotations

from typing import Any

import torch


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def example(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one small call of an operator."""
    torch.manual_seed(0)
    table = {"page_table": i32([[1, 3], [0, 2]])}
    return {
        "circular_pad": lambda: ((torch.rand(2, 3), [1, 1, 2, 0]), {}),
        "kv_cache_update": lambda: (
            (torch.zeros(4, 2, 1, 8), torch.zeros(4, 2, 1, 8), torch.rand(3, 1, 8), torch.rand(3, 1, 8)),
            {"update_offsets": i32([0, 1, 3]), "write_positions": i32([0, 1]), **table},
        ),
        "rotary_embedding": lambda: (
            (torch.rand(3, 4, 8), torch.rand(3, 2, 8), torch.rand(16, 8)),
            {"position_ids": i32([0, 5, 15])},
        ),
        "qk_norm_rope_append": lambda: (
            (
                torch.rand(3, 4, 8),
                torch.rand(3, 2, 8),
                torch.rand(3, 2, 8),
                torch.zeros(4, 2, 2, 8),
                torch.zeros(4, 2, 2, 8),
                torch.rand(16, 8),
                i32([0, 1, 3]),
            ),
            {"write_positions": i32([0, 1]), "q_norm_weight": torch.rand(8), "k_norm_weight": torch.rand(8), **table},
        ),
        "attention": lambda: (
            (torch.rand(3, 4, 8), torch.rand(4, 2, 2, 8), torch.rand(4, 2, 2, 8)),
            {"query_offsets": i32([0, 1, 3]), "kv_lengths": i32([3, 2]), **table},
        ),
        "int4_groupwise_gemm": lambda: (
            (
                torch.rand(3, 64),
                torch.randint(-128, 128, (8, 512), dtype=torch.int8),
                torch.rand(2, 5, dtype=torch.float16),
            ),
            {"group_size": 32},
        ),
        "trt_attention": lambda: (
            (torch.rand(2, 4, 3, 8), torch.rand(2, 2, 5, 8), torch.rand(2, 2, 5, 8), torch.rand(3, 5) < 0.7),
            {"kv_lengths": i32([5, 2])},
        ),
        "trt_quantized_attention": lambda: (
            (torch.rand(3, 4, 8), torch.rand(2, 2, 5, 8), torch.rand(2, 2, 5, 8), None, torch.tensor([0.01])),
            {"query_lengths": i32([0, 1, 3]), "query_form": "packed_nhd", "normalization_quantize_to_type": "int8"},
        ),
        "trt_kv_cache_update": lambda: ((torch.rand(2, 2, 6, 8), torch.rand(2, 2, 3, 8), i32([1, 5])), {}),
        "pack_int4_fragments": lambda: ((torch.randint(0, 16, (5, 64), dtype=torch.uint8),), {}),
        "unpack_int4_fragments": lambda: ((torch.randint(-128, 128, (8, 512), dtype=torch.int8), 5, 64), {}),
    }[name]()
