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

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

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
    """What fired, and what each GEMM absorbed; layers that came out alike share one row."""
    title(console, "matched")
    for name, count in sorted(found["matched"].items()):
        console.print(f"{count:4} x {name}")
    if not found["matched"]:
        console.print("nothing")
    for graph in found["graphs"]:
        title(console, "what each GEMM absorbs")
        console.print(f"{graph['summary']}.")
        console.print(table_of(graph["sites"]))
        saved = {how: sum(s["bytes"] for s in graph["sites"] if s["how"] == how) / 1e6
                 for how in ("kernel", "reference")}  # fmt: skip
        if saved["kernel"]:
            console.print(f"memory traffic saved: {saved['kernel']:.1f} MB a call")
        elif saved["reference"] > 0:
            console.print(
                "No kernel runs here: what is legal runs as plain ops, which Inductor compiles. As "
                f"kernels, they would move {saved['reference']:.1f} MB less a call."
            )


def table_of(sites: list[dict[str, Any]]) -> Table:
    """A row for all GEMMs that came out alike, with the bytes of all of them together."""
    kernels = any(site["how"] == "kernel" for site in sites)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("GEMM", overflow="fold", max_width=30)
    table.add_column("M x N x K", overflow="fold")
    table.add_column("runs as", max_width=10)
    table.add_column("absorbs, or why not", overflow="fold")
    table.add_column("MB saved" if kernels else "MB less as kernel", justify="right", max_width=8)
    alike: dict[str, list[dict[str, Any]]] = {}
    for site in sites:
        same = {key: site[key] for key in ("shape", "how", "patterns", "absorbed", "reason")}
        alike.setdefault(json.dumps(same), []).append(site)
    for group in alike.values():
        first = group[0]
        fused = first["how"] != "unfused"
        names = f"{', '.join(first['patterns'])}: " if first["patterns"] else ""
        how = {"kernel": "kernel", "reference": "legal, plain ops", "unfused": "unfused"}
        table.add_row(
            f"{len(group)} x",
            escape(first["site"].removeprefix("model.")),
            first["shape"],
            how[first["how"]],
            escape(names + ", ".join(first["absorbed"]) if fused else first["reason"]),
            f"{sum(s['bytes'] for s in group) / 1e6:.2f}" if fused else "",
        )
    return table


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
