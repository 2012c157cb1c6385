# SPDX-License-Identifier: Apache-2.0
"""One product of a pair of gate and up is computed again without the other."""

import pytest
import torch
from checking import leave_custom_ops
from harness import Harness
from programs import kinds, parsed
from zoo.layers import Gated

from coda_inductor.memory.halves import half_of
from coda_inductor.program import EpilogueProgram, verify
from coda_inductor.runtime.op import OP

D, ROWS = 32, 64
OF_COLUMNS = [
    parsed("bfloat16", f"b:{kind}", "g add acc0 b; y mul g acc1", "y g", accs=("acc0", "acc1"))
    for kind in ("row", "batch")
]


def test_a_half_has_the_steps_of_its_product():
    program = kinds()["swiglu_train"]
    stored = {s.value: at for at, s in enumerate(program.stores)}
    for product, name in enumerate("gu"):
        half, number, own = half_of(program, stored[name])
        verify(half)
        assert (number, own) == (product, [0])
        assert [step.name for step in half.steps] == [name]
        assert [s.value for s in half.stores] == [name]


@pytest.mark.parametrize("program", OF_COLUMNS)
@pytest.mark.parametrize("value", ["y", "g"])
def test_no_half_of_what_needs_both_products_or_values_of_columns(program, value):
    at = [s.value for s in program.stores].index(value)
    assert half_of(program, at) is None


def programs(graph):
    return [
        EpilogueProgram.from_json(call.args[3])
        for call in graph.find_nodes(op="call_function", target=OP)
    ]


def test_up_is_computed_alone(monkeypatch):
    """Half of what a block keeps is gate and up. Where a third must go, one of them does."""
    leave_custom_ops(monkeypatch)
    model = Gated(D, 4 * D).double()
    x = torch.randn(ROWS, D, dtype=torch.float64, requires_grad=True)
    grads, harnesses = [], []
    for share in (1.0, 0.5):
        torch._dynamo.reset()
        harnesses.append(Harness(gate="always", memory=share))
        compiled = torch.compile(model, backend=harnesses[-1])
        grads.append(torch.autograd.grad(compiled(x).sin().sum(), [x, *model.parameters()]))
    assert all(map(torch.equal, *grads))
    before, after = ([programs(part) for part in h.parts] for h in harnesses)
    assert before[0] == after[0]
    assert len(after[1]) == len(before[1]) + 1
    again = next(p for p in after[1] if p not in before[1])
    assert not again.paired
    assert again in [half_of(p, at)[0] for p in before[0] if p.paired for at in (0, 1)]
    assert harnesses[1].report.memory.again == 1
