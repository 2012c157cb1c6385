# SPDX-License-Identifier: Apache-2.0
"""Tensors as a site has them."""

from __future__ import annotations

import pytest
import torch
from measured import site
from programs import fp8, kinds, programs, select

from coda_inductor.select.site import Site
from coda_inductor.tune.inputs import size, tensors

M, N, K = 24, 32, 64


def described(found) -> list[tuple]:
    return [(tuple(x.shape), x.dtype) for x in found]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_of_every_kind(device, dtype):
    name = str(dtype).removeprefix("torch.")
    as_, bs, operands = tensors(Site(select(name), M, N, K), device)
    assert described(as_) == [((M, K), dtype)]
    assert described(bs) == [((K, N), dtype)]
    assert described(operands) == [
        ((M, N), dtype), ((M, N), torch.float32), ((), torch.float32), ((M,), dtype),
    ]  # fmt: skip
    assert all(x.device.type == device for x in (*as_, *bs, *operands))


@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k")])
def test_majors(a_major, b_major):
    wanted = Site(programs()["chain"], M, N, K, a_major=a_major, b_major=b_major)
    (a,), (b,), (bias,) = tensors(wanted, "cpu")
    assert a.stride() == ((K, 1) if a_major == "k" else (1, M))
    assert b.stride() == ((1, K) if b_major == "k" else (N, 1))
    assert bias.shape == (N,)


def test_a_product_of_each_term():
    """Of weights that are copied each has its own K."""
    as_, bs, _ = tensors(Site(programs()["chain"], M, N, 3 * K, 3), "cpu")
    assert described(as_) == [((M, K), torch.bfloat16)] * 3
    assert described(bs) == [((K, N), torch.bfloat16)] * 3
    for group in (as_, bs):
        assert group == sorted(group, key=torch.Tensor.data_ptr)
    as_, bs, _ = tensors(Site(programs()["chain"], M, N, K, copied=(16, 48)), "meta")
    assert [a.shape[1] for a in as_] == [b.shape[0] for b in bs] == [16, 48]


def test_a_pair_has_two_weights_and_rows_of_both():
    as_, bs, operands = tensors(Site(programs()["paired_rows"], M, N, K), "cpu")
    assert described(as_) == [((M, K), torch.bfloat16)]
    assert described(bs) == [((K, N), torch.bfloat16)] * 2
    assert [tuple(x.shape) for x in operands] == [(M,), (M,), (2 * N,), (2 * N,), (2 * N,)]
    for row in operands[2:]:
        assert torch.equal(row[::2], row[1::2])  # every value twice


def test_values_are_those_of_a_layer():
    """Products of order one, statistics of rows positive, tables of cosines."""
    (a,), (b,), (_, _, one, column) = tensors(Site(select(), 256, 256, 4096), "cpu")
    assert 0.8 < (a.float() @ b.float()).std().item() < 1.2
    assert column.min() > 0
    assert one == 1
    program = kinds()["rotary"]
    _, _, operands = tensors(Site(program, M, 256, K), "cpu")
    shapes = {o.name: tuple(x.shape) for o, x in zip(program.operands, operands, strict=True)}
    assert shapes == {"rstd": (M,), "cos": (M, 128), "sin": (M, 128)}
    assert all(x.abs().max() <= 1 for x in operands[1:])


@pytest.mark.parametrize("kind", ["scale", "swiglu_train", "norm_bwd_joined"])
def test_a_measurement_needs_at_least_its_inputs_and_outputs(kind):
    wanted = site(kind)
    given = [x for group in tensors(wanted, "meta") for x in group]
    outputs = len(wanted.program.stores) * wanted.m * wanted.n * 2
    needed = sum(x.numel() * x.element_size() for x in given) + outputs
    assert needed < size(wanted) < 10 * needed


@pytest.mark.parametrize("name", ["fp8_dswiglu", "fp8_swiglu"])
def test_values_of_fp8_are_in_its_range(name):
    """Their scales undo what they are multiplied with."""
    program = fp8()[name]
    (a,), bs, operands = tensors(Site(program, 48, 64, 512), "cpu")
    assert (a.stride(), bs[0].stride()) == ((512, 1), (1, 512))
    names = [o.name for o in program.operands]
    product = (a.float() @ bs[0].float()) * operands[names.index("inv_a")][:, None]
    assert 0.3 < product.std() < 3
    assert (bs[0] == torch.zeros((), dtype=bs[0].dtype)).float().mean() < 0.05
