# SPDX-License-Identifier: Apache-2.0
"""Whole models as people train them: all layers, random bf16 weights, on one GPU.

``python -m benchmarks whole OUT.json`` starts a process a variant. They compile side by side, their
weights given back meanwhile (storages of no bytes, as FSDP2 leaves them), and then take turns, A B
B A: milliseconds of a step (``worth.sustained``), joules, and the peak with weights and gradients.
A variant is "[MODEL] RECIPE BACKEND [ROWSxTOKENS] [OPTIMIZER] [in_backward] [memory=SHARE]", as in
``--variant "qwen2 lora coda 2x4096 adamw"``; of 8 bits are torchao's AdamW (``adamw8``) and that of
bitsandbytes (``bnb8``). OUT.json keeps those that it has, and commands on other cards may write it
meanwhile. coda is compared with what ran on the same card. ``--render`` writes it into
docs/results. With ``--python NAME=FILE``, "NAME: VARIANT" runs in another interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from coda_inductor.optim import in_backward

from . import energy, environment, headline, measure, models, worth, worth_models

VARIANTS = ("bf16 eager", *(f"{recipe} {backend}" for recipe in ("bf16", "rowwise", "tensorwise")
                            for backend in ("compile", "causal", "coda")))  # fmt: skip
#: ``causal``: torch.compile with SDPA told to be causal, as transformers does from 5.23 on.
BACKENDS = {"eager": "", "compile": "inductor", "causal": "inductor", "coda": "coda"}
#: Name -> that of ``models.MODELS``, and layers: all but of a mixture, whose eight are 5.4B.
MODELS = {"8B": ("8B-32", 32), "8Bx4": ("8B-32", 4),
          "qwen2": ("qwen2-28", 28), "qwen3_moe": ("qwen3_moe", 8),
          "14B": ("qwen3_14b", 40), "32B": ("qwen2_32b", 64), "tiny": ("tiny", 1)}  # fmt: skip
LORA = ("lora", "lora_rowwise", "lora_fp8", "qlora")
WORDS = {"model": MODELS, "recipe": ("bf16", "rowwise", "tensorwise", *LORA),
         "backend": BACKENDS, "optimizer": ("adamw", "adamw8", "bnb8"),
         "update": ("in_backward",)}  # fmt: skip
#: Words that are a number.
NUMBERS = {"shape": r"[1-9]\d*x[1-9]\d*", "memory": r"memory=0?\.\d+"}
#: Samples of a variant, FLOP/s of an H100's or H200's tensor cores in bf16, dense.
TURNS, PEAK = 2, 989e12
PAGE = environment.REPOSITORY / "docs" / "results" / "training.md"


def main(arguments: list[str]) -> None:
    """Measure, render; or, as one of the processes, be measured."""
    parser = headline.parser_of("whole", __doc__, "variant")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args(arguments)
    if options.part:
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        answer(options.part, options.file.with_suffix(f".{card}.lock"))
    elif options.render:
        put("measured", table(json.loads(options.file.read_text())))
    else:
        names = options.names or list(VARIANTS)
        try:
            [parsed(name.rpartition(": ")[2]) for name in names]
        except ValueError as error:
            parser.error(str(error))
        print(table(headline.measured("whole", names, options, TURNS)))


def parsed(variant: str) -> dict[str, str]:
    """What each word of a variant is; ValueError where one is nothing."""
    found = {"model": "8B", "shape": "1x8192", "optimizer": "", "update": "", "memory": ""}
    for word in variant.split():
        kinds = [kind for kind, known in WORDS.items() if word in known]
        kinds += [kind for kind, known in NUMBERS.items() if re.fullmatch(known, word)]
        if not kinds:
            known = ", ".join(word for words in WORDS.values() for word in words)
            raise ValueError(f"{variant!r}: {word!r} is none of {known}, and no ROWSxTOKENS")
        found[kinds[0]] = word
    if {"recipe", "backend"} - {*found}:
        raise ValueError(f"{variant!r} is no variant such as '8B bf16 coda 1x8192 adamw'")
    return found


def built(variant: str) -> tuple[worth_models.Workload, float]:
    """The model of a variant and its batch; FLOP of a token: 6 for each parameter, 4 of one that
    is not trained, those of a token's experts only, and the causal half of attention."""
    said = parsed(variant)
    (name, layers), recipe = MODELS[said["model"]], said["recipe"]
    rows, tokens = map(int, said["shape"].split("x"))
    if recipe == "bf16":
        workload = worth_models.stock(name, layers)
    elif "lora" in recipe:
        workload = worth_models.lora(name, layers, 0.1, recipe)
    else:
        workload = worth_models.float8(recipe, name, layers)
    if said["backend"] == "causal":
        models.make_causal(workload.model)
    config = workload.model.config
    ids = torch.randint(config.vocab_size, (rows, tokens), device=measure.device())
    workload.batch = {"input_ids": ids, "labels": ids}
    if said["memory"]:
        workload.options = {"memory": float(said["memory"].removeprefix("memory="))}
    embedding = workload.model.get_input_embeddings().weight
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    flops = 6.0 * layers * width * tokens
    for key, weight in workload.model.named_parameters():
        share = config.num_experts_per_tok / config.num_experts if "experts" in key else 1
        count = weight.numel() * (1 if weight.is_floating_point() else 2)  # two of 4 bits a byte
        flops += (6 if weight.requires_grad else 4) * share * count * (weight is not embedding)
    return workload, flops


def answer(variant: str, lock: Path) -> None:
    """Compile, then answer each line of stdin with a line of JSON."""
    sys.stdout = sys.stderr  # answers alone go to the other one
    began, said = time.perf_counter(), parsed(variant)
    with worth.turn(lock):
        workload, flops = built(variant)
        matrices = [p for p in workload.model.parameters() if p.ndim > 1]
        matrices = [getattr(p, "qdata", p) for p in matrices]  # of torchao's, which have no storage
        sizes = {p: p.untyped_storage().nbytes() for p in matrices}
        first = optimizer_of(said, workload.model)
        if not said["update"]:  # in_backward tells weights apart by their memory
            give_back(workload, sizes)
    step = workload.step((), BACKENDS[said["backend"]])
    awake = functools.partial(turn, workload, sizes, said, lock)
    with worth.compiled(step, awake, eager=said["backend"] == "eager"):
        del first
        line: dict[str, Any] = {"first_s": time.perf_counter() - began, "flops": flops}
        line["torch"] = torch.__version__
        card = torch.cuda.get_device_properties(0)
        line |= worth.facts(step) | {"gpu": card.name, "card": str(card.uuid)}
    for number, _ in enumerate(sys.stdin):
        if number:
            with awake(), contextlib.suppress(energy.EnergyError):
                step()
                line = {"ms": worth.sustained(step, 1.5, 3.0, least=3)}
                line |= energy.joules(step, 3.0, energy.Counter())
        print(json.dumps(line), flush=True, file=sys.__stdout__)


@contextlib.contextmanager
def turn(
    workload: worth_models.Workload, sizes: dict[Any, int], said: dict[str, str], lock: Path
) -> Iterator[None]:
    """This process has the GPU, random weights of these bytes, and an optimizer without state."""
    with worth.turn(lock):
        with torch.no_grad():
            for weight, size in sizes.items():
                weight.untyped_storage().resize_(size)
                if weight.dtype == torch.float8_e4m3fn:
                    weight.copy_(100 * torch.randn_like(weight, dtype=torch.bfloat16))
                else:
                    weight.normal_(std=0.02) if weight.is_floating_point() else weight.random_()
        workload.optimizer = optimizer_of(said, workload.model)
        try:
            yield
        except RuntimeError as error:
            text = f"{type(error).__name__}: {str(error)[:160]}"
            print(json.dumps({"error": text}), flush=True, file=sys.__stdout__)
            os._exit(1)  # with the lock: its memory is taken until it ends
        give_back(workload, sizes)


def optimizer_of(said: dict[str, str], model: torch.nn.Module) -> Any:
    """The optimizer of a variant, without state, for what is trained; None where it has none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not said["optimizer"]:
        return None
    if said["optimizer"] == "adamw8":
        from torchao.optim import AdamW8bit

        optimizer: Any = AdamW8bit(parameters, lr=1e-5)
    elif said["optimizer"] == "bnb8":
        from bitsandbytes import optim

        optimizer = optim.AdamW8bit(parameters, lr=1e-5)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    return in_backward(optimizer) if said["update"] else optimizer


def give_back(workload: worth_models.Workload, sizes: dict[Any, int]) -> None:
    """Leave the memory of weights, gradients and the optimizer's state to others."""
    workload.optimizer = None
    workload.model.zero_grad(set_to_none=True)
    for weight in sizes:
        weight.untyped_storage().resize_(0)


def put(mark: str, text: str) -> None:
    """Write ``text`` between the marks of this name in the page."""
    between = re.compile(f"(?<=<!-- {mark} -->\n).*?(?=<!-- /{mark} -->)", re.DOTALL)
    PAGE.write_text(between.sub(lambda _: text, PAGE.read_text()))


def where(about: dict[str, Any]) -> str:
    """A sentence about the machine."""
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    return f"Measured on one {about['gpu']}: {versions}; commit {about['commit']}."


def shown(ms: float, samples: list[dict[str, Any]]) -> str:
    """The median, and the least and most where they differ by more than 3 %."""
    least, most = (pick(each["ms"] for each in samples) for pick in (min, max))
    return f"{ms:.0f}" + f" ({least:.0f} to {most:.0f})" * (most > 1.03 * least)


def table(found: dict[str, Any]) -> str:
    """What stands between the marks of docs/results/training.md."""
    rows, about, errors, of = [], found["environment"], [], {}
    kinds = ("model", "recipe", "shape", "optimizer")
    for name, result in sorted(found["results"].items(), key=lambda item: "coda" in item[0]):
        samples = [each for each in result["samples"] if "ms" in each]
        if not samples:
            errors.append(f"\n{name} did not run: {result.get('error', 'it ended')}\n")
            continue
        python, _, variant = name.rpartition(": ")
        said = parsed(variant)
        batch, length = map(int, said["shape"].split("x"))
        tokens, ms = batch * length, statistics.median(each["ms"] for each in samples)
        # Older results have the parameters of the 8B.
        each = result.get("flops") or 6 * (result["parameters"] + 32 * 4096 * length)
        flops = 1e3 * each * tokens / ms
        joules = [each["joules"] / tokens for each in samples if "joules" in each]
        pair = *(said[kind] for kind in kinds), result.get("card", ""), python
        of[pair, said["backend"]] = ms
        stock = of.get((pair, "causal"))
        rows.append([
            name, result.get("gpu", "").removeprefix("NVIDIA ")[:4], shown(ms, samples),
            f"{stock / ms:.3f}x" if stock and said["backend"] == "coda" else "",
            f"{1e3 * tokens / ms:,.0f}", f"{flops / 1e12:.0f}",
            f"{flops / PEAK:.1%}", f"{result['peak']:.1f}",
            f"{1e3 * statistics.mean(joules):.1f}" if joules else "-", f"{result['first_s']:.0f}",
        ])  # fmt: skip
    heads = ("variant", "GPU", "ms", "causal over it", "tokens a second", "TFLOP/s", "of the peak",
             "peak GiB", "mJ a token", "first")  # fmt: skip
    rows.sort(key=lambda row: [parsed(row[0].rpartition(": ")[2])[kind] for kind in kinds])
    text = tabulate(rows, heads, "github", disable_numparse=True)
    return f"{where(about)}\n\n{text}\n{''.join(errors)}"
