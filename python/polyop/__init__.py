"""polyop: operators for LLM inference, defined once and served to many hosts.

>>> import torch, polyop
>>> polyop.ops.circular_pad(torch.arange(4.0), [1, 1])
tensor([3., 0., 1., 2., 3., 0.])

The subpackages are imported when they are first named, so that ``import polyop`` itself needs neither torch nor the
compiled module:

- ``polyop.cuda``       what kernels on a GPU had to skip
- ``polyop.ops``        one function per operator, and their ``torch.library`` registration
- ``polyop.attention``  attention backends by name
- ``polyop.kv_cache``   a paged key/value cache: pages, tables, sequences
- ``polyop.llm``        quantize and run a language model; the ``polyop`` command
- ``polyop.testing``    input makers, tolerances, comparison
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBPACKAGES = ("attention", "cuda", "kv_cache", "llm", "ops", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"polyop.{name}")
    raise AttributeError(f"module 'polyop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBPACKAGES])
