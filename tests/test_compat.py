# SPDX-License-Identifier: Apache-2.0
"""A private name of torch's, QuACK's or CuTeDSL's that is gone costs what ``compat`` says of it."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coda_inductor import compat
from coda_inductor.errors import CodaError
from coda_inductor.mainloop import availability

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "coda_inductor"


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "compat.py":
            yield path, ast.parse(path.read_text())


def private(name: str) -> bool:
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])


def imported(tree: ast.Module) -> Iterator[str]:
    """Everything that a module imports from torch and the kernel libraries, by its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (n for n in names if n.split(".")[0] in ("torch", "quack", "cutlass"))


def attributes(tree: ast.Module) -> Iterator[str]:
    """Private attributes of things that are not the module's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if dotted(node).split(".")[0] not in ("self", "cls"):
                yield dotted(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)):
                yield f".{name.value}"


def own_names() -> set[str]:
    """What the package itself calls by a private name."""
    found = set()
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if dotted(node).startswith("self.") else set()
    return found


KERNEL_NAMES = {p.path.rpartition(".")[2] for p in compat.KERNELS}


def test_private_names_stand_in_compat_only():
    ours = own_names() | {"_exit", "_coda_mixed", "_CODE_STATE"}
    wrong = []
    for path, tree in modules():
        in_mainloop = "mainloop" in path.parts
        names = [n for n in imported(tree) if private(n) or n.startswith(("quack", "cutlass"))]
        names += [n for n in attributes(tree) if n.rpartition(".")[2] not in ours]
        for name in names:
            if in_mainloop and (name.startswith("cutlass") and not private(name)):
                continue  # CuTeDSL's public names
            if not (in_mainloop and known(name)):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong


def known(name: str) -> bool:
    """Does compat list ``name``, a module of one of its names, or such an attribute?"""
    paths = [p.path for p in compat.KERNELS]
    if name.startswith(("quack", "cutlass")) and any(f"{p}.".startswith(f"{name}.") for p in paths):
        return True
    return private(name) and name.rpartition(".")[2] in KERNEL_NAMES


@pytest.mark.parametrize("entry", compat.KERNELS, ids=lambda entry: entry.path)
def test_without_a_name_of_the_kernel_libraries_there_are_no_kernels(entry, monkeypatch):
    pytest.importorskip("quack")
    gone = dataclasses.replace(entry, path=f"{entry.path}_gone")
    others = [gone if e is entry else e for e in compat.KERNELS]
    monkeypatch.setattr(availability, "KERNELS", others)
    availability.missing_from_libraries.cache_clear()
    why = availability.library_stack.__wrapped__()
    availability.missing_from_libraries.cache_clear()
    assert why.code == "no-kernel-stack"
    assert f"has no {entry.path}_gone" in why.text


#: Removes one name after another, each in a fork that has not imported coda_inductor yet.
REMOVE = '''
import dataclasses, functools, importlib.util, io, json, logging, os, sys, traceback
import torch, torch._dynamo, torch._functorch.aot_autograd, torch._inductor.compile_fx

def remove(names, root):
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

def traced(gm, inputs):
    """Our passes, and no code generation."""
    from coda_inductor.options import parse
    from coda_inductor.pipeline import on_aten, on_dynamo
    from coda_inductor.record import Record
    from coda_inductor.tracing import trace

    record = Record(parse(None, None), "graph")
    around = on_dynamo(gm, record)
    call = trace(gm, inputs, lambda graph: on_aten(graph, record)).call
    assert record.report.sites
    return around(call)

def as_it_is(gm, inputs, **how):
    """In place of Inductor's code."""
    def call(args):
        return gm.forward(*args)

    call._boxed_call = True
    return call

def attempt(names, root, how):
    said = io.StringIO()
    logger = logging.getLogger("coda_inductor")
    logger.addHandler(logging.StreamHandler(said))
    remove(names, root)
    import coda_inductor
    from coda_inductor import backend, compat, op_by_op
    inductor = torch._inductor.compile_fx
    inductor.compile_fx = functools.partial(inductor.compile_fx, inner_compile=as_it_is)
    op_by_op.compile_fx_inner = as_it_is
    for name in names:
        getattr(compat, name)
    result = {"lacking": compat.lacking()}
    if how != "import":
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        x = torch.ones(2, 8, requires_grad=True)
        y = torch.compile(model, backend=backend.coda if how == "compile" else traced)(x)
        (got,) = torch.autograd.grad(y.square().sum(), x)
        (want,) = torch.autograd.grad(model(x).square().sum(), x)
        torch.testing.assert_close(y, model(x))
        torch.testing.assert_close(got, want)
    return {**result, "said": said.getvalue()}

if __name__ == "__main__":
    root, groups = sys.argv[1], json.loads(sys.argv[2])
    for names, how in groups:
        sys.stdout.flush()
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                answer = attempt(names, root, how)
            except BaseException:
                answer = {"error": traceback.format_exc()[-2000:]}
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            print(pipe.read(), flush=True)
'''

#: Run by the backend, and compared with eager: nothing is left to it, and a little is.
COMPILED = (
    ["CustomGraphPass", "tree_map", "tree_leaves", "tree_flatten"],
    ["make_boxed_func", "select_decomp_table", "remove_noop_ops"],
)
#: Run op by op after our passes, and compared with eager.
TRACED = (
    ["InductorError", "without_saved_tensors_hooks", "select_decomp_table"],
    ["stable_topological_sort"], ["TorchDispatchMode"], ["trace_structured", "counters"],
)  # fmt: skip


#: Imported without some at a time.
IMPORTED = [list(compat.TORCH)[start::6] for start in range(6)]


@pytest.fixture(scope="module")
def removed(tmp_path_factory) -> dict[tuple[str, ...], dict]:
    """What happens without each name."""
    groups = [(names, "import") for names in IMPORTED]
    groups += [(names, "trace") for names in TRACED] + [(names, "compile") for names in COMPILED]
    folder = tmp_path_factory.mktemp("removed")
    (folder / "remove.py").write_text(REMOVE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, str(folder / "remove.py"), str(PACKAGE), json.dumps(groups)],
        env=environment, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers = map(json.loads, done.stdout.splitlines())
    return {(*names, how): answer for (names, how), answer in zip(groups, answers, strict=True)}


@pytest.mark.parametrize("names", IMPORTED, ids=" ".join)
def test_without_names_of_torchs_the_backend_is_imported(names, removed):
    answer = removed[(*names, "import")]
    assert "error" not in answer, answer["error"]
    entries = [compat.TORCH[name] for name in names]
    for entry in entries:
        assert f"this torch has no {entry.path}_gone" in answer["said"]
        assert entry.without in answer["said"]
    essential = {f"{entry.path}_gone" for entry in entries if entry.essential}
    assert set(answer["lacking"]) == essential


@pytest.mark.parametrize("names", [*TRACED, *COMPILED], ids=" ".join)
def test_without_it_models_compile_and_are_right(names, removed):
    answer = removed[(*names, "compile" if names in COMPILED else "trace")]
    assert "error" not in answer, answer["error"]
    essential = any(compat.TORCH[name].essential for name in names)
    assert ("coda falls back to Inductor: it does nothing" in answer["said"]) == essential
    for name in names:
        assert f"no {compat.TORCH[name].path}_gone" in answer["said"]


def test_what_cannot_be_replaced_raises_when_it_is_called():
    for name in ("aot_autograd", "TorchDispatchMode"):
        with pytest.raises(CodaError, match=compat.TORCH[name].path):
            compat._unusable(compat.TORCH[name])(1, key=2)


def test_stand_ins_do_what_they_stand_for():
    boxed = compat.TORCH["make_boxed_func"].instead(lambda x, y: x + y)
    assert boxed([1, 2]) == 3
