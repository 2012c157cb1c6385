# SPDX-License-Identifier: Apache-2.0
"""Calls of the op with FP8 operands, on a CPU: schema, numbers, what a launch is given."""

from __future__ import annotations

import pytest
import torch
from programs import inputs
from programs_fp8 import E4M3, E5M2, programs

from coda_inductor.program import Store, reference
from coda_inductor.runtime import op
from coda_inductor.runtime.launch import Kernel, requests
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.runtime.tensors import UnpairableError, pair_order
from coda_inductor.select.config import Config
from coda_inductor.select.kinds import kinds

CONFIG = Config(128, 128, 2, 1, False)
M, N, K = 300, 64, 96


@pytest.mark.parametrize("name", list(programs()))
def test_opcheck(name):
    program = programs()[name]
    arguments = (*inputs(program, M, N, K), program.to_json(), str(CONFIG))
    # Torch compares no FP8 tensors, which its test of the schema needs.
    tests = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.coda_inductor.gemm_epilogue.default, arguments, test_utils=tests
    )


@pytest.mark.parametrize("name", list(programs()))
def test_against_float64_within_the_rounding_of_the_stores(name):
    program = programs()[name]
    as_, bs, operands = inputs(program, M, N, K)
    found = gemm_epilogue(as_, bs, operands, program, CONFIG)
    exact = reference.run(program, [as_[0].double()], [b.double() for b in bs], operands)
    digits = {"bfloat16": 8, E4M3: 4, E5M2: 3}
    for spec, output, y in zip(program.outputs, found, exact, strict=True):
        x = output
        if not isinstance(spec, Store):
            x = reference.COMBINE[spec.combine](x, 1 if spec.axis == "row" else 0, keepdim=True)
        # A value between two numbers may round to either: the sums before it are float32's.
        step = 2.0 ** -digits[spec.dtype] if isinstance(spec, Store) else 2.0**-4
        torch.testing.assert_close(x.double(), y.double(), rtol=2 * step, atol=1e-4)


@pytest.mark.parametrize("a_row_major", [True, False])
@pytest.mark.parametrize("b_row_major", [True, False])
def test_operands_that_are_not_contiguous_along_k_are_copied(a_row_major, b_row_major):
    program = programs()["fp8_stored"]
    (a,), (b,), _ = inputs(program, M, N, K)
    given = a if a_row_major else a.t().contiguous().t()
    other = b.contiguous() if b_row_major else b
    got = Kernel(program, CONFIG)._bind_inputs([given], [other], {})
    assert (got[0].stride(), got[1].stride()) == ((K, 1), (1, K))
    assert torch.equal(got[0].float(), a.float())
    assert torch.equal(got[1].float(), b.float())
    assert (got[0] is given, got[1].data_ptr() == other.data_ptr()) == (
        a_row_major,
        not b_row_major,
    )
    (request,) = requests([given], [other], program.to_json(), str(CONFIG))
    assert (request.a_major, request.b_major) == ("k", "k")


def test_a_pair_has_distances_of_16_bytes():
    both = torch.zeros(2 * N, K, dtype=torch.float8_e4m3fn)
    assert pair_order(both[:N].t(), both[N:].t()) == (False, N * K)
    odd = torch.zeros(2 * N, K + 8, dtype=torch.float8_e4m3fn)[:, :K]
    with pytest.raises(UnpairableError, match="16-byte rows"):
        pair_order(odd[:N].t(), odd[N:].t())
    shifted = both.flatten()[8 : 8 + N * K].view(N, K)
    with pytest.raises(UnpairableError, match="TMA stride"):
        pair_order(both[:N].t(), shifted.t())


def unsupported(program, dtypes, n=N, k=K, n_major=False, terms=1):
    return op._unsupported(program.to_json(), n, k, dtypes, n_major, terms, None)


def test_unsupported_names_the_dtypes():
    program = kinds()["scale"]
    why = unsupported(program, (torch.float16,) * 2)
    assert why.failure
    assert why.text == "the program is for bfloat16 inputs, they are torch.float16"
    program = programs()["fp8_dswiglu"]
    why = unsupported(program, (torch.float8_e4m3fn, torch.float8_e5m2))
    assert why.text == (
        f"the program is for {E5M2} and {E4M3} inputs, "
        "they are torch.float8_e4m3fn and torch.float8_e5m2"
    )


def test_what_no_launch_can_mend(monkeypatch):
    monkeypatch.setattr(op.availability, "kernel_stack", lambda _: None)
    op._unsupported.cache_clear()
    dtypes = (torch.float8_e4m3fn,) * 2
    program = programs()["fp8_residual"]
    assert unsupported(program, dtypes, n_major=True) is None  # it is copied
    assert "sum of 2 FP8 products" in unsupported(program, dtypes, terms=2).text
    assert "multiples of 16" in unsupported(program, dtypes, k=K + 8).text
    assert "along N" in unsupported(programs()["fp8_swiglu"], dtypes, n_major=True).text
    op._unsupported.cache_clear()
