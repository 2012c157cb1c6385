# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m benchmarks NAME ...``; ``--help`` behind a name says the rest."""

from __future__ import annotations

import importlib
import sys

#: Name -> (module, arguments before those given); imported when asked for.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{suite: ("run", (suite,)) for suite in ("grid", "families")},
    "account": ("account", ()),
    "report": ("report", ()),
    "worth": ("worth", ()),
    "headline": ("headline", ()),
    "first": ("first", ()),
    "whole": ("whole", ()),
    "adapters": ("adapters", ()),
    "paper": ("paper", ()),
    "joules": ("joules", ()),
}  # fmt: skip


def main() -> None:
    """Dispatch on the first word."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        print(f"usage: python -m benchmarks NAME ...\n\nNAME: {', '.join(COMMANDS)}")
        sys.exit(0 if name in ("-h", "--help") else 2)
    module, first = COMMANDS[name]
    importlib.import_module(f"benchmarks.{module}").main(*first, arguments)


if __name__ == "__main__":
    main()
