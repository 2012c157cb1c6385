# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m benchmarks NAME ...``; ``--help`` behind a name says the rest."""

import importlib
import sys

#: Names of modules, imported when asked for.
COMMANDS = ("account", "worth", "headline", "first", "whole", "paper", "memory", "dit",
            "curve", "tokens", "parallel", "trainers")  # fmt: skip


def main() -> None:
    """Dispatch on the first word."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        print(f"usage: python -m benchmarks NAME ...\n\nNAME: {', '.join(COMMANDS)}")
        sys.exit(0 if name in ("-h", "--help") else 2)
    importlib.import_module(f"benchmarks.{name}").main(arguments)


if __name__ == "__main__":
    main()
