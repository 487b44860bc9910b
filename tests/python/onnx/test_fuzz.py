"""Random damage to the bytes of one-node models: a verdict or one message, never anything else.

Runs for POLYOP_FUZZ_SECONDS (3 by default; CI sets 60), from fixed seeds.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from polyop.onnx.check import ModelError, check_model

FOLDER = Path(__file__).parents[2] / "data" / "trt_ops"
SECONDS = float(os.environ.get("POLYOP_FUZZ_SECONDS", "3"))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut, repeated, inserted."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result)) if result else 0
        kind = rng.randrange(5)
        if kind == 0 and result:
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and result:
            result[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif kind == 2:
            del result[at : at + rng.randint(1, 8)]
        elif kind == 3:
            result[at:at] = rng.randbytes(rng.randint(1, 6))
        else:
            piece = result[at : at + rng.randint(1, 40)]
            result[at:at] = piece
    return bytes(result)


@pytest.mark.parametrize("strict", [False, True])
def test_damaged_models(strict):
    files = sorted(FOLDER.glob("*.onnx"))
    end = time.monotonic() + SECONDS / 2
    seed = 0
    while time.monotonic() < end:
        rng = random.Random(seed)
        data = damaged(rng.choice(files).read_bytes(), rng)
        seed += 1
        try:
            report = check_model(data, strict=strict)
        except ModelError as error:
            assert len(str(error).splitlines()) == 1, f"seed {seed - 1}"
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed - 1} raised {type(error).__name__}: {error}") from error
        for node in report.nodes:
            assert node.verdict in ("ok", "no_kernel", "reject"), f"seed {seed - 1}"
    assert seed > 0
