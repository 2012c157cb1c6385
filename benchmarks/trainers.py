# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's trainers as users run them: ``Trainer``'s own loop with TRL's defaults
(checkpoints, autocast to bf16, fused AdamW, clipped gradients), random weights and tokens.

``python -m benchmarks trainers OUT.json`` starts a process a variant, "CASE BACKEND". They compile
side by side, without weights, and take turns, A B B A: milliseconds of a step, data and logs
included, and the peak GiB with weights and the optimizer. ``--curve STEPS`` trains on the text of
``curve`` instead and keeps the logs. ``--layers`` cuts models, in which heads then weigh more.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from . import curve, headline, measure, models, whole, worth

#: Qwen3's widths: hidden, inner, heads, those of keys and values, layers, tied head.
SHAPES = {"tiny": (64, 128, 4, 2, 2, True), "1.7B": (2048, 6144, 16, 8, 28, True),
          "4B": (2560, 9728, 32, 8, 36, True), "8B": (4096, 12288, 32, 8, 36, False)}  # fmt: skip
#: Name -> TRL's trainer, model, dtype of weights, and the learning rate of TRL's scripts.
CASES: dict[str, tuple[str, str, torch.dtype, float]] = {
    "sft_lora": ("SFT", "8B", torch.bfloat16, 2e-4), "sft": ("SFT", "1.7B", torch.bfloat16, 2e-5),
    "sft32": ("SFT", "1.7B", torch.float32, 2e-5), "packed": ("SFT", "1.7B", torch.bfloat16, 2e-5),
    "dpo_lora": ("DPO", "4B", torch.bfloat16, 5e-6), "grpo": ("GRPO", "4B", torch.bfloat16, 1e-6),
}  # fmt: skip
#: ``compile`` is the flag ``torch_compile``; ``regions``, with accelerate's variable: block by
#: block; ``causal``, with SDPA told to be causal; ``flex``, with FlexAttention.
BACKENDS = ("eager", "liger", "compile", "regions", "causal", "flex", "coda")
VARIANTS = [f"{case} {backend}" for case in CASES for backend in BACKENDS
            if backend != ("causal" if case == "packed" else "flex")]  # fmt: skip
#: Of a batch, of which DPO's rows are pairs, and what the data has; words of the tokenizer.
ROWS, LENGTH, BATCHES, WORDS = 8, 1024, 64, 8192


def main(arguments: list[str]) -> None:
    """Measure or train; or, as one of the processes, be measured or trained."""
    parser = headline.parser_of("trainers", __doc__, "variant")
    parser.add_argument("--layers", type=int, default=99)
    parser.add_argument("--curve", type=int, default=0, metavar="STEPS")
    options = parser.parse_args(arguments)
    if options.part:
        sys.exit(answer(options.part, options.file.with_suffix(".lock")))
    chosen = [v for v in VARIANTS if any(fnmatch.fnmatch(v, n) for n in options.names or ["*"])]
    names = [f"{name} {options.layers} {options.curve}" for name in chosen or options.names]
    found = headline.measured("trainers", names, options, 0 if options.curve else whole.TURNS)
    for name in names:
        if samples := found["results"][name]["samples"]:
            ms = statistics.median(each["ms"] for each in samples)
            print(f"{name:24} {ms:7.1f} ms {1e3 * ROWS * LENGTH / ms:7,.0f} tokens/s "
                  f"{max(each['peak'] for each in samples):6.1f} GiB")  # fmt: skip


def trainer_of(case: str, backend: str, layers: int, tokens: Tensor, **more: Any) -> Any:
    """TRL's trainer of a variant on ``tokens``; ``more`` are arguments of its config."""
    import peft
    import transformers
    import trl

    from coda_inductor.transformers import CodaCallback

    kind, size, dtype, rate = CASES[case]
    hidden, inner, heads, kv, most, tied = SHAPES[size]
    config = transformers.Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, head_dim=128,
        num_key_value_heads=kv, num_hidden_layers=min(layers, most), tie_word_embeddings=tied,
        vocab_size=WORDS if size == "tiny" else 151936, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(measure.device()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if backend == "causal":
        models.make_causal(model)
    elif backend == "flex":
        model.set_attn_implementation("flex_attention")
    elif backend == "regions":
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "1"
    how = getattr(trl, f"{kind}Config")(
        tempfile.mkdtemp(), learning_rate=rate, save_strategy="no", report_to="none",
        per_device_train_batch_size=ROWS // 2 if kind == "DPO" else ROWS, disable_tqdm=True,
        torch_compile=backend in ("compile", "regions", "causal", "flex"),
        use_liger_kernel=backend == "liger", use_cpu=measure.device() == "cpu", **more,
        **({"packing": True, "max_length": LENGTH} if case == "packed" else {}),
    )  # fmt: skip
    lora = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return getattr(trl, f"{kind}Trainer")(
        model, args=how, processing_class=tokenizer(), peft_config=lora if "lora" in case else None,
        callbacks=[CodaCallback()] if backend == "coda" else [],
        **data(case, kind, tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)),
    )  # fmt: skip


def tokenizer() -> Any:
    """Its token 17 is the word "17"; 1 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({str(n): n for n in range(WORDS)}, "0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, **dict.fromkeys(("eos_token", "pad_token"), "1")
    )


def data(case: str, kind: str, rows: Tensor) -> dict[str, Any]:
    """What a trainer takes of data. All batches have one shape."""
    from datasets import Dataset

    listed, half = rows.tolist(), LENGTH // 2
    if case == "packed":  # pairs of documents, of which no two have the same border
        cuts = torch.randint(LENGTH // 32, half, (len(rows),)).tolist()
        listed = [p for row, n in zip(listed, cuts, strict=True) for p in (row[:n], row[n:])]
    if kind == "SFT":
        return {"train_dataset": Dataset.from_dict({"input_ids": listed})}
    said = [" ".join(map(str, row[:half])) for row in listed]
    ends = ["".join(f" {n}" for n in [*row[half:-1], 1]) for row in listed]
    if kind == "DPO":
        pairs = {"prompt": said, "chosen": ends, "rejected": ends[1:] + ends[:1]}
        return {"train_dataset": Dataset.from_dict(pairs)}

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """What a policy would have said: other rows at each step."""
        ends = rows.roll(trainer.state.global_step * ROWS, 0)[: len(prompts), half:].tolist()
        ids = [[*map(int, prompt.split())] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": ends, "logprobs": None}

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [statistics.mean(1 - n % 2 for n in ids) for ids in completion_ids]

    prompts = Dataset.from_dict({"prompt": said})
    return {"train_dataset": prompts, "reward_funcs": even, "rollout_func": rollouts}


class Stepped(TrainerCallback):
    """A step of a trainer that trains in a thread: to the next ``on_step_begin``."""

    optimizer = None  # which ``whole.turn`` sets

    def __init__(self, trainer: Any):
        self.trainer, self.model, self.error = trainer, trainer.model, ""
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        trainer.add_callback(self)
        threading.Thread(target=self.train, daemon=True).start()
        self.done.acquire()

    def train(self) -> None:
        """All steps. An error is raised where the step was asked for."""
        try:
            self.trainer.train()
        except Exception as error:  # noqa: BLE001
            self.error = repr(error)
        self.done.release()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.done.release()
        self.go.acquire()

    def __call__(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error:
            raise RuntimeError(self.error)


def answer(variant: str, lock: Path) -> None:
    """Compile, or train; then answer each line of stdin with a line of JSON."""
    sys.stdout = sys.stderr  # answers alone go to the other one
    began, (case, backend, *numbers) = time.perf_counter(), variant.split()
    layers, steps = map(int, numbers)
    line: dict[str, Any] = {"torch": torch.__version__}
    if steps:
        tokens = curve.text()[0][: ROWS * LENGTH * steps].long()
        trainer = trainer_of(case, backend, layers, tokens, max_steps=steps, logging_steps=1)
        trainer.train()
        line |= {"logs": trainer.state.log_history}
        print(json.dumps(line), flush=True, file=sys.__stdout__)
        return
    with worth.turn(lock):
        tokens = torch.randint(2, WORDS, (BATCHES * ROWS * LENGTH,))
        step = Stepped(trainer_of(case, backend, layers, tokens, max_steps=10**6))
        sizes = {p: p.untyped_storage().nbytes() for p in step.model.parameters() if p.ndim > 1}
        whole.give_back(step, sizes)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def awake() -> Iterator[None]:
        with whole.turn(step, sizes, {"optimizer": ""}, lock):  # type: ignore[arg-type]
            yield
            step.trainer.optimizer.state.clear()

    with worth.compiled(step, awake, eager=backend in ("eager", "liger")):
        line["first_s"] = time.perf_counter() - began
    for number, _ in enumerate(sys.stdin):
        if number:
            with awake():
                torch.cuda.reset_peak_memory_stats()
                line = {"ms": worth.sustained(step, 1.0, 2.0, least=3)}
                line["peak"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(line), flush=True, file=sys.__stdout__)
