# SPDX-License-Identifier: Apache-2.0
"""Loss curves of small models on real text, under torch.compile and under coda.

``python -m benchmarks curve OUT.json`` trains each variant in a process, four side by side:
torch.compile with two seeds (``compile``, ``compile 1``) and coda with the first. ``again`` repeats
the first steps, to compare losses bit by bit; ``exact`` does so under deterministic algorithms.
``--variant`` takes shell patterns ("bf16*"); commands on other GPUs may write the same file.
``--render`` writes table and picture into docs/results, where those of h200_X.json are named X.

The text is the Python source of the standard library, torch and transformers, a file in forty held
out. Weights are in bf16, their masters in float32, as FSDP2 and Megatron have them; ``adamw`` has
no masters and clips nothing, so that ``in_backward`` may update the weights. ``lora_fp8`` quantizes
the frozen weights of ``lora``; ``r8`` is its rank in place of 16. coda fuses all that it may
(``gate="always"``). The held-out loss is eager's, whatever trained the weights; torchao's for FP8.
"""

import array
import fnmatch
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from coda_inductor.optim import Updated, in_backward

from . import environment, headline, measure, models, whole, worth, worth_models

#: Title -> torch.compile's run, coda's, and perhaps torch.compile's with another seed.
CURVES = {
    "bfloat16": ("bf16 compile", "bf16 coda", "bf16 compile 1"),
    "FP8 rowwise": ("rowwise compile", "rowwise coda", "rowwise compile 1"),
    "LoRA, dropout 0.1": ("lora compile", "lora coda", "lora compile 1"),
    "experts": ("experts compile", "experts coda", "experts compile 1"),
    "LoRA on FP8": ("lora compile", "lora_fp8 coda", "lora compile 1"),
    "LoRA on FP8, seed 1": ("lora compile 1", "lora_fp8 coda 1"),
    "LoRA on FP8, rank 8": ("lora compile r8", "lora_fp8 coda r8"),
    "LoRA on FP8, rank 64": ("lora compile r64", "lora_fp8 coda r64"),
    "AdamW in_backward": ("adamw compile", "adamw coda in_backward", "adamw compile 1"),
}
LABELS, COLORS = ("torch.compile", "coda", "another seed"), ("#9aa4b2", "#2f81f7", "#d6a24a")
VARIANTS = [*dict.fromkeys(itertools.chain(*CURVES.values())),
            *(f"{runs[1]} {how}" for how in ("again", "exact", "exact again")
              for runs in CURVES.values())]  # fmt: skip
#: Steps of a short run, between two held-out losses, and until the learning rate has risen.
SHORT, EVERY, RISE = 200, 100, 100
ROWS, LENGTH, HELD = 8, 1024, 8
SHAPE = {"hidden_size": 768, "intermediate_size": 2816, "num_hidden_layers": 12,
         "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 8192}  # fmt: skip
EXPERTS = {"intermediate_size": 512, "num_hidden_layers": 8, "num_experts": 16,
           "num_experts_per_tok": 4}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Train, or render."""
    parser = headline.parser_of("curve", __doc__, "variant")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args(arguments)
    if options.render:
        mark = options.file.stem.partition("_")[2]
        sys.exit(render(json.loads(options.file.read_text()), mark))
    if options.part:
        about = environment.describe(arguments[:-2], options.commit, "benchmarks.curve")
        keep = functools.partial(environment.keep, options.file, about)
        base = options.file.with_suffix(f".{options.steps}.pt")
        sys.exit(train(options.part, options.steps, keep, base))
    chosen = [n for n in VARIANTS if any(fnmatch.fnmatch(n, p) for p in options.names or ["*"])]
    call = [sys.executable, "-m", "benchmarks", "curve", *arguments, "--part"]
    with ThreadPoolExecutor(4) as threads:
        failed = sum(threads.map(lambda name: subprocess.call([*call, name]) != 0, chosen))
    if failed or not chosen:
        sys.exit(f"{failed} of {len(chosen)} failed; variants: {', '.join(VARIANTS)}")


def train(name: str, steps: int, keep: Any, base: Path) -> None:
    """Train one variant; ``keep`` gets its losses so far after each held-out loss. ``base`` is the
    file of the weights that adapters start from."""
    recipe, backend, *how = name.split()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    began, seed, short = time.perf_counter(), int("1" in how), min(SHORT, steps)
    last = short if {"again", "exact"} & {*how} else steps
    tokens, held = once(base.with_suffix(".text.pt"), text)
    torch.manual_seed(0 if "lora" in recipe else seed)
    model = model_of(recipe)
    if "lora" in recipe:
        model.load_state_dict(once(base, lambda: pretrained(model, tokens, steps)))
        if recipe == "lora_fp8":
            worth_models.quantized(model, least=16)
        torch.manual_seed(seed)
        rank = next((int(word[1:]) for word in how if word[0] == "r"), 16)
        model = worth_models.adapted(model, rank=rank).bfloat16()
    # With ``warn_only`` cuDNN's attention sums in any order; experts' torch.histc raises without.
    torch.use_deterministic_algorithms("exact" in how, warn_only=recipe == "experts")
    options = {"backend": "coda", "options": {"gate": "always"}} if backend == "coda" else {}
    function = torch.compile(model, dynamic=False, **options)
    found: dict[str, Any] = {"held_out": {"0": held_out(model, held)}, "losses": []}
    losses: list[Tensor] = []
    run = training(model, function, tokens, steps, seed, recipe, "in_backward" in how)
    for step, loss in enumerate(itertools.islice(run, last), 1):
        losses.append(loss)
        if step % EVERY == 0 or step in (short, steps):
            found["losses"] = torch.stack(losses[:SHORT]).tolist()
            found["held_out"][str(step)] = held_out(model, held)
            print(name, step, found["held_out"][str(step)], time.perf_counter() - began, flush=True)
            if backend == "coda":
                import coda_inductor

                sites = [site.fused for report in coda_inductor.reports() for site in report.sites]
                found["fused"] = f"{sum(sites)} of {len(sites)}"
            keep({name: found})


def once(file: Path, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, the same bits for all: the first process makes the file."""
    with worth.turn(file.with_suffix(".pt.lock")):
        if not file.exists():
            torch.save(make(), file)
    return torch.load(file, map_location=measure.device())


def pretrained(model: Any, tokens: Tensor, steps: int) -> dict[str, Tensor]:
    """The weights of ``model`` after a tenth of the steps in eager."""
    run = training(model, model, tokens, steps, 2, "bf16")
    list(itertools.islice(run, math.ceil(steps / 10)))
    return model.state_dict()


def text() -> tuple[Tensor, Tensor]:
    """Tokens to train on, and those held out. The commonest words, signs and indentations are one
    token each; what is rarer is spelled in bytes, which are the first 256."""
    import transformers

    packages = Path(torch.__file__).parent, Path(transformers.__file__ or "").parent
    files = [file for folder in (Path(sysconfig.get_path("stdlib")), *packages)
             for file in sorted(folder.rglob("*.py"))
             if "-packages/" not in str(file.relative_to(folder))]  # fmt: skip
    pieces = re.compile(r"\w+|\n *| +|[^\w\s]+|\s")
    sources = [file.read_text(errors="replace") for file in files]
    counts = Counter(itertools.chain.from_iterable(map(pieces.findall, sources)))
    common = sorted(counts, key=lambda piece: (-counts[piece], piece))[: SHAPE["vocab_size"] - 256]

    known = {piece: (number,) for number, piece in enumerate(common, 256)}
    parts = array.array("h"), array.array("h")
    for number, source in enumerate(sources):
        spelled = (known.get(piece) or piece.encode() for piece in pieces.findall(source))
        parts[number % 40 == 0].extend(itertools.chain.from_iterable(spelled))
    train, held = (torch.frombuffer(part, dtype=torch.int16) for part in parts)
    return train, held


def model_of(recipe: str) -> Any:
    """A Llama of 110M parameters, or an OLMoE of 170M."""
    from transformers import LlamaForCausalLM, OlmoeForCausalLM

    experts = recipe == "experts"
    kind: Any = OlmoeForCausalLM if experts else LlamaForCausalLM
    shape = SHAPE | (EXPERTS if experts else {})
    config = kind.config_class(**shape, use_cache=False, pad_token_id=0)
    if experts:
        config._experts_implementation = "grouped_mm"
    with torch.device(measure.device()):
        model = kind(config).bfloat16().train()
    models.make_causal(model)
    return worth_models.in_float8(model, recipe) if recipe == "rowwise" else model


def training(
    model: Any, function: Any, tokens: Tensor, steps: int, seed: int, recipe: str,
    within: bool = False,
) -> Iterator[Tensor]:  # fmt: skip
    """The loss of step after step: AdamW, a cosine to a tenth of the peak. ``within``: the backward
    pass updates the weights."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    mixed, peak = recipe != "adamw", 1e-3 if "lora" in recipe else 6e-4
    masters = [weight.detach().float() if mixed else weight for weight in weights]
    optimizer = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if within:
        in_backward(optimizer)
    order = torch.Generator().manual_seed(seed)
    for step in range(steps):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = peak * cosine * min(1.0, (step + 1) / RISE)
        starts = torch.randint(len(tokens) - LENGTH, (ROWS,), generator=order)
        loss = function(**batch(tokens, starts)).loss
        loss.backward()
        assert within == all(isinstance(weight.grad, Updated) for weight in weights)
        if mixed:
            for master, weight in zip(masters, weights, strict=True):
                master.grad = weight.grad.float()
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if mixed:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        model.zero_grad(set_to_none=True)
        yield loss.detach()


def batch(tokens: Tensor, starts: Tensor) -> dict[str, Tensor]:
    """The rows of ``tokens`` that begin at ``starts``."""
    ids = tokens[(starts[:, None] + torch.arange(LENGTH)).to(tokens.device)].long()
    return {"input_ids": ids, "labels": ids}


@torch.no_grad()
def held_out(model: Any, tokens: Tensor) -> float:
    """The mean loss of ``HELD`` batches from all over the text, without dropout."""
    model.eval()
    starts = torch.linspace(0, len(tokens) - LENGTH - 1, HELD * ROWS).long().split(ROWS)
    losses = [model(**batch(tokens, each)).loss for each in starts]
    model.train()
    return torch.stack(losses).mean().item()


def render(found: dict[str, Any], mark: str) -> None:
    """Write the table between the marks of this name; and the picture: held-out losses, below them
    what they are over torch.compile's."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows, runs = [], found["results"]
    drawn = {title: names for title, names in CURVES.items() if runs.keys() >= {*names}}
    figure = Figure(figsize=(2.5 * len(drawn), 4.4), layout="constrained")
    panels = figure.subplots(2, len(drawn), sharex="col", squeeze=False)
    for (title, names), above, below in zip(drawn.items(), *panels, strict=True):
        curves = [runs[name]["held_out"] for name in names]
        stock, mine, *other = curves
        both, *seeds = (max(stock.keys() & each, key=int) for each in curves[1:])
        rows.append([
            title, both, *(f"{curve[both]:.4f}" for curve in (stock, mine)),
            f"{mine[both] - stock[both]:+.4f}",
            *([f"{other[0][n] - stock[n]:+.4f} ({n})" for n in seeds] or [""]),
            same(runs, names[1]), same(runs, f"{names[1]} exact"), runs[names[1]]["fused"],
        ])  # fmt: skip
        for curve, run, color in zip(curves, LABELS, COLORS, strict=False):
            steps = sorted(stock.keys() & curve, key=int)[1:]
            above.plot([*map(int, steps)], [curve[n] for n in steps], color=color, label=run)
            over = [curve[n] - stock[n] for n in steps]
            below.plot([*map(int, steps)], over, color=color)
        above.set_title(title, fontsize="medium")
        below.set(xlabel="step")
    panels[0][0].set(ylabel="held-out loss")
    panels[1][0].set(ylabel="over torch.compile's")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curve"}):
        figure.savefig(whole.PAGE.with_name(f"{mark}.svg"), metadata={"Date": None})
    heads = ("", "steps", *LABELS[:2], "difference", f"{LABELS[2]} (steps)", "bits again",
             "deterministic", "fused")  # fmt: skip
    text = tabulate(rows, heads, "github", disable_numparse=True)
    image = f"![held-out losses, and what they are over torch.compile's]({mark}.svg)"
    whole.put(mark, f"{whole.where(found['environment'])}\n\n{text}\n\n{image}\n")


def same(runs: dict[str, Any], name: str) -> str:
    """Whether a run had the same losses again, to the last bit."""
    if name not in runs or f"{name} again" not in runs:
        return "not run"
    one, two = (runs[each]["losses"] for each in (name, f"{name} again"))
    equal = [a == b for a, b in zip(one, two, strict=False)]
    return f"{len(equal)} steps" if all(equal) else f"differ from step {equal.index(False) + 1} on"
