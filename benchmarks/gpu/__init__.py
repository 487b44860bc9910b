"""The GPU benchmark: one module for each operator, found by name; README.md says what a module holds."""

OPERATORS = ("circular_pad", "kv_cache_update", "rotary_embedding", "qk_norm_rope_append", "attention")
