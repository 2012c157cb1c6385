# SPDX-License-Identifier: Apache-2.0
"""How the process that proves a file starts: ``python -I isolated.py PACKAGE PATHS ARGUMENT...``.

``-I`` keeps the current folder, the user's site folder and PYTHONPATH out, so that no ``sympy.py``
that lies about is imported. What is needed is told instead: where this package is, however it was
installed (no search finds another), and the folders that the parent imports from, as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def load_package(folder: Path) -> None:
    """Import the package ``coda_inductor`` from its folder, whatever ``sys.path`` says."""
    spec = importlib.util.spec_from_file_location(
        "coda_inductor", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["coda_inductor"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _package, _paths, *_arguments = sys.argv[1:]
    sys.path[:] = json.loads(_paths)
    load_package(Path(_package))
    from coda_inductor.patterns import worker

    worker.answer(*_arguments)
