"""SmolLM2-135M end to end: against transformers, batch against singles, page sizes, INT4 perplexity, peak memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyop.llm import Engine, SamplingParams, compute_perplexity, load_model, load_tokenizer
from polyop.llm.paged_model import PagedModel, Piece

pytestmark = pytest.mark.real_model

TEXT_FILE = Path(__file__).resolve().parents[2] / "data" / "perplexity_text.txt"
PROMPT_LENGTHS = (3, 17, 64, 129, 300)
NUM_GREEDY = 64
MAX_LOGIT_DIFFERENCE = 1e-3
MAX_PERPLEXITY_DIFFERENCE = 0.001  # relative


@pytest.fixture(scope="module")
def prompts(smollm2_f32) -> list[list[int]]:
    """Five prompts of 3 to 300 tokens out of the test text."""
    ids = smollm2_f32[1].encode(TEXT_FILE.read_text(encoding="utf-8"))
    return [ids[700 * i : 700 * i + length] for i, length in enumerate(PROMPT_LENGTHS)]


@pytest.fixture(scope="module")
def golden(smollm2_gguf, prompts) -> dict[str, list[torch.Tensor]]:
    """What transformers computes from the same file: logits [S, V] of each prompt, and greedy tokens of the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0] for ids in prompts]
        greedy = model.generate(
            torch.tensor([prompts[1]]),
            attention_mask=torch.ones(1, len(prompts[1]), dtype=torch.long),
            max_new_tokens=NUM_GREEDY,
            min_new_tokens=NUM_GREEDY,
            do_sample=False,
            repetition_penalty=1.0,
        )[0, len(prompts[1]) :]
    return {"logits": logits, "greedy": [greedy]}


@torch.inference_mode()
def logits_of_batch(model, prompts: list[list[int]], page_size: int = 16) -> list[torch.Tensor]:
    """Logits of all rows of each prompt [S, V], computed in one batch."""
    lengths = [len(ids) for ids in prompts]
    paged = PagedModel(
        model, max_batch=len(prompts), max_num_tokens=sum(lengths), max_seq_len=max(lengths), page_size=page_size
    )
    pieces = [Piece(request_id=i, token_ids=ids, prompt_length=len(ids)) for i, ids in enumerate(prompts)]
    hidden, row_ranges = paged.forward(pieces)
    return [model.logits_of_block(hidden[start:stop]) for start, stop in row_ranges]


def generate(loaded, prompts, num_tokens: int, **limits) -> list[list[int]]:
    engine = Engine(*loaded, max_seq_len=512, **limits)
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    requests = [engine.submit(ids, params) for ids in prompts]
    engine.run()
    return [request.output_ids for request in requests]


# ---- against transformers ------------------------------------------------------------------------------------------


def test_logits_equal_those_of_transformers(smollm2_f32, prompts, golden):
    differences = []
    for ids, expected in zip(prompts, golden["logits"], strict=True):
        (actual,) = logits_of_batch(smollm2_f32[0], [ids])
        differences.append(float((actual - expected).abs().max()))
    print("largest difference of logits:", ", ".join(f"{value:.1e}" for value in differences))
    assert max(differences) <= MAX_LOGIT_DIFFERENCE


def test_greedy_tokens_equal_those_of_transformers(smollm2_f32, prompts, golden):
    (actual,) = generate(smollm2_f32, [prompts[1]], NUM_GREEDY)
    assert actual == golden["greedy"][0].tolist()


# ---- invariance ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["f32", "int4"])
def loaded(request, smollm2_f32, smollm2_int4_folder):
    if request.param == "f32":
        return smollm2_f32
    folder = smollm2_int4_folder(32)
    return load_model(folder, max_seq_len=1024), load_tokenizer(folder)


def test_batch_of_five_equals_five_singles_bit_for_bit(loaded, prompts):
    together = logits_of_batch(loaded[0], prompts)
    for ids, expected in zip(prompts, together, strict=True):
        assert torch.equal(logits_of_batch(loaded[0], [ids])[0], expected)
    batch = generate(loaded, prompts, 8)
    assert batch == [generate(loaded, [ids], 8)[0] for ids in prompts]


def test_page_sizes_give_equal_bits(loaded, prompts):
    expected = logits_of_batch(loaded[0], prompts[2:4], page_size=16)
    for page_size in (1, 128):
        for actual, want in zip(logits_of_batch(loaded[0], prompts[2:4], page_size), expected, strict=True):
            assert torch.equal(actual, want)
    runs = [generate(loaded, prompts[:3], 8, page_size=size) for size in (1, 16, 128)]
    assert runs[0] == runs[1] == runs[2]


# ---- INT4 ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_int4_perplexity_of_packed_weights_equals_that_of_dense_ones(smollm2_f32, smollm2_int4_folder, capsys):
    model, tokenizer = smollm2_f32
    ids = tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"))
    lines = [f"perplexity over {len(ids)} tokens: f32 {compute_perplexity(model, ids):.3f}"]
    ratios = {}
    for group_size in (32, 64, 128):
        folder = smollm2_int4_folder(group_size)
        packed = compute_perplexity(load_model(folder, max_seq_len=512), ids)
        dense = compute_perplexity(load_model(folder, max_seq_len=512, dequantize=True), ids)
        lines.append(f"group {group_size}: packed {packed:.3f}, dense {dense:.3f}")
        ratios[group_size] = packed / dense
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    for group_size, ratio in ratios.items():
        assert abs(ratio - 1) <= MAX_PERPLEXITY_DIFFERENCE, f"group {group_size}: {ratio}"


# ---- memory --------------------------------------------------------------------------------------------------------

_PEAK = """
from pathlib import Path
def peak():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
"""
_BASE = (
    _PEAK
    + """
import sys, torch
from tokenizers import Tokenizer
Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
print(peak())
"""
)
_RUN = (
    _PEAK
    + """
import contextlib, io, json, sys
from polyop.llm.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    prompts = ["Tell me about the sea. " * 20, "And the sky?"]
    code = main(["run", sys.argv[1], *prompts, "--max-new-tokens", "32", "--json"])
assert code == 0
statistics = json.loads(out.getvalue())["statistics"]
print(peak(), statistics["weight_bytes"], statistics["kv_bytes"])
"""
)
ALLOWANCE_BYTES = 150 * 2**20


def numbers_of(program: str, folder: Path) -> list[int]:
    result = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True, timeout=300
    )
    return [int(word) for word in result.stdout.split()]


def test_peak_memory_of_the_int4_run(smollm2_int4_folder):
    folder = smollm2_int4_folder(32)
    (base,) = numbers_of(_BASE, folder)
    peak, weight_bytes, kv_bytes = numbers_of(_RUN, folder)
    extra = peak - base - weight_bytes - kv_bytes
    sizes = [("peak", peak), ("base", base), ("weights", weight_bytes), ("KV", kv_bytes), ("rest", extra)]
    print(", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes))
    assert extra <= ALLOWANCE_BYTES
