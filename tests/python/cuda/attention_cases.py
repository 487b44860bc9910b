"""Random attention calls with NaN in all that must not be read, their error bound, and the check of every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from device_memory import DeviceGuarded, kernels_of, on_device, same_bits

from polyop import cuda, ops
from polyop.testing import UNIT_ROUNDOFF, assert_within_bound, output_bound
from polyop.testing.inputs import NO_PAGE, offsets_of, poison
from polyop.testing.sweep import Guarded

U32 = UNIT_ROUNDOFF[torch.float32]
BYTE_DTYPES = (torch.float8_e4m3fn, torch.int8)
KERNELS = kernels_of("attention")
GAP = 16  # elements of sentinels between two rows of out and of lse: aligned heads for every dtype

Outputs = dict[str, torch.Tensor]


def poisoned_behind(tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """The same values with one more slice of poison behind them in memory, outside the view."""
    size = tensor.shape[axis]
    shape = [*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :]]
    behind = (
        torch.full(shape, NO_PAGE, dtype=tensor.dtype) if tensor.dtype == torch.int32 else poison(shape, tensor.dtype)
    )
    return torch.cat([tensor, behind], axis).narrow(axis, 0, size)


@dataclass
class AttentionCase:
    """What to draw. ``kv_form``: paged, packed or padded; lengths are those of the keys, queries of the rows.

    ``spare`` False: every operand ends with its last used row, page or entry (a completely full cache). What lies
    behind an operand's end is poison too.
    """

    lengths: list[int]
    queries: list[int]
    head_dim: int = 128
    value_head_dim: int | None = None
    num_kv_heads: int = 2
    group: int = 4
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    kv_form: str = "paged"
    query_form: str = "packed"
    tree: bool = False
    sinks: bool = False
    scale_per_head: bool = False
    fp8_out: bool = False
    spare: bool = True
    seed: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def value_width(self) -> int:
        return self.value_head_dim or self.head_dim

    def make(self) -> dict[str, Any]:
        """Keyword arguments on the CPU; return_lse is on."""
        g = torch.Generator().manual_seed(self.seed)
        num_heads = self.num_kv_heads * self.group
        batch, total = len(self.lengths), sum(self.queries)
        kv_dtype = self.kv_dtype or self.dtype
        a: dict[str, Any] = {"query_form": self.query_form, "kv_form": self.kv_form, "return_lse": True}
        if self.query_form == "packed":
            a["q"] = torch.randn(total + 2 * self.spare, num_heads, self.head_dim, generator=g).to(self.dtype)
            a["q"][total:] = float("nan")  # rows of nobody
            a["query_offsets"] = offsets_of(self.queries)
        else:
            a["q"] = torch.randn(batch, max(self.queries), num_heads, self.head_dim, generator=g).to(self.dtype)
        a |= self._keys(g, kv_dtype)
        if self.kv_form != "packed":
            a["kv_lengths"] = torch.tensor(self.lengths, dtype=torch.int32)
        if self.tree:
            rows = a["q"].shape[0] if self.query_form == "packed" else batch * max(self.queries)
            words = -(-max(self.queries) // 32)
            a["tree_mask"] = torch.randint(-(2**31), 2**31, (rows, words), generator=g).to(torch.int32)
        if self.sinks:
            a["sinks"] = torch.randn(num_heads, generator=g)
        if kv_dtype in BYTE_DTYPES:
            heads = self.num_kv_heads if self.scale_per_head else 1
            factor = 1 / 40 if kv_dtype == torch.int8 else 1.0
            a["k_scale"] = (torch.rand(heads, generator=g) + 0.5) * factor
            a["v_scale"] = (torch.rand(heads, generator=g) + 0.5) * factor
        if self.fp8_out:
            a["output_scale"] = torch.tensor([0.25])
        for name in ("q", "query_offsets", "kv_lengths", "kv_offsets", "tree_mask", "sinks"):
            if name in a:
                a[name] = poisoned_behind(a[name])
        return {**a, **self.attributes}

    def _keys(self, g: torch.Generator, kv_dtype: torch.dtype) -> dict[str, Any]:
        """k and v, with page_table or kv_offsets. Of one width they are planes of one pool: equal strides."""
        widths = (self.head_dim, self.value_width)
        widest = max(widths)

        def values(rows: int) -> torch.Tensor:
            data = torch.randn(rows, self.num_kv_heads, widest, generator=g)
            if kv_dtype == torch.int8:
                return (data * 40).round().clamp(-128, 127).to(torch.int8)
            return data.to(kv_dtype)

        sequences = [(values(n), values(n)) for n in self.lengths]
        heads = (self.num_kv_heads, widest)
        batch, extra = len(self.lengths), {}
        if self.kv_form == "paged":
            pages_of = [-(-n // self.page_size) for n in self.lengths]
            num_pages = sum(pages_of) + 3 * self.spare
            order = torch.randperm(num_pages, generator=g).tolist()
            pool = poison((2, num_pages, self.page_size, *heads), kv_dtype)
            # What must not be read: no page, a negative id, a page of nobody.
            unused = torch.tensor([NO_PAGE, -1, order[-1]], dtype=torch.int32)
            table = unused.repeat(batch, max([*pages_of, 1]) // 3 + 2)[:, : max([*pages_of, 1]) + 2 * self.spare]
            next_page = iter(order)
            for b, planes in enumerate(sequences):
                for column in range(pages_of[b]):
                    page = next(next_page)
                    table[b, column] = page
                    first = column * self.page_size
                    last = min(self.lengths[b], first + self.page_size)
                    for plane in range(2):
                        pool[plane, page, : last - first] = planes[plane][first:last]
            extra["page_table"] = poisoned_behind(table, 1)
        elif self.kv_form == "packed":
            spare = poison((3 * self.spare, *heads), kv_dtype)
            pool = torch.stack([torch.cat([*(s[plane] for s in sequences), spare]) for plane in range(2)])
            extra["kv_offsets"] = offsets_of(self.lengths)
        else:
            pool = poison((2, batch, max(self.lengths) + 5 * self.spare, *heads), kv_dtype)
            for b, planes in enumerate(sequences):
                for plane in range(2):
                    pool[plane, b, : self.lengths[b]] = planes[plane]
        axis = 2 if self.kv_form == "padded" else 1
        if self.value_width == self.head_dim:
            k, v = poisoned_behind(pool, axis)
        else:
            k, v = (poisoned_behind(pool[i : i + 1, ..., :width], axis)[0] for i, width in enumerate(widths))
        return {"k": k, "v": v, **extra}


def out_shape(arguments: dict[str, Any]) -> tuple[int, ...]:
    return (*arguments["q"].shape[:-1], arguments["v"].shape[-1])


def outputs_of(arguments: dict[str, Any], fp8: bool, device: str) -> Outputs:
    """Poisoned out and lse."""
    shape = out_shape(arguments)
    out = poison(shape, torch.float8_e4m3fn if fp8 else arguments["q"].dtype)
    return {"out": out.to(device), "lse": torch.full(shape[:-1], float("nan"), device=device)}


def bounds(arguments: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of out and lse: rounded weights err by u each; a score by (D + 8) u32 of its largest value."""

    def largest(name: str) -> float:
        tensor = arguments.get(name)
        return 1.0 if tensor is None else tensor.double().abs().nan_to_num(nan=0.0).max().item()

    q, k = arguments["q"], arguments["k"]
    width = q.shape[-1]
    weight_dtype = torch.float16 if k.dtype in BYTE_DTYPES else q.dtype
    if k.dtype == torch.int8:
        k_most = v_most = 128.0
    else:
        k_most, v_most = largest("k"), largest("v")
    score = width**-0.5 * width * largest("q") * k_most * largest("k_scale")
    value = v_most * largest("v_scale") / (largest("output_scale") if "output_scale" in arguments else 1.0)
    length = 1 + int(k.shape[0] * k.shape[1])
    relative = UNIT_ROUNDOFF[weight_dtype] + 4 * (width + 8) * U32 * score + (length + 64) * U32
    return output_bound(out, out.dtype, relative * value), output_bound(
        lse, torch.float32, 2 * (width + 8) * U32 * score + (length + 64) * U32
    )


def run_guarded(function: Callable[..., Any], arguments: dict[str, Any], fp8: bool) -> Outputs:
    """The results of a call on the GPU: what lies around them keeps its bytes, and so do all operands."""
    shape = out_shape(arguments)
    guarded = {
        "out": Guarded.empty(shape, torch.float8_e4m3fn if fp8 else arguments["q"].dtype, GAP),
        "lse": Guarded.empty(shape[:-1], torch.float32, GAP),
    }
    for written in guarded.values():
        written.tensor.copy_(poison(written.tensor.shape, written.tensor.dtype))
    moved = on_device(arguments)
    on_gpu = {name: DeviceGuarded(written) for name, written in guarded.items()}
    function(**moved, **{name: written.tensor for name, written in on_gpu.items()})
    for name, written in on_gpu.items():
        written.fetch().assert_surroundings_intact(name)
    for name, tensor in moved.items():
        if isinstance(tensor, torch.Tensor):
            assert same_bits(tensor.cpu(), arguments[name]), f"{name} was written"
    return {name: written.tensor for name, written in guarded.items()}


def check_every_kernel(case: AttentionCase, arguments: dict[str, Any] | None = None) -> None:
    """Every kernel that takes the case within its bound of the double reference, twice with the same bits; the call
    without a kernel's name gives those of the first."""
    arguments = case.make() if arguments is None else arguments
    expected = outputs_of(arguments, case.fp8_out, "cpu")
    ops.with_kernel("attention", "reference")(**arguments, **expected)
    limits = dict(zip(("out", "lse"), bounds(arguments, expected["out"], expected["lse"]), strict=True))
    first: Outputs | None = None
    for kernel in KERNELS:
        function = ops.with_kernel("attention", kernel)
        try:
            got = run_guarded(function, arguments, case.fp8_out)
        except NotImplementedError:
            continue
        cuda.check_errors()
        for name, result in got.items():
            assert_within_bound(result, expected[name], limits[name], f"{kernel} {case}: {name}")
        again = run_guarded(function, arguments, case.fp8_out)
        assert all(same_bits(again[name], got[name]) for name in got), f"{kernel} {case}: other bits the second time"
        first = first or got
    assert first is not None, f"no kernel takes {case}"
    chosen = run_guarded(ops.attention, arguments, case.fp8_out)
    assert all(same_bits(chosen[name], first[name]) for name in first), f"{case}: not the first kernel that takes it"
