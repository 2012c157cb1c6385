# SPDX-License-Identifier: Apache-2.0
"""Generated source -> module -> QuACK ``EpiMod``, once per process.

The source is written to ``<cache>/epilogues/<key>.py`` for readers. The code that runs is compiled
from the rendered text, which tracebacks and CuTeDSL read from ``linecache``. Every process has the
same module name and therefore the same on-disk kernel key.
"""

import contextlib
import functools
import hashlib
import linecache
import sys
import types
from pathlib import Path
from typing import Any

from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import ColVecLoad, RowVecLoad, TileLoad
from quack.epilogue.rotary import RotaryCosSinTMALoad
from quack.gemm_runtime.identity import TORCH_OP_EPI_MODS

from coda_inductor.cache_dir import cache_dir, write
from coda_inductor.codegen.ports import ports
from coda_inductor.codegen.render import RENDERER_VERSION, render
from coda_inductor.mainloop import store
from coda_inductor.mainloop.environment import environment
from coda_inductor.mainloop.heads import HeadAccumulator, Swap
from coda_inductor.mainloop.lean import LeanEpilogue
from coda_inductor.mainloop.readings import reading_with
from coda_inductor.mainloop.resources import BatchLoad, DeviceScalar, Distance, reduction
from coda_inductor.program import EpilogueProgram

_LOADS = {
    "tile": TileLoad,
    "row": RowVecLoad,
    "col": ColVecLoad,
    "scalar": DeviceScalar,
    "batch": BatchLoad,
    "table": RotaryCosSinTMALoad,  # which accepts any values
}


class CodaEpiMod(EpiMod):
    """An epilogue with the identity of its program. QuACK's own identity is a fingerprint of the
    function's source. Ours is the program's key plus a hash of everything that turns programs into
    code, so that comments (which name the graph ops a step came from) do not cause recompilation.
    """

    def __init__(self, function, program: EpilogueProgram, variant: str):
        mapping = ports(program)
        self.reading = reading_with(program, variant)
        self._mixins = self.reading.mixins(program, variant)
        if mapping.across:
            self._mixins = (HeadAccumulator, *self._mixins)
        ops = {o.name: _LOADS[o.kind](o.name) for o in program.read if o.name != mapping.c}
        super().__init__(
            function,
            outputs=tuple(store.name for store in mapping.aux),
            ops=ops | {step.name: Swap(step) for step in mapping.across},
            outs={sink.name: reduction(sink) for sink in mapping.sinks},
            mode="acc_pair" if program.paired else None,
            extra_ops=tuple(map(Distance, self.reading.distances)),
        )
        self.program = program
        self.semantic_key = ("coda_inductor", program.key, variant, codegen_hash())
        self.semantic_digest = hashlib.sha256(repr(self.semantic_key).encode()).hexdigest()
        self._ident = f"coda_{self.semantic_digest[:16]}"
        TORCH_OP_EPI_MODS[self.semantic_digest] = self

    def _mint(self, *key):
        kernel_class = super()._mint(*key)
        if "_coda_mixed" not in vars(kernel_class):
            name, bases = kernel_class.__name__, (*self._mixins, LeanEpilogue, kernel_class)
            mixed = type(f"{name}_coda", bases, {"__module__": kernel_class.__module__})
            kernel_class._coda_mixed = mixed
        return kernel_class._coda_mixed


@functools.cache
def load(program: EpilogueProgram, variant: str = "") -> CodaEpiMod:
    """The EpiMod of ``program``. Its source is rendered, written and run on first use. Raises
    ValueError if no reading has this ``variant``."""
    path = source_path(program, variant)
    source = render(program, variant)
    with contextlib.suppress(OSError):  # the file is only for readers
        if not path.is_file() or path.read_text() != source:
            write(path, source)
    module = types.ModuleType(f"coda_inductor_epilogue_{path.stem}")
    module.__file__ = str(path)
    # Without a time, linecache shows this entry and never reads the file.
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    sys.modules[module.__name__] = module
    code = compile(source, str(path), "exec", dont_inherit=True)
    exec(code, vars(module))  # noqa: S102 (rendered just now)
    mod = CodaEpiMod(module.epilogue, program, variant)
    vars(module)["kernel"] = mod  # QuACK looks the mod up in the globals of the function's module
    return mod


def source_path(program: EpilogueProgram, variant: str = "") -> Path:
    """The path of the source of ``program``, which exists once the program has been loaded."""
    name = f"{program.key}_{variant}" if variant else program.key
    return cache_dir() / "epilogues" / f"{name}_v{RENDERER_VERSION}.py"


def kernel_name(
    program: EpilogueProgram | str, config: Any, a_major: str, b_major: str, variant: str, arch: str
) -> str:
    """The name of a kernel's file. The arguments are as for ``build``, or texts for a kernel
    without program; ``arch`` is the compute capability, e.g. "90"."""
    program = program.key if isinstance(program, EpilogueProgram) else program
    key = program, str(config), a_major, b_major, variant, arch, codegen_hash()
    return hashlib.sha256(repr(key).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def codegen_hash() -> str:
    """A hash of every source file that turns programs into code, and of the parts of the machine
    and the environment that the code depends on."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(f"{RENDERER_VERSION} {environment()}".encode())
    for folder in ("mainloop", "codegen"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


store.use()
