"""The one exception that the command line turns into a single line and exit code 2."""

from __future__ import annotations


class LlmError(Exception):
    """The user's input cannot be served: a bad file, an unknown architecture, a prompt too long, no space.

    The text is one line that names the file or option, what was found and what was wanted.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
