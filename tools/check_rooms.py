"""Checks the tree against the rooms table of ARCHITECTURE.md and a few rules of the house. Prints one line per fault.

The table has one row per room. Read from a row, by its back-quoted words:

- column 1: the folder. ``<op>`` stands for any one folder name; the longest matching room owns a file.
- column 3: what its files may include or import beside the standard library and their own folder: folders of this tree
  (``polyop/core``, ``polyop.ops``), and outside packages by the first part of an include path or module name.
- column 4: words that may not stand in the code (comments do not count). The phrase "operator names" forbids the names
  of all folders below polyop/ops, in snake_case and CamelCase; a file called outside_names.* is the exception.

The rules for every file: no more than 800 lines, no path of somebody's machine, no name with a leading underscore taken
from another room; and a README.md in every folder with three files or more.

Usage: check_rooms.py [root]        exit code 1 when a fault was found
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CPP_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
TEXT_SUFFIXES = (*CPP_SUFFIXES, ".py", ".pyi", ".md", ".sh", ".cmake", ".toml", ".json", ".txt", ".in", "")
COUNTED_SUFFIXES = (*CPP_SUFFIXES, ".py", ".pyi", ".md", ".sh", ".cmake")
MAX_LINES = 800
MAX_FILES_WITHOUT_README = 2
MACHINE_PATH = re.compile(r"(?<![\w.~$}>-])/(?:work|root|home)/[\w.]")
C_HEADERS = {"assert.h", "errno.h", "math.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"}
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__"}


@dataclass(frozen=True)
class Room:
    """One row of the table."""

    folder: str
    allowed: tuple[str, ...]
    forbidden_words: tuple[str, ...]
    forbids_operator_names: bool

    def match(self, path: PurePosixPath) -> dict[str, str] | None:
        """What ``<op>`` stands for when ``path`` lies in this room, else None."""
        pattern = re.escape(self.folder).replace("<op>", r"(?P<op>\w+)")
        found = re.match(pattern + "/", str(path))
        return found.groupdict() if found else None


def read_rooms(text: str) -> list[Room]:
    """The rooms table of ARCHITECTURE.md: the first table whose first heading is "room"."""
    rooms = []
    in_table = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            if in_table:
                break
            continue
        if cells[0] == "room":
            in_table = True
        elif in_table and len(cells) == 4 and "`" in cells[0]:
            quoted = [tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells]
            rooms += [Room(folder, quoted[2], quoted[3], "operator names" in cells[3]) for folder in quoted[0]]
    return rooms


def list_files(root: Path) -> list[PurePosixPath]:
    """The files git tracks or would track; every file where there is no git."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return sorted(PurePosixPath(name) for name in set(names) if (root / name).is_file())
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(PurePosixPath(path) for path in found if not SKIPPED_FOLDERS & set(path.parts))


def strip_cpp_comments(text: str) -> str:
    """C++ source with comments blanked and line numbers kept; string literals stay."""
    token = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    return token.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)


def strip_python_comments(text: str) -> str:
    """Python source with comments and docstrings blanked and line numbers kept."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    return "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in lines)


def cpp_dependencies(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, path, is standard header) of each #include."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r'\s*#\s*include\s*[<"]([^">]+)[">]', line)
        if found:
            path = found[1]
            is_standard = path in C_HEADERS or ("/" not in path and "." not in path)
            yield number, path, is_standard


def python_dependencies(text: str, package: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(line, absolute module, names taken from it) of each import; ``package`` is the package the file lies in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield node.lineno, module, tuple(alias.name for alias in node.names)


def is_below(name: str, folder: str, separator: str) -> bool:
    return name == folder or name.startswith(folder + separator)


class Checker:
    """Collects the faults of one tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults: list[str] = []
        self.files = list_files(root)
        self.rooms = read_rooms((root / "ARCHITECTURE.md").read_text(encoding="utf-8"))
        self.operators = sorted(
            {p.parts[2] for p in self.files if p.parts[:2] == ("polyop", "ops") and len(p.parts) > 3}
        )
        if not self.rooms:
            self.faults.append("ARCHITECTURE.md: no table with the heading 'room' found")

    def run(self) -> list[str]:
        self.check_readmes()
        for path in self.files:
            if path.suffix not in TEXT_SUFFIXES:
                continue
            try:
                text = (self.root / path).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            self.check_hygiene(path, text)
            if path.parts[0] == "polyop" and path.suffix in CPP_SUFFIXES:
                self.check_cpp(path, text)
            elif path.parts[:2] == ("python", "polyop") and path.suffix == ".py":
                self.check_python(path, text)
        return self.faults

    def fault(self, path: PurePosixPath, line: int, text: str) -> None:
        self.faults.append(f"{path}:{line}: {text}")

    def check_readmes(self) -> None:
        counts = Counter(path.parent for path in self.files if path.name not in ("README.md", "__init__.py"))
        names = set(self.files)
        for folder, count in sorted(counts.items()):
            hidden = any(part.startswith(".") for part in folder.parts)
            if count > MAX_FILES_WITHOUT_README and folder / "README.md" not in names and not hidden:
                self.faults.append(f"{folder}/: {count} files and no README.md")

    def check_hygiene(self, path: PurePosixPath, text: str) -> None:
        lines = text.splitlines()
        if path.suffix in COUNTED_SUFFIXES and len(lines) > MAX_LINES:
            self.fault(path, len(lines), f"{len(lines)} lines; split it at a seam before {MAX_LINES}")
        for number, line in enumerate(lines, 1):
            found = MACHINE_PATH.search(line)
            if found:
                self.fault(path, number, f"path of one machine: {line.strip()[:80]}")

    def room_of(self, path: PurePosixPath) -> tuple[Room, dict[str, str]] | None:
        matches = [(room, found) for room in self.rooms if (found := room.match(path)) is not None]
        if not matches:
            self.fault(path, 1, "lies in no room of ARCHITECTURE.md")
            return None
        return max(matches, key=lambda match: len(match[0].folder))

    def check_words(self, path: PurePosixPath, room: Room, code: str) -> None:
        words = list(room.forbidden_words)
        if room.forbids_operator_names and path.stem != "outside_names":
            words += self.operators
            words += ["".join(part.capitalize() for part in name.split("_")) for name in self.operators]
        for word in words:
            for found in re.finditer(rf"(?<![A-Za-z0-9_/]){re.escape(word)}(?![A-Za-z0-9])", code):
                number = code.count("\n", 0, found.start()) + 1
                self.fault(path, number, f"'{word}' may not stand in room {room.folder}")

    def check_cpp(self, path: PurePosixPath, text: str) -> None:
        match = self.room_of(path)
        if match is None:
            return
        room, bound = match
        own = room.folder.replace("<op>", bound.get("op", ""))
        allowed = [own, *(entry.replace("<op>", bound.get("op", "")) for entry in room.allowed)]
        code = strip_cpp_comments(text)
        for number, target, is_standard in cpp_dependencies(code):
            if is_standard or target == str(path):  # Highway's foreach_target.h includes a file into itself
                continue
            if not any(is_below(target, entry, "/") or fnmatch.fnmatch(target, entry) for entry in allowed):
                self.fault(path, number, f"room {own} may not include {target}")
        self.check_words(path, room, re.sub(r"(?m)^\s*#\s*include.*$", "", code))

    def check_python(self, path: PurePosixPath, text: str) -> None:
        match = self.room_of(path)
        if match is None:
            return
        room, _ = match
        own = room.folder.removeprefix("python/").replace("/", ".")
        package = ".".join(path.parent.parts[1:])
        for number, module, names in python_dependencies(text, package):
            first = module.split(".")[0]
            if first in sys.stdlib_module_names:
                continue
            targets = [module]
            if module == "polyop":  # "from polyop import ops" takes the subpackage
                targets = [f"polyop.{name}" for name in names] or [module]
            for target in targets:
                is_own = is_below(target, own, ".") and own != "polyop"
                if not is_own and not any(is_below(target, entry, ".") for entry in room.allowed):
                    self.fault(path, number, f"room {own} may not import {target}")
                private = [part for part in (*target.split("."), *names) if re.match(r"_[a-z]", part)]
                if first == "polyop" and not is_own and private:
                    self.fault(path, number, f"{private[0]} is private to {module}")
        self.check_words(path, room, strip_python_comments(text))


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    faults = Checker(root).run()
    print("\n".join(faults) if faults else "check_rooms: every file is in its room")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
