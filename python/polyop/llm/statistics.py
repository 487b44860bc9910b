"""Figures of a run: speed, bytes, peak memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(kw_only=True)
class Statistics:
    """What ``polyop run`` prints at the end.

    A step that holds prompt tokens counts as prefill with its whole time; decode_tokens are those of the other steps.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    generated_tokens: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second, 0 when there was none."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second over all sequences of the batch, 0 when no step was a pure decode step."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, float]:
        """All figures by name."""
        return asdict(self) | {
            "peak_memory_bytes": peak_memory_bytes(),
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }

    def to_text(self) -> str:
        """All figures in five lines for people."""
        return (
            f"prefill  {self.prefill_tokens_per_second:8.1f} tokens/s  "
            f"({self.prefill_tokens} tokens in {self.prefill_seconds:.2f} s)\n"
            f"decode   {self.decode_tokens_per_second:8.1f} tokens/s  "
            f"({self.decode_tokens} tokens in {self.decode_seconds:.2f} s)\n"
            f"weights  {format_bytes(self.weight_bytes)}\n"
            f"KV cache {format_bytes(self.kv_bytes)}\n"
            f"peak memory {format_bytes(peak_memory_bytes())}"
        )


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far (VmHWM; unlike getrusage it starts afresh with each program)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def format_bytes(count: int) -> str:
    """A size in MiB, for people."""
    return f"{count / 2**20:.1f} MiB"
