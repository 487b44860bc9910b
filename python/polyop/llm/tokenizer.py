"""Tokenizer: text to ids and back, chat template, and text of a growing list of ids.

A folder that holds tokenizer.json is read with ``tokenizers`` and ``jinja2`` alone: importing transformers would double
the start-up time. A GGUF file, or a folder without that file, goes through transformers' AutoTokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer

from .config import read_json
from .errors import LlmError

# ---- loading -------------------------------------------------------------------------------------------------------


class Tokenizer:
    """A loaded tokenizer. Build it with ``load_tokenizer``."""

    def __init__(self, backend: BackendTokenizer, chat_template: str | None, special_tokens: dict[str, str]) -> None:
        """
        Args:
            backend: the tokenizers object.
            chat_template: Jinja source, or None when the model has none.
            special_tokens: names a template may use, for example {"bos_token": "<s>"}.
        """
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = special_tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written out in the text are recognised."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation, ending where the assistant's answer begins.

        Args:
            messages: [{"role": "system" | "user" | "assistant", "content": text}, ...].

        Raises:
            LlmError: the model has no chat template, or the template refuses the messages.
        """
        # The template writes the special tokens itself, the first one included.
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The text that ``encode_chat`` encodes."""
        if self.chat_template is None:
            raise LlmError("the model has no chat template; use --no-chat")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        # Block trimming is what the templates of Hugging Face checkpoints are written for.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, **self.special_tokens)
        except TemplateError as error:
            raise LlmError(f"chat template: {error}") from None

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model file or folder.

    Raises:
        LlmError: there is none, or it is damaged.
    """
    path = Path(path)
    if (path / "tokenizer.json").is_file():
        return _load_from_json(path)
    return _load_with_transformers(path)


def _load_from_json(folder: Path) -> Tokenizer:
    try:
        backend = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise LlmError(f"{folder / 'tokenizer.json'}: not a readable tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    settings_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if value is not None:
            special[name] = value["content"] if isinstance(value, dict) else value
    return Tokenizer(backend, template, special)


def _load_with_transformers(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        if path.is_file():
            loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        else:
            loaded = AutoTokenizer.from_pretrained(path)
        backend = loaded.backend_tokenizer
    except Exception as error:  # whatever the converter of this tokenizer type raises
        raise LlmError(f"{path}: the tokenizer cannot be read: {error}") from None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: getattr(loaded, name) for name in names if getattr(loaded, name, None)}
    template = loaded.chat_template if isinstance(loaded.chat_template, str) else None
    return Tokenizer(backend, template, special)


# ---- streaming -----------------------------------------------------------------------------------------------------

_REPLACEMENT = "�"  # what a decoder writes for bytes that do not yet form a character


class TextStream:
    """Text of a growing list of ids, released as soon as it can no longer change.

    Held back: bytes of an unfinished character, and an ending that may be the beginning of a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """
        Args:
            decode: ids to text.
            stop: strings that end the text; they are not part of it.
        """
        self._decode = decode
        self._stop = tuple(text for text in stop if text)
        self._ids: list[int] = []
        self._settled_ids = 0  # ids whose text is complete
        self._context_ids = 0  # decoding starts here, so that a token sees the one before it (leading spaces)
        self._pending = ""
        self.text = ""
        self.has_stopped = False

    def push(self, token_id: int) -> str:
        """Adds one id and returns the text that became final; sets has_stopped when a stop string is complete."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context_ids : self._settled_ids])
        after = self._decode(self._ids[self._context_ids :])
        if after.endswith(_REPLACEMENT):
            return ""
        self._context_ids, self._settled_ids = self._settled_ids, len(self._ids)
        return self._release(after[len(before) :], is_last=False)

    def finish(self) -> str:
        """Returns what was held back."""
        rest = self._decode(self._ids[self._context_ids :])
        settled = self._decode(self._ids[self._context_ids : self._settled_ids])
        return self._release(rest[len(settled) :], is_last=True)

    def _release(self, text: str, *, is_last: bool) -> str:
        if self.has_stopped:
            return ""
        self._pending += text
        found = [self._pending.find(stop) for stop in self._stop if stop in self._pending]
        if found:
            self.has_stopped = True
            ready, self._pending = self._pending[: min(found)], ""
        else:
            held = 0 if is_last else max((_overlap(self._pending, stop) for stop in self._stop), default=0)
            cut = len(self._pending) - held
            ready, self._pending = self._pending[:cut], self._pending[cut:]
        self.text += ready
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
