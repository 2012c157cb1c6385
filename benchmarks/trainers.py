# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's trainers as users run them: ``Trainer``'s own loop with TRL's defaults
(checkpoints, autocast to bf16, fused AdamW, clipped gradients), random weights and tokens.

``python -m benchmarks trainers OUT.json`` starts a process a variant, "CASE BACKEND". They compile
side by side, without weights, and take turns, A B B A: milliseconds of a step, data and logs
included, and the peak GiB with weights and the optimizer. A first step that compiles several graphs
keeps its turn all the while: ``--beside`` takes them at once, where all models fit. ``--curve
STEPS`` trains on the text of ``curve`` instead and keeps the logs. ``--layers`` cuts models, in
which heads then weigh more.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import TrainerCallback

from . import curve, headline, measure, models, whole, worth, worth_models

#: Name -> TRL's trainer, model of ``models``, its layers, dtype, learning rate of TRL's scripts.
CASES = {"sft_lora": ("SFT", "qwen3_8b", 36, torch.bfloat16, 2e-4),
         "sft": ("SFT", "qwen3", 28, torch.bfloat16, 2e-5),
         "sft32": ("SFT", "qwen3", 28, torch.float32, 2e-5),
         "packed": ("SFT", "qwen3", 28, torch.bfloat16, 2e-5),
         "padded": ("SFT", "qwen3", 28, torch.bfloat16, 2e-5),
         "dpo_lora": ("DPO", "qwen3_4b", 36, torch.bfloat16, 5e-6),
         "grpo": ("GRPO", "qwen3_4b", 36, torch.bfloat16, 1e-6)}  # fmt: skip
#: Cases whose batches need a mask.
MASKED = ("packed", "padded")
#: ``compile`` is the flag ``torch_compile``; ``best``, with SDPA told to be causal and an embedding
#: without hooks; ``flex``, with FlexAttention; ``coda_fp8``, on weights that torchao put into FP8.
BACKENDS = ("eager", "liger", "best", "coda", "compile", "flex", "coda_fp8")
VARIANTS = [f"{case} {backend}" for case in CASES for backend in BACKENDS[:4] if case not in MASKED]
VARIANTS += [f"packed {backend}" for backend in BACKENDS if backend not in ("best", "coda_fp8")]
VARIANTS += [f"padded {backend}" for backend in BACKENDS if backend != "coda_fp8"]
VARIANTS += ["sft_lora coda_fp8", "dpo_lora coda_fp8"]
#: Of a batch, of which DPO's rows are pairs, and of random data; words of the tokenizer.
ROWS, LENGTH, BATCHES, WORDS = 8, 1024, 16, 8192


def main(arguments: list[str]) -> None:
    """Measure or train; or, as one of the processes, be measured or trained."""
    parser = headline.parser_of("trainers", __doc__, "variant")
    parser.add_argument("--layers", type=int, default=99)
    parser.add_argument("--curve", type=int, default=0, metavar="STEPS")
    parser.add_argument("--beside", action="store_true")
    options = parser.parse_args(arguments)
    if options.part:
        sys.exit(answer(options.part, options.file.with_suffix(".lock")))
    chosen = [v for v in VARIANTS if any(fnmatch.fnmatch(v, n) for n in options.names or ["*"])]
    how = f"{options.layers} {options.curve} {options.beside:d}"
    names = [f"{name} {how}" for name in chosen or options.names]
    threads = max(1, (os.cpu_count() or 1) // len(names))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    headline.measured("trainers", names, options, 0 if options.curve else whole.TURNS + 1)


def trainer_of(case: str, backend: str, layers: int, steps: int) -> Any:
    """TRL's trainer of a variant, for so many steps on text; 0: for ever, on random tokens."""
    import peft
    import transformers
    import trl

    from coda_inductor.transformers import CodaCallback, free_inputs

    kind, name, most, dtype, rate = CASES[case]
    shape = models.OTHERS[name][1] | {"num_hidden_layers": min(layers, most)}
    config = transformers.Qwen3Config(**shape, tie_word_embeddings=name != "qwen3_8b")
    torch.manual_seed(0)
    with torch.device(measure.device()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    callback: Any = CodaCallback() if "coda" in backend else TrainerCallback()
    if backend == "coda_fp8":
        worth_models.quantized(model)
    elif backend == "best":
        models.make_causal(model)
        callback.on_train_begin = lambda *_, model, **__: free_inputs(model) and None
    elif backend == "flex":
        model.set_attn_implementation("flex_attention")
    how = getattr(trl, f"{kind}Config")(
        tempfile.mkdtemp(), learning_rate=rate, max_steps=steps or 10**6, report_to="none",
        save_strategy="no", logging_steps=1 if steps else 10, disable_tqdm=True,
        per_device_train_batch_size=ROWS // 2 if kind == "DPO" else ROWS,
        torch_compile=backend in ("best", "compile", "flex"), use_liger_kernel=backend == "liger",
        use_cpu=measure.device() == "cpu",
        **({"packing": case == "packed", "max_length": LENGTH} if kind == "SFT" else {}),
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear",
                           task_type="CAUSAL_LM")  # fmt: skip
    words = {"<end>" if n == 1 else str(n): n for n in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return getattr(trl, f"{kind}Trainer")(
        model, args=how, callbacks=[callback], peft_config=lora if "lora" in case else None,
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>"  # noqa: S106
        ), **data(case, kind, steps),
    )  # fmt: skip


def data(case: str, kind: str, steps: int) -> dict[str, Any]:
    """What a trainer takes of data. All batches have one shape, but those of case ``padded``."""
    from datasets import Dataset

    count = (steps or BATCHES) * ROWS * LENGTH
    tokens = curve.text()[0][:count].long() if steps else torch.randint(2, WORDS, (count,))
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    listed, half = rows.tolist(), LENGTH // 2
    if case == "packed":  # pairs of documents, of which no two have the same border
        cuts = torch.randint(LENGTH // 32, half, (len(rows),)).tolist()
        listed = [p for row, n in zip(listed, cuts, strict=True) for p in (row[:n], row[n:])]
    if case == "padded":
        cuts = torch.randint(LENGTH // 4, LENGTH + 1, (len(rows),)).tolist()
        listed = [row[:n] for row, n in zip(listed, cuts, strict=True)]
    if kind == "SFT":
        return {"train_dataset": Dataset.from_dict({"input_ids": listed})}
    said, ends = ([" ".join(map(str, ["", *row[part]])) for row in listed]
                  for part in (slice(half), slice(half, -1)))  # fmt: skip
    pairs = {"prompt": said, "chosen": ends, "rejected": ends[1:] + ends[:1]}

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """What a policy would have said: other rows at each step."""
        ends = rows.roll(trainer.state.global_step * ROWS, 0)[: len(prompts), half:].tolist()
        ids = [[*map(int, prompt.split())] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": ends, "logprobs": None}

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [statistics.mean(1 - n % 2 for n in ids) for ids in completion_ids]

    more = {"reward_funcs": even, "rollout_func": rollouts} if kind == "GRPO" else {}
    return {"train_dataset": Dataset.from_dict(pairs), **more}


class Stepped(TrainerCallback):
    """A step of a trainer that trains in a thread, to the next ``on_step_begin``; ``model`` and
    ``optimizer`` are there for ``whole.turn``."""

    optimizer = None

    def __init__(self, trainer: Any, lock: Path):
        self.trainer, self.model, self.lock = trainer, trainer.model, lock
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        matrices = [getattr(p, "qdata", p) for p in matrices]  # as in ``whole``
        self.sizes = {p: p.untyped_storage().nbytes() for p in matrices}
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        trainer.add_callback(self)
        self.thread = threading.Thread(target=trainer.train, daemon=True)
        self.thread.start()
        self.wait()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait until a step is asked for."""
        self.done.release()
        self.go.acquire()

    def wait(self) -> None:
        """Until the trainer is where a step begins."""
        while not self.done.acquire(timeout=1):
            if not self.thread.is_alive():
                raise RuntimeError("the trainer ended")

    def __call__(self) -> None:
        self.go.release()
        self.wait()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """This process has the GPU, and a model."""
        with whole.turn(self, self.sizes, {"optimizer": ""}, self.lock):  # type: ignore[arg-type]
            yield
            self.trainer.optimizer.state.clear()


def answer(variant: str, lock: Path) -> None:
    """Compile, or train; then answer each line of stdin with a line of JSON."""
    sys.stdout = sys.stderr  # answers alone go to the other one
    began, (case, backend, layers, steps, beside) = time.perf_counter(), variant.split()
    line: dict[str, Any] = {"torch": torch.__version__}
    import_module(f"trl.trainer.{CASES[case][0].lower()}_trainer")  # seconds, before the turn
    if int(steps):
        trainer, step = trainer_of(case, backend, int(layers), int(steps)), None
        trainer.train()
        line["logs"] = trainer.state.log_history
    else:
        with worth.turn(lock):
            step = Stepped(trainer_of(case, backend, int(layers), 0), lock)
            whole.give_back(step, step.sizes)  # type: ignore[arg-type]
        step.lock = Path(tempfile.mkdtemp(), "lock") if int(beside) else lock
        with worth.compiled(step, step.awake, eager=backend in ("eager", "liger")):
            line["first_s"] = time.perf_counter() - began
            for _ in range(BATCHES // 2 if case == "padded" else 0):
                step()  # other lengths compile again: beside others too
            line["warm_s"] = time.perf_counter() - began
        step.lock = lock
    for number, _ in enumerate(sys.stdin):
        if step and number:
            with step.awake():
                torch.cuda.reset_peak_memory_stats()
                line = {"ms": worth.sustained(step, 0.8, 1.6, BATCHES if case == "padded" else 3)}
                line["peak"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(line), flush=True, file=sys.__stdout__)
