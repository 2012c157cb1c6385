"""``python -m coda_inductor COMMAND``: the table of commands, each in a file of its own in ``cli``.

A command's module has ``HELP``, ``arguments(parser)`` and ``run(arguments) -> exit code``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from coda_inductor.errors import CodaError

ABOUT = "What the coda backend does with a model, checks of pattern files, and the cache."
COMMANDS = {
    "cache": "coda_inductor.cli.cache",
    "check": "coda_inductor.cli.check",
    "explain": "coda_inductor.cli.explain",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code: 0, 1 for a failure, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m coda_inductor", description=ABOUT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(module) for name, module in COMMANDS.items()}
    for name, module in modules.items():
        module.arguments(commands.add_parser(name, help=module.HELP, description=module.__doc__))
    chosen = parser.parse_args(argv)
    try:
        return modules[chosen.command].run(chosen)
    except CodaError as error:
        sys.stderr.write(f"{parser.prog} {chosen.command}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
