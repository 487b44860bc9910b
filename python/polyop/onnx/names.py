"""Outside names: which ONNX nodes are which operator. The only place where an outside operator's name stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OutsideName:
    """One ONNX operator that is an operator of the registry, operand for operand and attribute for attribute."""

    op_type: str
    operator: str
    least_inputs: int  # fewest entries of a node's input list; absent ones in between are empty names
    domains: tuple[str, ...] = ("", "trt")


#: TensorRT's importer looks at the name alone; the files that its tools write have the domain "" or "trt".
OUTSIDE_NAMES = (
    OutsideName("TRT_Attention", "trt_attention", least_inputs=3),
    OutsideName("TRT_QuantizedAttention", "trt_quantized_attention", least_inputs=5),
    OutsideName("TRT_KVCacheUpdate", "trt_kv_cache_update", least_inputs=2),
)

BY_OP_TYPE = {name.op_type: name for name in OUTSIDE_NAMES}


def outside_name(op_type: str) -> OutsideName | None:
    """The entry of an ONNX operator, or None."""
    return BY_OP_TYPE.get(op_type)
