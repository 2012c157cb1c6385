# SPDX-License-Identifier: Apache-2.0
"""The debug folder of a compiled graph.

Each graph has one folder: the graph at each stage as readable Python, the table of GEMMs, every
program and generated kernel source.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from coda_inductor.errors import OptionError
from coda_inductor.log import logger
from coda_inductor.program import EpilogueProgram
from coda_inductor.report import GraphReport

Render = Callable[[EpilogueProgram], str]
_numbers = itertools.count()


class DebugFolder:
    """The debug output of the graph ``name``, in a new folder below ``parent`` (None: no output),
    whose path is ``path``. Raises OptionError if the folder cannot be created."""

    def __init__(self, name: str, parent: str | None):
        self.folder = None if parent is None else _fresh(Path(parent), name)
        self.path = "" if self.folder is None else str(self.folder)
        if self.folder is not None:
            logger.warning("debug output goes to %s", self.folder)

    def graph(self, stage: str, gm: GraphModule) -> None:
        """Write ``gm`` as readable Python."""

        def text() -> str:
            source = gm.print_readable(print_output=False, include_stride=True)
            return source.replace("class <lambda>(", "class Graph(")  # traced graphs have no name

        self.write(f"{stage}.py", text)

    def write(self, name: str, text: Any) -> None:
        """Write a file. A failure is only a warning, because the model must compile anyway; after
        an error of the disk, nothing more is written."""
        if self.folder is None:
            return
        path = self.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text() if callable(text) else text)
        except Exception as error:
            rest = ""
            if isinstance(error, OSError):
                self.folder, rest = None, ". The rest of this debug output is left out"
            logger.warning("cannot write %s: %s%s", path, error, rest)

    def finish(self, report: GraphReport, render: Render, changed: Iterable[str]) -> None:
        """Write the table of GEMMs, the names of the passes that ``changed`` something, and each
        program with the source that ``render`` makes."""
        self.write("gemms.txt", lambda: report.table() + "\n")
        fused = [site.site for site in report.sites if site.fused]
        names = {"changed": [*changed], "fired": report.fired, "fused": fused}
        self.write("names.json", json.dumps(names))
        programs = {s.program.key: s.program for s in report.sites if s.program is not None}
        for key, program in programs.items():
            self.write(f"programs/{key}.txt", f"{program}\n")
            self.write(f"programs/{key}.json", program.to_json())
            self.write(f"kernels/{key}.py", lambda p=program: render(p))


def _fresh(parent: Path, name: str) -> Path:
    """The first folder name that is free. All ranks of a job count in the same way."""
    try:
        while True:
            folder = parent / f"{name}_{next(_numbers):03d}"
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise OptionError(
            f"option 'debug_dir': cannot create a folder in {str(parent)!r} ({error.strerror}); "
            "name a writable one, here or in CODA_DEBUG_DIR"
        ) from error
