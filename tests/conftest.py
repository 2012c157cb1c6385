# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: no compiled code, zero counters, a fixed seed, no compile cache.

Counting tests need a graph to be analysed, not to come out of torch's cache. Kernels are compiled
for Hopper where there is no GPU; QuACK and CuTeDSL read that once, when they are imported.
"""

import gc
import logging
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import provoked
import pytest
import torch

#: Keys: of what a process of pytest-xdist hands over, and of the codes that no test provoked.
CODES, LEFT = "refusal codes", pytest.StashKey[list[str]]()
if not torch.cuda.is_available():
    os.environ.setdefault("QUACK_ARCH", "90")
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    # Inductor starts a process for Triton's kernels when it is imported (3 s of CPU a process).
    os.environ.setdefault("TORCH_WARM_POOL", "0")
# Where nobody keeps bytecode, each process that a test starts would compile all of our files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Processes that this one starts, pytest-xdist's among them, keep memory that they have freed: to
# ask for it again took 2 to 7 % of their CPU time. glibc reads these when a process starts.
for name, size in {"TRIM_THRESHOLD": 2**30, "TOP_PAD": 2**26, "MMAP_THRESHOLD": 2**25}.items():
    os.environ.setdefault(f"MALLOC_{name}_", str(size))

# Dynamo looks for garbage after each graph, up to a tenth of the time of tests that compile.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

COMPILER = shutil.which("g++")
if COMPILER and "CXX" not in os.environ:  # Inductor reads it when it is imported
    os.environ |= {"CXX": str(Path(__file__).parent / "cxx/g++"), "CODA_TESTS_CXX": COMPILER}


#: Files that take longest, the longest first: pytest-xdist gives a file to one process, and a long
#: one that starts last keeps that process busy after the others have ended.
SLOW = (
    "test_distributed", "test_pass_contract", "test_public_faults", "test_compile", "test_families",
    "test_fuzz", "test_fp8_recipes", "test_fp8_expansion", "test_examples", "test_frameworks",
    "test_plan", "test_explanation", "test_triton_kernels", "test_bisect",
    "test_inductor", "test_falls", "test_steps", "test_pipeline", "test_block_masks",
    "test_training_contexts", "test_dropouts", "test_masks", "test_pass_mode", "test_benchmarks",
)  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: a run on a borrowed GPU may end before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        last = str(report.longrepr).strip().splitlines()[-1:]
        print(
            f"\nFAILED NOW {report.nodeid} {''.join(last)[:300]}", file=sys.__stderr__, flush=True
        )


def pytest_configure(config: pytest.Config) -> None:
    """By default pytest-xdist starts with the files that hold most tests, however short."""
    nobody_traces()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """A process of pytest-xdist's has ended: what its tests provoked counts here."""
    provoked.codes.update(getattr(node, "workeroutput", {}).get(CODES, ()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run of all tests that passes has provoked every reason there is, where none is skipped for
    a package or because there is a GPU."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[CODES] = sorted(provoked.codes)
        return
    some = config.option.keyword or config.option.markexpr or config.option.collectonly
    some = some or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    lacks = torch.cuda.is_available() or not all(map(find_spec, ("quack", "torchao", "triton")))
    if some or lacks or exitstatus:
        return
    from coda_inductor.remedies import REMEDIES

    config.stash[LEFT] = sorted(REMEDIES.keys() - provoked.codes)
    if config.stash[LEFT]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for code in config.stash.get(LEFT, ()):
        terminalreporter.write_line(f"FAILED: no test provokes the reason {code!r}", red=True)


def pytest_collection_finish() -> None:
    """A tenth of the tests' time went into looking for garbage among modules and tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure() -> None:
    """What was frozen is freed, or nanobind says that somebody forgot it."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first. Tests marked ``gpu`` are skipped, with a reason, without a GPU."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def nobody_traces() -> None:
    """Pytest 9 listens to loggers that do not propagate: torch would write down every graph."""
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def clean_slate():
    """Isolation from the test before; restores the compile caches' settings afterwards."""
    nobody_traces()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    caches_off = torch._inductor.config.patch(fx_graph_cache=False)
    with caches_off, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory):
    """Nothing goes into the user's cache, and no process reads graphs from torch's caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODA_CACHE_DIR", str(tmp_path_factory.mktemp("coda_cache")))
        patch.setenv("COLUMNS", "1000")  # a terminal that breaks no line
        if beside := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
            # Else each process of pytest-xdist's has a compile worker, of 0.4 GB, a core.
            workers = max(2, len(os.sched_getaffinity(0)) // beside)
            patch.setenv("CODA_COMPILE_WORKERS", str(workers))
        patch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
        patch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_made_for_logs():
    """Dynamo times guards, 20 ms a graph, and AOTAutograd prints graphs that no log takes."""
    compiler = "torch._functorch._aot_autograd.graph_compile"
    none = {
        "torch._dynamo.guards.profile_guard_manager": 0.0,
        f"{compiler}._log_joint_graph": None,
        f"{compiler}._log_fw_bw_graphs": (None, None),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, result in none.items():
            patch.setattr(name, lambda *_, result=result: result, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_notice():
    """The process is told nothing of missing kernels. From here on codes of refusals are noted."""
    provoked.note_codes()
    from coda_inductor import notice

    notice.logged |= {"kernels", "torch"}


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture):
    """Tells what our logger has warned of so far, each message at least once."""
    from coda_inductor import log

    log.forget_warnings()
    with caplog.at_level(logging.WARNING, log.logger.name):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == log.logger.name]
    log.forget_warnings()


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch):
    """``backend="coda"`` runs graphs op by op behind our passes, without Inductor's C++."""
    from harness import as_it_is

    from coda_inductor import op_by_op

    monkeypatch.setattr(op_by_op, "compile_fx_inner", as_it_is)
