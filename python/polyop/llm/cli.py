"""The command ``polyop``: quantize, run, perplexity.

Errors of the user's input are one line on standard error and exit code 2. Heavy imports stand inside the commands, so
that help and errors of usage appear at once, and so that thread counts are set before the libraries read them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..onnx.command import check_command
from .errors import LlmError

EXIT_BAD_INPUT = 2
_UsageError = typer.BadParameter.__base__  # of the click that typer carries or depends on
_EXIT_INTERRUPTED = 130  # what shells report for SIGINT

app = typer.Typer(
    name="polyop",
    help="Quantize and run language models through polyop's own operators.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class DtypeName(str, Enum):
    """Values of --dtype."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"


class BackendName(str, Enum):
    """Values of --attn-backend."""

    fused = "fused"
    vanilla = "vanilla"


ModelArgument = Annotated[Path, typer.Argument(help="GGUF file, Hugging Face folder, or folder made by quantize.")]
DtypeOption = Annotated[DtypeName, typer.Option(help="Activations, KV cache and weights that are not INT4.")]
BackendOption = Annotated[BackendName, typer.Option(help="Attention: this library's kernels, or plain torch.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads.  [default: all]")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: None takes sys.argv.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = app(arguments, prog_name="polyop", standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except LlmError as error:
        message = str(error)
    except _UsageError as error:
        message = " ".join(error.format_message().split())
    except OSError as error:  # files of the user are reported by LlmError: this is our own output
        _drop_output()
        if isinstance(error, BrokenPipeError):  # its reader has seen enough
            return 1
        message = f"the output cannot be written: {error.strerror}"
    except (KeyboardInterrupt, typer.Abort):
        return _EXIT_INTERRUPTED
    print(f"polyop: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _drop_output() -> None:
    """Points standard output at nothing, so that what is still buffered does not fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- quantize ------------------------------------------------------------------------------------------------------


@app.command()
def quantize(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.")],
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128.")] = 128,
    threads: ThreadsOption = None,
) -> None:
    """Quantize a model's linear layers to INT4 (round to nearest, clip search for each group)."""
    _set_threads(threads)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from .quantize import quantize_model

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        quantize_model(
            model,
            output,
            group_size,
            lambda done, total: progress.update(task, description="quantizing", completed=done, total=total),
        )
    from .statistics import format_bytes

    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"{output}: INT4, group size {group_size}, {format_bytes(size)}")


# ---- run -----------------------------------------------------------------------------------------------------------


@app.command()
def run(
    model: ModelArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="One or more prompts.")] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A further prompt.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts, one to a line; - reads standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 draws from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of each prompt's random stream.  [default: random]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the model's chat template.  [default: if there is one]"),
    ] = None,
    attn_backend: BackendOption = BackendName.fused,
    dtype: DtypeOption = DtypeName.f32,
    max_batch: Annotated[int, typer.Option(min=1, help="Most sequences in one step.")] = 8,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of the KV cache.")] = 16,
    num_pages: Annotated[
        int | None, typer.Option(min=1, help="Pages of the KV cache.  [default: what the prompts need]")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest sequence, prompt and output.  [default: the model's context]")
    ] = None,
    threads: ThreadsOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Generate text for one or more prompts in one batch, and print speed and memory."""
    texts = _read_prompts([*(prompts or []), *(prompt or [])], prompt_file)
    _set_threads(threads)
    from .engine import Engine
    from .loading import DTYPES, load_model
    from .sampling import SamplingParams
    from .tokenizer import load_tokenizer

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    loaded = load_model(model, DTYPES[dtype.value], attn_backend=attn_backend.value, max_seq_len=max_seq_len)
    tokenizer = load_tokenizer(model)
    use_chat = tokenizer.chat_template is not None if chat is None else chat
    prompt_ids = [
        tokenizer.encode_chat([{"role": "user", "content": text}]) if use_chat else tokenizer.encode(text)
        for text in texts
    ]
    if num_pages is None:
        longest = sorted((min(len(ids) + max_new_tokens, loaded.max_seq_len) for ids in prompt_ids), reverse=True)
        num_pages = sum(-(-length // page_size) for length in longest[:max_batch])
    engine = Engine(loaded, tokenizer, max_batch=max_batch, page_size=page_size, num_pages=num_pages)
    printer = _OrderedPrinter(texts, is_silent=json_output)
    requests = [engine.submit(ids, params, printer.writer(i)) for i, ids in enumerate(prompt_ids)]
    printer.start()
    while engine.has_work():
        for request in engine.step():
            printer.finish(request.request_id)
    if json_output:
        outputs = [
            {
                "prompt": text,
                "text": request.text,
                "prompt_tokens": len(request.prompt_ids),
                "output_ids": request.output_ids,
                "finish_reason": request.finish_reason,
            }
            for text, request in zip(texts, requests, strict=True)
        ]
        print(json.dumps({"outputs": outputs, "statistics": engine.statistics.to_dict()}, ensure_ascii=False, indent=2))
    else:
        print(f"\n{engine.statistics.to_text()}")


def _read_prompts(texts: list[str], prompt_file: str | None) -> list[str]:
    """Prompts of the arguments, then those of the file, one to a line; empty lines are skipped."""
    if prompt_file == "-":
        texts += sys.stdin.read().splitlines()
    elif prompt_file is not None:
        texts += _read_text(Path(prompt_file)).splitlines()
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise LlmError("no prompt: give one as an argument, with --prompt or with --prompt-file")
    return texts


class _OrderedPrinter:
    """Prints the outputs of a batch one after the other: the first unfinished one live, the others when it ends."""

    def __init__(self, prompts: Sequence[str], *, is_silent: bool) -> None:
        self._prompts, self._is_silent = prompts, is_silent
        self._held = [""] * len(prompts)
        self._finished = [False] * len(prompts)
        self._live = -1

    def start(self) -> None:
        """Begins the first output."""
        self._advance()

    def writer(self, index: int) -> Callable[[str], None]:
        """The text callback of one prompt."""
        return lambda text: self._write(index, text)

    def finish(self, index: int) -> None:
        """Ends one output."""
        self._finished[index] = True
        while self._live < len(self._prompts) and self._finished[self._live]:
            self._advance()

    def _advance(self) -> None:
        """Ends the live output and begins the next one with its prompt and what it has so far."""
        self._live += 1
        if self._is_silent or self._live >= len(self._prompts):
            return
        gap = "\n\n" if self._live else ""
        print(f"{gap}[{self._live + 1}] {self._prompts[self._live]}\n{self._held[self._live]}", end="", flush=True)

    def _write(self, index: int, text: str) -> None:
        if self._is_silent:
            return
        if index == self._live:
            print(text, end="", flush=True)
        else:
            self._held[index] += text


# ---- perplexity ----------------------------------------------------------------------------------------------------


@app.command()
def perplexity(
    model: ModelArgument,
    text: Annotated[Path, typer.Option(help="Text file to score.")],
    window: Annotated[int, typer.Option(min=2, help="Tokens that are read together.")] = 512,
    attn_backend: BackendOption = BackendName.fused,
    dtype: DtypeOption = DtypeName.f32,
    threads: ThreadsOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Print a model's perplexity on a text."""
    content = _read_text(text)
    _set_threads(threads)
    from .loading import DTYPES, load_model
    from .perplexity import compute_perplexity
    from .tokenizer import load_tokenizer

    loaded = load_model(model, DTYPES[dtype.value], attn_backend=attn_backend.value)
    token_ids = load_tokenizer(model).encode(content)
    window = min(window, loaded.max_seq_len)
    value = compute_perplexity(loaded, token_ids, window=window)
    if json_output:
        print(json.dumps({"perplexity": value, "tokens": len(token_ids), "window": window}))
    else:
        print(f"perplexity {value:.4f} over {len(token_ids)} tokens in windows of {window}")


app.command("check")(check_command)

# --------------------------------------------------------------------------------------------------------------------


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise LlmError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LlmError(f"{file}: not a UTF-8 text") from None


def _set_threads(threads: int | None) -> None:
    """Gives torch and polyop the same number of threads; must run before polyop's library is loaded."""
    if threads is not None:
        os.environ["POLYOP_NUM_THREADS"] = str(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


if __name__ == "__main__":
    sys.exit(main())
