# SPDX-License-Identifier: Apache-2.0
"""All checks of ``make lint``, or the ones named: ruff, format, mypy, imports, house.

The house limits are what no linter knows: how long a file and its module docstring may get (past
that it is two ideas), and that sources and documents are ASCII.

Usage: python3 tools/lint.py [CHECK ...]
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
COMMANDS = {
    "ruff": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "imports": ["lint-imports"],
}
MAX_DOCSTRING = 40
LICENCE = "# SPDX-License-Identifier: Apache-2.0"
#: Lines a Python file may have, by its top-level folder.
MAX_LINES = {"tests": 500, "patterns": 200}
MAX_LINES_ELSEWHERE = 400
ASCII_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json"}


def main() -> int:
    """Run the checks; returns how many failed."""
    names = sys.argv[1:] or [*COMMANDS, "house"]
    unknown = set(names) - set(COMMANDS) - {"house"}
    if unknown:
        sys.exit(f"unknown check {', '.join(sorted(unknown))}; known: {', '.join(COMMANDS)}, house")
    failed = [name for name in names if not run(name)]
    print("lint:", f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return len(failed)


def run(name: str) -> bool:
    """Run one check; returns whether it passed."""
    print(f"--- {name}", flush=True)
    if name == "house":
        problems = [problem for path in project_files() for problem in house_problems(path)]
        print("\n".join(problems) or "ok")
        return not problems
    program, *args = COMMANDS[name]
    return subprocess.run([BIN / program, *args], cwd=ROOT, check=False).returncode == 0


def project_files() -> list[Path]:
    """The files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return sorted(path for path in paths if path.is_file())


def house_problems(path: Path) -> list[str]:
    """What is wrong with one file, as ``file:line: what to do``."""
    if path.suffix not in ASCII_SUFFIXES:
        return []
    name = path.relative_to(ROOT)
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    problems = [
        f"{name}:{number}: not ASCII: {line.strip()[:60]!r}"
        for number, line in enumerate(lines, 1)
        if not line.isascii()
    ]
    if path.suffix != ".py":
        return problems
    if lines and lines[0] != LICENCE:
        problems.append(f"{name}:1: the first line is not {LICENCE!r}")
    limit = MAX_LINES.get(name.parts[0], MAX_LINES_ELSEWHERE)
    if len(lines) > limit + 1:  # the licence's line does not count
        problems.append(f"{name}:1: {len(lines)} lines, the limit is {limit}: split it by idea")
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    if docstring is None:
        if text.strip():
            problems.append(f"{name}:1: no module docstring: say what this file does and why")
    elif len(docstring.splitlines()) > MAX_DOCSTRING:
        problems.append(f"{name}:1: module docstring over {MAX_DOCSTRING} lines: move it to docs/")
    return problems


if __name__ == "__main__":
    sys.exit(main())
