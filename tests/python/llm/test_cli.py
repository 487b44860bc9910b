"""The command line: what it prints, and one line with exit code 2 for every kind of bad input."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from polyop.llm.cli import main

SHORT_RUN = ["--max-new-tokens", "4", "--no-chat"]


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return code, out, err


def command(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "polyop.llm", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, **options)


# ---- run -----------------------------------------------------------------------------------------------------------


def test_run_prints_each_prompt_its_text_and_the_statistics(tiny_int4_folder, capfd):
    code, out, err = run(capfd, "run", tiny_int4_folder, "first", "second", *SHORT_RUN)
    assert (code, err) == (0, "")
    assert out.index("[1] first\n") < out.index("[2] second\n") < out.index("prefill")
    for pattern in (r"prefill +[\d.]+ tokens/s +\(11 tokens", r"decode +[\d.]+ tokens/s", r"weights +[\d.]+ MiB",
                    r"KV cache +[\d.]+ MiB", r"peak memory +[\d.]+ MiB"):  # fmt: skip
        assert re.search(pattern, out), pattern


def test_run_json_is_one_object(tiny_folder, capfd):
    code, out, err = run(capfd, "run", tiny_folder, "abc", "--json", *SHORT_RUN)
    result = json.loads(out)
    assert (code, err) == (0, "")
    (output,) = result["outputs"]
    assert output["prompt"] == "abc" and output["prompt_tokens"] == 3 and len(output["output_ids"]) == 4
    assert output["finish_reason"] == "length"
    assert result["statistics"]["decode_tokens"] == 3 and result["statistics"]["weight_bytes"] > 0


def test_streamed_text_is_the_text_of_json(tiny_folder, capfd):
    arguments = ["run", tiny_folder, "a", "bc", "--max-new-tokens", "20", "--seed", "5", "--temperature", "1"]
    outputs = json.loads(run(capfd, *arguments, "--json")[1])["outputs"]
    streamed = run(capfd, *arguments)[1]
    assert streamed.startswith(f"[1] a\n{outputs[0]['text']}\n\n[2] bc\n{outputs[1]['text']}\n")


def test_prompts_come_from_arguments_options_files_and_standard_input(tiny_folder, tmp_path, monkeypatch, capfd):
    (tmp_path / "prompts.txt").write_text("three\n\nfour\n")
    file = ["--prompt-file", tmp_path / "prompts.txt"]
    out = run(capfd, "run", tiny_folder, "one", "--prompt", "two", *file, "--json", *SHORT_RUN)[1]
    assert [output["prompt"] for output in json.loads(out)["outputs"]] == ["one", "two", "three", "four"]
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    out = run(capfd, "run", tiny_folder, "--prompt-file", "-", "--json", *SHORT_RUN)[1]
    assert [output["prompt"] for output in json.loads(out)["outputs"]] == ["from a pipe"]


def test_chat_template_is_used_unless_refused(tiny_folder, capfd):
    def prompt_tokens(*options: str) -> int:
        out = run(capfd, "run", tiny_folder, "hi", "--json", "--max-new-tokens", "1", *options)[1]
        return json.loads(out)["outputs"][0]["prompt_tokens"]

    assert prompt_tokens("--no-chat") == 2
    assert prompt_tokens() == prompt_tokens("--chat") == 2 + 3 + len("user\n") + len("\n") + len("assistant\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--attn-backend", "vanilla"],
        ["--dtype", "bf16"],
        ["--dtype", "f16"],
        ["--max-batch", "1", "--page-size", "1", "--max-seq-len", "64", "--threads", "1"],
        ["--temperature", "0.8", "--top-k", "5", "--top-p", "0.9", "--seed", "1", "--stop", "zz"],
    ],
)
def test_options_run(options, tiny_int4_folder, capfd):
    code, out, err = run(capfd, "run", tiny_int4_folder, "a", "b", "--json", *SHORT_RUN, *options)
    assert (code, err) == (0, "")
    assert len(json.loads(out)["outputs"]) == 2


def test_module_runs_as_a_program(tiny_folder):
    result = command("run", tiny_folder, "abc", *SHORT_RUN)
    assert (result.returncode, result.stderr) == (0, "") and "[1] abc" in result.stdout


# ---- quantize, perplexity ------------------------------------------------------------------------------------------


def test_quantize_then_run_and_perplexity(tiny_folder, tmp_path, capfd):
    code, out, err = run(capfd, "quantize", tiny_folder, "--output", tmp_path / "new" / "int4", "--group-size", 64)
    assert (code, err) == (0, "") and "INT4, group size 64" in out
    (tmp_path / "text.txt").write_text("Some words to score. " * 10)
    code, out, err = run(capfd, "perplexity", tmp_path / "new" / "int4", "--text", tmp_path / "text.txt")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"perplexity [\d.]+ over 210 tokens in windows of 256\n", out)
    out = run(capfd, "perplexity", tiny_folder, "--text", tmp_path / "text.txt", "--window", 100, "--json")[1]
    assert json.loads(out)["window"] == 100 and json.loads(out)["perplexity"] > 1


# ---- bad input -----------------------------------------------------------------------------------------------------


def make_bad_inputs(folder: Path, tiny: Path, int4: Path, gguf: Path) -> None:
    """Everything the table below names, under ``folder``."""
    (folder / "empty").mkdir()
    (folder / "text.gguf").write_text("this is no model\n" * 100)
    (folder / "nothing.gguf").write_bytes(b"")
    with open(gguf, "rb") as file:
        (folder / "header.gguf").write_bytes(file.read(4000))
        file.seek(0)
        (folder / "half.gguf").write_bytes(file.read(os.path.getsize(gguf) // 2))
    for name in ("cut", "foreign", "no_tokenizer", "no_weights", "awq"):
        (folder / name).mkdir()
        for file in tiny.iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    weights = (tiny / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    config = json.loads((tiny / "config.json").read_text())
    (folder / "foreign" / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    (folder / "awq" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    (folder / "no_tokenizer" / "tokenizer.json").write_text("{")
    (folder / "no_weights" / "model.safetensors").unlink()
    (folder / "taken").mkdir()
    (folder / "taken" / "file").write_text("mine")
    (folder / "short.txt").write_text("a")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\xff")


BAD_INPUT = {
    "missing model": ("run gone hi", "gone: no such file or folder"),
    "folder without a model": ("run empty hi", "config.json: No such file"),
    "foreign file": ("run text.gguf hi", "text.gguf: not a readable GGUF file"),
    "empty file": ("run nothing.gguf hi", "nothing.gguf: not a readable GGUF file"),
    "GGUF cut in its header": ("run header.gguf hi", "header.gguf: not a readable GGUF file"),
    "GGUF cut in its tensors": ("quantize half.gguf -o out", "half.gguf: not a readable GGUF file"),
    "safetensors cut": ("quantize cut -o out", "model.safetensors: not a readable safetensors file"),
    "no weights": ("run no_weights hi", "no .safetensors file"),
    "unknown architecture": ("run foreign hi", "unknown architecture 'mamba'; supported: llama, qwen2, qwen3"),
    "foreign quantization": ("run awq hi", "quantization method is 'awq'"),
    "damaged tokenizer": ("run no_tokenizer hi", "tokenizer.json: not a readable tokenizer"),
    "damaged tokenizer while writing": ("quantize no_tokenizer -o out", "tokenizer.json: not a readable tokenizer"),
    "output taken": ("quantize TINY -o taken", "taken: exists already"),
    "output below a file": ("quantize TINY -o short.txt/out", "short.txt/out: cannot be written: Not a directory"),
    "group size": ("quantize TINY -o out --group-size 48", "group size is 48; supported: 32, 64, 128"),
    "quantized twice": ("quantize INT4 -o out", "is quantized already"),
    "prompt too long": ("run TINY --no-chat --max-seq-len 4 abcdef", "prompt 0 has 6 tokens; the context holds 4"),
    "context too long": ("run TINY hi --max-seq-len 999", "max_seq_len is 999; wanted 1 to 256"),
    "no free page": ("run TINY hello --page-size 4 --num-pages 2", "no free page: prompt 0 needs"),
    "no prompt": ("run TINY", "no prompt"),
    "prompt file missing": ("run TINY --prompt-file gone.txt", "gone.txt: No such file"),
    "temperature": ("run TINY hi --temperature -1", "temperature is -1.0; wanted at least 0"),
    "option value": ("run TINY hi --dtype f8", "'f8' is not one of 'f32', 'f16', 'bf16'"),
    "option unknown": ("run TINY hi --fast", "No such option: --fast"),
    "argument missing": ("run", "Missing argument"),
    "command unknown": ("train TINY", "No such command 'train'"),
    "text missing": ("perplexity TINY --text gone.txt", "gone.txt: No such file"),
    "text too short": ("perplexity TINY --text short.txt", "the text has 1 tokens; wanted at least 2"),
    "text no text": ("perplexity TINY --text binary.txt", "binary.txt: not a UTF-8 text"),
}


@pytest.fixture(scope="module")
def bad_inputs(tiny_folder, tiny_int4_folder, smollm2_gguf, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    make_bad_inputs(folder, tiny_folder, tiny_int4_folder, smollm2_gguf)
    return folder


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(case, bad_inputs, tiny_folder, tiny_int4_folder, monkeypatch, capfd):
    line, text = BAD_INPUT[case]
    monkeypatch.chdir(bad_inputs)
    before = sorted(bad_inputs.rglob("*"))
    names = {"TINY": tiny_folder, "INT4": tiny_int4_folder}
    code, out, err = run(capfd, *(names.get(word, word) for word in line.split()))
    assert code == 2 and out == ""
    assert err.startswith("polyop: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert text in err
    assert sorted(bad_inputs.rglob("*")) == before


def test_full_disk_leaves_nothing_behind(tiny_folder, tmp_path):
    # A limit on file size stands for the full disk: the write fails half way with an OSError in the same place.
    limit = 8000
    result = command(
        "quantize", tiny_folder, "--output", tmp_path / "out",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr == f"polyop: {tmp_path / 'out'}: cannot be written: File too large\n"
    assert os.listdir(tmp_path) == []


def test_full_disk_under_standard_output(tiny_folder):
    line = [sys.executable, "-m", "polyop.llm", "run", str(tiny_folder), "abc", *SHORT_RUN]
    with open("/dev/full", "w") as full:
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr == "polyop: the output cannot be written: No space left on device\n"
