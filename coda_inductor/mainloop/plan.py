# SPDX-License-Identifier: Apache-2.0
"""Launching QuACK's plans: any plan (:func:`run`), or one whose constant work per call has been
done in advance (:func:`ready`).

``run_gemm_epi_plan`` collects the epilogue's arguments by name, asks every resource for its own,
and checks options that a plain GEMM does not have. ``ready`` does that once: each call passes its
values as a list in a fixed order. The counter of tiles of Hopper's dynamic scheduler is allocated
and cleared for each launch, on its stream: two launches at the same time share nothing, and a CUDA
graph clears it at each replay.
"""

import operator
from collections.abc import Callable, Sequence

import torch
from quack.gemm_runtime.host import GemmEpiPlan, run_gemm_epi_plan
from quack.gemm_tvm_ffi_utils import launch_gemm, make_varlen_args, plan_scheduler_args
from torch import Tensor


def counter(a: Tensor) -> Tensor:
    """The dynamic scheduler's counter for one launch with ``a``: (1,) int32."""
    return a.new_zeros(1, dtype=torch.int32)


def run(plan: GemmEpiPlan, a, b, d, c, values, groups=None, index=None) -> None:
    """Launch ``plan`` on the current stream. The tensors are as from ``build.dummy_arguments``;
    ``groups`` and ``index`` are the program's operands of these kinds.

    Raises whatever QuACK or the driver raises.
    """
    semaphore = counter(a) if plan.scheduler_uses_semaphore else None
    run_gemm_epi_plan(
        plan, a, b, d, c, values, tile_count_semaphore=semaphore, cu_seqlens_m=groups, A_idx=index
    )


#: (A, B, D, C, the epilogue's values, "groups", "index") -> None
Launch = Callable[..., None]


def ready(plan: GemmEpiPlan, names: Sequence[str]) -> Launch:
    """A function that launches ``plan`` like ``run_gemm_epi_plan``. ``names``: the names of the
    epilogue's values; each call passes these values in this order, and then None."""
    active = {name for name, _, _ in plan.call_ops}
    slots = [
        names.index(name) if name in active and name in names else len(names)
        for name in plan.arg_template
    ]
    several = len(slots) > 1  # an itemgetter of one slot returns no tuple
    pick = operator.itemgetter(*slots) if several else lambda v: tuple(v[slot] for slot in slots)
    conversions = [
        (names.index(name), convert, key)
        for name, convert, key in plan.call_ops
        if convert is not None and name in names
    ]

    static = plan_scheduler_args(plan, None)

    def launch(a, b, d, c, values, groups=None, index=None) -> None:
        for slot, convert, key in conversions:
            values[slot] = convert(values[slot], key)
        scheduler_args = static
        if plan.scheduler_uses_semaphore:
            semaphore = counter(a)  # the kernel gets its address, so it must live until the launch
            scheduler_args = static._replace(tile_count_semaphore=semaphore.data_ptr())
        varlen = make_varlen_args(groups, None, index)
        launch_gemm(plan, a, b, d, c, pick(values), scheduler_args, varlen)

    return launch
