# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled kernels: nothing planted runs, what is kept, folders of an image."""

import inspect
import linecache
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

pytest.importorskip("quack")

import quack.cache
import quack.cache.jit
from programs import kinds

from coda_inductor.mainloop import environment, mod, store
from coda_inductor.mainloop.environment import label


class Compiled:
    """A "kernel" is a file of bytes."""

    def __init__(self, text):
        self.text = text

    def export_to_c(self, object_file_path, function_name):
        Path(object_file_path).write_bytes(self.text)


def test_source_is_run_from_the_text_that_was_rendered(tmp_path, monkeypatch):
    """Neither a planted source nor byte code beside it is imported, by us or by tracebacks."""
    program = kinds()["rms_partial"]
    monkeypatch.setattr(mod, "cache_dir", lambda: tmp_path)
    path = mod.source_path(program)
    path.parent.mkdir()
    path.write_text("raise SystemExit('planted source')")
    (tmp_path / "evil.py").write_text("raise SystemExit('planted byte code')")
    rendered = mod.render(program)
    cached = Path(cache_from_source(str(path)))
    cached.parent.mkdir()
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(tmp_path / "evil.py"), str(cached), invalidation_mode=unchecked)
    loaded = mod.load.__wrapped__(program)
    assert path.read_text() == rendered
    assert loaded.program == program
    function = sys.modules[f"coda_inductor_epilogue_{path.stem}"].epilogue
    path.write_text("changed afterwards")
    linecache.checkcache(str(path))
    assert inspect.getsource(function) in rendered
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.write_text("a file")  # nothing can be written
    assert mod.load.__wrapped__(program).program == program


def test_kernels_of_a_folder_that_can_only_be_read_are_used(tmp_path, monkeypatch):
    own, compiled = tmp_path / "kernels" / label(), []
    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(own))

    def load(path, **_):
        return {quack.cache.jit.EXPORT_FUNC_NAME: Compiled(Path(path).read_bytes())}

    @quack.cache.jit.jit_cache
    def cached(key):
        compiled.append(key)
        return Compiled(f"code of {key}".encode())

    def compiler(key):
        cached.cache_clear()  # as another process would ask
        return cached(key).text

    monkeypatch.setattr(quack.cache.jit.cute.runtime, "load_module", load)
    compiler("a")
    (kernel,) = own.rglob("*.o")
    image = tmp_path / "image" / "kernels" / label()
    image.parent.mkdir(parents=True)
    own.rename(image)
    monkeypatch.setattr(store, "prewarmed", lambda: tmp_path / "image")
    assert store.read_only(kernel) == image / kernel.relative_to(own)
    assert compiler("a") == b"code of a"
    assert compiled == ["a"]
    assert kernel.read_bytes() == b"code of a"
    assert compiler("b") == b"code of b"
    assert len(list(image.rglob("*.o"))) == 1, "what it lacks goes to our own folder"


def test_keys_hold_machine_options_and_cuda_variant(monkeypatch):
    def fresh():
        return mod.codegen_hash.__wrapped__()

    before = fresh()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    assert fresh() == before
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_LINEINFO", "1")
        assert fresh() != before
    with monkeypatch.context() as patch:
        patch.setattr(environment.platform, "machine", lambda: "aarch64")
        assert fresh() != before
        assert label().startswith("aarch64-quack")
    version = environment.version
    with monkeypatch.context() as patch:
        patch.setattr(environment, "version", lambda n: "9" if "cu13" in n else version(n))
        assert fresh() != before
        assert label().endswith("-cu13")
    assert fresh() == before
