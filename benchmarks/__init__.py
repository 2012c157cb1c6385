"""The benchmark suite: one command measures, one command renders docs/benchmarks.md.

``python -m benchmarks --out DIR`` runs every suite, each part in its own process, beside its
baselines; ``python -m benchmarks report FILE`` turns a results file into tables and plots. Layers,
top down:

    __main__      the command line
    report        results -> markdown tables; plots draws them (both read results only)
    runner        one subprocess per job, which survives a variant that crashes or hangs
    job           what runs inside such a process: picks the suite
    layer, llama, compile_time    the suites
    ceiling       adapts a layer written by hand as one more baseline
    measure       timers, profiler, memory; keeps the variants that work
    environment   versions, and texts clean of local paths
"""
