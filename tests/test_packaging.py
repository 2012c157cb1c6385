"""An installed copy is complete: modules, data, pattern files and the backend's entry point."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import coda_inductor

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "coda_inductor", "patterns")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree, since a build leaves files behind; works offline."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tree)
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    run("-m", "pip", "wheel", *offline, "--quiet", "--wheel-dir", out, tree)
    (built,) = out.glob("*.whl")
    return built


def run(*args: object, **kwargs) -> str:
    """Standard output of ``python args``; a failure shows what it printed."""
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_wheel_holds_every_module_data_file_and_pattern(wheel):
    files = {p for folder in ("coda_inductor", "patterns") for p in (ROOT / folder).rglob("*")}
    data = {".py", ".json", ".j2", ".css", ".js"}
    shipped = {p for p in files if p.suffix in data or p.name == "py.typed"}
    expected = {str(p.relative_to(ROOT)) for p in shipped}
    expected = {name.replace("patterns/", "coda_inductor/_patterns/", 1)
                if name.startswith("patterns/") else name for name in expected}  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if name.startswith("coda_inductor/")}
        others = {name.split("/")[0] for name in archive.namelist()} - {"coda_inductor"}
    assert found == expected
    assert any("_patterns/" in name for name in found)
    assert {name.split(".")[-1] for name in others} == {"dist-info"}


def test_installed_copy_finds_its_patterns_and_backend(wheel, tmp_path):
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path, wheel)
    code = (
        "import torch; assert 'coda' in torch._dynamo.list_backends();"
        "from coda_inductor import patterns;"
        "print(patterns.builtin_folder()); print(*sorted(p.name for p in patterns.load()))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    folder, names = run("-c", code, cwd=tmp_path, env=env).splitlines()
    assert Path(folder) == tmp_path / "coda_inductor" / "_patterns"
    assert names.split() == sorted(p.name for p in coda_inductor.patterns.load())


def test_backend_is_known_to_torch_without_an_import():
    code = (
        "import sys, torch; assert 'coda' in torch._dynamo.list_backends();"
        "print('coda_inductor' in sys.modules)"
    )
    assert run("-c", code, cwd=os.path.sep).strip() == "False"


def test_version_is_said_once_and_the_same():
    assert importlib.metadata.version("coda-inductor") == coda_inductor.__version__
