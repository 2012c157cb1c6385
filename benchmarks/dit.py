# SPDX-License-Identifier: Apache-2.0
"""Diffusion transformers, forward only: torch.compile and coda in one process, sustained, A B B A.

``python -m benchmarks dit OUT.json [MODEL ...]`` takes diffusers' own models, with the widths of
the real ones, fewer layers and random weights; diffusers must be importable (its Python files on
``PYTHONPATH`` suffice). For each model: ms of a call, the peak MiB beside weights and inputs, the
error against float32, what fused, and with ``--profile`` the largest kernels. ``--no-reorder``
switches Inductor's search for an order of kernels with a low peak off. ``--float8`` is
torchao's dynamic FP8, scaled by rows.

``python -m coda_inductor tune benchmarks.dit:flux`` measures the sites of one first, or
``benchmarks.dit:flux_float8``.
"""

import argparse
import copy
import dataclasses
import gc
import importlib
import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import account, environment, worth_models
from .measure import Variants, in_turns, peak_mib, relative_error, synchronize
from .worth import sustained

VARIANTS, ROUNDS = ("compile", "coda"), 2
DTYPE = torch.bfloat16
#: A model, and its arguments by position and by name.
Model = tuple[nn.Module, tuple[()], dict[str, Any]]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def _of(name: str, **config: Any) -> nn.Module:
    file, name = name.split()
    file = file if "transformer" in file else f"transformer_{file}"
    module = importlib.import_module(f"diffusers.models.transformers.{file}")
    with torch.device("cuda"):
        model = getattr(module, name)(**config).to(DTYPE).eval()
    wide_parts = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}  # as loaded by diffusers
    for name, parameter in model.named_parameters():
        if wide_parts.intersection(name.split(".")):
            parameter.data = parameter.data.float()
    return model


def _called(model: nn.Module, **given: Any) -> Model:
    """``model`` with its arguments by name; a tuple of sizes is a random tensor."""
    sized = {k: v for k, v in given.items() if isinstance(v, tuple) and isinstance(v[0], int)}
    return model, (), {"return_dict": False, **given, **{k: _random(*v) for k, v in sized.items()}}


def _ones(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype)


def flux(side: int = 64) -> Model:
    """FLUX.1, an image of 1024 x 1024 (``side`` 64) and 512 tokens of text."""
    image, text = side * side, 512
    model = _of("flux FluxTransformer2DModel", num_layers=4, num_single_layers=8,
                guidance_embeds=True)  # fmt: skip
    ids = {"img_ids": image, "txt_ids": text}
    return _called(
        model, hidden_states=(1, image, 64), encoder_hidden_states=(1, text, 4096),
        pooled_projections=(1, 768), timestep=(1,), guidance=(1,),
        **{name: torch.zeros(rows, 3, device="cuda") for name, rows in ids.items()},
    )  # fmt: skip


def sd3() -> Model:
    """SD3.5 Large, an image of 1024 x 1024 with classifier-free guidance: a batch of 2."""
    model = _of(
        "sd3 SD3Transformer2DModel", sample_size=128, num_layers=8, num_attention_heads=38,
        caption_projection_dim=2432, pooled_projection_dim=2048, pos_embed_max_size=192,
        qk_norm="rms_norm", out_channels=16,
    )  # fmt: skip
    return _called(model, hidden_states=(2, 16, 128, 128), encoder_hidden_states=(2, 333, 4096),
                   pooled_projections=(2, 2048), timestep=(2,))  # fmt: skip


def qwen() -> Model:
    """Qwen-Image, an image of 1024 x 1024, the text's mask as its pipeline passes it."""
    model = _of("qwenimage QwenImageTransformer2DModel", num_layers=6)
    return _called(model, hidden_states=(1, 4096, 64), encoder_hidden_states=(1, 256, 3584),
                   encoder_hidden_states_mask=_ones(1, 256), timestep=(1,),
                   img_shapes=[[(1, 64, 64)]])  # fmt: skip


def _video(name: str, frames: int) -> Model:
    """1.3B widths, four layers: so many latent frames of 480 x 832."""
    model = _of(name, num_attention_heads=12, num_layers=4, ffn_dim=8960)
    return _called(model, hidden_states=(1, 16, frames, 60, 104),
                   encoder_hidden_states=(1, 512, 4096),
                   timestep=torch.full((1,), 500, device="cuda"))  # fmt: skip


def wan() -> Model:
    """Wan 2.1, 1.3B: 81 frames of 480 x 832."""
    return _video("wan WanTransformer3DModel", 21)


def flux_float8() -> Model:
    """The same as ``flux``, in FP8."""
    model, *inputs = flux()
    return worth_models.quantized(model), *inputs


def sd3_float8() -> Model:
    """The same as ``sd3``, in FP8."""
    model, *inputs = sd3()
    return worth_models.quantized(model), *inputs


def ltx() -> Model:
    """LTX-Video: 121 frames of 512 x 704, of which 16 x 16 x 22 tokens come; nothing was tuned."""
    model = _of("ltx LTXVideoTransformer3DModel", num_layers=8)
    return _called(
        model, num_frames=16, height=16, width=22, hidden_states=(1, 5632, 128),
        encoder_hidden_states=(1, 128, 4096), encoder_attention_mask=_ones(1, 128),
        timestep=torch.full((1,), 500, device="cuda"),
    )  # fmt: skip


def z_image() -> Model:
    """Z-Image, an image of 1024 x 1024 and 256 tokens of text; nothing was tuned."""
    model = _of("z_image ZImageTransformer2DModel", n_layers=8)
    image, text = _random(16, 1, 128, 128), _random(256, 2560)
    return _called(model, x=[image], cap_feats=[text], t=_random(1).abs())


def hunyuan_video() -> Model:
    """HunyuanVideo: 33 frames of 544 x 960; nothing was tuned."""
    model = _of("hunyuan_video HunyuanVideoTransformer3DModel", num_layers=2, num_single_layers=4)
    return _called(
        model, hidden_states=(1, 16, 9, 68, 120), encoder_hidden_states=(1, 256, 4096),
        encoder_attention_mask=_ones(1, 256), pooled_projections=(1, 768), guidance=(1,),
        timestep=torch.full((1,), 500, device="cuda"),
    )  # fmt: skip


def skyreels() -> Model:
    """SkyReels V2, 1.3B: 49 frames of 480 x 832; nothing was tuned."""
    return _video("skyreels_v2 SkyReelsV2Transformer3DModel", 13)


def hunyuan_dit() -> Model:
    """HunyuanDiT, an image of 1024 x 1024, a batch of 2; nothing was tuned."""
    model = _of(
        "hunyuan_transformer_2d HunyuanDiT2DModel", num_layers=6, hidden_size=1408, in_channels=4,
        patch_size=2, sample_size=128, text_len_t5=256, cross_attention_dim=1024,
    )  # fmt: skip
    return _called(
        model, hidden_states=(2, 4, 128, 128), timestep=_random(2).abs(),
        encoder_hidden_states=(2, 77, 1024), encoder_hidden_states_t5=(2, 256, 2048),
        text_embedding_mask=_ones(2, 77, dtype=DTYPE),
        text_embedding_mask_t5=_ones(2, 256, dtype=DTYPE), image_meta_size=(2, 6),
        style=torch.zeros(2, dtype=torch.long, device="cuda"),
        image_rotary_emb=(torch.randn(4096, 88, device="cuda"),) * 2,
    )  # fmt: skip


MAKERS = (flux, sd3, qwen, wan, ltx, z_image, hunyuan_video, skyreels, hunyuan_dit)
MODELS: dict[str, Callable[[], Model]] = {make.__name__: make for make in MAKERS}


def measured(model: nn.Module, inputs: dict[str, Any], how: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model, by variant."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    variants = Variants()
    wide = pytree.tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, inputs)
    want = pytree.tree_leaves(copy.deepcopy(model).float()(**wide))[0]
    if how.float8:
        worth_models.quantized(model)
    for name in VARIANTS:
        order = {"reorder_for_peak_memory": not how.no_reorder}
        backend = {"compile": "inductor"}.get(name, name)
        call = torch.compile(model, backend=backend, options=order)
        variants.add(name, lambda call=call: lambda: pytree.tree_leaves(call(**inputs))[0])
    samples: dict[str, list[float]] = {name: [] for name in variants.calls}
    for name in in_turns([*samples], ROUNDS):
        samples[name].append(sustained(variants.calls[name]))
    found: dict[str, Any] = {"errors": variants.errors}
    for name, call in variants.calls.items():
        figures = {"ms": statistics.mean(samples[name]), "samples": samples[name]}
        figures |= {"peak_mib": peak_mib(call), "error": relative_error(call(), want)}
        found[name] = figures | ({"kernels": largest(call)} if how.profile else {})
    synchronize()
    return found


def largest(call: Callable[[], Any], count: int = 24) -> dict[str, Any]:
    """The kernels of a call that take longest, by name."""
    kernels = account.read(account.traced(call), account.CALLS)
    longest = sorted(kernels.items(), key=lambda item: -item[1].us)[:count]
    return {environment.scrub(name): dataclasses.asdict(kernel) for name, kernel in longest}


def main(arguments: list[str]) -> None:
    """Measure the models that are named, or all."""
    import coda_inductor

    parser = argparse.ArgumentParser("python -m benchmarks dit", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--no-reorder", action="store_true", help="keep the graph's order")
    options = parser.parse_args(arguments)
    out: dict[str, Any] = {"environment": environment.describe(["dit", *arguments])}
    for name in options.models or MODELS:
        torch.manual_seed(0)
        torch._dynamo.reset()
        with torch.no_grad():
            model, _, inputs = MODELS[name]()
            found = measured(model, inputs, options)
            out[name + " float8" * options.float8] = found
            del model, inputs
        sites = [site for report in coda_inductor.reports()[-1:] for site in report.sites]
        fused = Counter(pattern for site in sites if site.fused for pattern in site.patterns)
        found |= {"fused": fused, "sites": f"{sum(s.fused for s in sites)} of {len(sites)}"}
        options.file.write_text(json.dumps(out, indent=1))
        print(name, {v: round(found[v]["ms"], 3) for v in VARIANTS if v in found}, found["sites"],
              {v: round(found[v]["error"], 5) for v in VARIANTS if v in found},
              dict(fused), found["errors"], flush=True)  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
