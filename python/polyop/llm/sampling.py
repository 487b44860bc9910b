"""Choosing the next token: greedy, temperature, top-k, top-p, with one random stream per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import LlmError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: logits are divided by it; 0 takes the likeliest token (greedy).
        top_k: only the k likeliest tokens take part; 0 takes all.
        top_p: only the likeliest tokens whose probabilities reach p together take part; 1 takes all.
        seed: of the request's own random stream; None draws one.
        stop: strings that end the text and are not part of it.
        ignore_eos: generate on after an end-of-sequence token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            LlmError: a value out of range.
        """
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0.0 < self.top_p <= 1.0, "more than 0 and at most 1"),
        }
        for name, (is_valid, wanted) in checks.items():
            if not is_valid:
                raise LlmError(f"{name} is {getattr(self, name)}; wanted {wanted}")


class Sampler:
    """Draws the tokens of one request. Its random stream belongs to the request, so batch neighbours do not matter."""

    def __init__(self, params: SamplingParams) -> None:
        """Starts the random stream at params.seed, or at a random place when that is None."""
        self._params = params
        self._generator = None
        if params.temperature > 0.0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    def sample(self, logits: torch.Tensor) -> int:
        """Picks the next token.

        Args:
            logits: f32 [V].
        """
        if self._generator is None:
            return int(logits.argmax())
        values, ids = candidates(logits, self._params)
        choice = torch.multinomial(values.softmax(dim=0), 1, generator=self._generator)
        return int(ids[choice])


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that take part in a draw; likeliest first, unless all of them do.

    Args:
        logits: f32 [V].
        params: temperature above 0, top_k, top_p.

    Returns:
        (scaled logits [C], token ids [C] i64), C at least 1.
    """
    scaled, num_tokens = logits / params.temperature, logits.shape[0]
    if params.top_k == 0 and params.top_p == 1.0:  # sorting a whole vocabulary takes milliseconds
        return scaled, torch.arange(num_tokens)
    count = min(params.top_k, num_tokens) if params.top_k else num_tokens
    values, ids = torch.topk(scaled, count)
    if params.top_p < 1.0:
        probabilities = values.softmax(dim=0)
        before = probabilities.cumsum(dim=0) - probabilities  # mass of the likelier tokens
        kept = max(int((before < params.top_p).sum()), 1)
        values, ids = values[:kept], ids[:kept]
    return values, ids
