# SPDX-License-Identifier: Apache-2.0
"""Ways to spread a decoder over two ranks and to compile it: whether steps of training are those of
one rank with all data, what fuses, and why the rest does not. ``CHECKS`` has all, by name."""

import contextlib
import copy
import dataclasses
import datetime as dt
import gc
import importlib.util
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import expert_ranks
import torch
import torch.distributed as dist
import training as on
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import titan
from zoo.layers import Decoder, rotated

import coda_inductor
from coda_inductor import log, notice, op_by_op
from coda_inductor.compat import InductorError
from coda_inductor.memory import limit as rooms

#: What one graph, which serves all blocks, does. Its first norm reads an input.
BLOCK = {"rms_norm": 1, "rms_norm_backward": 1, "swiglu": 1, "swiglu_backward": 1}
SWIGLU = {"swiglu": 1, "swiglu_backward": 1}
#: Each of 5 products reduces its gradient and gathers its operand; q, k, v together; gate, up too.
REDUCES = GATHERS = 3
OUT, PAIR = {("o", "collective"), ("down", "collective")}, {"gate + up"}
BFLOAT16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way: ``spread`` changes a decoder, and returns what is called in its place."""

    spread: Callable[[Decoder], Callable[..., torch.Tensor]]
    fired: Mapping[str, int]  # counters of all steps
    said: frozenset[tuple[str, str]] = frozenset()  # (what, or a forward site, code of its refusal)
    fused: frozenset[str] = frozenset()  # sites of a forward pass
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments of the decoder
    split: bool = False  # each rank has rows of its own of a batch
    loss: Callable[..., torch.Tensor] = on.loss_of
    around: Callable[[], Any] = contextlib.nullcontext

    def __call__(self) -> None:
        on.fresh()
        how, ranks = {"layers": 1, **self.model}, 2 if self.split else 1
        model, data = on.decoder(**how), on.batches(ranks, 2)
        call = self.spread(model)
        with self.around():
            on.train(model, [on.mine(t) if self.split else t for t in data], call, self.loss)
        on.assert_trained_as(model, on.single(ranks, 2, **how))
        on.assert_fired(dict(self.fired))
        report = coda_inductor.reports()[-1]
        sites = [(s.site.rpartition(".")[2], s) for s in report.sites if s.role == "forward"]
        said = {(why.what, why.code) for why in report.refusals}
        said |= {(name, site.refusal.code) for name, site in sites if site.refusal}
        assert self.said <= said, said
        assert self.fused <= {name for name, site in sites if site.fused}
        # Ranks agree on what each has fused: else collectives would not meet.
        sites = [site for found in coda_inductor.reports() for site in found.sites]
        mine = [(s.site, s.role, s.how, s.patterns) for s in sites]
        everybody: list = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        assert all(other == mine for other in everybody)


def compiled(model: nn.Module) -> Callable[..., torch.Tensor]:
    return torch.compile(model, **on.HOW)


def as_torchtitan_with_ours(model: Decoder) -> Callable[..., torch.Tensor]:
    """Norm and head sharded as one, head and loss in the graph of ``coda_inductor.torchtitan``."""
    fully_shard([model.norm, model.head], mesh=on.mesh())
    on.shard(on.blocks(model))
    with titan.imported() as (module, _):
        loss = module.HeadAndLoss(on.loss_of, on.loss_of)
    loss.attach(model.head)
    return lambda tokens: loss(model(tokens), tokens)


def tensor_parallel(model: Decoder, over: Any = None) -> Decoder:
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    plan |= {name: RowwiseParallel() for name in ("o", "down")}
    for block in model.layers:
        parallelize_module(block, over or on.mesh(), dict(plan))
    return model


def sequence_parallel(model: Decoder, over: Any = None) -> Decoder:
    whole, parts = Replicate(), Shard(1)
    around = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=whole),
    }
    plan = {name: SequenceParallel() for name in ("norm1", "norm2")}
    for name in ("q", "k", "v", "gate", "up"):
        plan[name] = ColwiseParallel(input_layouts=parts)
    plan |= {name: RowwiseParallel(output_layouts=parts) for name in ("o", "down")}
    parallelize_module(model, over or on.mesh(), around)
    for block in model.layers:
        parallelize_module(block, over or on.mesh(), dict(plan))
    return model


def tensor_in_fsdp(model: Decoder) -> Decoder:
    over = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    return on.shard(on.blocks(tensor_parallel(model, over["tensor"])), over["data"])


SHARDED = {"split": True, "model": {"layers": 2}}
CASES = {
    # Torch breaks the graph at each block's hooks.
    "FSDP of the whole model": Case(lambda m: compiled(on.shard(m)), BLOCK, **SHARDED),
    "FSDP as torchtitan applies it, head and loss as ours": Case(
        as_torchtitan_with_ours, BLOCK | {"cross_entropy": 1}, loss=lambda y, _: y, **SHARDED
    ),
    # A tile has whole heads, whatever rank they are of.
    "tensor parallelism": Case(
        lambda m: compiled(tensor_parallel(m)),
        {**SWIGLU, "rotary": 2, "collective": REDUCES, "rms_norm": 0},
        frozenset({("rms_norm", "norm-input-no-gemm"), *OUT}), frozenset(PAIR),
        {"turn": rotated},
    ),
    # Gathered once for gate and up, which can share a tile then; scattered once, too.
    "sequence parallelism": Case(
        lambda m: compiled(sequence_parallel(m)),
        {**SWIGLU, "collective": GATHERS + REDUCES, "rms_norm": 0},
        frozenset({("rms_norm", "distributed-tensor"), *OUT}), frozenset(PAIR),
    ),
    # Inductor's asynchronous tensor parallelism runs a product in pieces beside its collective.
    "what Inductor overlaps is left to it": Case(
        lambda m: compiled(sequence_parallel(m)), {"swiglu": 0, "collective": GATHERS},
        frozenset({("o", "async-tensor-parallel")}),
        around=lambda: torch._inductor.config.patch(_micro_pipeline_tp=True),
    ),
    "tensor parallelism inside of FSDP": Case(tensor_in_fsdp, {**SWIGLU, "collective": REDUCES}),
}  # fmt: skip


def a_graph_that_ddp_cut_is_named_once_with_the_remedy():
    """A block has more parameters than a bucket of 1 MiB, so that torch cuts within blocks. Nothing
    keeps the model or what DDP has made of it, which would end later than its group."""
    how = {"layers": 2, "width": 128}
    on.fresh()
    notice.logged.discard("ddp")
    model = on.decoder(**how)
    step = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), **on.HOW)
    with on.heard() as said:
        on.train(model, list(map(on.mine, on.batches(2, 2))), step)
    on.assert_trained_as(model, on.single(2, 2, **how))
    kept = [weakref.ref(x) for x in (model, step, model.head.weight)]
    del model, step
    gc.collect()
    assert not any(reference() for reference in kept)
    (warning,) = said
    assert "optimize_ddp = False" in warning
    assert torch._dynamo.utils.counters["coda"]["rms_norm"] < 2 * 2  # as one graph would have


def the_pages_recipes_train_as_eager_does():
    """docs/distributed.md, word for word, with a Llama; nothing of DDP or torch stays changed."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    recipes = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    how = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, num_key_value_heads=4, **how)
    tokens = torch.arange(16).reshape(2, 8)
    eager = LlamaForCausalLM(config).double()
    weights = copy.deepcopy(eager.state_dict())
    eager(tokens, labels=tokens).loss.backward()
    notice.logged.discard("ddp")
    for recipe in recipes:
        on.fresh()
        model = LlamaForCausalLM(config).double()
        model.load_state_dict(weights)
        names = {"model": model}
        with torch._dynamo.config.patch(optimize_ddp=True), on.heard() as said:
            exec(recipe, names)  # noqa: S102 (it is our page)
            names["model"](tokens, labels=tokens).loss.backward()
        on.assert_fired(SWIGLU)
        assert not [text for text in said if "cut" in text]
        for got, want in zip(model.parameters(), eager.parameters(), strict=True):
            # The loss of transformers is computed in float32.
            torch.testing.assert_close(on.full(got.grad), want.grad, rtol=1e-5, atol=1e-7)
    assert len(recipes) == 2


def steps_of_clipped_gradients_that_were_added_up():
    """Parameters stay gathered between two backward passes, and lie on the CPU behind them. HSDP:
    gradients are summed among the ranks that share, then among the copies."""
    on.fresh()
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    offload = CPUOffloadPolicy(pin_memory=False)
    how = {"over": copies, "reshard_after_forward": False, "offload_policy": offload}
    model, other = on.shard(on.blocks(on.decoder()), **how), on.decoder()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other)]
    for number, tokens in enumerate(on.batches(2, 4)):
        model.set_requires_gradient_sync(last := bool(number % 2))
        on.loss_of(model(on.mine(tokens)), on.mine(tokens)).backward()
        on.loss_of(other(tokens), tokens).backward()
        for each, optimizer in zip((model, other), optimizers, strict=True):
            if last:
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    on.assert_trained_as(model, other)
    on.assert_fired(BLOCK)


def bfloat16_beside_float32_master_weights():
    """As exact as eager under the same wrapping, beside float64."""
    on.fresh()
    ours, theirs = (
        on.shard(on.blocks(on.decoder()), **BFLOAT16).float(),
        on.shard(on.decoder().float(), **BFLOAT16),
    )
    for model in (ours, theirs):
        on.train(model, list(map(on.mine, on.batches(2))))
    errors = [on.distance(model, on.single(2, layers=2)) for model in (ours, theirs)]
    assert errors[0] <= 1.2 * errors[1], errors
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    on.assert_fired(BLOCK)


def no_room(*_args, **_how):
    raise InductorError(RuntimeError("there is no room"), None)


def a_rank_whose_compiler_fails_says_so_and_goes_on_with_the_others():
    """Its graph runs op by op, with the same collectives."""
    on.fresh()
    log.forget_warnings()
    options = {**on.OPTIONS, "strict": False}
    model, compiler = tensor_parallel(on.decoder(1)), op_by_op.compile_fx_inner
    fails = dist.get_rank() == 1
    if fails:
        op_by_op.compile_fx_inner = no_room
    try:
        with on.heard() as said:
            on.train(model, on.batches(1, 2), torch.compile(model, backend="coda", options=options))
    finally:
        op_by_op.compile_fx_inner = compiler
    on.assert_trained_as(model, on.single(1, 2, layers=1))
    on.assert_fired({**SWIGLU, "collective": REDUCES})
    assert len(said) == (2 if fails else 0), said  # a forward and a backward pass
    assert all("one op at a time" in text and "no room" in text for text in said)


def what_every_rank_warns_of_is_said_once_a_host():
    rank = dist.get_rank()
    with on.heard(alone=False) as said:
        log.logger.warning("all %s", "ranks")
        log.logger.warning("this is %d", rank)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, said)
    texts = [text for each in everybody for text in each]
    assert len([text for text in texts if text.endswith("]: all ranks")]) == 1, texts
    assert f"coda_inductor [rank {rank}]: this is {rank}" in said


def ranks_agree_on_a_peak_once_and_without_a_collective():
    """One rank compiles more graphs than the other: it must not wait for that."""
    rank = dist.get_rank()
    with mock.patch.object(torch.cuda, "memory_allocated", return_value=(rank + 1) << 20):
        for _ in range(1 + 2 * rank):
            assert rooms.room(64 << 20, torch.device("cuda")) == 62 << 20
    dist.barrier()


def a_rank_that_never_compiles_is_not_waited_for_forever():
    log.forget_warnings()
    if dist.get_rank() == 0:
        used = mock.patch.object(torch.cuda, "memory_allocated", return_value=1 << 20)
        patience = mock.patch.object(rooms, "_PATIENCE", dt.timedelta(seconds=1))
        with on.heard() as said, used, patience:
            assert rooms.room(33 << 20, torch.device("cuda")) == 32 << 20
        assert ["could not agree on a peak" in text for text in said] == [True]
    dist.barrier()


#: Whether Inductor writes the code, which takes seconds a graph.
INDUCTOR = False
#: Name -> a check.
CHECKS: dict[str, Callable[[], None]] = {
    **CASES,
    **expert_ranks.CHECKS,
    **{check.__name__: check for check in (
        a_graph_that_ddp_cut_is_named_once_with_the_remedy, the_pages_recipes_train_as_eager_does,
        steps_of_clipped_gradients_that_were_added_up, bfloat16_beside_float32_master_weights,
        a_rank_whose_compiler_fails_says_so_and_goes_on_with_the_others,
        what_every_rank_warns_of_is_said_once_a_host,
        ranks_agree_on_a_peak_once_and_without_a_collective,
        a_rank_that_never_compiles_is_not_waited_for_forever,
    )},
}  # fmt: skip
if importlib.util.find_spec("torchao") is not None:
    import float8_ranks

    CHECKS |= float8_ranks.CHECKS
if importlib.util.find_spec("accelerate") is not None:
    import trainer_ranks

    CHECKS |= trainer_ranks.CHECKS
