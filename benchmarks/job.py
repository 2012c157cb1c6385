# SPDX-License-Identifier: Apache-2.0
"""The process of one job: ``python -m benchmarks.job FOLDER`` reads its order there and leaves its
result there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from torch._dynamo.utils import counters

from . import compile_time, kernels, layer, layer_train, llama, model_train
from .environment import scrub
from .measure import Variants
from .runner import Files, Job

SUITES = {
    "layer": layer.run,
    "llama": llama.run,
    "layer_train": layer_train.run,
    "model_train": model_train.run,
    "kernels": kernels.run,
    "compile": compile_time.run,
}
#: Share of a job's time after which no further variant is prepared: the rest is for measuring.
PREPARATION = 0.7


def _decisions() -> dict:
    """What our backend says it did: rewrites by pattern name, and its table of GEMMs per compiled
    graph.
    """
    import coda_inductor

    return {
        "counters": dict(counters["coda"]),
        "reports": [scrub(report.table()) for report in coda_inductor.reports()],
    }


def main(folder: str) -> None:
    """Run the job of `folder`; whatever it raises ends the process with a traceback."""
    start = time.monotonic()
    files = Files(Path(folder))
    job = Job(**json.loads(files.order.read_text()))
    variants = Variants(files.progress, job.skip, start + PREPARATION * job.seconds)
    result = SUITES[job.suite](job, variants)
    if job.backend == "coda" and "coda_inductor" in sys.modules:
        result |= _decisions()
    result["seconds"] = time.monotonic() - start
    files.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
