# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch, QuACK and CuTeDSL that is used, and the effect if it is missing.

A name is private if a part of its path starts with an underscore; QuACK promises no stable API, so
all of its names are. Torch's are imported from here only (``from coda_inductor.compat import
tree_map``), and each is looked up at its first use. A missing name costs a feature, which its entry
names, and one warning, never a failed import; without an *essential* one the backend hands every
graph to Inductor unchanged (:func:`missing_names`). Only ``mainloop`` uses names of QuACK and
CuTeDSL; it is imported after ``mainloop.availability`` has seen each of them in their files.
"""

import contextlib
import functools
import importlib
import logging
import pkgutil
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from coda_inductor.errors import CodaError

_log = logging.getLogger("coda_inductor")


@dataclass(frozen=True)
class Private:
    """A private name of a library: its full dotted ``path``, the feature that a user loses
    ``without`` it, and its ``replacement``; None for a class or function that raises CodaError, so
    that only the pass that calls it fails. Without an ``essential`` one the backend is idle."""

    path: str
    without: str = "coda does nothing on this torch"
    replacement: Any = None
    essential: bool = False


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_context(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class _NeverRaised(Exception):  # noqa: N818 (in place of torch's own errors)
    pass


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(arguments: list[Any]) -> Any:
        return function(*arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


_NO_CONFIG = types.SimpleNamespace(patch=_no_context)
_DISPATCHED = "each kernel launch takes some microseconds more on the host"
_NO_NODE = types.SimpleNamespace(saved_tensors=())
_EXPLAIN = "explain, check and the command line's tables do not work"
_NO_V = types.SimpleNamespace(graph=types.SimpleNamespace(cpp_wrapper=True))
_RESTART = "where Dynamo would start over, stock Inductor compiles"
_VJP = "the gradient of a user's pattern may fail under a dispatch mode"
_HOOKS = "_disable_saved_tensors_hooks_during_tracing"
_NO_OP = "an operator of that name is not recognized"

#: Names without which there is only plain Inductor, by module.
_ESSENTIAL = {
    "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
    "torch._inductor.custom_graph_pass": "CustomGraphPass",
    "torch._inductor.config": "joint_custom_pre_pass",
    "torch._inductor": "list_options list_mode_options",
    "torch._subclasses.fake_tensor": "unset_fake_temporarily",
    "torch._ops": "OpOverload OpOverloadPacket HigherOrderOperator",
    "torch.utils._pytree": "tree_map tree_leaves tree_flatten tree_unflatten",
}
#: Ops of torch's whose names say that they may go, by namespace.
_OPS = {
    "aten": "_grouped_mm _scaled_mm _to_copy _unsafe_index_put _unsafe_masked_index_put_accumulate",
    "_c10d_functional": "all_gather_into_tensor all_reduce reduce_scatter_tensor wait_tensor",
}
#: (path, perhaps "as" its name here, what a user loses without it, what replaces it).
_ROWS: tuple[tuple[str, str, Any], ...] = (
    ("torch._functorch.compile_utils.fx_graph_cse",
     "under a limit of memory more may be kept than was planned", lambda graph: graph),
    ("torch._inductor.custom_graph_pass.CustomPartitionerFn",
     "memory budgets and selective checkpoints work as without coda", object),
    ("torch._dispatch.python.enable_python_dispatcher",
     "linear layers of a symbolic batch that are split stay one product", _no_context),
    ("torch._guards.TracingContext",
     "a graph that must be compiled again, because a kernel is missing, is an error",
     types.SimpleNamespace(try_get=_nothing)),
    ("torch._C._dynamo.guards._empty_strided_cuda", _DISPATCHED,
     lambda *how: torch.empty_strided(*how[:2], dtype=how[2], device="cuda")),
    ("torch._inductor.lowering.fallback_handler", _DISPATCHED, _nothing),
    ("torch._inductor.lowering.register_lowering", _DISPATCHED, lambda *_, **__: _nothing),
    ("torch._inductor.ir.ConcatKernel",
     "gradients of q, k and v are copied before their projections' gradient", False),
    ("torch._inductor.virtualized.V as virtualized", _DISPATCHED, _NO_V),
    ("torch._dynamo.lookup_backend", "where coda cannot work, graphs run as they are, uncompiled",
     lambda _name: lambda gm, _inputs: gm.forward),
    ("torch._inductor.exc.InductorError",
     "what Inductor cannot compile is an error, as without coda", _NeverRaised),
    ("torch._dynamo.exc.RestartAnalysis", _RESTART, _NeverRaised),
    ("torch._dynamo.exc.SkipFrame", _RESTART, _NeverRaised),
    ("torch._inductor.compile_fx as inductor_compile",
     "with coda_inductor.enable(), what Inductor cannot compile is an error",
     types.SimpleNamespace()),
    ("torch._functorch.aot_autograd.make_boxed_func",
     "a graph that runs op by op frees its inputs later", _boxed),
    (f"torch._dynamo.utils.{_HOOKS} as without_saved_tensors_hooks",
     "compiling under torch.autograd.graph.saved_tensors_hooks may fail",
     lambda: lambda function: function),
    ("torch._inductor.fx_passes.post_grad.remove_noop_ops",
     "an idiom with a full slice or a clone in it is not recognized", _nothing),
    ("torch._inductor.decomposition.select_decomp_table",
     "what is not fused may take one kernel more", dict),
    ("torch._inductor.pattern_matcher.stable_topological_sort",
     "activations are kept for the backward pass, not recomputed", None),
    ("torch._inductor.compile_fx._recursive_pre_grad_passes",
     "with coda_inductor.enable(), branches of torch.cond are rewritten too", _nothing),
    # graphs and values
    ("torch.utils._python_dispatch.TorchDispatchMode", "attention masks are not simplified", None),
    ("torch._C._current_autograd_node",
     "changing returned logits in place before backward is not noticed", lambda: _NO_NODE),
    ("torch._C._will_engine_execute_node",
     "optim.in_backward updates weights in gradients of other tensors too", lambda _node: True),
    ("torch.Tensor._make_wrapper_subclass",
     "a new pattern of a semantic op cannot be proven", None),
    # the gradient of a user's meaning, as if at top level
    ("torch.utils._python_dispatch._disable_current_modes", _VJP, _no_context),
    ("torch._C._dispatch_keyset_full", _VJP, lambda: 0),
    ("torch._C._dispatch_tls_local_include_set", _VJP, lambda: 0),
    ("torch._C._ForceDispatchKeyGuard", _VJP, _no_context),
    ("torch._C._DisableAutocast",
     "products that run op by op are rounded to float16", _no_context),
    # reports for users
    ("torch._dynamo.utils.counters",
     'torch._dynamo.utils.counters["coda"] stays empty', defaultdict(Counter)),
    ("torch.distributed.distributed_c10d._get_default_store as default_store",
     "each rank gives all warnings", _nothing),
    ("torch._logging._internal.register_log", 'TORCH_LOGS="+coda_inductor" is refused', _nothing),
    # explain and check: graphs without code generation
    ("torch._dynamo.backends.common.aot_autograd", _EXPLAIN, None),
    ("torch._functorch.partitioners.min_cut_rematerialization_partition",
     "memory budgets, explain and check do not work", None),
    ("torch._dynamo.exc.BackendCompilerFailed", "explain's errors are Dynamo's", _NeverRaised),
    ("torch._dynamo.exc.Unsupported", "explain takes no model with graph breaks", _NeverRaised),
    ("torch._dynamo.exc.UserError",
     "explain takes no model with graph breaks that depend on data", _NeverRaised),
    ("torch._dynamo.config as dynamo_config",
     "explain may show symbolic sizes, and CodaCallback lets DDP cut graphs", _NO_CONFIG),
    ("torch._dynamo.maybe_mark_dynamic", "CodaCallback compiles padded batches twice", _nothing),
    ("torch._functorch.config as functorch_config",
     "memory budgets are ignored, and explain may leave entries in torch's caches", _NO_CONFIG),
    ("torch._subclasses.meta_utils.MetaTensorDescriber",
     "explain shows what a model on meta keeps as torch's kernels for meta would",
     types.SimpleNamespace(describe_tensor=_nothing)),
    ("torch._dynamo.pgo", "a size that explain saw may be dynamic later", types.SimpleNamespace()),
    *((f"torch.ops.{parent}.{name}.default", _NO_OP, f"no {name}")
      for parent, names in _OPS.items() for name in names.split()),
)  # fmt: skip


def _named(path: str, without: str, replacement: Any) -> tuple[str, Private]:
    """The name here, by default the last part without underscores in front, and the record."""
    path, _, name = path.partition(" as ")
    name = name or path.removesuffix(".default").rpartition(".")[2].lstrip("_")
    return name, Private(path, without, replacement)


#: Torch's private names: the name here -> its record.
TORCH: dict[str, Private] = {
    **{
        name: Private(f"{parent}.{name}", essential=True)
        for parent, names in _ESSENTIAL.items()
        for name in names.split()
    },
    "inductor_config": Private("torch._inductor.config", essential=True),
    **dict(_named(*row) for row in _ROWS),
}

#: Of QuACK and CuTeDSL, by module. Without one of them there are no kernels.
KERNELS: tuple[str, ...] = tuple(
    f"{module}.{name}"
    for module, names in {
        "cutlass._mlir.dialects": "arith",
        "quack": "activation",
        "quack.cache": "CACHE_DIR CACHE_ENABLED",
        "quack.cache.async_compile": "_pool_initializer",
        "quack.cache.jit": "FileLock _compute_source_fingerprint _key_to_hash get_cache_path",
        "quack.compile_utils": "make_fake_tensor",
        "quack.cute_dsl_utils": "get_device_capacity",
        "quack.epilogue.frontend": "EpiMod _mint _plan_cache",
        "quack.epilogue.math": "F2 unpack",
        "quack.epilogue.ops": "ColVecLoad ColVecReduce EpiOp GroupedColStatsBase OnlineLSEReduce "
        "RowVecLoad RowVecReduce Scalar TileLoad VecReduce _mask_oob _mask_oob_active _reduce_dim "
        "_vec_reduce_combine",
        "quack.epilogue.rotary": "RotaryCosSinTMALoad",
        "quack.gemm": "_compile_gemm _gemm_plan_cache gemm get_max_active_clusters launch_gemm",
        "quack.gemm_runtime.host": "GemmEpiPlan _compile_gemm_epi get_max_active_clusters "
        "run_gemm_epi_plan",
        "quack.gemm_runtime.identity": "TORCH_OP_EPI_MODS",
        "quack.gemm_sm90": "fp8_fast_accum _compute_stages _compute_tile_shape_or_override",
        "quack.gemm_tvm_ffi_utils": "launch_gemm make_varlen_args plan_scheduler_args",
        "quack.layout_utils": "convert_layout_zero_stride",
    }.items()
    for name in names.split()
)


def __getattr__(name: str) -> Any:
    """The private name of torch that ``compat`` calls ``name``, or its replacement."""
    if name not in TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    private = TORCH[name]
    try:
        value = pkgutil.resolve_name(private.path)
    except (ImportError, AttributeError):
        _log.warning("this torch has no %s: %s", private.path, private.without)
        value = _unusable(private) if private.replacement is None else private.replacement
    globals()[name] = value
    return value


@functools.cache
def missing_names() -> list[str]:
    """The essential names that this torch lacks. If one is missing, the backend does nothing."""
    missing = []
    for path in (private.path for private in TORCH.values() if private.essential):
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            missing.append(path)
    return missing


def storage(tensor: Tensor) -> int:
    """An integer that identifies the memory of ``tensor``, fake or not: equal for its views."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


def version(tensor: Tensor) -> int:
    """The number of in-place changes of ``tensor`` (``Tensor._version``), or a constant."""
    return getattr(tensor, "_version", 0)


def has_hooks(weight: Tensor) -> bool:
    """Do hooks of the user wait for the gradient of ``weight``?"""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(weight, name, None) for name in hooks)


def micro_pipeline() -> bool:
    """Is Inductor's asynchronous tensor parallelism on (``config._micro_pipeline_tp``)?"""
    return bool(getattr(__getattr__("inductor_config"), "_micro_pipeline_tp", False))


def forward_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """The hooks behind the forward of ``module``, by key; what is taken out no longer runs."""
    return module._forward_hooks


def is_compiled(model: torch.nn.Module) -> bool:
    """Is it, or a part of it, compiled in place (``_compiled_call_impl``) or a wrapper
    (``_orig_mod``)? False if torch hides that."""
    names = ("_compiled_call_impl", "_orig_mod")
    return any(getattr(m, name, None) is not None for m in model.modules() for name in names)


def wrap_compiled_call(model: torch.nn.Module, wrapper: Callable[[Any], Any]) -> None:
    """Let calls of ``model``, which is compiled in place, go through ``wrapper``."""
    if (call := getattr(model, "_compiled_call_impl", None)) is not None:
        model._compiled_call_impl = wrapper(call)


def schema(op: Any) -> Any:
    """The schema of an overload's arguments and results (``OpOverload._schema``), or None."""
    return getattr(op, "_schema", None)


def saved_tensors() -> list[Tensor]:
    """The tensors saved by the autograd node that is running; empty if torch hides them."""
    node = __getattr__("current_autograd_node")()
    tensors = [*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())]
    return [tensor for tensor in tensors if tensor is not None]


def without_dynamo() -> None:
    """Keep QuACK's decorators from importing Dynamo, which takes seconds, in a process that
    compiles kernels but no graphs. They leave functions unchanged. Other uses import it."""

    def undecorated(function: Any = None, recompile_limit: int = 0, **_: Any) -> Any:  # noqa: ARG001
        return function or undecorated

    class LazyDynamo:
        assume_constant_result = staticmethod(undecorated)

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch._dynamo"), name)

    vars(torch).update(compile=undecorated, _dynamo=LazyDynamo())
    vars(torch.compiler).update(disable=undecorated)


def _unusable(private: Private) -> type:
    """A stand-in for a function, a context or a base class: calling it raises CodaError."""

    def raises(_self: Any, *_: Any, **__: Any) -> None:
        raise CodaError(f"this torch has no {private.path}: {private.without}")

    return type(private.path.rpartition(".")[2], (), {"__init__": raises})
