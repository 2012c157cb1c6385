"""Prove a pattern file and try it: match, algebra, gradient, kernel; on a GPU also error and speed.

Exit code 0 if everything passes, 1 if anything fails. What needs a GPU is skipped without one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from coda_inductor.cli.steps import Result, check_file

_COLOURS = {"pass": "green", "fail": "bold red", "skip": "yellow"}


HELP = "prove a pattern file and try it"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a pattern file")
    parser.add_argument("--json", action="store_true", help="print the results as JSON only")
    parser.add_argument("--quiet", action="store_true", help="no programs, no kernel sources")


def run(chosen: argparse.Namespace) -> int:
    """Check every file; 0 if all pass."""
    console = Console(quiet=chosen.json, highlight=False)
    results: list[Result] = []
    for path in chosen.files:
        found = _watch(path, console)
        results += found
        _show(path, found, console, quiet=chosen.quiet)
    if chosen.json:
        sys.stdout.write(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    return int(any(r.outcome == "fail" for r in results))


def _watch(path: Path, console: Console) -> list[Result]:
    """The results of one file, with a line that says what is being done; only in a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def told(what: str) -> None:
            progress.update(task, description=escape(what))

        return list(check_file(path, told))


def _show(path: Path, results: list[Result], console: Console, *, quiet: bool) -> None:
    table = Table(
        title=escape(str(path)), title_justify="left", title_style="bold", box=SIMPLE_HEAD
    )
    several = len({r.pattern for r in results}) > 1
    for column in ("pattern", "check", "", "what was found")[not several :]:
        table.add_column(column, no_wrap=column == "", overflow="fold")
    for r in results:
        row = (r.pattern, r.check, f"[{_COLOURS[r.outcome]}]{r.outcome}", r.detail)
        cells = [cell if i == 2 else escape(cell) for i, cell in enumerate(row)]
        table.add_row(*cells[not several :])
    if not quiet:
        for title, text in (listing for r in results for listing in r.listings):
            body = Syntax(text.rstrip(), "python", word_wrap=True, background_color="default")
            console.print(Panel(body, title=escape(title), title_align="left"))
    console.print(table)
    failed = sum(r.outcome == "fail" for r in results)
    console.print(f"[bold red]{failed} failed" if failed else "[bold green]all passed")
