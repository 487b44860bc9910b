"""Prints the requirements of pyproject.toml, one a line: the dependencies, then those of the extras given."""

from __future__ import annotations

import re
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10: pip carries the same parser
    from pip._vendor import tomli as tomllib


def collect(project: dict, extras: list[str]) -> list[str]:
    """Requirements in order of appearance; an extra of the project itself is replaced by its content."""
    own_extra = re.compile(rf"{project['name']}\[([\w,]+)\]")
    found = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            own = own_extra.fullmatch(requirement)
            found += collect(project, own[1].split(",")) if own else [requirement]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    print("\n".join(collect(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"], sys.argv[1:])))
