# SPDX-License-Identifier: Apache-2.0
"""What the backend does with every model family, as data: to show that a restructuring changed
nothing.

For each family of ``tests/zoo/families.py``, forward and training: the counters, every GEMM with
its program's key, config, absorbed ops and reasons, the near misses; in a CPU's numerics and in the
kernels', and as ``explain`` tells it for an H100, where nothing is too small to fuse. Usage::

    python3 tools/record_models.py OLD.json [FAMILY ...]     in the tree before
    python3 tools/record_models.py NEW.json [FAMILY ...]     in the tree behind
    diff OLD.json NEW.json
"""

import functools
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 2
#: Llamas as wide as real ones, on no device: what the gate decides differs from tiny models.
WIDE: dict[str, dict[str, int]] = {
    "Llama 1B wide": {"hidden_size": 2048, "intermediate_size": 8192, "rows": 8192},
    "Llama 8B wide": {"hidden_size": 4096, "intermediate_size": 14336, "rows": 4096},
}


def main() -> None:
    """Record what the file does not have yet."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    warnings.filterwarnings("ignore")
    families: Any = importlib.import_module("zoo.families").FAMILIES
    out, names = Path(sys.argv[1]), sys.argv[2:]
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in names or [*families, *WIDE]:
        if name not in found:
            print(name, file=sys.stderr, flush=True)
            found[name] = wide(**WIDE[name]) if name in WIDE else family(families[name])
            out.write_text(json.dumps(found, indent=1, sort_keys=True))


def family(make: Any) -> dict[str, Any]:
    """Everything about one family."""
    harness: Any = importlib.import_module("harness").Harness
    explain: Any = importlib.import_module("coda_inductor").explain
    torch.manual_seed(0)
    model, call, inputs = make(LAYERS)
    model = model.eval().bfloat16()
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    run = functools.partial(call, model)
    found: dict[str, Any] = {}
    for kind, options in (("cpu", {}), ("reference", {"reference": True})):
        forward, training = harness(**options), harness(**options)
        forward.run(run, *inputs)
        training.train(run, *inputs).square().mean().backward()
        found[f"{kind} forward"] = _compiled(forward)
        found[f"{kind} training"] = _compiled(training)
    always = {"gate": "always"}
    with torch.no_grad():
        found["H100 forward"] = _explained(explain(run, *inputs, options=always))
    found["H100 training"] = _explained(explain(run, *inputs, options=always))
    return found


def wide(rows: int, **widths: int) -> dict[str, Any]:
    """A Llama on the meta device, explained with its loss."""
    transformers: Any = importlib.import_module("transformers")
    explain: Any = importlib.import_module("coda_inductor").explain
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    config = transformers.LlamaConfig(**widths, **heads, num_hidden_layers=LAYERS)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(rows // 2048, 2048, dtype=torch.int64)

    def loss() -> torch.Tensor:
        return model(tokens, labels=tokens, use_cache=False).loss

    found = {"H100 training": _explained(explain(loss))}
    with torch.no_grad():
        found["H100 forward"] = _explained(explain(loss))
    return found


def _compiled(harness: Any) -> dict[str, Any]:
    return {
        "counts": dict(sorted(harness.counts.items())),
        "sites": [_site(site) for site in harness.report.sites],
        "misses": sorted(map(str, harness.report.near_misses)),
        "ops": dict(sorted(harness.ops().items())),
    }


def _explained(found: Any) -> dict[str, Any]:
    return {
        "summary": found.summary,
        "notes": list(found.notes),
        "sites": [_site(site) for site in found.sites],
        "misses": sorted(f"{m.what} at {m.where}: {m.reason}" for m in found.near_misses),
        "moved": [found.bytes_before, found.bytes_after],
        "saved": [found.saved_bytes_before, found.saved_bytes_after],
    }


def _site(site: Any) -> dict[str, Any]:
    estimate, why = site.estimate, site.reason if site.fused else ""
    return {
        "site": site.site,
        "shape": [str(size) for size in site.shape],
        "role": site.role,
        "how": site.how,
        "config": site.config,
        "reason": str(site.reason),
        "patterns": list(site.patterns),
        "absorbed": list(site.absorbed),
        "bytes": [site.bytes_before, site.bytes_after],
        "stopped": [str(stop) for stop in site.stopped],
        "program": None if site.program is None else site.program.key,
        "estimate": None
        if estimate is None
        else [estimate.unfused_us, estimate.fused_us, estimate.config, why],
    }


if __name__ == "__main__":
    main()
