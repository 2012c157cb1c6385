# SPDX-License-Identifier: Apache-2.0
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

TESTS = Path(__file__).parents[1]
ARCHS = ("90", "100", "120")
#: One of each kind of store, reduction, pairing and join: architectures differ in their code.
KERNELS = (
    "rms_partial,layer_partial,swiglu,paired_rows,chain,row_statistics,"
    "norm_bwd/straight,norm_bwd/crossed"
)
#: Hopper alone has lean epilogues.
HOPPER = f"{KERNELS},scale,select,dswiglu//128x192:2x1:pp:lean"

COMPILE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import quack.gemm_runtime.host as host
host.get_max_active_clusters = lambda *args, **kwargs: 0  # only a GPU knows, only a launch asks
from programs import programs
from coda_inductor.mainloop.build import build
from coda_inductor.select.config import Config, legal_configs
arch = int(sys.argv[2]) // 10
seconds = {}
for kernel in sys.argv[3].split(","):
    name, joined, config = (kernel + "//").split("/")[:3]
    program = programs()[name]
    config = Config.parse(config) if config else legal_configs(program, arch)[0]
    start = time.perf_counter()
    build(program, config, b_major="n" if joined else "k", joined=joined)
    seconds[kernel] = time.perf_counter() - start
print(json.dumps(seconds))
"""


def compile_in_process(arch: str, names: str, cache: Path) -> dict[str, float]:
    """Compile kernels for ``arch`` with its cache in ``cache``; returns seconds for each. A name is
    that of a program, perhaps followed by "/joined" and "/config"."""
    environment = {k: v for k, v in os.environ.items() if k != "QUACK_CACHE_DIR"}
    environment |= {
        "QUACK_ARCH": arch,
        "CUTE_DSL_ARCH": f"sm_{arch}a",
        "CODA_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, str(TESTS), arch, names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    """(the cache folder of all kernels for Hopper, the seconds that each took)."""
    cache = tmp_path_factory.mktemp("hopper")
    return cache, compile_in_process("90", HOPPER, cache)


@pytest.mark.parametrize("arch", ARCHS)
def test_representative_kernels_compile(arch, tmp_path, request):
    if arch == "90":
        cache, seconds = request.getfixturevalue("hopper")
    else:
        cache, seconds = tmp_path, compile_in_process(arch, KERNELS, tmp_path)
    assert [*seconds] == (HOPPER if arch == "90" else KERNELS).split(",")
    sources = [p.read_text() for p in (cache / "epilogues").glob("*.py")]
    assert len(sources) == len(seconds)
    assert all("def epilogue(acc" in source for source in sources)


def test_second_process_loads_what_the_first_compiled(hopper):
    cache, first = hopper
    objects = sorted((cache / "kernels").rglob("*.o"))
    assert len(objects) == len(first)
    again = compile_in_process("90", ",".join(first), cache)
    assert sorted((cache / "kernels").rglob("*.o")) == objects
    assert again.keys() == first.keys()
    assert sum(again.values()) < sum(first.values()) / 5
