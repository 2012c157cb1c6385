# SPDX-License-Identifier: Apache-2.0
"""The table of commands, ``python -m coda_inductor COMMAND``. Each has its own file in ``cli``.

A command's module has ``HELP``, ``arguments(parser)`` and ``run(arguments) -> exit code``.
"""

import argparse
import importlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import coda_inductor
from coda_inductor.errors import CodaError, OptionError

ABOUT = "What the coda backend does with a model, what makes a script fail, checks, measuring."
COMMANDS = ("bisect", "check", "explain", "tune")


def _versions() -> Iterable[str]:
    """The lines for a bug report: the versions, and the reason if kernels cannot run here."""
    from coda_inductor.kernels import QUACK

    for line in (f"coda_inductor {coda_inductor.__version__}", *QUACK.facts["versions"]()):
        name, value = line.split(" ", maxsplit=1)
        yield f"{name:<20}{value}"


def _names() -> Iterable[str]:
    from coda_inductor.options import parse
    from coda_inductor.pipeline import names

    return sorted(names(parse(None, None)))


class _Print(argparse.Action):
    """Print the lines that ``const`` returns, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any):
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for line in self.const():
            sys.stdout.write(f"{line}\n")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code: 0, 1 for a failure, 2 for wrong usage."""
    # Before torch is imported, which says so where NumPy is missing.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    parser = argparse.ArgumentParser(prog="python -m coda_inductor", description=ABOUT)
    version = "of this package and what it runs on"
    parser.add_argument("--version", action=_Print, const=_versions, help=version)
    disable = "that options={'disable': [...]} takes: passes, patterns, counters"
    parser.add_argument("--names", action=_Print, const=_names, help=disable)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"coda_inductor.cli.{name}") for name in COMMANDS}
    for name, module in modules.items():
        module.arguments(commands.add_parser(name, help=module.HELP, description=module.__doc__))
    arguments = parser.parse_args(argv)
    try:
        return modules[arguments.command].run(arguments)
    except CodaError as error:
        sys.stderr.write(f"{parser.prog} {arguments.command}: error: {error}\n")
        return 2 if isinstance(error, OptionError) else 1


if __name__ == "__main__":
    sys.exit(main())
