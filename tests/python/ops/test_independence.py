"""The bits of a row depend on that row alone: not on neighbours in the batch, on the order or size of pages, on the
number of threads, on who lends them, or on what other threads of the process call meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from example_calls import (
    EXAMPLES,
    KERNELS,
    STARTS,
    TOKENS,
    Prepared,
    append_arguments,
    attention_calls,
    digest,
    digests,
)

from polyop import ops

FAST = [(name, kernel) for name, kernel in KERNELS if kernel != "reference"]


@pytest.fixture(autouse=True)
def threads_as_before():
    before = ops.num_threads()
    yield
    ops.set_num_threads(before)


def test_every_operator_has_examples_and_every_kernel_takes_one():
    assert set(EXAMPLES) == set(ops.SCHEMAS)
    for name, kernel in FAST:
        assert kernel == "cpu_amx_attention" or digests(name, kernel), f"{name}: no example for {kernel}"


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kernel"), FAST)
def test_number_of_threads(name, kernel):
    ops.set_num_threads(1)
    wanted = digests(name, kernel)
    for threads in (2, 3, 16, 2):
        ops.set_num_threads(threads)
        assert digests(name, kernel) == wanted, f"{threads} threads"


def run_program(**environment: str) -> dict[str, dict[str, str]]:
    program = Path(__file__).with_name("example_calls.py")
    done = subprocess.run(
        [sys.executable, str(program)], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_own_workers_and_those_of_openmp_give_the_same_bits():
    wanted = {f"{name} {kernel}": digests(name, kernel) for name, kernel in FAST}
    for openmp in ("0", "1"):
        assert run_program(POLYOP_OPENMP=openmp, POLYOP_NUM_THREADS="3", OMP_NUM_THREADS="2") == wanted, openmp


def test_openmp_with_fewer_threads_than_asked_for():
    wanted = {f"{name} {kernel}": digests(name, kernel) for name, kernel in FAST}
    assert run_program(POLYOP_NUM_THREADS="4", OMP_THREAD_LIMIT="2", OMP_DYNAMIC="true") == wanted


def test_calls_of_several_python_threads_while_the_number_of_threads_changes():
    prepared = [(name, ops.with_kernel(name, kernel), digests(name, kernel)) for name, kernel in FAST]
    stop = threading.Event()
    wrong: list[str] = []

    def call(first: int) -> None:
        try:
            for turn in range(len(prepared)):
                name, function, wanted = prepared[(first + turn) % len(prepared)]
                for call, arguments in EXAMPLES[name]().items():
                    if call in wanted and digest(Prepared(name, arguments).run(function)) != wanted[call]:
                        wrong.append(f"{name}: {call}")
        except Exception as error:
            wrong.append(repr(error))

    def change() -> None:
        while not stop.is_set():
            for count in (1, 5, 2, 3, 8):
                ops.set_num_threads(count)

    callers = [threading.Thread(target=call, args=(first,)) for first in (0, 3, 6)]
    changer = threading.Thread(target=change)
    for thread in (*callers, changer):
        thread.start()
    for thread in callers:
        thread.join()
    stop.set()
    changer.join()
    assert not wrong


def run_in_child(source: str) -> None:
    """A program that forks; a child that hangs ends by its alarm."""
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("used_before", [True, False], ids=["pool_used_before", "pool_not_used_before"])
@pytest.mark.parametrize("openmp", ["0", "1"])
def test_fork_after_use(used_before, openmp):
    """torch's team has worked in the parent; the child must neither wait for it nor for workers that are gone."""
    run_in_child(f"""
import os, signal
os.environ["POLYOP_OPENMP"] = "{openmp}"
import torch
torch.set_num_threads(3)
torch.exp(torch.rand(1 << 20))
import example_calls as e
from polyop import ops
calls = [(n, e.Prepared(n, a), f) for n in e.EXAMPLES if n not in ("pack_int4_fragments", "int4_groupwise_gemm")
         for f in [getattr(ops, n)] for a in e.EXAMPLES[n]().values()]
if {used_before}:
    ops.set_num_threads(3)
    wanted = [e.digest(e.Prepared(n, c.arguments).run(f)) for n, c, f in calls]
child = os.fork()
if child == 0:
    signal.alarm(60)
    got = [e.digest(c.run(f)) for n, c, f in calls]
    ops.set_num_threads(2)
    os._exit(0 if not {used_before} or got == wanted else 1)
assert os.waitpid(child, 0)[1] == 0
if {used_before}:
    assert [e.digest(e.Prepared(n, c.arguments).run(f)) for n, c, f in calls] == wanted  # the parent goes on
""")


# ---- neighbours and pages --------------------------------------------------------------------------------------------


ATTENTION = [kernel for name, kernel in KERNELS if name == "attention"]


def rows_of(call, outputs, b):
    at = sum(rows for rows, _ in call.lengths[:b])
    where = np.s_[at : at + call.lengths[b][0]] if call.query_form == "packed" else np.s_[b]
    return digest([tensor[where].contiguous() for tensor in outputs.values()])


def run_attention(kernel, call):
    outputs = call.outputs()
    ops.with_kernel("attention", kernel)(**call.arguments, **outputs)
    return outputs


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize("name", attention_calls())
def test_attention_of_a_sequence_alone_and_on_other_pages(name, kernel):
    call = attention_calls()[name]
    try:
        outputs = run_attention(kernel, call)
    except NotImplementedError:
        pytest.skip(f"{kernel} does not take it")
    everyone = list(range(len(call.lengths)))
    wanted = [rows_of(call, outputs, b) for b in everyone]
    for b in everyone:
        alone = call.again([b])
        assert rows_of(alone, run_attention(kernel, alone), 0) == wanted[b], f"sequence {b} alone"
    backwards = call.again(everyone[::-1])
    got = run_attention(kernel, backwards)
    assert [rows_of(backwards, got, b) for b in everyone] == wanted[::-1], "sequences in another order"
    if call.kv_form != "paged":
        return
    for page_size, page_seed in ((16, 5), (1, 6), (3, 7), (128, 8)):
        moved = call.again(everyone, page_size=page_size, page_seed=page_seed)
        got = run_attention(kernel, moved)
        assert [rows_of(moved, got, b) for b in everyone] == wanted, f"pages of {page_size} in order {page_seed}"
    for form in ("packed", "padded"):
        moved = call.again(everyone, kv_form=form)
        got = run_attention(kernel, moved)
        assert [rows_of(moved, got, b) for b in everyone] == wanted, f"{form} keys"


def appended(cache: torch.Tensor, arguments: dict, b: int, row: int) -> bytes:
    """The rows that sequence b, row `row` of the call, has got."""
    positions = range(STARTS[b], STARTS[b] + TOKENS[b])
    if "page_table" in arguments:
        rows = [cache[int(arguments["page_table"][row, p // 16]), p % 16] for p in positions]
    else:
        rows = [cache[row, :, p] for p in positions]
    return b"".join(r.contiguous().view(torch.uint8).numpy().tobytes() for r in rows)


APPENDS = [(name, kernel) for name, kernel in KERNELS if name in ("kv_cache_update", "qk_norm_rope_append")]


@pytest.mark.parametrize(("name", "kernel"), APPENDS)
def test_appends_of_a_sequence_alone_and_to_other_pages(name, kernel):
    function = ops.with_kernel(name, kernel)
    for arguments in EXAMPLES[name]().values():
        dtype = arguments["k_cache"].dtype

        def run(a, number, arguments=arguments):
            prepared = Prepared(name, a)
            results = prepared.run(function)
            caches = [
                appended(cache, a, number[row], row) for cache in prepared.in_place[:2] for row in range(len(number))
            ]
            offsets = a["update_offsets"].tolist()
            rows = [r[i:j].numpy().tobytes() for r in results[2:] for i, j in pairwise(offsets)]
            return [caches[: len(number)], caches[len(number) :], *([rows] if rows else [])]

        batch = list(range(len(TOKENS)))
        wanted = run(arguments, batch)
        if "page_table" in arguments:
            moved = append_arguments(True, dtype, page_seed=9)
            assert run(arguments | {"page_table": moved["page_table"]}, batch) == wanted, "other pages"
        offsets = arguments["update_offsets"].tolist()
        for b in batch:
            one = dict(arguments)
            one["update_offsets"] = torch.tensor([0, TOKENS[b]], dtype=torch.int32)
            one["write_positions"] = arguments["write_positions"][b : b + 1]
            for operand in ("q", "k", "v"):
                if operand in one:
                    one[operand] = arguments[operand][offsets[b] : offsets[b + 1]]
            if "page_table" in one:
                one["page_table"] = arguments["page_table"][b : b + 1]
            else:
                one |= {cache: arguments[cache][b : b + 1] for cache in ("k_cache", "v_cache")}
            assert run(one, [b]) == [[part[b]] for part in wanted], f"sequence {b} alone"


@pytest.mark.parametrize("kernel", [kernel for name, kernel in FAST if name == "rotary_embedding"])
def test_rotation_of_a_token_alone(kernel):
    function = ops.with_kernel("rotary_embedding", kernel)
    for arguments in EXAMPLES["rotary_embedding"]().values():
        q, k = function(**arguments)
        for t in (0, 1, 150, 299):
            one = arguments | {name: arguments[name][t : t + 1] for name in ("q", "k", "position_ids")}
            assert digest(list(function(**one))) == digest([q[t : t + 1], k[t : t + 1]]), f"token {t}"


@pytest.mark.parametrize("kernel", [kernel for name, kernel in FAST if name == "int4_groupwise_gemm"])
def test_product_of_a_row_alone(kernel):
    function = ops.with_kernel("int4_groupwise_gemm", kernel)
    for arguments in EXAMPLES["int4_groupwise_gemm"]().values():
        x = torch.cat([arguments["x"]] * 4)[:270]
        out = function(**arguments | {"x": x})
        for first, count in ((0, 1), (3, 1), (len(x) - 1, 1), (1, 17), (0, len(x) // 2)):
            part = function(**arguments | {"x": x[first : first + count]})
            assert digest([part]) == digest([out[first : first + count]]), f"rows {first} to {first + count}"


@pytest.mark.parametrize("kernel", [kernel for name, kernel in FAST if name == "circular_pad"])
def test_padding_of_a_row_alone(kernel):
    function = ops.with_kernel("circular_pad", kernel)
    for arguments in EXAMPLES["circular_pad"]().values():
        out = function(arguments["x"], arguments["padding"][:2])
        for row in (0, 7, 79):
            one = function(arguments["x"][row : row + 1], arguments["padding"][:2])
            assert digest([one]) == digest([out[row : row + 1]])


@pytest.mark.parametrize(
    ("name", "kernel"), [(n, k) for n, k in KERNELS if n in ("trt_attention", "trt_quantized_attention")]
)
def test_tensorrt_attention_of_a_sequence_alone(name, kernel):
    function = ops.with_kernel(name, kernel)
    for arguments in EXAMPLES[name]().values():
        try:
            out = function(**arguments)
        except NotImplementedError:
            continue
        for b in range(3):
            one = arguments | {operand: arguments[operand][b : b + 1] for operand in ("Q", "K", "V", "kv_lengths")}
            assert digest([function(**one)]) == digest([out[b : b + 1].contiguous()]), f"sequence {b}"
