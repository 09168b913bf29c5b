"""Python's collector of cyclic garbage, kept from stalling steps: it does not look through the blocks of a pool.

A full collection visits every object that may be part of a cycle, the blocks of all pools among them: 24 ms for
100,000. That is longer than two steps in flight may last on a fast worker.
"""

from __future__ import annotations

import gc


def leave_out_what_is_there() -> None:
    """Collect now, then never look again at what is left, until the next call. For when a worker has brought a pool:
    what that of its predecessor left behind (blocks are linked both ways) goes now."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
