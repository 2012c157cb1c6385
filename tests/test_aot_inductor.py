# SPDX-License-Identifier: Apache-2.0
"""Programs of AOTInductor's run without Python, and so without our kernels, unless somebody says
that they need not (``enable(aot=True)``, which ``test_frameworks`` does)."""

import zipfile

import torch
from checking import leave_custom_ops, randn
from processes import python
from rewrite import test_heads_rotated as rotated
from torch._dynamo.utils import counters
from zoo.idioms import rotate_half
from zoo.layers import D, whole

import coda_inductor

LOAD = """
import sys, torch

def run():
    inputs, want = torch.load(sys.argv[2])
    torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(inputs), want)

try:
    run()
except RuntimeError as error:
    print(error)
    assert "coda_inductor" not in sys.modules
    import coda_inductor.backend
    run()
"""


def lacks(path, x, want, folder):
    """Why it does not run in a process without our package, where it must with it; or nothing."""
    torch.save((x, want), folder / "call.pt")
    return python("-c", LOAD, path, folder / "call.pt").stdout


def test_a_program_that_needs_no_python_is_not_fused(tmp_path, monkeypatch, warned):
    leave_custom_ops(monkeypatch)  # as on a GPU
    model, x = whole(), torch.randn(3, D)
    text = {"aot_inductor.package_cpp_only": True}  # compiling it takes seconds
    with torch.no_grad(), coda_inductor.enabled():
        program = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), inductor_configs=text
        )
    sites = coda_inductor.reports()[-1].sites
    assert {site.refusal.code for site in sites} == {"aot-inductor"}
    assert not counters["coda"]
    (said,) = [text for text in warned() if "AOTInductor" in text]
    assert "coda_inductor.enable(aot=True)" in said
    with zipfile.ZipFile(path) as package:
        texts = [package.read(name) for name in package.namelist() if name.endswith(".cpp")]
    assert texts
    assert not any(b"coda_inductor" in text for text in texts)


def test_rotations_of_a_dynamic_batch_run_for_any(tmp_path, monkeypatch):
    """Sizes of a batch are symbols when ``heads`` asks how a rotation is laid out."""
    leave_custom_ops(monkeypatch)
    model, tables = (
        rotated.layer(rotated.whole(rotate_half)).double(),
        (randn(1, 6, rotated.D), randn(1, 6, rotated.D)),
    )
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)}, (None, None))
    with torch.no_grad(), coda_inductor.enabled(aot=True):
        args = (randn(3, 6, rotated.WIDTH), *tables)
        program = torch.export.export(model, args, dynamic_shapes=sizes)
        package = str(tmp_path / "model.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        run = torch._inductor.aoti_load_package(package)
        for batch in (3, 5):
            x = randn(batch, 6, rotated.WIDTH)
            torch.testing.assert_close(run(x, *tables), model(x, *tables))
    assert counters["coda"]["rotary"] == 2
