"""tools/check_rooms.py: each rule is seen to fail on a made-up tree, and a clean tree passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
TOOL = REPOSITORY / "tools" / "check_rooms.py"

CLEAN_TREE = {
    "ARCHITECTURE.md": (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8"),
    "polyop/core/status.h": "#include <string>\n// What attention reports is a Status.\n",
    "polyop/ops/attention/attention_schema.cpp": '#include "polyop/core/status.h"\n',
    "polyop/ops/attention/cpu/flash.cpp": '#include <hwy/highway.h>\n#include "polyop/cpu/thread_pool.h"\n',
    "polyop/ops/circular_pad/circular_pad_schema.cpp": '#include "polyop/ops/circular_pad/circular_pad_problem.h"\n',
    "polyop/hosts/tvm_ffi/call.cpp": '#include <tvm/ffi/function.h>\n#include "polyop/core/op_registry.h"\n',
    "polyop/hosts/onnx/outside_names.cpp": 'const char* kName = "attention";\n',
    "python/polyop/ops/__init__.py": '"""attention is made from its schema."""\nimport json\nimport torch\n',
    "python/polyop/attention/fused.py": "from polyop import ops\nfrom . import metadata\n",
    "python/polyop/llm/cli.py": "import typer\nfrom polyop.attention import get_backend\nfrom ._files import read\n",
}


def check(tmp_path: Path, changes: dict[str, str]) -> tuple[int, str]:
    for name, text in {**CLEAN_TREE, **changes}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_clean_tree_passes(tmp_path):
    assert check(tmp_path, {}) == (0, "check_rooms: every file is in its room\n")


def test_this_repository_passes():
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


MACHINE_FOLDER = "/" + "home" + "/somebody/model"

FAULTS = {
    "core includes an operator": (
        "polyop/core/a.h",
        '#include "polyop/ops/attention/attention_problem.h"\n',
        "polyop/core/a.h:1: room polyop/core may not include polyop/ops/attention/attention_problem.h",
    ),
    "core names an operator": (
        "polyop/core/a.h",
        '\nconst char* kFirst = "attention";\n',
        "polyop/core/a.h:2: 'attention' may not stand in room polyop/core",
    ),
    "core names an operator in CamelCase": (
        "polyop/core/a.h",
        "struct CircularPad_Problem;\n",
        "polyop/core/a.h:1: 'CircularPad' may not stand in room polyop/core",
    ),
    "core includes SIMD": (
        "polyop/core/a.h",
        "#include <hwy/highway.h>\n",
        "room polyop/core may not include hwy/highway.h",
    ),
    "core throws": ("polyop/core/a.cpp", "void f() { throw 1; }\n", "'throw' may not stand in room polyop/core"),
    "an operator includes another": (
        "polyop/ops/attention/a.cpp",
        '#include "polyop/ops/circular_pad/circular_pad_problem.h"\n',
        "room polyop/ops/attention may not include polyop/ops/circular_pad/circular_pad_problem.h",
    ),
    "a kernel includes another operator": (
        "polyop/ops/attention/cpu/a.cpp",
        '#include "polyop/ops/circular_pad/circular_pad_problem.h"\n',
        "room polyop/ops/attention/cpu may not include polyop/ops/circular_pad/circular_pad_problem.h",
    ),
    "an operator includes a host": (
        "polyop/ops/attention/a.cpp",
        '#include "polyop/hosts/tvm_ffi/call.h"\n',
        "room polyop/ops/attention may not include polyop/hosts/tvm_ffi/call.h",
    ),
    "a kernel allocates": (
        "polyop/ops/attention/cpu/a.cpp",
        "float* f() { return new float[8]; }\n",
        "'new' may not stand in room polyop/ops/<op>/cpu",
    ),
    "the runtime includes a kernel": (
        "polyop/runtime/a.cpp",
        '#include "polyop/ops/attention/cpu/flash.h"\n',
        "room polyop/runtime may not include polyop/ops/attention/cpu/flash.h",
    ),
    "a host names an operator": (
        "polyop/hosts/tvm_ffi/a.cpp",
        'bool f(const char* n) { return n == "attention"; }\n',
        "'attention' may not stand in room polyop/hosts/tvm_ffi",
    ),
    "a host includes torch": (
        "polyop/hosts/tvm_ffi/a.cpp",
        "#include <torch/extension.h>\n",
        "room polyop/hosts/tvm_ffi may not include torch/extension.h",
    ),
    "a file outside every room": ("polyop/attic/a.cpp", "\n", "polyop/attic/a.cpp:1: lies in no room"),
    "attention imports llm": (
        "python/polyop/attention/a.py",
        "from polyop.llm import cli\n",
        "room polyop.attention may not import polyop.llm",
    ),
    "attention imports llm through the root": (
        "python/polyop/attention/a.py",
        "from polyop import llm\n",
        "room polyop.attention may not import polyop.llm",
    ),
    "attention imports llm by a relative path": (
        "python/polyop/attention/a.py",
        "from ..llm import cli\n",
        "room polyop.attention may not import polyop.llm",
    ),
    "an import inside a function": (
        "python/polyop/kv_cache/a.py",
        "def f():\n    import transformers\n",
        "python/polyop/kv_cache/a.py:2: room polyop.kv_cache may not import transformers",
    ),
    "ops names an operator": (
        "python/polyop/ops/a.py",
        'NAME = "circular_pad"\n',
        "'circular_pad' may not stand in room python/polyop/ops",
    ),
    "llm takes a private name": (
        "python/polyop/llm/a.py",
        "from polyop.attention.fused import _plan\n",
        "_plan is private to polyop.attention.fused",
    ),
    "a long file": ("tools/a.py", "pass\n" * 801, "tools/a.py:801: 801 lines"),
    "a path of one machine": ("docs/a.md", f"see {MACHINE_FOLDER}\n", "docs/a.md:1: path of one machine"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(tmp_path, name):
    path, text, message = FAULTS[name]
    code, output = check(tmp_path, {path: text})
    assert code == 1
    assert message in output
    assert len(output.splitlines()) == 1


def test_folder_of_three_files_needs_readme(tmp_path):
    files = {f"docs/{name}.md": "text\n" for name in "abc"}
    assert check(tmp_path, files) == (1, "docs/: 3 files and no README.md\n")
    assert check(tmp_path, {**files, "docs/README.md": "what this is\n"})[0] == 0
