"""``python -m coda_inductor COMMAND ...``: a table of subcommands and nothing else."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

#: Subcommand -> the module that implements it.
COMMANDS = {
    "explain": "coda_inductor.cli.explain",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m coda_inductor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(path) for name, path in COMMANDS.items()}
    for name, module in modules.items():
        module.arguments(commands.add_parser(name, help=module.HELP, description=module.__doc__))
    chosen = parser.parse_args(argv)
    return modules[chosen.command].run(chosen)


if __name__ == "__main__":
    sys.exit(main())
