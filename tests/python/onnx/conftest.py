"""Makes the helpers beside the tests importable (pytest runs with --import-mode=importlib)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("onnx", reason="the package onnx is missing: pip install 'polyop[onnx]'")
