"""`device.Device` on CUDA: streams, events, pinned memory, graphs. All that tests without a GPU cannot reach is here.

This file has not been run yet; it makes only calls that PyTorch documents, and holds no logic of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from worker.device import Body, Mark


class CudaDevice:
    """The stream that is current when a method is called computes; uploads and results have a stream each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._uploads = torch.cuda.Stream(device)
        self._results = torch.cuda.Stream(device)
        self._pool: Any = None  # torch's handle of the memory pool that all recordings share

    def host_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        # the allocator hands out memory that the computing stream may still read: right for that stream only
        self._uploads.wait_stream(torch.cuda.current_stream(self.device))
        return buffer

    def upload(self, host: Tensor, device: Tensor) -> None:
        with torch.cuda.stream(self._uploads):
            device.copy_(host, non_blocking=True)
        torch.cuda.current_stream(self.device).wait_stream(self._uploads)

    def download(self, device: Tensor, host: Tensor) -> Mark:
        self._results.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._results):
            host.copy_(device, non_blocking=True)
            arrived = CudaMark()
        device.record_stream(self._results)
        return arrived

    def mark(self) -> Mark:
        return CudaMark()

    def record(self, body: Body) -> Body:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles kernels, lets libraries take their workspaces: neither may be recorded
                body()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = body()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class CudaMark:
    """An event of the current stream. Who waits for it sleeps instead of spinning."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record()

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, CudaMark)
        return int(earlier.event.elapsed_time(self.event) * 1e3)
