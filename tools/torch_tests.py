# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of Inductor on a CPU, with our backend in Inductor's place and without.

``PATH`` is the ``test/`` folder of a PyTorch checkout of the installed version. What passes without
us must pass with us; what does not is listed, recorded and makes the exit status 1. The record is
one JSON file a version of torch: counts by file, and the tests that only fail here. Nothing of
PyTorch's is copied.

This file is also the pytest plugin that puts us in Inductor's place, in the processes it starts.

Usage: python tools/torch_tests.py PATH [--out FILE] [--jobs N] [-k EXPRESSION] [--options JSON]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "inductor/test_torchinductor.py",
    "inductor/test_pattern_matcher.py",
    "functorch/test_aotdispatch.py",
)
#: Set for the plugin: what our backend gets (JSON), where calls of it and outcomes are noted.
OPTIONS, CALLS, OUTCOMES = "CODA_TEST_OPTIONS", "CODA_TEST_CALLS", "CODA_TEST_OUTCOMES"
_WORST = ("failed", "skipped", "passed")


def main() -> int:
    """Run the tests both ways and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("path", type=Path, help="the test/ folder of a PyTorch checkout")
    parser.add_argument(
        "--out", type=Path, help="the record; default build/torch_tests/VERSION.json"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("-k", dest="only", default="", help="as pytest's")
    parser.add_argument("--options", default='{"strict": true}', help="our backend's, as JSON")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a test")
    args = parser.parse_args()
    found = [name for name in FILES if (args.path / name).exists()]
    if not found:
        parser.error(
            f"{args.path} holds none of {', '.join(FILES)}; give the test/ folder of a checkout"
        )
    json.loads(args.options)
    record = compare(args, found)
    out = args.out or ROOT / "build" / "torch_tests" / f"{record['torch']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    for name, counts in record["files"].items():
        print(f"{name}: without us {counts['without']}, with us {counts['with']}")
    print(f"our backend compiled {record['graphs']} graphs; recorded in {out}")
    for name in record["only_here"]:
        print(f"fails here, passes there: {name}")
    ran = any(counts["without"] for counts in record["files"].values())
    return 1 if record["only_here"] or not record["graphs"] or not ran else 0


def compare(args: argparse.Namespace, files: Sequence[str]) -> dict[str, Any]:
    """The record of a run with us and one without. What fails once only, of two times, is flaky."""
    import torch

    without, _ = run(args, files, None)
    ours, graphs = run(args, files, args.options)
    suspects = only_here(ours, without)
    again = run(args, suspects, args.options)[0] if suspects else {}
    real = [name for name in suspects if again.get(name) != "passed"]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "options": json.loads(args.options),
        "files": {
            name: {"without": _counts(without, name), "with": _counts(ours, name)} for name in files
        },
        "graphs": graphs,
        "only_here": real,
        "flaky": sorted(set(suspects) - set(real)),
    }


def only_here(ours: dict[str, str], without: dict[str, str]) -> list[str]:
    """Tests that pass without us and do not with us, be it that they were not run to the end."""
    return sorted(n for n, how in without.items() if how == "passed" and ours.get(n) != "passed")


def run(
    args: argparse.Namespace, tests: Sequence[str], options: str | None
) -> tuple[dict[str, str], int]:
    """(outcome by test, graphs that our backend compiled); ``options`` None: Inductor's."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes, calls = Path(folder, "outcomes"), Path(folder, "calls")
        paths = [str(ROOT), str(ROOT / "tools"), str(args.path), str(args.path / "inductor")]
        # Called by a worker of pytest-xdist, the processes that this starts are none.
        outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment = {
            **outside,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "CODA_CACHE_DIR": str(Path(folder, "coda")),
            OUTCOMES: str(outcomes),
            CALLS: str(calls),
        }
        if options is not None:
            environment[OPTIONS] = options
        # Without the checkout's own pytest.ini and conftest.py: they are for its CI.
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "torch_tests", "-p", "no:cacheprovider",
            "--noconftest", "-c", os.devnull, "--rootdir", ".",
            "--timeout", str(args.timeout), "--tb=short", *tests,
        ]  # fmt: skip
        if args.only:
            command += ["-k", args.only]
        if args.jobs > 1:
            command += ["-n", str(args.jobs)]
        print("with us" if options is not None else "without us", flush=True)
        subprocess.run(command, cwd=args.path, env=environment, check=False)
        text = outcomes.read_text() if outcomes.exists() else ""
        size = calls.stat().st_size if calls.exists() else 0
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, how = json.loads(line)
        found[name] = min(found.get(name, how), how, key=_WORST.index)
    return found, size


def _counts(outcomes: dict[str, str], file: str) -> dict[str, int]:
    return dict(Counter(how for name, how in outcomes.items() if name.startswith(f"{file}::")))


# The plugin.


def pytest_configure() -> None:
    """Before any test is imported."""
    if OPTIONS in os.environ:
        replace_inductor(json.loads(os.environ[OPTIONS]), Path(os.environ[CALLS]))


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a step of a test ended, at once: the process may not live to the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # the controller hears of it too
        return
    if report.when == "call" or not report.passed:
        with Path(os.environ[OUTCOMES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def replace_inductor(options: dict[str, Any], calls: Path) -> None:
    """From now on ``compile_fx`` is our backend, which calls the original. Compilers of a caller's
    own (``inner_compile``, ``decompositions``) stay the original's: ours has no such arguments."""
    import torch._inductor.compile_fx as module
    import torch.fx

    from coda_inductor.backend import coda

    original, state = module.compile_fx, threading.local()

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        state.inside = True
        try:
            yield
        finally:
            state.inside = False

    def compile_fx(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        own = any(kwargs[name] is not None for name in kwargs.keys() - {"config_patches"})
        plain = isinstance(model, torch.fx.GraphModule) and not args and not own
        if getattr(state, "inside", False) or not plain:
            return original(model, inputs, *args, **kwargs)
        with calls.open("a", encoding="utf-8") as file:
            file.write(".")
        with inside():  # compile_fx calls itself by its name in the module
            return coda(model, inputs, options={**(kwargs.get("config_patches") or {}), **options})

    module.compile_fx = compile_fx  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main())
