# SPDX-License-Identifier: Apache-2.0
"""Say what the backend does with a model of any size, on any machine: a table,
and with --out a page."""

import argparse
import sys
from pathlib import Path

import torch

from coda_inductor.cli import models
from coda_inductor.errors import CodaError, ExplainError, OptionError

HELP = "what each GEMM of a model absorbs, and what to do about those that do not"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    models.arguments(parser)
    parser.add_argument("--tokens", type=models.positive,
                        help="tokens a sequence, by default 2048, or what the model reads at "
                        "most (--hf)")  # fmt: skip
    parser.add_argument("--gpu", help="a measured GPU, e.g. h200; by default this machine's")
    parser.add_argument("--out", metavar="PAGE.html", help="write the page to this file")


def run(arguments: argparse.Namespace) -> int:
    """Explain the model, print the table and save the page. Returns 0. Raises OptionError if the
    model does not exist, or the page cannot be written to that place, and CodaError if the model
    cannot be traced, or writing the page fails."""
    from coda_inductor.explanation import explain

    page = Path(arguments.out).resolve() if arguments.out else None  # first: the rest takes long
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        why = "it is a folder" if page.is_dir() else "its folder does not exist"
        raise OptionError(f"--out {arguments.out}: {why}")
    options = models.options_of(arguments)
    model, args, kwargs = models.model_of(arguments, arguments.tokens)
    try:
        with torch.set_grad_enabled(arguments.train):
            result = explain(model, *args, options=options, gpu=arguments.gpu, **kwargs)
    except ExplainError as error:
        if arguments.hf is None or models.speaks(model):
            raise
        hint = "--hf is for language models; name others as FILE.py:FUNCTION"
        raise ExplainError(f"{error}; {hint}") from error
    sys.stdout.write(f"{result}\n")
    if arguments.out:
        try:
            path = result.save(arguments.out).resolve()
        except OSError as error:
            raise CodaError(f"the page cannot be written: {error}") from None
        sys.stdout.write(f"\nwrote {path}\n")
    return 0
