# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environment that ``make demo`` and ``make test`` run in.

Three kinds of machine, told apart without asking:

- The Python that runs this already has a CUDA build of torch: build on it. Its packages are made
  visible through a .pth file, which also works where that Python is a virtual environment itself
  (``venv --system-site-packages`` would skip to the Python underneath).
- There is an NVIDIA driver but no such torch: install torch and the ``cuda`` extra.
- Neither: install a CPU torch first and by its exact version, since a range would pull in several
  gigabytes of CUDA packages; kernels are then compiled in the tests, not run.

``CODA_CPU_TORCH`` (``make test TORCH=2.15.0`` sets it) names another torch; it is then installed on
every kind of machine. A machine without a package registry is fine as long as what is needed can be
imported.

Usage: python3 tools/setup_env.py VENV (demo | test | bench | docs | dev)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHOSEN_TORCH = os.environ.get("CODA_CPU_TORCH", "")
CPU_TORCH = CHOSEN_TORCH or "torch==2.13.0"
MIN_TORCH = (2, 11)
#: What each goal cannot do without; the kernel stack is not among them, models run without it.
IMPORTS = {
    "demo": ["torch", "sympy", "tabulate", "transformers"],
    "bench": ["torch", "sympy", "tabulate", "transformers", "matplotlib"],
    "test": ["torch", "sympy", "tabulate", "transformers", "matplotlib", "pytest",
             "pytest_timeout", "xdist"],
    "docs": ["mkdocs", "material", "mkdocstrings"],
    "dev": ["torch", "mypy", "ruff", "importlinter"],
}  # fmt: skip
# A registry that cannot be reached must be noticed in seconds, not after pip's usual minutes. Set
# in the environment, since the pip that pip starts for a build takes no arguments from here.
PIP_ENV = {"PIP_RETRIES": "2", "PIP_DEFAULT_TIMEOUT": "15", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def main() -> None:
    """Create or update the environment; exits with a message if a needed package is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("goal", choices=sorted(IMPORTS))
    args = parser.parse_args()

    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.findall(r'requires-python = ">=(\d+)\.(\d+)"', settings)[0]
    if sys.version_info < tuple(map(int, oldest)):
        sys.exit(
            f"coda needs Python {'.'.join(oldest)} or newer, and {sys.executable} is Python "
            f"{sys.version.split()[0]}. Name another one: make PYTHON=/path/to/python3 {args.goal}"
        )
    python = create(args.venv)
    cuda_torch = not CHOSEN_TORCH and has_cuda_torch()
    gpu = cuda_torch or has_nvidia_driver()
    extras = [args.goal]
    if gpu:
        extras.append("cuda")
    elif args.goal == "test":
        extras.append("kernels-test")
    # Compiling what nobody imports takes longer than the tests' first imports without bytecode. A
    # demo and a benchmark time imports, which find theirs.
    how = ["--no-compile"] if args.goal == "test" else []
    target = [*how, "-e", f"{ROOT}[{','.join(extras)}]"]

    if cuda_torch:
        inherit_packages(python)
        say("using the CUDA torch of", sys.executable)
        if pip(python, "--no-index", "--no-build-isolation", *target):
            return
        say("not everything is there yet")
    elif CHOSEN_TORCH or not gpu:
        if not pip(python, *how, CPU_TORCH):
            say("could not install", CPU_TORCH, "- trying what this Python has")
        elif uv(python, *([] if how else ["--compile-bytecode"]), *target[len(how) :]):
            return
    if pip(python, *target):
        return

    say("the package registry did not deliver; trying with what this Python already has")
    inherit_packages(python)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    missing = [name for name in IMPORTS[args.goal] if not importable(python, name)]
    if missing or not pip(python, *offline):
        sys.exit(
            f"cannot make an environment for `make {args.goal}`: no package registry can be "
            f"reached and {sys.executable} lacks {', '.join(missing) or 'setuptools'}.\n"
            "Install these there, or name another Python: make PYTHON=/path/to/python3"
        )
    if not importable(python, "quack"):
        say("no kernel stack (quack-kernels, nvidia-cutlass-dsl): fused GEMMs will fall back")


def create(venv: Path) -> Path:
    """An environment at ``venv``, new or as it was; returns its Python."""
    python = venv / "bin" / "python"
    if not python.exists():
        command = [sys.executable, "-m", "venv", "--clear", str(venv)]
        if subprocess.run(command, check=False).returncode != 0:
            say("no ensurepip (Debian's python3-venv); using this Python's own pip")
            subprocess.run([*command, "--without-pip"], check=True)
            inherit_packages(python)
    return python.absolute()


def has_cuda_torch() -> bool:
    """Does the Python that runs this have a CUDA build of torch that is new enough?"""
    try:
        import torch
    except ImportError:
        return False
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= MIN_TORCH and torch.version.cuda is not None


def has_nvidia_driver() -> bool:
    """Does ``nvidia-smi`` answer?"""
    with contextlib.suppress(FileNotFoundError):
        return not subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode
    return False


def inherit_packages(python: Path) -> None:
    """Let the environment of ``python`` import what the Python that runs this can import."""
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    run = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({folder!r})" for folder in sorted(folders)]
    Path(run.stdout.strip(), "_inherited.pth").write_text("\n".join(lines) + "\n")
    # Before Python 3.12 a new environment brings an old setuptools, which would hide that one.
    uninstall = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
    subprocess.run(uninstall, check=False, env={**os.environ, **PIP_ENV})


def pip(python: Path, *args: str) -> bool:
    """Run ``pip install``; returns whether it succeeded. In a terminal pip shows what it does."""
    say("pip install", *args)
    quiet = [] if sys.stdout.isatty() else ["--quiet", "--progress-bar", "off"]
    command = [str(python), "-m", "pip", "install", *quiet, *args]
    return subprocess.run(command, env={**os.environ, **PIP_ENV}, check=False).returncode == 0


def uv(python: Path, *args: str) -> bool:
    """The same by uv, which takes 4 s for the tests' packages (pip: 16), where nothing names
    another index to pip. It keeps the torch that is there."""
    asked = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    if re.search(r"\.index-url=", asked.stdout) or not pip(python, "--no-compile", "uv"):
        return False
    say("uv pip install", *args)
    command = [str(python), "-m", "uv", "pip", "install", "-q", "--python", str(python), *args]
    settings = {"UV_HTTP_RETRIES": "2", "UV_HTTP_TIMEOUT": "15", "UV_SYSTEM_CERTS": "1"}
    return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode == 0


def importable(python: Path, name: str) -> bool:
    """Can ``python`` find the module ``name``? Looks for it without importing it."""
    query = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", query], check=False).returncode == 0


def say(*words: object) -> None:
    """One line of progress."""
    print("[setup]", *words, flush=True)


if __name__ == "__main__":
    main()
