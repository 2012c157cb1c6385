# SPDX-License-Identifier: Apache-2.0
"""Prove a pattern file and try it: match, algebra, kernel.

Exit code 0 if everything passes, 1 if anything fails, 2 if there is no such file. No GPU is needed.
A folder means all pattern files in it. Each result is one line of any length, so that grep and diff
work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from coda_inductor.cli.steps import Result, check_file
from coda_inductor.errors import OptionError, PatternError
from coda_inductor.patterns.loading import expand

HELP = "prove a pattern file and try it"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a pattern file, or a folder of them"
    )
    parser.add_argument("--json", action="store_true", help="print only the results, as JSON")
    parser.add_argument("--must-pay", action="store_true",
                        help="fail where the plan says that a pattern brings nothing")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print no programs or kernel sources")


def run(arguments: argparse.Namespace) -> int:
    """Check every file. Returns 0 if all checks pass, 1 if any fails.

    Raises:
        OptionError: there is no such file, or a folder has no pattern file.
    """
    results: list[Result] = []
    try:
        files = [file for path in arguments.files for file in expand(path)]
    except PatternError as error:
        raise OptionError(str(error)) from None
    for path in files:
        rows = list(check_file(path))
        if arguments.must_pay:
            rows = [replace(r, outcome="fail") if r.check == "plan" and r.outcome == "note" else r
                     for r in rows]  # fmt: skip
        results += rows
        if not arguments.json:
            sys.stdout.writelines(_lines(path, rows, quiet=arguments.quiet))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    return int(any(r.outcome == "fail" for r in results))


def _lines(path: Path, results: list[Result], *, quiet: bool) -> Iterator[str]:
    for title, text in () if quiet else (listing for r in results for listing in r.listings):
        yield f"--- {title}\n{text.rstrip()}\n\n"
    yield f"{path}\n"
    several = len({r.pattern for r in results}) > 1
    width = max(len(r.check) for r in results)
    for r in results:
        name = f"{r.pattern}  " if several else ""
        yield f"{name}{r.check:<{width}}  {r.outcome}  {' '.join(r.detail.split())}\n"
    yield f"{_total(results)}\n\n"


def _total(results: list[Result]) -> str:
    """The last line of the output. It says ``all passed`` only if no check was skipped, because
    then the pattern was tried, not only proven."""
    counts = Counter(r.outcome for r in results)
    if not counts["fail"] and not any(r.check.startswith("match") for r in results):
        return f"{counts['pass']} passed, {counts['skip']} skipped: proven, but never tried"
    if counts.keys() == {"pass"}:
        return "all passed"
    words = {"fail": "failed", "pass": "passed", "note": "noted", "skip": "skipped"}
    return ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts[key])
