"""The shared configuration: one frozen struct, from flags and an optional TOML file. Children read it from one file."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Literal

import msgspec


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range; the message names it."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the whole deployment agrees on. Field names are the flags' names."""

    model: str = ""
    """Hugging Face folder (resolved by the supervisor before anyone else reads it)."""
    model_name: str = ""
    workers: int = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "int8"] = "auto"
    """auto: that of `dtype`."""
    block_size: int = 16
    kv_memory: str = "auto"
    """Bytes of KV memory per worker, with an optional unit (512MiB, 2G); auto: from what is free."""
    max_model_len: int = 0
    """0: the model's own, capped at 8192."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_stretch: float = 2.25
    """While rows decode, prompts are cut so that a step takes at most this many times what decoding alone would (more
    where many wait: `scheduler.step_budget`); 0: only max_num_batched_tokens cuts them."""
    enable_prefix_caching: bool = True
    seed: int = 0
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    """int8: matrix products with 8-bit weights and activations, on the CPU."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    transport: Literal["ipc", "tcp"] = "ipc"
    client_port: int = 0
    """TCP port on loopback for clients, with transport tcp; 0: any that is free."""
    pipeline_depth: int = 2
    """Steps in flight per replica."""
    watermark: float = 0.02
    """Share of the pool that admissions leave free."""
    max_waiting: int = 4096
    """Requests queued beyond this are rejected as overloaded."""
    threads_per_worker: int = 0
    """CPU threads of one worker; 0: cores // workers, at least 1."""
    lend_cores: bool = True
    """On the CPU, a worker that computes nothing lends its cores to those that do; and while a long prompt is computed,
    workers that only decode rest between steps, within max_step_stretch, so that it gets theirs. The supervisor
    settles it to False where workers have more threads than the machine cores."""
    enforce_eager: bool = False
    """On a GPU, launch every kernel of every step instead of replaying recorded decode steps (CUDA graphs)."""
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    start_timeout_s: float = 300.0
    trace: str = ""
    """File (absolute path) for a trace of the whole deployment, begun by the supervisor; empty: none is taken."""
    debug_checks: bool = False
    """Prove the scheduler's invariants after every event (slow)."""
    gateway: bool = True
    """Whether the deployment has an HTTP front door."""
    host: str = "127.0.0.1"
    """Address on which it listens."""
    port: int = 8000
    """0: any that is free."""
    api_key: str = ""
    """What HTTP clients must send as `Authorization: Bearer …`; empty: nothing."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients reach a server that listens on loopback without an api_key, beside localhost and addresses
    (a proxy on this machine may pass on the name that it was called by)."""
    max_request_bytes: int = 4 * 1024 * 1024
    """Largest body of an HTTP request."""
    kill_button: bool = True
    """Whether the live page may kill a worker, from the server's own machine."""
    down_timeout_s: float = 60.0
    """How long an HTTP request without a deadline of its own waits while no replica lives."""

    def __post_init__(self) -> None:
        for name, low in (
            ("workers", 1),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("pipeline_depth", 1),
            ("max_waiting", 1),
            ("max_model_len", 0),
            ("threads_per_worker", 0),
            ("client_port", 0),
            ("port", 0),
            ("max_request_bytes", 1),
        ):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token a step"
            )
        if self.max_step_stretch and not 1 < self.max_step_stretch < math.inf:
            raise ConfigError(f"max_step_stretch must be above 1, or 0 for none, got {self.max_step_stretch}")
        for name in ("client_port", "port"):
            if getattr(self, name) > 65535:
                raise ConfigError(f"{name} must be at most 65535, got {getattr(self, name)}")
        if self.client_port and self.transport != "tcp":
            raise ConfigError("client_port needs transport tcp")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}")
        for name in ("heartbeat_interval_s", "heartbeat_timeout_s", "start_timeout_s", "down_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.kv_memory != "auto":
            parse_bytes(self.kv_memory)

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @staticmethod
    def load(path: Path) -> EngineConfig:
        """Read what `save` wrote. Raises ConfigError naming the path."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"configuration {path}: {error}") from None

    @staticmethod
    def from_toml(path: Path, overrides: dict[str, object]) -> EngineConfig:
        """Settings of a TOML file (flat table, field names as keys), then `overrides`. Unknown keys are errors."""
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"configuration {path}: {error}") from None
        return EngineConfig.from_dict({**table, **overrides}, source=str(path))

    @staticmethod
    def from_dict(table: dict[str, object], source: str = "flags") -> EngineConfig:
        """Typed and checked settings. Raises ConfigError naming the source and the key."""
        unknown = sorted(set(table) - set(EngineConfig.__struct_fields__))
        if unknown:
            raise ConfigError(f"{source}: unknown setting {unknown[0]!r}")
        try:
            return msgspec.convert(table, EngineConfig, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source}: {error}") from None


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """ "512MiB", "2G", "1000000" → bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{text!r} is no amount of memory; write for example 512MiB or 2G")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])
