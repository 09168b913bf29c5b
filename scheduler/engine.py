"""The control plane as a state machine: `handle(event, now)` → actions. No I/O, no clock, no thread.

It owns the replicas, the queue and the requests. Each event is applied, then every replica that may have another step
in flight is given one. Making a plan and sending it is one action: if sending fails, the worker is dead.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable
from typing import get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol import messages as m
from protocol.arrays import pack, unpack
from protocol.codec import MalformedFrame
from protocol.config import EngineConfig
from protocol.logprobs import Logprobs, join
from protocol.model_config import ModelConfig
from scheduler import events as e
from scheduler.admission import InvalidRequest, check_prompt, check_request_id, check_sampling
from scheduler.block_hash import root_hash
from scheduler.commit import Outcome, commit
from scheduler.connections import Connections
from scheduler.planner import HoldPolicy, Planner, mean_position
from scheduler.prefix_explanation import explain_prefix
from scheduler.profiles import MOST_SECONDS, MOST_STEPS, Profiles
from scheduler.queue import RequestQueue
from scheduler.replica import Replica, Step
from scheduler.reports import keep, kept, new_prompt_logprobs, problem_with
from scheduler.request import Request, RequestState
from scheduler.rest import Rests, is_news
from scheduler.router import Router
from scheduler.snapshot import block_info, request_table, take_snapshot
from scheduler.step_budget import StepBudget
from scheduler.step_log import StepRecord
from scheduler.tracing import MOST_RECORDINGS, Chunk, Recording, Tracing
from scheduler.workers import Worker, describe, refusal

MOST_TRACE_S = 600.0
"""Longest trace that a client may ask for."""
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]


class Engine:
    """Scheduler state of the whole deployment.

    `hash_key`: the deployment's secret for prefix hashes (at most 64 bytes). `hold_policy`: see `planner`. `clock`:
    seconds, the same clock as `now` of `handle`; only measures how long things take (None: they take no time). `pid`:
    of this process, for traces.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        hash_key: bytes,
        now: float = 0.0,
        hold_policy: HoldPolicy | None = None,
        clock: Callable[[], float] | None = None,
        pid: int = 0,
    ):
        self.config = config
        self.model = model
        self.max_model_len = config.max_model_len or model.max_position_embeddings
        self.hash_key = hash_key
        self.started = self.now = now
        self.clock = clock or (lambda: self.now)
        self.replicas = [
            Replica(
                index,
                model.cache_groups,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_model_len=self.max_model_len,
                enable_caching=config.enable_prefix_caching,
            )
            for index in range(config.workers)
        ]
        self.queue = RequestQueue()
        self.router = Router(self.replicas, config.max_num_batched_tokens, config.watermark)
        budget = StepBudget(config.max_step_stretch, config.max_num_batched_tokens, config.block_size)
        self.planner = Planner(budget, hold_policy)
        self._resting = False
        """Whether any worker was told to rest."""
        self.rests = Rests(config.max_step_stretch if config.lend_cores else 0.0)
        self.connections = Connections()
        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.workers: dict[bytes, Worker] = {}
        """Living workers by routing id; at most one per replica."""
        self.last_hello: dict[str, tuple[m.Hello, str, int]] = {}
        """By worker id: its latest hello, state and epoch, dead or alive; for the status."""
        self.watchers: set[bytes] = set()
        self.finished: dict[str, int] = dict.fromkeys(get_args(m.FinishReason), 0)
        """Requests that are over, by reason."""
        self.tracing = Tracing(pid)
        self.profiles = Profiles()
        self.dropped_frames = 0
        self._strange_messages = 0
        """Well-formed, but from someone who never was a worker of ours."""
        self.shutting_down = False
        self._arrivals = 0
        self._random = random.Random(config.seed)
        self._actions: list[e.Action] = []

    # -------------------------------------------------------------------------------------------------------- entry

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """Apply one event and plan. `now`: seconds, monotonic. Returns the actions in the order to carry them out."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[e.Event], now: float) -> list[e.Action]:
        """Apply several events, then plan once."""
        self.now = now
        self._tell_time(now)
        for event in events:
            self._apply(event, now)
        self._tell_time(now)  # a pool may be new
        self._pump(now)
        self._share_cores()
        if self.tracing.active:
            self._hand_over(self.tracing.due(now))
        if self.config.debug_checks:
            self.check()
        actions, self._actions = self._actions, []
        return actions

    def _tell_time(self, now: float) -> None:
        for replica in self.replicas:
            replica.manager.pool.now = now

    def _apply(self, event: e.Event, now: float) -> None:
        match event:
            case e.FromWorker(identity, message):
                self._from_worker(identity, message, now)
            case e.FromClient(identity, message):
                self._from_client(identity, message, now)
            case e.FromSupervisor(identity, message):
                self._from_supervisor(identity, message, now)
            case e.WorkerUnreachable(identity, reason):
                if identity in self.workers:
                    self._fence(self.workers[identity], reason)
            case e.ClientGone(identity):
                for request in self.connections.forget(identity):
                    self._abort(request, tell=False)
                self._forget_listener(identity)
            case e.Tick(dropped_frames):
                self.dropped_frames = dropped_frames
                self._look_for_silent_workers(now)
                self._look_for_gone_clients()
                self._look_for_late_profiles(now)

    def _pump(self, now: float) -> None:
        """Plan for every replica that may have another step in flight, until none has anything to run."""
        progress = True
        while progress:
            progress = False
            for replica in self.replicas:
                if replica.ready and len(replica.in_flight) < self.config.pipeline_depth:
                    progress |= self._plan(replica, now)

    def _plan(self, replica: Replica, now: float) -> bool:
        began = self.clock()
        plan = self.planner.make_plan(replica, self.queue, self.router, now)
        for request, reason in plan.ended:
            self._finish(request, reason)
        for request in plan.preempted:
            self.tracing.preempted(request, now)
        if plan.output is None:
            return False
        self._record_plan(replica, plan.output, began)
        worker = self._worker_of(replica)
        assert worker is not None, "a ready replica has a worker"
        self._actions.append(e.ToWorker(worker.identity, plan.output))
        return True

    def _record_plan(self, replica: Replica, output: m.SchedulerOutput, began: float) -> None:
        for admitted in output.admit:
            request = replica.rows.requests[admitted.row]
            assert request is not None
            replica.stats.admitted(request, self.now)
            self.tracing.admitted(request, self.now)
        step, chunks = replica.in_flight[-1], unpack(output.prefill_num_tokens)
        num_prefill_tokens, position = 0, 0.0
        if len(chunks):
            num_prefill_tokens = int(chunks.sum())
            position = mean_position(replica.rows, unpack(output.prefill_rows), chunks)
        replica.step_log.planned(
            StepRecord(
                epoch=output.epoch,
                step=output.step,
                num_tokens=step.num_tokens,
                num_running=step.num_tokens - num_prefill_tokens + len(chunks),
                num_prefill_tokens=num_prefill_tokens,
                prefill_position=position,
                num_sampling=len(step.rows),
                planned_at=began,
                schedule_s=self.clock() - began,
                helped=replica.helped,
            )
        )

    def _share_cores(self) -> None:
        """Tell workers that only decode to rest between their steps while another computes a long prompt."""
        if not self._resting and not any(replica.rows.long_prompts for replica in self.replicas):
            return  # as nearly always
        lending = [worker for worker in self.workers.values() if worker.hello.lends_cores]
        work = {worker.hello.replica: self.replicas[worker.hello.replica].work for worker in lending}
        resting = self.rests.who(work, len(self.queue))
        for worker in lending:
            index, rest_s = worker.hello.replica, 0.0
            if index in resting:
                rest_s = self.rests.length_s(self.replicas[index].costs.decode_s(work[index].num_decoding))
            if is_news(rest_s, worker.rest_s):
                worker.rest_s = rest_s
                self._actions.append(e.ToWorker(worker.identity, m.Rest(round(rest_s * 1e6))))
        self._resting = any(worker.rest_s for worker in lending)
        for index, todo in work.items():
            replica = self.replicas[index]
            was_helped, replica.helped = replica.helped, self._resting and todo.prompts  # who has prompts does not rest
            if replica.helped and not was_helped:
                replica.costs.help_begins()

    def plan_encoded(self, identity: bytes, plan: m.SchedulerOutput, num_bytes: int, seconds: float) -> None:
        """The plan made for this worker became a frame, which took so long and is sent now. For the books only."""
        worker = self.workers.get(identity)
        if worker is not None and worker.epoch == plan.epoch:
            replica = self.replicas[worker.hello.replica]
            replica.step_log.encoded(plan.step, num_bytes, seconds, self.clock())
            replica.stats.histograms["plan_bytes"].observe(num_bytes)

    # ------------------------------------------------------------------------------------------------ worker plane

    def _from_worker(self, identity: bytes, message: m.WorkerToScheduler, now: float) -> None:
        match message:
            case m.Hello():
                self._hello(identity, message, now)
            case m.Heartbeat(worker_id, incarnation, _, work_items, borrowed_items):
                worker = self._incarnation(worker_id, incarnation)
                if worker is not None:
                    worker.last_seen = now
                    items = (work_items, borrowed_items)
                    self.replicas[worker.hello.replica].stats.computed(worker.items, items)
                    worker.items = items
            case m.ModelRunnerOutput():
                self._result(identity, message, now)
            case m.ProfileResult(_, profile):
                worker = self.workers.get(identity)
                if worker is None or message.epoch != worker.epoch:
                    self._count_fenced(identity)
                elif wait := self.profiles.end(worker.hello.replica):
                    report = m.ProfileReport(wait.query_id, worker.hello.worker_id, profile)
                    self._actions.append(e.ToClient(wait.client, report))
            case m.PlanRefused():
                worker = self.workers.get(identity)
                if worker is None or message.epoch != worker.epoch:
                    self._count_fenced(identity)
                    return
                values = f" (expected {message.expected:#x}, has {message.actual:#x})" if message.expected else ""
                self._diverged(worker, f"plan {message.step} refused: {message.reason}{values}")

    def _hello(self, identity: bytes, hello: m.Hello, now: float) -> None:
        reason = refusal(hello, self.config, self.model, self.max_model_len)
        if reason is None and self.shutting_down:
            reason = "the scheduler is shutting down"
        if reason is not None:
            self._actions.append(e.ToWorker(identity, m.Refused(reason)))
            self._log(logging.ERROR, f"refused {hello.worker_id}: {reason}")
            self._tell_watchers(m.WorkerChanged(describe(hello, "refused", 0), reason))
            return
        replica = self.replicas[hello.replica]
        old = self._worker_of(replica)
        if old is not None:
            self._fence(old, f"{hello.worker_id} {hello.incarnation} takes its place")
        replica.start(hello.num_blocks)
        worker = Worker(identity, hello, replica.epoch, now)
        self.workers[identity] = worker
        self.last_hello[hello.worker_id] = (hello, "ready", replica.epoch)
        self._actions.append(e.ToWorker(identity, m.Welcome(replica.index, replica.epoch, hello.num_blocks)))
        self.tracing.worker_joined(hello, replica.epoch, now)
        if self.tracing.active:
            self._actions.append(e.ToWorker(identity, m.CountKernels(True)))
        self._log(logging.INFO, f"{hello.worker_id} serves replica {replica.index}, epoch {replica.epoch}")
        self._tell_watchers(m.WorkerChanged(worker.status))
        self._reject_what_never_fits()

    def _result(self, identity: bytes, result: m.ModelRunnerOutput, now: float) -> None:
        worker = self.workers.get(identity)
        if worker is None or result.epoch != worker.epoch:
            self._count_fenced(identity)
            return
        worker.last_seen = now
        replica = self.replicas[worker.hello.replica]
        tokens = np.zeros(0, dtype=np.int32)
        if not replica.in_flight:
            problem: str | None = f"result of step {result.step}, but none is in flight"
        else:
            step = replica.in_flight[0]
            try:
                tokens = unpack(result.tokens, "tokens")
            except MalformedFrame as error:
                problem = str(error)
            else:
                problem = _disagreement(step, result, tokens, self.model.vocab_size) or problem_with(step, result)
        if problem is not None:
            self._diverged(worker, problem)
            return
        began = self.clock()
        replica.in_flight.popleft()
        for part in result.prompt_logprobs:
            self._send_prompt_logprobs(step.reporting[part.row], part)
        outcome = commit(replica, step, tokens, now)
        self._send_tokens(step.step, outcome, None if result.logprobs is None else Logprobs(result.logprobs))
        for request, reason, message in outcome.ended:
            self._finish(request, reason, message)
        self._record_result(worker, result, began, len(outcome.tokens))

    def _record_result(self, worker: Worker, result: m.ModelRunnerOutput, began: float, num_committed: int) -> None:
        replica = self.replicas[worker.hello.replica]
        record = replica.step_log.returned(result.step, result.timings_us, result.started_ns / 1e9, began)
        assert record is not None, "its plan was recorded"
        record.num_committed = num_committed
        record.result_s = self.clock() - began
        replica.stats.step_done(record)
        if record.helped == replica.helped:  # else help began or ended meanwhile: it says nothing of either
            num_decoding, seconds = record.num_tokens - record.num_prefill_tokens, record.forward_s + record.sample_s
            position, helped = record.prefill_position, record.helped
            replica.costs.observe(num_decoding, record.num_prefill_tokens, position, seconds, helped)
        self.tracing.step_done(replica, worker.hello, record, result.kernel_calls, self.now)

    def _send_tokens(self, step: int, outcome: Outcome, logprobs: Logprobs | None) -> None:
        """One TokenBatch per connection. logprobs: of the places of the result."""
        connections, handles, indices, tokens = outcome[:4]
        if not len(connections):
            return
        first = int(connections[0])
        alone = bool((connections == first).all())  # the usual case, for instance behind one gateway
        for index in [first] if alone else np.unique(connections).tolist():
            connection = self.connections.by_index(index)
            if connection is None:
                continue  # it left in this very batch of events
            mine = slice(None) if alone else connections == index
            told = None
            if logprobs is not None and logprobs.counts[outcome.places[mine]].any():
                told = logprobs.select(outcome.places[mine])
                keep(connection.requests, handles[mine], indices[mine], Logprobs(told))
            batch = m.TokenBatch(step, pack(handles[mine]), pack(indices[mine]), pack(tokens[mine]), told)
            self._actions.append(e.ToClient(connection.identity, batch))

    def _send_prompt_logprobs(self, request: Request, part: m.PromptLogprobs) -> None:
        """Pass on what its client does not know yet."""
        connection = self.connections.by_index(request.connection)
        if request.state is RequestState.FINISHED or connection is None:
            return  # it ended or left meanwhile
        start = request.num_prompt_logprobs
        new = new_prompt_logprobs(request, part.start, part.logprobs)
        if new is not None:
            self._actions.append(e.ToClient(connection.identity, m.PromptLogprobsBatch(request.handle, start, new)))

    # --------------------------------------------------------------------------------------------- death of a worker

    def _diverged(self, worker: Worker, problem: str) -> None:
        """The two planes no longer agree: nothing this worker holds can be trusted."""
        replica = self.replicas[worker.hello.replica]
        self._actions.append(e.WriteFlightRecord(replica.index, replica.epoch, problem, list(replica.recorder)))
        self._fence(worker, f"diverged: {problem}")

    def _fence(self, worker: Worker, reason: str) -> None:
        """Give this incarnation up although its process may live: have it killed, drop what it still says."""
        hello = worker.hello
        self._tell_watchers(m.KillWorker(hello.worker_id, hello.incarnation, reason))
        self._lose(worker, reason)

    def _lose(self, worker: Worker, reason: str) -> None:
        """The worker is gone: its requests return to the queue at their committed state."""
        replica = self.replicas[worker.hello.replica]
        del self.workers[worker.identity]
        worker.state = "dead"
        self.last_hello[worker.hello.worker_id] = (worker.hello, "dead", worker.epoch)
        void = replica.step_log.lost()
        bound = replica.lose()
        self.tracing.worker_lost(worker.hello, reason, void, bound, self.now)
        if wait := self.profiles.end(replica.index):
            problem = f"{worker.hello.worker_id} was lost while it was profiled: {reason}"
            self._reject(wait.client, wait.query_id, InvalidRequest("worker_lost", problem))
        replica.stats.recoveries += 1
        for request in bound:
            request.replica = None
            if request.state is not RequestState.WAITING:
                request.move(RequestState.WAITING)
                self.queue.push(request)
        self._log(
            logging.WARNING,
            f"lost {worker.hello.worker_id} ({reason}); {len(bound)} requests go on elsewhere; "
            f"replica {replica.index} is at epoch {replica.epoch}",
        )
        self._tell_watchers(m.WorkerChanged(worker.status, reason))

    def _look_for_silent_workers(self, now: float) -> None:
        limit = self.config.heartbeat_timeout_s
        for worker in list(self.workers.values()):
            if now - worker.last_seen > limit:
                self._fence(worker, f"no sign of life for {now - worker.last_seen:.1f} s (limit {limit:g} s)")

    def _look_for_gone_clients(self) -> None:
        """A client whose requests wait is sent nothing by itself; an empty batch fails to be sent if it has left."""
        for index in sorted({request.connection for request in self.queue}):
            connection = self.connections.by_index(index)
            if connection is not None:
                self._actions.append(e.ToClient(connection.identity, m.TokenBatch(0, b"", b"", b"")))

    def _count_fenced(self, identity: bytes) -> None:
        """A message of an old incarnation or epoch: it changes nothing. Identities read "name-hex"."""
        for hello, _, _ in self.last_hello.values():
            if identity.startswith(hello.worker_id.encode() + b"-"):
                self.replicas[hello.replica].stats.fenced_messages += 1
                return
        self._strange_messages += 1

    def _worker_of(self, replica: Replica) -> Worker | None:
        return next((w for w in self.workers.values() if w.hello.replica == replica.index), None)

    def _incarnation(self, worker_id: str, incarnation: str) -> Worker | None:
        for worker in self.workers.values():
            if (worker.hello.worker_id, worker.hello.incarnation) == (worker_id, incarnation):
                return worker
        return None

    # ------------------------------------------------------------------------------------------------ client plane

    def _from_client(self, identity: bytes, message: m.ClientToScheduler, now: float) -> None:
        match message:
            case m.Submit():
                try:
                    self._submit(identity, message)
                except InvalidRequest as error:
                    self._reject(identity, message.request_id, error)
            case m.Attach(request_id, next_index):
                self._attach(identity, request_id, next_index)
            case m.Abort(request_id, reason):
                request = self.requests.get(request_id)
                if request is None:
                    self._reject(identity, request_id, _unknown(request_id))
                else:
                    self._abort(request, reason)
            case m.Describe():
                info = m.ServerInfo(
                    model_path=self.config.model,
                    model_name=self.config.model_name,
                    vocab_size=self.model.vocab_size,
                    max_model_len=self.max_model_len,
                    eos_token_ids=self.model.eos_token_ids,
                    fingerprint=self.model.fingerprint,
                )
                self._actions.append(e.ToClient(identity, info))
            case m.GetStatus():
                self._actions.append(e.ToClient(identity, self.status(now)))
            case m.GetSnapshot(steps_after):
                self._actions.append(e.ToClient(identity, take_snapshot(self, steps_after, now)))
            case m.GetBlock(replica, block_id):
                self._actions.append(e.ToClient(identity, block_info(self.replicas, replica, block_id, now)))
            case m.GetTable(request_id):
                table = request_table(self.replicas, request_id, self.requests.get(request_id))
                self._actions.append(e.ToClient(identity, table))
            case m.ExplainPrefix():
                try:
                    self._actions.append(e.ToClient(identity, self._explain_prefix(message)))
                except InvalidRequest as error:
                    self._reject(identity, message.query_id, error)
            case m.StartProfile():
                try:
                    self._start_profile(identity, message)
                except InvalidRequest as error:
                    self._reject(identity, message.query_id, error)
            case m.StartTrace():
                try:
                    self._start_trace(identity, message)
                except InvalidRequest as error:
                    self._reject(identity, message.query_id, error)
            case m.GetMetrics():
                self._actions.append(e.ToClient(identity, self.metrics(now)))

    def _submit(self, identity: bytes, submit: m.Submit) -> None:
        check_request_id(submit.request_id)
        if self.shutting_down:
            raise InvalidRequest("shutting_down", "the server is shutting down")
        if submit.request_id in self.requests:
            raise InvalidRequest("duplicate_request", f"request {submit.request_id!r} is running already", "request_id")
        try:
            prompt = unpack(submit.token_ids, "token_ids").copy()
        except MalformedFrame as error:
            raise InvalidRequest("invalid_request", str(error), "token_ids") from None
        check_prompt(prompt, self.model.vocab_size, self.max_model_len)
        check_sampling(submit.sampling, self.model.vocab_size)
        self._check_capacity(len(prompt))
        if len(self.queue) >= self.config.max_waiting:
            raise InvalidRequest("overloaded", f"{len(self.queue)} requests wait already")
        sampling, most = submit.sampling, self.max_model_len
        drawn = self._random.getrandbits(64)
        stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stop_ids = tuple(dict.fromkeys(self.model.eos_token_ids + stop_ids))
        connection = self.connections.of(identity)
        request = Request(
            submit.request_id,
            prompt,
            msgspec.structs.replace(
                sampling,
                max_tokens=min(sampling.max_tokens, most),  # the wire allows 64 bits unsigned, arrays do not
                top_k=sampling.top_k if sampling.top_k < self.model.vocab_size else 0,
                seed=drawn if sampling.seed is None else sampling.seed,
                stop_token_ids=stop_ids,
                min_tokens=min(sampling.min_tokens, most),
            ),
            limit=min(len(prompt) + sampling.max_tokens, self.max_model_len),
            stop_ids=stop_ids,
            root=root_hash(self.hash_key, submit.cache_salt),
            arrival=self._arrivals,
            priority=submit.priority,
            connection=connection.index,
            handle=self.connections.new_handle(),
        )
        self._arrivals += 1
        request.arrived_at = self.now
        self.requests[request.request_id] = request
        connection.requests[request.handle] = request
        self.connections.finished.pop(request.request_id, None)
        self.queue.push(request)
        self.tracing.submitted(request, self.now)
        self._actions.append(e.ToClient(identity, m.Accepted(request.request_id, request.handle, request.prompt_len)))

    def _explain_prefix(self, question: m.ExplainPrefix) -> m.PrefixExplanation:
        try:
            prompt = unpack(question.token_ids, "token_ids")
        except MalformedFrame as error:
            raise InvalidRequest("invalid_request", str(error), "token_ids") from None
        check_prompt(prompt, self.model.vocab_size, self.max_model_len)
        root = root_hash(self.hash_key, question.cache_salt)
        request = Request("", prompt, m.SamplingParams(), limit=0, stop_ids=(), root=root, arrival=0)
        return explain_prefix(question.query_id, request, self.replicas)

    def _check_capacity(self, num_tokens: int) -> None:
        if not self.router.fits_somewhere(num_tokens):
            largest = max((replica.pool_size or 1) - 1 for replica in self.replicas)
            raise InvalidRequest(
                "too_long",
                f"the prompt of {num_tokens} tokens needs more KV cache than the whole pool has "
                f"({largest} blocks of {self.config.block_size} tokens)",
                "token_ids",
            )

    def _reject_what_never_fits(self) -> None:
        """Requests accepted while no worker lived may turn out too long for the pool that came."""
        for request in self.queue:
            if not self.router.may_ever_fit(len(request.tokens)):
                self._take_out(request)
                self._finish(request, "kv_capacity")

    def _attach(self, identity: bytes, request_id: str, next_index: int) -> None:
        """Report this request to another connection from now on, beginning at output index `next_index`."""
        done = self.connections.finished.get(request_id)
        request = self.requests.get(request_id)
        output = done.output if done is not None else self._output_of(request) if request is not None else None
        if output is None:
            self._reject(identity, request_id, _unknown(request_id))
            return
        if not 0 <= next_index <= len(output):
            error = InvalidRequest(
                "invalid_request", f"next_index {next_index} is not within 0 to {len(output)}", "next_index"
            )
            self._reject(identity, request_id, error)
            return
        if request is not None:
            self.connections.detach(request)
            connection = self.connections.of(identity)
            request.connection, request.handle = connection.index, self.connections.new_handle()
            connection.requests[request.handle] = request
            if request.row is not None:
                rows = self.replicas[request.replica or 0].rows
                rows.connection[request.row] = request.connection
                rows.handle[request.row] = request.handle
            handle, prompt_tokens = request.handle, request.prompt_len
        else:
            assert done is not None
            handle, prompt_tokens = self.connections.new_handle(), done.prompt_tokens
        missed = output[next_index:]
        self._actions.append(e.ToClient(identity, m.Accepted(request_id, handle, prompt_tokens)))
        if request is not None and request.prompt_logprobs:
            told = m.PromptLogprobsBatch(handle, 1, join(request.prompt_logprobs))
            self._actions.append(e.ToClient(identity, told))
        if len(missed):
            indices = np.arange(next_index, len(output))
            known = None if request is None else kept(request, next_index, len(missed))
            batch = m.TokenBatch(0, pack(np.full(len(missed), handle)), pack(indices), pack(missed), known)
            self._actions.append(e.ToClient(identity, batch))
        if done is not None:
            self._actions.append(e.ToClient(identity, m.Finished(handle, done.reason, done.usage, done.message)))

    def _output_of(self, request: Request) -> I32:
        """Its committed output tokens, wherever they lie."""
        if request.row is None:
            return request.tokens[request.prompt_len :]
        assert request.replica is not None
        rows = self.replicas[request.replica].rows
        return rows.token_ids[request.row, request.prompt_len : rows.committed[request.row]].copy()

    def _abort(self, request: Request, reason: m.FinishReason = "abort", tell: bool = True) -> None:
        self._take_out(request)
        self._finish(request, reason, tell=tell)

    def _take_out(self, request: Request) -> None:
        """Remove an unfinished request from wherever it stands; its tokens in flight will reach nobody."""
        if request.row is not None:
            assert request.replica is not None
            self.replicas[request.replica].release(request.row)
        if request.replica is not None:
            self.replicas[request.replica].loose.pop(request.binding, None)

    def _finish(self, request: Request, reason: m.FinishReason, message: str = "", tell: bool = True) -> None:
        """The request is over; it holds no row and no blocks by now."""
        if request.state is RequestState.WAITING:
            try:
                self.queue.remove(request)
            except KeyError:
                pass  # the planner took it out already
        request.move(RequestState.FINISHED)
        self.finished[reason] += 1
        self.tracing.finished(request, reason, self.now)
        if request.replica is not None:
            self.replicas[request.replica].stats.ended(request, reason, self.now)
        del self.requests[request.request_id]
        connection = self.connections.by_index(request.connection)
        if connection is not None and tell:
            self._actions.append(
                e.ToClient(connection.identity, m.Finished(request.handle, reason, request.usage, message))
            )
        self.connections.detach(request)
        self.connections.remember(request, reason, message)

    def _reject(self, identity: bytes, request_id: str, error: InvalidRequest) -> None:
        rejected = m.Rejected(request_id, error.code, str(error), error.param)
        self._actions.append(e.ToClient(identity, rejected))

    # ----------------------------------------------------------------------------------------------- control plane

    def _from_supervisor(self, identity: bytes, message: m.SupervisorToScheduler, now: float) -> None:
        match message:
            case m.Watch():
                self.watchers.add(identity)
                for living in self.workers.values():
                    self._actions.append(e.ToSupervisor(identity, m.WorkerChanged(living.status)))
            case m.WorkerExited(worker_id, incarnation, reason):
                worker = self._incarnation(worker_id, incarnation)
                if worker is not None:
                    self._lose(worker, reason)
            case m.GetStatus():
                self._actions.append(e.ToSupervisor(identity, self.status(now)))
            case m.KillWorker(worker_id, incarnation, reason):
                if self._incarnation(worker_id, incarnation) is not None:
                    self._log(logging.WARNING, f"{worker_id} is to be killed: {reason}")
                    self._tell_watchers(message)
            case m.Shutdown():
                self.shutting_down = True
                for request in list(self.requests.values()):
                    self._abort(request)
                for living in self.workers.values():
                    self._actions.append(e.ToWorker(living.identity, m.StopWorker("shutdown")))
                self._actions.append(e.Exit())

    def _tell_watchers(self, message: m.SchedulerToSupervisor) -> None:
        for identity in self.watchers:
            self._actions.append(e.ToSupervisor(identity, message))

    # ------------------------------------------------------------------------------------------------------ traces

    def trace_to_file(self, now: float) -> None:
        """Record from now on to the end, as WriteTrace actions."""
        self._listen(Recording(None, "", math.inf), now)

    def end_traces(self, now: float) -> list[e.Action]:
        """The process is about to end: what is still to be handed over."""
        self._hand_over(self.tracing.end_all(now))
        actions, self._actions = self._actions, []
        return actions

    def _start_trace(self, identity: bytes, start: m.StartTrace) -> None:
        if not 0 < start.seconds <= MOST_TRACE_S:
            raise InvalidRequest("invalid_request", f"seconds must be above 0, at most {MOST_TRACE_S}", "seconds")
        if self.tracing.is_full():
            raise InvalidRequest("overloaded", f"{MOST_RECORDINGS} traces are being taken already")
        self._listen(Recording(identity, start.query_id, self.now + start.seconds), self.now)

    def _listen(self, recording: Recording, now: float) -> None:
        if not self.tracing.active:
            self._have_kernels_counted(True)
        self.tracing.start(recording, self.requests.values(), now)

    def _forget_listener(self, client: bytes) -> None:
        if self.tracing.active:
            self.tracing.forget(client)
            if not self.tracing.active:
                self._have_kernels_counted(False)

    def _hand_over(self, chunks: list[Chunk]) -> None:
        for recording, events, last in chunks:
            if recording.client is None:
                self._actions.append(e.WriteTrace(events, last))
            else:
                chunk = m.TraceChunk(recording.query_id, events, last)
                self._actions.append(e.ToClient(recording.client, chunk))
        if chunks and not self.tracing.active:
            self._have_kernels_counted(False)

    def _have_kernels_counted(self, on: bool) -> None:
        for worker in self.workers.values():
            self._actions.append(e.ToWorker(worker.identity, m.CountKernels(on)))

    # ---------------------------------------------------------------------------------------------------- profiles

    def _start_profile(self, identity: bytes, start: m.StartProfile) -> None:
        if not 0 <= start.replica < len(self.replicas):
            raise InvalidRequest("invalid_request", f"replica must be 0 to {len(self.replicas) - 1}", "replica")
        if not 1 <= start.steps <= MOST_STEPS:
            raise InvalidRequest("invalid_request", f"steps must be 1 to {MOST_STEPS}", "steps")
        if not 0 < start.seconds <= MOST_SECONDS:
            raise InvalidRequest("invalid_request", f"seconds must be above 0, at most {MOST_SECONDS:g}", "seconds")
        worker = self._worker_of(self.replicas[start.replica])
        if worker is None:
            raise InvalidRequest("worker_lost", f"no worker serves replica {start.replica} now", "replica")
        if self.profiles.running(start.replica):
            raise InvalidRequest("overloaded", f"{worker.hello.worker_id} is being profiled already", "replica")
        self.profiles.start(start.replica, identity, start.query_id, self.now + start.seconds)
        self._actions.append(e.ToWorker(worker.identity, m.ProfileSteps(start.steps)))

    def _look_for_late_profiles(self, now: float) -> None:
        for replica in self.profiles.to_stop(now):
            worker = self._worker_of(self.replicas[replica])
            assert worker is not None, "a profile ends with its worker"
            self._actions.append(e.ToWorker(worker.identity, m.ProfileSteps(0)))
        for wait in self.profiles.given_up(now):
            self._reject(wait.client, wait.query_id, InvalidRequest("worker_lost", "the worker sent no profile"))

    # --------------------------------------------------------------------------------------------------- inspection

    def status(self, now: float) -> m.Status:
        """One snapshot of everything."""
        return m.Status(
            uptime_s=now - self.started,
            waiting=len(self.queue),
            requests=len(self.requests),
            workers=tuple(describe(*self.last_hello[worker_id]) for worker_id in sorted(self.last_hello)),
            replicas=tuple(_replica_status(replica) for replica in self.replicas),
            dropped_frames=self.dropped_frames + self._strange_messages,
        )

    def metrics(self, now: float) -> m.MetricsSnapshot:
        """Everything that is counted."""
        replicas = tuple(replica.stats.data(replica.index, self.planner.pace(replica)) for replica in self.replicas)
        return m.MetricsSnapshot(self.status(now), dict(self.finished), replicas)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken anywhere."""
        for replica in self.replicas:
            replica.check()
        running = {r.request_id for replica in self.replicas for r in replica.rows.running()}
        waiting = {request.request_id for request in self.queue}
        draining = {r.request_id for r in self.requests.values() if r.state is RequestState.DRAINING}
        loose = {r.request_id for replica in self.replicas for r in replica.loose.values()}
        assert running | waiting | draining == set(self.requests), "a request is lost"
        assert not running & waiting and not (running | waiting) & draining
        assert draining <= loose <= draining | waiting, "a request in flight is forgotten"

    def _log(self, level: int, text: str) -> None:
        self._actions.append(e.Log(level, text))


def _disagreement(step: Step, result: m.ModelRunnerOutput, tokens: I32, vocab_size: int) -> str | None:
    """What of a result contradicts the step it should be of; None: nothing."""
    if result.step != step.step:
        return f"result of step {result.step} instead of {step.step}"
    if result.digest != step.digest:
        return f"step {step.step}: digest {result.digest:#x} instead of {step.digest:#x}"
    if len(tokens) != len(step.rows):
        return f"step {step.step}: {len(tokens)} tokens instead of {len(step.rows)}"
    if len(tokens) and int(tokens.max()) >= vocab_size:
        return f"step {step.step}: token {int(tokens.max())} is outside the vocabulary"
    return None


def _unknown(request_id: str) -> InvalidRequest:
    return InvalidRequest("unknown_request", f"request {request_id!r} is not known", "request_id")


def _replica_status(replica: Replica) -> m.ReplicaStatus:
    pool, stats = replica.manager.pool, replica.stats
    return m.ReplicaStatus(
        replica=replica.index,
        state="ready" if replica.ready else "down",
        epoch=replica.epoch,
        running=replica.rows.num_active,
        free_blocks=pool.num_free if replica.ready else 0,
        total_blocks=pool.num_usable if replica.ready else 0,
        cached_blocks=pool.num_cached,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        steps=stats.steps,
        generated_tokens=stats.generated_tokens,
        preemptions=stats.preemptions,
        recoveries=stats.recoveries,
        fenced_messages=stats.fenced_messages,
    )
