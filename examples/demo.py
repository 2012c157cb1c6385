# SPDX-License-Identifier: Apache-2.0
"""A stock Hugging Face Llama under ``backend="coda"``, beside plain torch.compile.

Prints how long each takes to compile, what was matched, what each GEMM absorbed, how far the logits
are from float32, and on a GPU how fast it is. Everything is measured in processes of its own with
empty caches (``demo_run.py``), for whoever compiles second in a process finds much done.

Usage: python examples/demo.py [--debug]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

RUN = Path(__file__).with_name("demo_run.py")
WIDTH = 100
NAMES = {"torch.compile": "torch.compile", "coda": 'backend="coda"'}


def main(argv: list[str] | None = None) -> None:
    """Measure and print; see the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--debug", action="store_true", help="write graphs and kernel sources")
    parser.add_argument("--size", help=argparse.SUPPRESS)  # "tiny", for tests
    given = parser.parse_args(argv)
    flags = ["--debug"] * given.debug + (["--size", given.size] if given.size else [])
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    with tempfile.TemporaryDirectory(prefix="coda_demo_") as folder:
        found = {}
        for name, shown in NAMES.items():
            what = f"building a Llama and compiling it with {shown}"
            found[name] = measure(console, Path(folder), what, "compile", name, *flags, cache=name)
        ours = found["coda"]
        title(console, ours["title"])
        console.print("compiled, each in a process of its own with empty caches:")
        for name, shown in NAMES.items():
            console.print(f"  {shown:<16} {found[name]['seconds']:6.1f} s")
        show_report(console, ours)
        errors = {"eager": ours["eager error"]}
        errors |= {shown: found[name]["error"] for name, shown in NAMES.items()}
        title(console, "error of the logits against the same model in float32")
        for name, error in errors.items():
            console.print(f"  {name:<16} {error:.3e}")
        if ours["cuda"]:
            what = "timing one forward"
            times = measure(console, Path(folder), what, "speed", folder, *flags)
            show_speed(console, times)
    folders = sorted({graph["folder"] for graph in ours["graphs"] if graph["folder"]})
    if folders:
        console.print("\ngraphs and kernel sources:", *folders)


def measure(
    console: Console, folder: Path, what: str, *arguments: str, cache: str = ""
) -> dict[str, Any]:
    """What a run of ``demo_run.py`` with ``arguments`` found; ``what`` is shown while it runs, and
    what it wrote to standard error afterwards. Its caches are in ``folder / cache``."""
    out = folder / "found.json"
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / cache),
        "CODA_CACHE_DIR": str(folder / "kernels"),
    }
    command = [sys.executable, str(RUN), str(out), *arguments]
    if not console.is_terminal:
        console.print(f"{what} ...")
        console.file.flush()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        progress.add_task(escape(what))
        done = subprocess.run(  # noqa: S603 (our own script)
            command, env=environment, check=False, stderr=subprocess.PIPE, text=True
        )
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr}")
    if done.stderr.strip():
        console.print(escape(done.stderr.strip()), style="dim")
    return json.loads(out.read_text())


def show_report(console: Console, found: dict[str, Any]) -> None:
    """What fired, and what each GEMM absorbed."""
    title(console, "matched")
    for name, count in sorted(found["matched"].items()):
        console.print(f"{count:4} x {name}")
    if not found["matched"]:
        console.print("nothing")
    for graph in found["graphs"]:
        title(console, "what each GEMM absorbs")
        console.print(escape(graph["text"]))


def show_speed(console: Console, times: dict[str, float]) -> None:
    """Milliseconds of one forward, and how many times as fast as torch.compile."""
    title(console, "time of one forward (median, the two taking turns)")
    for name, shown in NAMES.items():
        faster = times["torch.compile"] / times[name]
        console.print(f"  {shown:<16} {times[name]:7.2f} ms   {faster:.3f}x")


def title(console: Console, text: str) -> None:
    """A heading."""
    console.print(f"\n[bold]== {escape(text)}")


if __name__ == "__main__":
    main()
