"""The workers that have said hello, and whether what they bring fits what we serve. Pure books."""

from __future__ import annotations

from protocol.config import EngineConfig
from protocol.messages import Hello, WorkerStatus
from protocol.model_config import ModelConfig


class Worker:
    """One incarnation of a worker process. `identity`: its routing id; state: ready, then dead; rest_s: how long it was
    told to wait between steps; items: work done and borrowed, as its last heartbeat told."""

    __slots__ = ("epoch", "hello", "identity", "items", "last_seen", "rest_s", "state")

    def __init__(self, identity: bytes, hello: Hello, epoch: int, now: float):
        self.identity = identity
        self.hello = hello
        self.epoch = epoch
        self.state = "ready"
        self.last_seen = now
        self.rest_s = 0.0
        self.items = (0, 0)

    @property
    def status(self) -> WorkerStatus:
        return describe(self.hello, self.state, self.epoch)


def describe(hello: Hello, state: str, epoch: int) -> WorkerStatus:
    """A worker's line in the status."""
    return WorkerStatus(
        worker_id=hello.worker_id,
        state=state,
        replica=hello.replica,
        epoch=epoch,
        pid=hello.pid,
        device=hello.device,
        dtype=hello.dtype,
        attention_backend=hello.attention_backend,
        backend_reason=hello.backend_reason,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        incarnation=hello.incarnation,
    )


def refusal(hello: Hello, config: EngineConfig, model: ModelConfig, max_model_len: int) -> str | None:
    """Why this worker cannot serve here, naming both values; None when it can."""
    pairs = (
        ("model fingerprint", hello.model_fingerprint, model.fingerprint),
        ("block_size", hello.block_size, config.block_size),
        ("cache groups", hello.groups, model.cache_groups),
        ("max_model_len", hello.max_model_len, max_model_len),
        ("max_num_seqs", hello.max_num_seqs, config.max_num_seqs),
        ("tp_size", hello.tp_size, 1),
        ("rank", hello.rank, 0),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            return f"{name} of {hello.worker_id} is {theirs}, the scheduler has {ours}"
    if not 0 <= hello.replica < config.workers:
        return f"replica of {hello.worker_id} is {hello.replica}, the scheduler has 0 to {config.workers - 1}"
    if hello.num_blocks < 2:
        return f"num_blocks of {hello.worker_id} is {hello.num_blocks}, the scheduler needs at least 2"
    return None
