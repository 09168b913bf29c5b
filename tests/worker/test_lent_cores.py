"""The file in which workers tell each other which cores are idle."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from worker.lent_cores import BORROWER, FILE, LINE, OWNER, LentCores


def lines(folder: Path) -> np.ndarray:
    """int64 [cores, 8], as they are now."""
    return np.memmap(folder / FILE, dtype=np.int64, mode="r+").reshape(-1, LINE // 8)


def test_a_worker_is_busy_but_while_it_waits(tmp_path: Path) -> None:
    cores = LentCores(tmp_path, replica=1, num_replicas=3, threads=2)
    told = lines(tmp_path)
    assert told[:, OWNER].tolist() == [0, 0, 1, 1, 0, 0]  # who has not started yet needs no core
    with cores.idle():
        assert not told[:, OWNER].any()
    assert told[:, OWNER].tolist() == [0, 0, 1, 1, 0, 0]
    cores.leave()
    assert not told.any()


def test_workers_see_each_other(tmp_path: Path) -> None:
    first, second = (LentCores(tmp_path, replica, num_replicas=2, threads=1) for replica in range(2))
    told = lines(tmp_path)
    with second.idle():
        assert told[:, OWNER].tolist() == [1, 0]
    assert len(first.others) == len(second.others) == 1
    assert first.borrower != second.borrower and first.borrower and second.borrower


def test_others_begin_with_the_neighbour(tmp_path: Path) -> None:
    cores = LentCores(tmp_path, replica=1, num_replicas=3, threads=2)
    offsets = [address - min(cores.others) for address in cores.others]
    assert offsets == [4 * LINE, 5 * LINE, 0, LINE]


def test_a_successor_gives_back_what_was_borrowed_and_counts_as_busy(tmp_path: Path) -> None:
    dead = LentCores(tmp_path, replica=0, num_replicas=3, threads=1)
    told = lines(tmp_path)
    told[:, BORROWER] = [0, dead.borrower, 3]
    with dead.idle():
        LentCores(tmp_path, replica=0, num_replicas=3, threads=1)
        assert told[:, OWNER].tolist() == [1, 0, 0]
        assert told[:, BORROWER].tolist() == [0, 0, 3]
