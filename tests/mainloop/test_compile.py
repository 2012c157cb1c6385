# SPDX-License-Identifier: Apache-2.0
"""Generated kernels compile for Hopper and both Blackwells on a machine without a GPU.

Each architecture has its own process: QuACK and CuTeDSL read theirs once, when imported. These are
forks of one that has imported the rest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import fp8, grouped, heads, programs

from coda_inductor.select.config import Config, mainloop_stages

pytest.importorskip("quack")

TESTS = Path(__file__).parents[1]
#: A pair and FP8, or a join, on both Blackwells, whose code differs; each takes three seconds. More
#: on Hopper, which alone has lean epilogues, and where GPU tests compile all the others.
KERNELS = {
    "90": "everything//128x128:2x1:pp:dyn,fp8_swiglu_fast//128x256:2x1:co,"
    "experts_dgrad//128x256:2x1:co:lean,unstored",
    "100": "fp8_swiglu",
    "120": "norm_bwd/joined",
}

COMPILE = """
import gc, json, os, sys, traceback
gc.disable()  # a tenth of the time
import torch._inductor.compile_fx  # as QuACK does, whatever the architecture
from apart import apart
from programs import fp8, grouped, heads, programs
from coda_inductor.arch import arch_with
from coda_inductor.select.config import Config, legal_configs

def process(names, environment, answer):
    os.dup2(2, 1)
    os.environ.update(environment)
    try:
        found = compiled(arch_with(divmod(int(environment["QUACK_ARCH"]), 10)), names)
    except BaseException:
        found = {"error": traceback.format_exc()}
    with open(answer, "w") as file:
        json.dump(found, file)

def compiled(arch, names):
    import quack.gemm_runtime.host as host
    # Only a GPU knows, only a launch asks.
    host.get_max_active_clusters = lambda *args, **kwargs: 66
    import quack.gemm_sm90
    from coda_inductor.mainloop.build import build
    stages, setup = [], quack.gemm_sm90.GemmSm90._setup_attributes
    def note(self, *arguments):
        setup(self, *arguments)
        stages.append(self.ab_stage)
    quack.gemm_sm90.GemmSm90._setup_attributes = note
    found, known = {}, programs() | fp8() | heads() | grouped()
    for kernel in names:
        name, variant, config = (kernel + "//").split("/")[:3]
        program = known[name]
        config = Config.parse(config) if config else legal_configs(program, arch)[0]
        build(program, config, b_major="n" if variant else "k", variant=variant)
        found[kernel] = {"config": str(config), "stages": stages[-1:]}
        stages.clear()
    return found

for line in sys.stdin:
    try:
        apart(process, *json.loads(line))
    except RuntimeError as error:
        print(error, flush=True)
    else:
        print(flush=True)
"""


@pytest.fixture(scope="module")
def compile_in_process():
    """Compile the kernels for ``arch`` with its cache in ``cache``; returns for each its "config",
    and its "stages" of A and B if it was compiled (on Hopper)."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {k: v for k, v in os.environ.items() if k != "QUACK_CACHE_DIR"}
    with subprocess.Popen(
        [sys.executable, "-c", COMPILE],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:

        def call(arch: str, cache: Path) -> dict[str, dict]:
            answer = cache / "answer.json"
            its = {
                "QUACK_ARCH": arch,
                "CUTE_DSL_ARCH": f"sm_{arch}a",
                "CODA_CACHE_DIR": str(cache),
                "CUTE_DSL_KEEP_PTX": "1",
                "CUTE_DSL_DUMP_DIR": str(cache),
            }
            server.stdin.write(json.dumps([KERNELS[arch].split(","), its, str(answer)]) + "\n")
            server.stdin.flush()
            assert server.stdout.readline() == "\n", "it died"
            found = json.loads(answer.read_text())
            assert "error" not in found, found["error"][-4000:]
            return found

        yield call
        server.stdin.close()


@pytest.fixture(scope="module")
def hopper(tmp_path_factory, compile_in_process):
    """(the cache folder of all kernels for Hopper, what ``compile_in_process`` says of each)."""
    cache = tmp_path_factory.mktemp("hopper")
    return cache, compile_in_process("90", cache)


@pytest.mark.parametrize("arch", ["100", "120"])
def test_kernels_compile_for_blackwell(arch, tmp_path, compile_in_process):
    compile_in_process(arch, tmp_path)
    assert len([*(tmp_path / "kernels").rglob("*.o")]) == 1


def test_second_process_loads_what_the_first_compiled(hopper, compile_in_process):
    cache, first = hopper
    objects = sorted((cache / "kernels").rglob("*.o"))
    assert len(objects) == len(first) == 4
    again = compile_in_process("90", cache)
    assert sorted((cache / "kernels").rglob("*.o")) == objects
    assert not any(kernel["stages"] for kernel in again.values())


def test_stages_are_what_legality_counts(hopper):
    known = programs() | fp8() | heads() | grouped()
    for name, kernel in hopper[1].items():
        program = known[name.split("/")[0]]
        assert [mainloop_stages(program, Config.parse(kernel["config"]))] == kernel["stages"], name


def test_what_would_kill_the_compiler_is_refused():
    from coda_inductor.mainloop.build import build

    with pytest.raises(ValueError, match="cannot read"):
        build(programs()["swiglu"], Config.parse("128x208:2x1:pp"))


def test_in_fp8_maxima_keep_nan(hopper):
    (text,) = (p.read_text() for p in hopper[0].glob("*Float8*.ptx"))
    assert "max.NaN.f32" in text
    assert "max.f32" not in text
