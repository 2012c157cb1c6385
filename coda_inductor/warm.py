# SPDX-License-Identifier: Apache-2.0
"""Reports of graphs that torch takes from its cache, where our passes do not run again.

Torch's cache keeps compiled code only. So the report of a graph is a file of ours, pickled, in
``reports/`` of the cache folder, its name a hash of what torch compiles. No file, no report.
"""

import contextlib
import gzip
import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from coda_inductor.cache_dir import cache_dirs, folder, write
from coda_inductor.compat import functorch_config
from coda_inductor.log import count, logger
from coda_inductor.matching import bodies
from coda_inductor.record import Record
from coda_inductor.report import GraphReport
from coda_inductor.report import record as keep_report

FOLDER = "reports"
#: Larger files are not written, and the oldest ones are deleted when there are more.
_MOST_BYTES, _MOST_FILES = 2**20, 2000


def key(
    gm: GraphModule, inputs: Sequence[Any], uuid: Callable[[], Any], record: Record
) -> str | None:
    """The name of the report of Dynamo's graph ``gm``. None if torch does not cache the result.
    ``uuid`` is our pass's, which has all versions and options.
    """
    if not getattr(functorch_config, "enable_autograd_cache", False) or (ours := uuid()) is None:
        return None
    try:
        code = [body.module.code for body in bodies(gm.graph)]
        modes: list[Any] = [torch.is_grad_enabled(), record.options.measures]
        for device in ("cuda", "cpu"):
            modes += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
        parts = ours, code, [_signature(value) for value in inputs], modes
        return hashlib.sha256(repr(parts).encode()).hexdigest()
    except Exception:
        logger.debug("no name for the report of %s", record.name, exc_info=True)
        return None


def finish(name: str | None, record: Record) -> None:
    """Keep the report of a graph that was just compiled under the key ``name``. If torch had it in
    its cache, read its report instead, and count what it counted."""
    report = None
    try:
        if name is not None and not record.rewritten:
            report = _read(name)
        elif name is not None and not record.failed:
            _write(folder(FOLDER) / f"{name}.pickle.gz", record.report)
    except Exception:  # a damaged file, a full disk
        logger.debug("no report %s", name, exc_info=True)
    if record.rewritten:
        return
    if report is None:
        text = "%s: from torch's compile cache, neither counted nor reported"
        logger.info(text, record.name)
        return
    report.name = record.name
    for counter, times in (report.fired - record.report.fired).items():  # not Dynamo's passes again
        count(counter, times)
    keep_report(report)
    logger.info("%s, from torch's compile cache: %s", report.name, report.summary)


def _signature(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, (int, float, torch.SymInt)) else type(value).__name__
    strides = value.stride() if value.layout == torch.strided else ()
    layout = str((tuple(value.shape), strides))
    return type(value).__name__, value.dtype, value.device, value.requires_grad, layout


def _plain(report: GraphReport) -> GraphReport:
    """``report`` for another process: symbolic sizes are texts."""
    sites = []
    for site in report.sites:
        shape: Any = tuple(n if isinstance(n, int) else str(n) for n in site.shape)
        sites.append(replace(site, shape=shape))
    return replace(report, sites=sites, from_cache=True)


def _write(path: Path, report: GraphReport) -> None:
    data = gzip.compress(pickle.dumps(_plain(report)), mtime=0)
    if len(data) <= _MOST_BYTES:
        write(path, data)
    files = list(path.parent.glob("*.gz"))
    if len(files) > _MOST_FILES:
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[: _MOST_FILES // 10]:
            old.unlink(missing_ok=True)


def _read(name: str) -> GraphReport | None:
    for base in filter(None, cache_dirs()):
        with contextlib.suppress(FileNotFoundError):
            data = gzip.decompress((base / FOLDER / f"{name}.pickle.gz").read_bytes())
            return pickle.loads(data)  # noqa: S301 (of a folder whose kernels are run, too)
    return None
