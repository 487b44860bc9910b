"""The CUDA kernels beside torch, cuDNN and FlashInfer in one process; see README.md for how it is measured.

Usage: gpu_kernels.py [--output results.json] [--profile attention]     (--profile runs one case ten times, for ncu)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator

import torch
from gpu_common import Measurement, Timer, clocks, environment, require_close, to_json
from shapes_file import describe, read_shapes
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyop import cuda, ops

BF16 = torch.bfloat16
KV_DTYPES = {"16bit": BF16, "f8e4m3": torch.float8_e4m3fn, "i8": torch.int8}


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_functions(case: dict, with_peers: bool = True) -> tuple[dict[str, Callable[[], object]], int]:
    """Ours and the peers on the same numbers; results are compared before they are returned."""
    batch, length, rows = case["B"], case["length"], case["rows"]
    heads, kv_heads, width = case["Hq"], case["Hkv"], case["D"]
    kv_dtype = KV_DTYPES[case["kv"]]
    page = case["page"] or 64
    pages_each = -(-length // page)
    q = torch.randn(batch * rows, heads, width, device="cuda", dtype=BF16)
    pool = torch.randn(2, batch * pages_each, page, kv_heads, width, device="cuda", dtype=BF16)
    scale = None
    if kv_dtype != BF16:
        factor = 32.0 if kv_dtype == torch.int8 else 1.0
        pool = (pool * factor).clamp(-127, 127).to(kv_dtype)
        scale = torch.tensor([1 / factor], device="cuda")
    offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * rows
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    common = {"query_offsets": offsets, "kv_lengths": lengths, "k_scale": scale, "v_scale": scale, "out": out}
    if case["page"]:
        table = torch.randperm(batch * pages_each, device="cuda").to(torch.int32).view(batch, pages_each)
        common |= {"page_table": table}
        k, v = pool[0], pool[1]
    else:
        table = torch.arange(batch * pages_each, device="cuda").view(batch, pages_each)
        k, v = (plane.view(batch, length, kv_heads, width) for plane in pool)
        common |= {"kv_form": "padded"}
    functions: dict[str, Callable[[], object]] = {"polyop": lambda: ops.attention(q, k, v, **common)}

    factor = 1.0 if scale is None else float(scale)
    dense_k, dense_v = (plane[table.long()].flatten(1, 2).to(BF16) * factor for plane in pool)
    padded_q = q.view(batch, rows, heads, width).transpose(1, 2)

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                padded_q, dense_k.transpose(1, 2), dense_v.transpose(1, 2), enable_gqa=True
            )

    functions["polyop"]()
    if rows == 1:
        wanted = torch.stack(  # a few sequences are enough, and f32 copies of all would not be
            [
                torch.nn.functional.scaled_dot_product_attention(
                    padded_q[b].float(),
                    dense_k[b].transpose(0, 1).float(),
                    dense_v[b].transpose(0, 1).float(),
                    enable_gqa=True,
                )
                for b in range(min(batch, 4))
            ]
        )
        got = out.view(batch, rows, heads, width).transpose(1, 2)[: min(batch, 4)]
        require_close(describe(case), got, wanted, 1e-2)
    if with_peers and rows == 1 and case["kv"] == "16bit" and not case["page"]:
        functions["cuDNN"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
        functions["torch flash"] = lambda: sdpa(SDPBackend.FLASH_ATTENTION)
    if with_peers and case["page"] and rows == 1 and kv_dtype != torch.int8:
        add_flashinfer(functions, case, q, pool, table, out)
    moved = (2 * batch * length * kv_heads * width) * pool.element_size() + 2 * q.numel() * 2
    return functions, moved


def add_flashinfer(functions, case, q, pool, table, ours) -> None:
    try:
        import flashinfer
    except Exception:
        return
    batch, page, pages_each = case["B"], case["page"], table.shape[1]
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages_each
    last = torch.full((batch,), case["length"] - (pages_each - 1) * page, dtype=torch.int32, device="cuda")
    kinds = {"q_data_type": q.dtype, "kv_data_type": pool.dtype}
    try:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=table.flatten().clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        wrapper.plan(indptr.cpu(), table.flatten(), last.cpu(), case["Hq"], case["Hkv"], case["D"], page, **kinds)
        target = torch.empty_like(q)
        run = lambda: wrapper.run(q, (pool[0], pool[1]), out=target)  # noqa: E731
        run()
        torch.cuda.synchronize()
        require_close(f"{describe(case)} against FlashInfer", ours, target, 2e-2)
        functions["FlashInfer"] = run
    except SystemExit:
        raise
    except Exception as error:  # a peer that refuses a case is not a failure of ours
        print(f"FlashInfer refuses {describe(case)}: {type(error).__name__} {str(error)[:200]}")


def measure_attention(timer: Timer) -> Iterator[Measurement]:
    for case in read_shapes("gpu_attention"):
        functions, moved = attention_functions(case)
        yield Measurement("attention", describe(case), moved, timer.time(functions, moved))
        del functions
        torch.cuda.empty_cache()


# ---- the copies: circular_pad, kv_cache_update, rotary_embedding, qk_norm_rope_append --------------------------------


def measure_circular_pad(timer: Timer) -> Iterator[Measurement]:
    for shape, pads, dtype in [
        ((8, 64, 512, 512), [1, 1, 2, 0], torch.float32),
        ((8, 64, 512, 512), [8, 8, 8, 8], torch.float16),
        ((64, 3, 1024, 1024), [3, 3, 3, 3], torch.uint8),
        ((1, 64, 56, 56), [1, 1, 1, 1], torch.float32),
    ]:
        x = (torch.randn(shape, device="cuda") * 50).to(dtype)
        out = ops.circular_pad(x, pads)
        functions: dict[str, Callable[[], object]] = {
            "polyop": lambda x=x, pads=pads, out=out: ops.circular_pad(x, pads, out=out)
        }
        if dtype.is_floating_point:
            functions["torch"] = lambda x=x, pads=pads: torch.nn.functional.pad(x, pads, mode="circular")
            if not torch.equal(functions["torch"](), out):
                raise SystemExit(f"circular_pad {shape}: differs from torch")
        moved = (x.numel() + out.numel()) * x.element_size()
        case = f"{'x'.join(map(str, shape))} pad={pads} {str(dtype).removeprefix('torch.')}"
        yield Measurement("circular_pad", case, moved, timer.time(functions, moved))


def measure_kv_cache_update(timer: Timer) -> Iterator[Measurement]:
    for tokens, batch, kv_dtype in [
        (64, 64, BF16),
        (4096, 4, BF16),
        (65536, 16, BF16),
        (65536, 16, torch.float8_e4m3fn),
        (65536, 16, torch.int8),
    ]:
        heads, width, page = 8, 128, 16
        each = tokens // batch
        k, v = torch.randn(2, tokens, heads, width, device="cuda", dtype=BF16).unbind()
        pages_each = -(-each // page) + 1
        pool = torch.zeros(2, batch * pages_each, page, heads, width, device="cuda").to(kv_dtype)
        table = torch.randperm(batch * pages_each, device="cuda").to(torch.int32).view(batch, pages_each)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * each
        positions = torch.full((batch,), 3, dtype=torch.int32, device="cuda")
        at = 3 + torch.arange(each, device="cuda")
        pages, slots = table.long()[:, at // page].flatten(), (at % page).repeat(batch)

        def ours(pool=pool, k=k, v=v, offsets=offsets, positions=positions, table=table):
            ops.kv_cache_update(
                pool[0], pool[1], k, v, update_offsets=offsets, write_positions=positions, page_table=table
            )

        functions: dict[str, Callable[[], object]] = {"polyop": ours}
        ours()
        if kv_dtype != torch.int8 and not torch.equal(pool[0][pages, slots].float(), k.to(kv_dtype).float()):
            raise SystemExit("kv_cache_update: the cache does not hold the keys")
        if kv_dtype == BF16:
            other = pool.clone()

            def assign(pool=other, k=k, v=v, pages=pages, slots=slots):
                pool[0].index_put_((pages, slots), k)
                pool[1].index_put_((pages, slots), v)

            functions["torch index_put"] = assign
        moved = 2 * k.numel() * (2 + pool.element_size())
        case = f"T={tokens} B={batch} Hkv={heads} D={width} page={page} {str(kv_dtype).removeprefix('torch.')}"
        yield Measurement("kv_cache_update", case, moved, timer.time(functions, moved))


def measure_rotary_embedding(timer: Timer) -> Iterator[Measurement]:
    for tokens in (1, 64, 4096, 65536):
        q = torch.randn(tokens, 32, 128, device="cuda", dtype=BF16)
        k = torch.randn(tokens, 8, 128, device="cuda", dtype=BF16)
        angles = torch.arange(tokens, device="cuda")[:, None] * 10000.0 ** (-torch.arange(64, device="cuda") / 64)
        table = torch.cat([angles.cos(), angles.sin()], 1)
        positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)

        def ours(q=q, k=k, table=table, positions=positions, q_out=q_out, k_out=k_out):
            ops.rotary_embedding(q, k, table, positions, q_out=q_out, k_out=k_out)

        ours()
        c, s = (part[:, None] for part in table.chunk(2, 1))
        x1, x2 = k.float().chunk(2, -1)
        require_close("rotary_embedding", k_out, torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1), 1e-2)
        moved = 2 * (q.numel() + k.numel()) * 2
        yield Measurement(
            "rotary_embedding", f"T={tokens} Hq=32 Hkv=8 D=128 bfloat16", moved, timer.time({"polyop": ours}, moved)
        )


def measure_qk_norm_rope_append(timer: Timer) -> Iterator[Measurement]:
    """Rotation and append in one launch, beside the two calls that it joins."""
    heads, kv_heads, width, page = 32, 8, 128, 16
    for tokens, batch in [(1, 1), (64, 64), (4096, 4), (65536, 16)]:
        each = tokens // batch
        q = torch.randn(tokens, heads, width, device="cuda", dtype=BF16)
        k, v = torch.randn(2, tokens, kv_heads, width, device="cuda", dtype=BF16).unbind()
        pages_each = -(-each // page) + 1
        joined = torch.zeros(2, batch * pages_each, page, kv_heads, width, device="cuda", dtype=BF16)
        apart = torch.zeros_like(joined)
        table = torch.randperm(batch * pages_each, device="cuda").to(torch.int32).view(batch, pages_each)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * each
        start = torch.full((batch,), 3, dtype=torch.int32, device="cuda")
        positions = (3 + torch.arange(each, device="cuda", dtype=torch.int32)).repeat(batch)
        angles = torch.arange(each + 3, device="cuda")[:, None] * 10000.0 ** (-torch.arange(64, device="cuda") / 64)
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        q_out, q_apart, k_apart = torch.empty_like(q), torch.empty_like(q), torch.empty_like(k)
        place = {"page_table": table, "write_positions": start}

        def ours(q=q, k=k, v=v, cache=joined, cos_sin=cos_sin, offsets=offsets, place=place, q_out=q_out):
            ops.qk_norm_rope_append(q, k, v, cache[0], cache[1], cos_sin, offsets, **place, q_out=q_out)

        def two_calls(
            q=q, k=k, v=v, cache=apart, cos_sin=cos_sin, ids=positions, offsets=offsets, place=place,
            q_out=q_apart, k_out=k_apart,
        ):  # fmt: skip
            ops.rotary_embedding(q, k, cos_sin, ids, q_out=q_out, k_out=k_out)
            ops.kv_cache_update(cache[0], cache[1], k_out, v, update_offsets=offsets, **place)

        ours()
        two_calls()
        require_close("qk_norm_rope_append: q", q_out, q_apart, 1e-2)
        require_close("qk_norm_rope_append: cache", joined, apart, 1e-2)
        moved = 2 * (q.numel() + k.numel() + v.numel()) * 2
        case = f"T={tokens} B={batch} Hq={heads} Hkv={kv_heads} D={width} page={page} bfloat16"
        times = timer.time({"polyop": ours, "two calls": two_calls}, moved)
        yield Measurement("qk_norm_rope_append", case, moved, times)


# ---- main ------------------------------------------------------------------------------------------------------------


def show(m: Measurement) -> None:
    rates = "  ".join(f"{n} {t:.1f} us {m.bytes_moved / t / 1e6:.2f} TB/s" for n, t in m.microseconds.items())
    print(f"{m.operator} {m.case}: {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--profile")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.profile == "attention":
        case = next(c for c in read_shapes("gpu_attention") if c["B"] == 64 and c["page"] == 16)
        functions, _ = attention_functions(case, with_peers=False)
        for _ in range(10):
            functions["polyop"]()
        torch.cuda.synchronize()
        return
    timer = Timer()
    report = {"environment": environment(), "clocks_before": clocks(), "copy_bandwidth": timer.copy_bandwidth()}
    print(f"copy {report['copy_bandwidth'] / 1e12:.2f} TB/s", flush=True)
    measurements: list[Measurement] = []
    for measure in (
        measure_circular_pad,
        measure_kv_cache_update,
        measure_rotary_embedding,
        measure_qk_norm_rope_append,
        measure_attention,
    ):
        for measurement in measure(timer):
            measurements.append(measurement)
            show(measurement)
            if arguments.output:  # written after every case: a run that is cut off keeps what it has
                done = report | {"clocks_after": clocks(), "measurements": to_json(measurements)}
                with open(arguments.output, "w", encoding="utf-8") as file:
                    json.dump(done, file, indent=1)
    cuda.check_errors()


if __name__ == "__main__":
    main()
