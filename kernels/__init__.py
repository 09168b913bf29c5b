"""Attention and cache kernels by backend. Knows tensors and block tables; knows no process, request or message.

    metadata.py       what every kernel of one step is told about the batch
    backend.py        what a backend must be able to do
    checks.py         the shapes and dtypes all backends accept
    registry.py       which backends there are, and what each supports
    selector.py       which one a worker gets, and why not each other
    reference.py      float64, readable: the oracle of all tests
    torch_backend.py  plain PyTorch, any device
    cpu/              Numba and explicit vectors
    triton/           (a GPU backend registers itself under this name)

This module imports nothing, so that a process which only wants the registry pays for nothing else.
"""
