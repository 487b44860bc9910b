"""Load, quantize and run Llama-family language models through this library's operators.

>>> from polyop.llm import Engine, SamplingParams, load_model, load_tokenizer
>>> model, tokenizer = load_model("smollm2-int4"), load_tokenizer("smollm2-int4")
>>> engine = Engine(model, tokenizer, max_seq_len=512)
>>> request = engine.submit(tokenizer.encode("The capital of France is"), SamplingParams(max_new_tokens=16))
>>> engine.run()
>>> request.text

The same from a shell: ``polyop quantize``, ``polyop run``, ``polyop perplexity``.
"""

from __future__ import annotations

import importlib

# Imported when first named: the command line must be able to answer, and to set thread counts, before torch is loaded.
_HOME_OF_NAME = {
    "DTYPES": "loading",
    "DecoderModel": "model",
    "Engine": "engine",
    "LlmError": "errors",
    "Request": "engine",
    "SamplingParams": "sampling",
    "Statistics": "statistics",
    "Tokenizer": "tokenizer",
    "compute_perplexity": "perplexity",
    "load_model": "loading",
    "load_tokenizer": "tokenizer",
    "quantize_groups": "quantize",
    "quantize_model": "quantize",
}

__all__ = list(_HOME_OF_NAME)


def __getattr__(name: str) -> object:
    if name in _HOME_OF_NAME:
        return getattr(importlib.import_module(f".{_HOME_OF_NAME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
