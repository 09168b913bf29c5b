"""The runner for a GPU: the host prepares a step while the device still computes the one before it.

A step's tokens reach the host only when the next step is already under way, so rows advance by tokens that the host
has yet to learn; the device keeps the last token of every row and fills them in. Inputs and changes of block tables
cross in one copy, beside the model (`upload`); results likewise. Positions and slots follow from them on the device if
the backend maps slots there (`places`). Decode runs from recordings (`graphs`) where the backend allows it. At most two
steps are on the device at a time: the one that `submit` adds and the one whose result it delivers.

On host memory (`device.HostDevice`) all of this is done too, one thing after the other: so it serves the interpreted
Triton backend, and so it is tested.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.graphs import GraphBackend
from kernels.metadata import AttentionMetadata
from protocol.arrays import pack
from protocol.config import EngineConfig
from protocol.messages import LogprobsLists, ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from worker.batch import StepInputs
from worker.completions import CompletionThread
from worker.device import Device, Mark, make_device
from worker.graphs import DecodeGraphs, RecordedStep
from worker.metadata import metadata_of
from worker.padding import graph_sizes
from worker.places import PlaceFinder
from worker.runner import Deliver, ModelRunner, StartError, pack_timings
from worker.upload import StepUploader, Upload, input_arrays

_LOG = logging.getLogger("worker")


class Flight(NamedTuple):
    """A step that the device has been given and whose result the host has not taken yet."""

    plan: SchedulerOutput
    rows: np.ndarray  # int64 [R]: those that sample
    tokens: Tensor  # int32 [R], in host memory once `arrived` has passed
    logprobs: LogprobsLists | None
    prompt_logprobs: tuple[PromptLogprobs, ...]
    arrived: Mark
    counters: dict[str, int]  # calls of each kernel up to this step
    began: float  # monotonic, in seconds: when the plan was taken up
    host_us: tuple[int, int]  # apply, commit
    marks: tuple[Mark, Mark, Mark, Mark]  # end of the step before, then of inputs, model, sampler


class PipelinedRunner(ModelRunner):
    """See the module. `ready_fd` is readable when the step in flight may be done: then call `take_ready`."""

    def __init__(
        self,
        config: EngineConfig,
        num_threads: int,
        on_progress: Callable[[float], None] = lambda done: None,
        *,
        replica: int = 0,
        make_device: Callable[[torch.device], Device] = make_device,
    ):
        super().__init__(config, num_threads, on_progress, replica=replica)
        self._queues = make_device(self.device)
        self.uploader = StepUploader(self._queues, self.tables)
        self.places = PlaceFinder(self.backend, self.tables)
        self.batch.maps_slots = not self.places.on_device
        self._last_token = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
        self._completions = CompletionThread()
        self.ready_fd: int | None = self._completions.fd
        self._flight: Flight | None = None
        self._end_before = self._queues.mark()
        self.graphs: DecodeGraphs | None = None
        self._counters = dict(self.backend.counters)
        self.replays = 0
        """Steps run from a recording."""

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    # ------------------------------------------------------------------------------------------------- one step

    def submit(self, plan: SchedulerOutput, deliver: Deliver) -> None:
        """Enqueue a plan, then deliver the result of the one before. Raises PlanError (nothing was enqueued)."""
        began = time.monotonic()
        step = self.batch.apply(plan)
        applied = time.monotonic()
        upload, recorded = self._send(step)
        inputs_there = self._queues.mark()
        logits, hidden = self._enqueue_forward(step, upload, recorded)
        computed = self._queues.mark()
        host_us = (int((applied - began) * 1e6), int((time.monotonic() - applied) * 1e6))
        # The device now has work, and the result before is due: so the rules of rows know all tokens up to this step.
        self.flush(deliver)
        self.rules.follow(plan)
        rows = step.rows[step.sampling]
        tokens, logprobs = self._enqueue_sampling(rows, logits, upload)
        prompt_logprobs = tuple(self._prompt_logprobs(part, hidden) for part in self.batch.reported_prompts(step))
        end = self._queues.mark()
        upload.free_after(end)
        on_host = self._queues.host_buffer(len(rows), torch.int32)
        arrived = self._queues.download(tokens, on_host)
        self.batch.expect_sampled(rows)
        marks = (self._end_before, inputs_there, computed, end)
        counters = dict(self.backend.counters)
        self._flight = Flight(plan, rows, on_host, logprobs, prompt_logprobs, arrived, counters, began, host_us, marks)
        self._end_before = end
        self._completions.watch(arrived)

    def take_ready(self, deliver: Deliver) -> None:
        """Deliver the result of the step in flight if it is there; never waits."""
        self._completions.clear()
        if self._flight is not None and self._flight.arrived.query():
            self.flush(deliver)

    def flush(self, deliver: Deliver) -> None:
        """Wait for the step in flight, if there is one, and deliver its result."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.arrived.synchronize()
        tokens = self.rules.name_failures(flight.rows, flight.tokens.numpy())
        self.rules.note(flight.rows, tokens)
        self._counters = flight.counters
        idle, forward, sampling = (after.microseconds_since(mark) for mark, after in pairwise(flight.marks))
        deliver(
            ModelRunnerOutput(
                epoch=flight.plan.epoch,
                step=flight.plan.step,
                tokens=pack(tokens),
                digest=flight.plan.digest,  # `apply` proved ours equal
                timings_us=pack_timings(*flight.host_us, forward, sampling, min(max(idle, 0), 2**31 - 1)),
                started_ns=int(flight.began * 1e9),
                logprobs=flight.logprobs,
                prompt_logprobs=flight.prompt_logprobs,
            )
        )

    def start_epoch(self, epoch: int) -> None:
        """What is in flight is void: wait for it, and forget everything."""
        self.flush(lambda result: None)
        super().start_epoch(epoch)

    def close(self) -> None:
        self._flight = None
        self._completions.stop()

    # ------------------------------------------------------------------------------------------------- its parts

    def _send(self, step: StepInputs) -> tuple[Upload, RecordedStep | None]:
        """The inputs on their way, and the recording that they are meant for, if one fits."""
        recorded = self.graphs.for_step(step) if self.graphs is not None else None
        if recorded is not None and self.batch.reported_prompts(step):
            recorded = None  # a recording keeps no hidden states
        packed = recorded.pack(step) if recorded is not None else None
        if packed is None:
            return self.uploader.send(step, input_arrays(step)), None
        return self.uploader.send(step, packed), recorded

    def _enqueue_forward(
        self, step: StepInputs, upload: Upload, recorded: RecordedStep | None
    ) -> tuple[Tensor, Tensor]:
        """The logits of the rows that sample, float32 [R, V], and the hidden states [T, H] (none of a recording)."""
        views = upload.views
        if len(step.copy_src):
            self.backend.copy_blocks(self.cache.tensors, views["copy_src"], views["copy_dst"])
        if recorded is not None:
            self.replays += 1
            logits = recorded.run(upload.buffer).index_select(0, views["last"])
            return logits, logits.new_empty(0)
        places = self.places.find(views)
        metadata = metadata_of(
            self.tables,
            rows=views["rows"],
            query_start_loc=views["query_start_loc"],
            seq_lens=views["seq_lens"],
            slot_mapping=places.slot_mapping,
            max_query_len=int(np.diff(step.query_start_loc).max()),
            max_seq_len=int(step.seq_lens.max()),
            host_query_start_loc=torch.from_numpy(step.query_start_loc),
            host_seq_lens=torch.from_numpy(step.seq_lens),
        )
        hidden = self._hidden(views["input_ids"], places.positions, metadata)
        return self.model.compute_logits(hidden.index_select(0, views["last"])), hidden

    def _enqueue_sampling(
        self, rows: np.ndarray, logits: Tensor, upload: Upload
    ) -> tuple[Tensor, LogprobsLists | None]:
        """The tokens, int32 [R] on the device, which also remembers them by row. If any row reports log-probabilities,
        this waits for the device."""
        if not len(rows):
            return torch.empty(0, dtype=torch.int32, device=self.device), None
        drawn, logprobs = self._draw(rows, logits)
        tokens = drawn.to(torch.int32)
        known = tokens.clamp(min=0)  # a failed row goes on with 0
        self._last_token.index_copy_(0, upload.views["sampling_rows"], known)
        return tokens, logprobs

    def _hidden(self, input_ids: Tensor, positions: Tensor, metadata: list[AttentionMetadata]) -> Tensor:
        """dtype [T, H]; an input id of -1 - r is the token that row r sampled last."""
        rows = (-1 - input_ids).clamp_(min=0).long()
        known = torch.where(input_ids < 0, self._last_token.index_select(0, rows), input_ids)
        per_layer = [metadata[group] for group in self._group_of]
        return self.model.forward(known, positions, self.cache.layers, per_layer, self.backend)

    # ------------------------------------------------------------------------------------------------- warm-up

    def warm_up(self) -> None:
        super().warm_up()
        if self.places.on_device:
            self.places.warm_up()
        if isinstance(self.backend, GraphBackend) and not self.config.enforce_eager:
            began = time.monotonic()
            sizes = graph_sizes(self.config.max_num_seqs)
            try:
                self.graphs = DecodeGraphs(sizes, functools.partial(self._record, self.backend))
            except RuntimeError as error:
                raise StartError(f"decode steps cannot be recorded ({error}); --enforce-eager goes without") from error
            _LOG.info("recorded decode at %d sizes up to %d in %.1f s", len(sizes), sizes[-1], time.monotonic() - began)
        self._counters = dict(self.backend.counters)

    def _record(self, backend: GraphBackend, size: int) -> RecordedStep:
        model, max_seq_len = self.model_config, self.config.max_model_len
        plans = [
            backend.plan_decode(
                max_seqs=size,
                max_seq_len=max_seq_len,
                num_q_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                block_size=table.table.block_size,
                window=window or None,
                kv_bytes=(self.kv_dtype or self.dtype).itemsize,
            )
            for table, window in zip(self.tables, model.windows, strict=True)
        ]
        return RecordedStep(
            size, plans, self.tables, self.places, max_seq_len, self.backend, self._logits, self._queues
        )

    def _logits(self, input_ids: Tensor, positions: Tensor, metadata: list[AttentionMetadata]) -> Tensor:
        return self.model.compute_logits(self._hidden(input_ids, positions, metadata))
