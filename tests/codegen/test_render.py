# SPDX-License-Identifier: Apache-2.0
"""Programs as source text: the rules that it rests on. Kernels of it run elsewhere."""

import ast

import pytest
from programs import heads, parsed, programs

from coda_inductor.codegen.ports import ports
from coda_inductor.codegen.render import render
from coda_inductor.errors import KernelError
from coda_inductor.program import EpilogueProgram, Step, Store


@pytest.mark.parametrize("name", [*programs(), *heads()])
def test_each_function_is_given_what_it_reads(name):
    program = (programs() | heads())[name]
    across = [step.name for step in program.steps if step.op == "swap"]
    functions = {f.name: f for f in ast.parse(render(program)).body if hasattr(f, "args")}
    for function in functions.values():
        known = {"coda_math", "unpack"} | {arg.arg for arg in function.args.args}
        for line in function.body:
            names = [x for x in ast.walk(line) if isinstance(x, ast.Name)]
            assert {x.id for x in names if isinstance(x.ctx, ast.Load)} <= known
            known |= {x.id for x in names if isinstance(x.ctx, ast.Store)}
    arguments = [arg.arg for arg in functions["epilogue"].args.args]
    assert arguments[len(arguments) - len(across) :] == across


def one_step(step: Step) -> EpilogueProgram:
    """A program that stores the value of ``step``."""
    stores = (Store("out0", step.name, "bfloat16"),)
    return EpilogueProgram(("acc",), "bfloat16", steps=(step,), stores=stores)


def test_origin_cannot_break_out_of_its_comment():
    text = render(one_step(Step("x", "neg", ("acc",), 'a\nimport os  """ \\ caf\u00e9')))
    compile(text, "origin", "exec")
    assert text.isascii()
    assert "\nimport os" not in text.split("def epilogue")[1]


def test_literals_survive_and_a_reserved_name_is_refused():
    for value, text in ((float("inf"), 'float("inf")'), (-1e-5, "(-1e-05)")):
        assert f"minimum(acc, {text})" in render(one_step(Step("x", "minimum", ("acc", value))))
    with pytest.raises(KernelError, match="'coda_math'"):
        render(one_step(Step("coda_math", "neg", ("acc",))))


@pytest.mark.parametrize(("axis", "steps", "masked"), [
    ("row", "v mul acc scale", False),
    ("row", "v mul acc bias", True),
    ("col", "v mul acc bias", False),
    ("col", "v mul acc scale", True),
    ("row", "v add acc bias", True),
    ("row", "v exp acc", True),
    ("row", "v div acc 2", False),
    ("row", "v div 2 acc", True),
    ("row", "w sigmoid bias; v mul acc w", True),
    ("row", "w log acc; v mul acc w", True),
])  # fmt: skip
def test_sums_are_masked_where_lanes_beyond_the_matrix_are_not_zero(axis, steps, masked):
    operands = "bias:row scale:col:float32"
    (sink,) = ports(parsed("bfloat16", operands, steps, "acc", f"part0:v:{axis}")).sinks
    assert sink.masked == masked
