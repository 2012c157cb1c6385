# SPDX-License-Identifier: Apache-2.0
"""An installed copy is complete: modules, data, pattern files and the backend's entry point."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from processes import python

import coda_inductor

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="an unpacked archive"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the source archive of what git has, as ``python -m build`` makes it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    build = "import setuptools.build_meta as b; b.build_{}(" + f"{str(out)!r})"
    python("-c", build.format("sdist"), cwd=tree)
    (archive,) = out.glob("*.tar.gz")
    shutil.unpack_archive(archive, out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    python("-c", build.format("wheel"), cwd=unpacked)
    (built,) = out.glob("*.whl")
    return built


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
    assert {name.split(".")[-1] for name in others} == {"dist-info"}


#: Threads that compile first register the backend once. No kernel library is imported.
FRESH = """
import sys, threading, torch
from concurrent.futures import ThreadPoolExecutor

assert "coda" in torch._dynamo.list_backends() and "coda_inductor" not in sys.modules
barrier, m = threading.Barrier(4), torch.nn.Linear(8, 8)  # nothing to build in C++

def look_up(_):
    barrier.wait()
    torch.compile(m, backend="coda")

list(ThreadPoolExecutor(4).map(look_up, range(4)))
torch.compile(m, backend="coda_inductor")(torch.ones(2, 8))
assert "quack" not in sys.modules
from coda_inductor import patterns
print(patterns.builtin_folder())
print(*sorted(p.name for p in patterns.load()))
"""


def test_a_fresh_process_finds_an_installed_copys_backend_and_patterns(wheel, tmp_path):
    """And is told that there is no GPU: at the default log level, with no setting."""
    shutil.unpack_archive(wheel, tmp_path, "zip")
    done = python("-c", FRESH, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    folder, names = done.stdout.splitlines()
    assert Path(folder) == tmp_path / "coda_inductor" / "_patterns"
    assert names.split() == sorted(p.name for p in coda_inductor.patterns.load())
    said = done.stderr.count("no GEMM becomes a kernel here: no CUDA device")
    assert said == (not torch.cuda.is_available())
