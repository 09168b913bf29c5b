"""`python -m bench kernels`: how near the kernels come to what the machine can do.

    work.py      bytes, FLOPs and the floor they make of the measured ceilings. Pure
    cases.py     what is measured, in order of importance, and the targets. Pure
    budget.py    which cases still fit into the time. Pure
    timing.py    samples → median and spread. Pure
    results.py   all numbers of a run and their JSON keys. Pure
    table.py     the same for the terminal
    plot.py      the same as a picture
    device.py    what a device must offer to be measured
    on_cpu.py, on_cuda.py          how each is timed, and its ceilings
    attention.py, cache_ops.py, elementwise.py, gemm.py, decode_step.py   how a case of each kind is run
    backends.py  the attention backend for a case; tiles.py: one whose tiles are chosen
    session.py   the order of things in a run
    command.py   the flags

The pure ones import no torch.
"""
