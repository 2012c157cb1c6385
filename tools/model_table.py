# SPDX-License-Identifier: Apache-2.0
"""What fires in each model family, as the table of ``docs/internals/models.md``.

Compiles tiny models of ``tests/zoo/families.py`` on the CPU, forward and backward, and compares
with eager; where diffusers can be imported (its Python files on ``PYTHONPATH`` suffice) also tiny
diffusion transformers, forward only. Usage: python3 tools/model_table.py [NAME ...], which prints
rows, or without names writes the page. Without diffusers, that section stays as it is.
"""

import copy
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

FAMILIES: Any = importlib.import_module("zoo.families").FAMILIES
Harness: Any = importlib.import_module("harness").Harness

PAGE = ROOT / "docs/internals/models.md"
LAYERS = 2
SEEDS = 3
TEXT = """# Models

For users who ask what the backend does with their model family.

What fires in tiny models of {layers} layers (transformers {version}, bfloat16 with the kernels'
numerics, on a CPU, where no gate decides; `python3 tools/model_table.py` makes this page again).
No row has more than 1.2 times eager's error, forward or backward.

*norms*: RMSNorms that are deferred, of those recognized; LayerNorms stay. *gates*: pairs of GEMMs
that meet in one tile. *masks*: attention masks that are proven to be a flag of SDPA, so that it
runs flash attention. *fused*: GEMMs of the forward pass that absorbed something, of all.
*training*: GEMMs of forward and backward that did, weight gradients included in the total. The last
column says what is missing.

{table}
"""
HEADS = ["family", "norms", "gates", "masks", "fused", "training", "norms that stay, and why"]
SECTION = "\n## Diffusion transformers\n"
DIFFUSION = """
The same of diffusers {version}, forward, with a batch of 2 and {tokens} tokens of an image or a
video.

{table}
"""
DIFFUSION_HEADS = ["model", "norms", "gates", "fused", "norms that stay, and why"]


def main() -> None:
    """Print the rows of the models that are named, or write the page; progress goes to stderr."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if names := sys.argv[1:]:
        for heads, known in ((HEADS, FAMILIES), (DIFFUSION_HEADS, MODELS)):
            if chosen := [name for name in names if name in known]:
                print(_table(heads, known, chosen))
        return
    table = _table(HEADS, FAMILIES, FAMILIES)
    page = TEXT.format(layers=LAYERS, version=transformers.__version__, table=table)
    try:
        diffusers: Any = importlib.import_module("diffusers")
    except ImportError:
        print("without diffusers (pip install diffusers), its section stays", file=sys.stderr)
        section = PAGE.read_text().partition(SECTION)[2]
    else:
        table = _table(DIFFUSION_HEADS, MODELS, MODELS)
        section = DIFFUSION.format(version=diffusers.__version__, tokens=TOKENS, table=table)
    PAGE.write_text(page + SECTION + section)


def _table(heads: list[str], makers: Any, names: Any) -> str:
    rows = []
    for name in names:
        print(name, file=sys.stderr, flush=True)
        rows.append(row(name, makers[name], training="training" in heads))
    return tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)


def row(family: str, make: Any, *, training: bool) -> list[str]:
    """One line of a table, of the first of a few random models that is as exact as eager's: at such
    sizes the ratio of two rounding errors is between 0.7 and 1.4, as chance has it. Raises
    AssertionError if the family does not agree with eager."""
    for seed in range(SEEDS):
        try:
            return _row(family, make, seed, training)
        except AssertionError as error:
            failed = error
    raise failed


def _row(family: str, make: Any, seed: int, training: bool) -> list[str]:
    torch.manual_seed(seed)
    model, call, inputs = make(LAYERS)
    model = model.eval().bfloat16()
    precise = torch.float64 if _computes_in(torch.float64, model, call, inputs) else torch.float32
    exact = copy.deepcopy(model).to(precise)
    inputs, wide = (_cast(inputs, dtype) for dtype in (torch.bfloat16, precise))
    run, run_exact = functools.partial(call, model), functools.partial(call, exact)
    forward, backward = Harness(reference=True), Harness(reference=True)
    ours = forward.run(run, *inputs)
    with torch.no_grad():
        assert _as_good(ours, run(*inputs), run_exact(*wide)), f"{family}: forward"
    deferred = forward.counts["rms_norm"]
    misses = [why for why in forward.report.refusals if why.what == "rms_norm"]
    norms = f"{deferred} of {deferred + len(misses)}" if deferred or misses else ""
    pairs = str(sum(site.program.paired for site in forward.fused) or "")
    if not training:
        return [family, norms, pairs, _fraction(forward), _reasons(misses)]
    gradients = []
    steps = [(functools.partial(backward.train, run), model, inputs), (run, model, inputs)]
    for step, of, given in [*steps, (run_exact, exact, wide)]:
        of.zero_grad()
        step(*given).square().mean().backward()
        gradients.append([p.grad for p in of.parameters() if p.grad is not None])
    flat = [torch.cat([g.double().flatten() for g in group]) for group in gradients]
    assert _as_good(*flat), f"{family}: backward"
    return [
        family,
        norms,
        pairs,
        str(forward.counts["constant_mask"] or ""),
        _fraction(forward),
        _fraction(backward),
        _reasons(misses),
    ]


TOKENS = 256
#: The arguments of configs and calls of diffusers' models; each model is given those that it has.
CONFIG = {
    "num_layers": LAYERS, "num_single_layers": LAYERS, "num_attention_heads": 2,
    "attention_head_dim": 16, "in_channels": 16, "out_channels": 16, "sample_size": 32,
    "axes_dims_rope": (4, 4, 8), "qk_norm": "rms_norm", "guidance_embeds": False, "ffn_dim": 64,
    "cross_attn_norm": True, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
    **dict.fromkeys(
        ("joint_attention_dim", "caption_projection_dim", "pooled_projection_dim", "text_dim",
         "cross_attention_dim", "caption_channels", "text_embed_dim", "time_embed_dim"), 32
    ),
}  # fmt: skip
INPUTS = {
    "hidden_states": (2, TOKENS, 16), "encoder_hidden_states": (2, TOKENS, 32),
    "pooled_projections": (2, 32), "timestep": torch.ones(2), "return_dict": False,
    "class_labels": torch.zeros(2, dtype=torch.int64), "guidance": None,
    "img_shapes": [[(1, 16, 16)]] * 2, "encoder_attention_mask": None,
    **dict.fromkeys(("img_ids", "txt_ids"), torch.zeros(TOKENS, 3)),
    **dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.ones(2, 2)),
}  # fmt: skip
IMAGE, VIDEO = ({"hidden_states": shape} for shape in ((2, 16, 32, 32), (2, 16, 1, 32, 32)))


def _diffusion(
    file: str, name: str, inputs: dict[str, Any], **config: Any
) -> Callable[[int], tuple[Any, ...]]:
    """A maker as in ``FAMILIES`` of a class of diffusers; ``inputs`` and ``config`` are those that
    differ from the ones above. A tuple in ``inputs`` is the shape of a random tensor."""

    def chosen(function: Any, *given: dict[str, Any]) -> dict[str, Any]:
        known = inspect.signature(function).parameters
        return {k: v for each in given for k, v in each.items() if k in known}

    def make(_layers: int) -> tuple[Any, ...]:
        kind = getattr(importlib.import_module(f"diffusers.models.transformers.{file}"), name)
        values = chosen(kind.forward, INPUTS, inputs)
        values = {k: torch.randn(v) if isinstance(v, tuple) else v for k, v in values.items()}
        tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}

        def call(model: Any, *given: torch.Tensor) -> torch.Tensor:
            return model(**values | dict(zip(tensors, given, strict=True)))[0]

        return kind(**chosen(kind.__init__, CONFIG, config)), call, list(tensors.values())

    return make


MODELS = {
    "DiT": _diffusion(
        "dit_transformer_2d", "DiTTransformer2DModel", IMAGE, num_embeds_ada_norm=8
    ),
    "PixArt": _diffusion("pixart_transformer_2d", "PixArtTransformer2DModel", IMAGE),
    "SD3.5": _diffusion("transformer_sd3", "SD3Transformer2DModel", IMAGE),
    "FLUX.1": _diffusion("transformer_flux", "FluxTransformer2DModel", {}),
    "FLUX.2": _diffusion(
        "transformer_flux2", "Flux2Transformer2DModel",
        dict.fromkeys(("img_ids", "txt_ids"), torch.zeros(TOKENS, 4)), axes_dims_rope=(4, 4, 4, 4)
    ),
    "Chroma": _diffusion(
        "transformer_chroma", "ChromaTransformer2DModel", {},
        approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=1,
    ),
    "Qwen-Image": _diffusion(
        "transformer_qwenimage", "QwenImageTransformer2DModel", {}, out_channels=4
    ),
    "AuraFlow": _diffusion(
        "auraflow_transformer_2d", "AuraFlowTransformer2DModel", IMAGE,
        num_mmdit_layers=LAYERS, num_single_dit_layers=LAYERS,
    ),
    "CogView4": _diffusion("transformer_cogview4", "CogView4Transformer2DModel", IMAGE),
    "Sana": _diffusion("sana_transformer", "SanaTransformer2DModel", IMAGE, qk_norm=None),
    "LTX-Video": _diffusion(
        "transformer_ltx", "LTXVideoTransformer3DModel",
        {"num_frames": 1, "height": 16, "width": 16}, qk_norm="rms_norm_across_heads",
    ),
    "Wan": _diffusion(
        "transformer_wan", "WanTransformer3DModel", VIDEO, qk_norm="rms_norm_across_heads"
    ),
    "SkyReels-V2": _diffusion(
        "transformer_skyreels_v2", "SkyReelsV2Transformer3DModel", VIDEO,
        qk_norm="rms_norm_across_heads",
    ),
}  # fmt: skip


def _cast(inputs: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


def _computes_in(dtype: torch.dtype, model: Any, call: Any, inputs: Any) -> bool:
    """Does the model run in ``dtype``? Torch's grouped products of experts do not in float64."""
    try:
        with torch.no_grad():
            call(copy.deepcopy(model).to(dtype), *_cast(inputs, dtype))
    except RuntimeError:
        return False
    return True


def _fraction(harness: Any) -> str:
    return f"{len(harness.fused)} of {len(harness.report.sites)}"


def _as_good(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((ours - exact).norm() <= 1.2 * (eager - exact).norm())


def _reasons(misses: list[Any]) -> str:
    """Each reason once, with how often; paths of modules left out."""
    counts: dict[str, int] = {}
    for miss in misses:
        reason = re.sub(r" in \w+\.[\w.]+", "", miss.text.split(":")[0])
        reason = re.sub(r"\bargs\.0\.[\w.]+", "a product", reason)
        counts[reason] = counts.get(reason, 0) + 1
    return "; ".join(f"{times} x {reason}" for reason, times in counts.items())


if __name__ == "__main__":
    main()
