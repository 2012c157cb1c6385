# SPDX-License-Identifier: Apache-2.0
"""A private name of torch's, QuACK's or CuTeDSL's that is gone costs what ``compat`` says of it."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python

from coda_inductor import compat
from coda_inductor.mainloop import availability

PACKAGE = Path(compat.__file__).parent


def private(name: str) -> bool:
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def names_of_others(tree: ast.Module) -> Iterator[str]:
    """What a module imports of torch and kernel libraries, and private attributes of others."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [above + alias.name for alias in node.names]
            yield from (n for n in names if n.startswith(("torch", "quack", "cutlass")))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            yield from (n for n in [ast.unparse(node)] if not n.startswith(("self.", "cls.")))


def test_private_names_stand_in_compat_only():
    texts = {p: p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "compat.py"}
    own = re.findall(r"(?:def |class |self\.)(\w+)", "".join(texts.values()))
    own = {*own, "_exit", "_coda_mixed", "_CODE_STATE"}
    listed = {part for path in compat.KERNELS for part in (path, *path.rpartition(".")[::2])}
    wrong = []
    for path, text in texts.items():
        for name in names_of_others(ast.parse(text)):
            last = name.rpartition(".")[2]
            if last in own or not (private(name) or name.startswith(("quack", "cutlass"))):
                continue
            public = name.startswith("cutlass") and not private(name)
            if "mainloop" not in path.parts or not (public or {name, last} & listed):
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert not wrong


def test_without_a_name_of_the_kernel_libraries_there_are_no_kernels(monkeypatch):
    pytest.importorskip("quack")
    for path in compat.KERNELS:
        monkeypatch.setattr(availability, "KERNELS", (path, f"{path}_gone"))
        assert availability.missing_from_libraries() == f"{path}_gone"
    assert availability.library_stack.__wrapped__().code == "no-kernel-stack"


#: A process without some names of torch's compiles a model, and computes what eager does; then
#: another without others.
REMOVE = '''
import dataclasses, functools, importlib.util, json, sys
import torch, torch._dynamo, torch._functorch.aot_autograd, torch._inductor.compile_fx
from apart import apart

def as_it_is(gm, inputs, **how):
    """In place of Inductor's code."""
    def call(args):
        return gm.forward(*args)

    call._boxed_call = True
    return call

def process(root, names):
    print("-- next --", file=sys.stderr)
    spec = importlib.util.spec_from_file_location("coda_inductor", f"{root}/__init__.py",
                                                  submodule_search_locations=[root])
    package = importlib.util.module_from_spec(spec)
    sys.modules["coda_inductor"] = package
    import coda_inductor.compat as compat
    for name in names:
        path = compat.TORCH[name].path
        compat.TORCH[name] = dataclasses.replace(compat.TORCH[name], path=f"{path}_gone")
    del sys.modules["coda_inductor"]
    spec.loader.exec_module(sys.modules.setdefault("coda_inductor", package))
    from coda_inductor import backend, op_by_op, report
    inductor = torch._inductor.compile_fx
    inductor.compile_fx = functools.partial(inductor.compile_fx, inner_compile=as_it_is)
    op_by_op.compile_fx_inner = as_it_is
    for name in names:
        getattr(compat, name)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    x = torch.ones(2, 8, requires_grad=True)
    y = torch.compile(model, backend=backend.coda)(x)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (want,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(got, want)
    print(json.dumps({"lacking": compat.missing_names(), "analysed": len(report.reports())}))

for names in json.loads(sys.argv[2]):
    apart(process, sys.argv[1], names)
'''


def test_without_names_of_torchs_models_compile_and_are_right(tmp_path):
    """Essential ones, and others."""
    parts = [{n: e for n, e in compat.TORCH.items() if e.essential == how} for how in (True, False)]
    (tmp_path / "remove.py").write_text(REMOVE)
    own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = python(tmp_path / "remove.py", PACKAGE, json.dumps([[*part] for part in parts]), **own)
    lines, (_, *logs) = done.stdout.splitlines(), done.stderr.split("-- next --")
    for entries, line, log, essential in zip(parts, lines, logs, (True, False), strict=True):
        assert all(f"this torch has no {entry.path}_gone" in log for entry in entries.values())
        found = json.loads(line)
        assert set(found["lacking"]) == {f"{e.path}_gone" for e in entries.values() if essential}
        assert found["analysed"] == (not essential)
