# SPDX-License-Identifier: Apache-2.0
"""Run checks in several processes of one group, each of which must end in time, by itself.

``Group`` runs this file as a script. It imports what all ranks need, which takes longer than most
checks, and forks them. Each rank calls the ``CHECKS`` of a module in order, and writes down how
each went and the codes of refusals. A check that fails ends its process at once, because the others
would wait for it; the script ends those.
"""

import datetime as dt
import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import provoked
from processes import python

NOT_RUN = "it was not reached: an earlier one failed, or took too long"
NOT_ENDED = "it did not end"


#: Of the deadline that CI gives a test, or pyproject.toml: ranks end before it, and say where.
SECONDS = 0.8 * float(os.environ.get("PYTEST_TIMEOUT", "1800"))


@functools.cache
def group(module: str, world: int) -> "Group":
    """The one group that has run the checks of ``module``."""
    return Group(module, world, SECONDS)


class Group:
    """``world`` processes that have run the checks of ``module``, and have ended. One that fails
    ends the others.

    Attributes:
        codes: their exit codes; of one that does not end in ``seconds``, faulthandler's.
        said: what they printed.
    """

    def __init__(self, module: str, world: int, seconds: float):
        with tempfile.TemporaryDirectory() as folder:
            self._run(module, world, seconds, Path(folder))

    def _run(self, module: str, world: int, seconds: float, folder: Path) -> None:
        environment = {
            "OMP_NUM_THREADS": "1",
            # No graph comes from a cache, but what is C++ is compiled once, not by each rank.
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        done = python(__file__, folder, seconds, module, check=False, **environment)
        codes = folder / "codes"
        self.codes = json.loads(codes.read_text()) if codes.exists() else []
        texts = (path.read_text() for path in sorted(folder.glob("*.txt")))
        self.said = "\n".join([done.stderr, *texts])
        self._results = [_read(path) for path in folder.glob("*.json")]
        provoked.codes |= {code for results in self._results for code in results.pop("codes", ())}

    def errors(self, check: str) -> str:
        """What went wrong in ``check`` on any rank; empty where nothing did."""
        found = [results.get(check, NOT_RUN) for results in self._results]
        errors = [error for error in found if error] or ([] if found else ["no process got there"])
        if not errors or set(errors) == {NOT_RUN}:
            return "".join(errors[:1])
        return "\n".join([*errors, self.said[-4000:]])


def _codes(ranks: list[int]) -> list[int | None]:
    """Wait for all of them; one that fails, or that faulthandler ends, ends the others."""
    codes: dict[int, int | None] = dict.fromkeys(ranks)
    while None in codes.values():
        ended, status = os.wait()
        codes[ended] = os.waitstatus_to_exitcode(status)
        for rank in [rank for rank in ranks if codes[ended] and codes[rank] is None]:
            os.kill(rank, signal.SIGKILL)
    return [*codes.values()]


def _read(path: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in path.read_text().splitlines())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(check: Any, name: str, file: Any) -> None:
    """One check; writes into ``file`` how it went."""
    import torch.distributed as dist

    begun = time.monotonic()
    file.write(json.dumps([name, NOT_ENDED]) + "\n")
    try:
        check()
        dist.barrier()
    except BaseException:  # noqa: BLE001 (whatever it is, the others must not wait)
        file.write(json.dumps([name, traceback.format_exc()]) + "\n")
        os._exit(1)
    file.write(json.dumps([name, ""]) + "\n")
    sys.stdout.write(f"{name}: {time.monotonic() - begun:.1f} s\n")


def op_by_op_only(gm: Any, _inputs: Any, **_how: Any) -> Any:
    """What stands for Inductor behind our passes."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(gm.forward)


def main(folder: str, seconds: str, name: str) -> None:
    """Fork the ranks, and write down their exit codes."""
    gc.disable()  # it would find nothing in modules, and unshare their pages
    if not Path("/dev/nvidiactl").exists():  # a driver that was asked for devices cannot be forked
        _imported(name)
    ranks = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        if not (forked := os.fork()):
            os.environ |= {"RANK": str(rank), **_device(rank)}
            with Path(folder, f"{rank}.txt").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            one_rank(folder, float(seconds), name)
            return
        ranks.append(forked)
    codes = _codes(ranks)
    Path(folder, "codes").write_text(json.dumps(codes))


def _device(rank: int) -> dict[str, str]:
    """The environment in which ``rank`` takes a GPU. NCCL refuses a second rank of one host on a
    GPU: where there are too few, each says that it is a host of its own, and they meet through
    sockets, which is slow and otherwise the same."""
    import torch

    count = torch.cuda.device_count()  # asks NVML: a driver that has begun cannot be forked
    local = {"LOCAL_RANK": str(rank % max(count, 1))}
    if 0 < count < int(os.environ["WORLD_SIZE"]):
        local |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return local


def _imported(name: str) -> Any:
    import torch._dynamo.guards as guards
    import torch._inductor.compile_fx  # noqa: F401 (what a first compilation imports)

    import coda_inductor.op_by_op  # noqa: F401

    guards.profile_guard_manager = lambda *_: 0.0  # as in conftest.py
    return importlib.import_module(name)


def one_rank(folder: str, seconds: float, name: str) -> None:
    """Run the checks, and end as any program does."""
    import torch.distributed as dist

    from coda_inductor import op_by_op

    module = _imported(name)
    provoked.note_codes()
    faulthandler.dump_traceback_later(seconds, exit=True)
    gc.freeze()  # a tenth of the time went into looking for garbage among modules
    gc.enable()
    gc.set_threshold(50_000, 20, 50)
    inductor = op_by_op.compile_fx_inner
    backend = getattr(module, "BACKEND", "gloo")
    dist.init_process_group(backend, timeout=dt.timedelta(seconds=seconds))
    with (Path(folder) / f"{dist.get_rank()}.json").open("w", buffering=1) as file:
        for check, function in module.CHECKS.items():
            # It takes minutes if Inductor writes C++ for all.
            op_by_op.compile_fx_inner = inductor if module.INDUCTOR else op_by_op_only
            run(function, check, file)
        file.write(json.dumps(["codes", sorted(provoked.codes)]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
