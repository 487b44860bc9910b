"""Attention backends by name. Names are compared without case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .interface import AttentionBackend

_BACKENDS: dict[str, type[AttentionBackend]] = {}
_ALIASES: dict[str, str] = {}


def register_attention_backend(
    name: str, *, aliases: Sequence[str] = ()
) -> Callable[[type[AttentionBackend]], type[AttentionBackend]]:
    """Class decorator that makes a backend known under a name and optional aliases; sets ``cls.name``.

    Raises:
        ValueError: a name or alias is taken; nothing has been registered then.
    """

    def register(cls: type[AttentionBackend]) -> type[AttentionBackend]:
        names = [text.lower() for text in (name, *aliases)]
        for text in names:
            if text in _BACKENDS or text in _ALIASES or names.count(text) > 1:
                raise ValueError(f"attention backend name {text!r} is taken already")
        _BACKENDS[names[0]] = cls
        _ALIASES.update(dict.fromkeys(names[1:], names[0]))
        cls.name = names[0]
        return cls

    return register


def get_attention_backend(name: str) -> type[AttentionBackend]:
    """The backend class of a name or alias.

    "vanilla" is the plain torch oracle. "fused" is this library's own, and so is "trtllm": in TensorRT-LLM that name
    is the default backend with paged cache and fused QKV input, which is fused's part here. "flashinfer" is another
    library and is not mapped to something else: it is unknown until a backend of that name is registered.

    Raises:
        ValueError: the name is unknown; the text lists what exists.
    """
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in _BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; known: {', '.join(available_attention_backends())}")
    return _BACKENDS[key]


def available_attention_backends() -> list[str]:
    """All names and aliases, sorted."""
    return sorted([*_BACKENDS, *_ALIASES])
