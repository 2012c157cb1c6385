# SPDX-License-Identifier: Apache-2.0
"""Masks of symbolic size: what is proven holds at every size, and the rest stays with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from checking import assert_same, check, check_gradients, differentiate, randn, reasons
from harness import Harness
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo.attention.index_proof import IndexProof
from coda_inductor.dynamo.attention.index_values import Affine, Choice, NotProvenError

sdpa = F.scaled_dot_product_attention
INF = float("inf")


def elements(known: Affine | Choice, shape: torch.Size) -> torch.Tensor:
    """What ``known`` says about a tensor of ``shape``, written out."""
    if isinstance(known, Choice):
        holds = torch.ones(shape, dtype=torch.bool)
        for condition in known.when:
            holds &= elements(condition, shape) >= 0
        return torch.where(holds, known.yes, known.no)
    result = torch.full(shape, known.constant)
    for dim, factor in known.slopes:
        along = torch.arange(shape[dim]).reshape(-1, *(1,) * (-dim - 1))
        result = result + factor * along
    return result


class Compare(torch.fx.Interpreter):
    """Runs a graph and holds every tensor that the proof knows to what it says."""

    def __init__(self, gm: torch.fx.GraphModule, proof: IndexProof):
        super().__init__(gm)
        self.proof, self.proven, self.refused = proof, 0, []

    def run_node(self, n):
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and n.op != "placeholder":
            try:
                known = self.proof.value(n)
            except NotProvenError as error:
                self.refused.append(f"{n.name}: {error}")
                return result
            assert torch.equal(elements(known, result.shape).to(result.dtype), result), n
            self.proven += 1
        return result


def compare(function) -> Compare:
    """Trace ``function`` of a (batch, length) tensor once and run the graph at several sizes."""
    torch._dynamo.reset()
    graphs: list[tuple[torch.fx.GraphModule, IndexProof]] = []
    runs: list[Compare] = []

    def backend(gm, _inputs):
        proof = IndexProof(gm.graph, set())

        def run(*args):
            runs.append(Compare(gm, proof))
            return runs[-1].run(*args)

        graphs.append((gm, proof))
        return run

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for size in [(2, 5), (3, 9), (9, 3)]:
        compiled(torch.zeros(size))
    assert len(graphs) == 1
    assert runs[0].proven
    return runs[0]


def arange(x):
    return torch.arange(x.shape[1])


def causal(x):
    return arange(x) <= arange(x)[:, None]


#: Each one ends in a value that must be proven; all before it are compared too.
PROVEN = {
    "start_and_step": lambda x: torch.arange(3, x.shape[1] + 3) * 2 - torch.arange(0, 2, 1)[:1],
    "start_and_named_end": lambda x: torch.arange(1, end=x.shape[1] + 1) + torch.arange(end=1),
    "arithmetic": lambda x: -(5 - arange(x).sub(2) * 3) + 2 * arange(x)[:, None].add(1),
    "views": lambda x: arange(x).view(1, -1, 1).expand(x.shape[0], -1, 4).transpose(1, 2)[:, :2],
    "slices": lambda x: (arange(x)[None, ..., None] + arange(x))[0, 1:, :-1],
    "squeeze": lambda x: arange(x).unsqueeze(0).unsqueeze(-1).squeeze(0).repeat(1, 3).clone(),
    "comparisons": lambda x: (
        torch.gt(arange(x), arange(x)[:, None] + 2) | arange(x)[:, None].lt(arange(x) * 2)
    ),
    "equalities": lambda x: (arange(x) == arange(x)[:, None]) & (arange(x) >= 0),
    "methods": lambda x: arange(x)[:, None].__lt__(arange(x)).__or__(arange(x) == 0).__invert__(),
    "inequality": lambda x: ((arange(x) * 2)[:, None] != arange(x) * 2).logical_not(),
    "halves": lambda x: (2 * arange(x)[:, None] + 1 >= 2 * arange(x)) & ~(arange(x) < 0),
    "stricter": lambda x: (arange(x) <= arange(x)[:, None] + 3) & causal(x),
    "jumps": lambda x: (
        torch.diff(arange(x).expand(x.shape[0], -1), prepend=arange(x)[None, :1] - 1
                   + torch.zeros(x.shape[0], 1, dtype=torch.long), dim=-1) != 1
    ).cumsum(-1),
    "gathered": lambda x: arange(x).expand(x.shape[0], -1)[
        torch.arange(x.shape[0])[:, None, None], arange(x)[:, None]
    ],
    "triangles": lambda x: torch.full((x.shape[1], x.shape[1]), -INF).triu(1).to(torch.float16),
    "band": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1).triu(-2),
    "additive": lambda x: (1.0 - causal(x)[None].float()) * torch.finfo(torch.float32).min,
    "filled": lambda x: x.new_zeros(x.shape[1], x.shape[1]).masked_fill(~causal(x), -INF),
    "chosen": lambda x: torch.where(causal(x), 0.0, torch.tensor(-1e9)).to(torch.bfloat16),
}  # fmt: skip


def test_what_is_proven_is_so_at_every_size():
    """All in one graph, which is traced once."""
    run = compare(lambda x: [make(x) for make in PROVEN.values()])
    assert not run.refused


#: Each one ends in a value that must not be proven, with the reason.
UNKNOWN = {
    "chain of 'and'": lambda x: (arange(x) == 3) | (arange(x)[:, None] == 4),
    "symbolic": lambda x: arange(x) - x.shape[1],
    "multiplies indices": lambda x: arange(x) * arange(x)[:, None],
    "not int64": lambda x: torch.arange(x.shape[1], dtype=torch.int32),
    "no multiples of an index": lambda x: arange(x) * 0.5,
    "a reshape moves": lambda x: (arange(x)[:, None] + arange(x)).reshape(-1),
    "that are not all 0": lambda x: (arange(x) >= 0).cumsum(0),
    "first difference": lambda x: arange(x).diff(prepend=arange(x)[:1]),
    "known to be in range": lambda x: arange(x)[(arange(x) - 1)],
    "flip is no op that its proof knows": lambda x: arange(x).flip(0),
    "beyond 1048576": lambda x: arange(x) * 2**21,
    "every so many": lambda x: arange(x)[::2],
    "from the end": lambda x: arange(x)[-2:],
    "bits of numbers": lambda x: x.new_ones(x.shape[1]).view(torch.int32),
    "called in a way": lambda x: torch.clone(input=arange(x)),
    "depends on L_x_": lambda x: x + arange(x),
}  # fmt: skip


def test_the_rest_is_not():
    run = compare(lambda x: [make(x) for make in UNKNOWN.values()])
    outputs = run.module.graph.output_node().args[0]
    for reason, node in zip(UNKNOWN, outputs, strict=True):
        with pytest.raises(NotProvenError, match=reason):
            run.proof.value(node)


def inputs(q=12, k=12):
    return [randn(2, 4, t, 8).requires_grad_() for t in (q, k, k)]


def rows_and_columns(q, k):
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def masked(make):
    def attend(q, k, v):
        return sdpa(q, k, v, attn_mask=make(*rows_and_columns(q, k)))

    return attend


REFUSED = {
    "a sliding window of 5 keys": lambda i, j: (j <= i) & (j > i - 5),
    "neither causal nor full|j+1": lambda i, j: j < i + 2,
    "neither causal nor full|transposed": lambda i, j: j >= i,
    "neither causal nor full|start": lambda i, j: j + 1 <= i + 1 + (j >= 0).long(),
    "its size is symbolic, and it joins": lambda i, j: (j <= i) | ((j == 0) & (i == 2)),
    "an in-place op changes it": lambda i, j: (j <= i).logical_or_(j == 0),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_masks_stay(reason):
    harness = check(masked(REFUSED[reason]), *inputs(), dynamic=True)
    assert not harness.counts["constant_mask"]
    assert reason.partition("|")[0] in reasons(harness)


def test_a_strict_triangle_stays():
    """Off by one: the first query sees no key. Its values are NaN in eager too."""
    harness = check(masked(lambda i, j: j < i), *inputs(), dynamic=True)
    assert not harness.counts["constant_mask"]
    assert "neither causal nor full" in reasons(harness)


def test_a_wrong_start_stays():
    def attend(q, k, v):
        t = q.shape[-2]
        return sdpa(q, k, v, attn_mask=torch.arange(1, t + 1)[:, None] >= torch.arange(t))

    harness = check(attend, *inputs(), dynamic=True)
    assert not harness.counts["constant_mask"]


def test_data_stays():
    def attend(q, k, v, lengths):
        i, j = rows_and_columns(q, k)
        return sdpa(q, k, v, attn_mask=(j <= i) & (j < lengths[:, None, None, None]))

    harness = check(attend, *inputs(), torch.tensor([12, 7]), dynamic=True)
    assert not harness.counts["constant_mask"]
    assert "it depends on L_lengths_" in reasons(harness)


def test_two_symbols_are_not_one_length():
    harness = check(masked(lambda i, j: j <= i), *inputs(12, 7), dynamic=True)
    assert not harness.counts["constant_mask"]
    assert "it is not full, and there are s" in reasons(harness)


def test_a_full_mask_needs_no_equal_lengths():
    harness = check(masked(lambda i, j: (j >= 0) & (i > -1)), *inputs(12, 7), dynamic=True)
    assert harness.counts["constant_mask"] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda q, causal: causal & q.new_ones((), dtype=torch.bool),
        lambda q, causal: (causal & torch.ones(len(q), 1, 12, 12, dtype=torch.bool))[0],
    ],
)
def test_only_the_batch_is_symbolic(make):
    def attend(q, k, v):
        i, j = rows_and_columns(q, k)
        return sdpa(q, k, v, attn_mask=make(q, j <= i))

    args = [t.detach() for t in inputs()]
    for t in args:
        torch._dynamo.mark_dynamic(t, 0)
    harness = Harness()
    assert_same(harness.run(attend, *args), attend(*args))
    assert harness.counts["constant_mask"] == 1


def test_masks_outside_of_checkpoints():
    def attend(q, k, v):
        i, j = rows_and_columns(q, k)
        mask = j <= i
        for _ in range(2):
            q = checkpoint(lambda q: sdpa(q, k, v, mask).sin(), q, use_reentrant=False)
        return q

    assert check_gradients(attend, *inputs(), dynamic=True).counts["constant_mask"] == 2


LAYERS = 2


def llama(layers: int = LAYERS) -> hf.LlamaForCausalLM:
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def attention_masks(harness: Harness) -> list:
    return [n.kwargs["attn_mask"] for n in harness.raised.nodes if n.target is sdpa]


# Torch would compile the first graph twice, to find that these floats need not be symbolic.
@torch._dynamo.config.patch(specialize_float=True)
def test_hugging_face_llama_trains_at_every_length():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    theirs = llama()
    ours, harness = copy.deepcopy(theirs), Harness()
    compiled = torch.compile(ours, backend=harness, dynamic=True)
    for batch, length in [(2, 9), (3, 14), (5, 6)]:
        ids = torch.randint(0, 64, (batch, length))
        have, want = (m(ids, use_cache=False).logits for m in (compiled, theirs))
        grads = [differentiate(out, (m, ())) for out, m in ((have, ours), (want, theirs))]
        assert_same((have, grads[0]), (want, grads[1]))
    assert harness.graphs == 1
    assert torch._dynamo.utils.counters["coda"]["constant_mask"] == LAYERS
    assert attention_masks(harness) == [None] * LAYERS


def test_hugging_face_llama_when_lengths_turn_out_to_vary():
    """Nobody says ``dynamic``: torch makes sizes symbolic at the second call."""
    torch._dynamo.reset()
    model, harness = llama(1), Harness()
    compiled = torch.compile(model, backend=harness)
    with torch.no_grad():
        for batch, length in [(2, 9), (3, 14), (5, 6)]:
            ids = torch.randint(0, 64, (batch, length))
            assert_same(*(m(ids, use_cache=False).logits for m in (compiled, model)))
    assert harness.graphs == 2
    assert attention_masks(harness) == [None]
