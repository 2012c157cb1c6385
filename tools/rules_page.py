# SPDX-License-Identifier: Apache-2.0
"""The page of all passes and patterns. Usage: python3 tools/rules_page.py > docs/rules.md"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
from benchmarks.worth_page import gains  # noqa: E402 (of this checkout)
from coda_inductor.pipeline import ON_ATEN, ON_DYNAMO  # noqa: E402
from coda_inductor.remedies import REMEDIES  # noqa: E402

HEAD = """# Rules

For contributors. Each pass in the order in which it runs, then each pattern: what it makes of what
and why, as its file says; the codes of reasons in that file and in what it imports of its room
(`coda_inductor/remedies.py` has what helps); the stock workloads of [worth.md](worth.md) in which
it did something, and the most that one of them lost without it. What fires in which family of
models: [models.md](models.md). Made by `python3 tools/rules_page.py > docs/rules.md`.
"""
PASSES = {each.name: each for each in (*ON_DYNAMO, *ON_ATEN)}
HOMES = {
    name: ROOT / f"{each.run.__module__.replace('.', '/')}.py" for name, each in PASSES.items()
}
HOMES["plan"] = ROOT / "coda_inductor" / "plan.py"
HOMES |= {path.stem: path for path in sorted((ROOT / "patterns").glob("*.py"))}
#: The rooms whose reasons a file of a room gives as its own.
ROOMS = {
    "dynamo": ("dynamo", "matching", "patterns"),
    "fusing": ("fusing", "fuse", "graph", "program", "runtime"),
    "plan.py": ("mainloop", "select"),
}


def codes(home: Path) -> set[str]:
    """The codes of reasons in ``home`` and in what it imports of the rooms that it speaks for."""
    rooms = ROOMS.get(home.relative_to(ROOT).parts[1], ("patterns", "rewrite"))
    found: set[str] = set()
    left, seen = [home], {*HOMES.values()} - {home}  # which speak for themselves
    while left:
        path = left.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse":
                found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
            elif isinstance(node, ast.Constant) and "-" in str(node.value):  # else any word
                found.add(str(node.value))
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name.name}" for name in node.names] + [f"{node.module}"]
                near = [ROOT.joinpath(*m.split(".")) for m in modules]
                near = [p for p in near if {*p.relative_to(ROOT).parts[1:2]} <= {*rooms}]
                left += [file for p in near for file in (p.with_suffix(".py"), p / "__init__.py")]
    return found & {*REMEDIES}


def page() -> str:
    """The page."""
    measured = json.loads((ROOT / "benchmarks/results/h200_worth.json").read_text())
    losses, text = gains(measured), HEAD
    for name, home in HOMES.items():
        counts = PASSES[name].counts if name in PASSES else ()
        names = (name, *(counts or (f"{name}_backward",)))
        rows = [row for each in names for row in losses.get(each, ()) if not row["error"]]
        lost = max(rows, key=lambda row: row["step"], default=None)
        facts = {
            "Counts": [f"`{each}`" for each in counts],
            "Reasons": [f"`{each}`" for each in sorted(codes(home))],
            "Fires in": [
                k for k, v in measured["workloads"].items() if {*names} & {*v["features"]}
            ],
            "Worth": [f"{lost['step']:+.1%} of a step ({lost['workload']})"] if lost else [],
        }
        said = str(ast.get_docstring(ast.parse(home.read_text()))).replace("::\n", ":\n")
        text += f"\n## {name}\n\n`{home.relative_to(ROOT)}`\n\n{said}\n"
        text += "".join(f"\n*{head}*: {', '.join(of)}\n" for head, of in facts.items() if of)
    return text


if __name__ == "__main__":
    print(page(), end="")
