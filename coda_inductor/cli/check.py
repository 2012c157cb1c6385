# SPDX-License-Identifier: Apache-2.0
"""Prove a pattern file and try it: match, algebra, gradient, kernel; on a GPU also error and speed.

Exit code 0 if everything passes, 1 if anything fails. What needs a GPU is skipped without one. A
folder stands for the pattern files in it. In a terminal it prints tables; in a pipe one result a
line, however long, so that grep and diff work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
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
from coda_inductor.errors import PatternError

_COLOURS = {"pass": "green", "fail": "bold red", "skip": "yellow"}


HELP = "prove a pattern file and try it"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a pattern file, or a folder of them"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON only")
    parser.add_argument("--quiet", action="store_true", help="no programs, no kernel sources")


def run(chosen: argparse.Namespace) -> int:
    """Check every file; 0 if all pass.

    Raises:
        PatternError: a folder holds no pattern file.
    """
    console = Console(quiet=chosen.json, highlight=False)
    results: list[Result] = []
    for path in [file for given in chosen.files for file in _expand(given)]:
        found = _watch(path, console)
        results += found
        if console.is_terminal:
            _show(path, found, console, quiet=chosen.quiet)
        elif not chosen.json:
            sys.stdout.writelines(_lines(path, found, quiet=chosen.quiet))
    if chosen.json:
        sys.stdout.write(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    return int(any(r.outcome == "fail" for r in results))


def _expand(path: Path) -> list[Path]:
    """A file, or the pattern files of a folder."""
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.glob("*.py") if p.name != "__init__.py")
    if not files:
        raise PatternError(f"no pattern files (*.py) in the folder {path}")
    return files


def _watch(path: Path, console: Console) -> list[Result]:
    """The results of one file, with a line that says what is being done; only in a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
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


def _lines(path: Path, results: list[Result], *, quiet: bool) -> Iterator[str]:
    """The same for a pipe: no colours, no frames, and no line that is broken in two."""
    for title, text in () if quiet else (listing for r in results for listing in r.listings):
        yield f"--- {title}\n{text.rstrip()}\n\n"
    yield f"{path}\n"
    several = len({r.pattern for r in results}) > 1
    width = max(len(r.check) for r in results)
    for r in results:
        name = f"{r.pattern}  " if several else ""
        yield f"{name}{r.check:<{width}}  {r.outcome}  {' '.join(r.detail.split())}\n"
    failed = sum(r.outcome == "fail" for r in results)
    yield f"{failed} failed\n\n" if failed else "all passed\n\n"
