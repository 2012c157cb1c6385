# SPDX-License-Identifier: Apache-2.0
"""The benchmark suite: one command measures, one command renders docs/benchmarks.md.

``python -m benchmarks --out DIR`` runs every suite, each part in its own process, beside its
baselines; ``python -m benchmarks report FILE`` turns a results file into tables and plots. Layers,
top down:

    __main__      the command line
    plots         writes the page and its plots (reads results only, as all down to tables)
    report        results -> the page, and what a terminal shows
    sections      which tables and notes belong to a suite
    tables, train_tables    the tables
    runner        one subprocess per job, which survives a variant that crashes or hangs
    job           what runs inside such a process: picks the suite
    layer, llama, compile_time            the suites without gradients
    layer_train, model_train, kernels     those with; kernels measures the modules of blocks
    gradients     a step of a module, its GEMMs alone, its gradients in fp32
    ceiling       adapts a layer written by hand as one more baseline
    measure       timers, profiler, memory; keeps the variants that work
    environment   versions, and texts clean of local paths
"""
