# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism, a module at a time: what collectives leave to fuse, and save."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from decoder import (
    OPTIONS,
    assert_trained_as,
    batches,
    decoder,
    fired,
    fresh,
    heard,
    loss_of,
    single,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from zoo.layers import rotated

import coda_inductor
from coda_inductor import log, op_by_op
from coda_inductor.compat import InductorError

LAYERS = 1
HOW = {"backend": "coda", "options": OPTIONS}
#: Each of 5 products reduces its gradient alone; q, k and v together are one, gate and up too.
REDUCES = 3
#: Each of them gathers its operand alone, too.
GATHERS = 3
SWIGLU = {"swiglu": LAYERS, "swiglu_backward": LAYERS}


def mesh(ranks: int | None = None):
    return init_device_mesh("cpu", (ranks or torch.distributed.get_world_size(),))


def tensor_parallel(model, over):
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    plan |= {name: RowwiseParallel() for name in ("o", "down")}
    for block in model.layers:
        parallelize_module(block, over, dict(plan))
    return model


def sequence_parallel(model, over, **how):
    whole, parts = Replicate(), Shard(1)
    around = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=whole),
    }
    plan = {name: SequenceParallel() for name in ("norm1", "norm2")}
    for name in ("q", "k", "v", "gate", "up"):
        plan[name] = ColwiseParallel(input_layouts=parts, **(how if name in ("gate", "up") else {}))
    plan |= {name: RowwiseParallel(output_layouts=parts) for name in ("o", "down")}
    parallelize_module(model, over, around)
    for block in model.layers:
        parallelize_module(block, over, dict(plan))
    return model


def trained(model, want, steps: int = 2, call=None, **how) -> list:
    """Steps like one rank's; returns the reasons that the last report gives. ``call`` stands for
    the compiled model."""
    fresh()
    data = batches(1, steps)
    train(model, data, call or torch.compile(model, **HOW))
    assert_trained_as(model, single(data, len(model.layers), **how))
    assert_fired(want)
    return coda_inductor.reports()[-1].refusals


def forward_sites() -> dict:
    """Those of the last report, by name."""
    sites = coda_inductor.reports()[-1].sites
    return {site.site: site for site in sites if site.role == "forward"}


def assert_fired(want) -> None:
    assert {name: fired().get(name, 0) for name in want} == want, fired()


def check_tensor_parallelism():
    """Gate, up and their gradients share tiles; a gradient is reduced once, not once a product.
    Heads are rotated in their projections' epilogues: a tile has whole heads, whatever rank they
    are of."""
    want = {**SWIGLU, "rotary": 2 * LAYERS, "collective": REDUCES * LAYERS, "rms_norm": 0}
    refusals = trained(tensor_parallel(decoder(LAYERS, turn=rotated), mesh()), want, turn=rotated)
    norms = [why for why in refusals if why.what == "rms_norm"]
    assert len(norms) == 2 * LAYERS + 1
    assert {why.code for why in norms} <= {"norm-input-no-gemm", "norm-gradient"}
    sites = forward_sites()
    assert sites["layers.0.gate + up"].fused
    for name in ("o", "down"):
        assert sites[f"layers.0.{name}"].refusal.code == "collective"
        assert "all_reduce" in sites[f"layers.0.{name}"].reason


def check_sequence_parallelism():
    """Gathered once for gate and up, which can share a tile then; scattered once, too."""
    want = {"swiglu": 1, "swiglu_backward": 1, "collective": GATHERS + REDUCES, "rms_norm": 0}
    refusals = trained(sequence_parallel(decoder(1), mesh()), want)
    assert {why.code for why in refusals} == {"distributed-tensor"}
    sites = forward_sites()
    assert sites["layers.0.gate + up"].fused
    for name in ("o", "down"):
        assert "reduce_scatter_tensor" in sites[f"layers.0.{name}"].reason


def check_gates_of_distributed_tensors():
    """They stay torch's: an op of ours has no rule for how to spread it."""
    want = {"swiglu": 0, "collective": GATHERS + REDUCES}
    refusals = trained(sequence_parallel(decoder(1), mesh(), use_local_output=False), want)
    assert [why.code for why in refusals if why.what == "swiglu"] == ["distributed-tensor"]


def check_a_loss_of_sharded_logits():
    """Loss parallel: correct, and the fused cross entropy says why it is not taken."""
    fresh()
    model = tensor_parallel(decoder(1), over := mesh())
    parallelize_module(model, over, {"head": ColwiseParallel(use_local_output=False)})
    compiled = torch.compile(lambda tokens: loss_of(model(tokens), tokens), **HOW)
    data, optimizer = batches(1, 2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in data:
        with loss_parallel():
            compiled(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_as(model, single(data, 1))
    assert_fired({"swiglu": 1, "swiglu_backward": 1, "cross_entropy": 0})
    refusals = {why.what: why for why in coda_inductor.reports()[-1].refusals}
    assert refusals["cross_entropy"].code == "distributed-tensor"


class Gelu(nn.Module):
    """A bias and an activation on one side of the collective, a residual on the other."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def check_biases_and_activations_fuse():
    fresh()
    torch.manual_seed(0)
    ours, plain = Gelu().double(), Gelu().double()
    plain.load_state_dict(ours.state_dict())
    parallelize_module(ours, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(6, 16, dtype=torch.float64)
    for call in (torch.compile(ours, **HOW), plain):
        call(x).square().mean().backward()
    for have, want in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(have.grad.full_tensor(), want.grad)
    sites = {(site.site, site.role): site for site in coda_inductor.reports()[-1].sites}
    assert sites["up", "forward"].fused
    assert sites["down", "input gradient"].fused
    assert "all_reduce" in sites["down", "forward"].reason


def check_what_inductor_overlaps_is_left_to_it():
    """Its asynchronous tensor parallelism runs a product piece by piece beside its collective."""
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        want = {"swiglu": 0, "collective": GATHERS}
        trained(sequence_parallel(decoder(1), mesh()), want)
    codes = {site.refusal.code for site in coda_inductor.reports()[-1].sites if site.refusal}
    assert "async-tensor-parallel" in codes


def check_no_gradients():
    fresh()
    model, (tokens,) = sequence_parallel(decoder(1), mesh()), batches(1, 1)
    with torch.no_grad():
        have = torch.compile(model, **HOW)(tokens)
        torch.testing.assert_close(have, decoder(1)(tokens), rtol=1e-9, atol=1e-9)
    assert_fired({"swiglu": 1, "collective": GATHERS})


def check_tensor_parallelism_inside_of_fsdp():
    """On a mesh of both, and ranks agree on what each has fused: else collectives would not
    meet."""
    over = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(decoder(LAYERS), over["tensor"])
    for block in model.layers:
        block.compile(**HOW)
    for part in (*model.layers, model):
        fully_shard(part, mesh=over["data"])
    trained(model, {**SWIGLU, "collective": REDUCES}, call=model)
    reports = coda_inductor.reports()
    sites = [(s.site, s.role, s.how, s.patterns) for report in reports for s in report.sites]
    everybody: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, sites)
    assert sites
    assert all(other == sites for other in everybody)


def check_a_rank_whose_compiler_fails_says_so_and_goes_on_with_the_others():
    """Its graph runs op by op, with the same collectives."""
    fresh()
    log.forget_warnings()
    data, options = batches(1, 2), {**OPTIONS, "strict": False}
    model, compiler = tensor_parallel(decoder(LAYERS), mesh()), op_by_op.compile_fx_inner
    fails = torch.distributed.get_rank() == 1
    if fails:
        op_by_op.compile_fx_inner = no_room
    try:
        with heard() as said:
            train(model, data, torch.compile(model, backend="coda", options=options))
    finally:
        op_by_op.compile_fx_inner = compiler
    assert_trained_as(model, single(data, LAYERS))
    assert_fired({**SWIGLU, "collective": REDUCES * LAYERS})
    assert len(said) == (2 if fails else 0), said  # a forward and a backward pass
    assert all("one op at a time" in text and "no room" in text for text in said)


def check_what_every_rank_warns_of_is_said_once_a_host():
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with heard(alone=False) as said:
        log.logger.warning("all %s", "ranks")
        log.logger.warning("this is %d", rank)
    everybody = [None] * world
    torch.distributed.all_gather_object(everybody, said)
    texts = [text for each in everybody for text in each]
    assert len([text for text in texts if text.endswith("]: all ranks")]) == 1, texts
    assert f"coda_inductor [rank {rank}]: this is {rank}" in said


def no_room(*_args, **_how):
    raise InductorError(RuntimeError("there is no room"), None)
