"""The ring of staging buffers: a buffer that a copy in flight reads is never lent, and waiting is the exception."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.late_device import LateDevice
from worker.device import HostDevice
from worker.layout import ALIGNMENT, Layout
from worker.staging import StagingRing


def send(ring: StagingRing, device: LateDevice, value: int, num_bytes: int = 8) -> None:
    staged = ring.acquire(num_bytes)
    staged.host.fill_(value)
    device.upload(staged.host, staged.device)
    staged.free_after = device.mark()


@given(depth=st.integers(1, 4), progress=st.sampled_from([0.0, 0.3, 0.9]), count=st.integers(1, 30))
def test_the_device_sees_what_was_sent_however_late_it_reads(depth: int, progress: float, count: int) -> None:
    device = LateDevice(progress)
    ring = StagingRing(device, depth)
    for number in range(count):
        send(ring, device, number, num_bytes=8 + number % 5)
    device.mark().synchronize()


def test_without_the_wait_the_device_would_see_a_later_step() -> None:
    """The test above has teeth: a buffer that is said to be free at once is rewritten too early."""
    device = LateDevice(0.0)
    ring = StagingRing(device, 1)
    send(ring, device, 1)
    ring.acquire(8).host.fill_(2)  # waits, and is right
    send(ring, device, 3)
    ring._lent[0].free_after = None
    ring.acquire(8).host.fill_(4)
    with pytest.raises(AssertionError, match="rewritten before"):
        device.mark().synchronize()


def test_one_buffer_more_than_steps_in_flight_never_waits() -> None:
    device = LateDevice(0.0)
    ring = StagingRing(device, 3)
    before = device.mark()
    for number in range(10):
        send(ring, device, number)
        before.synchronize()  # the result of the step before is taken
        before = device.mark()
    assert ring.waits == 0
    alone = StagingRing(device, 1)
    send(alone, device, 1)
    send(alone, device, 2)
    assert alone.waits == 1


def test_buffers_grow_and_are_kept() -> None:
    ring = StagingRing(HostDevice(), 1)
    small = ring.acquire(10)
    assert ring.acquire(5) is small
    large = ring.acquire(11)
    assert large is not small and len(large.host) == len(large.device) == 20
    assert ring.acquire(20) is large


def test_a_ring_has_a_buffer() -> None:
    with pytest.raises(ValueError, match="at least one"):
        StagingRing(HostDevice(), 0)


def test_arrays_of_a_layout_lie_apart_aligned_and_in_order() -> None:
    arrays = {
        "a": np.arange(3, dtype=np.int32), "b": np.arange(2, dtype=np.int64), "none": np.zeros(0, np.int64),
        "c": np.arange(5, dtype=np.int32),
    }  # fmt: skip
    layout = Layout(arrays)
    buffer = torch.full((layout.end + 3,), 77, dtype=torch.uint8)
    layout.write(arrays, buffer)
    views = layout.views(buffer.clone())
    assert {name: view.tolist() for name, view in views.items()} == {n: array.tolist() for n, array in arrays.items()}
    assert views["a"].dtype is torch.int32 and views["b"].dtype is torch.int64
    starts = [layout.views(buffer)[name].data_ptr() - buffer.data_ptr() for name in "abc"]
    assert all(start % ALIGNMENT == 0 for start in starts) and starts == sorted(starts)
    assert layout.end % ALIGNMENT == 0 and buffer[layout.end :].tolist() == [77] * 3


def test_what_comes_behind_moves_nothing() -> None:
    """A recorded step finds its inputs at the front, whatever else is sent with them."""
    inputs = {"x": np.arange(3, dtype=np.int32), "y": np.arange(4, dtype=np.int64)}
    alone, longer = Layout(inputs), Layout({**inputs, "more": np.arange(9, dtype=np.int64)})
    buffer = torch.zeros(longer.end, dtype=torch.uint8)
    longer.write({**inputs, "more": np.arange(9, dtype=np.int64)}, buffer)
    assert {name: view.tolist() for name, view in alone.views(buffer).items()} == {"x": [0, 1, 2], "y": [0, 1, 2, 3]}
