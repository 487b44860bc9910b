"""What every call on a GPU promises: graph replay, equal bits, skipped entries, 64-bit offsets, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_cases import KERNELS, AttentionCase, outputs_of
from device_memory import ALL_KERNELS, DEVICE, captured, on_device, same_bits
from example_calls import EXAMPLES
from test_reported_faults import results_of

import polyop
from polyop import cuda, ops

F8 = torch.float8_e4m3fn


def run(arguments, kernel=None):
    """out and lse; of the kernel of that name, or of the one that takes the call. A kernel that refuses: skipped."""
    got = outputs_of(arguments, False, DEVICE)
    function = ops.attention if kernel is None else ops.with_kernel("attention", kernel)
    try:
        function(**arguments, **got)
    except NotImplementedError as error:
        pytest.skip(str(error))
    return got


# ---- equal bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize("kv", [None, F8, torch.int8], ids=["16bit", "fp8", "int8"])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (6, 6, 6, 6), (40, 40, 40, 40), (1, 40, 3, 17)], ids=str)
def test_attention_bits_do_not_depend_on_the_run_page_order_or_neighbours(kernel, kv, rows):
    lengths = [3000, 40, 777, 1024]
    case = AttentionCase(lengths, list(rows), kv_dtype=kv, dtype=torch.bfloat16)
    arguments = on_device(case.make())
    first = run(arguments, kernel)
    for _ in range(20):
        again = run(arguments, kernel)
        assert same_bits(first["out"], again["out"]) and same_bits(first["lse"], again["lse"])
    order = torch.randperm(arguments["k"].shape[0], device=DEVICE)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=DEVICE)
    moved = dict(arguments)
    pool = torch.stack([arguments["k"].view(torch.uint8)[order], arguments["v"].view(torch.uint8)[order]])
    moved["k"], moved["v"] = pool[0].view(arguments["k"].dtype), pool[1].view(arguments["k"].dtype)
    table = arguments["page_table"].long()
    exists = (table >= 0) & (table < len(order))
    moved["page_table"] = torch.where(exists, inverse[table.clamp(0, len(order) - 1)], table).to(torch.int32)
    assert same_bits(first["out"], run(moved, kernel)["out"])
    if kernel is None and len(set(rows)) > 1:
        return  # by itself a sequence may be another kernel's: the mean number of rows decides
    for b in range(4):
        alone = dict(arguments)
        own = slice(sum(rows[:b]), sum(rows[: b + 1]))
        alone["q"] = arguments["q"][own]
        alone["query_offsets"] = torch.tensor([0, rows[b]], dtype=torch.int32, device=DEVICE)
        alone["page_table"] = arguments["page_table"][b : b + 1]
        alone["kv_lengths"] = arguments["kv_lengths"][b : b + 1]
        assert same_bits(first["out"][own], run(alone, kernel)["out"]), f"sequence {b} alone"


@pytest.mark.parametrize(("operator", "kernel"), ALL_KERNELS, ids=[f"{o}-{k}" for o, k in ALL_KERNELS])
def test_examples_give_equal_bits_from_run_to_run_and_from_a_graph(operator, kernel):
    function = ops.with_kernel(operator, kernel)
    taken = 0
    for name, example in EXAMPLES[operator]().items():
        arguments = on_device(example)
        try:
            first = results_of(function, operator, arguments)
        except NotImplementedError:
            continue
        taken += 1
        for _ in range(10):
            again = results_of(function, operator, arguments)
            assert all(same_bits(a, b) for a, b in zip(first, again, strict=True)), name
        written = {o.name: arguments[o.name] for o in ops.SCHEMAS[operator].operands
                   if o.role != "input" and arguments.get(o.name) is not None}  # fmt: skip
        start = {operand: tensor.clone() for operand, tensor in written.items()}
        held = []
        replay = captured(lambda: held.append(function(**arguments)))  # noqa: B023
        for operand, tensor in start.items():
            written[operand].copy_(tensor)
        outputs = held[-1] if isinstance(held[-1], tuple) else (held[-1],)
        replay()
        replayed = [*written.values(), *(tensor for tensor in outputs if tensor is not None)]
        assert all(same_bits(a, b) for a, b in zip(first, replayed, strict=True)), f"{name}: other bits from a graph"
    cuda.check_errors()
    if taken == 0:
        pytest.skip("takes no example")


# ---- graphs whose operands change between replays --------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 5])
def test_attention_replays_with_other_lengths_and_tables(kernel, rows):
    lengths = [[900, 40, 5], [16, 1000, 0], [1000, 1, 999], [0, 0, 0]]
    cases = [AttentionCase(each, [rows] * 3, head_dim=64, seed=seed) for seed, each in enumerate(lengths)]
    made = [on_device(case.make()) for case in cases]
    fixed = dict(made[0])
    pages = max(a["k"].shape[0] for a in made)
    pool = torch.zeros(2, pages, *made[0]["k"].shape[1:], dtype=torch.float16, device=DEVICE)
    fixed["k"], fixed["v"] = pool[0], pool[1]
    width = max(a["page_table"].shape[1] for a in made)
    fixed["page_table"] = torch.zeros(3, width, dtype=torch.int32, device=DEVICE)
    fixed["q"] = torch.empty_like(made[0]["q"])
    fixed["kv_lengths"] = torch.zeros(3, dtype=torch.int32, device=DEVICE)

    def fill(a):
        pool[0, : a["k"].shape[0]].copy_(a["k"])
        pool[1, : a["k"].shape[0]].copy_(a["v"])
        fixed["page_table"][:, : a["page_table"].shape[1]].copy_(a["page_table"])
        fixed["q"].copy_(a["q"])
        fixed["kv_lengths"].copy_(a["kv_lengths"])

    fill(made[0])
    held = run(fixed, kernel)
    replay = captured(lambda: ops.with_kernel("attention", kernel)(**fixed, **held))
    for a in made + made[::-1]:
        fill(a)
        held["out"].fill_(float("nan"))
        replay()
        replayed = {name: tensor.clone() for name, tensor in held.items()}
        eager = run(fixed, kernel)
        assert same_bits(replayed["out"], eager["out"]) and same_bits(replayed["lse"], eager["lse"])
    cuda.check_errors()


FIRST_CALL = """
import torch
from polyop import cuda, ops
x = torch.randn(4, 2, 64, device="cuda")
positions = torch.tensor([0, 1, 2, 9], device="cuda")
out, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    ops.rotary_embedding(x, None, torch.ones(4, 64, device="cuda"), positions, q_out=out)
graph.replay()
try:
    cuda.check_errors()
except ValueError as error:
    print(bool(out[:3].any(1).any(1).all()), error)
"""


def test_the_first_call_of_a_process_may_be_captured():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("True rotary_embedding: position_ids"), done.stdout + done.stderr


# ---- entries out of range --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [-1, -(1 << 31), 1 << 29, "first behind"])
@pytest.mark.parametrize("rows", [1, 20])
def test_attention_skips_pages_outside_the_pool_and_names_the_table(kernel, bad, rows):
    arguments = on_device(AttentionCase([100, 50], [rows, rows]).make())
    good = run(arguments, kernel)
    cuda.check_errors()
    arguments["page_table"][0, 2] = arguments["k"].shape[0] if bad == "first behind" else bad
    got = run(arguments, kernel)
    with pytest.raises(ValueError, match="attention: page_table"):
        cuda.check_errors()
    cuda.check_errors()  # the flag was cleared
    assert bool(torch.isfinite(got["out"][: 2 * rows].float()).all())
    assert same_bits(got["out"][rows : 2 * rows], good["out"][rows : 2 * rows])
    spare = next(iter(set(range(arguments["k"].shape[0])) - set(arguments["page_table"].flatten().tolist())))
    arguments["page_table"][0, 2] = spare
    for pool in (arguments["k"], arguments["v"]):
        pool[spare] = 0
    zeros = run(arguments, kernel)
    assert same_bits(got["out"], zeros["out"]) and same_bits(got["lse"], zeros["lse"]), "keys of no page are zeros"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_form", ["paged", "padded"])
@pytest.mark.parametrize("bad", [1 << 30, (1 << 31) - 1, -5, -(1 << 31)])
def test_attention_clamps_lengths_and_names_them(kernel, kv_form, bad):
    arguments = on_device(AttentionCase([100, 50], [1, 1], kv_form=kv_form).make())
    if kv_form == "paged":
        arguments["page_table"].clamp_(0, 3)
    arguments["k"].zero_()
    arguments["v"].zero_()
    arguments["kv_lengths"].copy_(torch.tensor([bad, -5]))
    got = run(arguments, kernel)
    with pytest.raises(ValueError, match="attention: kv_lengths"):
        cuda.check_errors()
    assert float(got["out"].float().abs().max()) == 0.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("operand", ["query_offsets", "kv_offsets"])
@pytest.mark.parametrize("bad", [[0, 5, 1], [-3, 1, 2], [0, 1, 1 << 30], [0, -(1 << 31), 2]])
def test_attention_leaves_out_sequences_whose_offsets_are_outside(kernel, operand, bad):
    arguments = on_device(AttentionCase([30, 20], [1, 1], kv_form="packed").make())
    run(arguments, kernel)
    cuda.check_errors()
    arguments[operand].copy_(torch.tensor(bad))
    got = run(arguments, kernel)
    with pytest.raises(ValueError, match=f"attention: {operand}"):
        cuda.check_errors()
    rows = got["out"].shape[0]
    kept = [b for b in range(2) if operand == "kv_offsets" and 0 <= bad[b] <= bad[b + 1] <= arguments["k"].shape[0]]
    left_out = [row for row in range(rows) if row not in kept]  # a sequence has one row
    assert bool((got["out"][left_out] == 0).all()) and bool((got["lse"][left_out] == float("-inf")).all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_call_with_overlapping_sequences_leaves_nothing_behind(kernel, head_dim):
    """Counters in scratch memory are zero for the next call, whatever the offsets of this one were."""
    arguments = on_device(AttentionCase([3000] * 5, [40] * 5, head_dim, num_kv_heads=1).make())
    good = run(arguments, kernel)
    offsets = arguments["query_offsets"].clone()
    for bad in ([0, 200, 0, 200, 0, 200], [0, 40, 17, 80, 60, 200], [7, 40, 80, 120, 160, 200]):
        arguments["query_offsets"].copy_(torch.tensor(bad))
        got = run(arguments, kernel)
        with pytest.raises(ValueError, match="attention: query_offsets"):
            cuda.check_errors()
        assert bool((got["out"] == 0).all()) and bool((got["lse"] == float("-inf")).all())
        arguments["query_offsets"].copy_(offsets)
        again = run(arguments, kernel)
        assert same_bits(again["out"], good["out"]) and same_bits(again["lse"], good["lse"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sequence_of_more_rows_than_tree_bits_is_left_out(kernel):
    case = AttentionCase([300, 60], [20, 40], tree=True, attributes={"causal": "none"})
    arguments = on_device(case.make())
    good = run(arguments, kernel)
    cuda.check_errors()
    arguments["tree_mask"] = arguments["tree_mask"][:, :1]  # bits of 32 rows: enough for the first sequence only
    got = run(arguments, kernel)
    with pytest.raises(ValueError, match="attention: query_offsets"):
        cuda.check_errors()
    assert same_bits(got["out"][:20], good["out"][:20])
    assert bool((got["out"][20:] == 0).all()) and bool((got["lse"][20:] == float("-inf")).all())


def test_sequences_longer_than_their_mask_are_left_out():
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
    q = torch.randn(8, 2, 64, device=DEVICE).half()
    forms = {"query_form": "packed_nhd", "kv_form": "packed_nhd", "query_lengths": offsets, "kv_lengths": offsets}
    for rows, keys, operand in ((4, 5, "query_offsets"), (5, 4, "kv_offsets")):
        mask = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE)
        ops.trt_attention(q, q, q, attn_mask=mask, **forms)
        with pytest.raises(ValueError, match=f"attention: {operand}"):
            cuda.check_errors()


def test_kv_cache_update_skips_what_does_not_fit():
    cache = torch.full((4, 2, 1, 8), 7.0, device=DEVICE, dtype=torch.float16)
    v_cache = cache.clone()
    k = torch.ones(3, 1, 8, device=DEVICE, dtype=torch.float16)
    common = {"update_offsets": torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)}
    table = torch.tensor([[0, 1], [-1, 9], [2, 3]], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([1, 0, 4], dtype=torch.int32, device=DEVICE)
    ops.kv_cache_update(cache, v_cache, k, k, write_positions=positions, page_table=table, **common)
    with pytest.raises(ValueError, match=r"kv_cache_update: write_positions.*kv_cache_update: page_table"):
        cuda.check_errors()
    expected = torch.full_like(cache, 7.0)
    expected[0, 1] = 1.0
    assert torch.equal(cache, expected) and torch.equal(v_cache, expected)


@pytest.mark.parametrize("operator", ["kv_cache_update", "qk_norm_rope_append"])
@pytest.mark.parametrize(
    ("index", "bad"), [(0, 1), (0, -1), (0, -(1 << 31)), (1, 1 << 30), (2, 80), (5, 205), (5, -(1 << 31))]
)
def test_update_offsets_that_are_no_cut_of_the_tokens_are_named(operator, index, bad):
    """They should be 0, 90, 90, 91, 201, 204."""
    for example in EXAMPLES[operator]().values():
        arguments = on_device(example)
        arguments["update_offsets"][index] = bad
        getattr(ops, operator)(**arguments)
        with pytest.raises(ValueError, match=f"{operator}: update_offsets"):
            cuda.check_errors()


def test_rotary_embedding_leaves_tokens_with_foreign_positions():
    q = torch.randn(3, 2, 16, device=DEVICE)
    table = torch.randn(4, 16, device=DEVICE)
    out = torch.full_like(q, 5.0)
    ops.rotary_embedding(q, None, table, torch.tensor([0, 4, -1], device=DEVICE), q_out=out)
    with pytest.raises(ValueError, match="rotary_embedding: position_ids"):
        cuda.check_errors()
    assert bool((out[1:] == 5.0).all()) and not bool((out[0] == 5.0).any())


# ---- size ------------------------------------------------------------------------------------------------------------


def test_offsets_past_two_to_the_31_elements():
    pages, rows, heads, width = 2**31 // (64 * 64) + 8, 1, 64, 64
    pool = torch.zeros(2, pages, rows, heads, width, dtype=torch.int8, device=DEVICE)
    k = torch.randn(2, heads, width, device=DEVICE, dtype=torch.float16)
    table = torch.tensor([[pages - 1, pages - 2]], dtype=torch.int32, device=DEVICE)
    scale = torch.tensor([1 / 32], device=DEVICE)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    common = {"page_table": table, "k_scale": scale, "v_scale": scale}
    ops.kv_cache_update(pool[0], pool[1], k, k, update_offsets=offsets, **common)
    stored = (k.float() * 32).round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(pool[0, table[0].long()][:, 0], stored)
    assert int(pool[0, : pages - 2].count_nonzero()) == 0
    lengths = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    out = ops.attention(k, pool[0], pool[1], query_offsets=offsets, kv_lengths=lengths, **common)
    assert torch.allclose(out[0].float(), stored[0].float() / 32, atol=2e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", ["lower_right", "none"])
def test_lengths_near_two_to_the_31(kernel, causal):
    """All keys lie in one page, so that a length may be any multiple of it."""
    page_size, width, rows = 1024, 2**21 - 1, 2048
    arguments = {
        "q": torch.randn(rows, 1, 64, device=DEVICE).half(),
        "k": torch.randn(1, page_size, 1, 64, device=DEVICE).half(),
        "v": torch.randn(1, page_size, 1, 64, device=DEVICE).half(),
        "query_offsets": torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
        "page_table": torch.zeros(1, width, dtype=torch.int32, device=DEVICE),
        "window": 3, "causal": causal, "return_lse": True,
    }  # fmt: skip
    got = []
    for length in (4 * page_size, width * page_size):
        arguments["kv_lengths"] = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        got.append(run(arguments, kernel))
        cuda.check_errors()
    assert torch.allclose(got[0]["out"].float(), got[1]["out"].float(), atol=2e-3)
    assert torch.allclose(got[0]["lse"], got[1]["lse"], atol=1e-4)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_combination_that_no_kernel_takes_names_itself():
    with pytest.raises(NotImplementedError, match=r"int4_groupwise_gemm: .*CUDA"):
        ops.int4_groupwise_gemm(
            torch.zeros(1, 64, device=DEVICE),
            torch.zeros(8, 512, dtype=torch.int8, device=DEVICE),
            torch.zeros(2, 1, dtype=torch.float16, device=DEVICE),
            group_size=32,
        )
    with pytest.raises(ValueError, match="is on cpu, wanted cuda:0"):
        ops.circular_pad(torch.zeros(3, device=DEVICE), [1, 1], out=torch.zeros(5))


def test_a_refusal_names_every_kernel_and_what_it_takes():
    """Of a head size beyond all of them."""
    arguments = on_device(AttentionCase([9], [1], 8192, num_kv_heads=1, group=1).make())
    with pytest.raises(NotImplementedError) as raised:
        ops.attention(**arguments)
    text = str(raised.value)
    assert text.startswith("attention: no kernel takes this call: ") and all(f"{name}: " in text for name in KERNELS)
    assert "D 8192 is not among 64" in text and "D is above 4096" in text, text
    for kernel in KERNELS:
        with pytest.raises(NotImplementedError, match=f"attention: .*{kernel}: "):
            ops.with_kernel("attention", kernel)(**arguments)


def test_library_says_what_it_is():
    assert polyop.cuda.has_kernels()
