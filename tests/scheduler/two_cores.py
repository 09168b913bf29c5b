"""A machine of as many cores as replicas in virtual time: a worker outside a step lends its core to those inside one.

The engine, the plans and the workers' state are real; steps take what a given cost says, divided by the cores that work
at them.
"""

from __future__ import annotations

from collections import defaultdict

from protocol import messages as m
from protocol.arrays import pack, unpack
from scheduler import events as e
from tests.scheduler.deployment import Deployment, hello_of
from tests.sim.worker import SimulatedWorker

STEP_S, ROW_S, CHUNK_S, TOKEN_S = 0.030, 0.001, 0.004, 0.0015


def decode_s(rows: int) -> float:
    """Of a step in which so many rows decode, and nobody lends a core."""
    return STEP_S + ROW_S * rows


class Core:
    """A worker's process: the plans it has, what is left of the step it is in, when that began, how it rests."""

    def __init__(self) -> None:
        self.left_s: float | None = None
        self.work_s = 0.0
        self.began = 0.0
        self.ended = 0.0
        self.rest_s = 0.0
        self.rested_s = 0.0


class Machine(Deployment):
    """`token_at`: for each request the moments of its tokens; `told`: every rest that a worker was told, in seconds."""

    def __init__(self, replicas: int = 2, **settings: object):
        self.cores = [Core() for _ in range(replicas)]
        self.token_at: dict[str, list[float]] = defaultdict(list)
        self.told: list[tuple[int, float]] = []
        defaults = {"num_blocks": 800, "max_num_batched_tokens": 512, "block_size": 16, "max_model_len": 3000}
        super().__init__(replicas=replicas, **{**defaults, **settings})  # type: ignore[arg-type]

    def start(self, replica: int = 0) -> SimulatedWorker:
        """As in Deployment, but its core can be lent."""
        self.incarnations[replica] += 1
        worker = SimulatedWorker(self.scenario, replica, self.incarnations[replica])
        self.workers[replica], self.cores[replica] = worker, Core()
        self.handle(e.FromWorker(worker.identity, hello_of(worker, lends_cores=True)))
        return worker

    def kill(self, replica: int = 0) -> SimulatedWorker:
        self.cores[replica] = Core()
        return super().kill(replica)

    def _to_worker(self, identity: bytes, message: m.SchedulerToWorker) -> None:
        super()._to_worker(identity, message)
        if isinstance(message, m.Rest):
            replica = next(worker.replica for worker in self.workers if worker and worker.identity == identity)
            self.cores[replica].rest_s = message.us / 1e6
            self.told.append((replica, message.us / 1e6))

    def _to_client(self, identity: bytes, message: m.SchedulerToClient) -> None:
        before = {name: len(tokens) for name, tokens in self.tokens.items()}
        super()._to_client(identity, message)
        for name, tokens in self.tokens.items():
            self.token_at[name] += [self.now] * (len(tokens) - before.get(name, 0))

    def advance(self, until: float) -> None:
        """Let the machine run until that moment, or until nothing is left to do."""
        while True:
            self._begin_steps()
            busy = [core for core in self.cores if core.left_s is not None]
            speed = len(self.cores) / len(busy) if busy else 1.0
            moments = [self.now + core.left_s / speed for core in busy if core.left_s is not None]
            moments += [self._may_begin(replica) for replica in range(len(self.cores)) if self._has_plan(replica)]
            moment = min([until, *(each for each in moments if each > self.now - 1e-12)])
            for core in busy:
                assert core.left_s is not None
                core.left_s -= (moment - self.now) * speed
            self.now = moment
            done = [
                replica for replica, core in enumerate(self.cores) if core.left_s is not None and core.left_s < 1e-9
            ]
            for replica in done:
                self._end_step(replica)
            if self.now >= until or not (moments or done):
                return

    def until_first_token(self, name: str, most_s: float = 60.0) -> float:
        """Run until this request has a token; the moment."""
        end = self.now + most_s
        while not self.token_at[name]:
            assert self.now < end, f"{name} has no token after {most_s} s"
            self.advance(self.now + 0.001)
        return self.token_at[name][0]

    def _has_plan(self, replica: int) -> bool:
        worker = self.workers[replica]
        return worker is not None and self.cores[replica].left_s is None and bool(self.plans[worker.identity])

    def _may_begin(self, replica: int) -> float:
        core = self.cores[replica]
        return max(self.now, core.ended + core.rest_s)

    def _begin_steps(self) -> None:
        for replica, core in enumerate(self.cores):
            if not self._has_plan(replica) or self._may_begin(replica) > self.now + 1e-12:
                continue
            plan = self.plans[self.worker(replica).identity][0]
            step = next(step for step in self.engine.replicas[replica].in_flight if step.step == plan.step)
            tokens = int(unpack(plan.prefill_num_tokens).sum())
            seconds = decode_s(step.num_tokens - tokens) + (CHUNK_S + TOKEN_S * tokens if tokens else 0.0)
            core.left_s, core.work_s, core.began, core.rested_s = seconds, seconds, self.now, self.now - core.ended

    def _end_step(self, replica: int) -> None:
        core, worker = self.cores[replica], self.worker(replica)
        core.left_s, core.ended = None, self.now
        self.run_plan(replica)
        result = self.results[worker.identity].pop()
        idle, rested = core.rested_s, min(core.rested_s, core.rest_s)
        micros = [0, 0, self.now - core.began, 0, idle, rested]
        timings = pack([round(1e6 * seconds) for seconds in micros])
        self.results[worker.identity].append(
            m.ModelRunnerOutput(result.epoch, result.step, result.tokens, result.digest, timings)
        )
        self.deliver(worker)
