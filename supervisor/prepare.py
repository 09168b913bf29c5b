"""Before anything is started: the model's folder, and a configuration in which nothing is left open."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

import protocol
from protocol.config import EngineConfig
from protocol.lifeline import SUPERVISOR_ENV
from protocol.model_config import ModelConfig, ModelConfigError

if TYPE_CHECKING:
    from supervisor.stop_signal import StopSignal

DEFAULT_MAX_MODEL_LEN = 8192


class StartFailed(RuntimeError):
    """The deployment cannot be started; the message says which part failed and why."""


class Interrupted(Exception):
    """A stop signal came before there was anything to stop."""


def clear_ready_file(path: Path) -> None:
    """Remove what an earlier deployment left. Raises StartFailed now if none could be written there later."""
    try:
        path.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise StartFailed(f"--ready-file {path} cannot be written: {error.strerror}") from None


def begin_trace(path: str) -> None:
    """Begin the trace file, instead of an old one. Raises StartFailed if it cannot be written."""
    try:
        Path(path).write_bytes(b"[\n")
    except OSError as error:
        raise StartFailed(f"--trace {path} cannot be written: {error.strerror}") from None


def resolve_model(config: EngineConfig, stop: StopSignal) -> Path:
    """The model's folder, fetched or converted first where need be (progress bars on stderr).

    Raises StartFailed when it cannot be had (the cause is on stderr already), Interrupted on a stop signal.
    """
    command = [sys.executable, "-m", "worker.model_store", "--load-format", config.load_format]
    if config.model:
        command += ["--model", config.model]
    environment = {**child_environment(1), SUPERVISOR_ENV: str(os.getpid())}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    poller = zmq.Poller()
    poller.register(stop.fd, zmq.POLLIN)
    poller.register(process.stdout.fileno(), zmq.POLLIN)
    output = b""
    while True:
        ready = dict(poller.poll())
        if stop.fd in ready and stop.take():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Interrupted
        if process.stdout.fileno() in ready:
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                break
            output += piece
    lines = output.decode().split("\n")
    if process.wait() != 0 or not output.strip():
        raise StartFailed(f"the model {config.model or ''} is not available".replace("  ", " "))
    return Path([line for line in lines if line][-1])


def complete(config: EngineConfig, folder: Path) -> EngineConfig:
    """The configuration with model, model_name, max_model_len, threads_per_worker and lend_cores settled. Raises
    StartFailed."""
    try:
        model = ModelConfig.from_folder(folder)
    except ModelConfigError as error:
        raise StartFailed(str(error)) from None
    limit = model.max_position_embeddings
    if config.max_model_len > limit:
        raise StartFailed(f"--max-model-len {config.max_model_len} is more than the model can do ({limit})")
    cores = available_cores()
    threads = config.threads_per_worker or max(1, cores // config.workers)
    return msgspec.structs.replace(
        config,
        model=str(folder),
        model_name=config.model_name or _name(config.model, folder),
        max_model_len=config.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN),
        threads_per_worker=threads,
        lend_cores=config.lend_cores and config.workers > 1 and config.workers * threads <= cores,
    )


def _name(asked: str, folder: Path) -> str:
    """A Hugging Face id as it is; else the folder's name without the hash and version that the cache appends."""
    if asked and not Path(asked).exists():
        return asked
    return re.sub(r"-[0-9a-f]{12}-v\d+$", "", folder.name)


def available_cores() -> int:
    """Cores this process may use: its affinity, or less where a container's quota says so."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def child_environment(threads: int) -> dict[str, str]:
    """Our environment, with the number of compute threads, and our own packages found before any others."""
    root = str(Path(protocol.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait by spinning keep the cores from the other processes
        **os.environ,
        **dict.fromkeys(counts, str(threads)),
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",  # a folder named like one of our packages in the current directory is not ours
        "PYTHONUNBUFFERED": "1",
    }
