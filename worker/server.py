"""The worker process around the runner: says hello, then plans in, results out, one after the other."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import zmq

from protocol import codec
from protocol import messages as m
from protocol.config import EngineConfig
from protocol.messages import PROTOCOL_VERSION
from protocol.runtime import Endpoints
from protocol.sockets import connect_dealer, fresh_identity
from worker.batch import DigestMismatch, PlanError
from worker.heartbeat import HeartbeatThread
from worker.kernel_calls import KernelCalls
from worker.lent_cores import LentCores
from worker.pipelined import PipelinedRunner
from worker.profiler import StepProfiler
from worker.rest import Rest
from worker.runner import ModelRunner, StartError, pick_device

_LOG = logging.getLogger("worker")

WELCOME_TIMEOUT_MS = 30_000
POLL_MS = 1000
"""How often an idle worker looks whether it was told to stop."""


class Worker:
    """One incarnation, bound to one replica."""

    def __init__(
        self,
        config: EngineConfig,
        endpoints: Endpoints,
        runner: ModelRunner,
        worker_id: str,
        replica: int,
        incarnation: str,
        idle: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """idle: entered while there is nothing to compute."""
        self.config = config
        self.runner = runner
        self.worker_id = worker_id
        self.replica = replica
        self.incarnation = incarnation
        self.stopping = False
        self._idle = idle
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_dealer(self._context, endpoints.worker, fresh_identity(worker_id))
        self._beat = HeartbeatThread(
            self._context, endpoints.worker, worker_id, incarnation, config.heartbeat_interval_s, runner.items
        )
        self._encoder = codec.Encoder()
        self._diverged = False
        self._kernel_calls = KernelCalls()
        self._profiler = StepProfiler()
        self._rest = Rest()
        self._kept: deque[m.SchedulerToWorker] = deque()
        """Received during a rest, and to be dealt with after it."""
        self._epoch = 0

    def run(self) -> None:
        """Serve until told to stop. Raises StartError when the scheduler refuses this worker or does not answer."""
        try:
            self._shake_hands()
            self._beat.state = "ready"
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            if self.runner.ready_fd is not None:
                poller.register(self.runner.ready_fd, zmq.POLLIN)
            while not self.stopping:
                message = self._receive()
                if message is not None:
                    self._handle(message)
                    continue
                with self._idle():
                    ready = dict(poller.poll(POLL_MS))
                if self.runner.ready_fd in ready:
                    self.runner.take_ready(self._send)
        finally:
            self.runner.close()
            self._beat.stop()
            self._socket.close(linger=0)
            self._context.term()

    def _receive(self) -> m.SchedulerToWorker | None:
        """What the scheduler says, if it is there by now. With two steps in flight the next plan is, when a step ends;
        asking the poller first would only keep it waiting."""
        if self._kept:
            return self._kept.popleft()
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return codec.scheduler_to_worker.decode(frame)

    def _shake_hands(self) -> None:
        runner, config = self.runner, self.config
        hello = m.Hello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            replica=self.replica,
            rank=0,
            tp_size=1,
            pid=os.getpid(),
            model_fingerprint=runner.model_config.fingerprint,
            block_size=config.block_size,
            groups=runner.model_config.cache_groups,
            num_blocks=runner.cache.num_blocks,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            kv_memory_id=runner.cache.memory_id,
            device=str(runner.device),
            dtype=str(runner.dtype).removeprefix("torch.") + (" + int8" if config.quantization == "int8" else ""),
            attention_backend=runner.backend.name,
            backend_reason=runner.selection.reason,
            lends_cores=runner.lends_cores,
        )
        self._socket.send(codec.encode(hello))
        if not self._socket.poll(WELCOME_TIMEOUT_MS):
            raise StartError(f"the scheduler did not answer the hello within {WELCOME_TIMEOUT_MS // 1000} s")
        self._handle(codec.scheduler_to_worker.decode(self._socket.recv()))

    def _handle(self, message: m.SchedulerToWorker) -> None:
        match message:
            case m.SchedulerOutput():
                if self._rest.length_s:
                    with self._idle():
                        self._take_rest()
                if self._profiler.active:
                    self._run_profiled(message)
                else:
                    self._run_plan(message)
                self._rest.ended_at = time.monotonic()
            case m.ProfileSteps(steps):
                if steps:
                    self._profiler.start(steps)
                elif self._profiler.active:
                    self._send_profile()
            case m.CountKernels(on):
                if on:
                    self._kernel_calls.start(self.runner.counters)
                else:
                    self._kernel_calls.stop()
            case m.Rest(us):
                self._rest.length_s = us / 1e6
            case m.Welcome(replica, epoch, _):
                self.runner.start_epoch(epoch)
                self._rest.length_s = 0.0
                self._diverged = False
                self._epoch = epoch
                _LOG.info("welcome: replica %d, epoch %d (protocol %d)", replica, epoch, PROTOCOL_VERSION)
            case m.Refused(reason):
                raise StartError(f"refused by the scheduler: {reason}")
            case m.StopWorker(reason):
                _LOG.info("stopping: %s", reason)
                self.stopping = True

    def _take_rest(self) -> None:
        """Wait before the plan that is to be run, as long as the rest lasts; what comes meanwhile is kept in its order,
        but for a new length of the rest. Whatever is neither that nor a plan ends it."""
        began = now = time.monotonic()
        while not self.stopping and (left_ms := int(1e3 * self._rest.left_s(now))) > 0:
            if self._socket.poll(left_ms):
                message = codec.scheduler_to_worker.decode(self._socket.recv())
                if isinstance(message, m.Rest):
                    self._rest.length_s = message.us / 1e6
                else:
                    self._kept.append(message)
                    if not isinstance(message, m.SchedulerOutput):
                        break
            now = time.monotonic()
        self._rest.taken(now - began)

    def _send(self, message: m.ModelRunnerOutput | m.PlanRefused) -> None:
        if self._kernel_calls.active:
            message = self._kernel_calls.add_to(message, self.runner.counters)
        if self._rest.taken_s:
            message = self._rest.add_to(message)
        self._socket.send(self._encoder.encode(message))

    def _send_profile(self) -> None:
        self._socket.send(codec.encode(m.ProfileResult(self._epoch, self._profiler.report())))

    def _run_profiled(self, plan: m.SchedulerOutput) -> None:
        with self._profiler.step(self.runner):
            self._run_plan(plan)
        if self._profiler.complete:
            self._send_profile()

    def _run_plan(self, plan: m.SchedulerOutput) -> None:
        """Run a plan, or say why not; after a refusal nothing runs until the next epoch."""
        if self._diverged:
            self._send(m.PlanRefused(plan.epoch, plan.step, "an earlier plan of this epoch was refused"))
            return
        try:
            self.runner.submit(plan, self._send)
            return
        except DigestMismatch as error:
            refusal = m.PlanRefused(plan.epoch, plan.step, "digest", error.expected, error.actual)
        except PlanError as error:
            refusal = m.PlanRefused(plan.epoch, plan.step, str(error))
        self._diverged = True
        _LOG.error("refused plan %d of epoch %d: %s", plan.step, plan.epoch, refusal.reason)
        self.runner.flush(self._send)  # the steps before it count
        self._send(refusal)


def runner_class(config: EngineConfig) -> type[ModelRunner]:
    """The pipelined one on a GPU, and for the kernels of a GPU even if they are interpreted; on the CPU nothing would
    overlap. Raises StartError."""
    on_gpu = pick_device(config.device).type == "cuda"
    return PipelinedRunner if on_gpu or config.attention_backend == "triton" else ModelRunner


def make_runner(config: EngineConfig, num_threads: int, replica: int) -> ModelRunner:
    """The runner that fits the device, its model loaded."""
    return runner_class(config)(config, num_threads, on_progress=_ProgressLine(), replica=replica)


def serve(
    config: EngineConfig,
    worker_id: str,
    replica: int,
    incarnation: str,
    endpoints: Endpoints,
    runtime: Path,
    make_runner: Callable[[EngineConfig, int, int], ModelRunner] = make_runner,
) -> None:
    """Load, warm up, then serve until SIGTERM or a stop message. SIGINT is the supervisor's business.

    runtime: the folder of the deployment. make_runner: (config, threads, replica) → the runner that is served.
    """
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = config.threads_per_worker or max(1, (os.cpu_count() or 1) // config.workers)
    torch.set_num_threads(threads)
    cores = _lent_cores(config, runtime, replica, threads)
    runner = make_runner(config, threads, replica)
    if cores is not None:
        runner.borrow(cores)
    with torch.inference_mode():
        runner.warm_up()
        gc.collect()
        gc.freeze()  # torch and the model stay: a full collection would look through them for 40 ms, between two steps
        idle = nullcontext if cores is None else cores.idle
        worker = Worker(config, endpoints, runner, worker_id, replica, incarnation, idle)

        def stop(signum: int, frame: object) -> None:
            worker.stopping = True

        signal.signal(signal.SIGTERM, stop)
        try:
            worker.run()
        finally:
            if cores is not None:
                cores.leave()


def _lent_cores(config: EngineConfig, runtime: Path, replica: int, threads: int) -> LentCores | None:
    """None where workers lend none: on a GPU, and where nobody else would be there to use them."""
    unknown = replica >= config.workers  # one that joined, and that the others do not count on
    if not config.lend_cores or config.workers == 1 or unknown or pick_device(config.device).type != "cpu":
        return None
    return LentCores(runtime, replica, config.workers, threads)


class _ProgressLine:
    """Writes "@progress 0.42" lines, which the supervisor shows as a bar."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, fraction: float) -> None:
        percent = int(fraction * 100)
        if percent >= self._shown + 2 or percent == 100 != self._shown:
            self._shown = percent
            print(f"@progress {fraction:.2f}", flush=True)
