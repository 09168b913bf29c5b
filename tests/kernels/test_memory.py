"""Memory in large pages: what is asked for is there, and tensors do not lie in one another."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.memory import ALIGNMENT, CHUNK, LARGE_PAGE, Ahead, Arena, empty

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def told(address: int, name: str) -> list[str]:
    """What the kernel says under this name of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith(f"{name}:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the tensor's pages: its mapping may be one with a neighbour's."""
    pages = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(tensor.data_ptr(), tensor.nbytes, pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_memory_asks_for_large_pages() -> None:
    tensor = empty((3, LARGE_PAGE), torch.bfloat16)
    assert tensor.data_ptr() % LARGE_PAGE == 0
    flags = told(tensor.data_ptr(), "VmFlags")
    assert "hg" in flags, "madvise(MADV_HUGEPAGE)"
    assert "sh" not in flags, "shared memory would stay in small pages"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (4, LARGE_PAGE // 4 + 3), (0, 7)])
def test_a_tensor_is_of_its_shape_and_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, other = empty(shape, dtype), empty(shape, dtype)
    assert tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous()
    tensor.fill_(1)
    other.fill_(2)
    assert bool((tensor == 1).all())


def test_memory_stays_while_a_view_of_it_does() -> None:
    part = empty((2, LARGE_PAGE), torch.int8).fill_(3)[1, 10:20]
    gc.collect()
    assert part.tolist() == [3] * 10


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300), st.sampled_from(DTYPES)), min_size=1, max_size=20))
def test_tensors_of_an_arena_follow_each_other(wanted: list[tuple[int, int, torch.dtype]]) -> None:
    arena = Arena()
    tensors = [arena.empty((rows, columns), dtype) for rows, columns, dtype in wanted]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, (rows, columns, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
        assert tensor.shape == (rows, columns) and tensor.dtype is dtype and tensor.data_ptr() % ALIGNMENT == 0
        assert bool((tensor == number).all()), "nothing else was written there"
    filled = [tensor for tensor in tensors if tensor.numel()]
    for before, after in itertools.pairwise(filled):
        assert 0 <= after.data_ptr() - before.data_ptr() - before.numel() * before.element_size() < ALIGNMENT


def test_an_arena_holds_what_is_larger_than_its_chunks() -> None:
    arena = Arena()
    small, large, next_small = (arena.empty((size,), torch.int8).fill_(i) for i, size in enumerate((9, CHUNK + 1, 9)))
    assert [int(t[-1]) for t in (small, large, next_small)] == [0, 1, 2]
    assert int(large[0]) == 1 and len(large) == CHUNK + 1


def test_pages_are_touched_a_few_at_a_time_and_before_they_are_used() -> None:
    """Blocks of 64 KiB, 32 to a page, in three tensors of six pages."""
    tensors = [empty((192, 1 << 16), torch.uint8) for _ in range(3)]
    ahead = Ahead(tensors)
    assert ahead.total == 18
    before = 0
    for block in range(1, 192):
        ahead.handed_out(1, block)
        assert ahead.touched - before <= 1
        if block >= 32:
            assert ahead.touched >= 3 * (block // 32 + 1), "its own page is ready in every tensor"
        assert ahead.touched <= 3 * (block // 32 + 2), "no more than the page behind it"
        before = ahead.touched
    assert ahead.touched == ahead.total
    ahead.handed_out(5, 191)
    assert ahead.touched == ahead.total


def test_touched_pages_are_there() -> None:
    tensor = empty((64, 1 << 17), torch.uint8)
    ahead = Ahead([tensor])
    assert resident_bytes(tensor) == 0
    ahead.handed_out(16, 15)
    ahead.settle()
    assert ahead.touched == 2
    assert resident_bytes(tensor) == 2 * LARGE_PAGE


def test_touching_changes_nothing() -> None:
    tensors = [empty((6, LARGE_PAGE), torch.uint8) for _ in range(2)]
    for tensor in tensors:
        tensor[:3] = torch.arange(3 * LARGE_PAGE).remainder(251).view(3, -1)
    copies = [tensor.clone() for tensor in tensors]
    ahead = Ahead(tensors)
    ahead.handed_out(12, 5)
    ahead.settle()
    assert ahead.touched == ahead.total
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_blocks_that_are_handed_out_again_touch_nothing_new() -> None:
    ahead = Ahead([empty((192, 1 << 16), torch.uint8)])
    for _ in range(300):
        ahead.handed_out(1, 7)
    assert ahead.touched == 2
