"""Generated kernels compile for Hopper and both Blackwells on a machine without a GPU.

Each architecture has its own process: QuACK and CuTeDSL read theirs once, when imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("quack")

HERE = Path(__file__).parent
ARCHS = ("90", "100", "120")

COMPILE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import quack.gemm_runtime.host as host
host.get_max_active_clusters = lambda *args, **kwargs: 0  # only a GPU knows, only a launch asks
from programs import programs
from coda_inductor.kernels.build import build
from coda_inductor.runtime.config import legal_configs
arch = int(sys.argv[2]) // 10
seconds = {}
for name in sys.argv[3].split(","):
    program = programs()[name]
    start = time.perf_counter()
    build(program, legal_configs(program, arch)[0])
    seconds[name] = time.perf_counter() - start
print(json.dumps(seconds))
"""


def compile_in_process(arch: str, names: str, cache: Path) -> dict[str, float]:
    """Compile programs for ``arch`` with its cache in ``cache``; returns seconds for each."""
    environment = {k: v for k, v in os.environ.items() if k != "QUACK_CACHE_DIR"}
    environment |= {
        "QUACK_ARCH": arch,
        "CUTE_DSL_ARCH": f"sm_{arch}a",
        "CODA_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, str(HERE), arch, names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", ARCHS)
def test_representative_kernels_compile(arch, tmp_path):
    names = "scale,rms_partial,swiglu,chain,select"
    assert set(compile_in_process(arch, names, tmp_path)) == set(names.split(","))
    sources = [p.read_text() for p in (tmp_path / "epilogues").glob("*.py")]
    assert len(sources) == 5
    assert all("def epilogue(acc" in source for source in sources)


def test_second_process_loads_what_the_first_compiled(tmp_path):
    names = "rms_partial,swiglu"
    compile_in_process("90", names, tmp_path)
    objects = sorted((tmp_path / "kernels").rglob("*.o"))
    assert len(objects) == 2
    seconds = compile_in_process("90", names, tmp_path)
    assert sorted((tmp_path / "kernels").rglob("*.o")) == objects
    assert max(seconds.values()) < 1.0
