"""Subcommands of ``python -m coda_inductor``, a module each, with ``HELP``, ``arguments(parser)``
and ``run(arguments) -> exit code``."""
