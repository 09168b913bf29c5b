"""`python -m tests.sim SEED` replays one history with a trace; `python -m tests.sim FIRST COUNT` runs many."""

from __future__ import annotations

import sys
import time

from tests.sim.cluster import play


def main(arguments: list[str]) -> None:
    if len(arguments) == 1:
        play(int(arguments[0]), trace=print)
        return
    first, count = int(arguments[0]), int(arguments[1])
    start, failed = time.perf_counter(), []
    for seed in range(first, first + count):
        try:
            play(seed)
        except Exception as error:
            failed.append(seed)
            print(f"{seed}: {type(error).__name__}: {error}")
    elapsed = time.perf_counter() - start
    print(f"{count} histories, {len(failed)} failed, {count / elapsed:.0f} a second")
    sys.exit(bool(failed))


main(sys.argv[1:])
